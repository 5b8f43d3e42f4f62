"""Marked blocks in Markdown files, kept up to date from stored records; hand-written text around them is never touched.

<!-- harness:begin ID -->
(whatever stands here is replaced)
<!-- harness:end ID -->
"""

import difflib
import re
from pathlib import Path

from harness.errors import InputError
from harness.files import write_atomic

_MARKER = re.compile(r"^<!-- harness:(begin|end) ([A-Za-z0-9._-]+) -->\s*$")


def replace_block(text: str, block: str, content: str, *, path: str) -> str:
    """A document's text with one block's content replaced.

    Raises:
        InputError: the block is not there, stands twice, or its markers do not pair; names the line.
    """
    begin, end = _find(text, block, path)
    lines = text.splitlines(keepends=True)
    return "".join([*lines[: begin + 1], content.rstrip("\n") + "\n", *lines[end:]])


def check(path: Path, block: str) -> None:
    """Fail early when a block cannot be replaced later: before a long run rather than after it."""
    _find(_read(path), block, str(path))


def publish(path: Path, block: str, content: str) -> bool:
    """Replace a block in a file; returns whether anything changed."""
    text = _read(path)
    changed = replace_block(text, block, content, path=str(path))
    if changed == text:
        return False
    write_atomic(path, changed)
    return True


def stale(path: Path, block: str, content: str) -> str:
    """The difference between a file and what it should say; empty when it is up to date."""
    text = _read(path)
    wanted = replace_block(text, block, content, path=str(path))
    lines = difflib.unified_diff(text.splitlines(), wanted.splitlines(), str(path), "from the stored run", lineterm="")
    return "\n".join(lines)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(
            f"cannot read `{path}`: {error.strerror}", hint="make the document with its two markers first"
        ) from error


def _find(text: str, block: str, path: str) -> tuple[int, int]:
    """Line numbers (from 0) of a block's two markers."""
    found: dict[str, list[int]] = {"begin": [], "end": []}
    others = set()
    for number, line in enumerate(text.splitlines()):
        if match := _MARKER.match(line):
            others.add(match[2])
            if match[2] == block:
                found[match[1]].append(number)
    begins, ends = found["begin"], found["end"]
    if not begins and not ends:
        known = ", ".join(f"`{name}`" for name in sorted(others)) or "none"
        markers = f"`<!-- harness:begin {block} -->` and `<!-- harness:end {block} -->`"
        hint = f"add the two lines {markers}; blocks here: {known}"
        raise InputError(f"`{path}` has no block `{block}`", hint=hint)
    if len(begins) != 1 or len(ends) != 1 or begins[0] > ends[0]:
        first = (begins + ends)[0] + 1
        seen = f"{len(begins)} begin and {len(ends)} end markers"
        hint = "each block has one begin line and, below it, one end line"
        raise InputError(f"`{path}:{first}`: block `{block}` is broken: {seen}", hint=hint)
    return begins[0], ends[0]

"""Marked blocks in Markdown files, kept up to date from stored records; hand-written text around them is never touched.

<!-- harness:begin ID -->
(whatever stands here is replaced)
<!-- harness:end ID -->

A second word says which part of the result a block shows: `<!-- harness:begin ID verdict -->`; without one it is all of
it. Markers stand on lines of their own; those within fenced code are text like any other.
"""

import difflib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from harness.errors import Fault, InputError, Location
from harness.files import escape_control, write_atomic
from harness.strict import suggest

ALL = "all"
PARTS = (ALL, "comparison", "verdict", "levels", "environment", "figure")
Content = Callable[[str], str]
_MARKER = re.compile(r"<!-- harness:(begin|end) ([A-Za-z0-9._-]+)(?: ([a-z]+))? -->\s*")
_LIKE = re.compile(r"\s*<!--\s*harness\s*:")
_FENCE = re.compile(r" {0,3}(```+|~~~+)")


@dataclass(frozen=True, slots=True)
class Block:
    """One block: its name, the part that it shows, the numbers (from 0) of its marker lines, what stands in it."""

    name: str
    part: str
    begin: int
    end: int
    content: str

    def __str__(self) -> str:
        return self.name if self.part == ALL else f"{self.name} {self.part}"


def blocks(text: str, path: str) -> list[Block]:
    """Every block of a document, in its order.

    Raises:
        InputError: every broken marker at once, each with its line.
    """
    faults: list[Fault] = []
    found: list[Block] = []
    opened: tuple[int, re.Match[str]] | None = None
    lines = text.splitlines(keepends=True)
    for number, line, marker in _markers(lines):
        where = Location(path, number + 1, 1)
        if marker is None:
            hint = "`<!-- harness:begin ID -->`, perhaps with a part after the ID, or `<!-- harness:end ID -->`"
            faults.append(Fault(f"`{line.strip()}` is no marker", where, hint))
        elif marker[1] == "begin":
            if opened is not None:
                faults.append(_unclosed(opened, path))
            opened = number, marker
            faults += _unknown_part(marker, where)
        elif opened is None or opened[1][2] != marker[2]:
            faults.append(Fault(f"block `{marker[2]}` ends here and did not begin", where))
        else:
            begin, first = opened
            content = "".join(lines[begin + 1 : number])
            found.append(Block(first[2], first[3] or ALL, begin, number, content))
            opened = None
    if opened is not None:
        faults.append(_unclosed(opened, path))
    faults += _twice(found, path)
    if faults:
        raise InputError.of(faults)
    return found


def inert(text: str) -> str:
    """Somebody's text as one line of Markdown: it begins no entry, comment or block, and steers no terminal."""
    return escape_control(" ".join(text.split())).replace("<!--", "&lt;!--")


def rewrite(text: str, wanted: Callable[[Block], str | None], *, path: str) -> str:
    """A document's text with blocks filled anew; a block of which nothing is wanted (None) stays as it is.

    Raises:
        InputError: a marker is broken.
    """
    lines = text.splitlines(keepends=True)
    for block in reversed(blocks(text, path)):
        if (content := wanted(block)) is not None:
            lines[block.begin + 1 : block.end] = [content.rstrip("\n") + "\n"]
    return "".join(lines)


def check(path: Path, name: str) -> None:
    """Fail early when a block cannot be replaced later: before a long run rather than after it.

    Raises:
        InputError: the document cannot be read, has no such block, or a marker is broken.
    """
    _filled(path, name, lambda _: "")


def publish(path: Path, name: str, content: Content) -> bool:
    """Fill every block of a name in a file, each with its part; returns whether anything changed."""
    text, changed = _filled(path, name, content)
    if changed == text:
        return False
    write_atomic(path, changed)
    return True


def stale(path: Path, name: str, content: Content) -> str:
    """The difference between a file and what its blocks of a name should say; empty when it is up to date."""
    return difference(path, *_filled(path, name, content))


def difference(path: Path, text: str, wanted: str) -> str:
    """A unified diff from what a document says to what the stored run says; empty when they are the same."""
    lines = difflib.unified_diff(text.splitlines(), wanted.splitlines(), str(path), "from the stored run", lineterm="")
    return "\n".join(lines)


def read(path: Path) -> str:
    """A document's text.

    Raises:
        InputError: it cannot be read, or is not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        hint = "make the document with its two markers first"
        raise InputError(f"cannot read `{path}`: {error.strerror}", hint=hint) from error
    except UnicodeDecodeError as error:
        raise InputError(f"`{path}` is not UTF-8 text: {error.reason} at byte {error.start}") from error


def _filled(path: Path, name: str, content: Content) -> tuple[str, str]:
    """A file's text, and the same with the blocks of a name filled."""
    text = read(path)
    known = blocks(text, str(path))
    if not any(block.name == name for block in known):
        names = ", ".join(f"`{other}`" for other in sorted({block.name for block in known})) or "none"
        markers = f"`<!-- harness:begin {name} -->` and `<!-- harness:end {name} -->`"
        hint = f"add the two lines {markers}; blocks here: {names}"
        raise InputError(f"`{path}` has no block `{name}`", hint=hint)
    return text, rewrite(text, lambda block: content(block.part) if block.name == name else None, path=str(path))


def _markers(lines: list[str]) -> Iterator[tuple[int, str, re.Match[str] | None]]:
    """Each marker line with its number, and None for one that only looks like one; fenced code is passed over."""
    fence = ""
    for number, line in enumerate(lines):
        if opening := _FENCE.match(line):
            mark = opening[1]
            if not fence:
                fence = mark
            elif mark[0] == fence[0] and len(mark) >= len(fence):
                fence = ""
        elif not fence and _LIKE.match(line):
            yield number, line, _MARKER.fullmatch(line)


def _unclosed(opened: tuple[int, re.Match[str]], path: str) -> Fault:
    number, marker = opened
    hint = f"end it with `<!-- harness:end {marker[2]} -->` before another block begins"
    return Fault(f"block `{marker[2]}` begins here and does not end", Location(path, number + 1, 1), hint)


def _unknown_part(marker: re.Match[str], where: Location) -> Iterator[Fault]:
    if marker[3] is not None and marker[3] not in PARTS:
        yield Fault(f"block `{marker[2]}` has no part `{marker[3]}`", where, suggest(marker[3], PARTS))


def _twice(found: list[Block], path: str) -> Iterator[Fault]:
    seen: dict[str, Block] = {}
    for block in found:
        if (first := seen.setdefault(str(block), block)) is not block:
            message = f"block `{block}` stands here a second time, the first is in line {first.begin + 1}"
            yield Fault(message, Location(path, block.begin + 1, 1))

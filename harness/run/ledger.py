"""What a run's files were when they were finished: `digests.jsonl`, a line a file, appended as the run goes.

Where several machines write into a run, each has a list of its own, `digests.WRITER.jsonl`: on a network file system
two that append to one file lose lines. The newest line about a file counts; one without a digest says that the file was
taken away. A log may grow after its line was written (of a launch tried again, a run gone on with), so a line holds the
size too: a log's digest is of so many first bytes.
"""

import hashlib
import json
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from harness.files import append_line, read_numbered_json_lines, sha256_file

NAME = "digests.jsonl"
_BLOCK = 1 << 20


@dataclass(frozen=True, slots=True)
class Noted:
    """One file as it was: its path within the run, its size in bytes, its sha256."""

    path: str
    size: int
    sha256: str


def note(run: Path, files: Iterable[Path], writer: str = "") -> None:
    """Append what some files of a run are now, in the writer's list; those that are not there are left out."""
    ledger = run / (f"digests.{writer}.jsonl" if writer else NAME)
    for path in files:
        if path.is_file():
            size = path.stat().st_size
            line = {"path": path.relative_to(run).as_posix(), "size": size, "sha256": _head_sha256(path, size)}
            append_line(ledger, json.dumps({**line, "at": time.time()}, ensure_ascii=False))


def forget(run: Path, files: Iterable[Path], writer: str = "") -> None:
    """Append that some noted files were taken away, because what they hold is made anew."""
    ledger = run / (f"digests.{writer}.jsonl" if writer else NAME)
    known = noted(run)
    for path in (one.relative_to(run).as_posix() for one in files):
        if path in known:
            append_line(ledger, json.dumps({"path": path, "size": 0, "sha256": None, "at": time.time()}))


def kept(run: Path) -> bool:
    """Whether a run has any list of digests."""
    return any(run.glob("digests*.jsonl"))


def noted(run: Path) -> dict[str, Noted]:
    """The newest line about each file, by path; empty for a run that kept none. Lines that do not read are left out."""
    lines = [line for _, line in _lines(run) if _fault(line) is None]
    lines.sort(key=lambda line: line.get("at") or 0)
    newest = {str(line["path"]): line for line in lines}
    return {path: Noted(path, line["size"], line["sha256"]) for path, line in newest.items() if line["sha256"]}


def faults(run: Path) -> list[tuple[str, str]]:
    """Lines that no harness wrote: where they stand (`digests.jsonl:3`), and what is wrong with them."""
    return [(where, fault) for where, line in _lines(run) if (fault := _fault(line)) is not None]


def changed(run: Path, folder: Path, known: Mapping[str, Noted]) -> list[str]:
    """The files of a folder that are not, by name, what was noted of them: other bytes, gone, or never noted."""
    within = folder.relative_to(run).as_posix() + "/"
    there = {path.relative_to(run).as_posix() for path in folder.iterdir() if is_current(path)}
    wanted = {path for path in known if path.startswith(within)}
    return [
        path.removeprefix(within)
        for path in sorted(there | wanted)
        if path not in known or sha256_now(run, known[path]) != known[path].sha256
    ]


def is_current(path: Path) -> bool:
    """Whether a file of a level belongs to its present measurement, and not to an attempt that was set aside."""
    return path.is_file() and ".attempt-" not in path.name and not path.name.startswith(".")


def _lines(run: Path) -> Iterator[tuple[str, Any]]:
    for path in sorted(run.glob("digests*.jsonl")):
        for number, line in read_numbered_json_lines(path):
            yield f"{path.name}:{number}", line


def _fault(line: Any) -> str | None:
    """What is wrong with a line, None where nothing is."""
    match line:
        case {"path": str() as path, "size": int() as size, "sha256": str() | None} if size >= 0:
            if not isinstance(line.get("at"), int | float | None):
                return f"`at` is no time: {line['at']!r}"
            # Nothing outside the run is read, whatever somebody wrote here.
            outside = path.startswith("/") or ".." in PurePosixPath(path).parts or "\0" in path
            return f"a path that leaves the run: `{path}`" if outside else None
    return "no object of `path`, `size` and `sha256`"


def sha256_now(run: Path, one: Noted) -> str | None:
    """What a noted file's digest is by now, of a log over so much as had been written; None where it is gone."""
    path = run / one.path
    if not path.is_file():
        return None
    grows = path.suffix == ".log" or path.name.startswith("events.")
    return _head_sha256(path, one.size) if grows else sha256_file(path)


def _head_sha256(path: Path, size: int) -> str:
    """Hex sha256 of a file's first `size` bytes."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while size > 0 and (block := stream.read(min(size, _BLOCK))):
            digest.update(block)
            size -= len(block)
    return digest.hexdigest()

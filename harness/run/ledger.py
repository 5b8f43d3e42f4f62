"""What a run's files were when they were finished: `digests.jsonl`, a line a file, appended as the run goes.

Where several machines write into a run, each has a list of its own, `digests.WRITER.jsonl`: on a network file system
two that append to one file lose lines. The newest line about a file counts. A log may grow after its line was written
(a launch that is tried again appends to it), so a line holds the size too: a log's digest is of so many first bytes.
"""

import hashlib
import json
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from harness.files import append_line, read_json_lines, sha256_file

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


def noted(run: Path) -> dict[str, Noted]:
    """The newest line about each file, by path; empty for a run that kept none."""
    lines = [line for path in run.glob("digests*.jsonl") for line in read_json_lines(path) if isinstance(line, dict)]
    lines.sort(key=lambda line: float(line.get("at") or 0))
    found = (Noted(str(line.get("path")), int(line.get("size") or 0), str(line.get("sha256"))) for line in lines)
    return {one.path: one for one in found}


def sha256_now(run: Path, one: Noted) -> str | None:
    """What a noted file's digest is by now, of a log over so much as had been written; None where it is gone."""
    path = run / one.path
    if not path.is_file():
        return None
    return _head_sha256(path, one.size) if path.suffix == ".log" else sha256_file(path)


def _head_sha256(path: Path, size: int) -> str:
    """Hex sha256 of a file's first `size` bytes."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while size > 0 and (block := stream.read(min(size, _BLOCK))):
            digest.update(block)
            size -= len(block)
    return digest.hexdigest()

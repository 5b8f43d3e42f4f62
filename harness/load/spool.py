"""What a level has read so far, as files: written by the readers while the clock runs, read by whoever comes after.

A folder holds, for one level: `frame` (its prompts), `zero` (when its clock started) and `spool0`, `spool1` ... with
what each reader process kept. The readers hand each finished request on in an idle moment, and the file is brought up
to date twice a second, so that it can be read while it grows. When the parent is killed they notice, write the rest and
end: what had arrived is on disk, and nobody had to understand or store it while the clock ran.
"""

import contextlib
import json
import marshal
import shutil
import struct
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from harness.load import transcript
from harness.load.records import RequestRecord
from harness.load.transcript import Frame, Prepared, Raw

_FRAME, _ZERO = "frame", "zero"


def write_frame(folder: Path, requests: Sequence[Prepared], warmups: int, *, keep_text: bool) -> None:
    """Note what it takes to understand the spools later: the prompts' names, but nothing that went to the server."""
    frame = {
        "warmups": warmups,
        "keep_text": keep_text,
        "requests": [[prepared.prompt_id, prepared.requested_tokens] for prepared in requests],
    }
    (folder / _FRAME).write_text(json.dumps(frame))


def write_zero(folder: Path, started_ns: int) -> None:
    """Note when the level's clock started: wall-clock nanoseconds."""
    (folder / _ZERO).write_text(str(started_ns))


def raws(folder: Path) -> Iterator[Raw]:
    """Every finished request of a level's spools; a spool that is torn or still growing is read as far as it goes."""
    for path in sorted(folder.glob("spool*")):
        with contextlib.suppress(FileNotFoundError), path.open("rb") as stream:  # dropped just now: it is in records
            yield from _whole(_entries(stream))


class Tail:
    """The requests of a level's spools that ended since one last looked, each read once; for a look while it runs."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._offsets: dict[Path, int] = {}
        self._pieces: dict[Path, dict[tuple[int, int], list[Any]]] = {}

    def fresh(self) -> list[Raw]:
        """Those that ended since the last call."""
        found: list[Raw] = []
        for path in sorted(self._folder.glob("spool*")):
            with contextlib.suppress(FileNotFoundError), path.open("rb") as stream:
                stream.seek(self._offsets.get(path, 0))
                found += _joined(self._told(path, stream), self._pieces.setdefault(path, {}))
        return found

    def understood(self, raws: Sequence[Raw]) -> list[RequestRecord]:
        """Their records; none before the level's clock has started."""
        return _understood(self._folder, raws)

    def _told(self, path: Path, stream: IO[bytes]) -> Iterator[tuple[Any, ...]]:
        """Whole entries, noting how far they go."""
        for entry in _entries(stream):
            self._offsets[path] = stream.tell()
            yield entry


def recover(folder: Path) -> list[RequestRecord]:
    """The records of a level whose parent is gone or still busy, by time; empty where nothing was sent.

    What the readers gave up because they lost their parent is `stopped`, as after any other stop.
    """
    return sorted(_understood(folder, raws(folder)), key=lambda record: (record.sent_s, record.index))


def _understood(folder: Path, found: Iterable[Raw]) -> list[RequestRecord]:
    try:
        frame, zero = json.loads((folder / _FRAME).read_text()), int((folder / _ZERO).read_text())
    except (OSError, ValueError):  # it had not begun, or has been understood meanwhile
        return []
    prompts = [Prepared(prompt_id, "", b"", requested_tokens=tokens) for prompt_id, tokens in frame["requests"]]
    records = []
    for raw in found:
        phase = "warmup" if raw.index < frame["warmups"] else "measure"
        seen = Frame(zero, phase, frame["keep_text"])
        records.append(transcript.understand(raw, prompts[raw.index % len(prompts)], seen))
    return records


def remove(folder: Path) -> None:
    """Drop the files of a level that has been understood."""
    shutil.rmtree(folder, ignore_errors=True)


def _entries(stream: IO[bytes]) -> Iterator[tuple[Any, ...]]:
    """Entries as the readers keep them, each after its length in eight bytes; the last may be torn."""
    while len(length := stream.read(8)) == 8:
        (size,) = struct.unpack("<Q", length)
        data = stream.read(size)
        if len(data) < size:
            return
        try:
            yield marshal.loads(data)
        except (EOFError, ValueError, TypeError):  # the disk was full in the middle of it
            return


def _whole(entries: Iterator[tuple[Any, ...]]) -> Iterator[Raw]:
    """Requests put together from their pieces."""
    return _joined(entries, {})


def _joined(entries: Iterator[tuple[Any, ...]], pieces: dict[tuple[int, int], list[Any]]) -> Iterator[Raw]:
    """Requests put together from their pieces; `pieces` holds those of requests that go on."""
    for index, serial, slot, facts, log in entries:
        earlier = pieces.pop((slot, serial), [])
        if facts is None:
            pieces[slot, serial] = earlier + log
        else:
            yield Raw(index, slot, facts, earlier + log)

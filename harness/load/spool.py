"""What a level has read so far, as files: written by the readers while the clock runs, read by whoever comes after.

A folder holds, for one level: `frame` (what the parent knew when it set the clock) and `spool0`, `spool1` ... with
what each reader process kept. The readers hand on each finished request in the first idle moment, and what they hold
back at most twice a second, so a spool may be read while it grows; when the parent is killed they notice, write the rest
and end. So what had arrived survives a harness that was killed, without one instruction on the timing path.
"""

import json
import marshal
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from harness.load import transcript
from harness.load.records import RequestRecord
from harness.load.transcript import Frame, Prepared, Raw

_FRAME = "frame"


def write_frame(folder: Path, requests: Sequence[Prepared], started_ns: int, warmups: int, *, keep_text: bool) -> None:
    """Note what it takes to understand the spools later: prompts without their bodies, and the zero of the clock."""
    frame = {
        "started_ns": started_ns,
        "warmups": warmups,
        "keep_text": keep_text,
        "requests": [[prepared.prompt_id, prepared.requested_tokens] for prepared in requests],
    }
    (folder / _FRAME).write_text(json.dumps(frame))


def raws(folder: Path) -> Iterator[Raw]:
    """Every finished request of a level's spools; a spool that is torn or still growing is read as far as it goes."""
    for path in sorted(folder.glob("spool*")):
        with path.open("rb") as stream:
            yield from _whole(_entries(stream))


def recover(folder: Path) -> list[RequestRecord]:
    """The records of a level whose parent is gone or still busy, by time; empty where nothing was sent.

    What the readers gave up because they lost their parent is `stopped`, as after any other stop.
    """
    path = folder / _FRAME
    if not path.is_file():
        return []
    frame = json.loads(path.read_text())
    prompts = [Prepared(prompt_id, "", b"", requested_tokens=tokens) for prompt_id, tokens in frame["requests"]]
    records = []
    for raw in raws(folder):
        phase = "warmup" if raw.index < frame["warmups"] else "measure"
        seen = Frame(frame["started_ns"], phase, frame["keep_text"])
        records.append(transcript.understand(raw, prompts[raw.index % len(prompts)], seen))
    return sorted(records, key=lambda record: (record.sent_s, record.index))


def remove(folder: Path) -> None:
    """Drop the files of a level that has been understood."""
    shutil.rmtree(folder, ignore_errors=True)


def _entries(stream: IO[bytes]) -> Iterator[tuple[Any, ...]]:
    while True:
        try:
            yield marshal.load(stream)
        except (EOFError, ValueError, TypeError):  # the end, or an entry that is not whole
            return


def _whole(entries: Iterator[tuple[Any, ...]]) -> Iterator[Raw]:
    """Requests put together from their pieces."""
    pieces: dict[tuple[int, int], list[Any]] = {}
    for index, serial, slot, facts, log in entries:
        earlier = pieces.pop((slot, serial), [])
        if facts is None:
            pieces[slot, serial] = earlier + log
        else:
            yield Raw(index, slot, facts, earlier + log)

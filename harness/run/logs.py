"""Server logs as the reaper keeps them: `2026-01-31T12:00:00.000000Z [PID] text`, read while they grow."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_LINE = re.compile(r"(?P<at>\S+Z) \[(?P<writer>\w+)\] (?P<text>.*)", re.DOTALL)
REAPER = "reaper"


@dataclass(frozen=True, slots=True)
class LogLine:
    """One line: when (UTC, ISO 8601), which process (a pid, or `reaper` for what the reaper notes), what."""

    at: str
    writer: str
    text: str

    @property
    def clock(self) -> str:
        """The time of day, to the millisecond."""
        return self.at[11:23]

    def __str__(self) -> str:
        return f"{self.clock} [{self.writer}] {self.text}"


class LogTail:
    """Reads the whole lines that were added since it last looked; starts at `offset` bytes."""

    def __init__(self, path: Path, offset: int = 0) -> None:
        self._path = path
        self._offset = offset
        self._rest = b""

    def fresh(self) -> list[LogLine]:
        """The lines added since the last call."""
        try:
            with self._path.open("rb") as stream:
                stream.seek(self._offset)
                data = stream.read()
        except FileNotFoundError:
            return []
        self._offset += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [parsed for line in lines if (parsed := parse(line))]


def parse(line: bytes) -> LogLine | None:
    """One stored line, None when it is not of our form (torn by a full disk)."""
    match = _LINE.fullmatch(line.decode(errors="backslashreplace"))
    return LogLine(match["at"], match["writer"], match["text"]) if match else None


def read(path: Path, offset: int = 0) -> Iterator[LogLine]:
    """Every whole line of a log, from a byte offset on."""
    yield from LogTail(path, offset).fresh()


def plain(path: Path, offset: int = 0) -> str:
    """The text the server wrote, as an engine looks for evidence in it: no stamps, no notes of the reaper."""
    return "".join(f"{line.text}\n" for line in read(path, offset) if line.writer != REAPER)

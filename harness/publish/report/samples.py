"""The parts of a report that come from raw requests and logs, bounded so that a page stays small however much there is.

What is left out is always a known share by a stated rule: order statistics at even distances, whole slots at even
distances, log lines with warnings and errors first.
"""

import datetime
import heapq
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from harness.load.records import RequestRecord
from harness.publish.report.shown import Level
from harness.run import logs
from harness.run.logs import LogLine
from harness.run.store import Run
from harness.stats import metrics

Values = NDArray[np.float64]
_DOTS = 60_000  # of all distributions of a page
_BARS = 24_000  # requests in all timelines of a page
_LINES = 4_000  # log lines in all timelines of a page
_LONGEST = 240  # characters of a log line
_ERROR = re.compile(r"\b(error|exception|traceback|fatal|critical|killed|out of memory)\b| E ", re.IGNORECASE)
_WARNING = re.compile(r"\bwarn(ing)?\b| W ", re.IGNORECASE)
DISTRIBUTIONS = {
    "ttft_s": "time to first token (ms)",
    "tpot_s": "time per output token (ms)",
    "chunk_gap_s": "time between chunks (ms)",
}


@dataclass(frozen=True, slots=True)
class Budget:
    """How much of one level is shown: points a distribution, requests a timeline, log lines a timeline."""

    dots: int
    bars: int
    lines: int

    @classmethod
    def of(cls, levels: int) -> "Budget":
        """Each level's share of what a page holds."""
        levels = max(1, levels)
        return cls(
            dots=min(60, max(9, _DOTS // (len(DISTRIBUTIONS) * levels))),
            bars=min(600, max(8, _BARS // levels)),
            lines=min(60, max(2, _LINES // levels)),
        )


class Bar(NamedTuple):
    """One request: lane, seconds from the level's start, and whether it was `ok`, `warm-up` or `failed`."""

    lane: int
    sent_s: float
    first_s: float | None
    end_s: float
    state: str
    tokens: int | None
    note: str


class Line(NamedTuple):
    """Something that was written while a level ran: seconds from its start, kind, text."""

    at_s: float
    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class Timeline:
    """One level as it went; `lanes` and `written` are how many there were, of which `bars` and `lines` show a part."""

    bars: tuple[Bar, ...]
    lines: tuple[Line, ...]
    requests: int
    lanes: int
    written: int
    window: tuple[float, float] | None


@dataclass(frozen=True, slots=True)
class Sample:
    """One level's raw data: the values of each distribution in seconds, how many of them may be drawn, its timeline."""

    level: Level
    values: Mapping[str, Values]
    dots: int
    timeline: Timeline


def take(run: Run, level: Level, budget: Budget) -> Sample:
    """Read one level's requests and its part of the logs.

    Raises:
        InputError: the requests are damaged.
    """
    records = list(run.requests(level.launch, str(level.cell.level["name"])))
    return Sample(level, _values(records), budget.dots, _timeline(run, level, records, budget))


def spread(values: Sequence[float] | Values, most: int) -> list[float]:
    """At most `most` order statistics at even distances in rank, smallest and largest included."""
    ordered = np.sort(np.asarray(values, dtype=float))
    if len(ordered) > most:
        ordered = ordered[np.linspace(0, len(ordered) - 1, most).round().astype(int)]
    return [float(value) for value in ordered]


def _values(records: Sequence[RequestRecord]) -> dict[str, Values]:
    good = [record for record in records if record.ok and record.phase == "measure"]
    return {
        "ttft_s": np.array([value for record in good if (value := metrics.ttft(record)) is not None]),
        "tpot_s": np.array([value for record in good if (value := metrics.tpot(record)) is not None]),
        "chunk_gap_s": np.array([gap for record in good for gap in metrics.chunk_gaps(record)]),
    }


def _timeline(run: Run, level: Level, records: Sequence[RequestRecord], budget: Budget) -> Timeline:
    lanes = lanes_of(records, level)
    kept = _even(sorted(set(lanes)), max(1, budget.bars * len(set(lanes)) // max(1, len(records))))
    bars = [_bar(record, lane) for record, lane in zip(records, lanes, strict=True) if lane in kept][: budget.bars]
    last = max((record.end_s for record in records), default=0.0)
    lines = _lines(run, level, last)
    window = level.result.window if level.result else None
    steady = (window.start_s, window.end_s) if window else (None, None)
    return Timeline(
        bars=tuple(bars),
        lines=_foremost(lines, budget.lines),
        requests=len(records),
        lanes=len(set(lanes)),
        written=len(lines),
        window=None if steady[0] is None or steady[1] is None else (steady[0], steady[1]),
    )


def _bar(record: RequestRecord, lane: int) -> Bar:
    state = "failed" if not record.ok else "warm-up" if record.phase == "warmup" else "ok"
    first = record.chunks[0].at_s if record.chunks else None
    note = "" if record.ok else f"{record.reason or 'failed'}: {record.detail or ''}"[:_LONGEST].rstrip(": ")
    return Bar(lane, record.sent_s, first, record.end_s, state, record.output_tokens, note)


def lanes_of(records: Sequence[RequestRecord], level: Level) -> list[int]:
    """A row for each request: its slot in a closed loop; in an open one the first row that is free when it is sent."""
    if level.cell.level.get("mode") != "open":
        return [record.slot for record in records]
    free: list[int] = []
    busy: list[tuple[float, int]] = []
    lanes = [0] * len(records)
    for place in sorted(range(len(records)), key=lambda place: records[place].sent_s):
        record = records[place]
        while busy and busy[0][0] <= record.sent_s:
            heapq.heappush(free, heapq.heappop(busy)[1])
        lanes[place] = heapq.heappop(free) if free else len(busy)
        heapq.heappush(busy, (record.end_s, lanes[place]))
    return lanes


def _even(lanes: Sequence[int], most: int) -> set[int]:
    """Some of the lanes, at even distances."""
    if len(lanes) <= most:
        return set(lanes)
    return {lanes[round(place * (len(lanes) - 1) / max(1, most - 1))] for place in range(most)}


def _lines(run: Run, level: Level, last_s: float) -> list[Line]:
    """What server and harness wrote between a level's start and the end of its last request."""
    if level.result is None:
        return []
    began = _instant(level.result.started_at) or 0.0
    found = [
        Line(at - began, "harness" if line.writer == logs.REAPER else _kind(line.text), line.text)
        for line in _log(run.launch_folder(level.launch) / "server.log")
        if (at := _instant(line.at)) is not None
    ]
    found += [
        Line(at - began, "harness", f"{event.get('kind')} {event.get('message', '')}".strip())
        for event in run.events()
        if (at := _instant(str(event["at"]))) is not None
    ]
    inside = (line for line in found if 0 <= line.at_s <= last_s)
    return sorted(line._replace(text=line.text[:_LONGEST]) for line in inside)


def _log(path: Path) -> tuple[LogLine, ...]:
    return _log_of(path, path.stat().st_size) if path.is_file() else ()


@lru_cache(maxsize=1)
def _log_of(path: Path, size: int) -> tuple[LogLine, ...]:
    """A launch's log, once for all its levels; `size` is how long it was."""
    return tuple(logs.read(path))


def _kind(text: str) -> str:
    return "error" if _ERROR.search(text) else "warning" if _WARNING.search(text) else "server"


def _foremost(lines: Sequence[Line], most: int) -> tuple[Line, ...]:
    """The lines that are shown: errors, warnings and the harness's own first, then the others at even distances."""
    if len(lines) <= most:
        return tuple(lines)
    loud = [line for line in lines if line.kind != "server"][:most]
    quiet = [line for line in lines if line.kind == "server"]
    places = _even(range(len(quiet)), most - len(loud)) if len(loud) < most else set()
    return tuple(sorted([*loud, *(quiet[place] for place in sorted(places))]))


def _instant(text: str) -> float | None:
    """Seconds since 1970 of an ISO 8601 time; one without a zone is UTC. None for what is no time: a damaged line."""
    try:
        at = datetime.datetime.fromisoformat(text)
    except ValueError:
        return None
    return (at if at.tzinfo else at.replace(tzinfo=datetime.UTC)).timestamp()

"""A look at the level that is being measured: what its files say so far, cheaply enough to be asked once a second.

Nothing here is a measurement: rates are those of the last seconds, times those of the requests that ended last.
"""

import json
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.engines import get as engine_of
from harness.engines.engine import Counters
from harness.errors import InputError
from harness.load.spool import Tail
from harness.run.store import Run
from harness.stats import metrics

_LATEST = 8  # requests that a typical time is taken of
_UNDERSTOOD = 4  # of those that ended since the last look: to understand one takes a millisecond
_SPAN = 5  # readings of the server, one a second, that a rate is taken over
_TAIL = 1 << 15  # bytes at the end of a file in which its last lines are looked for


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU by its last reading: watts, MHz of its processors, bytes in use."""

    index: int
    power_w: float | None
    sm_mhz: int | None
    memory_used: int | None


@dataclass(frozen=True, slots=True)
class Seen:
    """What is known of a level by now; None where nothing says it (yet). Times in seconds."""

    tok_s: float | None = None
    ttft_s: float | None = None
    acceptance_length: float | None = None
    lag_s: float | None = None
    gpus: tuple[Gpu, ...] = ()


class Glance:
    """Looks at one level; each look reads only what is new."""

    def __init__(self, run: Run, launch: str, level: str) -> None:
        self._folder = run.level_folder(launch, level)
        self._tail = Tail(run.client_folder(launch, level))
        self._counters = _counters(run, launch)
        self._ttfts: deque[float] = deque(maxlen=_LATEST)
        self._lags: deque[float] = deque(maxlen=_LATEST)

    def look(self) -> Seen:
        """What is known by now."""
        for record in self._tail.understood(self._tail.fresh()[-_UNDERSTOOD:]):
            if record.ok and (ttft := metrics.ttft(record)) is not None:
                self._ttfts.append(ttft)
                self._lags.append(max(chunk.read_s - chunk.at_s for chunk in record.chunks))
        readings = _last_lines(self._folder / "server_metrics.jsonl", _SPAN + 1)
        first, last = (readings[0], readings[-1]) if len(readings) > 1 else ({}, {})
        seconds = last.get("at", 0.0) - first.get("at", 0.0)
        tokens, drafts, accepted = (
            _grown(first, last, name)
            for name in (self._counters.generated_tokens, self._counters.drafts, self._counters.accepted_tokens)
        )
        return Seen(
            tok_s=tokens / seconds if tokens is not None and seconds > 0 else None,
            ttft_s=statistics.median(self._ttfts) if self._ttfts else None,
            acceptance_length=(accepted + drafts) / drafts if drafts and accepted is not None else None,
            lag_s=max(self._lags) if self._lags else None,
            gpus=tuple(_gpus(_last_lines(self._folder / "gpu.jsonl", 16))),
        )


def _counters(run: Run, launch: str) -> Counters:
    """The names under which the server of a launch counts."""
    try:
        return engine_of(str(run.launch(launch).get("engine"))).counters
    except InputError:
        return Counters()


def _grown(first: Mapping[str, float], last: Mapping[str, float], name: str | None) -> float | None:
    if name is None or name not in first or name not in last:
        return None
    return max(0.0, last[name] - first[name])


def _gpus(readings: list[dict[str, Any]]) -> list[Gpu]:
    """The last reading of each GPU."""
    latest = {int(one["gpu"]): one for one in readings if "gpu" in one}
    return [
        Gpu(index, one.get("power_w"), one.get("sm_mhz"), one.get("memory_used"))
        for index, one in sorted(latest.items())
    ]


def _last_lines(path: Path, count: int) -> list[dict[str, Any]]:
    """The last whole JSON lines of a growing file."""
    try:
        with path.open("rb") as stream:
            stream.seek(0, 2)
            stream.seek(max(0, stream.tell() - _TAIL))
            lines = stream.read().split(b"\n")[:-1]
    except OSError:
        return []
    found = []
    for line in lines[-count:]:
        try:
            found.append(json.loads(line))
        except ValueError:  # the first of the tail may begin in its middle
            continue
    return [one for one in found if isinstance(one, dict)]

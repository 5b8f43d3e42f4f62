"""What an observer left behind for one level, read back: the same answers from the files as it gave at the time."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness.files import read_json_lines
from harness.load.observe import clock_events, named

_GAUGES = ("running", "waiting")  # of our names; every other one counts
_COUNTING = ("_total", "_sum", "_count")  # how counters, sums and counts of histograms end


@dataclasses.dataclass(frozen=True, slots=True)
class Readings:
    """The lines of `server_metrics.jsonl` and `gpu.jsonl`; `counters` is the engine's list of its own names."""

    server: tuple[Mapping[str, float], ...]
    gpu: tuple[Mapping[str, Any], ...]
    counters: Any

    @classmethod
    def of(cls, folder: Path, counters: Any) -> "Readings":
        """Those of a level's folder; empty where there was nothing to observe."""
        return cls(_lines(folder / "server_metrics.jsonl"), _lines(folder / "gpu.jsonl"), counters)

    def deltas(self) -> dict[str, float]:
        """How far each counter went from the first reading to the last, by the server's own names."""
        if len(self.server) < 2:
            return {}
        first, last = self.server[0], self.server[-1]
        return {name: value - first.get(name, 0.0) for name, value in last.items() if self._counts(name)}

    def named(self) -> dict[str, float]:
        """As `Observer.named`."""
        gauges = {name for reading in self.server for name in reading if not self._counts(name)}
        peaks = {name: max(reading[name] for reading in self.server if name in reading) for name in gauges}
        return named(dataclasses.asdict(self.counters), self.deltas(), peaks)

    def restarted(self) -> bool:
        """Whether a counter went backwards."""
        return any(delta < 0 for delta in self.deltas().values())

    def throttles(self) -> list[int]:
        """Masks of clock event reasons that were seen, each once, idleness left out."""
        return clock_events(self.gpu)

    def _counts(self, name: str) -> bool:
        """Whether a name counts up: the lines do not say, so by the engine's list, else by how such names end."""
        ours = {theirs: ours for ours, theirs in dataclasses.asdict(self.counters).items() if theirs}
        return ours[name] not in _GAUGES if name in ours else name.endswith(_COUNTING)


def _lines(path: Path) -> tuple[Any, ...]:
    return tuple(read_json_lines(path)) if path.is_file() else ()

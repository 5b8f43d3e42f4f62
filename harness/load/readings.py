"""What an observer left behind for one level, read back: the same answers from the files as it gave at the time."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness.errors import InputError
from harness.files import read_numbered_json_lines
from harness.load.observe import clock_events, named

# How counters, sums and counts of histograms end. The lines do not say which is which; every counter of the engines
# that we read ends so, and SGLang's `num_retracted_reqs`, which sounds like one, is a gauge.
_COUNTING = ("_total", "_sum", "_count")


@dataclasses.dataclass(frozen=True, slots=True)
class Readings:
    """The lines of `server_metrics.jsonl` and `gpu.jsonl`; `counters` is the engine's list of its own names."""

    server: tuple[Mapping[str, float], ...]
    gpu: tuple[Mapping[str, Any], ...]
    counters: Any

    @classmethod
    def of(cls, folder: Path, counters: Any) -> "Readings":
        """Those of a level's folder; empty where there was nothing to observe.

        Raises:
            InputError: a line is none that an observer wrote; says which.
        """
        server = _lines(folder / "server_metrics.jsonl")
        for number, line in server:
            if odd := [name for name, value in line.items() if type(value) not in {int, float}]:
                raise InputError(f"`{folder / 'server_metrics.jsonl'}:{number}`: `{odd[0]}` is no number")
        gpu = _lines(folder / "gpu.jsonl")
        return cls(tuple(line for _, line in server), tuple(line for _, line in gpu), counters)

    def deltas(self) -> dict[str, float]:
        """How far each counter went from the first reading to the last, by the server's own names."""
        if len(self.server) < 2:
            return {}
        first, last = self.server[0], self.server[-1]
        return {name: value - first.get(name, 0.0) for name, value in last.items() if name.endswith(_COUNTING)}

    def named(self) -> dict[str, float]:
        """As `Observer.named`."""
        gauges = {name for reading in self.server for name in reading if not name.endswith(_COUNTING)}
        peaks = {name: max(reading[name] for reading in self.server if name in reading) for name in gauges}
        return named(dataclasses.asdict(self.counters), self.deltas(), peaks)

    def restarted(self) -> bool:
        """Whether a counter went backwards."""
        return any(delta < 0 for delta in self.deltas().values())

    def throttles(self) -> list[int]:
        """Masks of clock event reasons that were seen, each once, idleness left out."""
        return clock_events(self.gpu)


def _lines(path: Path) -> list[tuple[int, dict[str, Any]]]:
    """Objects with the numbers of their lines."""
    found = list(read_numbered_json_lines(path)) if path.is_file() else []
    for number, line in found:
        if not isinstance(line, dict):
            raise InputError(f"`{path}:{number}` is no reading: {line!r}")
    return found

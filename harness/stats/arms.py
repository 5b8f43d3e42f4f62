"""What a comparison is made of: an arm is a sequence of server launches, a launch a sequence of measured cells.

These are values only. Measured levels and published tables become the same `Cell`, so that there is one comparison.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from harness.load.records import RequestRecord
from harness.stats.level import LevelResult, Summary

PRIMARY = "output_tok_s"
HIGHER_IS_BETTER = {
    PRIMARY: True,
    "output_tok_s_whole": True,
    "per_request_tok_s": True,
    "tpot_s": False,
    "ttft_s": False,
    "e2e_s": False,
}
_SUMMARIES = ("tpot_s", "ttft_s", "e2e_s")


@dataclass(frozen=True, slots=True)
class Cell:
    """One level of one launch, reduced to what is compared.

    Attributes:
        key: the level's name, equal where levels are the same (`c4`, `serial`, `r2.5`, `saturation`).
        level: as planned, `{"mode": "closed", "concurrency": 4, ...}`.
        values: one number a metric: throughputs in tok/s, latencies in seconds (median over requests, or mean of few).
        state: the level's verdict.
        reasons: why it is not valid.
        requests: how many requests it took.
        slices: output tok/s in equal slices of the steady window, for the spread within the launch.
    """

    key: str
    level: Mapping[str, Any]
    values: Mapping[str, float]
    state: str = "valid"
    reasons: tuple[str, ...] = ()
    requests: int | None = None
    slices: tuple[float, ...] = ()

    @property
    def concurrency(self) -> int | None:
        """The level's concurrency, where it has one; a serial run has 1."""
        value = self.level.get("concurrency")
        return 1 if self.level.get("mode") == "serial" else value if isinstance(value, int) else None

    @property
    def usable(self) -> bool:
        """Whether its numbers may be compared."""
        return self.state in {"valid", "suspect"}


@dataclass(frozen=True, slots=True)
class Launch:
    """One server launch of one arm: the unit of replication.

    Attributes:
        launch: its id.
        block: launches of different arms with the same block ran next to each other and are compared as a pair.
        cells: its levels.
        effective: the configuration the server said it ran with, flattened.
        facts: flattened facts that must not differ between arms (env_id, driver, clocks, topology ...).
        results: the levels as stored, where they were measured here.
        records: requests by level key, where they are at hand.
    """

    launch: str
    block: int
    cells: tuple[Cell, ...]
    effective: Mapping[str, Any] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    results: Mapping[str, LevelResult] = field(default_factory=dict)
    records: Mapping[str, Sequence[RequestRecord]] = field(default_factory=dict)

    def cell(self, key: str) -> Cell | None:
        """Its cell of that name."""
        return next((cell for cell in self.cells if cell.key == key), None)


@dataclass(frozen=True, slots=True)
class Arm:
    """One arm of an experiment.

    Attributes:
        name: as in the recipe.
        launches: its server launches.
        plan: the plan of the arm, flattened to `dotted.name: scalar`.
        simulated: its numbers come from a simulated engine.
        published: its numbers were published by others and not measured here: the source.
    """

    name: str
    launches: tuple[Launch, ...]
    plan: Mapping[str, Any] = field(default_factory=dict)
    simulated: bool = False
    published: str | None = None

    def level_keys(self) -> list[str]:
        """Names of the levels that any launch has, in the order of load."""
        levels = {cell.key: cell for launch in self.launches for cell in launch.cells}
        return sorted(levels, key=lambda key: order(levels[key].level))

    def cells(self, key: str) -> list[tuple[Launch, Cell]]:
        """The usable cells of one level, by launch."""
        found = ((launch, launch.cell(key)) for launch in self.launches)
        return [(launch, cell) for launch, cell in found if cell is not None and cell.usable]


def level_key(level: Mapping[str, Any]) -> str:
    """A level's name: what it offers, without how many requests or seconds it took."""
    mode = level.get("mode")
    if mode == "serial":
        return "serial"
    if mode == "closed" or (mode is None and level.get("concurrency") is not None):
        return f"c{level['concurrency']}"
    for name, letter in (("rate", "r"), ("rate_rps", "r"), ("concurrency", "c")):
        if level.get(name) is not None:
            return f"{letter}{level[name]!r}".removesuffix(".0")
    return str(mode or "level")


def order(level: Mapping[str, Any]) -> tuple[int, float]:
    """Sort key: serial first, then by concurrency, then by rate, then whatever has neither."""
    if level.get("mode") == "serial":
        return (0, 0.0)
    if level.get("concurrency") is not None:
        return (1, float(level["concurrency"]))
    rate = level.get("rate", level.get("rate_rps"))
    return (2, float(rate)) if rate is not None else (3, 0.0)


def cell_of(result: LevelResult, slices: Sequence[float] = ()) -> Cell:
    """A measured level as a cell."""
    throughput = result.throughput
    values = {
        PRIMARY: throughput.output_tok_s,
        "output_tok_s_whole": throughput.output_tok_s_whole,
        "per_request_tok_s": throughput.per_request_tok_s,
        **{name: _typical(summary) for name in _SUMMARIES if (summary := result.metrics.get(name)) is not None},
    }
    return Cell(
        key=level_key(result.level),
        level=result.level,
        values={name: value for name, value in values.items() if value is not None},
        state=result.verdict.state,
        reasons=tuple(reason.message for reason in result.verdict.reasons),
        requests=result.requests,
        slices=tuple(slices),
    )


def _typical(summary: Summary) -> float | None:
    """The median; of fewer requests than allow one, the mean."""
    return summary.mean if summary.p50 is None else summary.p50


def launch_of(
    results: Iterable[LevelResult],
    *,
    effective: Mapping[str, Any] | None = None,
    facts: Mapping[str, Any] | None = None,
    records: Mapping[str, Sequence[RequestRecord]] | None = None,
    slicer: Callable[[LevelResult, Sequence[RequestRecord]], Sequence[float]] | None = None,
) -> Launch:
    """The levels of one launch, as stored, as a launch.

    Args:
        results: its levels; they name the launch and the block themselves, and must agree.
        effective: what the server said of its configuration.
        facts: facts of machine and environment.
        records: its requests by level key.
        slicer: cuts a level's steady window into tok/s slices (`stats.slices.throughput`), where records are at hand.

    Raises:
        ValueError: no level, or levels of different launches.
    """
    levels = list(results)
    names = {(result.launch, result.block) for result in levels}
    if len(names) != 1:
        raise ValueError(f"levels of one launch expected, got launches {sorted(names)}")
    [(launch, block)] = names
    by_key = records or {}
    keyed = {level_key(result.level): result for result in levels}
    slices = {key: slicer(result, by_key[key]) for key, result in keyed.items() if slicer and key in by_key}
    return Launch(
        launch=launch,
        block=block,
        cells=tuple(cell_of(result, slices.get(key, ())) for key, result in keyed.items()),
        effective=effective or {},
        facts=facts or {},
        results=keyed,
        records=by_key,
    )

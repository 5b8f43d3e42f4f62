"""Two arms, one verdict a level, and the reasons to distrust it.

The unit is the server launch: a level's log ratio is taken within each block of neighbouring launches, and its interval
comes from how much the blocks disagree. Requests within a launch share its state and do not count as repeats of it.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from harness.stats import crossover as crossing
from harness.stats.arms import HIGHER_IS_BETTER, PRIMARY, Arm, Cell, order
from harness.stats.intervals import (
    MOST_LAUNCHES,
    Contrast,
    Interval,
    equivalent,
    interval,
    launches_needed,
    ordered,
    paired,
    unpaired,
    with_floor,
)
from harness.stats.level import Reason, Stored

FORMAT = "harness.comparison/1"
SECONDARY = ("per_request_tok_s", "tpot_s", "ttft_s", "e2e_s")

RowVerdict = Literal["better", "worse", "equivalent", "unresolved", "not comparable"]


class NoiseFloor(Stored):
    """How far identical arms differ on a machine: what an A/A run gives.

    `spread` is the standard deviation of the log ratio of one launch pair, `freedom` its degrees of freedom, `largest`
    the largest ratio seen between two identical launches less 1.
    """

    spread: float
    freedom: float
    largest: float
    source: str


class Estimate(Stored):
    """Treatment over base for one metric at one level.

    `base` and `treatment` are geometric means over launches, in the metric's unit; `interval` is that of the ratio,
    None where one launch an arm allows none.
    """

    base: float
    treatment: float
    ratio: float
    log_ratio: float
    interval: Interval | None = None
    launches: int


class Row(Stored):
    """The comparison of one level.

    `direction` is which arm the point estimate favours, whether or not that is more than noise; `verdict` is about the
    treatment. `p` is adjusted for the whole table. `more_launches` is how many more an arm would probably settle it.
    """

    key: str
    level: dict[str, Any]
    concurrency: int | None
    verdict: RowVerdict
    direction: Literal["base", "treatment", "even"] | None = None
    estimate: Estimate | None = None
    secondary: dict[str, Estimate] = {}
    p: float | None = None
    more_launches: int | None = None
    reasons: tuple[Reason, ...] = ()
    notes: tuple[str, ...] = ()


class Comparison(Stored):
    """Everything `comparison.json` says about one treatment against its base."""

    format: str = FORMAT
    base: str
    treatment: str
    metric: str
    margin: float
    confidence: float
    rows: tuple[Row, ...]
    crossover: crossing.Crossover
    summary: str
    notes: tuple[str, ...] = ()
    simulated: bool = False
    published: dict[str, str] = {}
    noise: NoiseFloor | None = None


@dataclass(frozen=True, slots=True)
class Settings:
    """How a comparison is made.

    Attributes:
        metric: what the verdict is about.
        margin: arms within this share of each other are equivalent.
        confidence: of intervals; 1 - confidence is the chance of any false claim in a table without differences.
        paired: launches of a block belong together; False for arms that come from separate runs.
        noise: the spread of identical arms on this machine, for arms of one launch.
        one_launch_limit: with one launch an arm and no noise floor, a difference below this share stays unresolved.
            Published repeats of one server differ by at most 1.3 % (the seeds' baseline at C=2, 157.7 and 159.7
            tok/s); identical arms on shared machines by up to 22 %, so this is a convention and not a guarantee.
        blockers: what makes the arms not comparable as a whole, by name.
    """

    metric: str = PRIMARY
    margin: float = 0.02
    confidence: float = 0.95
    paired: bool = True
    noise: NoiseFloor | None = None
    one_launch_limit: float = 0.10
    blockers: Sequence[Reason] = field(default_factory=tuple)


def compare(base: Arm, treatment: Arm, settings: Settings | None = None) -> Comparison:
    """Compare two arms level by level.

    Args:
        base: the arm that ratios are relative to.
        treatment: the arm that the verdicts are about.
        settings: how.

    Returns:
        One row a level that either arm has, in the order of load. Levels that cannot be compared say why; nothing is
        left out.
    """
    how = settings or Settings()
    levels = _levels(base, treatment)
    contrasts = {key: contrast for key in levels if (contrast := _contrast(base, treatment, key, how.metric, how))}
    keys = list(contrasts)
    adjusted = dict(zip(keys, ordered([contrasts[key] for key in keys], _scales(base, treatment, keys)), strict=True))
    rows = tuple(_row(base, treatment, key, levels[key], how, contrasts.get(key), adjusted.get(key)) for key in levels)
    crossed = crossing.find(
        _claims(rows),
        _curve(base, treatment, rows, how),
        base=base.name,
        treatment=treatment.name,
        confidence=how.confidence,
    )
    return Comparison(
        base=base.name,
        treatment=treatment.name,
        metric=how.metric,
        margin=how.margin,
        confidence=how.confidence,
        rows=rows,
        crossover=crossed,
        summary=_summary(base, treatment, rows, crossed),
        notes=_notes(base, treatment, rows),
        simulated=base.simulated or treatment.simulated,
        published={arm.name: arm.published for arm in (base, treatment) if arm.published},
        noise=how.noise,
    )


def _levels(base: Arm, treatment: Arm) -> dict[str, Mapping[str, Any]]:
    """Every level that either arm has, in the order of load."""
    levels = {cell.key: cell.level for arm in (base, treatment) for launch in arm.launches for cell in launch.cells}
    return dict(sorted(levels.items(), key=lambda item: order(item[1])))


def _logs(arm: Arm, key: str, metric: str) -> dict[int, float]:
    """Mean logarithm of a metric by block; launches without a usable, positive value are left out."""
    blocks: dict[int, list[float]] = {}
    for launch, cell in arm.cells(key):
        if (value := cell.values.get(metric)) is not None and value > 0:
            blocks.setdefault(launch.block, []).append(math.log(value))
    return {block: float(np.mean(values)) for block, values in sorted(blocks.items())}


def _contrast(base: Arm, treatment: Arm, key: str, metric: str, how: Settings) -> Contrast | None:
    one, other = _logs(base, key, metric), _logs(treatment, key, metric)
    if not one or not other:
        return None
    if shared := _pairs(one, other, how):
        contrast = paired([other[block] - one[block] for block in shared])
    else:
        contrast = unpaired(list(one.values()), list(other.values()))
    if contrast.error is None and how.noise is not None and metric == how.metric:
        return with_floor(contrast, how.noise.spread, how.noise.freedom)
    return contrast


def _pairs(one: Iterable[int], other: Iterable[int], how: Settings) -> list[int]:
    """Blocks that both arms have; empty where the launches are not paired, or pairing would waste repeats."""
    mine, theirs = set(one), set(other)
    shared = sorted(mine & theirs) if how.paired else []
    return [] if len(shared) < 2 <= min(len(mine), len(theirs)) else shared


def _scales(base: Arm, treatment: Arm, keys: Sequence[str]) -> list[float] | None:
    """Each level's relative spread within its launches, where all levels have slices; independent of launch means."""
    scales = []
    for key in keys:
        parts = [_within(cell) for arm in (base, treatment) for _, cell in arm.cells(key)]
        known = [part for part in parts if part]
        if not known:
            return None
        scales.append(float(np.sqrt(np.mean(np.square(known)))))
    return scales


def _within(cell: Cell) -> float | None:
    """Relative standard error of a level's throughput, from its slices."""
    slices = np.asarray(cell.slices)
    if len(slices) < 4 or slices.mean() <= 0:
        return None
    return float(slices.std(ddof=1) / slices.mean() / math.sqrt(len(slices)))


def _estimate(base: Arm, treatment: Arm, key: str, metric: str, how: Settings) -> Estimate | None:
    contrast = _contrast(base, treatment, key, metric, how)
    if contrast is None:
        return None
    one, other = _logs(base, key, metric), _logs(treatment, key, metric)
    shared = _pairs(one, other, how)
    base_mean = np.mean([one[block] for block in shared] if shared else list(one.values()))
    bounds = interval(contrast, how.confidence)
    return Estimate(
        base=float(np.exp(base_mean)),
        treatment=float(np.exp(base_mean + contrast.mean)),
        ratio=math.exp(contrast.mean),
        log_ratio=contrast.mean,
        interval=bounds.exp() if bounds else None,
        launches=contrast.launches,
    )


def _row(
    base: Arm,
    treatment: Arm,
    key: str,
    level: Mapping[str, Any],
    how: Settings,
    contrast: Contrast | None,
    p: float | None,
) -> Row:
    concurrency = level.get("concurrency") if level.get("mode") != "serial" else 1
    head: dict[str, Any] = {"key": key, "level": dict(level), "concurrency": concurrency}
    if contrast is None:
        return Row(**head, verdict="not comparable", reasons=tuple(how.blockers) + _missing(base, treatment, key, how))
    verdict, reasons = _verdict(contrast, p, how)
    if how.blockers:
        verdict, reasons = "not comparable", tuple(how.blockers)
    secondary = {metric: _estimate(base, treatment, key, metric, how) for metric in SECONDARY if metric != how.metric}
    return Row(
        **head,
        verdict=verdict,
        direction=_direction(contrast.mean, how.metric),
        estimate=_estimate(base, treatment, key, how.metric, how),
        secondary={metric: estimate for metric, estimate in secondary.items() if estimate is not None},
        p=p,
        more_launches=_more(contrast, how) if verdict == "unresolved" else None,
        reasons=reasons,
        notes=_cautions(base, treatment, key),
    )


def _verdict(contrast: Contrast, p: float | None, how: Settings) -> tuple[RowVerdict, tuple[Reason, ...]]:
    """The verdict on the treatment.

    Equivalence goes first: a difference that is certain and lies within the margin is no reason to choose an arm.
    """
    if contrast.error is None:
        return _one_launch(contrast, how)
    bounds = interval(contrast, how.confidence)
    if equivalent(contrast, how.margin, 1 - how.confidence):
        return "equivalent", ()
    if p is not None and p <= 1 - how.confidence:
        return _side(contrast.mean, how.metric), ()
    more = _more(contrast, how)
    low, high = (bounds.low, bounds.high) if bounds else (-math.inf, math.inf)
    seen = f"{math.expm1(low):+.1%} to {math.expm1(high):+.1%} over {contrast.launches} launches an arm"
    if low > 0 or high < 0:
        seen += "; this level alone excludes 0, the whole table does not yet"
    plan = f"more than {MOST_LAUNCHES}" if more is None else str(more)
    message = f"{seen}; {plan} more launches an arm would probably settle it"
    return "unresolved", (Reason(code="unresolved", message=message),)


def _one_launch(contrast: Contrast, how: Settings) -> tuple[RowVerdict, tuple[Reason, ...]]:
    limit = math.log1p(how.one_launch_limit)
    if abs(contrast.mean) > limit:
        message = f"1 launch an arm: no interval; the difference exceeds {how.one_launch_limit:.0%}"
        return _side(contrast.mean, how.metric), (Reason(code="one-launch", message=message),)
    message = f"1 launch an arm: no interval, and {math.expm1(contrast.mean):+.1%} may be noise between launches"
    return "unresolved", (Reason(code="one-launch", message=message),)


def _side(log_ratio: float, metric: str) -> Literal["better", "worse"]:
    return "better" if (log_ratio > 0) == HIGHER_IS_BETTER[metric] else "worse"


def _direction(log_ratio: float, metric: str) -> Literal["base", "treatment", "even"]:
    if log_ratio == 0:
        return "even"
    return "treatment" if _side(log_ratio, metric) == "better" else "base"


def _more(contrast: Contrast, how: Settings) -> int | None:
    """Launches an arm that would probably settle the level; None when even the most would not.

    With one launch the spread is not known, and three an arm are the fewest whose interval is of any use (the t
    quantile falls from 12.7 with two launches to 4.3 with three).
    """
    if contrast.spread is None:
        return max(1, 3 - contrast.launches)
    needed = launches_needed(contrast.mean, contrast.spread, how.margin, alpha=1 - how.confidence)
    return None if needed >= MOST_LAUNCHES else max(1, needed - contrast.launches)


def _missing(base: Arm, treatment: Arm, key: str, how: Settings) -> tuple[Reason, ...]:
    """Why a level has no pair of numbers."""
    reasons = []
    for arm in (base, treatment):
        cells = [cell for launch in arm.launches if (cell := launch.cell(key)) is not None]
        if not cells:
            reasons.append(Reason(code="missing", message=f"`{arm.name}` has no such level"))
        elif not any(cell.usable for cell in cells):
            why = "; ".join(dict.fromkeys(reason for cell in cells for reason in cell.reasons)) or cells[0].state
            reasons.append(Reason(code="invalid", message=f"`{arm.name}` is {cells[0].state}: {why}"))
        elif not any(cell.values.get(how.metric) for cell in cells):
            reasons.append(Reason(code="missing", message=f"`{arm.name}` has no `{how.metric}` at this level"))
    return tuple(reasons)


def _cautions(base: Arm, treatment: Arm, key: str) -> tuple[str, ...]:
    """Suspect cells that went into the row, and launches that could not."""
    notes = []
    for arm in (base, treatment):
        for launch in arm.launches:
            cell = launch.cell(key)
            if cell is not None and cell.state != "valid":
                notes.append(f"`{arm.name}` launch {launch.launch} is {cell.state}: {'; '.join(cell.reasons)}")
    return tuple(notes)


def _curve(base: Arm, treatment: Arm, rows: Sequence[Row], how: Settings) -> crossing.Curve:
    """The closed levels of both arms as matrices for interpolation."""
    numbered = [row for row in rows if row.level.get("mode") != "serial" and row.concurrency and row.estimate]
    sign = 1.0 if HIGHER_IS_BETTER[how.metric] else -1.0
    one = [_logs(base, row.key, how.metric) for row in numbered]
    other = [_logs(treatment, row.key, how.metric) for row in numbered]
    blocks = [sorted({block for logs in arm for block in logs}) for arm in (one, other)]
    shared = _pairs(blocks[0], blocks[1], how)
    rows_of = [shared, shared] if shared else blocks

    def matrix(arm: Sequence[Mapping[int, float]], keep: Sequence[int]) -> NDArray[np.float64]:
        values = np.full((len(keep), len(arm)), math.nan)
        for column, logs in enumerate(arm):
            values[:, column] = [sign * logs.get(block, math.nan) for block in keep]
        return values

    floor = (how.noise.spread, how.noise.freedom) if how.noise else None
    levels = tuple(row.concurrency for row in numbered if row.concurrency)
    return crossing.Curve(levels, matrix(one, rows_of[0]), matrix(other, rows_of[1]), bool(shared), floor)


def _claims(rows: Sequence[Row]) -> list[crossing.Claim]:
    return [
        crossing.Claim(
            label=str(row.concurrency) if row.concurrency else row.key,
            concurrency=row.concurrency,
            verdict=row.verdict,
            direction=row.direction,
            interval=row.estimate is not None and row.estimate.interval is not None,
        )
        for row in rows
        if row.level.get("mode") != "serial"
    ]


def _summary(base: Arm, treatment: Arm, rows: Sequence[Row], crossed: crossing.Crossover) -> str:
    """The table in a sentence."""
    blocked = [row for row in rows if row.verdict == "not comparable" and row.estimate is not None]
    if blocked:
        return f"not comparable: {'; '.join(dict.fromkeys(reason.message for reason in blocked[0].reasons))}"
    return crossed.sentence


def _notes(base: Arm, treatment: Arm, rows: Sequence[Row]) -> tuple[str, ...]:
    notes = [
        f"`{arm.name}` is published, not measured here: {arm.published}" for arm in (base, treatment) if arm.published
    ]
    notes += [f"`{arm.name}` is simulated" for arm in (base, treatment) if arm.simulated]
    launches = min((row.estimate.launches for row in rows if row.estimate), default=0)
    if launches == 1:
        notes.append("1 launch an arm: no interval is possible, and a second launch may move every number")
    return tuple(notes)

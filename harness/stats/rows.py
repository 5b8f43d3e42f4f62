"""One row of a comparison: the contrast of a level, its estimate, and the verdict that follows.

The unit is the server launch: a level's log ratio is taken within each block of neighbouring launches, and its interval
comes from how much the blocks disagree. Requests within a launch share its state and do not count as repeats of it.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np

from harness.stats.arms import HIGHER_IS_BETTER, PRIMARY, Arm
from harness.stats.comparison import Estimate, NoiseFloor, Row, RowVerdict
from harness.stats.fairness import Permission
from harness.stats.intervals import (
    MOST_LAUNCHES,
    Contrast,
    Interval,
    equivalent,
    interval,
    launches_needed,
    paired,
    resample,
    unpaired,
    with_floor,
)
from harness.stats.level import Reason
from harness.stats.speculation import Acceptance, Explained, acceptance, explain

SECONDARY = ("per_request_tok_s", "tpot_s", "ttft_s", "e2e_s")
FEWEST_SLICES = 4  # below that a level's slices say nothing about its spread


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
        permission: what may differ between the arms.
        blockers: what else makes the arms not comparable as a whole, by name.
    """

    metric: str = PRIMARY
    margin: float = 0.02
    confidence: float = 0.95
    paired: bool = True
    noise: NoiseFloor | None = None
    one_launch_limit: float = 0.10
    permission: Permission = field(default_factory=Permission)
    blockers: tuple[Reason, ...] = ()


class Sides(NamedTuple):
    """The two arms of a comparison, and how it is made."""

    base: Arm
    treatment: Arm
    how: Settings


def logs(arm: Arm, key: str, metric: str) -> dict[int, float]:
    """Mean logarithm of a metric by block; launches without a usable, positive value are left out."""
    blocks: dict[int, list[float]] = {}
    for launch, cell in arm.cells(key):
        if (value := cell.values.get(metric)) is not None and value > 0:
            blocks.setdefault(launch.block, []).append(math.log(value))
    return {block: float(np.mean(values)) for block, values in sorted(blocks.items())}


def pairs(one: Iterable[int], other: Iterable[int], how: Settings) -> list[int]:
    """Blocks that both arms have; empty where the launches are not paired, or pairing would waste repeats."""
    mine, theirs = set(one), set(other)
    shared = sorted(mine & theirs) if how.paired else []
    return [] if len(shared) < 2 <= min(len(mine), len(theirs)) else shared


def contrast_of(sides: Sides, key: str, metric: str) -> Contrast | None:
    """The log ratio of one metric at one level; None where either arm has no usable number."""
    how = sides.how
    one, other = logs(sides.base, key, metric), logs(sides.treatment, key, metric)
    if not one or not other:
        return None
    if shared := pairs(one, other, how):
        contrast = paired([other[block] - one[block] for block in shared])
    else:
        contrast = unpaired(list(one.values()), list(other.values()))
    if contrast.error is None and how.noise is not None and metric == how.metric:
        return with_floor(contrast, how.noise.spread, how.noise.freedom)
    return contrast


def row_of(
    sides: Sides,
    key: str,
    level: Mapping[str, Any],
    blockers: tuple[Reason, ...],
    contrast: Contrast | None,
    p: float | None,
) -> Row:
    """The row of one level.

    Args:
        sides: both arms.
        key: the level.
        level: as planned.
        blockers: why nothing between these arms can be compared; the figures are shown all the same.
        contrast: the level's log ratio in the compared metric.
        p: its p-value, adjusted for the whole table.
    """
    concurrency = level.get("concurrency") if level.get("mode") != "serial" else 1
    accepted = _acceptances(sides, key)
    notes = (*_cautions(sides, key), *_disagreements(accepted))
    head: dict[str, Any] = {"key": key, "level": dict(level), "concurrency": concurrency, "notes": notes}
    head |= {"suspect": _suspect(sides, key)}
    if contrast is None:
        return Row(**head, verdict="not comparable", reasons=(*blockers, *_missing(sides, key)))
    how = sides.how
    verdict, reasons = _verdict(contrast, p, how)
    if blockers:
        verdict, reasons = "not comparable", blockers
    secondary = {metric: _estimate(sides, key, metric) for metric in SECONDARY if metric != how.metric}
    known = {name: [one.level for one in launches if one.level is not None] for name, launches in accepted.items()}
    lengths = {name: float(np.mean(levels)) for name, levels in known.items() if levels}
    return Row(
        **head,
        verdict=verdict,
        direction=_direction(contrast, how),
        estimate=_estimate(sides, key, how.metric),
        secondary={metric: estimate for metric, estimate in secondary.items() if estimate is not None},
        p=p,
        more_launches=_more(contrast, how) if verdict == "unresolved" else None,
        reasons=reasons,
        acceptance=lengths,
        speculation=None if blockers else _explained(sides, secondary.get("tpot_s"), lengths),
    )


def _estimate(sides: Sides, key: str, metric: str) -> Estimate | None:
    contrast = contrast_of(sides, key, metric)
    if contrast is None:
        return None
    one, other = logs(sides.base, key, metric), logs(sides.treatment, key, metric)
    shared = pairs(one, other, sides.how)
    base_mean = np.mean([one[block] for block in shared or one])
    bounds = interval(contrast, sides.how.confidence)
    within = _within(sides, key) if metric == PRIMARY and contrast.launches == 1 else None
    return Estimate(
        base=float(np.exp(base_mean)),
        treatment=float(np.exp(base_mean + contrast.mean)),
        ratio=math.exp(contrast.mean),
        log_ratio=contrast.mean,
        interval=bounds.exp() if bounds else None,
        within=within.exp() if within else None,
        launches=contrast.launches,
    )


def _within(sides: Sides, key: str) -> Interval | None:
    """How far the ratio of one launch an arm moves within these launches, from their time slices."""
    cells = [[cell for _, cell in arm.cells(key)] for arm in (sides.base, sides.treatment)]
    if any(len(arm) != 1 or len(arm[0].slices) < FEWEST_SLICES or min(arm[0].slices) <= 0 for arm in cells):
        return None
    one, other = cells[0][0].slices, cells[1][0].slices
    return resample([one], [other], confidence=sides.how.confidence)


def _acceptances(sides: Sides, key: str) -> dict[str, list[Acceptance]]:
    """What speculation did in each launch of each arm that has the level."""
    return {
        arm.name: [
            acceptance(result, launch.records.get(key, ()))
            for launch in arm.launches
            if (result := launch.results.get(key)) is not None
        ]
        for arm in (sides.base, sides.treatment)
    }


def _disagreements(accepted: Mapping[str, Sequence[Acceptance]]) -> tuple[str, ...]:
    """Where two ways to an accept length differ, by arm."""
    return tuple(
        f"`{name}`: {finding.message}"
        for name, launches in accepted.items()
        for launch in launches
        for finding in launch.findings
    )


def _explained(sides: Sides, tpot: Estimate | None, lengths: Mapping[str, float]) -> Explained | None:
    if tpot is None:
        return None
    return explain(tpot.base, tpot.treatment, lengths.get(sides.base.name), lengths.get(sides.treatment.name))


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
    count = "1 launch an arm" if contrast.launches == 1 else f"{contrast.launches} launches an arm"
    low, high = (bounds.low, bounds.high) if bounds else (-math.inf, math.inf)
    seen = f"{math.expm1(low):+.1%} to {math.expm1(high):+.1%} over {count}"
    if low > 0 or high < 0:
        seen += "; this level alone excludes 0, the whole table does not yet"
    plan = f"{MOST_LAUNCHES} launches an arm would not" if more is None else f"{_launches(more)} an arm would probably"
    message = f"{seen}; {plan} settle it"
    return "unresolved", (Reason(code="unresolved", message=message),)


def _launches(more: int) -> str:
    return "1 more launch" if more == 1 else f"{more} more launches"


def _one_launch(contrast: Contrast, how: Settings) -> tuple[RowVerdict, tuple[Reason, ...]]:
    limit = math.log1p(how.one_launch_limit)
    if abs(contrast.mean) > limit:
        message = f"1 launch an arm: no interval; the difference exceeds {how.one_launch_limit:.0%}"
        return _side(contrast.mean, how.metric), (Reason(code="one-launch", message=message),)
    message = f"1 launch an arm: no interval, and {math.expm1(contrast.mean):+.1%} may be noise between launches"
    return "unresolved", (Reason(code="one-launch", message=message),)


def _side(log_ratio: float, metric: str) -> Literal["better", "worse"]:
    return "better" if (log_ratio > 0) == HIGHER_IS_BETTER[metric] else "worse"


def _direction(contrast: Contrast, how: Settings) -> Literal["base", "treatment", "even"]:
    """Which arm the estimate favours; without an error of its own, one within the margin favours none."""
    if contrast.mean == 0 or (contrast.error is None and abs(contrast.mean) < math.log1p(how.margin)):
        return "even"
    return "treatment" if _side(contrast.mean, how.metric) == "better" else "base"


def _more(contrast: Contrast, how: Settings) -> int | None:
    """Launches an arm that would probably settle the level; None when even the most would not.

    With one launch the spread is not known, and three an arm are the fewest whose interval is of any use (the t
    quantile falls from 12.7 with two launches to 4.3 with three).
    """
    if contrast.spread is None:
        return max(1, 3 - contrast.launches)
    needed = launches_needed(contrast.mean, contrast.spread, how.margin, alpha=1 - how.confidence)
    return None if needed >= MOST_LAUNCHES else max(1, needed - contrast.launches)


def _missing(sides: Sides, key: str) -> tuple[Reason, ...]:
    """Why a level has no pair of numbers."""
    reasons = []
    for arm in (sides.base, sides.treatment):
        cells = [cell for launch in arm.launches if (cell := launch.cell(key)) is not None]
        if not cells:
            reasons.append(Reason(code="missing", message=f"`{arm.name}` has no such level"))
        elif not any(cell.usable for cell in cells):
            why = "; ".join(dict.fromkeys(reason for cell in cells for reason in cell.reasons)) or cells[0].state
            reasons.append(Reason(code="invalid", message=f"`{arm.name}` is {cells[0].state}: {why}"))
        elif not any(cell.values.get(sides.how.metric) for cell in cells):
            reasons.append(Reason(code="missing", message=f"`{arm.name}` has no `{sides.how.metric}` at this level"))
    return tuple(reasons)


def _suspect(sides: Sides, key: str) -> tuple[str, ...]:
    """The arms of which a number that went into the row is suspect."""
    arms = (sides.base, sides.treatment)
    return tuple(arm.name for arm in arms if any(cell.state == "suspect" for _, cell in arm.cells(key)))


def _cautions(sides: Sides, key: str) -> tuple[str, ...]:
    """Suspect cells that went into the row, and launches that could not."""
    notes = []
    for arm in (sides.base, sides.treatment):
        for launch in arm.launches:
            cell = launch.cell(key)
            if cell is not None and cell.state != "valid":
                notes.append(f"`{arm.name}` launch {launch.launch} is {cell.state}: {'; '.join(cell.reasons)}")
    return tuple(notes)

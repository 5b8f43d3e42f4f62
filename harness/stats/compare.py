"""Two arms, one verdict a level, and the reasons to distrust it.

A comparison is a short list of parts, each made in its own room: rows, crossover, fairness, outputs, saturation,
consistency, and the policy that follows from them.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harness.stats import crossover as crossing
from harness.stats.arms import HIGHER_IS_BETTER, Arm, order
from harness.stats.comparison import Comparison, NoiseFloor, Row
from harness.stats.consistency import serial_against_closed
from harness.stats.equivalence import compare_outputs
from harness.stats.fairness import Fairness, check, cumulative_acceptance
from harness.stats.intervals import ordered
from harness.stats.level import Reason
from harness.stats.policy import decide
from harness.stats.rows import Settings, Sides, contrast_of, logs, pairs, row_of
from harness.stats.saturation import saturation

__all__ = ["Comparison", "NoiseFloor", "Row", "Settings", "compare", "compare_all", "noise_floor"]


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
    fairness = check(base, treatment, how.permission)
    sides = Sides(base, treatment, how)
    rows = _rows(sides, (*how.blockers, *fairness.blockers))
    names = {"base": base.name, "treatment": treatment.name}
    crossed = crossing.find(_claims(rows), _curve(sides, rows), confidence=how.confidence, **names)
    outputs = compare_outputs(base, treatment)
    serial = tuple(found for arm in (base, treatment) if (found := serial_against_closed(arm, how.margin)) is not None)
    result = Comparison(
        base=base.name,
        treatment=treatment.name,
        metric=how.metric,
        margin=how.margin,
        confidence=how.confidence,
        rows=rows,
        crossover=crossed,
        summary=_summary(rows, crossed),
        notes=_notes(sides, rows, fairness),
        simulated=base.simulated or treatment.simulated,
        published={arm.name: arm.published for arm in (base, treatment) if arm.published},
        noise=how.noise,
        fairness=fairness,
        suspect=(
            *(outputs.suspect if outputs else ()),
            *(Reason(code="serial-disagrees", message=found.message) for found in serial if found.agree is False),
        ),
        # A ratio of plateaus is a claim as well.
        saturation=None if how.blockers or fairness.blockers else saturation(base, treatment, how.confidence),
        equivalence=outputs,
        serial=serial,
    )
    return result.model_copy(update={"policy": decide(result, treatment.plan)})


def compare_all(arms: Sequence[Arm], base: str, settings: Settings | None = None) -> list[Comparison]:
    """Every other arm against the base, in the arms' order.

    Each table keeps its own guarantee; with m treatments the chance of a false claim anywhere is at most m times that.

    Raises:
        KeyError: no arm has the base's name.
    """
    by_name = {arm.name: arm for arm in arms}
    return [compare(by_name[base], arm, settings) for arm in arms if arm.name != base]


def noise_floor(one: Arm, other: Arm, source: str, settings: Settings | None = None) -> NoiseFloor | None:
    """The spread of identical arms on a machine, from an A/A run.

    The mean is known to be 0, so the spread is the root mean square of the log ratios; levels of one launch move
    together, so it counts one degree of freedom a block and not one a level. None where no level has a pair.

    Args:
        one: the base.
        other: the base again.
        source: which run.
        settings: for the metric and the pairing.
    """
    how = settings or Settings()
    ratios = [
        theirs[block] - ours[block]
        for key in one.level_keys()
        for ours, theirs in [(logs(one, key, how.metric), logs(other, key, how.metric))]
        for block in pairs(ours, theirs, how)
    ]
    blocks = {launch.block for launch in one.launches} & {launch.block for launch in other.launches}
    if not ratios or not blocks:
        return None
    return NoiseFloor(
        spread=float(np.sqrt(np.mean(np.square(ratios)))),
        freedom=len(blocks),
        largest=math.expm1(max(abs(ratio) for ratio in ratios)),
        source=source,
    )


def _rows(sides: Sides, blockers: tuple[Reason, ...]) -> tuple[Row, ...]:
    levels = _levels(sides.base, sides.treatment)
    contrasts = {key: found for key in levels if (found := contrast_of(sides, key, sides.how.metric))}
    adjusted = ordered(list(contrasts.values()))
    p_values = dict(zip(contrasts, adjusted, strict=True))
    return tuple(
        row_of(sides, key, level, blockers, contrasts.get(key), p_values.get(key)) for key, level in levels.items()
    )


def _levels(base: Arm, treatment: Arm) -> dict[str, Mapping[str, Any]]:
    """Every level that either arm has, in the order of load."""
    levels = {cell.key: cell.level for arm in (base, treatment) for launch in arm.launches for cell in launch.cells}
    return dict(sorted(levels.items(), key=lambda item: order(item[1])))


def _curve(sides: Sides, rows: Sequence[Row]) -> crossing.Curve:
    """The closed levels of both arms as matrices for interpolation."""
    how = sides.how
    numbered = [row for row in rows if row.level.get("mode") != "serial" and row.concurrency and row.estimate]
    sign = 1.0 if HIGHER_IS_BETTER[how.metric] else -1.0
    one = [logs(sides.base, row.key, how.metric) for row in numbered]
    other = [logs(sides.treatment, row.key, how.metric) for row in numbered]
    blocks = [sorted({block for logs in arm for block in logs}) for arm in (one, other)]
    shared = pairs(blocks[0], blocks[1], how)
    rows_of = [shared, shared] if shared else blocks

    def matrix(arm: Sequence[Mapping[int, float]], keep: Sequence[int]) -> NDArray[np.float64]:
        values = np.full((len(keep), len(arm)), math.nan)
        for column, known in enumerate(arm):
            values[:, column] = [sign * known.get(block, math.nan) for block in keep]
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


def _summary(rows: Sequence[Row], crossed: crossing.Crossover) -> str:
    """The table in a sentence."""
    blocked = [row for row in rows if row.verdict == "not comparable" and row.estimate is not None]
    if blocked:
        return f"not comparable: {'; '.join(reason.message for reason in blocked[0].reasons)}"
    return crossed.sentence


def _notes(sides: Sides, rows: Sequence[Row], fairness: Fairness) -> tuple[str, ...]:
    arms = (sides.base, sides.treatment)
    notes = [f"`{arm.name}` is published, not measured here: {arm.published}" for arm in arms if arm.published]
    notes += [f"`{arm.name}` is simulated" for arm in arms if arm.simulated]
    if "effective" not in fairness.checked:
        notes.append("fairness of the effective configuration was not checked: it is not known for both arms")
    silent = [arm for arm in arms if not any(arm.name in row.acceptance for row in rows)]
    notes += [found.message for arm in silent if (found := cumulative_acceptance(arm)) is not None]
    if min((row.estimate.launches for row in rows if row.estimate), default=0) == 1:
        notes.append(_one_launch(sides.how.noise))
    return tuple(notes)


def _one_launch(floor: NoiseFloor | None) -> str:
    """Where the intervals of one launch an arm come from."""
    if floor is None:
        return "1 launch an arm: no interval is possible, and a second launch may move every number"
    return (
        f"1 launch an arm: intervals are by how far identical launches differ here, {floor.spread:.1%} in "
        f"`{floor.source}` (an A/A run)"
    )

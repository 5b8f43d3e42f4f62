"""What to run next: the next block of launches goes where the answer is least certain, until it is certain enough.

A block is one launch of each arm. The first scans every second level of the grid. The width of a crossover's interval
depends on the launches at the two levels beside it and on nothing else, so each later block runs just one level on
either side of where the crossover seems to be, near enough for a straight line between them and far enough apart for
each to be certain of its sign. Where no sign changes, it runs the levels that are still unresolved.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from harness.stats.arms import Arm
from harness.stats.compare import Comparison, Row, Settings, compare
from harness.stats.level import Stored


@dataclass(frozen=True, slots=True)
class Goal:
    """When to stop.

    Attributes:
        grid: the concurrencies of the recipe, ascending.
        width: a crossover's interval is narrow enough when its upper end is at most this many times its lower end.
        blocks: launches an arm that may be spent in all.
        minutes: time that may be spent in all; None for no limit.
        nearest: how far from the crossover, as a ratio, a level must be to be sure of its sign.
        farthest: and how far it may be for the line between the two to be straight.
    """

    grid: Sequence[int]
    width: float = 1.5
    blocks: int = 8
    minutes: float | None = None
    nearest: float = 1.25
    farthest: float = 3.0


class Step(Stored):
    """The next block: `levels` for both arms, one launch each. No levels: done, and `reason` says why."""

    levels: tuple[int, ...]
    reason: str

    @property
    def done(self) -> bool:
        """Whether there is nothing more to run."""
        return not self.levels


def next_step(
    base: Arm, treatment: Arm, goal: Goal, settings: Settings | None = None, minutes_spent: float = 0.0
) -> Step:
    """Decide the next block from what has been measured so far.

    Args:
        base: the base arm with its launches so far, none at first.
        treatment: the treatment arm, likewise.
        goal: grid, target and budget.
        settings: of the comparison.
        minutes_spent: time spent so far; what the next block takes is guessed from the mean so far.
    """
    blocks = min(len(base.launches), len(treatment.launches))
    if blocks == 0:
        return Step(levels=_scan(goal.grid), reason="scan: every second level of the grid")
    result = compare(base, treatment, settings)
    rows = [row for row in result.rows if row.estimate and row.concurrency and row.level.get("mode") != "serial"]
    if not rows:
        return Step(levels=(), reason="no level can be compared")
    if (reached := _reached(result, rows, goal)) is not None:
        return Step(levels=(), reason=reached)
    if (spent := _spent(blocks, goal, minutes_spent)) is not None:
        return Step(levels=(), reason=spent)
    return _around(rows, goal) or _unresolved(rows, goal)


def _scan(grid: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted({*grid[::2], grid[-1]}))


def _reached(result: Comparison, rows: Sequence[Row], goal: Goal) -> str | None:
    """Why the question is answered, if it is."""
    crossings = result.crossover.crossings
    widths = [_width(crossing.low, crossing.high) for crossing in crossings]
    signs = {row.direction for row in rows if row.verdict != "equivalent"}
    if crossings and all(width is not None and width <= goal.width for width in widths):
        return f"answered: {result.crossover.sentence}"
    # With one launch an arm large differences are claimed without an interval: a second block has to confirm them.
    settled = all(row.verdict != "unresolved" and row.estimate and row.estimate.interval for row in rows)
    if settled and not crossings and len(signs) <= 1:
        return f"answered: {result.crossover.sentence}"
    return None


def _width(low: float | None, high: float | None) -> float | None:
    return high / low if low and high else None


def _spent(blocks: int, goal: Goal, minutes: float) -> str | None:
    if blocks >= goal.blocks:
        return f"budget spent: {blocks} launches an arm"
    if goal.minutes is not None and minutes + minutes / blocks > goal.minutes:
        return f"budget spent: {minutes:.0f} of {goal.minutes:.0f} minutes, and a block takes {minutes / blocks:.0f}"
    return None


def _around(rows: Sequence[Row], goal: Goal) -> Step | None:
    """One level on either side of the apparent crossover; None where no sign changes."""
    root = _apparent(rows)
    if root is None:
        return None
    left = _beside(rows, goal, root / goal.farthest, root / goal.nearest)
    right = max(left + 1, _beside(rows, goal, root * goal.nearest, root * goal.farthest))
    return Step(levels=(left, right), reason=f"the sign seems to change near {root:.3g}: one level on either side")


def _apparent(rows: Sequence[Row]) -> float | None:
    """Where the sign seems to change: the split of the levels that contradicts the fewest and smallest estimates.

    Noise near a crossover makes the sign go to and fro; the best split is a step function fitted by weighted absolute
    deviation. Within the split, straight in log concurrency.
    """
    points = [(float(row.concurrency or 1), row.estimate) for row in rows if row.estimate is not None]
    pulls = [estimate.log_ratio * math.sqrt(estimate.launches) for _, estimate in points]
    scores = {split: abs(sum(pulls[:split]) - sum(pulls[split:])) for split in range(1, len(points))}
    if not scores:
        return None
    split = max(scores, key=lambda index: scores[index])
    (left, one), (right, other) = points[split - 1], points[split]
    if scores[split] <= abs(sum(pulls)) or sum(pulls[:split]) * sum(pulls[split:]) >= 0:
        return None
    if one.log_ratio * other.log_ratio >= 0:
        return math.sqrt(left * right)
    return float(left * (right / left) ** (one.log_ratio / (one.log_ratio - other.log_ratio)))


def _beside(rows: Sequence[Row], goal: Goal, low: float, high: float) -> int:
    """A level in a range: the one with the most launches so far, else a new one, never outside the grid."""
    known = {int(row.concurrency or 1): row.estimate.launches for row in rows if row.estimate is not None}
    within = [level for level in known if low <= level <= high]
    if within:
        return max(within, key=lambda level: known[level])
    return min(max(round(math.sqrt(low * high)), goal.grid[0]), goal.grid[-1])


def _unresolved(rows: Sequence[Row], goal: Goal) -> Step:
    """No sign change: the levels that are not settled, else those of the grid that were not scanned."""
    known = {row.concurrency: row for row in rows if row.concurrency}
    settled = {
        level for level, row in known.items() if row.verdict != "unresolved" and row.estimate and row.estimate.interval
    }
    levels = sorted(known.keys() - settled or set(goal.grid) - settled)
    listed = ", ".join(str(level) for level in levels)
    return Step(levels=tuple(levels), reason=f"not settled yet: {listed}" if levels else "every level is settled")

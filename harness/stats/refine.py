"""What to run next: the next block of launches goes where the answer is least certain, until it is certain enough.

A block is one launch of each arm. The first block scans every second level of the grid; each later one looks only at
the levels around the crossover, or, where no crossover shows, at the levels that are still unresolved. The width of a
crossover's interval depends on the launches at the two levels beside it and on nothing else, so that requests spent at
other levels buy no precision.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

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
        narrowest: no level is added between two neighbours nearer than this ratio.
    """

    grid: Sequence[int]
    width: float = 1.5
    blocks: int = 8
    minutes: float | None = None
    narrowest: float = 2.0


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
    """The two levels beside each change of sign, and one between them while they are far apart."""
    levels: set[int] = set()
    for one, other in _brackets(rows):
        left, right = int(one.concurrency or 1), int(other.concurrency or 1)
        levels |= {left, right}
        middle = _middle(left, right, goal)
        if middle is not None:
            levels.add(middle)
    if not levels:
        return None
    listed = ", ".join(str(level) for level in sorted(levels))
    return Step(levels=tuple(sorted(levels)), reason=f"the sign changes between these levels: {listed}")


def _brackets(rows: Sequence[Row]) -> list[tuple[Row, Row]]:
    """Neighbours between which the point estimate changes sign, widened to levels that are certain of theirs."""
    found = []
    for index, (one, other) in enumerate(pairwise(rows)):
        if one.direction != other.direction and "even" not in {one.direction, other.direction}:
            left = next((row for row in reversed(rows[: index + 1]) if _certain(row, one.direction)), one)
            right = next((row for row in rows[index + 1 :] if _certain(row, other.direction)), other)
            found.append((left, right))
    return found


def _certain(row: Row, direction: str | None) -> bool:
    """Whether a level's own interval is on one side; with one launch its point estimate has to do."""
    if row.direction != direction or row.estimate is None:
        return False
    bounds = row.estimate.interval
    return bounds is None or not bounds.low <= 1 <= bounds.high


def _middle(left: int, right: int, goal: Goal) -> int | None:
    """A level between two that are far apart: of the grid where it has one, else the geometric mean."""
    if right / left <= goal.narrowest or right - left < 2:
        return None
    centre = math.sqrt(left * right)
    between = [level for level in goal.grid if left < level < right]
    if between:
        return min(between, key=lambda level: abs(math.log(level / centre)))
    return round(centre)


def _unresolved(rows: Sequence[Row], goal: Goal) -> Step:
    """No sign change: the levels that are not settled, and the neighbours on the grid that were not scanned."""
    open_rows = [
        row for row in rows if row.verdict == "unresolved" or row.estimate is None or not row.estimate.interval
    ]
    measured = {row.concurrency for row in rows}
    levels = {int(row.concurrency or 1) for row in open_rows}
    if not levels:
        levels = set(goal.grid) - measured
    listed = ", ".join(str(level) for level in sorted(levels))
    return Step(levels=tuple(sorted(levels)), reason=f"not settled yet: {listed}")

"""Where an arm stops gaining from more load: the knee, the plateau, and when to stop a sweep."""

import math
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from harness.stats.arms import PRIMARY, Arm, Cell, Launch, order
from harness.stats.intervals import Interval, interval, paired
from harness.stats.level import Stored


class Knee(Stored):
    """The smallest concurrency whose throughput is within `share` of the best one's.

    `low` and `high` are the levels between which it lies with the confidence of the test, None with one launch.
    `beyond` says that the highest level is the best one: the plateau may lie higher than the sweep went.
    """

    arm: str
    share: float
    best_tok_s: float
    best_at: int
    at: int
    low: int | None = None
    high: int | None = None
    beyond: bool = False


class Saturation(Stored):
    """Both arms' plateaus: knees where there is a sweep, and the ratio of the best throughputs, base over treatment.

    The throughputs and their ratio are over levels that both arms have, and None where that says nothing of a peak.
    """

    base: Knee | None
    treatment: Knee | None
    base_tok_s: float | None = None
    treatment_tok_s: float | None = None
    ratio: float | None = None
    interval: Interval | None = None
    sentence: str


def knee(arm: Arm, share: float = 0.05, confidence: float = 0.95) -> Knee | None:
    """The knee of an arm's throughput over concurrency.

    A level is ruled out as the knee when Student's t over the arm's launches says that it is below the best less
    `share`, or that a lower level already reaches that; the levels that are left are the interval. None with fewer than
    two levels.
    """
    levels = _levels(arm)
    table = _table(arm, levels)
    if len(levels) < 2 or not len(table):
        return None
    means = table.mean(axis=0)
    best = int(means.argmax())
    floor = math.log1p(-share)
    above = means - means[best] - floor >= 0
    low = high = None
    if len(table) > 1:
        bounds = [_bounds(table[:, column] - table[:, best] - floor, confidence) for column in range(len(levels))]
        low = next(level for level, (_, top) in zip(levels, bounds, strict=True) if top >= 0)
        reached = (level for level, (bottom, _) in zip(levels, bounds, strict=True) if bottom >= 0)
        high = next(reached, levels[best])
    return Knee(
        arm=arm.name,
        share=share,
        best_tok_s=float(np.exp(means[best])),
        best_at=levels[best],
        at=levels[int(above.argmax())],
        low=low,
        high=high,
        beyond=best == len(levels) - 1 and not bool(above[-2]),
    )


def saturation(base: Arm, treatment: Arm, confidence: float = 0.95) -> Saturation | None:
    """The plateaus of two arms: as published where a `saturation` row says so, else the best of the shared levels.

    A ladder that ends lower has a lower peak, so peaks are compared over levels of one loop that both arms have.
    None where either arm has no throughput at all.
    """
    arms, knees = (base, treatment), (knee(base, confidence=confidence), knee(treatment, confidence=confidence))
    if not all(any(_usable(launch) for launch in arm.launches) for arm in arms):
        return None
    ground = _ground(arms, knees)
    if isinstance(ground, str):
        return Saturation(base=knees[0], treatment=knees[1], sentence=f"peaks are not compared: {ground}")
    one, other = (_peaks(arm, keys) for arm, keys in zip(arms, ground.keys, strict=True))
    shared = sorted(one.keys() & other.keys())
    logs = [math.log(one[block] / other[block]) for block in shared]
    bounds = interval(paired(logs), confidence) if len(logs) > 1 else None
    left, right = (_geometric([peaks[block] for block in shared or peaks]) for peaks in (one, other))
    spread = f" [{math.exp(bounds.low):.2f}, {math.exp(bounds.high):.2f}]" if bounds else ", no interval"
    parts = [_reached(arm, value, at, ground.where) for arm, value, at in zip(arms, (left, right), knees, strict=True)]
    return Saturation(
        base=knees[0],
        treatment=knees[1],
        base_tok_s=left,
        treatment_tok_s=right,
        ratio=left / right,
        interval=bounds.exp() if bounds else None,
        sentence=f"{parts[0]}, {parts[1]}: ratio {left / right:.2f}{spread}",
    )


class _Ground(NamedTuple):
    """The levels, by key, over which each arm's peak is taken, and how that place is called."""

    keys: tuple[Collection[str], Collection[str]]
    where: str


def _ground(arms: tuple[Arm, Arm], knees: tuple[Knee | None, Knee | None]) -> _Ground | str:
    """What two peaks may be taken over, or why they are not to be compared."""
    published = [_published(arm) for arm in arms]
    if any(published):
        # A published plateau has no level; beside it stands another one, or a sweep that shows its own.
        for arm, known, found in zip(arms, published, knees, strict=True):
            if not known and (found is None or found.beyond):
                return f"`{arm.name}` has not shown its plateau"
        one, other = (["saturation"] if _published(arm) else [f"c{at}" for at in _levels(arm)] for arm in arms)
        return _Ground((one, other), "at most")
    left, right = (_ladder(arm) for arm in arms)
    every = []
    for loop in sorted(left.keys() & right.keys()):
        shared = [key for key in left[loop].complete if key in right[loop].complete]
        every += shared
        if shared and left[loop].top == right[loop].top == shared[-1]:
            return _Ground((shared, shared), "at most")
        if len(shared) > 1:
            return _Ground((shared, shared), f"over the shared levels {_said(shared[0])} to {_said(shared[-1])}")
    return f"the arms share only {' and '.join(map(_said, every))}" if every else "the arms share no level"


class _Ladder(NamedTuple):
    """The levels of one loop in the order of load: those that every launch has, and the highest of any."""

    complete: tuple[str, ...]
    top: str


def _ladder(arm: Arm) -> dict[str, _Ladder]:
    """An arm's ladders by loop (`closed`, `open`); a serial run is no step of one."""
    launches = [cells for launch in arm.launches if (cells := _usable(launch))]
    loops: dict[str, dict[str, Cell]] = {}
    for cell in sorted((cell for cells in launches for cell in cells), key=lambda cell: order(cell.level)):
        loop = str(cell.level.get("mode") or "closed")
        if loop not in {"serial", "saturation"}:
            loops.setdefault(loop, {})[cell.key] = cell
    keys = [{cell.key for cell in cells} for cells in launches]
    return {
        loop: _Ladder(tuple(key for key in cells if all(key in launch for launch in keys)), [*cells][-1])
        for loop, cells in loops.items()
    }


def _said(key: str) -> str:
    return f"C={key[1:]}" if key.startswith("c") and key[1:].isdigit() else key


def _published(arm: Arm) -> bool:
    return any(cell.key == "saturation" for launch in arm.launches for cell in _usable(launch))


def _reached(arm: Arm, value: float, at: Knee | None, where: str) -> str:
    """How an arm's plateau is said; a sweep that still climbs at its end has not shown one."""
    if _published(arm) or (at is not None and not at.beyond and value >= (1 - at.share) * at.best_tok_s):
        return f"`{arm.name}` saturates at {value:.0f} tok/s"
    return f"`{arm.name}` reaches {value:.0f} tok/s {where}"


def _geometric(values: Sequence[float]) -> float:
    return math.exp(float(np.mean(np.log(values))))


class Overload(NamedTuple):
    """Whether a server falls behind, and the sign of it."""

    overloaded: bool
    message: str


def overload(
    in_flight: Sequence[tuple[float, float]],
    ttft: Sequence[tuple[float, float]],
    confidence: float = 0.95,
    *,
    rate: float | None = None,
    least: float = 0.05,
) -> Overload:
    """Whether load outruns the server within a level: in-flight and TTFT both grow.

    Both slopes of ordinary least squares must be above zero by their one-sided t-test (Draper and Smith, Applied
    Regression Analysis, ch. 1), as guidellm's over-saturation detector asks of concurrency and TTFT.

    A server that completes the share u of what arrives lets in-flight grow by 1 - u of the rate, and TTFT by 1 - u
    seconds a second. Slopes below `least` of that are the wandering of any queue.

    Args:
        in_flight: (seconds, requests in flight).
        ttft: (seconds, TTFT in seconds), at send time.
        confidence: of each test.
        rate: arrivals a second, where they are to be measured against.
        least: the share of arrivals that must pile up, where the rate is known.
    """
    grows = {name: _grows(points, confidence) for name, points in (("in-flight", in_flight), ("TTFT", ttft))}
    if not all(grow is not None for grow in grows.values()):
        flat = " and ".join(name for name, grow in grows.items() if grow is None)
        return Overload(False, f"no overload: {flat} does not grow")
    rates = [grow for grow in grows.values() if grow is not None]
    if rate is not None and (rates[0] < least * rate or rates[1] < least):
        return Overload(False, f"no overload: less than {least:.0%} of what arrives piles up")
    message = f"overload: in-flight grows by {rates[0]:.2g} requests a second and TTFT by {rates[1]:.2g} s a second"
    return Overload(True, message)


def exhausted(levels: Sequence[tuple[int, float, float]], gain: float = 0.02) -> Overload:
    """Whether a sweep of closed levels may stop: the last two steps up bought less than `gain` and only raised TTFT.

    Args:
        levels: (concurrency, tok/s, median TTFT in seconds), ascending, those measured so far.
        gain: relative throughput that a step must buy to go on.
    """
    if len(levels) < 3:
        return Overload(False, "fewer than three levels")
    (_, first, early), (_, second, middle), (at, third, late) = levels[-3:]
    if max(second, third) < (1 + gain) * first and early < middle < late:
        message = f"no level since {levels[-3][0]} gained {gain:.0%}, and TTFT rose from {early:.2g} to {late:.2g} s"
        return Overload(True, f"saturated at C={at}: {message}")
    return Overload(False, "throughput still grows, or TTFT does not")


def _grows(points: Sequence[tuple[float, float]], confidence: float) -> float | None:
    """The slope where it is above zero with that confidence."""
    if len(points) < 5:
        return None
    times, values = zip(*points, strict=True)
    if len(set(values)) == 1 or len(set(times)) == 1:
        return None
    from scipy import stats  # noqa: PLC0415 - half a second, for those who ask about overload

    line = stats.linregress(times, values)
    if line.slope <= 0:
        return None
    certain = line.stderr == 0 or stats.t.sf(line.slope / line.stderr, len(points) - 2) < 1 - confidence
    return float(line.slope) if certain else None


def _levels(arm: Arm) -> list[int]:
    found = {
        cell.concurrency
        for launch in arm.launches
        for cell in launch.cells
        if cell.concurrency is not None and cell.key.startswith("c") and cell.usable and cell.values.get(PRIMARY)
    }
    return sorted(found)


def _table(arm: Arm, levels: Sequence[int]) -> "np.ndarray[tuple[int, int], np.dtype[np.float64]]":
    """Log throughput, one row for each launch that has all levels."""
    rows = []
    for launch in arm.launches:
        values = [
            cell.values.get(PRIMARY) if (cell := launch.cell(f"c{level}")) is not None and cell.usable else None
            for level in levels
        ]
        if all(values):
            rows.append([math.log(value) for value in values if value])
    return np.array(rows, dtype=np.float64).reshape(len(rows), len(levels))


def _bounds(values: "np.ndarray[tuple[int], np.dtype[np.float64]]", confidence: float) -> tuple[float, float]:
    bounds = interval(paired(values), confidence)
    return (bounds.low, bounds.high) if bounds else (-math.inf, math.inf)


def _usable(launch: Launch) -> list[Cell]:
    """A launch's cells with a throughput that may be compared."""
    return [cell for cell in launch.cells if cell.usable and cell.values.get(PRIMARY)]


def _peaks(arm: Arm, keys: Collection[str]) -> dict[int, float]:
    """Each block's best over some levels, in tok/s."""
    peaks: dict[int, float] = {}
    for launch in arm.launches:
        values = [cell.values[PRIMARY] for cell in _usable(launch) if cell.key in keys]
        if values:
            peaks[launch.block] = max([*values, peaks.get(launch.block, 0.0)])
    return peaks

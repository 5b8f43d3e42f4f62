"""Where an arm stops gaining from more load: the knee, the plateau, and when to stop a sweep."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from harness.stats.arms import PRIMARY, Arm
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
    """Both arms' plateaus: knees where there is a sweep, and the ratio of the best throughputs, base over treatment."""

    base: Knee | None
    treatment: Knee | None
    base_tok_s: float
    treatment_tok_s: float
    ratio: float
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
    """The plateaus of two arms: as published where a `saturation` row says so, else each launch's best level.

    None where either arm has no throughput at all.
    """
    one, other = _plateaus(base), _plateaus(treatment)
    if not one or not other:
        return None
    shared = sorted(one.keys() & other.keys())
    logs = [math.log(one[block] / other[block]) for block in shared]
    bounds = interval(paired(logs), confidence) if len(logs) > 1 else None
    left, right = (_geometric([arm[block] for block in shared or arm]) for arm in (one, other))
    knees = [knee(arm, confidence=confidence) for arm in (base, treatment)]
    spread = f" [{math.exp(bounds.low):.2f}, {math.exp(bounds.high):.2f}]" if bounds else ", no interval"
    parts = [_reached(arm, value, at) for arm, value, at in zip((base, treatment), (left, right), knees, strict=True)]
    return Saturation(
        base=knees[0],
        treatment=knees[1],
        base_tok_s=left,
        treatment_tok_s=right,
        ratio=left / right,
        interval=bounds.exp() if bounds else None,
        sentence=f"{parts[0]}, {parts[1]}: ratio {left / right:.2f}{spread}",
    )


def _reached(arm: Arm, value: float, at: Knee | None) -> str:
    """How an arm's plateau is said; a sweep that still climbs at its end has not shown one."""
    published = any(launch.cell("saturation") for launch in arm.launches)
    if published or (at is not None and not at.beyond):
        return f"`{arm.name}` saturates at {value:.0f} tok/s"
    return f"`{arm.name}` reaches {value:.0f} tok/s at its highest level"


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


def _plateaus(arm: Arm) -> dict[int, float]:
    """Each block's plateau, in tok/s."""
    plateaus: dict[int, float] = {}
    for launch in arm.launches:
        published = launch.cell("saturation")
        cells = [published] if published is not None else [cell for cell in launch.cells if cell.usable]
        values = [value for cell in cells if (value := cell.values.get(PRIMARY))]
        if values:
            plateaus[launch.block] = max([*values, plateaus.get(launch.block, 0.0)])
    return plateaus

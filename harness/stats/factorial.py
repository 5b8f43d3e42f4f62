"""Two factors at two levels each (stack x speculation): main effects and interaction on the log scale.

The four arms of a block give three orthogonal contrasts (Box, Hunter and Hunter, Statistics for Experimenters, ch. 5).
On the log scale an interaction of 0 means that the factors multiply: speculation gives the same ratio on both stacks.
"""

import math
from collections.abc import Mapping, Sequence

from harness.stats.arms import PRIMARY, Arm
from harness.stats.intervals import Contrast, Interval, interval, ordered, paired
from harness.stats.level import Stored

# Signs of the arms (low low, low high, high low, high high) in each contrast, and its divisor.
_CONTRASTS = {"first": ((-1, -1, 1, 1), 2), "second": ((-1, 1, -1, 1), 2), "interaction": ((1, -1, -1, 1), 1)}


class Effect(Stored):
    """One effect, as a ratio; an interaction is the ratio of two ratios. `interval` is None with one launch an arm.

    `p` is adjusted for the three effects of a level.
    """

    name: str
    ratio: float
    interval: Interval | None
    p: float | None
    sentence: str


class Factorial(Stored):
    """The effects at one level: the first factor's, the second's, and their interaction."""

    level: str
    launches: int
    effects: tuple[Effect, Effect, Effect]


def effects(
    arms: Mapping[tuple[str, str], Arm],
    factors: tuple[str, str],
    key: str,
    *,
    metric: str = PRIMARY,
    confidence: float = 0.95,
) -> Factorial | None:
    """Main effects and interaction of a 2x2 at one level.

    Args:
        arms: the four arms by (level of the first factor, level of the second), lower level first in each factor.
        factors: what the factors are called.
        key: the load level.
        metric: what is measured.
        confidence: of the intervals.

    Returns:
        None where no block has all four arms.

    Raises:
        ValueError: there are not two levels of each factor, or not all four arms.
    """
    firsts, seconds = (list(dict.fromkeys(names[side] for names in arms)) for side in (0, 1))
    if len(firsts) != 2 or len(seconds) != 2 or len(arms) != 4:
        raise ValueError(f"a 2x2 needs four arms, got {sorted(arms)}")
    corners = [_logs(arms[first, second], key, metric) for first in firsts for second in seconds]
    blocks = sorted(set.intersection(*(set(corner) for corner in corners)))
    if not blocks:
        return None
    contrasts = [_contrast(corners, blocks, *signs) for signs in _CONTRASTS.values()]
    names = (
        f"{factors[0]} ({firsts[1]} over {firsts[0]})",
        f"{factors[1]} ({seconds[1]} over {seconds[0]})",
        f"{factors[0]} x {factors[1]}",
    )
    made = [
        _effect(name, contrast, p, confidence)
        for name, contrast, p in zip(names, contrasts, ordered(contrasts, [0.5, 0.5, 1.0]), strict=True)
    ]
    return Factorial(level=key, launches=len(blocks), effects=(made[0], made[1], made[2]))


def _contrast(
    corners: Sequence[Mapping[int, float]], blocks: Sequence[int], signs: Sequence[int], over: int
) -> Contrast:
    return paired(
        [sum(sign * corner[block] for sign, corner in zip(signs, corners, strict=True)) / over for block in blocks]
    )


def _effect(name: str, contrast: Contrast, p: float | None, confidence: float) -> Effect:
    ratio, bounds = math.exp(contrast.mean), interval(contrast, confidence)
    limits = bounds.exp() if bounds else None
    said = f"[{limits.low:.3f}, {limits.high:.3f}]" if limits else "no interval (1 launch an arm)"
    return Effect(name=name, ratio=ratio, interval=limits, p=p, sentence=f"{name}: x {ratio:.3f} {said}")


def _logs(arm: Arm, key: str, metric: str) -> dict[int, float]:
    return {
        launch.block: math.log(value)
        for launch, cell in arm.cells(key)
        if (value := cell.values.get(metric)) is not None and value > 0
    }

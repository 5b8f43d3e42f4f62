"""The serial mode and the closed loop at C=1 are one experiment: a disagreement is a finding, never an average.

A closed loop with one slot sends a request, waits for its end, and sends the next: that is what a serial script does.
(That a level's counts of its own tokens agree is judged with the level, in `validity`.)
"""

import math

from harness.stats.arms import PRIMARY, Arm
from harness.stats.intervals import Contrast, equivalent, interval, paired, unpaired
from harness.stats.level import Stored


class SerialCheck(Stored):
    """The serial mode against the closed loop at C=1, for one arm. `agree` is None where it cannot be told."""

    arm: str
    serial: float
    closed: float
    ratio: float
    agree: bool | None
    message: str


def serial_against_closed(arm: Arm, margin: float = 0.02, confidence: float = 0.95) -> SerialCheck | None:
    """Whether an arm's serial run and its closed loop at C=1 measured the same server.

    They disagree when the interval of their ratio excludes 1 and the ratio is outside the margin; with one launch, when
    the ratio is outside the margin. They agree when they are equivalent within it.

    Args:
        arm: an arm that has both; else the answer is None.
        margin: how far apart they may be.
        confidence: of the interval.
    """
    serial, closed = (_by_launch(arm, key) for key in ("serial", "c1"))
    if not serial or not closed:
        return None
    shared = sorted(serial.keys() & closed.keys())
    one = [math.log(closed[launch]) for launch in shared or sorted(closed)]
    other = [math.log(serial[launch]) for launch in shared or sorted(serial)]
    contrast = paired([b - a for a, b in zip(one, other, strict=True)]) if shared else unpaired(one, other)
    return _serial_check(arm.name, sum(one) / len(one), sum(other) / len(other), contrast, margin, confidence)


def _by_launch(arm: Arm, key: str) -> dict[str, float]:
    return {launch.launch: value for launch, cell in arm.cells(key) if (value := cell.values.get(PRIMARY))}


def _serial_check(
    arm: str, closed_log: float, serial_log: float, contrast: Contrast, margin: float, confidence: float
) -> SerialCheck:
    closed, serial = math.exp(closed_log), math.exp(serial_log)
    bounds = interval(contrast, confidence)
    outside = abs(contrast.mean) > math.log1p(margin)
    certain = bounds is None or not bounds.low <= 0 <= bounds.high
    agree = False if outside and certain else True if equivalent(contrast, margin) or not outside else None
    figures = f"`{arm}`: {serial:.1f} tok/s in the serial run, {closed:.1f} at C=1 ({serial / closed - 1:+.1%})"
    text = {
        False: "the same experiment gives two answers, so one of the two mis-measured",
        True: "they agree",
        None: "whether they agree is not resolved",
    }[agree]
    return SerialCheck(
        arm=arm, serial=serial, closed=closed, ratio=serial / closed, agree=agree, message=f"{figures}: {text}"
    )

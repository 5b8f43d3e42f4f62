"""Where one arm stops being better than the other: an interval over concurrency, or an honest "not resolved".

The log ratio is taken as piecewise linear over log concurrency. A concurrency belongs to the interval when the same
t-test that judges a level cannot tell the interpolated ratio there from 1: the confidence set of a root by inverting
the test (Fieller, J. R. Stat. Soc. B 16 (1954) 175-185, for the root of a line; here segment by segment). Unlike a
bootstrap of the root it needs no more launches than the t-test does. A crossover is claimed only between two levels
whose verdicts are opposite, so the guarantee for the whole table covers it, and never outside the measured range.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from harness.stats.intervals import Contrast, interval, paired, unpaired, with_floor
from harness.stats.level import Stored

GRID = 400  # points a segment between two levels; the interval's ends are that fine

State = Literal[
    "crossover",
    "treatment everywhere",
    "base everywhere",
    "equivalent everywhere",
    "not resolved",
    "nothing comparable",
]


class Crossing(Stored):
    """One change of sign: `at` the point estimate, `low` and `high` the interval, `between` the two claimed levels."""

    below: str
    above: str
    between: tuple[int, int]
    at: float | None
    low: float | None = None
    high: float | None = None
    confidence: float | None = None


class Crossover(Stored):
    """Which arm is better where. `sentence` says it all; `crossings` are in the order of concurrency.

    `unresolved` holds the ranges of levels, first and last, about which nothing is claimed.
    """

    state: State
    sentence: str
    crossings: tuple[Crossing, ...] = ()
    unresolved: tuple[tuple[str, str], ...] = ()


class Claim(NamedTuple):
    """What a comparison says of one level: the row's verdict, and which arm the point estimate favours."""

    label: str
    concurrency: int | None
    verdict: str
    direction: str | None
    interval: bool


@dataclass(frozen=True, slots=True)
class Curve:
    """Logarithms of the metric over concurrency.

    Attributes:
        levels: concurrencies, ascending (L of them).
        base: one row a launch, one column a level; NaN where a launch has no such level.
        treatment: likewise.
        paired: row i of both arms ran next to each other.
        floor: spread and degrees of freedom of an A/A run, for arms of one launch.
    """

    levels: tuple[int, ...]
    base: NDArray[np.float64]
    treatment: NDArray[np.float64]
    paired: bool = True
    floor: tuple[float, float] | None = None

    def at(self, concurrency: float) -> Contrast | None:
        """The contrast at a concurrency between the lowest and the highest level; None where no launch covers it."""
        contrast = self._contrast(concurrency)
        if contrast is not None and contrast.error is None and self.floor is not None:
            return with_floor(contrast, *self.floor)
        return contrast

    def _contrast(self, concurrency: float) -> Contrast | None:
        weights = self._weights(concurrency)
        base, treatment = _project(self.base, weights), _project(self.treatment, weights)
        if self.paired:
            differences = treatment - base
            differences = differences[np.isfinite(differences)]
            return paired(differences) if len(differences) else None
        base, treatment = base[np.isfinite(base)], treatment[np.isfinite(treatment)]
        return unpaired(base, treatment) if len(base) and len(treatment) else None

    def _weights(self, concurrency: float) -> dict[int, float]:
        logs = np.log(self.levels)
        place = float(np.interp(math.log(concurrency), logs, np.arange(len(logs))))
        left = min(int(place), len(logs) - 1)
        share = place - left
        return {left: 1.0} if share == 0 else {left: 1 - share, left + 1: share}


def find(claims: Sequence[Claim], curve: Curve, *, base: str, treatment: str, confidence: float = 0.95) -> Crossover:
    """Where the better arm changes.

    Args:
        claims: one a level, in the order of load; levels without a concurrency (saturation) come last.
        curve: the metric of both arms over concurrency.
        base: the base arm's name.
        treatment: the treatment arm's name.
        confidence: of the crossing's interval.
    """
    known = [claim for claim in claims if claim.verdict != "not comparable"]
    if not known:
        return Crossover(state="nothing comparable", sentence="no level can be compared")
    if not any(claim.interval for claim in known):
        return _without_intervals(known, base, treatment)
    crossings = tuple(_crossing(one, other, curve, (base, treatment), confidence) for one, other in _opposites(known))
    state: State = "crossover" if crossings else _everywhere(known)
    sentence = _sentence(known, crossings, _words(base, treatment), whole=len(known) == len(claims))
    return Crossover(state=state, sentence=sentence, crossings=crossings, unresolved=_unresolved(known))


def _opposites(claims: Sequence[Claim]) -> list[tuple[Claim, Claim]]:
    """Neighbours among the levels that claim a difference from an interval, whose claims are opposite."""
    sides = {"better", "worse"}
    decided = [claim for claim in claims if claim.verdict in sides and claim.interval and claim.concurrency is not None]
    return [(one, other) for one, other in pairwise(decided) if one.verdict != other.verdict]


def _crossing(one: Claim, other: Claim, curve: Curve, names: tuple[str, str], confidence: float) -> Crossing:
    base, treatment = names
    falls = one.verdict == "better"
    below, above = (treatment, base) if falls else (base, treatment)
    left, right = int(one.concurrency or 0), int(other.concurrency or 0)
    mean, lower, upper = _trace(curve, left, right, 1.0 if falls else -1.0, confidence)
    return Crossing(
        below=below,
        above=above,
        between=(left, right),
        at=_first_below(mean),
        low=_first_below(lower),
        high=_first_below([(point, -value) for point, value in reversed(upper)]),
        confidence=confidence,
    )


Trace = Sequence[tuple[float, float]]


def _trace(curve: Curve, left: int, right: int, sign: float, confidence: float) -> tuple[Trace, Trace, Trace]:
    """Mean, lower and upper bound of the log ratio from one level to another, turned so that it falls."""
    mean, lower, upper = [], [], []
    for point in np.geomspace(left, right, GRID).tolist():
        contrast = curve.at(point)
        bounds = interval(contrast, confidence) if contrast else None
        if contrast is None or bounds is None:
            continue
        ends = sorted((sign * bounds.low, sign * bounds.high))
        mean.append((point, sign * contrast.mean))
        lower.append((point, ends[0]))
        upper.append((point, ends[1]))
    return mean, lower, upper


def _first_below(trace: Trace) -> float | None:
    """Where a trace that starts above zero first falls to it, interpolated in log concurrency."""
    for (left, one), (right, other) in pairwise(trace):
        if one >= 0 >= other and one != other:
            return float(left * (right / left) ** (one / (one - other)))
    return None


def _everywhere(claims: Sequence[Claim]) -> State:
    verdicts = {claim.verdict for claim in claims}
    if verdicts == {"better"}:
        return "treatment everywhere"
    if verdicts == {"worse"}:
        return "base everywhere"
    return "equivalent everywhere" if verdicts == {"equivalent"} else "not resolved"


def _sentence(claims: Sequence[Claim], crossings: Sequence[Crossing], words: Mapping[str, str], *, whole: bool) -> str:
    """The zones of equal verdict, in words; a crossing replaces the zones that it separates.

    Zones that rest on one launch an arm, beside others that have intervals, say so.
    """
    if len(crossings) == 1 and _clean(claims):
        crossing = crossings[0]
        return f"`{crossing.below}` better below {_bounds(crossing)}, `{crossing.above}` above"
    zones = [part for zone in _zones(claims) for part in _by_interval(zone)]
    if len(zones) == 1 and len(zones[0][1]) > 1:
        [(verdict, zone)] = zones
        which = "any" if verdict == "unresolved" else "every"
        return f"{words[verdict]} at {which} {'' if whole else 'comparable '}level {_range(zone)}"
    parts = [f"{words[verdict]} {_where(zone)}{_rests(zone)}" for verdict, zone in zones]
    parts += [f"the sign changes at {_bounds(crossing)}" for crossing in crossings]
    return "; ".join(parts)


def _by_interval(zone: tuple[str, list[Claim]]) -> list[tuple[str, list[Claim]]]:
    """A zone in parts with an interval and without; what is not resolved stays one."""
    verdict, claims = zone
    if verdict == "unresolved":
        return [zone]
    return [(verdict, list(part)) for _, part in groupby(claims, key=lambda claim: claim.interval)]


def _rests(zone: Sequence[Claim]) -> str:
    return "" if zone[0].interval or zone[0].verdict == "unresolved" else " by point estimate"


def _clean(claims: Sequence[Claim]) -> bool:
    """Whether the levels fall into one zone, an undecided gap at most, and the opposite zone, all with intervals."""
    if any(_rests([claim]) for claim in claims):
        return False
    verdicts = [verdict for verdict, _ in groupby(claims, key=lambda claim: claim.verdict)]
    decided = [verdict for verdict in verdicts if verdict in {"better", "worse"}]
    return len(decided) == 2 and verdicts[0] in {"better", "worse"} and verdicts[-1] in {"better", "worse"}


def _without_intervals(claims: Sequence[Claim], base: str, treatment: str) -> Crossover:
    """What point estimates alone can say: a side where the row claims one, never an interval."""
    limit = "1 launch an arm, so no interval is possible"
    zones = _zones(claims)
    if len(zones) == 1 and (len(claims) > 1 or zones[0][0] != "unresolved"):
        [(verdict, zone)] = zones
        which, seen = ("any", "") if verdict == "unresolved" else ("every", " by point estimate, no crossover seen")
        sentence = f"{_words(base, treatment)[verdict]} at {which} shared level {_range(zone)}{seen}"
    else:
        parts = [f"{_words(base, treatment)[verdict]} {_where(zone)}" for verdict, zone in zones]
        if decided := [place for place, (verdict, _) in enumerate(zones) if verdict != "unresolved"]:
            parts[decided[-1]] += " by point estimate"
        sentence = "; ".join(parts)
    return Crossover(state=_everywhere(claims), sentence=f"{sentence}; {limit}", unresolved=_unresolved(claims))


def _words(base: str, treatment: str) -> dict[str, str]:
    """Verdicts on the treatment, as a sentence says them."""
    return {
        "better": f"`{treatment}` better",
        "worse": f"`{base}` better",
        "equivalent": "equivalent",
        "unresolved": "not resolved",
    }


def _zones(claims: Sequence[Claim]) -> list[tuple[str, list[Claim]]]:
    """Neighbouring levels of one verdict."""
    return [(verdict, list(zone)) for verdict, zone in groupby(claims, key=lambda claim: claim.verdict)]


def _unresolved(claims: Sequence[Claim]) -> tuple[tuple[str, str], ...]:
    return tuple((zone[0].label, zone[-1].label) for verdict, zone in _zones(claims) if verdict == "unresolved")


def _bounds(crossing: Crossing) -> str:
    if crossing.at is None:
        return f"{crossing.between[0]}..{crossing.between[1]}"
    if crossing.low is None or crossing.high is None:
        return f"{crossing.at:.3g}"
    return f"{crossing.at:.3g} [{crossing.low:.3g}, {crossing.high:.3g}]"


def _range(zone: Sequence[Claim]) -> str:
    numbered = [claim.label for claim in zone if claim.concurrency is not None]
    others = [claim.label for claim in zone if claim.concurrency is None]
    spans = [numbered[0] if len(numbered) == 1 else f"{numbered[0]}..{numbered[-1]}"] if numbered else []
    return " and ".join(spans + others)


def _where(zone: Sequence[Claim]) -> str:
    if len(zone) == 1:
        return f"at {zone[0].label}"
    if len(zone) == 2 and all(claim.verdict == "unresolved" for claim in zone):
        return f"between {zone[0].label} and {zone[1].label}"
    return f"at {_range(zone)}"


def _project(rows: NDArray[np.float64], weights: dict[int, float]) -> NDArray[np.float64]:
    """Each launch's value as the weighted sum of the levels that matter; NaN where one of these is missing."""
    total = np.zeros(len(rows))
    for column, weight in weights.items():
        total = total + weight * rows[:, column]
    return total

"""Intervals and tests for the log ratio of two arms, with the server launch as the unit.

Everything starts from a `Contrast`: the mean log ratio, its standard error, and how many degrees of freedom that error
has. On the log scale a ratio and its inverse are equally far from none, and block effects that multiply cancel.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from harness.stats.level import Stored

Values = Sequence[float] | NDArray[np.float64]

MOST_LAUNCHES = 50  # more launches an arm than anybody runs: planning stops here


class Interval(Stored):
    """A confidence interval; `method` says how it was made."""

    low: float
    high: float
    confidence: float
    method: str

    def exp(self) -> "Interval":
        """The interval of a ratio, from that of its logarithm."""
        return self.model_copy(update={"low": math.exp(self.low), "high": math.exp(self.high)})


class Contrast(NamedTuple):
    """A mean log ratio (treatment over base) and what is known of its error.

    Attributes:
        mean: mean of the log ratio.
        error: its standard error; None when one launch an arm leaves it unknown.
        freedom: degrees of freedom of `error`.
        launches: launches an arm (the smaller arm's), or pairs.
        energy: sum of squares about no difference: large for a large effect or a large spread. Orders the levels.
        method: how it was made, in words.
    """

    mean: float
    error: float | None
    freedom: float
    launches: int
    energy: float
    method: str

    @property
    def spread(self) -> float | None:
        """Standard deviation of one pair's log ratio."""
        return None if self.error is None else self.error * math.sqrt(self.launches)


def paired(differences: Values) -> Contrast:
    """Log ratios of pairs of neighbouring launches (one a block): the one-sample Student t (Biometrika 6, 1908)."""
    values = np.asarray(differences, dtype=float)
    count, mean = len(values), float(values.mean())
    error = float(values.std(ddof=1) / math.sqrt(count)) if count > 1 else None
    return Contrast(mean, error, count - 1, count, float(values @ values), f"Student t over {count} launch pairs")


def unpaired(base: Values, treatment: Values) -> Contrast:
    """Log means of launches that ran at different times: Welch's t (Biometrika 34, 1947), Satterthwaite's freedom."""
    one, other = np.asarray(base, dtype=float), np.asarray(treatment, dtype=float)
    mean = float(other.mean() - one.mean())
    pooled = np.concatenate([one, other])
    energy = float(((pooled - pooled.mean()) ** 2).sum())
    launches = min(len(one), len(other))
    method = f"Welch t over {len(one)} and {len(other)} launches, not paired"
    if launches < 2:
        return Contrast(mean, None, 0, launches, energy, method)
    parts = np.array([one.var(ddof=1) / len(one), other.var(ddof=1) / len(other)])
    weights = np.array([len(one) - 1, len(other) - 1])
    variance = float(parts.sum())
    freedom = variance**2 / float((parts**2 / weights).sum()) if variance else float(weights.sum())
    return Contrast(mean, math.sqrt(variance), freedom, launches, energy, method)


def with_floor(contrast: Contrast, spread: float, freedom: float) -> Contrast:
    """A contrast without an error of its own, given the spread of identical arms (A/A) on the same machine.

    Args:
        contrast: of one launch an arm.
        spread: standard deviation of the log ratio of one pair of identical launches.
        freedom: how many degrees of freedom that spread was estimated with.
    """
    error = spread / math.sqrt(max(1, contrast.launches))
    return contrast._replace(error=error, freedom=freedom, method="Student t with the spread of an A/A run")


def interval(contrast: Contrast, confidence: float = 0.95) -> Interval | None:
    """Student's interval for the mean log ratio; None where its error is not known."""
    if contrast.error is None:
        return None
    half = float(stats.t.ppf((1 + confidence) / 2, contrast.freedom)) * contrast.error
    return Interval(low=contrast.mean - half, high=contrast.mean + half, confidence=confidence, method=contrast.method)


def p_value(contrast: Contrast) -> float | None:
    """Two-sided p of no difference; None where the error is not known."""
    if contrast.error is None:
        return None
    if contrast.error == 0:
        return 1.0 if contrast.mean == 0 else 0.0
    return float(2 * stats.t.sf(abs(contrast.mean) / contrast.error, contrast.freedom))


def equivalent(contrast: Contrast, margin: float, alpha: float = 0.05) -> bool:
    """Whether the two arms are the same to within a margin: two one-sided tests.

    Args:
        contrast: the log ratio.
        margin: as a share, 0.02 for 2 %; symmetric on the log scale.
        alpha: size of each test. Schuirmann, J. Pharmacokinet. Biopharm. 15 (1987): both tests reject exactly when the
            1 - 2 alpha interval lies inside the margin.
    """
    inner = interval(contrast, 1 - 2 * alpha)
    limit = math.log1p(margin)
    return inner is not None and -limit < inner.low and inner.high < limit


def launches_needed(effect: float, spread: float, margin: float, *, alpha: float = 0.05, power: float = 0.8) -> int:
    """Launches an arm after which a level would probably be settled, if effect and spread are what they seem.

    Args:
        effect: log ratio.
        spread: standard deviation of one pair's log ratio.
        margin: the equivalence margin as a share.
        alpha: size of the test.
        power: the chance of settling it.

    Returns:
        The fewest pairs (2 at least, `MOST_LAUNCHES` at most) with which either the t-test finds the difference or
        the two one-sided tests find none, each with the chance `power`. Power of t from the noncentral t
        (Johnson, Kotz and Balakrishnan, Continuous Univariate Distributions 2, ch. 31).
    """
    limit = math.log1p(margin)
    for count in range(2, MOST_LAUNCHES + 1):
        error = spread / math.sqrt(count)
        if error == 0 or max(_power(effect, error, count - 1, alpha), _same(effect, error, count - 1, limit)) >= power:
            return count
    return MOST_LAUNCHES


def _power(effect: float, error: float, freedom: int, alpha: float) -> float:
    """Chance that the two-sided t-test rejects."""
    critical, shift = stats.t.ppf(1 - alpha / 2, freedom), abs(effect) / error
    if shift > 30:  # the noncentral t loses its digits there, and the answer is 1 for all but the widest t
        return 1.0 if shift > 2 * critical else 0.0
    return float(stats.nct.sf(critical, freedom, shift))


def _same(effect: float, error: float, freedom: int, limit: float) -> float:
    """Chance that both one-sided tests reject: the mean must fall within the margin less the half width."""
    room = limit - float(stats.t.ppf(0.95, freedom)) * error
    if room <= 0:
        return 0.0
    return float(stats.norm.cdf((room - effect) / error) - stats.norm.cdf((-room - effect) / error))


def ordered(contrasts: Sequence[Contrast], scales: Sequence[float] | None = None) -> list[float | None]:
    """P-values adjusted so that a whole table of levels makes one false claim with the chance alpha, not one each.

    The levels are tested in the order of their sum of squares, each at full size, until the first that is not
    significant: Kropf and Läuter, Biometrical Journal 44 (2002) 789-800. Given the sum of squares the t statistic
    keeps its distribution, so the chance of any false claim is exactly alpha for normal errors, whatever the
    correlation between the levels of a launch (and they are correlated: they share it), and down to two launches an
    arm, where neither a permutation nor a bootstrap has enough arrangements to reach 5 %.

    Args:
        contrasts: one a level.
        scales: the standard deviation to divide each level by before ordering, from data independent of the
            launches' means (the spread within a launch), so that a noisy level does not bar the way. All 1 if None.

    Returns:
        The running largest p in that order, one a level; None where a level has no error.
    """
    weights = np.ones(len(contrasts)) if scales is None else np.asarray(scales, dtype=float)
    energies = [contrast.energy / weight**2 for contrast, weight in zip(contrasts, weights, strict=True)]
    adjusted: list[float | None] = [None] * len(contrasts)
    largest = 0.0
    for index in sorted(range(len(contrasts)), key=lambda index: -energies[index]):
        if (p := p_value(contrasts[index])) is not None:
            largest = max(largest, p)
            adjusted[index] = largest
    return adjusted

"""Intervals and tests for the log ratio of two arms, with the server launch as the unit.

Everything starts from a `Contrast`: the mean log ratio, its standard error, and how many degrees of freedom that error
has. On the log scale a ratio and its inverse are equally far from none, and block effects that multiply cancel.
"""

import math
from collections.abc import Sequence
from types import ModuleType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

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


def _special() -> ModuleType:
    from scipy import special  # noqa: PLC0415 - a third of a second, which a level that needs no test need not wait for

    return special


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
    half = float(_special().stdtrit(contrast.freedom, (1 + confidence) / 2)) * contrast.error
    return Interval(low=contrast.mean - half, high=contrast.mean + half, confidence=confidence, method=contrast.method)


def p_value(contrast: Contrast) -> float | None:
    """Two-sided p of no difference; None where the error is not known."""
    if contrast.error is None:
        return None
    if contrast.error == 0:
        return 1.0 if contrast.mean == 0 else 0.0
    return float(2 * _special().stdtr(contrast.freedom, -abs(contrast.mean) / contrast.error))


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
    if spread == 0:
        return 2
    counts = np.arange(2, MOST_LAUNCHES + 1, dtype=np.float64)
    error: NDArray[np.float64] = spread / np.sqrt(counts)
    differs = _differs(abs(effect) / error, counts - 1, alpha)
    same = _same(effect, error, counts - 1, math.log1p(margin), alpha)
    settled = np.maximum(differs, same) >= power
    return int(counts[settled.argmax()]) if settled.any() else MOST_LAUNCHES


def _differs(shift: NDArray[np.float64], freedom: NDArray[np.float64], alpha: float) -> NDArray[np.float64]:
    """Chance that the t-test rejects on the side of the effect; `shift` is the effect in standard errors."""
    critical = _special().stdtrit(freedom, 1 - alpha / 2)
    # Beyond 30 the noncentral t loses its digits, and whether the shift clears the quantile decides by itself.
    known: NDArray[np.float64] = 1 - _special().nctdtr(freedom, np.minimum(shift, 30.0), critical)
    return np.where(shift > 30, (shift > 2 * critical).astype(float), known)


def _same(
    effect: float, error: NDArray[np.float64], freedom: NDArray[np.float64], limit: float, alpha: float
) -> NDArray[np.float64]:
    """Chance that both one-sided tests reject: the mean must fall within the margin less the half width."""
    room = limit - _special().stdtrit(freedom, 1 - alpha) * error
    inside: NDArray[np.float64] = _special().ndtr((room - effect) / error) - _special().ndtr((-room - effect) / error)
    return np.where(room > 0, inside, 0.0)


def ordered(contrasts: Sequence[Contrast], scales: Sequence[float] | None = None) -> list[float | None]:
    """P-values adjusted so that a whole table of levels makes one false claim with the chance alpha, not one each.

    The levels are tested in the order of their sum of squares, each at full size, until the first that is not
    significant: Kropf and Läuter, Biometrical Journal 44 (2002) 789-800. Given the sum of squares the t statistic
    keeps its distribution, so the chance of any false claim is exactly alpha for normal errors, whatever the
    correlation between the levels of a launch (and they are correlated: they share it), and down to two launches an
    arm, where neither a permutation nor a bootstrap has enough arrangements to reach 5 %. The price: a level that is
    both noisy and far from 0 comes early, and holds up the levels behind it until it is certain.

    Args:
        contrasts: one a level.
        scales: how the contrasts' standard deviations relate by design (an interaction's is twice a main effect's), to
            be divided out before ordering. All 1 if None. It must not come from the same launches.

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


def resample(
    base: Sequence[Values], treatment: Sequence[Values], *, confidence: float = 0.95, draws: int = 2000, seed: int = 0
) -> Interval:
    """Hierarchical bootstrap of the log ratio: pairs of launches, then the slices within each, with replacement.

    Davison and Hinkley, Bootstrap Methods and their Application (1997), 3.8; percentile interval. With few launches it
    is too narrow (`docs/verdicts.md` shows how much), so verdicts do not rest on it. With one launch an arm it says how
    far the numbers move within that launch, which a second launch may exceed.

    Args:
        base: for each launch the metric in equal time slices, or by request.
        treatment: likewise; launch i ran next to the base's launch i.
        confidence: of the interval.
        draws: how often to resample.
        seed: of the draws.
    """
    source = np.random.default_rng(seed)
    pairs = [
        (np.asarray(one, dtype=float), np.asarray(other, dtype=float))
        for one, other in zip(base, treatment, strict=True)
    ]
    # Slice means of every launch in every draw, then launches drawn from those.
    ratios = np.stack([_slice_means(other, draws, source) - _slice_means(one, draws, source) for one, other in pairs])
    chosen = source.integers(0, len(pairs), (len(pairs), draws))
    means = np.take_along_axis(ratios, chosen, axis=0).mean(axis=0)
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
    method = f"hierarchical bootstrap over {len(pairs)} launch pairs and their slices"
    return Interval(low=float(low), high=float(high), confidence=confidence, method=method)


def _slice_means(values: NDArray[np.float64], draws: int, source: np.random.Generator) -> NDArray[np.float64]:
    drawn = values[source.integers(0, len(values), (len(values), draws))]
    return np.asarray(np.log(drawn.mean(axis=0)), dtype=np.float64)

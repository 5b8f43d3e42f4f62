"""Percentiles with distribution-free bounds, and the sample sizes below which there is none to show.

The number of samples below the true p-quantile is binomial(n, p) whatever the distribution, so order statistics bound
the quantile (Thompson, Annals of Mathematical Statistics 7 (1936); David and Nagaraja, Order Statistics, 7.1). The
bound on how few samples allow a percentile is the early-stopping rule of MLPerf LoadGen as mlcommons/endpoints applies
it: the estimate must survive with at least one sample above it discarded.
"""

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Bounded(NamedTuple):
    """A sample percentile between two order statistics; an end is None where the sample has none that far out."""

    value: float
    low: float | None
    high: float | None


@cache
def fewest(percentile: float, confidence: float = 0.99) -> int:
    """Fewest samples with which a percentile may be shown.

    The smallest n with P(binomial(n, 1 - p) <= 1) <= 1 - confidence: then, with that confidence, at least two of n
    samples lie above the true p-quantile, so that the second largest is an upper bound that one stray cannot set.
    For p = confidence = 0.99 it is 662: 0.99^662 + 662 * 0.01 * 0.99^661 = 0.99^661 (0.99 + 6.62) = 0.009914, and one
    sample fewer gives 0.010001. p90 needs 64, p50 needs 11.

    Args:
        percentile: as a share, 0.99 for p99.
        confidence: as a share.
    """
    below, count = percentile, 2
    while below**count + count * (1 - below) * below ** (count - 1) > 1 - confidence:
        count += 1
    return count


def supports(count: int, percentile: float, confidence: float = 0.99) -> bool:
    """Whether a sample of that size may show that percentile."""
    return count >= fewest(percentile, confidence)


def bounded(values: Sequence[float] | NDArray[np.float64], percentile: float, confidence: float = 0.95) -> Bounded:
    """A percentile (linear interpolation, numpy's default) and the order statistics that bound the true one.

    Args:
        values: the sample, any order.
        percentile: as a share.
        confidence: of the pair of bounds; each side takes half of what is left.

    Raises:
        ValueError: the sample is empty.
    """
    if not len(values):
        raise ValueError("no percentile of nothing")
    ranked = np.sort(np.asarray(values, dtype=float))
    count, tail = len(ranked), (1 - confidence) / 2
    # X_(r) lies above the quantile exactly when fewer than r samples lie below it.
    chances = _at_most(count, percentile)
    low = int(np.searchsorted(chances, tail))
    while low > 0 and chances[low - 1] > tail:
        low -= 1
    high = int(np.searchsorted(chances, 1 - tail)) + 1
    return Bounded(
        value=float(np.quantile(ranked, percentile)),
        low=float(ranked[low - 1]) if low >= 1 else None,
        high=float(ranked[high - 1]) if high <= count else None,
    )


def why_not(count: int, percentile: float, confidence: float = 0.99) -> str | None:
    """Why a percentile is not shown, as a reader's sentence; None where it is."""
    needed = fewest(percentile, confidence)
    if count >= needed:
        return None
    return f"p{percentile * 100:g} needs {needed} samples, there are {count}"


def _at_most(count: int, chance: float) -> NDArray[np.float64]:
    """P(binomial(count, chance) <= k) for k from 0 to count.

    By the ratio of neighbouring terms, (count - k) / (k + 1) * chance / (1 - chance), from the largest one outwards.
    `scipy.special.bdtr` says the same to nine digits and more; importing it takes longer than a request.
    """
    k = np.arange(count)
    steps = np.log((count - k) / (k + 1) * (chance / (1 - chance)))
    peak = min(int((count + 1) * chance), count)
    below, above = -np.cumsum(steps[:peak][::-1])[::-1], np.cumsum(steps[peak:])
    terms = np.exp(np.concatenate([below, [0.0], above]))
    return np.asarray(np.cumsum(terms) / terms.sum())

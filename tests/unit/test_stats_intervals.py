"""Intervals, tests and launch planning against scipy and simulation."""

import math

import numpy as np
import pytest
from scipy import stats

from harness.stats.intervals import (
    MOST_LAUNCHES,
    equivalent,
    interval,
    launches_needed,
    ordered,
    p_value,
    paired,
    resample,
    unpaired,
    with_floor,
)

SAMPLE = [0.031, 0.052, 0.044, 0.017, 0.049]


def test_a_paired_contrast_is_the_one_sample_t_test():
    contrast, expected = paired(SAMPLE), stats.ttest_1samp(SAMPLE, 0)
    assert p_value(contrast) == pytest.approx(expected.pvalue)
    bounds = interval(contrast, 0.9)
    assert (bounds.low, bounds.high) == pytest.approx(tuple(expected.confidence_interval(0.9)))


def test_an_unpaired_contrast_is_welchs_t_test():
    other = [0.011, 0.009, 0.028]
    contrast, expected = unpaired(other, SAMPLE), stats.ttest_ind(SAMPLE, other, equal_var=False)
    assert p_value(contrast) == pytest.approx(expected.pvalue)
    assert contrast.freedom == pytest.approx(expected.df)


def test_one_launch_has_no_error_no_interval_and_no_p():
    contrast = paired([0.05])
    assert (contrast.error, interval(contrast), p_value(contrast)) == (None, None, None)
    assert not equivalent(contrast, 0.5)


def test_a_noise_floor_lends_its_spread_and_its_degrees_of_freedom():
    contrast = with_floor(paired([0.05]), spread=0.02, freedom=3)
    assert p_value(contrast) == pytest.approx(2 * stats.t.sf(2.5, 3))


def test_identical_launches_leave_no_doubt():
    assert p_value(paired([0.1, 0.1, 0.1])) == pytest.approx(0, abs=1e-12)
    assert p_value(paired([0.0, 0.0])) == 1.0


def test_equivalence_is_two_one_sided_t_tests():
    values, limit = [0.004, -0.006, 0.009, 0.001], math.log(1.02)
    lower = stats.ttest_1samp(values, -limit, alternative="greater").pvalue
    upper = stats.ttest_1samp(values, limit, alternative="less").pvalue
    assert equivalent(paired(values), 0.02) is bool(max(lower, upper) < 0.05) is True
    shifted = [value + 0.012 for value in values]
    assert stats.ttest_1samp(shifted, limit, alternative="less").pvalue > 0.05
    assert not equivalent(paired(shifted), 0.02)


@pytest.mark.parametrize("effect", [0.05, 0.02])
def test_the_launches_asked_for_give_eighty_percent_power_and_one_fewer_does_not(effect):
    spread, needed = 0.016, launches_needed(effect, 0.016, margin=1e-9)
    source = np.random.default_rng(3)

    def power(launches):
        draws = source.normal(effect, spread, (launches, 20_000))
        return (stats.ttest_1samp(draws, 0).pvalue < 0.05).mean()

    assert power(needed) > 0.79
    assert power(needed - 1) < 0.81


def test_a_difference_too_small_to_find_and_too_large_to_dismiss_asks_for_the_most():
    assert launches_needed(math.log(1.02), 0.05, margin=0.02) == MOST_LAUNCHES


def test_no_difference_is_settled_by_equivalence():
    assert launches_needed(0.0, 0.01, margin=0.02) < launches_needed(0.0, 0.02, margin=0.02) < MOST_LAUNCHES


def test_a_table_is_tested_in_the_order_of_energy_and_stops_at_the_first_that_is_not_significant():
    large, noisy, small = [0.50, 0.51, 0.49], [0.3, -0.3, 0.2], [0.0401, 0.0402, 0.0400]
    p = {
        name: stats.ttest_1samp(values, 0).pvalue
        for name, values in (("large", large), ("noisy", noisy), ("small", small))
    }
    assert p["small"] < 0.001 < p["noisy"]
    assert ordered([paired(small), paired(noisy), paired(large)]) == pytest.approx([p["noisy"], p["noisy"], p["large"]])


def test_known_spreads_put_a_noisy_level_behind():
    noisy, small = [0.3, -0.3, 0.2], [0.0401, 0.0402, 0.0400]
    adjusted = ordered([paired(small), paired(noisy)], scales=[0.001, 0.1])
    assert adjusted[0] == pytest.approx(stats.ttest_1samp(small, 0).pvalue)


def test_a_level_of_one_launch_has_no_p_and_bars_nobody():
    assert ordered([paired([5.0]), paired([0.1, 0.1001])])[0] is None
    assert ordered([paired([5.0]), paired([0.1, 0.1001])])[1] < 0.01


def test_the_hierarchical_bootstrap_of_many_launches_approaches_students_interval():
    source = np.random.default_rng(1)
    base = [np.exp(source.normal(0, 0.02) + source.normal(0, 0.01, 12)) for _ in range(60)]
    other = [np.exp(source.normal(0.1, 0.02) + source.normal(0, 0.01, 12)) for _ in range(60)]
    found = resample(base, other)
    logs = [math.log(b.mean() / a.mean()) for a, b in zip(base, other, strict=True)]
    low, high = stats.ttest_1samp(logs, 0).confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((low, high), abs=0.002)

"""How far another clock is from ours: exchanges by hand, in nanoseconds."""

import random

import pytest

from harness.load import clocks
from harness.load.clocks import Exchange, Offset

LEAD = 5_000_000_000  # the other clock is five seconds ahead


def exchange(asked: int, there: int, thinks: int, back: int, lead: int = LEAD) -> Exchange:
    heard = asked + there + lead
    return Exchange(asked, heard, heard + thinks, asked + there + thinks + back)


def test_equal_ways_give_the_offset_exactly_and_half_the_round_trip_as_its_bound() -> None:
    found = clocks.offset([exchange(1_000, 40_000, 500, 40_000)])
    assert (found.offset_s, found.bound_s, found.rtt_s, found.exchanges) == (5.0, 40e-6, 80e-6, 1)


def test_unequal_ways_are_wrong_by_half_their_difference_and_the_bound_covers_it() -> None:
    # There 90 us, back 10 us: the middle is (90 - 10) / 2 = 40 us too high, and 50 us are allowed.
    found = clocks.offset([exchange(0, 90_000, 0, 10_000)])
    assert found.offset_s == pytest.approx(5.000040, abs=1e-12)
    assert found.bound_s == pytest.approx(50e-6, abs=1e-12)


def test_the_quickest_way_there_and_the_quickest_way_back_may_be_of_different_exchanges() -> None:
    # Least delay alone would keep the first: bound 50 us. Together: there 20 us, back 10 us.
    found = clocks.offset([exchange(0, 90_000, 0, 10_000), exchange(10**6, 20_000, 0, 200_000)])
    assert found.bound_s == pytest.approx(15e-6, abs=1e-12)
    assert found.offset_s == pytest.approx(5.000005, abs=1e-12)
    assert found.rtt_s == pytest.approx(100e-6, abs=1e-12)


@pytest.mark.parametrize("lead", [-3_600_000_000_000, -7, 0, 12_345_678])
def test_the_true_offset_is_always_within_the_bound(lead: int) -> None:
    source = random.Random(lead)
    ways = [(round(source.paretovariate(1.5) * 20_000), round(source.paretovariate(1.1) * 60_000)) for _ in range(64)]
    found = clocks.offset([exchange(10**9 * n, there, 3_000, back, lead) for n, (there, back) in enumerate(ways)])
    assert abs(found.offset_s - lead / 1e9) <= found.bound_s + 1e-12


def test_a_clock_that_is_set_meanwhile_is_noticed() -> None:
    with pytest.raises(ValueError, match=r"a clock was set during 2 exchanges: 0\.999900 s do not fit"):
        clocks.offset([exchange(0, 50_000, 0, 50_000), exchange(10**6, 50_000, 0, 50_000, LEAD + 10**9)])


def at(offset_s: float, at_s: float, bound_s: float = 1e-4) -> Offset:
    return Offset(offset_s, bound_s, 2e-4, 64, at_s)


def test_drift_is_what_the_clock_gained_a_second() -> None:
    assert clocks.drift(at(1.0, 100.0), at(1.001, 200.0)) == pytest.approx(1e-5)


def test_a_difference_within_the_bounds_is_no_drift() -> None:
    assert clocks.drift(at(1.0, 100.0), at(1.0002, 200.0)) == 0.0
    assert clocks.drift(at(1.0, 100.0), at(2.0, 100.0)) == 0.0

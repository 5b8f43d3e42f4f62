"""Comparing arms: every verdict, from tables small enough to check by hand."""

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from harness.stats.arms import Arm, Cell, Launch, level_key
from harness.stats.compare import Comparison, NoiseFloor, Settings, compare


def arm(name, *launches, **facts):
    """An arm whose launches are `{level: tok/s}`; a level is a concurrency or a key."""
    return Arm(
        name,
        tuple(
            Launch(f"{block:02}-{name}", block, tuple(cell(level, value) for level, value in values.items()))
            for block, values in enumerate(launches)
        ),
        **facts,
    )


def cell(level, value):
    if isinstance(value, Cell):
        return value
    if isinstance(level, int):
        return Cell(f"c{level}", {"mode": "closed", "concurrency": level}, {"output_tok_s": value})
    return Cell(level, {"mode": level}, {"output_tok_s": value})


def test_a_ratio_and_its_interval_are_students_t_on_the_log_ratios_of_launch_pairs():
    base, treatment = arm("a", {1: 100.0}, {1: 102.0}, {1: 98.0}), arm("b", {1: 110.0}, {1: 115.0}, {1: 107.0})
    [row] = compare(base, treatment).rows
    logs = [math.log(110 / 100), math.log(115 / 102), math.log(107 / 98)]
    expected = stats.ttest_1samp(logs, 0)
    low, high = expected.confidence_interval(0.95)
    assert row.estimate.ratio == pytest.approx(math.exp(sum(logs) / 3))
    assert (row.estimate.interval.low, row.estimate.interval.high) == pytest.approx((math.exp(low), math.exp(high)))
    assert row.p == pytest.approx(expected.pvalue)
    assert (row.verdict, row.direction, row.estimate.launches) == ("better", "treatment", 3)


def test_arms_of_separate_runs_are_compared_with_welchs_t():
    one, other = [100.0, 103.0, 99.0], [109.0, 115.0]
    base, treatment = arm("a", *({1: v} for v in one)), arm("b", *({1: v} for v in other))
    [row] = compare(base, treatment, Settings(paired=False)).rows
    expected = stats.ttest_ind([math.log(v) for v in other], [math.log(v) for v in one], equal_var=False)
    low, high = expected.confidence_interval(0.95)
    assert row.p == pytest.approx(expected.pvalue)
    assert (row.estimate.interval.low, row.estimate.interval.high) == pytest.approx((math.exp(low), math.exp(high)))


def test_arms_within_the_margin_are_equivalent_even_where_the_difference_is_certain():
    base = arm("a", {1: 100.0}, {1: 100.1}, {1: 100.0})
    treatment = arm("b", {1: 100.5}, {1: 100.6}, {1: 100.51})
    [row] = compare(base, treatment).rows
    assert row.p < 0.01
    assert row.verdict == "equivalent"


def test_an_unresolved_level_says_what_was_seen_and_how_many_launches_would_settle_it():
    base = arm("a", {1: 100.0}, {1: 100.0}, {1: 100.0})
    treatment = arm("b", {1: 102.0}, {1: 106.0}, {1: 104.0})
    [row] = compare(base, treatment, Settings(margin=0.005, confidence=0.99)).rows
    assert row.verdict == "unresolved"
    [reason] = row.reasons
    assert reason.message == ("-6.9% to +16.1% over 3 launches an arm; 4 more launches an arm would probably settle it")
    assert row.more_launches == 4


def test_one_launch_an_arm_has_no_interval_and_a_small_difference_stays_unresolved():
    result = compare(arm("a", {1: 100.0, 4: 300.0}), arm("b", {1: 103.0, 4: 150.0}))
    small, large = result.rows
    assert (small.verdict, small.estimate.interval, small.more_launches) == ("unresolved", None, 2)
    assert small.reasons[0].message == "1 launch an arm: no interval, and +3.0% may be noise between launches"
    assert (large.verdict, large.reasons[0].message) == (
        "worse",
        "1 launch an arm: no interval; the difference exceeds 10%",
    )
    assert "1 launch an arm: no interval is possible, and a second launch may move every number" in result.notes


def test_an_aa_run_gives_one_launch_an_interval():
    floor = NoiseFloor(spread=0.01, freedom=4, largest=0.02, source="runs/aa")
    result = compare(arm("a", {1: 100.0}), arm("b", {1: 105.0}), Settings(noise=floor))
    [row] = result.rows
    half = stats.t.ppf(0.975, 4) * 0.01  # 2.776 x 1 %
    assert row.estimate.interval.low == pytest.approx(1.05 * math.exp(-half))
    assert row.verdict == "better"
    said = "1 launch an arm: intervals are by how far identical launches differ here, 1.0% in `runs/aa` (an A/A run)"
    assert said in result.notes


def test_what_would_settle_one_launch_is_said_in_the_singular():
    floor = NoiseFloor(spread=0.05, freedom=4, largest=0.1, source="runs/aa")
    [row] = compare(arm("a", {1: 100.0}), arm("b", {1: 105.0}), Settings(noise=floor)).rows
    assert " over 1 launch an arm; " in row.reasons[0].message


def test_a_level_that_one_arm_lacks_is_not_comparable_by_name():
    result = compare(arm("a", {1: 90.0, 2: 150.0}), arm("b", {1: 60.0}))
    assert [(row.key, row.verdict) for row in result.rows] == [("c1", "worse"), ("c2", "not comparable")]
    assert result.rows[1].reasons[0].message == "`b` has no such level"


def test_an_invalid_level_is_not_compared_and_says_why():
    bad = Cell("c1", {"mode": "closed", "concurrency": 1}, {"output_tok_s": 1.0}, "invalid", ("the server died",))
    [row] = compare(arm("a", {1: 90.0}), arm("b", {1: bad})).rows
    assert row.verdict == "not comparable"
    assert row.reasons[0].message == "`b` is invalid: the server died"


def test_a_suspect_level_is_compared_and_the_suspicion_goes_with_the_row():
    odd = Cell("c1", {"mode": "closed", "concurrency": 1}, {"output_tok_s": 50.0}, "suspect", ("the GPU slowed down",))
    [row] = compare(arm("a", {1: 90.0}), arm("b", {1: odd})).rows
    assert row.notes == ("`b` launch 00-b is suspect: the GPU slowed down",)


def test_lower_is_better_for_latencies():
    cells = [Cell("c1", {"mode": "closed", "concurrency": 1}, {"tpot_s": v}) for v in (0.010, 0.008)]
    [row] = compare(arm("a", {1: cells[0]}), arm("b", {1: cells[1]}), Settings(metric="tpot_s")).rows
    assert (row.verdict, row.direction) == ("better", "treatment")


def test_a_comparison_survives_its_file():
    result = compare(arm("a", {1: 100.0}, {1: 101.0}), arm("b", {1: 80.0}, {1: 80.5}))
    assert Comparison.model_validate(json.loads(result.model_dump_json())) == result


@pytest.mark.parametrize(
    ("level", "key"),
    [
        ({"mode": "closed", "concurrency": 4, "requests": 30}, "c4"),
        ({"mode": "serial", "requests": 30}, "serial"),
        ({"mode": "open", "rate": 2.5}, "r2.5"),
        ({"mode": "saturation"}, "saturation"),
    ],
)
def test_a_levels_key_is_what_it_offers(level, key):
    assert level_key(level) == key


RATES = st.floats(min_value=1.0, max_value=1e4, allow_nan=False)
TABLES = st.lists(st.fixed_dictionaries({1: RATES, 8: RATES, 64: RATES}), min_size=1, max_size=4)


@given(TABLES, TABLES)
@settings(max_examples=30, deadline=None, derandomize=True)
def test_swapping_the_arms_inverts_the_ratio_and_turns_the_verdict(one, other):
    there, back = compare(arm("a", *one), arm("b", *other)), compare(arm("b", *other), arm("a", *one))
    turned = {"better": "worse", "worse": "better"}
    for forward, backward in zip(there.rows, back.rows, strict=True):
        assert forward.estimate.ratio * backward.estimate.ratio == pytest.approx(1)
        assert turned.get(forward.verdict, forward.verdict) == backward.verdict
        assert forward.p == pytest.approx(backward.p)
    assert len(there.crossover.crossings) == len(back.crossover.crossings)


@given(TABLES, st.floats(min_value=0.01, max_value=100))
@settings(max_examples=20, deadline=None, derandomize=True)
def test_a_faster_machine_changes_no_verdict(tables, factor):
    other = [{level: rate * 1.07 for level, rate in table.items()} for table in reversed(tables)]
    scaled = [[{level: rate * factor for level, rate in table.items()} for table in arm] for arm in (tables, other)]
    plain, faster = compare(arm("a", *tables), arm("b", *other)), compare(arm("a", *scaled[0]), arm("b", *scaled[1]))
    assert [row.verdict for row in plain.rows] == [row.verdict for row in faster.rows]


@given(TABLES, TABLES)
@settings(max_examples=30, deadline=None, derandomize=True)
def test_no_crossover_is_ever_claimed_outside_the_measured_levels(one, other):
    for crossing in compare(arm("a", *one), arm("b", *other)).crossover.crossings:
        for point in (crossing.low, crossing.at, crossing.high):
            assert point is None or crossing.between[0] <= point <= crossing.between[1]

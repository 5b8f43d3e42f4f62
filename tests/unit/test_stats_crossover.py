"""Where one arm stops being better: sentences, intervals and restraint, from curves whose crossing is known by hand."""

import math

import numpy as np
import pytest
from scipy import stats

from harness.stats.arms import Arm, Cell, Launch
from harness.stats.compare import NoiseFloor, Settings, compare


def arms(base, treatment, wobble=(0.0,)):
    """Two arms of `{concurrency: tok/s}`; launch i of the treatment is multiplied by 1 + wobble[i]."""

    def arm(name, table, factors):
        return Arm(
            name,
            tuple(
                Launch(
                    f"{block:02}-{name}",
                    block,
                    tuple(
                        Cell(f"c{level}", {"mode": "closed", "concurrency": level}, {"output_tok_s": value * factor})
                        for level, value in table.items()
                    ),
                )
                for block, factor in enumerate(factors)
            ),
        )

    return arm("A", base, [1.0] * len(wobble)), arm("B", treatment, [1 + part for part in wobble])


WOBBLE = (0.004, -0.004, 0.002, -0.002)


def test_a_crossover_lies_where_the_line_between_two_levels_crosses_zero():
    # Log ratio +0.1 at 4 and -0.1 at 16: zero half way in log concurrency, at sqrt(4 * 16) = 8.
    base, treatment = arms({4: 100, 16: 200}, {4: 100 * math.exp(0.1), 16: 200 * math.exp(-0.1)}, WOBBLE)
    [crossing] = compare(base, treatment).crossover.crossings
    assert crossing.at == pytest.approx(8, rel=1e-3)
    assert (crossing.below, crossing.above, crossing.between) == ("B", "A", (4, 16))


def test_its_interval_holds_every_concurrency_where_the_t_test_does_not_reject():
    base, treatment = arms({4: 100, 16: 200}, {4: 100 * math.exp(0.1), 16: 200 * math.exp(-0.1)}, WOBBLE)
    [crossing] = compare(base, treatment).crossover.crossings

    def p(concurrency):
        share = math.log(concurrency / 4) / math.log(4)
        return stats.ttest_1samp([math.log1p(part) + 0.1 - 0.2 * share for part in WOBBLE], 0).pvalue

    assert p(crossing.low) == pytest.approx(0.05, abs=0.002)
    assert p(crossing.high) == pytest.approx(0.05, abs=0.002)
    assert crossing.low < 8 < crossing.high


def test_the_sentence_names_both_sides_and_the_interval():
    base, treatment = arms({1: 90, 4: 100, 16: 200, 64: 300}, {1: 110, 4: 110, 16: 180, 64: 200}, WOBBLE)
    found = compare(base, treatment).crossover
    [crossing] = found.crossings
    assert found.state == "crossover"
    assert found.sentence == (
        f"`B` better below {crossing.at:.3g} [{crossing.low:.3g}, {crossing.high:.3g}], `A` above"
    )


def test_one_arm_better_at_every_level_claims_nothing_outside_the_range():
    base, treatment = arms({1: 92, 10: 400, 250: 773}, {1: 60, 10: 240, 250: 354}, WOBBLE)
    found = compare(base, treatment).crossover
    assert (found.state, found.sentence) == ("base everywhere", "`A` better at every level 1..250")


def test_levels_that_are_not_resolved_are_named_instead_of_a_crossover():
    wobble = (0.05, -0.06, 0.04, -0.05)
    base, treatment = arms({1: 100, 5: 100, 10: 100}, {1: 200, 5: 101, 10: 99}, wobble)
    found = compare(base, treatment).crossover
    assert (found.state, found.crossings) == ("not resolved", ())
    assert found.sentence == "`B` better at 1; not resolved between 5 and 10"
    assert found.unresolved == (("5", "10"),)


def test_an_unresolved_middle_widens_the_interval_and_not_the_claim():
    base, treatment = arms({1: 100, 5: 100, 10: 100, 50: 100}, {1: 150, 5: 100.5, 10: 99.5, 50: 60}, WOBBLE)
    found = compare(base, treatment, Settings(margin=1e-6)).crossover
    [crossing] = found.crossings
    assert crossing.between == (1, 50)
    assert 1 < crossing.low <= 5
    assert 7 <= crossing.high < 50


def test_two_crossings_are_both_given():
    base, treatment = arms({1: 100, 8: 100, 64: 100}, {1: 120, 8: 80, 64: 120}, WOBBLE)
    found = compare(base, treatment).crossover
    assert [(c.below, c.above) for c in found.crossings] == [("B", "A"), ("A", "B")]
    assert found.sentence.startswith("`B` better at 1; `A` better at 8; `B` better at 64; the sign changes at")


def test_equivalent_arms_have_no_crossover():
    base, treatment = arms({1: 100, 8: 100}, {1: 100.2, 8: 99.9}, WOBBLE)
    found = compare(base, treatment).crossover
    assert (found.state, found.sentence) == ("equivalent everywhere", "equivalent at every level 1..8")


def test_one_launch_an_arm_gives_sides_and_no_interval():
    base, treatment = arms({1: 100, 8: 100}, {1: 150, 8: 60})
    found = compare(base, treatment).crossover
    assert found.crossings == ()
    assert (
        found.sentence
        == "`B` better at 1; `A` better at 8 by point estimate; 1 launch an arm, so no interval is possible"
    )


LIMIT = "1 launch an arm, so no interval is possible"


def test_a_level_of_one_launch_that_is_unresolved_is_on_no_side():
    # Within 10 % of each other nothing is claimed: 8 is unresolved, though its estimate favours A.
    base, treatment = arms({1: 100, 4: 100, 8: 100, 16: 100}, {1: 150, 4: 120, 8: 94, 16: 74})
    found = compare(base, treatment).crossover
    assert found.sentence == f"`B` better at 1..4; not resolved at 8; `A` better at 16 by point estimate; {LIMIT}"
    assert (found.state, found.unresolved) == ("not resolved", (("8", "8"),))


def test_point_estimates_are_named_only_where_a_side_is_claimed():
    base, treatment = arms({1: 100, 8: 100}, {1: 60, 8: 108})
    assert compare(base, treatment).summary == f"`A` better at 1 by point estimate; not resolved at 8; {LIMIT}"
    base, treatment = arms({1: 100, 8: 100}, {1: 94, 8: 107})
    assert compare(base, treatment).summary == f"not resolved at any shared level 1..8; {LIMIT}"
    assert compare(*arms({2: 100}, {2: 107})).summary == f"not resolved at 2; {LIMIT}"


def test_a_side_that_rests_on_one_launch_beside_intervals_says_so():
    # C=8 is in one launch of the treatment only: 150 against 100 exceeds 10 %, without an interval.
    base, treatment = arms({1: 100, 8: 100}, {1: 150, 8: 150}, WOBBLE)
    short = tuple(Launch(launch.launch, launch.block, launch.cells[:1]) for launch in treatment.launches[1:])
    base = Arm("A", (base.launches[0], *(Launch(one.launch, one.block, one.cells[:1]) for one in base.launches[1:])))
    found = compare(base, Arm("B", (treatment.launches[0], *short))).crossover
    assert found.sentence == "`B` better at 1; `B` better at 8 by point estimate"


def test_every_level_means_every_one_that_can_be_compared():
    base, treatment = arms({1: 100, 8: 100, 64: 100}, {1: 150, 8: 150}, WOBBLE)
    assert compare(base, treatment).crossover.sentence == "`B` better at every comparable level 1..8"


def test_an_aa_run_gives_one_launch_a_crossover_with_an_interval():
    base, treatment = arms({4: 100, 16: 100}, {4: 120, 16: 80})
    floor = NoiseFloor(spread=0.01, freedom=6, largest=0.02, source="aa")
    [crossing] = compare(base, treatment, Settings(noise=floor)).crossover.crossings
    assert 4 < crossing.low < crossing.at < crossing.high < 16


def test_a_serial_run_is_no_point_of_the_curve():
    cells = (
        Cell("serial", {"mode": "serial", "concurrency": 1}, {"output_tok_s": 200.0}),
        Cell("c1", {"mode": "closed", "concurrency": 1}, {"output_tok_s": 50.0}),
    )
    base, _ = arms({1: 100}, {1: 100})
    found = compare(base, Arm("B", (Launch("0", 0, cells),))).crossover
    assert found.sentence.startswith("`A` better at every shared level 1 by point estimate")


def test_a_launch_without_a_level_does_not_spoil_the_others():
    base, treatment = arms({4: 100, 16: 200}, {4: 110, 16: 180}, WOBBLE)
    short = Launch(treatment.launches[0].launch, 0, treatment.launches[0].cells[:1])
    treatment = Arm("B", (short, *treatment.launches[1:]))
    [crossing] = compare(base, treatment).crossover.crossings
    assert np.isfinite([crossing.low, crossing.at, crossing.high]).all()

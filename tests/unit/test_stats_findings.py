"""What stands beside the speeds: outputs, accept lengths, saturation, serial runs, percentiles, slices, policy, 2x2."""

import math

import pytest
from scipy import stats

from harness.load.records import Chunk, RequestRecord
from harness.stats.arms import Arm, Cell, Launch, cell_of, launch_of
from harness.stats.compare import Settings, compare, compare_all, noise_floor
from harness.stats.consistency import serial_against_closed
from harness.stats.equivalence import Output, agreement, compare_outputs
from harness.stats.factorial import effects
from harness.stats.level import LevelResult, Summary, Throughput, Verdict, Window
from harness.stats.metrics import summary
from harness.stats.percentiles import bounded, fewest, supports, why_not
from harness.stats.policy import better_arm, kept_promise
from harness.stats.refine import Goal, next_step
from harness.stats.saturation import exhausted, knee, overload, saturation
from harness.stats.slices import throughput
from harness.stats.speculation import acceptance, explain


def arm(name, *launches, plan=None, simulated=False, effective=None):
    """An arm whose launches are `{concurrency or key: tok/s}`."""
    known = {"kv_cache_dtype": "auto"} if effective is None else effective
    return Arm(
        name,
        tuple(
            Launch(f"{block:02}-{name}", block, tuple(cell(level, value) for level, value in values.items()), known)
            for block, values in enumerate(launches)
        ),
        plan or {},
        simulated,
    )


def cell(level, value):
    if isinstance(level, int):
        return Cell(f"c{level}", {"mode": "closed", "concurrency": level}, {"output_tok_s": value})
    if level.startswith("r"):
        return Cell(level, {"mode": "open", "rate": float(level[1:])}, {"output_tok_s": value})
    return Cell(level, {"mode": level}, {"output_tok_s": value})


def record(prompt, text, *, chunks=(), tokens=None, finish="length", **extra):
    return RequestRecord(
        0, 0, "measure", prompt, 0.0, 9.0, True, chunks=tuple(chunks), output_tokens=tokens, text=text,
        finish_reason=finish, extra=extra,
    )  # fmt: skip


def result(**changes):
    values = {
        "measurement": "1",
        "cell_id": "0" * 64,
        "arm": "a",
        "launch": "01-a",
        "block": 0,
        "level": {"mode": "closed", "concurrency": 2, "requests": 2},
        "started_at": "2026-11-29T12:00:00Z",
        "requests": 2,
        "ok": 2,
        "output_tokens": 8,
        "window": Window(start_s=1.0, end_s=5.0),
        "throughput": Throughput(output_tok_s=50.0, output_tok_s_whole=48.0, per_request_tok_s=25.0),
        "metrics": {"tpot_s": Summary(n=2, p50=0.02), "e2e_s": Summary(n=2)},
        "verdict": Verdict(state="valid"),
    }
    return LevelResult(**{**values, **changes})


# --- outputs


def test_agreement_counts_tokens_up_to_the_first_divergence():
    one = {"p": Output("abcdef"), "q": Output("same"), "only here": Output("x")}
    other = {"p": Output("abcxyz"), "q": Output("same")}
    found = agreement(one, other, "characters")
    # p agrees in 3 of 6, q in 4 of 4.
    assert (found.prompts, found.identical, found.token_share) == (2, 1, 0.7)
    assert found.divergence == (3, 3, 3, 3, 3)


def test_an_answer_that_ends_early_diverges_where_it_ends():
    found = agreement({"p": Output([1, 2, 3, 4])}, {"p": Output([1, 2])}, "token ids")
    assert (found.identical, found.token_share, found.divergence[0]) == (0, 0.5, 2)


def outputs(name, *launches):
    """An arm of which only the answers matter: `{prompt: text}` a launch."""
    return Arm(
        name,
        tuple(
            Launch(f"{block}", block, (cell(1, 100.0),), records={"c1": [record(p, t) for p, t in texts.items()]})
            for block, texts in enumerate(launches)
        ),
    )


def test_arms_that_answer_otherwise_make_the_comparison_suspect():
    base, treatment = outputs("base", {"p": "abcdefgh"}), outputs("eagle3", {"p": "abXXXXXX"})
    found = compare(base, treatment)
    assert [reason.code for reason in found.suspect] == ["outputs-differ"]
    assert found.suspect[0].message == (
        "the arms agree on 25.0% of the characters before they part, at least 90.0% was expected: the speeds belong to "
        "different outputs"
    )


def test_a_base_that_does_not_repeat_itself_lowers_the_floor():
    base = outputs("base", {"p": "abcdefgh"}, {"p": "abcdXXXX"})
    assert compare_outputs(base, outputs("eagle3", {"p": "abcdYYYY"})).suspect == ()
    assert compare_outputs(base, outputs("eagle3", {"p": "aZZZZZZZ"})).suspect[0].code == "outputs-differ"


def test_endings_and_lengths_are_reported_for_both_arms():
    base, treatment = outputs("base", {"p": "ab"}), outputs("eagle3", {"p": "ab"})
    found = compare_outputs(base, treatment)
    assert found.finish_reasons == {"base": {"length": 1}, "eagle3": {"length": 1}}
    assert found.sentence == "1 of 1 answers are identical, 100.0% of the characters agree before the answers part"


def test_arms_without_text_have_no_output_comparison():
    assert compare(arm("a", {1: 1.0}), arm("b", {1: 1.0})).equivalence is None


# --- speculation


def test_the_accept_length_of_a_level_is_one_plus_accepted_over_drafts():
    # llama.cpp's published example: 231 + 201 + 171 + 141 accepted of 259 drafts.
    found = acceptance(result(server={"drafts": 259, "draft_tokens": 1036, "accepted_tokens": 744}))
    assert found.level == pytest.approx(1 + 744 / 259)
    assert found.rate == pytest.approx(744 / 1036)


def test_verify_counts_of_requests_weigh_by_tokens():
    records = [record("p", "", tokens=30, spec_verify_ct=10), record("q", "", tokens=10, spec_verify_ct=10)]
    assert acceptance(result(), records).level == 40 / 20


def test_two_ways_to_the_accept_length_that_disagree_are_a_finding():
    chunks = [Chunk(1.0, 1.0, 1), Chunk(2.0, 2.0, 3), Chunk(3.0, 3.0, 3)]
    found = acceptance(result(server={"drafts": 10, "accepted_tokens": 10}), [record("p", "", chunks=chunks, tokens=7)])
    assert (found.level, found.by_chunk) == (2.0, 3.0)
    assert found.findings[0].message == "acceptance length is 3.000 by chunks and 2.000 by counters"


def test_an_engine_that_streams_token_by_token_is_no_contradiction():
    chunks = [Chunk(1.0, 1.0, 1), Chunk(2.0, 2.0, 1)]
    assert (
        acceptance(result(server={"drafts": 10, "accepted_tokens": 10}), [record("p", "", chunks=chunks)]).findings
        == ()
    )


def test_a_level_without_speculation_has_no_accept_length():
    assert acceptance(result(server={"drafts": 0, "accepted_tokens": 0})).level is None


def test_a_speed_up_is_tokens_a_step_over_the_ratio_of_step_times():
    # 10 ms a token without; 8 ms a token at 2.5 tokens a step is a step of 20 ms: 2.5 / 2 = 1.25.
    found = explain(0.010, 0.008, None, 2.5)
    assert (found.tokens_per_step, found.step_time, found.speed) == pytest.approx((2.5, 2.0, 1.25))
    assert found.sentence == (
        "2.50 against 1.00 tokens a step, 20.0 against 10.0 ms a step: 2.50 / 2.00 = 1.25 times the decoding speed"
    )


def test_a_row_explains_its_speed_up():
    def launch(name, tpot, server):
        level = result(launch=name, metrics={"tpot_s": Summary(n=2, p50=tpot)}, server=server)
        return launch_of([level])

    base = Arm("base", (launch("0", 0.010, {}),))
    eagle3 = Arm("eagle3", (launch("1", 0.008, {"drafts": 100, "accepted_tokens": 150}),))
    [row] = compare(base, eagle3).rows
    assert row.acceptance == {"eagle3": 2.5}
    assert row.speculation.speed == pytest.approx(1.25)


# --- serial against C=1


def test_a_serial_run_and_a_closed_loop_of_one_must_agree():
    found = serial_against_closed(arm("eagle3", {"serial": 96.1, 1: 77.5}))
    assert (found.agree, found.ratio) == (False, pytest.approx(96.1 / 77.5))
    assert found.message == (
        "`eagle3`: 96.1 tok/s in the serial run, 77.5 at C=1 (+24.0%): the same experiment gives two answers, so one "
        "of the two mis-measured"
    )
    assert serial_against_closed(arm("baseline", {"serial": 92.6, 1: 92.7})).agree is True


def test_noise_between_launches_is_no_disagreement():
    noisy = arm("a", {"serial": 100.0, 1: 95.0}, {"serial": 95.0, 1: 101.0}, {"serial": 103.0, 1: 97.0})
    assert serial_against_closed(noisy).agree is not False


def test_a_disagreement_makes_the_comparison_suspect():
    found = compare(arm("base", {1: 92.6}), arm("eagle3", {"serial": 96.1, 1: 77.5}))
    assert [reason.code for reason in found.suspect] == ["serial-disagrees"]


# --- saturation


def test_the_knee_is_the_smallest_level_within_five_percent_of_the_best():
    # The published EAGLE-3 table: 95 % of 340.9 is 323.9, first reached at C=70.
    table = {1: 77.5, 2: 125.1, 5: 183.2, 10: 239.6, 30: 299.5, 70: 337.7, 100: 338.8, 250: 340.9}
    found = knee(arm("eagle3", table))
    assert (found.at, found.best_at, found.low, found.beyond) == (70, 250, None, False)


def test_launches_bound_the_knee():
    middle, best = (93.0, 97.0, 96.0), (100.0, 101.0, 102.0)
    tables = [{1: 50.0, 10: one, 100: 0.99 * other, 200: other} for one, other in zip(middle, best, strict=True)]
    found = knee(arm("a", *tables))
    # C=10 is neither clearly below 95 % of the best nor clearly above; C=1 is below, C=100 above.
    low, high = stats.ttest_1samp(
        [math.log(one / other / 0.95) for one, other in zip(middle, best, strict=True)], 0
    ).confidence_interval(0.95)
    assert low < 0 < high
    assert (found.low, found.at, found.high) == (10, 100, 100)


def test_a_sweep_that_still_climbs_has_not_shown_its_plateau():
    assert knee(arm("a", {1: 10.0, 2: 20.0})).beyond
    sentence = saturation(arm("a", {1: 10.0, 2: 20.0}), arm("b", {1: 10.0, 2: 20.0})).sentence
    assert sentence.startswith("`a` reaches 20 tok/s at most")


def test_an_arm_of_one_level_has_no_peak_to_set_against_a_sweeps():
    found = saturation(arm("mine", {1: 227.0}), arm("baseline (first)", {1: 230.0, 4: 900.0, 16: 1909.0}))
    assert (found.ratio, found.base_tok_s, found.treatment_tok_s, found.interval) == (None, None, None, None)
    assert found.sentence == "peaks are not compared: the arms share only C=1"


def test_closed_and_open_loops_share_no_level_and_have_no_ratio_of_peaks():
    found = saturation(arm("closed", {1: 227.0, 16: 1909.0}), arm("open", {"r2": 100.0, "r16": 376.0}))
    assert (found.ratio, found.sentence) == (None, "peaks are not compared: the arms share no level")


def test_a_serial_run_is_not_part_of_a_peak():
    found = saturation(arm("a", {"serial": 90.0, 1: 80.0}), arm("b", {"serial": 96.0, 1: 40.0}))
    assert found.ratio == pytest.approx(2)  # 80 / 40


def test_ladders_of_different_height_are_compared_over_the_levels_they_share():
    low = arm("low", {1: 100.0, 4: 300.0, 16: 600.0})
    high = arm("high", {1: 100.0, 4: 200.0, 16: 400.0, 64: 900.0})
    found = saturation(low, high)
    assert found.ratio == pytest.approx(1.5)  # 600 / 400, not 600 / 900
    assert found.sentence == (
        "`low` reaches 600 tok/s over the shared levels C=1 to C=16, `high` reaches 400 tok/s over the shared levels "
        "C=1 to C=16: ratio 1.50, no interval"
    )


def test_a_level_that_one_launch_lacks_is_not_part_of_a_peak():
    base = arm("a", {1: 100.0, 4: 200.0, 16: 400.0}, {1: 100.0, 4: 200.0})
    found = saturation(base, arm("b", {1: 100.0, 4: 100.0, 16: 800.0}, {1: 100.0, 4: 100.0, 16: 800.0}))
    assert found.ratio == pytest.approx(2)  # 200 / 100 at C=4


def test_a_published_plateau_is_not_set_against_a_sweep_that_still_climbs():
    published, flat, climbing = {"saturation": 780.0}, {1: 100.0, 4: 399.0, 16: 390.0}, {1: 100.0, 4: 200.0, 16: 390.0}
    assert saturation(arm("a", published), arm("b", flat)).ratio == pytest.approx(780 / 399)
    found = saturation(arm("a", published), arm("b", climbing))
    assert (found.ratio, found.sentence) == (None, "peaks are not compared: `b` has not shown its plateau")


def test_acceptance_without_accepted_tokens_is_tokens_over_verify_calls_then_requests_then_the_log():
    """SGLang counts verify calls and tokens; a release without that counter says `spec_verify_ct` or its log does."""
    counted = result(server={"drafts": 30.0, "generated_tokens": 60.0, "log": {"acceptance_length": 9.0}})
    assert acceptance(counted).level == 2.0
    told = [record("p", "", tokens=64, spec_verify_ct=20)]
    assert acceptance(result(server={"log": {"acceptance_length": 3.2}}), told).level == 3.2
    assert acceptance(result(server={"log": {"acceptance_length": 2.4}})).level == 2.4
    # Nothing was verified: the base arm.
    assert acceptance(result(server={"drafts": 0.0, "generated_tokens": 60.0})).level is None


def test_growing_queue_and_growing_ttft_are_overload():
    falling_behind = overload([(t, 2.0 * t) for t in range(10)], [(t, 0.1 + 0.05 * t) for t in range(10)])
    assert falling_behind.overloaded
    assert falling_behind.message == "overload: in-flight grows by 2 requests a second and TTFT by 0.05 s a second"
    steady = overload([(t, 4 + t % 2) for t in range(10)], [(t, 0.1 + 0.05 * t) for t in range(10)])
    assert (steady.overloaded, steady.message) == (False, "no overload: in-flight does not grow")


def test_a_sweep_may_stop_when_two_levels_bought_nothing_but_waiting():
    assert exhausted([(70, 337.7, 1.0), (100, 338.8, 2.0), (250, 340.9, 5.0)]).overloaded
    assert not exhausted([(10, 239.6, 0.5), (30, 299.5, 1.0), (70, 337.7, 2.0)]).overloaded
    assert not exhausted([(70, 337.7, 1.0), (100, 338.8, 1.0)]).overloaded


# --- percentiles


def test_p99_needs_662_samples():
    assert fewest(0.99) == 662
    # P(at most 1 of n above the quantile), by hand: 0.99^n + n 0.01 0.99^(n-1).
    assert 0.99**662 + 662 * 0.01 * 0.99**661 <= 0.01 < 0.99**661 + 661 * 0.01 * 0.99**660
    assert not supports(661, 0.99)
    assert why_not(30, 0.99) == "p99 needs 662 samples, there are 30"
    assert why_not(662, 0.99) is None


def test_order_statistics_bound_a_percentile():
    # For the median of 10 samples, X(2) and X(9) hold 97.9 % (David and Nagaraja, table of sign-test bounds).
    found = bounded(list(range(1, 11)), 0.5)
    assert (found.value, found.low, found.high) == (5.5, 2, 9)
    assert stats.binom.cdf(8, 10, 0.5) - stats.binom.cdf(1, 10, 0.5) == pytest.approx(0.979, abs=5e-4)


def test_a_bound_that_the_sample_does_not_reach_is_none():
    assert bounded([1.0, 2.0, 3.0], 0.99).high is None
    with pytest.raises(ValueError, match="no percentile of nothing"):
        bounded([], 0.5)


def test_a_summary_carries_the_bounds_of_the_percentiles_it_shows():
    found = summary([float(value) for value in range(1, 12)])
    # 11 samples: p50 is shown and p90 is not; X(2) and X(10) hold the median with 98.8 % (sign-test bounds).
    assert (found.p50, found.p90, found.bounds) == (6.0, None, {"p50": (2.0, 10.0)})


# --- slices


def test_tokens_count_in_the_slice_they_arrived_in():
    chunks = [Chunk(at, at, tokens) for at, tokens in ((0.5, 9), (1.5, 2), (2.5, 4), (4.5, 6), (6.0, 9))]
    # The window is 1..5 s, in four slices of one second; what arrived outside does not count.
    assert throughput(result(), [record("p", "", chunks=chunks)], count=4) == (2, 4, 0, 6)


def test_a_request_spreads_its_tokens_where_chunks_do_not_say():
    chunks = [Chunk(1.5, 1.5), Chunk(4.5, 4.5)]
    assert throughput(result(), [record("p", "", chunks=chunks, tokens=10)], count=2) == (2.5, 2.5)


def test_a_level_without_a_window_has_no_slices():
    assert throughput(result(window=Window(start_s=None, end_s=None)), []) == ()


def test_a_cell_takes_medians_and_leaves_out_what_is_not_known():
    values = cell_of(result()).values
    assert values == {"output_tok_s": 50.0, "output_tok_s_whole": 48.0, "per_request_tok_s": 25.0, "tpot_s": 0.02}


def test_levels_of_two_launches_are_not_one_launch():
    with pytest.raises(ValueError, match="levels of one launch expected"):
        launch_of([result(launch="01-a"), result(launch="02-b")])


# --- several arms, noise floor, 2x2


def test_every_arm_is_compared_with_the_base_in_order():
    found = compare_all([arm("a", {1: 1.0}), arm("base", {1: 1.0}), arm("c", {1: 2.0})], "base")
    assert [(one.base, one.treatment) for one in found] == [("base", "a"), ("base", "c")]


def test_an_aa_run_gives_the_root_mean_square_of_its_log_ratios():
    one, other = (
        arm("a", {1: 100.0, 2: 100.0}, {1: 100.0, 2: 100.0}),
        arm("a again", {1: 101.0, 2: 99.0}, {1: 102.0, 2: 100.0}),
    )
    found = noise_floor(one, other, "runs/aa")
    logs = [math.log(1.01), math.log(0.99), math.log(1.02), 0.0]
    assert found.spread == pytest.approx(math.sqrt(sum(log**2 for log in logs) / 4))
    assert (found.freedom, found.largest) == (2, pytest.approx(0.02))


def test_the_published_two_by_two_is_an_interaction():
    # Single-stream figures of the seeds: CUDA 12.8/13 x baseline/EAGLE-3.
    table = {("12.8", "off"): 89.5, ("12.8", "on"): 54.1, ("13", "off"): 92.6, ("13", "on"): 96.1}
    found = effects(
        {names: arm(str(names), {"serial": value}) for names, value in table.items()}, ("CUDA", "EAGLE-3"), "serial"
    )
    stack, speculation, interaction = found.effects
    assert stack.ratio == pytest.approx(math.sqrt(92.6 / 89.5 * 96.1 / 54.1))
    assert speculation.ratio == pytest.approx(math.sqrt(54.1 / 89.5 * 96.1 / 92.6))
    assert interaction.ratio == pytest.approx((96.1 / 92.6) / (54.1 / 89.5))
    assert interaction.sentence == "CUDA x EAGLE-3: x 1.717 no interval (1 launch an arm)"


def test_a_two_by_two_needs_four_arms():
    with pytest.raises(ValueError, match="a 2x2 needs four arms"):
        effects({("a", "x"): arm("1", {1: 1.0}), ("b", "x"): arm("2", {1: 1.0})}, ("f", "g"), "c1")


# --- policy

BASE = [dict.fromkeys((1, 4, 16, 64), 100.0)] * 3
WINS_BELOW = [{1: 130.0 + i, 4: 120.0 + i, 16: 80.0 + i, 64: 60.0 + i} for i in (0, 1, -1)]


def test_a_policy_turns_speculation_on_below_the_certain_side_of_the_crossover():
    found = compare(arm("base", *BASE), arm("eagle3", *WINS_BELOW))
    [crossing] = found.crossover.crossings
    assert found.policy.decision == "go in range"
    assert found.policy.on == ((1, math.floor(crossing.low)),)
    assert found.policy.sentence == (
        f"go in range: turn `eagle3` on at concurrency 1..{math.floor(crossing.low)} and off elsewhere; "
        f"{found.crossover.sentence}"
    )


def test_sglangs_lever_is_a_tier_of_candidate_steps_by_lowest_batch_size():
    plan = {"server.args.speculative-num-steps": 3, "server.args.speculative-eagle-topk": 1}
    policy = compare(arm("base", *BASE), arm("eagle3", *WINS_BELOW, plan=plan)).policy
    last = policy.on[0][1]
    assert policy.levers == {
        "sglang --speculative-adaptive-config": {"1": {"candidate_steps": [3]}, str(last + 1): {"candidate_steps": [0]}}
    }


def test_sglangs_lever_needs_topk_1_and_says_so():
    plan = {"server.args.speculative-num-steps": 2, "server.args.speculative-eagle-topk": 4}
    policy = compare(arm("base", *BASE), arm("eagle3", *WINS_BELOW, plan=plan)).policy
    assert policy.levers == {"sglang": "--speculative-adaptive needs --speculative-eagle-topk 1, the treatment has 4"}


def test_vllms_lever_is_a_list_of_batch_size_ranges():
    plan = {"server.args.speculative-config": '{"method": "eagle3", "num_speculative_tokens": 3}'}
    policy = compare(arm("base", *BASE), arm("eagle3", *WINS_BELOW, plan=plan)).policy
    last = policy.on[0][1]
    assert policy.levers == {"vllm num_speculative_tokens_per_batch_size": [[1, last, 3], [last + 1, 64, 0]]}


def test_the_simulated_engines_lever_is_a_line_of_tiers():
    policy = compare(arm("base", *BASE), arm("spec", *WINS_BELOW, plan={"server.args.speculative-tokens": 4})).policy
    assert policy.levers == {"simulated --speculative-tiers": f"1:4,{policy.on[0][1] + 1}:0"}


@pytest.mark.parametrize(
    ("factor", "decision"), [(1.3, "go"), (0.7, "no-go"), (1.0, "no-go")], ids=["better", "worse", "equivalent"]
)
def test_one_verdict_everywhere_is_go_or_no_go(factor, decision):
    treatment = [
        {level: value * factor * (1 + i / 1000) for level, value in table.items()} for i, table in enumerate(BASE)
    ]
    assert compare(arm("base", *BASE), arm("t", *treatment)).policy.decision == decision


def test_no_go_ahead_while_levels_could_not_be_compared():
    base, treatment = arm("base", {1: 100.0, 4: 100.0, 16: 100.0}), arm("t", {1: 150.0})
    policy = compare(base, treatment).policy
    assert (policy.decision, policy.on) == ("undecided", ())
    assert policy.sentence == (
        "undecided: leave `t` off until more is known; nothing is decided while C=4, C=16 cannot be compared; "
        "`t` better at every shared level 1 by point estimate, no crossover seen; 1 launch an arm, so no interval is "
        "possible"
    )


@pytest.mark.parametrize("treatment", [{1: 150.0, 4: 150.0}, {1: 150.0, 4: 50.0}], ids=["everywhere", "in range"])
def test_no_go_ahead_while_fairness_is_unknown(treatment):
    policy = compare(arm("base", {1: 100.0, 4: 100.0}), arm("t", treatment, effective={})).policy
    assert (policy.decision, policy.on) == ("undecided", ())
    assert "nothing is decided while the effective configuration is not known for both arms" in policy.sentence


def test_a_range_does_not_reach_over_a_level_that_could_not_be_compared():
    base = arm("base", {1: 100.0, 4: 100.0, 16: 100.0, 64: 100.0})
    policy = compare(base, arm("t", {1: 150.0, 16: 150.0, 64: 50.0})).policy
    assert (policy.decision, policy.on) == ("go in range", ((1, 1), (16, 16)))


def test_nothing_resolved_is_undecided_and_off():
    noisy = [{1: 100.0 * factor} for factor in (0.9, 1.1, 1.02)]
    policy = compare(arm("base", *[{1: 100.0}] * 3), arm("t", *noisy)).policy
    assert (policy.decision, policy.on) == ("undecided", ())


def test_an_adaptive_arm_is_held_to_the_better_of_the_two():
    base, eagle3 = arm("base", *BASE), arm("eagle3", *WINS_BELOW)
    best = better_arm(base, eagle3, compare(base, eagle3))
    keeps = [{1: 129.0 + i, 4: 120.0 + i, 16: 99.5, 64: 99.8} for i in (0, 1, -1)]
    breaks = [{**table, 64: 70.0} for table in keeps]
    assert kept_promise(compare(best, arm("adaptive", *keeps)), 0.02) == ()
    [broken] = kept_promise(compare(best, arm("adaptive", *breaks)), 0.02)
    assert broken.message == "at c64 the adaptive arm reaches 0.700 of the better arm"


# --- refine

GOAL = Goal(grid=(1, 2, 5, 10, 30, 70, 100, 250), width=1.5, blocks=6)


def test_the_first_block_scans_every_second_level_and_the_last():
    assert next_step(arm("a"), arm("b"), GOAL).levels == (1, 5, 30, 100, 250)


def test_later_blocks_run_one_level_on_either_side_of_the_apparent_crossover():
    scan = {1: 130.0, 5: 110.0, 30: 90.0, 100: 80.0, 250: 70.0}
    step = next_step(arm("a", dict.fromkeys(scan, 100.0)), arm("b", scan), GOAL)
    # Log ratios +0.095 at 5 and -0.105 at 30 cross near 11.7: 5 lies within a factor of 3, 30 too.
    assert step.levels == (5, 30)


def test_it_stops_when_the_interval_is_narrow_enough():
    scan = [{5: 110.0 + i / 10, 30: 90.0 + i / 10} for i in (0, 1, -1)]
    step = next_step(arm("a", *[{5: 100.0, 30: 100.0}] * 3), arm("b", *scan), GOAL)
    assert step.done
    assert step.reason.startswith("answered: `b` better below")


def test_it_stops_when_the_budget_is_spent():
    noisy = [{5: 100.0 * factor, 30: 100.0 / factor} for factor in (1.3, 0.8, 1.2, 0.9, 1.3, 0.9)]
    pair = arm("a", *[{5: 100.0, 30: 100.0}] * 6), arm("b", *noisy)
    assert next_step(*pair, GOAL).reason == "budget spent: 6 launches an arm"
    three = arm("a", *[{5: 100.0, 30: 100.0}] * 3), arm("b", *noisy[:3])
    hurried = Goal(grid=GOAL.grid, minutes=30)
    assert next_step(*three, hurried, minutes_spent=24).reason == "budget spent: 24 of 30 minutes, and a block takes 8"


def test_without_a_crossover_it_runs_what_is_not_settled():
    treatment = [{1: 50.0 + i / 10, 10: 97.0 + 3 * i} for i in (0, 1, -1)]
    step = next_step(arm("a", *[{1: 100.0, 10: 100.0}] * 3), arm("b", *treatment), GOAL)
    assert step.levels == (10,)


def test_secondary_metrics_have_ratios_and_intervals_of_their_own():
    def both(tok, tpot):
        return Cell("c1", {"mode": "closed", "concurrency": 1}, {"output_tok_s": tok, "tpot_s": tpot})

    def side(name, *cells):
        return Arm(name, tuple(Launch(str(block), block, (one,)) for block, one in enumerate(cells)))

    base, treatment = side("a", both(100, 0.01), both(101, 0.0101)), side("b", both(50, 0.02), both(51, 0.0203))
    [row] = compare(base, treatment, Settings()).rows
    expected = stats.ttest_1samp([math.log(2), math.log(203 / 101)], 0).confidence_interval(0.95)
    tpot = row.secondary["tpot_s"]
    assert (tpot.interval.low, tpot.interval.high) == pytest.approx((math.exp(expected.low), math.exp(expected.high)))

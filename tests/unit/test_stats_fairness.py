"""What may differ between arms, what may not, and the traps that fake a comparison of speculation."""

import pytest

from harness.stats.arms import Arm, Cell, Launch
from harness.stats.compare import Settings, compare
from harness.stats.fairness import Permission, check, flatten

TREATMENT = Permission(treatment=["server.args.speculative-*"])
SAME = {"max_running_requests": 256, "cuda_graph_max_bs": 256, "stream_interval": 1, "attention_backend": "flashinfer"}
SPECULATING = {"speculative_algorithm": "EAGLE3", "speculative_num_steps": 2}


def arm(name, effective=None, *, plan=None, facts=None, highest=100, requests=30):
    level = {"mode": "closed", "concurrency": highest, "requests": requests}
    cell = Cell(f"c{highest}", level, {"output_tok_s": 100.0})
    return Arm(name, (Launch(f"00-{name}", 0, (cell,), effective or {}, facts or {}),), plan or {})


def messages(reasons):
    return [reason.message for reason in reasons]


def test_the_declared_treatment_may_differ_in_plan_and_in_the_servers_own_words():
    base = arm("baseline", SAME, plan={"server.args.tp": 8})
    treatment = arm(
        "eagle3", {**SAME, **SPECULATING}, plan={"server.args.tp": 8, "server.args.speculative-num-steps": 2}
    )
    found = check(base, treatment, TREATMENT)
    assert found.blockers == ()
    assert {(d.kind, d.name, d.status) for d in found.differences} == {
        ("plan", "server.args.speculative-num-steps", "treatment"),
        ("effective", "speculative_algorithm", "treatment"),
        ("effective", "speculative_num_steps", "treatment"),
    }


def test_a_server_may_say_that_it_speculates_where_speculation_is_the_treatment():
    base, treatment = arm("a", {"speculative": False}), arm("b", {"speculative": True})
    assert check(base, treatment, Permission(treatment=["server.args.spec-*"])).blockers == ()
    assert messages(check(base, treatment, Permission(treatment=["env"])).blockers) == [
        "speculative differs (false / true)"
    ]


def test_anything_else_makes_the_arms_not_comparable_by_name():
    facts = {"env_id": "aaa", "driver": "580.65", "measurement": "1"}
    base = arm("a", SAME, facts=facts)
    treatment = arm("b", {**SAME, "attention_backend": "triton"}, facts={**facts, "driver": "575.12"})
    assert messages(check(base, treatment, TREATMENT).blockers) == [
        "attention_backend differs (flashinfer / triton)",
        "driver differs (580.65 / 575.12)",
    ]


def test_a_derived_value_may_differ_where_the_recipe_accepts_it_by_name():
    base, treatment = arm("a", {**SAME, "mem_fraction_static": 0.9}), arm("b", {**SAME, "mem_fraction_static": 0.85})
    assert messages(check(base, treatment, Permission()).blockers) == ["mem_fraction_static differs (0.9 / 0.85)"]
    found = check(base, treatment, Permission(accepted=["mem_fraction_static"]))
    assert (found.blockers, [d.status for d in found.differences]) == ((), ["accepted"])


def test_environment_arms_may_differ_in_their_environment_and_not_in_the_driver():
    base = arm("old", facts={"env_id": "aaa", "driver": "580"}, plan={"env": "sglang-cu128"})
    treatment = arm("new", facts={"env_id": "bbb", "driver": "580"}, plan={"env": "sglang-cu130"})
    assert check(base, treatment, Permission(treatment=["env"])).blockers == ()
    assert len(check(base, treatment, TREATMENT).blockers) == 2


def test_a_pool_size_measured_at_start_may_move_by_one_percent():
    sizes = [{**SAME, "max_total_num_tokens": size} for size in (100_000, 100_900, 103_000)]
    assert check(arm("a", sizes[0]), arm("b", sizes[1]), TREATMENT).blockers == ()
    assert len(check(arm("a", sizes[0]), arm("b", sizes[2]), TREATMENT).blockers) == 1


def test_ports_and_running_averages_are_no_configuration():
    base, treatment = arm("a", {**SAME, "port": 30000}), arm("b", {**SAME, "port": 30001, "nccl_port": 4})
    assert check(base, treatment, TREATMENT).differences == ()


def test_levels_of_another_size_are_named():
    found = check(arm("a", requests=30), arm("b", requests=60), TREATMENT)
    assert messages(found.blockers) == ["levels.c100.requests differs (30 / 60)"]


def test_what_changes_between_launches_of_one_arm_is_a_warning():
    cell = Cell("c1", {"mode": "closed", "concurrency": 1}, {"output_tok_s": 1.0})
    launches = tuple(
        Launch(str(block), block, (cell,), {}, {"clock": clock}) for block, clock in ((0, 2400), (1, 1800))
    )
    found = check(Arm("a", launches), arm("b"), TREATMENT)
    assert messages(found.warnings) == ["`clock` changes between the launches of `a`: 2400 / 1800"]


def test_speculation_that_lowered_the_running_limit_to_48_is_called_queueing():
    base = arm("baseline", {**SAME, "max_running_requests": 2048})
    treatment = arm("eagle3", {**SAME, **SPECULATING, "max_running_requests": 48})
    found = check(base, treatment, TREATMENT)
    assert messages(found.blockers)[0] == (
        "max_running_requests is 2048 in one arm and 48 in the other: speculation lowered it to 48 by itself, so above "
        "C=48 the arms differ in queueing and not in speed; pin it to at least 100 in both"
    )


def test_accepting_the_running_limit_by_name_leaves_the_warning():
    base = arm("baseline", {**SAME, "max_running_requests": 2048})
    treatment = arm("eagle3", {**SAME, **SPECULATING, "max_running_requests": 48})
    found = check(base, treatment, Permission(TREATMENT.treatment, ["max_running_requests"]))
    assert found.blockers == ()
    assert "differ in queueing" in messages(found.warnings)[0]


def test_levels_above_a_shared_running_limit_measure_the_queue():
    effective = {"total_slots": 8}
    found = check(arm("a", effective, highest=16), arm("b", effective, highest=16), TREATMENT)
    assert messages(found.warnings) == ["both arms run at most 8 requests at once: levels above that measure the queue"]


@pytest.mark.parametrize(("other", "blocks"), [(64, False), (256, True)])
def test_a_graph_batch_below_the_running_batch_is_a_slow_path(other, blocks):
    base, treatment = arm("a", {**SAME, "cuda_graph_max_bs": 64}), arm("b", {**SAME, "cuda_graph_max_bs": other})
    found = check(base, treatment, Permission(treatment=["unrelated"]))
    traps = [reason for reason in (found.blockers if blocks else found.warnings) if reason.code == "graph-limit"]
    assert traps[0].message == (
        "the base arm captured CUDA graphs up to batch 64 and runs up to 100: above 64 it leaves the graphs and "
        "decodes on the slow path; raise cuda-graph-max-bs or lower the levels"
    )


@pytest.mark.parametrize(
    ("name", "values", "what"),
    [("stream_interval", (1, 4), "stream interval"), ("incremental_streaming_output", (True, False), "streaming mode")],
)
def test_streaming_in_another_way_blocks(name, values, what):
    base, treatment = (arm(side, {**SAME, name: value}) for side, value in zip("ab", values, strict=True))
    found = check(base, treatment, TREATMENT)
    assert [reason.code for reason in found.blockers] == ["streaming", "differs"]
    assert found.blockers[0].message.startswith(f"the {what} differs (")


def test_random_prompts_without_a_chat_template_block_speculation():
    plan = {"workload.prompts": "random-1k", "workload.dialect": "completions"}
    treatment = {**plan, "server.args.speculative-algorithm": "EAGLE3"}
    found = check(arm("a", plan=plan), arm("b", plan=treatment), TREATMENT)
    assert [reason.code for reason in found.blockers] == ["chat-template"]
    assert check(arm("a", plan=plan), arm("b", plan=plan), TREATMENT).blockers == ()


def test_a_scheduler_that_speculation_turned_off_is_part_of_the_difference():
    base = arm("a", {**SAME, "disable_overlap_schedule": False})
    treatment = arm("b", {**SAME, **SPECULATING, "disable_overlap_schedule": True})
    found = check(base, treatment, TREATMENT)
    assert [reason.code for reason in found.blockers] == ["scheduler", "differs"]
    assert check(base, treatment, Permission(TREATMENT.treatment, ["disable_overlap_schedule"])).blockers == ()


def test_an_accept_length_since_the_servers_start_is_that_of_no_level():
    said = {**SAME, "internal_states.0.avg_spec_accept_length": 2.41}
    result = compare(arm("baseline", SAME), arm("eagle3", said), Settings(permission=TREATMENT))
    assert (
        "`eagle3`: the server tells its accept length only as an average since its start (2.41), which is that of no "
        "level; counter deltas or per-request verify counts would tell"
    ) in result.notes
    assert result.fairness.blockers == ()
    assert result.rows[0].acceptance == {}


def test_blockers_stand_in_every_row_and_the_figures_stay_visible():
    base, treatment = arm("a", SAME), arm("b", {**SAME, "attention_backend": "triton"})
    result = compare(base, treatment, Settings(permission=TREATMENT))
    [row] = result.rows
    assert (row.verdict, row.estimate.ratio) == ("not comparable", pytest.approx(1.0))
    assert result.summary == "not comparable: attention_backend differs (flashinfer / triton)"


def test_nested_plans_are_flattened_by_dotted_names():
    assert flatten({"server": {"args": {"tp": 8, "x": [1, 2]}}, "env": "e"}) == {
        "server.args.tp": 8,
        "server.args.x": [1, 2],
        "env": "e",
    }


def test_a_level_of_one_arm_alone_is_no_difference_between_the_arms():
    """A sweep that stopped early has fewer levels; those that both have must ask the same."""
    one = Arm("a", (Launch("1", 0, (Cell("c1", closed(1, 8), {}), Cell("c2", closed(2, 8), {}))),))
    other = Arm("b", (Launch("2", 0, (Cell("c1", closed(1, 8), {}),)),))
    assert check(one, other, Permission()).blockers == ()
    more = Arm("b", (Launch("2", 0, (Cell("c1", closed(1, 9), {}),)),))
    assert [reason.message for reason in check(one, more, Permission()).blockers] == [
        "levels.c1.requests differs (8 / 9)"
    ]


def closed(concurrency, requests):
    return {"mode": "closed", "concurrency": concurrency, "requests": requests}

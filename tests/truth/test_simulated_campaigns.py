"""Whole campaigns on the simulated engine, whose truth is a formula: what the verdicts say against what is so."""

import gzip
import json
import shutil

import campaign
import pytest
from campaign import ROOT, SIMULATED, TWINS

from harness.cli import main
from harness.recipe.decide import decide
from harness.recipe.references import load_all
from harness.recipe.site import load as load_site
from harness.run import answer, store
from harness.stats.compare import compare
from harness.stats.policy import better_arm, kept_promise

TRUE_CROSSOVER = 8.0  # recipes/simulated/crossover.yaml: (10 + 3.705 b) / 2 = 9.5 + 1.29 b

# What makes the long ones short: fewer and lower levels, a faster clock.
SHORTER = {
    "seeds-eagle3": {
        "[1, 2, 5, 10, 30, 70, 100, 250]": "[1, 10], requests: 24",
        "launches: 3": "launches: 1",
        "256, time-scale: 0.5": "256, time-scale: 0.2",
    },
    "seeds-2x2": {"requests: 12": "requests: 8", "launches: 3": "launches: 2", "time-scale: 0.5": "time-scale: 0.2"},
    "crossover": {
        "concurrency: [2, 5, 12, 30], requests: 36": "concurrency: [4, 16], requests: 32",
        "time-scale: 0.5": "time-scale: 0.25",
    },
    "refine": {
        "[1, 2, 4, 8, 16, 32]": "[2, 4, 8, 16], requests: 24",
        "blocks: 6": "blocks: 3",
        "time-scale: 0.5": "time-scale: 0.2",
    },
}


def place(folder, twin):
    """A project with the simulated recipes in it, the long ones shortened; the path of one of them."""
    (folder / "envspecs").mkdir()
    shutil.copytree(ROOT / "recipes" / "prompts", folder / "recipes" / "prompts")
    shutil.copytree(SIMULATED, folder / "recipes" / "simulated")
    for name, changes in SHORTER.items():
        path = folder / "recipes" / "simulated" / f"{name}.yaml"
        text = path.read_text()
        for old, new in changes.items():
            assert text.count(old) == 1, (name, old)
            text = text.replace(old, new)
        path.write_text(text)
    return folder / "recipes" / "simulated" / f"{twin}.yaml"


def carried_out(folder, twin):
    """A twin run once, from recipe to answer, through the command line."""
    path = place(folder, twin)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        code = main(["run", str(path), "-q"])
    assert code in {0, 1}
    [run] = (folder / "runs").iterdir()
    return store.open_run(run)


def test_every_recipe_of_the_seeds_has_a_twin_that_is_there():
    assert {path.stem for path in campaign.SEEDS.glob("*.yaml")} == set(TWINS)
    assert {path for path in TWINS.values() if not (SIMULATED / f"{path}.yaml").is_file()} == set()


def test_the_seeds_recipe_has_the_shape_of_every_published_row():
    _, plan = decide(SIMULATED / "seeds-eagle3.yaml", load_site())
    rows = [
        (reference.arm, level.concurrency or (250 if level.saturation else None), level.output_tok_s)
        for reference in load_all(ROOT / "recipes" / "references")
        if "cu13" in reference.reference and "serial" not in reference.reference
        for level in reference.levels
    ]
    assert len(rows) == 18
    # Published with 512 tokens a request, where the cut of the last step is nothing.
    far = {row: campaign.throughput(plan.arms[row[0]].args, row[1], 512) / row[2] - 1 for row in rows}
    assert {row: error for row, error in far.items() if abs(error) > 0.10} == {}
    assert {cell.level.concurrency for _, cell in plan.cells()} == {1, 2, 5, 10, 30, 70, 100, 250}


SHORT = sorted({*TWINS.values()} - {"crossover", "refine", "seeds-2x2", "seeds-all-reduce-flags"})


@pytest.mark.timeout(600)
@pytest.mark.parametrize("twin", SHORT)
def test_a_twin_says_of_every_level_what_is_true_of_it(twin, tmp_path):
    """On a machine so busy that levels are lost a row may be "unresolved", but never on the wrong side."""
    run = carried_out(tmp_path, twin)
    true = {(name, level): said for name, level, said in campaign.truth(run.plan())}
    found = {one.treatment: {row.level["name"]: row for row in one.rows} for one in answer.across([run]).comparisons}
    assert {(name, level) for name, rows in found.items() for level in rows} == true.keys()
    assert set(true.values()) <= {"better", "worse"}  # a twin's effects are large
    for (name, level), expected in true.items():
        row = found[name][level]
        assert row.verdict in {expected, "unresolved"}, (name, level, row)
        assert row.direction == ("treatment" if expected == "better" else "base"), (name, level, row)
    also = ALSO.get(twin)
    if also:
        also(run)


def the_trace_has_steps_of_the_length_they_must_have(run):
    """(9.5 + 4 x 1.29) x 0.5 = 7.33 ms and (22.78 + 4 x 6.35) x 0.5 = 24.09 ms a step of four, in microseconds."""
    for launch in run.plan().launches:
        [path] = (run.level_folder(launch.name, "c4") / "profile").iterdir()
        trace = json.loads(gzip.decompress(path.read_bytes()))
        assert trace["simulated"]
        full = [event for event in trace["traceEvents"] if event["args"]["batch"] == 4]
        assert {round(event["dur"], -1) for event in full} == {7330 if launch.arm == "baseline" else 24090}
        assert {event["name"] for event in full} == {"decode" if launch.arm == "baseline" else "verify"}
        # It was asked for 0.4 s of it; a busy machine makes it longer, never shorter.
        assert sum(event["dur"] for event in trace["traceEvents"]) > 300_000
        reasons = {reason.code for reason in run.level(launch.name, "c4").verdict.reasons}
        assert "profile" in reasons
        assert "profile" not in {reason.code for reason in run.level(launch.name, "c2").verdict.reasons}
        assert not (run.level_folder(launch.name, "c2") / "profile").exists()


def wrong_sums_are_seen_in_the_answers(run):
    """Half of the prompts leave their reference; a fast all-reduce that is right changes no answer."""
    told = {one.treatment: one.equivalence.between for one in answer.across([run]).comparisons}
    assert told["pcie-ipc"].identical == told["pcie-ipc"].prompts > 0
    # 48 prompts, each off with chance 1/2 at a token around 8 of 32: outside of this range is one in a billion.
    assert 4 < told["symmetric-memory"].identical < 44


def serial_and_one_at_a_time_agree(run):
    """Published: 96.1 tok/s in the serial script and 80.9 at C=1. On one server such a difference is a finding."""
    checks = [check for one in answer.across([run]).comparisons for check in one.serial]
    assert {check.arm for check in checks} == {"baseline", "eagle3"}
    assert [check for check in checks if check.agree is False] == []


ALSO = {
    "seeds-profile": the_trace_has_steps_of_the_length_they_must_have,
    "seeds-all-reduce": wrong_sums_are_seen_in_the_answers,
    "seeds-serial": serial_and_one_at_a_time_agree,
}


@pytest.mark.timeout(600)
def test_flags_that_do_nothing_are_never_said_to_help_and_never_prove_to_be_engaged(tmp_path):
    run = carried_out(tmp_path, "seeds-all-reduce-flags")
    assert {said for _, _, said in campaign.truth(run.plan())} == {"same"}
    found = answer.across([run]).comparisons
    assert {row.verdict for one in found for row in one.rows} <= {"equivalent", "unresolved"}
    reasons = {
        launch: [reason.message for reason in result.verdict.reasons if reason.code == "feature-not-engaged"]
        for launch, result in run.levels()
    }
    assert {len(said) for launch, said in reasons.items() if "baseline" not in launch} == {1}
    assert {len(said) for launch, said in reasons.items() if "baseline" in launch} == {0}


@pytest.mark.timeout(600)
def test_the_two_by_two_gives_back_the_published_effects(tmp_path):
    """Published: CUDA 12.8 89.5 and 54.1 tok/s, CUDA 13 92.6 and 96.1 tok/s.

    Stack: sqrt(92.6 / 89.5 x 96.1 / 54.1) = 1.356. Speculation: sqrt(54.1 / 89.5 x 96.1 / 92.6) = 0.792. Interaction:
    (96.1 / 92.6) / (54.1 / 89.5) = 1.717.
    """
    [effect] = answer.across([carried_out(tmp_path, "seeds-2x2")]).factorial
    # Two launches of eight requests on a machine that may be busy: near enough to be no other effect.
    assert [one.ratio for one in effect.effects] == pytest.approx([1.356, 0.792, 1.717], rel=0.2)


@pytest.mark.timeout(600)
def test_the_hunt_for_the_crossover_ends_near_it(tmp_path):
    run = carried_out(tmp_path, "refine")
    plan = run.plan()
    assert plan.refined  # the first block was not enough
    added = {cell.level.concurrency for launch, cell in plan.cells() if launch.block > 0}
    assert any(2 < level < 16 for level in added), "launches go where the answer is least certain"
    [found] = answer.across([run]).comparisons
    for crossing in found.crossover.crossings:
        assert crossing.low <= TRUE_CROSSOVER * 1.1
        assert crossing.high >= TRUE_CROSSOVER * 0.9
    sides = {row.concurrency: row.direction for row in found.rows}
    assert (sides[2], sides[16]) == ("treatment", "base")


@pytest.fixture(scope="module")
def crossover(tmp_path_factory):
    """The crossover recipe with two levels, run once: three launches of three arms."""
    return carried_out(tmp_path_factory.mktemp("campaign"), "crossover")


@pytest.mark.timeout(600)
def test_the_known_crossover_is_covered_by_its_interval(crossover):
    """On a machine so busy that the interval is lost the answer may be "not resolved", but never a wrong side."""
    found = {one.treatment: one for one in answer.across([crossover]).comparisons}["fictitious"]
    assert found.simulated
    low, high = found.rows
    assert (low.direction, high.direction) == ("treatment", "base")
    assert low.verdict in {"better", "unresolved"}
    assert high.verdict in {"worse", "unresolved"}
    if {low.verdict, high.verdict} == {"better", "worse"}:
        [crossing] = found.crossover.crossings
        assert crossing.low <= TRUE_CROSSOVER * 1.1  # the line between 4 and 16 crosses within 10 % of the curve
        assert crossing.high >= TRUE_CROSSOVER * 0.9
        assert found.policy.decision == "go in range"
        assert found.policy.levers == {"simulated --speculative-tiers": f"1:0,4:1,{found.policy.on[0][1] + 1}:0"}


@pytest.mark.timeout(600)
def test_the_adaptive_arm_is_nowhere_worse_than_the_better_of_the_two(crossover):
    arms = answer.arms(crossover)
    base, fictitious, adaptive = (arms[name] for name in ("baseline", "fictitious", "adaptive"))
    best = better_arm(base, fictitious, compare(base, fictitious))
    assert kept_promise(compare(best, adaptive), margin=0.05) == ()


def test_the_campaign_says_that_it_is_simulated_wherever_it_speaks(crossover, capsys):
    stored = json.loads((crossover.path / "comparison.json").read_text())
    assert all(comparison["simulated"] for comparison in stored["comparisons"])
    main(["compare", str(crossover.path)])
    assert "(simulated)" in capsys.readouterr().out

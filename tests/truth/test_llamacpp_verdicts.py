"""Verdicts on a real server: llama.cpp with the tiny model, every arm launched more than once, in seconds.

What must come out is known without our code: a draft model as large as its target takes four whole passes before the
one that checks them, which yields five tokens at most, so it cannot win; and a server does not differ from itself.
"""

import json
import math
from collections import defaultdict
from pathlib import Path

import pytest

from harness.cli import main
from harness.env import places
from harness.run import answer, noise, store

ROOT = Path(__file__).resolve().parents[2]
T_ONE_DEGREE = 12.706  # Student's t, two-sided 5 %, one degree of freedom: any printed table

RECIPE = """\
recipe: {name}
question: What does a second launch say?
env: llamacpp-cpu
model: {{path: {model}, name: tiny}}
server:
  engine: llamacpp
  args: {{threads: 1, parallel: 2, ctx-size: 4096}}
arms: {arms}
workload: {{prompts: coding, max_tokens: 24, temperature: 0, seed: 7}}
warmup: {{requests: 1, level_requests: 1}}
sweep: {{concurrency: [1, 2], requests: 6}}
compare: {compare}
timeouts: {{start_s: 120, request_s: 120}}
"""
DRAFTED = """
  baseline: {{}}
  drafted: {{server: {{args: {{spec-type: draft-simple, spec-draft-model: {draft}, spec-draft-n-max: 4}}}}}}"""


@pytest.fixture
def project(tmp_path: Path, llamacpp_python: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project of its own that shares specs, prompts and built environments with the real one, and no noise floor."""
    built = places.home() / "envs"
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "envs").symlink_to(built)
    (tmp_path / "envspecs").symlink_to(ROOT / "envspecs")
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "prompts").symlink_to(ROOT / "recipes" / "prompts")
    monkeypatch.setenv("HARNESS_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("HARNESS_PROJECT", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def carry_out(project: Path, name: str, **parts: object) -> store.Run:
    recipe = project / "recipes" / f"{name}.yaml"
    recipe.write_text(RECIPE.format(name=name, **parts))
    before = set(project.glob("runs/*"))
    # 1: a level is worse. 6: a busy machine made a level suspect. Neither is a fault of the road.
    assert main(["run", str(recipe), "-q"]) in {0, 1, 6}
    [run] = set(project.glob("runs/*")) - before
    return store.open_run(run)


def speeds(run: store.Run, level: str) -> dict[str, dict[int, float]]:
    """tok/s of one level by arm and block, as the level's own file says."""
    found: dict[str, dict[int, float]] = defaultdict(dict)
    for path in run.path.glob(f"launches/*/levels/{level}/level.json"):
        result = json.loads(path.read_text())
        found[result["arm"]][result["block"]] = result["throughput"]["output_tok_s"]
    return found


@pytest.mark.timeout(300)
def test_two_launches_an_arm_give_a_verdict_with_the_interval_of_students_t(
    project: Path, tiny_model: Path, noisy_draft: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arms = DRAFTED.format(draft=noisy_draft)
    compare = '{base: baseline, treatment: ["server.args.spec-*"], launches: 2}'

    run = carry_out(project, "drafted", model=tiny_model, arms=arms, compare=compare)

    assert [launch.arm for launch in run.plan().launches] == ["baseline", "drafted", "drafted", "baseline"]
    found = answer.stored(run)
    assert found is not None
    [comparison] = found.comparisons
    assert [row.key for row in comparison.rows] == ["c1", "c2"]
    for row in comparison.rows:
        estimate = row.estimate
        assert estimate is not None
        assert estimate.launches == 2
        assert row.direction == "base"
        assert row.verdict in {"worse", "unresolved"}, row
        # By hand: two log ratios, their mean, and half their distance (standard deviation over root 2) times t.
        measured = speeds(run, row.key)
        one, other = (
            math.log(measured["drafted"][block] / measured["baseline"][block]) for block in sorted(measured["baseline"])
        )
        middle, reach = (one + other) / 2, T_ONE_DEGREE * abs(one - other) / 2
        assert estimate.ratio == pytest.approx(math.exp(middle))
        assert estimate.interval is not None
        assert estimate.interval.low == pytest.approx(math.exp(middle - reach), rel=1e-3)
        assert estimate.interval.high == pytest.approx(math.exp(middle + reach), rel=1e-3)
        assert 1 < row.acceptance["drafted"] <= 5
    capsys.readouterr()
    main(["compare", str(run.path)])
    assert " to " in capsys.readouterr().out  # the interval is printed


@pytest.mark.timeout(300)
def test_a_server_against_itself_claims_no_difference_and_leaves_its_noise_floor(
    project: Path, tiny_model: Path
) -> None:
    """A table may claim a difference once in twenty by chance, so a claim is asked again: twice the same is a fault."""
    runs = [again(project, tiny_model, "first")]
    if claimed(runs[0]):
        runs.append(again(project, tiny_model, "second"))

    assert not set.intersection(*map(claimed, runs))
    [comparison] = answer.across([runs[-1]]).comparisons
    assert {row.estimate.launches for row in comparison.rows if row.estimate} == {3}
    floor = noise.known(runs[-1], runs[-1].plan().arms["baseline"])
    assert floor is not None
    assert (floor.source, floor.freedom) == (runs[-1].run_id, 3)
    assert 0 < floor.spread < math.log(3)


def again(project: Path, model: Path, name: str) -> store.Run:
    return carry_out(
        project, name, model=model, arms="{baseline: {}}", compare="{base: baseline, aa: true, launches: 3}"
    )


def claimed(run: store.Run) -> set[tuple[str, str]]:
    """Levels that a stored answer calls better or worse."""
    found = answer.stored(run)
    assert found is not None
    return {(row.key, row.verdict) for row in found.comparisons[0].rows if row.verdict in {"better", "worse"}}

"""Whole campaigns on the simulated engine, whose truth is a formula: what the verdicts say against what is so."""

import json
import shutil
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from harness.cli import main
from harness.recipe.references import load_all
from harness.run import answer, store
from harness.stats.compare import compare
from harness.stats.policy import better_arm, kept_promise

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ROOT / "recipes" / "simulated"
TRUE_CROSSOVER = 8.0  # recipes/simulated/crossover.yaml: (10 + 3.705 b) / 2 = 9.5 + 1.29 b


def formula(args):
    """tok/s over concurrency of a recipe's arguments, in model time: b m / (a + k b + s + d g b)."""
    drafts, share = args.get("speculative-tokens", 0), args.get("speculative-acceptance", 0.0)
    tokens = sum(share**position for position in range(drafts + 1))
    step = args["step-ms"] + args.get("speculative-step-ms", 0.0)
    sequence = args["sequence-ms"] + drafts * args.get("speculative-token-ms", 0.0)
    return lambda b: 1000 * b * tokens / (step + sequence * b)


def test_the_seeds_recipe_has_the_shape_of_every_published_row():
    recipe = YAML(typ="safe").load((RECIPES / "seeds-eagle3.yaml").read_text())
    base = recipe["server"]["args"]
    curves = {
        name: formula({**base, **(arm.get("server") or {}).get("args", {})}) for name, arm in recipe["arms"].items()
    }
    rows = [
        (reference.arm, level.concurrency or (250 if level.saturation else None), level.output_tok_s)
        for reference in load_all(ROOT / "recipes" / "references")
        if "cu13" in reference.reference and "serial" not in reference.reference
        for level in reference.levels
    ]
    assert len(rows) == 18
    far = {row: curves[row[0]](row[1]) / row[2] - 1 for row in rows}
    assert {row: error for row, error in far.items() if abs(error) > 0.10} == {}
    assert set(recipe["sweep"]["concurrency"]) == {1, 2, 5, 10, 30, 70, 100, 250}


@pytest.fixture(scope="module")
def campaign(tmp_path_factory):
    """The crossover recipe with two levels, run once: three launches of three arms."""
    place = tmp_path_factory.mktemp("campaign")
    (place / "envspecs").mkdir()
    shutil.copytree(ROOT / "recipes" / "prompts", place / "recipes" / "prompts")
    text = (
        (RECIPES / "crossover.yaml")
        .read_text()
        .replace("concurrency: [2, 5, 12, 30], requests: 36", "concurrency: [4, 16], requests: 32")
    )
    path = place / "recipes" / "crossover.yaml"
    path.write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        code = main(["run", str(path), "-q"])
    assert code in {0, 1}
    [run] = (place / "runs").iterdir()
    return store.open_run(run)


@pytest.mark.timeout(600)
def test_the_known_crossover_is_covered_by_its_interval(campaign):
    """On a machine so busy that the interval is lost the answer may be "not resolved", but never a wrong side."""
    found = {one.treatment: one for one in answer.across([campaign]).comparisons}["fictitious"]
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
def test_the_adaptive_arm_is_nowhere_worse_than_the_better_of_the_two(campaign):
    arms = answer.arms(campaign)
    base, fictitious, adaptive = (arms[name] for name in ("baseline", "fictitious", "adaptive"))
    best = better_arm(base, fictitious, compare(base, fictitious))
    assert kept_promise(compare(best, adaptive), margin=0.05) == ()


def test_the_campaign_says_that_it_is_simulated_wherever_it_speaks(campaign, capsys):
    stored = json.loads((campaign.path / "comparison.json").read_text())
    assert all(comparison["simulated"] for comparison in stored["comparisons"])
    main(["compare", str(campaign.path)])
    assert "(simulated)" in capsys.readouterr().out

"""What the command line prints, whole."""

import shutil
import sys
from pathlib import Path

import pytest
from cli import golden
from cli.conftest import Workplace

from harness.cli import main

ROOT = Path(__file__).parents[2]
STORED = ROOT / "tests" / "files" / "runs"


@pytest.fixture(autouse=True)
def width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")


def test_help_lists_the_verbs_and_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    golden.check("help.txt", capsys.readouterr().out)


def test_the_plan_of_the_simulated_demo(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "executable", "PYTHON")  # its length would decide where lines break
    assert main(["plan", "recipes/simulated/demo-speculation.yaml", "--out", "no-runs-here"]) == 0
    golden.check("plan.txt", capsys.readouterr().out)


def test_what_the_published_flags_do_on_their_stack(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    assert main(["plan", "recipes/seeds/eagle3-vs-baseline.yaml", "--out", "no-runs-here"]) == 0
    golden.check("plan-seeds.txt", capsys.readouterr().out)


def test_a_stored_run_is_shown_and_compared_the_same_way_for_ever(workplace: Workplace) -> None:
    run = workplace.root / "runs" / "simulated"
    shutil.copytree(STORED / "simulated", run)
    shown = workplace.harness("show", run)
    assert shown.code == 0
    golden.check("show.txt", shown.out)
    compared = workplace.harness("compare", run)
    assert compared.code == 1  # worse at a level
    golden.check("compare.txt", compared.out)


def test_several_faults_of_a_recipe_in_one_message(workplace: Workplace) -> None:
    recipe = workplace.changed(
        ("max_tokens: 8", "max_tokns: 8"), ("[1, 2]", "[0]"), ("  baseline: {}", "  baseline: {x: 1}")
    )
    said = workplace.harness("run", recipe.relative_to(workplace.root))
    golden.check("faults.txt", said.err)


def test_the_published_tables_are_compared_from_what_they_hold(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT / "recipes" / "references")
    code = main(["compare", "baseline-cu13-coding-prompts.yaml", "eagle3-cu13-coding-prompts.yaml"])
    said = capsys.readouterr().out
    assert code == 1
    assert "ratio 2.18" in said  # 773 / 354 = 2.1836
    assert "no crossover seen" in said
    assert "no interval is possible" in said
    assert "96.1 tok/s in the serial run, 80.9 at C=1 (+18.8%)" in said  # 96.1 / 80.9 = 1.1879
    golden.check("published.txt", said)

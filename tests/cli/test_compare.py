"""`harness compare`: what it says is compared, what it claims, and its exit code."""

import json
import re
import shutil
from pathlib import Path

import pytest
from conftest import Workplace

from harness.publish import targets
from harness.publish.report import findings, shown
from harness.run import answer, store

ROOT = Path(__file__).resolve().parents[2]
STORED = ROOT / "tests" / "files" / "runs" / "simulated"
TABLE = """\
reference: paper
arm: baseline
server: theirs
source: a paper
hardware: 8 of their GPUs
model: their model
method: their script
levels: [{concurrency: 1, output_tok_s: 100.0}, {concurrency: 2, output_tok_s: 210.0}]
"""


@pytest.fixture
def runs(workplace: Workplace) -> Path:
    """Two runs of two arms: `first`, and `second`, in which one arm has another name and everything was 10 % faster."""
    folder = workplace.root / "runs"
    shutil.copytree(STORED, folder / "first")
    shutil.copytree(STORED, folder / "second")
    plan = (folder / "second" / "plan.json").read_text().replace('"speculative"', '"drafted"')
    (folder / "second" / "plan.json").write_text(plan)
    for path in (folder / "second").glob("launches/*/levels/*/level.json"):
        level = json.loads(path.read_text())
        level["arm"] = level["arm"].replace("speculative", "drafted")
        level["throughput"]["output_tok_s"] *= 1.1
        path.write_text(json.dumps(level))
    return folder


def test_every_arm_that_two_runs_share_is_compared_and_the_rest_is_named(workplace: Workplace, runs: Path) -> None:
    done = workplace.harness("compare", runs / "first", runs / "first", "--json")
    assert [(one["base"], one["treatment"]) for one in done.json["comparisons"]] == [
        ("baseline", "baseline (first)"), ("speculative", "speculative (first)"),
    ]  # fmt: skip

    done = workplace.harness("compare", runs / "first", runs / "second", "--json")
    [one] = done.json["comparisons"]
    assert (one["base"], one["treatment"]) == ("baseline", "baseline (second)")
    assert [row["estimate"]["ratio"] for row in one["rows"]] == pytest.approx([1.1] * 5)
    assert done.json["notes"] == [
        "compared: `baseline`, first against second; left out: `speculative` of first, `drafted` of second"
    ]
    assert done.code == 0
    assert done.json["notes"][0] in workplace.harness("compare", runs / "first", runs / "second").out.replace("\n", " ")


def test_pairs_of_arms_are_compared_as_asked(workplace: Workplace, runs: Path) -> None:
    words = ("--arms", "speculative:drafted", "--treatment", "server.args.*")
    done = workplace.harness("compare", runs / "first", runs / "second", *words, "--json")
    assert [(one["base"], one["treatment"]) for one in done.json["comparisons"]] == [
        ("speculative", "drafted (second)")
    ]

    done = workplace.harness("compare", runs / "first", "--arms", "speculative:baseline", "--json")
    assert [(one["base"], one["treatment"]) for one in done.json["comparisons"]] == [("speculative", "baseline")]
    assert done.json["notes"] == ["compared: `speculative` with `baseline`, within first"]
    assert done.code == 1  # at C=1 nothing beats speculation here


def test_an_arm_that_is_not_there_is_an_error_that_names_those_that_are(workplace: Workplace, runs: Path) -> None:
    done = workplace.harness("compare", runs / "first", runs / "second", "--arms", "speculative:speculative")
    assert done.code == 2
    assert done.err.startswith("error: run `second` has no arm `speculative`")
    assert "drafted" in done.err
    assert workplace.harness("compare", runs / "first", "--arms", "speculative:").code == 2


def test_what_is_not_comparable_shows_both_figures_and_no_ratio_and_the_exit_code_says_so(
    workplace: Workplace, runs: Path
) -> None:
    plan = (runs / "second" / "plan.json").read_text().replace('"max_tokens": 48', '"max_tokens": 24')
    (runs / "second" / "plan.json").write_text(plan)

    done = workplace.harness("compare", runs / "first", runs / "second")

    assert done.code == 6
    rows = [line for line in done.out.splitlines() if line.startswith("│ C=")]
    assert len(rows) == 5
    for row in rows:
        cells = [cell.strip() for cell in row.strip("│").split("│")]
        assert [float(cell) > 0 for cell in cells[1:3]] == [True, True]
        assert cells[3:6] == ["-", "-", "-"]
        assert cells[7] == "not comparable"
    assert "workload.max_tokens differs (48 / 24)" in done.out
    assert "ratio 0" not in done.out  # nor anywhere below the table
    assert "times the decoding speed" not in done.out


def test_a_worse_level_outranks_one_that_cannot_be_compared(workplace: Workplace, runs: Path) -> None:
    shutil.rmtree(runs / "first" / "launches" / "02-speculative" / "levels" / "c2")
    done = workplace.harness("compare", runs / "first", "--json")
    assert {row["verdict"] for row in done.json["comparisons"][0]["rows"]} >= {"worse", "not comparable"}
    assert done.code == 1


def test_a_run_and_a_published_table_are_compared_by_whole_run_throughput(workplace: Workplace, runs: Path) -> None:
    table = workplace.recipe(TABLE, "paper.yaml")

    done = workplace.harness("compare", table, runs / "first", "--json")

    [one] = done.json["comparisons"]
    assert (one["base"], one["treatment"], one["metric"]) == ("paper", "baseline (first)", "output_tok_s_whole")
    measured = json.loads((runs / "first/launches/01-baseline/levels/c1/level.json").read_text())["throughput"]
    assert one["rows"][0]["estimate"]["ratio"] == pytest.approx(measured["output_tok_s_whole"] / 100.0)
    assert any("measured on 8 of their GPUs" in note for note in done.json["notes"])
    assert done.code == 6  # levels that only the run has

    turned = workplace.harness("compare", runs / "first", table, "--json").json["comparisons"]
    assert [(found["base"], found["treatment"]) for found in turned] == [("baseline (first)", "paper")]


def test_no_figure_is_folded_at_120_columns(workplace: Workplace, runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS")
    long = "2026-11-29T203121-a-recipe-with-a-long-name-d47faaba"
    (runs / "second").rename(runs / long)

    compared = workplace.harness("compare", runs / "first", runs / long).out
    shown = workplace.harness("show", runs / "first").out

    found = answer.across([store.Run(runs / "first"), store.Run(runs / long)])
    for row in found.comparisons[0].rows:
        assert row.estimate is not None
        line = next(line for line in compared.splitlines() if line.startswith(f"│ C={row.concurrency} "))
        for figure in (f"{row.estimate.base:.1f}", f"{row.estimate.treatment:.1f}", f"{row.estimate.ratio:.3f}"):
            assert f" {figure} " in line
    assert max(len(line) for line in compared.splitlines() if line.startswith(("┃", "│"))) <= 120
    rows = [line for line in shown.splitlines() if re.match(r"C= +\d+ \|", line)]
    assert len(rows) == 10
    assert all(line.endswith("ok: 32/32") for line in rows)


BUSY = "others were using this machine: load average 5.0 on 2 CPUs before anything started"  # its facts say 4.98


def test_a_run_that_began_on_a_busy_machine_says_so_wherever_it_is_shown(workplace: Workplace, runs: Path) -> None:
    first = workplace.root / "runs" / "first"
    assert workplace.harness("show", first, "--json").json["suspect"] == [BUSY]
    assert f"suspect: {BUSY}" in workplace.harness("show", first).out
    assert workplace.harness("compare", first, "--json").json["suspect"] == [BUSY]
    assert f"suspect: {BUSY}" in workplace.harness("compare", first).out
    (workplace.root / "paper.yaml").write_text(TABLE)
    assert workplace.harness("compare", "paper.yaml", first, "--json").json["suspect"] == [BUSY]
    run = store.open_run(first)
    assert f"suspect: {BUSY}" in targets.entry(run, run.plan(), None).surprises
    [shown_run] = shown.read_all([first])
    assert f"O{BUSY[1:]}." in [finding.text for finding in findings.validity(shown_run)]
    verified = workplace.harness("verify", first)

    quiet = runs / "second"
    facts = json.loads((quiet / "facts.json").read_text())
    facts["before"]["cpu"]["load_average"] = [0.9, 5.0, 5.0]
    (quiet / "facts.json").write_text(json.dumps(facts))
    assert workplace.harness("show", quiet, "--json").json["suspect"] == []
    assert "others were using" not in workplace.harness("compare", quiet).out
    assert workplace.harness("compare", quiet, first, "--json").json["suspect"] == [f"first: {BUSY}"]
    run = store.open_run(quiet)
    assert not any("others" in line for line in targets.entry(run, run.plan(), None).surprises)
    shutil.copyfile(quiet / "facts.json", first / "facts.json")
    assert workplace.harness("verify", first) == verified  # nothing that is stored depends on it

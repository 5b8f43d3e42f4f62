"""`harness reproduce`: a stored run is made again from its record, and what comes out is held against it."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from cli.conftest import QUICK, Workplace, carry_out
from fakes.projects import project

from harness.run import reproduce

# Slow enough for the machine's own noise to be small beside it.
STEADY = QUICK.replace("publish: [{doc: docs/quick.md, block: quick}, logbook]\n", "").replace(
    "step-ms: 2,", "step-ms: 12,"
)
WIDE = "0.9"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A place with one finished run, whose prompts come from a file beside the recipe."""
    root = tmp_path_factory.mktemp("original")
    (root / "envspecs").mkdir()
    (root / "sets").mkdir()
    (root / "sets" / "mine.jsonl").write_text("".join(json.dumps({"text": f"Say {n}."}) + "\n" for n in range(64)))
    (root / "quick.yaml").write_text(STEADY.replace("synthetic:words=8,count=64", "sets/mine.jsonl"))
    carry_out(root)
    return root


@pytest.fixture
def stored(workplace: Workplace, original: Path) -> Path:
    """The run in a copy of that place."""
    shutil.copytree(original, workplace.root, dirs_exist_ok=True)
    workplace.capture.readouterr()
    return workplace.run()


def new_run(root: Path, stored: Path) -> Path:
    [found] = [path for path in (root / "runs").iterdir() if path != stored]
    return found


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def test_the_same_plan_is_run_again_and_every_level_compared(workplace: Workplace, stored: Path) -> None:
    done = workplace.harness("reproduce", stored, "--margin", WIDE, "--json")
    assert done.code == 0, done.out + done.err
    assert done.json["sentence"].startswith("reproduced within ")
    assert done.json["sentence"].endswith("by point estimate, 1 launch an arm: no interval: 4 levels")
    levels = [(level["arm"], level["key"]) for level in done.json["levels"]]
    assert levels == [("baseline", "c1"), ("baseline", "c2"), ("speculative", "c1"), ("speculative", "c2")]
    for level in done.json["levels"]:
        ratio = level["now"] / level["before"]
        assert level["within"] == pytest.approx(max(ratio, 1 / ratio) - 1)
        assert level["certain"] is False
    again = new_run(workplace.root, stored)
    assert read(again / "run.json")["reproduces"] == stored.name
    assert read(again / "run.json")["plan"] == read(stored / "run.json")["plan"]
    assert read(again / "reproduction.json")["of"] == stored.name
    assert done.json["changes"] == []
    assert workplace.servers() == []


def test_a_stored_run_that_was_edited_is_refused_with_what_differs(workplace: Workplace, stored: Path) -> None:
    level = stored / "launches/01-baseline/levels/c2/level.json"
    value = read(level)
    value["throughput"]["output_tok_s"] = 1e6
    level.write_text(json.dumps(value))
    done = workplace.harness("reproduce", stored, "--margin", WIDE)
    assert (done.code, "is not what was measured" in done.err) == (2, True)
    assert "launches/01-baseline/levels/c2/level.json: throughput.output_tok_s: stored 1000000.0, derived " in done.err
    assert list((workplace.root / "runs").iterdir()) == [stored]


def test_what_does_not_come_out_again_is_named_and_so_is_what_else_differs(
    workplace: Workplace, stored: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reproduce, "refuse_changed", lambda _: None)  # the run of another machine, made by hand
    level = stored / "launches/01-baseline/levels/c2/level.json"
    value = read(level)
    value["throughput"]["output_tok_s"] *= 10
    level.write_text(json.dumps(value))
    facts = stored / "facts.json"
    facts.write_text(
        facts.read_text().replace('"kernel": "', '"kernel": "other ').replace('"harness": "', '"harness": "9.')
    )
    comparison = read(stored / "comparison.json")
    for row in comparison["comparisons"][0]["rows"]:
        row["verdict"] = "equivalent"
    (stored / "comparison.json").write_text(json.dumps(comparison))
    done = workplace.harness("reproduce", stored, "--margin", WIDE)
    assert done.code == 1
    assert "not reproduced within 90%" in done.out
    assert ": 1 of 4 levels: baseline c2 -" in done.out
    assert "differs: kernel: other " in done.out
    assert "differs: harness: 9." in done.out
    assert "another answer: speculative against baseline at c1: equivalent before, " in done.out


def test_prompts_that_were_changed_since_come_from_the_record(workplace: Workplace, stored: Path) -> None:
    (workplace.root / "sets" / "mine.jsonl").write_text('{"text": "Something else."}\n')
    (workplace.root / "quick.yaml").unlink()
    done = workplace.harness("reproduce", stored, "--margin", WIDE)
    assert done.code == 0, done.out + done.err
    again = new_run(workplace.root, stored)
    cells = [
        [cell["cell_id"] for launch in read(run / "plan.json")["launches"] for cell in launch["cells"]]
        for run in (stored, again)
    ]
    assert cells[0] == cells[1]
    assert (again / "inputs/recipes/sets/mine.jsonl").read_bytes() == (
        stored / "inputs/recipes/sets/mine.jsonl"
    ).read_bytes()


def test_prompts_that_are_lost_are_an_input_error_before_anything_starts(workplace: Workplace, stored: Path) -> None:
    (workplace.root / "sets" / "mine.jsonl").unlink()
    shutil.rmtree(stored / "inputs")
    done = workplace.harness("reproduce", stored)
    assert (done.code, "not to be had as they were: `sets/mine.jsonl`" in done.err) == (2, True)
    assert list((workplace.root / "runs").iterdir()) == [stored]


def test_an_attempt_that_was_cut_short_is_gone_on_with(workplace: Workplace, stored: Path) -> None:
    workplace.harness("reproduce", stored, "--margin", WIDE)
    again = new_run(workplace.root, stored)
    lost = again / "launches/02-speculative/levels/c2"
    kept = (again / "launches/01-baseline/levels/c1/level.json").read_bytes()
    shutil.rmtree(lost)
    done = workplace.harness("reproduce", stored, "--margin", WIDE, "--resume")
    assert done.code == 0, done.out + done.err
    assert new_run(workplace.root, stored) == again
    assert (lost / "level.json").is_file()
    assert (again / "launches/01-baseline/levels/c1/level.json").read_bytes() == kept


def test_a_run_without_a_finished_level_cannot_be_reproduced(workplace: Workplace, stored: Path) -> None:
    shutil.rmtree(stored / "launches")
    done = workplace.harness("reproduce", stored)
    assert (done.code, "has no finished level to reproduce" in done.err) == (2, True)


@pytest.mark.parametrize("margin", ["0", "1", "much"])
def test_a_margin_that_is_no_share_is_told(workplace: Workplace, stored: Path, margin: str) -> None:
    done = workplace.harness("reproduce", stored, "--margin", margin)
    assert (done.code, f"`{margin}` is not between 0 and 1" in done.err) == (2, True)


def test_environments_are_built_from_the_lock_in_the_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The project has moved on to another release, and the old environment is gone."""
    with project(tmp_path, monkeypatch, capsys) as here:
        here.wheel("leaf", "1.0")
        here.spec("tiny", "packages: [leaf]\n")
        for words in (["lock", "tiny"], ["build", "tiny"]):
            assert here.run(*words).code == 0
        (here.root / "quick.yaml").write_text(STEADY.replace("server:\n  engine", "env: tiny\nserver:\n  engine"))
        assert here.run("run", "quick.yaml").code in {0, 1}
        [stored] = (here.root / "runs").iterdir()
        env_id = read(stored / "launches/01-baseline/launch.json")["env_id"]

        here.wheel("leaf", "2.0")
        assert here.run("lock", "tiny", "--upgrade-all").code == 0
        shutil.rmtree(tmp_path / "home" / "envs")
        done = here.run("reproduce", str(stored), "--margin", WIDE)
        assert done.code == 0, done.out + done.err
        again = new_run(here.root, stored)
        assert read(again / "launches/01-baseline/launch.json")["env_id"] == env_id
        assert 'version = "2.0"' in here.lock("tiny").read_text()  # the project's own lock stays as it is
        assert os.environ["HARNESS_PROJECT"] == str(here.root)
        assert here.run("verify", str(again)).code == 0

        shutil.rmtree(stored / "inputs")  # as an older harness left it
        ledger = stored / "digests.jsonl"
        ledger.write_text("".join(line for line in ledger.read_text().splitlines(True) if '"inputs/' not in line))
        refused = here.run("reproduce", str(stored))
        assert (refused.code, "kept no copy of its lock" in refused.err) == (3, True)

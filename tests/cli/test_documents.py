"""`harness publish`: documents say what was measured, on the machine that measured and on a fresh clone."""

import json
import shutil
from pathlib import Path

import pytest
from cli.conftest import QUICK, Workplace, carry_out

ROOT = Path(__file__).parents[2]
PARTS = """\
# Quick
By hand, above.
<!-- harness:begin quick verdict -->
<!-- harness:end quick -->
Between.
<!-- harness:begin quick comparison -->
<!-- harness:end quick -->
<!-- harness:begin quick levels -->
<!-- harness:end quick -->
<!-- harness:begin quick environment -->
<!-- harness:end quick -->
By hand, below.
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with a finished run: its parts stand in a document, its record in docs/records."""
    root = tmp_path_factory.mktemp("project")
    (root / "envspecs").mkdir()
    (root / "docs").mkdir()
    (root / "docs" / "quick.md").write_text(PARTS)
    (root / "LOGBOOK.md").write_text("# Logbook\n")
    (root / "quick.yaml").write_text(QUICK.replace("logbook]", "logbook, record]"))
    carry_out(root)
    return root


@pytest.fixture
def published(workplace: Workplace, project: Path) -> Path:
    """The run in a copy of that project, which a test may spoil."""
    shutil.copytree(project, workplace.root, dirs_exist_ok=True)
    workplace.capture.readouterr()
    return workplace.run()


def test_the_projects_own_documents_say_what_their_records_say(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HARNESS_PROJECT", str(ROOT))
    done = workplace.harness("publish", "--check", "--out", workplace.root / "no-runs", "--json")
    assert done.code == 0, done.out + done.err
    assert "docs/demo.md: block demo-speculation" in done.json["current"]


def test_each_part_stands_in_its_block_with_the_run_and_the_cells_it_came_from(
    workplace: Workplace, published: Path
) -> None:
    text = (workplace.root / "docs" / "quick.md").read_text()
    verdict, comparison, levels, environment = text.split("<!-- harness:end quick -->")[:4]
    for part in (verdict, comparison, levels, environment):
        assert f"<!-- run {published.name}; plan " in part
    cell = json.loads((published / "launches/01-baseline/levels/c2/level.json").read_text())["cell_id"]
    for part in (verdict, comparison, levels):
        assert f"c2={cell[:12]}" in part
    assert "**speculative against baseline** (simulated): " in verdict
    assert "| level | baseline tok/s | speculative tok/s | ratio |" in comparison
    assert "**baseline**, launch `01-baseline` (simulated)" in levels
    assert "| baseline | simulated | none | - | - |" in environment
    assert "| hardware | " in environment
    for hand in ("By hand, above.", "Between.", "By hand, below."):
        assert hand in text


def test_documents_are_checked_by_the_run_and_on_a_fresh_clone_by_its_record(
    workplace: Workplace, published: Path
) -> None:
    with_run = workplace.harness("publish", "--check", "--json")
    assert (with_run.code, len(with_run.json["current"])) == (0, 4)
    shutil.rmtree(workplace.root / "runs")
    with_record = workplace.harness("publish", "--check", "--json")
    assert (with_record.code, with_record.json) == (0, with_run.json)


def test_a_stale_document_is_exit_1_with_its_diff_and_stays_as_it_is(workplace: Workplace, published: Path) -> None:
    shutil.rmtree(workplace.root / "runs")
    document = workplace.root / "docs" / "quick.md"
    lines = document.read_text().splitlines(keepends=True)
    row = next(number for number, line in enumerate(lines) if line.startswith("| C=2"))
    lines[row] = "| C=2 | 1.0 | 100.0 | 100.000 | - | 0.010 | 1 | better |\n"
    document.write_text("".join(lines))
    before = document.read_text()
    done = workplace.harness("publish", "--check")
    assert done.code == 1
    assert "-| C=2 | 1.0 | 100.0 | 100.000 | - | 0.010 | 1 | better |" in done.out
    assert "documents are stale" in done.err
    assert document.read_text() == before


def test_a_block_whose_run_is_nowhere_is_exit_1_with_the_way_to_mend_it(workplace: Workplace, published: Path) -> None:
    shutil.rmtree(workplace.root / "runs")
    shutil.rmtree(workplace.root / "docs" / "records")
    done = workplace.harness("publish", "--check")
    assert done.code == 1
    assert f"docs/quick.md: block quick verdict: run `{published.name}`" in done.err
    assert "harness publish RUN --record docs/records" in done.err


def test_a_broken_marker_is_exit_2_with_its_line(workplace: Workplace, published: Path) -> None:
    document = workplace.root / "docs" / "quick.md"
    document.write_text(document.read_text().replace("<!-- harness:end quick -->\nBetween.", "Between."))
    done = workplace.harness("publish", "--check")
    assert done.code == 2
    assert "quick.md:3:1: block `quick` begins here and does not end" in done.err


def test_a_record_is_small_names_no_place_and_reads_as_a_run(workplace: Workplace, published: Path) -> None:
    record = workplace.root / "docs" / "records" / published.name
    files = [path for path in record.rglob("*") if path.is_file()]
    assert {path.name for path in files} == {
        "plan.json", "run.json", "facts.json", "launch.json", "level.json", "comparison.json", "record.json",
        "digests.jsonl",
    }  # fmt: skip
    assert sum(path.stat().st_size for path in files) < 60_000
    text = "".join(path.read_text() for path in files if path.name != "plan.json")
    assert str(workplace.root) not in text
    assert json.loads((record / "facts.json").read_text())["before"].get("host") is None
    shown = workplace.harness("show", record, "--json").json
    assert [level["level"]["name"] for level in shown["levels"]] == ["c1", "c2", "c1", "c2"]
    verified = workplace.harness("verify", record, "--json")
    assert (verified.code, verified.json["differences"]) == (0, [])


@pytest.mark.parametrize(
    ("told", "place"),
    [
        ("{WEIGHTS: /home/me/weights}", "`arms.baseline.variables.WEIGHTS` holds a path below a home directory"),
        ("{WEIGHTS: file:///Users/me/weights}", "`arms.baseline.variables.WEIGHTS` holds a path below a home"),
    ],
)
def test_a_run_whose_record_would_tell_of_a_home_directory_does_not_start(
    workplace: Workplace, told: str, place: str
) -> None:
    variables = f"engine: simulated\n  variables: {told}"
    recipe = workplace.changed(("logbook]", "record]"), ("engine: simulated", variables))
    done = workplace.harness("run", recipe.name)
    assert done.code == 2
    assert place in done.err
    assert "/me/" not in done.out + done.err
    assert not (workplace.root / "runs").exists()
    assert workplace.harness("run", recipe.name, "--no-publish").code in {0, 1}


def test_no_record_is_made_of_an_older_plan_with_a_secret_in_it(workplace: Workplace, published: Path) -> None:
    path = published / "plan.json"
    plan = json.loads(path.read_text())
    plan["arms"]["baseline"]["variables"] = {"AUTHORIZATION": "Bearer sekret", "MODE": "hf_abcdefgh"}
    plan["arms"]["baseline"]["unchecked"] = ["--api-key", "sekret"]
    path.write_text(json.dumps(plan))
    records = workplace.root / "elsewhere"
    done = workplace.harness("publish", published, "--record", records)
    assert done.code == 2
    for place in ("variables.AUTHORIZATION", "variables.MODE", "unchecked"):
        assert f"`arms.baseline.{place}` holds a secret" in done.err
    assert "sekret" not in done.out + done.err
    assert not records.exists()


def test_a_record_says_what_the_files_were_that_it_leaves_out(workplace: Workplace, published: Path) -> None:
    record = json.loads((workplace.root / "docs" / "records" / published.name / "record.json").read_text())
    noted = {
        line["path"]: line["sha256"] for line in map(json.loads, (published / "digests.jsonl").read_text().splitlines())
    }
    requests = {path: sha256 for path, sha256 in record["left_out"].items() if path.endswith("requests.jsonl")}
    assert len(requests) == 4
    assert requests == {path: noted[path] for path in requests}


def test_a_changed_record_is_found_by_its_digests(workplace: Workplace, published: Path) -> None:
    record = workplace.root / "docs" / "records" / published.name
    path = record / "launches/01-baseline/levels/c1/level.json"
    path.write_text(path.read_text().replace('"requests":4', '"requests":5', 1))
    done = workplace.harness("verify", record)
    assert done.code == 1
    assert "launches/01-baseline/levels/c1/level.json: sha256: stored" in done.out


def test_a_record_replaces_its_predecessor_and_nothing_else(workplace: Workplace, published: Path) -> None:
    records = workplace.root / "elsewhere"
    first = workplace.harness("publish", published, "--record", records)
    assert (first.code, first.out.strip()) == (0, str(records / published.name))
    (records / published.name / "left-over.json").write_text("{}")
    workplace.harness("publish", published, "--record", records)
    assert not (records / published.name / "left-over.json").exists()
    other = records / "mine" / published.name
    other.mkdir(parents=True)
    refused = workplace.harness("publish", published, "--record", records / "mine")
    assert (refused.code, "is there and is no record" in refused.err) == (2, True)
    again = workplace.harness("publish", records / published.name, "--record", workplace.root / "third")
    assert (again.code, "has no requests" in again.err) == (2, True)


def test_no_record_vouches_for_a_run_that_somebody_changed(workplace: Workplace, published: Path) -> None:
    path = published / "launches/01-baseline/levels/c1/level.json"
    path.write_text(path.read_text().replace('"requests": 4', '"requests": 5', 1))
    done = workplace.harness("publish", published, "--record", workplace.root / "elsewhere")
    assert done.code == 2
    assert "is not as it was measured" in done.err
    assert "launches/01-baseline/levels/c1/level.json" in done.err
    assert not (workplace.root / "elsewhere").exists()


def test_no_document_repeats_numbers_that_somebody_edited(workplace: Workplace, published: Path) -> None:
    path = published / "launches/01-baseline/levels/c1/level.json"
    path.write_text(path.read_text().replace('"requests": 4', '"requests": 5', 1))
    before = {doc: doc.read_bytes() for doc in workplace.root.rglob("*.md")}
    refused = workplace.harness("publish", published)
    assert (refused.code, "is not what was measured" in refused.err) == (2, True)
    assert {doc: doc.read_bytes() for doc in workplace.root.rglob("*.md")} == before
    for checked in (workplace.harness("publish", "--check"), workplace.harness("publish", "--check", published)):
        assert checked.code == 1
        assert "documents repeat runs that are not what was measured" in checked.err
        assert published.name in checked.err


def test_a_run_that_another_process_carries_out_is_not_logged_as_ended(workplace: Workplace, published: Path) -> None:
    from harness.publish import targets
    from harness.run.store import Run

    run = Run(published)
    run.write_state("running")
    assert targets.log_failure(run, run.plan(), workplace.root) is None
    run.write_state("interrupted", error="stopped")
    assert targets.log_failure(run, run.plan(), workplace.root) == "LOGBOOK.md: entry added"


def test_a_figure_is_drawn_beside_its_document_and_a_changed_one_is_stale(workplace: Workplace) -> None:
    pytest.importorskip("vl_convert")
    document = workplace.root / "docs" / "quick.md"
    document.write_text("<!-- harness:begin quick figure -->\n<!-- harness:end quick -->\n")
    assert workplace.harness("run", workplace.recipe()).code in {0, 1}
    figure = workplace.root / "docs" / "figures" / "quick.svg"
    assert figure.read_text().startswith("<svg")
    assert "![Does it help?](figures/quick.svg)" in document.read_text()
    assert workplace.harness("publish", "--check").code == 0
    figure.write_text("<svg/>")
    assert workplace.harness("publish", "--check").code == 1


def test_a_run_that_fails_is_in_the_logbook_too(workplace: Workplace) -> None:
    recipe = workplace.changed(("{step-ms: 2,", "{fault: die-before-ready, step-ms: 2,"))
    done = workplace.harness("run", recipe)
    assert done.code == 5, done.err
    logbook = (workplace.root / "LOGBOOK.md").read_text()
    assert f"- run: `{workplace.run().name}` (failed); environment: none" in logbook
    assert "- question: Does it help?" in logbook
    assert "- answer: failed: server `simulated` did not start: " in logbook


def test_an_unpublished_failure_leaves_the_logbook_alone(workplace: Workplace) -> None:
    recipe = workplace.changed(("{step-ms: 2,", "{fault: die-before-ready, step-ms: 2,"))
    assert workplace.harness("run", recipe, "--no-publish").code == 5
    assert (workplace.root / "LOGBOOK.md").read_text() == "# Logbook\n"


def test_a_run_that_was_never_on_slurm_is_not_published_again_by_following_it(
    workplace: Workplace, published: Path
) -> None:
    document = workplace.root / "docs" / "quick.md"
    document.write_text(PARTS)  # as a newer run would have filled it
    done = workplace.harness("follow", published)
    assert (done.code, "this run has no Slurm jobs" in done.err) == (2, True)
    assert document.read_text() == PARTS


def test_a_run_that_was_refused_before_it_began_is_no_run(workplace: Workplace) -> None:
    """Its cells would stand beside some from other hardware."""
    recipe = workplace.recipe()
    assert workplace.harness("run", recipe, "--name", "first").code in {0, 1}
    facts = workplace.root / "runs" / "first" / "facts.json"
    facts.write_text(facts.read_text().replace('"threads": ', '"threads": 1').replace('"usable": ', '"usable": 9'))
    before = (workplace.root / "LOGBOOK.md").read_text()
    done = workplace.harness("run", recipe, "--resume", workplace.root / "runs" / "first")
    assert (done.code, "measured on other hardware" in done.err) == (2, True)
    assert (workplace.root / "LOGBOOK.md").read_text() == before

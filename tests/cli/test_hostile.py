"""What someone did who tried to break the command line; each case once did."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from cli.conftest import QUICK, Workplace

Wait = Callable[[Callable[[], bool], str], None]
MATRIX = QUICK[: QUICK.index("compare:")] + "timeouts: {start_s: 20, request_s: 20}\n"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("matrix: {server.args.step-ms: []}\n", "`matrix.server.args.step-ms`: must not be empty"),
        ("matrix: {server.args.step-ms: [1]}\nzip: {server.args.step-ms: [2]}\n", "is varied twice"),
        ("matrix: {server.args: [1], server.args.step-ms: [1]}\n", "is varied twice"),
        ("matrix: {server.args.step-ms: [1]}\nexclude: [{server.args.step-ms: 1}]\n", "leaves no combination"),
        ("expect: {speculative: [speculaton]}\n", "has no feature `speculaton`"),
        ("publish: [{doc: ../outside.md, block: x}]\n", "a document lies within the project"),
        ("publish: [{doc: /tmp/outside.md, block: x}]\n", "a document lies within the project"),
        ("hardware: " + "[" * 3000 + "\n", "nested too deep"),
    ],
)
def test_a_recipe_that_cannot_be_meant_is_an_input_error(workplace: Workplace, more: str, message: str) -> None:
    done = workplace.harness("plan", workplace.recipe(MATRIX + more))
    assert (done.code, message in done.err) == (2, True), done.err


def test_a_matrix_value_never_becomes_a_path(workplace: Workplace) -> None:
    text = MATRIX + 'matrix: {server.variables.FOO: ["a/../../../escaped", "b\\nc"]}\n'
    plan = workplace.harness("plan", workplace.recipe(text), "--json").json
    names = [launch["name"] for launch in plan["launches"]]
    assert len(set(names)) == 4
    assert not any(set("/\n") & set(name) for name in names)


@pytest.mark.parametrize("name", ["../escaped", "/absolute", "a\nb", "x" * 200])
def test_a_run_has_a_plain_name(workplace: Workplace, name: str) -> None:
    done = workplace.harness("run", workplace.recipe(), "--name", name)
    assert done.code == 2
    assert "cannot name a run" in done.err


def test_two_rates_are_two_levels_however_near(workplace: Workplace) -> None:
    text = MATRIX.replace("concurrency: [1, 2]", "rate: [20.00000001, 20.00000002, 5]")
    plan = workplace.harness("plan", workplace.recipe(text), "--json").json
    levels = [cell["level"]["name"] for cell in plan["launches"][0]["cells"]]
    assert levels == ["r5", "r20.00000001", "r20.00000002"]


def runs_whole_in_bash(workplace: Workplace, redirected: str) -> None:
    """A run whose command line ends so exits with 0, and is done."""
    workplace.recipe()
    line = f'"{sys.executable}" -m harness run quick.yaml {redirected}'
    done = subprocess.run(["bash", "-c", line], cwd=workplace.root, capture_output=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert workplace.state()["state"] == "done"


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-"])
def test_a_closed_stream_neither_hangs_nor_loses_a_run(workplace: Workplace, closed: str) -> None:
    runs_whole_in_bash(workplace, closed)


@pytest.mark.parametrize("reader", ["2>&1 | head -n 1", "2>&1 >/dev/null | true", "| true"])
def test_a_run_whose_reader_goes_away_goes_on_to_its_end(workplace: Workplace, reader: str) -> None:
    runs_whole_in_bash(workplace, f"{reader}; exit ${{PIPESTATUS[0]}}")


def test_all_documents_that_are_missing_are_named_at_once_and_before_a_run(workplace: Workplace) -> None:
    publish = "publish: [{doc: docs/one.md, block: a}, {doc: docs/two.md, block: b}, logbook]\n"
    recipe = workplace.recipe(MATRIX + publish)
    (workplace.root / "LOGBOOK.md").unlink(missing_ok=True)
    planned, refused = workplace.harness("plan", recipe), workplace.harness("run", recipe)
    assert (planned.code, refused.code) == (0, 2)
    for name in ("one.md", "two.md", "LOGBOOK.md"):
        assert name in refused.err
        assert any("`harness run` will refuse" in line and name in line for line in planned.err.splitlines())


def test_counters_that_could_not_be_read_leave_the_reason_in_the_level(workplace: Workplace) -> None:
    text = MATRIX.replace("sequence-ms: 0.1}", "sequence-ms: 0.1, fault: no-metrics}")
    assert text != MATRIX
    workplace.harness("run", workplace.recipe(text))
    (path, *_) = sorted(workplace.run().glob("launches/*/levels/*/level.json"))
    assert "/metrics` could not be read: 404" in json.loads(path.read_text())["server"]["unread"][0]
    assert workplace.harness("verify", workplace.run()).code == 0


def test_the_newest_run_is_the_last_carried_out_whatever_its_name(workplace: Workplace) -> None:
    for name in ("zebra", "aardvark"):
        workplace.harness("run", workplace.recipe(), "--name", name)
    assert workplace.harness("show", "--json").json["run"] == "aardvark"


def test_a_run_that_went_on_after_an_error_no_longer_tells_it(workplace: Workplace) -> None:
    from harness.run.store import Run

    recipe = workplace.recipe()
    workplace.harness("run", recipe, "--name", "first")
    Run(workplace.root / "runs/first").write_state("interrupted", error="stopped while it was starting")
    assert workplace.harness("run", recipe, "--resume").code == 0
    shown = workplace.harness("show", "runs/first", "--json").json
    assert (shown["state"], shown.get("error")) == ("done", None)


def test_a_run_is_carried_out_by_one_process_at_a_time(workplace: Workplace) -> None:
    from harness.errors import InputError
    from harness.run.store import Run

    workplace.harness("run", workplace.recipe())
    run = Run(workplace.run())
    with run.held(), pytest.raises(InputError, match="carried out by another process"), Run(run.path).held():
        pass


def test_a_server_that_never_answers_can_be_stopped_waiting_for(workplace: Workplace, wait_for: Wait) -> None:
    attach = 'engine: attach\n  url: "http://127.0.0.1:1"'
    text = MATRIX.replace("engine: simulated\n  args: {step-ms: 2, sequence-ms: 0.1}", attach)
    text = text[: text.index("arms:")] + text[text.index("workload:") :]
    process = workplace.start("run", workplace.recipe(text))
    wait_for(lambda: any(workplace.root.glob("runs/*/facts.json")), "the run to begin")
    events = "runs/*/events.jsonl"
    wait_for(lambda: any("launch" in path.read_text() for path in workplace.root.glob(events)), "the launch")
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert workplace.state()["state"] == "interrupted"


@pytest.mark.parametrize("name", ["run.json", "facts.json", "launches/01-baseline/launch.json"])
@pytest.mark.parametrize("content", ["null", "5", "[]", "[" * 100_000])
def test_a_damaged_run_is_told_by_file(workplace: Workplace, name: str, content: str, finished: Path) -> None:
    path = finished / name
    kept = path.read_text()
    path.write_text(content)
    try:
        verb = "show" if name == "run.json" else "compare"
        done = workplace.harness(verb, finished)
        assert done.code == 2
        assert name.rsplit("/", 1)[-1] in done.err
    finally:
        path.write_text(kept)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One finished run for many to damage."""
    root = tmp_path_factory.mktemp("finished")
    (root / "quick.yaml").write_text(QUICK[: QUICK.index("publish:")] + QUICK[QUICK.index("timeouts:") :])
    command = [sys.executable, "-m", "harness", "run", "quick.yaml", "--name", "it", "--json", "-q"]
    done = subprocess.run(command, cwd=root, capture_output=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["state"] == "done"
    return root / "runs" / "it"


@pytest.mark.parametrize("columns", ["", "abc", "-5", "3"])
def test_any_columns_will_do(workplace: Workplace, monkeypatch: pytest.MonkeyPatch, columns: str) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert workplace.harness("plan", workplace.recipe()).code == 0


def test_closed_and_open_loops_stand_in_one_comparison_without_being_mixed_up(workplace: Workplace) -> None:
    workplace.harness("run", workplace.recipe(), "--name", "closed")
    text = QUICK.replace("concurrency: [1, 2]", "rate: [20]")
    workplace.harness("run", workplace.recipe(text), "--name", "open")
    done = workplace.harness("compare", "runs/closed", "runs/open", "--json")
    assert {row["verdict"] for found in done.json["comparisons"] for row in found["rows"]} == {"not comparable"}


@pytest.mark.parametrize("verb", ["show", "compare", "plan", "run"])
def test_a_name_too_long_for_the_file_system_is_an_input_error(workplace: Workplace, verb: str) -> None:
    done = workplace.harness(verb, "x" * 5000)
    assert done.code == 2
    assert "File name too long" in done.err
    assert len(done.err) < 6000


def test_output_that_cannot_be_written_is_told(workplace: Workplace) -> None:
    workplace.recipe()
    line = f'"{sys.executable}" -m harness plan quick.yaml --json > /dev/full'
    done = subprocess.run(["bash", "-c", line], cwd=workplace.root, capture_output=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith(b"error: cannot use the output: No space left on device")
    assert b"Traceback" not in done.stderr


def test_a_bug_of_ours_is_no_answer(workplace: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise KeyError("\x1b[2J")

    monkeypatch.setattr("harness.recipe.decide.decide", broken)
    done = workplace.harness("plan", workplace.recipe())
    assert (done.code, done.out) == (70, "")
    assert "Traceback (most recent call last):" in done.err
    assert "in broken" in done.err
    assert done.err.splitlines()[-1].startswith("error: this is a bug in harness ")
    assert "\x1b" not in done.err


def test_a_refusal_of_the_machine_stays_one_where_it_is_traced(workplace: Workplace) -> None:
    done = workplace.harness("show", "x" * 5000, "-v")
    assert done.code == 2
    assert done.err.startswith("Traceback")
    assert "File name too long\n\nhint:" in done.err

"""`harness run` as a whole command: what it leaves, what it says, how it ends."""

import json
import os
import shutil
import signal
import socket
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from cli.conftest import QUICK, Workplace, interrupt

from harness.stats import validity
from harness.stats.level import LevelResult, Summary

Wait = Callable[[Callable[[], bool], str], None]


def test_a_run_measures_compares_and_publishes(workplace: Workplace) -> None:
    done = workplace.harness("run", workplace.recipe())
    assert done.code in {0, 1}, done.err
    run = workplace.run()
    assert workplace.state()["state"] == "done"
    assert sorted(path.name for path in (run / "launches").iterdir()) == ["01-baseline", "02-speculative"]
    for launch in ("01-baseline", "02-speculative"):
        stopped = json.loads((run / "launches" / launch / "launch.json").read_text())["stop"]
        assert stopped["ok"]
        assert stopped["ports_free"]
        for level in ("c1", "c2"):
            folder = run / "launches" / launch / "levels" / level
            result = json.loads((folder / "level.json").read_text())
            assert (result["ok"], result["requests"]) == (4, 4)
            assert result["output_tokens"] == 4 * 8  # four requests of max_tokens
            assert result["simulated"] is True
    comparison = json.loads((run / "comparison.json").read_text())
    assert [row["key"] for row in comparison["comparisons"][0]["rows"]] == ["c1", "c2"]
    assert "1 launch an arm" in comparison["comparisons"][0]["summary"]
    block = (workplace.root / "docs" / "quick.md").read_text()
    assert run.name in block
    assert "simulated" in block
    entry = (workplace.root / "LOGBOOK.md").read_text()
    assert f"run: `{run.name}`" in entry
    assert "- question: Does it help?" in entry
    assert workplace.servers() == []


def test_a_run_prints_the_seeds_row_for_every_level(workplace: Workplace) -> None:
    done = workplace.harness("run", workplace.recipe())
    rows = [line for line in done.out.splitlines() if line.startswith("C=")]
    assert len(rows) == 4
    assert rows[0].startswith("C=  1 | 4 requests | throughput: ")
    assert rows[0].endswith("s | ok: 4/4")
    # The progress goes to stderr, so that stdout can be piped.
    assert "ready after" in done.err
    assert "ready after" not in done.out


def test_json_is_all_that_stdout_holds(workplace: Workplace) -> None:
    done = workplace.harness("run", workplace.recipe(), "--json", "-q")
    assert done.json["state"] == "done"
    assert len(done.json["levels"]) == 4
    assert done.err == "" or done.err.startswith("warning: ")


def test_run_folders_are_private(workplace: Workplace) -> None:
    workplace.harness("run", workplace.recipe())
    run = workplace.run()
    assert stat.S_IMODE(run.stat().st_mode) == 0o700
    files = [path for path in run.rglob("*") if path.is_file()]
    assert files
    assert {stat.S_IMODE(path.stat().st_mode) & 0o077 for path in files} == {0}


def test_the_plan_starts_nothing_and_agrees_with_the_run(workplace: Workplace) -> None:
    recipe = workplace.recipe()
    plan = workplace.harness("plan", recipe, "--json").json
    assert not (workplace.root / "runs").exists()
    workplace.harness("run", recipe)
    levels = list(workplace.run().rglob("level.json"))
    planned = {cell["cell_id"] for launch in plan["launches"] for cell in launch["cells"]}
    assert {json.loads(path.read_text())["cell_id"] for path in levels} == planned


# Bad input


@pytest.mark.parametrize(
    ("change", "code", "message"),
    [
        (("max_tokens: 8", "max_tokns: 8"), 2, "unknown key `workload.max_tokns`"),
        (("concurrency: [1, 2]", "concurrency: [0]"), 2, "`sweep.concurrency[0]`: must be at least 1, got `0`"),
        (("concurrency: [1, 2]", "concurrency: []"), 2, "`sweep.concurrency`: must not be empty"),
        (("engine: simulated", "engine: simulatd"), 2, "quick.yaml:4:3: unknown engine `simulatd`"),
        (("server:\n  engine", "env: nowhere\nserver:\n  engine"), 2, "there is no spec `nowhere`"),
        (("synthetic:words=8,count=64", "cooking"), 2, "there is no prompt set `cooking`"),
        (("docs/quick.md, block: quick", "docs/quick.md, block: other"), 2, "has no block `other`"),
        (("docs/quick.md", "docs/absent.md"), 2, "docs/absent.md`: No such file"),
        (
            ("server:\n  engine", "model: {path: /nowhere/x.gguf}\nserver:\n  engine"),
            2,
            "no model at `/nowhere/x.gguf`",
        ),
        (("server:\n  engine", 'model: {path: "${NOPE}/x"}\nserver:\n  engine'), 2, "needs `NOPE`"),
    ],
)
def test_a_fault_is_told_before_anything_starts(
    workplace: Workplace, change: tuple[str, str], code: int, message: str
) -> None:
    done = workplace.harness("run", workplace.changed(change))
    assert (done.code, message in done.err) == (code, True), done.err
    assert not (workplace.root / "runs").exists()
    assert "Traceback" not in done.err


def test_an_environment_without_a_lock_is_exit_3_with_the_command(workplace: Workplace) -> None:
    spec = 'env: bare\npython: ">=3.11"\npackages: [six]\n'
    (workplace.root / "envspecs" / "bare.yaml").write_text(spec)
    done = workplace.harness("run", workplace.changed(("server:\n  engine", "env: bare\nserver:\n  engine")))
    assert done.code == 3
    assert "hint: run `harness lock bare`" in done.err


def test_a_taken_port_is_refused_and_its_owner_named_and_left_alone(workplace: Workplace) -> None:
    with socket.socket() as squatter:
        squatter.bind(("127.0.0.1", 0))
        squatter.listen()
        port = squatter.getsockname()[1]
        done = workplace.harness("run", workplace.changed(("engine: simulated", f"engine: simulated\n  port: {port}")))
        assert done.code == 2
        assert f"port {port}: taken by pid {os.getpid()}" in done.err
    assert not (workplace.root / "runs").exists()


def test_a_run_folder_that_exists_is_refused_and_kept(workplace: Workplace) -> None:
    (workplace.root / "runs" / "mine").mkdir(parents=True)
    done = workplace.harness("run", workplace.recipe(), "--name", "mine")
    assert done.code == 2
    assert "run folder `runs/mine` exists already" in done.err


def test_an_output_that_cannot_be_written_is_refused(workplace: Workplace) -> None:
    (workplace.root / "file").write_text("in the way")
    done = workplace.harness("run", workplace.recipe(), "--out", "file/runs")
    assert done.code == 2
    assert "file/runs" in done.err
    assert "Traceback" not in done.err


# Servers that fail


def failing(workplace: Workplace, fault: str, *more: tuple[str, str]) -> Path:
    return workplace.changed(("sequence-ms: 0.1}", f"sequence-ms: 0.1, fault: {fault}}}"), *more)


def test_a_server_that_exits_at_once_is_exit_5_with_its_last_lines(workplace: Workplace) -> None:
    unknown = 'engine: simulated\n  unchecked: ["--step-mss", "2"]'
    done = workplace.harness("run", workplace.changed(("engine: simulated", unknown)))
    assert done.code == 5
    assert "unrecognized arguments: --step-mss" in done.err
    assert workplace.state()["state"] == "failed"
    assert workplace.servers() == []


def test_a_server_that_never_gets_healthy_is_given_up_at_the_deadline(workplace: Workplace) -> None:
    done = workplace.harness("run", failing(workplace, "never-healthy", ("start_s: 20", "start_s: 2")))
    assert done.code == 5
    assert "did not start" in done.err
    assert workplace.servers() == []


def test_a_server_that_answers_500_is_not_ready(workplace: Workplace) -> None:
    done = workplace.harness("run", failing(workplace, "status=500"))
    assert done.code == 5
    assert "HTTP 500" in done.err
    assert workplace.servers() == []


def test_requests_that_fail_make_the_level_invalid_and_exit_6(workplace: Workplace) -> None:
    text = QUICK.replace("sequence-ms: 0.1}", "sequence-ms: 0.1, fault: status=503, fault-from: 4}")
    done = workplace.harness("run", workplace.recipe(text))
    assert done.code == 6, done.err
    assert "invalid: 01-baseline c1" in done.err
    assert workplace.servers() == []


# Interruption and resume

SLOW = QUICK.replace("step-ms: 2", "step-ms: 40")


@pytest.mark.parametrize("stage", ["starting", "warming up", "level c1", "between arms"])
def test_an_interrupt_leaves_nothing_running_and_nothing_lost(workplace: Workplace, wait_for: Wait, stage: str) -> None:
    text = SLOW.replace("sequence-ms: 0.1}", "sequence-ms: 0.1, load-s: 3}") if stage == "starting" else SLOW
    process = workplace.start("run", workplace.recipe(text))
    marks: dict[str, Callable[[], bool]] = {
        "starting": lambda: bool(workplace.servers()),
        "warming up": lambda: any(workplace.root.glob("runs/*/launches/01-baseline/launch.json")),
        "level c1": lambda: any(workplace.root.glob("runs/*/launches/01-baseline/levels/c1")),
        "between arms": lambda: any(workplace.root.glob("runs/*/launches/01-baseline/levels/c2/level.json")),
    }
    try:
        wait_for(marks[stage], stage)
        interrupt(process)
        _, err = process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            process.kill()
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert workplace.servers() == []
    assert workplace.state()["state"] == "interrupted"
    if stage == "between arms":
        assert len(list(workplace.root.glob("runs/*/launches/01-baseline/levels/*/level.json"))) == 2


def test_an_interrupted_run_goes_on_where_it_stopped(workplace: Workplace, wait_for: Wait) -> None:
    recipe = workplace.recipe(SLOW)
    process = workplace.start("run", recipe)
    wait_for(lambda: any(workplace.root.glob("runs/*/launches/01-baseline/levels/c1/level.json")), "the first level")
    interrupt(process)
    process.communicate(timeout=60)
    first = next(workplace.root.glob("runs/*/launches/01-baseline/levels/c1/level.json")).read_text()

    done = workplace.harness("run", recipe, "--resume")
    assert done.code in {0, 1}, done.err
    assert "01-baseline c1: reuse" in done.err
    assert "02-speculative c2: run" in done.err
    assert workplace.state()["state"] == "done"  # in the same folder
    assert (workplace.run() / "launches/01-baseline/levels/c1/level.json").read_text() == first
    assert len(list(workplace.run().rglob("level.json"))) == 4


def test_a_killed_run_can_be_shown_and_goes_on(workplace: Workplace, wait_for: Wait) -> None:
    recipe = workplace.recipe(SLOW)
    process = workplace.start("run", recipe)
    wait_for(lambda: any(workplace.root.glob("runs/*/launches/01-baseline/levels/c1/level.json")), "the first level")
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=60)
    wait_for(lambda: workplace.servers() == [], "the server to follow its harness")
    shown = workplace.harness("show", workplace.run())
    assert shown.code == 0
    assert "not measured: c2" in shown.out
    assert workplace.harness("run", recipe, "--resume").code in {0, 1}
    assert len(list(workplace.run().rglob("level.json"))) == 4


def test_a_changed_recipe_says_which_cells_are_stale_and_why(workplace: Workplace) -> None:
    workplace.harness("run", workplace.recipe())
    done = workplace.harness("plan", workplace.changed(("max_tokens: 8", "max_tokens: 9")), "--json")
    fates = {(cell["launch"], cell["level"]): cell for cell in done.json["cells"]}
    assert fates["01-baseline", "c1"]["fate"] == "stale"
    assert fates["01-baseline", "c1"]["why"] == ["workload.max_tokens changed from 8 to 9"]


def test_a_new_plan_takes_over_the_cells_that_did_not_change(workplace: Workplace) -> None:
    workplace.harness("run", workplace.recipe(), "--name", "first")
    slower = workplace.changed(("speculative-step-ms: 1", "speculative-step-ms: 2"))
    done = workplace.harness("run", slower, "--resume", "--name", "second")
    assert done.code in {0, 1}, done.err
    assert "01-baseline c1: reuse" in done.err
    assert "02-speculative c1: stale because args.speculative-step-ms changed from 1 to 2" in done.err
    old, new = (workplace.root / "runs" / name / "launches/01-baseline/levels/c1" for name in ("first", "second"))
    assert (old / "requests.jsonl").read_bytes() == (new / "requests.jsonl").read_bytes()


def test_a_run_that_is_gone_on_with_keeps_its_name(workplace: Workplace) -> None:
    recipe = workplace.recipe()
    assert workplace.harness("run", recipe, "--name", "first").code in {0, 1}
    first = workplace.root / "runs" / "first"
    for resumed in (["--resume"], ["--resume", first]):
        done = workplace.harness("run", recipe, *resumed, "--name", "clean")
        assert (done.code, "runs/first` is a run of this very plan already" in done.err) == (2, True)
    assert workplace.run() == first
    assert workplace.harness("run", recipe, "--resume", "--name", "first").code in {0, 1}


def test_cells_from_other_hardware_are_not_mixed_in(workplace: Workplace) -> None:
    workplace.harness("run", workplace.recipe(), "--name", "first")
    path = workplace.root / "runs" / "first" / "facts.json"
    facts = json.loads(path.read_text())
    facts["before"]["cpu"]["model"] = "another CPU"
    path.write_text(json.dumps(facts))
    slower = workplace.changed(("speculative-step-ms: 1", "speculative-step-ms: 2"))
    done = workplace.harness("run", slower, "--resume", "--name", "second")
    assert done.code == 2
    assert "measured on other hardware" in done.err


# Reading stored runs


def test_compare_and_publish_read_the_stored_run(workplace: Workplace) -> None:
    workplace.harness("run", workplace.recipe(), "--no-publish")
    run = workplace.run()
    assert "harness" in (workplace.root / "docs" / "quick.md").read_text()
    compared = workplace.harness("compare", run, "--json")
    assert [found["treatment"] for found in compared.json["comparisons"]] == ["speculative"]
    assert workplace.harness("publish", run, "--check").code == 1
    assert workplace.harness("publish", run).code == 0
    assert workplace.harness("publish", run, "--check").code == 0
    document = workplace.root / "docs" / "quick.md"
    document.write_text(document.read_text().replace("| C=1 |", "| C=9 |"))
    stale = workplace.harness("publish", run, "--check")
    assert stale.code == 1
    assert "C=9" in stale.out


def test_what_is_not_a_run_is_refused(workplace: Workplace) -> None:
    done = workplace.harness("show", workplace.root)
    assert done.code == 2
    assert "is not a run" in done.err


def test_an_edited_level_is_told_by_name(workplace: Workplace) -> None:
    workplace.harness("run", workplace.recipe())
    path = next(workplace.run().rglob("level.json"))
    data = json.loads(path.read_text())
    del data["verdict"]
    path.write_text(json.dumps(data))
    done = workplace.harness("show", workplace.run())
    assert done.code == 2
    assert "does not read as LevelResult" in done.err


def test_a_run_folder_can_be_moved_and_read(workplace: Workplace) -> None:
    workplace.harness("run", workplace.recipe())
    moved = workplace.root / "elsewhere"
    shutil.move(workplace.run(), moved)
    assert workplace.harness("show", moved).code == 0


def test_an_a_a_run_claims_nothing_and_gives_the_machine_its_noise_floor(workplace: Workplace) -> None:
    text = QUICK.replace("treatment: [", "aa: true, launches: 2, treatment: [").replace("publish:", "# publish:")
    done = workplace.harness("run", workplace.recipe(text), "--json", "-q")
    [comparison] = done.json["answer"]["comparisons"]
    assert {row["verdict"] for row in comparison["rows"]} <= {"equivalent", "unresolved"}
    [floor] = (workplace.root / ".harness" / "noise").glob("*.json")
    told = json.loads(floor.read_text())
    assert told["freedom"] == 2  # two blocks
    # The next comparison with one launch an arm has an interval, from that floor.
    later = workplace.harness("run", workplace.recipe(), "--json", "-q", "--name", "later")
    [comparison] = later.json["answer"]["comparisons"]
    assert comparison["noise"] == told
    assert all(row["estimate"]["interval"] for row in comparison["rows"])


def test_a_level_that_takes_too_long_is_cut_and_says_so(workplace: Workplace) -> None:
    text = QUICK.replace("step-ms: 2", "step-ms: 100").replace("request_s: 20}", "request_s: 1.9, level_s: 2}")
    done = workplace.harness("run", workplace.recipe(text), "--json", "-q")
    assert done.code == 6
    [reason, *_] = [
        r for level in done.json["levels"] for r in level["verdict"]["reasons"] if r["code"] == "level-timeout"
    ]
    assert reason["message"] == "the level was not over after the 2 s it may take"
    assert workplace.servers() == []


def test_a_sweep_that_asks_for_it_leaves_out_what_lies_beyond_saturation(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Throughput and TTFT are put in by hand: what a busy machine measures would decide by luck."""
    truth = {1: (100.0, 0.01), 2: (200.0, 0.01), 4: (201.0, 0.2), 8: (202.0, 0.6), 16: (203.0, 1.4)}
    judge = validity.judged

    def known(result: LevelResult, context: validity.Context) -> LevelResult:
        speed, ttft = truth[result.level["concurrency"]]
        throughput = result.throughput.model_copy(update={"output_tok_s": speed})
        metrics = {**result.metrics, "ttft_s": Summary(n=4, mean=ttft)}
        return judge(result.model_copy(update={"throughput": throughput, "metrics": metrics}), context)

    monkeypatch.setattr(validity, "judged", known)
    text = QUICK.replace("[1, 2], requests: 4", "[1, 2, 4, 8, 16], requests: 32, stop_when_saturated: true")
    done = workplace.harness("run", workplace.recipe(text), "--json")
    levels = [level["level"]["name"] for level in done.json["levels"] if level["arm"] == "baseline"]
    assert levels == ["c1", "c2", "c4", "c8"]  # 4 and 8 gained less than 2 % over 2, and TTFT rose
    assert "saturated at C=8" in done.err

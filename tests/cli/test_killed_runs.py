"""A run that is looked at while it goes on, and one whose harness is killed: what is on disk, shown, and resumed."""

import json
import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cli.conftest import QUICK, Workplace

from harness.load import spool
from harness.run import store

Wait = Callable[[Callable[[], bool], str], None]
# 8 tokens of 100 ms each: a request takes 0.8 s, a level of 30 about half a minute.
LONG = QUICK.replace("step-ms: 2", "step-ms: 100").replace("requests: 4", "requests: 30")
CLIENT = "runs/*/launches/01-baseline/levels/c1/client"


@pytest.fixture
def going(workplace: Workplace, wait_for: Wait) -> Iterator["subprocess.Popen[str]"]:
    """A run in its first level, whose warm-up request and two more have come back."""
    process = workplace.start("run", workplace.recipe(LONG))
    wait_for(lambda: len(arrived(workplace.root)) >= 3, "three requests")
    yield process
    if process.poll() is None:
        process.kill()
    process.communicate()
    wait_for(lambda: workplace.servers() == [], "the server to follow its harness")


def arrived(root: Path) -> list[str]:
    return [record.prompt_id for folder in root.glob(CLIENT) for record in spool.recover(folder) if record.ok]


def test_a_run_that_goes_on_shows_how_far_it_got(workplace: Workplace, going: "subprocess.Popen[str]") -> None:
    shown = workplace.harness("show", workplace.run())
    assert going.poll() is None
    assert shown.code == 0
    assert ": running\n" in shown.out
    [count] = re.findall(r"01-baseline: not measured: c1 \((\d+) of 30 requests had completed\), c2", shown.out)
    assert int(count) >= 2
    [begun] = workplace.harness("show", workplace.run(), "--json").json["unfinished"]
    assert (begun["launch"], begun["level"], begun["of"]) == ("01-baseline", "c1", 30)
    assert begun["ok"] == begun["completed"] >= int(count)


def test_what_had_arrived_when_the_harness_was_killed_is_shown_and_kept(
    workplace: Workplace, going: "subprocess.Popen[str]", wait_for: Wait
) -> None:
    before = arrived(workplace.root)
    os.kill(going.pid, signal.SIGKILL)
    going.communicate()
    wait_for(lambda: workplace.servers() == [], "the server to follow its harness")
    assert set(arrived(workplace.root)) >= set(before)
    shown = workplace.harness("show", workplace.run())
    assert re.search(r"c1 \(\d+ of 30 requests had completed\)", shown.out)

    run = store.open_run(workplace.run())
    run.start_requests("01-baseline", "c1")  # as a resumed run does
    [attempt] = workplace.root.glob("runs/*/launches/01-baseline/levels/c1/requests.attempt-1.jsonl")
    lines = [json.loads(line) for line in attempt.read_text().splitlines()]
    assert {line["prompt_id"] for line in lines if line["ok"]} >= set(before)
    assert {line["reason"] for line in lines if not line["ok"]} <= {"stopped", "disconnected"}
    assert not list(workplace.root.glob(CLIENT))
    assert not list(run.requests("01-baseline", "c1"))


def test_nothing_that_was_sent_to_the_server_lies_in_the_run_folder_while_a_level_runs(
    workplace: Workplace, going: "subprocess.Popen[str]"
) -> None:
    [folder] = workplace.root.glob(CLIENT)
    assert sorted(path.name for path in folder.iterdir()) == ["frame", "spool0", "zero"]


def test_a_killed_run_can_be_resumed_at_once(workplace: Workplace, wait_for: Wait) -> None:
    text = QUICK.replace("sequence-ms: 0.1}", "sequence-ms: 0.1, fault: ignore-term}").replace(
        "step-ms: 2", "step-ms: 40"
    )
    recipe = workplace.recipe(text)
    process = workplace.start("run", recipe)
    wait_for(lambda: any(workplace.root.glob("runs/*/launches/01-baseline/levels/c1/level.json")), "the first level")
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    # Its server ignores SIGTERM, so it still runs now, and its reaper is at work.
    done = workplace.harness("run", recipe, "--resume")
    assert done.code in {0, 1}, done.err
    assert "01-baseline c1: reuse" in done.err
    assert workplace.servers() == []


def test_a_run_whose_cells_failed_goes_on_in_its_folder_and_keeps_what_failed(workplace: Workplace) -> None:
    flaky = "sequence-ms: 0.1, fault: status=503, fault-from: 4, fault-count: 1}"
    recipe = workplace.recipe(QUICK.replace("sequence-ms: 0.1}", flaky))
    assert workplace.harness("run", recipe).code == 6
    again = workplace.harness("run", recipe, "--resume")
    assert again.code == 6
    run = workplace.run()  # the only one
    assert "01-baseline c1: run because it was invalid: 1 of 4 requests failed: 1 status" in again.err
    assert "01-baseline c2: reuse" in again.err
    level = run / "launches/01-baseline/levels/c1"
    old = json.loads((level / "level.attempt-1.json").read_text())
    assert (level / "server_metrics.attempt-1.jsonl").is_file()
    assert (old["verdict"]["state"], old["ok"]) == ("invalid", 3)
    lines = [json.loads(line) for line in (level / "requests.attempt-1.jsonl").read_text().splitlines()]
    assert [line["ok"] for line in lines if line["phase"] == "measure"].count(True) == 3

"""What Slurm and its machines do to a run half-way, and what the run makes of it."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from slurm.cluster import Cluster
from slurm.conftest import QUICK, Site, ended

pytestmark = pytest.mark.slurm

Wait = Callable[..., None]
# One arm, of which the first level is over at once and the second takes its time.
ONE = QUICK.replace("  slower: {server: {args: {step-ms: 3}}}\n", "").replace("compare: {base: baseline}\n", "")
SLOW = ONE.replace("step-ms: 2", "step-ms: 60").replace("requests: 4}", "requests: 8}")


def begun(place: Site, wait_for: Wait) -> bytes:
    """Wait until the first level is over and the second goes on; returns the mark of the first."""
    first = "launches/01-baseline/levels/c1/level.json"
    wait_for(
        lambda: place.has(first) and place.has("launches/01-baseline/levels/c2/requests.jsonl"), "the second level"
    )
    return (place.folder / first).read_bytes()


def resumed(place: Site, first: bytes) -> dict[str, Any]:
    """Go on with the run; the first level must be reused, and the second measured. Returns the launch."""
    place.recipe(text=SLOW)
    done = place.run("--resume")
    assert done.code == 0, done.err
    assert "01-baseline c1: reuse" in done.err
    assert place.level("01-baseline", "c1").read_bytes() == first
    assert json.loads(place.level("01-baseline", "c2").read_text())["ok"] == 8
    launch: dict[str, Any] = place.json("launches/01-baseline/launch.json")
    return launch


def test_scancel_while_a_server_starts_leaves_nothing(place: Site, wait_for: Wait) -> None:
    place.recipe(("sequence-ms: 0.1}", "sequence-ms: 0.1, fault: never-healthy}"), text=ONE)
    process = place.submit()
    wait_for(lambda: bool(place.servers()), "a server")
    place.cluster.ask("scancel", *place.jobs())
    done = ended(process)
    assert done.code == 130, done.err
    assert f"job {place.jobs()[0]} was cancelled" in done.err
    assert place.servers() == []
    assert place.json("run.json")["state"] == "interrupted"


def test_scancel_in_a_sweep_ends_even_a_child_that_slurm_does_not_see(place: Site, wait_for: Wait) -> None:
    """Under proctrack/linuxproc a child that called setsid outlives its job; our supervisor finds it."""
    place.recipe(("sequence-ms: 0.1}", "sequence-ms: 0.1, fault: setsid-child}"), text=SLOW)
    process = place.submit()
    begun(place, wait_for)
    [child] = [pid for pid in place.servers() if os.getsid(pid) == pid and _is_fault(pid)]
    place.cluster.ask("scancel", *place.jobs())
    done = ended(process)
    assert done.code == 130, done.err
    stop = place.json("launches/01-baseline/launch.json")["stop"]
    assert child in [pid for sent in stop["signals"] if sent["signal"] == "SIGKILL" for pid in sent["to"]]
    assert stop["ok"]
    assert not psutil.pid_exists(child)
    assert not place.level("01-baseline", "c2").exists()


def _is_fault(pid: int) -> bool:
    """Whether a process is the child that the fault `setsid-child` starts: not the server itself."""
    return "harness.engines.simulated_server" not in psutil.Process(pid).cmdline()


def test_a_node_that_fails_costs_the_level_it_was_at_and_leaves_no_survivor(place: Site, wait_for: Wait) -> None:
    place.site(requeue=False)
    place.recipe(("sequence-ms: 0.1}", "sequence-ms: 0.1, fault: setsid-child}"), text=SLOW)
    process = place.submit()
    first = begun(place, wait_for)
    node = place.json("slurm/01/reports/0-0-0.json")["host"]
    [child] = [pid for pid in place.servers() if os.getsid(pid) == pid and _is_fault(pid)]
    _crash(place.cluster, node)
    done = ended(process)
    assert done.code == 5, done.err
    assert f"ended as NODE_FAIL on {node}" in done.err
    assert psutil.pid_exists(child)  # the machine did not really go down, and nobody was left to end it
    # The fault's child is of another cell identity than the run to come: go on with this very recipe.
    resumed_with_child = place.run("--resume")
    assert resumed_with_child.code == 0, resumed_with_child.err
    assert place.level("01-baseline", "c1").read_bytes() == first
    assert not psutil.pid_exists(child)
    events = [json.loads(line) for path in place.folder.glob("events*.jsonl") for line in path.read_text().splitlines()]
    [left] = [event for event in events if event["kind"] == "leftovers"]
    assert f"pid {child}" in left["processes"]
    assert left["survivors"] == 0
    assert "ended what" in resumed_with_child.err
    assert place.json("launches/01-baseline/launch.json")["node"]["name"] != node
    assert place.servers() == []


def _crash(cluster: Cluster, node: str) -> None:
    """A node falls over: its daemon, the agent and the server's reaper die in the same instant."""
    here = cluster.processes_on(node)
    for process in here:
        process.suspend()
    for child in {child for process in here for child in process.children(recursive=True)}:
        with suppress(psutil.Error):  # the server dies with its reaper
            if any(word.endswith("/reaper.py") for word in child.cmdline()):
                child.kill()
    cluster.kill_node(node)
    # As a site's health check would: Slurm itself takes half a minute to be sure.
    cluster.ask("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=fell over")


def test_a_job_that_slurm_starts_again_repeats_no_finished_level(place: Site, wait_for: Wait) -> None:
    place.recipe(text=SLOW)
    process = place.submit()
    first = begun(place, wait_for)
    place.cluster.ask("scontrol", "requeue", *place.jobs())
    done = ended(process)
    assert done.code == 0, done.err
    assert place.level("01-baseline", "c1").read_bytes() == first
    assert place.json("slurm/01/reports/0-0-0.json")["restarts"] == 1
    assert done.err.count("C=  1 | 8 requests") == 1
    assert place.json("run.json")["state"] == "done"


def test_a_job_that_reaches_its_time_limit_keeps_what_it_measured(place: Site, wait_for: Wait) -> None:
    place.site(time="1", grace_s=55)
    place.recipe(("step-ms: 60", "step-ms: 150"), ("requests: 8}", "requests: 60}"), text=SLOW)
    done = ended(place.submit())
    assert done.code == 6, done.err
    assert "reached its time limit; what was measured is kept" in done.err
    assert "hint: go on with `harness run RECIPE --on slurm --resume`" in done.err
    assert place.servers() == []


@pytest.fixture
def unshared(place: Site) -> Iterator[str]:
    """A node that has a folder of its own where everybody else has the runs."""
    runs = place.root / "runs"
    runs.mkdir()
    place.cluster.kill_node("n4")
    mount = f"mount -t tmpfs none '{runs}' && exec \"$@\""
    place.cluster.start_node("n4", wrap=("unshare", "-m", "sh", "-c", mount, "sh"))
    yield "n4"
    place.cluster.kill_node("n4")


def test_a_folder_that_a_node_does_not_share_is_told(place: Site, unshared: str, wait_for: Wait) -> None:
    wait_for(lambda: place.cluster.idle() == 4, "the node")
    place.site(arguments=[f"--nodelist={unshared}"])
    done = place.run()
    assert done.code == 2, done.err
    assert f"on {unshared}, and left nothing in the run folder" in done.err
    assert "on a file system that all machines share?" in done.err


def test_a_controller_that_is_away_for_a_while_is_asked_again(place: Site, wait_for: Wait) -> None:
    place.recipe(text=SLOW)
    process = place.submit()
    begun(place, wait_for)
    place.cluster.daemons["slurmctld"].kill()
    place.cluster.daemons.pop("slurmctld").wait()
    wait_for(lambda: place.cluster.ask("sinfo").returncode != 0, "the controller to be away")
    place.cluster.start_controller()
    done = ended(process)
    assert done.code == 0, done.err


def test_a_launch_is_never_written_by_two_jobs_at_once(place: Site, tmp_path: Path) -> None:
    place.recipe(text=ONE)
    assert place.run("--detach", "--name", "mine").code == 0
    local = place.harness("run", "quick.yaml", "--resume", "--no-publish")
    followed = place.harness("follow", place.folder, "--no-publish")
    assert followed.code == 0, followed.err
    # Whoever came second was refused, or found everything done; nothing was measured twice.
    assert local.code in {0, 2}, local.err
    assert not list(place.folder.rglob("*.attempt-*"))

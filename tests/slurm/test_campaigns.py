"""Whole campaigns on a real Slurm, of one host: what they leave, how they end, what they share with a run here."""

import datetime
import json
import os
import re
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from slurm.conftest import QUICK, Site, ended

pytestmark = pytest.mark.slurm


def test_the_same_plan_gives_the_same_cells_and_numbers_on_slurm_and_here(place: Site) -> None:
    place.recipe(("requests: 4", "requests: 20"), ("max_tokens: 8", "max_tokens: 32"))
    here = place.harness("run", "quick.yaml", "--no-publish", "--out", "here", "--json", "-q")
    there = place.run("--json", "-q")
    assert (here.code, there.code) == (0, 0), there.err
    local, slurm = json.loads(here.out), json.loads(there.out)
    assert slurm["plan"] == local["plan"]
    assert [level["cell_id"] for level in slurm["levels"]] == [level["cell_id"] for level in local["levels"]]
    assert len(slurm["levels"]) == 4
    for one, other in zip(local["levels"], slurm["levels"], strict=True):
        assert one["output_tokens"] == other["output_tokens"] == 20 * 32
        # The server's steps take 2.1 to 3.2 ms whoever starts it; what the machine adds differs, on two noisy cores.
        assert other["metrics"]["tpot_s"]["mean"] == pytest.approx(one["metrics"]["tpot_s"]["mean"], rel=0.25)
    assert slurm["answer"]["comparisons"][0]["rows"]


def test_a_run_says_where_each_launch_ran_and_on_which_cpus(place: Site) -> None:
    place.site(client_cpus=1)
    assert place.run().code == 0
    launch = place.json("launches/01-baseline/launch.json")
    cpus = launch["node"]["cpus"]
    allowed = sorted(os.sched_getaffinity(0))
    assert cpus == {"server": allowed[:-1], "client": allowed[-1:], "shared": False}
    assert re.fullmatch("n[1-4]", launch["node"]["name"])
    assert launch["node"]["job"] == place.jobs()[0]
    assert launch["facts"]["cpu"]["threads"] == os.cpu_count()
    facts = place.json("facts.json")
    assert facts["before"] == facts["nodes"][launch["node"]["name"]] == launch["facts"]
    assert launch["stop"]["ok"]
    assert place.json("run.json")["state"] == "done"
    assert place.servers() == []
    shown = place.harness("show", place.folder).out
    assert f"01-baseline (simulated) on {launch['node']['name']}, job {place.jobs()[0]}" in shown
    assert place.harness("verify", place.folder).code == 0
    # Both launches are compared, so they ran on the same node, one after the other.
    assert place.json("launches/02-slower/launch.json")["node"] == launch["node"]


def test_launches_fan_out_over_the_nodes_as_a_throttled_array(place: Site) -> None:
    place.site(parallel=2)
    arms = "\n".join(f"  a{number}: {{server: {{args: {{step-ms: {number}}}}}}}" for number in range(2, 6))
    text = re.sub(r"arms:\n.*?\nworkload", f"arms:\n{arms}\nworkload", QUICK, flags=re.DOTALL)
    text = text.replace("compare: {base: baseline}\n", "").replace("concurrency: [1, 2]", "concurrency: [1]")
    place.recipe(text=text)
    done = place.run()
    assert done.code == 0, done.err
    assert "submitted 4 pieces as job " in done.err
    assert len(place.jobs()) == 1
    script = (place.folder / "slurm/01/0.sh").read_text()
    assert "#SBATCH --array=0-3%2\n" in script
    launches = [json.loads(path.read_text()) for path in sorted(place.folder.glob("launches/*/launch.json"))]
    assert len({launch["node"]["name"] for launch in launches}) == 2
    # Never more than two at once: each launch began when at most one other was still going. (A quick one may be over
    # before Slurm, which looks at a throttled array every few seconds, starts the next.)
    spans = [(one["started_at"], _stopped(place, one["launch"])) for one in launches]
    assert max(sum(start <= at < end for start, end in spans) for at, _ in spans) <= 2


def _stopped(place: Site, launch: str) -> str:
    """When the stop of a launch was written down, which is the last thing that is."""
    at = (place.folder / "launches" / launch / "launch.json").stat().st_mtime
    return datetime.datetime.fromtimestamp(at, datetime.UTC).isoformat(timespec="milliseconds")


def test_a_detached_run_can_be_followed_later_and_is_compared_then(place: Site) -> None:
    done = place.run("--detach")
    assert done.code == 0, done.err
    assert place.json("run.json")["state"] == "submitted"
    assert "submitted to Slurm" in place.harness("show", place.folder).out
    followed = place.harness("follow", place.folder, "--no-publish")
    assert followed.code == 0, followed.err
    assert "[02-slower] C=  2 | 4 requests" in followed.err
    assert place.json("comparison.json")["comparisons"]
    again = place.harness("follow", place.folder, "--no-publish")  # of a run that is done
    assert again.code == 0, again.err


def test_a_job_whose_id_was_never_noted_is_found_by_its_name(place: Site) -> None:
    assert place.run("--detach").code == 0
    path = place.folder / "slurm" / "jobs.json"
    jobs = json.loads(path.read_text())
    known = jobs["jobs"][0]["job_id"]
    jobs["jobs"][0]["job_id"] = None  # as if the submitter had been killed right after sbatch
    path.write_text(json.dumps(jobs))
    followed = place.harness("follow", place.folder, "--no-publish")
    assert followed.code == 0, followed.err
    assert place.jobs() == [known]


def test_a_server_that_fails_on_a_node_is_exit_5_with_its_last_lines(place: Site) -> None:
    place.recipe(("sequence-ms: 0.1}", 'sequence-ms: 0.1, fault: "die-before-ready=CUDA error: out of memory"}'))
    done = place.run()
    assert done.code == 5
    assert "CUDA error: out of memory" in done.err
    assert re.search(r"\(job \d+ on n[1-4]\)", done.err)
    assert place.json("run.json")["state"] == "failed"
    assert place.servers() == []


def test_a_squatter_on_a_node_is_named_and_left_alone(place: Site) -> None:
    with socket.socket() as squatter:
        squatter.bind(("127.0.0.1", 0))
        squatter.listen()
        port = squatter.getsockname()[1]
        place.recipe(("engine: simulated", f"engine: simulated\n  port: {port}"))
        done = place.run()
    assert done.code == 2
    assert f"port {port}: taken by pid {os.getpid()}" in done.err


def test_a_node_without_the_environment_is_exit_3_with_the_command(place: Site) -> None:
    place.variables = {"HARNESS_PROJECT": str(Path(__file__).parents[2]), "HARNESS_HOME": str(place.root / "home")}
    recipe = Path(__file__).parents[2] / "recipes" / "demo-speculation.yaml"
    done = place.harness("run", recipe, "--on", "slurm", "--no-publish", "--out", "runs")
    assert done.code == 3, done.err
    assert "is not built here (job " in done.err
    assert "hint: run `harness build llamacpp-cpu`" in done.err


# Bad input


def test_a_partition_that_is_not_there_is_refused_in_slurms_own_words(place: Site) -> None:
    place.site(partition="nowhere")
    done = place.run()
    assert done.code == 2
    assert "Slurm does not take the job" in done.err
    assert "invalid partition specified: nowhere" in done.err
    assert place.cluster.queue() == ""
    assert place.json("run.json")["state"] == "failed"


def test_a_job_that_waits_for_ever_is_told_and_cancelled_when_asked(place: Site) -> None:
    place.site(partition="closed")
    done = place.run("--cancel-hopeless")
    assert done.code == 2
    assert "waits: PartitionDown" in done.err
    assert "was cancelled, because it waited for `PartitionDown`" in done.err
    assert place.cluster.queue() == ""


def test_a_machine_without_slurm_says_so_before_there_is_a_run(place: Site) -> None:
    place.variables = {"PATH": "/nowhere"}
    done = place.run()
    assert done.code == 2
    assert "there is no Slurm here: `sinfo` is not installed" in done.err
    assert not (place.root / "runs").exists()


def test_a_controller_that_does_not_answer_is_exit_5_before_there_is_a_run(place: Site) -> None:
    conf = (place.cluster.root / "slurm.conf").read_text()
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    conf = re.sub(r"SlurmctldPort=\d+", f"SlurmctldPort={port}", conf).replace("MessageTimeout=10", "MessageTimeout=2")
    (place.root / "slurm.conf").write_text(conf)
    place.variables = {"SLURM_CONF": str(place.root / "slurm.conf")}
    done = place.run()
    assert done.code == 5, done.err
    assert "Slurm's controller does not answer" in done.err
    assert not (place.root / "runs").exists()


def test_the_plan_shows_the_script_that_is_submitted(place: Site) -> None:
    shown = place.harness("plan", "quick.yaml", "--on", "slurm", "--name", "mine")
    assert shown.code == 0, shown.err
    assert place.run("--name", "mine", "--detach").code == 0
    script = (place.folder / "slurm" / "01" / "0.sh").read_text()
    # All of it but the token, which is new each time.
    assert re.sub("[0-9a-f]{6,16}", "", script) in re.sub("[0-9a-f]{6,16}", "", shown.out)


def test_an_unknown_key_of_the_site_file_is_refused_with_its_line(place: Site) -> None:
    (place.root / "site.yaml").write_text("slurm:\n  partition: all\n  acount: me\n")
    done = place.run()
    assert done.code == 2
    assert "site.yaml:3:3: unknown key `slurm.acount`" in done.err
    assert "did you mean `account`?" in done.err


def test_a_run_that_still_has_jobs_is_not_submitted_again(place: Site) -> None:
    place.site(partition="closed")
    assert place.run("--detach").code == 0
    done = place.run("--resume")
    assert done.code == 2
    assert f"still has jobs: {place.jobs()[0]}" in done.err


def test_clean_knows_the_jobs_of_runs_that_are_gone(place: Site) -> None:
    place.site(partition="closed")
    assert place.run("--detach", "--name", "kept").code == 0
    assert place.run("--detach", "--name", "gone").code == 0
    kept, gone = (json.loads((place.root / "runs" / name / "slurm/jobs.json").read_text()) for name in ("kept", "gone"))
    for path in sorted((place.root / "runs" / "gone").rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    (place.root / "runs" / "gone").rmdir()
    shown = place.harness("clean", "--dry-run")
    assert shown.code == 0, shown.err
    assert f"job {gone['jobs'][0]['job_id']}" in shown.out
    assert len(place.cluster.queue().splitlines()) == 2
    done = place.harness("clean")
    assert done.code == 0, done.err
    assert place.cluster.queue().split()[0] == kept["jobs"][0]["job_id"]


def test_interrupting_a_run_cancels_its_jobs(place: Site, wait_for: Callable[..., None]) -> None:
    place.recipe(("step-ms: 2", "step-ms: 200"))
    process = place.submit()
    wait_for(lambda: place.has("launches/01-baseline/levels/c1"), "the first level")
    os.killpg(process.pid, signal.SIGINT)
    done = ended(process)
    assert done.code == 130, done.err
    assert "was cancelled; what was measured is kept" in done.err
    assert place.servers() == []
    assert place.json("run.json")["state"] == "interrupted"

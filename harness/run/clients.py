"""Which machines offer a launch's load, where that is not simply the one that measures.

`client: {nodes: M}` takes the server's own machines first, its first one above all, and others after them;
`node: separate` takes machines that no server runs on. Each runs one `harness.load.worker`; rank 0 coordinates.
"""

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from harness.load.distributed import Workers
from harness.recipe.plan import Plan, PlannedArm
from harness.run import rendezvous
from harness.run.store import Run

_HOME = str(Path(__file__).resolve().parents[2])
_LEAVE_S = 15.0  # from goodbye to the end of a worker's process
_LOOK_S = 0.2


def apart(plan: Plan) -> bool:
    """Whether the load comes from elsewhere than the one machine that measures."""
    return plan.client.nodes > 1 or plan.client.node == "separate"


def offers(plan: Plan, arm: PlannedArm, rank: int) -> bool:
    """Whether the machine of a rank offers load to an arm's servers; ranks from `arm.nodes` on run no server."""
    if not apart(plan):
        return False
    first = arm.nodes if plan.client.node == "separate" else 0
    return first <= rank < first + plan.client.nodes


def contact(run: Run, launch: str) -> Path:
    """The file by which a launch's workers find their coordinator."""
    return run.launch_folder(launch) / "clients.json"


@contextmanager
def gathered(run: Run, plan: Plan, launch: str, stop: threading.Event) -> Iterator[Workers]:
    """The machines that offer a launch's load, all of them there; this one among them where the plan says so.

    Raises:
        ServerError: some did not come while a server may start.
    """
    arm = plan.arms[next(planned.arm for planned in plan.launches if planned.name == launch)]
    place = contact(run, launch)
    with contextlib.ExitStack() as closing:
        if offers(plan, arm, 0):
            closing.enter_context(worker(place, plan.start_timeout_s))
        workers = closing.enter_context(Workers(place, plan.client.nodes, rendezvous.address()))
        names = workers.gather(plan.start_timeout_s, stop)
        run.event("clients", launch=launch, machines=names)
        yield workers


@contextmanager
def worker(place: Path, wait_s: float, cpus: tuple[int, ...] = ()) -> Iterator["subprocess.Popen[bytes]"]:
    """A worker's process on this machine, on these CPUs (empty: all that we may use); leaving this ends it.

    It ends by itself when its coordinator says goodbye, or is gone.
    """
    paths = filter(None, [_HOME, os.environ.get("PYTHONPATH")])
    words = [sys.executable, "-P", "-m", "harness.load.worker", str(place), "--wait-s", str(wait_s)]
    process = subprocess.Popen(
        [*words, "--name", rendezvous.node()],
        stdin=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        start_new_session=True,  # an interrupt is for us, who then say goodbye
    )
    if cpus:
        os.sched_setaffinity(process.pid, cpus)
    try:
        yield process
    finally:
        try:
            process.wait(_LEAVE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def offer(run: Run, launch: str, wait_s: float, stop: threading.Event, cpus: tuple[int, ...] = ()) -> int:
    """Offer load from this machine, on which no server runs, until the coordinator says goodbye; its exit code."""
    with worker(contact(run, launch), wait_s, cpus) as process:
        while process.poll() is None:
            if stop.wait(_LOOK_S):
                process.terminate()
                return 0
    return process.returncode

"""The program that a job starts on each of its machines: it carries out its piece of the plan as `local` would.

    python -m harness.run.node_agent RUN SUBMISSION BATCH TOKEN [--step N]

Rank 0 measures: the same supervisor, reaper and sweep as on one machine. The other ranks start their part of a server
that spans machines when rank 0 calls. Whatever happens is written into the run folder, by files that are replaced
whole; the exit code is that of the error, 78 where the run folder is not the one that was meant.
"""

import argparse
import json
import math
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from harness.errors import HarnessError, Interrupted, MeasurementError
from harness.files import append_line
from harness.recipe.plan import Plan, PlannedCell, PlannedLaunch
from harness.recipe.site import Site
from harness.run import clients, needs, ranks, supervise
from harness.run import facts as machine
from harness.run.executors import local
from harness.run.executors.slurm import queue
from harness.run.executors.slurm.orders import ANOTHER_FOLDER, NOT_SHARED, Report, Submission, SubmittedOrder
from harness.run.store import Run, now, open_run

_HOLD_S = 60.0  # a twin that Slurm gave up, or the file system's word that it is dead, may take so long
_PROGRESS_S = 1.0  # between two lines about the same level
_LOOK_S = 1.0
_SIGNALS_S = 1.0  # how much later than others we may get a signal that is sent to all
_LIMIT_SLACK_S = 65.0  # sbatch(1), --signal: "may be sent up to 60 seconds earlier than specified"
_COUNT = {"valid", "suspect"}
_RESUME = "go on with `harness run RECIPE --on slurm --resume`"


@dataclass(frozen=True, slots=True)
class Place:
    """Where in a job this agent runs, as Slurm's variables say it."""

    job: str = "0"
    task: int = 0
    rank: int = 0
    node: str = field(default_factory=socket.gethostname)
    nodelist: str = ""
    restarts: int = 0

    @classmethod
    def of(cls, variables: Mapping[str, str]) -> "Place":
        """Read the variables of a step (srun(1), "OUTPUT ENVIRONMENT VARIABLES")."""
        return cls(
            job=variables.get("SLURM_JOB_ID", "0"),
            task=int(variables.get("SLURM_ARRAY_TASK_ID", 0)),
            rank=int(variables.get("SLURM_PROCID", 0)),
            node=variables.get("SLURMD_NODENAME") or socket.gethostname(),
            nodelist=variables.get("SLURM_STEP_NODELIST") or variables.get("SLURM_JOB_NODELIST", ""),
            restarts=int(variables.get("SLURM_RESTART_COUNT", 0)),
        )


@dataclass(frozen=True, slots=True)
class Split:
    """The CPUs of this machine that are ours, divided between servers and the load client; one CPU is shared."""

    server: tuple[int, ...]
    client: tuple[int, ...]

    @property
    def shared(self) -> bool:
        """Whether both run on the same CPUs."""
        return self.server == self.client

    def to_json(self) -> dict[str, Any]:
        """As `launch.json` has it."""
        return {"server": list(self.server), "client": list(self.client), "shared": self.shared}


def split_cpus(allowed: Sequence[int], wanted: int | None) -> Split:
    """The last CPUs for the client, as many as the site says, else a quarter of them and at least one.

    Args:
        allowed: the CPUs that this job may use here.
        wanted: what the site says.
    """
    cpus = tuple(sorted(allowed))
    count = min(wanted or max(1, len(cpus) // 4), len(cpus) - 1)
    return Split(cpus[:-count], cpus[-count:]) if count > 0 else Split(cpus, cpus)


@dataclass(frozen=True, slots=True)
class Errand:
    """Everything an agent is told."""

    run: Run
    plan: Plan
    submission: Submission
    order: SubmittedOrder
    number: int
    launches: tuple[str, ...]
    place: Place

    @property
    def site(self) -> Site:
        """Site facts as they were where the job was submitted."""
        return Site(self.submission.path / "order.json", self.order.variables)

    def report(self, state: Literal["running", "done", "failed", "interrupted"], **facts: Any) -> None:
        """Say how it goes; what was said of this very start before, and is not said anew, stands."""
        place = self.place
        before = self.submission.report(self.number, place.task, place.rank)
        if before is not None and _same_start(before, place):
            facts = {"launches": before.launches, "facts": before.facts, **facts}
        report = Report(
            state=state,
            host=place.node,
            job=place.job,
            restarts=place.restarts,
            pid=os.getpid(),
            at=now(),
            **facts,
        )
        self.submission.write_report(self.submission.report_path(self.number, place.task, place.rank), report)


class Progress:
    """Events of a run as lines in a shared file, for whoever follows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._next: dict[str, float] = {}

    def tell(self, kind: str, **facts: Any) -> None:
        """One event; a level's result is left out, because it lies in the run folder."""
        if kind == "level-progress":
            if time.monotonic() < self._next.get(facts["launch"], 0.0):
                return
            self._next[facts["launch"]] = time.monotonic() + _PROGRESS_S
        if "result" in facts:
            facts = {**facts, "level": facts["result"].level["name"], "result": None}
        append_line(self._path, json.dumps({"kind": kind, "facts": facts}, ensure_ascii=False))


def main(argv: Sequence[str] | None = None) -> int:
    """Carry out what this agent was started for; returns its exit code."""
    parser = argparse.ArgumentParser(prog="harness.run.node_agent")
    parser.add_argument("run", type=Path)
    parser.add_argument("submission")
    parser.add_argument("number", type=int)
    parser.add_argument("token")
    parser.add_argument("--step", type=int, default=0)
    arguments = parser.parse_args(argv)
    place = Place.of(os.environ)
    if not _shared(arguments.run / "slurm" / arguments.submission / "token", arguments.token):
        sys.stderr.write(
            f"error: `{arguments.run}` on {place.node} {ANOTHER_FOLDER}\n\n"
            "hint: put runs on a file system that all machines share: `--out DIR`\n"
        )
        return NOT_SHARED
    try:
        errand = _errand(arguments, place)
    except HarnessError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    stop = threading.Event()
    with _told_to_stop(stop):
        return _reported(errand, stop)


def _shared(path: Path, token: str) -> bool:
    try:
        return path.read_text() == token
    except OSError:
        return False


def _errand(arguments: argparse.Namespace, place: Place) -> Errand:
    found = open_run(arguments.run)
    run = Run(found.path, writer=f"{arguments.submission}-{arguments.number}-{place.task}")
    submission = Submission(run, arguments.submission)
    order = submission.order()
    piece = order.batches[arguments.number][place.task]
    launches = piece.steps[arguments.step].launches
    return Errand(run, run.plan(), submission, order, arguments.number, launches, place)


def _reported(errand: Errand, stop: threading.Event) -> int:
    """Do it, and leave a report however it ends."""
    try:
        troubles = _measure(errand, stop) if errand.place.rank == 0 else _serve(errand, stop)
    except HarnessError as error:
        state: Literal["failed", "interrupted"] = "interrupted" if isinstance(error, Interrupted) else "failed"
        said = {"exit_code": error.exit_code, "message": error.message, "hint": error.hint, "details": error.details}
        errand.report(state, **said)
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    except BaseException as error:
        traceback.print_exc()
        errand.report("failed", exit_code=5, message=f"{type(error).__name__}: {error}", details=["see its log"])
        raise
    errand.report("done", exit_code=0, troubles=tuple(troubles))
    return 0


@contextmanager
def _told_to_stop(stop: threading.Event) -> Iterator[None]:
    """SIGTERM, from `scancel` or some time before the job's limit, ends what runs; Slurm sends it more than once."""
    before = {number: signal.signal(number, lambda *_: stop.set()) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _measure(errand: Errand, stop: threading.Event) -> list[str]:
    """Rank 0: every launch of the piece that is not finished, in the plan's order; returns troubles."""
    plan = errand.plan
    progress = Progress(errand.submission.progress_path(errand.number, errand.place.task))
    todo = [launch for launch in plan.launches if launch.name in errand.launches and _unfinished(errand.run, launch)]
    here = machine.collect()
    errand.report("running", launches=tuple(launch.name for launch in todo), facts=here)
    _clear(errand, progress)
    arms = {launch.arm: plan.arms[launch.arm] for launch in todo}
    for trouble in needs.before(plan.model_copy(update={"arms": arms}), errand.site, errand.run.path):
        progress.tell("note", text=f"{errand.place.node}: warning: {trouble}")
    split = _split_here(errand)
    deadline = time.monotonic() + plan.run_timeout_s if plan.run_timeout_s else math.inf
    job = local.Job(
        errand.run,
        plan,
        errand.site,
        progress.tell,
        stop,
        deadline,
        node=_where(errand, split, here),
        server_cpus=split.server,
    )
    return _carried_out(errand, job, todo)


def _carried_out(errand: Errand, job: local.Job, todo: Sequence[PlannedLaunch]) -> list[str]:
    troubles: list[str] = []
    for launch in todo:
        try:
            with errand.run.held(launch=launch.name, patience_s=_HOLD_S):
                if cells := _unfinished(errand.run, launch):
                    troubles += local.carry_out(job, launch, cells)
        except HarnessError as error:
            # Slurm signals every process of a step, so what fails first may be the load client, or the server.
            if isinstance(error, Interrupted) or job.stop.wait(_SIGNALS_S):
                raise _told_why(errand) from error
            raise
        _stop_here(job, errand)
    return troubles


def _split_here(errand: Errand) -> Split:
    """Who runs on which CPUs of the head; the agent, and with it the load client, keeps to its own from here on."""
    allowed = tuple(sorted(os.sched_getaffinity(0)))
    if errand.plan.client.node == "separate":
        return Split(allowed, ())
    split = split_cpus(allowed, errand.order.client_cpus)
    os.sched_setaffinity(0, split.client)
    return split


def _stop_here(job: local.Job, errand: Errand) -> None:
    """Raise where the piece may not go on."""
    if job.stop.is_set():
        raise _told_why(errand)
    if time.monotonic() > job.deadline:
        raise MeasurementError(f"the piece took longer than the {errand.plan.run_timeout_s:g} s it may")


def _told_why(errand: Errand) -> HarnessError:
    """The clock, where the job's limit is near; else somebody."""
    left = queue.time_left(errand.place.job)
    if left is not None and left <= errand.order.grace_s + _LIMIT_SLACK_S:
        return MeasurementError(
            f"job {errand.place.job} reached its time limit; what was measured is kept", hint=_RESUME
        )
    told = f"job {errand.place.job} was told to stop on {errand.place.node}; what was measured is kept"
    return Interrupted(told, hint=_RESUME)


def _unfinished(run: Run, launch: PlannedLaunch) -> list[PlannedCell]:
    """The cells of a launch that this run has not measured, or only in vain."""
    return [cell for cell in launch.cells if not _finished(run, launch, cell)]


def _finished(run: Run, launch: PlannedLaunch, cell: PlannedCell) -> bool:
    result = run.level(launch.name, cell.level.name)
    return result is not None and result.cell_id == cell.cell_id and result.verdict.state in _COUNT


def _clear(errand: Errand, progress: Progress) -> None:
    """End what a killed agent of this very run left on this machine; say what others left.

    Slurm does not always do it: a process that called setsid outlives its job under `proctrack/linuxproc`.
    """
    for left in supervise.leftovers():
        members = "; ".join(map(str, left.members))
        if not left.launch.startswith(f"{errand.run.run_id}/"):
            progress.tell("note", text=f"{errand.place.node}: left behind by `{left.launch}`: {members}")
            continue
        survivors = supervise.end(list(left.identities))
        errand.run.event(
            "leftovers", node=errand.place.node, launch=left.launch, processes=members, survivors=len(survivors)
        )
        progress.tell("note", text=f"{errand.place.node}: ended what `{left.launch}` had left behind: {members}")
    supervise.leftovers()  # drops the rosters of those that are gone


def _where(errand: Errand, split: Split, here: Mapping[str, Any]) -> dict[str, Any]:
    """What `launch.json` says about where it ran."""
    place = errand.place
    node = {
        "name": place.node,
        "nodes": place.nodelist,
        "job": place.job,
        "task": place.task,
        "restarts": place.restarts,
        "cpus": split.to_json(),
    }
    return {"node": node, "facts": dict(here)}


def _serve(errand: Errand, stop: threading.Event) -> list[str]:
    """A rank above 0: its part of each launch that spans so many machines, or its share of the load."""
    errand.report("running")
    launches = _called_for(errand, stop)
    over = threading.Event()
    watch = threading.Thread(target=_watch_head, args=(errand, stop, over), name="head", daemon=True)
    watch.start()
    troubles = []
    try:
        for launch in (launch for launch in errand.plan.launches if launch.name in launches):
            code = 0 if stop.is_set() else _take_part(errand, launch, stop)
            troubles += [f"rank {errand.place.rank} of `{launch.name}` ended with {code}"] if code else []
    finally:
        over.set()
        watch.join()
    return troubles


def _take_part(errand: Errand, launch: PlannedLaunch, stop: threading.Event) -> int:
    """What this machine is for in a launch: a rank of the server, load, both, or nothing; the worst exit code."""
    run, plan, rank = errand.run, errand.plan, errand.place.rank
    arm = plan.arms[launch.arm]
    offers = clients.offers(plan, arm, rank)
    if rank >= arm.nodes:
        return clients.offer(run, launch.name, plan.start_timeout_s, stop) if offers else 0
    cpus = ranks.Cpus()
    if offers:
        split = split_cpus(sorted(os.sched_getaffinity(0)), errand.order.client_cpus)
        cpus = ranks.Cpus(split.server, split.client)
    return ranks.serve(run, plan, launch.name, rank, arm.nodes, site=errand.site, stop=stop, cpus=cpus)


def _watch_head(errand: Errand, stop: threading.Event, over: threading.Event) -> None:
    """Stop what runs here when rank 0 has said its last word: it may have given up before the last launch."""
    while not over.wait(_LOOK_S):
        head = errand.submission.report(errand.number, errand.place.task)
        if head is not None and _same_start(head, errand.place) and head.state != "running":
            stop.set()
            return


def _same_start(report: Report, place: Place) -> bool:
    """Whether a report is of this very start of a job, not of one before Slurm started it again."""
    return (report.job, report.restarts) == (place.job, place.restarts)


def _called_for(errand: Errand, stop: threading.Event) -> tuple[str, ...]:
    """The launches that rank 0 of this very job is going to carry out, as soon as it says so."""
    while not stop.wait(_LOOK_S):
        head = errand.submission.report(errand.number, errand.place.task)
        if head is not None and _same_start(head, errand.place):
            return head.launches
    return ()


if __name__ == "__main__":
    sys.exit(main())

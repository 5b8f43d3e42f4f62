"""What a run's jobs do, told as it happens, until Slurm has ended all of them; then what that comes to.

One question to Slurm a poll, however many jobs there are. Progress comes from files that the node agents append to, so
that following can begin, end and begin again at any time, and a run needs nobody who follows it.
"""

import json
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.errors import HarnessError, InputError, Interrupted, MeasurementError, ServerError
from harness.recipe.plan import Plan, PlannedLaunch
from harness.recipe.site import Slurm
from harness.run import facts as machine
from harness.run.executors.slurm import queue, submit
from harness.run.executors.slurm.orders import ANOTHER_FOLDER, Job, Report, StoredPiece, Submission
from harness.run.executors.slurm.queue import Seen
from harness.run.executors.slurm.states import Phase, hopeless, phase
from harness.run.store import Run, now
from harness.run.sweep import Tell

_RESUME = "go on with `harness run RECIPE --on slurm --resume`"
_LOG_LINES = 8
_COMPLETING_S = 20.0


@dataclass
class Task:
    """One job (or array task) as it is followed."""

    job: Job
    number: int
    piece: StoredPiece
    submission: Submission
    reasons: set[str]  # for which tasks of this job were seen to wait: told once, not once a task
    seen: Seen | None = None
    ended: bool = False
    cancelled: bool = False  # by us
    hopeless: str | None = None  # why, where it waited for what only a person could end
    doubtful_since: float | None = None
    silent_since: float | None = None
    _told: set[str] = field(default_factory=set)
    _offset: int = 0
    _completing: float | None = None

    @property
    def name(self) -> str:
        """As Slurm's users write it: `123`, or `123_4` in an array."""
        return f"{self.job_id}_{self.number}" if self.job.pieces > 1 else self.job_id

    @property
    def report(self) -> Report | None:
        """What its agent says of it."""
        return self.submission.report(self.job.number, self.number)

    @property
    def log(self) -> Path:
        """What it printed."""
        return self.submission.log_path(self.job.number, self.number)

    @property
    def job_id(self) -> str:
        """The id of the job, or of the array it is in."""
        return str(self.job.job_id)

    @property
    def key(self) -> tuple[str, int]:
        """As the queue's rows are named."""
        return self.job_id, self.number

    def has_said_its_last(self) -> bool:
        """Whether its agent has ended, by its own word."""
        return (report := self.report) is not None and report.state != "running"

    def lingers(self) -> bool:
        """Whether its agent ended some time ago: an epilog that hangs is not ours to wait for."""
        self._completing = self._completing or time.monotonic()
        return time.monotonic() - self._completing > _COMPLETING_S and self.has_said_its_last()

    def once(self, text: str) -> bool:
        """Whether this was not said of it before."""
        fresh = text not in self._told
        self._told.add(text)
        return fresh

    def events(self) -> Iterator[dict[str, Any]]:
        """Whole lines of its progress that were not read yet."""
        path = self.submission.progress_path(self.job.number, self.number)
        if not path.is_file():
            return
        with path.open("rb") as stream:
            stream.seek(self._offset)
            for line in stream:
                if not line.endswith(b"\n"):
                    return
                self._offset += len(line)
                yield json.loads(line)


@dataclass(frozen=True, slots=True)
class Wishes:
    """How a run is followed: `stop` is set when the user says stop, which cancels the jobs."""

    stop: threading.Event
    cancel_hopeless: bool = False


def follow(run: Run, site: Slurm, tell: Tell, wishes: Wishes) -> list[Task]:
    """Follow the jobs of a run's last submission until Slurm has ended them.

    Returns:
        The jobs, ended.

    Raises:
        ServerError: Slurm has not answered for longer than the site's patience; its jobs go on.
    """
    tasks = _tasks(run)
    heard = time.monotonic()
    while True:
        going = [task for task in tasks if not task.ended]
        try:
            if wishes.stop.is_set():
                _cancel([task for task in going if not task.cancelled])
            _look_at_all(going, site, tell, wishes)
            heard = time.monotonic()
        except ServerError as error:  # it may answer again, or make sense again
            if time.monotonic() - heard > site.patience_s:
                raise
            tell("note", text=f"{error.message}; asking again")
        for task in going:
            _tell_progress(run, task, tell)
        if all(task.ended for task in tasks):
            return tasks
        wishes.stop.wait(site.poll_s) if not wishes.stop.is_set() else time.sleep(min(1.0, site.poll_s))


def problems(run: Run, plan: Plan, tasks: Sequence[Task]) -> HarnessError | None:
    """What ended jobs come to: None when every cell of theirs is measured, else the error that says why not."""
    launches = {launch.name: launch for launch in plan.launches}
    found = [(task, error) for task in tasks if (error := _problem(run, launches, task)) is not None]
    if not found:
        return None
    if len(found) == 1 or len({str(error) for _, error in found}) == 1:
        return found[0][1]
    kinds = [type(error) for _, error in found]
    kind = Interrupted if Interrupted in kinds else max(kinds, key=lambda one: one.exit_code)
    details = [f"job {task.name} ({', '.join(task.piece.launches)}): {error.message}" for task, error in found]
    hints = dict.fromkeys(error.hint for _, error in found if error.hint)
    return kind(f"{len(found)} of {len(tasks)} jobs did not finish", details=details, hint="; ".join(hints) or None)


def other_hardware(tasks: Sequence[Task]) -> list[str]:
    """Machines of another kind than the first job's, a sentence each: rows across them will not be comparable."""
    found = {report.host: machine.hardware_class(report.facts) for task in tasks if (report := task.report)}
    kinds = list(dict.fromkeys(found.values()))
    return [f"{host} is other hardware, {kind}, than {kinds[0]}" for host, kind in found.items() if kind != kinds[0]]


def finish(run: Run, tasks: Sequence[Task]) -> tuple[str, ...]:
    """Write down that a run is done, and on which machines; returns its troubles."""
    reports = [report for task in tasks if (report := task.report) is not None]
    facts = {report.host: report.facts for report in reports if report.facts}
    if facts:
        before = run.facts().get("nodes", {})
        run.write_facts({"before": next(iter(facts.values())), "nodes": {**before, **facts}})
    troubles = tuple(trouble for report in reports for trouble in report.troubles)
    run.event("ended")
    run.write_state("done", ended=now(), troubles=list(troubles))
    return troubles


def _tasks(run: Run) -> list[Task]:
    jobs = submit.identified(run)
    last = max((job.submission for job in jobs), default=None)
    found = []
    for job in jobs:
        if job.submission != last or job.job_id is None:
            continue
        submission = Submission(run, job.submission)
        batch = submission.order().batches[job.number]
        reasons: set[str] = set()
        found += [Task(job, number, piece, submission, reasons) for number, piece in enumerate(batch)]
    if not found:
        raise InputError(f"`{run.path}` has no jobs", hint="`harness run RECIPE --on slurm` submits some")
    return found


def _look_at_all(going: Sequence[Task], site: Slurm, tell: Tell, wishes: Wishes) -> None:
    """What Slurm says of jobs now, in as few questions as can be."""
    rows = {(seen.job_id, seen.task): seen for seen in queue.look(sorted({task.job_id for task in going}))}
    gone = [task for task in going if task.key not in rows and not task.has_said_its_last()]
    forgotten = queue.remembered([(*task.key, task.seen.raw_id if task.seen else None) for task in gone])
    for task in going:
        _look(task, rows.get(task.key) or forgotten.get(task.key), site, tell, wishes)


def _look(task: Task, seen: Seen | None, site: Slurm, tell: Tell, wishes: Wishes) -> None:
    """What Slurm says of one job now; None where it knows nothing of it any more."""
    task.seen = seen or task.seen
    where = phase(seen.state) if seen else Phase.UNKNOWN
    over = (seen is None and task.has_said_its_last()) or (seen and seen.state == "COMPLETING" and task.lingers())
    if where is Phase.ENDED or over:
        task.ended = True
        return
    if where is Phase.UNKNOWN:
        _doubt(task, seen.state if seen else "not in the queue any more", site, tell)
        return
    task.doubtful_since = None
    if seen and where is Phase.WAITING:
        _look_waiting(task, seen, tell, wishes)
    elif seen and seen.state == "RUNNING":
        _look_running(task, seen, site, tell)


def _look_running(task: Task, seen: Seen, site: Slurm, tell: Tell) -> None:
    report = task.report
    if report is not None:
        if task.once(f"runs {report.job} {report.restarts}"):
            tell("note", text=f"job {task.name} runs on {seen.nodes}: {', '.join(task.piece.launches)}")
        return
    task.silent_since = task.silent_since or time.monotonic()
    if time.monotonic() - task.silent_since > site.patience_s and task.once("silent"):
        asked = f"is its image still being fetched? is `{task.submission.run.path}` shared with {seen.nodes}?"
        tell("note", text=f"warning: job {task.name} runs, but nothing of it is seen in the run folder: {asked}")


def _look_waiting(task: Task, seen: Seen, tell: Tell, wishes: Wishes) -> None:
    fresh = seen.reason not in task.reasons and seen.reason != "None"
    task.reasons.add(seen.reason)
    if fresh:
        expected = f", expected to start at {seen.start}" if seen.start not in {"", "N/A"} else ""
        tell("note", text=f"job {task.job_id} waits: {seen.reason}{expected}")
    if not hopeless(seen.reason):
        return
    if wishes.cancel_hopeless and not task.cancelled:
        task.hopeless = seen.reason
        _cancel([task])
    elif fresh:
        advice = f"`scancel {task.job_id}` ends it, --cancel-hopeless does so by itself"
        tell("note", text=f"warning: `{seen.reason}` may last for ever; {advice}")


def _doubt(task: Task, state: str, site: Slurm, tell: Tell) -> None:
    """Slurm says nothing of a job, or what we do not understand; for so long, and no longer."""
    task.doubtful_since = task.doubtful_since or time.monotonic()
    if time.monotonic() - task.doubtful_since < site.patience_s:
        return
    tell("note", text=f"job {task.name} is `{state}` for {site.patience_s:.0f} s; it is given up")
    _cancel([task])
    task.ended = True


def _cancel(tasks: Sequence[Task]) -> None:
    queue.cancel([task.name for task in tasks])
    for task in tasks:
        task.cancelled = True


def _tell_progress(run: Run, task: Task, tell: Tell) -> None:
    for event in task.events():
        facts = event["facts"]
        if event["kind"] == "level-done":
            result = run.level(facts["launch"], facts["level"])
            if result is None:  # measured again by a later attempt
                continue
            facts = {**facts, "result": result}
        tell(event["kind"], **facts)


def _problem(run: Run, launches: Mapping[str, PlannedLaunch], task: Task) -> HarnessError | None:
    """Why a job's cells are not all measured; None when they are."""
    report, state = task.report, task.seen.state if task.seen else "gone"
    missing = _missing(run, launches, task)
    if report is None:
        return _silent(task, state) if missing else None
    if report.state == "done" or (report.state != "failed" and not missing):
        return None
    if report.state == "running":
        seen = f"job {task.name} ended as {state} on {report.host} before its agent could say why"
        return _ended_by_slurm(state)(seen, details=_tail(task.log), hint=_RESUME)
    error = report.error()
    assert error is not None  # a report that is neither running nor done holds one
    if report.state == "interrupted":
        return _interrupted(task, report, state)
    return type(error)(f"{error.message} (job {task.name} on {report.host})", details=error.details, hint=error.hint)


def _interrupted(task: Task, report: Report, state: str) -> HarnessError:
    """Who told an agent to stop: we, somebody else, or the clock."""
    if task.cancelled or state.startswith("CANCELLED"):
        return Interrupted(f"job {task.name} was cancelled; what was measured is kept", hint=_RESUME)
    if state.startswith("TIMEOUT"):
        return MeasurementError(f"job {task.name} reached its time limit; what was measured is kept", hint=_RESUME)
    return Interrupted(f"{report.message}; Slurm says {state}", hint=_RESUME)


def _ended_by_slurm(state: str) -> type[HarnessError]:
    if state.startswith("CANCELLED"):
        return Interrupted
    return MeasurementError if state.startswith(("TIMEOUT", "DEADLINE")) else ServerError


def _silent(task: Task, state: str) -> HarnessError:
    """A job of which nothing was ever seen in the run folder."""
    if task.hopeless is not None:
        return InputError(f"job {task.name} was cancelled, because it waited for `{task.hopeless}`", hint=_RESUME)
    if task.cancelled or state.startswith("CANCELLED"):
        return Interrupted(f"job {task.name} was cancelled before it began", hint=_RESUME)
    nodes = task.seen.nodes if task.seen else ""
    ended = f"job {task.name} ended as {state}{f' on {nodes}' if nodes else ''}"
    said = _tail(task.log)
    if said and not any(ANOTHER_FOLDER in line for line in said):
        return ServerError(f"{ended} before its agent could say why", details=said, hint=_RESUME)
    return InputError(
        f"{ended}, and left nothing in the run folder",
        details=said,
        hint=f"is `{task.submission.run.path}` on a file system that all machines share? `--out DIR` puts it elsewhere",
    )


def _missing(run: Run, launches: Mapping[str, PlannedLaunch], task: Task) -> bool:
    """Whether a cell of a job is not measured."""
    cells = ((name, cell.level.name) for name in task.piece.launches for cell in launches[name].cells)
    return any(run.level(name, level) is None for name, level in cells)


def _tail(path: Path) -> list[str]:
    return path.read_text(errors="replace").splitlines()[-_LOG_LINES:] if path.is_file() else []

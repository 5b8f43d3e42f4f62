"""Verb: follow; and what `plan` and `run` do with `--on slurm`."""

import argparse
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from harness.cli.talk import Verbs, common, safe
from harness.errors import HarnessError, InputError, Interrupted, ServerError

if TYPE_CHECKING:
    from harness.cli.experiments import Begun
    from harness.recipe.plan import Plan
    from harness.recipe.site import Site
    from harness.run.executors.slurm.follow import Task
    from harness.run.store import Run


def register(verbs: Verbs) -> None:
    """Add this room's verbs."""
    follow = common(
        verbs.add_parser(
            "follow",
            help="show how far a run's Slurm jobs are, and conclude it when they are done",
            description="Follow the jobs of a run that was submitted with `harness run --on slurm`. Ctrl-C leaves them "
            "alone; following again goes on. When all are done, the run is compared and published.",
        )
    )
    follow.add_argument("folder", type=Path, metavar="RUN", help="a run folder")
    follow.add_argument("--site", type=Path, metavar="FILE", help="site facts (default: ~/.config/harness/site.yaml)")
    follow.add_argument("--cancel-hopeless", action="store_true", help="cancel jobs that only a person could help on")
    follow.add_argument("--no-publish", action="store_true", help="leave documents and LOGBOOK.md alone")
    follow.set_defaults(run=follow_run)


def scripts(arguments: argparse.Namespace, plan: "Plan", site: "Site") -> list[str]:
    """The batch scripts that `run --on slurm` would submit; touches nothing."""
    from harness.run.executors.slurm import submit

    run = arguments.out / (arguments.name or f"RUN-{plan.recipe}-{plan.digest[:8]}")
    return list(submit.prepare(plan, [launch.name for launch in plan.launches], site, run).scripts)


def run_recipe(arguments: argparse.Namespace, site: "Site") -> int:
    """`harness run --on slurm`."""
    from harness.cli import experiments
    from harness.run.executors.slurm import follow, queue, submit

    def check(plan: "Plan") -> None:
        if plan.refine is not None and arguments.detach:
            raise InputError("a run that refines decides as it goes", hint="leave out --detach, or `refine`")
        submit.prepare(plan, [launch.name for launch in plan.launches], site, arguments.out / "RUN")
        queue.check_reachable()

    begun = experiments.begin(arguments, site, check)
    run, plan = begun.run, begun.plan
    more = experiments.more_of(run, plan, begun.expanded, site)
    troubles: tuple[str, ...] = ()
    submitted = _submit(arguments, begun, plan, site)
    while not (submitted and arguments.detach):
        troubles += _followed(arguments, run, plan, site, cancel=True) if submitted else follow.finish(run, ())
        added = more(plan)
        if added is None:
            return experiments.conclude(arguments, run, begun.root, troubles)
        plan = added
        run.write_plan(plan)
        arguments.talk.line(f"one more block: {plan.refined[-1]}")
        submitted = _submit(arguments, begun, plan, site)
    arguments.talk.data({"run": run.run_id, "path": str(run.path), **run.state()}, str(run.path))
    arguments.talk.line(f"`harness follow {run.path}` shows how far it is")
    return 0


def follow_run(arguments: argparse.Namespace) -> int:
    """`harness follow`."""
    from harness.cli import experiments
    from harness.recipe.site import load as load_site
    from harness.run import store
    from harness.run.executors.slurm import orders

    run = store.open_run(arguments.folder)
    if not orders.jobs(run):  # to conclude it all the same would publish it once more, over newer runs
        hint = f"`harness show {run.path}` says what it found; `harness publish {run.path}` fills documents from it"
        raise InputError(f"this run has no Slurm jobs: `{run.path}`", hint=hint)
    plan = run.plan()
    troubles = _followed(arguments, run, plan, load_site(arguments.site), cancel=False)
    return experiments.conclude(arguments, run, experiments.project_folder(), troubles)


@dataclass(frozen=True, slots=True)
class QueuedJob:
    """A job of ours that Slurm has not ended; `over` says why nobody needs it, None where somebody does."""

    job_id: str
    state: str
    run: str
    over: str | None

    def __str__(self) -> str:
        why = f"needed by nobody, {self.over}" if self.over else f"goes on, `harness follow {self.run}`"
        return f"job {self.job_id} ({self.state}) of `{safe(self.run)}`: {why}"

    def to_json(self) -> dict[str, str | None]:
        """For `--json`."""
        return asdict(self)


def clean_jobs(*, dry_run: bool) -> list[QueuedJob]:
    """Cancel our jobs whose run is gone or over; returns all of ours, none where there is no Slurm."""
    import shutil

    from harness.run.executors.slurm import queue

    if not shutil.which("squeue"):
        return []
    jobs: dict[str, QueuedJob] = {}
    try:
        for seen in queue.mine():
            over = _over(Path(seen.comment))
            jobs.setdefault(seen.job_id, QueuedJob(seen.job_id, seen.state, seen.comment, over))
        if not dry_run:
            queue.cancel([job.job_id for job in jobs.values() if job.over])
    except ServerError:  # no controller answers: there is nothing to clean that could be reached
        return []
    return list(jobs.values())


def _over(folder: Path) -> str | None:
    """Why a run needs its jobs no more, None where it does."""
    from harness.run import store

    if not (folder / "plan.json").is_file():
        return "its run is gone"
    state = store.Run(folder).state()["state"]
    return f"its run is {state}" if state in {"done", "failed", "interrupted"} else None


def _submit(arguments: argparse.Namespace, begun: "Begun", plan: "Plan", site: "Site") -> bool:
    """Take over what is measured, and submit the rest; returns whether there was any.

    Raises:
        HarnessError: it could not be submitted; nothing of it is left in the queue.
    """
    from harness.run import inputs, store
    from harness.run.executors.slurm import submit

    run = begun.run
    with run.held():
        inputs.keep(run, plan)
        todo = _todo(begun, plan)
        if not todo:
            return False
        run.withdraw_answer()
        run.write_state("submitted", started=store.now(), error=None)
        try:
            submission = submit.submit(run, plan, todo, site)
        except HarnessError as error:
            run.write_state("failed", error=str(error))
            raise
    jobs = [job for job in submit.identified(run) if job.submission == submission.name]
    count = sum(job.pieces for job in jobs)
    named = ", ".join(f"job {job.job_id}" for job in jobs)
    arguments.talk.line(f"submitted {count} {'piece' if count == 1 else 'pieces'} as {named}")
    return True


def _todo(begun: "Begun", plan: "Plan") -> list[str]:
    """Launches with cells that neither this run nor an earlier one has measured; what can be reused is brought in."""
    from harness.run.resume import take_over

    reusable = {(fate.launch, fate.level): fate.source for fate in begun.fates if fate.source}
    todo = []
    for launch in plan.launches:
        sources = [(cell, reusable.get((launch.name, cell.level.name))) for cell in launch.cells]
        for cell, source in sources:
            if source is not None and source.run.path != begun.run.path:
                take_over(begun.run, launch, cell, source)
        if any(source is None for _, source in sources):
            todo.append(launch.name)
    return todo


def _followed(
    arguments: argparse.Namespace, run: "Run", plan: "Plan", site: "Site", *, cancel: bool
) -> tuple[str, ...]:
    """Follow a run's jobs to their end; returns troubles that the plan said to go on after.

    Args:
        arguments: of the verb.
        run: the run.
        plan: its plan.
        site: site facts.
        cancel: whether Ctrl-C cancels the jobs; otherwise it only ends the following.

    Raises:
        HarnessError: not every cell is measured; the run's state says so too.
    """
    from harness.cli import experiments
    from harness.publish import targets
    from harness.run import store
    from harness.run.executors.slurm import follow

    if run.state()["state"] == "done":
        return ()
    tasks = _watched(arguments, run, plan, site, cancel=cancel)
    for other in follow.other_hardware(tasks):
        arguments.talk.line(f"warning: {other}")
    error = follow.problems(run, plan, tasks)
    if error is None:
        return follow.finish(run, tasks)
    run.write_state("interrupted" if isinstance(error, Interrupted) else "failed", error=str(error), ended=store.now())
    run.event("ended", error=error.message)
    if not arguments.no_publish and (line := targets.log_failure(run, plan, experiments.project_folder())):
        arguments.talk.line(line)
    raise error


def _watched(arguments: argparse.Namespace, run: "Run", plan: "Plan", site: "Site", *, cancel: bool) -> "list[Task]":
    from harness.cli.live import LiveView
    from harness.run.executors.slurm.follow import Wishes, follow
    from harness.run.run import interruptible

    wishes = Wishes(threading.Event(), arguments.cancel_hopeless)
    with LiveView(arguments.talk, cells=sum(1 for _ in plan.cells()), run=run) as view:
        if cancel:
            with interruptible(wishes.stop, view.tell):
                return follow(run, site.slurm, view.tell, wishes)
        try:
            return follow(run, site.slurm, view.tell, wishes)
        except KeyboardInterrupt:
            raise Interrupted("no longer followed; its jobs go on", hint=f"`harness follow {run.path}`") from None

"""A plan's unfinished launches become jobs. Each is written down before Slurm hears of it, and its id at once after."""

import os
import secrets
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.env import lock, places
from harness.errors import HarnessError, InputError, LockError
from harness.files import write_atomic
from harness.recipe.plan import Plan
from harness.recipe.site import Site
from harness.run.executors.slurm import orders, pieces, queue, render
from harness.run.executors.slurm.orders import Job, Submission
from harness.run.executors.slurm.pieces import Batch
from harness.run.executors.slurm.queue import Unreachable
from harness.run.executors.slurm.render import Order
from harness.run.executors.slurm.states import Phase, phase
from harness.run.store import Run

_NAME_LIMIT = 60


@dataclass(frozen=True, slots=True)
class Prepared:
    """A submission before Slurm hears of it: its batches, and the script of each."""

    token: str
    batches: tuple[Batch, ...]
    orders: tuple[Order, ...]
    scripts: tuple[str, ...]


def prepare(plan: Plan, todo: Sequence[str], site: Site, run: Path, submission: str = "01") -> Prepared:
    """Everything that would be submitted; touches nothing.

    Args:
        plan: the plan.
        todo: names of the launches that are not finished.
        site: site facts.
        run: the run's folder, whether or not it is there yet.
        submission: the name of the submission's folder.

    Raises:
        InputError: a path that no script can name, an environment without an image.
        LockError: an environment that was not locked when the plan was made.
    """
    _refuse_unlocked(plan)
    divided = pieces.batches(pieces.divide(plan, todo, site.slurm))
    token = secrets.token_hex(8)
    made = tuple(
        Order(
            name=f"{queue.PREFIX}{run.name[:_NAME_LIMIT]}.{token[:6]}.{number}",
            number=number,
            batch=batch,
            run=run.resolve(),
            folder=run.resolve() / orders.FOLDER / submission,
            cwd=Path.cwd(),
            python=site.slurm.python or sys.executable,
            token=token,
            variables=_places(),
            secrets=tuple(sorted({name for arm in plan.arms.values() for name in arm.secrets})),
        )
        for number, batch in enumerate(divided)
    )
    asked = site.slurm
    if asked.parallel is not None:  # Slurm throttles each array by itself
        asked = asked.model_copy(update={"parallel": max(1, asked.parallel // max(1, len(divided)))})
    return Prepared(token, divided, made, tuple(render.script(order, asked) for order in made))


def submit(run: Run, plan: Plan, todo: Sequence[str], site: Site) -> Submission:
    """Submit what is not finished.

    Raises:
        InputError: Slurm does not take a job (its own words are in the error), or jobs of this run are still there;
            what was submitted before the rejected one is cancelled.
        Unreachable: Slurm does not answer.
    """
    queue.check_reachable()
    if waiting := unfinished(run):
        raise InputError(
            f"`{run.path}` still has jobs: {', '.join(waiting)}",
            hint=f"`harness follow {run.path}` shows how far they are, `scancel` ends them",
        )
    number = 1 + len({job.submission for job in orders.jobs(run)})
    prepared = prepare(plan, todo, site, run.path, f"{number:02d}")
    facts = {"variables": dict(site.variables), "client_cpus": site.slurm.client_cpus, "grace_s": site.slurm.grace_s}
    submission = orders.begin(run, f"{number:02d}", prepared.batches, prepared.token, facts)
    for order, script in zip(prepared.orders, prepared.scripts, strict=True):
        _submit_one(run, submission, order, script)
    return submission


def unfinished(run: Run) -> list[str]:
    """Ids of a run's jobs that Slurm has not ended."""
    known = [job.job_id for job in identified(run) if job.job_id]
    return sorted({seen.job_id for seen in queue.look(known) if phase(seen.state) is not Phase.ENDED})


def identified(run: Run) -> list[Job]:
    """Every job of a run; one whose id was never noted, because its submitter was killed, is looked up by name."""
    found = orders.jobs(run)
    if all(job.job_id or job.rejected for job in found):
        return found
    known = [
        job if job.job_id or job.rejected else job.model_copy(update=_looked_up(queue.named(job.name))) for job in found
    ]
    orders.write_jobs(run, known)
    return known


def _looked_up(job_id: str | None) -> dict[str, str]:
    return {"job_id": job_id} if job_id else {"rejected": "it never reached Slurm"}


def _submit_one(run: Run, submission: Submission, order: Order, script: str) -> None:
    path = submission.path / f"{order.number}.sh"
    write_atomic(path, script, mode=0o700)
    job = Job(submission=submission.name, number=order.number, name=order.name, pieces=len(order.batch.pieces))
    before = orders.jobs(run)
    orders.write_jobs(run, [*before, job])
    try:
        job_id = queue.submit(path)
    except Unreachable:
        raise  # it may have been queued all the same: it is looked for by its name when the run is next looked at
    except HarnessError as error:
        said = "; ".join(error.details) or error.message
        orders.write_jobs(run, [*before, job.model_copy(update={"rejected": said})])
        queue.cancel([one.job_id for one in before if one.submission == submission.name and one.job_id])
        raise
    orders.write_jobs(run, [*before, job.model_copy(update={"job_id": job_id})])
    run.event("submitted", job=job_id, name=order.name, pieces=len(order.batch.pieces))


def _places() -> dict[str, str]:
    """Where project and state lie, told to the nodes: they start in the same folder, but without our environment."""
    try:
        return {"HARNESS_HOME": str(places.home()), "HARNESS_PROJECT": str(places.project_root())}
    except InputError:
        return {name: os.environ[name] for name in ("HARNESS_HOME",) if name in os.environ}


def _refuse_unlocked(plan: Plan) -> None:
    for arm in plan.arms.values():
        if arm.env is not None and arm.env_id is None:
            lock.read(
                places.lock_path(arm.env)
            )  # says what is wrong with it, where it is not simply newer than the plan
            raise LockError(f"`{arm.env}` was not locked when this was planned", hint="plan again")

"""The files through which the submitting machine and the nodes speak, all of them in the run folder.

slurm/
  jobs.json              every job that was asked for, before it was: nothing queued is forgotten
  01/                    the first submission
    order.json           what its jobs are to do
    token                proves that a node sees this very folder
    0.sh                 the script of its first batch
    logs/0-3.log         what its fourth piece printed
    reports/0-3-0.json   how that piece goes or went, by the agent of rank 0
    progress/0-3.jsonl   what happened, for whoever follows
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from harness.errors import HarnessError, InputError
from harness.files import read_json, write_atomic, write_json
from harness.run.executors.slurm.pieces import Batch, Piece, Step
from harness.run.store import Run, read_stored
from harness.stats.level import Stored

FOLDER = "slurm"
ANOTHER_FOLDER = "is not the folder that the job was submitted with"  # what such an agent prints
NOT_SHARED = 78  # exit code of an agent that does not see the run folder: it cannot say so in there
_PRIVATE = 0o600


class StoredStep(Stored):
    """A step of a piece."""

    launches: tuple[str, ...]
    image: str | None = None


class StoredPiece(Stored):
    """A piece of a plan."""

    steps: tuple[StoredStep, ...]
    nodes: int
    gpus: int

    def piece(self) -> Piece:
        """As `pieces` knows it."""
        return Piece(tuple(Step(step.launches, step.image) for step in self.steps), self.nodes, self.gpus)

    @property
    def launches(self) -> tuple[str, ...]:
        """Every launch, in order."""
        return self.piece().launches


class SubmittedOrder(Stored):
    """`order.json`: what the jobs of a submission are to do, beside the plan."""

    format: str = "harness.slurm-order/1"
    token: str
    variables: dict[str, str]  # of the site, for model paths and arguments
    client_cpus: int | None
    grace_s: float
    batches: tuple[tuple[StoredPiece, ...], ...]


class Job(Stored):
    """One line of `jobs.json`: a batch that was, or was about to be, submitted. `job_id` is None in between."""

    submission: str
    number: int
    name: str
    pieces: int
    job_id: str | None = None
    rejected: str | None = None


class Report(Stored):
    """How one piece goes on one rank: written when the agent starts, when it ends, and never by halves."""

    format: str = "harness.slurm-report/1"
    state: Literal["running", "done", "failed", "interrupted"]
    host: str
    job: str
    restarts: int
    pid: int
    at: str
    launches: tuple[str, ...] = ()  # rank 0: what it is going to carry out
    exit_code: int | None = None
    message: str | None = None
    hint: str | None = None
    details: tuple[str, ...] = ()
    troubles: tuple[str, ...] = ()
    facts: dict[str, Any] = {}

    def error(self) -> HarnessError | None:
        """The error it ended with, of its own kind; None where it did not end with one."""
        if self.message is None:
            return None
        kinds = {kind.exit_code: kind for kind in HarnessError.__subclasses__()}
        kind = kinds.get(self.exit_code or 2, InputError)
        return kind(self.message, hint=self.hint, details=self.details)


@dataclass(frozen=True, slots=True)
class Submission:
    """The folder of one submission."""

    run: Run
    name: str

    @property
    def path(self) -> Path:
        """The folder."""
        return self.run.path / FOLDER / self.name

    def order(self) -> SubmittedOrder:
        """What its jobs are to do."""
        return read_stored(SubmittedOrder, self.path / "order.json")

    def report_path(self, number: int, task: int, rank: int = 0) -> Path:
        """Where an agent reports."""
        return self.path / "reports" / f"{number}-{task}-{rank}.json"

    def report(self, number: int, task: int, rank: int = 0) -> Report | None:
        """What an agent reported last, None where it never started."""
        path = self.report_path(number, task, rank)
        return read_stored(Report, path) if path.is_file() else None

    def write_report(self, path: Path, report: Report) -> None:
        """Replace a report."""
        write_json(path, report.model_dump(mode="json"), mode=_PRIVATE)

    def progress_path(self, number: int, task: int) -> Path:
        """Where the events of a piece are appended."""
        return self.path / "progress" / f"{number}-{task}.jsonl"

    def log_path(self, number: int, task: int) -> Path:
        """What Slurm keeps of the output of a piece."""
        return self.path / "logs" / f"{number}-{task}.log"


def begin(run: Run, name: str, batches: tuple[Batch, ...], token: str, facts: Mapping[str, Any]) -> Submission:
    """A new submission's folder, with its order in it."""
    submission = Submission(run, name)
    for folder in ("logs", "reports", "progress"):
        (submission.path / folder).mkdir(parents=True, mode=0o700)
    stored = tuple(tuple(_stored(piece) for piece in batch.pieces) for batch in batches)
    order = SubmittedOrder(token=token, batches=stored, **facts)
    write_json(submission.path / "order.json", order.model_dump(mode="json"), mode=_PRIVATE)
    write_atomic(submission.path / "token", token, mode=_PRIVATE)
    return submission


def jobs(run: Run) -> list[Job]:
    """Every job that was ever asked for in this run."""
    path = run.path / FOLDER / "jobs.json"
    return [Job.model_validate(job) for job in read_json(path)["jobs"]] if path.is_file() else []


def write_jobs(run: Run, found: list[Job]) -> None:
    """Replace `jobs.json`."""
    value = {"format": "harness.slurm-jobs/1", "jobs": [job.model_dump(mode="json") for job in found]}
    write_json(run.path / FOLDER / "jobs.json", value, mode=_PRIVATE)


def _stored(piece: Piece) -> StoredPiece:
    steps = tuple(StoredStep(launches=step.launches, image=step.image) for step in piece.steps)
    return StoredPiece(steps=steps, nodes=piece.nodes, gpus=piece.gpus)

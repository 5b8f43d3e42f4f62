"""Slurm's commands: the only module that calls them. Arguments are lists, answers are values.

Jobs are looked for in three places, each with its own memory: `squeue --states=all` knows those of the last minutes,
`sacct` all of them where the site keeps accounts, and `sacct -c` those that the job completion plugin noted.
"""

import contextlib
import os
import re
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.errors import HarnessError, InputError, ServerError

PREFIX = "harness:"
_PATIENCE_S = 60.0
_AT_ONCE = 200  # job ids in one command line
_FORMAT = "%A|%F|%K|%T|%r|%N|%S|%j|%k"  # the comment last: it is a path, and may hold anything
_UNREACHABLE = re.compile(r"(?i)unable to contact slurm controller|socket timed out|connection refused|not responding")
_LEFT = re.compile(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)")  # D-HH:MM:SS, as squeue writes it
_UNKNOWN_JOB = re.compile(r"(?i)invalid job id")
# Variables that would override what a script says (sbatch(1), "INPUT ENVIRONMENT VARIABLES").
_OVERRIDING = re.compile(r"(SBATCH|SALLOC|SRUN)_\w+|SLURM_(?!CONF)\w+")


class Unreachable(ServerError):
    """Slurm's controller does not answer; it may again."""


@dataclass(frozen=True, slots=True)
class Seen:
    """One job or array task as Slurm shows it. `task` counts from 0, also where there is no array."""

    job_id: str  # of the array, where it is one
    task: int
    raw_id: str  # of this job alone
    state: str
    reason: str = ""
    nodes: str = ""
    start: str = ""
    name: str = ""
    comment: str = ""


def submit(script: Path) -> str:
    """Hand a script over; returns the job's id.

    Raises:
        InputError: there is no Slurm here, or it does not take the job; with its own words.
        Unreachable: its controller does not answer.
    """
    done = _call(["sbatch", "--parsable", str(script)])
    if done.returncode != 0:
        raise InputError(
            "Slurm does not take the job",
            details=_said(done),
            hint="partition, account, qos and limits come from the site file's `slurm:` section",
        )
    return done.stdout.strip().splitlines()[-1].split(";")[0]


def cancel(job_ids: Iterable[str]) -> None:
    """Cancel jobs (all of an array's tasks with them) or single tasks; those that are gone already are no fault.

    Raises:
        ServerError: Slurm refuses.
    """
    ids = list(job_ids)
    for first in range(0, len(ids), _AT_ONCE):
        done = _call(["scancel", *ids[first : first + _AT_ONCE]])
        if done.returncode != 0 and not _UNKNOWN_JOB.search(done.stderr):
            raise ServerError("Slurm does not cancel jobs", details=_said(done))


def look(job_ids: Sequence[str]) -> list[Seen]:
    """What the queue knows of jobs, those that ended a short while ago too.

    Raises:
        Unreachable: the controller does not answer.
    """
    if not job_ids:
        return []
    done = _call(
        ["squeue", "--noheader", "--array", "--states=all", f"--jobs={','.join(job_ids)}", f"--format={_FORMAT}"]
    )
    if done.returncode != 0 and not _UNKNOWN_JOB.search(done.stderr):
        raise ServerError("Slurm does not show its queue", details=_said(done))
    return [seen for line in done.stdout.splitlines() if (seen := _seen(line))]


def mine() -> list[Seen]:
    """Every job that a harness of ours submitted and that is not over."""
    user = str(os.getuid())
    done = _call(["squeue", "--noheader", "--array", f"--user={user}", f"--format={_FORMAT}"])
    if done.returncode != 0:
        raise ServerError("Slurm does not show its queue", details=_said(done))
    found = (_seen(line) for line in done.stdout.splitlines())
    return [seen for seen in found if seen and seen.name.startswith(PREFIX)]


def named(name: str) -> str | None:
    """The id of the job of this name, None where there is none."""
    done = _call(["squeue", "--noheader", "--array", "--states=all", f"--name={name}", f"--format={_FORMAT}"])
    found = [seen for line in done.stdout.splitlines() if (seen := _seen(line))]
    return found[0].job_id if found else None


def remembered(wanted: Sequence[tuple[str, int, str | None]]) -> dict[tuple[str, int], Seen]:
    """What the site's accounts, or else its list of completed jobs, say of jobs that the queue has forgotten.

    Args:
        wanted: id, task and, where it was seen, the id of that task alone.
    """
    if not wanted:
        return {}
    keys = {name: (job_id, task) for job_id, task, _ in wanted for name in (job_id, f"{job_id}_{task}")}
    found: dict[tuple[str, int], Seen] = {}
    asked = ",".join(sorted({job_id for job_id, _, _ in wanted}))
    for line in _lines(["sacct", "-X", "-n", "-P", "-j", asked, "-o", "JobID,JobIDRaw,State,NodeList"]):
        shown, raw, state, nodes = line.split("|")[:4]
        if (key := keys.get(shown)) is not None:
            found[key] = Seen(*key, raw, state, nodes=nodes)
    raws = {raw or job_id: (job_id, task) for job_id, task, raw in wanted if (job_id, task) not in found}
    for line in _lines(["sacct", "-c", "-n", "-P", "-j", ",".join(raws), "-o", "JobID,State,NodeList"]) if raws else ():
        raw, state, nodes = line.split("|")[:3]
        if (key := raws.get(raw)) is not None:
            found[key] = Seen(*key, raw, state, nodes=nodes)
    return found


def _lines(words: Sequence[str]) -> list[str]:
    """What a command of Slurm's printed; nothing where this site has no such memory."""
    try:
        done = _call(words)
    except InputError:  # Slurm without its sacct
        return []
    return done.stdout.splitlines() if done.returncode == 0 else []


def time_left(job_id: str) -> float | None:
    """Seconds until a job's time limit; None where that cannot be known (in a container there may be no squeue)."""
    with contextlib.suppress(HarnessError):
        done = _call(["squeue", "--noheader", f"--jobs={job_id}", "--format=%L"])
        match = _LEFT.fullmatch(done.stdout.strip()) if done.returncode == 0 else None
        if match:
            days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
            return ((days * 24 + hours) * 60 + minutes) * 60.0 + seconds
    return None


def check_reachable() -> None:
    """Prove that there is a Slurm here and that it answers.

    Raises:
        InputError: there is none.
        Unreachable: it does not answer.
    """
    done = _call(["sinfo", "--noheader", "--format=%P"])
    if done.returncode != 0:
        raise ServerError("Slurm does not answer", details=_said(done))


def _call(words: Sequence[str]) -> "subprocess.CompletedProcess[str]":
    """Run one of Slurm's commands without what this shell's own job would make of it."""
    variables = {name: value for name, value in os.environ.items() if not _OVERRIDING.fullmatch(name)}
    try:
        done = subprocess.run(words, capture_output=True, text=True, env=variables, timeout=_PATIENCE_S, check=False)
    except FileNotFoundError as error:
        raise InputError(
            f"there is no Slurm here: `{words[0]}` is not installed",
            hint="run where Slurm's commands are (a login node), or without `--on slurm`",
        ) from error
    except subprocess.TimeoutExpired as error:
        raise Unreachable(f"`{words[0]}` says nothing for {_PATIENCE_S:.0f} s") from error
    if done.returncode != 0 and _UNREACHABLE.search(done.stderr):
        raise Unreachable("Slurm's controller does not answer", details=_said(done), hint="`sinfo` says when it does")
    return done


def _said(done: "subprocess.CompletedProcess[str]") -> list[str]:
    lines = [line.removeprefix("sbatch: ").removeprefix("error: ") for line in done.stderr.splitlines()]
    return [line for line in lines if line.strip()] or [f"exit code {done.returncode}"]


def _seen(line: str) -> Seen | None:
    fields = line.split("|", 8)
    if len(fields) < 9:
        return None
    raw, job_id, task, state, reason, nodes, start, name, comment = fields
    return Seen(job_id, int(task) if task.isdigit() else 0, raw, state, reason, nodes, start, name, comment)

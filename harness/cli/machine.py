"""Verbs: clean, doctor."""

import argparse
from typing import TYPE_CHECKING, Any

from harness.cli.talk import Talk, Verbs, common, safe

if TYPE_CHECKING:
    from collections.abc import Sequence

    from harness.run.preflight import Trouble
    from harness.run.supervise import Leftover


def register(verbs: Verbs) -> None:
    """Add this room's verbs."""
    clean = common(
        verbs.add_parser(
            "clean",
            help="end what a killed harness left running",
            description="End the servers that a harness left behind when it was killed, and nothing else: a process is "
            "ours by the mark in its environment or by the roster its reaper kept, and only when its harness is gone. "
            "Where there is Slurm, also cancel our jobs whose run is gone or over; those of others are listed.",
        )
    )
    clean.add_argument("-n", "--dry-run", action="store_true", help="only list what would be ended")
    clean.set_defaults(run=run_clean)
    doctor = common(
        verbs.add_parser(
            "doctor",
            help="say what this machine is and what would get in a run's way",
            description="Look at this machine as a run would before it starts: GPUs and who uses them, driver, limits, "
            "disk, leftovers of earlier runs. Exit code 1 when something would stop a run.",
        )
    )
    doctor.add_argument("--model", metavar="PATH", help="also check that this model is whole")
    doctor.add_argument("--port", type=int, help="also check that this port is free")
    doctor.add_argument("--gpus", type=int, default=0, metavar="N", help="also check that N GPUs are there and free")
    doctor.add_argument(
        "--concurrency", type=int, default=1000, metavar="C", help="open streams to allow for (default: 1000)"
    )
    doctor.set_defaults(run=run_doctor)


def run_clean(arguments: argparse.Namespace) -> int:
    """End leftovers: 0 when nothing is left of them, 5 when something would not end."""
    from harness.cli.cluster import clean_jobs
    from harness.errors import ServerError
    from harness.run import supervise

    talk: Talk = arguments.talk
    found = supervise.leftovers()
    left: list[str] = []
    if not arguments.dry_run:
        survivors = {seen.pid for seen in supervise.end([seen for one in found for seen in one.identities])}
        left = [str(member) for one in found for member in one.members if member.pid in survivors]
        supervise.leftovers()  # drops the rosters of those that are gone
    jobs = clean_jobs(dry_run=arguments.dry_run)
    told = [*([_leftovers_text(found)] if found else []), *(str(job) for job in jobs)]
    talk.data(
        {
            "dry_run": arguments.dry_run,
            "leftovers": [one.to_json() for one in found],
            "survivors": left,
            "jobs": [job.to_json() for job in jobs],
        },
        "\n".join(told) or "nothing was left behind",
    )
    if left:
        raise ServerError("some leftovers did not end", details=left, hint="a process in state D waits for its driver")
    if found:
        count = sum(len(one.members) for one in found)
        talk.line(f"{count} processes would be ended" if arguments.dry_run else f"{count} processes ended")
    return 0


def run_doctor(arguments: argparse.Namespace) -> int:
    """Facts and troubles of this machine: 0 when a run could start, 1 when not."""
    from pathlib import Path

    from harness.run import facts, preflight

    talk: Talk = arguments.talk
    need = preflight.Need(
        run_folder=Path("runs"),
        port=arguments.port,
        concurrency=arguments.concurrency,
        model=Path(arguments.model) if arguments.model else None,
        gpus=arguments.gpus,
    )
    troubles, known = preflight.check(need), facts.collect()
    value = {
        "facts": known,
        "tools": _tools(),
        "troubles": [
            {"subject": one.subject, "message": one.message, "hint": one.hint, "fatal": one.fatal} for one in troubles
        ],
    }
    talk.data(value, None if talk.as_json else _doctor_text(known, troubles))
    return int(any(one.fatal for one in troubles))


def _leftovers_text(found: "Sequence[Leftover]") -> str:
    """A line a process: nothing is cut, so that it can be searched."""
    lines = [f"{'launch':24} {'pid':>8} {'user':10} {'MiB':>7} command"]
    for one in found:
        for member in one.members:
            memory = member.memory >> 20
            lines.append(f"{one.launch:24} {member.pid:8} {member.user:10} {memory:7} {member.command}")
    return "\n".join(safe(line) for line in lines)


def _tools() -> dict[str, str | None]:
    import shutil

    return {name: shutil.which(name) for name in ("git", "docker", "podman", "nvidia-smi", "nvcc", "sbatch")}


def _doctor_text(known: dict[str, Any], troubles: "Sequence[Trouble]") -> str:
    system, cpu, memory = known["system"], known["cpu"], known["memory"]
    lines = [
        f"system   {system['distribution']}, {system['kernel']}, {system['libc']}",
        f"cpu      {cpu['model']}, {cpu['usable']:g} of {cpu['threads']} threads, load {cpu['load_average'][0]}",
        f"memory   {memory['available'] >> 20} of {memory['total'] >> 20} MiB free",
        *_gpu_lines(known["gpu"]),
        f"tools    {', '.join(name for name, path in _tools().items() if path) or 'none'}",
        "",
        *[f"{'refuses' if one.fatal else 'warns'}  {safe(str(one))}" for one in troubles],
    ]
    if not troubles:
        lines.append("nothing would get in a run's way")
    return "\n".join(lines)


def _gpu_lines(told: Any) -> list[str]:
    if not isinstance(told, dict):
        return ["gpu      none"]
    lines = [f"driver   {told['driver']}, CUDA {told['cuda']}"]
    for device in told["devices"]:
        used, total = device["memory_used"] >> 20, device["memory_total"] >> 20
        capability = ".".join(map(str, device["capability"] or ("?",)))
        lines.append(f"gpu {device['index']}    {device['name']}, {capability}, {used} of {total} MiB in use")
    return lines

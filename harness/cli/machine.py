"""Verbs: clean, doctor."""

import argparse
import re
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from harness.cli.talk import Talk, Verbs, common, safe

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from harness.run.fitness import Fit
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
            description="Look at this machine as a run would before it starts: GPUs, who uses them and how they reach "
            "each other, driver, CUDA toolkits, limits, disk, leftovers of earlier runs, and which environments of the "
            "project can be built and run here. Exit code 1 when something would stop a run.",
        )
    )
    doctor.add_argument("--model", metavar="PATH", help="also check that this model is whole")
    doctor.add_argument("--port", type=_whole(1, 65535), help="also check that this port is free")
    doctor.add_argument(
        "--gpus", type=_whole(0, 1024), default=0, metavar="N", help="also check that N GPUs are there and free"
    )
    doctor.add_argument(
        "--concurrency",
        type=_whole(1, 1_000_000),
        default=1000,
        metavar="C",
        help="open streams to allow for (default: 1000)",
    )
    doctor.set_defaults(run=run_doctor)


def _whole(least: int, most: int) -> Callable[[str], int]:
    """A whole number within limits, both of them allowed."""

    def read(text: str) -> int:
        if not re.fullmatch(r"-?\d{1,9}", text) or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"`{text}` is not a whole number from {least} to {most}")
        return int(text)

    return read


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
    from dataclasses import asdict
    from pathlib import Path

    from harness.run import facts, host, preflight

    talk: Talk = arguments.talk
    beyond = host.survey([Path("runs"), *_home()])  # before the check, which raises this process's limit of open files
    fits = _fits()
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
        "host": beyond,
        "environments": [asdict(one) for one in fits],
        "tools": _tools(),
        "troubles": [
            {"subject": one.subject, "message": one.message, "hint": one.hint, "fatal": one.fatal} for one in troubles
        ],
    }
    talk.data(value, None if talk.as_json else _doctor_text(known, beyond, fits, troubles))
    return int(any(one.fatal for one in troubles))


def _home() -> "list[Path]":
    """Where environments and wheels lie; nowhere outside a project."""
    from harness.env import places
    from harness.errors import InputError

    try:
        return [places.home()]
    except InputError:
        return []


def _fits() -> "list[Fit]":
    """Every environment of the project; none outside one."""
    from harness.errors import InputError
    from harness.run import fitness

    try:
        return fitness.all_here()
    except InputError:
        return []


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


def _doctor_text(
    known: dict[str, Any], beyond: dict[str, Any], fits: "Sequence[Fit]", troubles: "Sequence[Trouble]"
) -> str:
    """The machine in one screen."""
    system, cpu, memory = known["system"], known["cpu"], known["memory"]
    governors = ", ".join(f"{name} on {count}" for name, count in sorted(beyond["governors"].items()))
    threads = f"{cpu['usable']:g} of {cpu['threads']} threads, load {cpu['load_average'][0]}"
    lines = [
        f"system    {system['distribution']}, {system['kernel']}, {system['libc']}",
        f"cpu       {cpu['model']}, {threads}, governor {governors or 'not told'}",
        f"memory    {memory['available'] >> 20} of {memory['total'] >> 20} MiB free",
        *_gpu_lines(known["gpu"], beyond["topology"]),
        f"iommu     {_iommu(beyond['iommu'])}",
        f"cuda      {_toolkits(beyond['toolkits'])}",
        f"limits    {_limits(beyond['limits'])}",
        *(f"disk      {_disk(one)}" for one in beyond["disk"]),
        f"tools     {', '.join(name for name, path in _tools().items() if path) or 'none'}",
        "",
        *_fit_lines(fits),
        *[f"{'refuses' if one.fatal else 'warns'}  {safe(str(one))}" for one in troubles],
    ]
    if not troubles:
        lines.append("nothing would get in a run's way")
    return "\n".join(lines)


def _gpu_lines(told: Any, topology: dict[str, Any]) -> list[str]:
    if not isinstance(told, dict):
        return ["gpu       none"]
    lines = [f"driver    {told['driver']}, CUDA {told['cuda']}"]
    slots = {slot["index"]: slot for slot in topology["slots"]}
    for device in told["devices"]:
        used, total = device["memory_used"] >> 20, device["memory_total"] >> 20
        capability = ".".join(map(str, device["capability"] or ("?",)))
        slot = slots.get(device["index"])
        place = f"; {slot['address']}, NUMA {_told(slot['numa_node'])}, PCIe {_told(slot['link'])}" if slot else ""
        index = device["index"]
        lines.append(f"gpu {index:<5} {device['name']}, {capability}, {used} of {total} MiB in use{place}")
    if len(slots) > 1:
        lines.append(f"paths     {_pairs(topology['paths'])}; peer reads {_peers(told['peers'])}")
        lines.append(f"acs       {_redirects(topology['slots'])}")
    return lines


def _pairs(paths: "Sequence[Sequence[str]]") -> str:
    """Pairs of GPUs by how they reach each other; the kind that most have stands without its pairs."""
    found: dict[str, list[str]] = {}
    for one, row in enumerate(paths):
        for other in range(one + 1, len(row)):
            found.setdefault(row[other], []).append(f"{one}-{other}")
    by_count = sorted(found.items(), key=lambda item: len(item[1]))
    few = [f"{kind} {' '.join(pairs)}" for kind, pairs in by_count[:-1]]
    return ", ".join([*few, f"{by_count[-1][0]} {'otherwise' if few else 'between all'}"])


def _peers(reads: "Sequence[Sequence[bool | None]]") -> str:
    """Whether the driver lets GPUs read each other's memory."""
    counts = Counter(value for one, row in enumerate(reads) for other, value in enumerate(row) if one != other)
    if not counts or counts[None]:
        return "not told"
    if not counts[False]:
        return "allowed between all"
    return "allowed between none" if not counts[True] else f"allowed in {counts[True]} of {counts.total()} directions"


def _redirects(slots: "Sequence[dict[str, Any]]") -> str:
    if any(slot["redirects"] is None for slot in slots):
        return "not told (root may ask the bridges)"
    found = list(dict.fromkeys(text for slot in slots for text in slot["redirects"]))
    shown = "; ".join(found[:2]) + (f" and {len(found) - 2} more" if found[2:] else "")
    return f"GPUs reach each other through the root complex: {shown}" if found else "no bridge redirects peer traffic"


def _iommu(told: dict[str, Any]) -> str:
    state = f"on, {told['groups']} groups" if told["on"] else "off"
    return f"{state}; kernel options {' '.join(told['options'])}" if told["options"] else state


def _toolkits(found: "Sequence[dict[str, Any]]") -> str:
    texts = [
        f"{one['version'] or '?'} in {one['path']}{' (current)' if one['current'] else ''}"
        f"{'' if one['nvcc'] else ' (no nvcc)'}"
        for one in found
    ]
    return ", ".join(texts) or "no toolkit on this machine; environments bring their own runtime"


def _limits(limits: dict[str, Any]) -> str:
    return ", ".join(
        f"{name.replace('_', ' ')} {_limit(limits[name][0])}"
        + (f" of {_limit(limits[name][1])}" if limits[name][0] != limits[name][1] else "")
        for name in ("open_files", "locked_memory", "processes")
    )


def _limit(value: int) -> str:
    return "unlimited" if value < 0 or value >= 1 << 62 else str(value)


def _disk(one: dict[str, Any]) -> str:
    free, total = one["free"] / (1 << 30), one["total"] / (1 << 30)
    return f"{free:.1f} of {total:.1f} GiB free: {', '.join(one['folders'])}"


def _fit_lines(fits: "Sequence[Fit]") -> list[str]:
    """A line an environment."""
    width = max((len(one.spec) for one in fits), default=0)
    return [f"env       {one.spec:<{width}}  {_fit(one)}" for one in fits] + ([""] if fits else [])


def _fit(one: "Fit") -> str:
    why = f": {safe('; '.join(one.why))}" if one.why else ""
    if not one.builds:
        return f"cannot be built here{why}"
    state = "built" if one.built else f"can be built ({(one.size or 0) / 1e9:.1f} GB of wheels)"
    return f"{state} and runs here" if one.runs else f"{state}, cannot run here{why}"


def _told(value: Any) -> str:
    return "not told" if value is None else str(value)

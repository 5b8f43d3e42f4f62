"""What machine this is: facts for the record, each absent where the machine does not say."""

import os
import platform
import re
import resource
import socket
import subprocess
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from harness import __version__
from harness.run import gpu

FORMAT = "harness.facts/1"
_OPTION = re.compile(
    r"\w*iommu|pcie?\w*=|mitigations=|isolcpus=|nohz|numa|hugepages|default_hugepagesz|transparent_hugepage"
)
_VECTOR_FLAGS = ("avx", "avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_tile", "amx_bf16", "asimd", "sve")


def collect(project: Path | None = None) -> dict[str, Any]:
    """Everything about this machine that may bear on a measurement, as JSON. `project`: whose git state to note."""
    return {
        "format": FORMAT,
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "harness": __version__,
        "python": platform.python_version(),
        "host": socket.gethostname(),
        "system": _system(),
        "cpu": _cpu(),
        "memory": _memory(),
        "limits": {"open_files": list(resource.getrlimit(resource.RLIMIT_NOFILE))},
        "gpu": _gpus() or "no GPU",
        "git": git_state(project or Path.cwd()),
    }


def hardware_class(facts: Mapping[str, Any]) -> str:
    """What must be equal for two runs to stand in one table: CPU, cores we may use, and the GPUs by name and number."""
    cpu, devices = facts.get("cpu") or {}, facts.get("gpu")
    processor = f"{cpu.get('model') or 'unknown CPU'} x {cpu.get('usable')}"
    if not isinstance(devices, dict):
        return f"no GPU; {processor}"
    counted = Counter(device["name"] for device in devices["devices"])
    return "; ".join([*(f"{count} x {name}" for name, count in sorted(counted.items())), processor])


def comparable(facts: Mapping[str, Any]) -> dict[str, str | None]:
    """The machine facts that a comparison checks for equality, by name; empty where none were noted."""
    if not facts:
        return {}
    devices = facts["gpu"] if isinstance(facts.get("gpu"), dict) else {}
    limits = [device.get("power_limit_w") for device in devices.get("devices", [])]
    return {
        "hardware": hardware_class(facts),
        "kernel": (facts.get("system") or {}).get("kernel"),
        "governor": _listed((facts.get("cpu") or {}).get("governor") or {}),
        "driver": devices.get("driver"),
        "power limits": ", ".join(f"{limit:.0f} W" for limit in limits if limit is not None) or None,
        "harness": facts.get("harness"),
    }


def busy(cpu: Mapping[str, Any]) -> str | None:
    """What says that others use a machine which should be idle; None where nothing does, or the load is not known.

    Args:
        cpu: the part `cpu` of machine facts: `load_average`, whose first number is the last minute's, and `usable`.
    """
    match cpu:
        case {"load_average": [int() | float() as load, *_], "usable": int() | float() as usable} if load > usable / 2:
            return f"load average {load:.1f} on {usable:g} CPUs before anything started"
    return None


def busy_before(noted: Mapping[str, Any]) -> list[str]:
    """What a run's `facts.json` says of others on its machines when it began: a sentence a machine, mostly none."""
    machines = noted.get("nodes") or {"": noted.get("before") or {}}
    said = {name: busy(known.get("cpu") or {}) for name, known in machines.items() if isinstance(known, Mapping)}
    return [
        f"others were using {f'`{name}`' if name else 'this machine'}: {sentence}"
        for name, sentence in said.items()
        if sentence
    ]


def _listed(counts: Mapping[str, int]) -> str | None:
    return ", ".join(f"{name} on {count}" for name, count in sorted(counts.items())) or None


def governors() -> dict[str, int]:
    """How many CPUs follow which frequency governor; empty where the machine does not say (most virtual ones)."""
    found = Path("/sys/devices/system/cpu").glob("cpu[0-9]*/cpufreq/scaling_governor")
    return dict(Counter(text for path in found if (text := _text(path))))


def usable_cpus() -> float:
    """CPUs this process may use: its affinity, and the quota of its control group."""
    allowed = float(len(os.sched_getaffinity(0)))
    quota = (_text(Path("/sys/fs/cgroup/cpu.max")) or "max").split()
    if len(quota) == 2 and quota[0].isdigit():
        return min(allowed, int(quota[0]) / int(quota[1]))
    return allowed


def git_state(folder: Path) -> dict[str, Any] | None:
    """Commit and uncommitted files of the repository a folder is in, None when it is in none."""
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None:
        return None
    changed = (_git(folder, "status", "--porcelain") or "").splitlines()
    return {"commit": commit, "dirty": bool(changed), "changed": len(changed)}


def _system() -> dict[str, Any]:
    system = platform.uname()
    return {
        "kernel": f"{system.system} {system.release} {system.machine}",
        "distribution": _distribution(),
        "libc": " ".join(platform.libc_ver()).strip() or None,
        # iommu=, pci=noacs, pcie_aspm= and their like decide how GPUs reach each other.
        "kernel_options": [word for word in (_text(Path("/proc/cmdline")) or "").split() if _OPTION.match(word)],
        "iommu": any(Path("/sys/class/iommu").glob("*")),
        "clocksource": _text(Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")),
        "container": Path("/.dockerenv").exists() or Path("/run/.containerenv").exists(),
    }


def _cpu() -> dict[str, Any]:
    told: dict[str, str] = {}
    for line in (_text(Path("/proc/cpuinfo")) or "").splitlines():
        name, _, value = line.partition(":")
        told.setdefault(name.strip(), value.strip())
    flags = (told.get("flags") or told.get("Features") or "").split()
    return {
        "model": told.get("model name") or told.get("Model") or platform.processor() or None,
        "threads": psutil.cpu_count(),
        "cores": psutil.cpu_count(logical=False),
        "usable": usable_cpus(),
        "numa_nodes": len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or None,
        "vector": [flag for flag in _VECTOR_FLAGS if flag in flags],
        "governor": governors() or None,
        "load_average": [round(load, 2) for load in os.getloadavg()],
        # Since boot, all cores: what it grew by during a run is time that other guests of the machine took from it.
        "stolen_s": getattr(psutil.cpu_times(), "steal", None),
    }


def _memory() -> dict[str, Any]:
    memory, shared = psutil.virtual_memory(), Path("/dev/shm")
    return {
        "total": memory.total,
        "available": memory.available,
        "swap": psutil.swap_memory().total,
        "limit": _text(Path("/sys/fs/cgroup/memory.max")),
        "shared": psutil.disk_usage(str(shared)).total if shared.is_dir() else None,
        "transparent_hugepages": _text(Path("/sys/kernel/mm/transparent_hugepage/enabled")),
    }


def _gpus() -> dict[str, Any] | None:
    devices, driver = gpu.gpus(), gpu.driver()
    if not devices or driver is None:
        return None
    return {
        "driver": driver[0],
        "cuda": f"{driver[1] // 1000}.{driver[1] % 1000 // 10}",
        "devices": [asdict(device) for device in devices],
        "peers": gpu.peers(),
    }


def _distribution() -> str | None:
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME")
    except OSError:
        return None


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _text(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None

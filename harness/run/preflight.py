"""Everything that can be known to go wrong before anything starts, in one list.

A trouble is `fatal` (the run is refused), or worth a warning that goes into the record; `passing` ones (a port, a GPU
in use) may end by themselves, and `wait_free` waits for that. Nobody else's process is ever touched.
"""

import os
import resource
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from harness.errors import Fault, InputError
from harness.run import facts, gpu, locks, modelfiles, ports, supervise

_FILES_BESIDE = 256  # open files besides one socket a stream
_STRANGER_BYTES = 512 << 20  # GPU memory that a driver and a display may use
_LOG_BYTES = 1 << 30  # what a run's folder may grow to unless we know better
_SHARED_BYTES = 1 << 30  # /dev/shm for several ranks
_LOOK_S = 2.0
_REAPING_S = 20.0  # longer than a reaper gives a server, once politely and once firmly


@dataclass(frozen=True, slots=True)
class Need:
    """What a run is going to need of this machine.

    `gpus` is how many; `capability` as (12, 0), `driver` as "580", `gpu_bytes` free on each. `variables` are the
    server's, for where its caches lie. `guard` is the environment's own check: the faults it finds.
    """

    run_folder: Path
    host: str = "127.0.0.1"
    port: int | None = None
    concurrency: int = 1
    model: Path | None = None
    run_bytes: int = _LOG_BYTES
    gpus: int = 0
    capability: tuple[int, int] | None = None
    driver: str | None = None
    gpu_bytes: int = 0
    variables: dict[str, str] = field(default_factory=dict)
    guard: Callable[[], Sequence[Fault]] | None = None


@dataclass(frozen=True, slots=True)
class Trouble:
    """One thing that is wrong, or worth knowing."""

    subject: str
    message: str
    hint: str | None = None
    fatal: bool = True
    passing: bool = False

    def __str__(self) -> str:
        return f"{self.subject}: {self.message}" + (f" ({self.hint})" if self.hint else "")


def check(need: Need) -> list[Trouble]:
    """All troubles at once, the fatal ones first. Raises this process's limit of open files where that helps."""
    found: list[Trouble] = []
    for look in (_port, _leftovers, _gpus, _driver, _disk, _open_files, _model, _locks, _shared_memory, _guard):
        found += look(need)
    found += cpu()
    return sorted(found, key=lambda trouble: not trouble.fatal)


def refuse(troubles: Sequence[Trouble]) -> None:
    """Refuse to start where something fatal is wrong.

    Raises:
        InputError: every fatal trouble.
    """
    fatal = [
        Fault(f"{trouble.subject}: {trouble.message}", None, trouble.hint) for trouble in troubles if trouble.fatal
    ]
    if fatal:
        waits = any(trouble.passing for trouble in troubles)
        raise InputError.of(fatal, hint="`--wait-free 10m` waits for what is in use" if waits else None)


def wait_free(
    need: Need, wait_s: float, on_wait: Callable[[Sequence[Trouble]], None] = lambda _: None
) -> list[Trouble]:
    """`check` again and again while ports or GPUs are in use by others, for at most `wait_s`; returns the last list."""
    until = time.monotonic() + wait_s
    while True:
        troubles = check(need)
        fatal = [trouble for trouble in troubles if trouble.fatal]
        if not fatal or not all(trouble.passing for trouble in fatal) or time.monotonic() >= until:
            return troubles
        on_wait(fatal)
        time.sleep(min(_LOOK_S, max(0.0, until - time.monotonic())))


def _port(need: Need) -> Iterator[Trouble]:
    if need.port and not ports.is_free(need.host, need.port):
        known = "; ".join(map(str, ports.holders(need.port))) or "a process that is not visible to us"
        hint = "stop it yourself, wait with --wait-free, or leave the port out of the recipe"
        yield Trouble(f"port {need.port}", f"taken by {known}", hint, passing=True)


def _leftovers(_: Need) -> Iterator[Trouble]:
    """What is left of a killed harness for good: a reaper that is at its work just now gets the time it needs."""
    until = time.monotonic() + _REAPING_S
    found = supervise.leftovers()
    while any(left.reaped for left in found) and time.monotonic() < until:
        time.sleep(0.25)
        found = supervise.leftovers()
    for left in found:
        names = "; ".join(map(str, left.members))
        yield Trouble("an earlier run", f"`{left.launch}` left {names}", "`harness clean` ends exactly these")


def _gpus(need: Need) -> Iterator[Trouble]:
    if not need.gpus:
        return
    devices = gpu.gpus()
    if len(devices) < need.gpus:
        yield Trouble("GPU", f"{need.gpus} needed, {len(devices) or 'none'} found", "is the driver loaded?")
    for device in devices:
        yield from _device(device, need)


def _device(device: gpu.Gpu, need: Need) -> Iterator[Trouble]:
    name = f"GPU {device.index} ({device.name})"
    if need.capability and device.capability and device.capability != need.capability:
        seen, wanted = (".".join(map(str, pair)) for pair in (device.capability, need.capability))
        yield Trouble(name, f"compute capability {seen}, the environment is built for {wanted}")
    strangers = [(ports.describe(pid), pid, used) for pid, used in device.users]
    if strangers:
        who = "; ".join(f"{holder or f'pid {pid}'} using {(used or 0) >> 20} MiB" for holder, pid, used in strangers)
        yield Trouble(name, f"in use by {who}", "stop it yourself, or wait with --wait-free", passing=True)
    elif device.memory_used > _STRANGER_BYTES:
        used = device.memory_used >> 20
        yield Trouble(name, f"{used} MiB in use by nobody we can see", "a container or a dying process?", passing=True)
    if device.memory_total - device.memory_used < need.gpu_bytes:
        free = (device.memory_total - device.memory_used) >> 20
        yield Trouble(name, f"{free} MiB free, {need.gpu_bytes >> 20} MiB needed", passing=bool(strangers))
    if device.power_limit_w and device.power_default_w and device.power_limit_w < device.power_default_w - 1:
        capped = f"power capped at {device.power_limit_w:.0f} W of {device.power_default_w:.0f} W"
        yield Trouble(name, capped, "`nvidia-smi -pl` sets it", fatal=False)
    if device.throttle and device.throttle & ~gpu.IDLE:
        yield Trouble(name, f"held back before anything started: {gpu.throttle_names(device.throttle)}", fatal=False)


def _driver(need: Need) -> Iterator[Trouble]:
    if need.driver is None or (found := gpu.driver()) is None:
        return
    if _version(found[0]) < _version(need.driver):
        yield Trouble("driver", f"{found[0]}, the environment needs {need.driver} or newer", "update the NVIDIA driver")


def _disk(need: Need) -> Iterator[Trouble]:
    folder = _existing(need.run_folder)
    free = shutil.disk_usage(folder).free
    if free < need.run_bytes:
        yield Trouble("disk", f"{free >> 20} MiB free at `{folder}`, up to {need.run_bytes >> 20} MiB needed")
    if not os.access(folder, os.W_OK | os.X_OK):
        yield Trouble("disk", f"`{folder}` is not writable")


def _open_files(need: Need) -> Iterator[Trouble]:
    """One socket a stream, here and in the server, which inherits the limit."""
    wanted = 2 * need.concurrency + _FILES_BESIDE
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
        if allowed < wanted:
            message = f"the limit is {hard}, concurrency {need.concurrency} needs {wanted}"
            yield Trouble("open files", message, f"`ulimit -Hn {wanted}` as root, or LimitNOFILE")


def _model(need: Need) -> Iterator[Trouble]:
    if need.model is not None:
        for message in modelfiles.faults(need.model):
            yield Trouble("model", message, "fetch the whole model again, or correct `model.path`")


def _locks(need: Need) -> Iterator[Trouble]:
    for path in locks.stale(locks.roots(need.variables or dict(os.environ))):
        yield Trouble("JIT lock", f"`{path}` was left by a build that is gone; a server would wait for it", "remove it")


def _shared_memory(need: Need) -> Iterator[Trouble]:
    shared = Path("/dev/shm")
    if need.gpus > 1 and shared.is_dir() and (free := shutil.disk_usage(shared).free) < _SHARED_BYTES:
        yield Trouble(
            "/dev/shm", f"{free >> 20} MiB free for {need.gpus} ranks", "--ipc=host or --shm-size", fatal=False
        )


def _guard(need: Need) -> Iterator[Trouble]:
    for fault in need.guard() if need.guard else ():
        yield Trouble("environment", fault.message, fault.hint)


def cpu() -> Iterator[Trouble]:
    """What would disturb any measurement on this machine: governors that save power, and others at work."""
    slow = {name: count for name, count in facts.governors().items() if name != "performance"}
    if slow:
        named = ", ".join(f"{name} on {count} CPUs" for name, count in sorted(slow.items()))
        yield Trouble("CPU governor", named, "`cpupower frequency-set -g performance` steadies the client", fatal=False)
    if message := facts.busy({"load_average": os.getloadavg(), "usable": facts.usable_cpus()}):
        yield Trouble("CPU", message, "others are using this machine", fatal=False)


def _existing(folder: Path) -> Path:
    folder = folder.absolute()
    return next(found for found in (folder, *folder.parents) if found.is_dir())


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.removeprefix(">=").strip().split(".") if part.isdigit())

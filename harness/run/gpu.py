"""What NVML says of this machine's GPUs. Without a GPU, or without its driver, everything here is None or empty."""

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

Reading = dict[str, Any]  # a line of `gpu.jsonl`

IDLE = 0x1  # nvmlClocksEventReasonGpuIdle
# nvml.h, "Clock event reasons": what holds a GPU's clocks back.
_THROTTLES = {
    0x2: "application clocks setting",
    0x4: "software power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
    0x100: "display clock setting",
}


def throttle_names(reasons: int) -> str:
    """The bits of a clock event mask in words, idleness left out."""
    return ", ".join(name for bit, name in _THROTTLES.items() if reasons & bit) or f"{reasons:#x}"


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU now. Memory in bytes, clocks in MHz, power in watts, `users` as (pid, bytes or None).

    None: this GPU does not say.
    """

    index: int
    name: str
    uuid: str
    capability: tuple[int, int] | None
    memory_total: int
    memory_used: int
    users: tuple[tuple[int, int | None], ...]
    power_w: float | None = None
    power_limit_w: float | None = None
    power_default_w: float | None = None
    sm_clock_mhz: int | None = None
    sm_clock_max_mhz: int | None = None
    throttle: int | None = None
    temperature_c: int | None = None


@contextlib.contextmanager
def nvml() -> Iterator[ModuleType | None]:
    """The NVML module, opened; None where there is no driver."""
    import pynvml  # noqa: PLC0415 - costs nothing where it is not asked

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield None
        return
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def driver() -> tuple[str, int] | None:
    """The driver's version and the newest CUDA it serves (as 13000), or None."""
    with nvml() as library:
        if library is None:
            return None
        return str(library.nvmlSystemGetDriverVersion()), int(library.nvmlSystemGetCudaDriverVersion())


def gpus() -> tuple[Gpu, ...]:
    """Every GPU that NVML shows; empty where there is none."""
    with nvml() as library:
        if library is None:
            return ()
        return tuple(_read(library, index) for index in range(library.nvmlDeviceGetCount()))


def _asker(library: ModuleType, handle: Any) -> Callable[..., Any]:
    """Questions about one GPU by the name of NVML's function; None for what this GPU does not say."""

    def ask(name: str, *arguments: Any) -> Any:
        try:
            return getattr(library, name)(handle, *arguments)
        except library.NVMLError:
            return None

    return ask


def _read(library: ModuleType, index: int) -> Gpu:
    handle = library.nvmlDeviceGetHandleByIndex(index)
    ask = _asker(library, handle)
    memory = library.nvmlDeviceGetMemoryInfo(handle)
    power, limit = ask("nvmlDeviceGetPowerUsage"), ask("nvmlDeviceGetEnforcedPowerLimit")
    default = ask("nvmlDeviceGetPowerManagementDefaultLimit")
    running = [
        *(ask("nvmlDeviceGetComputeRunningProcesses") or []),
        *(ask("nvmlDeviceGetGraphicsRunningProcesses") or []),
    ]
    capability = ask("nvmlDeviceGetCudaComputeCapability")
    return Gpu(
        index=index,
        name=str(library.nvmlDeviceGetName(handle)),
        uuid=str(library.nvmlDeviceGetUUID(handle)),
        capability=(int(capability[0]), int(capability[1])) if capability else None,
        memory_total=int(memory.total),
        memory_used=int(memory.used),
        users=tuple(
            (int(user.pid), None if user.usedGpuMemory is None else int(user.usedGpuMemory)) for user in running
        ),
        power_w=power / 1000 if power is not None else None,
        power_limit_w=limit / 1000 if limit is not None else None,
        power_default_w=default / 1000 if default is not None else None,
        sm_clock_mhz=ask("nvmlDeviceGetClockInfo", library.NVML_CLOCK_SM),
        sm_clock_max_mhz=ask("nvmlDeviceGetMaxClockInfo", library.NVML_CLOCK_SM),
        throttle=ask("nvmlDeviceGetCurrentClocksEventReasons"),
        temperature_c=ask("nvmlDeviceGetTemperature", library.NVML_TEMPERATURE_GPU),
    )


def watcher(ours: Callable[[], set[int]]) -> Callable[[], AbstractContextManager[Callable[[float], Iterator[Reading]]]]:
    """Who reads GPUs while a level runs, as `load.observe` wants it.

    Args:
        ours: the pids of the server; empty where they are not known.
    """

    @contextlib.contextmanager
    def watching() -> Iterator[Callable[[float], Iterator[Reading]]]:
        with nvml() as library:
            yield lambda at: iter(()) if library is None else _readings(library, at, ours())

    return watching


def _readings(library: ModuleType, at: float, ours: set[int]) -> Iterator[Reading]:
    """One reading of each GPU: watts, MHz, degrees Celsius, bytes, PCIe bytes a second over NVML's own 20 ms, and the
    strangers on it."""
    for index in range(library.nvmlDeviceGetCount()):
        try:
            ask = _asker(library, library.nvmlDeviceGetHandleByIndex(index))
        except library.NVMLError:  # it fell off the bus; the others, and the server's own metrics, are still to be read
            continue
        power, memory = ask("nvmlDeviceGetPowerUsage"), ask("nvmlDeviceGetMemoryInfo")
        sent = ask("nvmlDeviceGetPcieThroughput", library.NVML_PCIE_UTIL_TX_BYTES)
        received = ask("nvmlDeviceGetPcieThroughput", library.NVML_PCIE_UTIL_RX_BYTES)
        rates = ask("nvmlDeviceGetUtilizationRates")
        users = [int(user.pid) for user in ask("nvmlDeviceGetComputeRunningProcesses") or []]
        yield {
            "at": at,
            "gpu": index,
            "power_w": None if power is None else power / 1000,
            "sm_mhz": ask("nvmlDeviceGetClockInfo", library.NVML_CLOCK_SM),
            "memory_mhz": ask("nvmlDeviceGetClockInfo", library.NVML_CLOCK_MEM),
            "throttle": ask("nvmlDeviceGetCurrentClocksEventReasons"),
            "temperature_c": ask("nvmlDeviceGetTemperature", library.NVML_TEMPERATURE_GPU),
            "memory_used": None if memory is None else int(memory.used),
            "busy_percent": None if rates is None else int(rates.gpu),
            "pcie_sent_bytes_s": None if sent is None else sent * 1024,
            "pcie_received_bytes_s": None if received is None else received * 1024,
            "strangers": strangers(users, ours),
        }


def strangers(users: Sequence[int], ours: set[int]) -> list[str]:
    """Who else computes on a GPU that the server uses, as `name (pid)`.

    Nobody where none of the users is ours: then the server runs on other GPUs, or the driver tells pids of another
    namespace (a container's), and a stranger cannot be told from the server itself.
    """
    if not ours.intersection(users):
        return []
    return [f"{_name(pid)} ({pid})" for pid in sorted(set(users) - ours - {os.getpid()})]


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return "a process"


def peers() -> list[list[bool | None]]:
    """Whether the driver lets GPU i read GPU j's memory (None on the diagonal, and where it does not say)."""
    with nvml() as library:
        if library is None:
            return []
        handles = [library.nvmlDeviceGetHandleByIndex(index) for index in range(library.nvmlDeviceGetCount())]
        return [[_reads(library, one, other) for other in handles] for one in handles]


def _reads(library: ModuleType, one: Any, other: Any) -> bool | None:
    if one is other:
        return None
    try:
        status = library.nvmlDeviceGetP2PStatus(one, other, library.NVML_P2P_CAPS_INDEX_READ)
    except library.NVMLError:
        return None
    return bool(status == library.NVML_P2P_STATUS_OK)

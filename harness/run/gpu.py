"""What NVML says of this machine's GPUs. Without a GPU, or without its driver, everything here is None or empty."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

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


def _read(library: ModuleType, index: int) -> Gpu:
    handle = library.nvmlDeviceGetHandleByIndex(index)

    def ask(name: str, *arguments: Any) -> Any:
        try:
            return getattr(library, name)(handle, *arguments)
        except library.NVMLError:
            return None

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

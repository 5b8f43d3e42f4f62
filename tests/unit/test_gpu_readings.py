"""GPUs while a level runs, with a driver that says what a test wants it to say."""

import contextlib
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from harness.engines.engine import Counters
from harness.load.observe import Observer
from harness.run import gpu


class NVMLError(Exception):
    """As pynvml raises it."""


def driver(*users: list[int]) -> SimpleNamespace:
    """A driver with one GPU for each list of pids that compute on it; it tells no power and no PCIe rates."""

    def refuse(*_: Any) -> None:
        raise NVMLError

    return SimpleNamespace(
        NVMLError=NVMLError,
        NVML_PCIE_UTIL_TX_BYTES=0,
        NVML_PCIE_UTIL_RX_BYTES=1,
        NVML_CLOCK_SM=1,
        NVML_CLOCK_MEM=2,
        nvmlDeviceGetCount=lambda: len(users),
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetPowerUsage=refuse,
        nvmlDeviceGetPcieThroughput=refuse,
        nvmlDeviceGetMemoryInfo=lambda _: SimpleNamespace(used=5 << 30),
        nvmlDeviceGetUtilizationRates=lambda _: SimpleNamespace(gpu=97),
        nvmlDeviceGetComputeRunningProcesses=lambda index: [SimpleNamespace(pid=pid) for pid in users[index]],
        nvmlDeviceGetClockInfo=lambda _, kind: 2400 + kind,
        nvmlDeviceGetCurrentClocksEventReasons=lambda _: 0x4,
        nvmlDeviceGetTemperature=refuse,
        NVML_TEMPERATURE_GPU=0,
    )


@pytest.fixture
def with_driver(monkeypatch: pytest.MonkeyPatch) -> Any:
    def put(library: SimpleNamespace | None) -> None:
        @contextlib.contextmanager
        def opened() -> Iterator[SimpleNamespace | None]:
            yield library

        monkeypatch.setattr(gpu, "nvml", opened)

    return put


def watched(ours: set[int]) -> Observer:
    """One level's observation of a server without metrics."""
    silent = SimpleNamespace(metrics_path=None, counters=Counters())
    with Observer("http://127.0.0.1:1", silent, gpus=gpu.watcher(lambda: ours)) as observer:
        pass
    return observer


def test_a_stranger_on_a_gpu_of_the_server_is_named_and_one_on_another_gpu_is_not(with_driver: Any) -> None:
    with_driver(driver([100, 101, 1], [4242]))

    found = watched({100, 101})

    comm = gpu._name(1)
    assert found.sharing() == {"shared_with": [f"{comm} (1)"]}
    assert [reading["strangers"] for reading in found.gpus()[:2]] == [[f"{comm} (1)"], []]


def test_nobody_is_called_a_stranger_where_the_servers_own_pids_are_not_told(with_driver: Any) -> None:
    """A driver outside a container tells pids that mean nothing inside."""
    with_driver(driver([70001, 70002]))
    assert watched({100}).sharing() == {}
    assert watched(set()).sharing() == {}


def test_the_harness_itself_is_no_stranger_and_a_process_that_is_gone_still_is() -> None:
    gone = 2**22 + 1  # beyond the kernel's highest pid
    assert gpu.strangers([100, os.getpid()], {100}) == []
    assert gpu.strangers([100, gone], {100}) == [f"a process ({gone})"]


def test_a_reading_says_what_this_gpu_tells_and_none_for_the_rest(with_driver: Any) -> None:
    with_driver(driver([]))
    reading = watched(set()).gpus()[0]
    wanted = {"gpu": 0, "power_w": None, "sm_mhz": 2401, "memory_used": 5 << 30, "busy_percent": 97, "throttle": 4}
    assert {name: reading[name] for name in wanted} == wanted
    assert watched(set()).throttles() == [4]


def test_without_a_driver_there_are_no_readings(with_driver: Any) -> None:
    with_driver(None)
    assert watched({1}).gpus() == []


def telling() -> SimpleNamespace:
    """One GPU that tells everything, in the units of nvml.h: milliwatts, MHz, degrees Celsius, bytes, PCIe KB/s."""
    library = driver([])
    library.nvmlDeviceGetPowerUsage = lambda _: 312_500
    library.nvmlDeviceGetClockInfo = lambda _, clock: {library.NVML_CLOCK_SM: 1980, library.NVML_CLOCK_MEM: 2619}[clock]
    library.nvmlDeviceGetTemperature = lambda _, sensor: {library.NVML_TEMPERATURE_GPU: 61}[sensor]
    library.nvmlDeviceGetPcieThroughput = lambda _, way: {0: 2048, 1: 10}[way]
    return library


def test_power_clocks_temperature_memory_and_pcie_are_told_in_the_units_of_the_record(with_driver: Any) -> None:
    with_driver(telling())
    reading = watched(set()).gpus()[0]
    wanted = {
        "power_w": 312.5,
        "sm_mhz": 1980,
        "memory_mhz": 2619,
        "temperature_c": 61,
        "memory_used": 5 << 30,
        "pcie_sent_bytes_s": 2 << 20,
        "pcie_received_bytes_s": 10 << 10,
    }
    assert {name: reading[name] for name in wanted} == wanted


def test_a_gpu_that_is_lost_meanwhile_leaves_the_others_to_be_read(with_driver: Any) -> None:
    library = driver([], [])

    def handle(index: int) -> int:
        if index == 0:
            raise NVMLError("GPU is lost")
        return index

    library.nvmlDeviceGetHandleByIndex = handle
    with_driver(library)
    assert {reading["gpu"] for reading in watched(set()).gpus()} == {1}


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        (pynvml.nvmlClocksEventReasonApplicationsClocksSetting, "application clocks setting"),
        (pynvml.nvmlClocksEventReasonSwPowerCap, "software power cap"),
        (pynvml.nvmlClocksEventReasonHwSlowdown, "hardware slowdown"),
        (pynvml.nvmlClocksEventReasonSyncBoost, "sync boost"),
        (pynvml.nvmlClocksEventReasonSwThermalSlowdown, "software thermal slowdown"),
        (pynvml.nvmlClocksEventReasonHwThermalSlowdown, "hardware thermal slowdown"),
        (pynvml.nvmlClocksEventReasonHwPowerBrakeSlowdown, "hardware power brake"),
        (pynvml.nvmlClocksEventReasonDisplayClockSetting, "display clock setting"),
    ],
)
def test_what_holds_clocks_back_is_named_as_nvml_counts_its_bits(reason: int, words: str) -> None:
    assert gpu.throttle_names(reason) == words
    assert gpu.throttle_names(reason | pynvml.nvmlClocksEventReasonGpuIdle) == words


def test_several_reasons_are_all_named_and_an_unknown_one_by_its_bit() -> None:
    both = pynvml.nvmlClocksEventReasonSwPowerCap | pynvml.nvmlClocksEventReasonHwThermalSlowdown
    assert gpu.throttle_names(both) == "software power cap, hardware thermal slowdown"
    assert gpu.throttle_names(0x8000) == "0x8000"
    assert pynvml.nvmlClocksEventReasonGpuIdle == gpu.IDLE


def test_what_a_gpu_is_is_told_in_the_units_of_the_record_and_none_where_it_does_not_say(with_driver: Any) -> None:
    library = telling()
    library.nvmlDeviceGetCount = lambda: 1
    library.nvmlDeviceGetMemoryInfo = lambda _: SimpleNamespace(used=5 << 30, total=140 << 30)
    library.nvmlDeviceGetName = lambda _: "NVIDIA H200"
    library.nvmlDeviceGetUUID = lambda _: "GPU-1"
    library.nvmlDeviceGetEnforcedPowerLimit = lambda _: 600_000
    library.nvmlDeviceGetPowerManagementDefaultLimit = lambda _: 700_000
    library.nvmlDeviceGetMaxClockInfo = lambda _, clock: {library.NVML_CLOCK_SM: 2010}[clock]
    library.nvmlDeviceGetCudaComputeCapability = lambda _: (9, 0)
    computing, drawing = SimpleNamespace(pid=7, usedGpuMemory=1 << 30), SimpleNamespace(pid=8, usedGpuMemory=None)
    library.nvmlDeviceGetComputeRunningProcesses = lambda _: [computing]
    library.nvmlDeviceGetGraphicsRunningProcesses = lambda _: [drawing]
    with_driver(library)
    told = gpu.Gpu(
        index=0,
        name="NVIDIA H200",
        uuid="GPU-1",
        capability=(9, 0),
        memory_total=140 << 30,
        memory_used=5 << 30,
        users=((7, 1 << 30), (8, None)),
        power_w=312.5,
        power_limit_w=600.0,
        power_default_w=700.0,
        sm_clock_mhz=1980,
        sm_clock_max_mhz=2010,
        throttle=0x4,
        temperature_c=61,
    )
    assert gpu.gpus() == (told,)

    def refuse(*_: Any) -> None:
        raise NVMLError

    asked = [name for name in vars(library) if name.startswith("nvmlDeviceGet")]
    always = {f"nvmlDeviceGet{name}" for name in ("Count", "HandleByIndex", "MemoryInfo", "Name", "UUID")}
    for name in set(asked) - always:
        setattr(library, name, refuse)
    assert gpu.gpus() == (gpu.Gpu(0, "NVIDIA H200", "GPU-1", None, 140 << 30, 5 << 30, ()),)

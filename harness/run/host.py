"""What of a machine bears on serving with GPUs beyond a run's facts: toolkits, ways between GPUs, limits, disk.

For `harness doctor`: everything is read and nothing changed, and what the machine does not say is None.
"""

import os
import re
import resource
import shutil
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from harness.files import read_json
from harness.run import facts, gpu

_ACS = 0x000D  # PCI Express extended capability "Access Control Services", PCIe base specification 7.7.11
_REDIRECTS = {0x04: "P2P request redirect", 0x08: "P2P completion redirect"}  # of its control register
_LIMITS = {
    "open_files": resource.RLIMIT_NOFILE,
    "locked_memory": resource.RLIMIT_MEMLOCK,
    "processes": resource.RLIMIT_NPROC,
    "stack": resource.RLIMIT_STACK,
    "core": resource.RLIMIT_CORE,
}


@dataclass(frozen=True, slots=True)
class Toolkit:
    """One CUDA toolkit on this machine; `current` is the one whose nvcc a build finds first."""

    path: str
    version: str | None
    nvcc: bool
    current: bool


@dataclass(frozen=True, slots=True)
class Slot:
    """Where one GPU sits: its PCI address, NUMA node, link, the bridges above it, and what stands in the way of peers.

    `redirects` names bridges whose ACS sends traffic between GPUs up through the root complex; None where the bridges
    do not say, which takes root.
    """

    index: int
    address: str
    numa_node: int | None
    link: str | None
    bridges: tuple[str, ...]
    iommu_group: int | None
    redirects: tuple[str, ...] | None


def survey(folders: Sequence[Path] = ()) -> dict[str, Any]:
    """Everything, as JSON. `folders`: whose free space is told, beside those that every machine has."""
    slots = tuple(_slots())
    return {
        "toolkits": [asdict(one) for one in toolkits()],
        "topology": {"slots": [asdict(one) for one in slots], "paths": paths(slots)},
        "iommu": iommu(),
        "governors": facts.governors(),
        "limits": {name: list(resource.getrlimit(number)) for name, number in _LIMITS.items()},
        "disk": free_space(folders),
    }


# Toolkits


def toolkits(root: Path = Path("/"), variables: Mapping[str, str] | None = None) -> list[Toolkit]:
    """CUDA toolkits side by side: under /usr/local and /opt, where $CUDA_HOME points, and the one on $PATH."""
    known = os.environ if variables is None else variables
    named = [Path(known[name]) for name in ("CUDA_HOME", "CUDA_PATH") if known.get(name)]
    nvcc = shutil.which("nvcc", path=known.get("PATH", ""))
    on_path = [Path(nvcc).resolve().parents[1]] if nvcc else []
    found = [*on_path, *named, *sorted((root / "usr/local").glob("cuda*")), *sorted((root / "opt").glob("cuda*"))]
    folders = dict.fromkeys(folder.resolve() for folder in found if folder.is_dir())
    current = next((folder.resolve() for folder in (*named, *on_path)), None)
    told = [
        Toolkit(str(folder), _toolkit_version(folder), (folder / "bin/nvcc").is_file(), folder == current)
        for folder in folders
    ]
    # An nvcc on $PATH may be a script in a folder that holds no toolkit.
    return [one for one in told if one.version is not None or Path(one.path).name.startswith("cuda")]


def _toolkit_version(folder: Path) -> str | None:
    """What a toolkit says it is: `version.json`, the older `version.txt`, else its header."""
    with suppress(Exception):
        return str(read_json(folder / "version.json")["cuda"]["version"])
    for name, pattern in (("version.txt", r"CUDA Version (\S+)"), ("include/cuda.h", r"define CUDA_VERSION (\d+)")):
        with suppress(OSError):
            if match := re.search(pattern, (folder / name).read_text(errors="replace")):
                text = match[1]
                return f"{int(text) // 1000}.{int(text) % 1000 // 10}" if text.isdigit() else text
    return None


# How GPUs reach each other


def _slots() -> Iterator[Slot]:
    with gpu.nvml() as library:
        if library is None:
            return
        for index in range(library.nvmlDeviceGetCount()):
            handle = library.nvmlDeviceGetHandleByIndex(index)
            address = _address(str(library.nvmlDeviceGetPciInfo(handle).busId))
            yield slot(index, address, link=_link(library, handle))


def slot(index: int, address: str, *, link: str | None = None, root: Path = Path("/")) -> Slot:
    """One GPU's place by its PCI address, from sysfs."""
    device = root / "sys/bus/pci/devices" / address
    above = _bridges(device)
    controls = {bridge: acs_control(root / "sys/bus/pci/devices" / bridge / "config") for bridge in above}
    told = [value for value in controls.values() if value is not None]
    redirects = tuple(
        f"{bridge}: {', '.join(name for bit, name in _REDIRECTS.items() if value & bit)}"
        for bridge, value in controls.items()
        if value is not None and any(value & bit for bit in _REDIRECTS)
    )
    return Slot(
        index=index,
        address=address,
        numa_node=_number(device / "numa_node"),
        link=link,
        bridges=above,
        iommu_group=_group(device),
        redirects=redirects if told or not above else None,
    )


def paths(slots: Sequence[Slot]) -> list[list[str]]:
    """How each GPU reaches each other, in `nvidia-smi topo`'s words, as far as PCI tells: NVLink is not looked at.

    PIX: one bridge between them; PXB: several, no host bridge; PHB: through a host bridge; SYS: from socket to socket.
    """
    return [["X" if one is other else _path(one, other) for other in slots] for one in slots]


def _path(one: Slot, other: Slot) -> str:
    shared = [bridge for bridge in one.bridges if bridge in other.bridges]
    if shared:
        # The port nearest to both is shared; below it each has a port of the switch of its own.
        nearest = max(one.bridges.index(bridge) for bridge in shared)
        deepest = max(len(one.bridges), len(other.bridges)) - 1 - nearest
        return "PIX" if deepest <= 1 else "PXB"
    known = None not in (one.numa_node, other.numa_node)
    return "SYS" if known and one.numa_node != other.numa_node else "PHB"


def acs_control(config: Path) -> int | None:
    """The ACS control register of a bridge from its configuration space; None where it has none, or is not shown.

    Extended capabilities begin at byte 0x100, each with a header of id (16 bits), version (4) and the next one's offset
    (12); the control register is at offset 6 of this one. Without root only 64 bytes can be read.
    """
    try:
        data = config.read_bytes()
    except OSError:
        return None
    at, seen = 0x100, set[int]()
    while 0x100 <= at <= len(data) - 8 and at not in seen:
        seen.add(at)
        (head,) = struct.unpack_from("<I", data, at)
        if head & 0xFFFF == _ACS:
            return int(struct.unpack_from("<H", data, at + 6)[0])
        at = head >> 20
    return None


def iommu(root: Path = Path("/")) -> dict[str, Any]:
    """Whether an IOMMU translates for devices: units, groups, and what the kernel was told."""
    words = _text(root / "proc/cmdline").split()
    return {
        "on": any((root / "sys/class/iommu").glob("*")),
        "groups": len(list((root / "sys/kernel/iommu_groups").glob("*"))),
        "options": [word for word in words if "iommu" in word or word.startswith("pci=")],
    }


def _bridges(device: Path) -> tuple[str, ...]:
    """PCI addresses above a device, the root port first."""
    try:
        parts = device.resolve().parts
    except OSError:
        return ()
    addresses = [part for part in parts if re.fullmatch(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", part)]
    return tuple(addresses[:-1])


def _address(bus_id: str) -> str:
    """NVML's `00000000:17:00.0` as sysfs has it: `0000:17:00.0`."""
    domain, _, rest = bus_id.lower().partition(":")
    return f"{domain[-4:]}:{rest}"


def _link(library: Any, handle: Any) -> str | None:
    """A GPU's PCIe link as it is and as it could be: `5.0 x16 of 5.0 x16`; an idle GPU lowers its generation."""
    try:
        now = library.nvmlDeviceGetCurrPcieLinkGeneration(handle), library.nvmlDeviceGetCurrPcieLinkWidth(handle)
        most = library.nvmlDeviceGetMaxPcieLinkGeneration(handle), library.nvmlDeviceGetMaxPcieLinkWidth(handle)
    except library.NVMLError:
        return None
    return f"{now[0]}.0 x{now[1]} of {most[0]}.0 x{most[1]}"


def _group(device: Path) -> int | None:
    link = device / "iommu_group"
    return int(link.resolve().name) if link.exists() and link.resolve().name.isdigit() else None


# Disk


def free_space(folders: Sequence[Path]) -> list[dict[str, Any]]:
    """Free bytes where runs, environments and caches lie; a file system is told once, with all that lies on it."""
    wanted = [*folders, Path("/tmp"), Path("/dev/shm"), Path.home()]
    systems: dict[int, dict[str, Any]] = {}
    for folder in wanted:
        there = next((path for path in (folder, *folder.absolute().parents) if path.is_dir()), None)
        if there is None:
            continue
        known = systems.setdefault(
            there.stat().st_dev,
            {"folders": [], "free": shutil.disk_usage(there).free, "total": shutil.disk_usage(there).total},
        )
        if str(folder) not in known["folders"]:
            known["folders"].append(str(folder))
    return list(systems.values())


def _number(path: Path) -> int | None:
    text = _text(path)
    return int(text) if text.lstrip("-").isdigit() and int(text) >= 0 else None


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""

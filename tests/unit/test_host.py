"""What a machine says of its toolkits, its PCI tree and its IOMMU, from trees made for the purpose."""

import struct
from pathlib import Path

import pytest

from harness.run import host


def device(root: Path, *chain: str, numa: int = 0, group: int | None = None, acs: dict[str, int] | None = None) -> None:
    """A GPU below some bridges: `/sys/devices/pci0000:00/BRIDGE/.../GPU`, and links to all of them by address."""
    folder = root / "sys/devices/pci0000:00"
    links = root / "sys/bus/pci/devices"
    links.mkdir(parents=True, exist_ok=True)
    for address in chain:
        folder = folder / address
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config").write_bytes(config((acs or {}).get(address)))
        if not (links / address).exists():
            (links / address).symlink_to(folder)
    (folder / "numa_node").write_text(f"{numa}\n")
    if group is not None:
        (root / f"sys/kernel/iommu_groups/{group}").mkdir(parents=True, exist_ok=True)
        (folder / "iommu_group").symlink_to(root / f"sys/kernel/iommu_groups/{group}")


def config(control: int | None) -> bytes:
    """Configuration space with an advanced-error capability at 0x100 and, where asked, ACS behind it at 0x148."""
    data = bytearray(4096)
    struct.pack_into("<I", data, 0x100, 0x0001 | 2 << 16 | (0x148 if control is not None else 0) << 20)
    if control is not None:
        struct.pack_into("<I", data, 0x148, 0x000D | 1 << 16)
        struct.pack_into("<H", data, 0x148 + 6, control)
    return bytes(data)


def test_two_gpus_of_one_switch_are_one_bridge_apart_and_others_cross_the_host(tmp_path: Path) -> None:
    up, one, two = "0000:16:00.0", "0000:17:00.0", "0000:17:01.0"
    device(tmp_path, "0000:15:01.0", up, one, "0000:18:00.0")
    device(tmp_path, "0000:15:01.0", up, two, "0000:19:00.0")
    device(tmp_path, "0000:15:02.0", "0000:2a:00.0")
    device(tmp_path, "0000:80:01.0", "0000:81:00.0", numa=1)
    addresses = ("0000:18:00.0", "0000:19:00.0", "0000:2a:00.0", "0000:81:00.0")
    slots = [host.slot(index, address, root=tmp_path) for index, address in enumerate(addresses)]
    assert slots[0].bridges == ("0000:15:01.0", up, one)
    assert host.paths(slots) == [
        ["X", "PIX", "PHB", "SYS"],
        ["PIX", "X", "PHB", "SYS"],
        ["PHB", "PHB", "X", "SYS"],
        ["SYS", "SYS", "SYS", "X"],
    ]


def test_gpus_of_two_switches_below_one_are_several_bridges_apart(tmp_path: Path) -> None:
    device(tmp_path, "0000:15:01.0", "0000:16:00.0", "0000:17:00.0", "0000:18:00.0", "0000:19:00.0", "0000:1a:00.0")
    device(tmp_path, "0000:15:01.0", "0000:16:00.0", "0000:17:01.0", "0000:28:00.0", "0000:29:00.0", "0000:2a:00.0")
    slots = [host.slot(index, address, root=tmp_path) for index, address in enumerate(("0000:1a:00.0", "0000:2a:00.0"))]
    assert host.paths(slots)[0] == ["X", "PXB"]


@pytest.mark.parametrize(
    ("control", "redirects"),
    [
        (0x00, ()),
        (0x01, ()),  # source validation redirects nothing
        (0x04, ("0000:15:01.0: P2P request redirect",)),
        (0x1D, ("0000:15:01.0: P2P request redirect, P2P completion redirect",)),  # SV RR CR UF, Linux's default
    ],
)
def test_a_bridge_that_redirects_peer_traffic_is_named(
    tmp_path: Path, control: int, redirects: tuple[str, ...]
) -> None:
    device(tmp_path, "0000:15:01.0", "0000:16:00.0", group=31, acs={"0000:15:01.0": control})
    found = host.slot(0, "0000:16:00.0", root=tmp_path, link="5.0 x16 of 5.0 x16")
    assert (found.redirects, found.iommu_group, found.numa_node) == (redirects, 31, 0)


def test_what_only_root_may_read_is_not_known_rather_than_absent(tmp_path: Path) -> None:
    device(tmp_path, "0000:15:01.0", "0000:16:00.0")
    bridge = tmp_path / "sys/bus/pci/devices/0000:15:01.0/config"
    bridge.write_bytes(config(0x1D)[:64])
    assert host.acs_control(bridge) is None
    assert host.slot(0, "0000:16:00.0", root=tmp_path).redirects is None
    assert host.acs_control(tmp_path / "nothing") is None


def test_a_circle_of_capabilities_ends(tmp_path: Path) -> None:
    data = bytearray(4096)
    struct.pack_into("<I", data, 0x100, 0x0001 | 0x100 << 20)
    path = tmp_path / "config"
    path.write_bytes(bytes(data))
    assert host.acs_control(path) is None


def test_toolkits_stand_side_by_side_and_the_one_that_a_build_finds_is_marked(tmp_path: Path) -> None:
    new, old, bare = (tmp_path / "usr/local" / name for name in ("cuda-13.0", "cuda-12.8", "cuda-11"))
    for folder in (new, old):
        (folder / "bin").mkdir(parents=True)
        (folder / "bin/nvcc").write_text("#!/bin/sh\n")
        (folder / "bin/nvcc").chmod(0o755)
    (bare / "include").mkdir(parents=True)
    (new / "version.json").write_text('{"cuda": {"name": "CUDA SDK", "version": "13.0.1"}}')
    (old / "version.txt").write_text("CUDA Version 12.8.93\n")
    (bare / "include/cuda.h").write_text("#define CUDA_VERSION 11080\n")
    (tmp_path / "usr/local/cuda").symlink_to(new)
    found = host.toolkits(tmp_path, {"PATH": str(old / "bin")})
    told = [(Path(one.path).name, one.version, one.nvcc, one.current) for one in found]
    assert told == [
        ("cuda-12.8", "12.8.93", True, True),
        ("cuda-13.0", "13.0.1", True, False),
        ("cuda-11", "11.8", False, False),
    ]
    assert [one.current for one in host.toolkits(tmp_path, {"PATH": "", "CUDA_HOME": str(new)})] == [True, False, False]


def test_an_iommu_is_told_with_its_groups_and_options(tmp_path: Path) -> None:
    (tmp_path / "sys/class/iommu/dmar0").mkdir(parents=True)
    for number in range(3):
        (tmp_path / f"sys/kernel/iommu_groups/{number}").mkdir(parents=True)
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cmdline").write_text("root=/dev/sda1 intel_iommu=on iommu=pt quiet\n")
    assert host.iommu(tmp_path) == {"on": True, "groups": 3, "options": ["intel_iommu=on", "iommu=pt"]}
    assert host.iommu(tmp_path / "none") == {"on": False, "groups": 0, "options": []}


def test_a_file_system_is_told_once_with_all_that_lies_on_it(tmp_path: Path) -> None:
    found = host.free_space([tmp_path / "not/yet", tmp_path])
    [mine] = [one for one in found if str(tmp_path) in one["folders"]]
    assert str(tmp_path / "not/yet") in mine["folders"]
    assert 0 < mine["free"] <= mine["total"]

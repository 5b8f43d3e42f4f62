"""Device code: the container's layout byte by byte, the real thing from nvcc, and what targets mean for a device.

The flags are those that nvcc 13.0.88 writes for targets it was asked for (repeated below where there is an nvcc):
0x11 for any, 0x1000000 more from sm_100 on, 0x100000 for `a`, 0x200000 for `f`, 0x8000 zstd, 0x2000 LZ4, 0x2 debug.
"""

import io
import shutil
import subprocess
from pathlib import Path

import pytest
from fakes.binaries import KERNEL, container, device_library, entry, wheel

from harness.env.audit import fatbin
from harness.env.audit.distributions import Wheel
from harness.env.audit.sources import from_wheels
from harness.env.audit.survey import take

SM, PTX, LTO = 2, 1, 8


def decoded(data: bytes, padding: int = 0) -> list[list[str]]:
    """The units of a section that begins somewhere in a file."""
    stream = io.BytesIO(b"\xff" * 24 + data + b"\0" * padding)
    return [sorted(map(str, unit)) for unit in fatbin.units(stream, 24, len(data) + padding)]


@pytest.mark.parametrize(
    ("kind", "number", "flags", "target"),
    [
        (SM, 90, 0x11, "sm_90"),
        (SM, 90, 0x100011, "sm_90a"),
        (SM, 120, 0x1000011 | 0x8000, "sm_120"),
        (SM, 120, 0x1100011 | 0x8000, "sm_120a"),
        (SM, 120, 0x1200011 | 0x8000, "sm_120f"),
        (SM, 80, 0x2011, "sm_80"),
        (SM, 90, 0x8013, "sm_90"),
        (PTX, 90, 0x8011, "compute_90"),
        (PTX, 120, 0x108011, "compute_120a"),
        (PTX, 120, 0x208011, "compute_120f"),
    ],
)
def test_a_target_is_read_with_its_suffix(kind: int, number: int, flags: int, target: str) -> None:
    kernel = b"\x7fELF .text.add " if kind == SM else b"ptx"

    assert decoded(container(entry(kind, number, flags, kernel))) == [[target]]


def test_containers_follow_each_other_with_padding_between_and_behind() -> None:
    first = container(entry(PTX, 80, 0x8011, b"x" * 5))
    second = container(entry(PTX, 90, 0x8011), entry(PTX, 120, 0x8011))

    assert decoded(first + b"\0" * (-len(first) % 8) + b"\0" * 16 + second, padding=32) == [
        ["compute_80"],
        ["compute_120", "compute_90"],
    ]


def test_an_unknown_flag_makes_a_target_uncertain_and_never_fine() -> None:
    stream = io.BytesIO(container(entry(SM, 120, 0x1100011 | 1 << 22, b".text.add")))

    (unit,) = fatbin.units(stream, 0, len(stream.getvalue()))

    assert [str(target) for target in unit] == ["sm_120a?"]
    assert fatbin.verdict(unit, 120) == "cannot tell"
    assert fatbin.verdict(unit, 90) == "cannot tell"


def test_both_suffixes_at_once_are_not_understood() -> None:
    stream = io.BytesIO(container(entry(SM, 120, 0x1300011, b".text.add")))

    (unit,) = fatbin.units(stream, 0, len(stream.getvalue()))

    assert fatbin.verdict(unit, 120) == "cannot tell"


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(container(entry(LTO, 90, 0x18011)), id="link-time IR"),
        pytest.param(container(entry(99, 90, 0x11)), id="unknown kind"),
        pytest.param(container(entry(SM, 90, 0x11, b".text.a"), version=2), id="another container version"),
        pytest.param(b"\x01\x02\x03\x04" * 8, id="no container"),
        pytest.param(container(entry(SM, 90, 0x11, b".text.a"))[:-4], id="container longer than its section"),
        pytest.param(container(entry(SM, 90, 0x11, b".text.a")[:40]), id="entry cut in its header"),
    ],
)
def test_what_cannot_be_decoded_is_unknown(data: bytes) -> None:
    assert decoded(data) == [["unknown"]]
    assert fatbin.verdict({fatbin.UNKNOWN}, 120) == "cannot tell"


def test_an_entry_that_runs_past_its_container_is_unknown_and_the_rest_is_still_read() -> None:
    long = bytearray(entry(SM, 90, 0x11, b".text.a"))
    long[8] = 200  # payload size
    good = container(entry(PTX, 120, 0x8011))
    bad = container(bytes(long))

    assert decoded(bad + b"\0" * (-len(bad) % 8) + good) == [["unknown"], ["compute_120"]]


def test_machine_code_without_kernels_covers_nothing_and_needs_no_cover() -> None:
    stub = entry(SM, 75, 0x11, b"\x7fELF .nv.info .shstrtab")

    assert decoded(container(stub)) == []
    assert decoded(container(stub, entry(SM, 90, 0x11, b"\x7fELF .text.add"))) == [["sm_90"]]


# CUDA C++ programming guide: machine code runs within its major number, upwards; PTX upwards from its own number;
# architecture-specific code (a) on that device only; family-specific code (f) of 100 also on 103, of 120 on 121.
@pytest.mark.parametrize(
    ("target", "device", "expected"),
    [
        (("sm", 120, ""), 120, "native"),
        (("sm", 120, ""), 121, "native"),
        (("sm", 120, "a"), 120, "native"),
        (("sm", 120, "a"), 121, "none"),
        (("sm", 120, "f"), 120, "native"),
        (("sm", 120, "f"), 121, "native"),
        (("sm", 121, "f"), 120, "none"),
        (("sm", 100, "f"), 103, "native"),
        (("sm", 100, "f"), 120, "none"),
        (("sm", 80, ""), 86, "native"),
        (("sm", 86, ""), 80, "none"),
        (("sm", 80, ""), 87, "none"),  # Orin is embedded: desktop code does not run there
        (("sm", 90, "a"), 120, "none"),
        (("sm", 109, "f"), 109, "cannot tell"),  # a family we know nothing of
        (("compute", 90, ""), 120, "by PTX"),
        (("compute", 120, ""), 90, "none"),
        (("compute", 90, "a"), 120, "none"),
        (("compute", 120, "f"), 121, "by PTX"),
    ],
)
def test_what_a_target_means_for_a_device(target: tuple[str, int, str], device: int, expected: str) -> None:
    assert fatbin.verdict({fatbin.Target(*target)}, device) == expected  # type: ignore[arg-type]


def test_the_best_target_of_a_unit_decides() -> None:
    ptx, native = fatbin.Target("compute", 90), fatbin.Target("sm", 120)

    assert fatbin.verdict({ptx, native, fatbin.UNKNOWN}, 120) == "native"
    assert fatbin.verdict({ptx, fatbin.UNKNOWN}, 120) == "by PTX"
    assert fatbin.verdict(set(), 120) == "none"


@pytest.mark.parametrize(
    ("text", "number"),
    [("sm_120a", 120), ("sm_90", 90), ("compute_100f", 100), ("12.0a", 120), ("8.9", 89), ("103", 103)],
)
def test_an_architecture_is_asked_for_in_any_of_its_spellings(text: str, number: int) -> None:
    assert fatbin.device(text) == number


# Few compilations that hold every kind of target between them: nvcc takes seconds for each.
COMPILED = {
    "base, with PTX": (
        ["-gencode", "arch=compute_120,code=sm_120", "-gencode", "arch=compute_90,code=[sm_90,compute_90]"],
        {"sm_120", "sm_90", "compute_90"},
    ),
    "specific, all compressed": (
        [
            *("-Xfatbin", "-compress-all", "-gencode", "arch=compute_80,code=sm_80"),
            *("-gencode", "arch=compute_90a,code=sm_90a", "-gencode", "arch=compute_120a,code=[sm_120a,compute_120a]"),
        ],
        {"sm_80", "sm_90a", "sm_120a", "compute_120a"},
    ),
    "family, relocatable": (
        ["-rdc=true", "-gencode", "arch=compute_90,code=sm_90", "-gencode", "arch=compute_120f,code=sm_120f"],
        {"sm_90", "sm_120f"},
    ),
    "family PTX, LZ4, debug": (
        [
            *("-G", "-compress-mode=speed", "-gencode", "arch=compute_90a,code=sm_90a"),
            *("-gencode", "arch=compute_120f,code=compute_120f"),
        ],
        {"sm_90a", "compute_120f"},
    ),
}


@pytest.mark.parametrize("case", COMPILED)
def test_what_nvcc_was_asked_for_is_what_is_read(case: str, tmp_path: Path) -> None:
    flags, expected = COMPILED[case]

    (unit,) = _surveyed(device_library(tmp_path / "k.so", *flags), tmp_path)

    assert set(map(str, unit)) == expected


def test_linking_for_another_gpu_adds_no_target(tmp_path: Path) -> None:
    """nvcc links what was compiled for sm_90 as if for sm_120: that gives no code for sm_120."""
    if shutil.which("nvcc") is None:
        pytest.skip("no nvcc here to compile a kernel with")
    (tmp_path / "k.cu").write_text(KERNEL)
    for argv in (
        ["-Xcompiler", "-fPIC", "-c", "-gencode", "arch=compute_90,code=sm_90", "k.cu", "-o", "k.o"],
        ["-shared", "-cudart", "none", "-gencode", "arch=compute_120,code=sm_120", "k.o", "-o", "k.so"],
    ):
        subprocess.run(["nvcc", *argv], cwd=tmp_path, check=True, capture_output=True)

    (unit,) = _surveyed(tmp_path / "k.so", tmp_path)

    assert set(map(str, unit)) == {"sm_90"}


def _surveyed(path: Path, folder: Path) -> list[fatbin.Unit]:
    packed = wheel(folder / "wheels", "kernels", "1.0", {"kernels/k.so": path})
    assert Wheel.at(packed).name == "kernels"
    (contents,) = take(from_wheels([packed])).contents
    return [unit for binary in contents.binaries for unit in binary.units]

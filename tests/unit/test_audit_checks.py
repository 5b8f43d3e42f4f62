"""The audit's verdicts on small wheels that are broken in one way each. Symbols are real ones, mangled as g++ does."""

import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path

import pytest
from fakes.binaries import container, entry, library, record, wheel

from harness.env import audit, rules
from harness.env.audit import Finding, Report, abi, sources
from harness.env.audit.distributions import Absent, Source, Wheel, installed
from harness.env.audit.report import Check
from harness.errors import InputError

# The signature of one function over three torch releases, as in the released libc10_cuda.so.
CHECK_2_9 = "_ZN3c104cuda29c10_cuda_check_implementationEiPKcS2_ib"
CHECK_2_11 = "_ZN3c104cuda29c10_cuda_check_implementationEiPKcS2_jb"
CHECK_2_14 = "_ZN3c104cuda29c10_cuda_check_implementationEiPKcS2_jbPNS0_19CUDAErrorLogCaptureE"
LOGGER_2_11 = "_ZN3c1013MessageLoggerC1ENS_14SourceLocationEib"


def findings(report: Report, check: Check, *states: str) -> list[Finding]:
    return [item for item in report.findings if item.check == check and (not states or item.state in states)]


def only(report: Report, check: Check, *states: str) -> Finding:
    (found,) = findings(report, check, *states)
    return found


def audited(*wheels: Path, arch: str = "sm_120a", **changes: object) -> Report:
    """A complete environment of some wheels."""
    source = Source("here", tuple(map(Wheel.at, wheels)), **changes)  # type: ignore[arg-type]
    return audit.run(source, targets=[arch])


@pytest.fixture
def torch(tmp_path: Path) -> Path:
    """Torch 2.14.1, as small as it gets: one library that links CUDA 13."""
    cudart = library(tmp_path / "libcudart.so.13")
    torch = library(tmp_path / "libtorch_cuda.so", defines=[CHECK_2_14, LOGGER_2_11], needs=[cudart])
    return wheel(tmp_path / "w", "torch", "2.14.1", {"torch/lib/libtorch_cuda.so": torch})


@pytest.fixture
def cudart(tmp_path: Path) -> Path:
    cudart = library(tmp_path / "libcudart.so.13")
    return wheel(tmp_path / "w", "nvidia-cuda-runtime", "13.0.96", {"nvidia/cu13/lib/libcudart.so.13": cudart})


def kernels(folder: Path, name: str, version: str, libraries: Mapping[str, list[str]], cuda: str = "13") -> Path:
    """A kernel wheel whose libraries need torch, CUDA and some symbols."""
    needs = [library(folder / "libtorch_cuda.so"), library(folder / f"libcudart.so.{cuda}")]
    files = {
        path: library(folder / "k" / path.rpartition("/")[2], needs=needs, uses=uses)
        for path, uses in libraries.items()
    }
    return wheel(folder / "w", name, version, files)


# --- ABI ------------------------------------------------------------------------------------------------------------


def test_a_kernel_for_this_torch_finds_every_symbol(torch: Path, cudart: Path, tmp_path: Path) -> None:
    fitting = kernels(tmp_path, "sglang-kernel", "0.4.10", {"sgl_kernel/common_ops.abi3.so": [CHECK_2_14]})

    report = audited(torch, cudart, fitting)

    assert only(report, "abi").message == "1 library finds every symbol in torch 2.14.1"
    (row,) = report.abi
    assert (row.imports, row.missing, row.built_for) == (1, (), "2.14 or newer")
    assert report.failed == ()


def test_a_kernel_for_another_torch_is_named_with_its_torch_and_the_fix(
    torch: Path, cudart: Path, tmp_path: Path
) -> None:
    old = kernels(
        tmp_path,
        "sgl-kernel",
        "0.3.21",
        {"sgl_kernel/common_ops.abi3.so": [CHECK_2_9, "_ZN2at3oneEv"], "sgl_kernel/spatial_ops.abi3.so": [LOGGER_2_11]},
    )

    finding = only(audited(torch, cudart, old), "abi")

    assert finding.state == "fail"
    assert finding.subject == "sgl-kernel 0.3.21"
    assert finding.message == (
        "cannot be loaded with torch 2.14.1: 2 of the symbols that `sgl_kernel/common_ops.abi3.so` needs are missing "
        "(1 of 2 libraries are affected); it was built for torch 2.9 or older"
    )
    assert finding.remedy == (
        "use the kernel package for torch 2.14.1: sglang-kernel 0.4.9 to 0.4.10, or pin torch 2.9 or older"
    )
    assert finding.details == ("sgl_kernel/common_ops.abi3.so: 2 missing", "_ZN2at3oneEv", CHECK_2_9)


def test_without_torch_on_hand_the_closure_cannot_be_told(cudart: Path, tmp_path: Path) -> None:
    kernel = kernels(tmp_path, "kernels", "1.0", {"kernels/ops.so": [CHECK_2_14]})
    absent = (Absent("torch", "2.14.1", "torch.whl", 554_618_695, binary=True),)

    report = audited(cudart, kernel, absent=absent)

    assert [item.state for item in findings(report, "abi")] == ["cannot tell", "cannot tell"]
    assert report.abi[0].missing is None
    assert report.state("abi") == report.state("arch") == report.state("cuda-major") == "cannot tell"
    assert "torch (555 MB)" in findings(report, "abi")[1].message


def test_a_symbol_from_a_library_that_comes_along_is_not_missing(torch: Path, cudart: Path, tmp_path: Path) -> None:
    shared = "_ZN8decoders3runERKN2at6TensorE"
    base = library(tmp_path / "libcore.so", needs=[library(tmp_path / "libtorch_cuda.so")], defines=[shared])
    user = library(tmp_path / "ops.so", needs=[base], uses=[shared, CHECK_2_14])
    codec = wheel(tmp_path / "w", "codec", "1.0", {"codec/libcore.so": base, "codec/ops.so": user})

    assert only(audited(torch, cudart, codec), "abi").state == "ok"


def test_libraries_for_other_torch_releases_are_set_aside(torch: Path, cudart: Path, tmp_path: Path) -> None:
    one = kernels(
        tmp_path, "dlpack", "1.0", {"d/lib_torch29-cuda.so": [CHECK_2_9], "d/lib_torch214-cuda.so": [CHECK_2_14]}
    )
    assert only(audited(torch, cudart, one), "abi").state == "ok"

    none = kernels(
        tmp_path, "dlpack", "0.9", {"d/lib_torch28-cuda.so": [CHECK_2_9], "d/lib_torch29-cuda.so": [CHECK_2_9]}
    )
    found = only(audited(torch, cudart, none), "abi")
    assert (found.state, found.message) == (
        "note",
        "brings 2 libraries for other torch releases, and none for torch 2.14.1",
    )


def test_the_old_string_abi_is_told_by_its_mangling(torch: Path, cudart: Path, tmp_path: Path) -> None:
    old = kernels(tmp_path, "kernels", "1.0", {"k/ops.so": ["_ZN3c106detail14torchCheckFailEPKcS2_jRKSs"]})

    assert "the old C++ string ABI" in only(audited(torch, cudart, old), "abi").message


@pytest.mark.parametrize(
    ("imports", "expected"),
    [
        ({CHECK_2_9}, "2.9 or older"),
        ({CHECK_2_11}, "2.10 to 2.13"),
        ({CHECK_2_11, LOGGER_2_11}, "2.11 to 2.13"),
        ({CHECK_2_11, "_ZN3c1013MessageLoggerC1EPKciib"}, "2.10"),
        ({CHECK_2_14, LOGGER_2_11}, "2.14 or newer"),
        ({CHECK_2_9, CHECK_2_14}, None),
        ({"_ZN2at6TensorC1Ev"}, None),
    ],
)
def test_epoch_markers_tell_the_torch_a_kernel_was_built_for(imports: set[str], expected: str | None) -> None:
    assert abi.built_for(frozenset(imports)) == expected


# --- CUDA major -----------------------------------------------------------------------------------------------------


def test_a_cuda_12_kernel_in_a_cuda_13_environment_fails(torch: Path, cudart: Path, tmp_path: Path) -> None:
    old = kernels(tmp_path, "sgl-kernel", "0.3.21", {"sgl_kernel/common_ops.abi3.so": [CHECK_2_14]}, cuda="12")

    finding = only(audited(torch, cudart, old), "cuda-major", "fail")

    assert finding.message == (
        "was built for CUDA 12, the environment is CUDA 13: it needs libcudart.so.12, which nothing here brings"
    )
    assert (
        finding.remedy == "take a build of `sgl-kernel` for CUDA 13 (a `+cu130` wheel or a newer release), or drop it"
    )
    assert finding.details == ("libcudart.so.12: sgl_kernel/common_ops.abi3.so",)


def test_two_cuda_runtimes_in_one_environment_fail(torch: Path, cudart: Path, tmp_path: Path) -> None:
    old = kernels(tmp_path, "kernels", "1.0", {"k/ops.so": []}, cuda="12")
    runtime = {"nvidia/cuda_runtime/lib/libcudart.so.12": library(tmp_path / "libcudart.so.12")}
    both = wheel(tmp_path / "w", "nvidia-cuda-runtime-cu12", "12.8.90", runtime)

    report = audited(torch, cudart, old, both)

    assert "two CUDA runtimes into one process" in only(report, "cuda-major", "fail").message
    rivals = only(report, "one-owner")
    assert rivals.subject == "nvidia-cuda-runtime 13.0.96 and nvidia-cuda-runtime-cu12 12.8.90"
    assert rivals.state == "fail"


def test_of_variants_for_two_cuda_majors_only_ours_counts(torch: Path, cudart: Path, tmp_path: Path) -> None:
    needs12, needs13 = library(tmp_path / "libcudart.so.12"), library(tmp_path / "libcudart.so.13")
    files = {
        "hook.abi3.so": library(tmp_path / "a" / "hook.abi3.so", needs=[needs12]),
        "hook_cu12.abi3.so": library(tmp_path / "a" / "hook_cu12.abi3.so", needs=[needs12]),
        "hook_cu13.abi3.so": library(tmp_path / "a" / "hook_cu13.abi3.so", needs=[needs13]),
    }
    saver = wheel(tmp_path / "w", "memory-saver", "1.0", files)

    assert findings(audited(torch, cudart, saver), "cuda-major", "fail") == []


def test_a_cuda_library_nobody_brings_fails_and_one_not_opened_cannot_be_told(torch: Path, tmp_path: Path) -> None:
    assert "libcudart.so.13, which nothing here brings" in only(audited(torch), "cuda-major", "fail").message

    runtime = Absent("nvidia-cuda-runtime", "13.0.96", "runtime.whl", 2_243_632, binary=True)
    told = findings(audited(torch, absent=(runtime,)), "cuda-major", "cannot tell")
    assert told[0].message == "needs libcudart.so.13, which nvidia-cuda-runtime should bring by name and version"

    image = only(audited(torch, toolkit="13.0.1"), "cuda-major")
    assert (image.state, image.message) == (
        "cannot tell",
        "needs libcudart.so.13, which no wheel brings, but the CUDA 13.0.1 image may",
    )


def test_system_libraries_that_no_wheel_brings_are_noted(tmp_path: Path) -> None:
    numa = library(tmp_path / "libnuma.so.1")
    libc = library(tmp_path / "libc.so.6")
    user = library(tmp_path / "ops.so", needs=[numa, libc])

    finding = only(audited(wheel(tmp_path / "w", "user", "1.0", {"ops.so": user})), "cuda-major")

    assert (finding.state, finding.message) == ("note", "needs what no wheel here brings: libnuma.so.1")


# --- owners and RECORD ----------------------------------------------------------------------------------------------


def test_two_distributions_that_own_one_path_are_named_with_it(tmp_path: Path) -> None:
    one = wheel(tmp_path, "sgl-kernel", "0.3.21", {"sgl_kernel/__init__.py": b"1", "sgl_kernel/same.py": b""})
    two = wheel(tmp_path, "sglang-kernel", "0.4.10", {"sgl_kernel/__init__.py": b"2", "sgl_kernel/same.py": b""})

    by_name, by_path = findings(audited(one, two), "one-owner")

    assert by_name.message == "both install the package `sgl_kernel`, which was renamed at 0.4.0"
    assert by_path.subject == "sgl-kernel 0.3.21 and sglang-kernel 0.4.10"
    assert by_path.message == "both own 1 files with different contents; what is installed depends on the order"
    assert by_path.details == ("sgl_kernel/__init__.py",)
    assert by_name.state == by_path.state == "fail"


def test_rivals_are_known_by_name_without_their_wheels() -> None:
    absent = [Absent(name, "1", f"{name}.whl", 1, binary=True) for name in ("sgl-kernel", "sglang-kernel")]

    report = audit.run(Source("here", (), tuple(absent)))

    assert [item.state for item in findings(report, "one-owner")] == ["fail", "cannot tell"]
    assert report.state("record") == "cannot tell"


def test_equal_files_and_left_overs_of_builds_do_no_harm(tmp_path: Path) -> None:
    one = wheel(tmp_path, "one", "1", {"nvidia/__init__.py": b"", "build_backend.py": b"1"})
    two = wheel(tmp_path, "two", "1", {"nvidia/__init__.py": b"", "build_backend.py": b"2"})

    finding = only(audited(one, two), "one-owner")

    assert (finding.state, finding.details) == ("note", ("build_backend.py",))


def test_files_in_the_data_folder_count_where_they_land(tmp_path: Path) -> None:
    one = wheel(tmp_path, "one", "1", {"one-1.data/purelib/shared/a.py": b"1", "one-1.data/scripts/run": b"1"})
    two = wheel(tmp_path, "two", "1", {"shared/a.py": b"2", "run": b"2"})

    assert only(audited(one, two), "one-owner").details == ("shared/a.py",)


def test_a_wheel_that_is_not_what_its_record_says_is_caught(tmp_path: Path) -> None:
    path = wheel(tmp_path, "good", "1", {"good/a.py": b"a", "good/b.py": b"b"})
    bad = tmp_path / "bad" / path.name
    bad.parent.mkdir()
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(bad, "w") as new:
        for item in old.infolist():
            if item.filename != "good/b.py":
                new.writestr(item, b"changed" if item.filename == "good/a.py" else old.read(item))
        new.writestr("good/extra.py", b"")

    found = findings(audited(bad), "record")

    assert [(item.state, item.message, item.details) for item in found] == [
        ("fail", "1 files differ from what RECORD, or a patch of this spec, says they are", ("good/a.py",)),
        ("fail", "1 files that RECORD lists are missing", ("good/b.py",)),
        ("fail", "1 files are not in RECORD", ("good/extra.py",)),
    ]
    assert only(audited(path), "record").state == "ok"


def test_records_of_vendored_distributions_are_not_taken_for_the_wheels_own(tmp_path: Path) -> None:
    vendored = {"tools/_vendor/other-1.dist-info/RECORD": b"gone.py,,\n", "tools/__init__.py": b""}

    assert only(audited(wheel(tmp_path, "tools", "1", vendored)), "record").state == "ok"


def test_damaged_wheels_are_named(tmp_path: Path) -> None:
    path = wheel(tmp_path, "good", "1", {"good/a.py": b"a" * 5000})
    path.write_bytes(path.read_bytes()[:300])
    with pytest.raises(InputError, match=r"good-1-cp310-abi3-manylinux2014_x86_64.whl` is damaged"):
        audited(path)

    with pytest.raises(InputError, match="is not named as a wheel"):
        sources.from_wheels([Path(__file__)])
    with pytest.raises(InputError, match=r"there is no file `gone\.whl`"):
        sources.from_wheels([Path("gone.whl")])


def test_an_edited_file_of_an_installed_environment_shows_and_a_patched_one_does_not(tmp_path: Path) -> None:
    site, info = tmp_path, tmp_path / "demo-1.dist-info"
    (site / "demo").mkdir()
    info.mkdir()
    contents = {"demo/a.py": b"a", "demo/b.py": b"b", "demo-1.dist-info/METADATA": b"Name: Demo\nVersion: 1\n\n"}
    for path, data in contents.items():
        (site / path).write_bytes(data)
    (info / "RECORD").write_bytes(record(contents, "demo-1.dist-info/RECORD"))
    (site / "demo/a.py").write_bytes(b"patched")
    (site / "demo/b.py").write_bytes(b"edited")
    distributions = installed(site)
    by_record = audit.run(Source("here", distributions), checks=["record"])
    assert only(by_record, "record").details == ("demo/a.py", "demo/b.py")
    right, after = sha256(b"patched").hexdigest(), sha256(b"patched otherwise").hexdigest()
    by_patch = audit.run(Source("here", distributions, patched={"demo/a.py": right}), checks=["record"])
    assert only(by_patch, "record").details == ("demo/b.py",)
    wrong = audit.run(Source("here", distributions, patched={"demo/a.py": after}), checks=["record"])
    assert only(wrong, "record").details == ("demo/a.py", "demo/b.py")


# --- architectures --------------------------------------------------------------------------------------------------


def device_code(folder: Path, *containers: bytes, name: str = "ops.so") -> Path:
    """A library with these containers as its `.nv_fatbin`."""
    plain = library(folder / name)
    if shutil.which("objcopy") is None:
        pytest.skip("no objcopy here to add a section with")
    section = folder / "section.bin"
    section.write_bytes(b"".join(data + b"\0" * (-len(data) % 8) for data in containers))
    subprocess.run(["objcopy", "--add-section", f".nv_fatbin={section}", str(plain)], check=True)
    return plain


def code(*targets: tuple[int, int, int]) -> bytes:
    return container(*(entry(*target, b".text.add") for target in targets))


def test_coverage_is_judged_per_library_and_architecture(tmp_path: Path) -> None:
    native, ptx, none = code((2, 120, 0x1100011)), code((1, 90, 0x8011)), code((2, 90, 0x100011))
    unknown = code((2, 120, 0x1100011 | 1 << 30))
    files = {
        f"k/{name}.so": device_code(tmp_path, data, name=f"{name}.so")
        for name, data in {"native": native, "ptx": ptx, "none": none, "unknown": unknown}.items()
    }

    report = audited(wheel(tmp_path / "w", "kernels", "1.0", files))

    assert {row.path: row.coverage["sm_120a"].verdict for row in report.arch} == {
        "k/native.so": "native",
        "k/ptx.so": "by PTX",
        "k/none.so": "none",
        "k/unknown.so": "cannot tell",
    }
    assert [item.state for item in findings(report, "arch")] == ["ok", "note", "cannot tell", "fail"]
    failed = only(report, "arch", "fail")
    assert failed.subject == "kernels 1.0 (1 of 4 libraries)"
    assert failed.details == ("k/none.so: sm_90a",)
    assert failed.remedy == "use a build of `kernels` whose architecture list covers sm_120a"


def test_units_that_lack_code_are_counted(tmp_path: Path) -> None:
    mixed = device_code(tmp_path, code((2, 90, 0x11)), code((2, 90, 0x11), (2, 120, 0x1000011)), code((2, 80, 0x11)))

    report = audited(wheel(tmp_path / "w", "kernels", "1.0", {"ops.so": mixed}))

    (row,) = report.arch
    assert (row.units, row.targets) == (3, ("sm_80", "sm_90", "sm_120"))
    assert (row.coverage["sm_120a"].verdict, row.coverage["sm_120a"].covered) == ("native", 1)
    finding = only(report, "arch")
    assert (finding.state, finding.details) == ("note", ("ops.so: native in 1 of 3 units",))


def test_device_code_outside_its_section_is_found(tmp_path: Path) -> None:
    """cuFFT keeps its containers in plain data."""
    plain = device_code(tmp_path, code((2, 75, 0x11)))
    section = tmp_path / "other.bin"
    section.write_bytes(code((2, 120, 0x1000011)))
    subprocess.run(["objcopy", "--add-section", f".ldata={section}", str(plain)], check=True)

    (row,) = audited(wheel(tmp_path / "w", "fft", "1.0", {"libfft.so": plain})).arch

    assert row.targets == ("sm_75", "sm_120")
    assert row.coverage["sm_120a"].verdict == "native"


def test_libraries_that_are_not_used_on_a_gpu_need_no_code_for_it(tmp_path: Path) -> None:
    hopper = device_code(tmp_path, code((2, 90, 0x100011)))
    files = {"sgl_kernel/flash_ops.abi3.so": hopper}
    packed = wheel(tmp_path / "w", "sglang-kernel", "0.4.10", files)

    assert only(audited(packed), "arch").state == "note"
    assert only(audited(packed, arch="sm_89"), "arch").state == "fail"  # there it is used, and would be missed


# --- versions, and the whole ----------------------------------------------------------------------------------------


def test_rules_that_fire_are_findings_with_their_remedy(tmp_path: Path) -> None:
    text = """rules:
  too-old:
    severity: error
    when: {packages: {demo: "<2"}}
    message: demo 1 gives wrong sums.
    source: read in the wheel
    remedy: Take demo 2.
  slow-one:
    severity: slow
    when: {packages: {demo: installed}}
    message: demo is slow.
    source: measured
    remedy: Wait.
  of-a-flag:
    severity: error
    when: {args: {tp: 1}}
    message: not asked here.
    source: none
    remedy: None.
"""
    (tmp_path / "rules.yaml").write_text(text)
    known = rules.load_all(tmp_path)
    context = rules.Context(packages={"demo": "1.0"})

    report = audit.run(Source("here", ()), checks=["versions"], known=known, context=context)

    first, second = report.findings
    assert (first.state, first.subject, first.message) == ("fail", "demo 1.0", "demo 1 gives wrong sums. [error]")
    assert first.remedy == "Take demo 2."
    assert second.state == "note"


def test_a_report_survives_as_json(torch: Path, cudart: Path) -> None:
    report = audited(torch, cudart)

    assert Report.model_validate_json(report.model_dump_json()) == report


def test_nothing_of_what_is_audited_gets_imported(tmp_path: Path) -> None:
    packed = wheel(tmp_path, "trap", "1", {"trap/__init__.py": b"raise SystemExit('imported')"})

    audited(packed)

    assert "trap" not in sys.modules

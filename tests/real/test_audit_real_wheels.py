"""The audit on the wheels it was made for: some GB, fetched once into the project's wheelhouse.

Expected values were found by other means before (readelf, nm, cuobjdump): sglang-kernel 0.4.10 misses nothing in torch
2.14.1, sgl-kernel 0.3.21 misses seven symbols there and none in the torch of its own time.
"""

from pathlib import Path

import pytest
from locked_wheels import locked_wheel

from harness.env import audit
from harness.env.audit import Report, sources

pytestmark = [pytest.mark.real, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def torch() -> Path:
    return locked_wheel("sglang-cu130", "torch")


def audited(*wheels: Path) -> Report:
    return audit.run(sources.from_wheels(wheels), targets=["sm_120a", "sm_90a"], checks=["cuda-major", "abi", "arch"])


def test_the_current_kernels_fit_the_current_torch(torch: Path) -> None:
    report = audited(torch, locked_wheel("sglang-cu130", "sglang-kernel"))

    assert {row.path: row.missing for row in report.abi} == {
        "sgl_kernel/flash_ops.abi3.so": (),
        "sgl_kernel/flashmla_ops.abi3.so": (),
        "sgl_kernel/infllm_ops.cpython-310-x86_64-linux-gnu.so": (),
        "sgl_kernel/sm100/common_ops.abi3.so": (),
        "sgl_kernel/sm90/common_ops.abi3.so": (),
        "sgl_kernel/spatial_ops.abi3.so": (),
    }
    rows = {row.path: row for row in report.arch if row.distribution == "sglang-kernel"}
    common = rows["sgl_kernel/sm100/common_ops.abi3.so"]
    assert common.targets == ("sm_80", "sm_89", "sm_90", "sm_90a", "sm_100f", "sm_120a")
    assert (common.coverage["sm_120a"].verdict, common.coverage["sm_90a"].verdict) == ("native", "native")
    assert rows["sgl_kernel/flash_ops.abi3.so"].targets == ("sm_80", "sm_86", "sm_90a")
    assert rows["sgl_kernel/flash_ops.abi3.so"].coverage["sm_120a"].verdict == "none"
    assert report.failed == ()


def test_the_old_kernels_miss_seven_symbols_of_the_current_torch(torch: Path) -> None:
    report = audited(torch, locked_wheel("sglang-0.5.9-cu128", "sgl-kernel"))

    rows = {row.path: row for row in report.abi}
    common = rows["sgl_kernel/sm100/common_ops.abi3.so"]
    assert common.missing == (
        "_ZN2at4cuda24getCurrentCUDABlasHandleEv",
        "_ZN3c1013MessageLoggerC1EPKcii",
        "_ZN3c104cuda29c10_cuda_check_implementationEiPKcS2_ib",
        "_ZN3c104impl3cow23materialize_cow_storageERNS_11StorageImplE",
        "_ZNK2at10TensorBase14const_data_ptrIiLi0EEEPKT_v",
        "_ZNR5torch7Library4_defEON3c1014FunctionSchemaEPNS1_12OperatorNameERKSt6vectorIN2at3TagESaIS8_EENS_17_RegisterOrVerifyE",
        "_ZNR5torch7Library4_defEOSt7variantIJN3c1012OperatorNameENS2_14FunctionSchemaEEEONS_11CppFunctionERKSt6vectorIN2at3TagESaISB_EE",
    )
    assert common.built_for == "2.9 or older"
    failed = {finding.check: finding for finding in report.failed}
    assert failed["abi"].subject == failed["cuda-major"].subject == "sgl-kernel 0.3.21"
    assert "sglang-kernel 0.4.9 to 0.4.10" in (failed["abi"].remedy or "")
    assert "was built for CUDA 12, the environment is CUDA 13" in failed["cuda-major"].message
    targets = {row.path: row.targets for row in report.arch}
    assert targets["sgl_kernel/sm100/common_ops.abi3.so"] == (
        "sm_80", "sm_89", "sm_90", "sm_90a", "sm_100a", "sm_120a"
    )  # fmt: skip


def test_the_old_kernels_fit_the_torch_of_their_own_lock() -> None:
    old, theirs = locked_wheel("sglang-0.5.9-cu128", "sgl-kernel"), locked_wheel("sglang-0.5.9-cu128", "torch")

    report = audited(theirs, old)

    assert [row.path for row in report.abi if row.missing] == []
    assert [finding for finding in report.failed if finding.check == "abi"] == []


def test_both_kernel_packages_at_once_are_refused() -> None:
    wheels = [locked_wheel("sglang-cu130", "sglang-kernel"), locked_wheel("sglang-0.5.9-cu128", "sgl-kernel")]

    report = audit.run(sources.from_wheels(wheels), checks=["one-owner"])

    by_name, by_path = report.failed
    assert by_name.subject == "sgl-kernel 0.3.21 and sglang-kernel 0.4.10"
    assert by_path.message.startswith("both own 47 files with different contents")

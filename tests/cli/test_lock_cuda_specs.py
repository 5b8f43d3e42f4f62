"""The project's specs whose indexes are seldom in reach: locked and fetched against stand-ins of those indexes.

The wheels are tiny and ours; names, versions, pins between them and the indexes they come from are the real ones.
"""

import shutil
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes.packages import PackageIndex, make_wheel, served
from fakes.projects import Project, project

ENVSPECS = Path(__file__).parents[2] / "envspecs"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Project]:
    with project(tmp_path, monkeypatch, capsys) as made:
        shutil.copytree(ENVSPECS, made.root / "envspecs", dirs_exist_ok=True)
        yield made


@pytest.fixture
def cuda_wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PackageIndex]:
    """One index that stands for PyTorch's, SGLang's and FlashInfer's."""
    with served(PackageIndex(tmp_path / "cuda")) as index:
        index.folder.mkdir()
        index.html = True  # as those indexes answer
        for name in ("PYTORCH_CU130", "PYTORCH_NIGHTLY_CU130", "SGLANG_CU130", "FLASHINFER_CU130"):
            monkeypatch.setenv(f"HARNESS_INDEX_{name}", index.address)
        yield index


def origins(here: Project, name: str) -> dict[str, tuple[object, object]]:
    """Version and index by package."""
    packages = tomllib.loads(here.lock(name).read_text())["packages"]
    return {package["name"]: (package["version"], package.get("index", "default")) for package in packages}


def test_the_nightly_stack_locks_and_outlives_its_nightly(
    here: Project, cuda_wheels: PackageIndex, tmp_path: Path
) -> None:
    here.wheel(
        "sglang", "0.5.23", requires=["torch==2.14.1", "sglang-kernel==0.4.10", "flashinfer-python[cu13]==0.7.2"]
    )
    here.wheel("flashinfer-python", "0.7.2", requires=["torch"])
    here.wheel("torch", "2.14.1")
    here.wheel("sglang-kernel", "0.4.10")
    nightly = make_wheel(cuda_wheels.folder, "torch", "2.16.0.dev20261115+cu130")
    make_wheel(cuda_wheels.folder, "torch", "2.16.0.dev20261116+cu130")
    make_wheel(cuda_wheels.folder, "sglang-kernel", "0.4.10+cu130", requires=["torch==2.14.1"])
    make_wheel(cuda_wheels.folder, "flashinfer-cubin", "0.7.2")
    make_wheel(cuda_wheels.folder, "flashinfer-jit-cache", "0.7.2+cu130")

    said = here.run("lock", "sglang-cu130-nightly")

    assert said.code == 0, said.err
    assert origins(here, "sglang-cu130-nightly") == {
        "sglang": ("0.5.23", "default"),
        "torch": ("2.16.0.dev20261115+cu130", "pytorch-nightly-cu130"),
        "sglang-kernel": ("0.4.10+cu130", "sglang-cu130"),
        "flashinfer-python": ("0.7.2", "default"),
        "flashinfer-cubin": ("0.7.2", "flashinfer-cu130"),
        "flashinfer-jit-cache": ("0.7.2+cu130", "flashinfer-cu130"),
    }
    patches = tomllib.loads(here.lock("sglang-cu130-nightly").read_text())["patches"]
    assert [patch["name"] for patch in patches] == ["sm120-symm-mem-tables-0.5.23"]

    assert here.run("fetch", "sglang-cu130-nightly").code == 0
    nightly.unlink()
    cuda_wheels.asked.clear()
    assert here.run("fetch", "sglang-cu130-nightly").code == 0
    assert here.run("lock", "sglang-cu130-nightly").err == "sglang-cu130-nightly: unchanged\n"
    assert cuda_wheels.asked == []

    said = here.run("fetch", "sglang-cu130-nightly", "--wheelhouse", str(tmp_path / "other"))
    assert said.code == 4
    assert f"the index `pytorch-nightly-cu130` no longer has `{nightly.name}`" in said.err


def test_the_storys_stack_takes_its_cuda_13_builds_from_their_indexes(here: Project, cuda_wheels: PackageIndex) -> None:
    pins = ["torch==2.9.1", "torchaudio==2.9.1", "torchvision", "sgl-kernel==0.3.21", "flashinfer_python==0.6.3"]
    here.wheel("sglang", "0.5.9", requires=[*pins, "flashinfer_cubin==0.6.3"])
    for name, version in (
        ("torch", "2.9.1"),
        ("torchaudio", "2.9.1"),
        ("torchvision", "0.24.1"),
        ("sgl-kernel", "0.3.21"),
    ):
        here.wheel(name, version)
        make_wheel(cuda_wheels.folder, name, f"{version}+cu130")
    for name in ("flashinfer-python", "flashinfer-cubin"):
        here.wheel(name, "0.6.3")

    said = here.run("lock", "sglang-0.5.9-cu130-sm120")

    assert said.code == 0, said.err
    assert origins(here, "sglang-0.5.9-cu130-sm120") == {
        "sglang": ("0.5.9", "default"),
        "torch": ("2.9.1+cu130", "pytorch-cu130"),
        "torchaudio": ("2.9.1+cu130", "pytorch-cu130"),
        "torchvision": ("0.24.1+cu130", "pytorch-cu130"),
        "sgl-kernel": ("0.3.21+cu130", "sglang-cu130"),
        "flashinfer-python": ("0.6.3", "default"),
        "flashinfer-cubin": ("0.6.3", "default"),
    }
    diff = here.run("lock", "--diff", "sglang-0.5.9-cu128", "sglang-0.5.9-cu130-sm120").out.splitlines()
    assert "cuda.toolkit: 12.8.1 -> 13.0.1" in diff
    assert "sgl-kernel 0.3.21 -> 0.3.21+cu130" in diff
    assert "patch `sm120-symm-mem-tables` is new" in diff

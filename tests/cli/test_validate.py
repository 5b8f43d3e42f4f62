"""`harness validate`: whole commands, on a project of its own with a wheel broken in one way."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes.binaries import library, wheel
from fakes.projects import Project, project

from harness.env import build

GPU = Path(__file__).parents[1] / "fakes" / "gpu"
OLD = "_ZN3c104cuda29c10_cuda_check_implementationEiPKcS2_ib"
NEW = "_ZN3c104cuda29c10_cuda_check_implementationEiPKcS2_jbPNS0_19CUDAErrorLogCaptureE"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Project]:
    monkeypatch.setenv("COLUMNS", "200")
    with project(tmp_path, monkeypatch, capsys) as made:
        yield made


def stack(here: Project, folder: Path) -> None:
    """A locked environment whose kernels were built for another torch."""
    torch = library(folder / "libtorch_cpu.so", defines=[NEW])
    kernels = library(folder / "ops.abi3.so", needs=[torch], uses=[OLD])
    wheel(here.index.folder, "torch", "2.14.1", {"torch/lib/libtorch_cpu.so": torch})
    wheel(here.index.folder, "kernels", "1.0", {"kernels/ops.abi3.so": kernels, "kernels/__init__.py": b"value = 1\n"})
    here.spec("demo", "packages: [torch==2.14.1, kernels==1.0]\nchecks: [one-owner, record, cuda-major, abi]\n")
    assert here.run("lock", "demo").code == 0


def test_what_is_not_on_hand_cannot_be_told_and_fetch_gets_it(here: Project, tmp_path: Path) -> None:
    stack(here, tmp_path)

    before = here.run("validate", "demo", "--static", "--json")
    assert before.code == 0
    assert {finding["state"] for finding in before.json["findings"]} == {"cannot tell"}
    assert before.json["absent"] == ["kernels 1.0", "torch 2.14.1"]

    after = here.run("validate", "demo", "--static", "--fetch", "--json")
    assert after.code == 1
    assert after.json["absent"] == []
    (failed,) = [finding for finding in after.json["findings"] if finding["state"] == "fail"]
    assert (failed["check"], failed["subject"], failed["details"]) == (
        "abi",
        "kernels 1.0",
        ["kernels/ops.abi3.so: 1 missing", OLD],
    )


def test_the_tables_name_the_library_the_torch_it_was_built_for_and_the_fix(here: Project, tmp_path: Path) -> None:
    stack(here, tmp_path)

    said = here.run("validate", "demo", "--static", "--fetch")

    assert said.code == 1
    assert "ABI: symbols that PyTorch's libraries must export" in said.out
    assert "2.9 or older" in said.out
    assert "fix: use a build of `kernels` for torch 2.14.1, or pin torch 2.9 or older" in said.out
    assert "demo: one-owner ok, record ok, cuda-major ok, abi fail" in said.err


def test_one_check_alone_and_an_unknown_one(here: Project, tmp_path: Path) -> None:
    stack(here, tmp_path)

    assert here.run("validate", "demo", "--static", "--fetch", "--check", "record").code == 0
    wrong = here.run("validate", "demo", "--static", "--check", "abbi")
    assert (wrong.code, wrong.err) == (
        2,
        "error: there is no static check `abbi`\n\nhint: did you mean `abi`?\n",
    )


def test_a_truncated_wheel_is_refused_with_the_command_that_mends_it(here: Project, tmp_path: Path) -> None:
    stack(here, tmp_path)
    here.run("fetch", "demo")
    (torch,) = (tmp_path / "home" / "wheelhouse").glob("torch-*.whl")
    size = torch.stat().st_size
    with torch.open("ab") as stream:
        stream.truncate(100)

    said = here.run("validate", "demo", "--static")

    assert said.code == 2
    assert said.err == (
        f"error: `{torch}` has 100 bytes, the lock says {size}\n\n"
        "hint: run `harness fetch demo`: it takes away damaged files and gets them again\n"
    )


def test_wheel_files_are_audited_by_themselves(here: Project, tmp_path: Path) -> None:
    stack(here, tmp_path)
    wheels = sorted(map(str, here.index.folder.glob("*.whl")))

    assert here.run("validate", "--static", *wheels).code == 1
    mixed = here.run("validate", "--static", "demo", *wheels)
    assert (mixed.code, "wheel files are audited by themselves" in mixed.err) == (2, True)
    arch = here.run("validate", "--static", "--arch", "blackwell", *wheels)
    assert arch.err == "error: `blackwell` is no GPU architecture\n\nhint: write it as `sm_120a`\n"


def test_a_built_environment_is_audited_where_it_lies_and_shows_edited_files(here: Project) -> None:
    here.wheel("server", "1.2")
    here.spec("demo", "packages: [server==1.2]\nchecks: [imports, one-owner, record]\n")
    here.run("lock", "demo")
    path = Path(here.run("build", "demo", "--json").json["path"])
    assert here.run("validate", "demo", "--static").code == 0
    assert here.run("validate", "demo", "--imports").code == 0

    (module,) = path.glob("lib/python3*/site-packages/server/__init__.py")
    module.unlink()  # installers link files from their cache: writing into one would change the cache too
    module.write_text("raise RuntimeError('edited')\n")

    audited = here.run("validate", "demo", "--static", "--json")
    assert audited.code == 1
    (failed,) = [finding for finding in audited.json["findings"] if finding["state"] == "fail"]
    assert (failed["subject"], failed["details"]) == ("server 1.2", ["server/__init__.py"])
    imported = here.run("validate", "demo", "--imports", "--json")
    assert imported.code == 1
    assert imported.json["results"][0]["message"] == "cannot import `server`: RuntimeError: edited"


def test_a_package_that_only_holds_data_is_not_imported_and_keeps_the_environments_identity(here: Project) -> None:
    here.wheel("server", "1.2")
    here.wheel("weights", "3.0", contents={"weights/__init__.py": "import plugin_of_a_program_that_is_not_here\n"})
    packages = "packages: [server==1.2, weights==3.0]\n"
    here.spec("demo", packages)
    here.run("lock", "demo")
    here.run("build", "demo")
    assert here.run("validate", "demo", "--imports").code == 1

    here.spec("demo", packages + "not_imported: {weights: it holds a model file}\n")

    done = here.run("validate", "demo", "--imports", "--json")
    assert done.code == 0
    assert done.json["results"][0]["message"] == "imported server"
    assert "not imported: weights: it holds a model file" in done.err
    assert here.run("lock", "demo", "--check").code == 0  # what gets installed is the same

    here.spec("demo", packages + "not_imported: {wights: it holds a model file}\n")
    wrong = here.run("validate", "demo", "--imports")
    assert wrong.code == 2
    assert "demo.yaml:4:16: `not_imported`: `wights` is not in `packages`\n\nhint: did you mean `weights`?" in wrong.err


def gpu_project(here: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """A spec for SM120 that counts as built: its interpreter is this one, its PyTorch the stand-in."""
    here.wheel("server", "1.2")
    here.spec("demo", 'packages: [server==1.2]\ncuda: {toolkit: 13.0.1, arch: [sm_120a], driver: ">=580"}\n')
    here.run("lock", "demo")

    def built(lock: object) -> build.Built:
        variables = {"PYTHONPATH": str(GPU), "PATH": f"{GPU / 'bin'}:{os.environ['PATH']}"}
        python = Path(sys.executable)
        return build.Built(python.parent, python, python.parent, lock.env_id, "3.12.1", variables)  # type: ignore[attr-defined]

    monkeypatch.setattr(build, "find", built)


def test_gpu_checks_are_reported_as_they_come_and_as_a_table(here: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu_project(here, monkeypatch)

    said = here.run("validate", "demo", "--gpu", "--check", "devices", "--check", "driver")

    assert said.code == 0
    assert "2 x Stand-in GPU (sm_120)" in said.out
    assert [line.split(" (")[0] for line in said.err.splitlines()] == ["devices: ok", "driver: ok"]


def test_a_machine_without_a_gpu_is_told_so(here: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu_project(here, monkeypatch)
    monkeypatch.setenv("STUB_GPUS", "0")

    said = here.run("validate", "demo", "--gpu")

    assert said.code == 1
    assert "no GPU on this machine: PyTorch sees no GPU" in said.out
    assert said.err.endswith(
        "no GPU on this machine: run it where there is one; `harness validate --static` needs none\n"
    )


def test_an_environment_that_is_not_built_cannot_be_asked(here: Project) -> None:
    here.wheel("server", "1.2")
    here.spec("demo", "packages: [server==1.2]\n")
    here.run("lock", "demo")

    said = here.run("validate", "demo", "--gpu")

    assert (said.code, said.err) == (
        2,
        "error: the environment of `demo` is not built\n\nhint: run `harness build demo`\n",
    )


def test_one_way_must_be_chosen() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "harness", "validate", "demo"], capture_output=True, text=True, check=False
    )

    assert done.returncode == 2
    assert "one of the arguments --static --gpu --imports is required" in done.stderr

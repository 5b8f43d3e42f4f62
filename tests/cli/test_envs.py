"""`harness envs`: every environment of a project, built and audited where the machine can hold it."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes.projects import Project, project


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Project]:
    with project(tmp_path, monkeypatch, capsys) as made:
        made.wheel("server", "1.2")
        made.spec("good", "packages: [server==1.2]\nchecks: [one-owner, record]\n")
        assert made.run("lock", "good").code == 0
        yield made


def states(here: Project) -> tuple[int, dict[str, str]]:
    """Exit code, and the state of each spec."""
    said = here.run("envs", "--json")
    return said.code, {row["spec"]: row["state"] for row in said.json}


def test_what_this_machine_cannot_hold_is_said_and_is_no_failure(here: Project) -> None:
    here.spec("later", "packages: [server==1.2]\nplatform: {os: linux, arch: x86_64, glibc: '2.99'}\n")
    here.spec("unlocked", "packages: [server==1.2]\n")
    assert here.run("lock", "later").code == 0

    said = here.run("envs")

    assert said.code == 0
    assert "good      built and fit\n" in said.out
    assert "later     not for this machine: this environment needs glibc 2.99 or newer" in said.out
    assert "unlocked  not for this machine: it has no lock; `harness lock` says which" in said.out
    assert len(said.out.splitlines()) == 3  # what the other verbs answer is talk
    assert "files are what their RECORD says" in said.err


def test_an_environment_that_is_not_fit_or_not_built_is_a_failure(here: Project, tmp_path: Path) -> None:
    assert states(here) == (0, {"good": "built and fit"})
    [module] = (tmp_path / "home" / "envs").glob("*/lib/python3*/site-packages/server/__init__.py")
    kept, seen = module.read_bytes(), module.stat()
    module.write_bytes(kept.replace(b"1", b"9"))
    # Size and date as before: a build takes it for whole, and the audit reads the bytes.
    os.utime(module, ns=(seen.st_atime_ns, seen.st_mtime_ns))
    assert states(here) == (1, {"good": "not fit"})

    here.spec("broken", "packages: [server==1.2]\n")
    assert here.run("lock", "broken").code == 0
    for wheel in here.index.folder.iterdir():
        wheel.unlink()
    for wheel in (tmp_path / "home" / "wheelhouse").glob("*.whl"):
        wheel.unlink()
    assert states(here)[1]["broken"] == "could not be built"

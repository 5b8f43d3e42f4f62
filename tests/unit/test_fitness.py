"""Which environments a machine can build and run."""

from pathlib import Path

import pytest

from harness.env import places
from harness.run.fitness import Machine, all_here, fit

ROOT = Path(__file__).parents[2]
NONE = Machine(None, ())
BLACKWELL = Machine("580.95.05", ((12, 0), (12, 0)))


@pytest.fixture(autouse=True)
def project(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HARNESS_PROJECT", str(ROOT))
    monkeypatch.setenv("HARNESS_HOME", str(tmp_path))


@pytest.fixture
def newer_libc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.env.interpreter.check_platform", lambda wanted: None)
    monkeypatch.setattr("harness.env.interpreter.choose", lambda locked, asked: None)


def test_a_cpu_environment_needs_no_gpu() -> None:
    found = fit("llamacpp-cpu", NONE)
    assert (found.builds, found.runs, found.built, found.why) == (True, True, False, ())
    assert found.size is not None
    assert found.size > 50e6  # a model of 135 million parameters is among its wheels


@pytest.mark.usefixtures("newer_libc")
@pytest.mark.parametrize(
    ("here", "why"),
    [
        (NONE, ("no NVIDIA GPU here",)),
        (BLACKWELL, ()),
        (Machine("570.10", ((12, 0),)), ("driver 570.10, it needs >=580",)),
        (Machine("580.95", ((9, 0),)), ("built for sm_120a, this GPU is 9.0",)),
        (Machine("570.10", ((9, 0), (12, 0))), ("driver 570.10, it needs >=580", "built for sm_120a, this GPU is 9.0")),
    ],
)
def test_a_gpu_environment_can_be_built_anywhere_and_run_where_driver_and_gpu_fit(
    here: Machine, why: tuple[str, ...]
) -> None:
    found = fit("sglang-cu130", here)
    assert (found.builds, found.runs, found.why) == (True, not why, why)


def test_an_environment_without_a_lock_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "envspecs").mkdir()
    (tmp_path / "envspecs" / "x.yaml").write_text('env: x\npython: "3.12"\npackages: [six]\n')
    monkeypatch.setenv("HARNESS_PROJECT", str(tmp_path))
    [found] = all_here()
    assert (found.spec, found.builds, found.runs) == ("x", False, False)
    assert found.why == ("no lock: `harness lock` says which index could not be reached",)


def test_every_environment_of_the_project_is_told() -> None:
    assert [one.spec for one in all_here()] == places.spec_names()

"""Files are found from anywhere inside a project, and nowhere else."""

from pathlib import Path

import pytest

from harness.env import places
from harness.errors import InputError


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("HARNESS_PROJECT", raising=False)
    monkeypatch.delenv("HARNESS_HOME", raising=False)
    for name in ("envspecs", "docs/deep", "elsewhere"):
        (tmp_path / "project" / name).mkdir(parents=True)
    (tmp_path / "project" / "envspecs" / "sglang-cu130.yaml").write_text("")
    return tmp_path / "project"


def test_the_project_is_the_nearest_folder_upwards_with_envspecs(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root / "docs" / "deep")
    assert places.project_root() == root
    assert places.home() == root / ".harness"
    assert places.spec_path("sglang-cu130") == root / "envspecs" / "sglang-cu130.yaml"
    assert places.lock_path("sglang-cu130") == root / "envspecs" / "locks" / "sglang-cu130.lock.toml"


def test_variables_name_the_project_and_its_home(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HARNESS_PROJECT", str(root))
    monkeypatch.setenv("HARNESS_HOME", str(tmp_path / "state"))
    assert places.project_root() == root
    assert places.environments() == tmp_path / "state" / "envs"
    assert places.wheelhouse() == tmp_path / "state" / "wheelhouse"


def test_where_no_folder_holds_envspecs_the_nearest_with_recipes_is_the_project(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "plain" / "recipes").mkdir(parents=True)
    (tmp_path / "plain" / "deep").mkdir()
    monkeypatch.chdir(tmp_path / "plain" / "deep")
    with pytest.raises(InputError, match="no project here"):  # a folder of that name may hold anything
        places.project_root()
    for folder in (tmp_path / "plain", root / "elsewhere"):
        (folder / "recipes").mkdir(exist_ok=True)
        (folder / "recipes" / "mine.yaml").touch()
    assert places.project_root() == tmp_path / "plain"
    monkeypatch.chdir(root / "elsewhere")
    assert places.project_root() == root
    monkeypatch.setenv("HARNESS_PROJECT", str(tmp_path / "plain"))
    assert places.project_root() == tmp_path / "plain"


def test_outside_a_project_there_is_a_message(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=f"no project here: neither `{tmp_path}` nor a folder above it"):
        places.project_root()
    monkeypatch.setenv("HARNESS_PROJECT", str(tmp_path))
    with pytest.raises(InputError, match="which holds no `envspecs` folder"):
        places.project_root()


@pytest.mark.parametrize("asked", ["sglang-cu13", "envspecs/sglang-cu13.yaml"])
def test_an_unknown_spec_gets_the_nearest_name(asked: str, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root)
    with pytest.raises(InputError) as caught:
        places.spec_path(asked)
    assert caught.value.hint == "did you mean `sglang-cu130`?"

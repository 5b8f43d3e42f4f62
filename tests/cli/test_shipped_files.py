"""Every recipe and spec of the project loads and plans."""

from pathlib import Path

import pytest

from harness.cli import main
from harness.env import lock, places, spec

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").rglob("*.yaml"))
RECIPES = [path for path in RECIPES if "references" not in path.parts]
SPECS = sorted((ROOT / "envspecs").glob("*.yaml"))


@pytest.fixture(autouse=True)
def in_project(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: str(path.relative_to(ROOT / "recipes")))
def test_a_shipped_recipe_plans(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(path), "--json"]) == 0, capsys.readouterr().err


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_a_shipped_spec_loads_and_its_lock_is_current(path: Path) -> None:
    wanted = spec.load(path)
    lock_path = places.lock_path(path)
    if lock_path.is_file():
        assert lock.check(wanted, lock.read(lock_path)) == []

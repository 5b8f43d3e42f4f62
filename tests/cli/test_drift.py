"""A run on an environment that is no longer what its lock says: refused, or marked for good."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli.conftest import QUICK
from fakes.projects import Project, project

RECIPE = QUICK[: QUICK.index("publish:")].replace("server:\n  engine", "env: demo\nserver:\n  engine", 1)
REASON = "a print was added by hand to find a hang"


@pytest.fixture
def edited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Project]:
    """A project whose built environment differs from its lock in one byte, edited a minute later."""
    with project(tmp_path, monkeypatch, capsys) as made:
        made.wheel("server", "1.2")
        made.spec("demo", "packages: [server==1.2]\n")
        assert made.run("lock", "demo").code == 0
        answer = made.run("build", "demo", "--json").json
        (installed,) = Path(answer["path"]).rglob("site-packages/server/__init__.py")
        was = installed.read_text()
        installed.write_text(was.replace("1.2", "1.3"))
        assert len(installed.read_text()) == len(was)
        later = installed.stat().st_mtime + 60
        os.utime(installed, (later, later))
        monkeypatch.chdir(made.root)
        yield made


def written(here: Project, text: str) -> str:
    path = here.root / "quick.yaml"
    path.write_text(text)
    return str(path)


def test_one_edited_byte_refuses_a_run_before_anything_starts(edited: Project) -> None:
    said = edited.run("run", written(edited, RECIPE))
    assert said.code == 3
    assert "environment `demo` differs from its lock" in said.err
    assert "server/__init__.py" in said.err
    assert "harness build demo" in said.err
    assert not (edited.root / "runs").exists()


def test_a_run_that_may_drift_carries_the_reason_and_the_file_on_its_face(edited: Project) -> None:
    said = edited.run("run", written(edited, f"{RECIPE}allow_drift: {REASON}\n"))
    assert said.code == 0, said.err
    (folder,) = (edited.root / "runs").iterdir()
    assert REASON in (folder / "plan.json").read_text()
    for launch in (folder / "launches").glob("*/launch.json"):
        assert "server/__init__.py" in launch.read_text()
    shown = edited.run("show", str(folder))
    assert REASON in shown.out
    assert "suspect: the environment is not what its lock says: file `server/__init__.py`" in shown.out
    checked = edited.run("verify", str(folder))
    assert (checked.code, "all as stored" in checked.out) == (0, True), checked.out

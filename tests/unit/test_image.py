"""What an image is built from, and with which words; building one for real is `tests/image`."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes.projects import Project, project

from harness.cli import main
from harness.env import image, lock, places, spec

REPOSITORY = Path(__file__).parents[2]
COMMANDS = json.loads((REPOSITORY / "tests" / "files" / "image_commands.json").read_text())
ENGINES = ("docker", "podman", "buildah")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Project]:
    """A project with a spec `served` on top of `base`, one without a base image, and the harness's own."""
    with project(tmp_path, monkeypatch, capsys) as made:
        shutil.copy(REPOSITORY / "Dockerfile.cuda13", made.root)
        made.wheel("server", "1.2")
        made.wheel("tool", "3.4")
        made.spec("base", "packages: [server==1.2]\nbase_image: example/base:1\n")
        made.spec("served", "env: served\nextends: base\noverlays: [shim]\nvariables: {ANSWER: '42'}\n")
        made.spec("other", "packages: [server==1.2]\n")
        made.spec("harness", "packages: [tool==3.4]\n")
        for name in ("shim", "unused"):
            overlay = made.root / "envspecs" / "overlays" / name
            overlay.mkdir(parents=True)
            (overlay / "overlay.yaml").write_text(f"distribution: {name}\nversion: '1'\nwhy: for this test\n")
            (overlay / f"{name}.py").write_text("ours = True\n")
        (made.root / "envspecs" / "rules").mkdir()
        (made.root / "envspecs" / "rules" / "facts.yaml").write_text("rules: {}\n")
        for name in ("served", "other", "harness"):
            assert made.run("lock", name).code == 0
        yield made


def tree(folder: Path) -> dict[str, tuple[bytes, int, int]]:
    """Bytes, mode and date of everything under a folder but wheels, which are mounted and never copied."""
    found = {}
    for path in sorted(folder.rglob("*")):
        seen, name = path.stat(), path.relative_to(folder).as_posix()
        if path.is_dir() or not name.startswith("wheels/"):
            found[name] = (b"" if path.is_dir() else path.read_bytes(), seen.st_mode, int(seen.st_mtime))
    return found


def stand_in(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str, name: str = "buildah") -> None:
    """A builder that does what a script says; what the real one does is tested with the real one."""
    folder.mkdir()
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


@pytest.mark.parametrize("engine", ENGINES)
def test_the_cuda_image_is_asked_for_in_the_words_each_builder_knows(
    engine: image.Engine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HARNESS_PROJECT", str(REPOSITORY))
    text = (REPOSITORY / "envspecs" / "locks" / "sglang-cu130.lock.toml").read_text()
    identity = dict(re.findall(r'^(env_id|spec_digest) = "([0-9a-f]{64})"$', text, re.MULTILINE))

    assert main(["image", "sglang-cu130", "--engine", engine, "--print", "--json"]) == 0

    answer = json.loads(capsys.readouterr().out)
    assert answer["command"] == [word.format(**identity) for word in COMMANDS[engine]]
    assert answer["variables"] == ({"DOCKER_BUILDKIT": "1"} if engine == "docker" else {})


def test_the_dockerfile_takes_what_it_is_given_and_nothing_else() -> None:
    dockerfile = (REPOSITORY / "Dockerfile.cuda13").read_text()
    taken = set(re.findall(r"^ARG (\w+)$", dockerfile, re.MULTILINE))
    given = {word.split("=")[0] for word in COMMANDS["docker"] if re.match(r"[A-Z_]+=", word)}
    assert taken == given


def test_the_harness_locks_for_itself_what_it_says_it_depends_on() -> None:
    stated = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["dependencies"]
    locked = spec.load(REPOSITORY / "envspecs" / "harness.yaml")
    assert [package.requirement for package in locked.packages] == stated


def test_a_context_holds_what_the_image_needs_and_nothing_else(here: Project) -> None:
    assert here.run("image", "served", "--context", "context").code == 0

    names = {path.relative_to("context").as_posix() for path in Path("context").rglob("*") if path.is_file()}
    source = {name for name in names if "/source/harness/" in name}
    package = REPOSITORY / "harness"
    assert {name.split("/source/harness/")[1] for name in source} == {
        path.relative_to(package).as_posix()
        for path in package.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert "rest/source/harness/stats/level.py" in source
    assert "packages/source/harness/env/build.py" in source
    assert names - source == {
        "Dockerfile.cuda13",
        "tools/requirements.txt",
        "packages/project/envspecs/served.yaml",
        "packages/project/envspecs/base.yaml",
        "packages/project/envspecs/locks/served.lock.toml",
        "packages/project/envspecs/overlays/shim/overlay.yaml",
        "packages/project/envspecs/overlays/shim/shim.py",
        "rest/project/envspecs/rules/facts.yaml",
        "wheels/packages/server-1.2-py3-none-any.whl",
        "wheels/tools/tool-3.4-py3-none-any.whl",
    }


def test_only_the_patches_that_a_spec_names_are_in_its_context(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HARNESS_PROJECT", str(REPOSITORY))
    source = image.source("sglang-cpu")
    wanted = source.spec.patches

    names = [name for name, _ in image.spec_files(source)]

    assert [name for name in names if name.startswith("patches/")] == [f"patches/{name}.patch" for name in wanted]
    assert len(list((REPOSITORY / "envspecs" / "patches").glob("*.patch"))) > len(wanted)


def test_equal_inputs_give_equal_contexts_whenever_and_however_they_are_made(here: Project) -> None:
    assert here.run("image", "served", "--context", "first").code == 0
    touched = here.root / "envspecs" / "base.yaml"
    os.utime(touched, (time.time() - 1000,) * 2)
    touched.chmod(0o600)
    assert here.run("image", "served", "--context", "second", "--engine", "podman").code == 0

    assert tree(here.root / "first") == tree(here.root / "second")
    assert {seen[2] for seen in tree(here.root / "first").values()} == {315532800}  # `date -d 1980-01-01T00:00Z +%s`


def test_the_wheelhouse_keeps_its_own_dates(here: Project) -> None:
    assert here.run("fetch", "served").code == 0
    wheel = places.wheelhouse() / "server-1.2-py3-none-any.whl"
    os.utime(wheel, (1_700_000_000,) * 2)
    assert here.run("image", "served", "--context", "context").code == 0
    assert wheel.stat().st_mtime == 1_700_000_000


def test_a_context_is_not_written_over_what_is_there(here: Project) -> None:
    (here.root / "context").mkdir()
    (here.root / "context" / "mine").write_text("mine")
    said = here.run("image", "served", "--context", "context")
    assert said.code == 2
    assert "`context` is not empty" in said.err
    assert (here.root / "context" / "mine").read_text() == "mine"


def test_what_builds_the_packages_runs_by_itself(here: Project) -> None:
    """The part of the harness below the packages' layer is all that `harness build` needs."""
    assert here.run("image", "served", "--context", "context").code == 0
    context = here.root / "context"
    variables = os.environ | {
        "PYTHONPATH": str(context / "packages" / "source"),
        "HARNESS_PROJECT": str(context / "packages" / "project"),
        "HARNESS_HOME": str(here.root / "inside"),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    words = [sys.executable, "-m", "harness", "build", "served", "--offline", "--json"]

    done = subprocess.run(
        [*words, "--wheelhouse", str(context / "wheels" / "packages")],
        env=variables,
        cwd=context,
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["env_id"] == lock.read_for("served").env_id


def test_requirements_hold_every_hash_and_say_which_python_gets_a_package() -> None:
    packages = (
        {"name": "anywhere", "version": "1", "files": [{"file": "a.whl", "sha256": "a" * 64, "size": 1}]},
        {
            "name": "compiled",
            "version": "2.0+cu130",
            "files": [
                {"file": "c11.whl", "sha256": "c" * 64, "size": 1, "pythons": ("3.11",)},
                {"file": "c12.whl", "sha256": "b" * 64, "size": 1, "pythons": ("3.12",)},
            ],
        },
        {
            "name": "backport",
            "version": "3",
            "pythons": ("3.11",),
            "files": [{"file": "b.whl", "sha256": "d" * 64, "size": 1}],
        },
    )
    wanted = spec.Wanted.model_validate({"env": "x", "python": ">=3.11,<3.13", "packages": ({"name": "anywhere"},)})
    locked = lock.Lock(
        env_id="0" * 64,
        spec_digest="0" * 64,
        wanted=wanted,
        packages=tuple(lock.LockedPackage.model_validate_json(json.dumps(package)) for package in packages),
    )

    assert list(image.requirements(locked, ["3.11", "3.12"])) == [
        f"anywhere==1 --hash=sha256:{'a' * 64}",
        f"compiled==2.0+cu130 --hash=sha256:{'b' * 64} --hash=sha256:{'c' * 64}",
        f'backport==3 ; python_version == "3.11" --hash=sha256:{"d" * 64}',
    ]
    assert list(image.requirements(locked, ["3.12"])) == [
        f"anywhere==1 --hash=sha256:{'a' * 64}",
        f"compiled==2.0+cu130 --hash=sha256:{'b' * 64}",
    ]


def test_an_image_needs_a_base(here: Project) -> None:
    said = here.run("image", "other", "--print")
    assert said.code == 2
    assert "`other` names no base image" in said.err
    assert "--base IMAGE" in said.err


def test_another_base_than_the_locks_is_said(here: Project) -> None:
    digest = "sha256:" + "0" * 64
    said = here.run("image", "served", "--print", "--base", f"mine:1@{digest}", "--tag", "mine/served:2")
    assert f"BASE_IMAGE=mine:1@{digest}" in said.out
    assert "--tag mine/served:2" in said.out
    assert "not the lock's" in said.err
    assert "named without its digest" not in said.err
    assert "named without its digest" in here.run("image", "served", "--print").err


def test_a_python_that_the_lock_is_not_for_is_refused(here: Project) -> None:
    said = here.run("image", "served", "--print", "--python", "3.9")
    assert said.code == 2
    assert "no image with Python 3.9: `served` and the harness have 3.11 3.12 3.13 3.14" in said.err


@pytest.mark.parametrize(("change", "stale"), [("served", "`served`"), ("harness", "`harness`")])
def test_a_stale_lock_becomes_no_image(here: Project, change: str, stale: str) -> None:
    path = here.root / "envspecs" / f"{change}.yaml"
    path.write_text(path.read_text() + "constraints: [server<2]\n")
    said = here.run("image", "served", "--print")
    assert said.code == 3
    assert f"the lock of {stale} is stale" in said.err


def test_a_machine_without_a_builder_is_told_what_to_do(here: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(here.root))
    said = here.run("image", "served", "--engine", "podman")
    assert said.code == 4
    assert "this machine has no podman" in said.err
    assert "--context DIR" in said.err
    assert "this machine has no docker and no podman and no buildah" in here.run("image", "served").err


def test_a_builder_that_fails_is_quoted_and_leaves_nothing(
    here: Project, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = 'for n in $(seq 30); do echo "step $n"; done; echo "no such base" >&2; exit 125'
    stand_in(tmp_path / "bin", monkeypatch, script)
    said = here.run("image", "served", "--engine", "buildah", "--quiet")
    assert said.code == 4
    assert "`buildah build` failed with exit code 125" in said.err
    assert "no such base" in said.err
    assert "step 30" in said.err
    assert "step 11\n" not in said.err  # the last 20 lines
    assert not list(places.home().glob(".image-*"))


def test_a_builder_gets_no_input_and_its_image_id_is_the_answer(
    here: Project, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = 'read -r line && exit 9; while [ "$1" != --iidfile ]; do shift; done; printf sha256:abc > "$2"'
    script += '; echo "$DOCKER_BUILDKIT"'
    stand_in(tmp_path / "bin", monkeypatch, script, "docker")
    said = here.run("image", "served", "--engine", "docker", "--json")
    assert said.code == 0
    assert said.json["image_id"] == "sha256:abc"
    assert said.json["image"] == f"harness/served:{lock.read_for('served').env_id[:16]}"
    assert "\n1\n" in said.err
    assert not list(places.home().glob(".image-*"))

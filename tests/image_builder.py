"""A machine that can build images: buildah with a storage of its own, and a base image that debootstrap makes.

The base stands in for a CUDA image: this machine's own distribution and Python, from the archive that its apt knows. It
is kept in the harness's cache, since making it takes a minute or more.
"""

import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from harness.env import places

REPOSITORY = Path(__file__).parents[1]
BASE = "localhost/stand-in:1"
SPEC = "llamacpp-cpu"
CANARY = "canary-9f2c7b1e5a"


@dataclass
class Builder:
    """A project to build images of, and the storage they go to."""

    project: Path
    variables: dict[str, str]

    def run(self, *words: str, check: bool = True) -> "subprocess.CompletedProcess[str]":
        """One command of this project's harness, or of buildah."""
        done = subprocess.run(words, env=self.variables, cwd=self.project, capture_output=True, text=True, check=False)
        assert not check or done.returncode == 0, f"{words}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done

    def build(self, *more: str, check: bool = True) -> "subprocess.CompletedProcess[str]":
        """`harness image` by the harness as it lies in the project."""
        python = f"{sys.version_info.major}.{sys.version_info.minor}"
        words = (sys.executable, "-m", "harness", "image", SPEC, "--engine", "buildah", "--base", BASE)
        return self.run(*words, "--python", python, "--json", *more, check=check)

    def inspect(self, image: str) -> Any:
        """What an image says of itself, as the OCI's format has it."""
        return json.loads(self.run("buildah", "inspect", "--type", "image", image).stdout)["OCIv1"]

    def inside(self, image: str, *words: str, check: bool = True) -> "subprocess.CompletedProcess[str]":
        """One command in a container of an image."""
        container = self.run("buildah", "from", "--pull-never", image).stdout.strip()
        try:
            return self.run("buildah", "run", container, "--", *words, check=check)
        finally:
            self.run("buildah", "rm", container)


@contextmanager
def image_builder(folder: Path) -> Iterator[Builder]:
    """A copy of this project to build from, and an empty storage that holds the base image only.

    Skips the test, with the reason, where no image can be built.
    """
    _need_a_builder()
    project = folder / "project"
    skipped = shutil.ignore_patterns("__pycache__")
    for name in ("harness", "envspecs"):
        shutil.copytree(REPOSITORY / name, project / name, ignore=skipped)
    shutil.copy(REPOSITORY / "Dockerfile.cuda13", project)
    made = Builder(project, _variables(folder, project))
    try:
        _base_image(made, folder)
        yield made
    finally:
        for words in (("rm", "--all"), ("rmi", "--all", "--force"), ("umount", "--all")):
            made.run("buildah", *words, check=False)
        shutil.rmtree(folder / "storage", ignore_errors=True)


def _need_a_builder() -> None:
    missing = [name for name in ("buildah", "debootstrap") if not shutil.which(name)]
    if missing:
        pytest.skip(f"images are not built here: no {' and no '.join(missing)} (Debian packages of the same names)")
    if os.geteuid() != 0:
        pytest.skip("images are not built here: debootstrap needs root")


def _variables(folder: Path, project: Path) -> dict[str, str]:
    """The harness of the project, a storage of its own, and a secret that must not get into an image."""
    storage = folder / "storage"
    storage.mkdir()
    (folder / "storage.conf").write_text(
        f'[storage]\ndriver = "{_driver(folder)}"\ngraphroot = "{storage}/root"\nrunroot = "{storage}/run"\n'
    )
    return {
        **os.environ,
        "HARNESS_HOME": str(places.home()),
        "HARNESS_PROJECT": str(project),
        "PYTHONPATH": str(project),
        "PYTHONDONTWRITEBYTECODE": "1",
        "CONTAINERS_STORAGE_CONF": str(folder / "storage.conf"),
        "BUILDAH_ISOLATION": "chroot",
        "HF_TOKEN": CANARY,
    }


def _driver(folder: Path) -> str:
    """`overlay` where the kernel mounts one here; else `vfs`, which works everywhere and copies every layer."""
    parts = {name: folder / "probe" / name for name in ("lower", "upper", "work", "merged")}
    for part in parts.values():
        part.mkdir(parents=True)
    options = f"lowerdir={parts['lower']},upperdir={parts['upper']},workdir={parts['work']}"
    words = ["mount", "-t", "overlay", "overlay", "-o", options, str(parts["merged"])]
    if subprocess.run(words, capture_output=True, check=False).returncode:
        return "vfs"
    subprocess.run(["umount", str(parts["merged"])], check=True)
    return "overlay"


def _base_image(made: Builder, folder: Path) -> None:
    archive = _base_archive(folder)
    container = made.run("buildah", "from", "scratch").stdout.strip()
    made.run("buildah", "add", "--quiet", container, str(archive), "/")
    made.run("buildah", "commit", "--quiet", "--rm", container, BASE)


def _base_archive(folder: Path) -> Path:
    """A small system with Python and venv, as a tar file; made once."""
    suite, mirror = _archive_of_this_machine()
    machine = subprocess.run(
        ["dpkg", "--print-architecture"], capture_output=True, text=True, check=True
    ).stdout.strip()
    kept = places.home() / "cache" / "base-images" / f"{suite}-{machine}-python-libgomp.tar"
    if kept.exists():
        return kept
    root = folder / "root"
    words = ["debootstrap", "--variant=minbase", "--include=libgomp1,python3,python3-venv", suite, str(root), mirror]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"images are not built here: debootstrap failed: {done.stdout.strip().splitlines()[-1:]}")
    for left in (root / "var/cache/apt/archives", root / "var/lib/apt/lists"):
        shutil.rmtree(left, ignore_errors=True)
    kept.parent.mkdir(parents=True, exist_ok=True)
    partial = folder / "base.tar"
    with tarfile.open(partial, "w") as tar:
        tar.add(root, arcname=".")
    shutil.rmtree(root)
    shutil.move(partial, kept.with_suffix(".partial"))
    kept.with_suffix(".partial").replace(kept)
    return kept


def _archive_of_this_machine() -> tuple[str, str]:
    """This machine's release and the address of its package archive, as its own apt has them."""
    release = dict(line.split("=", 1) for line in Path("/etc/os-release").read_text().splitlines() if "=" in line)
    suite = release.get("VERSION_CODENAME", "").strip('"')
    words = ["apt-get", "indextargets", "--format", "$(CODENAME) $(COMPONENT) $(REPO_URI)", "Created-By: Packages"]
    for line in subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines():
        codename, component, address = line.split(" ", 2)
        if (codename, component) == (suite, "main"):
            return suite, address
    pytest.skip(f"images are not built here: apt knows no archive for `{suite}` (run `apt-get update`)")

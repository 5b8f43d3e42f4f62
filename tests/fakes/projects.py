"""A project of its own for a test: specs, a package index, and a machine that knows no other."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fakes.packages import PackageIndex, make_wheel, served

from harness.cli import main

_CONFIGURATION = (
    "UV_DEFAULT_INDEX",
    "UV_INDEX_URL",
    "UV_FIND_LINKS",
    "PIP_INDEX_URL",
    "PIP_FIND_LINKS",
    "PIP_CONFIG_FILE",
)


@dataclass
class Said:
    """What one command answered: exit code, stdout, stderr."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """stdout as JSON."""
        return json.loads(self.out)


@dataclass
class Project:
    """One project on the loopback."""

    root: Path
    index: PackageIndex
    capture: pytest.CaptureFixture[str]

    def wheel(self, name: str, version: str, **details: Any) -> Path:
        """Put a wheel on the default index."""
        return make_wheel(self.index.folder, name, version, **details)

    def spec(self, name: str, text: str) -> Path:
        """Write `envspecs/NAME.yaml`; `env` and `python` are added where the text names none."""
        head = "" if text.startswith("env:") else f"env: {name}\n"
        # The Pythons the harness itself may run under, so that a build finds an interpreter on any machine.
        python = "" if "python:" in text or "extends:" in text else 'python: ">=3.11,<3.15"\n'
        path = self.root / "envspecs" / f"{name}.yaml"
        path.write_text(head + python + text)
        return path

    def lock(self, name: str) -> Path:
        """Where a spec's lock lies."""
        return self.root / "envspecs" / "locks" / f"{name}.lock.toml"

    def run(self, *argv: str) -> Said:
        """One command line."""
        self.capture.readouterr()
        code = main(argv)
        seen = self.capture.readouterr()
        return Said(code, seen.out, seen.err)


@contextmanager
def project(folder: Path, monkeypatch: pytest.MonkeyPatch, capture: pytest.CaptureFixture[str]) -> Iterator[Project]:
    """A project in a folder, served by an index of its own; no configuration of this machine is seen."""
    for name in _CONFIGURATION:
        monkeypatch.delenv(name, raising=False)
    root = folder / "project"
    (root / "envspecs").mkdir(parents=True)
    (folder / "wheels").mkdir()
    monkeypatch.setenv("HARNESS_PROJECT", str(root))
    monkeypatch.setenv("HARNESS_HOME", str(folder / "home"))
    monkeypatch.setenv("HOME", str(folder / "user"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(folder / "user" / "config"))
    monkeypatch.setenv("XDG_CONFIG_DIRS", str(folder / "user" / "site"))
    monkeypatch.setenv("UV_CACHE_DIR", str(folder / "uv-cache"))
    monkeypatch.setenv("UV_HTTP_RETRIES", "0")
    monkeypatch.chdir(root)
    with served(PackageIndex(folder / "wheels")) as index:
        monkeypatch.setenv("UV_DEFAULT_INDEX", index.address)
        yield Project(root, index, capture)

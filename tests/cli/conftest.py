"""A place to run recipes in: a folder that looks like a project, and a recipe on the simulated engine."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from harness.cli import main

QUICK = """\
recipe: quick
question: Does it help?
server:
  engine: simulated
  args: {step-ms: 2, sequence-ms: 0.1}
arms:
  baseline: {}
  speculative:
    server:
      args: {speculative-tokens: 3, speculative-acceptance: 0.7, speculative-step-ms: 1, speculative-token-ms: 0.2}
workload: {prompts: "synthetic:words=8,count=64", max_tokens: 8}
warmup: {requests: 1}
sweep: {concurrency: [1, 2], requests: 4}
compare: {base: baseline, treatment: ["server.args.speculative-*"]}
expect: {speculative: [speculation]}
publish: [{doc: docs/quick.md, block: quick}, logbook]
timeouts: {start_s: 20, request_s: 20}
"""


def carry_out(root: Path) -> None:
    """Run `quick.yaml` of a folder, for a fixture that many tests take copies of."""
    with contextlib.chdir(root):
        assert main(["run", "quick.yaml", "-q"]) in {0, 1}


@dataclass
class Answer:
    """What one command said."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@dataclass
class Workplace:
    """A folder to run recipes in."""

    root: Path
    capture: pytest.CaptureFixture[str]

    def recipe(self, text: str = QUICK, name: str = "quick.yaml") -> Path:
        path = self.root / name
        path.write_text(text)
        return path

    def changed(self, *changes: tuple[str, str]) -> Path:
        """The quick recipe with some of its text replaced."""
        text = QUICK
        for old, new in changes:
            assert old in text, old
            text = text.replace(old, new)
        return self.recipe(text)

    def harness(self, *words: str | Path) -> Answer:
        """One command in this process."""
        try:
            code = main([str(word) for word in words])
        except SystemExit as end:
            code = int(end.code or 0)
        said = self.capture.readouterr()
        return Answer(code, said.out, said.err)

    def start(self, *words: str | Path) -> "subprocess.Popen[str]":
        """One command in a process of its own."""
        return subprocess.Popen(
            [sys.executable, "-m", "harness", *map(str, words)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=self.root,
            start_new_session=True,
        )

    def run(self) -> Path:
        """The only run there is."""
        [run] = (self.root / "runs").iterdir()
        return run

    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = json.loads((self.run() / "run.json").read_text())
        return state

    def servers(self) -> list[int]:
        """Simulated servers whose files lie in this place."""
        found = []
        for process in psutil.process_iter(["cmdline", "cwd"]):
            words = process.info["cmdline"] or []
            if "harness.engines.simulated_server" in words and (process.info["cwd"] or "").startswith(str(self.root)):
                found.append(process.pid)
        return found


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Workplace:
    """An empty project with a document and a logbook to publish into."""
    (tmp_path / "envspecs").mkdir()
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "quick.md").write_text("# Quick\n<!-- harness:begin quick -->\n<!-- harness:end quick -->\n")
    (tmp_path / "LOGBOOK.md").write_text("# Logbook\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    return Workplace(tmp_path, capsys)


@pytest.fixture
def wait_for() -> Callable[[Callable[[], bool], str], None]:
    """Wait for something to become true, and say what did not."""

    def wait(condition: Callable[[], bool], what: str, seconds: float = 60.0) -> None:
        until = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < until, f"waited {seconds:.0f} s for {what}"
            time.sleep(0.05)

    return wait


def interrupt(process: "subprocess.Popen[str]", times: int = 1) -> None:
    """Ctrl-C as a terminal sends it: to the foreground process group."""
    for _ in range(times):
        os.killpg(process.pid, signal.SIGINT)
        time.sleep(0.3)

"""One cluster for all tests of this folder, and a place to run recipes on it."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
from slurm.cluster import Cluster, missing

QUICK = """\
recipe: quick
question: Does it help?
server:
  engine: simulated
  args: {step-ms: 2, sequence-ms: 0.1}
arms:
  baseline: {}
  slower: {server: {args: {step-ms: 3}}}
workload: {prompts: "synthetic:words=8,count=64", max_tokens: 8}
warmup: {requests: 1}
sweep: {concurrency: [1, 2], requests: 4}
compare: {base: baseline}
timeouts: {start_s: 30, request_s: 20}
"""


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Four nodes on this machine; where that cannot be, everything here is skipped, loudly."""
    if reason := missing():
        pytest.skip(f"NO SLURM HERE, so nothing is known about harness on Slurm: {reason}")
    made = Cluster(tmp_path_factory.mktemp("cluster"))
    try:
        made.start()
        yield made
    finally:
        made.stop()


@dataclass
class Site:
    """A folder that looks like a project, with a recipe and a site file."""

    root: Path
    cluster: Cluster
    variables: dict[str, str] = field(default_factory=dict)

    def recipe(self, *changes: tuple[str, str], text: str = QUICK) -> str:
        """The quick recipe with some of its text replaced."""
        for old, new in changes:
            assert old in text, old
            text = text.replace(old, new)
        (self.root / "quick.yaml").write_text(text)
        return "quick.yaml"

    def site(self, **more: Any) -> None:
        """Another site file: some keys of `slurm:` changed."""
        slurm = {"partition": "all", "poll_s": 0.3, "patience_s": 15, "grace_s": 10, **more}
        (self.root / "site.yaml").write_text(json.dumps({"slurm": slurm}))

    def start(self, *words: str | Path) -> "subprocess.Popen[str]":
        """One command of ours."""
        environment = {**os.environ, **self.cluster.environment(), "HARNESS_SITE": str(self.root / "site.yaml")}
        return subprocess.Popen(
            [sys.executable, "-m", "harness", *map(str, words)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=self.root,
            env={**environment, "COLUMNS": "200", **self.variables},
            start_new_session=True,
        )

    def harness(self, *words: str | Path) -> "Said":
        """One command of ours, to its end."""
        return ended(self.start(*words))

    def submit(self, *words: str | Path) -> "subprocess.Popen[str]":
        """`harness run --on slurm`, without publishing."""
        return self.start("run", "quick.yaml", "--on", "slurm", "--no-publish", *words)

    def run(self, *words: str | Path) -> "Said":
        """The same, to its end."""
        return ended(self.submit(*words))

    @property
    def folder(self) -> Path:
        """The only run there is."""
        [run] = (self.root / "runs").iterdir()
        return run

    def json(self, name: str) -> Any:
        """A JSON file of the run."""
        return json.loads((self.folder / name).read_text())

    def level(self, launch: str, level: str) -> Path:
        """The mark that a cell is finished."""
        return self.folder / "launches" / launch / "levels" / level / "level.json"

    def has(self, pattern: str) -> bool:
        """Whether a file is there, in any run."""
        return any(self.root.glob(f"runs/*/{pattern}"))

    def jobs(self) -> list[str]:
        """Ids of the jobs of the run's last submission."""
        return [job["job_id"] for job in self.json("slurm/jobs.json")["jobs"]]

    def servers(self) -> list[int]:
        """Simulated servers, and their children, whose files lie in this place."""
        found = psutil.process_iter(["cwd"])
        return [process.pid for process in found if (process.info["cwd"] or "").startswith(f"{self.root}/runs/")]


@dataclass
class Said:
    """What a command said."""

    code: int
    out: str
    err: str


def ended(process: "subprocess.Popen[str]", seconds: float = 120.0) -> Said:
    """Wait for a command, and take what it said."""
    try:
        out, err = process.communicate(timeout=seconds)
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
    return Said(process.returncode, out, err)


@pytest.fixture
def place(cluster: Cluster, tmp_path: Path) -> Iterator[Site]:
    """An empty project on the cluster; afterwards its jobs are gone and all nodes are idle."""
    (tmp_path / "envspecs").mkdir()
    made = Site(tmp_path, cluster)
    made.recipe()
    made.site()
    try:
        yield made
    finally:
        cluster.empty()
        for pid in made.servers():  # what a test crashed on purpose
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def wait_for() -> Callable[..., None]:
    """Wait for something to become true, and say what did not."""

    def wait(condition: Callable[[], bool], what: str, seconds: float = 60.0) -> None:
        until = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < until, f"waited {seconds:.0f} s for {what}"
            time.sleep(0.1)

    return wait

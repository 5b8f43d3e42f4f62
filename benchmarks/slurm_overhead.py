#!/usr/bin/env python3
"""What running on Slurm costs beside running here, on a real one-host cluster, and how that grows with a campaign.

    python benchmarks/slurm_overhead.py             overhead a cell over 1, 2 and 4 nodes; needs root and Slurm
    python benchmarks/slurm_overhead.py --scale     instead: what a campaign of 10,000 cells weighs

The cells are bound by the simulated server's clock, not by CPU, so that four "nodes" on two cores do not disturb each
other much. On a busy machine read the ratios. What was printed on which machine stands in docs/scale.md.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from slurm.cluster import Cluster, missing

from harness.recipe.decide import decide
from harness.recipe.site import Site, Slurm
from harness.run import store
from harness.run.executors.slurm import orders, queue, submit
from harness.run.executors.slurm.pieces import batches, divide
from harness.run.resume import fates

CELLS = 8
RECIPE = """\
recipe: overhead
question: What does a cell cost beside its measurement?
server: {{engine: simulated}}
arms:
{arms}
workload: {{prompts: "synthetic:words=8,count=64", max_tokens: 64}}
warmup: {{requests: 1, level_requests: 0}}
sweep: {{concurrency: {levels}, requests: 4}}
"""


def recipe(folder: Path, arms: int, levels: int) -> Path:
    """Independent arms; a level of C=1 is 4 requests of 64 steps of 8 ms, 2 s of the server's own time."""
    lines = "\n".join(
        f"  a{number:04d}: {{server: {{args: {{step-ms: 8, seed: {number}}}}}}}" for number in range(arms)
    )
    path = folder / "overhead.yaml"
    path.write_text(RECIPE.format(arms=lines, levels=list(range(1, levels + 1))))
    return path


def took(action: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds, and what came out."""
    began = time.monotonic()
    found = action()
    return time.monotonic() - began, found


def campaign(folder: Path, cluster: Cluster, *words: str) -> float:
    """One run of the recipe, from the command line; returns its wall time."""
    environment = {**os.environ, **cluster.environment()}
    command = [sys.executable, "-m", "harness", "run", "overhead.yaml", "--no-publish", "-q", *words]
    seconds, done = took(
        lambda: subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    )
    if done.returncode != 0:
        raise SystemExit(done.stderr)
    return seconds


def overhead(folder: Path, cluster: Cluster) -> list[dict[str, Any]]:
    """The same cells here, and on 1, 2 and 4 nodes at once."""
    recipe(folder, CELLS, 1)
    rows = [{"where": "here", "at_once": 1, "wall_s": campaign(folder, cluster, "--name", "here")}]
    for nodes in (1, 2, 4):
        site = {"slurm": {"partition": "all", "poll_s": 0.5, "parallel": nodes}}
        (folder / "site.yaml").write_text(json.dumps(site))
        words = ("--on", "slurm", "--site", "site.yaml", "--name", f"slurm-{nodes}")
        rows.append({"where": "slurm", "at_once": nodes, "wall_s": campaign(folder, cluster, *words)})
    measured = 4 * 64 * 0.008
    for row in rows:
        row["overhead_s_per_cell"] = row["wall_s"] * row["at_once"] / CELLS - measured
        row["speed_up"] = rows[0]["wall_s"] / row["wall_s"]
    return rows


def scale(folder: Path, cluster: Cluster) -> dict[str, Any]:
    """What a campaign of 1,000 launches with 10 levels each weighs, for the scheduler, the file system and us."""
    path, site = recipe(folder, 1000, 10), Site(folder / "none")
    planning_s, (_, plan) = took(lambda: decide(path, site))
    run = store.create(folder / "runs", plan, name="large")
    reading_s, _ = took(run.plan)
    fates_s, _ = took(lambda: fates(plan, [run]))
    names = [launch.name for launch in plan.launches]
    preparing_s, prepared = took(lambda: submit.prepare(plan, names, site, run.path))
    facts = {"variables": {}, "client_cpus": None, "grace_s": 60.0}
    submission = orders.begin(run, "01", batches(divide(plan, names, Slurm())), prepared.token, facts)
    os.environ |= cluster.environment()
    script = folder / "job.sh"
    script.write_text(
        f"#!/bin/sh\n#SBATCH --job-name={queue.PREFIX}x\n#SBATCH --comment={folder}\n#SBATCH --array=0-999%4\n"
        "#SBATCH --hold\nsleep 1\n"
    )
    submitting_s, job = took(lambda: queue.submit(script))
    asking_s, seen = took(lambda: queue.look([job]))
    cancelling_s, _ = took(lambda: queue.cancel([job]))
    return {
        "cells": sum(1 for _ in plan.cells()),
        "plan_mb": (run.path / "plan.json").stat().st_size / 1e6,
        "order_mb": (submission.path / "order.json").stat().st_size / 1e6,
        "planning_s": planning_s,
        "reading_the_plan_s": reading_s,
        "looking_for_finished_cells_s": fates_s,
        "preparing_s": preparing_s,
        "submitting_1000_tasks_s": submitting_s,
        "asking_for_1000_tasks_s": asking_s,
        "tasks_seen": len(seen),
        "cancelling_1000_tasks_s": cancelling_s,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", action="store_true")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if reason := missing():
        print(f"no Slurm here: {reason}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="harness-slurm-") as name:
        folder = Path(name)
        (folder / "envspecs").mkdir()
        (folder / "cluster").mkdir()
        cluster = Cluster(folder / "cluster")
        os.chdir(folder)
        try:
            cluster.start()
            found = scale(folder, cluster) if arguments.scale else {}
            rows = overhead(folder, cluster) if not arguments.scale else []
        finally:
            cluster.stop()
    if arguments.json:
        print(json.dumps({"overhead": rows, "scale": found}, indent=1))
        return 0
    for label, value in found.items():
        print(f"{label.replace('_', ' '):40} {value:10.4g}")
    for row in rows:
        print(
            f"{row['where']:6} {row['at_once']} at once: {row['wall_s']:6.1f} s for {CELLS} cells,"
            f" {row['overhead_s_per_cell']:5.2f} s a cell beside its measurement, {row['speed_up']:4.2f} x as fast"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())

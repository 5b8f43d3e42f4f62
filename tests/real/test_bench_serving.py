"""SGLang's own load client, out of its wheel, as a peer of ours: two clients, one server whose speed is a formula.

Nothing of SGLang's engine starts: `sglang.benchmark.serving` (`sglang.bench_serving` of old) asks the simulated server.
Its numbers carry our names under these formulas: its TPOT is our `tpot_naive`, (E2E - TTFT) / (n - 1); its ITL is our
chunk gap; its throughput is our whole-run one; its E2E and TTFT begin before the connection is open, ours behind it,
and its E2E ends with `[DONE]`.
"""

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from servers import Running, serving

from harness.engines import get
from harness.engines.engine import Model, Sampling
from harness.env.build import Built
from harness.load.client import Load, Target, run_level
from harness.load.transcript import Prepared
from harness.stats import metrics
from harness.stats.level import LevelResult

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

REQUESTS, CONCURRENCY, TOKENS = 32, 4, 32
STEP_MS, SEQUENCE_MS = 40, 2
EXTRA_S = 0.005  # a connection and a `[DONE]` on loopback, on a busy machine
PLAIN = {"step-ms": STEP_MS, "sequence-ms": SEQUENCE_MS, "max-running-requests": 64}
SPECULATING = {**PLAIN, "speculative-tokens": 3, "speculative-acceptance": 1.0}


def theirs(env: Built, model: Path, server: Running, out: Path) -> dict[str, Any]:
    """What SGLang's client says; seconds in place of its milliseconds."""
    options = {
        "backend": "sglang-oai", "base-url": f"http://127.0.0.1:{server.port}", "dataset-name": "random-ids",
        "model": "sim", "tokenizer": model, "num-prompts": REQUESTS, "random-input-len": 32,
        "random-output-len": TOKENS, "random-range-ratio": 1.0, "max-concurrency": CONCURRENCY, "warmup-requests": 1,
        "output-file": out, "seed": 1,
    }  # fmt: skip
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    done = subprocess.run(
        [env.python, "-m", "sglang.benchmark.serving", *words, "--disable-tqdm"],
        env={**os.environ, **env.variables, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(out.read_text().splitlines()[-1])
    return {name.replace("_ms", "_s"): value / 1e3 if name.endswith("_ms") else value for name, value in said.items()}


def ours(server: Running) -> LevelResult:
    """The same load by our client."""
    path, body = server.engine.request("completions", "hello " * 20, Sampling(TOKENS), "sim")
    asked = [
        Prepared(f"p{n}", path, json.dumps(body).encode(), dialect="completions", requested_tokens=TOKENS)
        for n in range(REQUESTS)
    ]
    load = Load(concurrency=CONCURRENCY, requests=REQUESTS)
    trace = run_level(Target("127.0.0.1", server.port), load, asked)
    level: Mapping[str, Any] = {"mode": "closed", "concurrency": CONCURRENCY, "requests": REQUESTS}
    return metrics.summarise(trace, metrics.Identity("0" * 64, "a", "01-a"), level)


@pytest.mark.parametrize("args", [PLAIN, SPECULATING], ids=["plain", "speculating"])
def test_two_clients_agree_on_a_server_whose_speed_is_known(
    args: Mapping[str, Any], sglang_env: Built, tiny_llama: Any, tmp_path: Path
) -> None:
    model = tiny_llama(sglang_env)
    with serving(get("simulated"), tmp_path, model=Model("", "sim"), args=args) as server:
        peer = theirs(sglang_env, model, server, tmp_path / "out.jsonl")
        mine = ours(server)

    assert (peer["completed"], peer["total_output_tokens"]) == (REQUESTS, REQUESTS * TOKENS)
    assert (mine.ok, mine.output_tokens) == (REQUESTS, REQUESTS * TOKENS)
    means = {name: summary.mean for name, summary in mine.metrics.items() if summary.mean is not None}
    assert peer["mean_tpot_s"] == pytest.approx(means["tpot_naive_s"], rel=0.03)
    assert peer["mean_itl_s"] == pytest.approx(means["chunk_gap_s"], rel=0.03)
    # Its duration ends when its own loop has read the last answer, which a busy machine delays.
    assert peer["output_throughput"] == pytest.approx(mine.throughput.output_tok_s_whole, rel=0.1)
    assert 0 <= peer["mean_ttft_s"] - means["ttft_s"] < EXTRA_S + 0.1 * means["ttft_s"]
    assert peer["mean_e2e_latency_s"] == pytest.approx(means["e2e_s"], rel=0.03)
    # And both have the server's own figure: a step of four sequences takes 40 + 4 x 2 ms; where four tokens come of it
    # (three drafts that are always right, and one), the gap between chunks is the step and TPOT a quarter of it.
    step_s = (STEP_MS + CONCURRENCY * SEQUENCE_MS) / 1e3
    assert means["chunk_gap_s"] == pytest.approx(step_s, rel=0.03)
    if args is PLAIN:
        assert means["tpot_naive_s"] == pytest.approx(step_s, rel=0.03)
    else:
        assert means["tpot_naive_s"] < step_s / 3

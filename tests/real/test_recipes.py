"""The recipes that run real SGLang and vLLM, end to end through the command line: plan, launch, measure, compare."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.env.build import Built

pytestmark = [pytest.mark.real, pytest.mark.timeout(1500)]

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_ngram_against_baseline_is_measured_end_to_end(
    engine: str, request: pytest.FixtureRequest, tiny_llama: Callable[[Built], Path], tmp_path: Path
) -> None:
    env: Built = request.getfixturevalue(f"{engine}_env")
    site = tmp_path / "site.yaml"
    site.write_text(f"variables: {{MODELS: {tiny_llama(env).parent}}}\n")

    answer = subprocess.run(
        [sys.executable, "-m", "harness", "run", f"recipes/{engine}-cpu-ngram.yaml", "--no-publish", "--out", tmp_path],
        cwd=ROOT,
        env={**os.environ, "HARNESS_SITE": str(site)},
        capture_output=True,
        text=True,
        timeout=1400,
        check=False,
    )

    # A suspect level (a busy machine, eight requests) is no failure of the road: 6 says so.
    assert answer.returncode in {0, 6}, answer.stderr[-3000:]
    levels = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("*/launches/*/levels/*/level.json"))]
    assert {(level["arm"], level["level"]["concurrency"]) for level in levels} == {
        ("baseline", 1), ("baseline", 4), ("ngram", 1), ("ngram", 4),
    }  # fmt: skip
    for level in levels:
        reasons = {reason["code"] for reason in level["verdict"]["reasons"]}
        assert level["ok"] == level["requests"] == 8, level["failures"]
        assert level["output_tokens"] == 8 * 32
        # What the server's own log and counters say agrees with the client, and a chat template is no warm cache.
        wrong = {"feature-not-engaged", "wrong-length", "server-restarted", "counts-disagree", "cached-prompt"}
        assert not reasons & wrong, level["verdict"]
        if engine == "sglang" and level["arm"] == "baseline" and level["level"]["concurrency"] == 1:
            # Nine requests of 32 tokens are seven decode lines of 40 steps, each with the rate since the one before.
            logged = level["server"]["log"]
            assert logged["output_tok_s"] == pytest.approx(logged["client_tok_s"], rel=0.02 + logged["slack"])
        if engine == "sglang":
            assert level["server"]["template_tokens"] > 0

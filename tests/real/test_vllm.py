"""vLLM 0.32.0 itself, on a CPU: started, asked, measured and stopped by the product's own adapter and supervisor.

Three starts of one to two minutes each; tests that share a server are ordered, the one that ends it comes last.
"""

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests
from lane import PROMPTS, START_S, Real, assert_lossless_up_to_ties, finish_of, serving, text_of, usage_of

from harness.engines import get, openai, vllm
from harness.engines.engine import Model, Sampling, Server
from harness.env.build import Built
from harness.load.client import Load, Target, run_level
from harness.load.transcript import Prepared
from harness.run import diagnose, launch, logs, ports, supervise

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]

ARGS = {"max-model-len": 2048, "max-num-seqs": 16, "dtype": "bfloat16", "enforce-eager": True}
NGRAM = {
    "speculative-config.method": "ngram",
    "speculative-config.num_speculative_tokens": 4,
    "speculative-config.prompt_lookup_max": 3,
}
TOKENS = 48

TinyLlama = Callable[[Built], Path]


@pytest.fixture(scope="module")
def ngram(vllm_env: Built, tiny_llama: TinyLlama, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Real]:
    folder = tmp_path_factory.mktemp("vllm-ngram")
    with serving(vllm_env, tiny_llama(vllm_env), folder, engine="vllm", args={**ARGS, **NGRAM}) as real:
        yield real


@pytest.fixture(scope="module")
def ngram_texts(ngram: Real) -> list[str]:
    """Greedy answers with speculation, kept for the comparison with those without."""
    return [text_of(ngram.generate(prompt, TOKENS)) for prompt in PROMPTS]


def test_it_becomes_ready_through_the_milestones_the_adapter_names(ngram: Real) -> None:
    met = [reached.name for reached in ngram.launched.milestones]

    assert met == [
        "architecture resolved", "engine starting", "loading weights", "weights loaded", "cache sized", "engine ready",
        "serving", "ready",
    ]  # fmt: skip


def test_speculation_engaged_by_counters_and_effective_configuration(ngram: Real) -> None:
    before = ngram.metrics()

    ngram.generate("Write a function that returns the largest of a list of numbers.", 200)

    observed = ngram.observed(before)
    found = ngram.launched.engine.evidence("speculation", observed)
    assert found.engaged is True, found
    assert found.lines[0] == "speculative_config.method = ngram"
    length = ngram.acceptance(observed.deltas)
    assert length is not None
    assert 1.0 < length <= 5.0
    assert ngram.launched.engine.evidence("cuda-graph", observed).engaged is False
    assert ngram.launched.engine.evidence("async-scheduling", observed).engaged is False


def test_the_effective_configuration_is_the_resolved_one_and_holds_no_port(ngram: Real) -> None:
    launched = ngram.launched
    told = launched.engine.effective(launch.answers(launched.engine, launched.server))

    assert told["version"] == "0.32.0"
    assert told["speculative_config.num_speculative_tokens"] == 4
    assert told["scheduler_config.max_num_seqs"] == 16
    assert told["model_config.max_model_len"] == 2048
    assert str(launched.port) not in {str(value) for value in told.values()}


def test_the_metrics_of_this_release_are_the_ones_the_adapter_names(ngram: Real) -> None:
    seen = ngram.metrics()

    assert [name for name in vllm.metric_names(speculation=True) if name not in seen] == []


def test_every_chunk_says_its_tokens_and_some_carry_several(ngram: Real) -> None:
    events = [event for event in ngram.generate(PROMPTS[1], 96) if isinstance(event, dict)]
    carried = [len(event["choices"][0].get("token_ids") or ()) for event in events if event["choices"]]

    assert sum(carried) == usage_of(events)["completion_tokens"] == 96
    assert max(carried) > 1
    assert finish_of(events) == "length"


def test_a_flush_is_proven_by_the_next_requests_cached_tokens(ngram: Real) -> None:
    # Blocks of 128 tokens are cached, so the prompt must be longer than one.
    prompt = "The batch holds those that are being worked on; the cache holds what was computed. " * 8
    ngram.generate(prompt, 4)
    warm = usage_of(ngram.generate(prompt, 4))["prompt_tokens_details"]["cached_tokens"]

    status, body = ngram.flush()

    cold = usage_of(ngram.generate(prompt, 4))["prompt_tokens_details"]
    assert warm > 0
    assert openai.flushed(status, body)
    assert (cold or {"cached_tokens": 0})["cached_tokens"] == 0


def test_a_prompt_longer_than_the_context_is_a_400_of_its_own_shape(ngram: Real) -> None:
    path, body = ngram.request("word " * 4000, 4)

    answer = requests.post(ngram.url + path, json=body, timeout=60)

    assert answer.status_code == 400
    assert "maximum context length is 2048 tokens" in answer.json()["error"]["message"]


def test_an_unknown_model_name_is_refused(ngram: Real) -> None:
    path, body = ngram.request(PROMPTS[0], 2)

    assert requests.post(ngram.url + path, json={**body, "model": "another"}, timeout=60).status_code == 404


def test_stopping_ends_though_clients_hold_their_streams(ngram: Real, ngram_texts: list[str]) -> None:
    launched = ngram.launched
    assert launched.process is not None
    family = [psutil.Process(launched.process.pid), *psutil.Process(launched.process.pid).children(recursive=True)]
    path, body = ngram.request("Explain everything.", 1900)
    events: list[Any] = []

    def hold() -> None:
        try:
            events.extend(ngram.events(path, body))
        except requests.RequestException as error:
            events.append(error)

    first = threading.Event()

    def watch() -> None:
        with requests.post(ngram.url + path, json=body, stream=True, timeout=120) as answer:
            for line in answer.iter_lines():
                if line.startswith(b"data: {"):
                    first.set()

    holders = [threading.Thread(target=hold), threading.Thread(target=_quietly, args=(watch,))]
    for holder in holders:
        holder.start()
    assert first.wait(60)
    began = time.monotonic()

    report = launched.stop()

    for holder in holders:
        holder.join(60)
    assert report is not None
    assert report.ok, report.problems()
    # Left to itself it waits for the streams without end.
    assert time.monotonic() - began < 60
    assert not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in family)
    # The stream looks complete but for its finish reason: `[DONE]` proves nothing.
    assert finish_of(events) in {"abort", None}


def _quietly(act: Callable[[], None]) -> None:
    try:
        act()
    except requests.RequestException:
        return


def test_speculation_is_lossless_and_a_killed_parent_leaves_no_orphans(
    vllm_env: Built, tiny_llama: TinyLlama, tmp_path: Path, ngram_texts: list[str]
) -> None:
    with serving(vllm_env, tiny_llama(vllm_env), tmp_path, engine="vllm", args=ARGS) as real:
        before = real.metrics()
        texts = [text_of(real.generate(prompt, TOKENS)) for prompt in PROMPTS]
        observed = real.observed(before)
        process = real.launched.process
        assert process is not None
        api = psutil.Process(process.pid)
        family = api.children(recursive=True)
        assert any("EngineCore" in " ".join(child.cmdline()) for child in family)

        assert_lossless_up_to_ties(texts, ngram_texts)
        assert len(set(texts)) == len(PROMPTS)
        assert real.launched.engine.evidence("speculation", observed).engaged is False

        # The engine and its worker rename themselves and outlive their parent.
        api.kill()
        report = real.launched.stop()

        assert report is not None
        assert not report.survivors
        assert not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in family)


def test_an_engine_that_dies_at_its_first_request_is_told_by_cause(
    vllm_env: Built, tiny_llama: TinyLlama, tmp_path: Path
) -> None:
    args = {**ARGS, **NGRAM, "speculative-config.rejection_sample_method": "synthetic"}
    args["speculative-config.synthetic_acceptance_length"] = 2.0

    # Which is seen first is a race, the line in the log or the error inside the stream; the cause is told either way.
    with (
        pytest.raises(launch.LaunchFailed, match="synthetic acceptance on a CPU") as caught,
        serving(vllm_env, tiny_llama(vllm_env), tmp_path, engine="vllm", args=args),
    ):
        pass

    assert caught.value.report is not None
    assert not caught.value.report.survivors


def test_an_engine_that_dies_in_mid_run_fails_its_requests_and_is_told_by_cause(
    vllm_env: Built, tiny_llama: TinyLlama, tmp_path: Path
) -> None:
    """Nothing asks it before the load comes: requests under way get an error in their streams, later ones no answer."""
    args = {**ARGS, **NGRAM, "speculative-config.rejection_sample_method": "synthetic"}
    args["speculative-config.synthetic_acceptance_length"] = 2.0
    engine, port = get("vllm"), ports.choose_port("127.0.0.1", None)
    model = Model(str(tiny_llama(vllm_env)), "tiny")
    server = Server("vllm", "127.0.0.1", port, model, args, {**vllm_env.variables}, str(vllm_env.python))
    log = tmp_path / "server.log"
    process = supervise.start(engine.command(server), log=log, marker="crash/01", cwd=tmp_path, listens_on=[port])
    try:
        _await_healthy(port)
        path, body = engine.request("completions", PROMPTS[1] * 4, Sampling(64), "tiny")
        asked = [Prepared(f"p{n}", path, json.dumps(body).encode(), dialect="completions") for n in range(6)]
        load = Load(concurrency=2, requests=6, request_timeout_s=120)
        records = run_level(Target("127.0.0.1", port), load, asked).records
        ended = process.wait(120)
    finally:
        report = process.stop(engine.stop)

    assert [record.ok for record in records] == [False] * 6
    reasons = {record.reason for record in records}
    assert "error" in reasons  # HTTP 200, an error in the stream, and `[DONE]` behind it
    assert reasons <= {"error", "status", "connect", "disconnected", "ended early"}
    assert ended is not None  # it goes by itself
    assert not report.survivors
    death = diagnose.Death(ended, "measure")
    assert diagnose.explain(list(logs.read(log)), engine.signatures, death).name == "synthetic acceptance on a CPU"


def _await_healthy(port: int) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        with contextlib.suppress(requests.RequestException):
            if requests.get(f"http://127.0.0.1:{port}/health", timeout=5).ok:
                return
        time.sleep(0.5)
    raise AssertionError(f"vLLM was not ready within {START_S:.0f} s")


def test_a_bad_flag_is_told_by_name(vllm_env: Built, tiny_llama: TinyLlama, tmp_path: Path) -> None:
    with (
        pytest.raises(launch.LaunchFailed, match="bad flag") as caught,
        serving(vllm_env, tiny_llama(vllm_env), tmp_path, engine="vllm", args=ARGS, unchecked=("--bogus-flag", "1")),
    ):
        pass

    assert "unrecognized arguments: --bogus-flag 1" in str(caught.value)

"""SGLang 0.5.23 itself, on a CPU: started, asked, measured and stopped by the product's own adapter and supervisor.

Two starts of about two minutes each; tests that share a server are ordered, the one that ends it comes last.
"""

import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import requests
from lane import PROMPTS, Real, assert_lossless_up_to_ties, finish_of, serving, text_of, usage_of

from harness.engines import openai, sglang, sglang_log
from harness.env.build import Built
from harness.run import launch

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]

# Without --max-total-tokens it would size its cache from free memory: 17 GB here.
ARGS = {"device": "cpu", "context-length": 2048, "max-total-tokens": 32768, "max-running-requests": 16}
NGRAM = {"speculative-algorithm": "NGRAM", "speculative-num-draft-tokens": 4}
TOKENS = 48

TinyLlama = Callable[[Built], Path]


@pytest.fixture(scope="module")
def ngram(sglang_env: Built, tiny_llama: TinyLlama, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Real]:
    folder = tmp_path_factory.mktemp("sglang-ngram")
    with serving(sglang_env, tiny_llama(sglang_env), folder, engine="sglang", args={**ARGS, **NGRAM}) as real:
        yield real


@pytest.fixture(scope="module")
def ngram_texts(ngram: Real) -> list[str]:
    """Greedy answers with speculation, kept for the comparison with those without."""
    return [text_of(ngram.generate(prompt, TOKENS)) for prompt in PROMPTS]


def test_it_becomes_ready_through_the_milestones_the_adapter_names(ngram: Real) -> None:
    met = [reached.name for reached in ngram.launched.milestones]

    # No graphs on a CPU; the last two lines are written in either order of what they announce.
    assert met[:3] == ["arguments resolved", "process groups up", "loading weights"]
    assert {"weights loaded", "cache allocated", "memory planned", "ready"} <= set(met)
    assert ngram.launched.models["data"][0]["id"] == "tiny"


def test_speculation_engaged_by_metrics_log_and_effective_arguments(ngram: Real) -> None:
    before = ngram.metrics()

    events = ngram.generate("Write a function that returns the largest of a list of numbers.", 300)

    observed = ngram.observed(before)
    found = ngram.launched.engine.evidence("speculation", observed)
    assert found.engaged is True, found
    assert found.lines[0] == "speculative_algorithm = NGRAM"
    assert usage_of(events)["completion_tokens"] == 300
    # Decode lines are written every 40 steps: 300 tokens at four a step at most give one.
    lengths = [line.accept_length for line in sglang_log.decode_lines(observed.log)]
    assert lengths
    assert all(length is not None and 1.0 <= length <= 4.0 for length in lengths)
    # The CPU scheduler has no overlap with speculation, and says so.
    assert ngram.launched.engine.evidence("overlap-schedule", observed).engaged is False
    assert ngram.launched.engine.evidence("cuda-graph", observed).engaged is False


def test_acceptance_from_counters_is_the_servers_own_for_the_request(ngram: Real) -> None:
    before = ngram.metrics()

    events = ngram.generate("Explain what a queue does when the batch is full.", 64, "generate")

    told = [event for event in events if isinstance(event, dict)][-1]["meta_info"]
    deltas = ngram.observed(before).deltas
    assert deltas["sglang:generation_tokens_total"] == 64
    assert deltas["sglang:spec_verify_calls_total"] == told["spec_verify_ct"]
    assert ngram.acceptance(deltas) == pytest.approx(told["spec_accept_length"], abs=0.02)


def test_the_effective_configuration_is_the_resolved_one_and_holds_no_port(ngram: Real) -> None:
    launched = ngram.launched
    told = launched.engine.effective(launch.answers(launched.engine, launched.server))

    assert told["speculative_algorithm"] == "NGRAM"
    assert told["speculative_num_draft_tokens"] == 4
    assert told["attention_backend"] == "torch_native"
    assert told["max_total_num_tokens"] == 32768
    assert str(launched.port) not in {str(value) for value in told.values()}


def test_the_metrics_of_this_release_are_the_ones_the_adapter_names(ngram: Real) -> None:
    ngram.generate(PROMPTS[0], 8)
    seen = ngram.metrics()

    missing = [
        name
        for name in sglang.metric_names("0.5.23")
        if not any(sample == name or sample.startswith(f"{name}_") for sample in seen)
        # Written at the first retraction or abort only.
        and name not in {"sglang:num_aborted_requests_total"}
    ]
    assert missing == []


def test_a_flush_is_proven_by_the_next_requests_cached_tokens(ngram: Real) -> None:
    prompt = "The batch holds those that are being worked on; the cache holds what was computed."
    ngram.generate(prompt, 4)
    warm = usage_of(ngram.generate(prompt, 4))["prompt_tokens_details"]["cached_tokens"]

    status, body = ngram.flush()

    cold = usage_of(ngram.generate(prompt, 4))["prompt_tokens_details"]
    assert warm > 0
    assert openai.flushed(status, body)
    assert (cold or {"cached_tokens": 0})["cached_tokens"] == 0


def test_chunks_are_not_tokens_and_a_chat_stream_begins_with_a_role(ngram: Real) -> None:
    events = [event for event in ngram.generate(PROMPTS[2], TOKENS, "chat") if isinstance(event, dict)]
    choices = [event["choices"][0] for event in events if event["choices"]]
    spoken = [choice for choice in choices if choice["delta"].get("content")]

    assert choices[0]["delta"]["role"] == "assistant"
    assert not choices[0]["delta"]["content"]
    assert usage_of(events)["completion_tokens"] == TOKENS
    assert len(spoken) < TOKENS  # several tokens a chunk
    assert finish_of(events) == "length"


def test_a_prompt_longer_than_the_context_is_a_400_of_its_own_shape(ngram: Real) -> None:
    path, body = ngram.request("word " * 4000, 4)

    answer = requests.post(ngram.url + path, json=body, timeout=60)

    assert answer.status_code == 400
    assert "longer than the model's context length" in answer.json()["message"]
    assert "error" not in answer.json()


def test_unknown_fields_and_an_unknown_model_name_are_not_refused(ngram: Real) -> None:
    path, body = ngram.request(PROMPTS[0], 2)

    answer = requests.post(ngram.url + path, json={**body, "model": "another", "no_such_field": 1}, timeout=60)

    assert answer.status_code == 200


def test_stopping_with_a_stream_open_ends_everything_within_the_policy(ngram: Real, ngram_texts: list[str]) -> None:
    launched = ngram.launched
    assert launched.process is not None
    family = [psutil.Process(launched.process.pid), *psutil.Process(launched.process.pid).children(recursive=True)]
    path, body = ngram.request("Explain everything.", 1900)
    answer = requests.post(ngram.url + path, json=body, stream=True, timeout=60)
    next(answer.iter_lines())
    # The client closes first: else the server drains the stream to its last token.
    answer.close()

    report = launched.stop()

    assert report is not None
    assert report.ok, report.problems()
    assert not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in family)


def test_speculation_is_lossless_and_the_baseline_has_none(
    sglang_env: Built, tiny_llama: TinyLlama, tmp_path: Path, ngram_texts: list[str]
) -> None:
    with serving(sglang_env, tiny_llama(sglang_env), tmp_path, engine="sglang", args=ARGS) as real:
        before = real.metrics()
        texts = [text_of(real.generate(prompt, TOKENS)) for prompt in PROMPTS]
        observed = real.observed(before)

        assert_lossless_up_to_ties(texts, ngram_texts)
        assert len(set(texts)) == len(PROMPTS)
        assert real.launched.engine.evidence("speculation", observed).engaged is False
        assert real.acceptance(observed.deltas) is None
        _hold_a_stream_open_and_stop(real)


def _hold_a_stream_open_and_stop(real: Real) -> None:
    """With a client that never leaves, the stop still ends: signals, then force, then proof."""
    path, body = real.request("Explain everything.", 1900)
    seen: list[object] = []

    def hold() -> None:
        try:
            seen.extend(real.events(path, body))
        except requests.RequestException as error:
            seen.append(error)

    client = threading.Thread(target=hold)
    client.start()
    while not seen and client.is_alive():
        time.sleep(0.05)
    report = real.launched.stop()
    client.join(60)

    assert report is not None
    assert report.ok, report.problems()
    assert not client.is_alive()


def test_the_stand_in_kernels_do_what_sglangs_own_code_says(sglang_env: Built) -> None:
    script = Path(__file__).with_name("check_kernels.py")

    answer = subprocess.run(
        [sglang_env.python, script],
        env={**os.environ, **sglang_env.variables},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )

    assert answer.returncode == 0, answer.stderr[-2000:]
    assert answer.stdout.strip().endswith("200 batches of 3 trees agree")


def test_a_bad_flag_is_told_by_name(sglang_env: Built, tiny_llama: TinyLlama, tmp_path: Path) -> None:
    with (
        pytest.raises(launch.LaunchFailed, match="bad flag") as caught,
        serving(
            sglang_env, tiny_llama(sglang_env), tmp_path, engine="sglang", args=ARGS, unchecked=("--bogus-flag", "1")
        ),
    ):
        pass

    assert "unrecognized arguments: --bogus-flag 1" in str(caught.value)

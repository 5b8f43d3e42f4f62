"""The vLLM adapter. Log lines are written by hand in the formats of the 0.32.0 and 0.33.0 sources."""

# ruff: noqa: E501 - log lines are as long as servers write them

import re
from dataclasses import asdict, replace
from typing import Any

import pytest

from harness.engines import get, openai, vllm
from harness.engines.engine import Model, Observed, Sampling, Server
from harness.errors import InputError
from harness.load.observe import named

ENGINE = get("vllm")
SERVER = Server("vllm", "127.0.0.1", 8000, Model("/models/tiny", "tiny"), python="/env/bin/python")
INFO = "/server_info?config_format=json"


def observed(log: str = "", config: dict[str, Any] | None = None, **deltas: float) -> Observed:
    answers = {} if config is None else {INFO: {"vllm_config": config}}
    return Observed(answers, log, {f"vllm:{name}": value for name, value in deltas.items()})


def test_a_server_is_the_console_script_beside_the_environments_python() -> None:
    args = {
        "max-model-len": 2048,
        "enforce-eager": True,
        "speculative-config.method": "ngram",
        "middleware": ["a", "b"],
    }

    command = ENGINE.command(replace(SERVER, args=args, variables={"VLLM_CPU_KVCACHE_SPACE": "1"}))

    assert command.argv == (
        "/env/bin/vllm", "serve", "/models/tiny", "--served-model-name", "tiny", "--host", "127.0.0.1", "--port", "8000",
        "--enable-prompt-tokens-details", "--max-model-len", "2048", "--enforce-eager",
        "--speculative-config.method", "ngram", "--middleware", "a", "b",
    )  # fmt: skip
    # Development mode serves the effective configuration and the cache reset.
    assert command.variables == {
        "VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1",
    }  # fmt: skip


def test_a_recipe_may_switch_development_mode_off() -> None:
    command = ENGINE.command(replace(SERVER, variables={"VLLM_SERVER_DEV_MODE": "0"}))

    assert command.variables["VLLM_SERVER_DEV_MODE"] == "0"


def test_what_the_harness_decides_is_refused_in_a_recipe() -> None:
    with pytest.raises(InputError, match="`--port` of vllm is set by the harness"):
        ENGINE.command(replace(SERVER, args={"port": 1}))


def test_several_nodes_need_all_three_arguments() -> None:
    with pytest.raises(InputError, match="`nnodes: 2` needs `node-rank`, `master-addr` too"):
        ENGINE.command(replace(SERVER, args={"nnodes": 2}))


@pytest.mark.parametrize(("server", "missing"), [({"model": None}, "model"), ({"python": None}, "environment")])
def test_a_server_without_model_or_environment_is_refused(server: dict[str, None], missing: str) -> None:
    with pytest.raises(InputError, match=f"needs an? {missing}"):
        ENGINE.command(replace(SERVER, **server))  # type: ignore[arg-type]


def test_requests_ask_for_the_tokens_of_every_chunk() -> None:
    path, body = ENGINE.request("completions", "hello", Sampling(32, seed=7), "tiny")

    assert path == "/v1/completions"
    assert body["return_token_ids"] is True
    assert (body["max_tokens"], body["ignore_eos"], body["seed"]) == (32, True, 7)


def test_there_is_no_native_dialect() -> None:
    with pytest.raises(InputError, match="dialect `generate`"):
        ENGINE.request("generate", "hello", Sampling(1), "tiny")


def test_the_effective_configuration_leaves_out_what_differs_between_launches() -> None:
    config = {
        "scheduler_config": {"max_num_seqs": 16}, "instance_id": "17959",
        "parallel_config": {"master_port": 29501, "tensor_parallel_size": 1},
        "speculative_config": {"method": "ngram", "target_model_config": {"model": "/models/tiny"}},
    }  # fmt: skip
    answers = {
        INFO: {"vllm_config": config, "vllm_env": {"VLLM_USE_V2": True, "VLLM_API_KEY": "secret", "VLLM_PORT": 3}},
        "/version": {"version": "0.32.0"},
    }

    assert ENGINE.effective(answers) == {
        "scheduler_config.max_num_seqs": 16,
        "parallel_config.tensor_parallel_size": 1,
        "speculative_config.method": "ngram",
        "env.VLLM_USE_V2": True,
        "version": "0.32.0",
    }
    assert ENGINE.effective({}) == {}


def test_speculation_engaged_when_drafted_tokens_were_accepted() -> None:
    drafted = {"spec_decode_num_draft_tokens_total": 100.0}
    on = ENGINE.evidence("speculation", observed(**drafted, spec_decode_num_accepted_tokens_total=40.0))
    assert on.engaged is True
    assert on.lines == ("vllm:spec_decode_num_draft_tokens_total: +100, accepted +40",)

    assert ENGINE.evidence("speculation", observed(**drafted)).engaged is False
    assert ENGINE.evidence("speculation", observed(config={"speculative_config": None})).engaged is False
    assert ENGINE.evidence("speculation", observed()).engaged is None


ENGAGEMENT = [
    ("cuda-graph", "INFO 11-29 [gpu_model_runner.py:6517] Graph capturing finished in 12 secs, took 0.41 GiB", True),
    ("cuda-graph", "WARNING [vllm.py:1703] Enforce eager set, disabling torch.compile, CUDAGraphs, and JIT kernel warmup.", False),
    ("pcie-ipc-allreduce", "Initialized FlashInfer PCIe IPC all-reduce for TP8, hidden_dim=6144, max", True),
    ("pcie-ipc-allreduce", "FlashInfer PCIe IPC all-reduce was requested but this FlashInfer build does not provide", False),
    ("custom-allreduce", "Custom allreduce is disabled because it's not supported on more than two PCIe-only GPUs.", False),
    ("nccl-p2p", "NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/IPC", True),
    ("nccl-p2p", "NCCL INFO Channel 00/0 : 0[0] -> 1[1] via SHM/direct/direct", False),
    ("no-such-feature", "", None),
]  # fmt: skip


@pytest.mark.parametrize(("feature", "log", "engaged"), ENGAGEMENT)
def test_a_feature_engaged_only_if_the_log_says_so(feature: str, log: str, engaged: bool | None) -> None:
    assert ENGINE.evidence(feature, observed(log)).engaged is engaged


def test_the_effective_configuration_judges_graphs_and_scheduling() -> None:
    assert (
        ENGINE.evidence("cuda-graph", observed(config={"compilation_config": {"cudagraph_mode": 0}})).engaged is False
    )
    assert (
        ENGINE.evidence("async-scheduling", observed(config={"scheduler_config": {"async_scheduling": False}})).engaged
        is False
    )
    assert ENGINE.evidence("prefix-cache", observed(prefix_cache_hits_total=0)).engaged is False


def test_every_feature_can_be_judged_from_nothing() -> None:
    assert {ENGINE.evidence(feature, observed()).engaged for feature in ENGINE.features} == {None}


def test_acceptance_length_is_one_and_what_was_accepted_per_draft() -> None:
    # vLLM's own definition, v1/spec_decode/metrics.py: 1 + accepted / drafts. 668 accepted of 1360 drafts of three.
    deltas = {"vllm:spec_decode_num_drafts_total": 1360.0, "vllm:spec_decode_num_accepted_tokens_total": 668.0}

    assert named(asdict(ENGINE.counters), deltas, {})["acceptance_length"] == pytest.approx(1 + 668 / 1360)
    assert "acceptance_length" not in named(asdict(ENGINE.counters), {}, {})


def test_a_flush_is_believed_only_when_it_says_so() -> None:
    assert openai.flushed(200, '{"success":true}') is True
    assert openai.flushed(200, '{"success": false}') is False
    assert openai.flushed(404, '{"detail":"Not Found"}') is False


def test_the_counters_are_metrics_of_the_release() -> None:
    counters = ENGINE.counters

    assert {counters.prompt_tokens, counters.generated_tokens, counters.drafts, counters.accepted_tokens} <= set(
        vllm.metric_names(speculation=True)
    )


DEATHS = [
    ("pydantic_core._pydantic_core.ValidationError: 1 validation error for SpeculativeConfig", "bad speculation"),
    ("AssertionError: Synthetic acceptance not supported with CPU sampling", "synthetic acceptance on a CPU"),
    ("importlib.metadata.PackageNotFoundError: No package metadata was found for vllm", "version not found"),
    ("ValueError: No available memory for the cache blocks. Try increasing", "no room for the cache"),
    ("RuntimeError: Engine core initialization failed. See root cause above.", "engine did not start"),
    ("vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.", "engine died"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "name"), DEATHS)
def test_the_first_signature_that_matches_names_the_death(line: str, name: str) -> None:
    found = [signature.name for signature in ENGINE.signatures if re.search(signature.regex, line)]

    assert found[:1] == [name]


def test_milestones_are_met_in_order_by_a_real_starts_lines() -> None:
    log = [
        "INFO [model.py:733] Resolved architecture: LlamaForCausalLM",
        "INFO [core.py:133] Initializing a V1 LLM engine (v0.32.0) with config: model='/m'",
        "INFO [cpu_model_runner.py:68] Starting to load model /m...", "INFO [default_loader.py:501] Loading weights took 0.01 seconds",
        "INFO [kv_cache_utils.py:2327] CPU KV cache size: 524,288 tokens, Maximum concurrency", "INFO Graph capturing finished in 3 secs",
        "INFO [core.py:402] init engine (profile, create kv cache, warmup model) took 1.78 s",
        "INFO [entry.py:140] Starting vLLM server on http://127.0.0.1:8000", "INFO:     Application startup complete.",
    ]  # fmt: skip

    met = [next(i for i, line in enumerate(log) if re.search(m.regex, line)) for m in ENGINE.milestones]

    assert met == list(range(len(log)))

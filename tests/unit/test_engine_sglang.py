"""The SGLang adapter. Log lines are written by hand in the formats of the 0.5.9 and 0.5.23 sources."""

# ruff: noqa: E501 - log lines are as long as servers write them

import re
from dataclasses import asdict, replace
from typing import Any

import pytest

from harness.engines import get, openai, sglang, sglang_log
from harness.engines.engine import Model, Observed, Sampling, Server
from harness.errors import InputError
from harness.load.observe import named

ENGINE = get("sglang")
SERVER = Server("sglang", "127.0.0.1", 30000, Model("/models/kimi", "kimi"), python="/env/bin/python")

# 0.5.9: scheduler_metrics_mixin.py; 0.5.23: metrics_reporter.py (also seen on a running server).
OLD = """\
[2026-03-01 10:00:01 TP0] Decode batch, #running-req: 8, #token: 4096, token usage: 0.12, accept len: 2.41, accept rate: 0.60, cuda graph: True, gen throughput (token/s): 512.30, #queue-req: 2
[2026-03-01 10:00:05 TP0] Decode batch [120], #running-req: 3, #full token: 900, full token usage: 0.03, #swa token: 300, swa token usage: 0.01, cuda graph: False, gen throughput (token/s): 80.00, #queue-req: 0
"""
NEW = """\
[2026-11-01 10:00:01] Decode batch, #running-req: 1, #token: 96, token usage: 0.00, accept len: 1.80, accept rate: 0.27, block accept len: 9.00, cpu graph: False, gen throughput (token/s): 80.72, #queue-req: 0
[2026-11-01 10:00:02] Prefill batch, #new-seq: 1, #new-token: 15, #cached-token: 0, token usage: 0.00, #running-req: 0, #queue-req: 0, cpu graph: False
"""


def observed(log: str = "", info: dict[str, Any] | None = None, **deltas: float) -> Observed:
    answers = {} if info is None else {"/server_info": info}
    return Observed(answers, log, {f"sglang:{name}": value for name, value in deltas.items()})


def test_the_seeds_baseline_becomes_the_command_line_it_was_run_with() -> None:
    args = {
        "tp": 8, "trust-remote-code": True, "cuda-graph-max-bs": 128, "disable-custom-all-reduce": True,
        "attention-backend": "flashinfer", "enable-flashinfer-allreduce-fusion": True,
    }  # fmt: skip

    command = ENGINE.command(replace(SERVER, args=args, variables={"NCCL_PROTO": "LL"}))

    assert command.argv == (
        "/env/bin/python", "-m", "sglang.launch_server", "--model-path", "/models/kimi", "--served-model-name", "kimi",
        "--host", "127.0.0.1", "--port", "30000", "--enable-metrics", "--enable-cache-report",
        "--tp", "8", "--trust-remote-code", "--cuda-graph-max-bs", "128", "--disable-custom-all-reduce",
        "--attention-backend", "flashinfer", "--enable-flashinfer-allreduce-fusion", "--random-seed", "0",
    )  # fmt: skip
    assert command.variables == {"NCCL_PROTO": "LL"}


def test_a_list_becomes_several_values_and_a_seed_of_the_recipe_wins() -> None:
    command = ENGINE.command(replace(SERVER, args={"cuda-graph-bs": [1, 2, 4], "random-seed": 7, "skip": None}))

    assert command.argv[-6:] == ("--cuda-graph-bs", "1", "2", "4", "--random-seed", "7")


def test_what_the_harness_decides_is_refused_in_a_recipe() -> None:
    with pytest.raises(InputError, match="2 faults") as caught:
        ENGINE.command(replace(SERVER, args={"port": 1, "model-path": "/x"}))

    assert "set by the harness" in str(caught.value)


def test_several_nodes_need_all_three_arguments() -> None:
    node = {"nnodes": 2, "node-rank": 1, "dist-init-addr": "10.0.0.1:5000"}
    assert "--dist-init-addr" in ENGINE.command(replace(SERVER, args=node)).argv

    with pytest.raises(InputError, match="`nnodes: 2` needs `dist-init-addr` too"):
        ENGINE.command(replace(SERVER, args={"nnodes": 2, "node-rank": 1}))


@pytest.mark.parametrize(("server", "missing"), [({"model": None}, "model"), ({"python": None}, "environment")])
def test_a_server_without_model_or_environment_is_refused(server: dict[str, None], missing: str) -> None:
    with pytest.raises(InputError, match=f"needs an? {missing}"):
        ENGINE.command(replace(SERVER, **server))  # type: ignore[arg-type]


def test_chat_completions_and_native_requests_pin_the_output_length() -> None:
    sampling = Sampling(64, temperature=0.0, seed=7)

    path, body = ENGINE.request("chat", "hello", sampling, "kimi")
    assert path == "/v1/chat/completions"
    assert body["messages"] == [{"role": "user", "content": "hello"}]
    assert (body["max_tokens"], body["ignore_eos"], body["seed"]) == (64, True, 7)
    assert body["stream_options"] == {"include_usage": True}

    assert ENGINE.request("generate", "hello", sampling, "kimi") == (
        "/generate",
        {
            "text": "hello",
            "sampling_params": {"max_new_tokens": 64, "temperature": 0.0, "sampling_seed": 7, "ignore_eos": True},
            "stream": True,
        },
    )


def test_the_effective_configuration_leaves_out_what_differs_between_launches() -> None:
    info = {
        "attention_backend": "flashinfer", "port": 30000, "nccl_port": 31999, "random_seed": 42, "host": "0.0.0.0",
        "launch_command": "--port 30000", "status": "ready", "startup_time": {"load_weight": 3.1},
        "api_key": "secret", "cuda_graph_config": {"decode": {"max_bs": 32}},
        "internal_states": [{"last_gen_throughput": 12.5, "effective_max_running_requests_per_dp": 48}],
    }  # fmt: skip

    told = ENGINE.effective({"/server_info": info, "/model_info": {"model_type": "kimi_k25"}})

    assert told == {
        "attention_backend": "flashinfer",
        "cuda_graph_config.decode.max_bs": 32,
        "effective_max_running_requests_per_dp": 48,
        "model.model_type": "kimi_k25",
    }
    # 0.5.9 also knows the older path.
    assert ENGINE.effective({"/get_server_info": {"tp_size": 8}}) == {"tp_size": 8}
    assert ENGINE.effective({}) == {}


def test_decode_lines_of_both_releases_are_read() -> None:
    first, second = sglang_log.decode_lines(OLD)

    assert first == sglang_log.DecodeLine(8, 2, 512.30, True, 2.41, 0.60)
    assert second == sglang_log.DecodeLine(3, 0, 80.0, False, None, None)
    assert list(sglang_log.decode_lines(NEW)) == [sglang_log.DecodeLine(1, 0, 80.72, False, 1.80, 0.27)]
    assert sglang_log.graph_share(OLD) == 0.5
    assert sglang_log.graph_share("nothing here") is None


def test_speculation_engaged_when_more_than_one_token_a_step_was_accepted() -> None:
    on = ENGINE.evidence("speculation", observed(OLD, {"speculative_algorithm": "EAGLE3"}))
    assert on.engaged is True
    assert on.lines == ("speculative_algorithm = EAGLE3", "accept len in 1 decode lines: 2.41 to 2.41")

    counted = observed(spec_verify_calls_total=30, generation_tokens_total=60)
    assert ENGINE.evidence("speculation", counted).engaged is True
    assert (
        ENGINE.evidence("speculation", observed(spec_verify_calls_total=30, generation_tokens_total=30)).engaged
        is False
    )
    assert ENGINE.evidence("speculation", observed(info={"speculative_algorithm": None})).engaged is False
    assert ENGINE.evidence("speculation", observed(spec_verify_calls_total=0)).engaged is False
    assert ENGINE.evidence("speculation", observed()).engaged is None


def test_spec_v2_is_told_by_the_log_of_0_5_9_and_by_the_arguments_of_0_5_23() -> None:
    on = "[..] Spec v2 is enabled for eagle/eagle3 speculative decoding and overlap schedule is turned on."
    off = "[..] Overlap scheduler is disabled when spec v2 is off or using unsupported speculative algorithm. You can"

    assert ENGINE.evidence("spec-v2", observed(on)).engaged is True
    assert ENGINE.evidence("spec-v2", observed(off)).engaged is False
    new = {"speculative_algorithm": "EAGLE3", "disable_overlap_schedule": False}
    assert ENGINE.evidence("spec-v2", observed(info=new)).engaged is True
    assert ENGINE.evidence("spec-v2", observed(info={"disable_overlap_schedule": False})).engaged is False


ENGAGEMENT = [
    ("cuda-graph", "Decode batch, #running-req: 1, cuda graph: True, gen throughput (token/s): 1.00, #queue-req: 0", True),
    ("cuda-graph", "Decode batch, #running-req: 1, cuda graph: False, gen throughput (token/s): 1.00, #queue-req: 0", False),
    ("cuda-graph", "Capture cuda graph failed: out of memory", False),
    ("allreduce-fusion", "FlashInfer AllReduce Fusion enabled and workspace initialized: backend=trtllm, rank=0", True),
    ("allreduce-fusion", "Failed to initialize FlashInfer workspace: no SM12. Disabling flashinfer allreduce fusion permanently.", False),
    ("allreduce-fusion", "nothing said", None),
    ("torch-symm-mem", "TorchSymmMemCommunicator: Device capability 12 not supported, communicator is not available.", False),
    ("torch-symm-mem", "TorchSymmMemCommunicator: torch symmetric memory multicast operations are not supported.", False),
    ("pcie-ipc-allreduce", "FlashInfer PCIe-IPC all-reduce enabled (world=8, workspace sized on first reduction)", True),
    ("pcie-ipc-allreduce", "SGLANG_ENABLE_PCIE_IPC_ALLREDUCE is set but this FlashInfer build has no pcie_ipc_comm; falling back to NCCL all-reduce.", False),
    ("pcie-ipc-allreduce", "FlashInfer PCIe-IPC all-reduce enabled (world=8, w)\nFlashInfer PCIe-IPC workspace (max_numel=9) failed: oom; reductions stay on NCCL", False),
    ("custom-allreduce", "Custom allreduce is disabled because it's not supported on more than two PCIe-only GPUs.", False),
    ("nccl-p2p", "box:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM", True),
    ("nccl-p2p", "NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM\nNCCL INFO Channel 01 : 3[3] -> 4[4] via SHM/direct/direct", False),
    ("overlap-schedule", "Overlap schedule is not implemented for speculative decoding on CPU.", False),
    ("adaptive-speculation", "speculative_adaptive disabled: topk must be 1. Falling back", False),
    ("no-such-feature", "", None),
]  # fmt: skip


@pytest.mark.parametrize(("feature", "log", "engaged"), ENGAGEMENT)
def test_a_feature_engaged_only_if_the_log_says_so(feature: str, log: str, engaged: bool | None) -> None:
    found = ENGINE.evidence(feature, observed(log))

    assert found.engaged is engaged
    assert found.feature == feature


def test_every_feature_can_be_judged_from_nothing() -> None:
    assert {ENGINE.evidence(feature, observed()).engaged for feature in ENGINE.features} == {None}


def test_acceptance_length_is_tokens_a_step_and_unknown_without_verification() -> None:
    # A request seen on a running 0.5.23: 60 tokens in 30 verification steps, spec_accept_length 2.0.
    deltas = {"sglang:spec_verify_calls_total": 30.0, "sglang:generation_tokens_total": 60.0}
    assert named(asdict(ENGINE.counters), deltas, {})["acceptance_length"] == 2.0
    assert "acceptance_length" not in named(asdict(ENGINE.counters), {}, {})


def test_a_flush_is_believed_only_when_it_says_so() -> None:
    assert openai.flushed(200, "Cache flushed.\nPlease check backend logs for more details.") is True
    assert openai.flushed(400, "Flush cache failed.\n") is False
    assert openai.flushed(200, "Flush cache failed.\n") is False


def test_the_counters_are_metrics_of_the_newest_release_that_has_them() -> None:
    names = set(sglang.metric_names("0.5.23"))
    counters = ENGINE.counters

    assert {counters.prompt_tokens, counters.generated_tokens, counters.drafts, counters.running} <= names
    assert "sglang:spec_verify_calls_total" not in sglang.metric_names("0.5.9")
    assert "sglang:cuda_graph_passes_total" in sglang.metric_names("0.5.9")


DEATHS = [
    ("RuntimeError: FlashInfer allreduce fusion requires SM90 or SM10X NVIDIA GPUs.", "all-reduce fusion refused"),
    ("'KimiK25ForConditionalGeneration' object has no attribute 'set_eagle3_layers_to_capture'", "EAGLE-3 not delegated"),
    ("ValueError: Spec v2 currently only supports topk = 1 for speculative decoding.", "spec v2 with a tree of drafts"),
    ("Exception: sgl-kernel is installed with version 0.3.19, which is less than the minimum required version 0.3.21", "kernel package too old"),
    ("Capture cuda graph failed: CUDA out of memory", "graph capture failed"),
    ("RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.", "no room for the cache"),
    ("[Errno 98] error while attempting to bind on address ('127.0.0.1', 30000): address already in use", "port in use"),
    ("RuntimeError: sgl_kernel.silu_and_mul is a stand-in: this environment has no sgl-kernel", "stand-in called"),
    ("Received sigquit from a child process. It usually means the child failed.", "a child process died"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "name"), DEATHS)
def test_the_first_signature_that_matches_names_the_death(line: str, name: str) -> None:
    found = [signature.name for signature in ENGINE.signatures if re.search(signature.regex, line)]

    assert found[:1] == [name]


def test_milestones_are_met_in_order_by_a_real_starts_lines() -> None:
    log = [
        "[..] server_args={'model_path': '/m'}", "[..] Init parallel ends. elapsed=0.06 s", "[..] Load weight begin. avail mem=21 GB",
        "[..] Load weight end. elapsed=0.03 s", "[..] KV Cache is allocated. dtype: torch.bfloat16, #tokens: 32768",
        "[..] Capture cuda graph begin. This can take up to several minutes.", "[..] max_total_num_tokens=32768, chunked_prefill_size=4096",
        "[..] The server is fired up and ready to roll!",
    ]  # fmt: skip

    met = [next(i for i, line in enumerate(log) if re.search(m.regex, line)) for m in ENGINE.milestones]

    assert met == list(range(len(log)))

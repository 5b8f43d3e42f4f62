"""What SGLang's log proves: decode lines, milestones, how it dies, and which features engaged.

Formats were read in the wheels of 0.5.9 and 0.5.23 (`scheduler_metrics_mixin.py`, `metrics_reporter.py`) and seen on a
running 0.5.23. A flag is not a feature: on SM120 several flags are accepted and do nothing.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from harness.engines.engine import Evidence, LogFigures, Milestone, Observed, Signature
from harness.engines.log_lines import SHOWN, matching, nccl_p2p

_VERIFIED = "sglang:spec_verify_calls_total"
_GENERATED = "sglang:generation_tokens_total"
_CACHED = "sglang:cached_tokens_total"

_DECODE = re.compile(r"Decode batch(?: \[\d+\])?, #running-req: (?P<running>\d+), (?P<rest>.*)$")
_ACCEPT = re.compile(r"(?<!block )accept len: (?P<length>[\d.]+), accept rate: (?P<rate>[\d.]+)")
_GRAPH = re.compile(r"\b(?:cuda|cpu|npu) graph: (?P<used>True|False)")
_THROUGHPUT = re.compile(r"gen throughput \(token/s\): (?P<value>[\d.]+)")
_QUEUE = re.compile(r"#queue-req: (?P<queued>\d+)")

# A line counts what was decoded since the one before; a request's first token comes from its prefill and is not in it.
FIGURES = LogFigures(
    rate=r"Decode batch.*gen throughput \(token/s\): (?P<value>[\d.]+)",
    acceptance=r"Decode batch.*(?<!block )accept len: (?P<value>[\d.]+)",
)

MILESTONES: tuple[Milestone, ...] = (
    Milestone("arguments resolved", r"server_args="),
    Milestone("process groups up", r"Init (?:torch distributed|parallel) ends"),
    Milestone("loading weights", r"Load weight begin"),
    Milestone("weights loaded", r"Load weight end"),
    Milestone("cache allocated", r"KV Cache is allocated"),
    Milestone("capturing graphs", r"Capture (?:\w+ )*cuda graph begin"),
    Milestone("memory planned", r"max_total_num_tokens="),
    Milestone("ready", r"The server is fired up and ready to roll!"),
)

# What only SGLang says; what every CUDA server may say is in `harness.run.signatures`. Issues are sgl-project/sglang's.
SIGNATURES: tuple[Signature, ...] = (
    Signature(
        "all-reduce fusion refused",
        r"FlashInfer allreduce fusion requires SM90 or SM10X",
        "remove `enable-flashinfer-allreduce-fusion`: SM120 has no such path, and from 0.5.14 asking for it is fatal",
        source="0.5.14 to 0.5.23 flashinfer_comm_fusion.py",
        decisive=True,
    ),
    Signature(
        "EAGLE-3 not delegated",
        r"has no attribute '(?:set_eagle3_layers_to_capture|get_embed_and_head|set_embed_and_head)'",
        "apply the patch `kimi-k25-eagle3-delegation`, or take sglang 0.5.10 or newer",
        source="PR #19689",
        decisive=True,
    ),
    Signature(
        "spec v2 with a tree of drafts",
        r"Spec v2 currently only supports topk = 1",
        "set `speculative-eagle-topk: 1`, or leave SGLANG_ENABLE_SPEC_V2 out",
        source="0.5.9 server_args.py",
        decisive=True,
    ),
    Signature(
        "tree of drafts with FlashInfer MLA",
        r"Currently Flashinfer MLA only supports topk=1 for speculative decoding",
        "set `speculative-eagle-topk: 1`, or use `attention-backend: triton`, which honours the tree mask",
        source="0.5.9 flashinfer_mla_backend.py",
    ),
    Signature(
        "kernel package too old",
        r"(?:sgl-kernel|sglang-kernel|flashinfer_python) is installed with version \S+, which is less than the minimum",
        "install the version this release pins: `harness lock ENV` resolves it; the check goes by distribution name",
        source="engine.py, _set_envs_and_config",
        decisive=True,
    ),
    Signature(
        "graph capture failed",
        r"Capture cuda graph failed",
        "lower `mem-fraction-static` or the largest captured batch; the lines above name the kernel",
        source="0.5.9 cuda_graph_runner.py",
        decisive=True,
    ),
    Signature(
        "no room for the cache",
        r"Not enough memory\. Please try to (?:increase|decrease) --mem-fraction-static|max_total_num_tokens=-?0\b",
        "the weights leave no room: raise `mem-fraction-static`, or lower the context and the batch",
        source="model_runner.py",
        decisive=True,
    ),
    Signature(
        "port in use",
        r"\[Errno 98\]|[Aa]ddress already in use",
        "another server holds the port; after this line SGLang lives on for minutes and then kills itself",
        retry=True,
        source="seen on 0.5.23",
        decisive=True,
    ),
    Signature(
        "stand-in called",
        r"is a stand-in: (?:this environment has no sgl-kernel|torchvision is not installed here)",
        "the CPU environment has stand-ins for a few kernels only: this model or option needs a real one",
        source="envspecs/overlays",
    ),
    # Last: what the parent says when any child died; the cause stands above it.
    Signature(
        "a child process died",
        r"Scheduler hit an exception|Received sigquit from a child process|SIGQUIT received",
        "the first traceback in the log is the cause; this line only passes it on",
        source="managers/scheduler.py",
    ),
)


@dataclass(frozen=True, slots=True)
class DecodeLine:
    """One `Decode batch` line. `graph`: whether the batch ran as a captured graph; None where the line does not say."""

    running: int
    queued: int | None
    tokens_per_second: float | None
    graph: bool | None
    accept_length: float | None
    accept_rate: float | None


def decode_lines(log: str) -> Iterator[DecodeLine]:
    """Every decode line of a log, of any release from 0.5.9 to 0.5.23; written every `decode-log-interval` steps."""
    for line in log.splitlines():
        if (found := _DECODE.search(line)) is None:
            continue
        rest = found["rest"]
        accept, graph = _ACCEPT.search(rest), _GRAPH.search(rest)
        speed, queue = _THROUGHPUT.search(rest), _QUEUE.search(rest)
        yield DecodeLine(
            running=int(found["running"]),
            queued=int(queue["queued"]) if queue else None,
            tokens_per_second=float(speed["value"]) if speed else None,
            graph=graph["used"] == "True" if graph else None,
            accept_length=float(accept["length"]) if accept else None,
            accept_rate=float(accept["rate"]) if accept else None,
        )


def graph_share(log: str) -> float | None:
    """The share of decode lines that ran as a captured graph; None when no line says."""
    said = [line.graph for line in decode_lines(log) if line.graph is not None]
    return sum(said) / len(said) if said else None


def evidence(feature: str, observed: Observed, info: Mapping[str, Any]) -> Evidence:
    """Whether a feature engaged.

    Args:
        feature: one of the engine's features.
        observed: answers, log and counter deltas of one launch.
        info: what `/server_info` said, empty when it was not asked.
    """
    judge = _JUDGES.get(feature)
    return Evidence(feature, None, (f"sglang has no feature `{feature}`",)) if judge is None else judge(observed, info)


def _speculation(observed: Observed, info: Mapping[str, Any]) -> Evidence:
    """Engaged when verification steps accepted more than the one token a step gives anyway."""
    lines = [f"speculative_algorithm = {info.get('speculative_algorithm')}"] if info else []
    verified, generated = observed.deltas.get(_VERIFIED), observed.deltas.get(_GENERATED)
    lengths = [line.accept_length for line in decode_lines(observed.log) if line.accept_length is not None]
    if verified:
        lines.append(f"{_VERIFIED}: +{verified:.0f}, tokens +{generated or 0:.0f}")
    if lengths:
        lines.append(f"accept len in {len(lengths)} decode lines: {min(lengths):.2f} to {max(lengths):.2f}")
    if info and not info.get("speculative_algorithm"):
        return Evidence("speculation", False, tuple(lines))
    longest = max(lengths, default=0.0)
    if verified and generated:
        longest = max(longest, generated / verified)
    if longest:
        return Evidence("speculation", longest > 1.0, tuple(lines))
    return Evidence("speculation", False if verified == 0 else None, tuple(lines))


def _spec_v2(observed: Observed, info: Mapping[str, Any]) -> Evidence:
    """Speculation with the overlap scheduler: a variable up to 0.5.13, the only way from 0.5.14."""
    on = matching(observed.log, r"Spec v2 is enabled")
    off = matching(
        observed.log, r"Overlap scheduler is disabled when spec v2 is off|Overlap schedule is not implemented"
    )
    if on or off:
        return Evidence("spec-v2", bool(on) and not off, (*on, *off))
    disabled = info.get("disable_overlap_schedule")
    if not info.get("speculative_algorithm") or disabled is None:
        return Evidence("spec-v2", False if info else None, ("no speculative algorithm",) if info else ())
    return Evidence("spec-v2", not disabled, (f"disable_overlap_schedule = {disabled}",))


def _adaptive(observed: Observed, info: Mapping[str, Any]) -> Evidence:
    off = matching(observed.log, r"speculative_adaptive disabled")
    told = info.get("speculative_adaptive")
    lines = (*off, *((f"speculative_adaptive = {told}",) if told is not None else ()))
    if off or told is False:
        return Evidence("adaptive-speculation", False, lines)
    return Evidence("adaptive-speculation", True if told else None, lines)


def _overlap(observed: Observed, info: Mapping[str, Any]) -> Evidence:
    off = matching(observed.log, r"Overlap schedule(?:r)? is (?:disabled|not implemented)|Disabling overlap schedule")
    disabled = info.get("disable_overlap_schedule")
    if disabled is None:
        return Evidence("overlap-schedule", False if off else None, off)
    return Evidence("overlap-schedule", not disabled, (*off, f"disable_overlap_schedule = {disabled}"))


def _cuda_graph(observed: Observed, info: Mapping[str, Any]) -> Evidence:
    """Engaged when decode batches ran as graphs; a mixture is told, and counts as engaged from one half up."""
    share = graph_share(observed.log)
    failed = matching(observed.log, r"Capture cuda graph failed")
    if share is None:
        return Evidence("cuda-graph", False if failed else None, failed)
    lines = (f"{share:.0%} of {sum(1 for _ in decode_lines(observed.log))} decode lines ran as a graph", *failed)
    return Evidence("cuda-graph", share >= 0.5, lines)


def _prefix_cache(observed: Observed, info: Mapping[str, Any]) -> Evidence:
    cached = observed.deltas.get(_CACHED)
    if cached is None:
        return Evidence("prefix-cache", None)
    return Evidence("prefix-cache", cached > 0, (f"{_CACHED}: +{cached:.0f}",))


def _by_log(feature: str, on: str, off: str) -> Callable[[Observed, Mapping[str, Any]], Evidence]:
    """A feature that says in the log when it is on, and when it cannot be; off wins, because it comes after on."""

    def judge(observed: Observed, info: Mapping[str, Any]) -> Evidence:
        yes, no = matching(observed.log, on), matching(observed.log, off)
        return Evidence(feature, False if no else True if yes else None, (*yes, *no)[:SHOWN])

    return judge


def _custom_allreduce(observed: Observed, info: Mapping[str, Any]) -> Evidence:
    """At more than two GPUs without NVLink it turns itself off, whatever the flag says."""
    off = matching(observed.log, r"more than two PCIe-only GPUs|Custom allreduce is disabled")
    disabled = info.get("disable_custom_all_reduce")
    lines = (*off, *((f"disable_custom_all_reduce = {disabled}",) if disabled is not None else ()))
    return Evidence("custom-allreduce", False if off or disabled else None, lines)


_JUDGES: Mapping[str, Callable[[Observed, Mapping[str, Any]], Evidence]] = {
    "speculation": _speculation,
    "spec-v2": _spec_v2,
    "adaptive-speculation": _adaptive,
    "overlap-schedule": _overlap,
    "cuda-graph": _cuda_graph,
    "prefix-cache": _prefix_cache,
    # Before 0.5.13 there is no line for success, so its absence proves nothing.
    "allreduce-fusion": _by_log(
        "allreduce-fusion",
        r"FlashInfer AllReduce Fusion enabled and workspace initialized|FlashInfer workspace initialized for rank",
        r"Failed to initialize FlashInfer workspace|FlashInfer (?:comm|AllReduce [Ff]usion) (?:not available|disabled)|"
        r"[Ss]kipping allreduce fusion|allreduce fusion disabled|requires SM90 or SM10X",
    ),
    # On success it says nothing; the reasons against it are all logged.
    "torch-symm-mem": _by_log("torch-symm-mem", r"(?!)", r"TorchSymmMemCommunicator: .*not supported"),
    "pcie-ipc-allreduce": _by_log(
        "pcie-ipc-allreduce",
        r"FlashInfer PCIe-IPC (?:all-reduce enabled|workspace built) \(",
        r"no pcie_ipc_comm; falling back to NCCL|leaving PCIe-IPC all-reduce off|PCIe-IPC workspace .*failed|"
        r"PCIe-IPC all-reduce serves bf16 only",
    ),
    "custom-allreduce": _custom_allreduce,
    "nccl-p2p": lambda observed, _: nccl_p2p(observed.log),
}

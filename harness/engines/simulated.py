"""The simulated engine's adapter; the server itself is `harness.engines.simulated_server`."""

import sys
from collections.abc import Mapping
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

_OWNED = ("host", "port", "served-model-name")
_DRAFTED = "simulated:draft_tokens_total"
_ACCEPTED = "simulated:accepted_tokens_total"
_CACHED = "simulated:cached_tokens_total"
# Where this process listens is no part of how it is configured.
_NOT_CONFIGURATION = ("host", "port", "node_rank", "dist_init_addr")


class Simulated:
    """A server of ours whose speed is a formula, for tests, teaching and planning. It never yields a measurement."""

    name: str = "simulated"
    simulated: bool = True
    needs_environment: bool = False
    needs_model: bool = False
    ready_path: str = "/health"
    models_path: str = "/v1/models"
    metrics_path: str | None = "/metrics"
    effective_paths: tuple[str, ...] = ("/server_info",)
    flush: tuple[str, str] | None = ("POST", "/flush_cache")
    counters: Counters = Counters(
        prompt_tokens="simulated:prompt_tokens_total",
        generated_tokens="simulated:generated_tokens_total",
        drafts="simulated:drafts_total",
        draft_tokens=_DRAFTED,
        accepted_tokens=_ACCEPTED,
        cached_tokens=_CACHED,
        running="simulated:requests_running",
        waiting="simulated:requests_waiting",
    )
    features: tuple[str, ...] = ("speculation", "prefix-cache")
    milestones: tuple[Milestone, ...] = (
        Milestone("loading weights", r"simulated: loading weights"),
        Milestone("ready", r"simulated: ready on "),
    )
    figures: LogFigures = LogFigures()
    stop: StopPolicy = StopPolicy(signals=("SIGTERM",), grace_s=5.0)
    stop_profile: str = "/stop_profile"
    rank_ports: int = 1
    address_variable: str | None = None
    signatures: tuple[Signature, ...] = (
        Signature(
            "bad flag",
            r"simulated_server: error: ",
            "see `python -m harness.engines.simulated_server --help`",
        ),
        Signature(
            "port in use",
            r"simulated: error: cannot listen on ",
            "another process holds the port; leave `server.port` out to get a free one",
            retry=True,
        ),
        Signature(
            "rank lost",
            r"simulated: error: rank \d+ of \d+ (was lost|found no group)",
            "look at that rank's own log: it says why it went",
            of_a_peer=True,
        ),
        Signature(
            "rank left",
            r"simulated: rank \d+ left$",
            "that rank was stopped, and the group ends with it: look at that rank's own log",
            of_a_peer=True,
        ),
    )

    def command(self, server: Server) -> Command:
        """Argv of one server, run by the harness's own python."""
        refuse_owned("simulated", server.args, _OWNED)
        name = server.model.name if server.model else "simulated"
        argv = [sys.executable, "-m", "harness.engines.simulated_server"]
        argv += ["--host", server.host, "--port", str(server.port), "--served-model-name", name]
        return Command((*argv, *flags(server.args, lists="repeat")), dict(server.variables))

    def rank_args(self, rank: Rank) -> dict[str, Scalar]:
        """SGLang's names; rank 0 is not healthy before every rank has joined it."""
        return {"nnodes": rank.nodes, "node-rank": rank.rank, "dist-init-addr": rank.address}

    def request(self, dialect: Dialect, prompt: Any, sampling: Sampling, model: str) -> tuple[str, dict[str, Any]]:
        """A streaming request; every chunk says how many tokens there are so far."""
        if dialect == "generate":
            return "/generate", _native(prompt, sampling)
        options = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
        return openai.request(dialect, prompt, sampling, model, extra=options)

    def start_profile(self, folder: str) -> tuple[str, dict[str, Any]]:
        """Every step from now on, for a trace in Chrome's format."""
        return "/start_profile", {"output_dir": folder}

    def effective(self, answers: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments `/server_info` lists, without those that say where it listens."""
        told = answers.get("/server_info")
        if not isinstance(told, Mapping) or not isinstance(told.get("arguments"), Mapping):
            return {}
        arguments = {name: value for name, value in told["arguments"].items() if name not in _NOT_CONFIGURATION}
        return {"simulated": told.get("simulated"), **openai.flatten(arguments)}

    def evidence(self, feature: str, observed: Observed) -> Evidence:
        """Speculation engaged if tokens were drafted, the prefix cache if prompt tokens came from it."""
        counter = {"speculation": _DRAFTED, "prefix-cache": _CACHED}.get(feature)
        if counter is None:
            return Evidence(feature, None, (f"simulated has no feature `{feature}`",))
        moved = observed.deltas.get(counter)
        if moved is None:
            return Evidence(feature, None)
        line = f"{counter}: +{moved:.0f}"
        if feature == "speculation":
            line += f", accepted +{observed.deltas.get(_ACCEPTED, 0):.0f}"
        return Evidence(feature, moved > 0, (line,))


ENGINE = Simulated()


def _native(prompt: Any, sampling: Sampling) -> dict[str, Any]:
    chosen: dict[str, Any] = {"max_new_tokens": sampling.max_tokens, "temperature": sampling.temperature}
    chosen["ignore_eos"] = sampling.ignore_eos
    if sampling.top_p is not None:
        chosen["top_p"] = sampling.top_p
    if sampling.seed is not None:
        chosen["seed"] = sampling.seed
    return {"text": openai.text(prompt), "sampling_params": chosen, "stream": True}

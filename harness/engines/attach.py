"""A server that already runs, at a URL: nothing is started or stopped, what it says of itself is recorded.

Which engine it is follows from its answers (`detect`); what it does not say stays unknown.
"""

from collections.abc import Mapping
from typing import Any

from harness.engines import get, openai
from harness.engines.argv import refuse_ranks
from harness.engines.engine import (
    Command,
    Counters,
    Dialect,
    Engine,
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
from harness.errors import InputError


class Attach:
    """Any OpenAI-compatible server, until its answers say more: `recognised` gives the engine to go on with."""

    name: str = "attach"
    simulated: bool = False
    needs_environment: bool = False
    needs_model: bool = False
    ready_path: str = "/v1/models"  # the one path that every such server has
    models_path: str = "/v1/models"
    metrics_path: str | None = "/metrics"
    effective_paths: tuple[str, ...] = ("/v1/models", "/server_info", "/props", "/slots", "/version")
    flush: tuple[str, str] | None = None
    counters: Counters = Counters()
    features: tuple[str, ...] = ()
    signatures: tuple[Signature, ...] = ()
    milestones: tuple[Milestone, ...] = ()
    figures: LogFigures = LogFigures()
    stop: StopPolicy = StopPolicy(signals=(), grace_s=0.0)
    rank_ports: int = 0
    address_variable: str | None = None

    def command(self, server: Server) -> Command:
        """Nothing to start.

        Raises:
            InputError: always: a caller that wants to start this has not looked at what it is.
        """
        raise InputError(
            f"engine `attach` starts no server (asked to start one on port {server.port})",
            hint="start it yourself and give its `server.url`, or name the engine that runs it",
        )

    def rank_args(self, rank: Rank) -> dict[str, Scalar]:
        """Raises InputError: it runs on one machine only."""
        refuse_ranks("attach")

    def request(self, dialect: Dialect, prompt: Any, sampling: Sampling, model: str) -> tuple[str, dict[str, Any]]:
        """A streaming request with the fields that most servers know; one that refuses `ignore_eos` needs it off."""
        return openai.request(dialect, prompt, sampling, model)

    def effective(self, answers: Mapping[str, Any]) -> dict[str, Any]:
        """What the server says of itself, and which engine it looks like; `unknown` when it says nothing."""
        found = detect(answers)
        if found is None:
            names = openai.model_names(answers.get(self.models_path))
            return {"engine": "unknown", "models": ", ".join(names) or "unknown"}
        return {"engine": found, **get(found).effective(answers)}

    def evidence(self, feature: str, observed: Observed) -> Evidence:
        """What the recognised engine says; unknown when none is recognised."""
        found = detect(observed.answers)
        if found is None:
            return Evidence(feature, None, ("the server does not say which engine it is",))
        return get(found).evidence(feature, observed)


ENGINE = Attach()


def detect(answers: Mapping[str, Any]) -> str | None:
    """The name of the engine that gave these answers (by path; None or absent where a path gave none).

    `owned_by` in `/v1/models` names llama.cpp, vLLM, SGLang and our simulation; where it is missing or was renamed,
    `/props` with slots is llama.cpp's and `/server_info` with a `disaggregation_mode` SGLang's.
    """
    told = answers.get("/server_info")
    if isinstance(told, Mapping) and told.get("simulated") is True:
        return "simulated"
    models = answers.get("/v1/models")
    entries = models.get("data") if isinstance(models, Mapping) else None
    first = entries[0] if isinstance(entries, list) and entries and isinstance(entries[0], Mapping) else {}
    owner = first.get("owned_by")
    if owner in ("llamacpp", "vllm", "sglang", "simulated"):
        return str(owner)
    props = answers.get("/props")
    if isinstance(props, Mapping) and "total_slots" in props:
        return "llamacpp"
    if isinstance(told, Mapping) and "disaggregation_mode" in told:
        return "sglang"
    return None


def recognised(answers: Mapping[str, Any]) -> Engine:
    """The engine to ask with: the recognised one, whose counters and dialects are known, else `attach` itself."""
    found = detect(answers)
    return ENGINE if found is None else get(found)

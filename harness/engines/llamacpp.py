"""llama.cpp's HTTP server: the `llama-server` binary, or our launcher over `xllamacpp` in a locked environment.

Facts below were read off `xllamacpp` 2026.10.11549 (CPU) and `llama-server` b11434. The trap to know: a draft model
without `--spec-type` is loaded and then never used; `/slots` and the `spec_decode_*` counters tell.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness.engines import openai
from harness.engines.argv import flags, refuse_owned, refuse_ranks
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
from harness.errors import InputError

LAUNCHER = Path(__file__).with_name("llamacpp_server.py")
_OWNED = ("model", "alias", "host", "port")
_DRAFTED = "llamacpp:spec_decode_num_draft_tokens_total"
_ACCEPTED = "llamacpp:spec_decode_num_accepted_tokens_total"
_CACHED = "llamacpp:prompt_tokens_cached_total"


class LlamaCpp:
    """llama.cpp. `args: {binary: PATH}` runs that binary; else the environment's python, or `llama-server` on PATH."""

    name: str = "llamacpp"
    simulated: bool = False
    needs_environment: bool = False
    needs_model: bool = True
    ready_path: str = "/health"
    models_path: str = "/v1/models"
    metrics_path: str | None = "/metrics"
    effective_paths: tuple[str, ...] = ("/props", "/slots", "/v1/models")
    # Erasing a slot needs --slot-save-path and clears one slot only: requests switch the prompt cache off instead.
    flush: tuple[str, str] | None = None
    counters: Counters = Counters(
        prompt_tokens="llamacpp:prompt_tokens_total",
        generated_tokens="llamacpp:tokens_predicted_total",
        drafts="llamacpp:spec_decode_num_drafts_total",
        draft_tokens=_DRAFTED,
        accepted_tokens=_ACCEPTED,
        cached_tokens=_CACHED,
        running="llamacpp:requests_processing",
        waiting="llamacpp:requests_deferred",
    )
    features: tuple[str, ...] = ("speculation", "prompt-cache")
    milestones: tuple[Milestone, ...] = (
        Milestone("loading the model", r"load_model: loading model '"),
        Milestone("loading the draft model", r"loading draft model '"),
        Milestone("slots ready", r"load_model: initializing, n_slots = \d+"),
        Milestone("model loaded", r"model loaded$"),
        Milestone("listening", r"listening on https?://"),
    )
    figures: LogFigures = LogFigures(tokens=r"(?<!prompt )eval time =\s+[\d.]+ ms /\s+(?P<value>\d+) tokens")
    # While a stream is open the first SIGTERM waits up to 30 s for it; the second ends it at once.
    stop: StopPolicy = StopPolicy(signals=("SIGTERM", "SIGTERM"), grace_s=5.0)
    rank_ports: int = 0
    address_variable: str | None = None
    signatures: tuple[Signature, ...] = (
        Signature(
            "removed flag",
            r'error while handling argument "(?P<flag>[^"]+)": the argument has been removed',
            "take the flag's successor, which the same line names",
            source="llama-server b11434",
        ),
        Signature(
            "bad flag",
            r"error: (invalid argument: |unrecognized arguments: |argument -\S+: )|error while handling argument ",
            "look the flag up in `llama-server --help`, or in harness/engines/llamacpp_server.py for the launcher",
        ),
        Signature(
            "port in use",
            r"couldn't bind HTTP server socket|bind\(\) failed|Address already in use",
            "another process holds the port: `ss -ltnp` names it; leave `server.port` out to get a free one",
            retry=True,
        ),
        Signature(
            "context memory",
            r"failed to allocate (?:\S+ )?buffer|ggml_backend_\w+_buffer_type_alloc_buffer: .*failed|"
            r"failed to (create|initialize) (the )?context|KV cache allocation failed",
            "lower `ctx-size` or `parallel`: the KV cache grows with their product",
        ),
        Signature(
            "draft model not loaded",
            r"failed to load draft model|failed to create draft context",
            "check the path and the vocabulary of `spec-draft-model`: it must be the target's",
        ),
        Signature(
            "model not found",
            r"failed to open GGUF file|failed to open .*: No such file or directory|No such file or directory.*gguf",
            "check the model's path",
        ),
        Signature(
            "model not loaded",
            r"exiting due to model loading error|error loading model|failed to load model|"
            r"gguf_init_from_\w+: (?:failed|invalid)|unable to load model",
            "check the file's sha256 against its source: it is truncated, damaged or of an unknown architecture",
        ),
        Signature(
            "package missing",
            r"No module named 'xllamacpp'",
            "build the environment that holds xllamacpp (`harness build`), or give `binary: llama-server`",
        ),
        Signature(
            "illegal instruction",
            r"Illegal instruction|SIGILL",
            "this build was made for another CPU: take a build for this machine's instruction set",
        ),
        Signature(
            "assertion failed",
            r"GGML_ASSERT\(",
            "a bug in llama.cpp: keep the log, note the version, search its issues for the assertion",
        ),
        Signature(
            "ended by a second signal",
            r"Received second interrupt, terminating immediately",
            "somebody stopped the server while streams were open",
        ),
    )

    def command(self, server: Server) -> Command:
        """Argv of one server; metrics and slots are on unless the recipe says no, because the record needs them."""
        if server.model is None:
            raise InputError("engine `llamacpp` needs a model", hint="give `model: {path: FILE.gguf}`")
        args = {"metrics": True, "slots": True, **server.args}
        binary = args.pop("binary", None)
        refuse_owned("llama-server", args, _OWNED)
        start = _program(None if binary is None else str(binary), server.python)
        argv = [*start, "--model", server.model.path, "--alias", server.model.name]
        argv += ["--host", server.host, "--port", str(server.port)]
        return Command((*argv, *flags(args, lists="join")), dict(server.variables))

    def rank_args(self, rank: Rank) -> dict[str, Scalar]:
        """Raises InputError: it runs on one machine only."""
        refuse_ranks("llamacpp")

    def request(self, dialect: Dialect, prompt: Any, sampling: Sampling, model: str) -> tuple[str, dict[str, Any]]:
        """A streaming request; `timings` in every chunk say how many tokens there are so far.

        The prompt cache is off, so that one level does not warm the next.
        """
        extra = {"timings_per_token": True, "cache_prompt": False}
        return openai.request(dialect, prompt, sampling, model, extra=extra)

    def effective(self, answers: Mapping[str, Any]) -> dict[str, Any]:
        """What `/props`, `/slots` and `/v1/models` say; the chat template as its sha256."""
        return {**_props(answers.get("/props")), **_slots(answers.get("/slots")), **_meta(answers.get("/v1/models"))}

    def evidence(self, feature: str, observed: Observed) -> Evidence:
        """Whether speculation or the prompt cache did anything."""
        if feature == "speculation":
            return _speculation(observed)
        if feature == "prompt-cache":
            return _prompt_cache(observed)
        return Evidence(feature, None, (f"llamacpp has no feature `{feature}`",))


ENGINE = LlamaCpp()


def _program(binary: str | None, python: str | None) -> list[str]:
    if binary is not None:
        return [binary]
    # -u: the log is read while the server runs.
    return [python, "-u", str(LAUNCHER)] if python is not None else ["llama-server"]


def _props(answer: Any) -> dict[str, Any]:
    if not isinstance(answer, Mapping):
        return {}
    told: dict[str, Any] = {
        name: answer[name]
        for name in ("total_slots", "model_alias", "model_path", "model_ftype", "build_info")
        if name in answer
    }
    defaults = answer.get("default_generation_settings")
    if isinstance(defaults, Mapping) and "n_ctx" in defaults:
        told["n_ctx_slot"] = defaults["n_ctx"]
    if isinstance(template := answer.get("chat_template"), str):
        told["chat_template_sha256"] = hashlib.sha256(template.encode()).hexdigest()
    return told


def _slots(answer: Any) -> dict[str, Any]:
    slots = [slot for slot in answer if isinstance(slot, Mapping)] if isinstance(answer, list) else []
    flags_seen = [slot["speculative"] for slot in slots if "speculative" in slot]
    return {"slots": len(slots), "speculative": all(flags_seen)} if flags_seen else {}


def _meta(answer: Any) -> dict[str, Any]:
    entries = answer.get("data") if isinstance(answer, Mapping) else None
    first = entries[0] if isinstance(entries, list) and entries else None
    meta = first.get("meta") if isinstance(first, Mapping) else None
    return {f"model.{key}": value for key, value in openai.flatten(meta).items()}


def _speculation(observed: Observed) -> Evidence:
    """Engaged only if tokens were drafted; a loaded draft model proves nothing."""
    lines: list[str] = []
    on = _slots(observed.answers.get("/slots")).get("speculative")
    if on is not None:
        lines.append(f"/slots: speculative = {str(on).lower()}")
    drafted = observed.deltas.get(_DRAFTED)
    if drafted is not None:
        lines.append(f"{_DRAFTED}: +{drafted:.0f}, accepted +{observed.deltas.get(_ACCEPTED, 0):.0f}")
    if on is False or drafted == 0:
        if "loading draft model" in observed.log:
            lines.append("a draft model was loaded and is not used: `--spec-type` is missing")
        return Evidence("speculation", False, tuple(lines))
    return Evidence("speculation", True if drafted else None, tuple(lines))


def _prompt_cache(observed: Observed) -> Evidence:
    cached = observed.deltas.get(_CACHED)
    if cached is None:
        return Evidence("prompt-cache", None)
    return Evidence("prompt-cache", cached > 0, (f"{_CACHED}: +{cached:.0f}",))

"""The OpenAI dialects that every engine here speaks: request bodies, and what `/v1/models` says."""

from collections.abc import Mapping
from typing import Any

from harness.engines.engine import Dialect, Sampling
from harness.errors import InputError

PATHS: Mapping[str, str] = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}


def request(
    dialect: Dialect,
    prompt: Any,
    sampling: Sampling,
    model: str,
    *,
    extra: Mapping[str, Any] | None = None,
) -> tuple[str, dict[str, Any]]:
    """Path and body of one streaming request that asks for usage.

    Args:
        dialect: `chat` or `completions`.
        prompt: a text, or a list of chat messages (`{"role": ..., "content": ...}`).
        sampling: what to sample; `ignore_eos` is a field of vLLM's and SGLang's that llama.cpp knows too.
        model: the name the server gave its model.
        extra: fields of the engine's own.

    Raises:
        InputError: the dialect is not one of these, or chat messages are to go to `/v1/completions`.
    """
    if dialect not in PATHS:
        raise InputError(f"dialect `{dialect}` is not one this engine speaks", hint="known: `chat`, `completions`")
    body: dict[str, Any] = {"model": model}
    if dialect == "chat":
        body["messages"] = messages(prompt)
    else:
        body["prompt"] = text(prompt)
    body |= {"max_tokens": sampling.max_tokens, "temperature": sampling.temperature}
    if sampling.top_p is not None:
        body["top_p"] = sampling.top_p
    if sampling.seed is not None:
        body["seed"] = sampling.seed
    if sampling.ignore_eos:
        body["ignore_eos"] = True
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    return PATHS[dialect], {**body, **(extra or {})}


def messages(prompt: Any) -> list[dict[str, Any]]:
    """A prompt as chat messages."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)


def text(prompt: Any) -> str:
    """A prompt as one text.

    Raises:
        InputError: it is a list of chat messages, which only the server's own template may turn into text.
    """
    if isinstance(prompt, str):
        return prompt
    raise InputError(
        "a prompt of chat messages cannot be sent as a plain completion",
        hint="use dialect `chat`, or a prompt set of texts",
    )


def model_names(answer: Any) -> tuple[str, ...]:
    """The names `/v1/models` lists; empty where the answer is not of that form."""
    entries = answer.get("data") if isinstance(answer, Mapping) else None
    if not isinstance(entries, list):
        return ()
    return tuple(str(entry["id"]) for entry in entries if isinstance(entry, Mapping) and "id" in entry)


def flatten(value: Any, name: str = "") -> dict[str, Any]:
    """Nested mappings and lists as `a.b.0: scalar`; what is not JSON's is left out."""
    if isinstance(value, Mapping):
        items = [(str(key), item) for key, item in value.items()]
    elif isinstance(value, list | tuple):
        items = [(str(index), item) for index, item in enumerate(value)]
    elif value is None or isinstance(value, str | int | float | bool):
        return {name: value} if name else {}
    else:
        return {}
    flat: dict[str, Any] = {}
    for key, item in items:
        flat |= flatten(item, f"{name}.{key}" if name else key)
    return flat


def flushed(status: int, body: str) -> bool:
    """Whether an engine emptied its prefix cache when asked to. The proof is the next request: 0 cached tokens.

    SGLang answers 400 while requests run, and an older one 200 with "Flush cache failed"; vLLM refuses within a 200
    while blocks are in use.
    """
    said = body.replace(" ", "").lower()
    return status == 200 and "fail" not in said and '"success":false' not in said

"""One generation: what was asked for, and the answer in its dialect, streamed or whole, with whatever fault it has."""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from harness.engines.simulation.faults import HALF_WAY
from harness.engines.simulation.http import Connection, Message
from harness.engines.simulation.model import Request
from harness.engines.simulation.text import Writer, identity

CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
# Tokens a chat template adds: a few around each message, and the opening of the answer.
TEMPLATE_MESSAGE, TEMPLATE_ANSWER = 4, 3
DEFAULT_MAX_TOKENS = 128


class BadAsk(Exception):
    """The request is not one this server can answer; the message says why."""


@dataclass(frozen=True, slots=True)
class Ask:
    """A generation as asked for. `key` is 64 bits of prompt and seed, all that the output depends on."""

    path: str
    model: str
    prompt: str
    template_tokens: int
    max_tokens: int
    ignore_eos: bool
    stream: bool
    usage: bool
    running_usage: bool
    key: int


@dataclass(frozen=True, slots=True)
class Told:
    """What an answer tells about itself: its prompt's tokens, how it ends, and the faults it has."""

    prompt_tokens: int
    cached_tokens: int
    finish: str
    faults: Mapping[str, Any]


def ask(message: Message, model: str) -> Ask:
    """Read a request body of any of the three dialects.

    Raises:
        BadAsk: it is not JSON, or a field has the wrong type.
    """
    try:
        body = message.json()
    except ValueError as error:
        raise BadAsk(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise BadAsk("the body is not a JSON object")
    native = message.path == GENERATE
    sampling = _typed(body, "sampling_params", dict, {}) if native else body
    prompt, template = _prompt(message.path, body)
    limit = sampling.get("max_new_tokens" if native else "max_tokens", sampling.get("max_completion_tokens"))
    limit = DEFAULT_MAX_TOKENS if limit is None else limit
    if not isinstance(limit, int) or isinstance(limit, bool) or limit < 1:
        raise BadAsk(f"max_tokens: a whole number above 0 was expected, got {json.dumps(limit)}")
    options = _typed(body, "stream_options", dict, {})
    greedy = not sampling.get("temperature", 1.0)
    return Ask(
        path=message.path,
        model=str(body.get("model", model)),
        prompt=prompt,
        template_tokens=template,
        max_tokens=limit,
        ignore_eos=bool(sampling.get("ignore_eos", False)),
        stream=bool(body.get("stream", False)),
        usage=bool(options.get("include_usage", False)),
        running_usage=bool(options.get("continuous_usage_stats", False)),
        key=identity(prompt, None if greedy else sampling.get("seed", 0)),
    )


def _prompt(path: str, body: dict[str, Any]) -> tuple[str, int]:
    if path != CHAT:
        return _typed(body, "text" if path == GENERATE else "prompt", str, None), 0
    messages = _typed(body, "messages", list, None)
    if not messages or not all(isinstance(entry, dict) for entry in messages):
        raise BadAsk("messages: a list of objects was expected")
    texts = [str(entry.get("role", "")) + "\n" + _content(entry.get("content")) for entry in messages]
    return "\n".join(texts), TEMPLATE_MESSAGE * len(texts) + TEMPLATE_ANSWER


def _content(content: Any) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    raise BadAsk("messages: `content` must be a text or a list of parts")


def _typed(body: dict[str, Any], name: str, kind: type, default: Any) -> Any:
    value = body.get(name)
    if value is None and default is not None:
        return default
    if not isinstance(value, kind):
        raise BadAsk(f"{name}: a {kind.__name__} was expected, got {json.dumps(value)[:80]}")
    return value


class Reply:
    """Writes one answer as its tokens come."""

    def __init__(self, connection: Connection, asked: Ask, request: Request, writer: Writer, told: Told) -> None:
        self.asked = asked
        self._told = told
        self.over = False
        self._connection = connection
        self._request = request
        self._writer = writer
        self._faults = told.faults
        self._half_way = next((name for name in HALF_WAY if name in told.faults), None)
        self._text = ""
        self._sent = 0
        self._id = f"simulated-{asked.key:016x}"
        self._head = self._prepare()

    def begin(self) -> bool:
        """Send the headers; False when nothing is to be generated."""
        if self.asked.stream:
            self._connection.begin_stream()
        if "hang-after-headers" in self._faults:
            self.over = True
        elif "zero-tokens" in self._faults:
            self._end()
        return not self.over

    def tokens(self, count: int) -> None:
        """Send the tokens of one step; `over` when they were the last, or the stream was broken on purpose."""
        if self._half_way and self._request.produced * 2 >= self.asked.max_tokens:
            self._break(self._half_way)
            return
        text = self._writer.write(count)
        self._sent += count
        if not self.asked.stream or self.asked.path == GENERATE:
            self._text += text
        if self.asked.stream:
            self._connection.chunk(self._frame(text))
        if self._request.done:
            self._end()

    # -- frames ---------------------------------------------------------------------------------------------------

    def _prepare(self) -> str:
        kind = "chat.completion.chunk" if self.asked.path == CHAT else "text_completion"
        common = {"id": self._id, "object": kind, "created": int(time.time()), "model": self.asked.model}
        return json.dumps(common)[:-1] + ', "simulated": true'

    def _frame(self, text: str) -> bytes:
        if self.asked.path == GENERATE:
            return self._event({"text": self._text, "meta_info": self._meta(None)})
        # The words hold only lower-case letters and spaces: no JSON escapes, so no encoder in the hot loop.
        if self.asked.path == CHAT:
            choice = f'{{"index": 0, "delta": {{"content": "{text}"}}, "finish_reason": null}}'
        else:
            choice = f'{{"index": 0, "text": "{text}", "finish_reason": null}}'
        usage = f', "usage": {json.dumps(self._usage(self._sent))}' if self.asked.running_usage else ""
        frame = f'data: {self._head}, "choices": [{choice}]{usage}}}\n\n'
        if self.asked.path == CHAT and self._request.steps == 1:
            role = '{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": null}'
            frame = f'data: {self._head}, "choices": [{role}]}}\n\n' + frame
        return frame.encode()

    def _usage(self, tokens: int) -> dict[str, Any]:
        return {
            "prompt_tokens": self._told.prompt_tokens,
            "completion_tokens": tokens,
            "total_tokens": self._told.prompt_tokens + tokens,
            "prompt_tokens_details": {"cached_tokens": self._told.cached_tokens},
        }

    def _meta(self, finish: str | None) -> dict[str, Any]:
        request = self._request
        meta = {
            "id": self._id,
            "simulated": True,
            "prompt_tokens": self._told.prompt_tokens,
            "completion_tokens": self._sent + (self._faults.get("wrong-usage", 0) if finish else 0),
            "cached_tokens": self._told.cached_tokens,
            "finish_reason": {"type": finish, "length": self._sent} if finish else None,
        }
        if request.drafts:
            meta |= {"spec_verify_ct": request.steps, "spec_accept_length": request.produced / request.steps}
        return meta

    @staticmethod
    def _event(value: Any) -> bytes:
        return f"data: {json.dumps(value)}\n\n".encode()

    # -- the end --------------------------------------------------------------------------------------------------

    def _end(self) -> None:
        self.over = True
        if not self.asked.stream:
            self._connection.reply(200, self._whole())
            return
        frames = b"".join(self._event(event) for event in self._last_events())
        self._connection.chunk(frames + (b"" if "no-done" in self._faults else b"data: [DONE]\n\n"))
        self._connection.end_stream()

    def _last_events(self) -> list[dict[str, Any]]:
        finish = None if "no-finish" in self._faults else self._told.finish
        if self.asked.path == GENERATE:
            return [{"text": self._text, "meta_info": self._meta(finish)}]
        head = json.loads(self._head + "}")
        empty: dict[str, Any] = {"delta": {}} if self.asked.path == CHAT else {"text": ""}
        events = [{**head, "choices": [{"index": 0, **empty, "finish_reason": finish}]}]
        if (self.asked.usage or self.asked.running_usage) and "no-usage" not in self._faults:
            events.append({**head, "choices": [], **self._totals()})
        return events

    def _totals(self) -> dict[str, Any]:
        request = self._request
        totals: dict[str, Any] = {"usage": self._usage(self._sent + self._faults.get("wrong-usage", 0))}
        if request.drafts:
            totals["timings"] = {
                "predicted_n": self._sent,
                "draft_n": request.drafted,
                "draft_n_accepted": request.accepted,
                "verify_n": request.steps,
            }
        return totals

    def _whole(self) -> dict[str, Any]:
        if self.asked.path == GENERATE:
            return {"text": self._text, "meta_info": self._meta(self._told.finish)}
        said: dict[str, Any] = {"text": self._text}
        if self.asked.path == CHAT:
            said = {"message": {"role": "assistant", "content": self._text}}
        head = json.loads(self._head.replace("chat.completion.chunk", "chat.completion") + "}")
        return {**head, "choices": [{"index": 0, **said, "finish_reason": self._told.finish}], **self._totals()}

    def _break(self, fault: str) -> None:
        """Break the stream half-way, in the way the fault says."""
        self.over = True
        connection = self._connection
        if fault == "truncated":
            connection.close()
        elif fault == "reset-mid-chunk":
            connection.write(b"400\r\ndata: {")
            connection.reset()
        elif fault == "garbage":
            connection.write(b"\x00\xffthis is not a chunk\r\n\r\n")
            connection.close()
        elif fault == "garbage-json":
            connection.chunk(b'data: {"choices": [{"delta": {"content": \n\n')
            connection.end_stream()
        elif fault == "error-event":
            error = {"message": "the engine died (simulated)", "type": "InternalServerError", "code": 500}
            connection.chunk(self._event({"error": error}) + b"data: [DONE]\n\n")
            connection.end_stream()

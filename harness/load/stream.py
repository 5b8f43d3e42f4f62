"""What a response body says: server-sent events and the dialects of chat, completions and SGLang's `/generate`.

Pure, and never on the timing path. Event streams are read as the WHATWG standard says (HTML Living Standard, section
9.2.6), lines ending in LF, CR LF or CR. Who counts tokens, in this order, and only where every token-carrying event
says it: `token_ids` of choices (vLLM's `return_token_ids`), usage in every event (`continuous_usage_stats`),
`timings.predicted_n` (llama.cpp's `timings_per_token`), `meta_info.completion_tokens` (SGLang's `/generate`).
"""

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import orjson

_LINE = re.compile(rb"([^\r\n]*)(?:\r\n|\n|\r)")
# Facts of engines about one request that are worth keeping, by their own names.
_FACTS = frozenset(
    (
        "draft_n",
        "draft_n_accepted",
        "spec_verify_ct",
        "spec_accept_rate",
        "spec_accept_length",
        "spec_accept_histogram",
        "spec_num_correct_drafts",
        "spec_num_proposed_drafts",
        "spec_correct_drafts_histogram",
        "spec_accept_token_num",
        "spec_draft_token_num",
    )
)


Counts = tuple[int | None, int | None, int | None, int | None]
_UNCOUNTED: Counts = (None, None, None, None)
_TRIES = 8  # events in a row that did not repeat the one before, after which nobody looks whether they do
_TEXTS = ("content", "reasoning_content", "reasoning", "refusal")  # where a delta may hold its text


class StreamError(ValueError):
    """The body is not what a generation server may say; the message says what was seen."""


@dataclass(slots=True)
class Said:
    """What a body said, all of it.

    `arrivals`: the body offset of the last byte of each event that carried generated text or tokens, and `tokens` how
    many each carried, None where the server does not say.
    """

    arrivals: list[int] = field(default_factory=list)
    tokens: list[int] | None = None
    text: str = ""
    output_tokens: int | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    counter: str | None = None
    finish_reason: str | None = None
    done: bool = False
    error: str | None = None
    streamed: bool = True
    extra: dict[str, Any] = field(default_factory=dict)


def events(body: bytes, start: int, end: int) -> Iterator[tuple[str, bytes, int]]:
    """Event name, data and offset of the data's last byte, for each event between two offsets that has data.

    An event whose empty line never came is given too when the body ends after a whole line: servers cut the last
    line end off, and a stream that was really cut is known by its framing.
    """
    name, data, last = "", None, 0
    if start == 0 and body.startswith(b"\xef\xbb\xbf"):
        start = 3
    for line, line_end in _lines(body, start, end):
        if not line:
            if data is not None:
                yield name, data, last
            name, data = "", None
            continue
        key, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if key == b"data":
            data, last = value if data is None else data + b"\n" + value, line_end - 1
        elif key == b"event":
            name = value.decode("utf-8", "replace")
    if data is not None:
        yield name, data, last


def _lines(body: bytes, start: int, end: int) -> Iterator[tuple[bytes, int]]:
    """Lines without their ends, and the offset one after their last byte."""
    at = start
    for match in _LINE.finditer(body, start, end):
        yield match[1], match.end(1)
        at = match.end()
    if at < end:
        yield body[at:end], end


class Listener:
    """Takes in one response's events and, at the end, says what they meant together."""

    def __init__(self) -> None:
        self.said = Said()
        self._texts: list[str] = []
        self._native: list[str] = []  # SGLang's /generate repeats the text so far unless told otherwise
        # For each arrival: tokens by `token_ids`, then cumulative counts by usage, timings and meta_info.
        self._counts: list[Counts] = []
        self._usage: int | None = None
        self._timings: int | None = None
        self._meta: int | None = None

    def stream(self, body: bytes) -> None:
        """Take an event stream, whole or as far as it came.

        Raises:
            StreamError: an event's data is neither JSON nor `[DONE]`.
        """
        if b"\r" in body:
            self._events(body, 0, len(body))
        else:
            self._plain(body)

    def _plain(self, body: bytes) -> None:
        """The usual stream: line feeds only.

        Most events differ from the one before in nothing but their text. What stands around the text is kept from an
        event that was read in full, and an event with the same around a plain text needs no reading: see `_mould`.
        """
        start, length, texts, arrivals, counts = 0, len(body), self._texts, self.said.arrivals, self._counts
        mould, before, after, tries, seen = (b"", b""), 0, 0, 0, 0
        while start < length:
            end = body.find(b"\n", start)
            if end < 0 or body[end + 1 : end + 2] != b"\n":  # several lines, or the end of the body
                end = body.find(b"\n\n", start) + 2
                end = end if end >= 2 else length
                self._events(body, start, end)
                start = end
                continue
            prefix, suffix = mould
            if before and body.startswith(prefix, start) and body.endswith(suffix, start + before, end):
                text = _plain_text(body[start + before : end - after])
                if text:
                    texts.append(text)
                    arrivals.append(end - 1)
                    counts.append(_UNCOUNTED)
                    start = end + 2
                    continue
            if body.startswith(b"data: ", start):
                value = self._event("", body[start + 6 : end], end - 1)
                # Where nothing ever repeats, looking for what does would only cost.
                tries, seen = (0 if len(texts) > seen + 1 else tries + 1), len(texts)
                if tries < _TRIES:
                    mould = _mould(body[start:end], value) or mould
                    before, after = len(mould[0]), len(mould[1])
            else:
                self._events(body, start, end + 2)
            start = end + 2

    def _events(self, body: bytes, start: int, end: int) -> None:
        for name, data, offset in events(body, start, end):
            self._event(name, data, offset)

    def _event(self, name: str, data: bytes, offset: int) -> Any:
        """Take one event; gives what its data meant."""
        if data == b"[DONE]":
            self.said.done = True
            return None
        value = whole_json(data)
        self.message(value, offset, failed=name == "error")
        return value

    def message(self, value: Any, offset: int, *, failed: bool = False) -> None:
        """Take one JSON message: an event's, or a whole answer that was not streamed."""
        if not isinstance(value, dict):
            raise StreamError(f"an event is not an object: `{_short(value)}`")
        error = value.get("error")
        if error or failed or value.get("object") == "error":
            self.said.error = self.said.error or _error(error or value)
            return
        meta = value.get("meta_info")
        if isinstance(meta, dict):
            self._generated(value, meta, offset)
            return
        self._choices(value, offset)

    def _choices(self, value: dict[str, Any], offset: int) -> None:
        usage, timings = value.get("usage"), value.get("timings")
        counted = self._take_usage(usage) if usage else None
        predicted = self._take_timings(timings) if timings else None
        text, ids, any_choice = False, None, False
        for choice in value.get("choices") or ():
            any_choice = True
            piece = self._choice(choice)
            if piece:
                text = True
                self._texts.append(piece)
            if (given := choice.get("token_ids")) is not None:
                ids = (ids or 0) + len(given)
        if text or ids or (any_choice and (self._grew(counted, 1) or self._grew(predicted, 2))):
            self._arrive(offset, (ids, counted, predicted, None))

    def _choice(self, choice: dict[str, Any]) -> str:
        """The new text of one choice, whatever it is called: content, reasoning, refusal or a tool call's pieces."""
        if (reason := choice.get("finish_reason")) is not None:
            self.said.finish_reason = str(reason)
        delta = choice.get("delta") or choice.get("message")
        if delta is None:
            return choice.get("text") or ""
        content = delta.get("content")
        if content and isinstance(content, str) and (len(delta) == 1 or (len(delta) == 2 and "role" in delta)):
            return content
        text = (delta.get("reasoning_content") or delta.get("reasoning") or "") + _content(content)
        text += delta.get("refusal") or ""
        for call in delta.get("tool_calls") or ():
            function = call.get("function") or {}
            text += (function.get("name") or "") + (function.get("arguments") or "")
        return text

    def _generated(self, value: dict[str, Any], meta: dict[str, Any], offset: int) -> None:
        """SGLang's `/generate`: text so far (or only what is new) and `meta_info` with running counts."""
        said = self.said
        count = _count(meta.get("completion_tokens"))
        said.prompt_tokens = _first(_count(meta.get("prompt_tokens")), said.prompt_tokens)
        said.cached_tokens = _first(_count(meta.get("cached_tokens")), said.cached_tokens)
        said.extra.update({key: item for key, item in meta.items() if key in _FACTS and item is not None})
        if (reason := meta.get("finish_reason")) is not None:
            said.finish_reason = str(reason.get("type")) if isinstance(reason, dict) else str(reason)
            if isinstance(reason, dict) and reason.get("type") == "abort":
                said.error = said.error or f"aborted: {reason.get('message')}"
        text = value.get("text") or ""
        new = bool(text) and (not self._native or text != self._native[-1])
        self._native.append(text)
        grown = count is not None and count > (self._meta or 0)
        self._meta = _first(count, self._meta)
        if grown or (new and count is None):
            self._arrive(offset, (None, None, None, count))

    def _take_usage(self, usage: dict[str, Any]) -> int | None:
        said = self.said
        said.prompt_tokens = _first(_count(usage.get("prompt_tokens")), said.prompt_tokens)
        details = usage.get("prompt_tokens_details")
        if isinstance(details, dict):
            said.cached_tokens = _first(_count(details.get("cached_tokens")), said.cached_tokens)
        count = _count(usage.get("completion_tokens"))
        self._usage = _first(count, self._usage)
        return count

    def _take_timings(self, timings: dict[str, Any]) -> int | None:
        said = self.said
        said.extra.update({key: item for key, item in timings.items() if key in _FACTS and item is not None})
        said.cached_tokens = _first(said.cached_tokens, _count(timings.get("cache_n")))
        count = _count(timings.get("predicted_n"))
        self._timings = _first(count, self._timings)
        return count

    def _grew(self, count: int | None, source: int) -> bool:
        """Whether a running count says that an event without text carried tokens; only for counts that run."""
        if count is None or not self._counts:
            return False
        last = self._counts[-1][source]
        return last is not None and count > last

    def _arrive(self, offset: int, counts: Counts) -> None:
        self.said.arrivals.append(offset)
        self._counts.append(counts)

    def end(self) -> Said:
        """What it all meant."""
        said = self.said
        said.text = "".join(self._texts) + _joined(self._native)
        total = _first(self._usage, self._meta, self._timings)
        said.output_tokens, said.counter = total, "usage" if total is not None else None
        said.tokens = self._tokens(total)
        if said.tokens is not None and total is None:
            said.output_tokens, said.counter = sum(said.tokens), "stream"
        return said

    def _tokens(self, total: int | None) -> list[int] | None:
        """Tokens of each arrival, by the first source that counts all of them."""
        if not self._counts:
            return None
        for source in range(4):
            column = [counts[source] for counts in self._counts]
            known = [count for count in column if count is not None]
            if len(known) < len(column):
                continue
            tokens = (
                known if source == 0 else [after - before for before, after in zip([0, *known], known, strict=False)]
            )
            if min(tokens) < 0:
                raise StreamError("a running token count went backwards")
            if source and total is not None and total > known[-1]:
                # Tokens that came with no event of their own (an end token): they count with the last one.
                self.said.extra["tokens_after_last_chunk"] = total - known[-1]
                tokens[-1] += total - known[-1]
            return tokens
        return None


@lru_cache(maxsize=1 << 14)  # pieces of text are tokens, and those repeat
def _plain_text(raw: bytes) -> str:
    """The text of a JSON string that holds no escapes, from the bytes between its quotes; empty where it is not one."""
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        return ""
    return text if text.isprintable() and '"' not in text and "\\" not in text else ""


def _mould(block: bytes, value: Any) -> tuple[bytes, bytes] | None:
    """What stands before and after the text in an event that says nothing but a piece of text; None where it says more.

    Any other plain text between the two makes an event that differs in its text alone: the first part ends inside a
    JSON string, which the second part's first byte closes. That it is the string with the text, and no other that
    reads the same, is tried with another text in its place. `value`, what the event says, is used up.
    """
    holder, key = _holder(value)
    if holder is None:
        return None
    before, found, after = block.partition(b'"%b"' % holder[key].encode("utf-8", "surrogatepass"))
    if not found:
        return None
    holder[key] = "?"
    try:
        tried = orjson.loads(b'%b"?"%b' % (before[6:], after))
    except orjson.JSONDecodeError:
        return None
    return (before + b'"', b'"' + after) if tried == value else None


def _holder(value: Any) -> tuple[Any, str]:
    """The object that holds an event's text, and under which key; None where the event says anything else."""
    nothing = None, ""
    if not isinstance(value, dict) or any(value.get(key) for key in ("error", "usage", "timings", "meta_info")):
        return nothing
    choices = value.get("choices")
    if value.get("object") == "error" or not isinstance(choices, list) or len(choices) != 1:
        return nothing
    choice = choices[0]
    if choice.get("finish_reason") is not None or choice.get("token_ids") is not None:
        return nothing
    delta = choice.get("delta") or choice.get("message")
    if delta is None:
        return (choice, "text") if isinstance(choice.get("text"), str) and choice["text"] else nothing
    keys = [key for key in _TEXTS if delta.get(key)]
    if len(keys) != 1 or not isinstance(delta[keys[0]], str) or delta.get("tool_calls"):
        return nothing
    return delta, keys[0]


def whole_json(data: bytes) -> Any:
    """JSON, or a `StreamError` that shows its beginning."""
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise StreamError(f"an event is not JSON ({error}): `{data[:80].decode('utf-8', 'replace')}`") from error


def _joined(texts: list[str]) -> str:
    """The whole text of pieces that are either new each time or repeat everything before them."""
    repeats = all(after.startswith(before) for before, after in itertools.pairwise(texts))
    return texts[-1] if texts and repeats else "".join(texts)


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _first(*values: int | None) -> int | None:
    return next((value for value in values if value is not None), None)


def _content(content: Any) -> str:
    """Content as text; some servers send a list of typed parts."""
    if isinstance(content, list):
        return "".join(str(part.get("text") or "") for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""


def _error(value: Any) -> str:
    if isinstance(value, dict):
        value = value.get("message") or value.get("detail") or value
    return _short(value)


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 300 else text[:297] + "..."

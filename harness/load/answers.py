"""Conversations that go on with what the server itself answered: marks in their requests, and what takes their place.

A prompt set whose answers are `served` holds a mark where an answer is to stand. Only the measuring process can put the
answer there, between one turn and the next: it is the one piece of understanding that cannot wait until the clock has
stopped. It takes place after a turn has ended and before the next is sent, so that it is in no turn's times; other
streams of the process are read later by it, which their kernel stamps do not notice.
"""

import json
import re
from collections.abc import Sequence
from typing import Any

import orjson

from harness.load import stream, wire

# Private-use characters around words that no prompt holds.
_MARK = "\ue000answer {} of this conversation\ue000"
_MARKS = re.compile(_MARK.format("([0-9]+)").encode())


def mark(number: int) -> str:
    """What stands for the answer to a conversation's turn of this number, from 0, as a message's content."""
    return _MARK.format(number)


def are_wanted(body: bytes) -> bool:
    """Whether a request's body holds a mark."""
    return _MARKS.search(body) is not None


def filled(request: bytes, answers: Sequence[str]) -> tuple[bytes, int]:
    """A request with answers in place of its marks and its length made good, and how many answers there were not.

    An answer is not there when the conversation began in an earlier slice of the prompt set: its place stays empty.
    """
    head, blank, body = request.partition(b"\r\n\r\n")
    missing = 0

    def answer(match: re.Match[bytes]) -> bytes:
        nonlocal missing
        number = int(match[1])
        if number < len(answers):
            return json.dumps(answers[number], ensure_ascii=False)[1:-1].encode("utf-8", "replace")
        missing += 1
        return b""

    body = _MARKS.sub(answer, body)
    # `wire.request` writes the length last.
    return head[: head.rindex(b":")] + b": %d" % len(body) + blank + body, missing


def content(log: Sequence[Any]) -> str:
    """What a chat client would send back as the assistant's message, from the reads of a whole response.

    Reasoning is left out, as chat templates leave it out; so is what could not be understood.
    """
    body = wire.response(b"".join(entry[0][0] for entry in log)).body
    events = [body] if body.lstrip()[:1] == b"{" else [data for _, data, _ in stream.events(body, 0, len(body))]
    return "".join(_piece(event) for event in events)


def _piece(event: bytes) -> str:
    try:
        choice = orjson.loads(event)["choices"][0]
        text = (choice.get("delta") or choice.get("message") or {}).get("content")
    except (orjson.JSONDecodeError, LookupError, TypeError, AttributeError):  # `[DONE]`, usage, and what is no chat
        return ""
    return text if isinstance(text, str) else ""

"""From the raw bytes and stamps of one request to its record. Pure; runs after the clock has stopped.

A record is a sample (`ok`) only when the response was whole, HTTP said 200, no event said otherwise, tokens came, and
the counts agree; else it has one of `REASONS`.
"""

import hashlib
import itertools
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from harness.load import stream, wire
from harness.load.records import Chunk, RequestRecord

TokenCounter = tuple[str, Callable[[str], int]]

REASONS = frozenset(
    (
        "connect",
        "timeout",
        "disconnected",
        "stopped",
        "malformed",
        "redirected",
        "status",
        "compressed",
        "error",
        "ended early",
        "no tokens",
        "identity",
    )
)

_SO_TIMESTAMPING = 37  # the ancillary type of the stamps; harness.load.reader asks for them
_STAMP = struct.Struct("@ll")
# Events of one read were written together as far as anybody can tell when they arrived within this, or within this
# part of the stream's usual wait: a server's next step takes longer, so they are of one step, or it was late itself.
_TOGETHER_NS = 100_000
_TOGETHER_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class Prepared:
    """One request ready to send. `headers` are this request's own; `conversation` ties turns that one slot plays."""

    prompt_id: str
    path: str
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)
    dialect: str = "chat"
    requested_tokens: int | None = None
    conversation: str | None = None


@dataclass(frozen=True, slots=True)
class Raw:
    """What the reader kept of one request; see `harness.load.reader` for `facts` and `log`."""

    index: int
    slot: int
    facts: Mapping[str, Any]
    log: list[Any]


@dataclass(frozen=True, slots=True)
class Frame:
    """How a level reads a request: the zero of its clock (wall-clock nanoseconds), the phase, whether to keep text."""

    zero_ns: int
    phase: str
    keep_text: bool = True


@dataclass(slots=True)
class _Reads:
    """Ends of reads in the raw stream, with their stamps; all nanoseconds."""

    ends: list[int]
    stamps: list[int]
    read: list[int]
    not_before: list[int]
    kernel: bool


def understand(raw: Raw, prepared: Prepared, frame: Frame, count_tokens: TokenCounter | None = None) -> RequestRecord:
    """The record of one request."""
    reads = _reads(raw.log)
    answer = wire.response(b"".join(entry[0][0] for entry in raw.log))
    said, reason, detail = _listen(answer)
    if raw.facts["reason"] is not None:
        reason, detail = raw.facts["reason"], raw.facts["detail"]
    if reason is None and said.output_tokens is None and count_tokens is not None:
        said.output_tokens, said.counter = count_tokens[1](said.text), f"tokenizer:{count_tokens[0]}"
    if reason is None:
        reason, detail = _faults(said)
    chunks = _chunks(said, answer, reads, frame.zero_ns)
    end_ns = reads.stamps[-1] if reads.stamps and raw.facts["reason"] is None else raw.facts["end"]
    extra = dict(said.extra)
    if not said.streamed:
        extra["streamed"] = False
    if raw.facts["retried"]:
        extra["retried"] = raw.facts["retried"]
    if raw.facts.get("missing"):
        extra["answers_missing"] = raw.facts["missing"]
    return RequestRecord(
        index=raw.index,
        slot=raw.slot,
        phase=frame.phase,
        prompt_id=prepared.prompt_id,
        sent_s=(raw.facts["sent"] - frame.zero_ns) / 1e9,
        end_s=(end_ns - frame.zero_ns) / 1e9,
        ok=reason is None,
        reason=reason,
        detail=detail,
        scheduled_s=_since(raw.facts["scheduled"], frame.zero_ns),
        queued_s=_since(raw.facts["queued"], 0),
        connect_s=_since(raw.facts["connect"], 0),
        status=answer.head.status if answer.head else None,
        chunks=chunks,
        output_tokens=said.output_tokens,
        prompt_tokens=said.prompt_tokens,
        cached_tokens=said.cached_tokens,
        requested_tokens=prepared.requested_tokens,
        counter=said.counter,
        finish_reason=said.finish_reason,
        text_sha256=hashlib.sha256(said.text.encode("utf-8", "surrogatepass")).hexdigest() if said.text else None,
        text=said.text if frame.keep_text else None,
        kernel_stamps=reads.kernel,
        extra=extra,
    )


def shifted(record: RequestRecord, by_s: float) -> RequestRecord:
    """The same record on a clock whose zero lies `by_s` earlier."""
    chunks = tuple(
        chunk._replace(
            at_s=chunk.at_s + by_s,
            read_s=chunk.read_s + by_s,
            since_s=None if chunk.since_s is None else chunk.since_s + by_s,
        )
        for chunk in record.chunks
    )
    scheduled = None if record.scheduled_s is None else record.scheduled_s + by_s
    return replace(record, sent_s=record.sent_s + by_s, end_s=record.end_s + by_s, scheduled_s=scheduled, chunks=chunks)


def _since(value: int | None, zero: int) -> float | None:
    return None if value is None else (value - zero) / 1e9


def _reads(log: list[Any]) -> _Reads:
    stamps, kernel = [], bool(log)
    for (_, ancillary, _, _), read_ns, _ in log:
        stamp = 0
        for _, kind, data in ancillary:
            if kind == _SO_TIMESTAMPING and len(data) >= _STAMP.size:
                seconds, nanoseconds = _STAMP.unpack_from(data)
                stamp = seconds * 1_000_000_000 + nanoseconds
        if not 0 < stamp <= read_ns:
            kernel, stamp = False, read_ns
        stamps.append(stamp)
    ends = list(itertools.accumulate(len(entry[0][0]) for entry in log))
    return _Reads(ends, stamps, [entry[1] for entry in log], [entry[2] for entry in log], kernel)


def _listen(answer: wire.Response) -> tuple[stream.Said, str | None, str | None]:
    """What a response said, and the reason why it is no sample as far as HTTP and the stream can tell."""
    reason, detail = _refusal(answer)
    if answer.head is None or reason is not None:
        return stream.Said(), reason, detail
    listener = stream.Listener()
    try:
        _take(listener, answer.head, answer.body)
        said = listener.end()
    except stream.StreamError as error:
        # What came before the fault still counts as seen: the record shows how far it got.
        return listener.said, "malformed" if answer.complete else "ended early", str(error)
    except (TypeError, AttributeError, ValueError) as error:
        return listener.said, "malformed", f"an event has an unknown shape: {error}"
    return said, *_breaks(said, answer)


def _refusal(answer: wire.Response) -> tuple[str | None, str | None]:
    """Why a response is not even looked into."""
    head = answer.head
    if head is None:
        return "malformed", answer.fault or "no HTTP header came"
    if 300 <= head.status < 400:
        return "redirected", f"HTTP {head.status} to `{head.headers.get('location', '')}`"
    if head.status != 200:
        return "status", f"HTTP {head.status}: {_body(answer.body)}"
    encoding = head.headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        return "compressed", f"content-encoding is `{encoding}`, though identity was asked for"
    return None, None


def _breaks(said: stream.Said, answer: wire.Response) -> tuple[str | None, str | None]:
    """What broke a response that was understood."""
    if said.error is not None:
        return "error", said.error
    if answer.fault is not None:
        return "malformed", answer.fault
    if answer.trailing:
        return "malformed", f"{answer.trailing} bytes came after the end of the response"
    if not answer.complete:
        return "ended early", "the response stops before its end"
    return None, None


def _take(listener: stream.Listener, head: wire.Head, body: bytes) -> None:
    if head.headers.get("content-type", "").startswith("application/json"):
        listener.said.streamed = False
        listener.message(stream.whole_json(body), max(0, len(body) - 1))
        return
    listener.stream(body)


def _faults(said: stream.Said) -> tuple[str | None, str | None]:
    """The identities of one whole response."""
    if not said.arrivals or said.output_tokens == 0:
        return "no tokens", f"{len(said.arrivals)} chunks, {said.output_tokens} tokens counted by the server"
    if said.streamed and not said.done and said.finish_reason is None:
        return "ended early", "neither a finish reason nor `[DONE]`"
    if said.finish_reason == "abort":
        return "error", "the server aborted the request"
    if said.tokens is not None and sum(said.tokens) != said.output_tokens:
        return "identity", f"chunks carry {sum(said.tokens)} tokens, the server counted {said.output_tokens}"
    return None, None


def _body(body: bytes) -> str:
    text = " ".join(body.decode("utf-8", "replace").split())
    return text if len(text) <= 300 else text[:297] + "..."


def _chunks(said: stream.Said, answer: wire.Response, reads: _Reads, zero_ns: int) -> tuple[Chunk, ...]:
    """Arrivals with the stamps of the reads that brought their last bytes."""
    where = _places(said.arrivals, answer.frames, reads.ends)
    counts: Iterable[int | None] = itertools.repeat(None) if said.tokens is None else said.tokens
    stamps, read_at, kernel = reads.stamps, reads.read, reads.kernel
    chunks = []
    together_ns: float | None = None
    for (read, frame), (next_read, next_frame), tokens in zip(where, [*where[1:], _NOWHERE], counts, strict=False):
        stamp = stamps[read]
        # Events of one frame were written together; they are one arrival, however many events. Others that have one
        # stamp came in one read, or in one segment by the time that it was read.
        shared = next_frame not in {frame, _NOWHERE[1]} and stamps[next_read] == stamp
        at_s, read_s = (stamp - zero_ns) / 1e9, (read_at[read] - zero_ns) / 1e9
        if kernel and not shared:
            chunks.append(Chunk(at_s, read_s, tokens))
            continue
        since_ns = _not_before(reads, read)
        if shared and together_ns is None:
            together_ns = max(_TOGETHER_NS, _TOGETHER_SHARE * _usual_wait_ns(stamps[where[0][0] :]))
        merged = shared and together_ns is not None and stamp - since_ns > together_ns
        since_s = (since_ns - zero_ns) / 1e9 if merged or not kernel else None
        chunks.append(Chunk(at_s, read_s, tokens, merged, since_s))
    return tuple(chunks)


_NOWHERE = (-1, -1)


def _places(arrivals: list[int], frames: tuple[tuple[int, int], ...], ends: list[int]) -> list[tuple[int, int]]:
    """For each arrival: the read that brought its last byte, and the frame that holds it."""
    where = []
    read, frame = 0, 0
    for offset in arrivals:
        while offset >= frames[frame][0]:
            frame += 1
        at = offset + frames[frame][1]
        while at >= ends[read]:
            read += 1
        where.append((read, frame))
    return where


def _not_before(reads: _Reads, read: int) -> int:
    """When the first bytes that have the stamp of a read may have arrived at the earliest."""
    first = read
    while first and reads.stamps[first - 1] == reads.stamps[read]:
        first -= 1
    return max(reads.not_before[first], reads.stamps[first - 1] if first else 0)


def _usual_wait_ns(stamps: list[int]) -> float:
    """Mean time from one stamp to the next without the longest, which may be a stall; 0 where there are too few to say.

    Not the median: of a server that writes many tokens a step as events of their own, most waits are within a step.
    """
    waits = sorted(after - before for before, after in itertools.pairwise(stamps) if after > before)
    return sum(waits[:-1]) / (len(waits) - 1) if len(waits) >= 3 else 0.0

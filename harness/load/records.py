"""What the load client writes down: one record a request, raw times only. Everything else is derived in `stats`.

All times are seconds as float on one monotonic clock whose zero is the level's own start; the level's record says what
wall-clock instant that was. `None` means not known, never zero.
"""

import json
import math
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from harness.errors import InputError


class Chunk(NamedTuple):  # of which a level has a hundred thousand: a frozen dataclass takes four times as long to make
    """One arrival that carried generated tokens.

    `at_s` is the kernel's receive stamp where there is one, else the read time; `read_s` is when the client read it.
    `tokens` is how many generated tokens it carried, None where the server does not say. `merged` marks a chunk that
    was not the last event in its read and may have come noticeably earlier: between `since_s` and `at_s`. Without a
    kernel stamp every chunk has `since_s`: it came no earlier than that and no later than it was read.
    """

    at_s: float
    read_s: float
    tokens: int | None = None
    merged: bool = False
    since_s: float | None = None


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request from schedule to end. `ok` is False with a `reason` when it may not be a sample."""

    index: int
    slot: int
    phase: str  # "warmup" or "measure"
    prompt_id: str
    sent_s: float
    end_s: float
    ok: bool
    reason: str | None = None
    detail: str | None = None
    scheduled_s: float | None = None  # open loop: when it was due
    queued_s: float | None = None  # time it waited for a free slot in the client
    connect_s: float | None = None  # time its connection took to open, apart from everything else
    status: int | None = None
    chunks: tuple[Chunk, ...] = ()
    output_tokens: int | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    requested_tokens: int | None = None
    counter: str | None = None  # who counted output_tokens: "usage", "stream", "tokenizer:NAME"
    finish_reason: str | None = None
    text_sha256: str | None = None
    text: str | None = None
    kernel_stamps: bool = False
    extra: dict[str, Any] = field(default_factory=dict)  # engine facts: draft_n, accepted, verify counts ...

    def to_json(self) -> dict[str, Any]:
        """As stored, one line of `requests.jsonl`; chunks become lists `[at, read, tokens, merged]`, with `since` fifth
        where it is known."""
        # Not `asdict`: it would copy every chunk of every request, only for them to be laid out anew.
        data = {each.name: getattr(self, each.name) for each in fields(self)}
        data["chunks"] = [
            [c.at_s, c.read_s, c.tokens, int(c.merged), *(() if c.since_s is None else (c.since_s,))]
            for c in self.chunks
        ]
        return data

    def to_line(self) -> str:
        """`to_json` as one line of text."""
        return json.dumps(self.to_json(), separators=(",", ":"))

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "RequestRecord":
        """What `to_json` wrote.

        Raises:
            InputError: it did not write this; says what is wrong.
        """
        try:
            chunks = tuple(
                Chunk(at, read, tokens, bool(merged), *since) for at, read, tokens, merged, *since in data["chunks"]
            )
            record = cls(**{**data, "chunks": chunks})
        except (TypeError, ValueError, KeyError) as error:
            raise InputError(f"no request as the client wrote it: {error}") from error
        if (fault := _fault(record)) is not None:
            raise InputError(f"no request as the client wrote it: {fault}")
        return record


_Types = frozenset[type]
_NUMBER, _COUNT, _TEXT, _NONE = (frozenset[type](one) for one in ({int, float}, {int}, {str}, {type(None)}))
_TYPES: dict[str, _Types] = {
    **dict.fromkeys(("index", "slot"), _COUNT),
    **dict.fromkeys(("sent_s", "end_s"), _NUMBER),
    **dict.fromkeys(("scheduled_s", "queued_s", "connect_s"), _NUMBER | _NONE),
    **dict.fromkeys(("status", "output_tokens", "prompt_tokens", "cached_tokens", "requested_tokens"), _COUNT | _NONE),
    **dict.fromkeys(("reason", "detail", "counter", "finish_reason", "text_sha256", "text"), _TEXT | _NONE),
    **dict.fromkeys(("phase", "prompt_id"), _TEXT),
    **dict.fromkeys(("ok", "kernel_stamps"), frozenset[type]({bool})),
    "extra": frozenset({dict}),
}


def _fault(record: RequestRecord) -> str | None:
    """What of a record no client would write, None where nothing is; whole columns at once, for there are many."""
    for name, types in _TYPES.items():
        if type(value := getattr(record, name)) not in types:
            return f"`{name}` is {value!r}"
    if not math.isfinite(record.sent_s + record.end_s):
        return "a time is no number"
    if not record.chunks:
        return "`ok` without chunks" if record.ok else None
    at, read, tokens, _, since = zip(*record.chunks, strict=True)
    if not set(map(type, at + read)) <= _NUMBER or not math.isfinite(sum(at) + sum(read)):
        return "the time of a chunk is no number"
    if not set(map(type, since)) <= _NUMBER | _NONE or not set(map(type, tokens)) <= _COUNT | _NONE:
        return "the tokens of a chunk, or since when it may have come, are no number"
    return None


@dataclass(frozen=True, slots=True)
class ClientFacts:
    """What the client says of itself over one level. Times in seconds."""

    processes: int
    cpu_s: float  # of the measuring processes, from the first send to the last byte
    wall_s: float  # of the same span
    kernel_stamps: bool  # every stamp came from the kernel
    reads: int
    parse_s: float  # CPU spent on understanding the bytes, after the clock stopped
    wrapped: int = 0  # requests sent again because the set was too small
    clock_step_s: float = 0.0  # how far the wall clock was set during the level: kernel stamps are wall-clock stamps
    cpus: tuple[int, ...] = ()  # cores the measuring processes were bound to; empty: not bound
    reconnects: int = 0
    busiest: float | None = None  # largest share of a core that one process took in half a second; None: too short
    hosts: tuple[dict[str, Any], ...] = ()  # where the load came from several machines: each one's share and clock


@dataclass(frozen=True, slots=True)
class LevelTrace:
    """All that one level left behind. `started_at` is the wall-clock instant (s since 1970) of the records' zero."""

    records: tuple[RequestRecord, ...]
    client: ClientFacts
    started_at: float
    mode: str
    concurrency: int | None
    stopped: bool = False  # ended by the caller before its time

    def in_flight(self) -> list[tuple[float, int]]:
        """Steps `(time, requests in flight from then on)`, warm-up included, by time."""
        steps = [(record.sent_s, 1) for record in self.records]
        steps += [(record.end_s, -1) for record in self.records]
        count, trace = 0, []
        # At one instant an end comes before a send: a slot that sends again does not count twice.
        for at, change in sorted(steps):
            count += change
            trace.append((at, count))
        return trace

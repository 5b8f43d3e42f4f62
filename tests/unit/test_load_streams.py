"""Every trap a stream may hold gives the record it should, however the network cuts it up."""

import dataclasses
import itertools
import json
import struct

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from load_streams import STREAM, TRAPS, Trap, chat, chunked, plain, sse

from harness.load import stream, transcript, wire
from harness.load.transcript import Frame, Prepared, Raw, understand

ZERO = 1_700_000_000_000_000_000
STEP = 1_000_000  # a millisecond between reads


def stamp(ns: int) -> list[tuple[int, int, bytes]]:
    """What the kernel hands over with a read: three timespecs, the first is the software stamp."""
    return [(1, 37, struct.pack("@6l", ns // 10**9, ns % 10**9, 0, 0, 0, 0))]


def log(pieces, lag=20_000):
    """Reads one step apart, stamped by the kernel; each was read `lag` after it arrived."""
    times = itertools.count(ZERO + STEP, STEP)
    return [((piece, stamp(at), 0, None), at + lag, 0) for piece, at in zip(pieces, times, strict=False)]


def record(pieces, *, reason=None, **facts):
    pieces = [piece for piece in pieces if piece]
    end = ZERO + STEP * (len(pieces) + 1)
    told = {"sent": ZERO, "end": end, "scheduled": None, "queued": None, "connect": None, "retried": 0}
    told |= {"reason": reason, "detail": None, **facts}
    return understand(Raw(0, 0, told, log(pieces)), Prepared("p", "/x", b"{}"), Frame(ZERO, "measure"))


def of(trap: Trap, pieces=None):
    """The record of a trap, ended as the reader would have ended it."""
    pieces = [trap.raw] if pieces is None else pieces
    framer = wire.Framer()
    try:
        whole = [framer.feed(piece) for piece in pieces][-1:] == [True] or (trap.closed and framer.closed())
    except wire.WireError:
        return record(pieces, reason="malformed")
    return record(pieces, reason=None if whole else "disconnected")


def shown(found, trap: Trap):
    values = {name: getattr(found, name) for name in trap.expected if name != "tokens"}
    if "tokens" in trap.expected:
        values["tokens"] = [chunk.tokens for chunk in found.chunks]
    return values


@pytest.mark.parametrize("trap", TRAPS, ids=lambda trap: trap.trap)
def test_a_trap_gives_its_record(trap):
    found = of(trap)
    assert (found.ok, found.reason) == (trap.ok, trap.expected.get("reason"))
    assert shown(found, trap) == trap.expected


@pytest.mark.parametrize("trap", TRAPS, ids=lambda trap: trap.trap)
def test_a_trap_read_byte_by_byte_gives_the_same_record(trap):
    found = of(trap, [bytes([byte]) for byte in trap.raw])
    assert (found.ok, found.reason) == (trap.ok, trap.expected.get("reason"))
    assert shown(found, trap) == trap.expected


def without_times(found):
    data = found.to_json()
    data["chunks"] = [chunk[2] for chunk in data["chunks"]]
    return {name: value for name, value in data.items() if name not in {"end_s", "kernel_stamps"}}


@given(data=st.data(), trap=st.sampled_from(TRAPS))
@settings(max_examples=300, deadline=None)
def test_any_split_into_reads_gives_the_same_record_but_for_its_times(data, trap):
    cuts = data.draw(st.lists(st.integers(0, len(trap.raw)), max_size=12).map(sorted))
    pieces = [trap.raw[start:end] for start, end in itertools.pairwise([0, *cuts, len(trap.raw)])]
    assert without_times(of(trap, pieces)) == without_times(of(trap))


@given(st.binary(max_size=400), st.integers(0, len(TRAPS) - 1), st.integers(0, 2000))
@settings(max_examples=500, deadline=None)
@example(b"\xff", 0, 200)
@example(b"0\r\n\r\n", 1, 300)
@example(b"data: {}\n\n", 2, 150)
def test_no_damage_to_a_stream_crashes_the_parser(damage, which, at):
    raw = TRAPS[which].raw
    for broken in (raw[:at] + damage + raw[at:], raw[:at] + damage, STREAM + chunked(damage), damage):
        found = of(Trap("damaged", broken, closed=True))
        assert found.ok or found.reason in transcript.REASONS


# Words that also stand around the text of an event, and what JSON writes with escapes or may not hold at all.
AWKWARD = [
    "content",
    "index",
    "delta",
    "x",
    "",
    " ",
    '"',
    "\\",
    "\n",
    "\t",
    "\u2028",
    "\x7f",
    "é",
    "\U0001f600",
    "\ufffd",
    "{}",
]
SHAPES = {
    "chat": lambda text: {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}]},
    "role each time": lambda text: {"choices": [{"index": 0, "delta": {"role": "assistant", "content": text}}]},
    "completion": lambda text: {"id": "x", "choices": [{"index": 0, "text": text, "logprobs": None}], "usage": None},
    "reasoning": lambda text: {
        "choices": [{"delta": {"content": None, "reasoning_content": text, "tool_calls": None}}]
    },
    "two texts": lambda text: {"choices": [{"delta": {"reasoning": text, "content": ""}}], "index": text},
}


@given(
    st.sampled_from(sorted(SHAPES)),
    st.lists(st.tuples(st.sampled_from(AWKWARD) | st.text(max_size=4), st.booleans()), max_size=30),
)
@settings(max_examples=300, deadline=None)
def test_events_that_repeat_all_but_their_text_are_read_as_json_reads_them(shape, written):
    """Python's own JSON writes the events, escaped or not; their texts in a row are the text, one arrival each."""
    parts = [json.dumps(SHAPES[shape](text), ensure_ascii=escaped) for text, escaped in written]
    listener = stream.Listener()
    listener.stream("".join(f"data: {part}\n\n" for part in parts).encode("utf-8", "surrogatepass"))
    said = listener.end()
    assert said.text == "".join(text for text, _ in written)
    assert len(said.arrivals) == sum(bool(text) for text, _ in written)


@given(st.sampled_from(sorted(SHAPES)), st.lists(st.sampled_from(AWKWARD), min_size=3, max_size=8), st.data())
@settings(max_examples=300, deadline=None)
def test_a_damaged_event_is_read_the_same_whether_or_not_the_one_before_is_remembered(shape, texts, data):
    body = bytearray("".join(f"data: {json.dumps(SHAPES[shape](text))}\n\n" for text in texts).encode())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(body) - 1))
        body[at : at + data.draw(st.integers(0, 3))] = data.draw(
            st.sampled_from([b'"', b"\\", b"\n", b"\xff", b":", b"0", b""])
        )
    with pytest.MonkeyPatch.context() as patch:
        remembered = heard(bytes(body))
        patch.setattr(stream, "_TRIES", 0)
        assert remembered == heard(bytes(body))


def heard(body):
    """What a listener makes of a body, or what it says is wrong with it; with what it had heard until then."""
    listener = stream.Listener()
    try:
        listener.stream(body)
        return listener.end()
    except (stream.StreamError, TypeError, AttributeError, ValueError) as error:
        return type(error).__name__, str(error), listener.said


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["choices", "delta", "content", "usage", "text", "meta_info", "error"]), inner, max_size=4
        )
    ),
    max_leaves=12,
)


@given(JSON)
@settings(max_examples=300, deadline=None)
def test_an_event_of_any_shape_is_understood_or_called_malformed(value):
    import json

    found = record([plain(chat("a"), json.dumps(value), chat("b", "stop"), "[DONE]")])
    assert found.ok or found.reason in transcript.REASONS


def test_the_stamp_of_a_chunk_is_that_of_the_read_with_its_last_byte():
    """Three events, cut so: head | first | half of second | rest of second and third. Reads at 1, 2, 3, 4 ms."""
    first, second, third = (
        f"{len(part):x}\r\n".encode() + part + b"\r\n" for part in sse(chat("a"), chat("b"), chat("c", "stop"))
    )
    found = record([STREAM, first, second[:20], second[20:] + third + b"0\r\n\r\n"])
    assert [round(chunk.at_s * 1e3, 6) for chunk in found.chunks] == [2, 4, 4]
    assert found.end_s == pytest.approx(0.004)
    assert found.kernel_stamps
    assert {round((chunk.read_s - chunk.at_s) * 1e6) for chunk in found.chunks} == {20}


def one_read_of_two(**changes):
    frames = chunked(*sse(chat("a"), chat("b"), chat("c", "stop")))
    first = frames[: frames.index(b"\r\n", 10) + 2]
    entries = log([STREAM + first, frames[len(first) :]], lag=changes.pop("lag", 20_000))
    answer, read_ns, _ = entries[1]
    entries[1] = (answer, read_ns, changes.pop("not_before", 0))
    told = {
        "sent": ZERO,
        "end": 0,
        "scheduled": None,
        "queued": None,
        "connect": None,
        "retried": 0,
        "reason": None,
        "detail": None,
    }
    found = understand(Raw(0, 0, told, entries), Prepared("p", "/x", b"{}"), Frame(ZERO, "measure"))
    return [chunk.merged for chunk in found.chunks]


def test_events_of_one_read_are_merged_when_a_busy_client_could_have_kept_them():
    """The read's last bytes came at 2 ms; the poll before returned at 1.1 ms: the first event may be 0.9 ms older."""
    assert one_read_of_two(not_before=ZERO + 1_100_000) == [False, True, False]


def test_events_of_one_read_are_one_burst_when_the_poll_before_says_so():
    """The poll before returned 50 us before the last bytes came: there is no more room than that."""
    assert one_read_of_two(not_before=ZERO + 2_000_000 - 50_000) == [False, False, False]


def test_events_read_one_by_one_are_bounds_only_where_the_kernel_had_joined_them():
    """Late reads at 9 ms took four events apart: the first has its own stamp, the next two share one, then the last."""
    frames = [b"%x\r\n%b\r\n" % (len(each), each) for each in sse(chat("a"), chat("b"), chat("c"), chat("d", "stop"))]
    at = [ZERO + STEP * ms for ms in (2, 5, 5, 8)]
    entries = [
        ((frame, stamp(ns), 0, None), ZERO + 9 * STEP, ZERO + STEP) for frame, ns in zip(frames, at, strict=True)
    ]
    entries[0] = ((STREAM + frames[0], *entries[0][0][1:]), *entries[0][1:])
    told = {"sent": ZERO, "end": 0, "scheduled": None, "queued": None, "connect": None, "retried": 0}
    raw = Raw(0, 0, {**told, "reason": "stopped", "detail": None}, entries)
    chunks = understand(raw, Prepared("p", "/x", b"{}"), Frame(ZERO, "measure")).chunks
    assert [chunk.at_s for chunk in chunks] == pytest.approx([0.002, 0.005, 0.005, 0.008])
    assert [chunk.merged for chunk in chunks] == [False, True, False, False]
    assert chunks[1].since_s == pytest.approx(0.002)  # it came after the first event, whose stamp is its own


def steady(waits_ms, last_bound_ms):
    """A stream whose events come singly after these waits, and then two in one read, 10 ms after the last."""
    frames = [b"%x\r\n%b\r\n" % (len(each), each) for each in sse(*(chat("x") for _ in waits_ms), chat("y"), chat("z"))]
    at = [ZERO + round(STEP * sum(waits_ms[: n + 1])) for n in range(len(waits_ms))]
    entries = [((frame, stamp(ns), 0, None), ns + 1000, 0) for frame, ns in zip(frames, at, strict=False)]
    entries[0] = ((STREAM + frames[0], *entries[0][0][1:]), *entries[0][1:])
    end = at[-1] + 10 * STEP
    entries.append(((frames[-2] + frames[-1], stamp(end), 0, None), end + 1000, end - round(last_bound_ms * STEP)))
    told = {"sent": ZERO, "end": 0, "scheduled": None, "queued": None, "connect": None, "retried": 0}
    raw = Raw(0, 0, {**told, "reason": "stopped", "detail": None}, entries)
    return understand(raw, Prepared("p", "/x", b"{}"), Frame(ZERO, "measure")).chunks


def test_events_closer_than_a_quarter_of_the_usual_wait_are_one_burst_of_the_server():
    """A step takes 10 ms: two events within 2.4 ms are of one step, within 2.6 ms perhaps not; the bound is kept."""
    burst = steady([5, 10, 10, 10], 2.4)
    assert [chunk.merged for chunk in burst] == [False] * 6
    apart = steady([5, 10, 10, 10], 2.6)
    assert [chunk.merged for chunk in apart] == [False] * 4 + [True, False]
    assert apart[4].since_s == pytest.approx(0.045 - 0.0026)
    assert [chunk.since_s for chunk in apart if not chunk.merged] == [None] * 5


def test_the_usual_wait_is_that_between_steps_where_a_server_writes_many_events_a_step():
    """Three steps of four events 0.3 ms apart, 100 ms from step to step, and the pair 10 ms later.

    Waits are 9 times 0.3 ms, twice 99.1 and once 10: without the longest 111.8 ms in 11 waits, and a quarter is 2.54.
    The median wait is 0.3 ms, and would call what came within 0.075 ms a burst.
    """
    waits = [5, *[0.3, 0.3, 0.3, 99.1] * 2, 0.3, 0.3, 0.3]
    assert not any(chunk.merged for chunk in steady(waits, 2.5))
    assert [chunk.merged for chunk in steady(waits, 2.6)] == [False] * 12 + [True, False]


def test_one_long_stall_does_not_make_bursts_of_what_came_apart():
    """Waits of 10 ms, one of 5 s and the pair 10 ms later: the quarter is 2.5 ms, stall or no stall."""
    assert [chunk.merged for chunk in steady([5, 10, 10, 5000, 10], 2.6)] == [False] * 5 + [True, False]


def test_a_bound_survives_being_stored():
    found = steady([5, 10, 10, 10], 2.6)
    one = record([plain(chat("a", "stop"), "[DONE]")])
    stored = type(one).from_json(json.loads(dataclasses.replace(one, chunks=found).to_line()))
    assert stored.chunks == found


def test_events_in_one_http_chunk_were_written_together():
    found = record([STREAM, chunked(b"".join(sse(chat("a"), chat("b"), chat("c", "stop"))))])
    assert [chunk.merged for chunk in found.chunks] == [False, False, False]
    assert len({chunk.at_s for chunk in found.chunks}) == 1


def test_without_kernel_stamps_the_read_time_stands_in_and_the_record_says_so():
    reads = [((plain(chat("a", "stop"), "[DONE]"), [], 0, None), ZERO + STEP, ZERO + STEP - 70_000)]
    told = {
        "sent": ZERO,
        "end": 0,
        "scheduled": None,
        "queued": None,
        "connect": None,
        "retried": 0,
        "reason": None,
        "detail": None,
    }
    found = understand(Raw(0, 0, told, reads), Prepared("p", "/x", b"{}"), Frame(ZERO, "measure"))
    assert not found.kernel_stamps
    assert found.chunks[0].at_s == found.chunks[0].read_s == pytest.approx(0.001)
    assert found.chunks[0].since_s == pytest.approx(0.00093)


def test_a_tokenizer_counts_the_whole_text_where_the_server_does_not_and_is_named():
    told = {
        "sent": ZERO,
        "end": 0,
        "scheduled": None,
        "queued": None,
        "connect": None,
        "retried": 0,
        "reason": None,
        "detail": None,
    }
    raw = Raw(0, 0, told, log([plain(chat("a b"), chat(" c d", "stop"), "[DONE]")]))
    found = understand(
        raw, Prepared("p", "/x", b"{}"), Frame(ZERO, "measure"), ("words", lambda text: len(text.split()))
    )
    assert (found.output_tokens, found.counter) == (4, "tokenizer:words")

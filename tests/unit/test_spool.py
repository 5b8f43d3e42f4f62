"""What the measuring processes keep, read back whole, torn and while it grows."""

import json
import marshal
import struct
from pathlib import Path

import pytest

from harness.load import spool
from harness.load.transcript import Prepared

ZERO = 1_700_000_000_000_000_000
PROMPTS = [Prepared(f"p{number}", "/v1/completions", b"a secret body", requested_tokens=2) for number in range(3)]


def answer(text: str) -> bytes:
    """A whole streamed completion of two tokens, as a server would send it."""
    events = [
        {"choices": [{"text": text, "finish_reason": "length"}]},
        {"choices": [], "usage": {"completion_tokens": 2, "prompt_tokens": 5}},
    ]
    body = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
    head = f"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: {len(body)}\r\n\r\n"
    return (head + body).encode()


def entry(index: int, pieces: list[bytes], *, ends: bool = True, reason: str | None = None) -> bytes:
    log = [((piece, [], 0, None), ZERO + 5_000_000, ZERO) for piece in pieces]
    facts = {
        "sent": ZERO + index * 1_000_000,
        "end": ZERO + 9_000_000,
        "scheduled": None,
        "queued": None,
        "connect": None,
        "reason": reason,
        "detail": reason,
        "retried": 0,
    }
    data = marshal.dumps((index, index + 1, 0, facts if ends else None, log))
    return struct.pack("<Q", len(data)) + data


@pytest.fixture
def level(tmp_path: Path) -> Path:
    spool.write_frame(tmp_path, PROMPTS, 1, keep_text=True)
    spool.write_zero(tmp_path, ZERO)
    return tmp_path


def test_records_come_back_with_their_prompt_phase_and_times(level: Path) -> None:
    (level / "spool0").write_bytes(entry(0, [answer("zero")]) + entry(2, [answer("two")]))
    (level / "spool1").write_bytes(entry(1, [answer("one")]))
    records = spool.recover(level)
    told = [(record.prompt_id, record.phase, record.ok, record.text, record.sent_s) for record in records]
    assert told == [
        ("p0", "warmup", True, "zero", 0.0),
        ("p1", "measure", True, "one", 0.001),
        ("p2", "measure", True, "two", 0.002),
    ]
    assert [(record.output_tokens, record.requested_tokens) for record in records] == [(2, 2)] * 3


def test_an_answer_kept_in_pieces_is_put_together_and_an_unfinished_one_left_out(level: Path) -> None:
    raw = answer("whole")
    kept = entry(1, [raw[:40]], ends=False) + entry(2, [raw[:70]], ends=False) + entry(1, [raw[40:]])
    (level / "spool0").write_bytes(kept)
    [record] = spool.recover(level)
    assert (record.prompt_id, record.ok, record.text) == ("p1", True, "whole")


def test_a_spool_cut_anywhere_yields_what_is_whole_of_it(level: Path) -> None:
    entries = [entry(number, [answer(str(number))]) for number in range(3)]
    whole = b"".join(entries)
    for cut in range(len(whole) + 1):
        (level / "spool0").write_bytes(whole[:cut])
        expected = sum(cut >= sum(map(len, entries[: number + 1])) for number in range(3))
        assert len(list(spool.raws(level))) == expected


def test_a_spool_with_noise_in_it_ends_there(level: Path) -> None:
    noise = struct.pack("<Q", 4) + b"\xff\xff\xff\xff"
    (level / "spool0").write_bytes(entry(0, [answer("zero")]) + noise + entry(1, [answer("one")]))
    assert [record.prompt_id for record in spool.recover(level)] == ["p0"]


def test_what_the_readers_gave_up_is_stopped(level: Path) -> None:
    (level / "spool0").write_bytes(entry(0, [answer("zero")[:60]], reason="stopped"))
    [record] = spool.recover(level)
    assert (record.ok, record.reason) == (False, "stopped")


def test_a_level_that_never_began_has_no_records(tmp_path: Path) -> None:
    assert spool.recover(tmp_path / "nowhere") == []
    spool.write_frame(tmp_path, PROMPTS, 0, keep_text=False)
    (tmp_path / "spool0").write_bytes(entry(0, [answer("zero")]))
    assert spool.recover(tmp_path) == []


def test_nothing_that_is_sent_is_kept(level: Path) -> None:
    assert not any(b"secret" in path.read_bytes() for path in level.iterdir())


def test_a_tail_hands_each_request_over_once_also_one_in_pieces_across_looks(level: Path) -> None:
    raw, path = answer("whole"), level / "spool0"
    tail = spool.Tail(level)
    assert tail.fresh() == []
    path.write_bytes(entry(0, [answer("zero")]) + entry(1, [raw[:40]], ends=False))
    assert [one.index for one in tail.fresh()] == [0]
    assert tail.fresh() == []
    rest = entry(1, [raw[40:]])
    with path.open("ab") as stream:
        stream.write(rest[:20])
        stream.flush()
        assert tail.fresh() == []  # torn: read again when it is whole
        stream.write(rest[20:])
    [found] = tail.understood(tail.fresh())
    assert (found.prompt_id, found.ok, found.text) == ("p1", True, "whole")

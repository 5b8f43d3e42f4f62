"""The reader knows the end of a stream from whatever pieces it comes in, spooled or not."""

import io
import itertools
from collections import deque
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from load_streams import DONE, ROLE, USAGE, chat, plain

from harness.load.reader import Reader, Slot

ANSWER = plain(ROLE, *(chat(str(number)) for number in range(4)), chat("", "length"), USAGE % 4, DONE)
HEAD = ANSWER.index(b"\r\n\r\n") + 4


class Watched(Reader):
    """A reader without a server: pieces are handed to it, and what it concludes is noted."""

    def __init__(self) -> None:
        self.spool, self.kept, self.answers, self.ends = io.BytesIO(), 0, None, list[Any]()
        self.slot = Slot(0)
        self.slot.state = "waiting"

    def take(self, piece: bytes, *, spool: bool) -> None:
        self.slot.log.append(((piece, [], 0, None), 0, 0))
        self._progress(self.slot, piece)
        if spool:
            self._spool_slot(self.slot)

    def _finish(self, slot: Slot, *, closes: bool) -> None:
        self.ends.append("finished")

    def _fail(self, slot: Slot, reason: str, detail: str) -> None:
        self.ends.append(reason)

    def _lost(self, slot: Slot, error: OSError | None) -> None:
        self.ends.append("lost")


def pieces(cuts: set[int]) -> list[bytes]:
    """The answer, cut at some places behind its head."""
    places = [0, *sorted(HEAD + cut for cut in cuts), len(ANSWER)]
    return [ANSWER[start:end] for start, end in itertools.pairwise(places) if start < end]


@given(st.sets(st.integers(0, len(ANSWER) - HEAD - 1)), st.lists(st.booleans(), min_size=1, max_size=40))
@example({0, 300, 400, len(ANSWER) - HEAD - 2}, [True])  # llama.cpp writes `0` and the empty line behind it apart
def test_a_stream_ends_with_its_last_piece_however_it_is_cut_and_spooled(cuts: set[int], spooled: list[bool]) -> None:
    reader = Watched()
    *before, last = pieces(cuts)
    for number, piece in enumerate(before):
        reader.take(piece, spool=spooled[number % len(spooled)])
    assert reader.ends == []
    reader.take(last, spool=False)
    assert reader.ends == ["finished"]


@pytest.mark.parametrize("last", [b"0;name=value\r\n\r\n", b"0\r\nX-Sum: 1\r\nX-More: 2\r\n\r\n", b"000\r\n\r\n"])
@pytest.mark.parametrize("apart", [True, False])
def test_a_spooled_stream_may_end_with_extensions_and_trailers(last: bytes, apart: bool) -> None:
    """RFC 9112, section 7.1: zeros, extensions of the last chunk, trailer fields, an empty line."""
    reader, rest = Watched(), ANSWER[-65:-5]
    for piece in (ANSWER[:HEAD], ANSWER[HEAD:-100], ANSWER[-100:-65]):
        reader.take(piece, spool=True)
    for piece in (rest, last[:3], last[3:]) if apart else (rest + last,):
        assert reader.ends == []
        reader.take(piece, spool=False)
    assert reader.ends == ["finished"]


@pytest.mark.parametrize("spool", [True, False])
def test_a_stream_that_is_cut_off_is_lost_not_malformed(spool: bool) -> None:
    reader = Watched()
    for piece in pieces(set(range(0, len(ANSWER) - HEAD, 50)))[:-1]:
        reader.take(piece, spool=spool)
    reader.take(b"", spool=False)
    assert reader.ends == ["lost"]


def test_what_has_to_stay_in_memory_is_not_looked_through_again_until_there_is_twice_as_much() -> None:
    """Answers that are to be sent back stay until their turn ends: 250,000 reads are over the bound of 200,000."""
    reader = Watched()
    reader.answers, reader.finished, reader.slots = object(), deque(), {1: reader.slot}
    reader.slot.log = [((b"x", [], 0, None), 0, 0)] * 250_000
    reader._spool_all()
    assert (reader.kept, reader.most) == (250_000, 500_000)
    reader.slot.log = []
    reader._spool_all()
    assert reader.most == 200_000


@pytest.mark.parametrize(
    ("reads", "ends", "stamps", "naps"),
    [
        (2_500, 20, True, True),  # 5,000 reads a second, 125 a request
        (2_500, 20, False, False),  # the read time is all there is: it must not be late
        (1_500, 20, True, False),  # 3,000 a second: waking for each is cheap
        (2_500, 200, True, False),  # 12 reads a request: a nap before its successor would count
    ],
)
def test_a_reader_naps_only_where_stamps_tell_the_time_and_many_chunks_come(
    reads: int, ends: int, stamps: bool, naps: bool
) -> None:
    reader = Watched()
    reader.slots, reader.paced = {3: reader.slot, 4: Slot(1)}, (1_000, 10)
    reader.worked, reader.busiest = 0, None
    reader.slot.log = [((b"data", [(1, 37, b"")] if stamps else [], 0, None), 0, 0)]
    reader.reads, reader.done, reader.failed = 1_000 + reads, 10 + ends - 1, 1
    reader._pace(500_000_000)
    assert (reader.nap_s > 0) == naps
    reader._pace(500_000_000)  # nothing came since
    assert reader.nap_s == 0


def test_the_busiest_half_second_of_a_level_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three spans of half a second the CPU took 0.1, 0.4 and 0.2 s: at most 0.8 of a core."""
    reader = Watched()
    reader.slots, reader.paced, reader.reads, reader.done, reader.failed = {}, (0, 0), 0, 0, 0
    reader.worked, reader.busiest = 1_000, None
    for worked in (100_001_000, 500_001_000, 700_001_000):
        monkeypatch.setattr("time.process_time_ns", lambda worked=worked: worked)
        reader._pace(500_000_000)
    assert reader.busiest == pytest.approx(0.8)

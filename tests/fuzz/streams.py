#!/usr/bin/env python3
"""Fuzz what understands a response, guided by coverage (atheris, libFuzzer): `python tests/fuzz/streams.py 60`.

Seconds as the argument; it ends with 0 when nothing was found. Starts from the traps of `load_streams`. Whatever came,
and however reads cut it: no exception, a reason out of the known ones, the same record for any cut, and the same
whether or not an event is taken for a repetition of the one before.
"""

import itertools
import struct
import sys
import tempfile
from pathlib import Path
from unittest import mock

import atheris

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]

with atheris.instrument_imports(include=["harness.load"]):
    from load_streams import TRAPS

    from harness.load import stream, transcript, wire

ZERO = 1_700_000_000_000_000_000
SLOWEST_S = 10
MEMORY_MB = 1024
LONGEST = 4096


def record(pieces: list[bytes]) -> transcript.RequestRecord:
    """The record of a response that came in these reads, a millisecond apart, and then ended."""
    framer = wire.Framer()
    try:
        whole = [framer.feed(piece) for piece in pieces][-1:] == [True] or framer.closed()
        reason = None if whole else "disconnected"
    except wire.WireError:
        reason = "malformed"
    log = []
    for number, piece in enumerate(pieces, start=1):
        at = ZERO + number * 1_000_000
        stamp = struct.pack("@6l", at // 10**9, at % 10**9, 0, 0, 0, 0)
        log.append(((piece, [(1, 37, stamp)], 0, None), at + 1000, at - 1000))
    told = {"sent": ZERO, "end": ZERO + 10**9, "scheduled": None, "queued": None, "connect": None, "retried": 0}
    raw = transcript.Raw(0, 0, {**told, "reason": reason, "detail": None}, log)
    return transcript.understand(raw, transcript.Prepared("p", "/x", b"{}"), transcript.Frame(ZERO, "measure"))


def said(found: transcript.RequestRecord) -> object:
    """A record without its times."""
    tokens = [chunk.tokens for chunk in found.chunks]
    return found.ok, found.reason, found.detail, found.text, tokens, found.output_tokens, found.extra


def try_one(data: bytes) -> None:
    """One input: its first bytes say where the reads are cut, the rest is the response."""
    cuts, raw = data[:4], data[4:]
    whole = record([raw] if raw else [])
    assert whole.ok or whole.reason in transcript.REASONS, whole
    places = sorted({len(raw) * cut // 256 for cut in cuts})
    pieces = [raw[start:end] for start, end in itertools.pairwise([0, *places, len(raw)]) if end > start]
    assert said(record(pieces)) == said(whole)
    with mock.patch.object(stream, "_TRIES", 0):
        assert said(record([raw] if raw else [])) == said(whole)


def main() -> None:
    """Run for as long as the argument says."""
    seconds = int(sys.argv[1]) if len(sys.argv) > 1 else 60
    with tempfile.TemporaryDirectory(prefix="harness-fuzz-") as folder:
        for number, trap in enumerate(TRAPS):
            (Path(folder) / f"trap{number}").write_bytes(b"\x40\x80\xc0\xff" + trap.raw)
        limits = [f"-max_total_time={seconds}", f"-timeout={SLOWEST_S}", f"-rss_limit_mb={MEMORY_MB}"]
        words = [sys.argv[0], *limits, f"-max_len={LONGEST}", f"-artifact_prefix={folder}/", folder]
        atheris.Setup(words, try_one)
        atheris.Fuzz()


if __name__ == "__main__":
    main()

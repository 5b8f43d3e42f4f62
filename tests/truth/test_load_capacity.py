"""The calibration reads real streams of its own source, and says what a chunk costs here."""

import subprocess
import sys
from dataclasses import replace

import pytest

from harness.load import capacity
from harness.load.client import Load
from harness.load.records import Chunk, ClientFacts, LevelTrace, RequestRecord

FOUND = capacity.Capacity(40_000.0, 25e-6, 15_000.0, 1, 0.0001)


def level(chunks, wall_s, processes=1):
    made = tuple(Chunk(at / chunks, at / chunks) for at in range(chunks))
    one = RequestRecord(0, 0, "measure", "p", 0.0, 1.0, True, chunks=made)
    facts = ClientFacts(processes, cpu_s=0.1, wall_s=wall_s, kernel_stamps=True, reads=chunks, parse_s=0.0)
    return LevelTrace((one,), facts, 0.0, "closed", 6)


def test_a_calibration_says_what_a_chunk_costs_and_how_many_that_makes():
    found = capacity.calibrate(8, 400.0, seconds=0.5)
    assert found.chunks_s == pytest.approx(1 / found.cpu_per_chunk_s)
    assert 0 < found.cpu_per_chunk_s < 0.01
    # 8 streams of 25 chunks each, 20 ms apart: never faster than planned, and the wall includes the first token's wait.
    assert 0 < found.rate_tried <= 8 / 0.020 * 25 / 24
    assert found.lag_p99_s >= 0


def test_an_interrupt_does_not_meet_the_source_of_a_calibration():
    """A terminal sends Ctrl-C to all of the foreground: the calibration's own is to end by what its parent does."""
    script = (
        "import os, psutil, signal, sys, threading, time\n"
        "from harness.load import capacity\n"
        "signal.signal(signal.SIGINT, lambda *_: None)\n"
        "def interrupt():\n"
        "    def found(): return [c for c in psutil.Process().children() if 'harness.load.reader' in c.cmdline()]\n"
        "    while not found(): time.sleep(0.01)\n"
        "    os.killpg(0, signal.SIGINT)\n"
        "threading.Thread(target=interrupt, daemon=True).start()\n"
        "print(capacity.calibrate(8, 400.0, seconds=0.5).processes)\n"
    )
    words = [sys.executable, "-c", script]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False, start_new_session=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "1\n", "")


def test_several_processes_read_as_often_as_one_does():
    found = capacity.calibrate(9, 400.0, processes=3, seconds=0.2)
    assert found.chunks_s == pytest.approx(3 / found.cpu_per_chunk_s)
    assert found.rate_tried <= 400 * 1.2  # one process: 3 streams of 27 chunks


def test_a_rate_that_the_source_cannot_send_is_tried_as_far_as_it_can():
    found = capacity.calibrate(40, 1e6, seconds=0.2)
    assert found.rate_tried <= 15_000 * 1.5


def test_what_a_chunk_costs_is_worked_out_from_what_one_of_the_processes_read(monkeypatch):
    """Nine streams on two processes: five on the one that is tried, 300 chunks a second for 2 s, so 120 tokens each.

    It read 1,000 times for 50 ms of CPU: 50 us each, 20,000 a second, 40,000 with two. 3,000 chunks in 2.5 s are
    1,200 a second; the k-th was read k us late, so that 99 % were read within 2.97 ms.
    """
    asked = []
    chunks = tuple(Chunk(1.0, 1.0 + late * 1e-6) for late in range(3000))

    def read(streams, gap_s, tokens):
        asked.append((streams, gap_s, tokens))
        trace = level(1, 2.5)
        facts = replace(trace.client, cpu_s=0.05, reads=1000)
        return replace(trace, records=(replace(trace.records[0], chunks=chunks),), client=facts)

    monkeypatch.setattr(capacity, "_read_source", read)
    found = capacity.calibrate(9, 300.0, processes=2)
    assert asked == [(5, pytest.approx(5 / 300), 120)]
    assert (found.chunks_s, found.cpu_per_chunk_s) == (pytest.approx(40_000), pytest.approx(50e-6))
    assert (found.rate_tried, found.processes) == (pytest.approx(1200), 2)
    assert found.lag_p99_s == pytest.approx(2970e-6)


def test_without_kernel_stamps_a_calibration_knows_no_lag(monkeypatch):
    trace = level(10, 1.0)
    unstamped = replace(trace, client=replace(trace.client, kernel_stamps=False))
    monkeypatch.setattr(capacity, "_read_source", lambda *_, **__: unstamped)
    assert capacity.calibrate(1).lag_p99_s is None


def test_the_clients_of_several_machines_are_not_spoken_for_by_one():
    trace = level(60_000, 3.0)
    two = replace(trace, client=replace(trace.client, hosts=({"host": "a"}, {"host": "b"})))
    known = capacity.Capacities()
    known._known[1] = FOUND
    assert known.of(two) == (None, "not calibrated: the load came from 2 machines")


def test_a_level_with_few_chunks_or_that_was_short_is_not_worth_a_calibration():
    never = capacity.Capacities(seconds=2.0)
    assert never.of(level(2997, 3.0)) == (None, "not calibrated: 999 chunks/s are few for any client")
    assert never.of(level(3000, 1.9)) == (None, "not calibrated: the level was over in 1.9 s")


def test_a_run_calibrates_once_for_each_number_of_processes(monkeypatch):
    made = []
    real = capacity.calibrate

    def counted(concurrency, **more):
        made.append((concurrency, more["processes"]))
        return real(concurrency, **more)

    monkeypatch.setattr(capacity, "calibrate", counted)
    capacities = capacity.Capacities(seconds=0.2)
    first = capacities.of(level(3000, 1.0))
    assert first[0] > 0
    assert first[1].startswith("calibrated: ")
    assert capacities.of(level(9000, 1.0)) == first
    two = level(3000, 1.0, processes=2)
    assert capacities.of(two) != first
    assert made == [(6, 1), (6, 2)]


def test_a_sweep_with_many_streams_is_calibrated_before_its_first_level(monkeypatch):
    made = []
    monkeypatch.setattr(capacity, "calibrate", lambda streams, **more: made.append((streams, more)) or FOUND)
    capacities = capacity.Capacities(seconds=2.0)
    loads = [Load(concurrency=count, processes=1) for count in (1, 10, 100, 250)] + [Load(mode="serial")]
    assert list(capacities.before(loads)) == ["calibrating the client for 2 s, with 250 streams"]
    assert made == [(250, {"processes": 1, "seconds": 2.0})]
    assert list(capacities.before(loads)) == []  # known: a launch that follows does not calibrate again
    assert capacities.of(level(10, 0.1)) == (40_000.0, "calibrated: 25.0 us a chunk at 15000/s")


def test_one_level_or_few_streams_do_not_wait_for_a_calibration(monkeypatch):
    monkeypatch.setattr(capacity, "calibrate", lambda *_, **__: pytest.fail("nobody needs this"))
    capacities = capacity.Capacities()
    assert list(capacities.before([Load(concurrency=1000)])) == []
    assert list(capacities.before([Load(concurrency=count) for count in (1, 2, 5, 10)])) == []
    assert list(capacities.before([Load(mode="open", concurrency=None, rate=r) for r in (10.0, 500.0)])) == []


def test_each_number_of_processes_that_a_sweep_uses_is_tried_with_its_most_streams(monkeypatch):
    made = []
    monkeypatch.setattr(
        capacity, "calibrate", lambda streams, **more: made.append((streams, more["processes"])) or FOUND
    )
    loads = [Load(concurrency=count, processes=-(-count // 256)) for count in (64, 256, 500, 512)]
    assert len(list(capacity.Capacities().before(loads))) == 2
    assert made == [(256, 1), (512, 2)]


def test_an_open_loop_is_calibrated_with_as_many_streams_as_it_had_at_once(monkeypatch):
    made = []
    monkeypatch.setattr(capacity, "calibrate", lambda streams, **more: made.append(streams) or FOUND)
    one = level(1000, 1.0).records[0]
    three = replace(level(3000, 1.0), mode="open", concurrency=None, records=(one, one, replace(one, sent_s=1.0)))
    assert capacity.Capacities(seconds=0.2).of(three) == (40_000.0, "calibrated: 25.0 us a chunk at 15000/s")
    assert made == [2]


def test_a_calibration_that_fails_costs_the_figure_and_not_the_run(monkeypatch):
    monkeypatch.setattr(capacity, "_read_source", lambda streams, gap_s, tokens: failed())
    found, said = capacity.Capacities(seconds=0.1).of(level(3000, 1.0))
    assert (found, said) == (None, "not calibrated: the client's calibration lost 1 of 1 loopback streams")


def test_a_calibration_that_fails_before_a_sweep_is_told_by_the_level_that_needs_it(monkeypatch):
    monkeypatch.setattr(capacity, "_read_source", lambda *_, **__: failed())
    capacities = capacity.Capacities()
    loads = [Load(concurrency=count, processes=1) for count in (1, 64)]
    assert list(capacities.before(loads)) == ["calibrating the client for 2 s, with 64 streams"]
    assert capacities.of(level(9000, 3.0)) == (
        None,
        "not calibrated: the client's calibration lost 1 of 1 loopback streams",
    )


def failed():
    trace = level(10, 1.0)
    return replace(trace, records=(replace(trace.records[0], ok=False),))

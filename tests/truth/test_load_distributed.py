"""A load from several machines is the load of one: two workers on this host, whose clocks are said to be far apart.

The clocks are really one, and each worker adds a known lead to everything it says of its clock (`--pretend-clock-ms`),
so that the truth is known: the lead must be found within the bound that is recorded, and every stamp must lie between
the instants at which the server, by its own clock, handed this chunk and the next one to the kernel.
"""

import contextlib
import json
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.truthd import COMPILER, start
from harness.errors import InputError, MeasurementError, ServerError
from harness.load import channel, distributed, transcript, worker
from harness.load.client import Load, Target, run_level
from harness.load.clocks import Offset
from harness.load.distributed import Part, Workers
from harness.load.records import LevelTrace
from harness.load.transcript import Prepared
from harness.stats import metrics

LEADS_MS = (750.0, -300.0)


def body(tokens):
    return json.dumps(
        {"model": "truth", "stream": True, "stream_options": {"include_usage": True}, "max_tokens": tokens}
    ).encode()


def prepared(count, tokens=8, query=""):
    return [
        Prepared(f"p{index}", f"/v1/chat/completions?id={index}&{query}", body(tokens), requested_tokens=tokens)
        for index in range(count)
    ]


@pytest.fixture(scope="module")
def truth():
    with start(native=COMPILER is not None, ttft_us=5000, gap_us=3000) as server:
        yield server


@contextlib.contextmanager
def gathered(folder: Path, leads=LEADS_MS) -> Iterator[tuple[Workers, list[subprocess.Popen]]]:
    contact = folder / "clients.json"
    words = [sys.executable, "-m", "harness.load.worker", str(contact), "--wait-s", "60"]
    started = [
        subprocess.Popen(
            [*words, "--name", f"n{number}", "--pretend-clock-ms", str(lead)], stderr=subprocess.PIPE, text=True
        )
        for number, lead in enumerate(leads, start=1)
    ]
    try:
        with Workers(contact, len(leads), "127.0.0.1") as workers:
            assert contact.stat().st_mode & 0o777 == 0o600
            assert sorted(workers.gather(60.0)) == [f"n{number}" for number in range(1, len(leads) + 1)]
            yield workers, started
        assert not contact.exists()
        assert {one.wait(30) for one in started} <= {0, -signal.SIGKILL}
    finally:
        for one in started:
            if one.poll() is None:
                one.kill()
            one.communicate()


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    with gathered(tmp_path_factory.mktemp("run")) as (workers, _):
        yield workers


def facts(trace: LevelTrace) -> list[tuple]:
    """All of a trace that is no time."""
    return sorted(
        (one.index, one.phase, one.prompt_id, one.ok, one.output_tokens, tuple(chunk.tokens for chunk in one.chunks))
        for one in trace.records
    )


CLOSED = Load(concurrency=6, requests=24, warmup_requests=6, processes=1)


def test_two_machines_bring_back_exactly_what_one_does(pair, truth):
    truth.reset()
    requests = prepared(30, tokens=21, query="k=4&first=1&count=1")
    alone = run_level(Target("127.0.0.1", truth.port), CLOSED, requests)
    truth.reset()
    seen = []
    together = pair.run_level(Target("127.0.0.1", truth.port), CLOSED, requests, on_record=seen.append)
    assert facts(together) == facts(alone)
    assert seen == list(together.records)
    assert sorted(entry["id"] for entry in truth.log()) == list(range(30))
    assert truth.totals()["peak"] == max(count for _, count in together.in_flight()) == 6
    assert {record.slot for record in together.records} == set(range(6))
    assert (together.mode, together.concurrency, together.client.processes) == ("closed", 6, 2)
    assert [host["requests"] for host in together.client.hosts] == [15, 15]


def test_the_lead_of_every_clock_is_found_within_the_bound_that_is_recorded(pair, truth):
    trace = pair.run_level(Target("127.0.0.1", truth.port), replace(CLOSED, requests=6), prepared(12))
    leads = {f"n{number}": lead / 1e3 for number, lead in enumerate(LEADS_MS, start=1)}
    assert {host["name"] for host in trace.client.hosts} == set(leads)
    for host in trace.client.hosts:
        assert host["pretended_clock_s"] == leads[host["name"]]
        for clock in (host["clock_before"], host["clock_after"]):
            # A float holds nanoseconds since 1970 to within 240 ns; these are differences, and exact to 1 ns.
            assert abs(clock["offset_s"] - leads[host["name"]]) <= clock["bound_s"] + 1e-9
            assert 0 <= clock["bound_s"] <= clock["rtt_s"] / 2 + 1e-9
            assert clock["exchanges"] == 64


def test_stamps_of_every_machine_are_on_one_clock(pair, truth):
    truth.reset()
    trace = pair.run_level(
        Target("127.0.0.1", truth.port), replace(CLOSED, warmup_requests=0), prepared(24, tokens=24, query="k=2")
    )
    log = {entry["id"]: entry for entry in truth.log()}
    bound = max(host["clock_bound_s"] for host in trace.client.hosts) + 1e-6
    zero = round(trace.started_at * 1e9)
    checked = 0
    for record in trace.records:
        sent = [(at - zero) / 1e9 for _, at, _ in log[record.index]["chunks"]]
        assert record.sent_s < (log[record.index]["arrived"] - zero) / 1e9 + bound
        for chunk, begun, following in zip(record.chunks, sent, [*sent[1:], float("inf")], strict=True):
            if not chunk.merged:
                assert begun - bound <= chunk.at_s <= following + 2e-4 + bound
                checked += 1
    assert checked > 100


def test_percentiles_are_those_of_the_truth_from_one_machine_and_from_two(pair, truth):
    """TTFT is at least what the server took to its first chunk, and at most to its second: so is each percentile."""
    load, requests = replace(CLOSED, requests=120, warmup_requests=0), prepared(120, query="jitter_us=2000")
    target = Target("127.0.0.1", truth.port)
    for run in (run_level, pair.run_level):
        truth.reset()
        trace = run(target, load, requests)
        log = {entry["id"]: entry for entry in truth.log()}
        zero = round(trace.started_at * 1e9)
        bound = max((host["clock_bound_s"] for host in trace.client.hosts), default=0.0)
        kept = [record for record in trace.records if not record.chunks[0].merged]
        least = [(log[one.index]["chunks"][0][1] - log[one.index]["arrived"]) / 1e9 for one in kept]
        most = [(log[one.index]["chunks"][1][1] - zero) / 1e9 - one.sent_s for one in kept]
        low, found, high = (metrics.summary(each) for each in (least, [metrics.ttft(one) for one in kept], most))
        for name in ("p50", "p90"):
            assert getattr(low, name) - 1e-6 <= getattr(found, name) <= getattr(high, name) + 2e-4 + bound


def test_an_open_loop_keeps_the_one_schedule(pair, truth):
    load = Load(mode="open", rate=200.0, concurrency=None, requests=40, seed=7, processes=1)
    target, requests = Target("127.0.0.1", truth.port), prepared(40)
    alone = run_level(target, load, requests)
    together = pair.run_level(target, load, requests)
    assert {one.index: one.scheduled_s for one in together.records} == {
        one.index: one.scheduled_s for one in alone.records
    }
    assert facts(together) == facts(alone)


@pytest.mark.parametrize("cap", [1, 3])
def test_a_cap_on_open_requests_holds_for_all_machines_together(pair, truth, cap):
    truth.reset()
    load = Load(mode="open", rate=400.0, concurrency=cap, requests=12, processes=2)
    trace = pair.run_level(Target("127.0.0.1", truth.port), load, prepared(12))
    assert sorted(record.index for record in trace.records) == list(range(12))
    assert truth.totals()["peak"] <= cap


def test_turns_of_a_conversation_stay_on_one_slot(pair, truth):
    requests = [replace(each, conversation=f"c{number // 3}") for number, each in enumerate(prepared(18))]
    trace = pair.run_level(Target("127.0.0.1", truth.port), Load(concurrency=4, requests=18, processes=1), requests)
    slots = {}
    for record in trace.records:
        slots.setdefault(record.index // 3, set()).add(record.slot)
    assert [len(one) for one in slots.values()] == [1] * 6


def test_a_drained_warm_up_and_a_serial_level_work_as_on_one_machine(pair, truth):
    target = Target("127.0.0.1", truth.port)
    trace = pair.run_level(target, replace(CLOSED, requests=6, drain_warmup=True), prepared(12))
    assert Counter(record.phase for record in trace.records) == {"warmup": 6, "measure": 6}
    assert max(one.end_s for one in trace.records if one.phase == "warmup") < 0
    serial = pair.run_level(target, Load(mode="serial", requests=3), prepared(3))
    assert max(count for _, count in serial.in_flight()) == 1
    assert len(serial.client.hosts) == 1


def test_a_level_that_is_stopped_brings_what_came_until_then(pair, truth):
    stop = threading.Event()
    counted = []

    def progress(**counts):
        counted.append(counts["sent"])
        stop.set()

    load = Load(concurrency=4, duration_s=600.0, processes=1)
    trace = pair.run_level(Target("127.0.0.1", truth.port), load, prepared(4), stop=stop, progress=progress)
    assert trace.stopped
    assert len(trace.records) >= counted[0] > 0


def test_a_server_that_is_not_there_fails_the_level_and_not_the_next_one(pair, truth):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        with pytest.raises(MeasurementError, match=r"machine `n[12]`: cannot connect to `127.0.0.1:"):
            pair.run_level(Target("127.0.0.1", port), CLOSED, prepared(4))
    trace = pair.run_level(Target("127.0.0.1", truth.port), replace(CLOSED, requests=6), prepared(12))
    assert Counter(record.reason for record in trace.records) == {None: 12}


def test_a_load_that_makes_no_sense_is_refused_before_anybody_is_asked(pair):
    with pytest.raises(InputError, match="a closed loop needs a concurrency above zero"):
        pair.run_level(Target("127.0.0.1", 1), Load(concurrency=0, requests=1), prepared(1))


def test_a_machine_that_is_lost_voids_the_level_by_name(truth, tmp_path):
    with gathered(tmp_path, leads=(0.0, 0.0)) as (workers, started):
        seen = threading.Event()

        def kill():
            seen.wait(30)
            started[1].send_signal(signal.SIGKILL)
            started[1].wait()

        thread = threading.Thread(target=kill)
        thread.start()
        with pytest.raises(MeasurementError, match="machine `n2`, which offers part of the load, is lost"):
            workers.run_level(
                Target("127.0.0.1", truth.port),
                Load(concurrency=4, duration_s=600.0, processes=1),
                prepared(4),
                progress=lambda **_: seen.set(),
            )
        thread.join()


def test_who_does_not_know_the_token_is_turned_away_on_either_side(tmp_path, capsys):
    contact = tmp_path / "clients.json"
    with Workers(contact, 1, "127.0.0.1") as workers:
        host, port, _ = channel.read_contact(contact)
        wrong = tmp_path / "wrong.json"
        channel.write_contact(wrong, host, port, "another token")
        names = []
        gathering = threading.Thread(target=lambda: names.extend(workers.gather(60.0)))
        gathering.start()
        assert worker.main([str(wrong), "--wait-s", "0"]) == InputError.exit_code
        assert "the token is another's" in capsys.readouterr().err
        with socket.create_connection((host, port)) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
            assert b"challenge" in stranger.recv(1000)
        honest = threading.Thread(target=worker.main, args=([str(contact), "--name", "n1", "--wait-s", "30"],))
        honest.start()
        gathering.join(30)
        assert names == ["n1"]
    honest.join(30)
    assert not honest.is_alive()


def test_machines_that_do_not_come_are_missed_at_the_deadline(tmp_path):
    with (
        Workers(tmp_path / "clients.json", 2, "127.0.0.1") as workers,
        pytest.raises(ServerError, match="0 of 2 machines came within 0 s to offer the load"),
    ):
        workers.gather(0.2)


# -- the same records, split ------------------------------------------------------------------------------------------


def halves(trace: LevelTrace, gained: float) -> list[Part]:
    """A trace as two machines would have brought it, the second with a clock that gains `gained` seconds a second."""
    known = Offset(0.5, 1e-6, 2e-6, 64, 100.0)
    later = replace(known, offset_s=0.5 + 50 * gained, at_s=150.0)
    even = tuple(one for one in trace.records if one.slot % 2 == 0)
    odd = tuple(transcript.shifted(one, gained * one.sent_s) for one in trace.records if one.slot % 2)
    client = replace(trace.client, processes=1)
    return [Part("n1", even, client, known, known), Part("n2", odd, client, known, later)]


def test_records_that_were_split_merge_to_the_same_result_to_the_last_digit(truth):
    trace = run_level(Target("127.0.0.1", truth.port), replace(CLOSED, requests=120), prepared(126))
    who = metrics.Identity("cell", "arm", "launch")
    level = {"mode": "closed", "concurrency": 6}
    whole = metrics.summarise(trace, who, level)
    again = metrics.summarise(distributed.merged(halves(trace, 0.0), CLOSED, round(trace.started_at * 1e9)), who, level)
    same = ("requests", "ok", "output_tokens", "prompt_tokens", "window", "throughput", "metrics", "counter")
    assert {name: getattr(again, name) for name in same} == {name: getattr(whole, name) for name in same}
    assert whole.metrics["ttft_s"].p90 is not None
    assert again.client["peak_in_flight"] == whole.client["peak_in_flight"] == 6
    assert again.client["hosts"][0]["name"] == "n1"


def test_what_a_clock_gained_during_the_level_is_taken_off(truth):
    trace = run_level(Target("127.0.0.1", truth.port), replace(CLOSED, requests=30), prepared(36))
    merged = distributed.merged(halves(trace, 2e-3), CLOSED, 0)
    there = {one.index: one for one in trace.records}
    for one in merged.records:
        # 2 ms/s of at most a few seconds, of which the correction leaves its own square.
        assert one.sent_s == pytest.approx(there[one.index].sent_s, abs=4e-6 * abs(one.sent_s) + 1e-9)
        assert metrics.ttft(one) == pytest.approx(metrics.ttft(there[one.index]), abs=1e-12)

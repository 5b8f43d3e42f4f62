"""What a load is before it meets a server: when requests are due, by how many processes, on which cores and sockets."""

import os
import select
import socket
import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
from fakes.scripted import read_request, scripted
from load_streams import ROLE, USAGE, chat, plain
from scipy import stats

from harness.errors import InputError
from harness.load import client, reader, wire
from harness.load.client import Load, Target, run_level
from harness.load.transcript import Prepared


def due_s(**load):
    return [at / 1e9 for at, _ in client._schedule(Load(mode="open", concurrency=None, **load))]


@pytest.mark.parametrize("shape", [0.25, 1.0, 4.0])
def test_gaps_of_an_open_loop_are_of_the_gamma_distribution_asked_for(shape):
    """By scipy's: mean 1 / rate, and its shape the burstiness; 1 is Poisson's exponential."""
    gaps = np.diff(due_s(rate=100.0, burstiness=shape, requests=20_001))
    assert stats.kstest(gaps, stats.gamma(shape, scale=0.01 / shape).cdf).pvalue > 0.01
    assert gaps.std() / gaps.mean() == pytest.approx(shape**-0.5, rel=0.05)


def test_a_rate_rises_over_its_ramp_from_a_tenth_and_is_kept_from_then_on():
    """10 a second over 2 s: 1 a second at 0, 5 at 1.0, 6 at 1.2; every tenth of a second after the ramp."""
    due = due_s(rate=10.0, burstiness=None, ramp_up_s=2.0, requests=20)
    assert due[:4] == pytest.approx([0.0, 1.0, 1.2, 1.2 + 1 / 6])
    assert np.diff([at for at in due if at >= 2.0]) == pytest.approx(0.1)


def test_an_open_loop_ends_by_count_or_by_time_whichever_comes_first():
    assert due_s(rate=10.0, burstiness=None, duration_s=0.45) == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4])
    assert len(due_s(rate=10.0, burstiness=None, duration_s=0.45, requests=2)) == 2
    assert len(due_s(rate=10.0, burstiness=None, requests=2, warmup_requests=3)) == 5


@pytest.mark.parametrize(
    ("cores", "load", "processes", "bound"),
    [
        (64, Load(concurrency=256), 1, (63,)),
        (64, Load(concurrency=257), 2, (62, 63)),
        (64, Load(concurrency=10_000), 16, tuple(range(48, 64))),  # a quarter of the cores at most
        (64, Load(mode="open", concurrency=None, rate=600.0), 3, (61, 62, 63)),
        (8, Load(concurrency=2000), 2, (6, 7)),
        (7, Load(concurrency=2000), 1, ()),  # none to spare
        (2, Load(concurrency=2000), 1, ()),
        (64, Load(concurrency=1, cpus=(5,)), 1, (5,)),
    ],
)
def test_processes_are_enough_for_the_load_and_bound_where_cores_are_to_spare(
    monkeypatch, cores, load, processes, bound
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    assert client.default_processes(load) == processes
    assert client._cores(load, processes) == bound


ANSWER = plain(ROLE, chat("a"), chat("b", "stop"), USAGE % 2, "[DONE]")


def test_slots_of_a_closed_loop_begin_one_after_the_other_over_the_ramp():
    """Four slots over 0.4 s: slot n sends its first request no earlier than n tenths of a second after the start."""

    def script(sock, _):
        while read_request(sock):
            sock.sendall(ANSWER)

    requests = [Prepared("p", "/v1/chat/completions", b"{}")]
    with scripted(script) as port:
        load = Load(concurrency=4, duration_s=0.6, ramp_up_s=0.4, processes=2)
        trace = run_level(Target("127.0.0.1", port), load, requests)
    first = {slot: min(each.sent_s for each in trace.records if each.slot == slot) for slot in range(4)}
    assert all(first[slot] >= slot * 0.1 for slot in range(4))


@pytest.mark.skipif(sys.platform != "linux", reason="processes are bound to cores on Linux alone")
def test_a_measuring_process_runs_on_the_core_that_the_record_names():
    core, seen, held = max(os.sched_getaffinity(0)), set(), threading.Event()

    def script(sock, _):
        while read_request(sock):
            held.wait(30)
            sock.sendall(ANSWER)

    def look(**_counts):
        for child in psutil.Process().children():
            if "harness.load.reader" in child.cmdline():
                seen.add(tuple(child.cpu_affinity()))
        held.set()

    with scripted(script) as port:
        load = Load(concurrency=1, requests=1, cpus=(core,))
        trace = run_level(
            Target("127.0.0.1", port), load, [Prepared("p", "/v1/chat/completions", b"{}")], progress=look
        )
    assert seen == {(core,)}
    assert trace.client.cpus == (core,)


def test_a_connection_sends_at_once_and_leaves_its_receive_buffer_to_the_kernel():
    """Setting SO_RCVBUF would end the kernel's own tuning, which goes far beyond what a program may ask for."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as plain_one:
        opener, slot = reader.Reader.__new__(reader.Reader), reader.Slot(0)
        opener.job = {"family": socket.AF_INET, "address": server.getsockname(), "stamps": sys.platform == "linux"}
        opener.slots, opener.epoll = {}, select.epoll()
        opener._connect(slot)
        with slot.sock, opener.epoll:
            assert slot.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0
            assert slot.sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) >= plain_one.getsockopt(
                socket.SOL_SOCKET, socket.SO_RCVBUF
            )


def test_a_request_asks_for_no_compression_and_says_its_own_headers():
    raw = wire.request("h:1", "/v1/completions", b"{}", {"Authorization": "Bearer x"})
    head, _, body = raw.partition(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    assert lines[0] == b"POST /v1/completions HTTP/1.1"
    assert {b"Host: h:1", b"Accept-Encoding: identity", b"Content-Length: 2", b"Authorization: Bearer x"} <= set(lines)
    assert body == b"{}"


def test_headers_of_the_target_go_with_every_request_and_an_ipv6_host_stands_in_brackets():
    heard = []
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as listener:

        def serve():
            sock, _ = listener.accept()
            with sock:
                for _ in range(2):
                    heard.append(read_request(sock))
                    sock.sendall(ANSWER)

        thread = threading.Thread(target=serve)
        thread.start()
        port = listener.getsockname()[1]
        target = Target("::1", port, headers={"Authorization": "Bearer x"})
        trace = run_level(target, Load(concurrency=1, requests=2), [Prepared("p", "/v1/completions", b"{}")])
        thread.join(30)
    assert [record.ok for record in trace.records] == [True, True]
    for request in heard:
        assert {b"Host: [::1]:%d" % port, b"Authorization: Bearer x"} <= set(request.split(b"\r\n"))


def test_the_time_that_connecting_took_is_told_once_for_each_connection():
    def script(sock, _):
        while read_request(sock):
            sock.sendall(ANSWER)

    with scripted(script) as port:
        load = Load(concurrency=1, requests=3)
        trace = run_level(Target("127.0.0.1", port), load, [Prepared("p", "/v1/chat/completions", b"{}")])
    first, *later = (record.connect_s for record in trace.records)
    assert first > 0
    assert later == [None, None]


def test_a_slot_that_cannot_connect_three_times_in_a_row_stays_empty():
    """The server answers once, ends the connection, and is gone."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve():
        sock, _ = listener.accept()
        with sock:
            read_request(sock)
            listener.close()
            sock.sendall(ANSWER.replace(b"Content-Type", b"Connection: close\r\nContent-Type", 1))

    thread = threading.Thread(target=serve)
    thread.start()
    target = Target("127.0.0.1", listener.getsockname()[1])
    trace = run_level(target, Load(concurrency=1, requests=10), [Prepared("p", "/v1/chat/completions", b"{}")])
    thread.join(30)
    assert [record.reason for record in trace.records] == [None, "connect", "connect", "connect"]


def test_a_wall_clock_that_is_set_during_a_level_is_told(monkeypatch):
    ahead = [0]
    clock = SimpleNamespace(
        time_ns=lambda: time.time_ns() + ahead[0], monotonic_ns=time.monotonic_ns, process_time=time.process_time
    )
    monkeypatch.setattr(client, "time", clock)

    def script(sock, _):
        while read_request(sock):
            ahead[0] = 250_000_000
            sock.sendall(ANSWER)

    with scripted(script) as port:
        load = Load(concurrency=1, requests=1)
        trace = run_level(Target("127.0.0.1", port), load, [Prepared("p", "/v1/chat/completions", b"{}")])
    assert trace.client.clock_step_s == pytest.approx(0.25, abs=0.05)


def test_an_open_loop_without_a_rate_or_a_shape_is_refused():
    with pytest.raises(InputError) as caught:
        client.check(Load(mode="open", rate=0.0, burstiness=0.0, requests=1), [Prepared("p", "/x", b"{}")])
    assert "an open loop needs a rate above zero, got 0.0" in str(caught.value)
    assert "burstiness is above zero, got 0.0" in str(caught.value)

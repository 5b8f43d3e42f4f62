"""The load client against servers whose truth is known: counts are exact, stamps lie where they must, faults are named.

No assertion depends on how fast the machine is: a stamp is held between the instants at which the server, by its own
clock, handed this chunk and the next one to the kernel.
"""

import itertools
import json
import os
import resource
import select
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import replace

import fakes.tls
import psutil
import pytest
from fakes.scripted import read_request, scripted
from load_streams import ROLE, STREAM, USAGE, chat, chunked, plain, sse

from benchmarks.truthd import COMPILER, start
from harness.errors import InputError, ServerError
from harness.load import answers, reader
from harness.load.client import Load, Target, run_level
from harness.load.transcript import Prepared

NATIVE = COMPILER is not None


def body(tokens=8, **more):
    asked = {"model": "truth", "stream": True, "stream_options": {"include_usage": True}, "max_tokens": tokens, **more}
    return json.dumps(asked).encode()


def prepared(count, *, path="/v1/chat/completions", query="", tokens=8, dialect="chat"):
    return [
        Prepared(f"p{index}", f"{path}?id={index}&{query}", body(tokens), dialect=dialect, requested_tokens=tokens)
        for index in range(count)
    ]


def local(port, **more):
    return Target("127.0.0.1", port, **more)


def reasons(trace):
    return Counter(record.reason for record in trace.records)


@pytest.fixture(scope="module", params=["c", "python"])
def truth(request):
    if request.param == "c" and not NATIVE:
        pytest.skip("no C compiler here: only the Python truth server is tested")
    with start(native=request.param == "c", ttft_us=5000, gap_us=3000) as server:
        assert server.native == (request.param == "c")
        yield server


@pytest.fixture(autouse=True)
def fresh(request):
    if "truth" in request.fixturenames:
        request.getfixturevalue("truth").reset()


def planned(k, first, tokens):
    """Tokens of each chunk by hand: the first chunk, then k at a time, then the rest."""
    sizes, left = [], tokens
    while left:
        sizes.append(min((first or k) if not sizes else k, left))
        left -= sizes[-1]
    return sizes


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize(("k", "first"), [(1, 1), (4, 4), (4, 1), (3, 5), (2, 8), (8, 3)])
def test_tokens_of_every_chunk_are_exact_however_the_server_counts(truth, k, first, count):
    query = f"k={k}&first={first}&count={count}"
    trace = run_level(local(truth.port), Load(concurrency=2, requests=4), prepared(4, query=query, tokens=21))
    assert reasons(trace) == {None: 4}
    for record in trace.records:
        assert [chunk.tokens for chunk in record.chunks] == planned(k, first, 21)
        assert (record.output_tokens, record.finish_reason, record.counter) == (21, "length", "usage")
    assert sum(len(record.chunks) for record in trace.records) == truth.totals()["chunks"]


def test_sglang_native_streams_are_counted_by_their_running_total(truth):
    requests = prepared(3, path="/generate", query="k=3&first=2", tokens=9, dialect="generate")
    trace = run_level(local(truth.port), Load(concurrency=3, requests=3), requests)
    assert [[chunk.tokens for chunk in record.chunks] for record in trace.records] == [[2, 3, 3, 1]] * 3
    assert trace.records[0].text == " the of and to in is that for the"


def burst(record):
    """Within what time chunks may share a stamp: what a late server writes within a quarter of the usual wait.

    The wait is that between stamps of any events, of which these are most; and a tenth of a millisecond always counts.
    """
    waits = [after.at_s - before.at_s for before, after in itertools.pairwise(record.chunks)]
    return 0.3 * statistics.mean(sorted(wait for wait in waits if wait > 0)[:-1]) + 5e-4


def test_every_stamp_lies_between_the_server_sending_this_chunk_and_the_next(truth):
    """Jitter, a stall, several tokens a chunk: the kernel's stamps follow what the server did, not what it planned."""
    query = "k=2&jitter_us=2000&stall_at=5&stall_us=40000"
    trace = run_level(local(truth.port), Load(concurrency=4, requests=12), prepared(12, query=query, tokens=24))
    log = {entry["id"]: entry for entry in truth.log()}
    assert trace.client.kernel_stamps
    seen = 0
    for record in trace.records:
        entry = log[record.index]
        sent = [(at - round(trace.started_at * 1e9)) / 1e9 for _, at, _ in entry["chunks"]]
        assert len(record.chunks) == len(sent) == 12
        # A float holds nanoseconds since 1970 to within 240 ns.
        assert record.sent_s < (entry["arrived"] / 1e9 - trace.started_at) + 1e-6
        for chunk, begun, following in zip(record.chunks, sent, [*sent[1:], float("inf")], strict=True):
            if not chunk.merged:
                # A busy kernel delivers a segment after `send` has returned: some milliseconds, where a stall is 40.
                assert begun - 1e-6 <= chunk.at_s <= following + burst(record) + 5e-3
                seen += 1
            assert chunk.at_s <= chunk.read_s
    assert seen > 100


def assert_known_when_sent(trace, log, *, chunks):
    """Every request has so many chunks, none stamped before it was sent nor, bursts aside, after the next one was."""
    for record in trace.records:
        sent = [(at - round(trace.started_at * 1e9)) / 1e9 for _, at, _ in log[record.index]["chunks"]]
        assert len(record.chunks) == len(sent) == chunks
        for chunk, begun, following in zip(record.chunks, sent, [*sent[1:], float("inf")], strict=True):
            assert begun - 1e-6 <= chunk.at_s
            assert (chunk.since_s if chunk.merged else chunk.at_s) <= following + burst(record)


def test_a_client_whose_core_others_keep_busy_still_knows_when_each_chunk_came(truth):
    """Three processes share its core, so that it reads chunks late and several at once; the kernel's stamps stand.

    Where the kernel joined two before they were read, the earlier one is merged, and lies within its bounds.
    """
    core = max(os.sched_getaffinity(0))
    busy = [subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(3)]
    try:
        for process in busy:
            os.sched_setaffinity(process.pid, {core})
        load = Load(concurrency=8, requests=24, processes=1, cpus=(core,))
        trace = run_level(local(truth.port), load, prepared(24, query="gap_us=4000", tokens=40))
    finally:
        for process in busy:
            process.kill()
            process.wait()
    log = {entry["id"]: entry for entry in truth.log()}
    assert reasons(trace) == {None: 24}
    assert_known_when_sent(trace, log, chunks=40)


def test_a_reader_that_naps_between_polls_knows_when_each_chunk_came_all_the_same():
    """At 8,000 chunks a second it naps once half a second has shown that rate; until then it does not."""
    with start(ttft_us=5000, gap_us=6000) as server:
        load = Load(concurrency=48, requests=48, processes=1)
        trace = run_level(local(server.port), load, prepared(48, tokens=300))
        log = {entry["id"]: entry for entry in server.log()}
    assert reasons(trace) == {None: 48}
    assert 0 < trace.client.busiest < 1.1  # a level of two seconds; the clock of CPU time ticks apart from the wall's
    assert_known_when_sent(trace, log, chunks=300)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's stamps are read on Linux alone")
@pytest.mark.parametrize(("ago_ms", "reads"), [(20, 4), (2, 1)])
def test_a_late_read_takes_events_one_by_one_unless_they_came_in_a_rush(ago_ms, reads):
    """Head, two events and part of a third: within 20 ms each has its stamp, within 2 ms they are read at once."""
    pieces = [STREAM, *(chunked(event)[:-5] for event in sse(chat("a"), chat("b"))), b"99\r\ndata: {"]
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as ours:
        ours.setsockopt(socket.SOL_SOCKET, reader.SO_TIMESTAMPING, reader.RX_SOFTWARE | reader.SOFTWARE)
        ours.setblocking(False)
        reader.await_stamps()
        theirs, _ = server.accept()
        with theirs:
            theirs.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for piece in pieces:
                theirs.sendall(piece)
                wait_for(ours, b"".join(pieces[: pieces.index(piece) + 1]))
            late, slot = reader.Reader.__new__(reader.Reader), reader.Slot(0)
            late.before = late.reads = late.kept = 0
            late.polled = time.time_ns()
            slot.sock, slot.receive, slot.state = ours, ours.recvmsg, "waiting"
            slot.sent = late.polled - ago_ms * 1_000_000
            late._read_apart(slot)
    assert [entry[0][0] for entry in slot.log] == (pieces if reads == 4 else [b"".join(pieces)])
    assert [kind for entry in slot.log for _, kind, _ in entry[0][1]] == [reader.SO_TIMESTAMPING] * reads
    assert late.reads == late.kept == reads - 1  # beside the one that the loop counts for itself


def wait_for(sock, data):
    """Until all of this has arrived."""
    seen = b""
    while len(seen) < len(data):
        select.select([sock], [], [], 10)
        seen = sock.recv(1 << 16, socket.MSG_PEEK)
    assert seen == data


def test_a_closed_loop_holds_its_level_and_hands_over_from_warm_up(truth):
    load = Load(concurrency=5, requests=10, warmup_requests=5)
    # The first one ends 100, 200, 300 and 400 ms before the others do.
    requests = [
        replace(each, path=f"{each.path}gap_us=20000&tokens={3 + 5 * (i % 5)}") for i, each in enumerate(prepared(15))
    ]
    trace = run_level(local(truth.port), load, requests)
    assert truth.totals()["peak"] == max(count for _, count in trace.in_flight()) == 5
    assert Counter(record.phase for record in trace.records) == {"warmup": 5, "measure": 10}
    assert sorted(record.index for record in trace.records) == list(range(15))
    measured = min(record.sent_s for record in trace.records if record.phase == "measure")
    # No drain: others were still in flight when the first measured request left.
    assert sum(record.sent_s < measured < record.end_s for record in trace.records) == 4


def test_a_drained_warm_up_ends_before_the_first_measured_request(truth):
    load = Load(concurrency=3, requests=6, warmup_requests=3, drain_warmup=True)
    trace = run_level(local(truth.port), load, prepared(9))
    assert Counter(record.phase for record in trace.records) == {"warmup": 3, "measure": 6}
    assert max(r.end_s for r in trace.records if r.phase == "warmup") < 0
    assert min(r.sent_s for r in trace.records if r.phase == "measure") >= 0
    assert sorted(entry["id"] for entry in truth.log()) == list(range(9))


def test_a_cap_below_the_number_of_processes_leaves_nothing_unsent(truth):
    load = Load(mode="open", rate=400.0, concurrency=1, requests=6, processes=3)
    trace = run_level(local(truth.port), load, prepared(6))
    assert sorted(record.index for record in trace.records) == list(range(6))
    assert truth.totals()["peak"] == 1


def test_serial_requests_never_overlap(truth):
    trace = run_level(local(truth.port), Load(mode="serial", requests=4), prepared(4))
    assert max(count for _, count in trace.in_flight()) == truth.totals()["peak"] == 1


def test_several_processes_share_one_level_and_send_each_request_once(truth):
    load = Load(concurrency=7, requests=40, processes=3)
    trace = run_level(local(truth.port), load, prepared(40))
    assert trace.client.processes == 3
    assert sorted(record.index for record in trace.records) == list(range(40))
    assert sorted(entry["id"] for entry in truth.log()) == list(range(40))
    assert {record.slot for record in trace.records} == set(range(7))


def test_a_duration_ends_a_level_and_wrapped_requests_are_reported(truth):
    trace = run_level(local(truth.port), Load(concurrency=4, duration_s=0.4), prepared(3))
    assert len(trace.records) > 3
    assert trace.client.wrapped == len(trace.records) - 3
    assert max(record.sent_s for record in trace.records) < 0.4
    assert reasons(trace) == {None: len(trace.records)}


def test_an_open_loop_sends_on_a_schedule_that_does_not_drift(truth):
    load = Load(mode="open", concurrency=None, rate=50, burstiness=None, requests=20, processes=2)
    trace = run_level(local(truth.port), load, prepared(20))
    due = sorted(record.scheduled_s for record in trace.records)  # one of two processes may be kept off its core
    assert due == [pytest.approx(index / 50) for index in range(20)]
    assert all(record.sent_s >= record.scheduled_s for record in trace.records)
    assert all(record.queued_s is None for record in trace.records)


def test_poisson_arrivals_are_the_same_for_the_same_seed_and_have_the_rate_asked(truth):
    load = Load(mode="open", concurrency=None, rate=400, requests=200, seed=3)
    first, second = (run_level(local(truth.port), load, prepared(200, tokens=1)) for _ in range(2))
    due = [record.scheduled_s for record in first.records]
    assert due == [record.scheduled_s for record in second.records]
    # The mean of 199 exponential gaps has a relative standard deviation of 7 %.
    assert due[-1] / 199 == pytest.approx(1 / 400, rel=0.3)


def test_a_cap_on_an_open_loop_makes_requests_wait_and_says_how_long(truth):
    load = Load(mode="open", concurrency=2, rate=1000, burstiness=None, requests=10)
    trace = run_level(local(truth.port), load, prepared(10))
    assert truth.totals()["peak"] == 2
    assert max(record.queued_s for record in trace.records) > 0.02  # a request takes 26 ms; the last ones wait for four


def test_one_slot_plays_the_turns_of_a_conversation_in_order(truth):
    turns = [
        Prepared(f"c{c}/{t}", f"/v1/chat/completions?id={3 * c + t}", body(3), conversation=f"c{c}")
        for c in range(4)
        for t in range(3)
    ]
    trace = run_level(local(truth.port), Load(concurrency=2, requests=12), turns)
    by_conversation = {}
    for record in sorted(trace.records, key=lambda record: record.sent_s):
        by_conversation.setdefault(record.prompt_id.split("/")[0], []).append(record)
    for records in by_conversation.values():
        assert [record.prompt_id[-1] for record in records] == ["0", "1", "2"]
        assert len({record.slot for record in records}) == 1
        assert records[0].end_s <= records[1].sent_s and records[1].end_s <= records[2].sent_s


def conversation(turns):
    """A conversation whose answers are the server's, as `sweep.prepare` encodes it."""
    messages, requests = [], []
    for number in range(turns):
        messages.append({"role": "user", "content": f"question {number}"})
        text = json.dumps({"stream": True, "messages": messages}, ensure_ascii=False).encode()
        requests.append(Prepared(f"c/{number}", "/v1/chat/completions", text, conversation="c"))
        messages.append({"role": "assistant", "content": answers.mark(number)})
    return requests


def test_a_conversation_goes_on_with_what_the_server_answered_to_each_turn():
    """Awkward text comes back as it was said: quotes, line feeds, what needs escapes; reasoning is not sent back."""
    said = ['He said "no".\n', "\u2028 \\ é \U0001f600", "third"]
    heard = []

    def script(sock, _):
        while request := read_request(sock):
            heard.append(json.loads(request.partition(b"\r\n\r\n")[2])["messages"])
            text = said[len(heard) - 1]
            thought = json.dumps({"choices": [{"delta": {"reasoning_content": "hm"}}]})
            sock.sendall(plain(ROLE, thought, chat(text[:3]), chat(text[3:], "stop"), USAGE % 3, "[DONE]"))

    with scripted(script) as port:
        trace = run_level(local(port), Load(concurrency=1, requests=3), conversation(3))
    assert reasons(trace) == {None: 3}
    assert [message["content"] for message in heard[2]] == ["question 0", said[0], "question 1", said[1], "question 2"]
    assert heard[1] == heard[2][:3]
    assert all("answers_missing" not in record.extra for record in trace.records)


def test_a_turn_whose_earlier_answers_belong_to_another_slice_says_how_many_it_lacks():
    heard = []

    def script(sock, _):
        while request := read_request(sock):
            heard.append(json.loads(request.partition(b"\r\n\r\n")[2])["messages"])
            sock.sendall(ANSWER)

    with scripted(script) as port:
        trace = run_level(local(port), Load(concurrency=1, requests=1), conversation(3)[2:])
    assert [message["content"] for message in heard[0]] == ["question 0", "", "question 1", "", "question 2"]
    assert trace.records[0].extra["answers_missing"] == 2


def test_an_open_loop_refuses_conversations_that_must_wait_for_answers():
    load = Load(mode="open", concurrency=None, rate=10, requests=3)
    with pytest.raises(InputError, match="which an open loop does not wait for"):
        run_level(local(1), load, conversation(3))


def test_a_prompt_larger_than_any_socket_buffer_arrives_whole(truth):
    large = [
        Prepared("large", "/v1/chat/completions?id=0", body(3, messages=[{"role": "user", "content": "x" * 9_000_000}]))
    ]
    trace = run_level(local(truth.port), Load(concurrency=1, requests=1), large)
    assert reasons(trace) == {None: 1}
    assert trace.records[0].prompt_tokens == len(large[0].body) // 4


def test_a_stream_cut_by_the_server_is_a_failed_request_and_the_slot_goes_on(truth):
    requests = prepared(2, query="cut_at=3") + prepared(4)[2:]
    trace = run_level(local(truth.port), Load(concurrency=1, requests=4), requests)
    assert [record.reason for record in trace.records] == ["disconnected", "disconnected", None, None]
    assert [len(record.chunks) for record in trace.records] == [3, 3, 8, 8]


def test_a_request_past_its_time_is_given_up_and_the_server_sees_the_client_leave(truth):
    requests = prepared(1, query="ttft_us=60000000") + prepared(2)[1:]
    trace = run_level(local(truth.port), Load(concurrency=1, requests=2, request_timeout_s=0.3), requests)
    assert [record.reason for record in trace.records] == ["timeout", None]
    assert trace.records[0].detail == "no end within 0.3 s"


def test_stop_ends_a_level_at_once_and_keeps_what_came(truth):
    stop = threading.Event()

    def after_some(**counts):
        if counts["done"] >= 2:
            stop.set()

    load = Load(concurrency=2, duration_s=600)
    trace = run_level(local(truth.port), load, prepared(50, query="gap_us=20000"), stop=stop, progress=after_some)
    assert trace.stopped
    assert reasons(trace)["stopped"] <= 2
    assert reasons(trace)[None] >= 2


def test_an_interrupt_that_meets_a_measuring_process_does_not_end_it(truth):
    """Ctrl-C is for the parent, which says stop; a child just forked is still in the terminal's group."""
    found = set()

    def interrupt(**_counts):
        found.update(each.pid for each in psutil.Process().children() if "harness.load.reader" in each.cmdline())
        for pid in found:
            os.kill(pid, signal.SIGINT)

    slow = prepared(4, query="gap_us=100000", tokens=12)
    trace = run_level(local(truth.port), Load(concurrency=2, requests=4), slow, progress=interrupt)
    assert found
    assert reasons(trace) == {None: 4}


def test_records_are_handed_over_one_by_one(truth):
    handed = []
    trace = run_level(local(truth.port), Load(concurrency=2, requests=5), prepared(5), on_record=handed.append)
    assert sorted(handed, key=lambda record: (record.sent_s, record.index)) == list(trace.records)


@pytest.mark.skipif(not NATIVE, reason="no C compiler here: the Python truth server cannot hold ten thousand streams")
def test_ten_thousand_streams_at_once_are_all_complete_and_exact():
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 10_200:
        pytest.skip(f"a process may open only {hard} files here")
    with start(ttft_us=3_000_000, gap_us=400_000, k=2) as truth:
        trace = run_level(local(truth.port), Load(concurrency=10_000, requests=10_000), prepared(500, tokens=6))
        assert reasons(trace) == {None: 10_000}
        assert truth.totals()["peak"] == max(count for _, count in trace.in_flight()) == 10_000
        assert sum(record.output_tokens for record in trace.records) == truth.totals()["tokens"] == 60_000
        assert {len(record.chunks) for record in trace.records} == {3}


def test_a_server_that_dies_with_a_thousand_open_streams_leaves_a_thousand_named_failures():
    with start(native=NATIVE, ttft_us=50_000, gap_us=100_000) as truth:

        def kill(**counts):
            if counts["active"] == 1000 and counts["reads"] > 3000:
                os.kill(truth.pid, signal.SIGKILL)

        load = Load(concurrency=1000, requests=1000)
        trace = run_level(local(truth.port), load, prepared(100, tokens=5000), progress=kill)
    assert reasons(trace) == {"disconnected": 1000}
    assert all(record.chunks for record in trace.records)


# Faults that only a scripted server has

ANSWER = plain(ROLE, chat("a"), chat("b", "stop"), USAGE % 2, "[DONE]")


def every_request(answer):
    def script(sock, _):
        while read_request(sock):
            sock.sendall(answer)

    return script


def test_a_connection_closed_between_requests_is_opened_anew_and_the_request_sent_again():
    """A server that ends a kept connection with the next request: llama.cpp after 100 requests, uvicorn after 5 s."""

    def script(sock, _):
        read_request(sock)
        sock.sendall(ANSWER)
        sock.recv(1)  # the next request begins; it is never answered

    with scripted(script) as port:
        trace = run_level(local(port), Load(concurrency=1, requests=3), prepared(3))
    assert reasons(trace) == {None: 3}
    assert [record.extra.get("retried") for record in trace.records] == [None, 1, 1]
    assert trace.client.reconnects == 2


def test_connection_close_is_kept_to():
    answer = ANSWER.replace(b"Content-Type", b"Connection: close\r\nContent-Type", 1)

    def script(sock, _):
        read_request(sock)
        sock.sendall(answer)

    with scripted(script) as port:
        trace = run_level(local(port), Load(concurrency=2, requests=6), prepared(6))
    assert reasons(trace) == {None: 6}
    assert all("retried" not in record.extra for record in trace.records)
    assert all(record.connect_s is not None for record in trace.records)


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_an_answer_sent_in_crumbs_is_whole(size):
    def script(sock, _):
        while read_request(sock):
            for at in range(0, len(ANSWER), size):
                sock.sendall(ANSWER[at : at + size])

    with scripted(script) as port:
        trace = run_level(local(port), Load(concurrency=2, requests=4), prepared(4))
    assert reasons(trace) == {None: 4}
    assert {record.text for record in trace.records} == {"ab"}


def test_carriage_returns_do_not_look_like_the_end():
    """Each event ends in CR LF CR LF, as a response does; the last event's data is `0`-like on purpose."""
    parts = [
        *sse(ROLE, chat("10"), end="\r\n"),
        b": 0\r\n\r\n",
        *sse(chat("0", "stop"), USAGE % 2, "[DONE]", end="\r\n"),
    ]
    with scripted(every_request(STREAM + chunked(*parts))) as port:
        trace = run_level(local(port), Load(concurrency=1, requests=3), prepared(3))
    assert reasons(trace) == {None: 3}
    assert {record.text for record in trace.records} == {"100"}


BIG = [Prepared("big", "/v1/chat/completions", b"x" * 8_000_000)]
TOO_BIG = b"HTTP/1.1 413 Too Large\r\nContent-Length: 3\r\n\r\nbig"


def test_what_a_server_says_before_it_hangs_up_on_a_large_request_is_heard():
    def script(sock, _):
        sock.recv(100)
        sock.sendall(TOO_BIG)  # and closes with most of the request unread, which resets the connection

    with scripted(script) as port:
        trace = run_level(local(port), Load(concurrency=1, requests=3), BIG)
    assert {(record.reason, record.detail) for record in trace.records} == {("status", "HTTP 413: big")}


def test_a_request_answered_before_it_was_all_sent_is_the_last_of_its_connection():
    """The server goes on to take the rest of the body; what came there in its place would be lost in it."""
    connections = set()

    def script(sock, number):
        connections.add(number)
        head = sock.recv(100)
        sock.sendall(TOO_BIG)
        while head:
            head = sock.recv(1 << 20)
            time.sleep(0.01)

    load = Load(concurrency=1, requests=3, request_timeout_s=20)
    with scripted(script) as port:
        trace = run_level(local(port), load, BIG)
    assert reasons(trace) == {"status": 3}
    assert len(connections) == 3


def test_a_capped_open_loop_whose_server_dies_ends_with_its_schedule():
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def die():
            sock, _ = listener.accept()
            with sock:
                read_request(sock)
                listener.shutdown(socket.SHUT_RDWR)
                listener.close()

        dying = threading.Thread(target=die)
        dying.start()
        load = Load(mode="open", rate=50, burstiness=None, concurrency=1, requests=20)
        trace = run_level(local(listener.getsockname()[1]), load, prepared(20))
        dying.join()
    assert len(trace.records) == 20
    assert set(reasons(trace)) == {"disconnected", "connect"}


def test_what_speaks_no_http_is_not_waited_for():
    with scripted(every_request(b"SSH-2.0-OpenSSH_9.9\r\n")) as port:
        trace = run_level(local(port), Load(concurrency=1, requests=2), prepared(2))
    assert {(record.reason, record.detail) for record in trace.records} == {
        ("malformed", "not an HTTP/1.1 status line: `SSH-2.0`")
    }


def test_a_length_that_no_number_holds_is_a_malformed_answer():
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: %b\r\n\r\n" % (b"9" * 5000)
    with scripted(every_request(answer)) as port:
        trace = run_level(local(port), Load(concurrency=1, requests=2), prepared(2))
    assert reasons(trace) == {"malformed": 2}


def test_refusals_of_a_busy_server_are_failures_with_its_words():
    said = b'{"error":{"message":"queue full"}}'
    answer = b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: %d\r\n\r\n" % len(said) + said
    with scripted(every_request(answer)) as port:
        trace = run_level(local(port), Load(concurrency=3, requests=9), prepared(9))
    assert reasons(trace) == {"status": 9}
    assert trace.records[0].detail == 'HTTP 429: {"error":{"message":"queue full"}}'


def test_a_server_that_is_not_there_is_an_error_with_a_hint():
    with scripted(every_request(ANSWER)) as port:
        pass
    with pytest.raises(ServerError, match=f"cannot connect to `127.0.0.1:{port}`: Connection refused"):
        run_level(local(port), Load(concurrency=2, requests=2), prepared(2))


def test_every_fault_of_a_load_is_named_at_once():
    with pytest.raises(InputError) as caught:
        run_level(local(1), Load(concurrency=0, request_timeout_s=0), [])
    assert str(caught.value).splitlines() == [
        "4 faults in a level's load",
        "  there are no requests to send",
        "  a level needs a number of requests or a duration",
        "  a closed loop needs a concurrency above zero, got 0",
        "  a request timeout is above zero, got 0",
    ]


def test_a_header_with_a_line_break_is_refused_before_anything_is_sent():
    requests = [Prepared("p0", "/x", b"{}", headers={"X-Note": "a\r\nB: c"})]
    with pytest.raises(InputError, match="request `p0` cannot be sent: header `X-Note` holds a line break"):
        run_level(local(1), Load(requests=1), requests)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    return fakes.tls.certificate(tmp_path_factory.mktemp("tls"))


@pytest.fixture
def tls(certificate):
    return fakes.tls.context(certificate)


def test_tls_works_and_says_that_its_stamps_are_read_times(tls, certificate):
    with scripted(every_request(ANSWER), tls) as port:
        target = local(port, tls=True, ca_file=str(certificate / "cert.pem"))
        trace = run_level(target, Load(concurrency=3, requests=9), prepared(9))
    assert reasons(trace) == {None: 9}
    assert not trace.client.kernel_stamps
    assert all(chunk.at_s == chunk.read_s for record in trace.records for chunk in record.chunks)


def test_a_certificate_that_nobody_vouches_for_is_refused_unless_told(tls):
    with scripted(every_request(ANSWER), tls) as port:
        with pytest.raises(ServerError, match="CERTIFICATE_VERIFY_FAILED"):
            run_level(local(port, tls=True), Load(requests=1), prepared(1))
        trace = run_level(local(port, tls=True, insecure=True), Load(requests=1), prepared(1))
    assert reasons(trace) == {None: 1}

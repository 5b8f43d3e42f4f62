"""The simulated server as a process: its dialects, its counters, its faults, its ranks."""

import asyncio
import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import psutil
import pytest
from servers import await_ready, content, finish, free_port, last, serving

from harness.engines import simulated
from harness.engines.engine import Model, Observed, Sampling, Server
from harness.errors import InputError

ENGINE = simulated.ENGINE
FAST = {"step-ms": 1, "sequence-ms": 0.1}


@pytest.fixture
def serve(tmp_path):
    """A function that runs a server with these arguments."""

    def start(*, ready=True, port=None, faults=(), **arguments):
        args = FAST | {name.replace("_", "-"): value for name, value in arguments.items()}
        return serving(ENGINE, tmp_path, ready=ready, port=port, args={**args, "fault": list(faults)})

    return start


def await_true(condition, what):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.02)


@contextlib.contextmanager
def streaming(server, tokens=100_000):
    """An open stream whose first token has come; yields the response."""
    path, body = ENGINE.request("completions", "on and on", Sampling(tokens), "m")
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    connection.request("POST", path, json.dumps(body))
    response = connection.getresponse()
    response.readline()
    try:
        yield response
    finally:
        connection.close()


# -- dialects --------------------------------------------------------------------------------------------------------


def test_a_chat_stream_opens_with_the_role_counts_every_chunk_and_ends_with_usage(serve):
    with serve() as server:
        events = server.generate("hi there", 5)
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    counts = [event["usage"]["completion_tokens"] for event in events[:-1] if "usage" in event]
    assert counts == [1, 2, 3, 4, 5, 5]
    assert events[-1] == "[DONE]"
    assert finish(events) == "length"
    # "user", "hi", "there", four tokens of template around the message and three that open the answer.
    assert last(events, "usage")["prompt_tokens"] == 10
    assert all(event["simulated"] for event in events[:-1])


def test_completions_and_native_say_the_same_text_as_each_other(serve):
    with serve() as server:
        completions = server.generate("hi there", 6, "completions")
        native = server.generate("hi there", 6, "generate")
    assert content(completions) == native[-2]["text"]
    assert [event["meta_info"]["completion_tokens"] for event in native[:-1]] == [1, 2, 3, 4, 5, 6, 6]
    assert native[-2]["meta_info"]["finish_reason"] == {"type": "length", "length": 6}


def test_without_streaming_the_whole_answer_comes_at_once(serve):
    with serve() as server:
        status, answer = server.ask("POST", "/v1/chat/completions", {"messages": [{"content": "x"}], "max_tokens": 3})
        assert status == 200
        assert answer["usage"]["completion_tokens"] == 3
        assert answer["object"] == "chat.completion"
        assert len(answer["choices"][0]["message"]["content"].split()) == 3
        status, native = server.ask("POST", "/generate", {"text": "x", "sampling_params": {"max_new_tokens": 2}})
        assert native["meta_info"]["completion_tokens"] == 2


def test_greedy_text_is_the_same_with_speculation_in_a_batch_and_after_a_restart(serve):
    with serve() as server:
        alone = content(server.generate("a prompt", 40))
    with serve(speculative_tokens=4, max_running_requests=3) as server:
        texts = []
        threads = [
            threading.Thread(target=lambda: texts.append(content(server.generate("a prompt", 40)))) for _ in range(6)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert texts == [alone] * 6


def test_speculation_puts_several_tokens_into_a_chunk_and_the_identities_hold(serve):
    with serve(speculative_tokens=4, speculative_acceptance=1.0) as server:
        before = server.metrics()
        events = server.generate("p", 20)
        after = server.metrics()
    # All four drafts accepted: five tokens a step, four steps, of which each accepted four drafts.
    assert [event["usage"]["completion_tokens"] for event in events[:-1] if "usage" in event] == [5, 10, 15, 20, 20]
    assert last(events, "timings") == {"predicted_n": 20, "draft_n": 16, "draft_n_accepted": 16, "verify_n": 4}
    moved = {name: after[name] - before[name] for name in after}
    counters = ENGINE.counters
    assert (moved[counters.generated_tokens], moved[counters.drafts]) == (20, 4)
    assert (moved[counters.draft_tokens], moved[counters.accepted_tokens]) == (16, 16)
    assert ENGINE.evidence("speculation", Observed(deltas=moved)).engaged is True


def test_without_speculation_the_evidence_says_so(serve):
    with serve() as server:
        server.generate("p", 5)
        evidence = ENGINE.evidence("speculation", Observed(deltas=server.metrics()))
    assert evidence.engaged is False
    assert evidence.lines == ("simulated:draft_tokens_total: +0, accepted +0",)
    assert ENGINE.evidence("speculation", Observed()).engaged is None


def test_a_natural_end_is_a_stop_and_ignore_eos_pins_the_length(serve):
    with serve(output_tokens=10) as server:
        free = server.generate("some prompt", 400, ignore_eos=False)
        pinned = server.generate("some prompt", 60)
    assert finish(free) == "stop"
    assert 1 <= last(free, "usage")["completion_tokens"] < 400
    assert (finish(pinned), last(pinned, "usage")["completion_tokens"]) == ("length", 60)


# -- queue, cache, connection ----------------------------------------------------------------------------------------


def test_requests_above_the_largest_batch_wait_and_a_client_that_leaves_makes_room(serve):
    with serve(max_running_requests=1) as server, streaming(server), asking(server) as waiting:
        await_true(lambda: gauges(server) == (1, 1), "one runs, one waits")
        waiting.close()
        await_true(lambda: gauges(server) == (1, 0), "the one that waited has left")


@contextlib.contextmanager
def asking(server):
    """A request that is sent and not answered yet."""
    path, body = ENGINE.request("completions", "me too", Sampling(5), "m")
    raw = json.dumps(body).encode()
    with socket.create_connection(("127.0.0.1", server.port)) as sock:
        sock.sendall(b"POST %b HTTP/1.1\r\ncontent-length: %d\r\n\r\n%b" % (path.encode(), len(raw), raw))
        yield sock


def gauges(server):
    found = server.metrics()
    return found[ENGINE.counters.running], found[ENGINE.counters.waiting]


def test_the_prefix_cache_is_reported_flushed_and_not_flushed_while_requests_run(serve):
    words = " ".join(f"w{index}" for index in range(40))
    with serve(prefix_cache_tokens=10_000) as server:

        def cached():
            usage = last(server.generate(words, 2, "completions"), "usage")
            return usage["prompt_tokens_details"]["cached_tokens"]

        assert (cached(), cached()) == (0, 32)
        assert server.ask(*ENGINE.flush)[0] == 200
        assert cached() == 0
        with streaming(server):
            status, answer = server.ask(*ENGINE.flush)
    assert status == 400
    assert answer["error"]["message"] == "cache not flushed: requests are running"


def test_a_connection_serves_one_request_after_another_even_when_they_come_together(serve):
    with serve() as server, socket.create_connection(("127.0.0.1", server.port), timeout=20) as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\n\r\nGET /v1/models HTTP/1.1\r\nConnection: close\r\n\r\n")
        answer = b""
        while data := sock.recv(4096):
            answer += data
    assert re.findall(rb"HTTP/1.1 (\d+)", answer) == [b"200", b"200"]
    assert b'"id": "simulated"' in answer


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "said"),
    [
        ("GET", "/nowhere", None, 404, "no such path: /nowhere"),
        ("GET", "/generate", None, 405, "/generate does not take GET"),
        ("POST", "/v1/completions", b"{", 400, "the body is not JSON"),
        ("POST", "/v1/completions", {"prompt": "x y z", "max_tokens": 99}, 400, "the context length is 64"),
    ],
)
def test_a_bad_request_is_answered_with_its_reason(serve, method, path, body, status, said):
    with serve(context_length=64) as server:
        answered, answer = server.ask(method, path, body)
    assert answered == status
    assert said in answer["error"]["message"]


def test_a_thousand_streams_at_once_all_get_all_their_tokens(serve):
    async def one(port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        raw = json.dumps({"prompt": "p", "max_tokens": 5, "stream": True}).encode()
        writer.write(b"POST /v1/completions HTTP/1.1\r\ncontent-length: %d\r\n\r\n%b" % (len(raw), raw))
        answer = await reader.readuntil(b"0\r\n\r\n")
        writer.close()
        return answer.count(b'"finish_reason": null')

    async def all_of_them(port):
        return await asyncio.gather(*(one(port) for _ in range(1000)))

    with serve(step_ms=200) as server:
        assert asyncio.run(all_of_them(server.port)) == [5] * 1000
        assert server.metrics()[ENGINE.counters.generated_tokens] == 5000


# -- what it says of itself ------------------------------------------------------------------------------------------


def test_the_effective_configuration_is_what_it_was_started_with_but_not_where_it_listens(serve):
    with serve(speculative_tokens=3, seed=5) as server:
        told = ENGINE.effective(server.answers())
    assert told["simulated"] is True
    assert (told["speculative_tokens"], told["step_ms"], told["seed"]) == (3, 1.0, 5)
    assert "port" not in told
    assert ENGINE.effective({"/server_info": None}) == {}


def test_each_launch_draws_its_own_seed_and_says_which(serve):
    seeds = set()
    for _ in range(2):
        with serve(launch_noise=0.1) as server:
            state = server.ask("GET", "/server_info")[1]["state"]
            seeds.add(state["seed"])
            assert state["launch_factor"] != 1.0
    assert len(seeds) == 2


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({"bogus": 1}, "unrecognized arguments: --bogus 1"),
        ({"step-ms": "fast"}, "argument --step-ms: a number not below 0 was expected, got `fast`"),
        ({"speculative-acceptance": 1.5}, "argument --speculative-acceptance: a number from 0 to 1 was expected"),
        ({"time-scale": 0}, "argument --time-scale: a number above 0 was expected, got `0`"),
        ({"speculative-tiers": "4"}, "argument --speculative-tiers: BATCH:TOKENS,... was expected, got `4`"),
        ({"fault": "trunkated"}, "no fault is called `trunkated`, did you mean `truncated`?"),
    ],
)
def test_bad_arguments_end_it_with_2_and_a_line_that_is_a_signature(tmp_path, args, said):
    with serving(ENGINE, tmp_path, ready=False, args=args) as server:
        assert server.wait() == 2
        assert said in server.log
        assert named(server) == "bad flag"


def named(server):
    return next((each.name for each in ENGINE.signatures if re.search(each.regex, server.log)), None)


def test_a_taken_port_ends_it_with_1_and_leaves_the_holder_alone(serve):
    with serve() as first, serve(ready=False, port=first.port) as second:
        assert second.wait() == 1
        assert named(second) == "port in use"
        assert first.ask("GET", "/health")[0] == 200


def test_flags_the_harness_owns_are_refused():
    with pytest.raises(InputError, match="`--port` of simulated is set by the harness"):
        ENGINE.command(Server("simulated", "127.0.0.1", 1, args={"port": 2}))


def test_the_name_requests_use_is_the_models(tmp_path):
    with serving(ENGINE, tmp_path, model=Model("/nowhere", "kimi"), args=FAST) as server:
        assert server.ask("GET", "/v1/models")[1]["data"][0]["id"] == "kimi"


def test_a_port_that_the_system_chose_is_the_one_it_tells(tmp_path):
    """Asked for port 0, it says where it really is."""
    log = (tmp_path / "server.log").open("wb")
    command = [sys.executable, "-m", "harness.engines.simulated_server", "--port", "0"]
    with log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        told = re.compile(r"ready on http://127\.0\.0\.1:(\d+)")
        await_true(lambda: told.search((tmp_path / "server.log").read_text()), "it says where it is")
        port = int(told.search((tmp_path / "server.log").read_text())[1])
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=30)) as connection:
            connection.request("GET", "/server_info")
            assert json.loads(connection.getresponse().read())["arguments"]["port"] == port
        process.terminate()


# -- faults of a process ---------------------------------------------------------------------------------------------


def test_a_polite_stop_ends_it_with_0_even_while_a_stream_is_open(serve):
    with serve() as server, streaming(server) as response:
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 0
        with pytest.raises(http.client.IncompleteRead):
            response.read()


def test_never_healthy_answers_503_and_lives(serve):
    with serve(ready=False, faults=["never-healthy"]) as server:
        await_true(lambda: "ready on" in server.log, "it is up")
        assert server.ask("GET", "/health") == (
            503,
            {"error": {"message": "Loading model", "type": "simulated_error", "code": 503}},
        )
        assert server.process.poll() is None


def test_never_listening_lives_without_a_port_and_stops_when_told(serve):
    with serve(ready=False, faults=["never-listens"]) as server:
        await_true(lambda: "loading weights" in server.log, "it runs")
        with pytest.raises(ConnectionRefusedError):
            server.ask("GET", "/health")
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 0


def test_a_slow_start_refuses_generation_until_it_is_ready(serve):
    with serve(ready=False, faults=["slow-start=1.5"]) as server:
        await_true(lambda: "loading weights" in server.log, "it loads")
        path, body = ENGINE.request("completions", "p", Sampling(2), "m")
        await_true(lambda: answers(server) == 503, "503 while loading")
        assert server.ask("POST", path, body)[0] == 503
        await_ready(server)
        assert finish(server.events(body, path)) == "length"


def answers(server):
    try:
        return server.ask("GET", "/health")[0]
    except OSError:
        return None


def test_dying_before_ready_prints_the_given_line(serve):
    line = "RuntimeError: CUDA error: no kernel image is available for execution on the device"
    with serve(ready=False, faults=[f"die-before-ready={line}"]) as server:
        assert server.wait() == 1
        assert line in server.log


def test_hanging_before_ready_prints_the_given_line_and_lives(serve):
    with serve(ready=False, faults=["hang-before-ready=NCCL INFO waiting for peers"]) as server:
        await_true(lambda: "NCCL INFO waiting for peers" in server.log, "the line")
        assert answers(server) == 503
        assert server.process.poll() is None


@pytest.mark.parametrize(
    ("fault", "code"),
    [("die-after-tokens=10", -signal.SIGKILL), ("crash-after-tokens=10", 1), ("die-after-requests=1", -signal.SIGKILL)],
)
def test_dying_in_the_middle_breaks_the_stream(serve, fault, code):
    with serve(faults=[fault]) as server:
        path, body = ENGINE.request("completions", "p", Sampling(100), "m")
        assert finish(server.events(body, path)) is None
        assert server.wait() == code
        assert ("an illegal memory access was encountered" in server.log) is (code == 1)


def test_a_restart_keeps_the_pid_and_starts_its_counters_anew(serve):
    with serve(faults=["restart-after-requests=2"]) as server:
        server.generate("p", 3)
        before, pid = server.metrics(), server.process.pid
        server.generate("p", 3)
        await_true(lambda: answers(server) == 200, "it is back")
        after = server.metrics()
        assert after["process_start_time_seconds"] > before["process_start_time_seconds"]
        assert after[ENGINE.counters.generated_tokens] == 0
        assert server.ask("GET", "/server_info")[1]["state"]["pid"] == pid
        assert finish(server.generate("p", 3)) == "length"


def test_a_child_in_its_own_session_survives_the_servers_end(serve):
    with serve(faults=["setsid-child=60"]) as server:
        child = psutil.Process(int(re.search(r"child (\d+) started", server.log)[1]))
        try:
            assert os.getsid(child.pid) != os.getsid(server.process.pid)
            server.process.send_signal(signal.SIGTERM)
            assert server.wait() == 0
            child.terminate()
            time.sleep(0.3)
            assert child.is_running()
        finally:
            child.kill()


def test_a_server_that_ignores_sigterm_has_to_be_killed(serve):
    with serve(faults=["ignore-term"]) as server:
        server.process.send_signal(signal.SIGTERM)
        await_true(lambda: "asked to stop, ignored" in server.log, "it heard")
        assert server.ask("GET", "/health")[0] == 200


def test_a_server_that_drains_ends_when_its_streams_do(serve):
    with serve(faults=["drain-on-term"]) as server:
        with streaming(server):
            server.process.send_signal(signal.SIGTERM)
            await_true(lambda: "stopping" in server.log, "it heard")
            assert server.process.poll() is None
        assert server.wait() == 0


def test_a_frozen_server_stays_healthy_and_says_nothing_more(serve):
    with serve(faults=["freeze-after-tokens=5"]) as server, streaming(server):
        await_true(lambda: server.metrics()[ENGINE.counters.generated_tokens] == 5, "five tokens")
        time.sleep(0.3)
        assert server.metrics()[ENGINE.counters.generated_tokens] == 5
        assert server.ask("GET", "/health")[0] == 200


@pytest.mark.parametrize(
    ("fault", "method", "path", "expected"),
    [
        ("no-metrics", "GET", "/metrics", (404, "metrics are off")),
        ("bad-metrics", "GET", "/metrics", (200, "<html>")),
        ("flush-fails", "POST", "/flush_cache", (500, "cache not flushed")),
        ("wrong-model", "GET", "/v1/models", (200, "someone-elses-model")),
        ("die-at-stop", "GET", "/health", (200, "ok")),
    ],
)
def test_paths_that_answer_wrongly(serve, fault, method, path, expected):
    with serve(faults=[fault]) as server:
        status, answer = server.ask(method, path)
        assert status == expected[0]
        assert expected[1] in json.dumps(answer)
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == (1 if fault == "die-at-stop" else 0)


def test_a_warm_cache_is_reported_where_none_is(serve):
    with serve(faults=["warm-cache=8"]) as server:
        usage = last(server.generate("a prompt of several words", 2), "usage")
        assert usage["prompt_tokens_details"]["cached_tokens"] == 8
        assert server.metrics()[ENGINE.counters.cached_tokens] == 8


# -- faults of a request ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_status_fault_hits_only_the_requests_it_is_aimed_at(serve, status):
    with serve(faults=[f"status={status}"], fault_from=1, fault_count=1) as server:
        path, body = ENGINE.request("completions", "p", Sampling(2), "m")
        seen = [server.ask("POST", path, {**body, "stream": False})[0] for _ in range(3)]
    assert seen == [200, status, 200]


@pytest.mark.parametrize(
    ("fault", "reason", "tokens", "done"),
    [
        ("zero-tokens", "length", 0, True),
        ("abort", "abort", 10, True),
        ("wrong-length", "length", 10, True),
        ("early-stop", "stop", 10, True),
        ("no-finish", None, 20, True),
        ("wrong-usage=3", "length", 23, True),
        ("no-done", "length", 20, False),
    ],
)
def test_streams_that_end_properly_and_lie(serve, fault, reason, tokens, done):
    with serve(faults=[fault]) as server:
        events = server.generate("p", 20)
    assert finish(events) == reason
    assert last(events, "usage")["completion_tokens"] == tokens
    assert (events[-1] == "[DONE]") is done


def test_a_stream_without_usage_ends_without_it(serve):
    with serve(faults=["no-usage"]) as server:
        path, body = ENGINE.request("completions", "p", Sampling(4), "m")
        events = server.events({**body, "stream_options": {"include_usage": True}}, path)
    assert last(events, "usage") is None
    assert finish(events) == "length"


@pytest.mark.parametrize(
    ("fault", "ending"),
    [
        ("truncated", http.client.IncompleteRead),
        ("reset-mid-chunk", ConnectionResetError),
        ("garbage", http.client.IncompleteRead),
    ],
)
def test_streams_that_break_half_way(serve, fault, ending):
    with serve(faults=[fault]) as server, streaming(server, tokens=20) as response, pytest.raises(ending):
        response.read()


def test_an_error_event_comes_inside_a_200_stream_and_done_follows_it(serve):
    with serve(faults=["error-event"]) as server:
        events = server.generate("p", 20)
    assert events[-2]["error"]["code"] == 500
    assert events[-1] == "[DONE]"
    assert finish(events) is None


def test_an_event_that_is_not_json_comes_half_way(serve):
    with serve(faults=["garbage-json"]) as server:
        events = server.generate("p", 20)
    assert events[-1] == '{"choices": [{"delta": {"content":'
    assert finish(events) is None


@pytest.mark.parametrize(("fault", "headers"), [("no-answer", 0), ("hang-after-headers", 1), ("hang-mid-stream", 1)])
def test_streams_that_hang_keep_their_connection_and_hold_no_place(serve, fault, headers):
    with serve(faults=[fault], fault_count=1) as server, asking(server) as sock:
        sock.settimeout(1.0)
        received = b""
        with contextlib.suppress(TimeoutError):
            while data := sock.recv(65536):
                received += data
        assert received.count(b"HTTP/1.1 200") == headers
        assert b"[DONE]" not in received
        assert gauges(server) == (0, 0)
        assert finish(server.generate("p", 3)) == "length"


# -- ranks -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def ranks(tmp_path):
    """A function that runs a group of two ranks."""

    @contextlib.contextmanager
    def start(**arguments):
        address = f"127.0.0.1:{free_port()}"
        common = {"nnodes": 2, "dist-init-addr": address} | {k.replace("_", "-"): v for k, v in arguments.items()}
        with (
            serving(ENGINE, tmp_path, ready=False, args=FAST | common | {"node-rank": 1}) as second,
            serving(ENGINE, tmp_path, args=FAST | common | {"node-rank": 0}) as first,
        ):
            await_ready(second)
            yield first, second

    return start


def test_rank_0_serves_and_the_other_does_not(ranks):
    with ranks() as (first, second):
        assert finish(first.generate("p", 3)) == "length"
        path, body = ENGINE.request("chat", "p", Sampling(3), "m")
        assert second.ask("POST", path, body)[0] == 503


@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_rank_takes_the_group_with_it(ranks, killed):
    with ranks() as group:
        group[killed].process.kill()
        survivor = group[1 - killed]
        assert survivor.wait() == 1
        assert f"rank {killed} of 2 was lost" in survivor.log
        assert named(survivor) == "rank lost"


def test_a_lost_rank_can_leave_the_group_hanging(ranks):
    with ranks(on_rank_loss="hang") as (first, second), streaming(first):
        second.process.kill()
        await_true(lambda: "was lost" in first.log, "it noticed")
        made = first.metrics()[ENGINE.counters.generated_tokens]
        time.sleep(0.3)
        assert first.metrics()[ENGINE.counters.generated_tokens] == made
        assert first.ask("GET", "/health")[0] == 200


def test_stopping_rank_0_ends_the_group_without_an_error(ranks):
    with ranks() as (first, second):
        first.process.send_signal(signal.SIGTERM)
        assert (first.wait(), second.wait()) == (0, 0)


def test_rank_0_is_not_ready_before_everyone_is_there(serve):
    with serve(ready=False, nnodes=2, dist_init_addr=f"127.0.0.1:{free_port()}") as server:
        await_true(lambda: answers(server) == 503, "it waits")
        time.sleep(0.3)
        assert answers(server) == 503


def test_the_server_runs_from_the_command_line_and_lists_its_faults():
    shown = subprocess.run(
        [sys.executable, "-m", "harness.engines.simulated_server", "--help"], capture_output=True, text=True, check=True
    )
    assert "reset-mid-chunk" in shown.stdout

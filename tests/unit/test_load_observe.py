"""What an observer makes of a server's own metrics."""

import contextlib
import json
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import requests
from fakes.scripted import scripted

from harness.engines.engine import Counters
from harness.load.observe import Observer, clock_events, named, read_metrics

TEXT = """\
# HELP srv:tokens_total made
# TYPE srv:tokens_total counter
srv:tokens_total{{rank="0"}} {a}
srv:tokens_total{{rank="1"}} {b}
# TYPE srv:drafts_total counter
srv:drafts_total {drafts}
# TYPE srv:accepted_total counter
srv:accepted_total {accepted}
# TYPE srv:running gauge
srv:running {running}
# TYPE srv:ttft histogram
srv:ttft_bucket{{le="1"}} 3
srv:ttft_bucket{{le="+Inf"}} 4
srv:ttft_sum 5.5
srv:ttft_count 4
srv:ttft_created 1.7e9
# TYPE srv:wait summary
srv:wait{{quantile="0.5"}} 0.25
srv:wait_sum 2.5
srv:wait_count 10
"""
PATIENCE_S = 30


def serving(*texts):
    """A /metrics that gives these texts one after the other, then the last again."""
    left = list(texts)

    def script(sock, _):
        while sock.recv(65536):
            text = (left.pop(0) if len(left) > 1 else left[0]).encode()
            sock.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(text) + text)

    return scripted(script)


def engine(path="/metrics"):
    counters = Counters(
        generated_tokens="srv:tokens_total",
        drafts="srv:drafts_total",
        accepted_tokens="srv:accepted_total",
        running="srv:running",
    )
    return SimpleNamespace(metrics_path=path, counters=counters)


def test_counters_and_gauges_are_summed_over_labels_and_buckets_are_left_out():
    found = read_metrics(TEXT.format(a=3, b=4, drafts=1, accepted=2, running=5), at=1.0)
    assert found.counters == {
        "srv:tokens_total": 7.0,
        "srv:drafts_total": 1.0,
        "srv:accepted_total": 2.0,
        "srv:ttft_sum": 5.5,
        "srv:ttft_count": 4.0,
        "srv:wait_sum": 2.5,
        "srv:wait_count": 10.0,
    }
    assert found.gauges == {"srv:running": 5.0}


def test_deltas_are_between_the_ends_of_a_level_and_acceptance_length_follows(tmp_path):
    """20 drafts of which 30 tokens were accepted: 20 steps made 50 tokens, 2.5 a step."""
    before = TEXT.format(a=10, b=10, drafts=100, accepted=200, running=0)
    after = TEXT.format(a=40, b=30, drafts=120, accepted=230, running=3)
    with serving(before, after) as port:
        with Observer(f"http://127.0.0.1:{port}", engine(), folder=tmp_path) as observer:
            pass
        assert observer.deltas()["srv:tokens_total"] == 50.0
        named = observer.named()
        assert (named["generated_tokens"], named["drafts"], named["running_max"]) == (50.0, 20.0, 3.0)
        assert named["acceptance_length"] == pytest.approx(2.5)
        assert not observer.restarted()
    lines = [json.loads(line) for line in (tmp_path / "server_metrics.jsonl").read_text().splitlines()]
    assert lines[0]["srv:tokens_total"] == 20.0
    assert lines[-1]["srv:tokens_total"] == 70.0


def test_a_counter_that_went_backwards_is_another_process():
    fresh = TEXT.format(a=1, b=0, drafts=0, accepted=0, running=0)
    old = TEXT.format(a=10, b=10, drafts=5, accepted=5, running=0)
    with serving(old, fresh) as port, Observer(f"http://127.0.0.1:{port}", engine()) as observer:
        pass
    assert observer.restarted()


def test_a_server_without_metrics_leaves_nothing_and_says_why(tmp_path):
    with scripted(lambda sock, _: None) as port:
        with Observer(f"http://127.0.0.1:{port}", engine(), folder=tmp_path) as observer:
            pass
        assert observer.deltas() == {}
        assert observer.named() == {}
        assert observer.faults[0].startswith(f"`http://127.0.0.1:{port}/metrics` could not be read")
    with Observer("http://127.0.0.1:1", engine(None)) as silent:
        pass
    assert (silent.deltas(), silent.faults) == ({}, [])


def lines_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def until(met) -> None:
    """Wait for what another thread does; a machine that never gets there fails the test by what it asserts next."""
    end = time.monotonic() + PATIENCE_S
    while not met() and time.monotonic() < end:
        time.sleep(0.05)


def test_a_level_is_read_once_a_second_and_a_gauge_is_kept_at_its_highest(tmp_path):
    texts = [TEXT.format(a=a, b=0, drafts=0, accepted=0, running=running) for a, running in ((1, 0), (4, 7), (9, 1))]
    written = tmp_path / "server_metrics.jsonl"
    with serving(*texts) as port, Observer(f"http://127.0.0.1:{port}", engine(), folder=tmp_path) as observer:
        until(lambda: len(lines_of(written)) == 2)
    first, second, last = lines_of(written)
    assert [line["srv:running"] for line in (first, second, last)] == [0.0, 7.0, 1.0]
    assert second["at"] - first["at"] > 0.9
    assert observer.named() == {"generated_tokens": 8.0, "drafts": 0.0, "accepted_tokens": 0.0, "running_max": 7.0}


def test_gpus_are_read_beside_the_metrics_into_a_file_of_their_own(tmp_path):
    @contextlib.contextmanager
    def gpus():
        yield lambda at: [{"at": at, "gpu": 0, "throttle": 0x5}, {"at": at, "gpu": 1, "throttle": None}]

    with Observer("http://127.0.0.1:1", engine(None), folder=tmp_path, gpus=gpus) as observer:
        until(lambda: len(lines_of(tmp_path / "gpu.jsonl")) >= 4)
    stored = lines_of(tmp_path / "gpu.jsonl")
    assert [line["gpu"] for line in stored[:4]] == [0, 1, 0, 1]
    assert stored[2]["at"] - stored[0]["at"] > 0.9
    assert stored == observer.gpus()
    assert observer.throttles() == [0x4]  # 0x1 is idleness


def test_idleness_holds_no_clock_back():
    assert clock_events([{"throttle": 0x1}, {"throttle": 0x0}, {"throttle": None}, {}]) == []


def test_where_accepted_tokens_are_not_counted_the_acceptance_length_is_tokens_a_draft():
    """SGLang's definition: 50 tokens in 20 verify steps; and without a step there is none."""
    names = {"generated_tokens": "made", "drafts": "steps", "accepted_tokens": None}
    assert named(names, {"made": 50.0, "steps": 20.0}, {})["acceptance_length"] == 2.5
    assert "acceptance_length" not in named(names, {"made": 50.0, "steps": 0.0}, {})


def test_a_counter_that_first_appears_during_a_level_began_at_nothing():
    """prometheus_client shows a counter with labels only once it was counted."""
    before, after = "srv:other_total 1\n", "srv:other_total 1\nsrv:tokens_total 30\n"
    kinds = "# TYPE srv:other counter\n# TYPE srv:tokens counter\n"
    with serving(kinds + before, kinds + after) as port, Observer(f"http://127.0.0.1:{port}", engine()) as observer:
        pass
    assert observer.deltas() == {"srv:other_total": 0.0, "srv:tokens_total": 30.0}


def test_an_answer_that_is_an_error_is_no_reading():
    def script(sock, _):
        while sock.recv(65536):
            text = TEXT.format(a=1, b=1, drafts=1, accepted=1, running=1).encode()
            sock.sendall(b"HTTP/1.1 503 Busy\r\nContent-Length: %d\r\n\r\n" % len(text) + text)

    with scripted(script) as port, Observer(f"http://127.0.0.1:{port}", engine()) as observer:
        pass
    assert observer.named() == {}
    assert "503 Server Error: Busy" in observer.faults[0]


def test_readings_that_cannot_be_stored_are_a_fault_and_end_nothing(tmp_path):
    """On the observer's thread and on the caller's alike: the deltas stand all the same."""
    before, after = (TEXT.format(a=made, b=0, drafts=0, accepted=0, running=0) for made in (1, 5))
    (tmp_path / "file").touch()
    with serving(before, after) as port:
        with Observer(f"http://127.0.0.1:{port}", engine(), folder=tmp_path / "file") as observer:
            pass
        assert observer.deltas()["srv:tokens_total"] == 4.0
    assert observer.faults == [f"cannot write `{tmp_path / 'file' / 'server_metrics.jsonl'}`: Not a directory"]


def test_the_session_that_reached_the_server_is_closed_with_the_level():
    closed = []

    class Session(requests.Session):
        def close(self):
            closed.append(self)
            super().close()

    session = Session()
    with Observer("http://127.0.0.1:1", engine(None), session=session):
        assert closed == []
    assert closed == [session]

"""What an observer makes of a server's own metrics."""

import json
from types import SimpleNamespace

import pytest
from fakes.scripted import scripted

from harness.engines.engine import Counters
from harness.load.observe import Observer, read_metrics

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
"""


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

"""The formulas of a level, against values worked out by hand and against an independent recomputation."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from benchmarks.truthd import COMPILER, start
from harness.load.client import Load, Target, run_level
from harness.load.records import Chunk, ClientFacts, LevelTrace, RequestRecord
from harness.load.transcript import Prepared
from harness.stats import metrics
from harness.stats.level import Window
from harness.stats.percentiles import bounded

CLIENT = ClientFacts(processes=1, cpu_s=0.5, wall_s=10.0, kernel_stamps=True, reads=10, parse_s=0.1)


def record(index=0, sent=0.0, chunks=(), *, slot=0, tokens="sum", **more):
    made = tuple(Chunk(at, at + 0.001, k) for at, k in chunks)
    total = sum(k for _, k in chunks) if tokens == "sum" else tokens
    end = chunks[-1][0] if chunks else sent
    facts = {"ok": True, "phase": "measure", "prompt_id": "p", "kernel_stamps": True, "counter": "usage", "end_s": end}
    return RequestRecord(index=index, slot=slot, sent_s=sent, chunks=made, output_tokens=total, **{**facts, **more})


def trace(*records, mode="closed", concurrency=1):
    return LevelTrace(tuple(records), CLIENT, 1_700_000_000.0, mode, concurrency)


def test_one_request_by_hand():
    """Sent at 1; 4 tokens at 1.5, then 4 at 2.0 and 2 at 2.4: TPOT = 0.9 / (10 - 4) = 0.15; naive = 0.9 / 9 = 0.1."""
    one = record(sent=1.0, chunks=[(1.5, 4), (2.0, 4), (2.4, 2)])
    assert metrics.ttft(one) == pytest.approx(0.5)
    assert metrics.e2e(one) == pytest.approx(1.4)
    assert metrics.tpot(one) == pytest.approx(0.15)
    assert metrics.tpot_naive(one) == pytest.approx(0.1)
    assert metrics.chunk_gaps(one) == pytest.approx([0.5, 0.4])
    assert metrics.token_gaps(one) == pytest.approx([0.125] * 4 + [0.2] * 2)


def test_what_cannot_be_said_is_none():
    alone = record(chunks=[(0.5, 4)])
    assert metrics.tpot(alone) is None  # n = k_1: no token came after the first chunk
    unknown = record(chunks=[(0.5, None), (1.0, None)], tokens=None)
    assert metrics.tpot(unknown) is metrics.tpot_naive(unknown) is None
    assert metrics.token_gaps(unknown) == []
    assert metrics.ttft(record()) is None


@pytest.mark.parametrize("first", range(1, 9))
def test_time_per_token_is_exact_whatever_the_first_chunk_carries(first):
    """4 tokens every 20 ms are 5 ms a token, whether the first chunk carried 1 or 8."""
    chunks = [(0.05, first)] + [(0.05 + 0.02 * i, 4) for i in range(1, 31)]
    assert metrics.tpot(record(chunks=chunks)) == pytest.approx(0.005, abs=1e-12)


def test_a_gap_that_brought_text_but_no_token_belongs_to_the_next_token():
    assert metrics.token_gaps(record(chunks=[(1.0, 1), (1.2, 0), (1.5, 1)])) == pytest.approx([0.5])


def test_the_steady_window_runs_from_full_to_the_first_slot_that_stays_empty():
    """Two slots. In flight reaches 2 at 1.0. Slot 0 ends for good at 6, slot 1 at 9."""
    records = [
        record(0, 0.0, [(2.0, 1), (3.0, 1)], slot=0),
        record(1, 1.0, [(2.0, 1), (9.0, 1)], slot=1),
        record(2, 3.0, [(4.0, 1), (6.0, 1)], slot=0),
    ]
    level = trace(*records, concurrency=2)
    window = metrics.steady_window(level)
    assert (window.start_s, window.end_s) == (1.0, 6.0)
    # Tokens at 2, 2, 3, 4 and 6 arrived in those five seconds; the one at 9 did not.
    rates = metrics.throughput(level.records, window)
    assert rates.output_tok_s == pytest.approx(5 / 5)
    assert rates.output_tok_s_whole == pytest.approx(6 / 9)
    assert rates.requests_s_whole == pytest.approx(3 / 9)
    assert metrics.mean_in_flight(level.in_flight(), 1.0, 6.0) == pytest.approx(2.0)
    assert metrics.mean_in_flight(level.in_flight(), 0.0, 9.0) == pytest.approx((1 + 10 + 3) / 9)


def test_a_warm_up_that_hands_over_does_not_open_the_window_but_its_tokens_count_in_it():
    records = [
        record(0, 0.0, [(1.0, 1), (5.0, 1)], slot=0, phase="warmup"),
        record(1, 0.0, [(2.0, 1)], slot=1, phase="warmup"),
        record(2, 2.0, [(4.0, 1), (8.0, 1)], slot=1),
        record(3, 5.0, [(6.0, 1), (7.0, 1)], slot=0),
    ]
    window = metrics.steady_window(trace(*records, concurrency=2))
    assert (window.start_s, window.end_s) == (2.0, 7.0)
    # 4, 5 (warm-up), 6, 7: the token at 2.0 came before the window, the one at 8 after it.
    assert metrics.window_tokens(records, window) == pytest.approx(4 / 5)
    # Over the whole run only measured requests are told: 4 tokens of two requests, from 2 to 8.
    rates = metrics.throughput(records, window)
    assert (rates.output_tok_s_whole, rates.requests_s_whole) == pytest.approx((4 / 6, 2 / 6))
    assert rates.per_request_tok_s == pytest.approx((2 / 6 + 2 / 2) / 2)


def test_a_level_never_reached_has_no_window():
    level = trace(record(chunks=[(1.0, 1)]), concurrency=2)
    assert metrics.steady_window(level) == Window(start_s=None, end_s=None)
    assert metrics.throughput(level.records, metrics.steady_window(level)).output_tok_s is None
    facts = metrics.client_facts(level, metrics.steady_window(level))
    assert (facts["peak_in_flight"], facts["mean_in_flight"]) == (1, None)


def test_tokens_of_uncounted_chunks_are_spread_evenly_over_them():
    one = record(chunks=[(1.0, None), (2.0, None), (3.0, None), (9.0, None)], tokens=8)
    assert metrics.window_tokens([one], Window(start_s=0.0, end_s=4.0)) == pytest.approx(3 * 2 / 4)


def test_failed_requests_are_counted_by_reason_and_are_no_samples():
    level = trace(record(0, 0.0, [(1.0, 1), (2.0, 1)]), record(1, 2.0, [(2.5, 1)], ok=False, reason="timeout"))
    result = metrics.summarise(level, metrics.Identity("c", "a", "l"), {"mode": "closed", "concurrency": 1})
    assert (result.requests, result.ok, result.failures, result.output_tokens) == (2, 1, {"timeout": 1}, 2)
    assert result.metrics["ttft_s"].n == 1
    assert result.verdict.state == "valid"


def test_a_whole_level_by_hand():
    """Two slots for 3.5 s: 5 + 2 + 8 = 15 tokens for 7 + 9 + 4 = 20 of prompt; the fourth request failed, and counts in
    nothing but its connection and the slot it held. Slot 1 is empty from 3.0 on, before which 5 + 2 + 4 tokens came.
    """
    records = [
        record(0, 0.0, [(0.5, 2), (1.5, 3)], slot=0, prompt_tokens=7, cached_tokens=2, connect_s=0.01, queued_s=0.25),
        record(1, 0.0, [(1.0, 1), (2.0, 1)], slot=1, prompt_tokens=9, cached_tokens=0),
        # Its usage came a tenth of a second after its last token, which is when it ends for the rates.
        record(2, 1.5, [(2.5, 4), (3.5, 4)], slot=0, prompt_tokens=4, cached_tokens=4, counter="stream", end_s=3.6),
        record(
            3,
            2.0,
            [(2.5, 9)],
            slot=1,
            ok=False,
            reason="timeout",
            end_s=3.0,
            prompt_tokens=99,
            cached_tokens=99,
            connect_s=0.03,
            queued_s=9.0,
        ),
    ]
    records[2] = replace(records[2], chunks=(records[2].chunks[0]._replace(merged=True), records[2].chunks[1]))
    client = ClientFacts(
        2,
        cpu_s=6.0,
        wall_s=10.0,
        kernel_stamps=True,
        reads=12,
        parse_s=0.1,
        wrapped=3,
        clock_step_s=-0.002,
        cpus=(6, 7),
        reconnects=1,
    )
    level = replace(trace(*records, concurrency=2), client=client, stopped=True)
    found = metrics.summarise(level, metrics.Identity("c", "a", "l", 4), {"concurrency": 2}, server={"drafts": 5.0})
    assert found.started_at == "2023-11-14T22:13:20.000+00:00"
    assert (found.prompt_tokens, found.cached_tokens, found.output_tokens) == (20, 6, 15)
    assert (found.counter, found.block, found.server) == ("stream, usage", 4, {"drafts": 5.0})
    rates = found.throughput
    assert rates.output_tok_s == pytest.approx(11 / 3.0)
    assert rates.output_tok_s_whole == pytest.approx(15 / 3.5)
    assert rates.total_tok_s_whole == pytest.approx((15 + 20) / 3.5)
    assert rates.requests_s_whole == pytest.approx(3 / 3.5)
    assert rates.per_request_tok_s == pytest.approx((5 / 1.5 + 2 / 2.0 + 8 / 2.0) / 3)
    queued, connect = found.metrics["queued_s"], found.metrics["connect_s"]
    assert (queued.n, queued.mean) == (1, 0.25)
    assert (connect.n, connect.minimum, connect.maximum) == (2, 0.01, 0.03)
    wanted = {
        "processes": 2,
        "cpus": [6, 7],
        "cpu_s": 6.0,
        "cpu_share": 0.3,
        "parse_s": 0.1,
        "kernel_stamps": True,
        "reads": 12,
        "reconnects": 1,
        "merged_share": 1 / 7,
        "chunks_s": 0.7,
        "capacity_chunks_s": None,
        "capacity_share": None,
        "capacity_note": None,
        "peak_in_flight": 2,
        "mean_in_flight": 2.0,
        "wrapped_requests": 3,
        "clock_step_s": -0.002,
        "stopped": True,
    }
    assert {name: found.client[name] for name in wanted} == wanted


def test_what_one_request_does_not_say_no_total_does():
    """One of two servers' answers without a count: what it made is not nothing, so that no sum and no rate stands."""
    told = record(0, 0.0, [(0.5, 1), (1.0, 1)], prompt_tokens=3, cached_tokens=1)
    silent = record(1, 1.0, [(1.5, None), (2.0, None)], tokens=None, counter=None)
    found = metrics.summarise(trace(told, silent), metrics.Identity("c", "a", "l"), {})
    assert (found.prompt_tokens, found.cached_tokens, found.counter) == (None, None, "nobody, usage")
    rates = found.throughput
    assert (rates.output_tok_s, rates.output_tok_s_whole, rates.total_tok_s_whole) == (None, None, None)
    assert rates.requests_s_whole == pytest.approx(2 / 2.0)


def test_a_first_chunk_that_nobody_counted_is_taken_for_one_token():
    """9 tokens, the first chunk at 0.5 and the last at 2.5: 2.0 / (9 - 1)."""
    assert metrics.tpot(record(chunks=[(0.5, None), (2.5, None)], tokens=9)) == pytest.approx(0.25)


def test_an_open_loops_window_is_the_time_in_which_measured_requests_were_sent():
    records = [record(i, sent, [(sent + 5.0, 1)], slot=i) for i, sent in enumerate((1.0, 2.5, 4.0))]
    early = record(9, 0.0, [(1.0, 1)], slot=9, phase="warmup")
    window = metrics.steady_window(trace(early, *records, mode="open", concurrency=None))
    assert (window.start_s, window.end_s) == (1.0, 4.0)


def test_a_serial_level_is_full_with_one_request():
    one = record(0, 1.0, [(2.0, 1), (3.0, 1)])
    window = metrics.steady_window(trace(one, mode="serial", concurrency=8))
    assert (window.start_s, window.end_s) == (1.0, 3.0)


def test_a_request_that_ends_as_the_next_begins_is_never_two_in_flight():
    level = trace(record(0, 0.0, [(1.0, 1)]), record(1, 1.0, [(2.0, 1)]))
    assert level.in_flight() == [(0.0, 1), (1.0, 0), (1.0, 1), (2.0, 0)]


def test_a_level_without_a_measured_request_was_not_run():
    level = trace(record(0, 0.0, [(1.0, 1)], phase="warmup"))
    found = metrics.summarise(level, metrics.Identity("c", "a", "l"), {})
    assert (found.requests, found.verdict.state, found.metrics) == (0, "not run", {})


def test_percentiles_stand_only_where_the_sample_supports_them():
    few, many = metrics.summary([1.0] * 30), metrics.summary(list(range(1000)))
    assert (few.p50, few.p90, few.p99) == (1.0, None, None)
    assert many.p99 == pytest.approx(989.01)  # numpy's linear interpolation: 0.99 * 999
    assert metrics.summary([]).n == 0


@pytest.mark.parametrize("count", [1, 2, 11, 64, 511, 662, 5000, 128_000])
@pytest.mark.parametrize("share", [0.5, 0.9, 0.99, 0.999])
def test_the_ranks_that_bound_a_percentile_are_those_of_scipys_binomial(count, share):
    chances = stats.binom.cdf(np.arange(count + 1), count, share)
    found = bounded(np.arange(1, count + 1), share)
    # The sample 1, 2, 3 ... names its own ranks; X_(r) lies above the quantile when fewer than r samples lie below it.
    below = [rank for rank in range(1, count + 1) if chances[rank - 1] <= 0.025]
    above = [rank for rank in range(1, count + 1) if chances[rank - 1] >= 0.975]
    assert found.low == (below[-1] if below else None)
    assert found.high == (above[0] if above else None)


def test_goodput_counts_requests_that_keep_every_objective():
    records = [record(i, float(i), [(i + 0.2 * (i + 1), 1), (i + 1.0, 1)]) for i in range(4)]
    # TTFT 0.2, 0.4, 0.6, 0.8 over 4 seconds; two keep 0.5.
    assert metrics.goodput(trace(*records), {"ttft_s": 0.5}) == pytest.approx(2 / 4)
    assert metrics.goodput(trace(*records), {"ttft_s": 0.5, "e2e_s": 0.5}) == 0.0
    # One token after the first, in 0.8, 0.6, 0.4 and 0.2 seconds; a fifth request failed, and a failure keeps nothing.
    failed = record(4, 3.5, [(3.6, 1), (3.7, 1)], ok=False, reason="ended early")
    assert metrics.goodput(trace(*records, failed), {"tpot_s": 0.5}) == pytest.approx(2 / 4)
    # A single token has no time per token, and keeps any.
    assert metrics.goodput(trace(record(0, 0.0, [(1.0, 1)])), {"tpot_s": 0.001}) == pytest.approx(1 / 1)


def test_goodput_stands_in_a_level_that_has_objectives():
    level = trace(record(0, 0.0, [(0.2, 1), (1.0, 1)]), record(1, 1.0, [(1.9, 1), (2.0, 1)]))
    plan = {"mode": "closed", "concurrency": 1}
    identity = metrics.Identity("c", "a", "l")
    assert metrics.summarise(level, identity, plan).throughput.goodput_requests_s is None
    asked = metrics.summarise(level, identity, {**plan, "goodput": {"ttft_s": 0.5}})
    assert asked.throughput.goodput_requests_s == pytest.approx(1 / 2)  # TTFT 0.2 and 0.9, in two seconds


def test_the_share_of_a_calibrated_capacity_is_worked_out():
    level = trace(record(0, 0.0, [(1.0, 1), (2.0, 1)]))
    plan = {"mode": "closed", "concurrency": 1}
    found = metrics.summarise(level, metrics.Identity("c", "a", "l"), plan, capacity=(0.25, "calibrated"))
    assert found.client["capacity_share"] == pytest.approx(0.2 / 0.25)  # 2 chunks in 10 s: 0.2 a second


def test_lag_without_kernel_stamps_is_the_most_it_can_have_been():
    """Read at 1.001 and 2.003; they cannot have come before 0.999 and 1.999: at most 2 and 4 ms late."""
    chunks = (Chunk(1.001, 1.001, 1, since_s=0.999), Chunk(2.003, 2.003, 1, since_s=1.999))
    level = replace(trace(replace(record(), chunks=chunks)), client=replace(CLIENT, kernel_stamps=False))
    facts = metrics.client_facts(level, Window(start_s=None, end_s=None))
    assert facts["lag_p50_s"] == pytest.approx(0.003)
    assert facts["lag_p99_s"] == pytest.approx(0.00398)  # numpy's linear interpolation between 2 and 4


def test_waiting_for_a_cap_is_no_skew():
    """Due at 1.0; waited 0.4 s for a free slot, then left 2 ms later."""
    waited = replace(record(sent=1.402, chunks=[(2.0, 1)]), scheduled_s=1.0, queued_s=0.4)
    assert metrics.send_skew(waited) == pytest.approx(0.002)
    assert metrics.send_skew(record()) is None
    failed = replace(record(sent=3.006), scheduled_s=3.0, ok=False, reason="timeout")  # it left late all the same
    found = metrics.request_metrics([waited, failed, record(chunks=[(1.0, 1)])])["send_skew_s"]
    assert (found.n, found.mean) == (2, pytest.approx(0.004))


def test_a_recorded_run_recomputed_from_its_json_lines_agrees():
    """The stored lines, read by a few lines of numpy that know nothing of ours but the file's format."""
    body = b'{"stream": true, "stream_options": {"include_usage": true}, "max_tokens": 20}'
    with start(native=COMPILER is not None, ttft_us=8000, gap_us=4000, k=3, first=2, count=1, jitter_us=1500) as truth:
        requests = [Prepared(f"p{i}", f"/v1/chat/completions?id={i}", body) for i in range(40)]
        level = run_level(Target("127.0.0.1", truth.port), Load(concurrency=4, requests=40), requests)
    result = metrics.summarise(level, metrics.Identity("c", "a", "l"), {"mode": "closed", "concurrency": 4})
    lines = [json.loads(json.dumps(each.to_json())) for each in level.records]
    at = [np.array([chunk[0] for chunk in line["chunks"]]) for line in lines]
    tokens = [np.array([chunk[2] for chunk in line["chunks"]]) for line in lines]
    sent = np.array([line["sent_s"] for line in lines])
    first, last = np.array([a[0] for a in at]), np.array([a[-1] for a in at])
    n = np.array([line["output_tokens"] for line in lines])
    expected = {
        "ttft_s": first - sent,
        "e2e_s": last - sent,
        "tpot_s": (last - first) / (n - np.array([k[0] for k in tokens])),
        "tpot_naive_s": (last - first) / (n - 1),
        "chunk_gap_s": np.concatenate([np.diff(a) for a in at]),
        "token_itl_s": np.concatenate([np.repeat(np.diff(a) / k[1:], k[1:]) for a, k in zip(at, tokens, strict=True)]),
    }
    for name, values in expected.items():
        found = result.metrics[name]
        assert found.n == len(values)
        assert found.mean == pytest.approx(values.mean(), abs=1e-9)
        assert found.std == pytest.approx(values.std(ddof=1), abs=1e-9)
        assert found.p50 == pytest.approx(np.quantile(values, 0.5), abs=1e-9)
        for which, share in (("p90", 0.9), ("p99", 0.99)):
            if (shown := getattr(found, which)) is not None:
                assert shown == pytest.approx(np.quantile(values, share), abs=1e-9)
        assert (found.minimum, found.maximum) == pytest.approx((values.min(), values.max()), abs=1e-9)
    for which, line in enumerate(lines):  # the identities
        assert expected["ttft_s"][which] + np.diff(at[which]).sum() == pytest.approx(expected["e2e_s"][which], abs=1e-9)
        assert tokens[which].sum() == line["output_tokens"] == 20
    span = last.max() - sent.min()
    prompt = np.array([line["prompt_tokens"] for line in lines])
    assert result.throughput.total_tok_s_whole == pytest.approx((n.sum() + prompt.sum()) / span, rel=1e-9)
    assert result.throughput.requests_s_whole == pytest.approx(40 / span, rel=1e-9)
    assert result.throughput.per_request_tok_s == pytest.approx(np.mean(n / (last - sent)), rel=1e-9)
    # The window: from the first send that finds all four in flight to the last end of the slot that runs dry first.
    ended = np.array([line["end_s"] for line in lines])
    slot = np.array([line["slot"] for line in lines])
    full = min(t for t in sent if (sent <= t).sum() - (ended <= t).sum() >= 4)
    dry = min(ended[slot == each].max() for each in set(slot))
    inside = sum(k[(full < a) & (a <= dry)].sum() for a, k in zip(at, tokens, strict=True))
    busy = np.clip(np.minimum(ended, dry) - np.maximum(sent, full), 0, None).sum()
    assert (result.window.start_s, result.window.end_s) == (full, dry)
    assert result.throughput.output_tok_s == pytest.approx(inside / (dry - full), rel=1e-9)
    assert result.client["mean_in_flight"] == pytest.approx(busy / (dry - full), rel=1e-9)
    assert result.client["peak_in_flight"] == 4
    assert result.throughput.output_tok_s_whole == pytest.approx(n.sum() / (last.max() - sent.min()), rel=1e-9)
    assert math.isclose(
        result.client["lag_p99_s"],
        np.quantile([c[1] - c[0] for line in lines for c in line["chunks"]], 0.99),
        abs_tol=1e-9,
    )

"""Each rule of a level's verdict, with one fault at a time put into a level that is otherwise good."""

from dataclasses import replace

import pytest

from harness.engines.engine import Evidence
from harness.load.records import Chunk, RequestRecord
from harness.stats.level import LevelResult, Summary, Throughput, Verdict, Window
from harness.stats.validity import Context, Limits, Rate, judge, judged, template_tokens, trend


def level(**changes):
    """30 requests of 16 tokens at C=4 against a healthy server."""
    good = {
        "measurement": "1",
        "cell_id": "0" * 64,
        "arm": "baseline",
        "launch": "01-baseline",
        "block": 0,
        "level": {"mode": "closed", "concurrency": 4, "requests": 30},
        "started_at": "2026-11-29T12:00:00Z",
        "requests": 30,
        "ok": 30,
        "output_tokens": 480,
        "prompt_tokens": 3000,
        "cached_tokens": 0,
        "counter": "usage",
        "window": Window(start_s=0.1, end_s=9.0),
        "throughput": Throughput(output_tok_s=50.0, output_tok_s_whole=48.0),
        "metrics": {"chunk_gap_s": Summary(n=450, p50=0.020), "send_skew_s": Summary(n=30, maximum=0.001)},
        "client": {"peak_in_flight": 4, "mean_in_flight": 3.95, "kernel_stamps": True, "merged_share": 0.01},
        "verdict": Verdict(state="not run"),
    }
    return LevelResult(**{**good, **changes})


def record(index, tokens=16, finish="length"):
    return RequestRecord(index, 0, "measure", f"p{index}", 0.0, 1.0, True, output_tokens=tokens, finish_reason=finish)


HEALTHY = Context(cold=True, fixed_tokens=16, rates={"the server's log": Rate(50.4, 50.0)})


def test_a_healthy_level_is_valid_and_the_verdict_it_came_with_is_ignored():
    assert judge(level(), HEALTHY) == Verdict(state="valid")
    assert judged(level(), HEALTHY).verdict.state == "valid"


@pytest.mark.parametrize(
    ("result", "context", "state", "code", "message"),
    [
        (
            level(ok=29, failures={"timeout": 1}),
            Context(),
            "suspect",
            "failed-requests",
            "1 of 30 requests failed: 1 timeout",
        ),
        (
            level(ok=20, failures={"timeout": 3, "http-503": 7}),
            Context(),
            "invalid",
            "failed-requests",
            "10 of 30 requests failed: 7 http-503, 3 timeout",
        ),
        (level(output_tokens=0), Context(), "invalid", "no-tokens", "30 requests ended well and yielded 0 tokens"),
        (
            level(output_tokens=450),
            Context(fixed_tokens=16),
            "suspect",
            "wrong-length",
            "15.0 tokens a request on average where 16 were asked",
        ),
        (
            level(),
            Context(fixed_tokens=16, records=[record(0), record(1, 12), record(2, 12), record(3, 9)]),
            "suspect",
            "wrong-length",
            "3 of 4 requests yielded another length than 16: 2 x 12, 1 x 9",
        ),
        (
            level(),
            Context(fixed_tokens=16, records=[record(0), record(1, 16, "stop")]),
            "suspect",
            "early-stop",
            "1 of 2 requests stopped by themselves where 16 tokens were asked",
        ),
        (
            level(cached_tokens=2400),
            Context(cold=True),
            "invalid",
            "cached-prompt",
            "2400 of 3000 (80.0%) prompt tokens came from the cache where a cold one was planned",
        ),
        (
            level(cached_tokens=30),
            Context(cold=True),
            "suspect",
            "cached-prompt",
            "30 of 3000 (1.0%) prompt tokens came from the cache where a cold one was planned",
        ),
        (
            level(),
            Context(server_restarted=True),
            "invalid",
            "server-restarted",
            "the server is not the process that the launch started",
        ),
        (
            level(),
            Context(server_died="signal 9 after 4.1 s"),
            "invalid",
            "server-died",
            "the server died during the level: signal 9 after 4.1 s",
        ),
        (
            level(client={"peak_in_flight": 3}),
            Context(),
            "invalid",
            "in-flight",
            "in-flight never reached 4: at most 3 requests at once",
        ),
        (
            level(window=Window(start_s=None, end_s=None), client={}),
            Context(),
            "invalid",
            "in-flight",
            "in-flight never reached 4: fewer requests at once",
        ),
        (
            level(client={"peak_in_flight": 4, "mean_in_flight": 3.0}),
            Context(),
            "suspect",
            "in-flight",
            "3.0 requests in flight on average in the steady window where 4 were planned",
        ),
        (
            level(),
            Context(slices=[30, 31, 30, 29, 40, 41, 40, 39]),
            "suspect",
            "not-steady",
            "throughput rose by 33.3% within the level: the warm-up was too short, or the server slows down",
        ),
        (
            level(),
            Context(evidence=[Evidence("speculation", False, ("/slots says speculative: false",))]),
            "suspect",
            "feature-not-engaged",
            "`speculation` was promised to engage and the server shows that it did not: /slots says speculative: false",
        ),
        (
            level(),
            Context(evidence=[Evidence("speculation", None)]),
            "suspect",
            "feature-not-engaged",
            "`speculation` was promised to engage and the server does not show that it did",
        ),
        (
            level(),
            Context(throttled=["sw_power_cap"]),
            "suspect",
            "gpu-throttled",
            "the GPU slowed down: sw_power_cap",
        ),
        (
            level(),
            Context(shared_with=["python (pid 4242)"]),
            "suspect",
            "gpu-shared",
            "the GPU was shared with python (pid 4242)",
        ),
        (
            level(client={"lag_p99_s": 0.045}, metrics={"e2e_s": Summary(n=30, p50=0.3)}),
            Context(),
            "suspect",
            "client-bound",
            "the client read 45.0 ms late (p99), 15% of a request: slots wait that long",
        ),
        (
            level(client={"cpu_share": 0.97}),
            Context(),
            "suspect",
            "client-bound",
            "the client's processes were busy 97% of the time",
        ),
        (
            level(client={"chunks_s": 36000.0, "capacity_share": 0.72, "cpu_share": 0.9}),
            Context(),
            "suspect",
            "client-bound",
            "the client read 36000 chunks/s, 72% of what it can here",
        ),
        (
            level(client={"lag_p99_s": 0.0013, "kernel_stamps": False}, metrics={"e2e_s": Summary(n=30, p50=3.0)}),
            Context(),
            "suspect",
            "client-bound",
            "arrivals have no kernel stamp and were read up to 1.3 ms late (p99)",
        ),
        (
            level(client={"clock_step_s": -0.2}),
            Context(),
            "suspect",
            "clock-step",
            "the wall clock, whose stamps arrivals carry, was set by 200.0 ms during the level",
        ),
        (
            level(client={"hosts": [{"clock_bound_s": 0.0002}, {"clock_bound_s": 0.0121}]}),
            Context(),
            "suspect",
            "clocks-apart",
            "the clocks of the machines that offer the load are compared to within 12.1 ms only",
        ),
        (
            level(metrics={"send_skew_s": Summary(n=900, p99=0.08)}),
            Context(),
            "suspect",
            "client-bound",
            "requests left 80 ms late, so the schedule was missed",
        ),
        (
            level(client={"merged_share": 0.011}),
            Context(),
            "suspect",
            "merged-reads",
            "1.1% of the chunks shared a read, so their arrival is known only as an interval",
        ),
        (
            level(),
            Context(counts={"the server's log": 20}, records=[record(0)]),
            "suspect",
            "counts-disagree",
            "20 output tokens by the server's log, 16 by the requests: 20.0% apart",
        ),
        (
            level(server={"generated_tokens": 40.0}),
            Context(records=[record(0), record(1)]),
            "suspect",
            "counts-disagree",
            "40 output tokens by the server's metrics, 32 by the requests: 20.0% apart",
        ),
        (
            level(),
            Context(rates={"the server's log": Rate(40.0, 50.0, slack=0.1)}),
            "suspect",
            "counts-disagree",
            "40.0 tok/s by the server's log, 50.0 by the client in the same time: 20.0% apart",
        ),
    ],
)
def test_each_fault_is_named_with_its_numbers(result, context, state, code, message):
    verdict = judge(result, context)
    assert (verdict.state, [(r.code, r.message) for r in verdict.reasons]) == (state, [(code, message)])


@pytest.mark.parametrize(
    "client",
    [
        {"merged_share": 0.01},
        {"lag_p99_s": 0.0013, "kernel_stamps": True},  # a stamp does not care when it is read
        {"lag_p99_s": 0.001, "kernel_stamps": False},
        {"capacity_share": 0.70, "cpu_share": 0.70},
        {"clock_step_s": 0.001},
    ],
)
def test_a_client_at_its_limits_is_within_them(client):
    assert judge(level(client=client, metrics={"e2e_s": Summary(n=30, p50=3.0)}), Context()).state == "valid"


def test_nothing_sent_is_not_run():
    verdict = judge(level(requests=0, ok=0, output_tokens=0), Context())
    assert (verdict.state, verdict.reasons[0].code) == ("not run", "not-run")


def test_one_invalid_reason_makes_the_level_invalid_and_stands_first():
    verdict = judge(level(), Context(throttled=["hw_slowdown"], server_died="rc 1"))
    assert verdict.state == "invalid"
    assert [reason.code for reason in verdict.reasons] == ["server-died", "gpu-throttled"]


def test_counts_within_two_percent_agree_and_the_limit_can_be_moved():
    known = {"counts": {"the server's log": 470}, "records": [record(n) for n in range(30)]}  # 10 of 480 is 2.08 %
    assert judge(level(), Context(**known)).state == "suspect"
    assert judge(level(), Context(**known, limits=Limits(counts_apart=0.03))).state == "valid"


def test_what_falls_on_either_side_of_a_stretchs_ends_is_no_disagreement():
    assert judge(level(), Context(rates={"the server's log": Rate(96.0, 100.0, slack=0.03)})).state == "valid"
    assert judge(level(), Context(rates={"the server's log": Rate(94.0, 100.0, slack=0.03)})).state == "suspect"


def cached(index, tokens, of=100):
    return RequestRecord(
        index, 0, "measure", f"p{index}", 0.0, 1.0, True, output_tokens=16, prompt_tokens=of, cached_tokens=tokens
    )


def test_a_template_that_every_prompt_begins_with_is_no_warm_cache():
    """Twenty-nine requests of 100 tokens find the 25 of the template; the first after the flush finds nothing."""
    records = [cached(0, 0), *(cached(n, 25) for n in range(1, 30))]
    result = level(cached_tokens=29 * 25)
    assert judge(result, Context(cold=True, records=records, template_tokens=25)) == Verdict(state="valid")
    [reason] = judge(result, Context(cold=True, records=records)).reasons
    assert reason.message == "725 of 3000 (24.2%) prompt tokens came from the cache where a cold one was planned"


def test_a_prompt_that_was_asked_before_shows_beyond_the_template():
    records = [cached(0, 0), *(cached(n, 25) for n in range(1, 29)), cached(29, 99)]
    [reason] = judge(level(cached_tokens=799), Context(cold=True, records=records, template_tokens=25)).reasons
    assert reason.message == (
        "74 of 3000 (2.5%) prompt tokens came from the cache where a cold one was planned, beyond the 25 of the "
        "template that every prompt begins with"
    )


def test_a_template_is_measured_by_the_warm_up():
    # The first finds the readiness probe's template, the second two words more that it shares with the first.
    assert template_tokens([cached(0, 25), cached(1, 27)]) == 25
    assert template_tokens([cached(0, 0), cached(1, 60)]) == 0  # a prefix that the prompts share is no template
    assert template_tokens([cached(0, 0), cached(1, 0)]) == 0  # no prefix cache, or nothing in common
    assert template_tokens([cached(0, 96), cached(1, 96)]) == 0  # asked before: a server that ran already
    assert template_tokens([]) == 0


def test_the_servers_counter_is_not_held_against_requests_that_failed():
    failed = RequestRecord(2, 0, "measure", "p2", 0.0, 1.0, False, "timeout")
    context = Context(records=[record(0), record(1), failed])
    assert judge(level(server={"generated_tokens": 40.0}), context).state == "valid"


@pytest.mark.parametrize(
    ("slices", "change", "certain"),
    [
        ([10, 10, 10, 12, 12, 12], 0.2, True),
        ([10, 10, 10, 10, 10, 10], 0.0, False),
        ([8, 12, 10, 8, 12, 10], 0.0, False),
    ],
)
def test_a_trend_is_the_later_half_against_the_earlier_and_must_stand_out_of_the_noise(slices, change, certain):
    assert trend(slices) == pytest.approx((change, certain))


def test_waves_of_requests_are_no_drift():
    slices = [30, 31, 30, 29, 40, 41, 40, 39]
    long, short = ({"e2e_s": Summary(n=30, p50=seconds)} for seconds in (1.0, 2.0))  # the window is 8.9 s long
    assert judge(level(metrics=long), Context(slices=slices)).state == "suspect"
    assert judge(level(metrics=short), Context(slices=slices)).state == "valid"


def test_a_level_that_stood_still_is_suspect():
    # Seen on an overcommitted machine: 12 slices of 0.41 s, half of them all but empty, medians untouched.
    seen = [398, 386, 390, 170, 0, 0, 24, 0, 0, 24, 480, 405]
    metrics = {"ttft_s": Summary(n=30, p50=0.028), "chunk_gap_s": Summary(n=450, p50=0.027)}
    window = Window(start_s=0.4, end_s=5.3)
    verdict = judge(level(window=window, metrics=metrics), Context(slices=seen))
    assert [(reason.code, reason.message) for reason in verdict.reasons] == [
        ("stalled", "hardly anything arrived in 6 of 12 slices of the level: something stood still")
    ]


def test_slices_shorter_than_a_prefill_are_no_stall():
    metrics = {"ttft_s": Summary(n=30, p50=0.4), "chunk_gap_s": Summary(n=450, p50=0.027)}
    assert judge(level(metrics=metrics), Context(slices=[0, 50, 50, 0, 50, 50])).state == "valid"


def test_a_trend_needs_six_slices():
    assert trend([1, 2, 3, 4, 5]) is None


def queue(arrivals, services, count=100):
    """One server, first come first served: a request every 1/arrivals s that takes 1/services s and answers then."""
    records, free = [], 0.0
    for n in range(count):
        sent = n / arrivals
        free = max(free, sent) + 1 / services
        chunks = (Chunk(free, free, 16),)
        records.append(
            RequestRecord(n, n, "measure", f"p{n}", sent, free, True, chunks=chunks, output_tokens=16, scheduled_s=sent)
        )
    return records


def open_level():
    return level(level={"mode": "open", "rate": 10.0, "requests": 100}, client={"kernel_stamps": True})


def test_an_open_loop_beyond_what_the_server_completes_is_overloaded():
    """Ten arrive a second and eight leave: two pile up a second, and each waits 1 - 8/10 of a second longer a second.

    TTFT grows by 1/8 - 1/10 = 0.025 s from one request to the next, and there are ten a second: 0.25 s a second.
    """
    [reason] = judge(open_level(), Context(records=queue(10, 8))).reasons
    assert reason.code == "overloaded"
    assert "in-flight grows by 2 requests a second and TTFT by 0.25 s a second" in reason.message


def test_an_open_loop_that_is_over_before_its_first_request_ends_shows_a_server_filling_up():
    """Thirty requests leave within 3 s, and none takes less than 3.5 s: no rate and no latency under it was seen."""
    records = [replace(one, sent_s=0.1 * n, end_s=0.1 * n + 3.5) for n, one in enumerate(queue(10, 8)[:30])]
    [reason] = judge(open_level(), Context(records=records)).reasons
    assert (reason.code, reason.message) == (
        "only-filled", "the last request left 2.9 s in, the first one ended 3.5 s in: the server only filled up",
    )  # fmt: skip


def test_an_open_loop_that_the_server_keeps_up_with_is_not():
    assert judge(open_level(), Context(records=queue(8, 10))).state == "valid"
    assert (
        judge(open_level(), Context(records=queue(10, 9.9))).state == "valid"
    )  # 1 % piles up: within any queue's wandering
    assert judge(level(), Context(records=queue(10, 8))).state == "valid"  # a closed loop cannot be outrun

"""The simulated engine's truth, in virtual time, against formulas worked out by hand."""

import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.engines.simulation.model import Batcher, Cost, Noise, Request, Speculation, tiers_of

# Worked out by hand below: a = 10 ms, k = 1 ms.
COST = Cost(step=0.010, sequence=0.001)


def closed_loop(batcher, *, concurrency, tokens, requests, prefill=0, think_s=0.0):
    """Keep `concurrency` requests in flight in virtual time; (arrival, first token, end, request) of each."""
    arrivals, firsts, done = {}, {}, []
    pending = []  # (time, request) of clients that think before their next request
    count = 0

    def send(now):
        nonlocal count
        request = Request(tokens, prefill, seed=count)
        count += 1
        arrivals[request] = now
        batcher.arrive(request, now)

    for _ in range(concurrency):
        send(0.0)
    batcher.start(0.0)
    while len(done) < requests:
        step = batcher.step
        for at in sorted(at for at in pending if step is None or at <= step.ends):
            pending.remove(at)
            send(at)
            if batcher.step is None:
                batcher.start(at)
            step = batcher.step
        now = step.ends
        for request, _brought in batcher.finish():
            firsts.setdefault(request, now)
            if request.done:
                done.append((arrivals[request], firsts[request], now, request))
                pending.append(now + think_s)
        batcher.start(now)
    return done


def throughput(done, tokens):
    """Tokens a second from the first end to the last: whole generations only, so no edge."""
    first, last = done[0][2], done[-1][2]
    after = [entry for entry in done if entry[2] > first]
    return tokens * len(after) / (last - first)


@pytest.mark.parametrize(
    ("concurrency", "expected"),
    [
        (1, 1 / 0.011),  # 1 / (10 + 1) ms = 90.9
        (4, 4 / 0.014),  # 285.7
        (10, 10 / 0.020),  # 500
        (250, 250 / 0.260),  # 961.5
    ],
)
def test_a_closed_loop_gives_c_tokens_every_a_plus_k_times_c(concurrency, expected):
    batcher = Batcher(COST, Speculation(), max_running=1024)
    done = closed_loop(batcher, concurrency=concurrency, tokens=32, requests=5 * concurrency)
    assert throughput(done, 32) == pytest.approx(expected, rel=1e-9)


def test_a_client_that_needs_a_moment_between_requests_costs_no_throughput_once_the_loop_is_out_of_step():
    batcher = Batcher(COST, Speculation(), max_running=1024)
    # Lengths differ, so that ends spread over steps and the server never stands still.
    requests = [Request(20 + index) for index in range(4)]
    for request in requests:
        batcher.arrive(request, 0.0)
    batcher.start(0.0)
    now, made = 0.0, 0
    due = []
    while now < 20.0:
        step = batcher.step
        for at in [at for at in due if at <= step.ends]:
            due.remove(at)
            batcher.arrive(Request(20 + len(due)), at)
        now = batcher.step.ends
        brought = batcher.finish()
        made += sum(tokens for _, tokens in brought)
        due += [now + 0.002 for request, _ in brought if request.done]  # 2 ms later: in the first half of the next step
        batcher.start(now)
    assert made / now == pytest.approx(4 / 0.014, rel=0.01)


def test_a_request_above_max_running_waits_and_throughput_stays_at_the_largest_batch():
    batcher = Batcher(COST, Speculation(), max_running=4)
    done = closed_loop(batcher, concurrency=12, tokens=10, requests=60)
    assert throughput(done, 10) == pytest.approx(4 / 0.014, rel=1e-9)
    # Little's law: E2E = C * n / X = 12 * 10 / 285.7 = 0.42 s.
    assert statistics.mean(end - arrival for arrival, _, end, _ in done[12:]) == pytest.approx(0.42, rel=1e-6)


def test_prefill_is_paid_once_in_the_step_that_admits():
    batcher = Batcher(Cost(0.010, 0.001, prefill_token=0.0001), Speculation(), max_running=8)
    done = closed_loop(batcher, concurrency=1, tokens=5, requests=3, prefill=100)
    arrival, first, end, _ = done[0]
    assert first - arrival == pytest.approx(0.011 + 0.010)
    assert end - first == pytest.approx(4 * 0.011)
    # X = C*n / (n*T + C*f*q) = 5 / (0.055 + 0.010)
    assert throughput(done, 5) == pytest.approx(5 / 0.065)


def test_speculation_brings_a_truncated_geometric_number_of_tokens_a_step():
    # m = 1 + 0.5 + 0.25 + 0.125 = 1.875 for p = 0.5 and 3 drafts.
    batcher = Batcher(COST, Speculation(((1, 3),), acceptance=0.5), max_running=8)
    done = closed_loop(batcher, concurrency=4, tokens=4000, requests=8)
    per_step = [request.produced / request.steps for *_, request in done]
    assert statistics.mean(per_step) == pytest.approx(1.875, rel=0.02)
    for *_, request in done:
        assert request.accepted + request.steps == request.produced == 4000
        assert request.drafted == 3 * request.drafts


def test_speculation_at_full_acceptance_costs_what_the_formula_says():
    cost = Cost(0.010, 0.001, draft_step=0.002, draft_token=0.0005)
    batcher = Batcher(cost, Speculation(((1, 4),), acceptance=1.0), max_running=8)
    done = closed_loop(batcher, concurrency=2, tokens=50, requests=10)
    # T(2, 4) = 10 + 2 + 2 + 0.5*4*2 = 18 ms; 5 tokens a step; 50 tokens take exactly 10 steps: 2*50 / 0.180 s.
    assert throughput(done, 50) == pytest.approx(2 * 50 / 0.180, rel=1e-9)


def test_the_last_step_is_cut_to_what_was_asked_for():
    request = Request(7)
    assert [request.advance(3, 1.0), request.advance(3, 1.0)] == [4, 3]
    assert request.done
    assert (request.accepted, request.drafted, request.steps) == (5, 6, 2)


def expected_steps(tokens, drafts, acceptance):
    """N(n) of the module's docstring, written out again from the definition of a truncated geometric draw."""
    chances = {brought: acceptance ** (brought - 1) * (1 - acceptance) for brought in range(1, drafts + 1)}
    chances[drafts + 1] = acceptance**drafts
    steps = [0.0]
    for n in range(1, tokens + 1):
        steps.append(1 + sum(chance * steps[max(0, n - brought)] for brought, chance in chances.items()))
    return steps[tokens]


def test_short_outputs_take_the_expected_number_of_steps():
    counts = []
    for seed in range(4000):
        request = Request(8, seed=seed)
        while not request.done:
            request.advance(4, 0.7)
        counts.append(request.steps)
    expected = expected_steps(8, 4, 0.7)
    error = statistics.stdev(counts) / len(counts) ** 0.5
    assert abs(statistics.mean(counts) - expected) < 4 * error
    assert expected_steps(1, 4, 0.7) == 1.0


def test_accepted_drafts_are_the_requests_own_whatever_else_runs():
    def path(companions):
        batcher = Batcher(COST, Speculation(((1, 4),), acceptance=0.6), max_running=64)
        watched = Request(40, seed=11)
        batcher.arrive(watched, 0.0)
        for index in range(companions):
            batcher.arrive(Request(100, seed=100 + index), 0.0)
        batcher.start(0.0)
        taken = []
        while not watched.done:
            now = batcher.step.ends
            taken += [tokens for request, tokens in batcher.finish() if request is watched]
            batcher.start(now)
        return taken

    assert path(0) == path(7)


def test_adaptive_tiers_draft_less_as_the_batch_grows():
    speculation = Speculation(((1, 4), (8, 2), (32, 0)), acceptance=0.7)
    assert [speculation.drafts(batch) for batch in (1, 7, 8, 31, 32, 250)] == [4, 4, 2, 2, 0, 0]


@pytest.mark.parametrize(
    ("drafts", "max_batch", "tiers", "expected"),
    [
        (0, None, (), ()),
        (4, None, (), ((1, 4),)),
        (4, 8, (), ((1, 4), (9, 0))),
        (4, 8, ((16, 0), (1, 2)), ((1, 2), (16, 0))),
    ],
)
def test_tiers_come_from_a_number_an_upper_batch_or_are_spelt_out(drafts, max_batch, tiers, expected):
    assert tiers_of(drafts, max_batch, tiers) == expected


def test_a_late_arrival_waits_for_the_next_step_and_an_early_one_joins():
    batcher = Batcher(COST, Speculation(), max_running=8)
    batcher.arrive(Request(5), 0.0)
    step = batcher.start(0.0)
    assert step.ends == pytest.approx(0.011)
    early, late = Request(5), Request(5)
    batcher.arrive(early, 0.004)
    assert step.ends == pytest.approx(0.012)
    batcher.arrive(late, 0.008)
    assert list(batcher.waiting) == [late]
    assert early in [request for request, _ in batcher.finish()]


def test_who_comes_late_never_overtakes_who_waits():
    batcher = Batcher(COST, Speculation(), max_running=2)
    requests = [Request(3) for _ in range(4)]
    for request in requests:
        batcher.arrive(request, 0.0)
    batcher.start(0.0)
    late = Request(3)
    batcher.arrive(late, 0.001)
    assert [*batcher.running, *batcher.waiting] == [*requests, late]


def test_a_cancelled_request_gets_nothing_more_and_frees_its_place():
    batcher = Batcher(COST, Speculation(), max_running=1)
    gone, waits = Request(5), Request(5)
    batcher.arrive(gone, 0.0)
    batcher.arrive(waits, 0.0)
    batcher.start(0.0)
    batcher.cancel(gone)
    assert batcher.finish() == []
    batcher.start(0.011)
    assert list(batcher.running) == [waits]
    batcher.cancel(gone)  # a second time is nothing
    assert list(batcher.running) == [waits]


def test_noise_has_mean_one_and_its_sigma():
    noise = Noise(step_sigma=0.2, seed=3)
    draws = [noise.factor() for _ in range(20_000)]
    # A lognormal of mean 1 and sigma s has variance exp(s^2) - 1 = 0.0408 for s = 0.2.
    assert statistics.mean(draws) == pytest.approx(1.0, abs=0.006)
    assert statistics.variance(draws) == pytest.approx(0.0408, rel=0.06)


def test_launches_differ_by_their_seed_and_only_by_it():
    factors = [Noise(launch_sigma=0.05, seed=seed).launch_factor for seed in range(2000)]
    assert statistics.mean(factors) == pytest.approx(1.0, abs=0.005)
    assert statistics.stdev(factors) == pytest.approx(0.05, rel=0.08)
    assert Noise(launch_sigma=0.05, seed=7).launch_factor == factors[7]
    assert Noise(seed=7).launch_factor == 1.0


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 0.5), st.integers(1, 40), st.integers(0, 50)), min_size=1, max_size=30),
    st.integers(1, 8),
    st.integers(0, 5),
    st.floats(0, 1),
)
def test_whatever_arrives_everybody_gets_exactly_what_was_asked_for_in_turn(arrivals, most, drafts, acceptance):
    speculation = Speculation(tiers_of(drafts, None, ()), acceptance)
    batcher = Batcher(Cost(0.01, 0.001, 0.0001), speculation, max_running=most)
    due = sorted(arrivals)
    asked, got, began, last_end = [], {}, {}, 0.0
    while due or batcher.step:
        while due and (batcher.step is None or due[0][0] <= batcher.step.ends):
            at, tokens, prefill = due.pop(0)
            request = Request(tokens, prefill, seed=len(asked))
            asked.append(request)
            at = max(at, last_end)
            batcher.arrive(request, at)
            if batcher.step is None:
                batcher.start(at)
        step = batcher.step
        assert len(batcher.running) <= most
        assert step.ends > step.began >= last_end
        last_end = step.ends
        for request, tokens in batcher.finish():
            assert 1 <= tokens <= drafts + 1
            got[request] = got.get(request, 0) + tokens
            began.setdefault(request, step.began)
        batcher.start(last_end)
    assert [got[request] for request in asked] == [request.tokens for request in asked]
    # First come, first served: nobody who came later began in an earlier step.
    assert [began[request] for request in asked] == sorted(began.values())

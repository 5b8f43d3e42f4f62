"""What is made of a log's own figures: real formats, and a rate that is right, wrong, or too short to tell."""

import datetime

import pytest

from harness.engines import get
from harness.engines.engine import LogFigures
from harness.load.records import Chunk, ClientFacts, LevelTrace, RequestRecord
from harness.run.heard import heard
from harness.run.judge import Seen, judged
from harness.run.logs import LogLine
from harness.stats.level import LevelResult, Throughput, Verdict, Window

BEGAN = datetime.datetime(2026, 11, 29, 12, 0, 0, tzinfo=datetime.UTC).timestamp()
STEP_S = 0.02


def line(second: float, text: str, writer: str = "42") -> LogLine:
    at = datetime.datetime.fromtimestamp(BEGAN + second, datetime.UTC)
    return LogLine(f"{at:%Y-%m-%dT%H:%M:%S.%f}Z", writer, text)


def trace(requests: int = 2, tokens: int = 1000, ok: bool = True) -> LevelTrace:
    """Requests at once, a token each every 20 ms: 50 tok/s apiece."""
    chunks = tuple(Chunk(0.5 + n * STEP_S, 0.5 + n * STEP_S, 1) for n in range(tokens))
    records = tuple(
        RequestRecord(n, n, "measure", f"p{n}", 0.0, chunks[-1].at_s, ok, chunks=chunks, output_tokens=tokens)
        for n in range(requests)
    )
    return LevelTrace(records, ClientFacts(1, 0.1, 20.0, True, 10, 0.0), BEGAN, "closed", requests)


def decode(rate: float, accept: str = "") -> str:
    return f"[2026-11-29 12:00:01] Decode batch, #running-req: 2, #token: 96, token usage: 0.00, {accept}" + (
        f"cuda graph: True, gen throughput (token/s): {rate:.2f}, #queue-req: 0"
    )


def stats(rate: float, engine: str = "Engine 000") -> str:
    return f"INFO 11-29 12:00:05 [loggers.py:281] {engine}: Avg prompt throughput: 9.0 tokens/s, Avg generation " + (
        f"throughput: {rate:.1f} tokens/s, Running: 2 reqs, Waiting: 0 reqs"
    )


def test_sglangs_decode_lines_are_held_against_the_same_seconds_of_the_client() -> None:
    """Ten intervals of 0.8 s at 100 tok/s; the first line tells of a time in which the level had not begun."""
    lines = [line(1.0, decode(3.0)), *(line(1.0 + 0.8 * n, decode(100.0)) for n in range(1, 11))]

    found = heard(lines, get("sglang").figures, trace())

    assert found["output_tok_s"] == pytest.approx(100.0)
    assert found["client_tok_s"] == pytest.approx(100.0, rel=0.005)
    assert found["span_s"] == pytest.approx(8.0)
    # 800 tokens: a step of two at either end, and one for each of two requests; a rate of two decimals.
    assert found["slack"] == pytest.approx((2 * 2 + 2) / 800 + 0.005 / 100, rel=0.02)


def test_vllms_lines_tell_a_rate_and_those_of_several_engines_are_left_alone() -> None:
    lines = [line(1.0, stats(1.0)), line(11.0, stats(100.0)), line(20.0, stats(100.0))]
    found = heard(lines, get("vllm").figures, trace())
    assert found["output_tok_s"] == pytest.approx(100.0)
    assert found["slack"] == pytest.approx((2 * 2 + 2) / 1900 + 0.05 / 100, rel=0.02)  # a rate of one decimal

    two = [*lines, line(11.0, stats(40.0, "Engine 001"))]
    assert heard(two, get("vllm").figures, trace()) == {}
    assert heard([line(1.0, decode(1.0), "1"), line(2.0, decode(1.0), "2")], get("sglang").figures, trace()) == {}


def test_acceptance_is_the_mean_of_the_lines_that_say_one() -> None:
    said = [
        line(1.0, decode(1.0, "accept len: 2.40, accept rate: 0.60, ")),
        line(3.0, decode(1.0, "accept len: 2.00, ")),
    ]
    assert heard(said, get("sglang").figures, trace(ok=False)) == {"acceptance_length": pytest.approx(2.2)}
    [vllm] = [line(1.0, "INFO SpecDecoding metrics: Mean acceptance length: 1.77, Accepted throughput: 3.1 tokens/s")]
    assert heard([vllm], get("vllm").figures, trace()) == {"acceptance_length": 1.77}


def test_llamacpp_counts_the_tokens_of_every_request_that_ended() -> None:
    lines = [
        line(
            1.0,
            "0.58 I slot print_timing: id  3 | task 698 | prompt eval time =    3748.64 ms /    46 tokens ( 81.49 ms",
        ),
        line(
            1.0,
            "0.58 I slot print_timing: id  3 | task 698 |        eval time =    5365.60 ms /    32 tokens (173.08 ms",
        ),
        line(
            2.0,
            "0.59 I slot print_timing: id  7 | task 695 |        eval time =    5580.05 ms /    30 tokens (180.00 ms",
        ),
        line(2.0, "       eval time = 1 ms / 9 tokens", "reaper"),
    ]
    assert heard(lines, get("llamacpp").figures, trace()) == {"tokens": 62, "requests": 2}


def test_a_log_without_figures_tells_nothing() -> None:
    assert heard([line(1.0, decode(1.0))], LogFigures(), trace()) == {}
    assert heard([], get("sglang").figures, trace()) == {}
    assert heard([line(1.0, decode(1.0))], get("sglang").figures, trace()) == {}  # one line: no stretch of time


class Arm:
    """What is planned for a level of two requests."""

    workload = {"cold": False, "ignore_eos": False, "max_tokens": 1000}
    expect = ()


def level(log: dict[str, float]) -> LevelResult:
    return LevelResult(
        measurement="1", cell_id="0" * 64, arm="a", launch="01-a", block=0, level={"mode": "closed", "concurrency": 2},
        started_at="2026-11-29T12:00:00Z", requests=2, ok=2, output_tokens=2000, window=Window(start_s=0.5, end_s=20.0),
        throughput=Throughput(output_tok_s=100.0, output_tok_s_whole=98.0), metrics={},
        client={"peak_in_flight": 2}, server={"log": log}, verdict=Verdict(state="valid"),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("log", "said"),
    [
        (
            {"output_tok_s": 90.0, "client_tok_s": 100.0, "slack": 0.01},
            "90.0 tok/s by the server's log, 100.0 by the cl",
        ),
        ({"output_tok_s": 90.0, "client_tok_s": 100.0, "slack": 0.2}, None),  # too short to tell
        ({"output_tok_s": 97.5, "client_tok_s": 100.0, "slack": 0.01}, None),
        ({"tokens": 1900, "requests": 2}, "1900 output tokens by the server's log, 2000 by the requests"),
        ({"tokens": 1900, "requests": 1}, None),  # a line is missing
    ],
)
def test_a_level_whose_log_says_otherwise_is_suspect(log: dict[str, float], said: str | None) -> None:
    verdict = judged(level(log), Arm(), get("sglang"), trace().records, Seen()).verdict  # type: ignore[arg-type]
    assert [reason.message[: len(said or "")] for reason in verdict.reasons] == ([said] if said else [])

"""docs/metrics.md names every metric, fact and limit there is, each by a function that exists, and nothing else."""

import dataclasses
import itertools
import re
from pathlib import Path

import pytest

from harness.load.records import Chunk, ClientFacts, LevelTrace, RequestRecord
from harness.stats import metrics
from harness.stats.level import Throughput
from harness.stats.validity import Limits

TEXT = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()


def rows(heading):
    """First and second cell of each row of the first table under a heading."""
    below = TEXT.split(f"{heading}\n", 1)[1].splitlines()
    table = itertools.takewhile(lambda line: line, itertools.dropwhile(lambda line: line[:1] != "|", below))
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in list(table)[2:]]
    return [(row[0], row[1]) for row in cells]


def names(text):
    return re.findall(r"`([a-z_0-9]+)`", text)


def request():
    """One that has every metric."""
    chunks = (Chunk(1.0, 1.0, 1), Chunk(2.0, 2.0, 1))
    facts = {"scheduled_s": 0.0, "queued_s": 0.0, "connect_s": 0.1, "output_tokens": 2}
    return RequestRecord(0, 0, "measure", "p", 0.1, 2.0, True, chunks=chunks, **facts)


def test_every_metric_of_a_request_has_a_row_and_every_row_a_metric():
    assert [name for first, _ in rows("## Of a request, by the kernel's clock") for name in names(first)] == list(
        dict.fromkeys(["ttft_s", "tpot_s", "tpot_naive_s", *metrics.request_metrics([request()])])
    )


def test_every_function_that_a_row_names_is_there():
    named = [
        second for heading in ("## Of a request, by the kernel's clock", "## Of a level") for _, second in rows(heading)
    ]
    functions = [name for second in named for name in names(second)]
    assert len(functions) >= 14
    assert [name for name in functions if not callable(getattr(metrics, name, None))] == []


def test_every_rate_of_a_level_has_a_row():
    listed = [name for first, _ in rows("## Of a level") for name in names(first)]
    assert sorted(listed) == sorted(Throughput.model_fields)


def test_every_fact_of_the_client_has_a_row():
    trace = LevelTrace((request(),), ClientFacts(1, 0.1, 1.0, True, 2, 0.1), 0.0, "closed", 1)
    listed = [name for first, _ in rows("## Of the client") for name in names(first)]
    assert sorted(listed) == sorted(metrics.client_facts(trace, metrics.steady_window(trace)))


def test_every_limit_that_is_named_is_there_with_the_value_that_is_said():
    limits = dataclasses.asdict(Limits())
    said = {}
    for _, when in rows("### When a client makes a level suspect"):
        for value, unit, name in re.findall(r"(\d+) (%|ms)[^()|]*\(`([a-z_0-9]+)`\)", when):
            said[name] = float(value) / (100 if unit == "%" else 1000)
    assert said == {
        name: pytest.approx(limits[name])
        for name in (
            "capacity_share",
            "lag_unstamped_s",
            "lag_share",
            "skew_s",
            "merged_share",
            "clock_step_s",
            "clock_bound_s",
        )
    } | {"in_flight_share": pytest.approx(limits["in_flight_share"])}

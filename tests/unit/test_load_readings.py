"""A level's readings, read back from its files."""

import json
from pathlib import Path
from typing import Any

from harness.engines.engine import Counters
from harness.load.readings import Readings

NAMES = Counters(
    drafts="x:drafts_total", accepted_tokens="x:accepted_total", running="x:running", preemptions="x:stops"
)


def readings(folder: Path, lines: list[dict[str, Any]], gpu: list[dict[str, Any]] | None = None) -> Readings:
    (folder / "server_metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if gpu is not None:
        (folder / "gpu.jsonl").write_text("".join(json.dumps(line) + "\n" for line in gpu))
    return Readings.of(folder, NAMES)


def test_counters_give_deltas_gauges_their_peak_and_drafts_the_acceptance_length(tmp_path: Path) -> None:
    found = readings(
        tmp_path,
        [
            {"at": 1.0, "x:drafts_total": 10, "x:accepted_total": 4, "x:running": 1, "x:other_sum": 2, "x:stops": 0},
            {"at": 2.0, "x:drafts_total": 20, "x:accepted_total": 9, "x:running": 7, "x:other_sum": 3, "x:stops": 1},
            {"at": 3.0, "x:drafts_total": 30, "x:accepted_total": 34, "x:running": 2, "x:other_sum": 5, "x:stops": 1},
        ],
    )
    # By hand: 30 - 10 drafts, 34 - 4 accepted; each draft yields one token more: (30 + 20) / 20.
    assert found.deltas() == {"x:drafts_total": 20, "x:accepted_total": 30, "x:other_sum": 3}
    assert found.named() == {
        "drafts": 20, "accepted_tokens": 30, "preemptions_max": 1, "running_max": 7, "acceptance_length": 2.5,
    }  # fmt: skip
    assert found.restarted() is False


def test_one_reading_tells_no_change_and_a_counter_that_fell_a_restart(tmp_path: Path) -> None:
    assert readings(tmp_path, [{"at": 1.0, "x:drafts_total": 10}]).deltas() == {}
    assert readings(tmp_path, [{"at": 1.0, "x:drafts_total": 10}, {"at": 2.0, "x:drafts_total": 3}]).restarted()


def test_clock_events_are_told_once_and_idleness_not_at_all(tmp_path: Path) -> None:
    gpu = [{"throttle": 0x1}, {"throttle": 0x5}, {"throttle": 0x4}, {"throttle": None}, {}]
    assert readings(tmp_path, [], gpu).throttles() == [0x4]


def test_nothing_observed_is_nothing_known(tmp_path: Path) -> None:
    found = Readings.of(tmp_path, NAMES)
    assert (found.server, found.gpu, found.deltas(), found.named(), found.throttles()) == ((), (), {}, {}, [])

"""A look at a level while it is measured."""

import json
from pathlib import Path
from typing import Any

from harness.run.glance import Glance, Gpu, Seen
from harness.run.store import Run


def lines(path: Path, values: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(value) + "\n" for value in values))


def level(tmp_path: Path, engine: str = "simulated") -> tuple[Run, Path]:
    run = Run(tmp_path)
    folder = run.level_folder("01-x", "c4")
    folder.mkdir(parents=True)
    run.write_launch("01-x", {"engine": engine})
    return run, folder


def test_rates_are_those_of_the_last_seconds_and_gpus_those_of_the_last_reading(tmp_path: Path) -> None:
    run, folder = level(tmp_path)
    names = ("simulated:generated_tokens_total", "simulated:drafts_total", "simulated:accepted_tokens_total")
    readings = [(0, 0, 0, 0), (1, 900, 1, 1), (2, 1000, 10, 10), (3, 1100, 20, 25), (4, 1200, 30, 40)]
    readings += [(5, 1300, 40, 55), (6, 1400, 50, 70)]
    lines(
        folder / "server_metrics.jsonl",
        [{"at": float(at), **dict(zip(names, rest, strict=True))} for at, *rest in readings],
    )
    lines(
        folder / "gpu.jsonl",
        [
            {"gpu": 0, "power_w": 300.0, "sm_mhz": 1900, "memory_used": 1 << 30},
            {"gpu": 1, "power_w": 310.0, "sm_mhz": 1800, "memory_used": 2 << 30},
            {"gpu": 0, "power_w": 410.0, "sm_mhz": 2100, "memory_used": 3 << 30},
        ],
    )
    with (folder / "gpu.jsonl").open("a") as stream:
        stream.write('{"gpu": 0, "power_w": 9')  # still being written
    seen = Glance(run, "01-x", "c4").look()
    # The last six readings, five seconds: 1400 - 900 tokens, 50 - 1 drafts, 70 - 1 accepted: (69 + 49) / 49.
    assert seen.tok_s == 100.0
    assert seen.acceptance_length == 118 / 49
    assert seen.gpus == (Gpu(0, 410.0, 2100, 3 << 30), Gpu(1, 310.0, 1800, 2 << 30))
    assert (seen.ttft_s, seen.lag_s) == (None, None)


def test_where_nothing_is_written_nothing_is_known(tmp_path: Path) -> None:
    run, _ = level(tmp_path, engine="somebody's")
    assert Glance(run, "01-x", "c4").look() == Seen()

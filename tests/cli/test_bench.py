"""`harness bench` as a whole command, against a server whose truth is known."""

import json
import re
import subprocess
import sys

import pytest

from benchmarks.truthd import COMPILER, start

ROW = re.compile(
    r"^C= +(\d+) \| +(\d+) requests \| throughput: +([\d.]+) tok/s \| per-req: +([\d.]+) tok/s"
    r" \| latency avg/p50/p99: +[\d.]+/ +[\d.-]+/ +[\d.]+s \| ok: (\d+)/(\d+)$",
    re.MULTILINE,
)


@pytest.fixture(scope="module")
def truth():
    with start(native=COMPILER is not None, ttft_us=5000, gap_us=2000, count=1) as server:
        yield server


def bench(folder, *words):
    command = [sys.executable, "-m", "harness", "bench", *map(str, words)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)


def test_a_sweep_prints_the_seeds_row_for_each_level_and_leaves_a_run_that_can_be_shown(truth, tmp_path):
    done = bench(tmp_path, truth.url, "-c", "1,3", "-n", "6", "--max-tokens", "8")
    assert done.returncode == 0, done.stderr
    rows = ROW.findall(done.stdout)
    assert [(row[0], row[1], row[4], row[5]) for row in rows] == [("1", "6", "6", "6"), ("3", "6", "6", "6")]
    (run,) = (tmp_path / "runs").glob("*-bench-*")
    stored = [json.loads(path.read_text()) for path in sorted(run.glob("launches/*/levels/*/level.json"))]
    assert [level["output_tokens"] for level in stored] == [48, 48]
    assert all(len((path / "requests.jsonl").read_text().splitlines()) == 6 for path in run.glob("launches/*/levels/*"))
    shown = subprocess.run(
        [sys.executable, "-m", "harness", "show", run], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert shown.returncode == 0, shown.stderr


def test_json_is_all_that_stdout_holds(truth, tmp_path):
    done = bench(tmp_path, truth.url, "-c", "2", "-n", "4", "--max-tokens", "4", "--json")
    assert done.returncode == 0, done.stderr
    (level,) = json.loads(done.stdout)["levels"]
    assert (level["requests"], level["ok"], level["client"]["peak_in_flight"]) == (4, 4, 2)


def test_every_fault_of_the_command_line_is_named_at_once(tmp_path):
    done = bench(tmp_path, "ftp://x/v1", "-c", "1,zero,-2", "-n", "0")
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "error: 5 faults",
        "  `ftp://x/v1` is not a URL of a server (like http://127.0.0.1:8000)",
        "  `ftp://x/v1` has a path (give the server's address alone; --dialect says which path is asked)",
        "  --concurrency: `zero` is not a whole number above zero",
        "  --concurrency: `-2` is not a whole number above zero",
        "  --requests must be at least 1, got 0",
    ]
    assert not (tmp_path / "runs").exists()

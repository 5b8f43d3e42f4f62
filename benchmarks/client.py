#!/usr/bin/env python3
"""How good the load client is: against a server whose truth is known, beside a bare C reader, and beside peers.

    python benchmarks/client.py                          the table, on stdout; a few minutes
    python benchmarks/client.py --json                   the same as JSON
    python benchmarks/client.py -c 64,250 --rounds 3     which levels, how often; rounds alternate between clients
    python benchmarks/client.py --only paced             only cases whose name begins so
    python benchmarks/client.py --built              peers in the project's built environments too (`harness envs`)
    python benchmarks/client.py --peer 'name=command {port} {concurrency} {requests} {tokens}'

In the `busy core` cases another process takes what the client leaves of its core, in slices of a few milliseconds, so
that the core is busy for nine tenths of the time.

The server runs on one core and the client on another; every figure about time is taken against what the server wrote
down, on the kernel's clock. On a busy machine read ratios within a round, not absolute values.
"""

import argparse
import json
import os
import resource
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.peers import built, environment
from benchmarks.truthd import Truth, compiled, start
from harness.load.client import Load, Target, run_level
from harness.load.records import LevelTrace
from harness.load.transcript import Prepared
from harness.stats import metrics

TOKENS = 128
SERVER_CPU, CLIENT_CPU = 0, 1
BUSY = 0.9  # share of the time that the client's core is busy in the cases of that name


@dataclass(frozen=True)
class Case:
    """One cell: what the server does, at which concurrency, with how many requests."""

    name: str
    concurrency: int
    requests: int
    settings: dict[str, int]
    busy: float = 0.0  # share of the time that another process keeps the client's core busy


def cases(levels: Sequence[int]) -> Iterator[Case]:
    for concurrency in levels:
        gap = 10_000 if concurrency <= 250 else 50_000  # beyond this the server itself is the limit
        requests = max(min(4 * concurrency, 2000), 64)
        yield Case(f"paced {gap // 1000} ms", concurrency, requests, {"gap_us": gap})
        if concurrency > 1:
            yield Case(f"busy core, {gap // 1000} ms", concurrency, requests, {"gap_us": gap}, BUSY)
    yield Case("unpaced", 64, 2000, {"gap_us": 0})
    yield Case("4 tokens a chunk", 16, 64, {"gap_us": 20_000, "k": 4, "count": 1})


def requests_of(case: Case) -> list[Prepared]:
    message = {"role": "user", "content": "x" * 400}
    asked = {"model": "truth", "stream": True, "stream_options": {"include_usage": True}, "max_tokens": TOKENS}
    body = json.dumps({**asked, "messages": [message]}).encode()
    return [Prepared(f"p{index}", f"/v1/chat/completions?id={index}", body) for index in range(case.requests)]


def ours(truth: Truth, case: Case) -> dict[str, Any]:
    load = Load(concurrency=case.concurrency, requests=case.requests, processes=1, cpus=(CLIENT_CPU,))
    trace = run_level(Target("127.0.0.1", truth.port), load, requests_of(case))
    chunks = sum(len(record.chunks) for record in trace.records)
    facts = metrics.client_facts(trace, metrics.steady_window(trace))
    return {
        "client": "harness",
        "cpu_us_per_chunk": trace.client.cpu_s / chunks * 1e6,
        "parse_us_per_chunk": trace.client.parse_s / chunks * 1e6,
        "merged_share": facts["merged_share"],
        "lag_p99_ms": facts["lag_p99_s"] * 1e3,
        "busy": facts["cpu_share"],
        "peak": facts["peak_in_flight"],
        "failed": sum(not record.ok for record in trace.records),
        "tpot_ms": statistics.mean(filter(None, map(metrics.tpot, trace.records))) * 1e3,
        **errors(trace, truth),
        **held(truth),
    }


def errors(trace: LevelTrace, truth: Truth) -> dict[str, float]:
    """p99, in ms, by which our stamps miss what the server did: its first chunk, and its gaps either way.

    Gaps are taken once more without those that a merged chunk begins or ends: those are known only as bounds.
    """
    log = {entry["id"]: entry for entry in truth.log()}
    zero = round(trace.started_at * 1e9)
    added, gaps, sure = [], [], []
    for record in trace.records:
        entry = log[record.index]
        sent = [(at - zero) / 1e9 for _, at, _ in entry["chunks"]]
        added.append(record.chunks[0].at_s - sent[0])
        gaps.append(np.abs(np.diff([chunk.at_s for chunk in record.chunks]) - np.diff(sent)))
        merged = np.array([chunk.merged for chunk in record.chunks])
        sure.append(gaps[-1][~(merged[1:] | merged[:-1])])
    return {
        "added_ttft_p99_ms": float(np.quantile(added, 0.99)) * 1e3,
        "gap_error_p99_ms": float(np.quantile(np.concatenate(gaps), 0.99)) * 1e3,
        "sure_gap_error_p99_ms": float(np.quantile(np.concatenate(sure), 0.99)) * 1e3,
    }


def held(truth: Truth) -> dict[str, float]:
    """What the server saw of any client: output rate, and how many streams it held on average."""
    log, totals = truth.log(), truth.totals()
    first = min(entry["arrived"] for entry in log)
    last = max(entry["chunks"][-1][1] for entry in log)
    busy = sum(entry["chunks"][-1][1] - entry["arrived"] for entry in log)
    ttft = [entry["chunks"][0][1] - entry["arrived"] for entry in log]
    return {
        "tok_s": totals["tokens"] / (last - first) * 1e9,
        "mean_in_flight": busy / (last - first),
        "server_peak": totals["peak"],
        "server_late_p99_ms": totals["late_us"]["p99"] / 1e3,
        "server_ttft_ms": statistics.mean(ttft) / 1e6,
    }


@contextmanager
def hog(share: float) -> Iterator[None]:
    """Another process on the client's core, which takes what is missing for the core to be busy for this share."""
    if not share:
        yield
        return
    with subprocess.Popen(pinned([sys.executable, "-S", "-c", _HOG, str(CLIENT_CPU), str(share)])) as process:
        try:
            yield
        finally:
            process.kill()


# Slices of 4 ms; what of each is spent follows how busy the core was, whoever made it so, in the 0.1 s before.
_HOG = """
import sys, time
core, share = f"cpu{sys.argv[1]} ", float(sys.argv[2])
def ticks():
    line = next(line for line in open("/proc/stat") if line.startswith(core))
    spent = [int(word) for word in line.split()[1:9]]
    return sum(spent), spent[3] + spent[4]
mine, (total, idle) = share, ticks()
while True:
    looked = time.monotonic()
    while time.monotonic() < looked + 0.1:
        until = time.thread_time() + 0.004 * mine
        while time.thread_time() < until: pass
        time.sleep(0.004 * (1 - mine))
    was, slept = total, idle
    total, idle = ticks()
    busy = 1 - (idle - slept) / max(1, total - was)
    mine = min(0.99, max(0.01, mine + 0.3 * (share - busy)))
"""


@contextmanager
def core_busy(into: dict[str, Any]) -> Iterator[None]:
    """How busy the client's core was meanwhile, whoever made it so."""
    before = core_times()
    yield
    spent = [after - before for before, after in zip(before, core_times(), strict=True)]
    into["core_busy"] = 1 - (spent[3] + spent[4]) / max(1, sum(spent))


def core_times() -> list[int]:
    """Ticks of the client's core by kind, as proc(5) lists them: user, nice, system, idle, iowait ..."""
    lines = Path("/proc/stat").read_text().splitlines()
    return [int(word) for line in lines if line.startswith(f"cpu{CLIENT_CPU} ") for word in line.split()[1:9]]


def limit(truth: Truth, case: Case) -> dict[str, Any]:
    """The bare C reader."""
    words = [str(compiled("reader")), *map(str, (truth.port, case.concurrency, case.requests, TOKENS))]
    said = json.loads(subprocess.run(pinned(words), check=True, capture_output=True).stdout)
    return {
        "client": "C reader",
        "cpu_us_per_chunk": said["cpu_s"] / said["chunks"] * 1e6,
        "busy": said["cpu_s"] / said["wall_s"],
        "peak": said["peak"],
        "ttft_ms": said["ttft_s"]["mean"] * 1e3,
        **held(truth),
    }


def peer(truth: Truth, case: Case, name: str, command: str) -> dict[str, Any]:
    """Any command that offers the same load; the CPU of its starting up, which one request shows just before, is off.

    Where starting costs many times what the chunks cost, its own variation hides them: `cpu_s` says both.
    """
    started = peer_cpu_s(truth.port, command, concurrency=1, requests=1)
    truth.reset()
    spent = peer_cpu_s(truth.port, command, concurrency=case.concurrency, requests=case.requests)
    return {
        "client": name,
        "cpu_us_per_chunk": (spent - started) / truth.totals()["chunks"] * 1e6,
        "start_cpu_s": started,
        "cpu_s": spent,
        **held(truth),
    }


def peer_cpu_s(port: int, command: str, *, concurrency: int, requests: int) -> float:
    values = {"port": port, "concurrency": concurrency, "requests": requests, "tokens": TOKENS}
    words = pinned(shlex.split(command.format(**values)))
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(words, env=environment(), check=False, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}\nexit {done.returncode}\n{done.stderr[-2000:]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def pinned(words: Sequence[str]) -> list[str]:
    return ["taskset", "-c", str(CLIENT_CPU), *words] if CLIENT_CPU is not None else list(words)


def against_reader(rows: Sequence[dict[str, Any]]) -> None:
    """To each row, how it compares with the bare C reader in the same round."""
    readers = {cell(row): row for row in rows if row["client"] == "C reader"}
    for row in rows:
        reader = readers.get(cell(row))
        for name, ratio in RATIOS.items() if reader else ():
            row[ratio] = row[name] / reader[name]


def cell(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["case"], row["concurrency"], row["round"]


def measure(chosen: Sequence[Case], rounds: int, peers: dict[str, str]) -> Iterator[dict[str, Any]]:
    for case in chosen:
        with start(cpu=SERVER_CPU, ttft_us=50_000, tokens=TOKENS, **case.settings) as truth:
            for number in range(rounds):
                runs: list[Callable[[], dict[str, Any]]] = [partial(ours, truth, case)]
                if truth.native and case.settings.get("k", 1) == 1:
                    runs.append(partial(limit, truth, case))
                runs += [partial(peer, truth, case, name, command) for name, command in peers.items()]
                for run in runs[:: 1 if number % 2 == 0 else -1]:
                    truth.reset()
                    row = {"case": case.name, "concurrency": case.concurrency, "round": number}
                    with hog(case.busy), core_busy(row):
                        row |= run()
                    yield row


RATIOS = {"cpu_us_per_chunk": "cpu_ratio", "tok_s": "tok_s_ratio", "mean_in_flight": "in_flight_ratio"}

COLUMNS = {
    "cpu_us_per_chunk": "CPU us/chunk",
    "cpu_ratio": "x reader",
    "parse_us_per_chunk": "parse us/chunk",
    "added_ttft_p99_ms": "added TTFT p99 ms",
    "gap_error_p99_ms": "gap error p99 ms",
    "sure_gap_error_p99_ms": "unmerged",
    "server_late_p99_ms": "server late p99 ms",
    "merged_share": "merged",
    "busy": "busy",
    "core_busy": "core busy",
    "server_peak": "peak",
    "mean_in_flight": "mean in flight",
    "in_flight_ratio": "x reader",
    "tok_s": "tok/s",
    "tok_s_ratio": "x reader",
    "start_cpu_s": "start-up CPU s",
    "tpot_ms": "TPOT ms",
}


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Medians over rounds, a Markdown row for each case and client."""
    keys = list(dict.fromkeys((row["case"], row["concurrency"], row["client"]) for row in rows))
    lines = ["| case | C | client | " + " | ".join(COLUMNS.values()) + " |", "| --- " * (3 + len(COLUMNS)) + "|"]
    for case, concurrency, client in keys:
        same = [row for row in rows if (row["case"], row["concurrency"], row["client"]) == (case, concurrency, client)]
        cells = [shown([row[name] for row in same if row.get(name) is not None]) for name in COLUMNS]
        lines.append(f"| {case} | {concurrency} | {client} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def shown(values: Sequence[float]) -> str:
    if not values:
        return "-"
    middle = statistics.median(values)
    return f"{middle:.0f}" if abs(middle) >= 1000 else f"{middle:.4g}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-c", "--concurrency", default="1,64,250,1000")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", metavar="NAME")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=COMMAND")
    parser.add_argument("--built", action="store_true", help="peers in the built environments too")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    global CLIENT_CPU, SERVER_CPU  # noqa: PLW0603 - a machine of one core has no other
    if len(os.sched_getaffinity(0)) < 2:
        CLIENT_CPU = SERVER_CPU = min(os.sched_getaffinity(0))
        print("one core only: server and client share it, and the figures say little", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="harness-peers-") as folder:
        peers = {each.name: each.command(Path(folder)) for each in built()} if arguments.built else {}
        peers |= dict(each.split("=", 1) for each in arguments.peer)
        rows = list(asked(arguments, peers))
    against_reader(rows)
    print(json.dumps(rows, indent=1) if arguments.json else table(rows))
    return 0


def asked(arguments: argparse.Namespace, peers: dict[str, str]) -> Iterator[dict[str, Any]]:
    """The rows that a command line asks for, each told as it comes."""
    known = cases([int(each) for each in arguments.concurrency.split(",")])
    chosen = [case for case in known if case.name.startswith(arguments.only)]
    for row in measure(chosen, arguments.rounds, peers):
        said = f"{row['case']} C={row['concurrency']} {row['client']}: {row['cpu_us_per_chunk']:.1f} us/chunk"
        print(said, file=sys.stderr)
        yield row


if __name__ == "__main__":
    sys.exit(main())

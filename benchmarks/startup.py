#!/usr/bin/env python3
"""How long the tool takes to start: CPU and wall time beside `python3 -c pass`, in one run, and beside peers.

    python benchmarks/startup.py                      the table, on stdout; about a minute
    python benchmarks/startup.py --rounds 20 --json
    python benchmarks/startup.py --peer 'guidellm=guidellm --help'

Peers that lie in the project's built environments (`harness envs`) are found there. `bench, one request` is a whole
`harness bench URL -c 1 -n 1` less the request itself, against a loopback source. Commands alternate within a round; the
least CPU time of all rounds is the figure that other users of the machine disturb least.
"""

import argparse
import json
import resource
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.peers import PROJECT, built, environment

TTFT_MS, TOKENS, GAP_MS = 20, 64, 5
REQUEST_S = (TTFT_MS + (TOKENS - 1) * GAP_MS) / 1000


@dataclass(frozen=True)
class Command:
    """One thing to start. `waits_s` is time of its wall that is not its own."""

    name: str
    words: tuple[str, ...]
    waits_s: float = 0.0


@dataclass(frozen=True)
class Spent:
    """What one start took, in seconds; CPU is user and system, children included."""

    cpu_s: float
    wall_s: float


def commands(port: int, peers: Sequence[str]) -> Iterator[Command]:
    harness = (sys.executable, "-m", "harness")
    asked = ("-c", "1", "-n", "1", "--max-tokens", str(TOKENS), "-q")
    yield Command("python3 -c pass", (sys.executable, "-c", "pass"))
    yield Command("harness --help", (*harness, "--help"))
    yield Command("harness plan", (*harness, "plan", str(PROJECT / "recipes" / "demo-speculation.yaml")))
    yield Command("harness bench, one request", (*harness, "bench", f"http://127.0.0.1:{port}", *asked), REQUEST_S)
    yield from (Command(f"{peer.name} --help", peer.help()) for peer in built())
    for each in peers:
        name, _, command = each.partition("=")
        yield Command(name, tuple(shlex.split(command)))


@contextmanager
def source() -> Iterator[int]:
    """A loopback source of streams that each take `REQUEST_S`; gives its port."""
    settings = (f"ttft_us={TTFT_MS * 1000}", f"gap_us={GAP_MS * 1000}")
    words = (sys.executable, "-m", "harness.load.source", "0", *settings)
    with subprocess.Popen(words, stdout=subprocess.PIPE, cwd=PROJECT) as process:
        try:
            assert process.stdout is not None
            yield int(process.stdout.readline())
        finally:
            process.terminate()


def started(command: Command, folder: str) -> Spent | str:
    """What one start took, or the last line of why it failed."""
    project = {**environment(), "HARNESS_PROJECT": str(PROJECT)}
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(command.words, cwd=folder, env=project, capture_output=True, text=True, check=False)
    wall = time.perf_counter() - began - command.waits_s
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        return (done.stderr.strip().splitlines() or [f"exit {done.returncode}"])[-1]
    return Spent(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, wall)


def measured(chosen: Sequence[Command], rounds: int) -> Iterator[dict[str, Any]]:
    """A row for each command; the first round warms the file cache and is not counted."""
    spent: dict[str, list[Spent]] = {command.name: [] for command in chosen}
    failed: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="harness-startup-") as folder:
        for number in range(rounds + 1):
            for command in chosen:
                if command.name in failed:
                    continue
                one = started(command, folder)
                if isinstance(one, str):
                    failed[command.name] = one
                elif number:
                    spent[command.name].append(one)
    python = min(one.cpu_s for one in spent[chosen[0].name])
    for command in chosen:
        if command.name in failed:
            yield {"command": command.name, "failed": failed[command.name]}
            continue
        cpu, wall = ([getattr(one, name) for one in spent[command.name]] for name in ("cpu_s", "wall_s"))
        yield {
            "command": command.name,
            "cpu_s": min(cpu),
            "cpu_median_s": statistics.median(cpu),
            "wall_s": min(wall),
            "wall_median_s": statistics.median(wall),
            "cpu_ratio": min(cpu) / python,
        }


def table(rows: Sequence[dict[str, Any]]) -> str:
    lines = ["| command | CPU s, least | median | x python | wall s, least | median |", "| --- |" + " ---: |" * 5]
    for row in rows:
        if "failed" in row:
            lines.append(f"| {row['command']} | failed: {row['failed'][:80]} | | | | |")
            continue
        cpu, wall = (f"{row[f'{kind}_s']:.3f} | {row[f'{kind}_median_s']:.3f}" for kind in ("cpu", "wall"))
        lines.append(f"| {row['command']} | {cpu} | {row['cpu_ratio']:.1f} | {wall} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=COMMAND")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with source() as port:
        rows = list(measured(list(commands(port, arguments.peer)), arguments.rounds))
    print(json.dumps(rows, indent=1) if arguments.json else table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())

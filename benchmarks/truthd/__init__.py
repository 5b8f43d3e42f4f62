"""A server whose truth is known: `start()` runs `truthd.c`, compiled where there is a compiler, else the Python one.

with start(gap_us=10000, k=4) as truth:
    ...                     # truth.port, truth.url
    truth.log()             # what it sent, and when, by request
"""

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests

HERE = Path(__file__).resolve().parent
COMPILER = shutil.which("gcc") or shutil.which("cc") or shutil.which("clang")


@dataclass(frozen=True, slots=True)
class Truth:
    """A running truth server. `native` says whether it is the one in C."""

    port: int
    pid: int
    native: bool

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def log(self) -> list[dict[str, Any]]:
        """One entry a request: id, arrived, chunks as [due, sent, tokens]; nanoseconds since 1970."""
        answer = requests.get(f"{self.url}/log", timeout=60)
        return [json.loads(line) for line in answer.text.splitlines()]

    def totals(self) -> dict[str, Any]:
        """Counts, CPU seconds, and how late it sent."""
        return dict(requests.get(f"{self.url}/totals", timeout=60).json())

    def reset(self) -> None:
        """Forget both."""
        requests.post(f"{self.url}/reset", timeout=60)


def compiled(name: str) -> Path | None:
    """The program built from `NAME.c` beside this file, kept by its source's digest; None without a compiler."""
    if COMPILER is None or sys.platform != "linux":
        return None
    source = HERE / f"{name}.c"
    digest = hashlib.sha256(source.read_bytes()).hexdigest()[:16]
    program = Path(tempfile.gettempdir()) / f"harness-{os.getuid()}" / f"{name}-{digest}"
    if not program.exists():
        program.parent.mkdir(mode=0o700, exist_ok=True)
        fresh = program.with_suffix(f".{os.getpid()}")
        subprocess.run([COMPILER, "-O2", "-o", str(fresh), str(source)], check=True)
        fresh.rename(program)
    return program


@contextlib.contextmanager
def start(*, cpu: int | None = None, native: bool = True, **settings: int) -> Iterator[Truth]:
    """Run a truth server on a free port, on one core if asked, until the context ends."""
    program = compiled("truthd") if native else None
    command: Sequence[str] = [str(program)] if program else [sys.executable, "-m", "harness.load.source"]
    words = [*command, "0", *(f"{name}={value}" for name, value in settings.items())]
    with subprocess.Popen(words, stdout=subprocess.PIPE, cwd=HERE.parents[1]) as process:
        try:
            if cpu is not None:
                os.sched_setaffinity(process.pid, {cpu})
            assert process.stdout is not None
            yield Truth(int(process.stdout.readline()), process.pid, program is not None)
        finally:
            process.terminate()

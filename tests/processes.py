"""What tests with real processes share."""

import time
from collections.abc import Callable
from pathlib import Path

from harness.run import reaper

FAKES = Path(__file__).parent / "fakes"
PATIENCE_S = 30.0  # how long a busy machine may take for what takes milliseconds


def until(condition: Callable[[], object], what: str) -> None:
    """Wait for a condition; fail, naming it, when it does not come true."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"waited {PATIENCE_S:.0f} s for {what}"
        time.sleep(0.02)


def running(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    seen = reaper.look(pid)
    return seen is not None and seen.alive


def carriers(text: str) -> list[int]:
    """Pids of everything alive whose mark holds a text."""
    return [pid for pid, seen in reaper.scan().items() if seen.alive and text in (reaper.mark_of(pid) or "")]

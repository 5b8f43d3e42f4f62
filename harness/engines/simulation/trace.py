"""What `/start_profile` and `/stop_profile` leave behind: every simulated step, as Chrome shows traces."""

import gzip
import json
import os
from pathlib import Path
from typing import Any

from harness.engines.simulation.model import Step


class Trace:
    """Steps as they end, until they are written: one complete event each, times in microseconds."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._events: list[dict[str, Any]] = []

    def step(self, step: Step, batch: int) -> None:
        """Note a step that has ended, and how many sequences were in it."""
        self._events.append(
            {
                "name": "verify" if step.drafts else "decode",
                "cat": "simulated",
                "ph": "X",
                "pid": os.getpid(),
                "tid": 0,
                "ts": round(step.began * 1e6, 3),
                "dur": round((step.ends - step.began) * 1e6, 3),
                "args": {"batch": batch, "drafts": step.drafts, "prefill_tokens": step.prefill_tokens},
            }
        )

    def write(self) -> Path:
        """Write the trace into its folder.

        Raises:
            OSError: it cannot be written.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"simulated-{os.getpid()}.trace.json.gz"
        path.write_bytes(gzip.compress(json.dumps({"simulated": True, "traceEvents": self._events}).encode()))
        return path

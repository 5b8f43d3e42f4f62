"""What the server and its GPUs say while a level runs: `/metrics` and readings of GPUs, once a second, on a thread of
the parent.

Never in the measuring processes. Counters are read at the level's two ends as well: their deltas are the level's own.
"""

import dataclasses
import json
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import requests

from harness.errors import HarnessError
from harness.files import append_line

# A context in which GPUs are read: each call gives one reading of every GPU, at a time in seconds since 1970.
Gpus = Callable[[], AbstractContextManager[Callable[[float], Iterable[dict[str, Any]]]]]

_IDLE = 0x1  # nvmlClocksEventReasonGpuIdle
_PERIOD_S = 1.0
_PATIENCE_S = 5.0  # a busy server answers late; the scrape is not what is being measured


class Exposed(Protocol):
    """What an observer needs to know of an engine: where its metrics are, and a dataclass of their names by ours."""

    @property
    def metrics_path(self) -> str | None:
        """Path of the Prometheus text, None where there is none."""
        ...

    @property
    def counters(self) -> Any:
        """Fields: our names; values: the server's names, None where it does not say."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Scrape:
    """One reading: counters (and sums and counts of histograms) and gauges, each summed over its labels."""

    at: float  # seconds since 1970
    counters: Mapping[str, float]
    gauges: Mapping[str, float]


class Observer:
    """A context in which a server is watched; afterwards it answers what changed.

    `server_metrics.jsonl` and `gpu.jsonl` grow in `folder` a line a second. A server without metrics, or a machine
    without a GPU, leaves no file and no deltas; what could not be read stands in `faults`. `session`, which is closed
    at the end, knows how the server is to be reached and trusted; `gpus` is who reads GPUs.
    """

    def __init__(
        self,
        base_url: str,
        engine: Exposed,
        *,
        folder: Path | None = None,
        session: requests.Session | None = None,
        gpus: Gpus = lambda: nullcontext(lambda _: ()),
    ) -> None:
        self._url = base_url.rstrip("/") + engine.metrics_path if engine.metrics_path else None
        self._names: dict[str, str | None] = dataclasses.asdict(engine.counters)
        self._folder = folder
        self._done = threading.Event()
        self._thread: threading.Thread | None = None
        self._session = session or requests.Session()
        self._first: Scrape | None = None
        self._last: Scrape | None = None
        self._peaks: dict[str, float] = {}
        self._read_gpus = gpus
        self._gpus: list[dict[str, Any]] = []
        self.faults: list[str] = []

    def __enter__(self) -> "Observer":
        self._scrape()
        self._thread = threading.Thread(target=self._watch, name="observer", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        if self._thread is not None:
            self._thread.join(2 * _PATIENCE_S)
        if kind is None:
            self._scrape()
        self._session.close()

    def deltas(self) -> dict[str, float]:
        """How far each counter went between the level's ends, by the server's own names."""
        if self._first is None or self._last is None or self._last is self._first:
            return {}
        before = self._first.counters
        return {name: value - before.get(name, 0.0) for name, value in self._last.counters.items()}

    def named(self) -> dict[str, float]:
        """Counter deltas and highest gauges by our names, and the acceptance length where it follows."""
        return named(self._names, self.deltas(), self._peaks)

    def restarted(self) -> bool:
        """Whether a counter went backwards: not the process that the level began with."""
        return any(delta < 0 for delta in self.deltas().values())

    def gpus(self) -> list[dict[str, Any]]:
        """Each GPU's readings, in the order they were taken."""
        return list(self._gpus)

    def throttles(self) -> list[int]:
        """Masks of clock event reasons that were seen, each once, idleness left out."""
        return clock_events(self._gpus)

    def sharing(self) -> dict[str, list[str]]:
        """`shared_with`: the strangers that readings of GPUs name, each once; empty where there was none."""
        found = sorted({str(name) for reading in self._gpus for name in reading.get("strangers", ())})
        return {"shared_with": found} if found else {}

    def _watch(self) -> None:
        with self._read_gpus() as read:
            due = time.monotonic()
            while True:
                for reading in read(time.time()):
                    self._gpus.append(reading)
                    self._write("gpu.jsonl", reading)
                due += _PERIOD_S
                if self._done.wait(max(0.0, due - time.monotonic())):
                    return
                self._scrape()

    def _scrape(self) -> None:
        if self._url is None:
            return
        try:
            answer = self._session.get(self._url, timeout=_PATIENCE_S)
            answer.raise_for_status()
            scrape = read_metrics(answer.text, time.time())
        except (requests.RequestException, ValueError) as error:
            self._fault(f"`{self._url}` could not be read: {error}")
            return
        self._first = self._first or scrape
        self._last = scrape
        for name, value in scrape.gauges.items():
            self._peaks[name] = max(value, self._peaks.get(name, value))
        self._write("server_metrics.jsonl", {"at": scrape.at, **scrape.counters, **scrape.gauges})

    def _write(self, name: str, value: Mapping[str, Any]) -> None:
        if self._folder is None:
            return
        try:
            append_line(self._folder / name, json.dumps(value, separators=(",", ":")))
        except HarnessError as error:
            self._fault(error.message)

    def _fault(self, text: str) -> None:
        if text not in self.faults:
            self.faults.append(text)


def named(names: Mapping[str, str | None], deltas: Mapping[str, float], peaks: Mapping[str, float]) -> dict[str, float]:
    """Counter deltas and highest gauges by our names (`running_max`), and the acceptance length where it follows.

    Acceptance length is tokens a verify step: (accepted + drafts) / drafts, as each step also yields one token of the
    target model's own (Leviathan et al. 2023); where accepted tokens are not counted, generated tokens / drafts, which
    is SGLang's own definition.
    """
    found = {ours: deltas[theirs] for ours, theirs in names.items() if theirs is not None and theirs in deltas}
    found |= {f"{ours}_max": peaks[theirs] for ours, theirs in names.items() if theirs is not None and theirs in peaks}
    drafts, accepted = found.get("drafts"), found.get("accepted_tokens")
    if drafts and accepted is not None:
        found["acceptance_length"] = (accepted + drafts) / drafts
    elif drafts and (generated := found.get("generated_tokens")):
        found["acceptance_length"] = generated / drafts
    return found


def clock_events(readings: Iterable[Mapping[str, Any]]) -> list[int]:
    """Masks of clock event reasons in readings of GPUs, each once, idleness left out."""
    return sorted({int(one["throttle"]) & ~_IDLE for one in readings if one.get("throttle") is not None} - {0})


def read_metrics(text: str, at: float) -> Scrape:
    """Prometheus text as one reading; buckets and quantiles are left out.

    Raises:
        ValueError: it is not Prometheus text.
    """
    # It brings an HTTP server along, which a server without metrics need not wait for.
    from prometheus_client.parser import text_string_to_metric_families  # noqa: PLC0415

    counters: dict[str, float] = {}
    gauges: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.endswith(("_bucket", "_created")) or "quantile" in sample.labels:
                continue
            runs = family.type == "counter" or sample.name.endswith(("_total", "_sum", "_count"))
            into = counters if runs else gauges
            into[sample.name] = into.get(sample.name, 0.0) + sample.value
    return Scrape(at, counters, gauges)

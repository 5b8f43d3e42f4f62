"""One live server is warmed up and offered one level after another; each level becomes a stored, judged result."""

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from harness.engines.engine import Engine, Evidence, Model, Observed, Sampling
from harness.files import append_line
from harness.load.client import LevelTrace, Load, Prepared, Target, run_level
from harness.load.observe import Observer
from harness.load.prompts import PromptSet
from harness.load.records import RequestRecord
from harness.recipe.plan import PlannedArm, PlannedCell, PlannedLaunch, PlannedLevel
from harness.run.launch import Launched
from harness.run.store import Run
from harness.stats import metrics, slices, validity
from harness.stats.level import LevelResult

Tell = Callable[..., None]


@dataclass(frozen=True, slots=True)
class Bench:
    """What every level of one launch shares."""

    run: Run
    launch: PlannedLaunch
    arm: PlannedArm
    engine: Engine
    model: Model
    server: Launched
    prompts: PromptSet
    tell: Tell
    stop: threading.Event  # the user said stop

    @property
    def target(self) -> Target:
        """Where requests go."""
        return Target(self.server.host, self.server.port)


def warm_up(bench: Bench) -> None:
    """The launch's own warm-up: serial requests that nobody measures.

    Raises:
        ServerError: none of them succeeded, so that measuring would be idle.
    """
    count = bench.launch.warmup_requests
    if count == 0:
        return
    load = Load(mode="closed", concurrency=1, requests=count, request_timeout_s=_slowest(bench))
    requests = list(prepare(bench, bench.launch.first_prompt, count))
    trace = run_level(bench.target, load, requests, stop=bench.stop)
    ok = sum(record.ok for record in trace.records)
    bench.run.event("warmed-up", launch=bench.launch.name, requests=len(trace.records), ok=ok)
    if ok == 0 and not bench.stop.is_set():
        bench.server.refuse("every warm-up request failed", [_failure(record) for record in trace.records[:3]])


def measure(bench: Bench, cell: PlannedCell) -> LevelResult | None:
    """Offer one level and store its result; None when the user stopped it, which leaves the cell unfinished.

    A server that dies meanwhile ends the level at once; what came until then is stored as an invalid level.
    """
    level = cell.level
    path = bench.run.start_requests(bench.launch.name, level.name)
    folder = path.parent
    bench.tell("level-start", launch=bench.launch.name, level=level.name, requests=level.requests)
    ended = threading.Event()
    with (
        _watching(bench, ended),
        Observer(bench.server.base_url, bench.engine, folder=folder) as observer,
    ):
        trace = run_level(
            bench.target,
            _load(level),
            list(prepare(bench, cell.first_prompt, cell.prompts)),
            on_record=lambda record: append_line(path, json.dumps(record.to_json(), separators=(",", ":"))),
            stop=ended,
            progress=lambda **facts: bench.tell("level-progress", launch=bench.launch.name, level=level.name, **facts),
        )
    if bench.stop.is_set():
        return None
    result = _judge(bench, cell, trace, observer.deltas())
    bench.run.write_level(bench.launch.name, result)
    bench.tell("level-done", launch=bench.launch.name, level=level.name, result=result)
    return result


def prepare(bench: Bench, first: int, count: int) -> Iterator[Prepared]:
    """Encoded requests for a slice of the prompt set, before the clock starts."""
    workload = bench.arm.workload
    sampling = sampling_of(workload)
    for item in bench.prompts.slice(first, count):
        path, body = bench.engine.request(workload["dialect"], item.prompt, sampling, bench.model.name)
        yield Prepared(
            prompt_id=item.prompt_id,
            path=path,
            body=json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode(),
            dialect=workload["dialect"],
            requested_tokens=sampling.max_tokens,
        )


def sampling_of(workload: Mapping[str, Any]) -> Sampling:
    """The sampling parameters of a planned workload."""
    return Sampling(**{name: workload[name] for name in ("max_tokens", "temperature", "seed", "top_p", "ignore_eos")})

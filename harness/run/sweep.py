"""One live server is warmed up and offered one level after another; each level becomes a stored, judged result."""

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import requests

from harness.engines import openai
from harness.engines.engine import Engine, Model, Sampling
from harness.files import append_line
from harness.load.capacity import Capacities
from harness.load.client import Load, Target, run_level
from harness.load.distributed import Workers
from harness.load.observe import Observer
from harness.load.prompts import PromptSet
from harness.load.records import LevelTrace, RequestRecord
from harness.load.transcript import Prepared
from harness.recipe.plan import PlannedArm, PlannedCell, PlannedLaunch, PlannedLevel
from harness.run import gpu, judge, logs, privacy, profiling
from harness.run import launch as launching
from harness.run.heard import heard
from harness.run.launch import Launched
from harness.run.logs import LogLine
from harness.run.store import Run
from harness.stats import metrics, validity
from harness.stats.level import LevelResult, Reason

Tell = Callable[..., None]
_FLUSH_S = 30.0
_LOOK_S = 0.1  # between looks at the user's wish and the server's life


@dataclass(frozen=True, slots=True)
class Bench:
    """What every level of one launch shares."""

    run: Run
    launch: PlannedLaunch
    arm: PlannedArm
    engine: Engine
    model: Model
    server: Launched
    answers: Mapping[str, Any]  # what the server said of itself when it was ready
    prompts: PromptSet
    tell: Tell
    stop: threading.Event  # the user said stop
    deadline: float  # when the run must end, by the monotonic clock
    capacities: Capacities
    facts: dict[str, Any] = field(default_factory=dict)  # what the warm-up showed, part of every level's record
    processes: int | None = None  # measuring processes on each machine that offers load; None: as many as needed
    workers: Workers | None = None  # the machines that offer the load; None: this one alone

    @property
    def target(self) -> Target:
        """Where this machine's requests go."""
        tls = self.server.server.tls
        if tls is None:
            return Target(self.server.host, self.server.port)
        return Target(self.server.host, self.server.port, tls=True, ca_file=tls.ca_file, insecure=tls.insecure)

    def offer(self, load: Load, requests: Sequence[Prepared], **watched: Any) -> LevelTrace:
        """Run a level from wherever its load comes."""
        load = replace(load, processes=self.processes)
        if self.workers is None:
            return run_level(self.target, load, requests, **watched)
        target = self.target
        if launching.is_loopback(target.host):
            target = replace(target, host=self.workers.address)
        return self.workers.run_level(target, load, requests, **watched)


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
    if template := validity.template_tokens(trace.records):
        bench.facts["template_tokens"] = template
    if ok == 0 and not bench.stop.is_set():
        bench.server.refuse("every warm-up request failed", [_failure(record) for record in trace.records[:3]])


def measure(bench: Bench, cell: PlannedCell) -> LevelResult | None:
    """Offer one level and store its result; None when the user stopped it, which leaves the cell unfinished.

    A server that dies meanwhile ends the level at once; what came until then is stored as an invalid level.
    """
    level = cell.level
    path = bench.run.start_requests(bench.launch.name, level.name)
    folder = path.parent
    flushed = flush(bench)
    bench.tell("level-start", launch=bench.launch.name, level=level.name, requests=level.requests)
    ended, logged_before = threading.Event(), _log_size(bench)
    with (
        _watching(bench, level, ended) as cut,
        profiling.Profiler(bench.server, level, folder) as profiler,
        Observer(
            bench.server.base_url,
            bench.engine,
            folder=folder,
            session=launching.control_session(bench.server.server),
            gpus=gpu.watcher(lambda: bench.server.process.pids() if bench.server.process else set()),
        ) as observer,
    ):

        def progress(**counts: Any) -> None:
            profiler.seen(counts)
            bench.tell("level-progress", launch=bench.launch.name, level=level.name, **counts)

        trace = bench.offer(
            _load(level),
            list(prepare(bench, cell.first_prompt, cell.prompts)),
            on_record=lambda record: append_line(path, privacy.redact_text(record.to_line(), bench.server.secrets)),
            stop=ended,
            progress=progress,
            folder=bench.run.client_folder(bench.launch.name, level.name),
        )
    if bench.stop.is_set():
        return None
    around = {**observer.named(), "flushed": flushed, **profiler.facts, **bench.facts, **observer.sharing()}
    if said := heard(_logged(bench, logged_before), bench.engine.figures, trace):
        around["log"] = said
    if observer.faults:
        around["unread"] = list(observer.faults)
    result = _judge(bench, cell, trace, observer, around, cut)
    bench.run.write_level(bench.launch.name, result)
    bench.tell("level-done", launch=bench.launch.name, level=level.name, result=result)
    return result


def prepare(bench: Bench, first: int, count: int) -> Iterator[Prepared]:
    """Encoded requests for a slice of the prompt set, before the clock starts."""
    workload = bench.arm.workload
    sampling = sampling_of(workload)
    for position, item in enumerate(bench.prompts.slice(first, count), start=first):
        again = position // len(bench.prompts)
        prompt = _asked(item.prompt, workload["dialect"], again)
        path, body = bench.engine.request(workload["dialect"], prompt, sampling, bench.model.name)
        yield Prepared(
            prompt_id=f"{item.prompt_id}#{again + 1}" if again else item.prompt_id,
            conversation=item.conversation,
            path=path,
            body=json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode(),
            dialect=workload["dialect"],
            requested_tokens=sampling.max_tokens,
        )


def _asked(prompt: Any, dialect: str, round_: int) -> Any:
    """A prompt in its dialect's form; one used again gets a numbered first line, so that no prefix is cached."""
    head = f"(round {round_ + 1})\n" if round_ else ""
    if isinstance(prompt, str):
        return [{"role": "user", "content": head + prompt}] if dialect == "chat" else head + prompt
    if not head:
        return prompt
    first, *rest = prompt
    return [{**first, "content": head + str(first.get("content", ""))}, *rest]


def sampling_of(workload: Mapping[str, Any]) -> Sampling:
    """The sampling parameters of a planned workload."""
    return Sampling(**{name: workload[name] for name in ("max_tokens", "temperature", "seed", "top_p", "ignore_eos")})


@contextmanager
def _watching(bench: Bench, level: PlannedLevel, ended: threading.Event) -> Iterator[list[Reason]]:
    """Set `ended` as soon as the user says stop, the server dies, or time is up: no level outlives its use.

    Yields the reasons for which the level was cut short, for its verdict; a death and a stop are judged elsewhere.
    """
    over = threading.Event()
    cut: list[Reason] = []
    deadline = min(time.monotonic() + level.level_timeout_s, bench.deadline)

    def watch() -> None:
        while not over.wait(_LOOK_S):
            if time.monotonic() > deadline:
                message = f"the level was not over after the {level.level_timeout_s:g} s it may take"
                cut.append(Reason(code="level-timeout", message=message))
            if cut or bench.stop.is_set() or bench.server.is_dead():
                ended.set()
                return

    thread = threading.Thread(target=watch, name="watch", daemon=True)
    thread.start()
    try:
        yield cut
    finally:
        over.set()
        thread.join()


def _load(level: PlannedLevel) -> Load:
    return Load(
        mode=level.mode,
        concurrency=level.concurrency,
        requests=level.requests,
        duration_s=level.duration_s,
        rate=level.rate,
        burstiness=None if level.burstiness == "constant" else level.burstiness or 1.0,
        ramp_up_s=level.ramp_up_s or 0.0,
        warmup_requests=level.warmup_requests,
        drain_warmup=level.drain,
        request_timeout_s=level.request_timeout_s,
    )


def _judge(
    bench: Bench,
    cell: PlannedCell,
    trace: LevelTrace,
    observer: Observer,
    around: Mapping[str, Any],
    cut: Sequence[Reason],
) -> LevelResult:
    """Metrics, then the verdict over them and everything seen around the level."""
    who = metrics.Identity(cell.cell_id, bench.arm.name, bench.launch.name, bench.launch.block, bench.engine.simulated)
    death = bench.server.death()
    result = metrics.summarise(
        trace,
        who,
        cell.level.model_dump(),
        server=dict(around),
        capacity=bench.capacities.of(trace),
    )
    seen = judge.Seen(
        answers=bench.answers,
        log=bench.server.log_text(),
        deltas=observer.deltas(),
        died=str(death) if death else None,
        restarted=observer.restarted(),
        throttles=observer.throttles(),
        drift=bench.run.launch(bench.launch.name).get("drift", ()),
        flushed=around["flushed"],
        cut=cut,
    )
    return judge.judged(result, bench.arm, bench.engine, trace.records, seen)


def flush(bench: Bench) -> bool | None:
    """Empty the server's prefix cache before a level planned cold; None where that is not wanted or not possible."""
    if not bench.arm.workload["cold"] or bench.engine.flush is None:
        return None
    method, path = bench.engine.flush
    with launching.control_session(bench.server.server) as session:
        try:
            answer = session.request(method, bench.server.base_url + path, timeout=_FLUSH_S)
            return openai.flushed(answer.status_code, answer.text)
        except requests.RequestException:
            return False


def _log_size(bench: Bench) -> int:
    log = bench.server.log
    return log.stat().st_size if bench.server.process and log.exists() else 0


def _logged(bench: Bench, since: int) -> list[LogLine]:
    """What a server of ours has logged since; its last lines may be a moment late."""
    if bench.server.process is None:
        return []
    time.sleep(_LOOK_S)
    return list(logs.read(bench.server.log, since))


def _slowest(bench: Bench) -> float:
    """How long a warm-up request may take: as long as the most patient level's."""
    return max(cell.level.request_timeout_s for cell in bench.launch.cells)


def _failure(record: RequestRecord) -> str:
    return f"{record.prompt_id}: {record.reason or 'failed'}" + (f": {record.detail}" if record.detail else "")

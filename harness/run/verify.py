"""A stored run, derived once more from its raw requests: does every number and every digest come out again?

What the clock, the kernel and the server said cannot be derived and is taken as it was noted: send and arrival times,
the client's CPU time, the server's counters, how it died. Everything made from them is: windows, rates, distributions,
verdicts, comparisons; and every digest from its file. A run that is not finished is checked as far as it goes, and what
could not be checked is named.
"""

import contextlib
import datetime
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.engines import attach
from harness.engines import get as engine_of
from harness.engines.engine import Engine
from harness.errors import HarnessError, InputError
from harness.files import digest, read_json, sha256_bytes, sha256_file
from harness.load import prompts
from harness.load.readings import Readings
from harness.load.records import ClientFacts, LevelTrace, RequestRecord
from harness.recipe import identity
from harness.recipe.plan import Plan, PlannedArm, PlannedCell, PlannedLaunch, cell_identity
from harness.run import answer, inputs, judge, ledger, logs
from harness.run.store import Run, is_event
from harness.stats import metrics
from harness.stats.level import MEASUREMENT, LevelResult

SAME = 1e-9  # relative: sums come out the same to the last bits only with the same numpy on the same processor
_ABSENT = "(nothing)"
# Keys of what others say in words, which a later harness may choose anew.
_WORDS = frozenset({"sentence", "message", "notes"})


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing that does not come out again: where it is stored, what stands there, and what follows from the rest."""

    file: str
    key: str
    stored: Any
    derived: Any

    def __str__(self) -> str:
        return f"{self.file}: {self.key}: stored {_shown(self.stored)}, derived {_shown(self.derived)}"


@dataclass
class Verification:
    """What came of checking one run: how much was compared, what differs, and what nobody can tell.

    `numbers` counts values that were derived again, `digests` those recomputed from files, `levels` the levels whose
    every number was. `missing` holds file and key of values that can be derived and are not stored, `bare` the
    levels without requests, `taken` the event of each cell, by launch and level, that another run measured. `intact`
    are the files that are to the byte what they were (None: nobody noted what), `reworded` their sentences that
    this harness words otherwise.
    """

    run_id: str
    numbers: int = 0
    digests: int = 0
    levels: int = 0
    differences: list[Difference] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)
    missing: list[tuple[str, str]] = field(default_factory=list)
    bare: list[str] = field(default_factory=list)
    taken: dict[tuple[str, str], Mapping[str, Any]] = field(default_factory=dict)
    intact: set[str] | None = field(default_factory=set)
    reworded: list[tuple[str, str]] = field(default_factory=list)

    @property
    def sentence(self) -> str:
        """In a line."""
        counted = f"{self.numbers} numbers of {self.levels} levels and {self.digests} digests derived again"
        if self.differences:
            return f"{self.run_id}: {len(self.differences)} of them differ; {counted}"
        return f"{self.run_id}: {counted}, all as stored"

    def to_json(self) -> dict[str, Any]:
        """As `--json` prints it."""
        return {
            "run": self.run_id,
            "numbers": self.numbers,
            "digests": self.digests,
            "levels": self.levels,
            "differences": [
                {"file": one.file, "key": one.key, "stored": one.stored, "derived": one.derived}
                for one in self.differences
            ],
            "unchecked": self.unchecked,
        }

    def compare(self, file: str, stored: Any, derived: Any, key: str = "") -> None:
        """Hold two JSON values against each other, leaf by leaf."""
        if isinstance(stored, Mapping) and isinstance(derived, Mapping):
            for name, value in stored.items():
                place = f"{key}.{name}" if key else str(name)
                kept = self.intact is None or file in self.intact
                if kept and name in _WORDS and derived.get(name, value) != value:
                    self.reworded.append((file, place))
                else:
                    self.compare(file, value, derived.get(name, _ABSENT), place)
            # An older harness derived less. Where somebody took a value out, the file's digest says so.
            self.missing += [
                (file, f"{key}.{name}" if key else str(name))
                for name in derived
                if name not in stored and derived[name] not in (None, {}, [])
            ]
        elif isinstance(stored, list) and isinstance(derived, list) and len(stored) == len(derived):
            for index, pair in enumerate(zip(stored, derived, strict=True)):
                self.compare(file, *pair, f"{key}[{index}]")
        else:
            self.numbers += 1
            if not _same(stored, derived):
                self.differences.append(Difference(file, key, stored, derived))

    def hold(self, file: str, key: str, stored: str | None, derived: str) -> None:
        """Hold a stored digest against a recomputed one."""
        self.digests += 1
        if stored != derived:
            self.differences.append(Difference(file, key, stored, derived))


def verify(run: Run) -> Verification:
    """Derive everything again that a run stores.

    Raises:
        InputError: its plan does not read, so that nothing is known of it.
    """
    found = Verification(run.run_id)
    plan = run.plan()
    found.taken = dict(_reused(run, plan))
    _files(run, found)
    _events(run, found)
    with _reading("plan.json", found):
        _plan(run, plan, found)
    with _reading("inputs", found):
        _inputs(run, plan, found)
    for launch in plan.launches:
        with _reading(_relative(run, run.launch_folder(launch.name) / "launch.json"), found):
            _launch(run, plan, launch, found)
    for launch, cell in plan.cells():
        with _reading(_relative(run, run.level_folder(launch.name, cell.level.name)), found):
            _level(run, plan, launch, cell, found)
    with _reading("comparison.json", found):
        _comparison(run, found)
    if found.bare:
        found.unchecked.append(f"the numbers of {len(found.bare)} levels: requests are not here ({found.bare[0]} ...)")
    found.unchecked += _not_stored(found.missing)
    found.unchecked += _said_otherwise(found.reworded)
    return found


@contextlib.contextmanager
def _reading(file: str, found: Verification) -> Iterator[None]:
    """One part of a run; where it does not read, that is a difference, and the other parts are checked all the same."""
    try:
        yield
    except HarnessError as error:
        found.differences.append(_damaged(error.message, file))
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        # Of another form than the harness writes, in a way that no reader looks for.
        found.differences.append(_damaged(f"{type(error).__name__}: {error}", file))


def _not_stored(missing: Sequence[tuple[str, str]]) -> Iterator[str]:
    """Values that can be derived and are not stored, a line for all files that lack the same ones."""
    lacking: dict[str, list[str]] = {}
    for file, key in missing:
        lacking.setdefault(file, []).append(key)
    groups: dict[tuple[str, ...], list[str]] = {}
    for file, keys in lacking.items():
        groups.setdefault(tuple(keys), []).append(file)
    for (first, *others), files in groups.items():
        holds = f"`{first}`" + (f" and {len(others)} more" if others else "")
        also = f" and {len(files) - 1} more files" if files[1:] else ""
        yield f"{files[0]}{also}: no {holds}: written by a harness that did not derive them"


def _said_otherwise(reworded: Sequence[tuple[str, str]]) -> Iterator[str]:
    """Sentences of an older harness, a line a file: the file is what it was, and this harness words them anew."""
    for file in dict.fromkeys(file for file, _ in reworded):
        places = [place for one, place in reworded if one == file]
        more = f" and {len(places) - 1} more" if places[1:] else ""
        yield f"{file}: {places[0]}{more}: this harness says it in other words"


def has_requests(run: Run) -> bool:
    """Whether the requests of every finished level are here; a record for documents leaves them out."""
    return all(
        (run.level_folder(launch, str(result.level["name"])) / "requests.jsonl").is_file()
        for launch, result in run.levels()
    )


# Digests


def _files(run: Run, found: Verification) -> None:
    """Every file that was finished, against what it was then."""
    if not run.keeps_digests():
        found.unchecked.append(f"files: this run kept no {ledger.NAME}, so a changed file shows only in its numbers")
        found.intact = None
        return
    noted = ledger.noted(run.path)
    if not ledger.kept(run.path):
        found.differences.append(
            Difference(ledger.NAME, "contents", "(no such file)", "a line for every finished file")
        )
        return
    for where, fault in ledger.faults(run.path):
        found.differences.append(Difference(where, "line", fault, "a line as the harness wrote it"))
    now = {one.path: ledger.sha256_now(run.path, one) for one in noted.values()}
    for one in noted.values():
        found.hold(one.path, "sha256", one.sha256, now[one.path] or "(no such file)")
    found.intact = {one.path for one in noted.values() if now[one.path] == one.sha256}
    _without_line(run, [file for file in _finished(run) if file not in noted], found)
    _taken_over(run, found)


def _events(run: Run, found: Verification) -> None:
    """What happened is taken as it was noted; only lines that are no events show."""
    for where, line in run.event_lines():
        if not is_event(line):
            found.differences.append(Difference(where, "line", line, "an event with `at` and `kind`"))


def _without_line(run: Run, files: Sequence[str], found: Verification) -> None:
    """Files that are there and that the list of digests does not know."""
    if _state(run) == "done":
        for file in files:
            found.hold(file, "sha256", f"(no line in {ledger.NAME})", sha256_file(run.path / file))
    elif files:  # a kill may fall between a file and its line
        more = f" and {len(files) - 1} more files" if files[1:] else ""
        found.unchecked.append(f"{files[0]}{more}: no line in {ledger.NAME}, in a run that is not done")


def _finished(run: Run) -> Iterator[str]:
    """The files of a run that every harness with a list of digests writes into it."""
    path = run.path
    always = [path / "plan.json", path / "facts.json", *path.glob("launches/*/launch.json")]
    always += [one for one in path.glob("inputs/**/*") if one.is_file()]
    for level in path.glob("launches/*/levels/*/level.json"):
        always += [one for one in level.parent.iterdir() if ledger.is_current(one)]
    if run.says_digests():
        names = ("run.json", "record.json", "comparison.json", "events.jsonl")
        always += [*(path / name for name in names), *path.glob("policy-*.json")]
    return (_relative(run, one) for one in sorted(always) if one.is_file())


def _state(run: Run) -> str:
    try:
        return str(run.state()["state"])
    except InputError:
        return "damaged"


def _taken_over(run: Run, found: Verification) -> None:
    """Cells that another run measured: their files against what that run had noted of them."""
    for (launch, name), event in found.taken.items():
        digests = event.get("digests")
        for file, sha256 in digests.items() if isinstance(digests, Mapping) else ():
            if file == "level.json" or "/" in file:  # its launch, arm and block are those of this run now
                continue
            path = run.level_folder(launch, name) / file
            now = sha256_file(path) if path.is_file() else "(no such file)"
            found.hold(_relative(run, path), f"sha256 in `{event.get('source')}`", str(sha256), now)


def _reused(run: Run, plan: Plan) -> Iterator[tuple[tuple[str, str], Mapping[str, Any]]]:
    """The event of each cell that another run measured and that was not measured here later, by launch and level."""
    events = (event for event in run.events() if event["kind"] == "reused")
    newest = {(str(event.get("launch")), str(event.get("level"))): event for event in events}
    for launch, cell in plan.cells():
        place = (launch.name, cell.level.name)
        path = run.level_folder(*place) / "level.json"
        if place in newest and path.is_file():
            began, taken = _instant(_began(path)), _instant(newest[place]["at"])
            if began is None or taken is None or began < taken:
                yield place, newest[place]


def _began(path: Path) -> str:
    """When a level began; empty where its file is damaged, which is told where the level is checked."""
    try:
        stored = read_json(path)
    except InputError:
        return ""
    return str(stored.get("started_at")) if isinstance(stored, Mapping) else ""


def _plan(run: Run, plan: Plan, found: Verification) -> None:
    """The plan's own digest, and each cell's, from what they are digests of."""
    raw = read_json(run.path / "plan.json")
    state = run.state()
    if "plan" in state:
        found.hold("run.json", "plan", state["plan"], plan_digest(raw))
    if state.get("recipe", plan.recipe) != plan.recipe:
        found.differences.append(Difference("run.json", "recipe", state["recipe"], plan.recipe))
    for launch, cell in plan.cells():
        place = f"launches.{launch.name}.cells.{cell.level.name}"
        found.hold("plan.json", f"{place}.cell_id", cell.cell_id, identity.cell_id(cell.identity))
        arm = plan.arms[launch.arm]
        meant = cell_identity(arm, cell.level, cell.first_prompt, launch.block, plan.measurement)
        known = {name: meant[name] for name in meant if name in cell.identity}
        found.compare("plan.json", cell.identity, json.loads(json.dumps(known)), f"{place}.identity")


def plan_digest(raw: Mapping[str, Any]) -> str:
    """The digest of a plan as stored, by whichever harness: `Plan.digest` over its own keys and no later ones."""
    refined = raw.get("refined") or []
    blocks = 1 + max(launch["block"] for launch in raw["launches"]) - len(refined)
    launches = [launch for launch in raw["launches"] if launch["block"] < blocks]
    first = {**raw, "launches": launches}
    return digest({**first, "refined": []} if "refined" in raw else first)


def _inputs(run: Run, plan: Plan, found: Verification) -> None:
    """Recipe, locks and prompt sets, from the record's copies or from where they lay."""
    copy = inputs.recipe(run, plan)
    path = copy or Path(plan.recipe_path)
    if copy or (path.is_file() and sha256_file(path) == plan.recipe_sha256):
        found.hold("plan.json", "recipe_sha256", plan.recipe_sha256, sha256_file(path))
    else:
        found.unchecked.append(f"recipe_sha256: the run kept no copy of its recipe, and `{path}` is not that one")
    for environment, env_id in sorted({(arm.env, str(arm.env_id)) for arm in plan.arms.values() if arm.env}):
        _lock(run, environment, env_id, found)
    for name, sha256 in sorted(
        {(arm.workload["prompts"], arm.workload["prompts_sha256"]) for arm in plan.arms.values()}
    ):
        _prompts(name, sha256, path.parent, found)


def _lock(run: Run, environment: str, env_id: str, found: Verification) -> None:
    from harness.env import lock  # noqa: PLC0415 - a quarter of a second, for runs without an environment

    path = inputs.lock(run, environment)
    if path is None:
        found.unchecked.append(f"env_id of `{environment}`: the run kept no copy of its lock")
        return
    try:
        seen = lock.read(path)
    except HarnessError as error:
        found.differences.append(_damaged(error.message, _relative(run, path)))
        return
    found.hold("plan.json", f"arms: env_id of {environment}", env_id, seen.computed_id())


def _prompts(name: str, sha256: str, beside: Path, found: Verification) -> None:
    try:
        seen = prompts.load(name, beside=beside).sha256
    except HarnessError as error:
        found.unchecked.append(f"prompts `{name}`: {error.message}")
        return
    found.hold("plan.json", f"prompts_sha256 of {name}", sha256, seen)


# Launches and levels


def _launch(run: Run, plan: Plan, launch: PlannedLaunch, found: Verification) -> None:
    """What `launch.json` says of what was to be started, from the plan; the server's own words are taken so."""
    said, arm = run.launch(launch.name), plan.arms[launch.arm]
    engine = _engine(arm, said)
    planned: dict[str, Any] = {"env": arm.env, "env_id": arm.env_id}
    if engine is not None:
        planned |= {"engine": engine.name, "simulated": engine.simulated}
    if "reused_from" not in said:  # there it had a name of its own
        planned |= {"launch": launch.name, "arm": launch.arm, "block": launch.block}
    file = _relative(run, run.launch_folder(launch.name) / "launch.json")
    for key, value in planned.items():
        if key in said and said[key] != value:
            found.differences.append(Difference(file, key, said[key], value))


def _engine(arm: PlannedArm, said: Mapping[str, Any]) -> Engine | None:
    """The engine of an arm: the planned one; of a server that ran already, what its answers tell, where they are here.

    None where they are not: a record has no answers, and names an engine all the same.
    """
    if arm.engine != attach.ENGINE.name and arm.url is None:
        return engine_of(arm.engine)
    return attach.recognised(said["answers"]) if said.get("answers") else None


def _level(run: Run, plan: Plan, launch: PlannedLaunch, cell: PlannedCell, found: Verification) -> None:
    """Everything that `level.json` says, from its requests."""
    name = cell.level.name
    folder = run.level_folder(launch.name, name)
    file = _relative(run, folder / "level.json")
    if not (folder / "level.json").is_file():
        begun = sum(1 for _ in run.requests(launch.name, name))
        why = f"not finished, {begun} requests noted" if begun else "not measured"
        found.unchecked.append(f"{launch.name} {name}: {why}")
        return
    stored = run.level(launch.name, name)
    assert stored is not None  # the file is there
    if not (folder / "requests.jsonl").is_file():
        found.bare.append(f"{launch.name} {name}")
        _bare(run, plan, _Cell(launch, cell, stored, (), folder, False), found)
        return
    if stored.measurement != MEASUREMENT:
        found.unchecked.append(
            f"{launch.name} {name}: measured by {stored.measurement}, this harness has {MEASUREMENT}"
        )
        return
    records = tuple(run.requests(launch.name, name))
    _records(_relative(run, folder / "requests.jsonl"), records, plan.arms[launch.arm], found)
    reused = (launch.name, name) in found.taken
    derived = _derived(run, plan, _Cell(launch, cell, stored, records, folder, reused), found)
    found.levels += 1
    found.compare(file, read_json(folder / "level.json"), derived.model_dump(mode="json"))


@dataclass(frozen=True, slots=True)
class _Cell:
    """One finished level as stored."""

    launch: PlannedLaunch
    cell: PlannedCell
    stored: LevelResult
    records: tuple[RequestRecord, ...]
    folder: Path
    reused: bool  # another run measured it, and this one's server log says nothing of it

    @property
    def label(self) -> str:
        return f"{self.launch.name} {self.cell.level.name}"


def _bare(run: Run, plan: Plan, one: _Cell, found: Verification) -> None:
    """What a level without its requests says of itself, from the plan."""
    arm, stored = plan.arms[one.launch.arm], one.stored
    engine = _engine(arm, run.launch(one.launch.name))
    planned: dict[str, Any] = {"cell_id": one.cell.cell_id, "arm": one.launch.arm, "block": one.launch.block}
    if engine is not None:
        planned["simulated"] = engine.simulated
    for key, value in planned.items():
        if (said := getattr(stored, key)) != value:
            found.differences.append(Difference(_relative(run, one.folder / "level.json"), key, said, value))


def _records(file: str, records: Sequence[RequestRecord], arm: PlannedArm, found: Verification) -> None:
    """What each request's line says twice: its text by its digest, the tokens of its chunks, and what was planned."""
    secrets, asked = bool(arm.secrets), arm.workload.get("max_tokens")
    for record in records:
        if record.requested_tokens not in (None, asked):
            key = f"request {record.index} ({record.phase}): requested_tokens"
            found.differences.append(Difference(file, key, record.requested_tokens, asked))
        where = f"request {record.index} ({record.phase})"
        if record.text and record.text_sha256 and not secrets:  # a text with a secret taken out has another digest
            text = record.text.encode("utf-8", "surrogatepass")
            found.hold(file, f"{where}: text_sha256", record.text_sha256, sha256_bytes(text))
        counts = [chunk.tokens for chunk in record.chunks]
        if record.ok and counts and None not in counts:
            found.compare(file, record.output_tokens, sum(counts), f"{where}: output_tokens")


def _derived(run: Run, plan: Plan, one: _Cell, found: Verification) -> LevelResult:
    """The level once more: metrics from its requests, verdict from everything seen around it."""
    stored, arm = one.stored, plan.arms[one.launch.arm]
    said = run.launch(one.launch.name)
    engine = _engine(arm, said) or engine_of(str(said.get("engine") or arm.engine))
    readings = Readings.of(one.folder, engine.counters)
    client, capacity = _client(stored, one.records)
    trace = LevelTrace(
        records=one.records,
        client=client,
        started_at=datetime.datetime.fromisoformat(stored.started_at).timestamp(),
        mode=one.cell.level.mode,
        concurrency=one.cell.level.concurrency,
        stopped=bool(stored.client.get("stopped")),
    )
    who = metrics.Identity(one.cell.cell_id, one.launch.arm, one.launch.name, one.launch.block, engine.simulated)
    flushed = stored.server.get("flushed")
    noted = {name: stored.server[name] for name in judge.NOTED if name in stored.server}
    server: dict[str, Any] = {**readings.named(), "flushed": flushed, **noted}
    if not readings.server and set(stored.server) - {"flushed", *judge.NOTED}:
        found.unchecked.append(f"{one.label}: the server's counters: server_metrics.jsonl is not here")
        server = stored.server
    result = metrics.summarise(trace, who, one.cell.level.model_dump(), server=server, capacity=capacity)
    result = result.model_copy(update={"started_at": stored.started_at})
    log = _log(run, one) if readings.server or server is not stored.server else None
    if log is None and arm.expect:
        found.unchecked.append(
            f"{one.label}: whether {', '.join(arm.expect)} engaged: what the server said is not here"
        )
    seen = judge.Seen(
        answers=said.get("answers") or {},
        log=log or "",
        deltas=readings.deltas(),
        evidence=log is not None,
        died=_died(stored),
        restarted=readings.restarted(),
        throttles=readings.throttles(),
        drift=said.get("drift") or (),
        flushed=flushed,
        cut=[reason for reason in stored.verdict.reasons if reason.code in judge.CUT],
    )
    judged = judge.judged(result, arm, engine, one.records, seen)
    return judged if log is not None else _as_promised(judged, stored)


def _client(
    stored: LevelResult, records: Sequence[RequestRecord]
) -> tuple[ClientFacts, tuple[float | None, str] | None]:
    """What the client noted of itself; its wall time stands in the rate at which it read chunks."""
    told = stored.client
    chunks, rate = sum(len(record.chunks) for record in records), told.get("chunks_s")
    facts = ClientFacts(
        processes=int(told["processes"]),
        cpu_s=float(told["cpu_s"]),
        wall_s=chunks / rate if rate else 0.0,
        kernel_stamps=bool(told["kernel_stamps"]),
        reads=int(told["reads"]),
        parse_s=float(told["parse_s"]),
        wrapped=int(told.get("wrapped_requests") or 0),
        clock_step_s=float(told.get("clock_step_s") or 0.0),
        cpus=tuple(told.get("cpus") or ()),
        reconnects=int(told.get("reconnects") or 0),
        busiest=told.get("cpu_share_most"),
    )
    note = told.get("capacity_note")
    return facts, None if note is None else (told.get("capacity_chunks_s"), str(note))


def _died(stored: LevelResult) -> str | None:
    """How the server died, in the words of the verdict: a death leaves no raw number behind."""
    message = next((reason.message for reason in stored.verdict.reasons if reason.code == "server-died"), None)
    return message.partition(": ")[2] if message else None


def _log(run: Run, one: _Cell) -> str | None:
    """What the server had logged by the end of a level; None where that log is not in this run."""
    path = run.launch_folder(one.launch.name) / "server.log"
    if one.reused or not path.is_file():
        return None
    later = [
        result.started_at
        for cell in one.launch.cells
        if (result := run.level(one.launch.name, cell.level.name)) is not None
        and result.started_at > one.stored.started_at
    ]
    began = str(run.launch(one.launch.name).get("started_at") or "")
    span = (_instant(began) if began < one.stored.started_at else None, _instant(min(later)) if later else None)
    return "".join(f"{line.text}\n" for line in logs.read(path) if line.writer != logs.REAPER and _within(line, span))


def _within(line: logs.LogLine, span: tuple[float | None, float | None]) -> bool:
    """Whether a line was logged in a span of time; one without a readable stamp counts."""
    at, (start, end) = _instant(line.at), span
    return at is None or ((start is None or at >= start - 1) and (end is None or at <= end))


def _instant(text: str) -> float | None:
    try:
        return datetime.datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None


def _as_promised(judged: LevelResult, stored: LevelResult) -> LevelResult:
    """A level judged without its server's log, with what the stored verdict says of features taken over."""
    taken = [reason for reason in stored.verdict.reasons if reason.code == "feature-not-engaged"]
    if not taken:
        return judged
    wanted = [reason for reason in stored.verdict.reasons if reason in judged.verdict.reasons or reason in taken]
    missing = [reason for reason in judged.verdict.reasons if reason not in wanted]
    state = judged.verdict.state if judged.verdict.state != "valid" else "suspect"
    return judged.model_copy(
        update={"verdict": judged.verdict.model_copy(update={"state": state, "reasons": (*wanted, *missing)})}
    )


# Comparison


def _comparison(run: Run, found: Verification) -> None:
    """The stored answer, and each policy, from the levels."""
    path = run.path / "comparison.json"
    if not path.is_file():
        _unanswered(run, found)
        return
    try:
        known = answer.stored(run)
        assert known is not None  # the file is there
        fresh = answer.derived(run, known)
    except InputError as error:
        found.differences.append(_damaged(error.message, "comparison.json"))
        return
    if not has_requests(run):
        found.unchecked.append("comparison.json: made from requests that are not here")
        return
    if fresh is None:
        found.differences.append(Difference("comparison.json", "comparisons", "an answer", "the plan compares nothing"))
        return
    # The name of a run is its folder's, which may have been moved.
    found.compare("comparison.json", read_json(path), {**fresh.model_dump(mode="json"), "run_id": known.run_id})
    for comparison in fresh.comparisons:
        policy = run.path / f"policy-{comparison.treatment}.json"
        if comparison.policy is not None and policy.is_file():
            found.compare(policy.name, read_json(policy), comparison.policy.model_dump(mode="json"))


def _unanswered(run: Run, found: Verification) -> None:
    """No answer is stored: is there one to be had?"""
    plan = run.plan()
    if plan.compare is None:
        return
    if _state(run) == "done" and run.says_digests() and has_requests(run):
        with contextlib.suppress(InputError):  # too little was measured
            answer.derived(run, answer.Answer(run_id=run.run_id, question=plan.question, comparisons=()))
            found.differences.append(Difference("comparison.json", "contents", "(no such file)", "an answer"))
            return
    found.unchecked.append("comparison.json: this run has none (it did not end, or measured too little)")


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, int | float) and isinstance(other, int | float):
        return math.isclose(one, other, rel_tol=SAME, abs_tol=SAME * 1e-3)
    return bool(one == other)


def _relative(run: Run, path: Path) -> str:
    return path.relative_to(run.path).as_posix()


def _damaged(why: str, file: str) -> Difference:
    return Difference(file, "contents", f"does not read: {why}", "a file as the harness wrote it")


def shown(found: Verification) -> Iterator[str]:
    """What a person reads: the sentence, then what differs, then what could not be checked."""
    yield found.sentence
    for one in found.differences:
        yield f"  differs  {one}"
    for text, cells in _alike(found.unchecked).items():
        more = f" ({', '.join(cells[:2])} and {len(cells) - 2} more)" if len(cells) > 2 else f" ({', '.join(cells)})"
        yield f"  not checked  {text}{more if cells else ''}"


def _alike(texts: Sequence[str]) -> dict[str, list[str]]:
    """What could not be checked, and at which levels: a reason that many levels share is said once."""
    found: dict[str, list[str]] = {}
    for text in texts:
        cell, colon, why = text.partition(": ")
        named = bool(colon) and re.fullmatch(r"\S+ \S+", cell) is not None
        found.setdefault(why if named else text, []).extend([cell] if named else [])
    return found


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False) if not isinstance(value, str) else value
    return text if len(text) <= 120 else text[:117] + "..."

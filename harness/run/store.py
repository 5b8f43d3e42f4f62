"""The run folder: right at every instant, readable while it grows, after a kill, and a year later.

runs/RUN_ID/
  plan.json      before anything starts
  run.json       state: planned, running, done, failed, interrupted; replaced whole at each change
  facts.json     what machine this was
  inputs/        copies of what people wrote: recipe, prompts, specs and locks of its environments
  events.jsonl   what happened, one line each, as it happens
  digests.jsonl  what each file was when it was finished
  launches/NN-ARM/
    launch.json  what was started, what it said of itself, how it stopped
    server.log
    ranks/       of a server that spans machines: rank-N.json, its last word, and rank-N/server.log
    levels/NAME/
      client/         while the level runs: each request as it came back, as the measuring processes read it
      requests.jsonl  a line a request, understood, once the clock has stopped
      level.json      last: the cell is finished
  comparison.json
"""

import datetime
import json
import re
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from harness.errors import InputError
from harness.files import append_line, read_json, read_json_lines, read_numbered_json_lines, write_json
from harness.load import spool
from harness.load.records import RequestRecord
from harness.recipe.plan import Plan
from harness.run import ledger
from harness.run.hold import hold
from harness.stats.level import LevelResult, Stored

FORMAT = "harness.run/1"
S = TypeVar("S", bound=Stored)
_EDITED = "it was edited, or damaged"
_FOLDER_NAME = re.compile(r"(?!\.\.?$)[^/\0]+")
# Forms of what is read without a model: whatever has another one was not written by the harness.
_NUMBER = int | float
_DEVICE = {"name": str, "power_limit_w": _NUMBER}
_MACHINE = {
    "cpu": {"governor": {"*": int}, "model": str, "usable": _NUMBER},
    "system": {"kernel": str},
    "gpu": {"devices": [_DEVICE], "driver": str},
    "harness": str,
}
_FACTS = {"before": _MACHINE, "after": _MACHINE, "nodes": {"*": _MACHINE}}
_LAUNCH = {
    "facts": _MACHINE,
    "engine": str,
    "answers": {},
    "effective": {},
    "node": {},
    "started_at": str,
    "milestones": [{"name": str, "at_s": _NUMBER}],
    "ready_s": _NUMBER,
    "argv": [str],
}
_LEVEL = {
    "concurrency": int,
    "rate": _NUMBER,
    "requests": int,
    "duration_s": _NUMBER,
    "mode": str,
    "goodput": {"*": _NUMBER},
}
_RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,119}")
_SAYING = ("run.json", "record.json")  # files that say under `digests` which list of digests is kept
_PRIVATE_DIR = 0o700
_PRIVATE = 0o600


@dataclass(frozen=True, slots=True)
class Run:
    """A run folder. `writer` names one of several that write into it at once, each with an event log of its own."""

    path: Path
    writer: str = ""

    @property
    def run_id(self) -> str:
        """The folder's name."""
        return self.path.name

    def plan(self) -> Plan:
        """The plan this run carries out.

        Raises:
            InputError: there is none, or it names what it does not have.
        """
        path = self.path / "plan.json"
        plan = read_stored(Plan, path)
        names = [
            name for launch in plan.launches for name in (launch.name, *(cell.level.name for cell in launch.cells))
        ]
        unknown = [launch.arm for launch in plan.launches if launch.arm not in plan.arms]
        if plan.compare is not None and plan.compare.get("base") not in plan.arms:
            unknown.append(str(plan.compare.get("base")))
        if unknown:
            raise InputError(f"`{path}` has no arm `{unknown[0]}`, which it names", hint=_EDITED)
        if bad := [name for name in names if not _FOLDER_NAME.fullmatch(name)] or ([] if names else [""]):
            raise InputError(f"`{path}`: no launch or level can be called `{bad[0]}`", hint=_EDITED)
        return plan

    def state(self) -> dict[str, Any]:
        """`run.json`; a folder without one never got past its plan."""
        return {"state": "planned", **_object(self.path / "run.json")}

    def told_state(self) -> str:
        """The state as people are told it: a run that no process carries out any more was killed."""
        state = str(self.state()["state"])
        if state == "submitted":
            return f"submitted to Slurm; `harness follow {self.path}` says how far it is"
        if state != "running":
            return state
        try:
            with self.held():
                return "killed; go on with `harness run RECIPE --resume`"
        except InputError:
            return state

    def keeps_digests(self) -> bool:
        """Whether a list of digests is here, or should be: `run.json` (in a record, `record.json`) says so."""
        return ledger.kept(self.path) or self.says_digests()

    def says_digests(self) -> bool:
        """Whether one of these files says so: then everything that is finished has its line, the state itself too."""
        for name in _SAYING:
            with suppress(InputError):  # a damaged one says nothing; who needs it is told
                if "digests" in _object(self.path / name):
                    return True
        return False

    def facts(self) -> dict[str, Any]:
        """Machine facts, empty when not yet collected."""
        path = self.path / "facts.json"
        return _checked(path, _object(path), _FACTS)

    def launch_folder(self, launch: str) -> Path:
        """Where one launch keeps its files."""
        return self.path / "launches" / launch

    def level_folder(self, launch: str, level: str) -> Path:
        """Where one cell keeps its files."""
        return self.launch_folder(launch) / "levels" / level

    def launch(self, name: str) -> dict[str, Any]:
        """`launch.json` of one launch, empty when it never started."""
        path = self.launch_folder(name) / "launch.json"
        return _checked(path, _object(path), _LAUNCH)

    def level(self, launch: str, level: str) -> LevelResult | None:
        """One finished cell, None where it is not finished."""
        path = self.level_folder(launch, level) / "level.json"
        if not path.is_file():
            return None
        result = read_stored(LevelResult, path)
        if (fault := _fault(result, launch, level)) is not None:
            raise InputError(f"`{path}`: {fault}", hint=_EDITED)
        return result

    def levels(self) -> Iterator[tuple[str, LevelResult]]:
        """Every finished cell with its launch, in the plan's order."""
        for launch, cell in self.plan().cells():
            if (result := self.level(launch.name, cell.level.name)) is not None:
                if (result.arm, result.block) != (launch.arm, launch.block):
                    path = self.level_folder(launch.name, cell.level.name) / "level.json"
                    planned = f"arm `{launch.arm}` and block {launch.block} are planned"
                    raise InputError(f"`{path}`: `{result.arm}`, {result.block}: {planned}", hint=_EDITED)
                yield launch.name, result

    def requests(self, launch: str, level: str) -> Iterator[RequestRecord]:
        """The requests of one cell as stored so far; a torn last line is left out.

        Of a level that still goes on, or whose harness was killed, also those that only the client had noted.
        """
        path, seen = self.level_folder(launch, level) / "requests.jsonl", set()
        for number, line in read_numbered_json_lines(path) if path.is_file() else ():
            try:
                record = RequestRecord.from_json(line)
            except InputError as error:
                raise InputError(f"`{path}:{number}`: {error.message}", hint=_EDITED) from error
            seen.add((record.phase, record.index))
            yield record
        yield from (
            one for one in spool.recover(self.client_folder(launch, level)) if (one.phase, one.index) not in seen
        )

    def client_folder(self, launch: str, level: str) -> Path:
        """Where the client keeps what it reads while a level runs."""
        return self.level_folder(launch, level) / "client"

    @contextmanager
    def held(self, *, launch: str | None = None, patience_s: float = 0.0) -> Iterator[None]:
        """The run folder for one process at a time, as long as the context lasts (and the process lives).

        Args:
            launch: hold only this launch, beside others that hold other launches of the run.
            patience_s: how long to wait for whoever has it.

        Raises:
            InputError: another process is carrying this run or launch out, or the file system knows no locks.
        """
        with hold(self.path / "lock", shared=launch is not None, patience_s=patience_s):
            if launch is None:
                yield
                return
            self.launch_folder(launch).mkdir(parents=True, exist_ok=True, mode=_PRIVATE_DIR)
            with hold(self.launch_folder(launch) / "lock", patience_s=patience_s):
                yield

    def write_state(self, state: str, **more: Any) -> None:
        """Replace `run.json`; what was there and is not named now stays, and what is None goes."""
        path = self.path / "run.json"
        said = {**self.state(), "format": FORMAT, "state": state, "at": now(), **more}
        write_json(path, {name: value for name, value in said.items() if value is not None}, mode=_PRIVATE)
        self.note(path)

    def write_plan(self, plan: Plan) -> None:
        """Replace the plan: a run that refines adds launches to it."""
        write_json(self.path / "plan.json", plan.model_dump(mode="json"), mode=_PRIVATE)
        self.note(self.path / "plan.json")

    def write_facts(self, facts: Mapping[str, Any]) -> None:
        """Store the machine facts."""
        write_json(self.path / "facts.json", facts, mode=_PRIVATE)
        self.note(self.path / "facts.json")

    def write_launch(self, name: str, record: Mapping[str, Any]) -> None:
        """Replace one `launch.json`; with a stop in it, the server's log is whole too, and those of its other ranks."""
        path = self.launch_folder(name) / "launch.json"
        write_json(path, {"format": "harness.launch/1", **record}, mode=_PRIVATE)
        logs = [path.with_name("server.log"), *sorted(path.parent.glob("ranks/*/server.log"))]
        self.note(path, *(logs if "stop" in record else ()))

    def write_level(self, launch: str, result: LevelResult) -> None:
        """Finish a cell: its `level.json` is the mark that it is whole."""
        path = self.level_folder(launch, str(result.level["name"])) / "level.json"
        write_json(path, result.model_dump(mode="json"), mode=_PRIVATE)
        self.note(*sorted(one for one in path.parent.iterdir() if ledger.is_current(one)))

    def note(self, *files: Path) -> None:
        """Write down what some finished files are, so that a later change of them shows."""
        ledger.note(self.path, files, self.writer)

    def withdraw_answer(self) -> None:
        """Take the answer away, with its policies: cells may be measured anew."""
        old = [self.path / "comparison.json", *sorted(self.path.glob("policy-*.json"))]
        ledger.forget(self.path, old, self.writer)
        for path in old:
            path.unlink(missing_ok=True)

    def start_requests(self, launch: str, level: str) -> Path:
        """A fresh `requests.jsonl`; an earlier attempt, unfinished or in vain, is set aside whole, never lost."""
        folder = self.level_folder(launch, level)
        folder.mkdir(parents=True, exist_ok=True, mode=_PRIVATE_DIR)
        path = folder / "requests.jsonl"
        if path.exists():
            self._settle(launch, level)
            attempt = 1 + len(list(folder.glob("requests.attempt-*.jsonl")))
            old = [one for one in folder.iterdir() if ledger.is_current(one)]
            ledger.forget(self.path, old, self.writer)
            # The level's own file first: from here on the cell is not finished.
            for one in sorted(old, key=lambda one: one.name != "level.json"):
                one.rename(one.with_name(f"{one.stem}.attempt-{attempt}{one.suffix}"))
        path.touch(mode=_PRIVATE)
        return path

    def _settle(self, launch: str, level: str) -> None:
        """Write down what the client of a killed attempt had noted."""
        path = self.level_folder(launch, level) / "requests.jsonl"
        stored = sum(1 for _ in read_json_lines(path))
        for record in list(self.requests(launch, level))[stored:]:
            append_line(path, record.to_line())
        spool.remove(self.client_folder(launch, level))

    def event(self, kind: str, **facts: Any) -> None:
        """Append one event; with the one that it `ended`, what the log holds so far is written down."""
        path = self.path / f"events{self._suffix}.jsonl"
        append_line(path, json.dumps({"at": now(), "kind": kind, **facts}, ensure_ascii=False))
        if kind == "ended":
            self.note(path)

    def events(self) -> list[dict[str, Any]]:
        """Everything that happened so far, whoever wrote it down; lines that are no events are left out."""
        return sorted((event for _, event in self.event_lines() if is_event(event)), key=lambda event: str(event["at"]))

    def event_lines(self) -> Iterator[tuple[str, Any]]:
        """Every line of the event logs, whatever it holds, with where it stands: `events.jsonl:3`."""
        for path in sorted(self.path.glob("events*.jsonl")):
            for number, event in read_numbered_json_lines(path):
                yield f"{path.name}:{number}", event

    @property
    def _suffix(self) -> str:
        return f".{self.writer}" if self.writer else ""


def create(folder: Path, plan: Plan, *, name: str | None = None) -> Run:
    """A new run folder with its plan in it.

    Raises:
        InputError: the folder exists already, or cannot be written.
    """
    run_id = name or f"{datetime.datetime.now(datetime.UTC):%Y-%m-%dT%H%M%S}-{plan.recipe}-{plan.digest[:8]}"
    path = folder / run_id
    if not _RUN_NAME.fullmatch(run_id):
        raise InputError(f"`{run_id}` cannot name a run", hint="letters, digits and `._+-`, at most 120 of them")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"`{folder}` cannot hold runs: {error.strerror}") from error
    try:
        path.mkdir(mode=_PRIVATE_DIR)
    except FileExistsError as error:
        raise InputError(f"run folder `{path}` exists already", hint=_instead(folder, path, plan)) from error
    except OSError as error:
        raise InputError(f"cannot make the run folder `{path}`: {error.strerror}") from error
    run = Run(path)
    run.write_plan(plan)
    run.write_state("planned", recipe=plan.recipe, plan=plan.digest, digests=ledger.NAME)
    return run


def _instead(folder: Path, path: Path, plan: Plan) -> str:
    """What to do where a run has the name already: one of this very plan can be gone on with."""
    another = "give another --name or --out"
    try:
        same = Run(path).plan().digest == plan.digest
    except InputError:  # no run, or one that cannot be read
        return another
    words = shlex.join(["harness", "run", plan.recipe_path, "--out", str(folder), "--resume"])
    return f"{another}, or go on with it: `{words}`" if same else another


def open_run(path: Path) -> Run:
    """A run folder that exists.

    Raises:
        InputError: there is no run in it.
    """
    if not (path / "plan.json").is_file():
        near = [str(found.parent) for found in path.parent.glob("*/plan.json")][:5]
        hint = "runs here: " + ", ".join(near) if near else "a run is a folder that `harness run` made"
        raise InputError(f"`{path}` is not a run: it has no plan.json", hint=hint)
    return Run(path)


def find(folder: Path, recipe: str) -> list[Run]:
    """The runs of a recipe in a folder, newest first."""
    runs = [Run(path.parent) for path in folder.glob("*/plan.json")]
    named = [run for run in runs if run.state().get("recipe") == recipe]
    return sorted(named, key=lambda run: run.run_id, reverse=True)


def is_event(line: Any) -> bool:
    """Whether a line is one that `Run.event` wrote: an object with a time and a kind."""
    return isinstance(line, dict) and isinstance(line.get("at"), str) and isinstance(line.get("kind"), str)


def now() -> str:
    """The wall clock, UTC, ISO 8601."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")


def _object(path: Path) -> dict[str, Any]:
    """A JSON object of a run folder, empty where there is no such file."""
    if not path.is_file():
        return {}
    found = read_json(path, finite=True)
    if not isinstance(found, dict):
        raise InputError(f"`{path}` holds no JSON object", hint=_EDITED)
    return found


def _checked(path: Path, value: dict[str, Any], form: Any) -> dict[str, Any]:
    """The value, where it has the form of what the harness writes there."""
    if (where := _misfit(value, form, "")) is not None:
        raise InputError(f"`{path}`: `{where}` is not what the harness writes there", hint=_EDITED)
    return value


def _misfit(value: Any, form: Any, where: str) -> str | None:
    """Where a value is not of a form: types, a list for each of its items, a mapping for what it has of these keys."""
    if isinstance(form, dict):
        if value is None or isinstance(value, str):  # not known, or said in words: `no GPU`
            return None
        if not isinstance(value, dict):
            return where
        every = form.get("*")
        pairs = ((name, item, form.get(name, every)) for name, item in value.items())
        found = (_misfit(item, its, f"{where}.{name}".lstrip(".")) for name, item, its in pairs if its is not None)
        return next((one for one in found if one is not None), None)
    if isinstance(form, list):
        if not isinstance(value, list):
            return where
        found = (_misfit(item, form[0], f"{where}[{index}]") for index, item in enumerate(value))
        return next((one for one in found if one is not None), None)
    return None if value is None or isinstance(value, form) else where


def _fault(result: LevelResult, launch: str, level: str) -> str | None:
    """What of a level's file cannot be, None where nothing is."""
    if (result.launch, result.level.get("name")) != (launch, level):
        return f"it says that it is `{result.launch} {result.level.get('name')}`"
    if (where := _misfit(result.level, _LEVEL, "level")) is not None:
        return f"`{where}` is not what the harness writes there"
    try:
        datetime.datetime.fromisoformat(result.started_at)
    except ValueError:
        return f"`started_at` is no time: `{result.started_at}`"
    return None


def read_stored(model: type[S], path: Path) -> S:
    """A stored file as its model; says which part does not read when it is another version's."""
    try:
        return model.model_validate(read_json(path, finite=True))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(step) for step in first["loc"])
        raise InputError(
            f"`{path}` does not read as {model.__name__}: `{place}`: {first['msg']}",
            hint="it was written by another version of the harness, or edited",
        ) from error

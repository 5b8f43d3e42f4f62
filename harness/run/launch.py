"""Bringing one server up: a proven port, a supervised process, and readiness that is proven rather than assumed.

Ready means: the health endpoint says so, the process that listens is one of ours (a stranger on the port would answer
just as well), it serves the model by the name that requests use, and it has generated something. Meanwhile the log is
watched: milestones are passed on as they come, and a decisive line ends the wait at once.
"""

import contextlib
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Event
from typing import Any, NoReturn

import requests
import urllib3

from harness.engines import openai
from harness.engines.engine import Dialect, Engine, Sampling, Server, Signature, StopPolicy
from harness.errors import Interrupted, ServerError
from harness.run import diagnose, logs, ports, privacy, reaper, supervise
from harness.run.diagnose import Death, Diagnosis
from harness.run.rendezvous import Head
from harness.run.signatures import GENERIC
from harness.run.supervise import AT_ONCE, Process, StopReport

_LOOK_S = 0.1  # between looks at the log and the process
_ASK_S = 0.2  # between questions to the health endpoint
_ANSWER_S = 25.0  # SGLang's health endpoint generates, and waits up to 20 s for it
_GENERATE_S = 300.0  # the first generation may compile kernels
_LAST_WORDS_S = 2.0  # after a decisive line: what a dying server still has to say
_CHILDREN_S = 3.0  # between looks at a server's children: a parent may take a moment to notice a death
_TRIES = 3  # when a port that we chose is lost between proof and use
_PROBE = Sampling(max_tokens=4, temperature=0.0, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class Reached:
    """A milestone of a start: its name, seconds since the start, and the line that said so."""

    name: str
    at_s: float
    line: str


OnMilestone = Callable[[Reached], None]


@dataclass(frozen=True, slots=True)
class Watchers:
    """Who is told about milestones, who may break the start off, and the other machines of a server that spans some."""

    on_milestone: OnMilestone
    stop: Event
    ranks: Head | None = None


class LaunchFailed(ServerError):
    """A server that did not come up: why, and how what was started was cleaned away."""

    def __init__(self, what: str, diagnosis: Diagnosis, report: StopReport | None, log: Path) -> None:
        code = f" (exit {diagnosis.exit_code})" if diagnosis.exit_code is not None else ""
        left = report.problems() if report else []
        whole = f"\nthe whole log: {log}" if log.is_file() else ""  # one that somebody else started keeps it elsewhere
        super().__init__(
            f"{what}: {diagnosis}{code}",
            hint=f"{diagnosis.remedy}{whole}",
            details=[*diagnosis.evidence, *left],
        )
        self.diagnosis = diagnosis
        self.report = report


@dataclass
class Launched:
    """A server that is ready: where it answers, what was executed, and how it came up. `process` is None for one that
    was running already and is not ours to stop."""

    engine: Engine
    server: Server
    process: Process | None
    log: Path
    ready_s: float
    argv: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    withheld: tuple[str, ...] = ()
    milestones: tuple[Reached, ...] = ()
    models: Any = None
    probe: Mapping[str, Any] = field(default_factory=dict)
    oom_kills: int = 0
    log_offset: int = 0  # where this start begins in a log that an earlier one may have begun
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)  # values that may be written nowhere, by name
    ranks: Head | None = None  # the other machines' parts of it
    _next_look: float = field(default=0.0, repr=False)
    _crashed: list[str] = field(default_factory=list, repr=False)
    _maimed: bool = field(default=False, repr=False)

    def log_text(self) -> str:
        """What the server wrote so far, without stamps; empty for one that is not ours."""
        return logs.plain(self.log, self.log_offset) if self.process else ""

    @property
    def host(self) -> str:
        """The host it is asked at."""
        return asked_host(self.server)

    @property
    def port(self) -> int:
        """The port it listens on."""
        return self.server.port

    @property
    def base_url(self) -> str:
        """Where it answers."""
        return base_url(self.server)

    def refuse(self, message: str, details: Sequence[str] = ()) -> NoReturn:
        """Give this server up.

        Raises:
            ServerError: always; with the reason of its death where it is dead, else with its last lines.
        """
        details = [privacy.redact_text(line, self.secrets) for line in details]
        if (death := self.death()) is not None:
            raise ServerError(
                f"{message}: the server is dead, {death}", details=[*details, *death.evidence], hint=death.remedy
            )
        said = diagnose.last_lines(list(logs.read(self.log, self.log_offset))) if self.process else ()
        raise ServerError(message, details=[*details, *said], hint=f"the whole log: {self.log}" if said else None)

    def death(self, phase: diagnose.Phase = "measure") -> Diagnosis | None:
        """Why the server is dead, None while it lives (or is not ours). One whose workers crashed counts as dead."""
        if self.process is None or not self.is_dead():
            return None
        own = self._own_death(self.process, phase)
        return self.ranks.cause(own, phase) if self.ranks else own

    def _own_death(self, process: Process, phase: diagnose.Phase) -> Diagnosis | None:
        """Why the process here is dead; None where it lives, and it was another rank that went."""
        code = process.poll()
        if code is None and not self._maimed:
            return None
        time.sleep(_LOOK_S)  # the reaper may still be writing the last lines down
        death = Death(code, phase, diagnose.oom_kills() - self.oom_kills)
        found = diagnose.explain(list(logs.read(self.log, self.log_offset)), self.engine.signatures, death)
        return replace(found, evidence=(*self._crashed, *found.evidence)) if code is None else found

    def is_dead(self) -> bool:
        """Whether the server ended, or children of it crashed and nobody had noticed by the second look.

        Cheap enough to be asked all the time: it looks for children only now and then.
        """
        if self.process is None or self._maimed:
            return self._maimed
        if self.process.poll() is not None or (self.ranks is not None and self.ranks.lost()):
            return True
        if time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + _CHILDREN_S
            before, self._crashed = self._crashed, self.process.crashed_children()
            self._maimed = any(child in before for child in self._crashed)
        return self._maimed

    def stop(self, policy: StopPolicy | None = None) -> StopReport | None:
        """Stop it as its engine likes, and verify; None for a server that is not ours."""
        if self.process is None:
            return None
        return _stop(self.process, policy or self.engine.stop, self.ranks)


def _stop(process: Process, policy: StopPolicy, ranks: Head | None) -> StopReport:
    return ranks.stop(process, policy) if ranks else process.stop(policy)


def launch(  # noqa: PLR0913 - all but two by name
    engine: Engine,
    server: Server,
    *,
    folder: Path,
    deadline_s: float,
    on_milestone: OnMilestone = lambda _: None,
    marker: str | None = None,
    secrets: Sequence[str] = (),
    dialect: Dialect = "completions",
    stop: Event | None = None,
    ranks: Head | None = None,
) -> Launched:
    """Start a server and return once it is proven ready.

    Args:
        engine: what kind of server.
        server: the server; port 0 gets a free one, another port must be free.
        folder: gets `server.log`, and is the server's working directory.
        deadline_s: how long it may take to be ready.
        on_milestone: called with every milestone as its line appears.
        marker: names this launch in the mark its processes carry; by default the run's and the launch's folder name.
        secrets: names of environment variables the server needs whose values may be written nowhere.
        dialect: how the proof of readiness asks for a generation.
        stop: when set, the start is broken off.
        ranks: the other machines of a server that spans several: they are called, watched and stopped with it.

    Raises:
        Interrupted: `stop` was set; what was started is gone by then.
        LaunchFailed: it died, got stuck or answered wrongly; it is stopped and cleaned away by then.
        InputError: the port is taken.
    """
    for attempt in range(1, _TRIES + 1):
        placed = replace(server, port=ports.choose_port(server.host, server.port or None))
        if ranks is not None:
            placed = ranks.call(engine, placed)
        watchers = Watchers(on_milestone, stop or Event(), ranks)
        start = _Start(engine, placed, folder, deadline_s, watchers, secrets, dialect)
        try:
            return start.run(marker or f"{folder.parent.parent.name}/{folder.name}")
        except LaunchFailed as error:
            if error.diagnosis.name != "port in use" or server.port or attempt == _TRIES:
                raise
    raise AssertionError("unreachable")


def attach(
    engine: Engine, server: Server, *, log: Path, deadline_s: float, dialect: Dialect, stop: Event | None = None
) -> Launched:
    """A server that somebody else runs: proven ready as far as that can be asked over its endpoint.

    Raises:
        Interrupted: `stop` was set meanwhile.
        LaunchFailed: it does not answer in time, or wrongly.
    """
    stop = stop or Event()
    started, asking = time.monotonic(), _Asking(engine, server, dialect, lambda: None, stop)
    try:
        found = asking.until_ready(deadline_s)
    except _NotOurs as wrong:
        raise LaunchFailed(f"cannot use the server at {base_url(server)}", wrong.diagnosis, None, log) from wrong
    except TimeoutError as late:
        if stop.is_set():
            raise Interrupted("stopped while the server was asked whether it is ready") from late
        silent = f"no answer from {base_url(server)}{engine.ready_path} within {deadline_s:.0f} s"
        nobody = Diagnosis(silent, (), "is it running, and is this its URL?")
        raise LaunchFailed(f"could not reach the server at {base_url(server)}", nobody, None, log) from late
    ready_s = round(time.monotonic() - started, 3)
    return Launched(engine, server, None, log, ready_s, models=found.models, probe=found.probe)


def answers(engine: Engine, server: Server, *, timeout_s: float = 30.0) -> dict[str, Any]:
    """What a server says of itself: JSON by path, for those of `effective_paths` that answer with JSON."""
    found: dict[str, Any] = {}
    for path in engine.effective_paths:
        # A connection each: a server that answers 500 closes it, and the next path would pay for that.
        with control_session(server) as session, contextlib.suppress(requests.RequestException, ValueError):
            answer = session.get(base_url(server) + path, timeout=timeout_s)
            if answer.ok:
                found[path] = answer.json()
    return found


def control_session(server: Server) -> requests.Session:
    """A session for the control plane. Loopback ignores proxies, whatever the environment says."""
    session = requests.Session()
    session.trust_env = not is_loopback(server.host)
    if server.tls is not None:
        session.verify = server.tls.ca_file or not server.tls.insecure
        if server.tls.insecure:
            urllib3.disable_warnings(urllib3.exceptions.InsecureRequestWarning)  # it is what the user asked for
    return session


def base_url(server: Server) -> str:
    """`http://host:port`, or `https` for an encrypted one."""
    host, scheme = asked_host(server), "https" if server.tls else "http"
    return f"{scheme}://[{host}]:{server.port}" if ":" in host else f"{scheme}://{host}:{server.port}"


def asked_host(server: Server) -> str:
    """The host to ask at: a server on every address is asked on loopback."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(server.host, server.host)


def is_loopback(host: str) -> bool:
    """Whether a host is this machine, or is asked there."""
    return host in {"localhost", "0.0.0.0", "::", "::1"} or host.startswith("127.")


class _NotOurs(Exception):
    """The endpoint answers, but wrongly: the diagnosis says how."""

    def __init__(self, name: str, evidence: Sequence[str], remedy: str) -> None:
        super().__init__(name)
        self.diagnosis = Diagnosis(name, tuple(evidence), remedy)


class _Refused(_NotOurs):
    """It refuses the request as such."""


@dataclass(frozen=True, slots=True)
class _Found:
    models: Any
    probe: Mapping[str, Any]


class _Asking:
    """The questions whose answers make a server ready; runs beside the watch over log and process."""

    def __init__(
        self, engine: Engine, server: Server, dialect: Dialect, prove_ours: Callable[[], None], enough: Event
    ) -> None:
        self.engine = engine
        self.server = server
        self.dialect = dialect
        self.prove_ours = prove_ours
        self.enough = enough
        self.url = base_url(server)

    def until_ready(self, deadline_s: float) -> _Found:
        """Ask until the server is ready.

        Raises:
            _NotOurs: something answers, but not as it must.
            TimeoutError: nothing did in time.
        """
        until = time.monotonic() + deadline_s
        with control_session(self.server) as session:
            while not self._healthy(session):
                if self.enough.wait(_ASK_S) or time.monotonic() >= until:
                    raise TimeoutError
            self.prove_ours()
            models = self._models(session)
            return _Found(models, self._generates(session, openai.model_names(models)))

    def _healthy(self, session: requests.Session) -> bool:
        try:
            return session.get(self.url + self.engine.ready_path, timeout=(2.0, _ANSWER_S)).ok
        except requests.exceptions.SSLError as error:
            raise _NotOurs("its encryption cannot be trusted", [str(error)], _TRUST) from error
        except requests.RequestException:
            return False

    def _models(self, session: requests.Session) -> Any:
        """What `/v1/models` lists; the name that requests will use must be there."""
        try:
            found = session.get(self.url + self.engine.models_path, timeout=_ANSWER_S).json()
        except (requests.RequestException, ValueError) as error:
            raise _NotOurs(f"no answer from {self.engine.models_path}", [str(error)], _READ_LOG) from error
        entries = found.get("data") if isinstance(found, dict) else None
        names = [str(entry.get("id")) for entry in entries or [] if isinstance(entry, dict)]
        wanted = self.server.model.name if self.server.model else None
        if wanted is not None and names and wanted not in names:
            raise _NotOurs(
                f"it serves another model than `{wanted}`",
                [f"{self.engine.models_path} lists {', '.join(names)}"],
                "is another server on this port? does the engine take the model's name from another flag?",
            )
        return found

    def _generates(self, session: requests.Session, names: Sequence[str]) -> dict[str, Any]:
        """One real generation; a server that is healthy and cannot generate is not ready."""
        name = self.server.model.name if self.server.model else next(iter(names), "default")
        prompt: Any = "Hello" if self.dialect != "chat" else [{"role": "user", "content": "Hello"}]
        began = time.monotonic()
        path, body = self.engine.request(self.dialect, prompt, _PROBE, name)
        try:
            events = self._asked(session, path, body)
        except _Refused:  # a field that not every server knows; whether the workload may send it shows in its warm-up
            path, body = self.engine.request(self.dialect, prompt, replace(_PROBE, ignore_eos=False), name)
            events = self._asked(session, path, body)
        errors = [
            json.dumps(event["error"])[:500] for event in events if isinstance(event, dict) and event.get("error")
        ]
        if errors or not any(_generated(event) for event in events):
            shown = errors or [json.dumps(event)[:200] for event in events[-3:]] or ["an empty stream"]
            raise _NotOurs("the first generation gave no token", shown, _READ_LOG)
        return {"path": path, "events": len(events), "seconds": round(time.monotonic() - began, 4)}

    def _asked(self, session: requests.Session, path: str, body: Mapping[str, Any]) -> list[Any]:
        """The events of one generation.

        Raises:
            _Refused: the server does not like the request.
            _NotOurs: it failed otherwise.
        """
        try:
            with session.post(self.url + path, json=body, stream=True, timeout=_GENERATE_S) as answer:
                if answer.ok:
                    return list(_events(answer))
                kind = _Refused if answer.status_code in {400, 422} else _NotOurs
                said = answer.text[:500]
                raise kind(f"the first generation got HTTP {answer.status_code}", [said], _READ_LOG)
        except requests.RequestException as error:
            raise _NotOurs("the first generation failed", [str(error)], _READ_LOG) from error


_READ_LOG = "read the server's log around this time"
_TRUST = "name its authority with `ca_file`, or say `insecure`; is it encrypted at all?"


class _Start:
    """One attempt to bring a server up."""

    def __init__(
        self,
        engine: Engine,
        server: Server,
        folder: Path,
        deadline_s: float,
        watchers: Watchers,
        secrets: Sequence[str],
        dialect: Dialect,
    ) -> None:
        self.engine = engine
        self.server = server
        self.folder = folder
        self.deadline_s = deadline_s
        self.watchers = watchers
        self.secrets = secrets
        self.dialect = dialect
        self.log = privacy.private_folder(folder) / "server.log"
        self.log_offset = self.log.stat().st_size if self.log.exists() else 0
        self.tail = logs.LogTail(self.log, self.log_offset)
        self.lines: list[logs.LogLine] = []
        self.reached: list[Reached] = []
        self.began = time.monotonic()
        self.oom_kills = diagnose.oom_kills()

    def run(self, marker: str) -> Launched:
        """Start, watch, and return a ready server, or clean up and say why not."""
        command = self.engine.command(self.server)
        command = replace(command, argv=(*command.argv, *self.server.unchecked), cpus=self.server.cpus)
        process = supervise.start(
            command,
            log=self.log,
            marker=marker,
            cwd=self.folder,
            host=self.server.host,
            listens_on=[self.server.port],
            secrets=self.secrets,
        )
        try:
            found = self._watch(process)
        except BaseException as error:
            policy = AT_ONCE if isinstance(error, KeyboardInterrupt) else self.engine.stop
            _stop(process, policy, self.watchers.ranks)
            raise
        hidden = self._hidden(process)
        return Launched(
            engine=self.engine,
            server=self.server,
            process=process,
            log=self.log,
            ready_s=round(time.monotonic() - self.began, 3),
            argv=tuple(privacy.redact_argv(command.argv, hidden)),
            variables=privacy.redact_variables(_without_mark(process.variables), hidden),
            withheld=tuple(privacy.withheld(process.variables)),
            milestones=tuple(self.reached),
            models=privacy.redact_json(found.models, hidden),
            probe=found.probe,
            oom_kills=self.oom_kills,
            log_offset=self.log_offset,
            secrets=hidden,
            ranks=self.watchers.ranks,
        )

    def _watch(self, process: Process) -> _Found:
        """Watch log, process and clock until the questions are answered."""
        enough = Event()
        asking = _Asking(self.engine, self.server, self.dialect, lambda: self._prove_ours(process), enough)
        pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ready")
        try:
            future = pool.submit(asking.until_ready, self.deadline_s)
            for _ in self._looks(future):
                self._read_log()
                if self.watchers.stop.is_set():
                    said = f"stopped while `{self.engine.name}` was starting"
                    raise Interrupted(said, hint="go on with `--resume`")
                if (diagnosis := self._trouble(process)) is not None:
                    raise self._failed(process, diagnosis)
            self._read_log()
            return future.result()
        except _NotOurs as wrong:
            raise self._failed(process, self._root_of(process, wrong.diagnosis)) from wrong
        except TimeoutError as late:
            raise self._failed(process, self._late()) from late
        finally:
            enough.set()
            pool.shutdown(wait=False, cancel_futures=True)

    def _looks(self, future: "Future[_Found]") -> Iterator[None]:
        while not future.done():
            yield
            if time.monotonic() - self.began > self.deadline_s:
                raise TimeoutError
            wait_for([future], timeout=_LOOK_S)

    def _read_log(self) -> None:
        fresh = self.tail.fresh()
        self.lines += fresh
        for line in fresh:
            for milestone in self.engine.milestones:
                known = any(reached.name == milestone.name for reached in self.reached)
                if not known and re.search(milestone.regex, line.text):
                    reached = Reached(milestone.name, round(time.monotonic() - self.began, 3), line.text)
                    self.reached.append(reached)
                    self.watchers.on_milestone(reached)

    def _trouble(self, process: Process) -> Diagnosis | None:
        """Whether waiting is over: the server or a rank of it died, or wrote a line after which it never serves."""
        if process.poll() is not None:
            return self._explain(process)
        ranks = self.watchers.ranks
        if ranks is not None and ranks.lost():
            return ranks.cause(None, "start")
        signatures: tuple[Signature, ...] = (*self.engine.signatures, *GENERIC)
        if diagnose.decisive(self.lines, signatures):
            process.wait(_LAST_WORDS_S)
            return self._explain(process)
        return None

    def _explain(self, process: Process) -> Diagnosis:
        time.sleep(_LOOK_S)  # the reaper may still be writing the last lines down
        self._read_log()
        death = Death(process.poll(), "start", diagnose.oom_kills() - self.oom_kills)
        own = diagnose.explain(self.lines, self.engine.signatures, death)
        ranks = self.watchers.ranks
        return (ranks.cause(own, "start") or own) if ranks else own

    def _root_of(self, process: Process, answered: Diagnosis) -> Diagnosis:
        """A wrong answer is a symptom where the server dies, or any process of it wrote why it will: that says more.

        A front end may live on without its engine, and hand out errors.
        """
        ended = process.wait(_LAST_WORDS_S)
        self._read_log()
        dying = ended is not None or diagnose.decisive(self.lines, (*self.engine.signatures, *GENERIC))
        return self._explain(process) if dying else answered

    def _late(self) -> Diagnosis:
        self._read_log()
        own = diagnose.hung(self.lines, Death(None, "start"), self.deadline_s)
        ranks = self.watchers.ranks
        return ranks.late(self.deadline_s, own) if ranks else own

    def _failed(self, process: Process, diagnosis: Diagnosis) -> LaunchFailed:
        ranks = self.watchers.ranks
        policy = self.engine.stop if process.poll() is None or ranks else AT_ONCE
        report = _stop(process, policy, ranks)
        said = tuple(privacy.redact_text(line, self._hidden(process)) for line in diagnosis.evidence)
        what = f"server `{self.engine.name}` did not start"
        return LaunchFailed(what, replace(diagnosis, evidence=said), report, self.log)

    def _hidden(self, process: Process) -> dict[str, str]:
        return privacy.secret_values(self.secrets, process.variables)

    def _prove_ours(self, process: Process) -> None:
        """The process that listens must be one of ours."""
        if ports.listens(process.pids(), self.server.port):
            return
        strangers = [str(holder) for holder in ports.holders(self.server.port)]
        raise _NotOurs(
            f"port {self.server.port} is answered by a process that is not this server",
            strangers or ["its holder is not visible to us"],
            "leave the port out of the recipe to get one that is free",
        )


def _without_mark(variables: Mapping[str, str]) -> dict[str, str]:
    """The mark differs in every launch, and configures nothing."""
    return {name: value for name, value in variables.items() if name != reaper.MARK}


def _events(answer: requests.Response) -> Iterator[Any]:
    """The JSON of a stream's `data:` lines, or the one JSON of an answer that is no stream."""
    if "text/event-stream" not in answer.headers.get("Content-Type", ""):
        yield answer.json()
        return
    for line in answer.iter_lines():
        data = line.removeprefix(b"data:").strip()
        if line.startswith(b"data:") and data != b"[DONE]":
            yield json.loads(data)


def _generated(event: Any) -> bool:
    """Whether an event carries something generated, in any dialect: text, a token count, or a finish for length."""
    if not isinstance(event, dict):
        return False
    choices = event.get("choices") or []
    texts = [event.get("text"), event.get("content")]
    for choice in choices:
        delta = choice.get("delta") or choice.get("message") or {}
        texts += [choice.get("text"), delta.get("content"), delta.get("reasoning_content"), delta.get("reasoning")]
    counted = (event.get("usage") or {}).get("completion_tokens") or 0
    return counted > 0 or any(texts)

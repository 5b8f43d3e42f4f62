"""How the ranks of a server that spans machines find each other and hear of each other: files in a shared folder.

    launches/NN-ARM/ranks/
      rank-0.json       rank 0's word: where to meet, and what the others are to do; its `beat` counts up while it lives
      rank-N.json       what became of rank N: waiting, running, dead (and why), stopped (and how clean)
      rank-N/           its server's log

Each file has one writer and is replaced whole. Clocks of different machines are never compared: a rank lives while its
beat goes on, by the clock of who looks. Every writer beats before it looks, in the folder it looks into, because an NFS
client that changed a folder itself asks the server what is in it and does not answer from memory.
"""

import contextlib
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

from harness.engines.engine import Engine, Rank, Server, StopPolicy
from harness.errors import HarnessError, InputError
from harness.files import write_json
from harness.run import ports, privacy
from harness.run.diagnose import Diagnosis, Phase
from harness.run.supervise import Process, RankStop, StopReport

BEAT_S = 1.0
SILENT_S = 30.0  # a beat that is older says that its machine, its agent or the folder's server is gone
ADDRESS = "HARNESS_NODE_ADDRESS"  # how the other machines reach this one: an interface, or an address
_LOOK_S = 0.5
_SETTLE_S = 3.0  # after a first death: how long the other ranks may take to say what they saw
_STOP_EXTRA_S = 75.0  # beside the engine's own grace: TERM and KILL, ports and GPU memory, and the way here
_TRIES = 50


class Voice:
    """One writer's file: what it says, and a beat that goes on by itself."""

    def __init__(self, path: Path, said: Mapping[str, Any]) -> None:
        self._path = path
        self._said = dict(said)
        self._beat = 0
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._go_on, name="beat", daemon=True)

    def start(self) -> None:
        """Say the first word, and beat from then on."""
        privacy.private_folder(self._path.parent)
        self.say()
        self._thread.start()

    def say(self, **facts: Any) -> None:
        """Change what is said; it is written at once.

        Raises:
            InputError: it cannot be written.
        """
        with self._lock:
            self._said |= facts
            self._beat += 1
            write_json(self._path, {**self._said, "beat": self._beat}, mode=0o600)

    def end(self) -> None:
        """Beat no more; what was said last stands."""
        self._over.set()
        self._thread.join()

    def _go_on(self) -> None:
        while not self._over.wait(BEAT_S):
            with contextlib.suppress(InputError):  # a full disk may be emptied again; silence is noticed by the others
                self.say()


class Ear:
    """What another rank says, and for how long it has said nothing new."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._text: str | None = None
        self._changed = time.monotonic()
        self.said: dict[str, Any] = {}
        self.moved = False  # whether it has been seen to change: it is not what an earlier run left

    def listen(self) -> dict[str, Any]:
        """Its word now; empty where there is none yet."""
        try:
            text = self._path.read_text()
            said = json.loads(text)
        except (OSError, ValueError):
            return self.said
        if text != self._text:
            self.moved = self.moved or self._text is not None
            self._text, self._changed, self.said = text, time.monotonic(), said
        return self.said

    @property
    def silent_s(self) -> float:
        """Seconds since it last said something new, or since we began to listen."""
        return time.monotonic() - self._changed


class Head:
    """Rank 0's side of one launch. Use it as a context manager: leaving it sends the other ranks home."""

    def __init__(self, folder: Path, nodes: int, *, silent_s: float = SILENT_S) -> None:
        self.folder = folder / "ranks"
        self.nodes = nodes
        self._silent_s = silent_s
        self._session = secrets.token_hex(8)
        self._attempt = 0
        self._ordered = False
        self._voice = Voice(
            self.folder / "rank-0.json",
            {"session": self._session, "job": job(), "node": node(), "nodes": nodes, "attempt": 0, "order": "wait"},
        )
        self._ears = {rank: Ear(self.folder / f"rank-{rank}.json") for rank in range(1, nodes)}
        self._next_look = 0.0
        self._lost: dict[int, Diagnosis] = {}
        self._cause: Diagnosis | None = None

    def __enter__(self) -> Self:
        self._voice.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._voice.end()
        self._voice.say(order="over")

    def call(self, engine: Engine, server: Server) -> Server:
        """Rank 0's own part of a new server, after telling the others where to meet it.

        Raises:
            InputError: no port to meet at is free.
        """
        self._attempt += 1
        self._ordered = False
        self._lost, self._cause = {}, None
        host = address()
        rank = Rank(0, self.nodes, host, free_ports(host, engine.rank_ports))
        self._voice.say(attempt=self._attempt, order="start", host=rank.host, port=rank.port)
        return placed(engine, server, rank)

    def lost(self) -> bool:
        """Whether some rank is gone; cheap enough to be asked all the time."""
        if not self._lost and not self._ordered and time.monotonic() >= self._next_look:
            self._look()
        return bool(self._lost)

    def cause(self, own: Diagnosis | None, phase: Phase) -> Diagnosis | None:
        """Why the whole server went, from rank 0's own diagnosis (None while its part lives) and the others'.

        The first end seen that is not another's doing; where every end is, the first one seen. An end of another rank
        that is known by now was seen while rank 0's part still lived.
        """
        if self._cause is None:
            self._cause = self._first(own)
        return replace(self._cause, phase=phase) if self._cause else None

    def _first(self, own: Diagnosis | None) -> Diagnosis | None:
        ours = [] if own is None else [replace(own, where=f"rank 0 of {self.nodes} ({node()})")]
        seen = [*list(self._lost.values()), *ours]
        until = time.monotonic() + _SETTLE_S
        while time.monotonic() < until and all(found.of_a_peer for found in seen):
            time.sleep(0.1)
            self._look()
            seen = [*ours, *list(self._lost.values())]  # as a list: the level's watch looks, too, on its own thread
        return next((found for found in seen if not found.of_a_peer), seen[0] if seen else None)

    def absent(self) -> list[int]:
        """Ranks that have not said a word in this launch."""
        return [rank for rank, ear in self._ears.items() if ear.listen().get("session") != self._session]

    def late(self, waited_s: float, own: Diagnosis) -> Diagnosis:
        """Why the server was not ready in time: ranks that never came say more than rank 0's own last lines."""
        missing = self.absent()
        if not missing:
            return replace(own, where=f"rank 0 of {self.nodes} ({node()})")
        names = ", ".join(map(str, missing))
        return Diagnosis(
            f"rank {names} of {self.nodes} did not come within {waited_s:.0f} s",
            own.evidence,
            "did its machine's agent start, and does it see the run's folder?",
            retry=True,
        )

    def stop(self, process: Process, policy: StopPolicy) -> StopReport:
        """Stop every rank, rank 0's `process` too, and hear that each is clean."""
        if process.report is not None:
            return process.report
        self._ordered = True
        with contextlib.suppress(InputError):  # a full disk: the others end when rank 0's part does, or falls silent
            self._voice.say(order="stop", urgent=not policy.signals)
        try:
            process.stop(policy)
        finally:  # an interrupt stops it all the same
            report: StopReport | None = process.report
            if report is not None:
                others = self._stopped(len(policy.signals) * policy.grace_s + _STOP_EXTRA_S)
                report = process.report = replace(report, ranks=others)
        assert report is not None
        return report

    def facts(self) -> list[dict[str, Any]]:
        """What the record says of the other ranks: where each ran, and what was executed there."""
        told = [(rank, ear.listen()) for rank, ear in self._ears.items()]
        return [
            {
                "rank": rank,
                **{name: said.get(name) for name in ("node", "pid", "port", "argv", "variables", "cpus", "log")},
            }
            for rank, said in told
        ]

    def _look(self) -> None:
        self._next_look = time.monotonic() + _LOOK_S
        for rank, ear in self._ears.items():
            if rank not in self._lost and (found := self._trouble(rank, ear)) is not None:
                self._lost[rank] = found

    def _trouble(self, rank: int, ear: Ear) -> Diagnosis | None:
        said = ear.listen()
        if said.get("session") != self._session:
            return None
        where = f"rank {rank} of {self.nodes} ({said['node']})"
        if said["state"] in {"dead", "refused"} and said["attempt"] in {0, self._attempt}:
            return self._placed(read_diagnosis(said["diagnosis"]), rank, where)
        if said["state"] == "stopped" and said["attempt"] == self._attempt:
            return Diagnosis("stopped from outside", (), "its machine's agent was told to stop", where=where)
        if ear.silent_s > self._silent_s:
            seen = f"nothing was heard of it for {ear.silent_s:.0f} s"
            return Diagnosis("silent", (seen,), "is its machine up, and does it see the run's folder?", where=where)
        return None

    def _placed(self, found: Diagnosis, rank: int, where: str) -> Diagnosis:
        """A rank's diagnosis as everybody reads it: which rank, and where its own log is."""
        log = self.folder / f"rank-{rank}" / "server.log"
        remedy = f"{found.remedy}\nthat rank's log: {log}" if log.exists() else found.remedy
        evidence = tuple(f"rank {rank}: {line}" for line in found.evidence)
        return replace(found, where=where, evidence=evidence, remedy=remedy)

    def _stopped(self, deadline_s: float) -> tuple[RankStop, ...]:
        """What each rank that took part says of its end."""
        until = time.monotonic() + deadline_s
        absent = self.absent()
        waiting = {rank: ear for rank, ear in self._ears.items() if rank not in absent}
        found: dict[int, RankStop] = {}
        while waiting and time.monotonic() < until:
            for rank, ear in list(waiting.items()):
                if (report := self._report(rank, ear)) is not None:
                    found[rank] = report
                    del waiting[rank]
            time.sleep(0.1 if waiting else 0.0)
        for rank, ear in waiting.items():
            found[rank] = _unheard(rank, ear, f"it did not report a clean stop within {deadline_s:.0f} s")
        return tuple(found[rank] for rank in sorted(found))

    def _report(self, rank: int, ear: Ear) -> RankStop | None:
        said = ear.listen()
        if said["state"] == "stopped" and said["attempt"] == self._attempt:
            return RankStop(rank, said["node"], said["stop"]["exit_code"], tuple(said["problems"]))
        if ear.silent_s > self._silent_s:
            return _unheard(rank, ear, f"nothing was heard of it for {ear.silent_s:.0f} s")
        return None


class Follower:
    """A rank above 0. Use it as a context manager: leaving it ends its beat."""

    def __init__(self, folder: Path, rank: int, nodes: int, *, silent_s: float = SILENT_S) -> None:
        self.folder = folder / "ranks"
        self.rank = rank
        self.nodes = nodes
        self._silent_s = silent_s
        self._attempt = 0
        self._answered = 0  # the last one whose end rank 0 has been told
        self._ear = Ear(self.folder / "rank-0.json")
        said = {"session": "", "node": node(), "rank": rank, "attempt": 0, "state": "waiting"}
        self._voice = Voice(self.folder / f"rank-{rank}.json", said)

    def __enter__(self) -> Self:
        self._voice.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._voice.end()

    def met(self) -> bool:
        """Whether rank 0 of this very launch has been heard; from then on it hears us."""
        head = self._ear.listen()
        if not (self._ear.moved or (head and job() and head.get("job") == job())):
            return False
        self._voice.say(session=head["session"])
        return True

    def called(self) -> Rank | None:
        """Where to meet rank 0 for a server that has not been started here yet; None while there is none."""
        head = self._ear.listen()
        if head["order"] != "start" or head["attempt"] <= self._attempt:
            return None
        self._attempt = head["attempt"]
        return Rank(self.rank, self.nodes, head["host"], head["port"])

    def dismissed(self) -> None:
        """Answer an order to stop where nothing runs here: it was never started, or refused."""
        head = self._ear.listen()
        if head["order"] == "stop" and head["attempt"] > self._answered:
            self._attempt = self._answered = head["attempt"]
            self._voice.say(attempt=self._attempt, state="stopped", stop={"exit_code": None}, problems=[])

    @property
    def over(self) -> bool:
        """Whether rank 0 has sent everyone home."""
        return bool(self._ear.listen()["order"] == "over")

    @property
    def ordered_to_stop(self) -> bool:
        """Whether the server that was called for last is to be stopped."""
        head = self._ear.listen()
        return head["order"] in {"stop", "over"} or head["attempt"] > self._attempt

    @property
    def urgent(self) -> bool:
        """Whether it is to be stopped at once."""
        return bool(self._ear.listen().get("urgent"))

    @property
    def abandoned(self) -> bool:
        """Whether nothing has been heard of rank 0 for too long."""
        self._ear.listen()
        return self._ear.silent_s > self._silent_s and not self.over

    def running(self, **facts: Any) -> None:
        """Say what was started here."""
        self._voice.say(attempt=self._attempt, state="running", diagnosis=None, stop=None, problems=[], **facts)

    def dead(self, diagnosis: Diagnosis) -> None:
        """Say that this rank's server is gone, and why."""
        self._voice.say(state="dead", diagnosis=asdict(diagnosis))

    def refused(self, error: HarnessError) -> None:
        """Say why nothing can be started here."""
        found = Diagnosis(error.message, error.details, error.hint or "")
        self._voice.say(attempt=self._attempt, state="refused", diagnosis=asdict(found))

    def stopped(self, report: StopReport) -> None:
        """Say how this rank's server was stopped."""
        self._answered = self._attempt
        self._voice.say(state="stopped", stop=report.to_json(), problems=report.problems())


def placed(engine: Engine, server: Server, rank: Rank) -> Server:
    """One machine's part of a server that spans several; what the recipe says of the machine's address wins."""
    own = {engine.address_variable: address()} if engine.address_variable else {}
    args = {**server.args, **engine.rank_args(rank)}
    return replace(server, args=args, variables={**own, **server.variables})


def read_diagnosis(data: Mapping[str, Any]) -> Diagnosis:
    """What a rank wrote as `asdict(diagnosis)`."""
    return Diagnosis(**{**data, "evidence": tuple(data["evidence"]), "also": tuple(data["also"])})


def address() -> str:
    """How the other machines reach this one: as told, else what its name stands for, else its way out.

    A site tells an interface, which is called alike on all its machines. A name that stands for loopback, as in many an
    /etc/hosts, helps nobody else and is passed over.
    """
    if told := os.environ.get(ADDRESS):
        named = sorted(psutil.net_if_addrs().get(told, ()), key=lambda one: one.family)  # IPv4 before IPv6
        return next((one.address for one in named if one.family in {socket.AF_INET, socket.AF_INET6}), told)
    with contextlib.suppress(OSError):
        for _, _, _, _, found in socket.getaddrinfo(socket.gethostname(), 0, type=socket.SOCK_STREAM):
            host = str(found[0])
            if not host.startswith("127.") and host != "::1" and ports.is_free(host, 0):
                return host
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as trial:
        trial.connect(("192.0.2.1", 9))  # RFC 5737: nobody's address; nothing is sent
        return str(trial.getsockname()[0])
    return "127.0.0.1"


def free_ports(host: str, count: int) -> int:
    """The first of `count` consecutive ports that nobody listens on, on this address or on all.

    Raises:
        InputError: there are none.
    """
    everywhere = "::" if ":" in host else "0.0.0.0"
    for _ in range(_TRIES):
        first = ports.choose_port(host, None)
        if all(ports.is_free(place, first + step) for step in range(count) for place in (host, everywhere)):
            return first
    raise InputError(f"no {count} consecutive free ports found on {host} in {_TRIES} tries")


def node() -> str:
    """What this machine is called, by Slurm where it runs us."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def job() -> str:
    """What all machines of one allocation know and no other run does; empty outside one."""
    number = os.environ.get("SLURM_JOB_ID", "")
    return f"{number}.{os.environ.get('SLURM_RESTART_COUNT', '0')}" if number else ""


def _unheard(rank: int, ear: Ear, why: str) -> RankStop:
    return RankStop(rank, ear.said["node"], None, (why,))

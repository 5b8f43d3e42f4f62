"""Starting servers so that none of them outlives its use, and proving that it did not.

A server never runs below the harness itself but below a `reaper` of its own, which keeps its log and ends it when the
harness dies. `Process.stop` asks politely, then firmly, and then looks: nobody left, ports free, GPU memory back, no
lock left behind. `leftovers` finds what an earlier harness left, by the mark in the environment or by the roster.
"""

import contextlib
import json
import os
import re
import secrets as randomness
import select
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from harness.engines.engine import Command, StopPolicy
from harness.errors import ServerError
from harness.run import gpu, locks, ports, privacy, reaper
from harness.run.ports import Holder

AT_ONCE = StopPolicy((), 0.0)  # for who will not wait: everyone gets TERM, and soon KILL
_START_DEADLINE_S = 20.0
_TERM_GRACE_S = 5.0
_VERIFY_S = 30.0
_GPU_MARGIN = 512 << 20  # what a display or another context may have moved meanwhile


@dataclass(frozen=True, slots=True)
class Sent:
    """A signal of a stop: to which pids, seconds after the stop began."""

    signal: str
    to: tuple[int, ...]
    at_s: float


@dataclass(frozen=True, slots=True)
class RankStop:
    """How another machine's part of the same server was stopped, as that machine's own agent verified it."""

    rank: int
    node: str
    exit_code: int | None
    problems: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StopReport:
    """How a stop went, as verified afterwards.

    `exit_code` is the server's, negative for a signal, None when nobody could see it. `gpu` is "no GPU", "back", or
    what is still held. `locks` are files the dead left behind and we removed, `lost_lines` what the log misses because
    the disk was full. `ranks` are the other machines' of a server that spans several.
    """

    exit_code: int | None
    signals: tuple[Sent, ...]
    survivors: tuple[Holder, ...]
    busy_ports: tuple[str, ...]
    gpu: str
    locks: tuple[str, ...]
    seconds: float
    lost_lines: int = 0
    ranks: tuple[RankStop, ...] = ()

    @property
    def ports_free(self) -> bool:
        """Whether nobody of ours holds a port any more."""
        return not self.busy_ports

    @property
    def ok(self) -> bool:
        """Whether everything is as it was before the start."""
        return not self.problems()

    def problems(self) -> list[str]:
        """What remains, a line each."""
        left = [f"still running: {holder}" for holder in self.survivors]
        left += [f"still held: {line}" for line in self.busy_ports]
        left += [] if self.gpu in {"no GPU", "back"} else [f"GPU memory not back: {self.gpu}"]
        return left + [f"rank {other.rank} ({other.node}): {line}" for other in self.ranks for line in other.problems]

    def error(self) -> ServerError | None:
        """What remains as an error, None when nothing does."""
        if self.ok:
            return None
        return ServerError(
            f"the server was stopped, but not all of it is gone after {self.seconds:.0f} s",
            details=self.problems(),
            hint="`harness clean` ends what is left; a process in state D waits for its driver",
        )

    def to_json(self) -> dict[str, Any]:
        """As stored in `launch.json`; `ranks` only where there are others."""
        told = {**asdict(self), "ports_free": self.ports_free, "ok": self.ok}
        return told if self.ranks else {name: value for name, value in told.items() if name != "ranks"}


class Process:
    """A server under supervision. Use it as a context manager, or call `stop`."""

    def __init__(
        self, guard: "subprocess.Popen[bytes]", mark: str, log: Path, variables: Mapping[str, str], watched: "Watched"
    ) -> None:
        self._guard = guard
        self._received = b""
        self._stopped = False
        self._signals: list[Sent] = []
        self._lost = 0
        self._exit: int | None = None
        self._failure: str | None = None
        self.mark = mark
        self.log = log
        self.variables = variables  # as the server got them, secrets included: not to be stored
        self.watched = watched
        self.pid = 0
        self.report: StopReport | None = None

    def begin(self, order: Mapping[str, Any]) -> None:
        """Give the reaper its order and wait until the server is executed.

        Raises:
            ServerError: it could not be.
        """
        self._order(order)
        until = time.monotonic() + _START_DEADLINE_S
        while not self.pid and not self._failure and self._guard.poll() is None and time.monotonic() < until:
            self._listen(0.5)
        self._listen(0.0)
        if not self.pid:
            self._guard.kill()
            self._sweep()
            reason = self._failure or f"its reaper ended with {self._guard.returncode}"
            raise ServerError(f"the server could not be started: {reason}", details=[privacy.show_argv(order["argv"])])

    def poll(self) -> int | None:
        """The server's exit code, None while it runs. A server whose reaper was killed has died with it (-9)."""
        self._listen(0.0)
        if self._exit is None and self._guard.poll() is not None:
            self._exit = -9
        return self._exit

    def wait(self, timeout_s: float) -> int | None:
        """Wait for the server to end by itself; None when it still runs after `timeout_s`."""
        until = time.monotonic() + timeout_s
        while self.poll() is None and (rest := until - time.monotonic()) > 0:
            self._listen(min(rest, 0.5))
        return self._exit

    def descendants(self) -> list[Holder]:
        """Everyone alive who belongs to this server, itself included."""
        return [holder for pid in sorted(self._family()) if (holder := ports.describe(pid))]

    def pids(self) -> set[int]:
        """The pids of `descendants`."""
        return self._family()

    def crashed_children(self) -> list[str]:
        """Children of the living server that a signal ended and that nobody waited for.

        A server may go on answering its health endpoint with its workers dead (sglang#21486: NCCL aborts a scheduler).
        """
        table = reaper.scan()
        dead = [table[pid] for pid in reaper.below(self._guard.pid, table) if not table[pid].alive]
        crashed = [seen for seen in dead if seen.pid != self.pid and os.WIFSIGNALED(seen.status)]
        orphans = {seen.pid for seen in crashed if seen.parent == self._guard.pid}
        return [
            f"pid {seen.pid} ended by {signal.Signals(os.WTERMSIG(seen.status)).name}, unnoticed by pid {seen.parent}"
            for seen in crashed
            if seen.pid not in orphans
        ]

    def stop(
        self, policy: StopPolicy | None = None, *, term_grace_s: float = _TERM_GRACE_S, verify_s: float = _VERIFY_S
    ) -> StopReport:
        """Stop the server and everything it started, then verify; a second call returns the same report.

        Args:
            policy: which signals the server itself gets first, and how long each may take.
            term_grace_s: whoever is left then gets SIGTERM and, so much later, SIGKILL.
            verify_s: how long ports and GPU memory may take to come back after the last one died.

        An interrupt while this waits kills at once, still verifies, and is raised at the end.
        """
        if self.report is not None:
            return self.report
        policy, began = policy or StopPolicy(), time.monotonic()
        self._order({"stop": list(policy.signals), "grace_s": policy.grace_s, "term_grace_s": term_grace_s})
        interrupted = self._await_end(len(policy.signals) * policy.grace_s + term_grace_s + 20)
        survivors = self._sweep()
        busy, memory = self.watched.settle(survivors, verify_s)
        holders = [holder for pid in sorted(survivors) if (holder := ports.describe(pid))]
        self.report = StopReport(
            exit_code=self.poll(),
            signals=tuple(self._signals),
            survivors=tuple(holders),
            busy_ports=tuple(busy),
            gpu=memory,
            locks=tuple(locks.remove_stale(self.watched.lock_roots, since=self.watched.since)) if not holders else (),
            seconds=round(time.monotonic() - began, 3),
            lost_lines=self._lost,
        )
        if interrupted:
            raise KeyboardInterrupt
        return self.report

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _family(self) -> set[int]:
        table = reaper.scan()
        found = reaper.below(self._guard.pid, table) if self._guard.poll() is None else set()
        found |= {pid for pid in table if pid != self._guard.pid and reaper.mark_of(pid) == self.mark}
        found |= {pid for pid, start in _members(roster_of(self.mark)) if pid in table and table[pid].start == start}
        for pid in list(found):
            found |= reaper.below(pid, table)
        own = {os.getpid(), self._guard.pid}
        return {pid for pid in found - own if pid in table and table[pid].alive}

    def _order(self, order: Mapping[str, Any]) -> None:
        assert self._guard.stdin is not None
        with contextlib.suppress(OSError, ValueError):  # a reaper that is gone is noticed by `poll`
            self._guard.stdin.write(json.dumps(order).encode() + b"\n")

    def _await_end(self, deadline_s: float) -> bool:
        """Wait for the reaper's last word; returns whether the user interrupted."""
        until, interrupted = time.monotonic() + deadline_s, False
        while not self._stopped and self._guard.poll() is None and time.monotonic() < until:
            try:
                self._listen(0.5)
            except KeyboardInterrupt:
                interrupted = True
                self._order({"kill": True})
        return interrupted

    def _sweep(self) -> set[int]:
        """After the reaper is done: end what it could not, if it was killed; returns who survives."""
        if not self._stopped:
            table = reaper.scan()
            end([table[pid] for pid in self._family() if pid in table], term_grace_s=1.0)
            self._guard.kill()
        assert self._guard.stdin is not None
        assert self._guard.stdout is not None
        with contextlib.suppress(OSError):
            self._guard.stdin.close()
        self._listen(0.0)
        self._guard.wait()
        self._guard.stdout.close()
        survivors = self._family()
        if not survivors:
            roster_path(self.mark).unlink(missing_ok=True)
        return survivors

    def _listen(self, timeout_s: float) -> None:
        """Take in what the reaper has reported, waiting up to `timeout_s` for it to say something."""
        stdout = self._guard.stdout
        if stdout is None or stdout.closed:
            return
        while select.select([stdout], [], [], timeout_s)[0]:
            data = os.read(stdout.fileno(), 1 << 16)
            if not data:
                time.sleep(min(timeout_s, 0.05))
                return
            *lines, self._received = (self._received + data).split(b"\n")
            for line in lines:
                self._take(json.loads(line))
            timeout_s = 0.0

    def _take(self, report: dict[str, Any]) -> None:
        if "started" in report:
            self.pid = report["started"]
        elif "failed" in report:
            self._failure = report["failed"]
        elif "exited" in report:
            self._exit = report["exited"]
        elif "sent" in report:
            self._signals.append(Sent(report["sent"], tuple(report["to"]), report["at_s"]))
        elif "stopped" in report:
            self._stopped = True
            self._lost = report["lost"]


@dataclass(frozen=True, slots=True)
class Watched:
    """What must be as before once a server is gone: its address, the GPUs' used bytes, lock files."""

    host: str
    ports: tuple[int, ...]
    gpu_before: tuple[int, ...] | None
    lock_roots: tuple[Path, ...]
    since: float

    def settle(self, survivors: Iterable[int], deadline_s: float) -> tuple[list[str], str]:
        """Wait for ports and GPU memory to come back; returns the ports that did not, and the word on the GPUs."""
        until = time.monotonic() + deadline_s
        while True:
            busy, memory = self._busy(set(survivors)), self._gpu()
            if (not busy and memory in {"no GPU", "back"}) or time.monotonic() >= until:
                return busy, memory
            time.sleep(0.2)

    def _busy(self, survivors: set[int]) -> list[str]:
        """Ports still held; one that a stranger took meanwhile is the stranger's."""
        lines = []
        for port in self.ports:
            if ports.is_free(self.host, port):
                continue
            known = ports.holders(port)
            if not known or any(holder.pid in survivors for holder in known):
                lines.append(f"port {port}: {'; '.join(map(str, known)) or 'its holder is not visible to us'}")
        return lines

    def _gpu(self) -> str:
        if self.gpu_before is None:
            return "no GPU"
        lines = []
        for found, before in zip(gpu.gpus(), self.gpu_before, strict=False):
            if found.memory_used > before + _GPU_MARGIN:
                users = [str(ports.describe(pid) or f"pid {pid}") for pid, _ in found.users]
                over = (found.memory_used - before) >> 20
                lines.append(f"GPU {found.index} has {over} MiB more in use ({'; '.join(users) or 'by nobody we see'})")
        return "; ".join(lines) or "back"


def start(
    command: Command,
    *,
    log: Path,
    marker: str,
    cwd: Path,
    host: str = "127.0.0.1",
    listens_on: Sequence[int] = (),
    secrets: Sequence[str] = (),
) -> Process:
    """Start a server below a reaper of its own.

    Args:
        command: what to execute; its variables lie over the few we pass on (`privacy.server_environment`).
        log: gets every line the server or its children write, stamped and with the writer's pid.
        marker: names this launch (run id and launch id); the mark in the environment adds who started it.
        cwd: the server's working directory.
        host: where it listens.
        listens_on: the ports that must be free again after `stop`.
        secrets: names of environment variables it needs whose values may not be written anywhere.

    Raises:
        ServerError: it could not be executed.
    """
    mark = f"{marker}@{_own_identity()}.{randomness.token_hex(4)}"
    variables = {**privacy.server_environment(command.variables, secrets=secrets), reaper.MARK: mark}
    privacy.private_folder(log.parent)
    guard = subprocess.Popen(
        [sys.executable, "-I", "-S", reaper.__file__, mark],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        bufsize=0,
        env={"PATH": os.environ.get("PATH", os.defpath), reaper.MARK: mark},
        start_new_session=True,
    )
    before = tuple(found.memory_used for found in gpu.gpus()) or None
    watched = Watched(host, tuple(listens_on), before, locks.roots(variables), time.time())
    process = Process(guard, mark, log, variables, watched)
    process.begin(
        {
            "argv": list(command.argv),
            "cpus": list(command.cpus),
            "variables": variables,
            "cwd": str(cwd),
            "log": str(log),
            "roster": str(roster_path(mark)),
            "mark": mark,
            "secrets": privacy.secret_values(secrets, variables),
        }
    )
    return process


@dataclass(frozen=True, slots=True)
class Leftover:
    """What is alive of a launch whose harness is gone. `reaped`: its reaper still lives, and is about to end it."""

    mark: str
    members: tuple[Holder, ...]
    identities: tuple[reaper.Seen, ...]
    log: str | None = None
    reaped: bool = False

    @property
    def launch(self) -> str:
        """The launch it was: what `start` was given as marker."""
        return self.mark.rpartition("@")[0]

    def to_json(self) -> dict[str, Any]:
        """For `--json`."""
        return {"launch": self.launch, "log": self.log, "processes": [asdict(member) for member in self.members]}


def leftovers() -> list[Leftover]:
    """What earlier harnesses left running: found by mark or roster, and only where the harness itself is dead."""
    table = reaper.scan()
    groups: dict[str, set[int]] = {}
    logs: dict[str, str] = {}
    for pid in table:
        if (mark := reaper.mark_of(pid)) and _in_our_namespace(pid):
            groups.setdefault(mark, set()).add(pid)
    for path in sorted(state_folder().glob("*.json")):
        roster = _read_roster(path)
        alive = {pid for pid, start in _members(roster) if pid in table and table[pid].start == start}
        if alive:
            groups.setdefault(roster["mark"], set()).update(alive)
            logs[roster["mark"]] = roster["log"]
        elif roster and not _owner_lives(roster["mark"], table):
            path.unlink(missing_ok=True)
    spared = _lineage(table)
    found = []
    for mark, pids in sorted(groups.items()):
        if _owner_lives(mark, table):
            continue
        everyone = pids.union(*(reaper.below(pid, table) for pid in pids)) - spared
        seen = [table[pid] for pid in sorted(everyone) if table[pid].alive]
        holders = [holder for one in seen if (holder := ports.describe(one.pid))]
        if holders:
            reaped = any(_reaps(one.pid, mark) for one in seen)
            found.append(Leftover(mark, tuple(holders), tuple(seen), logs.get(mark), reaped))
    return found


def _reaps(pid: int, mark: str) -> bool:
    """Whether a process is the reaper of a launch, by the words that `start` gave it."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return mark.encode() in words and any(word.endswith(b"/reaper.py") for word in words)


def end(victims: Sequence[reaper.Seen], *, term_grace_s: float = _TERM_GRACE_S) -> list[reaper.Seen]:
    """End exactly these processes, TERM first, KILL after the grace; returns those still there 10 s later."""
    for seen in victims:
        reaper.send_signal(seen, signal.SIGTERM)
    left = _await_gone(victims, term_grace_s)
    for seen in left:
        reaper.send_signal(seen, signal.SIGKILL)
    return _await_gone(left, 10.0)


def state_folder() -> Path:
    """Where rosters lie: one place a machine and user, whatever the project, gone with the next boot.

    Raises:
        ServerError: somebody else owns a folder of that name.
    """
    folder = Path("/tmp") / f"harness-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise ServerError(f"`{folder}` belongs to somebody else, so nothing can be supervised", hint="remove it")
    return folder


def roster_path(mark: str) -> Path:
    """The roster of one launch."""
    return state_folder() / (re.sub(r"[^\w.@-]", "_", mark)[-200:] + ".json")


def roster_of(mark: str) -> dict[str, Any]:
    """What the reaper of one launch noted last; empty where there is nothing, or of another boot."""
    return _read_roster(roster_path(mark))


def _read_roster(path: Path) -> dict[str, Any]:
    try:
        roster = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    if isinstance(roster, dict) and roster.get("boot") == reaper.boot():
        return roster
    return {}


def _members(roster: Mapping[str, Any]) -> list[tuple[int, int]]:
    """(pid, start ticks) of everyone on a roster, the reaper too."""
    reaping = [roster["reaper"]] if roster else []
    return [(int(pid), int(start)) for pid, start in [*roster.get("members", []), *reaping]]


def _in_our_namespace(pid: int) -> bool:
    """Whether a process counts pids as we do. In a container the harness that its mark names has a number of there."""
    try:
        return os.readlink(f"/proc/{pid}/ns/pid") == os.readlink("/proc/self/ns/pid")  # noqa: PTH115 - text of the link
    except OSError:
        return False


def _owner_lives(mark: str, table: Mapping[int, reaper.Seen]) -> bool:
    """Whether the harness that made a mark still runs."""
    try:
        pid, start, _ = mark.rpartition("@")[2].split(".")
        owner = table.get(int(pid))
        return owner is not None and owner.alive and owner.start == int(start)
    except ValueError:
        return False


def _own_identity() -> str:
    own = reaper.look(os.getpid())
    return f"{os.getpid()}.{own.start if own else 0}"


def _lineage(table: Mapping[int, reaper.Seen]) -> set[int]:
    """Ourselves and our ancestors."""
    pid, lineage = os.getpid(), set[int]()
    while pid in table and pid not in lineage:
        lineage.add(pid)
        pid = table[pid].parent
    return lineage


def _await_gone(victims: Sequence[reaper.Seen], deadline_s: float) -> list[reaper.Seen]:
    until = time.monotonic() + deadline_s
    while True:
        left = [seen for seen in victims if (now := reaper.look(seen.pid)) and now.start == seen.start and now.alive]
        if not left or time.monotonic() >= until:
            return left
        time.sleep(0.05)

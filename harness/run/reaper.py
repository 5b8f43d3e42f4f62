"""The reaper: parent, log keeper and undertaker of one server; it outlives the harness, never the server's children.

`supervise.start` runs this file as a program of its own (standard library only, `python -I -S reaper.py MARK`). It is
the server's parent and a child-subreaper, so a process that double-forks and calls `setsid` is reparented to it and
stays in its tree. It watches its own parent: when the harness is gone, however it went, everything below is ended.
Should the reaper itself be killed, the kernel kills the server (PR_SET_PDEATHSIG), and what still lives is found by
its mark or by the roster this program keeps.

Orders come as JSON lines on stdin, reports go as JSON lines to stdout:

    > {"argv": [...], "cpus": [...], "variables": {...}, "cwd": "...", "log": "...", "roster": "...", "mark": "...",
       "secrets": {...}}
    < {"started": PID, "start": TICKS}   or   {"failed": "message"}
    < {"exited": CODE}                   negative for a signal, as subprocess has it
    > {"stop": ["SIGTERM"], "grace_s": 15, "term_grace_s": 5}      > {"kill": true}
    < {"sent": "SIGTERM", "to": [PID, ...], "at_s": 0.0}
    < {"stopped": true, "left": [PID, ...], "lost": LINES that a full disk cost}
"""

import contextlib
import ctypes
import datetime
import json
import os
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MARK = "HARNESS_MARK"
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_CREDENTIALS = struct.Struct("iii")  # pid, uid, gid
_LINE_LIMIT = 1 << 16
_TICK_S = 0.25
_PRESS_S = 0.05
_ORPHAN_GRACE_S = 5.0
_KILL_DEADLINE_S = 10.0


@dataclass(frozen=True, slots=True)
class Seen:
    """One process as /proc shows it; pid and `start` (clock ticks since boot) together name it for good.

    `status` is a zombie's wait status.
    """

    pid: int
    parent: int
    session: int
    start: int
    state: str
    status: int = 0

    @property
    def alive(self) -> bool:
        """Whether it still runs: a zombie waits for its parent, and holds nothing."""
        return self.state not in {"Z", "X"}


def look(pid: int) -> Seen | None:
    """One process, or None when there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    fields = stat[stat.rindex(b")") + 2 :].split()
    return Seen(pid, int(fields[1]), int(fields[3]), int(fields[19]), fields[0].decode(), int(fields[49]))


def scan() -> dict[int, Seen]:
    """Every process of this machine that we may see."""
    found = (look(int(name)) for name in os.listdir("/proc") if name.isdigit())  # noqa: PTH208 - names only, and often
    return {seen.pid: seen for seen in found if seen}


def below(root: int, table: dict[int, Seen]) -> set[int]:
    """The descendants of a process, without itself."""
    children: dict[int, list[int]] = {}
    for seen in table.values():
        children.setdefault(seen.parent, []).append(seen.pid)
    found: set[int] = set()
    todo = [root]
    while todo:
        fresh = [pid for pid in children.get(todo.pop(), []) if pid not in found]
        found.update(fresh)
        todo += fresh
    return found


def mark_of(pid: int) -> str | None:
    """The mark in a process's environment, None where there is none or it may not be read."""
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return None
    prefix = f"{MARK}=".encode()
    for variable in variables.split(b"\0"):
        if variable.startswith(prefix):
            return variable[len(prefix) :].decode(errors="replace")
    return None


def become_subreaper() -> None:
    """Ask the kernel to hand us the orphans among our descendants."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def send_signal(seen: Seen, number: int) -> bool:
    """Signal exactly this process: a pid that was given to another process since is left alone."""
    try:
        handle = os.pidfd_open(seen.pid)
    except OSError:
        return False
    try:
        now = look(seen.pid)
        if now is None or now.start != seen.start:
            return False
        signal.pidfd_send_signal(handle, number)
    except OSError:
        return False
    finally:
        os.close(handle)
    return True


class Log:
    """A log of stamped lines, `2026-01-31T12:00:00.000000Z [PID] text`, one line a write.

    Stamps are a wall clock read once plus a monotonic one, so that a stepped clock never reorders them. The values of
    secrets are replaced by their names. A full disk costs lines, never the server.
    """

    def __init__(self, path: str, secrets: dict[str, str]) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._secrets = [(value.encode(), f"[{name}]".encode()) for name, value in secrets.items() if len(value) > 3]
        self._pending: dict[int, bytes] = {}
        self._epoch = time.time() - time.monotonic()
        self.lost = 0

    def feed(self, pid: int, data: bytes) -> None:
        """Take what a process wrote; whole lines are written, the rest waits. A carriage return ends a line too."""
        *lines, rest = re.split(rb"[\r\n]", self._pending.pop(pid, b"") + data)
        for line in lines:
            self._write(str(pid), line)
        if len(rest) > _LINE_LIMIT:
            self._write(str(pid), rest)
        elif rest:
            self._pending[pid] = rest

    def note(self, text: str) -> None:
        """A line of the reaper's own."""
        self._write("reaper", text.encode())

    def flush(self) -> None:
        """Write the lines that never ended."""
        for pid in list(self._pending):
            self.feed(pid, b"\n")

    def _write(self, who: str, line: bytes) -> None:
        if not line:
            return
        for value, name in self._secrets:
            line = line.replace(value, name)
        stamp = datetime.datetime.fromtimestamp(self._epoch + time.monotonic(), datetime.UTC)
        try:
            os.write(self._file, f"{stamp:%Y-%m-%dT%H:%M:%S.%f}Z [{who}] ".encode() + line + b"\n")
        except OSError:
            self.lost += 1


@dataclass
class Stopping:
    """Where a stop stands: the polite signals still to send, and when patience ends."""

    polite: list[str]
    grace_s: float
    term_grace_s: float
    began: float = field(default_factory=time.monotonic)
    until: float = 0.0
    stage: str = "polite"


class Reaper:
    """One server's parent: a single loop over its log, its death, the harness's orders and the harness's death."""

    def __init__(self, order: dict[str, Any]) -> None:
        self.order = order
        self.harness = os.getppid()
        self.log = Log(order["log"], order["secrets"])
        self.server: Seen | None = None
        self.output: socket.socket | None = None
        self.exit: int | None = None
        self.stopping: Stopping | None = None
        self.done = False
        self.listening = True
        self._orders = b""
        self._roster: list[list[int]] = []
        self._next_roster = 0.0
        self._roster_pause = 0.25

    def spawn(self) -> socket.socket:
        """Start the server with its output on a socket that says which process wrote what."""
        ours, theirs = socket.socketpair()
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        ours.setblocking(False)
        parent = os.getpid()
        libc = ctypes.CDLL(None)

        def die_with_parent() -> None:
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != parent:
                os.kill(os.getpid(), signal.SIGKILL)
            if cpus:
                os.sched_setaffinity(0, cpus)

        argv: list[str] = self.order["argv"]
        variables: dict[str, str] = self.order["variables"]
        folder: str = self.order["cwd"]
        cpus: list[int] = self.order["cpus"]
        child = subprocess.Popen(
            argv,
            env=variables,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=theirs.fileno(),
            stderr=theirs.fileno(),
            start_new_session=True,
            preexec_fn=die_with_parent,  # noqa: PLW1509 - safe, there is one thread
        )
        theirs.close()
        # Never `wait`ed for: as a zombie the server keeps its pid, so nothing else can get its session's number.
        child.returncode = 0
        self.server = look(child.pid)
        return ours

    def run(self) -> None:
        """Until the server's whole family is gone and its end was asked for."""
        wake, poke = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(poke, warn_on_full_buffer=False)
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGCHLD):
            signal.signal(number, lambda *_: None)
        signal.signal(signal.SIGTERM, lambda *_: self.begin_stop([], 0.0, _ORPHAN_GRACE_S))
        try:
            output = self.output = self.spawn()
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            tell({"failed": f"{error.__class__.__name__}: {error}"})
            return
        assert self.server is not None
        self.log.note(f"started {self.server.pid}")
        self.write_roster()
        tell({"started": self.server.pid, "start": self.server.start})
        poll = select.poll()
        for handle in (output.fileno(), wake, sys.stdin.fileno()):
            poll.register(handle, select.POLLIN)
        while not self.done:
            ready = {handle for handle, _ in poll.poll(1000 * (_PRESS_S if self.stopping else _TICK_S))}
            if wake in ready:
                os.read(wake, 4096)
            if output.fileno() in ready and not self.read_output(output):
                poll.unregister(output.fileno())
            if sys.stdin.fileno() in ready:
                self.read_orders()
                if not self.listening:
                    poll.unregister(sys.stdin.fileno())
            self.step(child_ended=wake in ready)

    def read_output(self, output: socket.socket) -> bool:
        """Log what is there; False when every writer is gone."""
        for _ in range(64):  # leave a talkative server now and then, to hear orders
            try:
                data, extra, _, _ = output.recvmsg(_LINE_LIMIT, socket.CMSG_SPACE(_CREDENTIALS.size))
            except BlockingIOError:
                return True
            if not data:
                return False
            pid = next((_CREDENTIALS.unpack(c)[0] for _, kind, c in extra if kind == socket.SCM_CREDENTIALS), 0)
            self.log.feed(pid, data)
        return True

    def read_orders(self) -> None:
        """Take orders; the end of the stream means that the harness is gone."""
        data = os.read(sys.stdin.fileno(), 1 << 16)
        *lines, self._orders = (self._orders + data).split(b"\n")
        for line in lines:
            order = json.loads(line)
            if "stop" in order:
                self.begin_stop(order["stop"], order["grace_s"], order["term_grace_s"])
            elif order.get("kill"):
                self.begin_stop([], 0.0, 0.0)
                self.enter("kill", _KILL_DEADLINE_S)
        if not data:
            self.listening = False
            self.orphaned()

    def step(self, *, child_ended: bool) -> None:
        """What time brings: deaths, the harness gone, the next stage of a stop, a fresh roster."""
        if self.listening and os.getppid() != self.harness:
            self.listening = False
            self.orphaned()
        self.note_exit()
        roster_due = time.monotonic() >= self._next_roster
        if not (child_ended or self.stopping or roster_due):
            return  # looking at every process of the machine costs time that the measurement wants
        table = scan()
        self.bury(table)
        if self.stopping:
            self.press(table)
        if roster_due and not self.done:
            self.write_roster(table)

    def orphaned(self) -> None:
        """The harness is gone: end the server, briefly politely."""
        self.log.note("the harness is gone; ending the server")
        if self.stopping is None:
            self.begin_stop(["SIGTERM"], _ORPHAN_GRACE_S, 1.0)

    def note_exit(self) -> None:
        """Note the server's death, and leave it a zombie."""
        if self.exit is not None or self.server is None:
            return
        info = os.waitid(os.P_PID, self.server.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if info:
            self.exit = info.si_status if info.si_code == os.CLD_EXITED else -info.si_status
            self.log.note(f"{self.server.pid} ended with {self.exit}")
            tell({"exited": self.exit})

    def bury(self, table: dict[int, Seen]) -> None:
        """Wait for the dead orphans that were handed to us."""
        for seen in table.values():
            if seen.parent == os.getpid() and seen.state == "Z" and self.server and seen.pid != self.server.pid:
                with contextlib.suppress(ChildProcessError):
                    _, status = os.waitpid(seen.pid, os.WNOHANG)
                    if os.WIFSIGNALED(status):
                        self.log.note(f"{seen.pid} (orphan) ended with -{os.WTERMSIG(status)}")

    def family(self, table: dict[int, Seen], *, marked: bool) -> list[Seen]:
        """Who is alive of the server's: below us, in its session, and (dearer to find) whoever carries its mark."""
        assert self.server is not None
        pids = below(os.getpid(), table)
        pids |= {seen.pid for seen in table.values() if seen.session == self.server.pid}
        if marked:
            pids |= {pid for pid in table if pid != os.getpid() and mark_of(pid) == self.order["mark"]}
        return [table[pid] for pid in sorted(pids) if table[pid].alive]

    def begin_stop(self, signals: list[str], grace_s: float, term_grace_s: float) -> None:
        """Start a stop, or make a running one more urgent."""
        self.stopping = Stopping(list(signals), grace_s, term_grace_s)

    def enter(self, stage: str, patience_s: float) -> None:
        """The next stage of a stop."""
        assert self.stopping is not None
        self.stopping.stage = stage
        self.stopping.until = time.monotonic() + patience_s

    def press(self, table: dict[int, Seen]) -> None:
        """One turn of a stop: polite signals to the server alone, then TERM and KILL to all that is left."""
        stopping, now = self.stopping, time.monotonic()
        assert stopping is not None
        left = self.family(table, marked=True)
        if not left:
            return self.finish([])
        if stopping.stage == "polite":
            server = [seen for seen in left if self.server and seen.pid == self.server.pid]
            if server and (now < stopping.until):
                return None
            if server and stopping.polite:
                self.enter("polite", stopping.grace_s)
                return self.signal(stopping.polite.pop(0), server)
            self.enter("term", stopping.term_grace_s)
            self.signal("SIGTERM", left)
        elif stopping.stage == "term" and now >= stopping.until:
            self.enter("kill", _KILL_DEADLINE_S)
        if stopping.stage == "kill":
            self.signal("SIGKILL", left)  # again on every turn: whoever was forked meanwhile is in the next scan
            if now >= stopping.until:
                self.finish([seen.pid for seen in left])
        return None

    def signal(self, name: str, to: list[Seen]) -> None:
        """Send one signal, and say so."""
        assert self.stopping is not None
        hit = [seen.pid for seen in to if send_signal(seen, signal.Signals[name])]
        if hit:
            self.log.note(f"{name} to {' '.join(map(str, hit))}")
            tell({"sent": name, "to": hit, "at_s": round(time.monotonic() - self.stopping.began, 3)})

    def finish(self, left: list[int]) -> None:
        """The stop is over; without anybody left the roster goes too."""
        self.done = True
        if not left:
            Path(self.order["roster"]).unlink(missing_ok=True)
        if self.output:
            self.read_output(self.output)
        self.log.flush()
        self.log.note(f"stopped, left: {' '.join(map(str, left)) or 'nobody'}")
        tell({"stopped": True, "left": left, "lost": self.log.lost})

    def write_roster(self, table: dict[int, Seen] | None = None) -> None:
        """Note who belongs to the server, for a next run: some processes wipe the mark from their environment."""
        table = table or scan()
        members = [[seen.pid, seen.start] for seen in self.family(table, marked=False)]
        self._next_roster = time.monotonic() + self._roster_pause
        self._roster_pause = min(5.0, self._roster_pause * 1.2)
        if members == self._roster:
            return
        self._roster = members
        path = Path(self.order["roster"])
        own = look(os.getpid())
        value = {
            "mark": self.order["mark"],
            "boot": boot(),
            "reaper": [os.getpid(), own.start if own else 0],
            "log": self.order["log"],
            "members": members,
        }
        with contextlib.suppress(OSError):  # a full disk: the mark remains
            temporary = path.with_suffix(".new")
            temporary.write_text(json.dumps(value))
            temporary.replace(path)


def boot() -> str:
    """What names this boot and pid namespace: pids and start ticks mean nothing in another."""
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"  # noqa: PTH115


def tell(report: dict[str, Any]) -> None:
    """Report to the harness, if there still is one."""
    with contextlib.suppress(OSError):
        os.write(sys.stdout.fileno(), json.dumps(report).encode() + b"\n")


def main() -> int:
    """Take the order, then serve it to the end."""
    become_subreaper()
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    with open(sys.stdin.fileno(), "rb", buffering=0, closefd=False) as orders:
        line = orders.readline()  # unbuffered: later orders are read by `os.read`
    if not line.endswith(b"\n"):
        return 1
    Reaper(json.loads(line)).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())

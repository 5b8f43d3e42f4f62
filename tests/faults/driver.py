"""The command line with something broken inside: `driver.py BREAKAGE... -- run RECIPE ...`.

The plan knows nothing of it, so that a run that was disturbed and one that was not have the same identity.

    server:FAULT[=VALUE]     every simulated server gets `--fault FAULT=VALUE` (server1: the first, server2: the others)
    argument:FLAG[=VALUE]    and any other flag
    kill:PHASE               SIGKILL to ourselves in that phase
    interrupt:PHASE[*2]      SIGINT (twice)
    terminate:PHASE          SIGTERM
    full:FILE                the disk is full for files of that name
    torn:requests            killed half-way through a line
    clock:SECONDS            the wall clock jumps in the middle of a level
    kill-server:level        SIGKILL to the first server, from outside
    squat                    a stranger takes the server's port between choice and use, at every try

Phases: plan, launch, warm-up, level, level-done, teardown, answer.
"""

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness import cli
from harness.engines import simulated
from harness.engines.engine import Command, Server
from harness.load import client
from harness.run import answer, store, supervise, sweep

UNRULY = Path(__file__).parent.parent / "fakes" / "unruly.py"
SERVERS = {"server": range(1, 1000), "server1": range(1, 2), "server2": range(2, 1000)}
MID_LEVEL_S = 0.3  # a level of the recipe takes about 0.8 s


def add_arguments(words: list[str], *, launches: range = range(1, 1000)) -> None:
    """Give the simulated servers of these launches more arguments; the readiness and warm-up requests stay unharmed."""
    command, started = simulated.Simulated.command, [0]

    def with_more(self: simulated.Simulated, server: Server) -> Command:
        started[0] += 1
        made = command(self, server)
        return replace(made, argv=(*made.argv, *words)) if started[0] in launches else made

    simulated.Simulated.command = with_more


def before(owner: Any, name: str, act: Callable[[], None]) -> None:
    """Act whenever a function is called, before it does anything."""
    inner = getattr(owner, name)

    def outer(*arguments: Any, **named: Any) -> Any:
        act()
        return inner(*arguments, **named)

    setattr(owner, name, outer)


def after(owner: Any, name: str, act: Callable[[], None]) -> None:
    """Act whenever a function has returned."""
    inner = getattr(owner, name)

    def outer(*arguments: Any, **named: Any) -> Any:
        result = inner(*arguments, **named)
        act()
        return result

    setattr(owner, name, outer)


def soon(act: Callable[[], None], delay_s: float = MID_LEVEL_S) -> None:
    threading.Thread(target=lambda: (time.sleep(delay_s), act()), daemon=True).start()


def in_phase(phase: str, act: Callable[[], None]) -> None:
    """Act once, in a phase of the run."""
    calls = [0]

    def at_call(wanted: int, then: Callable[[], None]) -> Callable[[], None]:
        def count() -> None:
            calls[0] += 1
            if calls[0] == wanted:
                then()

        return count

    hooks: dict[str, Callable[[], None]] = {
        "plan": lambda: after(store, "create", at_call(1, act)),
        "launch": lambda: after(supervise, "start", at_call(1, act)),
        "warm-up": lambda: before(sweep, "run_level", at_call(1, lambda: soon(act, 0.05))),
        "level": lambda: before(sweep, "run_level", at_call(3, lambda: soon(act))),  # warm-up, c1, c4
        "level-done": lambda: after(store.Run, "write_level", at_call(1, act)),
        "teardown": lambda: before(supervise.Process, "_await_end", at_call(1, act)),
        "answer": lambda: before(answer, "answer", at_call(1, act)),
    }
    hooks[phase]()


def send(number: signal.Signals, times: int = 1) -> Callable[[], None]:
    def act() -> None:
        for _ in range(times):
            os.kill(os.getpid(), number)
            time.sleep(0.2 if times > 1 else 0.0)

    return act


def fill_disk(name: str) -> None:
    """Writing files of a name fails as on a full disk, and really does: it goes to /dev/full."""
    mkstemp, append = tempfile.mkstemp, sweep.append_line

    def full_temporary(*, prefix: str, **more: Any) -> tuple[int, str]:
        handle, path = mkstemp(prefix=prefix, **more)
        if prefix == f".{name}.":
            os.close(handle)
            handle = os.open("/dev/full", os.O_WRONLY)
        return handle, path

    if name == "spool0":
        job = client.Level._job
        client.Level._job = lambda level, *rest: {**job(level, *rest), "spool": "/dev/full"}
    elif name == "requests.jsonl":
        sweep.append_line = lambda _, line: append(Path("/dev/full"), line)
    else:
        tempfile.mkstemp = full_temporary


def tear_line() -> None:
    def half(path: Path, line: str, **_: Any) -> None:
        with path.open("a") as stream:
            stream.write(line[: len(line) // 2])
        os.kill(os.getpid(), signal.SIGKILL)

    lines = [0]
    whole = sweep.append_line

    def append(path: Path, line: str, **more: Any) -> None:
        lines[0] += 1
        (half if lines[0] == 12 else whole)(path, line, **more)

    sweep.append_line = append


def step_clock(seconds: float) -> None:
    true_time, true_now, moved = time.time, store.now, [0.0]
    time.time = lambda: true_time() + moved[0]
    store.now = lambda: true_now().replace("20", "19", 1) if moved[0] else true_now()
    in_phase("level", lambda: moved.__setitem__(0, seconds))


def squat() -> None:
    start = supervise.start

    def taken(command: Command, *, listens_on: list[int], **more: Any) -> supervise.Process:
        subprocess.Popen([sys.executable, str(UNRULY), "--listen", str(listens_on[0]), "--lives", "60"], stdout=2)
        time.sleep(0.5)
        return start(command, listens_on=listens_on, **more)

    supervise.start = taken


def kill_server() -> None:
    """SIGKILL to the first server, from outside."""
    start, started = supervise.start, []

    def noted(*arguments: Any, **more: Any) -> supervise.Process:
        started.append(start(*arguments, **more))
        return started[-1]

    supervise.start = noted
    in_phase("level", lambda: os.kill(started[0].pid, signal.SIGKILL))


def break_something(word: str) -> None:
    kind, _, what = word.partition(":")
    if kind in SERVERS:
        add_arguments(["--fault", what], launches=SERVERS[kind])
    elif kind == "argument":
        flag, equals, value = what.partition("=")
        add_arguments([f"--{flag}", *([value] if equals else [])])
    elif kind == "kill":
        in_phase(what, send(signal.SIGKILL))
    elif kind == "interrupt":
        phase, _, times = what.partition("*")
        in_phase(phase, send(signal.SIGINT, int(times or 1)))
    elif kind == "terminate":
        in_phase(what, send(signal.SIGTERM))
    elif kind == "full":
        fill_disk(what)
    elif kind == "clock":
        step_clock(float(what))
    else:
        {"torn": tear_line, "squat": squat, "kill-server": kill_server}[kind]()


if __name__ == "__main__":
    split = sys.argv.index("--")
    for argument in sys.argv[1:split]:
        break_something(argument)
    sys.exit(cli.main(sys.argv[split + 1 :]))

"""A program that behaves badly on request, to see whether supervision copes. Standard library only.

    unruly.py [--child] [--setsid-child] [--ignore-term] [--wipe-environment] [--listen PORT] [--say TEXT] [--lock PATH]
              [--exit CODE] [--crash SIGNAL] [--crash-child SIGNAL] [--after SECONDS] [--forks N] [--lives SECONDS]

Prints `ready` when everything asked for is in place, `child PID` for every child, and the name of each signal it gets.
"""

import argparse
import ctypes
import os
import signal
import socket
import sys
import time
from pathlib import Path


def say(text: str) -> None:
    os.write(1, f"{text}\n".encode())


def wipe_environment() -> None:
    """Overwrite our environment as /proc shows it, which is what setproctitle does to make room for a title."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[47]), int(fields[48])  # env_start, env_end: fields 50 and 51 of proc(5)
    ctypes.memset(start, 0, end - start)


def behave(arguments: argparse.Namespace) -> None:
    def on_signal(number: int, _: object) -> None:
        say(f"got {signal.Signals(number).name}")
        if not arguments.ignore_term:
            sys.exit(0)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    if arguments.wipe_environment:
        wipe_environment()


def have_child(arguments: argparse.Namespace, *, own_session: bool) -> None:
    if os.fork() == 0:
        if own_session:
            os.setsid()
            if os.fork():
                os._exit(0)  # the classic daemon: nobody's child any more
        behave(arguments)
        say(f"child {os.getpid()}")
        time.sleep(arguments.lives)
        os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser()
    for flag in ("--child", "--setsid-child", "--ignore-term", "--wipe-environment"):
        parser.add_argument(flag, action="store_true")
    parser.add_argument("--listen", type=int)
    parser.add_argument("--say")
    parser.add_argument("--lock", type=Path)
    parser.add_argument("--exit", type=int)
    parser.add_argument("--crash")
    parser.add_argument("--crash-child")
    parser.add_argument("--after", type=float, default=0.0)
    parser.add_argument("--forks", type=int, default=0)
    parser.add_argument("--lives", type=float, default=120.0)
    arguments = parser.parse_args()
    behave(arguments)
    for _ in range(arguments.child):
        have_child(arguments, own_session=False)
    for _ in range(arguments.setsid_child + arguments.forks):
        have_child(arguments, own_session=True)
    server = socket.create_server(("127.0.0.1", arguments.listen)) if arguments.listen else None
    if arguments.lock:
        arguments.lock.parent.mkdir(parents=True, exist_ok=True)
        os.open(arguments.lock, os.O_CREAT | os.O_EXCL)  # kept open, as FileBaton does
    if arguments.crash_child and os.fork() == 0:
        os.kill(os.getpid(), signal.Signals[arguments.crash_child])
    if arguments.say:
        say(arguments.say)
    say("ready")
    time.sleep(arguments.after)
    if arguments.exit is not None:
        sys.exit(arguments.exit)
    if arguments.crash:
        os.kill(os.getpid(), signal.Signals[arguments.crash])
    time.sleep(arguments.lives)
    del server


if __name__ == "__main__":
    main()

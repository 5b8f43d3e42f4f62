"""What the stand-in is told to do wrong: `STUB_FAULT=KIND=WHERE`."""

import os
import resource
import signal
import sys
import time

KIND, _, WHERE = os.environ.get("STUB_FAULT", "").partition("=")


def _say(text):
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


_ERRORS = {
    "add": "CUDA error: no kernel image is available for execution on the device",
    "rendezvous": "CUDASymmetricMemoryAllocator::rendezvous: no access",
}

if os.environ.get("STUB_STUBBORN"):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if KIND == "noise":
    _say('{"ok": false, "message": "not an answer"}')


def told(kind: str, default: str) -> str:
    """A value that a fault replaces."""
    return WHERE if kind == KIND else default


def wrong(where: str) -> bool:
    """Whether a result is to be wrong here."""
    return ("wrong", where) == (KIND, WHERE)


def at(where: str) -> None:
    """Hang, crash, exit or raise, if that is to happen here."""
    if where != WHERE:
        return
    if KIND == "hang":
        _say(f"entering {where}")
        while True:
            time.sleep(1)
    if KIND == "crash":
        _say("about to crash")
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.kill(os.getpid(), signal.SIGSEGV)
    if KIND == "exit":
        os._exit(3)
    if KIND == "raise":
        raise RuntimeError(_ERRORS[where])

"""A harness to be killed: starts `unruly.py` with the arguments after LOG, prints the pids, and waits for its end."""

import sys
import time
from pathlib import Path

from harness.engines.engine import Command
from harness.run import supervise

if __name__ == "__main__":
    log, *words = sys.argv[1:]
    unruly = Path(__file__).with_name("unruly.py")
    process = supervise.start(
        Command((sys.executable, str(unruly), *words)), log=Path(log), marker="killed/01-a", cwd=Path(log).parent
    )
    while "ready" not in Path(log).read_text():
        time.sleep(0.02)
    time.sleep(0.3)
    pids = (process._guard.pid, process.pid, *sorted(process.pids()))
    sys.stdout.write(" ".join(map(str, pids)) + "\n")
    sys.stdout.flush()
    time.sleep(120)

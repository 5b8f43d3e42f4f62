"""A Slurm cluster on this one machine: slurmctld, four slurmd and a munged of its own, all in one folder.

What makes it work (tried on Debian's slurm-wlm 22.05): one NodeName range with this host's name behind it, a port and
a loopback address for each node, `%n` in every path, `config_overrides` to claim more CPUs than there are, and
`jobcomp/filetxt`, so that `sacct -c` works without a database. `proctrack/linuxproc` loses whoever calls setsid, which
is what we want to be tested against.
"""

import os
import shutil
import socket
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

NEEDED = ("slurmctld", "slurmd", "sbatch", "squeue", "munged")
NODES = ("n1", "n2", "n3", "n4")
CONF = """\
ClusterName=one
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={root}/munge.socket,cred_expire=5
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool.%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd.%n.pid
SlurmctldLogFile={root}/slurmctld.log
SlurmdLogFile={root}/slurmd.%n.log
SlurmctldPort={controller}
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_min_interval=200000,sched_interval=2
JobCompType=jobcomp/filetxt
JobCompLoc={root}/jobcomp.log
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
ReturnToService=2
SlurmdTimeout=5
SlurmctldTimeout=10
KillWait=20
MinJobAge=60
MaxArraySize=1001
InactiveLimit=0
WaitTime=0
MessageTimeout=10
UnkillableStepTimeout=60
NodeName=n[1-4] NodeHostname={host} NodeAddr=127.0.1.[1-4] Port=[{ports}] CPUs=8 RealMemory=2000 State=UNKNOWN
PartitionName=all Nodes=n[1-4] Default=YES MaxTime=60 State=UP
PartitionName=closed Nodes=n4 MaxTime=60 State=DOWN
"""


def missing() -> str | None:
    """Why there can be no cluster here, None where there can."""
    if os.geteuid() != 0:
        return "a Slurm cluster on one machine needs root"
    absent = [program for program in NEEDED if not shutil.which(program)]
    return f"not installed: {', '.join(absent)} (Debian: slurm-wlm, munge)" if absent else None


@dataclass
class Cluster:
    """The cluster; commands are run with `environment()`."""

    root: Path
    daemons: dict[str, "subprocess.Popen[bytes]"] = field(default_factory=dict)

    def environment(self) -> dict[str, str]:
        """Variables under which Slurm's commands find it."""
        return {"SLURM_CONF": str(self.root / "slurm.conf")}

    def start(self) -> None:
        """Start all of it, and wait until the four nodes are idle."""
        host = socket.gethostname().split(".")[0]
        first = _free_ports(6)
        ports = f"{first + 1}-{first + 4}"
        conf = CONF.format(root=self.root, host=host, controller=first, ports=ports)
        (self.root / "slurm.conf").write_text(conf)
        (self.root / "state").mkdir()
        key = self.root / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        files = {"socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        options = [f"--{option}={self.root}/munge.{name}" for option, name in files.items()]
        self._spawn("munged", ["munged", "--foreground", "--force", f"--key-file={key}", *options])
        self._until((self.root / "munge.socket").exists, "munged")
        self.start_controller()
        for node in NODES:
            self.start_node(node)
        self._until(lambda: self.idle() == len(NODES), "four idle nodes")

    def start_controller(self) -> None:
        """Start slurmctld, with the state it left when there is one."""
        self._spawn("slurmctld", ["slurmctld", "-D"])

    def start_node(self, node: str, *, wrap: tuple[str, ...] = ()) -> None:
        """Start one slurmd; `wrap` is put before its command."""
        self._spawn(node, [*wrap, "slurmd", "-D", "-N", node])

    def kill_node(self, node: str) -> None:
        """Make a node fall over: its slurmd and everything that jobs run there die at once."""
        daemon = self.daemons.pop(node)
        daemon.kill()
        daemon.wait()
        for process in self.processes_on(node):
            with suppress(psutil.NoSuchProcess):
                process.kill()

    def processes_on(self, node: str) -> list[psutil.Process]:
        """Step daemons of a node first, then whoever runs below them with the node's name in the environment."""
        found, daemons = [], set()
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get("SLURMD_NODENAME") == node:
                    found.append(process)
                    daemons |= {each for each in process.parents() if each.name().startswith("slurmstepd")}
        return [*daemons, *found]

    def idle(self) -> int:
        """How many nodes are idle."""
        done = self.ask("sinfo", "--noheader", "-p", "all", "-N", "-o", "%N %t")
        return sum(line.split()[1] == "idle" for line in done.stdout.splitlines() if len(line.split()) == 2)

    def ask(self, *words: str) -> "subprocess.CompletedProcess[str]":
        """One of Slurm's commands."""
        environment = {**os.environ, **self.environment()}
        return subprocess.run(words, env=environment, capture_output=True, text=True, check=False, timeout=60)

    def queue(self) -> str:
        """The queue, as squeue shows it."""
        return self.ask("squeue", "--noheader", "--array", "-o", "%i %T %r").stdout

    def empty(self) -> None:
        """Cancel everything, and wait until all nodes are idle again."""
        self.ask("scancel", "--user=root")
        for node in NODES:
            if node not in self.daemons:
                self.start_node(node)
                self.ask("scontrol", "update", f"NodeName={node}", "State=RESUME")
        self._until(lambda: not self.queue().strip() and self.idle() == len(NODES), "an empty cluster", 90)

    def stop(self) -> None:
        """Stop all of it."""
        self.ask("scancel", "--user=root")
        with suppress(AssertionError):
            self._until(lambda: not self.queue().strip(), "the queue", 30)
        for name in [*NODES, "slurmctld", "munged"]:
            if daemon := self.daemons.pop(name, None):
                daemon.terminate()
                try:
                    daemon.wait(20)
                except subprocess.TimeoutExpired:
                    daemon.kill()
                    daemon.wait()

    def _spawn(self, name: str, words: list[str]) -> None:
        log = (self.root / f"{name}.out").open("ab")
        environment = {**os.environ, **self.environment()}
        self.daemons[name] = subprocess.Popen(words, env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        log.close()

    def _until(self, condition, what: str, seconds: float = 30.0) -> None:
        until = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < until, f"waited {seconds:.0f} s for {what}: {self.logs()}"
            time.sleep(0.1)

    def logs(self) -> str:
        """The last lines of every log."""
        paths = sorted([*self.root.glob("*.log"), *self.root.glob("*.out")])
        tails = ["\n".join([f"--- {path.name}", *path.read_text(errors="replace").splitlines()[-5:]]) for path in paths]
        return "\n".join([*tails, self.queue()])


def _free_ports(count: int) -> int:
    """The first of so many free ports in a row, below those that the kernel gives to clients."""
    for first in range(20_000 + os.getpid() % 10_000, 32_000, count):
        if all(_free(first + step) for step in range(count)):
            return first
    raise AssertionError("no ports")


def _free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("0.0.0.0", port))
        except OSError:
            return False
    return True

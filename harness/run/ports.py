"""TCP ports: choosing one that is free, proving it, and naming who holds one that is not."""

import random
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from harness.errors import InputError
from harness.files import escape_control
from harness.run import privacy

_TRIES = 200


@dataclass(frozen=True, slots=True)
class Holder:
    """A process that holds a resource we want: `memory` is its resident bytes."""

    pid: int
    user: str
    command: str
    memory: int

    def __str__(self) -> str:
        return f"pid {self.pid} ({self.user}, {self.memory >> 20} MiB): {self.command}"


def describe(pid: int) -> Holder | None:
    """Who a process is, None when it is gone."""
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            command = escape_control(privacy.show_argv(process.cmdline()) or process.name())
            return Holder(pid, process.username(), command, process.memory_info().rss)
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return None
    except psutil.AccessDenied:
        return Holder(pid, "?", "?", 0)


def is_free(host: str, port: int) -> bool:
    """Whether a server could listen there now: proven by listening.

    SO_REUSEADDR, because servers set it: a port in TIME_WAIT is free to them, one that somebody listens on is not.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind((host, port))
            trial.listen(1)
        except OSError:
            return False
    return True


def holders(port: int) -> list[Holder]:
    """The processes that listen on a port, as far as we may see them."""
    pids = {found.pid for found in psutil.net_connections("tcp") if _listens(found, port) and found.pid}
    return [holder for pid in sorted(pids) if (holder := describe(pid))]


def listens(pids: set[int], port: int) -> bool:
    """Whether one of these processes listens on a port."""
    for pid in pids:
        try:
            connections = psutil.Process(pid).net_connections("tcp")
        except psutil.Error:
            continue
        if any(_listens(found, port) for found in connections):
            return True
    return False


def _listens(connection: Any, port: int) -> bool:
    return bool(connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr.port == port)


def choose_port(host: str, wanted: int | None) -> int:
    """A port a server can listen on: the wanted one, or a free one that the kernel gives to no outgoing connection.

    Raises:
        InputError: the wanted port is taken (by whom, where that can be seen), or none is free.
    """
    if wanted:
        if is_free(host, wanted):
            return wanted
        seen = [str(holder) for holder in holders(wanted)] or ["its holder is not visible to us"]
        raise InputError(f"port {wanted} on {host} is taken", details=seen, hint="stop it, or choose another port")
    first = _first_ephemeral()
    for port in random.sample(range(max(1024, first - 20000), first), _TRIES):
        if is_free(host, port):
            return port
    raise InputError(f"no free port found on {host} in {_TRIES} tries below {first}")


def _first_ephemeral() -> int:
    """The lowest port the kernel may give to a client: one below it cannot be lost to our own load."""
    try:
        first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except OSError:
        return 32768
    return first if first > 2048 else 32768

"""What is read off any CUDA server's log: matching lines, and the transports NCCL chose."""

import re

from harness.engines.engine import Evidence

SHOWN = 6  # lines kept as evidence

_CHANNEL = re.compile(r"Channel \d+(?:/\d+)? : \d+\[\w+\] -> \d+\[\w+\](?: \[\w+\])? via (?P<transport>[\w/]+)")


def matching(log: str, pattern: str) -> tuple[str, ...]:
    """The first few lines that match, stripped."""
    wanted = re.compile(pattern)
    found = (line.strip() for line in log.splitlines() if wanted.search(line))
    return tuple(line for line, _ in zip(found, range(SHOWN), strict=False))


def transports(log: str) -> dict[str, int]:
    """NCCL's channels by transport (`P2P/CUMEM`, `SHM/direct/direct`, `NET/Socket/0`); needs NCCL_DEBUG=INFO."""
    found: dict[str, int] = {}
    for match in _CHANNEL.finditer(log):
        found[match["transport"]] = found.get(match["transport"], 0) + 1
    return found


def nccl_p2p(log: str) -> Evidence:
    """Whether GPUs talk to each other directly: all of NCCL's channels go by P2P."""
    found = transports(log)
    if not found:
        return Evidence("nccl-p2p", None, ("no channel lines: set NCCL_DEBUG=INFO",))
    lines = tuple(f"{count} channels via {transport}" for transport, count in sorted(found.items()))
    return Evidence("nccl-p2p", all(transport.startswith("P2P") for transport in found), lines)

"""One process per GPU for the checks that need all of them; loaded by file, like everything here."""

import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import distributed


def answers(name: str, settings: dict[str, Any], world: int) -> list[dict[str, Any]]:
    """Run `check` of one file in `world` processes, each with its `rank`; a rank that dies leaves what it said last.

    The ranks stay in this process's group, so that whoever ends it ends them.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, f"rank{rank}.json") for rank in range(world)]
        processes = [
            subprocess.Popen(
                [
                    sys.executable,
                    str(Path(__file__).with_name("runner.py")),
                    name,
                    json.dumps({**settings, "rank": rank, "world": world, "port": port}),
                    str(files[rank]),
                ],
                env={**os.environ, "NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": str(Path(folder, "nccl.%p"))},
            )
            for rank in range(world)
        ]
        codes = [process.wait() for process in processes]
        said: list[dict[str, Any]] = [
            json.loads(path.read_text())
            if path.exists()
            else {"ok": False, "message": f"rank {rank} ended with code {codes[rank]} and no answer", "facts": {}}
            for rank, path in enumerate(files)
        ]
        log = "".join(path.read_text(errors="replace") for path in Path(folder).glob("nccl.*"))
    said[0]["facts"] = {**said[0]["facts"], "transports": _transports(log)}
    return said


def start(settings: dict[str, Any]) -> Any:
    """Join the process group of all ranks; returns this rank's device."""
    device = torch.device("cuda", settings["rank"])
    torch.cuda.set_device(device)
    distributed.init_process_group(
        "nccl",
        init_method=f"tcp://127.0.0.1:{settings['port']}",
        rank=settings["rank"],
        world_size=settings["world"],
        device_id=device,
    )
    return device


def _transports(log: str) -> dict[str, int]:
    """How NCCL says that its channels go: `... via P2P/CUMEM`, `via SHM/direct/direct`, counted."""
    counts: dict[str, int] = {}
    for line in log.splitlines():
        _, found, rest = line.partition(" via ")
        if found and " -> " in line:
            transport = rest.split()[0]
            counts[transport] = counts.get(transport, 0) + 1
    return counts

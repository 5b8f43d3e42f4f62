"""`torch.distributed` of the stand-in: ranks that never talk, and sums that come out as if they had."""

import os
from pathlib import Path
from types import SimpleNamespace

from torch import _faults

group = SimpleNamespace(WORLD=SimpleNamespace(group_name="0"))
_world = SimpleNamespace(size=1)


def init_process_group(backend, init_method, rank, world_size, device_id):
    _world.size = world_size
    if folder := os.environ.get("STUB_PIDS"):
        Path(folder, str(os.getpid())).touch()
    other = (rank + 1) % world_size
    line = f"host:{os.getpid()}:1 [{rank}] NCCL INFO Channel 0%d/02 : {rank}[0] -> {other}[1] via SHM/direct/direct\n"
    log = Path(os.environ["NCCL_DEBUG_FILE"].replace("%p", str(os.getpid())))
    log.write_text("NCCL INFO connected via nothing\n" + line % 0 + line % 1)


def all_reduce(data):
    _faults.at("all_reduce")
    data.data *= _world.size + (1 if _faults.wrong("all_reduce") else 0)


def barrier():
    pass

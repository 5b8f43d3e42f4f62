"""Can the GPUs share symmetric memory, and is there multicast? On PCIe there is none, and some features stay off."""

from pathlib import Path
from runpy import run_path
from typing import Any

import torch
import torch.distributed._symmetric_memory as symmetric
from torch import distributed

_RANKS = run_path(str(Path(__file__).with_name("ranks.py")))


def check(settings: dict[str, Any]) -> dict[str, Any]:
    """A buffer that every rank writes its number into and its neighbour reads; tells the multicast pointer."""
    if "rank" in settings:
        return _rank(settings)
    if torch.cuda.device_count() == 1:
        return {"ok": True, "message": "one GPU, nothing to share", "facts": {}}
    said = _RANKS["answers"]("symmetric_memory", settings, torch.cuda.device_count())
    if wrong := [answer["message"] for answer in said if not answer["ok"]]:
        return {"ok": False, "message": "; ".join(sorted(set(wrong))), "facts": said[0]["facts"]}
    facts = said[0]["facts"]
    multicast = "with multicast" if facts["multicast_pointer"] else "without multicast (pointer 0)"
    return {
        "ok": True,
        "message": f"{len(said)} GPUs share memory, {multicast}, backend {facts['backend']}",
        "facts": facts,
    }


def _rank(settings: dict[str, Any]) -> dict[str, Any]:
    device = _RANKS["start"](settings)
    rank, world = settings["rank"], settings["world"]
    buffer = symmetric.empty(1024, dtype=torch.float32, device=device)
    handle = symmetric.rendezvous(buffer, distributed.group.WORLD.group_name)
    buffer.fill_(float(rank))
    torch.cuda.synchronize(device)
    distributed.barrier()
    neighbour = (rank + 1) % world
    seen = handle.get_buffer(neighbour, (1024,), torch.float32).clone()
    torch.cuda.synchronize(device)
    distributed.barrier()  # nobody lets go of memory that another still reads
    available = getattr(symmetric, "is_nvshmem_available", None)
    backend = getattr(symmetric, "get_backend", None)
    facts = {
        "multicast_pointer": int(handle.multicast_ptr),
        "backend": backend(device) if backend else None,
        "nvshmem": bool(available()) if available else None,
    }
    if not bool((seen == neighbour).all()):
        return {"ok": False, "message": f"rank {rank} does not read what rank {neighbour} wrote", "facts": facts}
    return {"ok": True, "message": "", "facts": facts}

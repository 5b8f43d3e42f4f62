"""Which GPUs reach each other directly, how fast, and do the bytes arrive as they were sent?"""

import time
from typing import Any

import torch

_BYTES = 64 << 20


def check(settings: dict[str, Any]) -> dict[str, Any]:
    """The matrix of peer access and a timed copy of 64 MiB between each pair; only wrong bytes fail."""
    count = torch.cuda.device_count()
    access = [[a == b or bool(torch.cuda.can_device_access_peer(a, b)) for b in range(count)] for a in range(count)]
    speeds: dict[str, float] = {}
    for a in range(count):
        source = torch.arange(_BYTES // 4, dtype=torch.int32, device=f"cuda:{a}")
        for b in range(count):
            if a == b:
                continue
            target = torch.zeros_like(source, device=f"cuda:{b}")
            target.copy_(source)
            _wait(a, b)
            begin = time.monotonic()
            target.copy_(source)
            _wait(a, b)
            speeds[f"{a}->{b}"] = round(_BYTES / (time.monotonic() - begin) / 1e9, 2)
            if not torch.equal(target.cpu(), source.cpu()):
                message = f"bytes copied from GPU {a} to GPU {b} arrive changed"
                return {"ok": False, "message": message, "facts": {"access": access, "gigabytes_s": speeds}}
    pairs = sum(access[a][b] for a in range(count) for b in range(count) if a != b)
    facts = {"access": access, "gigabytes_s": speeds}
    if count == 1:
        return {"ok": True, "message": "one GPU, no peers", "facts": facts}
    slowest = f"{min(speeds.values()):.1f} to {max(speeds.values()):.1f} GB/s"
    return {
        "ok": True,
        "message": f"direct access in {pairs} of {count * (count - 1)} directions, {slowest}",
        "facts": facts,
    }


def _wait(*devices: int) -> None:
    for device in devices:
        torch.cuda.synchronize(device)

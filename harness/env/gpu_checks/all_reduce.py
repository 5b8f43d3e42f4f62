"""Does an NCCL all-reduce over all GPUs end, with the right sum, and how long does it take?

A hang is how a bad board, IOMMU setting or P2P level shows, so whoever starts this puts a deadline on it.
"""

import time
from pathlib import Path
from runpy import run_path
from typing import Any

import torch
from torch import distributed

_RANKS = run_path(str(Path(__file__).with_name("ranks.py")))

_SIZES = {"4 KiB": 4 << 10, "64 KiB": 64 << 10, "1 MiB": 1 << 20}
_WARM, _TIMED = 5, 20


def check(settings: dict[str, Any]) -> dict[str, Any]:
    """Sums of 4 KiB, 64 KiB and 1 MiB in bfloat16; the time is the mean of 20 calls, the slowest rank's."""
    if "rank" in settings:
        return _rank(settings)
    said = _RANKS["answers"]("all_reduce", settings, torch.cuda.device_count())
    if wrong := [answer["message"] for answer in said if not answer["ok"]]:
        return {"ok": False, "message": "; ".join(sorted(set(wrong))), "facts": said[0]["facts"]}
    slowest = {size: max(answer["facts"]["microseconds"][size] for answer in said) for size in _SIZES}
    transports = said[0]["facts"]["transports"]
    text = ", ".join(f"{size} {value:.0f} us" for size, value in slowest.items())
    how = f" via {', '.join(sorted(transports))}" if transports else ""
    return {
        "ok": True,
        "message": f"{len(said)} ranks: {text}{how}",
        "facts": {"microseconds": slowest, "transports": transports, "nccl": said[0]["facts"]["nccl"]},
    }


def _rank(settings: dict[str, Any]) -> dict[str, Any]:
    device = _RANKS["start"](settings)
    facts: dict[str, Any] = {"microseconds": {}, "nccl": list(torch.cuda.nccl.version())}
    for name, size in _SIZES.items():
        data = torch.ones(size // 2, dtype=torch.bfloat16, device=device)
        distributed.all_reduce(data)
        if not bool((data == settings["world"]).all()):
            return {"ok": False, "message": f"the sum of {name} over {settings['world']} GPUs is wrong", "facts": facts}
        for _ in range(_WARM):
            distributed.all_reduce(data)
        torch.cuda.synchronize(device)
        begin = time.monotonic()
        for _ in range(_TIMED):
            distributed.all_reduce(data)
        torch.cuda.synchronize(device)
        facts["microseconds"][name] = round((time.monotonic() - begin) / _TIMED * 1e6, 1)
    return {"ok": True, "message": "", "facts": facts}

"""Does a PyTorch kernel run on every GPU, and give the right numbers?"""

from typing import Any

import torch


def check(settings: dict[str, Any]) -> dict[str, Any]:
    """An addition and a matrix product of small integers, which are exact in float32, on each device."""
    count = torch.cuda.device_count()
    left = (torch.arange(4096) % 7).float().reshape(64, 64)
    right = (torch.arange(4096) % 5).float().reshape(64, 64)
    for index in range(count):
        on_device, other = left.to(f"cuda:{index}"), right.to(f"cuda:{index}")
        if not torch.equal((on_device + other).cpu(), left + right):
            return {"ok": False, "message": f"GPU {index} adds wrongly", "facts": {"device": index}}
        if not torch.equal((on_device @ other).cpu(), left @ right):
            return {"ok": False, "message": f"GPU {index} multiplies wrongly", "facts": {"device": index}}
    return {"ok": True, "message": f"right results on {count} GPUs", "facts": {"devices": count}}

"""Are there GPUs, and are they the ones this environment is for?"""

from typing import Any

import torch


def check(settings: dict[str, Any]) -> dict[str, Any]:
    """Compute capability of every device against `devices`, the numbers that are asked for (120 for sm_120)."""
    if not torch.cuda.is_available() or torch.cuda.device_count() == 0:
        return {"ok": False, "no_gpu": True, "message": "PyTorch sees no GPU", "facts": {}}
    seen = []
    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        seen.append({"index": index, "name": torch.cuda.get_device_name(index), "capability": major * 10 + minor})
    wanted = settings["devices"]
    wrong = [device for device in seen if wanted and device["capability"] not in wanted]
    if wrong:
        found = ", ".join(f"GPU {device['index']} is sm_{device['capability']}" for device in wrong)
        return {
            "ok": False,
            "message": f"{found}; the environment is for {', '.join(f'sm_{number}' for number in wanted)}",
            "facts": {"devices": seen},
        }
    message = f"{len(seen)} x {seen[0]['name']} (sm_{seen[0]['capability']})"
    return {"ok": True, "message": message, "facts": {"devices": seen}}

"""Does PyTorch itself say that it holds code for these GPUs?"""

from typing import Any

import torch


def check(settings: dict[str, Any]) -> dict[str, Any]:
    """`torch.cuda.get_arch_list()` against the capability of every device."""
    listed = list(torch.cuda.get_arch_list())
    lacking = []
    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        if not any(_runs(entry, major * 10 + minor) for entry in listed):
            lacking.append(f"sm_{major}{minor}")
    facts = {"arch_list": listed, "cuda": torch.version.cuda, "torch": torch.__version__}
    if lacking:
        message = (
            f"PyTorch {torch.__version__} lists {' '.join(listed)} and nothing for {', '.join(sorted(set(lacking)))}"
        )
        return {"ok": False, "message": message, "facts": facts}
    return {"ok": True, "message": f"PyTorch {torch.__version__}: {' '.join(listed)}", "facts": facts}


def _runs(entry: str, device: int) -> bool:
    kind, _, text = entry.partition("_")
    if not text.rstrip("af").isdigit():
        return False
    number = int(text.rstrip("af"))
    if text.endswith("a"):
        return number == device
    if text.endswith("f"):
        return number <= device and number // 10 == device // 10
    return number <= device and (kind == "compute" or number // 10 == device // 10)

"""Does Triton compile for this GPU? It brings its own assembler, which may not know a new one."""

from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _add(left, right, result, count, block: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    offsets = tl.program_id(0) * block + tl.arange(0, block)
    inside = offsets < count
    total = tl.load(left + offsets, mask=inside) + tl.load(right + offsets, mask=inside)
    tl.store(result + offsets, total, mask=inside)


def check(settings: dict[str, Any]) -> dict[str, Any]:
    """A vector addition, compiled now and compared."""
    count = 1000
    left = torch.arange(count, device="cuda", dtype=torch.float32)
    right = torch.arange(count, 0, -1, device="cuda", dtype=torch.float32)
    result = torch.zeros_like(left)
    _add[(triton.cdiv(count, 128),)](left, right, result, count, block=128)
    torch.cuda.synchronize()
    facts = {"triton": triton.__version__}
    if not bool((result == count).all()):
        return {"ok": False, "message": "the kernel was compiled and adds wrongly", "facts": facts}
    return {"ok": True, "message": f"Triton {triton.__version__} compiles and is right", "facts": facts}

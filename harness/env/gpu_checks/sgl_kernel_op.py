"""Does SGLang's kernel package load, and does one of its compiled kernels give the right numbers?"""

from typing import Any

import sgl_kernel
import torch


def check(settings: dict[str, Any]) -> dict[str, Any]:
    """RMSNorm in half precision against PyTorch in single precision.

    The operator is called by its registered name: the Python wrapper may hand the work to FlashInfer instead.
    """
    torch.manual_seed(0)
    given = torch.randn(16, 1024, device="cuda", dtype=torch.float16)
    weight = torch.rand(1024, device="cuda", dtype=torch.float16)
    result = torch.empty_like(given)
    torch.ops.sgl_kernel.rmsnorm.default(result, given, weight, 1e-6, False)
    exact = given.float() * torch.rsqrt(given.float().pow(2).mean(-1, keepdim=True) + 1e-6) * weight.float()
    error = (result.float() - exact).abs().max().item()
    facts = {"largest_error": error, "version": getattr(sgl_kernel, "__version__", None)}
    # Half precision keeps 11 bits: values below 8 are off by at most 2^-8 when rounded once, twice that with slack.
    if not error < 2**-7:
        return {"ok": False, "message": f"rmsnorm is off by {error:.4g}", "facts": facts}
    return {"ok": True, "message": "rmsnorm is right", "facts": facts}

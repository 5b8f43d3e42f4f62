"""Can FlashInfer compile a kernel here and now? The cache is empty, so that nothing old answers for it."""

import os
import tempfile
import time
from typing import Any

import torch


def check(settings: dict[str, Any]) -> dict[str, Any]:
    """Top-k sampling with k = 1, which must choose the most probable token, compiled into an empty workspace."""
    with tempfile.TemporaryDirectory() as workspace:
        os.environ["FLASHINFER_WORKSPACE_BASE"] = workspace  # before the import: it is read there
        import flashinfer  # noqa: PLC0415

        torch.manual_seed(0)
        probabilities = torch.softmax(torch.randn(32, 4096, device="cuda"), dim=-1)
        begin = time.monotonic()
        chosen = flashinfer.sampling.top_k_sampling_from_probs(probabilities, 1)
        torch.cuda.synchronize()
        seconds = time.monotonic() - begin
    facts = {"flashinfer": flashinfer.__version__, "compile_s": round(seconds, 1)}
    if not bool((chosen.long() == probabilities.argmax(dim=-1)).all()):
        return {"ok": False, "message": "top-1 sampling does not choose the most probable token", "facts": facts}
    message = f"FlashInfer {flashinfer.__version__} compiled its sampling kernels in {seconds:.0f} s and is right"
    return {"ok": True, "message": message, "facts": facts}

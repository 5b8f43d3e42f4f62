"""A stand-in for FlashInfer, which looks whether its workspace is empty as it was promised."""

import os
from pathlib import Path
from types import SimpleNamespace

from torch import Tensor, _faults

__version__ = "0.7.2"


def _top_k(probabilities, k):
    assert k == 1
    assert not list(Path(os.environ["FLASHINFER_WORKSPACE_BASE"]).iterdir()), "the workspace is not empty"
    return Tensor(probabilities.data.argmax(-1) + (1 if _faults.wrong("sampling") else 0))


sampling = SimpleNamespace(top_k_sampling_from_probs=_top_k)

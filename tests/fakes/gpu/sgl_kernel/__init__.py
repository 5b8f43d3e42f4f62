"""A stand-in for SGLang's kernel package."""

from torch import _faults

__version__ = "0.4.10"

if (_faults.KIND, _faults.WHERE) == ("absent", "sgl_kernel"):
    raise ModuleNotFoundError("No module named 'sgl_kernel'")

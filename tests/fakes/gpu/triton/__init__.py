"""A stand-in for Triton: every kernel is the addition that the check writes."""

from torch import _faults

__version__ = "3.8.0"


class jit:  # noqa: N801 - Triton's own name
    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        return self._launch

    def _launch(self, left, right, result, count, block):
        result.data[...] = left.data + right.data + (1 if _faults.wrong("triton") else 0)


def cdiv(left, right):
    return -(-left // right)

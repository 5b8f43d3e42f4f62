"""A stand-in for PyTorch with GPUs that are not there: just what the GPU checks touch, on numpy."""

from types import SimpleNamespace

import numpy as np

from torch import _faults, cuda

__version__ = "2.14.1+stub"
version = SimpleNamespace(cuda="13.0")
int32, float32, float16, bfloat16 = np.int32, np.float32, np.float16, np.float32

__all__ = ["cuda"]


class device:  # noqa: N801 - PyTorch's own name
    def __init__(self, kind, index=0):
        self.kind, self.index = kind, index


class Tensor:
    def __init__(self, data, on_device=False):
        self.data, self.on_device = np.asarray(data), on_device

    def float(self):
        return Tensor(self.data.astype(np.float32))

    def long(self):
        return Tensor(self.data.astype(np.int64))

    def reshape(self, *shape):
        return Tensor(self.data.reshape(shape))

    def to(self, where):
        return Tensor(self.data.copy(), on_device=True)

    def cpu(self):
        return self

    def clone(self):
        return Tensor(self.data.copy())

    def pow(self, exponent):
        return Tensor(self.data**exponent)

    def mean(self, axis, keepdim=False):
        return Tensor(self.data.mean(axis, keepdims=keepdim))

    def abs(self):
        return Tensor(abs(self.data))

    def max(self):
        return Tensor(self.data.max())

    def all(self):
        return Tensor(self.data.all())

    def argmax(self, dim):
        return Tensor(self.data.argmax(dim))

    def item(self):
        return self.data.item()

    def copy_(self, other):
        self.data[...] = other.data
        if _faults.wrong("copy"):
            self.data[-1] += 1

    def fill_(self, value):
        self.data[...] = value

    def __add__(self, other):
        _faults.at("add")
        return Tensor(self.data + _plain(other) + (1 if self.on_device and _faults.wrong("add") else 0))

    def __sub__(self, other):
        return Tensor(self.data - _plain(other))

    def __mul__(self, other):
        return Tensor(self.data * _plain(other))

    def __matmul__(self, other):
        return Tensor(self.data @ other.data)

    def __mod__(self, other):
        return Tensor(self.data % other)

    def __eq__(self, other):
        return Tensor(self.data == _plain(other))

    __hash__ = None

    def __bool__(self):
        return bool(self.data)


def _plain(value):
    return value.data if isinstance(value, Tensor) else value


def arange(*bounds, dtype=None, device=None):
    return Tensor(np.arange(*bounds, dtype=dtype))


def ones(count, dtype=None, device=None):
    return Tensor(np.ones(count, dtype))


def zeros_like(other, device=None):
    return Tensor(np.zeros_like(other.data))


empty_like = zeros_like


def manual_seed(seed):
    globals()["_draw"] = np.random.default_rng(seed)


def randn(*shape, device=None, dtype=np.float32):
    return Tensor(_draw.standard_normal(shape).astype(dtype))  # noqa: F821 - made by manual_seed


def rand(*shape, device=None, dtype=np.float32):
    return Tensor(_draw.random(shape).astype(dtype))  # noqa: F821


def rsqrt(value):
    return Tensor(1 / np.sqrt(value.data))


def softmax(value, dim):
    raised = np.exp(value.data - value.data.max(dim, keepdims=True))
    return Tensor(raised / raised.sum(dim, keepdims=True))


def equal(left, right):
    return np.array_equal(left.data, right.data)


def _rmsnorm(result, given, weight, epsilon, dependent_launch):
    exact = given.data.astype(np.float32)
    exact = exact / np.sqrt((exact**2).mean(-1, keepdims=True) + epsilon) * weight.data
    result.data[...] = exact + (1 if _faults.wrong("rmsnorm") else 0)


ops = SimpleNamespace(sgl_kernel=SimpleNamespace(rmsnorm=SimpleNamespace(default=_rmsnorm)))

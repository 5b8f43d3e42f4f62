"""A stand-in for sgl_kernel on a CPU: slow, small, and right where it does anything at all.

sglang imports kernels by name when it starts. The ones that cache handling and n-gram speculation call on a CPU are
written out in `cpu`, in plain torch; every other name can be imported and raises when it is called. This is not
sgl-kernel, and no time measured on it says anything about sgl-kernel.
"""

import importlib.abc
import importlib.machinery
import sys
import types

from sgl_kernel.cpu import (
    assign_draft_cache_locs_contiguous_cpu,
    assign_extend_cache_locs_cpu,
    assign_req_to_token_pool_cpu,
    copy_all_layer_kv_cache_cpu,
    fill_accept_out_cache_loc_cpu,
    fill_bonus_tokens_cpu,
    reconstruct_indices_from_tree_mask,
    verify_tree_greedy_cpu,
)

__all__ = [
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "copy_all_layer_kv_cache_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "reconstruct_indices_from_tree_mask",
    "verify_tree_greedy_cpu",
]
__version__ = "0.0.0+standin"


class _Kernel:
    """A name without a kernel."""

    def __init__(self, name):
        self.__name__ = self.__qualname__ = name

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Kernel(f"{self.__name__}.{name}")

    def __call__(self, *args, **kwargs):
        raise RuntimeError(f"{self.__name__} is a stand-in: this environment has no sgl-kernel")


class _Module(types.ModuleType):
    __path__ = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return globals()[name] if name in __all__ else _Kernel(f"{self.__name__}.{name}")


class _Submodules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds `sgl_kernel.anything` that is not a file of ours."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname.startswith(f"{__name__}."):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec):
        return _Module(spec.name)

    def exec_module(self, module):
        pass


# Last, so that files of ours are found first.
sys.meta_path.append(_Submodules())


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return _Kernel(f"{__name__}.{name}")

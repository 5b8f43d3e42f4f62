"""A stand-in for torchvision, so that text models can be served where torchvision has no build.

sglang imports torchvision's names for its image models when it starts. Every name and every submodule exists here, and
using one (calling it, or making an object of it) raises: nothing pretends to work. This is not torchvision.
"""

import importlib.abc
import importlib.machinery
import sys
import types

__version__ = "0.0.0+standin"


class _Name(type):
    """The type of every stand-in name: a class, because some are subclassed and some have members."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _name(f"{cls.__name__}.{name}")

    def __call__(cls, *args, **kwargs):
        raise RuntimeError(f"{cls.__name__} is a stand-in: torchvision is not installed here")


def _name(path):
    return _Name(path, (), {})


class _Module(types.ModuleType):
    __path__ = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        found = sys.modules.get(f"{self.__name__}.{name}") or _name(f"{self.__name__}.{name}")
        setattr(self, name, found)
        return found


class _Submodules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds `torchvision.anything`."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname.startswith(f"{__name__}."):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec):
        return _Module(spec.name)

    def exec_module(self, module):
        pass


sys.meta_path.append(_Submodules())


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return importlib.import_module(f"{__name__}.{name}")

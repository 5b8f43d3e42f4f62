"""A built environment: where it is, and what a process in it must be given."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from harness.env import manifest, places
from harness.env.locked import Lock


@dataclass(frozen=True, slots=True)
class Built:
    """A built environment.

    Attributes:
        path: its folder.
        python: its interpreter.
        site_packages: where its packages are.
        env_id: the lock's identity.
        python_version: its interpreter's version, as `3.12.1`.
        variables: environment variables a process in it is to have: the spec's, and where the JIT
            compilers keep their work.
    """

    path: Path
    python: Path
    site_packages: Path
    env_id: str
    python_version: str
    variables: Mapping[str, str]


def find(lock: Lock) -> Built | None:
    """The environment of a lock, if it was built; complete by its manifest."""
    path = places.environments() / lock.env_id[:16]
    found = manifest.read(path)
    if found is None or found.env_id != lock.env_id or not (path / "bin" / "python").exists():
        return None
    return built_at(path, lock, found.python_version)


def built_at(path: Path, lock: Lock, python_version: str) -> Built:
    """The environment of a lock in a folder, whether it is finished or not."""
    minor = ".".join(python_version.split(".")[:2])
    return Built(
        path=path,
        python=path / "bin" / "python",
        site_packages=path / "lib" / f"python{minor}" / "site-packages",
        env_id=lock.env_id,
        python_version=python_version,
        variables={**jit_variables(lock.env_id), **lock.wanted.variables},
    )


def jit_variables(env_id: str) -> dict[str, str]:
    """Where just-in-time compilers keep their work: a folder of this env_id's own, since a kernel compiled for one
    set of packages must never be loaded by another."""
    cache = places.jit_cache(env_id)
    return {
        "CUTE_DSL_CACHE_DIR": str(cache / "cute-dsl"),
        "FLASHINFER_WORKSPACE_BASE": str(cache / "flashinfer"),
        "SGLANG_JIT_CACHE_DIR": str(cache / "sglang"),
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "TORCH_EXTENSIONS_DIR": str(cache / "torch-extensions"),
        "TRITON_CACHE_DIR": str(cache / "triton"),
        "TVM_FFI_CACHE_DIR": str(cache / "tvm-ffi"),
    }

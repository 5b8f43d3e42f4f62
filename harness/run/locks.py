"""Lock files that a killed build leaves behind, on which the next server would wait for ever.

`torch.utils.file_baton.FileBaton` locks a JIT build by creating the file `lock` in the extension's folder, keeps it
open while it builds, and removes it after; whoever finds the file waits until it is gone. Killed in between, nobody
ever removes it. FlashInfer's and TVM's locks are `flock`s, which die with their holder: those files mean nothing.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

_NAME = "lock"


def roots(variables: Mapping[str, str]) -> tuple[Path, ...]:
    """Where a server with these variables keeps its JIT builds (as `torch.utils.cpp_extension` finds it)."""
    if named := variables.get("TORCH_EXTENSIONS_DIR"):
        return (Path(named),)
    cache = variables.get("XDG_CACHE_HOME") or os.path.join(variables.get("HOME", "/"), ".cache")  # noqa: PTH118
    return (Path(cache) / "torch_extensions",)


def stale(folders: Sequence[Path], *, since: float = 0.0) -> list[Path]:
    """Locks made after `since` (Unix time) that no process holds open."""
    found = [
        path
        for folder in folders
        for pattern in (f"*/{_NAME}", f"*/*/{_NAME}")
        for path in folder.glob(pattern)
        if path.is_file() and path.stat().st_mtime >= since
    ]
    if not found:
        return []
    held = _open_files()
    return [path for path in sorted(found) if str(path.resolve()) not in held]


def remove_stale(folders: Sequence[Path], *, since: float) -> list[str]:
    """Remove such locks; returns their paths."""
    removed = stale(folders, since=since)
    for path in removed:
        path.unlink(missing_ok=True)
    return [str(path) for path in removed]


def _open_files() -> set[str]:
    """Paths of every open file we may see."""
    paths: set[str] = set()
    for folder in Path("/proc").glob("[0-9]*/fd"):
        try:
            entries = list(folder.iterdir())
        except OSError:
            continue
        for entry in entries:
            try:
                paths.add(os.readlink(entry))  # noqa: PTH115 - the text of the link is what we compare
            except OSError:
                continue
    return paths

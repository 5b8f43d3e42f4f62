"""Libraries an environment takes from the machine: which it needs, and whether they can be loaded.

A wheel brings most of what its extensions link with; the rest (the C and C++ runtime, OpenMP, the GPU driver) is the
machine's, and may vanish or change under a built environment.
"""

import json
import os
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from harness.env.audit import elf

_TAIL_BYTES = 1 << 20

# What a process of the environment itself finds, without running any of its code.
_PROBE = """
import ctypes, json, sys
failed = []
for name in json.load(sys.stdin):
    try:
        ctypes.CDLL(name)
    except OSError:
        failed.append(name)
print(json.dumps(failed))
"""


def needed(site_packages: Path) -> list[str]:
    """The sonames that libraries under a folder are linked with and that no file there provides, sorted."""
    from harness.env.audit import elf  # noqa: PLC0415  (numpy with it, which asking for what is built must not cost)

    asked: set[str] = set()
    given: set[str] = set()
    for path in _libraries(site_packages):
        given.add(path.name)
        try:
            library = _read(path)
        except elf.Unreadable:
            continue  # the audit names it; a guard only compares
        asked |= set(library.needed)
        given |= {library.soname} if library.soname else set()
    return sorted(asked - given)


def _read(path: Path) -> "elf.Library":
    """The library's tables, without a pass over its code: its two ends are enough to find them."""
    from harness.env.audit import elf  # noqa: PLC0415  (as above)

    with path.open("rb") as stream:
        head = stream.read(64)
        size = stream.seek(0, os.SEEK_END)
        stream.seek(max(0, size - _TAIL_BYTES))
        ends = elf.Ends(sha256="", size=size, head=head, tail=stream.read())
        stream.seek(0)
        return elf.read(stream, ends)


def _libraries(folder: Path) -> Iterator[Path]:
    for root, _, names in os.walk(folder):
        for name in names:
            if name.endswith(".so") or ".so." in name:
                path = Path(root, name)
                with path.open("rb") as stream:
                    if stream.read(4) == b"\x7fELF":
                        yield path


def unloadable(python: Path, names: Iterable[str]) -> list[str]:
    """Those of some sonames that an interpreter's dynamic loader cannot load here and now."""
    asked = json.dumps(list(names))
    answer = subprocess.run(
        [python, "-I", "-S", "-c", _PROBE], input=asked, capture_output=True, text=True, check=False
    )
    # A library that kills the process that loads it can hardly be used: without an answer, none is loadable.
    return list(json.loads(answer.stdout if answer.returncode == 0 else asked))

"""Is this the machine a lock is for, and which Python on it is one the lock covers?"""

import os
import platform
import re
import subprocess
import sys
from dataclasses import dataclass

import uv

from harness.env.locked import Lock
from harness.env.spec import Platform
from harness.errors import BuildError


@dataclass(frozen=True, slots=True)
class Interpreter:
    """A Python to build with: `version` as `3.12.1`."""

    path: str
    version: str

    @property
    def minor(self) -> str:
        """As `3.12`."""
        return ".".join(self.version.split(".")[:2])


def check_platform(wanted: Platform) -> None:
    """Refuse a machine that the lock is not for.

    Raises:
        BuildError: says what the machine is and what the lock wants.
    """
    hint = "locking works anywhere; build on such a machine, or in a container (`harness image`)"
    if not sys.platform.startswith(wanted.os):
        raise BuildError(f"this environment is for {wanted.os}, this machine runs {sys.platform}", hint=hint)
    if platform.machine() != wanted.arch:
        raise BuildError(f"this environment is for {wanted.arch}, this machine is {platform.machine()}", hint=hint)
    name, _, version = (os.confstr("CS_GNU_LIBC_VERSION") or "no glibc").partition(" ")
    if name != "glibc" or _numbers(version) < _numbers(wanted.glibc):
        seen = f"{name} {version}"
        raise BuildError(f"this environment needs glibc {wanted.glibc} or newer, this machine has {seen}", hint=hint)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))


def choose(lock: Lock, asked: str | None) -> Interpreter:
    """The Python to build with: the one asked for, else the running one, else the newest the lock covers.

    Raises:
        BuildError: there is none, or the one asked for is not covered.
    """
    running = f"{sys.version_info.major}.{sys.version_info.minor}"
    if asked is None and running in lock.pythons:
        return _asked_version(sys.executable, lock)
    if asked is not None and (found := _uv_python(asked)):
        return _asked_version(found, lock)
    for version in () if asked else reversed(lock.pythons):
        if found := _uv_python(version):
            return _asked_version(found, lock)
    wanted = asked or " or ".join(lock.pythons)
    raise BuildError(
        f"no Python {wanted} on this machine, which `{lock.name}` needs",
        hint="install one (`uv python install`, or the system's packages), or name one with `--python`",
    )


def _uv_python(request: str) -> str | None:
    command = [uv.find_uv_bin(), "python", "find", "--no-project", "--no-python-downloads", request]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    return answer.stdout.strip() if answer.returncode == 0 else None


def _asked_version(path: str, lock: Lock) -> Interpreter:
    code = "import platform; print(platform.python_version())"
    answer = subprocess.run([path, "-I", "-c", code], capture_output=True, text=True, check=False)
    found = Interpreter(path, answer.stdout.strip())
    if answer.returncode or found.minor not in lock.pythons:
        wanted = " or ".join(lock.pythons)
        raise BuildError(f"`{path}` is Python {found.version or '?'}, `{lock.name}` is locked for {wanted}")
    return found

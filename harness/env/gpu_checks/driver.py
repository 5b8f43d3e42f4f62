"""Is the driver new enough for this environment's CUDA?"""

import subprocess
from pathlib import Path
from typing import Any


def check(settings: dict[str, Any]) -> dict[str, Any]:
    """The driver's release against `floor`, as in `580` or `580.65`."""
    version = _version()
    if version is None:
        return {
            "ok": False,
            "message": "neither `nvidia-smi` nor the kernel module tells the driver's version",
            "facts": {},
        }
    floor = settings["driver_floor"]
    facts = {"driver": version, "floor": floor}
    if floor and _numbers(version) < _numbers(floor):
        return {"ok": False, "message": f"driver {version} is older than {floor}", "facts": facts}
    return {"ok": True, "message": f"driver {version}", "facts": facts}


def _version() -> str | None:
    try:
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        if done.returncode == 0 and done.stdout.strip():
            return done.stdout.split()[0]
    except (OSError, subprocess.TimeoutExpired):
        pass
    try:
        first = Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
    except (OSError, IndexError):
        return None
    return next((word for word in first.split() if word[:1].isdigit() and "." in word), None)


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".") if part.isdigit()]

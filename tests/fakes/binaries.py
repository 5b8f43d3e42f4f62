"""Small real binaries for the audit: libraries from gcc and nvcc, containers written byte by byte, wheels of them."""

import base64
import hashlib
import shutil
import struct
import subprocess
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

KERNEL = """
__global__ void add(float *a, const float *b, int n) { int i = threadIdx.x; if (i < n) a[i] += b[i]; }
extern "C" void go(float *a, const float *b, int n) { add<<<1, 32>>>(a, b, n); }
"""


def library(
    path: Path,
    *,
    needs: Sequence[Path] = (),
    defines: Sequence[str] = (),
    uses: Sequence[str] = (),
    soname: str | None = None,
) -> Path:
    """A shared library that exports some symbols and leaves others undefined, by their mangled names."""
    if shutil.which("gcc") is None:
        pytest.skip("no gcc here to build a library with")
    lines = [
        f'int defined{i}(void) __asm__("{name}"); int defined{i}(void) {{ return 0; }}'
        for i, name in enumerate(defines)
    ]
    lines += [f'extern int used{i}(void) __asm__("{name}");' for i, name in enumerate(uses)]
    lines.append("int caller(void) { return 0" + "".join(f" + used{i}()" for i in range(len(uses))) + "; }")
    path.parent.mkdir(parents=True, exist_ok=True)
    source = path.with_name(path.name + ".c")
    source.write_text("\n".join(lines))
    argv = ["gcc", "-shared", "-fPIC", "-nostdlib", f"-Wl,-soname,{soname or path.name}", "-Wl,--no-as-needed"]
    subprocess.run([*argv, str(source), "-o", str(path), *map(str, needs)], check=True, capture_output=True)
    source.unlink()
    return path


def device_library(path: Path, *flags: str) -> Path:
    """A library with one CUDA kernel, compiled for what the flags say."""
    if shutil.which("nvcc") is None:
        pytest.skip("no nvcc here to compile a kernel with")
    path.parent.mkdir(parents=True, exist_ok=True)
    source = path.with_name(path.name + ".cu")
    source.write_text(KERNEL)
    argv = ["nvcc", "-shared", "-Xcompiler", "-fPIC", "-cudart", "none", *flags, str(source), "-o", str(path)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"this nvcc does not take {' '.join(flags)}: {done.stderr.strip()}")
    return path


def entry(kind: int, number: int, flags: int, payload: bytes = b"\0" * 16) -> bytes:
    """One entry of a container, with the header of 64 bytes that nvcc 13.0 writes for machine code."""
    header = bytearray(64)
    struct.pack_into("<HHIQ", header, 0, kind, 0x101, len(header), len(payload))
    struct.pack_into("<I", header, 28, number)
    struct.pack_into("<Q", header, 40, flags)
    return bytes(header) + payload


def container(*entries: bytes, version: int = 1) -> bytes:
    """A container of entries."""
    body = b"".join(entries)
    return struct.pack("<IHHQ", 0xBA55ED50, version, 16, len(body)) + body


def wheel(folder: Path, name: str, version: str, files: Mapping[str, bytes | Path]) -> Path:
    """A wheel of these files, with a right RECORD."""
    module = name.replace("-", "_")
    info = f"{module}-{version}.dist-info"
    contents = {path: data.read_bytes() if isinstance(data, Path) else data for path, data in files.items()}
    contents[f"{info}/METADATA"] = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode()
    contents[f"{info}/WHEEL"] = b"Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: cp310-abi3-manylinux2014_x86_64\n"
    contents[f"{info}/RECORD"] = record(contents, f"{info}/RECORD")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{module}-{version}-cp310-abi3-manylinux2014_x86_64.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for inner, data in contents.items():
            archive.writestr(zipfile.ZipInfo(inner, (2026, 1, 1, 0, 0, 0)), data, zipfile.ZIP_DEFLATED)
    return path


def record(contents: Mapping[str, bytes], itself: str) -> bytes:
    """A RECORD (PEP 376): path, sha256 in unpadded urlsafe base64, size."""
    rows = []
    for path, data in contents.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        rows.append(f"{path},sha256={digest},{len(data)}")
    return ("\n".join([*rows, f"{itself},,"]) + "\n").encode()

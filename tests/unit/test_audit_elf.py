"""Reading shared libraries from streams; pyelftools, which reads them another way, says what is right."""

import hashlib
import io
import shutil
import struct
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from elftools.elf.sections import SymbolTableSection
from fakes.binaries import library

from harness.env.audit import elf

TORCH = "_ZN2at6Tensor4dataEv"
CHECK = "_ZN3c106detail14torchCheckFailEPKcS2_j"


@pytest.fixture
def kernels(tmp_path: Path) -> Path:
    """A library that needs another one, of which it uses two torch-facing symbols and a plain one."""
    base = library(tmp_path / "libc10.so", defines=[CHECK, "plain"])
    return library(
        tmp_path / "kernels.so", needs=[base], uses=[CHECK, TORCH, "plain"], defines=["_ZN5torch3opsEv", "run"]
    )


def read(path: Path) -> elf.Library:
    with path.open("rb") as stream:
        return elf.read(stream, elf.drain(stream))


def test_needed_libraries_soname_imports_and_exports_are_read(kernels: Path) -> None:
    found = read(kernels)

    assert found.needed == ("libc10.so",)
    assert found.soname == "kernels.so"
    assert found.imports == {CHECK, TORCH}
    assert found.exports == {"_ZN5torch3opsEv"}


def test_a_big_real_library_reads_as_pyelftools_reads_it() -> None:
    """numpy's core module: C++, thousands of symbols, names of many lengths."""
    path = Path(np._core._multiarray_umath.__file__)
    found = read(path)
    with path.open("rb") as stream:
        other = ELFFile(stream)
        dynamic = other.get_section_by_name(".dynamic")
        assert isinstance(dynamic, DynamicSection)
        needed = [tag.needed for tag in dynamic.iter_tags("DT_NEEDED")]
        sections = [(s.name, s["sh_offset"], s["sh_size"], s["sh_link"]) for s in other.iter_sections()]

    assert list(found.needed) == needed
    assert [(s.name, s.offset, s.size, s.link) for s in found.sections] == sections


def test_torch_facing_symbols_are_those_pyelftools_finds(kernels: Path) -> None:
    with kernels.open("rb") as stream:
        table = ELFFile(stream).get_section_by_name(".dynsym")
        assert isinstance(table, SymbolTableSection)
        undefined = {
            symbol.name
            for symbol in table.iter_symbols()
            if symbol["st_shndx"] == "SHN_UNDEF" and symbol["st_info"]["bind"] == "STB_GLOBAL"
        }

    assert undefined == {CHECK, TORCH, "plain"}
    assert read(kernels).imports == undefined - {"plain"}


@pytest.mark.parametrize(
    ("symbol", "facing"),
    [
        ("_ZN3c104cuda9SetDeviceEab", True),
        ("_ZTIN3c105ErrorE", True),
        ("_Z16THPVariable_WrapN2at10TensorBaseE", True),
        ("_ZNSt6vectorIN2at6TensorESaIS1_EE9push_backEv", True),
        ("aoti_torch_delete_tensor_object", True),
        ("torch_library_impl", True),
        ("THPVariableClass", True),
        ("_ZN10torchaudio4loadEv", False),
        ("_ZN7format26attachEv", False),
        ("_ZNSt6vectorIiSaIiEE9push_backEv", False),
        ("cudaMalloc", False),
    ],
)
def test_a_symbol_is_torch_facing_by_its_namespace(symbol: str, facing: bool) -> None:
    assert bool(elf.TORCH_FACING.search(symbol.encode())) is facing


def test_a_compressed_member_reads_like_the_file(kernels: Path, tmp_path: Path) -> None:
    packed = tmp_path / "packed.zip"
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(kernels, "kernels.so")
    with zipfile.ZipFile(packed) as archive:
        with archive.open("kernels.so") as stream:
            ends = elf.drain(stream)  # type: ignore[arg-type]
        with archive.open("kernels.so") as stream:
            found = elf.read(stream, ends)  # type: ignore[arg-type]

    assert found == read(kernels)
    assert ends.sha256 == hashlib.sha256(kernels.read_bytes()).hexdigest()
    assert ends.size == kernels.stat().st_size


def test_a_section_table_outside_the_kept_tail_is_found_too(kernels: Path, tmp_path: Path) -> None:
    """Signatures and self-extracting data are put behind libraries: the table is then not near the end."""
    longer = tmp_path / "longer.so"
    longer.write_bytes(kernels.read_bytes() + b"\0" * (3 << 20))

    assert read(longer) == read(kernels)


def test_marks_are_found_across_blocks() -> None:
    edge = (1 << 20) - 3  # three of eight bytes in the first block
    data = b"." * edge + b"MARKMARK" + b"." * 100 + b"MARKMARK"

    ends = elf.drain(io.BytesIO(data), b"MARKMARK")

    assert ends.marks == (edge, edge + 108)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: b"#!/bin/sh\n" + data, "not an ELF file"),
        (lambda data: data[:40], "not an ELF file"),
        (lambda data: data[:4] + b"\x01" + data[5:], "not a little-endian 64-bit ELF file"),
        (lambda data: data[:40] + struct.pack("<Q", 0) + data[48:], "it has no section table"),
        (lambda data: data[:62] + struct.pack("<H", 60000) + data[64:], "its section table is damaged"),
        (lambda data: data[:-200], "cut short: "),
    ],
    ids=["another file", "only a start", "32 bits", "no sections", "names nowhere", "cut short"],
)
def test_what_is_no_library_says_why(kernels: Path, damage: object, message: str) -> None:
    data = damage(kernels.read_bytes())  # type: ignore[operator]

    with pytest.raises(elf.Unreadable, match=message):
        elf.read(io.BytesIO(data), elf.drain(io.BytesIO(data)))


def test_the_interpreter_itself_can_be_read() -> None:
    path = shutil.which(Path(sys.executable).resolve())
    assert path is not None

    assert any(name.startswith("libc.so") for name in read(Path(path)).needed)

"""Whether a model on disk is whole: every file its index names, and every byte their headers promise."""

import json
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tiktoken.model", "vocab.json", "tekken.json", "spiece.model")
_LARGEST_HEADER = 100 << 20  # of a safetensors file, as its own reader has it
_PART = re.compile(r"(?P<stem>.*)-(?P<part>\d{5})-of-(?P<parts>\d{5})\.gguf")


def faults(path: Path) -> list[str]:
    """What is wrong with a model, a sentence each; empty when nothing is.

    Args:
        path: a GGUF file, or a folder as `transformers` writes it.
    """
    if not path.exists():
        return [f"`{path}` does not exist"]
    try:
        return list(_folder(path) if path.is_dir() else _gguf(path))
    except OSError as error:
        return [f"`{error.filename or path}` cannot be read: {error.strerror}"]


def _folder(path: Path) -> Iterator[str]:
    if not (path / "config.json").is_file():
        yield f"`{path}` has no config.json, so it is not a model folder"
        return
    if not any((path / name).is_file() for name in _TOKENIZERS):
        yield f"`{path}` has no tokenizer: none of {', '.join(_TOKENIZERS)}"
    weights = list(_weights(path))
    if not weights:
        yield f"`{path}` has no weights: neither safetensors nor pytorch_model files"
    for file in weights:
        if not file.is_file():
            yield f"`{file}` is named by the weight index and missing"
        elif file.suffix == ".safetensors":
            yield from _safetensors(file)
        elif file.stat().st_size == 0:
            yield f"`{file}` is empty"


def _weights(path: Path) -> Iterator[Path]:
    """The files an index names, else those that are there."""
    for name in ("model.safetensors.index.json", "pytorch_model.bin.index.json"):
        if (path / name).is_file():
            index = _json(path / name)
            mapped = index.get("weight_map") if isinstance(index, dict) else None
            yield from (path / file for file in sorted(set((mapped or {}).values())))
            return
    yield from sorted(path.glob("*.safetensors")) or sorted(path.glob("pytorch_model*.bin"))


def _safetensors(file: Path) -> Iterator[str]:
    """Format: u64 header length, JSON header with `data_offsets` of each tensor, data."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        raw = stream.read(8)
        length = struct.unpack("<Q", raw)[0] if len(raw) == 8 else _LARGEST_HEADER + 1
        header = stream.read(length) if length <= _LARGEST_HEADER else b""
    try:
        tensors = json.loads(header)
        end = max((entry["data_offsets"][1] for name, entry in tensors.items() if name != "__metadata__"), default=0)
    except (ValueError, KeyError, TypeError, AttributeError):
        yield f"`{file}` has no safetensors header (a Git LFS pointer, or torn): {size} bytes"
        return
    if size != 8 + length + end:
        yield f"`{file}` has {size} bytes, its header promises {8 + length + end}"


def _gguf(file: Path) -> Iterator[str]:
    if match := _PART.fullmatch(file.name):
        for part in range(1, int(match["parts"]) + 1):
            sibling = file.with_name(f"{match['stem']}-{part:05d}-of-{match['parts']}.gguf")
            if not sibling.is_file():
                yield f"`{sibling}` is missing: the model has {int(match['parts'])} parts"
            else:
                yield from _gguf_header(sibling)
        return
    yield from _gguf_header(file)


def _gguf_header(file: Path) -> Iterator[str]:
    """Format: magic `GGUF`, u32 version, u64 tensors, u64 metadata entries."""
    with file.open("rb") as stream:
        head = stream.read(24)
    if len(head) < 24 or head[:4] != b"GGUF":
        yield f"`{file}` is not GGUF: it starts with {head[:4]!r}"
    elif struct.unpack("<I", head[4:8])[0] not in {2, 3}:
        yield f"`{file}` is GGUF of version {struct.unpack('<I', head[4:8])[0]}, 2 or 3 were expected"


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except ValueError:
        return None

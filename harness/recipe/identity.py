"""What makes a cell the same cell: everything that can move its numbers, resolved to the end, and its sha256.

Not part of it: where the server listens, where files lie, when it ran.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from harness.files import digest, sha256_bytes, sha256_file

_HEAD = 1 << 20


def cell_id(identity: Mapping[str, Any]) -> str:
    """The sha256 of a cell's identity."""
    return digest(identity)


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """How two identities differ, in words: `workload.max_tokens changed from 64 to 128`."""
    before, after = dict(_flat(old)), dict(_flat(new))
    return [
        f"{name} changed from {_shown(before, name)} to {_shown(after, name)}"
        for name in sorted(before.keys() | after.keys())
        if before.get(name) != after.get(name)
    ]


def model_facts(path: Path) -> dict[str, str | int | None]:
    """What identifies a model on disk without reading all of it.

    A folder: sha256 of `config.json` and of the weight index. A file: its size and the sha256 of its first MiB, which
    holds the header and the tokenizer of a GGUF file.
    """
    if path.is_dir():
        index = sorted(path.glob("*.index.json"))
        config = path / "config.json"
        return {
            "config_sha256": sha256_file(config) if config.is_file() else None,
            "index_sha256": sha256_file(index[0]) if index else None,
        }
    if path.is_file():
        with path.open("rb") as stream:
            return {"size": path.stat().st_size, "head_sha256": sha256_bytes(stream.read(_HEAD))}
    return {}


def _flat(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, item in value.items():
        if isinstance(item, Mapping):
            yield from _flat(item, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", item


def _shown(values: Mapping[str, Any], name: str) -> str:
    if name not in values:
        return "nothing"
    text = str(values[name])
    return text if len(text) <= 40 else text[:12] + "…"

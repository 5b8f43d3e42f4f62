"""Levels in other tools' formats, and other tools' results as references."""

import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from ruamel.yaml import YAML

from harness.errors import Fault, InputError
from harness.files import write_atomic
from harness.publish.interop import aiperf, guidellm, openmetrics, rows, sglang, vllm
from harness.publish.interop.measured import Measured
from harness.publish.interop.told import Told, reference
from harness.recipe.references import PublishedLevel, Reference
from harness.stats.arms import level_key, order

EXPORTS = ("vllm", "sglang", "openmetrics", "jsonl")
IMPORTS = ("vllm", "sglang", "aiperf", "guidellm")
_READERS: dict[str, Callable[[dict[str, Any]], Told | list[Told]]] = {
    "vllm": vllm.read,
    "sglang": sglang.read,
    "aiperf": aiperf.read,
    "guidellm": guidellm.read,
}


def export(levels: Sequence[Measured], form: str, folder: Path) -> list[Path]:
    """Write levels into a folder in one of `EXPORTS`.

    Args:
        levels: from `measured.levels`.
        form: `vllm` and `sglang` write a file a level, as their scripts do; the others one file.
        folder: made where it is not there; files of the same name are replaced.

    Returns:
        What was written.

    Raises:
        InputError: a level's requests are needed and not there: a record small enough to commit has none.
    """
    files = {folder / name: content for name, content in _contents(levels, form).items()}
    for path, content in files.items():
        write_atomic(path, content)
    return list(files)


def _contents(levels: Sequence[Measured], form: str) -> dict[str, str]:
    if form == "openmetrics":
        return {"levels.openmetrics.txt": openmetrics.text(levels)}
    if bare := [f"{one.launch}/{one.name}" for one in levels if one.result.requests and not one.records]:
        raise InputError(
            f"no requests are stored of {', '.join(bare)}", hint="export from the run folder, a record has none"
        )
    if form == "jsonl":
        return {"requests.jsonl": rows.text(levels)}
    write, suffix = (vllm.export, "json") if form == "vllm" else (sglang.export, "jsonl")
    # SGLang's script writes `Infinity` for an unbounded rate, which is not JSON by the standard; its readers expect it.
    return {f"{one.launch}-{one.name}.{suffix}": json.dumps(write(one)) + "\n" for one in levels}


def read(paths: Sequence[Path], form: str) -> list[Told]:
    """The levels that results of other tools hold, in the order of load.

    Args:
        paths: files of one tool, each with one result or several.
        form: one of `IMPORTS`.

    Raises:
        InputError: a file does not read, is not of that tool, or a level is there twice; all of it at once.
    """
    faults: list[Fault] = []
    found: dict[str, tuple[Told, Path]] = {}
    for path in paths:
        try:
            for told in _told(path, form):
                key = _key(told)
                if key in found:
                    raise InputError(f"level {key} is there twice, also in `{found[key][1]}`: import them apart")
                found[key] = (told, path)
        except InputError as error:
            faults.append(Fault(f"`{path}`: {error.message}", hint=error.hint))
    if faults:
        raise InputError.of(faults)
    return sorted((told for told, _ in found.values()), key=lambda told: order(PublishedLevel(**told.level).level))


def _told(path: Path, form: str) -> list[Told]:
    found: list[Told] = []
    for data in _objects(path):
        try:
            told = _READERS[form](data)
        except (AttributeError, TypeError) as error:  # a part of another shape than the tool writes
            raise InputError(f"not a result as {form} writes it: {error}") from error
        found += told if isinstance(told, list) else [told]
    return found


def _objects(path: Path) -> list[dict[str, Any]]:
    """The JSON objects of a file: one, or one a line."""
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read: {getattr(error, 'strerror', None) or error}") from error
    try:
        values = [json.loads(content)]
    except (ValueError, RecursionError):
        values = _lines(content)
    if not values or not all(isinstance(value, dict) for value in values):
        raise InputError("holds no JSON objects")
    return values


def _lines(content: str) -> list[Any]:
    try:
        return [json.loads(line) for line in content.splitlines() if line.strip()]
    except (ValueError, RecursionError) as error:
        raise InputError(f"neither JSON nor JSON lines: {error}") from error


def _key(told: Told) -> str:
    """The level's name, once it holds what a reference may hold."""
    try:
        return level_key(PublishedLevel(**told.level).level)
    except ValidationError as error:
        told_faults = "; ".join(f"`{'.'.join(map(str, one['loc']))}`: {one['msg']}" for one in error.errors())
        raise InputError(
            f"cannot be a level of a reference: {told_faults}", hint="was every request a failure?"
        ) from error


def as_reference(told: Sequence[Told], given: dict[str, str | None]) -> str:
    """A reference file's text, checked to load again.

    Args:
        told: from `read`.
        given: as `told.reference` takes it.
    """
    content = reference(told, given)
    Reference.model_validate(content)
    stream, yaml = io.StringIO(), YAML()
    yaml.width = 110
    yaml.dump(content, stream)
    head = (
        "# Imported by `harness import`, not measured by this project. Numbers as the tool wrote them, in our names.\n"
    )
    return head + stream.getvalue()

"""JSON Schema of the files people write, made from the models that read them, for editors and other checkers.

What a model alone does not say is added: a file that `extends` another, and an arm, are parts of a recipe and need
nothing; a package may be written as one word. A schema is looser than the models (it knows no rule across keys), never
stricter: `harness plan` has the last word.
"""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from harness.env.spec import EnvSpec
from harness.errors import InputError
from harness.recipe.expand import ARM_KEYS, GRID_KEYS
from harness.recipe.schema import Recipe
from harness.recipe.site import SiteFile
from harness.strict import suggest

DIALECT = "https://json-schema.org/draft/2020-12/schema"
FOLDER = "schemas"
_EXTENDS = "another file of this kind, relative to this one, that this one is laid over; `null` takes a value away"
Schema = dict[str, Any]


def schema(kind: str) -> Schema:
    """The JSON Schema (draft 2020-12) of a kind of file.

    Args:
        kind: `recipe`, `spec` or `site`.

    Raises:
        InputError: there is no such kind.
    """
    if kind not in KINDS:
        raise InputError(f"there is no schema `{kind}`", hint=suggest(kind, KINDS))
    return {"$schema": DIALECT, **KINDS[kind]()}


def file_name(kind: str) -> str:
    """What a schema's file is called."""
    return f"{kind}.schema.json"


def text(kind: str) -> str:
    """A schema as its file holds it."""
    return json.dumps(schema(kind), indent=1, ensure_ascii=False) + "\n"


def first_line(kind: str, path: Path, root: Path) -> str:
    """The line by which editors find the schema of a file: the path from the file to the project's schemas."""
    relative = os.path.relpath(root / FOLDER / file_name(kind), path.parent)
    return f"# yaml-language-server: $schema={relative}"


def _recipe() -> Schema:
    whole = _plain(Recipe)
    _also_parts(whole, "a recipe that is to be laid under this one: a path from this file")
    arms = _not_null(whole["properties"]["arms"])
    [pattern] = arms["patternProperties"]
    arms["patternProperties"] = {pattern: _or_null({"$ref": "#/$defs/Arm"})}
    whole["$defs"]["Arm"] = {
        "type": "object",
        "additionalProperties": False,
        "description": "What one arm changes of the recipe.",
        "properties": {name: whole["properties"][name] for name in (*ARM_KEYS, *GRID_KEYS)},
    }
    return whole


def _spec() -> Schema:
    whole = _plain(EnvSpec)
    _also_parts(whole, "a spec that is to be laid under this one: its name")
    packages = _not_null(whole["properties"]["packages"])
    word = {"type": "string", "description": "`name==version`, or a range: `name>=1,<2`; extras as in `name[extra]`"}
    packages["items"] = {"anyOf": [word, packages["items"]]}
    return whole


def _site() -> Schema:
    return _plain(SiteFile)


KINDS: Mapping[str, Callable[[], Schema]] = {"recipe": _recipe, "spec": _spec, "site": _site}


def _plain(model: type[BaseModel]) -> Schema:
    """A model's schema without the titles that only repeat names."""
    found: Schema = _untitled(model.model_json_schema())
    return found


def _untitled(value: Any, *, names: bool = False) -> Any:
    """`names`: this mapping's keys are names of properties, among which `title` would be one like any other."""
    if isinstance(value, dict):
        kept = {key: item for key, item in value.items() if names or key != "title" or not isinstance(item, str)}
        return {key: _untitled(item, names=not names and key in {"properties", "$defs"}) for key, item in kept.items()}
    return [_untitled(item) for item in value] if isinstance(value, list) else value


def _also_parts(whole: Schema, extends: str) -> None:
    """Allow `extends`; where it stands nothing else is required, at any depth that files are merged at.

    A value may be `null` there, which takes away what the other file says. What a list holds is replaced and never
    merged, so that its own requirements stay.
    """
    whole["properties"] = {"extends": {"type": "string", "description": extends}, **whole["properties"]}
    sections = {
        name: target
        for name, value in whole["properties"].items()
        if (target := _referred(value)) is not None and whole["$defs"][target].get("required")
    }
    needed: Schema = {"required": whole.pop("required", [])}
    needed["properties"] = {name: {"required": whole["$defs"][target]["required"]} for name, target in sections.items()}
    for target in set(sections.values()):
        del whole["$defs"][target]["required"]
    whole["if"] = {"required": ["extends"]}
    whole["else"] = needed
    for model in (whole, *whole["$defs"].values()):
        model["properties"] = {name: _or_null(value) for name, value in model.get("properties", {}).items()}


def _or_null(value: Schema) -> Schema:
    """A value, or `null`; so for the values of a mapping, too."""
    if isinstance(inner := value.get("additionalProperties"), dict):
        value = {**value, "additionalProperties": _or_null(inner)}
    if named := value.get("patternProperties"):
        value = {**value, "patternProperties": {pattern: _or_null(inner) for pattern, inner in named.items()}}
    options = value.get("anyOf", ())
    if value.get("type") == "null" or any(option.get("type") == "null" for option in options):
        return value
    beside: Schema = {name: value[name] for name in ("description", "default") if name in value}
    plain = {name: item for name, item in value.items() if name not in beside}
    return {**beside, "anyOf": [plain, {"type": "null"}]}


def _not_null(value: Schema) -> Schema:
    """The other side of `_or_null`."""
    found: Schema = value["anyOf"][0]
    return found


def _referred(value: Schema) -> str | None:
    """The model that a property is of, or may be of."""
    for one in (value, *value.get("anyOf", ()), *value.get("allOf", ())):
        if isinstance(reference := one.get("$ref"), str):
            return reference.rpartition("/")[2]
    return None

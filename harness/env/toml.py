"""Write TOML: the few forms our files need, always the same bytes for the same values."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

_LINE = 100


def value(item: Any) -> str:
    """A value on one line. Strings of JSON are strings of TOML, but for the DEL character."""
    if isinstance(item, Mapping):
        inside = ", ".join(f"{key(name)} = {value(part)}" for name, part in item.items() if part is not None)
        return f"{{ {inside} }}" if inside else "{}"
    if isinstance(item, list | tuple):
        return f"[{', '.join(value(part) for part in item)}]"
    return json.dumps(item, ensure_ascii=False).replace("\x7f", "\\u007f")


def key(name: str) -> str:
    """A key, in quotes only where it needs them."""
    bare = name.isascii() and name.replace("-", "").replace("_", "").isalnum()
    return name if bare else value(name)


def pairs(table: Mapping[str, Any]) -> Iterator[str]:
    """The lines of a table: a list of tables, or a long list, gets a line for each item; what is None is left out."""
    for name, item in table.items():
        if item is None:
            continue
        if isinstance(item, list | tuple) and item and (isinstance(item[0], Mapping) or len(value(item)) > _LINE):
            yield f"{key(name)} = ["
            yield from (f"    {value(part)}," for part in item)
            yield "]"
        else:
            yield f"{key(name)} = {value(item)}"

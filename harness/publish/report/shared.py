"""JSON with its repeated parts stored once: a hundred runs draw the same charts of other numbers.

    pack({"a": X, "b": X})  ->  {"parts": [X], "whole": {"a": {"$": 0}, "b": {"$": 0}}}

Parts may hold parts, always ones that come earlier in the list.
"""

import json
from collections import Counter
from typing import Any

_SHORTEST = 40  # characters of JSON that are worth a reference
REFERENCE = "$"


def pack(value: Any) -> dict[str, Any]:
    """A value as its parts and the whole that refers to them."""
    return _Packing(value).result()


class _Packing:
    def __init__(self, value: Any) -> None:
        self._value = value
        self._texts: dict[int, str] = {}
        self._counts = Counter[str]()
        self._places: dict[str, int] = {}
        self._parts: list[Any] = []
        self._count(value)

    def result(self) -> dict[str, Any]:
        whole = self._packed(self._value)
        return {"parts": self._parts, "whole": whole}

    def _count(self, value: Any) -> str:
        """The JSON of a value; every container in it is counted by its own, once for each object."""
        if (known := self._texts.get(id(value))) is not None:
            self._counts[known] += 1
            return known
        if isinstance(value, list | tuple) and not any(isinstance(one, dict | list | tuple) for one in value):
            text = json.dumps(value)  # most of it: a column of numbers
        elif isinstance(value, dict):
            text = "{" + ",".join(f"{json.dumps(key)}:{self._count(one)}" for key, one in value.items()) + "}"
        elif isinstance(value, list | tuple):
            text = "[" + ",".join(self._count(one) for one in value) + "]"
        else:
            return json.dumps(value)
        self._texts[id(value)] = text
        self._counts[text] += 1
        return text

    def _packed(self, value: Any) -> Any:
        if not isinstance(value, dict | list | tuple):
            return value
        text = self._texts[id(value)]
        if self._counts[text] < 2 or len(text) < _SHORTEST:
            return self._inside(value)
        if text not in self._places:
            part = self._inside(value)
            self._places[text] = len(self._parts)
            self._parts.append(part)
        return {REFERENCE: self._places[text]}

    def _inside(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: self._packed(one) for key, one in value.items()}
        return [self._packed(one) for one in value]

"""A flag table from a `--help` snapshot, for engines whose options are not in Python source."""

import re
from collections.abc import Iterator

from harness.engines.flags.table import Flag, FlagTable, Takes, collect

# `-c, --ctx-size N` or `--flag {a,b}`: spellings first, then what a value is called, then prose.
_SPELLING = re.compile(r"--?[A-Za-z][\w.-]*")
_ENTRY = re.compile(r"^\s{0,8}(?P<names>--?[A-Za-z][\w.-]*(?:(?:,\s*|\s+)--?[A-Za-z][\w.-]*)*)(?P<value>[ =][^\s].*)?$")
_CHOICES = re.compile(r"^\{([^{}]*)\}|^\[([\w|-]+\|[\w|-]+)\]|^<([\w|-]+\|[\w|-]+)>")


def from_help(engine: str, version: str, text: str) -> FlagTable:
    """What a `--help` text says an engine accepts.

    Help text names values, not types: a value whose placeholder is `N` is taken for a whole number, choices in braces
    or divided by `|` are taken as such, and anything else is text. Both argparse's layout and llama.cpp's are read.
    """
    return FlagTable(engine, version, "--help", None, collect(_entries(text)))


def _entries(text: str) -> Iterator[Flag]:
    for line in text.splitlines():
        # Two spaces part an entry from its description on the same line.
        entry = re.split(r"\s{2,}(?=\S)", line.strip(), maxsplit=0)
        head = entry[0] if entry else ""
        while len(entry) > 1 and head.endswith(","):
            head, entry = f"{head} {entry[1]}", entry[1:]
        found = _ENTRY.match(head)
        if found and (flag := _flag(found["names"], (found["value"] or "").strip(" ="), head)) is not None:
            yield flag


def _flag(names: str, value: str, head: str) -> Flag | None:
    # argparse repeats the placeholder after each spelling: `--port PORT, -p PORT`.
    spellings = _SPELLING.findall(re.sub(r"\{[^{}]*\}", "", head if "," in value else names))
    long = [name.removeprefix("--") for name in spellings if name.startswith("--")]
    if not long:
        return None
    choices = _CHOICES.match(value)
    options = re.split(r"[,|]", next(group for group in choices.groups() if group)) if choices else None
    return Flag(
        long[0],
        takes=_takes(value, long),
        kind="int" if re.match(r"N\b(?![,.])", value) else "str",
        choices=tuple(option.strip() for option in options) if options else None,
        aliases=tuple(long[1:]),
    )


def _takes(value: str, long: list[str]) -> Takes:
    if not value or value.startswith("-"):
        return "on or off" if f"no-{long[0]}" in long else "nothing"
    return "many" if "..." in value else "one"

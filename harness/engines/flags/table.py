"""What one release of an engine accepts on its command line, as data."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

FORMAT = "harness.flags/1"

_PARSED_BY_ARGPARSE = {"sglang", "vllm"}

Takes = Literal["nothing", "one", "maybe one", "many", "on or off"]
Kind = Literal["str", "int", "float", "size", "json", "other"]


@dataclass(frozen=True, slots=True)
class Flag:
    """One option.

    `name` and `aliases` are long spellings without dashes. `kind` is what its value must parse as; `other` is a
    parser of the engine's own, which is not checked. `choices` are the legal values as text, None where any value or
    an unknown set is legal. `on or off` options also have a `no-` form. `deprecated` and `removed` hold what the
    engine itself says about it.
    """

    name: str
    takes: Takes = "one"
    kind: Kind = "str"
    choices: tuple[str, ...] | None = None
    aliases: tuple[str, ...] = ()
    required: bool = False
    deprecated: str | None = None
    removed: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Only what differs from the plainest option, to keep tables short."""
        plain = asdict(Flag(self.name))
        mine = {key: value for key, value in asdict(self).items() if value != plain[key]}
        return {key: list(value) if isinstance(value, tuple) else value for key, value in mine.items()}


@dataclass(frozen=True, slots=True)
class FlagTable:
    """Every option of one release, the environment variables its source names, and the wheel both were read from."""

    engine: str
    version: str
    source: str
    sha256: str | None
    flags: Mapping[str, Flag] = field(default_factory=dict)
    variables: frozenset[str] = frozenset()

    def find(self, name: str) -> Flag | None:
        """An option by any of its spellings, `no-` forms of on-or-off options included.

        argparse also takes the beginning of a spelling, where it is the beginning of one only: `--tp` is SGLang's
        `--tp-size`.
        """
        if (flag := self.flags.get(name)) is not None:
            return flag
        if (flag := self.flags.get(name.removeprefix("no-"))) is not None and flag.takes == "on or off":
            return flag
        if (flag := next((flag for flag in self.flags.values() if name in flag.aliases), None)) is not None:
            return flag
        begun = self.beginning(name) if self.engine in _PARSED_BY_ARGPARSE else ()
        return self.find(begun[0]) if len(begun) == 1 else None

    def beginning(self, name: str) -> tuple[str, ...]:
        """The spellings that begin with some text."""
        return tuple(spelling for spelling in self.spellings() if spelling.startswith(name)) if name else ()

    def spellings(self) -> Iterator[str]:
        """Every name that is legal to write."""
        for flag in self.flags.values():
            yield flag.name
            yield from flag.aliases
            if flag.takes == "on or off":
                yield f"no-{flag.name}"

    def to_json(self) -> dict[str, Any]:
        """As cached."""
        return {
            "format": FORMAT,
            "engine": self.engine,
            "version": self.version,
            "source": self.source,
            "sha256": self.sha256,
            "flags": {name: self.flags[name].to_json() for name in sorted(self.flags)},
            "variables": sorted(self.variables),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "FlagTable":
        """What `to_json` gave."""
        flags = {name: _flag(name, entry) for name, entry in data["flags"].items()}
        variables = frozenset(data["variables"])
        return cls(data["engine"], data["version"], data["source"], data["sha256"], flags, variables)


def collect(flags: Iterator[Flag]) -> dict[str, Flag]:
    """Options by name; the same option registered twice keeps its last form and all its spellings."""
    table: dict[str, Flag] = {}
    for flag in flags:
        before = table.get(flag.name)
        aliases = dict.fromkeys([*(before.aliases if before else ()), *flag.aliases])
        table[flag.name] = replace(flag, aliases=tuple(aliases))
    return table


def _flag(name: str, entry: Mapping[str, Any]) -> Flag:
    tuples = {key: tuple(value) for key, value in entry.items() if isinstance(value, list)}
    return Flag(**{"name": name, **entry, **tuples})

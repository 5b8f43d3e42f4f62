"""A recipe's `args` as flags: one place for what True, None and a list mean."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Literal, NoReturn

from harness.engines.engine import Scalar
from harness.errors import Fault, InputError

Value = Scalar | Sequence[Scalar]
Lists = Literal["join", "repeat", "spread"]


def flags(args: Mapping[str, Value], *, lists: Lists = "repeat") -> Iterator[str]:
    """Flags and their values, in the order written.

    Args:
        args: long flag names without dashes; True is a bare flag, None and False leave it out.
        lists: how a list is written: `join` gives `--x a,b`, `repeat` gives `--x a --x b`, `spread` gives `--x a b`.
    """
    for name, value in args.items():
        flag = f"--{name}"
        if value is None or value is False:
            continue
        if value is True:
            yield flag
        elif isinstance(value, str) or not isinstance(value, Sequence):
            yield from (flag, str(value))
        else:
            yield from _list(flag, [str(item) for item in value], lists)


def _list(flag: str, values: list[str], lists: Lists) -> Iterator[str]:
    if lists == "join":
        yield from (flag, ",".join(values))
    elif lists == "spread":
        yield from (flag, *values)
    else:
        for value in values:
            yield from (flag, value)


def refuse_ranks(engine: str) -> NoReturn:
    """What `rank_args` does in an engine that runs on one machine only.

    Raises:
        InputError: always.
    """
    raise InputError(
        f"engine `{engine}` runs on one machine only",
        hint="leave `server.nodes` out, or take an engine that spans several",
    )


def refuse_owned(engine: str, args: Mapping[str, Value], owned: Collection[str]) -> None:
    """Refuse flags that the harness itself decides (host, port, model ...): two answers would be one too many.

    Raises:
        InputError: all of them at once.
    """
    faults = [
        Fault(f"`--{name}` of {engine} is set by the harness, the recipe sets it to `{args[name]}`")
        for name in args
        if name in owned
    ]
    if faults:
        raise InputError.of(faults, hint="use `server.host`, `server.port` and `model` in the recipe instead")

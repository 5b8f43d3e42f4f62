"""How far another machine's clock is from ours, bounded: many exchanges over TCP, the quickest of which decide. Pure.

We note when we ask (`asked`) and when the answer is there (`answered`), the other machine when it hears (`heard`) and
when it answers (`said`), each by its own wall clock. Nothing is heard before it was asked: `offset <= heard - asked`.
Nothing is answered before it was said: `offset >= said - answered`. Both hold in every exchange, however long it was
and however unlike its two ways were, and so does the intersection of all. NTP's filter (RFC 5905, section 10) keeps
the exchange of the least delay; this keeps the quickest way there and the quickest way back, of whichever exchange.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Exchange:
    """Four instants, nanoseconds: `asked` and `answered` by our clock, `heard` and `said` by the other's."""

    asked: int
    heard: int
    said: int
    answered: int


@dataclass(frozen=True, slots=True)
class Offset:
    """The other clock's lead on ours in seconds, wrong by no more than `bound_s`, about the instant `at_s` (ours)."""

    offset_s: float
    bound_s: float
    rtt_s: float  # of the quickest exchange
    exchanges: int
    at_s: float

    def to_json(self) -> dict[str, Any]:
        """As a level's record has it."""
        return asdict(self)


def offset(exchanges: Sequence[Exchange]) -> Offset:
    """The offset that all exchanges allow.

    Raises:
        ValueError: none does: a clock was set meanwhile.
    """
    least = max(each.said - each.answered for each in exchanges)
    most = min(each.heard - each.asked for each in exchanges)
    if least > most:
        raise ValueError(f"a clock was set during {len(exchanges)} exchanges: {(least - most) / 1e9:.6f} s do not fit")
    quickest = min(each.answered - each.asked - (each.said - each.heard) for each in exchanges)
    middle = (exchanges[0].asked + exchanges[-1].answered) / 2
    return Offset((least + most) / 2e9, (most - least) / 2e9, quickest / 1e9, len(exchanges), middle / 1e9)


def drift(before: Offset, after: Offset) -> float:
    """Seconds a second by which the other clock runs ahead; 0 where the bounds allow that it does not."""
    moved = after.offset_s - before.offset_s
    if abs(moved) <= before.bound_s + after.bound_s or after.at_s <= before.at_s:
        return 0.0
    return moved / (after.at_s - before.at_s)

"""What the simulated engine reads and writes: token counts, a prefix cache, text that depends on the prompt alone."""

import hashlib
import math
import re
from collections import OrderedDict
from collections.abc import Sequence

BLOCK = 16
_TOKEN = re.compile(r"\w+|[^\w\s]")
_CONSONANTS = "bdfghjklmnprstvz"
_VOWELS = ("a", "e", "i", "o")
_SYLLABLES = tuple(consonant + vowel for consonant in _CONSONANTS for vowel in _VOWELS)
# 64 * 64 words of two syllables: a word stands for one token of the output.
WORDS = tuple(f" {first}{second}" for first in _SYLLABLES for second in _SYLLABLES)
_MASK = (1 << 64) - 1


def split(text: str) -> list[str]:
    """A text's tokens: words and single marks."""
    return _TOKEN.findall(text)


def identity(*parts: object) -> int:
    """64 bits that depend on these parts and nothing else: not on the process, the batch or the time."""
    raw = "\x1f".join(str(part) for part in parts).encode()
    return int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "big")


class Writer:
    """The output text of one request: the same for the same prompt and seed, in any batch and any launch.

    With a divergence the text leaves that path at one token, as a numerically different kernel's would.
    """

    def __init__(self, key: int, diverges_at: int | None = None) -> None:
        self._state = key
        self._diverges_at = diverges_at
        self._position = 0

    def write(self, tokens: int) -> str:
        """The next tokens as text."""
        words = []
        for _ in range(tokens):
            if self._position == self._diverges_at:
                self._state ^= 0x9E3779B97F4A7C15
            # Knuth's 64-bit linear congruential generator; the top 12 bits choose one of 4096 words.
            self._state = (self._state * 6364136223846793005 + 1442695040888963407) & _MASK
            words.append(WORDS[self._state >> 52])
            self._position += 1
        return "".join(words)


def divergence(key: int, share: float, mean_position: float) -> int | None:
    """Where a prompt's output leaves the reference: None for all but `share` of prompts, else geometric, from 0."""
    if identity(key, "diverges") / 2**64 >= share:
        return None
    if mean_position <= 1:
        return 0
    draw = (identity(key, "where") + 1) / (2**64 + 1)
    return int(math.log(draw) / math.log(1 - 1 / mean_position))


class PrefixCache:
    """Blocks of prompts seen before, least recently used out first. Holds keys only."""

    def __init__(self, capacity_tokens: int) -> None:
        self._capacity = capacity_tokens // BLOCK
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def take(self, tokens: Sequence[str]) -> int:
        """Tokens of this prompt found at its start, whole blocks and never all of it; it is remembered from now on."""
        if not self._capacity:
            return 0
        found, key, unbroken = 0, 0, True
        for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
            key = hash((key, tuple(tokens[start : start + BLOCK])))
            if key in self._blocks:
                self._blocks.move_to_end(key)
            else:
                unbroken = False
                self._blocks[key] = None
            found += BLOCK if unbroken else 0
        while len(self._blocks) > self._capacity:
            self._blocks.popitem(last=False)
        return min(found, max(0, len(tokens) - 1))

    def clear(self) -> None:
        """Forget everything."""
        self._blocks.clear()

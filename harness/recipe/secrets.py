"""What in a recipe would be a secret in the open: in its plan, in every record, and in the process listing."""

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from harness.errors import Fault
from harness.recipe.expand import Arm

# `tokens` are mostly what a model reads and writes: in the plural they are secrets only where the name says which.
_SECRET_NAME = re.compile(
    r"(?i)(((^|[_-])(key|bearer)|api_?key|secret|password|passwd|passphrase|credential)s?|"
    r"(^|[_-])(token|auth|authorization|authentication)|"
    r"(^|(^|[_-])(api|access|auth|bearer|hf|hub|refresh)[_-])tokens)([_-]?\d+)?$"
)
_NOT_SECRET = re.compile(r"(?i)(pad|eos|bos|unk|mask|stop|image|special|per|first)[_-]token([_-]?\d+)?$")
_USER_OF_URL = re.compile(r"://[^/?#\s@]+@")
_SECRET_VALUE = re.compile(
    r"(?i:\bbearer\s+)\S{8,}|(?i:\bauthorization[\"']?\s*[:=]\s*[\"']?)\S|"
    r"(^|[\s=:])(hf_|gh[pousr]_|github_pat_|sk-)\S{8,}|[\"'](hf_|gh[pousr]_|github_pat_|sk-)[\w-]{16,}"
)
_SHORTEST = 4  # characters of a secret: `1` switches something on
_HINT = "name a variable in `server.secrets`; the server gets it from your environment, and nothing stores it"


def is_secret(name: str) -> bool:
    """Whether a variable's or flag's name says that its value is a secret."""
    return bool(_SECRET_NAME.search(name)) and not _NOT_SECRET.search(name)


def looks_secret(text: str) -> bool:
    """Whether a value is a secret whatever its name: a URL with a user, a bearer's token, a key with a known head."""
    return bool(_USER_OF_URL.search(text) or _SECRET_VALUE.search(text))


def holds_secret(name: str, value: Any) -> bool:
    """Whether a variable's or flag's value, or anything within it, is a secret by its name or by itself."""
    if isinstance(value, Mapping):
        return any(holds_secret(str(inner), item) for inner, item in value.items())
    if isinstance(value, list | tuple):
        return any(holds_secret(name, item) for item in value)
    if value is None or isinstance(value, bool):
        return False
    text = str(value)
    return (is_secret(name) and len(text) >= _SHORTEST) or looks_secret(text)


def is_secret_flag(word: str) -> bool:
    """Whether a word of an argv, `--flag` or `--flag=value`, names a secret."""
    return word.startswith("-") and is_secret(word.partition("=")[0].lstrip("-"))


def faults(arm: Arm) -> Iterator[Fault]:
    """Secrets that an arm spells out; the faults name places, never values."""
    server = arm.setup.server
    for section, values in (("args", server.args), ("variables", server.variables)):
        for name, value in values.items():
            if holds_secret(name, value):
                yield Fault(f"`server.{section}.{name}` holds a secret", arm.place("server", section, name), hint=_HINT)
    if tells_secret(server.unchecked):
        yield Fault("`server.unchecked` holds a secret", arm.place("server", "unchecked"), hint=_HINT)
    if server.url is not None and "@" in server.url:
        yield Fault("`server.url` holds a user name", arm.place("server", "url"), hint="give the address alone")


def tells_secret(words: Sequence[str]) -> bool:
    """Whether an argv holds a secret's value: after its flag, behind its `=`, or by itself."""
    for word, following in pairwise([*words, "-"]):
        if looks_secret(word):
            return True
        if is_secret_flag(word) and ("=" in word or not following.startswith("-")):
            return True
    return False

"""What in a recipe would be a secret in the open: in its plan, in every record, and in the process listing."""

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise

from harness.errors import Fault
from harness.recipe.expand import Arm

_SECRET_NAME = re.compile(r"(?i)(api_?key|([_-]|^)(key|token|secret|password|passwd|credentials?))$")
_NOT_SECRET = re.compile(r"(?i)(pad|eos|bos|unk|mask|stop|image|special)[_-]token$")
_URL_PASSWORD = re.compile(r"://[^/\s@]*:[^/\s@]+@")
_HINT = "name a variable in `server.secrets`; the server gets it from your environment, and nothing stores it"


def is_secret(name: str) -> bool:
    """Whether a variable's or flag's name says that its value is a secret."""
    return bool(_SECRET_NAME.search(name)) and not _NOT_SECRET.search(name)


def is_secret_flag(word: str) -> bool:
    """Whether a word of an argv, `--flag` or `--flag=value`, names a secret."""
    return word.startswith("-") and is_secret(word.partition("=")[0].lstrip("-"))


def faults(arm: Arm) -> Iterator[Fault]:
    """Secrets that an arm spells out; the faults name places, never values."""
    server = arm.setup.server
    for section, values in (("args", server.args), ("variables", server.variables)):
        for name, value in values.items():
            if (is_secret(name) and value is not None) or _URL_PASSWORD.search(str(value)):
                yield Fault(f"`server.{section}.{name}` holds a secret", arm.place("server", section, name), hint=_HINT)
    if _tells(server.unchecked):
        yield Fault("`server.unchecked` holds a secret", arm.place("server", "unchecked"), hint=_HINT)
    if server.url is not None and "@" in server.url:
        yield Fault("`server.url` holds a user name", arm.place("server", "url"), hint="give the address alone")


def _tells(words: Sequence[str]) -> bool:
    """Whether an argv holds a secret's value: after its flag, behind its `=`, or in a URL."""
    for word, following in pairwise([*words, "-"]):
        if _URL_PASSWORD.search(word):
            return True
        if is_secret_flag(word) and ("=" in word or not following.startswith("-")):
            return True
    return False

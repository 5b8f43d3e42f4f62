"""Site facts: what differs from machine to machine and must not stand in a recipe (model folders, partitions).

One file, `$HARNESS_SITE` or `~/.config/harness/site.yaml`:

    variables: {MODELS: /srv/models}

`${NAME}` in a recipe's model path or server arguments takes its value from there; nothing else is expanded anywhere.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from harness.strict import Strict, parse, read

_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")


class SiteFile(Strict):
    """The site file."""

    variables: dict[str, str] = {}


@dataclass(frozen=True, slots=True)
class Site:
    """Site facts and the file they came from."""

    path: Path
    variables: Mapping[str, str] = field(default_factory=dict)

    def expand(self, text: str) -> str:
        """Replace `${NAME}` where the site knows it; unknown names stay as they are."""
        return _VARIABLE.sub(lambda match: self.variables.get(match[1], match[0]), text)

    def unknown(self, text: str) -> list[str]:
        """Names in a text that the site does not know."""
        return [name for name in _VARIABLE.findall(text) if name not in self.variables]


def load() -> Site:
    """The site file of this machine; an absent one is an empty one."""
    path = Path(os.environ.get("HARNESS_SITE", "~/.config/harness/site.yaml")).expanduser()
    if not path.is_file():
        return Site(path)
    return Site(path, parse(read(path), SiteFile).variables)

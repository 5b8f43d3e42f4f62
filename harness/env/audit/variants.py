"""Libraries a distribution ships several times, for different releases of PyTorch or majors of CUDA, and loads one of.

The loaders go by file name (`..._cu13.abi3.so`, `lib/cu13/...`, `..._torch29-cuda.so`), and so does this.
"""

import re
from collections import defaultdict
from typing import Literal

from harness.env.audit.survey import Contents

_TAGS = {
    "cuda": re.compile(r"(?<=[/_-])cu(\d\d)\d?(?=[/_.-])"),
    "torch": re.compile(r"(?<=[/_-])torch(\d{2,3})(?=[/_.-])"),
}


def unused(item: Contents, kind: Literal["cuda", "torch"], ours: str | None) -> frozenset[str]:
    """The libraries made for another release than this environment's.

    Args:
        item: the distribution.
        kind: which tag in the file names to go by.
        ours: the tag of this environment, such as `13` or `214`; when not known, nothing is left out.

    Returns:
        Paths with the tag of another release, and those without a tag where one with our tag stands beside them.
    """
    if ours is None:
        return frozenset()
    families: dict[str, dict[str, str | None]] = defaultdict(dict)
    for binary in item.binaries:
        tag = _TAGS[kind].search(binary.path)
        families[_stem(_TAGS[kind].sub("", binary.path))][binary.path] = tag[1] if tag else None
    return frozenset(
        path
        for family in families.values()
        for path, tag in family.items()
        if tag != ours and (tag is not None or ours in family.values())
    )


def _stem(path: str) -> str:
    """A path without what surrounded its tag, so that it equals the path of the untagged library."""
    return re.sub(r"[_-]+(?=[._-])", "", path)

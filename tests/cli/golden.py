"""What a command printed, compared with a file; paths and times filtered. `UPDATE_GOLDEN=1 pytest ...` rewrites."""

import os
import re
from pathlib import Path

FOLDER = Path(__file__).parent / "golden"
_FILTERS = (
    (r"\b[0-9a-f]{16}\b", "DIGEST16"),
    (r"\b[0-9a-f]{12}\b", "DIGEST12"),
    (r"harness \d+\.\d+\.\d+", "harness VERSION"),
)


def check(name: str, text: str) -> None:
    """Compare with `golden/NAME`, or write it when asked to."""
    for pattern, word in _FILTERS:
        text = re.sub(pattern, word, text)
    text = "\n".join(line.rstrip() for line in text.splitlines()) + "\n"
    path = FOLDER / name
    if os.environ.get("UPDATE_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert text == path.read_text(), f"{name} changed; UPDATE_GOLDEN=1 rewrites it when that is meant"

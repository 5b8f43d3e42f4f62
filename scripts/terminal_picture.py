"""What a command prints in a terminal, as a picture for documents.

    python scripts/terminal_picture.py --lines 13 FIG.svg compare RUN

The text is the command's own, to the given line. The fonts are the reader's: rich would load them from elsewhere.
"""

import argparse
import io
import os
import re
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text


def picture(words: list[str], lines: int | None = None, width: int = 118) -> str:
    """An SVG of `harness WORDS` and what it prints on stdout, up to so many lines."""
    variables = {**os.environ, "FORCE_COLOR": "1", "COLUMNS": str(width)}
    command = [sys.executable, "-m", "harness", *words]
    printed = subprocess.run(command, capture_output=True, text=True, check=False, env=variables).stdout.splitlines()
    console = Console(record=True, width=width, file=io.StringIO(), force_terminal=True, highlight=False)
    console.print(Text.assemble(("$ ", "bold green"), ("harness " + " ".join(words), "bold")))
    for line in printed[:lines]:
        console.print(Text.from_ansi(line))
    if lines is not None and len(printed) > lines:
        console.print("...")
    drawn = console.export_svg(title="harness", unique_id="terminal")
    drawn = re.sub(r"@font-face \{.*?\}\s*", "", drawn, flags=re.DOTALL)
    return drawn.replace("font-family: Fira Code, monospace", "font-family: ui-monospace, Menlo, Consolas, monospace")


def main() -> None:
    """Write the picture that the arguments ask for."""
    command = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    command.add_argument("--lines", type=int, help="stop after so many lines")
    command.add_argument("figure", type=Path)
    command.add_argument("words", nargs=argparse.REMAINDER, help="the command, without `harness`")
    asked = command.parse_args()
    asked.figure.parent.mkdir(parents=True, exist_ok=True)
    asked.figure.write_text(picture(asked.words, asked.lines))


if __name__ == "__main__":
    main()

"""A report of stored runs as one HTML file that needs nothing else: for people who want to look at a result.

shown       what is shown, from stored records
samples     the parts that come from raw requests and logs, bounded
findings    the top of the page in plain words
provenance  identities, digests and commands
charts      every drawing as a Vega-Lite specification
bundle      the drawing library as one script
page        all of it as HTML
"""

from collections.abc import Sequence
from pathlib import Path

from harness.errors import InputError
from harness.files import write_atomic


def write_report(runs: Sequence[Path], path: Path) -> int:
    """Write one report about some runs or published tables; returns its size in bytes.

    Args:
        runs: run folders, or reference files; runs may still go on, or have been killed.
        path: the HTML file to write, replaced whole.

    Raises:
        InputError: a path is neither, or the file cannot be written.
    """
    from harness.publish.report import page, shown  # noqa: PLC0415 - a template engine and scipy, for this verb alone

    if path.suffix.lower() not in {".html", ".htm"}:
        raise InputError(f"a report is an .html file, got `{path}`", hint="name one with `-o`")
    text = page.render(shown.read_all(runs))
    write_atomic(path, text)
    return len(text.encode())

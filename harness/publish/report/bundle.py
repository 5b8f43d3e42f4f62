"""Vega, Vega-Lite and vega-embed as one script to put into a page; made once a version, because that takes seconds."""

from importlib.metadata import version
from pathlib import Path

from harness.env import places
from harness.errors import InputError
from harness.files import write_atomic

_SNIPPET = "window.drawChart = vegaEmbed;"


def script() -> str:
    """The libraries as one script, from the harness's cache or made anew."""
    import vl_convert  # noqa: PLC0415 - a large library, which nothing else needs

    kept = _kept(f"vega-{version('vl-convert-python')}.js")
    if kept and kept.is_file():
        return kept.read_text(encoding="utf-8")
    made = vl_convert.javascript_bundle(_SNIPPET)
    if kept:
        write_atomic(kept, made)
    return made


def _kept(name: str) -> Path | None:
    try:
        return places.home() / "cache" / "report" / name
    except InputError:  # outside a project there is no cache
        return None

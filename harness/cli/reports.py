"""Verbs: report, plot. They turn stored runs into things to look at."""

import argparse
from pathlib import Path

from harness.cli.talk import Verbs, common

KINDS = ("throughput", "rate", "ratio", "pareto", "acceptance", "ttft", "tpot", "gaps", "timeline")


def register(verbs: Verbs) -> None:
    """Add this room's verbs."""
    report = common(
        verbs.add_parser(
            "report",
            help="a run, or several, as one HTML file",
            description="Write one self-contained HTML file: answer, findings, charts, tables, provenance. It needs no "
            "network and no other file. Works on runs that still go on or were killed, and on published tables.",
        )
    )
    report.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folders, or files of recipes/references")
    report.add_argument("-o", "--output", type=Path, default=Path("report.html"), help="default: report.html")
    report.set_defaults(run=write)
    plot = common(
        verbs.add_parser(
            "plot",
            help="one chart of runs as SVG or PNG",
            description="Write one chart of a run, or of several over each other, as a figure for papers and Markdown.",
        )
    )
    plot.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folders, or files of recipes/references")
    plot.add_argument("-o", "--output", type=Path, required=True, metavar="FIG", help="an .svg or .png file")
    plot.add_argument("--kind", choices=KINDS, default="throughput", help="what to draw (default: throughput)")
    plot.add_argument("--level", metavar="LAUNCH/LEVEL", help="of a timeline, such as 01-baseline/c4")
    plot.add_argument("--width", type=_width, default=640, help="in pixels; a PNG has twice as many (default: 640)")
    plot.set_defaults(run=draw)


def _width(text: str) -> int:
    value = int(text)
    if not 100 <= value <= 4000:
        raise argparse.ArgumentTypeError(f"`{text}` is not between 100 and 4000")
    return value


def write(arguments: argparse.Namespace) -> int:
    """`harness report`."""
    from harness.publish.report import write_report

    size = write_report(arguments.runs, arguments.output)
    arguments.talk.data(
        {"report": str(arguments.output), "bytes": size, "runs": len(arguments.runs)}, f"{arguments.output}"
    )
    return 0


def draw(arguments: argparse.Namespace) -> int:
    """`harness plot`."""
    from harness.publish import figures

    figures.write_figure(arguments.runs, arguments.output, arguments.kind, level=arguments.level, width=arguments.width)
    arguments.talk.data({"figure": str(arguments.output), "kind": arguments.kind}, f"{arguments.output}")
    return 0

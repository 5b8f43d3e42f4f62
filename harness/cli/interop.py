"""Verbs: export and import. Levels in the formats of other tools, and their results as references to compare with."""

import argparse
from pathlib import Path

from harness.cli.talk import Verbs, common
from harness.errors import InputError

EXPORTS = ("vllm", "sglang", "openmetrics", "jsonl")
IMPORTS = ("vllm", "sglang", "aiperf", "guidellm")


def register(verbs: Verbs) -> None:
    """Add this room's verbs."""
    export = common(verbs.add_parser("export", help="write a run's levels as other tools write them"))
    export.add_argument("run_folder", type=Path, metavar="RUN", help="a run folder")
    export.add_argument("--format", required=True, choices=EXPORTS, help="whose format")
    export.add_argument(
        "--level",
        action="append",
        default=[],
        metavar="NAME",
        help="only this one: `c4`, or `01-baseline/c4`; repeatable",
    )
    export.add_argument("-o", "--out", type=Path, required=True, metavar="DIR", help="folder for the files")
    export.set_defaults(run=export_levels)
    read = common(verbs.add_parser("import", help="read another tool's results as a reference for `compare`"))
    read.add_argument("files", nargs="+", type=Path, metavar="FILE", help="its results; several are levels of one arm")
    read.add_argument("--format", required=True, choices=IMPORTS, help="which tool wrote them")
    read.add_argument("-o", "--out", type=Path, required=True, metavar="FILE.yaml", help="the reference to write")
    read.add_argument("--arm", help="the arm's name (default: the reference's)")
    read.add_argument("--server", help="names the deployment; references of one server are checked against each other")
    read.add_argument("--hardware", help="what it ran on")
    read.add_argument("--model", help="the model (default: as the files say)")
    read.set_defaults(run=import_results)


def export_levels(arguments: argparse.Namespace) -> int:
    """`harness export`."""
    from harness.publish import interop
    from harness.publish.interop.measured import levels
    from harness.run import store

    found = levels(store.open_run(arguments.run_folder), arguments.level)
    written = interop.export(found, arguments.format, arguments.out)
    arguments.talk.data({"files": [str(path) for path in written]}, "\n".join(str(path) for path in written))
    return 0


def import_results(arguments: argparse.Namespace) -> int:
    """`harness import`."""
    from harness.files import write_atomic
    from harness.publish import interop

    out: Path = arguments.out
    if out.suffix not in {".yaml", ".yml"}:
        raise InputError(f"`{out}` cannot be a reference: its name must end in `.yaml`")
    if out.exists():
        raise InputError(f"`{out}` exists already", hint="remove it, or name another file")
    told = interop.read(arguments.files, arguments.format)
    given = {
        "reference": out.stem,
        "arm": arguments.arm or out.stem,
        "source": ", ".join(path.name for path in arguments.files),
        **{name: getattr(arguments, name) for name in ("server", "hardware", "model")},
    }
    write_atomic(out, interop.as_reference(told, given))
    differences = list(dict.fromkeys(line for one in told for line in one.differences))
    shown = "\n".join([str(out), *(f"  {line}" for line in differences)])
    arguments.talk.data({"file": str(out), "levels": len(told), "differences": differences}, shown)
    return 0

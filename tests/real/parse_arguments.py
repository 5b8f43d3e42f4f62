"""Ask an engine's own argument parser: run by that engine's python, imports nothing of ours.

    python parse_arguments.py sglang|vllm < cases.json > answers.json

`cases.json` is a list of argument vectors. Prints one JSON object: `accepted`, whether the parser took each, and
`options`, every option it has (spellings, number of values, type, choices).
"""

import argparse
import contextlib
import io
import json
import sys


def parser_of(engine: str) -> argparse.ArgumentParser:
    if engine == "sglang":
        from sglang.srt.server_args import ServerArgs

        parser = argparse.ArgumentParser()
        ServerArgs.add_cli_args(parser)
        return parser
    sys.argv = ["vllm", "serve"]
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    try:
        from vllm.entrypoints.common.cli_args import make_arg_parser
    except ImportError:
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
    return make_arg_parser(FlexibleArgumentParser())


def accepts(parser: argparse.ArgumentParser, argv: list[str]) -> bool:
    with contextlib.redirect_stderr(io.StringIO()):
        try:
            parser.parse_args(argv)
        except SystemExit:
            return False
    return True


def option(action: argparse.Action) -> dict[str, object]:
    kind = action.type
    return {
        "spellings": [text[2:] for text in action.option_strings if text.startswith("--")],
        "action": type(action).__name__,
        "nargs": action.nargs,
        "type": None if kind is None else getattr(kind, "__name__", repr(kind)),
        "choices": None if action.choices is None else sorted(map(str, action.choices)),
    }


def main() -> None:
    engine = sys.argv[1]
    cases = json.load(sys.stdin)
    out, sys.stdout = sys.stdout, sys.stderr  # engines print while they are imported
    parser = parser_of(engine)
    answers = {
        "accepted": [accepts(parser, argv) for argv in cases],
        "options": [option(action) for action in parser._actions if action.option_strings],
    }
    json.dump(answers, out)


if __name__ == "__main__":
    main()

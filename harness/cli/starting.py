"""Verbs: init, schema, completion. What one has before the first run: files to begin with, and an editor that helps."""

import argparse
from collections.abc import Iterator
from pathlib import Path

from harness.cli.talk import Verbs, common
from harness.errors import AnswerIsNo

ENGINES = ("sglang", "vllm", "llamacpp", "simulated", "attach")
SHELLS = ("bash", "zsh", "tcsh")


def register(verbs: Verbs) -> None:
    """Add this room's verbs."""
    init = common(
        verbs.add_parser(
            "init",
            help="write a commented recipe and spec for an engine, to begin with",
            description="Write a recipe, and for an engine that needs one the spec of its environment, with comments "
            "on what one may want to change. They plan as they are. A file that is there already is never touched.",
        )
    )
    init.add_argument("engine", choices=ENGINES, metavar="ENGINE", help=", ".join(ENGINES))
    init.add_argument("folder", nargs="?", type=Path, default=Path(), metavar="DIR", help="default: here")
    init.set_defaults(run=write_starters)
    schema = common(
        verbs.add_parser(
            "schema",
            help="JSON Schema of recipes, specs and the site file, for editors",
            description="Print the JSON Schema (draft 2020-12) of a kind of file, or write all of them into a folder. "
            "A file's first line names its schema (`# yaml-language-server: $schema=...`), so that editors complete "
            "and check it.",
        )
    )
    schema.add_argument("kind", nargs="?", choices=("recipe", "spec", "site"), default="recipe", help="default: recipe")
    how = schema.add_mutually_exclusive_group()
    how.add_argument("--write", type=Path, metavar="DIR", help="write all of them, such as into schemas")
    how.add_argument("--check", type=Path, metavar="DIR", help="exit 1 when those written are not these")
    schema.set_defaults(run=show_schema)
    completion = common(
        verbs.add_parser(
            "completion",
            help="shell completion: print the script for a shell",
            description="Print a completion script. For bash: `harness completion bash > "
            "~/.local/share/bash-completion/completions/harness`; for zsh into a file `_harness` on $fpath.",
        )
    )
    completion.add_argument("shell", choices=SHELLS)
    completion.set_defaults(run=show_completion)


def write_starters(arguments: argparse.Namespace) -> int:
    """`harness init`."""
    from harness.publish import starters

    written = starters.write(arguments.engine, arguments.folder)
    arguments.talk.data([str(path) for path in written], "\n".join(str(path) for path in written))
    for line in starters.next_steps(arguments.engine, arguments.folder):
        arguments.talk.line(line)
    return 0


def show_schema(arguments: argparse.Namespace) -> int:
    """`harness schema`."""
    from harness.files import write_atomic
    from harness.publish import schemas

    if arguments.write is not None:
        paths = [arguments.write / schemas.file_name(kind) for kind in schemas.KINDS]
        for kind, path in zip(schemas.KINDS, paths, strict=True):
            write_atomic(path, schemas.text(kind))
        arguments.talk.data([str(path) for path in paths], "\n".join(map(str, paths)))
        return 0
    if arguments.check is not None:
        return _check_schemas(arguments)
    arguments.talk.data(schemas.schema(arguments.kind))
    return 0


def _check_schemas(arguments: argparse.Namespace) -> int:
    from harness.publish import schemas

    paths = {arguments.check / schemas.file_name(kind): schemas.text(kind) for kind in schemas.KINDS}
    stale = [str(path) for path, text in paths.items() if not path.is_file() or path.read_text() != text]
    arguments.talk.data({"stale": stale}, "\n".join(stale) or f"{len(paths)} schemas are current")
    if stale:
        raise AnswerIsNo("schemas are stale", details=stale, hint=f"run `harness schema --write {arguments.check}`")
    return 0


def show_completion(arguments: argparse.Namespace) -> int:
    """`harness completion`."""
    import shtab

    from harness.cli import parser

    whole = parser()
    for action in _actions(whole):
        if action.type is Path:
            folder = action.metavar in {"DIR", "RUN"}
            action.complete = shtab.DIRECTORY if folder else shtab.FILE  # type: ignore[attr-defined]
    script = shtab.complete(whole, shell=arguments.shell)
    arguments.talk.data({"shell": arguments.shell, "script": script}, script)
    return 0


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Every argument of a parser and of the verbs below it."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for verb in action.choices.values():
                yield from _actions(verb)

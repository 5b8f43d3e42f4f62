"""Verb: image."""

import argparse
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.cli.talk import Verbs, common

if TYPE_CHECKING:
    from harness.env.image import Engine, Plan


def register(verbs: Verbs) -> None:
    """Add this room's verb."""
    verb = common(
        verbs.add_parser(
            "image",
            help="build a container image of an environment",
            description="Build Dockerfile.cuda13 for a spec: `harness build` from the lock's wheels alone, then "
            "`harness validate --static`, which must pass. Of this machine it holds the project's files and no others.",
        )
    )
    verb.add_argument("spec", metavar="SPEC", help="name or path of a spec")
    verb.add_argument("--engine", choices=("docker", "podman", "buildah"), help="default: the first there is")
    verb.add_argument("--base", metavar="IMAGE", help="the base image, in place of the spec's")
    verb.add_argument("--tag", metavar="NAME", help="the image's name (default: harness/SPEC:ENV_ID)")
    verb.add_argument("--python", metavar="3.N", help="the base image's Python: leave the other versions' wheels out")
    how = verb.add_mutually_exclusive_group()
    how.add_argument("--print", action="store_true", help="only say what would be run")
    how.add_argument("--context", type=Path, metavar="DIR", help="only write the build context, and say what to run")
    verb.set_defaults(run=image)


def image(arguments: argparse.Namespace) -> int:
    """Build an image, or say how."""
    from harness.cli.environments import showing_progress
    from harness.env import image as images

    wanted = images.plan(arguments.spec, base=arguments.base, tag=arguments.tag, python=arguments.python)
    talk = arguments.talk
    if wanted.base != wanted.packages.spec.base_image:
        talk.line(f"base image {wanted.base}: not the lock's, so the env_id tells of the packages only")
    if "@sha256:" not in wanted.base:
        talk.line(f"base image {wanted.base}: named without its digest, so another day may bring other contents")
    if arguments.print:
        talk.data(*_answer(wanted, arguments.engine or "docker", "CONTEXT"))
        return 0
    if arguments.context:
        with showing_progress(talk) as progress:
            images.lay_out(wanted, arguments.context, progress)
        talk.data(*_answer(wanted, arguments.engine or "docker", str(arguments.context)))
        return 0
    engine = images.choose(arguments.engine)
    with showing_progress(talk) as progress:
        image_id = images.build(wanted, engine, progress)
    answer = {"image": wanted.tag, "image_id": image_id, "engine": engine, "arguments": images.arguments(wanted)}
    talk.data(answer, f"{wanted.tag}: {image_id}")
    return 0


def _answer(wanted: "Plan", engine: "Engine", context: str) -> tuple[dict[str, Any], str]:
    from harness.env import image as images

    words, variables = images.command(engine, wanted, context), dict(images.variables(engine))
    value = {
        "image": wanted.tag,
        "engine": engine,
        "arguments": images.arguments(wanted),
        "command": words,
        "variables": variables,
    }
    return value, " ".join([*(f"{name}={part}" for name, part in variables.items()), shlex.join(words)])

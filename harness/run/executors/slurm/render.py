"""The batch script of a job, as a function of values: what `harness plan --on slurm` prints and `sbatch` gets.

Nothing of a recipe is in it: the node agent reads the plan itself. What a site file says is quoted, never expanded.
"""

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from harness.errors import InputError
from harness.recipe.site import Container, Slurm
from harness.run.executors.slurm.pieces import Batch, Step

AGENT = "harness.run.node_agent"
# What a job gets of the submitting shell's environment; beyond it only what the site file and the recipe name.
PASSED = ("HOME", "LANG", "LOGNAME", "PATH", "USER")
_UNSAFE = re.compile(r"[\x00-\x1f\x7f\"\\%$`]")


@dataclass(frozen=True, slots=True)
class Order:
    """What a script is rendered from.

    `run` and `folder` (of this submission) are absolute paths on the shared file system. `variables` say where project
    and state lie; `secrets` are names of variables that are handed on by name.
    """

    name: str
    number: int
    batch: Batch
    run: Path
    folder: Path
    cwd: Path
    python: str
    token: str
    variables: Mapping[str, str] = field(default_factory=dict)
    secrets: tuple[str, ...] = ()


def script(order: Order, site: Slurm) -> str:
    """The whole script.

    Raises:
        InputError: a folder's name would mean something else in it.
    """
    for path in (order.run, order.cwd):
        if _UNSAFE.search(str(path)):
            raise InputError(
                f"`{path}` cannot be named in a batch script", hint="no quotes, `%`, `$` or backslashes in folder names"
            )
    lines = [
        "#!/bin/bash -l" if site.modules else "#!/bin/sh",
        *(f"#SBATCH {option}" for option in _options(order, site)),
        "set -u",
        *(f"module load {shlex.quote(module)}" for module in site.modules),
        *(f"export {name}={shlex.quote(value)}" for name, value in _exports(order, site).items()),
        *_steps(order, site),
    ]
    return "\n".join(lines) + "\n"


def _options(order: Order, site: Slurm) -> Iterator[str]:
    batch = order.batch
    yield f"--job-name={order.name}"
    yield f"--comment={_quoted(order.run)}"
    yield f"--chdir={_quoted(order.cwd)}"
    task = "%a" if len(batch.pieces) > 1 else "0"
    yield f"--output={_quoted(order.folder / 'logs' / f'{order.number}-{task}.log')}"
    yield "--open-mode=append"
    if len(batch.pieces) > 1:
        yield f"--array=0-{len(batch.pieces) - 1}" + (f"%{site.parallel}" if site.parallel else "")
    yield f"--nodes={batch.nodes}"
    yield "--ntasks-per-node=1"
    for name in ("partition", "account", "qos", "reservation", "constraint", "time"):
        if value := getattr(site, name):
            yield f"--{name}={value}"
    if site.exclusive:
        yield "--exclusive"
    if site.cpus:
        yield f"--cpus-per-task={site.cpus}"
    if site.memory:
        yield f"--mem={site.memory}"
    yield from _gpus(batch.gpus, site)
    yield "--requeue" if site.requeue else "--no-requeue"
    yield f"--signal=TERM@{round(site.grace_s)}"
    yield f"--export={','.join(sorted({*PASSED, *order.secrets}))}"
    yield from site.arguments


def _gpus(count: int, site: Slurm) -> Iterator[str]:
    """GPUs on each machine, in the dialect of the site."""
    if count == 0 or site.gpus == "none":
        return
    kind = f"{site.gpu_type}:" if site.gpu_type else ""
    yield f"--gres=gpu:{kind}{count}" if site.gpus == "gres" else f"--gpus-per-node={kind}{count}"


def _exports(order: Order, site: Slurm) -> dict[str, str]:
    inside = {} if site.container else dict(order.variables)  # an image has its own project and state
    scratch = {"TMPDIR": site.scratch} if site.scratch else {}
    return {**inside, **scratch, **site.environment}


def _steps(order: Order, site: Slurm) -> Iterator[str]:
    """One `srun` for each step; the last one's exit code is the job's."""
    steps = order.batch.pieces[0].steps
    for number, step in enumerate(steps):
        which = [] if len(steps) == 1 else ["--step", str(number)]
        agent = [AGENT, str(order.run), order.folder.name, str(order.number), order.token, *which]
        words = shlex.join(["srun", *_srun(order, step, site), *_command(order, step, site), "-m", *agent])
        yield f"exec {words}" if number == len(steps) - 1 else f"{words} || exit $?"


def _srun(order: Order, step: Step, site: Slurm) -> Iterator[str]:
    """One agent a machine, with every CPU of the job there: which of them it uses is its own business."""
    nodes = order.batch.nodes
    yield from (f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1", "--cpu-bind=none")
    yield from ("--export=ALL", "--kill-on-bad-exit=0", "--wait=0", "--unbuffered")
    if site.container and site.container.plugin == "pyxis":
        yield f"--container-image={step.image}"
        yield f"--container-mounts={','.join(_mounts(order, site.container))}"
        yield f"--container-workdir={order.cwd}"
        yield from site.container.arguments


def _command(order: Order, step: Step, site: Slurm) -> list[str]:
    """What `srun` starts: the harness's python, inside the step's image where there is one."""
    container = site.container
    if container is None:
        return [order.python]
    if container.plugin == "pyxis":
        return [container.python]
    option = "--mount" if container.plugin == "enroot" else "--bind"
    mounts = [word for mount in _mounts(order, container) for word in (option, mount)]
    if container.plugin == "enroot":
        return ["enroot", "start", *mounts, *container.arguments, str(step.image), container.python]
    head = ["apptainer", "exec", "--nv", "--pwd", str(order.cwd)] if order.batch.gpus else ["apptainer", "exec"]
    return [*head, *mounts, *container.arguments, str(step.image), container.python]


def _mounts(order: Order, container: Container) -> list[str]:
    """The run folder and the folder the recipe is named from, under their own names; then the site's."""
    return [f"{order.run}:{order.run}", f"{order.cwd}:{order.cwd}", *container.mounts]


def _quoted(path: Path) -> str:
    """A path as sbatch reads it in a script."""
    text = str(path)
    return f'"{text}"' if re.search(r"[^\w./+=:@-]", text) else text

"""Site facts: what differs from machine to machine and must not stand in a recipe (model folders, partitions).

One file: `--site FILE`, else `$HARNESS_SITE`, else `~/.config/harness/site.yaml`:

    variables: {MODELS: /srv/models}
    slurm: {partition: gpu, account: team, time: "4:00:00"}

`${NAME}` in a recipe's model path or server arguments takes its value from `variables`; nothing else is expanded
anywhere. An unknown key is an error: a site file that is half understood sends jobs to the wrong partition.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from harness.errors import InputError
from harness.recipe.secrets import is_secret
from harness.strict import Strict, parse, read

_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# What may stand in an `#SBATCH` line or a list of Slurm's: no blanks, quotes or control characters.
Word = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.,:@/=+\[\]|&*()-]+$", max_length=200)]
Line = Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f]+$", max_length=4096)]
Cpus = Annotated[int, Field(ge=1, le=4096)]
Seconds = Annotated[float, Field(gt=0, le=1e6)]


class Container(Strict):
    """How servers and their harness run in an image that `harness image` built; each environment has its own."""

    plugin: Literal["pyxis", "enroot", "apptainer"] = Field(description="what runs images on this cluster")
    images: dict[str, Line] = Field(min_length=1, description="environment -> image: `name@sha256:...`, or a file")
    mounts: list[Line] = Field(default=[], description="HOST:INSIDE; the run folder and the recipe's are always there")
    arguments: list[Line] = Field(default=[], description="more arguments of the plugin, passed as they are")
    python: Line = Field(default="/opt/harness/tools/bin/python", description="the harness's python inside")


class Slurm(Strict):
    """How jobs are asked for on this site."""

    partition: Word | None = Field(default=None, description="as `sbatch --partition`")
    account: Word | None = Field(default=None, description="as `sbatch --account`")
    qos: Word | None = Field(default=None, description="as `sbatch --qos`")
    reservation: Word | None = Field(default=None, description="as `sbatch --reservation`")
    constraint: Word | None = Field(default=None, description="as `sbatch --constraint`")
    time: Annotated[str, Field(pattern=r"^(\d+-)?\d+(:\d+){0,2}$")] | None = Field(
        default=None, description="limit of one job, as Slurm writes it: minutes, h:m:s, or days-h:m:s"
    )
    exclusive: bool = Field(default=True, description="no other jobs on the machines: what they do would be measured")
    cpus: Cpus | None = Field(default=None, description="CPUs of a machine to ask for; default: the partition's")
    client_cpus: Cpus | None = Field(
        default=None,
        description="CPUs of a job that the load client has to itself; default: a quarter, at least 1",
    )
    memory: Annotated[str, Field(pattern=r"^\d+[KMGT]?$")] | None = Field(
        default=None, description="of a machine, as `sbatch --mem`"
    )
    gpus: Literal["gres", "gpus-per-node", "none"] = Field(default="gres", description="how GPUs are asked for here")
    gpu_type: Word | None = Field(default=None, description="a GPU type as this cluster names it")
    parallel: Annotated[int, Field(ge=1, le=10_000)] | None = Field(
        default=None, description="how many jobs of a run may go at once (array throttle)"
    )
    requeue: bool = Field(default=True, description="let Slurm start a job again after a node failure or preemption")
    grace_s: Seconds = Field(default=60.0, description="how long before its time limit a job is asked to stop")
    poll_s: Seconds = Field(default=5.0, description="between questions to Slurm while a run is followed")
    patience_s: Seconds = Field(
        default=180.0, description="how long Slurm may be silent, or say of a job what we do not understand"
    )
    modules: list[Word] = Field(default=[], description="environment modules that a job loads")
    environment: dict[str, Line] = Field(default={}, description="variables of the job; no secrets")
    scratch: Line | None = Field(default=None, description="TMPDIR on the machines")
    python: Line | None = Field(default=None, description="the harness's python on the machines; default: this one")
    container: Container | None = Field(default=None, description="how servers run in images")
    arguments: list[Annotated[str, Field(pattern=r"^--[a-z][a-z-]*(=[^\x00-\x20\x7f\"'\\#]+)?$")]] = Field(
        default=[], description="more options of sbatch: `--option=value`"
    )

    @field_validator("environment")
    @classmethod
    def _open(cls, value: dict[str, str]) -> dict[str, str]:
        for name in value:
            if not _NAME.fullmatch(name):
                raise ValueError(f"`{name}` cannot name a variable")
            if is_secret(name):
                raise ValueError(f"`{name}` would be a secret in a script that others may read")
        return value

    @model_validator(mode="after")
    def _one_gpu_dialect(self) -> Self:
        if self.gpu_type and self.gpus == "none":
            raise ValueError("`gpu_type` needs `gpus: gres` or `gpus: gpus-per-node`")
        return self


class SiteFile(Strict):
    """The site file."""

    variables: dict[str, str] = Field(default={}, description="values of ${NAME} in model paths and server arguments")
    slurm: Slurm | None = Field(default=None, description="how jobs are asked for")


@dataclass(frozen=True, slots=True)
class Site:
    """Site facts and the file they came from."""

    path: Path
    variables: Mapping[str, str] = field(default_factory=dict)
    slurm: Slurm = field(default_factory=Slurm)

    def expand(self, text: str) -> str:
        """Replace `${NAME}` where the site knows it; unknown names stay as they are."""
        return _VARIABLE.sub(lambda match: self.variables.get(match[1], match[0]), text)

    def unknown(self, text: str) -> list[str]:
        """Names in a text that the site does not know."""
        return [name for name in _VARIABLE.findall(text) if name not in self.variables]


def load(named: Path | None = None) -> Site:
    """The site file that was named, else this machine's; an absent one of this machine is an empty one.

    Raises:
        InputError: the one named is not there, or a file is faulty; all faults with line and column.
    """
    path = named or Path(os.environ.get("HARNESS_SITE", "~/.config/harness/site.yaml")).expanduser()
    if not path.is_file():
        if named is not None:
            raise InputError(f"there is no site file `{named}`", hint="`--site` names a YAML file")
        return Site(path)
    found = parse(read(path), SiteFile)
    return Site(path, found.variables, found.slurm or Slurm())

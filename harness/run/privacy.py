"""What we keep to ourselves: secrets by name, and folders nobody else reads."""

import os
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.recipe.secrets import is_secret, is_secret_flag

_SHORTEST = 4  # replacing every `1` of a log would hide more than it protects

# What a server gets from our own environment: where things are and how text is encoded, nothing that tunes it.
# CUDA_VISIBLE_DEVICES and the SLURM_ variables say which part of the machine is ours, and the interfaces which network
# joins the machines: facts of a site, which no recipe knows.
_PASSED = re.compile(
    r"PATH|HOME|USER|LOGNAME|SHELL|LANG|LANGUAGE|LC_\w+|TZ|TMPDIR|XDG_\w+|SSL_CERT_(FILE|DIR)|CUDA_VISIBLE_DEVICES|"
    r"SLURM_\w+|LD_LIBRARY_PATH|(NCCL|GLOO)_SOCKET_IFNAME|NCCL_IB_HCA"
)
_TUNING = re.compile(
    r"(NCCL|SGLANG|SGL|VLLM|FLASHINFER|TORCH|TORCHINDUCTOR|PYTORCH|CUDA|TRITON|OMP|MKL|GGML|LLAMA|HF|CUTE|TVM|PYTHON)_?\w*"
)


def secret_values(names: Iterable[str], variables: Mapping[str, str]) -> dict[str, str]:
    """The values to hide, by name: those named, and those whose names say so."""
    chosen = set(names) | {name for name in variables if is_secret(name)}
    return {name: variables[name] for name in sorted(chosen) if len(variables.get(name, "")) >= _SHORTEST}


def redact_text(text: str, secrets: Mapping[str, str]) -> str:
    """Text with the values of secrets replaced by `[NAME]`, longest first."""
    for name, value in sorted(secrets.items(), key=lambda item: -len(item[1])):
        text = text.replace(value, f"[{name}]")
    return text


def redact_json(value: Any, secrets: Mapping[str, str]) -> Any:
    """JSON that somebody else wrote, as it may be stored: known values replaced, and whatever a secret's name holds."""
    if isinstance(value, str):
        return redact_text(value, secrets)
    if isinstance(value, list | tuple):
        return [redact_json(item, secrets) for item in value]
    if isinstance(value, Mapping):
        return {
            redact_text(str(name), secrets): "[redacted]"
            if isinstance(item, str) and item and is_secret(str(name))
            else redact_json(item, secrets)
            for name, item in value.items()
        }
    return value


def redact_argv(argv: Sequence[str], secrets: Mapping[str, str]) -> list[str]:
    """Argv as it may be stored: known values replaced, and whatever follows a flag that names a secret."""
    shown: list[str] = []
    hide = False
    for word in argv:
        flag, equals, _ = word.partition("=")
        names_secret = is_secret_flag(word)
        if hide and not word.startswith("-"):
            shown.append("[redacted]")
        elif names_secret and equals:
            shown.append(f"{flag}=[redacted]")
        else:
            shown.append(redact_text(word, secrets))
        hide = names_secret and not equals
    return shown


def show_argv(argv: Sequence[str]) -> str:
    """Argv as people read it: quoted like a shell line, secrets hidden."""
    return shlex.join(redact_argv(argv, {}))


def redact_variables(variables: Mapping[str, str], secrets: Mapping[str, str]) -> dict[str, str]:
    """Variables as they may be stored."""
    return {
        name: "[redacted]" if name in secrets or is_secret(name) else redact_text(value, secrets)
        for name, value in sorted(variables.items())
    }


def server_environment(
    variables: Mapping[str, str], *, secrets: Iterable[str] = (), ambient: Mapping[str, str] | None = None
) -> dict[str, str]:
    """The whole environment of a server: a short list of ours, the secrets named, and what the plan says.

    A tuning variable that happens to be set in a shell never reaches a server; the plan is where it belongs.
    """
    ambient = os.environ if ambient is None else ambient
    named = set(secrets)
    passed = {name: value for name, value in ambient.items() if name in named or _PASSED.fullmatch(name)}
    return {**passed, **variables}


def withheld(variables: Mapping[str, str], ambient: Mapping[str, str] | None = None) -> list[str]:
    """Names of tuning variables in our environment that a server does not get."""
    ambient = os.environ if ambient is None else ambient
    return sorted(
        name for name in ambient if _TUNING.fullmatch(name) and not _PASSED.fullmatch(name) and name not in variables
    )


def private_folder(path: Path) -> Path:
    """Make a folder (and its parents) that only we may enter; one that exists already keeps its mode."""
    if not path.is_dir():
        path.mkdir(parents=True, mode=0o700)
        path.chmod(0o700)  # whatever the umask says
    return path

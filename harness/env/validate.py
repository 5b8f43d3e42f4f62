"""Ask the GPU: each check its own process under the environment's Python, with a deadline. A hang is a result.

The checks themselves are in `gpu_checks/`, cheap ones first. What can be told from files alone is `env.audit`.
"""

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from harness.errors import InputError
from harness.strict import Strict, suggest

FORMAT = "harness.gpu-validation/1"

_SCRIPTS = Path(__file__).with_name("gpu_checks")
_EVIDENCE_LINES = 12
_GRACE_S, _LAST_S = 2.0, 10.0

State = Literal["ok", "fail", "hang", "crash", "garbled", "not run"]


@dataclass(frozen=True, slots=True)
class Check:
    """One check: its file in `gpu_checks/`, how long it may take, and what a failure asks for.

    `needs` names the distributions without which there is nothing to check.
    """

    name: str
    script: str
    deadline_s: float
    remedy: str
    needs: tuple[str, ...] = ()


CHECKS = (
    Check("devices", "devices", 120, "run it on the machine the spec is for, or correct `cuda.arch` in the spec"),
    Check("arch-list", "arch_list", 120, "take a PyTorch build whose architecture list covers this GPU"),
    Check(
        "torch-kernel",
        "torch_kernel",
        180,
        "see the arch list and the driver; `CUDA_LAUNCH_BLOCKING=1` shows the kernel",
    ),
    Check(
        "sgl-kernel",
        "sgl_kernel_op",
        180,
        "see `harness validate --static`: the kernel wheel must fit PyTorch's ABI, CUDA major and this GPU",
        needs=("sgl-kernel", "sglang-kernel"),
    ),
    Check(
        "triton",
        "triton_kernel",
        300,
        "its assembler must know this GPU: Triton 3.6 or newer, or `TRITON_PTXAS_PATH` for older ones",
        needs=("triton",),
    ),
    Check(
        "flashinfer-jit",
        "flashinfer_jit",
        900,
        "nvcc must be found and know this GPU (12.9 or newer for SM 12.x with FlashInfer 0.6.7 to 0.7.0)",
        needs=("flashinfer-python",),
    ),
    Check("peer-access", "peer_access", 300, "look at IOMMU and ACS settings; `NCCL_P2P_DISABLE=1` goes round P2P"),
    Check(
        "all-reduce",
        "all_reduce",
        180,
        "a hang is P2P blocked by IOMMU or ACS, or too wide a P2P level: try NCCL_P2P_DISABLE=1, then NCCL_P2P_LEVEL",
    ),
    Check(
        "symmetric-memory",
        "symmetric_memory",
        180,
        "leave `--enable-torch-symm-mem` off; it needs peer access between all GPUs",
    ),
    Check("driver", "driver", 60, "install a driver at or above the floor in the spec"),
)
IMPORTS = Check("imports", "imports", 600, "the message names the module; `harness validate --static` often says why")


class Result(Strict):
    """What one check found. `evidence` is the end of its output when it did not answer properly."""

    check: str
    state: State
    seconds: float
    message: str
    remedy: str | None = None
    facts: dict[str, Any] = {}
    evidence: tuple[str, ...] = ()


class Report(Strict):
    """All checks of one environment on one machine."""

    format: str = FORMAT
    environment: str
    env_id: str | None
    gpu: bool
    results: tuple[Result, ...]

    @property
    def passed(self) -> bool:
        """Whether there was a GPU (where one is needed) and nothing went wrong."""
        return self.gpu and all(result.state in ("ok", "not run") for result in self.results)


class _Answer(Strict):
    """What a check writes."""

    ok: bool
    message: str
    facts: dict[str, Any] = {}
    no_gpu: bool = False


@dataclass(frozen=True, slots=True)
class Subject:
    """The environment to check: its interpreter, the variables its processes get, and what the spec promises.

    `devices` are the numbers of the architectures it is for (120 for sm_120), `driver_floor` the oldest driver release.
    """

    label: str
    env_id: str | None
    python: Path
    variables: Mapping[str, str]
    distributions: frozenset[str]
    devices: tuple[int, ...] = ()
    driver_floor: str | None = None

    def settings(self) -> dict[str, Any]:
        """What every check is told."""
        return {
            "devices": list(self.devices),
            "driver_floor": self.driver_floor,
            "distributions": sorted(self.distributions),
        }


def choose(names: Sequence[str]) -> tuple[Check, ...]:
    """The checks of these names, in the order they run; all of them when none is named.

    Raises:
        InputError: a name is not a check's.
    """
    known = {check.name for check in CHECKS}
    for name in names:
        if name not in known:
            raise InputError(f"there is no GPU check `{name}`", hint=suggest(name, known))
    return tuple(check for check in CHECKS if not names or check.name in names)


def run(
    subject: Subject,
    checks: Sequence[Check] = CHECKS,
    *,
    deadline_s: float | None = None,
    progress: Callable[[Result], None] | None = None,
) -> Report:
    """Run the checks one after the other.

    Args:
        subject: the environment.
        checks: what to run. Without a GPU, what follows the first check that finds so is not run.
        deadline_s: for every check, in place of its own.
        progress: told each result as it comes.
    """
    results: list[Result] = []
    gpu = True
    for check in checks:
        if not gpu:
            result = _not_run(check, "there is no GPU")
        elif check.needs and not subject.distributions.intersection(check.needs):
            result = _not_run(check, f"the environment has no {' or '.join(check.needs)}")
        else:
            result, gpu = _one(subject, check, deadline_s or check.deadline_s)
        results.append(result)
        if progress:
            progress(result)
    return Report(environment=subject.label, env_id=subject.env_id, gpu=gpu, results=tuple(results))


def _not_run(check: Check, why: str) -> Result:
    return Result(check=check.name, state="not run", seconds=0.0, message=why)


def _one(subject: Subject, check: Check, deadline_s: float) -> tuple[Result, bool]:
    """One check; also whether there is a GPU, as far as it knows."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="harness-check-") as folder:
        answer, output = Path(folder, "answer.json"), Path(folder, "output.txt")
        code = _process(subject, check, (answer, output), deadline_s)
        said = answer.read_bytes() if answer.exists() else None
        tail = tuple(output.read_text(errors="replace").splitlines()[-_EVIDENCE_LINES:])
    return _judged(check, (code, said, tail), (time.monotonic() - begin, deadline_s))


def _process(subject: Subject, check: Check, files: tuple[Path, Path], deadline_s: float) -> int | None:
    """Run it in a group of its own; None when the deadline ended it."""
    answer, output = files
    argv = [str(subject.python), str(_SCRIPTS / "runner.py"), check.script, json.dumps(subject.settings()), str(answer)]
    try:
        with output.open("wb") as stream:
            process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                env={**os.environ, **subject.variables},
                start_new_session=True,
            )
    except OSError as error:
        raise InputError(
            f"cannot run `{subject.python}`: {error.strerror}", hint="build the environment again: `harness build`"
        ) from error
    try:
        return process.wait(deadline_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        _end(process)


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End the whole group, and see it gone: asked first, so that a driver call may finish, then made to."""
    for number, patience_s in ((signal.SIGTERM, _GRACE_S), (signal.SIGKILL, _LAST_S)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        until = time.monotonic() + patience_s
        while time.monotonic() < until:
            if process.poll() is not None and not _group_lives(process.pid):
                return
            time.sleep(0.02)


def _group_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def _judged(
    check: Check, ended: tuple[int | None, bytes | None, tuple[str, ...]], times: tuple[float, float]
) -> tuple[Result, bool]:
    code, said, tail = ended
    seconds, deadline_s = times

    def result(state: State, message: str, facts: dict[str, Any] | None = None) -> Result:
        fine = state == "ok"
        return Result(
            check=check.name,
            state=state,
            seconds=round(seconds, 2),
            message=message,
            remedy=None if fine else check.remedy,
            facts=facts or {},
            evidence=() if fine else tail,
        )

    if code is None:
        return result("hang", f"no answer within {deadline_s:g} s; it was ended"), True
    if said is None:
        return result("crash", f"ended by {_ending(code)} without an answer"), True
    try:
        answer = _Answer.model_validate_json(said)
    except ValidationError as error:
        return result("garbled", f"its answer cannot be understood: {error.errors()[0]['msg']}"), True
    if answer.no_gpu:
        return result("fail", f"no GPU on this machine: {answer.message}"), False
    return result("ok" if answer.ok else "fail", answer.message, answer.facts), True


def _ending(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        return signal.Signals(-code).name
    return f"signal {-code}"

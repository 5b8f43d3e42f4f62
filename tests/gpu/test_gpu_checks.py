"""The GPU checks on a real GPU, in the environment that `$HARNESS_GPU_SPEC` names (default `sglang-cu130`)."""

import os
import shutil

import pytest

from harness.env import build, lock, manifest, validate
from harness.env.audit import fatbin

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(3600)]


def test_every_check_answers_and_none_fails() -> None:
    if shutil.which("nvidia-smi") is None:
        pytest.skip("no NVIDIA GPU on this machine")
    locked = lock.read_for(os.environ.get("HARNESS_GPU_SPEC", "sglang-cu130"))
    built = build.find(locked)
    if built is None or locked.wanted.cuda is None:
        pytest.skip(f"the environment of `{locked.name}` is not built for a GPU: run `harness build {locked.name}`")
    python = ".".join(built.python_version.split(".")[:2])
    subject = validate.Subject(
        label=locked.name,
        env_id=locked.env_id,
        python=built.python,
        variables=built.variables,
        distributions=frozenset(manifest.expected(locked, python)),
        devices=tuple(map(fatbin.device, locked.wanted.cuda.arch)),
        driver_floor=locked.wanted.cuda.driver.lstrip("<>=~! "),
    )

    report = validate.run(subject)

    assert {result.check: result.message for result in report.results if result.state not in ("ok", "not run")} == {}
    assert report.passed

"""The built CPU environments of the slow engines, and a tiny model for them."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.env import build, lock, places, spec
from harness.env.build import Built


def built(name: str) -> Built:
    path = places.spec_path(name)
    return build.build(lock.read(places.lock_path(path)), spec.load(path))


@pytest.fixture(scope="session")
def sglang_env() -> Built:
    return built("sglang-cpu")


@pytest.fixture(scope="session")
def vllm_env() -> Built:
    return built("vllm-cpu")


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Built], Path]:
    """The tiny model, made by the first environment that asks; `tests/real/tiny_llama.py` says what it is."""
    made = tmp_path_factory.mktemp("models") / "tiny-llama"

    def make(env: Built) -> Path:
        if not made.exists():
            subprocess.run(
                [env.python, Path(__file__).parent / "tiny_llama.py", made],
                check=True,
                capture_output=True,
                timeout=180,
            )
        return made

    return make

"""What tests of several rooms share: the tiny model, and the built environment that can serve it."""

import signal
from pathlib import Path

import pytest
import tiny_model as maker

# A test run that was started in the background inherits an ignored SIGINT, and would hand it on to all it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A 6.8 MB random Llama as GGUF."""
    return maker.write(tmp_path_factory.mktemp("models") / "tiny.gguf")


@pytest.fixture(scope="session")
def noisy_draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with 5 % noise on its weights: a draft that is right about six times in ten."""
    return maker.write(tmp_path_factory.mktemp("models") / "tiny-noise.gguf", noise=0.05)


@pytest.fixture(scope="session")
def llamacpp_python() -> str:
    """The python of the environment `llamacpp-cpu`, built from its lock if it was not before."""
    from harness.env import build, lock, places, spec

    spec_path = places.spec_path("llamacpp-cpu")
    built = build.build(lock.read(places.lock_path(spec_path)), spec.load(spec_path))
    return str(built.python)

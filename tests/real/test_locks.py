"""The committed locks, resolved again against the real indexes."""

from pathlib import Path

import pytest

from harness.env import lock as locks
from harness.env import locked, places, spec
from harness.errors import InputError

ENVSPECS = Path(__file__).parents[2] / "envspecs"
COMMITTED = sorted(path.name.removesuffix(".lock.toml") for path in (ENVSPECS / "locks").glob("*.lock.toml"))

pytestmark = pytest.mark.real


@pytest.mark.parametrize("name", COMMITTED)
def test_resolving_a_committed_lock_again_gives_the_same_bytes(name: str) -> None:
    wanted = spec.load(ENVSPECS / f"{name}.yaml")
    path = places.lock_path(ENVSPECS / f"{name}.yaml")
    try:
        again = locks.make(wanted, locks.read(path))
    except InputError as error:
        if "cannot be reached" in error.message:
            pytest.skip(error.message)
        raise
    assert locks.diff(locks.read(path), again) == []
    assert locked.render(again) == path.read_text()

"""Real wheels, by the locks that name them: fetched once into the project's wheelhouse, verified by sha256."""

from pathlib import Path

from harness.env import fetch, lock, places, spec


def locked_wheel(name: str, package: str) -> Path:
    """The wheel of one package in the lock of one of the project's specs."""
    wanted = spec.load(places.spec_path(name))
    whole = lock.read(places.lock_path(name))
    only = tuple(item for item in whole.packages if item.name == package)
    (path,) = fetch.fetch(whole.model_copy(update={"packages": only}), wanted, places.wheelhouse(), whole.pythons[:1])
    return path

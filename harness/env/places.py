"""Where things lie: the project's files, and the harness's own state beside them.

The project is the nearest folder upwards that holds `envspecs/`, else the nearest with recipes in `recipes/`; or it is
`$HARNESS_PROJECT`. State that can be made again (built environments, downloaded wheels, caches) lives in
`$HARNESS_HOME`, by default `.harness/` in the project.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from harness.errors import InputError
from harness.strict import suggest


def project_root() -> Path:
    """The nearest folder upwards that holds `envspecs/`; where none does, the nearest with recipes in `recipes/`.

    Engines that need no environment need no specs, and git keeps no empty folder.

    Raises:
        InputError: no such folder here or above, or `$HARNESS_PROJECT` names none.
    """
    if named := os.environ.get("HARNESS_PROJECT"):
        root = Path(named).resolve()
        if _has_specs(root) or _has_recipes(root):
            return root
        raise InputError(
            f"`$HARNESS_PROJECT` is `{named}`, which holds no `envspecs` folder and no recipes",
            hint="point it at the project's top folder, or unset it and run from inside the project",
        )
    here = Path.cwd().resolve()
    upwards = (here, *here.parents)
    for known in (_has_specs, _has_recipes):
        if found := next(filter(known, upwards), None):
            return found
    raise InputError(
        f"no project here: neither `{here}` nor a folder above it holds `envspecs` or recipes in `recipes`",
        hint="run from inside the project, or set `$HARNESS_PROJECT` to its top folder",
    )


def _has_specs(folder: Path) -> bool:
    return (folder / "envspecs").is_dir()


def _has_recipes(folder: Path) -> bool:
    return any((folder / "recipes").glob("*.yaml"))


@contextlib.contextmanager
def standing_in(root: Path) -> Iterator[None]:
    """Another folder as the project, for as long as the context lasts; state that can be made again stays shared.

    By `$HARNESS_PROJECT` and `$HARNESS_HOME`, so that processes started meanwhile stand there too.
    """
    meant = {"HARNESS_HOME": str(home()), "HARNESS_PROJECT": str(root)}
    before = {name: os.environ.get(name) for name in meant}
    os.environ.update(meant)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def home() -> Path:
    """The folder of state that can be made again."""
    if named := os.environ.get("HARNESS_HOME"):
        return Path(named).resolve()
    return project_root() / ".harness"


def environments() -> Path:
    """Built environments, one folder per env_id."""
    return home() / "envs"


def wheelhouse() -> Path:
    """Downloaded wheels, verified."""
    return home() / "wheelhouse"


def jit_cache(env_id: str) -> Path:
    """Where the just-in-time compilers of one environment keep what they made."""
    return home() / "cache" / env_id[:16]


def specs_folder() -> Path:
    """The folder of environment specs."""
    return project_root() / "envspecs"


def spec_names() -> list[str]:
    """The names of the project's specs."""
    return sorted(path.stem for path in specs_folder().glob("*.yaml"))


def spec_path(name_or_path: str) -> Path:
    """The spec of a name, or of a path to the file.

    Raises:
        InputError: there is no such spec; suggests the nearest name.
    """
    if "/" in name_or_path or name_or_path.endswith((".yaml", ".yml")):
        path = Path(name_or_path)
        if path.is_file():
            return path
        raise InputError(f"there is no spec file `{name_or_path}`", hint=suggest(path.stem, spec_names()))
    path = specs_folder() / f"{name_or_path}.yaml"
    if path.is_file():
        return path
    raise InputError(
        f"there is no spec `{name_or_path}` in `{specs_folder()}`", hint=suggest(name_or_path, spec_names())
    )


def lock_path(spec: str | Path) -> Path:
    """Where the lock of a spec lies (whether or not it has been made): `locks/NAME.lock.toml` beside the spec."""
    path = spec if isinstance(spec, Path) else spec_path(spec)
    return path.parent / "locks" / f"{path.stem}.lock.toml"

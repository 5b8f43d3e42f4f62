"""Files to begin with: a commented recipe for each engine, and the spec of its environment where it needs one."""

import shlex
from pathlib import Path

from harness.errors import InputError
from harness.files import write_atomic
from harness.publish import schemas

_HERE = Path(__file__).parent
_FOLDERS = {"recipe": "recipes", "spec": "envspecs"}


def write(engine: str, folder: Path) -> list[Path]:
    """Write an engine's starting files into a project's folder.

    Args:
        engine: one that has a recipe here.
        folder: the project's top folder; made where it is not there.

    Returns:
        What was written.

    Raises:
        InputError: one of the files is there already; nothing is written then.
    """
    texts = {
        folder / _FOLDERS[kind] / f"{engine}.yaml": _text(kind, engine, folder)
        for kind in _FOLDERS
        if _source(kind, engine).is_file()
    }
    if there := [str(path) for path in texts if path.exists()]:
        raise InputError(
            f"`harness init` never overwrites: {', '.join(f'`{path}`' for path in there)}",
            hint="name another folder, or move the file away",
        )
    # Editors look there. A project that has them keeps its own.
    for kind in _FOLDERS:
        path = folder / schemas.FOLDER / schemas.file_name(kind)
        if not path.exists():
            texts[path] = schemas.text(kind)
    for path, text in texts.items():
        write_atomic(path, text)
    # A project is known by its folder of specs, also where its engine needs none.
    (folder / _FOLDERS["spec"]).mkdir(exist_ok=True)
    return list(texts)


def next_steps(engine: str, folder: Path) -> list[str]:
    """What to do with them, a command a line."""
    recipe = f"recipes/{engine}.yaml"
    enter = [] if folder == Path() else [f"cd {shlex.quote(str(folder))}"]
    locks = [f"harness lock {engine}", f"harness build {engine}"] if _source("spec", engine).is_file() else []
    return ["next:", *(f"  {line}" for line in (*enter, f"harness plan {recipe}", *locks, f"harness run {recipe}"))]


def _source(kind: str, engine: str) -> Path:
    return _HERE / f"{engine}.{kind}.yaml"


def _text(kind: str, engine: str, folder: Path) -> str:
    path = folder / _FOLDERS[kind] / f"{engine}.yaml"
    return f"{schemas.first_line(kind, path, folder)}\n{_source(kind, engine).read_text()}"

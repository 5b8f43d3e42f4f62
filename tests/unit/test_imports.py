"""The house's walls: which room may import which."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "harness"
EDGE = {"errors", "files", "strict"}
# A room may import itself, the edge, and these.
MAY = {
    "errors": set(),
    "files": set(),
    "strict": set(),
    "engines": set(),
    "load": {"engines"},
    "stats": {"load", "engines"},
    "env": {"stats"},  # for the base of stored models only
    "recipe": {"env", "engines", "load", "stats"},
    "run": {"recipe", "env", "engines", "load", "stats"},
    "publish": {"run", "recipe", "env", "engines", "load", "stats"},
    "cli": {"publish", "run", "recipe", "env", "engines", "load", "stats"},
    "__main__": {"cli"},
    "__init__": set(),
}


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_rooms(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "harness":
            parts = node.module.split(".")
            names = [parts[1]] if len(parts) > 1 else [alias.name for alias in node.names]
            found |= {name for name in names if (PACKAGE / name).is_dir() or (PACKAGE / f"{name}.py").is_file()}
        elif isinstance(node, ast.Import):
            found |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("harness.")}
    return found


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_module_imports_only_rooms_below_its_own(path: Path) -> None:
    here = room(path)
    assert here in MAY, f"{here} is a room this picture does not know"
    wrong = imported_rooms(path) - MAY[here] - EDGE - {here}
    assert not wrong, f"{path.relative_to(PACKAGE)} imports {sorted(wrong)}"


def test_files_and_errors_know_nothing_of_the_rooms() -> None:
    assert imported_rooms(PACKAGE / "errors.py") == set()
    assert imported_rooms(PACKAGE / "files.py") == {"errors"}


def test_engines_open_no_socket_and_start_no_process() -> None:
    forbidden = {"requests", "socket", "subprocess", "http", "urllib.request"}
    servers = {"llamacpp_server.py", "simulated_server.py"}  # programs that are started, not adapters
    for path in (PACKAGE / "engines").rglob("*.py"):
        if path.name in servers or "simulation" in path.parts or "flags" in path.parts:
            continue
        tree = ast.parse(path.read_text())
        names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        assert not names & forbidden, path

"""One session = one call of the command line or of a tool. Run `python3 -m nox -l` for the list."""

import nox

nox.needs_version = ">=2024.10"
nox.options.sessions = ["lint", "types", "tests"]
nox.options.default_venv_backend = "venv"
PYPROJECT = nox.project.load_toml("pyproject.toml")


def install(session: nox.Session, *groups: str) -> None:
    """The harness itself, and what a session's dependency groups name."""
    session.install("-e", ".", *(name for group in groups for name in PYPROJECT["dependency-groups"][group]))


@nox.session
def demo(session: nox.Session) -> None:
    """The main job on a real server: build llama.cpp's environment, run the demo recipe, update docs/demo.md."""
    install(session)
    session.run("harness", "build", "llamacpp-cpu")
    session.run("harness", "run", "recipes/demo-speculation.yaml", *session.posargs)


@nox.session
def tests(session: nox.Session) -> None:
    """Every test that needs no slow engine."""
    install(session, "tests")
    session.run("python", "-m", "pytest", "-m", "not real and not gpu", *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """Ruff, as linter and formatter."""
    session.install(*PYPROJECT["dependency-groups"]["lint"])
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@nox.session
def types(session: nox.Session) -> None:
    """Mypy, strict."""
    install(session, "types")
    session.run("mypy")


@nox.session
def run(session: nox.Session) -> None:
    """`nox -s run -- RECIPE`: one recipe."""
    install(session)
    session.run("harness", "run", *session.posargs)


@nox.session
def lock(session: nox.Session) -> None:
    """`nox -s lock -- SPEC`: resolve a spec into its lock."""
    install(session)
    session.run("harness", "lock", *session.posargs)


@nox.session
def build(session: nox.Session) -> None:
    """`nox -s build -- SPEC`: build an environment from its lock."""
    install(session)
    session.run("harness", "build", *session.posargs)


@nox.session
def validate(session: nox.Session) -> None:
    """`nox -s validate -- SPEC --static`: audit an environment."""
    install(session)
    session.run("harness", "validate", *session.posargs)

"""One session = one call of the command line or of a tool. Run `python3 -m nox -l` for the list."""

import os
import shutil

import nox

nox.needs_version = ">=2024.10"
nox.options.sessions = ["lint", "types", "tests"]
nox.options.default_venv_backend = "venv"
PYPROJECT = nox.project.load_toml("pyproject.toml")
# Packages that are not named as their program is.
DEBIAN = {"slurmctld": "slurm-wlm", "munged": "munge"}


def install(session: nox.Session, *groups: str) -> None:
    """The harness itself, and what a session's dependency groups name."""
    session.install("-e", ".", *(name for group in groups for name in PYPROJECT["dependency-groups"][group]))


def install_debian(session: nox.Session, *programs: str) -> None:
    """Debian's packages of programs that this machine lacks; where that is not possible, tests say what they skip."""
    missing = [DEBIAN.get(program, program) for program in programs if not shutil.which(program)]
    if not missing:
        return
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        session.log(f"not installed, for want of root or apt-get: {' '.join(missing)}")
        return
    codes = range(256)  # no archive in reach is no reason to test nothing
    session.run("apt-get", "update", "-qq", external=True, silent=True, success_codes=codes)
    wait = ("-o", "DPkg::Lock::Timeout=300")
    session.run("apt-get", *wait, "install", "-y", "-qq", *missing, external=True, silent=True, success_codes=codes)
    if absent := [program for program in programs if not shutil.which(program)]:
        session.log(f"could not be installed: {' '.join(absent)}")


@nox.session
def demo(session: nox.Session) -> None:
    """The main job on a real server: build llama.cpp's environment, run the demo recipe, update docs/demo.md."""
    install(session)
    session.run("harness", "build", "llamacpp-cpu")
    session.run("harness", "run", "recipes/demo-speculation.yaml", *session.posargs)


@nox.session
def tests(session: nox.Session) -> None:
    """Every test that needs no slow engine, with a few faults of each kind."""
    install(session, "tests", "docs")
    install_debian(session, "buildah", "chromium", "debootstrap", "slurmctld", "munged", "zsh")
    session.run("python", "-m", "pytest", "-m", "not real and not gpu and not faults", *session.posargs)


@nox.session
def fuzz(session: nox.Session) -> None:
    """Fuzz what understands a response for a minute, or for `nox -s fuzz -- SECONDS`."""
    install(session, "fuzz")
    session.run("python", "tests/fuzz/streams.py", *(session.posargs or ["60"]))


@nox.session
def slurm(session: nox.Session) -> None:
    """Runs on a real Slurm of four nodes on this machine (part of `tests` too); needs root, to install it."""
    install(session, "tests")
    install_debian(session, "slurmctld", "munged")
    session.run("python", "-m", "pytest", "tests/slurm", *session.posargs)


@nox.session
def faults(session: nox.Session) -> None:
    """Break whole runs in every way we know, and write what came out into docs/reliability.md (about ten minutes)."""
    install(session, "tests")
    session.run(
        "python", "-m", "pytest", "tests/faults", *session.posargs, env={"HARNESS_RELIABILITY": "docs/reliability.md"}
    )


@nox.session
def real(session: nox.Session) -> None:
    """The slow lane: SGLang and vLLM themselves on a CPU, and audits of the real kernel wheels."""
    install(session, "tests")
    session.run("python", "-m", "pytest", "-m", "real", "tests/real", *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """Ruff, as linter and formatter."""
    session.install(*PYPROJECT["dependency-groups"]["lint"])
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("hadolint", "Dockerfile.cuda13")


@nox.session
def docs(session: nox.Session) -> None:
    """The documents as a site, in site/: strict, and whole without a network."""
    session.install(*PYPROJECT["dependency-groups"]["docs"])
    session.run("zensical", "build", "--clean", "--strict", "--config-file", "mkdocs.yml")


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


@nox.session
def image(session: nox.Session) -> None:
    """`nox -s image -- SPEC`: build a container image of an environment."""
    install(session)
    session.run("harness", "image", *session.posargs)


@nox.session
def envs(session: nox.Session) -> None:
    """Build and audit every environment that this machine can hold; say why for the others."""
    install(session)
    session.run("harness", "envs", *session.posargs)

"""Batch scripts as values: the same order gives the same text, whatever the dialect of the site."""

import os
import subprocess
from pathlib import Path

import pytest

from harness.errors import InputError
from harness.recipe.site import Container, Slurm
from harness.run.executors.slurm.pieces import Batch, Piece, Step
from harness.run.executors.slurm.render import Order, script

FILES = Path(__file__).parents[1] / "files" / "slurm"
IMAGE = "registry.example/team/sglang@sha256:" + "0" * 64


def order(*pieces: Piece, **changes: object) -> Order:
    facts: dict[str, object] = {
        "name": "harness:demo.abc123.0",
        "number": 0,
        "batch": Batch(pieces or (piece(),)),
        "run": Path("/shared/runs/demo"),
        "folder": Path("/shared/runs/demo/slurm/01"),
        "cwd": Path("/shared/project"),
        "python": "/shared/venv/bin/python",
        "token": "abc123def4567890",
        "variables": {"HARNESS_HOME": "/shared/state", "HARNESS_PROJECT": "/shared/project"},
    }
    return Order(**{**facts, **changes})  # type: ignore[arg-type]


def piece(nodes: int = 1, gpus: int = 0, *images: str) -> Piece:
    steps = tuple(Step((f"0{number}-arm",), image) for number, image in enumerate(images, 1))
    return Piece(steps or (Step(("01-arm",)),), nodes, gpus)


CASES = {
    "plain": (order(), Slurm()),
    "array": (
        order(*(piece(gpus=8) for _ in range(4)), secrets=("HF_TOKEN",)),
        Slurm(partition="gpu", account="team", qos="high", time="4:00:00", gpu_type="rtx6000", parallel=2),
    ),
    "gpus-per-node": (order(piece(2, 4)), Slurm(gpus="gpus-per-node", cpus=64, memory="0", requeue=False, grace_s=90)),
    "modules": (
        order(),
        Slurm(
            modules=["cuda/13.0"],
            scratch="/local/$USER",
            environment={"NCCL_DEBUG": "WARN; rm -rf /"},
            exclusive=False,
            constraint="ib&rack[1-2]",
            arguments=["--gres-flags=disable-binding"],
        ),
    ),
    "pyxis": (order(piece(2, 8, IMAGE)), Slurm(container=Container(plugin="pyxis", images={"a": IMAGE}))),
    "enroot": (
        order(piece(1, 1, "/images/a.sqsh"), run=Path("/shared/my runs/demo")),
        Slurm(container=Container(plugin="enroot", images={"a": "/images/a.sqsh"}, mounts=["/models:/models"])),
    ),
    "apptainer-two-images": (
        order(piece(1, 8, "/images/a.sif", "/images/b.sif")),
        Slurm(container=Container(plugin="apptainer", images={"a": "x"}, arguments=["--cleanenv"])),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_script_is_as_it_was_reviewed(name: str) -> None:
    """`UPDATE_GOLDEN=1` writes them anew, to be reviewed."""
    text, path = script(*CASES[name]), FILES / f"{name}.sh"
    if os.environ.get("UPDATE_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert text == path.read_text()


@pytest.mark.parametrize("name", CASES)
def test_a_shell_takes_each_script_and_expands_nothing(name: str, tmp_path: Path) -> None:
    """Run with an `srun` that prints its words: what a site file holds arrives as it is."""
    fake = tmp_path / "srun"
    fake.write_text('#!/bin/sh\nfor word in "$@"; do printf "%s\\n" "$word"; done\n')
    fake.chmod(0o755)
    (tmp_path / "script").write_text("module() { :; }\n" + script(*CASES[name]))
    done = subprocess.run(
        ["/bin/sh", tmp_path / "script"],
        env={"PATH": f"{tmp_path}:{os.defpath}", "USER": "me"},
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    words = done.stdout.splitlines()
    made = CASES[name][0]
    assert words.count("harness.run.node_agent") == len(made.batch.pieces[0].steps)
    assert str(made.run) in words
    assert words[-1] in {made.token, "1"}  # or the number of the last step
    assert done.stderr == ""


def test_nothing_of_a_recipe_is_in_a_script() -> None:
    """Arms and launches have names that people choose; the agent reads them from the plan."""
    assert "01-arm" not in script(order(), Slurm())


def test_a_site_cannot_smuggle_a_second_line_into_a_script(tmp_path: Path) -> None:
    from harness.recipe.site import load

    path = tmp_path / "site.yaml"
    path.write_text(
        'slurm:\n  partition: "gpu\\n#SBATCH --uid=0"\n  environment: {"A B": x}\n  arguments: ["--wrap=a b"]\n'
        "  time: soon\n  gpu_type: a b\n"
    )
    with pytest.raises(InputError) as caught:
        load(path)
    assert len(caught.value.faults) == 5
    assert [fault.where.line for fault in caught.value.faults if fault.where] == [2, 3, 4, 5, 6]


@pytest.mark.parametrize("folder", ["/a/100%", '/a/"b', "/a/b\\c", "/a/$HOME", "/a/b\nc"])
def test_a_folder_that_would_mean_something_else_in_a_script_is_refused(folder: str) -> None:
    with pytest.raises(InputError, match="cannot be named in a batch script"):
        script(order(run=Path(folder)), Slurm())


def test_the_site_named_must_be_there_and_secrets_have_no_place_in_it(tmp_path: Path) -> None:
    from harness.recipe.site import load

    with pytest.raises(InputError, match="there is no site file"):
        load(tmp_path / "none.yaml")
    path = tmp_path / "site.yaml"
    path.write_text("slurm: {environment: {HF_TOKEN: abc}}\n")
    with pytest.raises(InputError, match="`HF_TOKEN` would be a secret in a script that others may read"):
        load(path)

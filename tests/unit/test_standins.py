"""The stand-in packages of the CPU environments: everything can be imported, nothing pretends to work."""

import subprocess
import sys
from pathlib import Path

import pytest

from harness.env import overlay

OVERLAYS = Path(__file__).parents[2] / "envspecs" / "overlays"


def run(code: str) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter that finds the stand-in of torchvision."""
    return subprocess.run(
        [
            sys.executable,
            "-IB",
            "-c",
            f"import sys; sys.path.insert(0, {str(OVERLAYS / 'torchvision-standin')!r}); {code}",
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(
    "code",
    [
        "import torchvision.transforms.v2.functional as F",
        "from torchvision.transforms import InterpolationMode, functional; InterpolationMode.BICUBIC",
        "import torchvision; torchvision.io.decode_jpeg",
        "from torchvision import transforms\nclass Own(transforms.Resize): pass",
    ],
)
def test_names_of_torchvision_can_be_imported(code: str) -> None:
    assert run(code).returncode == 0


def test_using_one_says_that_it_is_a_stand_in() -> None:
    answer = run("import torchvision.transforms as T; T.Compose([])")

    assert answer.returncode == 1
    assert (
        "RuntimeError: torchvision.transforms.Compose is a stand-in: torchvision is not installed here" in answer.stderr
    )


@pytest.mark.parametrize("folder", sorted(OVERLAYS.iterdir()), ids=lambda folder: folder.name)
def test_every_overlay_says_what_it_stands_for_and_why(folder: Path) -> None:
    found = overlay.load(folder)

    assert found.why
    # Only a distribution that is asked for by name may carry that name.
    assert found.name.endswith("-standin") or not found.paths

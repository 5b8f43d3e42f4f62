"""llama.cpp itself, from its locked environment, on a node of a real Slurm."""

import json
import os
from pathlib import Path

import pytest
from slurm.conftest import Site

pytestmark = pytest.mark.slurm

RECIPE = """\
recipe: tiny
question: Does llama.cpp run on a cluster as it does here?
env: llamacpp-cpu
model: {{path: {model}, name: tiny}}
server:
  engine: llamacpp
  args: {{threads: 1, parallel: 2, ctx-size: 4096}}
workload: {{prompts: "synthetic:words=8,count=64", max_tokens: 16}}
warmup: {{requests: 1}}
sweep: {{concurrency: [1, 2], requests: 4}}
"""


def test_a_llamacpp_recipe_runs_on_a_node_from_its_verified_environment(
    place: Site, llamacpp_python: str, tiny_model: Path
) -> None:
    place.variables = {"HARNESS_PROJECT": str(Path(__file__).parents[2])}
    place.recipe(text=RECIPE.format(model=tiny_model))
    done = place.run()
    assert done.code == 0, done.err
    launch = place.json("launches/01-only/launch.json")
    assert launch["engine"] == "llamacpp"
    assert launch["argv"][0] == llamacpp_python
    assert Path(llamacpp_python).parents[1].name == launch["env_id"][:16]
    assert launch["drift"] == []
    assert set(launch["node"]["cpus"]["client"]) <= os.sched_getaffinity(0)
    for level in ("c1", "c2"):
        result = json.loads(place.level("01-only", level).read_text())
        assert (result["ok"], result["output_tokens"]) == (4, 4 * 16)
        assert result["simulated"] is False

"""Servers that span machines, and loads that come from several, as jobs of a real cluster."""

import json
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from slurm.conftest import QUICK, Site

pytestmark = pytest.mark.slurm

ONE = QUICK.replace("  slower: {server: {args: {step-ms: 3}}}\n", "").replace("compare: {base: baseline}\n", "")
# Everything is on this host: what ranks and workers say to each other stays on loopback.
HERE = {"HARNESS_NODE_ADDRESS": "127.0.0.1"}
LAUNCH = "01-baseline"


def spanning(place: Site, nodes: int, args: str = "", client: str = "") -> None:
    text = ONE.replace("engine: simulated", f"engine: simulated\n  nodes: {nodes}")
    text = text.replace("sequence-ms: 0.1}", f"sequence-ms: 0.1{args}}}")
    place.recipe(text=text + (f"client: {{{client}}}\n" if client else ""))
    place.site(environment=HERE)


def level(place: Site, name: str) -> dict:
    return json.loads(place.level(LAUNCH, name).read_text())


def said_by(place: Site, rank: int) -> str:
    return (place.folder / "launches" / LAUNCH / "ranks" / f"rank-{rank}" / "server.log").read_text()


@pytest.mark.parametrize("nodes", [2, 4])
def test_a_server_spans_machines_and_every_part_of_it_is_gone_afterwards(place: Site, nodes: int) -> None:
    spanning(place, nodes)
    done = place.run()
    assert done.code == 0, done.err
    assert [level(place, name)["ok"] for name in ("c1", "c2")] == [4, 4]
    launch = place.json(f"launches/{LAUNCH}/launch.json")
    others = [(told["rank"], told["node"]) for told in launch["ranks"]]
    assert [rank for rank, _ in others] == list(range(1, nodes))
    assert len({launch["node"]["name"], *(name for _, name in others)}) == nodes
    assert [(told["rank"], told["problems"]) for told in launch["stop"]["ranks"]] == [(n, []) for n in range(1, nodes)]
    assert launch["stop"]["ok"]
    for rank, _ in others:
        assert f"rank {rank} of {nodes}" in said_by(place, rank)
    assert place.servers() == []


@pytest.mark.parametrize("rank", [0, 1])
def test_the_rank_that_died_is_named_and_the_others_are_stopped(place: Site, rank: int) -> None:
    # Ready takes 4 tokens and the warm-up 8; c1 is 4 requests of 8 tokens, and one to warm up: it dies in there.
    spanning(place, 2, args=f", fault: crash-after-tokens=30, fault-rank: {rank}")
    done = place.run()
    assert done.code == 5, done.err
    assert f"died in `{LAUNCH}` at c1: illegal memory access on rank {rank} of 2 (" in done.err
    assert "CUDA error: an illegal memory access was encountered (simulated)" in done.err
    result = level(place, "c1")
    assert result["verdict"]["state"] == "invalid"
    assert any(f"rank {rank} of 2" in reason["message"] for reason in result["verdict"]["reasons"])
    assert place.json(f"launches/{LAUNCH}/launch.json")["stop"]["ok"]
    assert not place.level(LAUNCH, "c2").exists()
    assert place.servers() == []


def test_scancel_stops_every_rank(place: Site, wait_for: Callable[..., None]) -> None:
    spanning(place, 2)
    recipe = place.root / "quick.yaml"
    recipe.write_text(recipe.read_text().replace("step-ms: 2", "step-ms: 60").replace("requests: 4}", "requests: 40}"))
    process = place.submit()
    wait_for(lambda: place.has(f"launches/{LAUNCH}/levels/c1/requests.jsonl"), "the first level")
    place.cluster.ask("scancel", *place.jobs())
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130, err + out
    wait_for(lambda: place.servers() == [], "both ranks to be gone")


def test_a_port_that_somebody_holds_on_the_first_machine_refuses_the_launch_and_sends_the_others_home(
    place: Site,
) -> None:
    spanning(place, 2)
    with socket.create_server(("127.0.0.1", 0)) as squatter:
        port = squatter.getsockname()[1]
        recipe = place.root / "quick.yaml"
        recipe.write_text(recipe.read_text().replace("  nodes: 2", f"  nodes: 2\n  port: {port}"))
        done = place.run()
    assert done.code == 2, done.err
    assert f"port {port}" in done.err
    assert place.servers() == []
    reports = sorted(Path(place.folder, "slurm").glob("*/reports/*.json"))
    assert [json.loads(path.read_text())["state"] for path in reports] == ["failed", "done"]


@pytest.mark.parametrize(("client", "machines"), [("nodes: 2, processes: 1", 2), ("node: separate", 1)])
def test_the_load_comes_from_the_machines_that_the_recipe_says(place: Site, client: str, machines: int) -> None:
    spanning(place, 1, client=client)
    done = place.run()
    assert done.code == 0, done.err
    hosts = level(place, "c2")["client"]["hosts"]
    assert len({host["name"] for host in hosts}) == len(hosts) == machines
    assert sum(host["requests"] for host in hosts) == 4 + 2
    head = place.json(f"launches/{LAUNCH}/launch.json")["node"]["name"]
    assert (head in {host["name"] for host in hosts}) == (machines == 2)
    assert place.servers() == []

"""One machine's part of a server that spans several, as argv: as the engines' own documents write it for two nodes.

SGLang: `--nnodes 2 --node-rank 1 --dist-init-addr HEAD:PORT` on every node (its multi-node page). vLLM: `--nnodes 2
--node-rank 0 --master-addr HEAD` on the head and the same with its rank and `--headless` on the others (parallelism and
scaling, "Running vLLM with MultiProcessing"; the options are in the shipped tables of 0.32 and 0.33).
"""

from dataclasses import replace
from pathlib import Path

import pytest

from harness import engines
from harness.engines.engine import Model, Rank, Server
from harness.engines.flags import tables
from harness.errors import InputError
from harness.recipe import findings
from harness.recipe.expand import load
from harness.run import privacy, rendezvous

HEAD, OTHER = Rank(0, 2, "10.0.0.1", 20000), Rank(1, 2, "10.0.0.1", 20000)
SERVER = Server("", "0.0.0.0", 30000, Model("/models/kimi", "kimi"), {"tp": 16}, python="/env/bin/python")


def argv(engine: str, rank: Rank) -> list[str]:
    adapter = engines.get(engine)
    args = {**SERVER.args, **adapter.rank_args(rank)}
    return list(adapter.command(replace(SERVER, engine=engine, args=args)).argv)


def test_every_sglang_node_runs_the_same_command_but_for_its_rank() -> None:
    words = (
        "/env/bin/python -m sglang.launch_server --model-path /models/kimi --served-model-name kimi"
        " --host 0.0.0.0 --port 30000 --enable-metrics --enable-cache-report --tp 16"
        " --nnodes 2 --node-rank {} --dist-init-addr 10.0.0.1:20000 --random-seed 0"
    )
    assert argv("sglang", HEAD) == words.format(0).split()
    assert argv("sglang", OTHER) == words.format(1).split()


def test_vllm_nodes_above_the_first_are_headless() -> None:
    words = (
        "/env/bin/vllm serve /models/kimi --served-model-name kimi --host 0.0.0.0 --port 30000"
        " --enable-prompt-tokens-details --tp 16 --nnodes 2 --node-rank {} --master-addr 10.0.0.1 --master-port 20000"
    )
    assert argv("vllm", HEAD) == words.format(0).split()
    assert argv("vllm", OTHER) == [*words.format(1).split(), "--headless"]


def test_simulated_ranks_meet_where_rank_0_says() -> None:
    words = argv("simulated", Rank(3, 4, "127.0.1.1", 20000))
    assert words[-6:] == ["--nnodes", "4", "--node-rank", "3", "--dist-init-addr", "127.0.1.1:20000"]


def test_a_machine_of_vllm_is_told_its_own_address_unless_the_recipe_tells_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(rendezvous.ADDRESS, "10.0.0.7")
    vllm = engines.get("vllm")
    assert rendezvous.placed(vllm, SERVER, OTHER).variables == {"VLLM_HOST_IP": "10.0.0.7"}
    told = replace(SERVER, variables={"VLLM_HOST_IP": "10.1.0.7"})
    assert rendezvous.placed(vllm, told, OTHER).variables == {"VLLM_HOST_IP": "10.1.0.7"}
    assert rendezvous.placed(engines.get("sglang"), SERVER, OTHER).variables == {}


def test_which_network_joins_the_machines_is_a_fact_of_the_site_and_reaches_servers() -> None:
    site = {"NCCL_SOCKET_IFNAME": "ib0", "GLOO_SOCKET_IFNAME": "ib0", "NCCL_IB_HCA": "mlx5"}
    tuning = {"NCCL_P2P_DISABLE": "1", "NCCL_ALGO": "Ring"}
    assert privacy.server_environment({}, ambient={**site, **tuning}) == site


def test_an_ipv6_head_is_written_in_brackets() -> None:
    assert engines.get("sglang").rank_args(Rank(0, 2, "fd00::1", 5))["dist-init-addr"] == "[fd00::1]:5"
    assert engines.get("vllm").rank_args(Rank(0, 2, "fd00::1", 5))["master-addr"] == "fd00::1"


@pytest.mark.parametrize(("engine", "version"), [("sglang", "0.5.9"), ("sglang", "0.5.23"), ("vllm", "0.33.0")])
def test_the_releases_we_know_take_every_option_of_a_rank(engine: str, version: str) -> None:
    table = tables.table(engine, version, None)
    assert table is not None
    known = set(table.flags)
    assert set(engines.get(engine).rank_args(OTHER)) <= known


@pytest.mark.parametrize("engine", ["llamacpp", "attach"])
def test_an_engine_for_one_machine_refuses_to_span_more(engine: str) -> None:
    adapter = engines.get(engine)
    assert adapter.rank_ports == 0
    with pytest.raises(InputError, match=f"engine `{engine}` runs on one machine only"):
        adapter.rank_args(HEAD)


RECIPE = """\
recipe: wide
question: does it span?
model: {path: /models/m.gguf}
server: {engine: ENGINE, nodes: 2, args: {ARGS}}
workload: {prompts: coding, max_tokens: 16}
sweep: {concurrency: [1]}
"""


@pytest.mark.parametrize(
    ("engine", "args", "said"),
    [
        ("llamacpp", "", "r.yaml:4:28: engine `llamacpp` runs on one machine only"),
        ("simulated", "node-rank: 1", "r.yaml:4:46: `node-rank` is set by the harness where `server.nodes` is above 1"),
    ],
)
def test_a_recipe_that_cannot_span_machines_is_refused_at_its_line(
    tmp_path: Path, engine: str, args: str, said: str
) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(RECIPE.replace("ENGINE", engine).replace("ARGS", args))
    with pytest.raises(InputError) as caught:
        findings.find(load(path))
    assert said in str(caught.value)


def test_a_recipe_whose_engine_spans_machines_has_no_fault(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(RECIPE.replace("ENGINE", "simulated").replace("ARGS", "step-ms: 2"))
    assert findings.find(load(path)) == []

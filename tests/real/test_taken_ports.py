"""A stranger on the port that a real engine was given: it answers every poll as a healthy server of that name would.

SGLang notices after loading and then lives on for minutes; vLLM notices after its imports. Neither is waited for.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from processes import until

from harness.engines import get
from harness.engines.engine import Command, Engine, Model, Server
from harness.env.build import Built
from harness.run import launch, ports, supervise

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]

ARGS: dict[str, dict[str, Any]] = {
    "sglang": {"device": "cpu", "context-length": 2048, "max-total-tokens": 32768, "max-running-requests": 4},
    "vllm": {"max-model-len": 2048, "max-num-seqs": 4, "dtype": "bfloat16", "enforce-eager": True},
}


@pytest.fixture
def squat(tmp_path: Path) -> Iterator[Callable[[int], supervise.Process]]:
    """Puts a server of another make on a port, serving a model of the very name."""
    strangers: list[supervise.Process] = []

    def listen(port: int) -> supervise.Process:
        command = get("simulated").command(Server("simulated", "127.0.0.1", port, Model("", "tiny")))
        log = tmp_path / "stranger.log"
        strangers.append(supervise.start(command, log=log, marker="stranger/01", cwd=tmp_path))
        until(lambda: not ports.is_free("127.0.0.1", port), "the stranger to listen")
        return strangers[-1]

    yield listen
    for stranger in strangers:
        stranger.stop()


class Late:
    """A real engine whose port a stranger takes between the proof that it is free and the server's start."""

    def __init__(self, engine: Engine, first: Callable[[int], Any]) -> None:
        self._engine = engine
        self._first = first

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def command(self, server: Server) -> Command:
        self._first(server.port)
        return self._engine.command(server)


@pytest.mark.parametrize("name", ["sglang", "vllm"])
def test_a_stranger_who_answers_the_health_poll_is_not_taken_for_the_engine(
    name: str,
    request: pytest.FixtureRequest,
    tiny_llama: Callable[[Built], Path],
    squat: Callable[[int], supervise.Process],
    tmp_path: Path,
) -> None:
    env: Built = request.getfixturevalue(f"{name}_env")
    model = Model(str(tiny_llama(env)), "tiny")
    port = ports.choose_port("127.0.0.1", None)
    strangers: list[supervise.Process] = []
    engine: Any = Late(get(name), lambda taken: strangers.append(squat(taken)))
    server = Server(name, "127.0.0.1", port, model, ARGS[name], {**env.variables}, str(env.python))

    with pytest.raises(launch.LaunchFailed) as caught:
        launch.launch(engine, server, folder=tmp_path / "run" / "launches" / "01", deadline_s=250)

    [stranger] = strangers
    assert caught.value.diagnosis.name in {
        f"port {port} is answered by a process that is not this server",
        "port in use",  # where it came to bind before the question was asked
    }
    assert caught.value.report is not None
    assert not caught.value.report.survivors
    assert stranger.poll() is None
    assert requests.get(f"http://127.0.0.1:{port}/v1/models", timeout=30).json()["data"][0]["id"] == "tiny"

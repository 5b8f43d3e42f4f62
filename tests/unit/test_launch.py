import contextlib
import http.server
import json
import shlex
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import requests
from processes import FAKES, carriers, until

from harness import engines
from harness.engines.engine import Command, Milestone, Model, Sampling, Server, Signature
from harness.engines.simulated import Simulated
from harness.errors import InputError, Interrupted, ServerError
from harness.run import launch, ports, supervise
from harness.run.launch import Launched, LaunchFailed

DEADLINE_S = 60.0


class Rigged(Simulated):
    """A simulated engine whose command is something else."""

    def __init__(self, command: Callable[[Server], Command], **members: Any) -> None:
        self.make = command
        vars(self).update(members)

    def command(self, server: Server) -> Command:
        return self.make(server)


def unruly(*words: str) -> Command:
    return Command((sys.executable, str(FAKES / "unruly.py"), *words))


def simulated(server: Server) -> Command:
    return Simulated().command(server)


@dataclass
class Bench:
    folder: Path
    started: list[Launched]

    def up(
        self, engine: Simulated | None = None, *, port: int = 0, deadline_s: float = DEADLINE_S, **args: Any
    ) -> Launched:
        server = Server(
            "simulated", "127.0.0.1", port, Model("", "sim"), {n.replace("_", "-"): v for n, v in args.items()}
        )
        live = launch.launch(engine or Simulated(), server, folder=self.folder, deadline_s=deadline_s)
        self.started.append(live)
        return live

    def fails(self, engine: Simulated | None = None, **args: Any) -> LaunchFailed:
        with pytest.raises(LaunchFailed) as caught:
            self.up(engine, **args)
        assert carriers("a-run/01-a@") == []
        assert caught.value.report.ok
        return caught.value


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path / "a-run" / "launches" / "01-a", [])
    yield bench
    for live in bench.started:
        live.stop()
    assert carriers("a-run/01-a@") == []


@pytest.fixture
def squat() -> Iterator[Callable[[int], int]]:
    squatters: list[subprocess.Popen[bytes]] = []

    def listen(port: int) -> int:
        argv = [sys.executable, str(FAKES / "unruly.py"), "--listen", str(port)]
        squatters.append(subprocess.Popen(argv, stdout=subprocess.DEVNULL))
        until(lambda: not ports.is_free("127.0.0.1", port), "the squatter to listen")
        return squatters[-1].pid

    yield listen
    for squatter in squatters:
        assert squatter.poll() is None, "a stranger was ended"
        squatter.kill()
        squatter.wait()


def test_a_server_that_is_ready_says_what_it_is_and_how_it_came_up(bench: Bench) -> None:
    seen: list[launch.Reached] = []
    server = Server("simulated", "127.0.0.1", 0, Model("", "sim"), variables={"SIM_TOKEN": "hush-hush"})
    live = launch.launch(
        Simulated(), server, folder=bench.folder, deadline_s=DEADLINE_S, on_milestone=seen.append, dialect="chat"
    )
    bench.started.append(live)
    assert [reached.name for reached in live.milestones] == ["loading weights", "ready"]
    assert seen == list(live.milestones)
    assert live.base_url == f"http://127.0.0.1:{live.port}"
    assert live.models["data"][0]["id"] == "sim"
    assert live.probe["path"] == "/v1/chat/completions"
    assert live.variables["SIM_TOKEN"] == "[redacted]"
    assert "HARNESS_MARK" not in live.variables
    assert live.argv[1:3] == ("-m", "harness.engines.simulated_server")
    assert launch.answers(live.engine, live.server)["/server_info"]["simulated"] is True
    assert live.death() is None
    assert live.stop().ok
    assert ports.is_free("127.0.0.1", live.port)
    assert bench.folder.stat().st_mode & 0o777 == 0o700
    assert live.log.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("fault", "name"),
    [
        ("die-before-ready=CUDA error: no kernel image is available for execution on the device", "no kernel image"),
        ("die-before-ready=torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1 GiB", "CUDA out of memory"),
        ("die-before-ready=it just broke", "unknown (ended with 1)"),
        ("wrong-model", "it serves another model than `sim`"),
        ("zero-tokens", "the first generation gave no token"),
        ("status=503", "the first generation got HTTP 503"),
        ("error-event", "the first generation gave no token"),
    ],
)
def test_a_server_that_cannot_serve_fails_by_class_and_is_cleaned_away(bench: Bench, fault: str, name: str) -> None:
    assert bench.fails(fault=[fault]).diagnosis.name == name


def test_a_bad_flag_shows_the_line_that_says_so(bench: Bench) -> None:
    failed = bench.fails(bogus_flag=1)
    assert (failed.diagnosis.name, failed.diagnosis.exit_code, failed.exit_code) == ("bad flag", 2, 5)
    assert any("unrecognized arguments: --bogus-flag" in line for line in failed.details)
    assert failed.message == "server `simulated` did not start: bad flag (exit 2)"
    assert str(bench.folder / "server.log") in str(failed)


@pytest.mark.parametrize("fault", ["never-healthy", "never-listens"])
def test_a_server_that_is_never_ready_is_given_up_at_the_deadline(bench: Bench, fault: str) -> None:
    failed = bench.fails(fault=[fault], deadline_s=4.0)
    assert (failed.diagnosis.name, failed.diagnosis.exit_code) == ("still loading weights", None)


def test_a_server_that_says_nothing_is_given_up_at_the_deadline(bench: Bench) -> None:
    assert bench.fails(Rigged(lambda _: unruly()), deadline_s=2.0).diagnosis.name == "not ready after 2 s"


def test_a_slow_start_is_waited_for(bench: Bench) -> None:
    assert bench.up(fault=["slow-start=1.5"]).ready_s >= 1.5


def test_a_decisive_line_ends_the_wait_though_the_server_lives_on(bench: Bench) -> None:
    engine = Rigged(lambda _: unruly("--setsid-child", "--say", "[Errno 98] Address already in use"))
    failed = bench.fails(engine, port=ports.choose_port("127.0.0.1", None), deadline_s=600.0)
    assert failed.diagnosis.name == "port in use"


def test_a_front_end_that_hands_out_errors_is_explained_by_the_engine_that_died_behind_it(bench: Bench) -> None:
    """The front end lives on; a second after it listens, another process of the server writes why it is of no use."""

    def command(server: Server) -> Command:
        listens = f"(exec 3<>/dev/tcp/127.0.0.1/{server.port}) 2>/dev/null"
        engine = f"until {listens}; do sleep 0.05; done; sleep 1; echo the engine is gone"
        return Command(("bash", "-c", f"({engine}) & {shlex.join(simulated(server).argv)}"))

    gone = Signature("engine gone", "the engine is gone", "look above", decisive=True)
    failed = bench.fails(Rigged(command, signatures=(gone,)), fault=["error-event"])
    assert failed.diagnosis.name == "engine gone"


def test_a_line_that_is_not_decisive_does_not_end_the_wait(bench: Bench) -> None:
    signatures = (Signature("ominous", "oh dear", "nothing to do"),)
    engine = Rigged(
        lambda _: unruly("--say", "oh dear"), signatures=signatures, milestones=(Milestone("up", "^ready$"),)
    )
    failed = bench.fails(engine, deadline_s=2.0)
    assert failed.diagnosis.name == "not ready after 2 s"


def test_a_taken_port_is_refused_before_anything_starts(bench: Bench, squat: Callable[[int], int]) -> None:
    port = ports.choose_port("127.0.0.1", None)
    holder = squat(port)
    with pytest.raises(InputError, match=rf"port {port} on 127.0.0.1 is taken\n  pid {holder} "):
        bench.up(port=port)
    assert not (bench.folder / "server.log").exists()


def test_a_chosen_port_that_is_lost_before_the_server_binds_is_replaced(
    bench: Bench, squat: Callable[[int], int]
) -> None:
    tried: list[int] = []

    def command(server: Server) -> Command:
        if not tried:
            squat(server.port)
        tried.append(server.port)
        return simulated(server)

    live = bench.up(Rigged(command))
    assert live.port == tried[1] != tried[0]


def test_a_stranger_who_answers_on_the_port_is_not_taken_for_our_server(bench: Bench, tmp_path: Path) -> None:
    others: list[supervise.Process] = []

    def command(server: Server) -> Command:
        folder = tmp_path / "stranger"
        others.append(supervise.start(simulated(server), log=folder / "server.log", marker="other/01-a", cwd=tmp_path))
        until(lambda: not ports.is_free("127.0.0.1", server.port), "the stranger to listen")
        return unruly()

    try:
        failed = bench.fails(Rigged(command), port=(port := ports.choose_port("127.0.0.1", None)))
        assert failed.diagnosis.name == f"port {port} is answered by a process that is not this server"
        assert failed.diagnosis.evidence[0].startswith(f"pid {others[0].pid} (")
        assert others[0].poll() is None
    finally:
        for other in others:
            other.stop()


def test_a_server_that_dies_later_is_diagnosed(bench: Bench) -> None:
    live = bench.up(fault=["crash-after-tokens=8"])  # the proof of readiness takes 4
    with contextlib.suppress(requests.RequestException), launch.control_session(live.server) as session:
        path, body = live.engine.request("completions", "Hello", Sampling(max_tokens=64), "sim")
        session.post(live.base_url + path, json=body, timeout=DEADLINE_S)
    until(lambda: live.process.poll() is not None, "the server to crash")
    death = live.death()
    assert (death.name, death.exit_code, death.phase) == ("illegal memory access", 1, "measure")
    with pytest.raises(ServerError, match="no answer: the server is dead, illegal memory access"):
        live.refuse("no answer")


def test_a_server_whose_worker_crashed_counts_as_dead_though_it_is_healthy(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "_CHILDREN_S", 0.0)
    live = bench.up()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(live.process, "crashed_children", lambda: ["pid 7 ended by SIGABRT, unnoticed by pid 6"])
        assert live.death() is None  # a parent may just be about to notice
        death = live.death()
    assert (death.name, death.exit_code) == ("unknown (a child process crashed)", None)
    assert death.evidence[0] == "pid 7 ended by SIGABRT, unnoticed by pid 6"


def test_a_proxy_of_the_environment_is_not_asked_about_loopback(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as proxy:  # takes connections and never answers
        for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.getsockname()[1]}")
        assert bench.up().ready_s > 0


def test_an_interrupt_while_a_server_starts_leaves_nothing(bench: Bench) -> None:
    def interrupt(_: launch.Reached) -> None:
        signal.raise_signal(signal.SIGINT)

    server = Server("simulated", "127.0.0.1", 0, Model("", "sim"))
    with pytest.raises(KeyboardInterrupt):
        launch.launch(Simulated(), server, folder=bench.folder, deadline_s=DEADLINE_S, on_milestone=interrupt)
    assert carriers("a-run/01-a@") == []


def test_a_running_server_can_be_attached_to_and_is_not_stopped(bench: Bench) -> None:
    live = bench.up()
    attached = launch.attach(live.engine, live.server, log=live.log, deadline_s=DEADLINE_S, dialect="completions")
    assert attached.process is None
    assert attached.probe["events"] > 0
    assert attached.stop() is None
    assert attached.death() is None
    assert live.process.poll() is None


def test_a_server_that_refuses_fields_it_does_not_know_can_be_attached_to(tmp_path: Path) -> None:
    """`transformers serve` answers 422 to `ignore_eos`, and never sends `[DONE]`."""
    asked: list[dict[str, Any]] = []

    class Strict(http.server.BaseHTTPRequestHandler):
        def answer(self, status: int, text: str, kind: str = "application/json") -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.end_headers()
            self.wfile.write(text.encode())

        def do_GET(self) -> None:
            self.answer(200, '{"data": [{"id": "odd"}]}')

        def do_POST(self) -> None:
            asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            if "ignore_eos" in asked[-1]:
                self.answer(422, '{"detail": "Unexpected keys in the request: {\'ignore_eos\'}"}')
            else:
                event = {"choices": [{"text": "Hi", "finish_reason": "length"}], "usage": {"completion_tokens": 1}}
                self.answer(200, f"data: {json.dumps(event)}\n\n", "text/event-stream")

        def log_message(self, *_: Any) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Strict) as odd:
        thread = threading.Thread(target=odd.serve_forever)
        thread.start()
        server = Server("attach", "127.0.0.1", odd.server_port)
        live = launch.attach(
            engines.get("attach"), server, log=tmp_path / "none.log", deadline_s=DEADLINE_S, dialect="completions"
        )
        odd.shutdown()
        thread.join()
    assert live.models["data"][0]["id"] == "odd"
    assert ["ignore_eos" in body for body in asked] == [True, False]


def test_attaching_to_nothing_says_where_nobody_answered(tmp_path: Path) -> None:
    server = Server("simulated", "127.0.0.1", ports.choose_port("127.0.0.1", None))
    with pytest.raises(LaunchFailed) as caught:
        launch.attach(Simulated(), server, log=tmp_path / "server.log", deadline_s=1.0, dialect="completions")
    url = f"http://127.0.0.1:{server.port}"
    assert caught.value.message == f"could not reach the server at {url}: no answer from {url}/health within 1 s"
    assert caught.value.hint == "is it running, and is this its URL?"  # there is no log of ours to read


def test_a_start_is_broken_off_when_the_run_is_to_stop(bench: Bench) -> None:
    stop = threading.Event()
    server = Server("simulated", "127.0.0.1", 0, Model("", "sim"), {"fault": ["never-healthy"]})
    with pytest.raises(Interrupted, match="stopped while `simulated` was starting"):
        launch.launch(
            Simulated(), server, folder=bench.folder, deadline_s=600.0, on_milestone=lambda _: stop.set(), stop=stop
        )
    assert carriers("a-run/01-a@") == []


def test_the_log_of_an_earlier_start_in_the_same_folder_is_not_read_as_ours(bench: Bench) -> None:
    bench.fails(fault=["die-before-ready=CUDA error: an illegal memory access was encountered"])
    live = bench.up()
    assert "illegal memory access" in live.log.read_text()
    assert "illegal memory access" not in live.log_text()
    assert "simulated: ready on" in live.log_text()

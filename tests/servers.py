"""Starting one real server for a test: the adapter's own command, its log, its answers; ended by pid."""

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from harness.engines.engine import Engine, Sampling, Server

START_S = 60.0


def free_port() -> int:
    """A port nobody holds at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Running:
    """A server process and how to talk to it."""

    engine: Engine
    process: subprocess.Popen[bytes]
    port: int
    log_path: Path

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def ask(self, method: str, path: str, body: Any = None, *, timeout: float = 60.0) -> tuple[int, Any]:
        """Status and answer (parsed where it is JSON) of one request on a connection of its own."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        try:
            raw = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
            connection.request(method, path, raw, {"content-type": "application/json"})
            response = connection.getresponse()
            text = response.read().decode()
        finally:
            connection.close()
        try:
            return response.status, json.loads(text)
        except ValueError:
            return response.status, text

    def events(self, body: Any, path: str = "/v1/chat/completions") -> list[Any]:
        """The events of one stream, parsed where they are JSON; a stream that breaks ends with the exception."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        found: list[Any] = []
        try:
            connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
            response = connection.getresponse()
            while line := response.readline():
                if line.startswith(b"data: "):
                    data = line[6:].strip().decode()
                    with contextlib.suppress(ValueError):
                        data = json.loads(data)
                    found.append(data)
        except (OSError, http.client.HTTPException) as error:
            found.append(error)
        finally:
            connection.close()
        return found

    def generate(self, prompt: str, tokens: int, dialect: str = "chat", **sampling: Any) -> list[Any]:
        """The events of one generation, asked for as the adapter asks."""
        path, body = self.engine.request(dialect, prompt, Sampling(tokens, **sampling), "tiny")
        return self.events(body, path)

    def metrics(self) -> dict[str, float]:
        """Samples without labels by name."""
        _, text = self.ask("GET", "/metrics")
        families = text_string_to_metric_families(text)
        return {sample.name: sample.value for family in families for sample in family.samples if not sample.labels}

    def answers(self) -> dict[str, Any]:
        """What it says of itself, by path."""
        return {path: self.ask("GET", path)[1] for path in self.engine.effective_paths}

    def wait(self, timeout: float = 30.0) -> int:
        """Its exit code, once it ends."""
        return self.process.wait(timeout)


@contextlib.contextmanager
def serving(engine: Engine, folder: Path, *, ready: bool = True, **server: Any) -> Iterator[Running]:
    """Run a server while the block lasts; `ready=False` does not wait for it."""
    port = server.pop("port", None) or free_port()
    command = engine.command(Server(engine.name, "127.0.0.1", port, **server))
    log_path = folder / f"{engine.name}-{port}.log"
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            command.argv,
            env={**os.environ, **command.variables},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    running = Running(engine, process, port, log_path)
    try:
        if ready:
            await_ready(running)
        yield running
    finally:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def await_ready(running: Running) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if running.process.poll() is not None:
            raise AssertionError(f"the server ended with {running.process.returncode}:\n{running.log}")
        with contextlib.suppress(OSError):
            if running.ask("GET", running.engine.ready_path)[0] == 200:
                return
        time.sleep(0.05)
    raise AssertionError(f"the server was not ready within {START_S} s:\n{running.log}")


def content(events: list[Any]) -> str:
    """The text of a chat or completion stream."""
    choices = [choice for event in events if isinstance(event, Mapping) for choice in event.get("choices", [])]
    return "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)


def last(events: list[Any], name: str) -> Any:
    """The last value of a field of the events."""
    return next((event[name] for event in reversed(events) if isinstance(event, Mapping) and name in event), None)


def finish(events: list[Any]) -> Any:
    """The finish reason of a stream."""
    choices = [choice for event in events if isinstance(event, Mapping) for choice in event.get("choices", [])]
    return next((choice["finish_reason"] for choice in reversed(choices) if choice.get("finish_reason")), None)

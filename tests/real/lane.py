"""One real server started as the product starts it, and asked the way its adapter asks."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import requests
from prometheus_client.parser import text_string_to_metric_families

from harness.engines import get
from harness.engines.engine import Model, Observed, Sampling, Server
from harness.env.build import Built
from harness.load.observe import named
from harness.run import launch

START_S = 700.0  # seen: 60 to 130 s on two idle cores, five times that on busy ones

# Different enough that none is a prefix of another; text the tiny tokenizer knows.
PROMPTS = (
    "Explain how a hash table works, and what happens when two keys fall into the same bucket.",
    "Write a function that takes a list of numbers and returns the sum and the mean of them.",
    "A server that answers many people at once keeps a queue, a batch and a cache.",
    "for step in range(100): for request in schedule(queue, batch, limit=8):",
)


@dataclass
class Real:
    """One running server, asked the way its adapter asks."""

    launched: launch.Launched

    @property
    def url(self) -> str:
        return self.launched.base_url

    def request(
        self, prompt: str, tokens: int, dialect: str = "completions", **sampling: Any
    ) -> tuple[str, dict[str, Any]]:
        return self.launched.engine.request(dialect, prompt, Sampling(tokens, **sampling), "tiny")  # type: ignore[arg-type]

    def events(self, path: str, body: Mapping[str, Any]) -> Iterator[Any]:
        """The events of one stream, parsed where they are JSON."""
        with requests.post(self.url + path, json=body, stream=True, timeout=120) as answer:
            for line in answer.iter_lines():
                if line.startswith(b"data: "):
                    data = line[6:].decode()
                    yield data if data == "[DONE]" else json.loads(data)

    def generate(self, prompt: str, tokens: int, dialect: str = "completions", **sampling: Any) -> list[Any]:
        return list(self.events(*self.request(prompt, tokens, dialect, **sampling)))

    def metrics(self) -> dict[str, float]:
        """Sums of samples over their labels, by name."""
        text = requests.get(self.url + "/metrics", timeout=30).text
        found: dict[str, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                found[sample.name] = found.get(sample.name, 0.0) + sample.value
        return found

    def acceptance(self, deltas: Mapping[str, float]) -> float | None:
        """Tokens a verification step, as the product derives it from counters; None without any."""
        return named(asdict(self.launched.engine.counters), deltas, {}).get("acceptance_length")

    def flush(self) -> tuple[int, str]:
        method, path = self.launched.engine.flush or ("", "")
        answer = requests.request(method, self.url + path, timeout=60)
        return answer.status_code, answer.text

    def observed(self, before: Mapping[str, float]) -> Observed:
        now = self.metrics()
        answers = launch.answers(self.launched.engine, self.launched.server)
        return Observed(answers, self.launched.log_text(), {name: now[name] - before.get(name, 0.0) for name in now})


@contextmanager
def serving(
    env: Built, model: Path, folder: Path, *, engine: str, args: Mapping[str, Any], **more: Any
) -> Iterator[Real]:
    """One server for as long as the block lasts."""
    server = Server(
        engine, "127.0.0.1", 0, Model(str(model), "tiny"), dict(args), {**env.variables}, str(env.python), **more
    )
    launched = launch.launch(get(engine), server, folder=folder, deadline_s=START_S)
    try:
        yield Real(launched)
    finally:
        launched.stop()


def text_of(events: list[Any]) -> str:
    choices = [choice for event in events if isinstance(event, dict) for choice in event.get("choices", [])]
    return "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)


def usage_of(events: list[Any]) -> dict[str, Any]:
    return next(event["usage"] for event in reversed(events) if isinstance(event, dict) and event.get("usage"))


def finish_of(events: list[Any]) -> str | None:
    choices = [choice for event in events if isinstance(event, dict) for choice in event.get("choices", [])]
    return next((choice["finish_reason"] for choice in reversed(choices) if choice.get("finish_reason")), None)


def assert_lossless_up_to_ties(texts: list[str], others: list[str]) -> None:
    """Greedy outputs with and without speculation: equal, but for near ties that bfloat16 rounds the other way.

    A verify step has another batch shape than a plain one, so its sums round differently; where two tokens are almost
    equally likely the argmax may flip, and the rest of that answer with it. Most answers must be equal to the letter,
    and one that is not must begin alike.
    """
    assert len(texts) == len(others)
    unlike = [(one, other) for one, other in zip(texts, others, strict=True) if one != other]
    assert len(unlike) <= len(texts) // 3, unlike
    assert all(one[:2] == other[:2] for one, other in unlike), unlike

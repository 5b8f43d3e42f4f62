"""A simulated model server: real HTTP, real processes, real time, invented tokens. Everything it says, says so.

    python -m harness.engines.simulated_server --port 8000 --step-ms 9.5 --sequence-ms 1.29

The speed follows the formulas of `harness.engines.simulation.model`; `--time-scale 0.1` runs all of it ten times as
fast. Output text depends on prompt and seed only. Steps keep absolute deadlines, so late wake-ups do not add up; how
late they were is on `/metrics`. What can be made to go wrong: `--help` lists the faults.
"""

import argparse
import asyncio
import contextlib
import errno
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness import __version__
from harness.engines.simulation import faults as faulty
from harness.engines.simulation.arguments import batcher, parser
from harness.engines.simulation.group import Group, Heard
from harness.engines.simulation.http import Connection, Message
from harness.engines.simulation.model import Request
from harness.engines.simulation.reply import Ask, BadAsk, Reply, Told, ask
from harness.engines.simulation.text import PrefixCache, Writer, divergence, identity, split
from harness.engines.simulation.trace import Trace

LOG_EVERY_S = 1.0
# A machine that stood still is not caught up with by a burst: beyond this the clock is set anew, and it is counted.
LATE_LIMIT_S = 1.0
RESTARTED = "HARNESS_SIMULATED_RESTARTED"
CRASH = "CUDA error: an illegal memory access was encountered (simulated)"
COUNTERS = (
    "prompt_tokens",
    "generated_tokens",
    "cached_tokens",
    "drafts",
    "draft_tokens",
    "accepted_tokens",
    "requests",
    "steps",
)


class Simulation:
    """One server process: it drives the batcher by the clock and answers requests."""

    def __init__(self, arguments: argparse.Namespace, faults: faulty.Faults) -> None:
        self.arguments = arguments
        self.faults = faults
        self.seed = random.SystemRandom().getrandbits(32) if arguments.seed is None else arguments.seed
        self.batcher = batcher(arguments, self.seed)
        self.batcher.slowdown = float(faults.get("slow-decode") or 1.0)
        self.cache = PrefixCache(arguments.prefix_cache_tokens)
        self.connections: set[Connection] = set()
        self.replies: dict[Request, Reply] = {}
        self.counts = dict.fromkeys(COUNTERS, 0)
        self.started = time.time()
        self.late_max_s = 0.0
        self.clock_resets = 0
        self.ready = False
        self.frozen = False
        self.lost: subprocess.Popen[bytes] | None = None
        self.stopping = False
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.group = Group(
            arguments.node_rank,
            arguments.nnodes,
            arguments.dist_init_addr,
            Heard(on_loss=self._lost, on_leave=self._left, on_tokens=self._stepped),
        )
        self.traced: Trace | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._logged = (time.monotonic(), 0)
        self._routes: dict[tuple[str, str], Callable[[Connection, Message], None]] = {
            ("GET", "/health"): self._health,
            ("GET", "/v1/models"): self._models,
            ("GET", "/metrics"): self._metrics,
            ("GET", "/server_info"): self._server_info,
            ("POST", "/flush_cache"): self._flush,
            ("POST", "/start_profile"): self._start_profile,
            ("POST", "/stop_profile"): self._stop_profile,
            ("POST", "/v1/chat/completions"): self._generate,
            ("POST", "/v1/completions"): self._generate,
            ("POST", "/generate"): self._generate,
        }

    def handle(self, connection: Connection, message: Message) -> None:
        """Answer one request, now or over time."""
        route = self._routes.get((message.method, message.path))
        if route is not None:
            route(connection, message)
        elif message.path in {path for _, path in self._routes}:
            connection.reply(405, _error(405, f"{message.path} does not take {message.method}"))
        else:
            connection.reply(404, _error(404, f"no such path: {message.path}"))

    # -- the clock ------------------------------------------------------------------------------------------------

    def _arrive(self, request: Request) -> None:
        loop = asyncio.get_running_loop()
        self.batcher.arrive(request, loop.time())
        if self.batcher.step is None:
            self.batcher.start(loop.time())
        self._schedule()

    def _schedule(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self.batcher.step is not None and not self.frozen:
            self._timer = asyncio.get_running_loop().call_at(self.batcher.step.ends, self._step)

    def _step(self) -> None:
        """The step in flight ends: hand out its tokens, begin the next where this one ended."""
        self._timer = None
        step = self.batcher.step
        if step is None:
            return
        self.counts["steps"] += 1
        if self.traced is not None:
            self.traced.step(step, len(self.batcher.running))
        for request, tokens in self.batcher.finish():
            self._hand_out(request, tokens, step.drafts)
        self.group.tell(self.counts["generated_tokens"])
        self._trip()
        now = asyncio.get_running_loop().time()
        late = now - step.ends
        self.late_max_s = max(self.late_max_s, late)
        behind = late > LATE_LIMIT_S
        self.clock_resets += behind
        self.batcher.start(now if behind else step.ends)
        self._schedule()
        self._log()

    def _hand_out(self, request: Request, tokens: int, drafts: int) -> None:
        self.counts["generated_tokens"] += tokens
        if drafts:
            self.counts["drafts"] += 1
            self.counts["draft_tokens"] += drafts
            self.counts["accepted_tokens"] += tokens - 1
        reply = self.replies.get(request)
        if reply is None:
            return
        reply.tokens(tokens)
        if reply.over:
            self.batcher.cancel(request)
            self.replies.pop(request, None)

    def _trip(self) -> None:
        """Faults that come with the number of tokens."""
        made = self.counts["generated_tokens"]
        if _due(self.faults.get("die-after-tokens"), made):
            os.kill(os.getpid(), signal.SIGKILL)
        if _due(self.faults.get("crash-after-tokens"), made):
            say(CRASH)
            os._exit(1)
        if _due(self.faults.get("slow-after-tokens"), made):
            self.batcher.slowdown = 2.0
        if _due(self.faults.get("freeze-after-tokens"), made):
            self.frozen = True
        if _due(self.faults.get("lose-worker-after-tokens"), made) and not self.frozen:
            self.frozen, self.lost = True, _crash_child()

    def _log(self) -> None:
        now = time.monotonic()
        since, before = self._logged
        if now - since < LOG_EVERY_S:
            return
        made = self.counts["generated_tokens"]
        line = f"decode: running {len(self.batcher.running)}, waiting {len(self.batcher.waiting)}"
        line += f", {(made - before) / (now - since):.1f} tok/s"
        if self.counts["drafts"]:
            line += f", accept length {1 + self.counts['accepted_tokens'] / self.counts['drafts']:.2f}"
        say(line)
        self._logged = (now, made)

    # -- paths ----------------------------------------------------------------------------------------------------

    def _health(self, connection: Connection, _message: Message) -> None:
        if self.ready and not self.faults.get("never-healthy"):
            connection.reply(200, {"status": "ok", "simulated": True})
        else:
            connection.reply(503, _error(503, "Loading model"))

    def _models(self, connection: Connection, _message: Message) -> None:
        name = "someone-elses-model" if self.faults.get("wrong-model") else self.arguments.served_model_name
        entry = {"id": name, "object": "model", "created": int(self.started), "owned_by": "simulated"}
        connection.reply(200, {"object": "list", "data": [entry]})

    def _metrics(self, connection: Connection, _message: Message) -> None:
        if self.faults.get("no-metrics"):
            connection.reply(404, _error(404, "metrics are off"))
        elif self.faults.get("bad-metrics"):
            connection.reply(200, "<html>{not metrics at all", "text/plain; version=0.0.4")
        else:
            connection.reply(200, self._exposition(), "text/plain; version=0.0.4; charset=utf-8")

    def _exposition(self) -> str:
        gauges: dict[str, float] = {
            "simulated:requests_running": len(self.batcher.running),
            "simulated:requests_waiting": len(self.batcher.waiting),
            "simulated:late_seconds_max": self.late_max_s,
            "simulated:clock_resets": self.clock_resets,
            "process_start_time_seconds": self.started,
        }
        lines = []
        for name, count in self.counts.items():
            lines += [f"# TYPE simulated:{name}_total counter", f"simulated:{name}_total {count}"]
        for name, value in gauges.items():
            lines += [f"# TYPE {name} gauge", f"{name} {value!r}"]
        return "\n".join(lines) + "\n"

    def _server_info(self, connection: Connection, _message: Message) -> None:
        state = {"pid": os.getpid(), "seed": self.seed, "launch_factor": self.batcher.noise.launch_factor}
        connection.reply(
            200,
            {
                "simulated": True,
                "version": __version__,
                "arguments": vars(self.arguments),
                "state": {**state, "late_max_s": self.late_max_s, "clock_resets": self.clock_resets},
            },
        )

    def _flush(self, connection: Connection, _message: Message) -> None:
        if self.faults.get("flush-fails"):
            connection.reply(500, _error(500, "cache not flushed"))
        elif self.batcher.running or self.batcher.waiting:
            connection.reply(400, _error(400, "cache not flushed: requests are running"))
        else:
            self.cache.clear()
            connection.reply(200, {"success": True, "message": "Cache flushed."})

    def _start_profile(self, connection: Connection, message: Message) -> None:
        if self.traced is not None:
            connection.reply(400, _error(400, "profiling is already in progress"))
            return
        try:
            folder = Path(message.json()["output_dir"])
        except (ValueError, TypeError, KeyError):
            connection.reply(400, _error(400, "`output_dir` is missing"))
            return
        self.traced = Trace(folder)
        connection.reply(200, {"success": True, "simulated": True})

    def _stop_profile(self, connection: Connection, _message: Message) -> None:
        traced, self.traced = self.traced, None
        if traced is None:
            connection.reply(400, _error(400, "profiling is not in progress"))
            return
        try:
            path = traced.write()
        except OSError as error:
            connection.reply(500, _error(500, f"the trace could not be written: {error.strerror}"))
            return
        connection.reply(200, {"success": True, "simulated": True, "file": str(path)})

    # -- generation -----------------------------------------------------------------------------------------------

    def _generate(self, connection: Connection, message: Message) -> None:
        number = self.counts["requests"]
        if not self.ready or self.arguments.node_rank:
            connection.reply(503, _error(503, "Loading model"))
            return
        try:
            asked = ask(message, self.arguments.served_model_name)
        except BadAsk as error:
            connection.reply(400, _error(400, str(error)))
            return
        self.counts["requests"] += 1
        self._trip_request(number + 1)
        hits = self.faults.of_request(number)
        if "status" in hits:
            connection.reply(hits["status"], _error(hits["status"], "simulated failure"))
        elif "no-answer" not in hits:
            self._take(connection, asked, hits)

    def _trip_request(self, seen: int) -> None:
        """Faults that come with the number of requests."""
        if _due(self.faults.get("die-after-requests"), seen):
            os.kill(os.getpid(), signal.SIGKILL)
        if _due(self.faults.get("restart-after-requests"), seen) and RESTARTED not in os.environ:
            say("restarting")
            again = [sys.executable, "-m", "harness.engines.simulated_server", *sys.argv[1:]]
            os.execve(sys.executable, again, {**os.environ, RESTARTED: "1"})

    def _take(self, connection: Connection, asked: Ask, hits: Mapping[str, Any]) -> None:
        words = split(asked.prompt)
        prompt_tokens = len(words) + asked.template_tokens
        room = self.arguments.context_length - prompt_tokens
        if room < 1 or asked.max_tokens > room:
            said = f"the request needs {prompt_tokens + asked.max_tokens} tokens, "
            said += f"the context length is {self.arguments.context_length}"
            connection.reply(400, _error(400, said))
            return
        cached = min(self.faults.get("warm-cache") or self.cache.take(words), prompt_tokens)
        length, finish = self._length(asked, hits)
        request = Request(length, prompt_tokens - cached, seed=identity(self.seed, asked.key))
        self.counts["prompt_tokens"] += prompt_tokens
        self.counts["cached_tokens"] += cached
        leaves = divergence(asked.key, self.arguments.divergence_share, self.arguments.divergence_mean)
        told = Told(prompt_tokens, cached, finish, hits)
        reply = Reply(connection, asked, request, Writer(asked.key, leaves), told)
        connection.on_close = lambda: self._gone(request)
        if reply.begin():
            self.replies[request] = reply
            self._arrive(request)

    def _length(self, asked: Ask, hits: Mapping[str, Any]) -> tuple[int, str]:
        half = max(1, asked.max_tokens // 2)
        for fault, finish in (("wrong-length", "length"), ("early-stop", "stop"), ("abort", "abort")):
            if fault in hits:
                return half, finish
        if self.arguments.output_tokens and not asked.ignore_eos:
            natural = 1 + int(random.Random(asked.key).expovariate(1 / self.arguments.output_tokens))
            if natural < asked.max_tokens:
                return natural, "stop"
        return asked.max_tokens, "length"

    def _gone(self, request: Request) -> None:
        self.batcher.cancel(request)
        self.replies.pop(request, None)
        if self.stopping:
            self._end_when_drained()

    # -- start and stop -------------------------------------------------------------------------------------------

    async def run(self) -> int:
        """Load, serve, and return the exit code when told to stop."""
        loop = asyncio.get_running_loop()
        for name in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(name, self._asked_to_stop)
        say("loading weights")
        if (lives := self.faults.get("setsid-child")) is not None:
            say(f"child {_start_child(lives)} started")
        if self.faults.get("never-listens"):
            return await self.ended
        try:
            server = await loop.create_server(
                lambda: Connection(self.handle, self.connections),
                self.arguments.host,
                self.arguments.port,
                backlog=4096,
            )
        except OSError as error:
            say(f"error: cannot listen on {self.arguments.host}:{self.arguments.port}: {error.strerror or error}")
            return 1
        self.arguments.port = server.sockets[0].getsockname()[1]  # asked for port 0, it got another
        loading = asyncio.create_task(self._load())
        code = await self.ended
        loading.cancel()
        server.close()
        for connection in list(self.connections):
            connection.close()
        say(f"stopped, exit code {code}")
        return code

    async def _load(self) -> None:
        arguments = self.arguments
        self.ended.add_done_callback(lambda _: self.group.leave())
        if (line := self.faults.get("die-before-ready")) is not None:
            say(line)
            self._end(1)
            return
        if (line := self.faults.get("hang-before-ready")) is not None:
            say(line)
            return
        await asyncio.sleep(arguments.load_s + (self.faults.get("slow-start") or 0.0))
        try:
            await self.group.join()
        except OSError as error:  # a timeout is one too
            if error.errno == errno.EADDRINUSE:
                say(f"error: cannot listen on {arguments.dist_init_addr}: {error.strerror}")
                self._end(1)
                return
            place = f"rank {arguments.node_rank} of {arguments.nnodes}"
            say(f"error: {place} found no group at {arguments.dist_init_addr}: {error or 'timed out'}")
            self._end(1)
            return
        self.ready = True
        say(f"ready on http://{arguments.host}:{arguments.port}, rank {arguments.node_rank} of {arguments.nnodes}")

    def _lost(self, rank: int) -> None:
        if self.ended.done():
            return
        say(f"error: rank {rank} of {self.arguments.nnodes} was lost, the group cannot go on")
        if self.arguments.on_rank_loss == "hang":
            self.frozen = True
            self._schedule()
        else:
            self._end(1)

    def _stepped(self, tokens: int) -> None:
        """Rank 0 has so many tokens by now: every rank made its part of them, and may break at one."""
        self.counts["generated_tokens"] = tokens
        self._trip()

    def _left(self, rank: int) -> None:
        say(f"rank {rank} left")
        self._end(0)

    def _asked_to_stop(self) -> None:
        if self.faults.get("ignore-term"):
            say("asked to stop, ignored")
            return
        say("stopping")
        self.stopping = True
        if not self.faults.get("drain-on-term"):
            self._end(1 if self.faults.get("die-at-stop") else 0)
        self._end_when_drained()

    def _end_when_drained(self) -> None:
        if not self.replies:
            self._end(0)

    def _end(self, code: int) -> None:
        if not self.ended.done():
            self.ended.set_result(code)


def _start_child(lives_s: float) -> int:
    """A child as SGLang's schedulers are: its own session, deaf to SIGTERM. It ends by itself: no test can leak it."""
    program = f"import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep({lives_s})"
    return subprocess.Popen([sys.executable, "-c", program], start_new_session=True, stdin=subprocess.DEVNULL).pid


def _crash_child() -> "subprocess.Popen[bytes]":
    """A child that a signal ends at once. Whoever holds what this returns has not noticed its death."""
    program = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    return subprocess.Popen([sys.executable, "-S", "-c", program], stdin=subprocess.DEVNULL)


def _due(limit: int | None, count: int) -> bool:
    return limit is not None and count >= limit


def _error(status: int, said: str) -> dict[str, Any]:
    return {"error": {"message": said, "type": "simulated_error", "code": status}}


def say(text: str) -> None:
    """One line of log on stderr."""
    sys.stderr.write(f"[{time.strftime('%Y-%m-%d %H:%M:%S')}] simulated: {text}\n")
    sys.stderr.flush()


async def _serve(arguments: argparse.Namespace, faults: faulty.Faults) -> int:
    return await Simulation(arguments, faults).run()


def main(argv: Sequence[str] | None = None) -> int:
    """The program."""
    command = parser(str(__doc__))
    arguments = command.parse_args(argv)
    mine = arguments.fault_rank in {None, arguments.node_rank}
    try:
        faults = faulty.read(
            arguments.fault, first=arguments.fault_from, every=arguments.fault_every, count=arguments.fault_count
        )
        faults = faults if mine else faulty.Faults()
    except ValueError as error:
        command.error(str(error))
    # Each stream is an open file: take as many as this user may have.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with contextlib.suppress(KeyboardInterrupt):
        return asyncio.run(_serve(arguments, faults))
    return 130


if __name__ == "__main__":
    sys.exit(main())

"""A loopback source of known streams: what a client's capacity is measured against, and a stand-in for a server in C.

Run as `python -m harness.load.source PORT [name=value ...]`; PORT 0 takes any and prints it. It speaks chat,
completions and SGLang's `/generate`, sends every chunk on an absolute schedule, and writes down when each was due and
when it was handed to the kernel, on the clock the kernel stamps arrivals with. Its settings, by start argument or by
query (`?gap_us=5000&k=4`), its `/log`, `/totals` and `/reset` are those of the C server in `benchmarks/truthd`, which
is more exact and reaches farther; this one needs no compiler.
"""

import ctypes
import errno
import heapq
import json
import random
import resource
import select
import signal
import socket
import sys
import time
from contextlib import suppress
from urllib.parse import parse_qsl, urlsplit

AT_END, CONTINUOUS, TOKEN_IDS, TIMINGS, NEVER = range(5)
DEFAULTS = {
    "ttft_us": 50_000,
    "gap_us": 10_000,
    "k": 1,
    "first": 0,
    "jitter_us": 0,
    "stall_at": -1,
    "stall_us": 0,
    "tokens": 128,
    "count": AT_END,
    "lines": 0,
    "cut_at": 0,
    "id": 0,
}
_WORDS = (" the", " of", " and", " to", " in", " is", " that", " for")
_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"


class Stream:
    """One connection, and the response it is sending."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.incoming = b""
        self.outgoing = b""
        self.streaming = False
        self.blocked = False
        self.closed = False
        self.settings = dict(DEFAULTS)
        self.dialect = "chat"
        self.usage = False
        self.prompt = self.made = self.chunk = self.due = 0
        self.random = random.Random(0)
        self.record: dict[str, object] = {}
        self.chunks: list[tuple[int, int, int]] = []


class Source:
    """The server: one thread, one poller, one heap of what is due."""

    def __init__(self, port: int, settings: dict[str, int]) -> None:
        self.settings = {**DEFAULTS, **settings}
        self.listener = socket.create_server(("127.0.0.1", port), backlog=4096)
        self.listener.setblocking(False)
        self.poller = select.epoll()
        self.poller.register(self.listener.fileno(), select.EPOLLIN)
        self.streams: dict[int, Stream] = {}
        self.heap: list[tuple[int, int, Stream]] = []
        self.order = 0
        self.log: list[tuple[dict[str, object], list[tuple[int, int, int]]]] = []
        self.active = self.peak = self.done = 0

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self.listener.getsockname()[1])

    def serve(self) -> None:
        """Until the process is told to end."""
        while True:
            wait = max(0.0, (self.heap[0][0] - time.time_ns()) / 1e9) if self.heap else None
            if wait is not None:
                # epoll waits in milliseconds, select in microseconds.
                select.select([self.poller.fileno()], (), (), wait)
            for fd, event in self.poller.poll(0 if wait is not None else None):
                if fd == self.listener.fileno():
                    self._welcome()
                elif (stream := self.streams.get(fd)) is not None:
                    self._attend(stream, event)
            self._send_due()

    def _welcome(self) -> None:
        with suppress(BlockingIOError):
            while True:
                sock, _ = self.listener.accept()
                sock.setblocking(False)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self.streams[sock.fileno()] = Stream(sock)
                self.poller.register(sock.fileno(), select.EPOLLIN)

    def _drop(self, stream: Stream) -> None:
        self.active -= stream.streaming
        stream.streaming, stream.closed = False, True
        del self.streams[stream.sock.fileno()]
        self.poller.unregister(stream.sock.fileno())
        stream.sock.close()

    def _attend(self, stream: Stream, event: int) -> None:
        if event & select.EPOLLOUT and self._flush(stream) and stream.streaming:
            self._schedule(stream)
        if stream.closed or not event & ~select.EPOLLOUT:
            return
        try:
            data = stream.sock.recv(1 << 17)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._drop(stream)
            return
        stream.incoming += data
        self._take(stream)

    def _flush(self, stream: Stream) -> bool:
        """Whether everything is with the kernel; a reader that is too slow, or gone, makes it False."""
        try:
            stream.outgoing = stream.outgoing[stream.sock.send(stream.outgoing) :]
        except BlockingIOError:
            pass
        except OSError as error:
            if error.errno not in {errno.EPIPE, errno.ECONNRESET}:
                raise
            self._drop(stream)
            return False
        blocked = bool(stream.outgoing)
        if blocked != stream.blocked:
            self.poller.modify(stream.sock.fileno(), select.EPOLLIN | (select.EPOLLOUT if blocked else 0))
            stream.blocked = blocked
        return not blocked

    # Requests

    def _take(self, stream: Stream) -> None:
        while not stream.streaming and not stream.closed:
            head, blank, rest = stream.incoming.partition(b"\r\n\r\n")
            _, said, after = head.lower().partition(b"\r\ncontent-length:")
            length = int(after.split(b"\r\n")[0]) if said else 0
            if not blank or len(rest) < length:
                return
            stream.incoming = rest[length:]
            method, target, _ = head.split(b"\r\n")[0].decode("latin-1").split(" ", 2)
            self._handle(stream, method, target, rest[:length])

    def _handle(self, stream: Stream, method: str, target: str, body: bytes) -> None:
        url = urlsplit(target)
        if method == "POST" and url.path != "/reset":
            stream.dialect = (
                "chat" if "/chat/" in url.path else "generate" if url.path == "/generate" else "completions"
            )
            self._generate(stream, {key: int(value) for key, value in parse_qsl(url.query)}, body)
        elif url.path == "/log":
            lines = [json.dumps({**record, "chunks": chunks}) + "\n" for record, chunks in self.log]
            self._answer(stream, "".join(lines).encode())
        elif url.path == "/totals":
            self._answer(stream, json.dumps(self._totals()).encode())
        elif url.path == "/reset":
            self.log, self.peak, self.done = [], 0, 0
            self._answer(stream, b"{}")
        else:
            self._answer(stream, json.dumps({"object": "list", "data": [{"id": "truth", "object": "model"}]}).encode())

    def _answer(self, stream: Stream, body: bytes) -> None:
        head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        stream.outgoing += head.encode() + body
        self._flush(stream)

    def _totals(self) -> dict[str, object]:
        chunks = [chunk for _, chunks in self.log for chunk in chunks]
        late = sorted((sent - due) / 1e3 for due, sent, _ in chunks) or [0.0]
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return {
            "requests": len(self.log),
            "done": self.done,
            "chunks": len(chunks),
            "tokens": sum(tokens for _, _, tokens in chunks),
            "peak": self.peak,
            "cpu_s": usage.ru_utime + usage.ru_stime,
            "late_us": {"p50": late[len(late) // 2], "p99": late[len(late) * 99 // 100], "max": late[-1]},
        }

    def _generate(self, stream: Stream, query: dict[str, int], body: bytes) -> None:
        asked = json.loads(body or b"{}")
        sampling = asked.get("sampling_params") or {}
        tokens = asked.get("max_completion_tokens") or asked.get("max_tokens") or sampling.get("max_new_tokens")
        stream.settings = {**self.settings, **({"tokens": tokens} if tokens else {}), **query}
        stream.usage = bool((asked.get("stream_options") or {}).get("include_usage"))
        stream.prompt, stream.made, stream.chunk = len(body) // 4, 0, 0
        stream.random = random.Random(stream.settings["id"])
        stream.streaming = True
        self.active += 1
        self.peak = max(self.peak, self.active)
        arrived = time.time_ns()
        stream.chunks = []
        self.log.append(({"id": stream.settings["id"], "arrived": arrived}, stream.chunks))
        stream.due = arrived + stream.settings["ttft_us"] * 1000
        stream.outgoing += _HEAD
        if self._flush(stream):
            self._schedule(stream)

    # Chunks

    def _schedule(self, stream: Stream) -> None:
        self.order += 1
        heapq.heappush(self.heap, (stream.due, self.order, stream))

    def _send_due(self) -> None:
        now = time.time_ns()
        for _ in range(1000):
            if not self.heap or self.heap[0][0] > now:
                return
            _, _, stream = heapq.heappop(self.heap)
            if not stream.closed:
                self._emit(stream)

    def _emit(self, stream: Stream) -> None:
        options = stream.settings
        if options["cut_at"] and stream.chunk == options["cut_at"]:
            self._drop(stream)
            return
        wanted = options["first"] if stream.chunk == 0 and options["first"] else options["k"]
        tokens = min(wanted, options["tokens"] - stream.made)
        stream.made += tokens
        last = stream.made >= options["tokens"]
        frames = _frame(json.dumps(_event(stream, tokens, last=last), separators=(",", ":")), options["lines"])
        if last:
            if stream.usage and options["count"] != NEVER and stream.dialect != "generate":
                frames += _frame(json.dumps({"choices": [], "usage": _usage(stream)}), options["lines"])
            frames += _frame("[DONE]", options["lines"]) + b"0\r\n\r\n"
        stream.outgoing += frames
        stream.chunks.append((stream.due, time.time_ns(), tokens))
        stream.chunk += 1
        gap = options["gap_us"] + stream.random.randint(-options["jitter_us"], options["jitter_us"])
        gap += options["stall_us"] if stream.chunk == options["stall_at"] else 0
        # The schedule is absolute: a late chunk does not move the next.
        stream.due = stream.due + 1000 * max(0, gap) if options["gap_us"] else time.time_ns()
        if last:
            stream.streaming = False
            self.active -= 1
            self.done += 1
        flushed = self._flush(stream)
        if not last and flushed:
            self._schedule(stream)
        elif last and not stream.closed:
            self._take(stream)


def _usage(stream: Stream) -> dict[str, int]:
    total = stream.prompt + stream.made
    return {"prompt_tokens": stream.prompt, "completion_tokens": stream.made, "total_tokens": total}


def _event(stream: Stream, tokens: int, *, last: bool) -> dict[str, object]:
    """One chunk's JSON in the stream's dialect."""
    numbers = [index & 7 for index in range(stream.made - tokens, stream.made)]
    text = "".join(_WORDS[number] for number in numbers)
    counting = stream.settings["count"]
    if stream.dialect == "generate":
        meta = {"prompt_tokens": stream.prompt, "completion_tokens": stream.made, "cached_tokens": 0}
        reason = {"type": "length", "length": stream.made} if last else None
        return {"text": text, "meta_info": {**meta, "finish_reason": reason}}
    piece = {"delta": {"role": "assistant", "content": text}} if stream.dialect == "chat" else {"text": text}
    choice: dict[str, object] = {"index": 0, **piece, "logprobs": None, "finish_reason": "length" if last else None}
    if counting == TOKEN_IDS:
        choice["token_ids"] = [1000 + number for number in numbers]
    name = "chat.completion.chunk" if stream.dialect == "chat" else "text_completion"
    event: dict[str, object] = {
        "id": "truth",
        "object": name,
        "created": 1700000000,
        "model": "truth",
        "choices": [choice],
    }
    if counting == CONTINUOUS:
        event["usage"] = _usage(stream)
    if counting == TIMINGS:
        event["timings"] = {"prompt_n": stream.prompt, "predicted_n": stream.made}
    return event


def _frame(data: str, carriage_returns: int) -> bytes:
    event = f"data: {data}" + ("\r\n\r\n" if carriage_returns else "\n\n")
    raw = event.encode()
    return b"%x\r\n%b\r\n" % (len(raw), raw)


def main() -> int:
    """Serve until told to end, or until the parent is gone."""
    settings = {name: int(value) for name, _, value in (word.partition("=") for word in sys.argv[2:])}
    with suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: whoever started it is gone, nobody will stop it
        libc.prctl(29, 1)  # PR_SET_TIMERSLACK, nanoseconds
    with suppress(ValueError, OSError):
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    source = Source(int(sys.argv[1]), settings)
    sys.stdout.write(f"{source.port}\n")
    sys.stdout.flush()
    source.serve()
    return 0


if __name__ == "__main__":
    sys.exit(main())

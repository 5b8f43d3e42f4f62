"""A server of several ranks: rank 0 serves, the others hold a connection to it, and any rank's death is the group's.

Stands for what a tensor-parallel group does over NCCL: the connection is the proof of life, a rank that goes without
saying goodbye takes the others with it, or leaves them hanging as a lost peer in a collective would. Rank 0 tells the
others at each step how many tokens there are by now, as every rank takes part in every step.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

CONNECT_S = 60.0


@dataclass(frozen=True, slots=True)
class Heard:
    """Who is told: of a rank that went without, or with, a goodbye; of tokens made so far (at ranks above 0)."""

    on_loss: Callable[[int], None]
    on_leave: Callable[[int], None]
    on_tokens: Callable[[int], None]


class Group:
    """This process's place in the group.

    Args:
        rank, size: which of how many.
        address: `HOST:PORT` where rank 0 listens and the others call.
        heard: who is told what comes from the others.
    """

    def __init__(self, rank: int, size: int, address: str, heard: Heard) -> None:
        self.rank = rank
        self.size = size
        host, _, port = address.rpartition(":")
        self._host, self._port = host.strip("[]") or "127.0.0.1", int(port or 0)
        self._heard = heard
        self._writers: list[asyncio.StreamWriter] = []
        self._complete = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._server: asyncio.Server | None = None

    async def join(self) -> None:
        """Return when every rank is there.

        Raises:
            TimeoutError: some rank did not come within a minute.
        """
        if self.size == 1:
            return
        async with asyncio.timeout(CONNECT_S):
            if self.rank == 0:
                self._server = await asyncio.start_server(self._accept, self._host, self._port)
                await self._complete.wait()
            else:
                await self._connect()

    def tell(self, tokens: int) -> None:
        """Tell every other rank how many tokens there are by now."""
        for writer in self._writers:
            writer.write(b"tokens %d\n" % tokens)

    def leave(self) -> None:
        """Say goodbye, so that the others end too and nobody calls it a loss."""
        for writer in self._writers:
            writer.write(b"bye\n")
            writer.close()
        if self._server is not None:
            self._server.close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = await reader.readline()
        if not line.startswith(b"rank "):
            writer.close()
            return
        self._writers.append(writer)
        if len(self._writers) == self.size - 1:
            for peer in self._writers:
                peer.write(b"go\n")
            self._complete.set()
        await self._watch(reader, int(line[5:]))

    async def _connect(self) -> None:
        reader, writer = await self._call()
        self._writers.append(writer)
        writer.write(f"rank {self.rank}\n".encode())
        if await reader.readline() != b"go\n":
            self._heard.on_loss(0)
            return
        self._tasks.append(asyncio.create_task(self._watch(reader, 0)))

    async def _call(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection to rank 0, which may not listen yet."""
        while True:
            try:
                return await asyncio.open_connection(self._host, self._port)
            except OSError:
                await asyncio.sleep(0.1)

    async def _watch(self, reader: asyncio.StreamReader, rank: int) -> None:
        """Listen to a peer until its last word, or until its connection breaks."""
        try:
            while (said := await reader.readline()).startswith(b"tokens "):
                self._heard.on_tokens(int(said[7:]))
        except OSError:
            said = b""
        (self._heard.on_leave if said == b"bye\n" else self._heard.on_loss)(rank)

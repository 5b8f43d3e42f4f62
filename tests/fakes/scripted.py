"""A server that says exactly what a test tells it to, fault by fault: one script a connection, plain or TLS."""

import contextlib
import socket
import ssl
import threading
from collections.abc import Callable, Iterator

Script = Callable[[socket.socket, int], None]


def read_request(sock: socket.socket) -> bytes:
    """One whole request, or nothing when the client left."""
    data = b""
    while b"\r\n\r\n" not in data:
        more = sock.recv(1 << 16)
        if not more:
            return b""
        data += more
    head, _, body = data.partition(b"\r\n\r\n")
    length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
    while len(body) < length:
        body += sock.recv(1 << 16)
    return head + b"\r\n\r\n" + body


@contextlib.contextmanager
def scripted(script: Script, context: ssl.SSLContext | None = None) -> Iterator[int]:
    """Serve: `script(connection, number)` is called for each connection, counted from 0. Gives the port."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=256)
    threads: list[threading.Thread] = []

    def talk(sock: socket.socket, number: int) -> None:
        with contextlib.suppress(OSError):
            wrapped = context.wrap_socket(sock, server_side=True) if context else sock
            with wrapped:
                script(wrapped, number)

    def accept() -> None:
        number = 0
        with contextlib.suppress(OSError):
            while True:
                sock, _ = listener.accept()
                threads.append(threading.Thread(target=talk, args=(sock, number), daemon=True))
                threads[-1].start()
                number += 1

    acceptor = threading.Thread(target=accept, daemon=True)
    acceptor.start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        acceptor.join(5)
        for thread in threads:
            thread.join(5)

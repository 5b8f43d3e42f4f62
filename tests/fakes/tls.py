"""TLS in front of a server that speaks plain HTTP, with a certificate of our own."""

import select
import shutil
import socket
import ssl
import subprocess
from pathlib import Path

import pytest
from fakes.scripted import Script


def certificate(folder: Path) -> Path:
    """A folder with `cert.pem` and `key.pem` for 127.0.0.1, which no authority vouches for."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl here to make a certificate with")
    made = ["-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=127.0.0.1"]
    names = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", folder / "key.pem", "-out", folder / "cert.pem"]
    subprocess.run(["openssl", "req", *made, *names], check=True, capture_output=True)
    return folder


def context(folder: Path) -> ssl.SSLContext:
    """A server's side of it."""
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    made.load_cert_chain(folder / "cert.pem", folder / "key.pem")
    return made


def relay(port: int) -> Script:
    """A script for `scripted` that passes bytes on to a server on loopback, and back, until either side ends."""

    def script(sock: socket.socket, _: int) -> None:
        assert isinstance(sock, ssl.SSLSocket)
        with socket.create_connection(("127.0.0.1", port)) as behind:
            while True:
                ready = [sock] if sock.pending() else select.select([sock, behind], (), ())[0]
                for one in ready:
                    data = one.recv(1 << 16)
                    if not data:
                        return
                    (behind if one is sock else sock).sendall(data)

    return script

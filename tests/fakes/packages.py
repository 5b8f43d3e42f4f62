"""Small real wheels, and a package index on the loopback that serves them and can be told to misbehave."""

import base64
import hashlib
import io
import json
import tarfile
import threading
import time
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import quote, unquote

from packaging.utils import canonicalize_name, parse_sdist_filename, parse_wheel_filename


def make_wheel(
    folder: Path,
    name: str,
    version: str,
    *,
    requires: Sequence[str] = (),
    contents: Mapping[str, str | bytes] | None = None,
    tag: str = "py3-none-any",
) -> Path:
    """Write a wheel (PEP 427) whose module says its version; equal arguments give equal bytes."""
    module = canonicalize_name(name).replace("-", "_")
    info = f"{module}-{version}.dist-info"
    meta = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n" + "".join(
        f"Requires-Dist: {requirement}\n" for requirement in requires
    )
    files: dict[str, str | bytes] = {f"{module}/__init__.py": f'__version__ = "{version}"\n', **(contents or {})}
    files |= {f"{info}/METADATA": meta, f"{info}/WHEEL": f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag}\n"}
    encoded = {path: text.encode() if isinstance(text, str) else text for path, text in files.items()}
    rows = [f"{path},sha256={_digest64(data)},{len(data)}" for path, data in encoded.items()]
    encoded[f"{info}/RECORD"] = ("\n".join([*rows, f"{info}/RECORD,,"]) + "\n").encode()
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / f"{module}-{version}-{tag}.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, data in encoded.items():
            archive.writestr(zipfile.ZipInfo(path, (2026, 1, 1, 0, 0, 0)), data)
    return wheel


_BACKEND = """
import zipfile
def build_wheel(folder, config_settings=None, metadata_directory=None):
    name = "{module}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(f"{{folder}}/{{name}}", "w") as archive:
        archive.writestr("{module}/__init__.py", "built = True")
        info = "{module}-{version}.dist-info"
        archive.writestr(f"{{info}}/METADATA", "Metadata-Version: 2.1\\nName: {name}\\nVersion: {version}\\n")
        archive.writestr(f"{{info}}/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        archive.writestr(f"{{info}}/RECORD", "")
    return name
"""


def make_sdist(folder: Path, name: str, version: str) -> Path:
    """Write a source distribution that builds itself, with no build tool from any index."""
    module = canonicalize_name(name).replace("-", "_")
    root = f"{module}-{version}"
    system = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    files = {
        "PKG-INFO": f"Metadata-Version: 2.2\nName: {name}\nVersion: {version}\n",
        "pyproject.toml": f'{system}[project]\nname = "{name}"\nversion = "{version}"\n',
        "backend.py": _BACKEND.format(module=module, name=name, version=version),
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{root}.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for inner, text in files.items():
            entry = tarfile.TarInfo(f"{root}/{inner}")
            entry.size = len(text.encode())
            archive.addfile(entry, io.BytesIO(text.encode()))
    return path


def _digest64(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


@dataclass
class PackageIndex:
    """A simple index (PEP 503, 658, 691) over a folder of wheels.

    Attributes:
        folder: the wheels it has now; a file that is deleted has left the index.
        address: its URL, once served.
        html: answers pages in HTML only, as older indexes do.
        hashes, sizes: whether its pages say them.
        cut: serves only so many bytes of a file, once, then breaks the connection.
        pause_s: waits so long after every 4 KiB of a file.
        other: serves these bytes in place of a file's own.
        asked: every path asked for, with the Range header where there was one.
    """

    folder: Path
    address: str = ""
    html: bool = False
    hashes: bool = True
    sizes: bool = True
    cut: dict[str, int] = field(default_factory=dict)
    pause_s: float = 0.0
    other: dict[str, bytes] = field(default_factory=dict)
    asked: list[tuple[str, str | None]] = field(default_factory=list)

    def page(self, package: str) -> list[dict[str, object]]:
        """The entries of one package's page."""
        return [self._entry(path) for path in sorted(self.folder.iterdir()) if _owner(path) == package]

    def _entry(self, path: Path) -> dict[str, object]:
        entry: dict[str, object] = {
            "filename": path.name,
            "url": f"../../files/{quote(path.name)}",
            "hashes": {"sha256": hashlib.sha256(path.read_bytes()).hexdigest()} if self.hashes else {},
            "core-metadata": path.suffix == ".whl",
        }
        return entry | ({"size": path.stat().st_size} if self.sizes else {})

    def files_asked(self) -> list[str]:
        """The names of the wheels that were downloaded, in whole or in part."""
        return [unquote(path).rsplit("/", 1)[-1] for path, _ in self.asked if path.endswith(".whl")]


def _owner(path: Path) -> str:
    return parse_wheel_filename(path.name)[0] if path.suffix == ".whl" else parse_sdist_filename(path.name)[0]


@contextmanager
def served(index: PackageIndex) -> Iterator[PackageIndex]:
    """Serve an index on a free loopback port."""

    class Handler(_Handler):
        packages = index

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    index.address = f"http://127.0.0.1:{server.server_address[1]}/simple"
    try:
        yield index
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    packages: PackageIndex
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.packages.asked.append((self.path, self.headers.get("Range")))
        parts = unquote(self.path).strip("/").split("/")
        if parts[0] == "simple" and len(parts) == 2:
            self._page(parts[1])
        elif parts[0] == "files" and parts[1].endswith(".metadata"):
            self._metadata(parts[1].removesuffix(".metadata"))
        else:
            self._file(parts[-1])

    do_HEAD = do_GET  # noqa: N815

    def log_message(self, *_: object) -> None:
        """Quiet."""

    def _page(self, package: str) -> None:
        entries = self.packages.page(package)
        if not entries:
            self._answer(404, b"no such package", "text/plain")
        elif self.packages.html:
            links = [self._link(entry) for entry in entries]
            self._answer(
                200, "<!DOCTYPE html><html><body>{}</body></html>".format("\n".join(links)).encode(), "text/html"
            )
        else:
            body = {"meta": {"api-version": "1.1"}, "name": package, "files": entries}
            self._answer(200, json.dumps(body).encode(), "application/vnd.pypi.simple.v1+json")

    def _link(self, entry: Mapping[str, object]) -> str:
        hashes = entry["hashes"]
        assert isinstance(hashes, dict)
        fragment = f"#sha256={hashes['sha256']}" if hashes else ""
        return f'<a href="{entry["url"]}{fragment}" data-core-metadata="true">{entry["filename"]}</a>'

    def _metadata(self, name: str) -> None:
        path = self.packages.folder / name
        with zipfile.ZipFile(path) as archive:
            meta = next(member for member in archive.namelist() if member.endswith(".dist-info/METADATA"))
            self._answer(200, archive.read(meta), "text/plain")

    def _file(self, name: str) -> None:
        path = self.packages.folder / name
        if not path.is_file():
            self._answer(404, b"gone", "text/plain")
            return
        data = self.packages.other.get(name) or path.read_bytes()
        start = 0
        if asked := self.headers.get("Range"):
            start = int(asked.removeprefix("bytes=").split("-")[0])
        limit = self.packages.cut.pop(name, None) if self.command == "GET" else None
        self.send_response(206 if asked else 200)
        self.send_header("Content-Length", str(len(data) - start))
        self.end_headers()
        if self.command == "GET":
            self._pour(data[start : limit and start + limit])
        if limit is not None:
            self.close_connection = True

    def _pour(self, data: bytes) -> None:
        for position in range(0, len(data), 4096):
            self.wfile.write(data[position : position + 4096])
            time.sleep(self.packages.pause_s)

    def _answer(self, status: int, body: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

"""Read package indexes: which address a locked file has today (PEP 503 pages, PEP 691 JSON, folders)."""

from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urljoin, urlsplit

import requests

from harness.env.indexes import Index, local_path
from harness.errors import BuildError

_ACCEPT = "application/vnd.pypi.simple.v1+json, application/vnd.pypi.simple.v1+html;q=0.2, text/html;q=0.1"
_TIMEOUT = 60.0


def addresses(index: Index, package: str, session: requests.Session) -> dict[str, str]:
    """The files an index has of a package: file name to address (or path, for an index on this machine).

    Raises:
        BuildError: the index cannot be reached or does not know the package.
    """
    if index.folder is not None:
        return {path.name: str(path) for path in index.folder.glob("*") if path.is_file()}
    root = local_path(index.address)
    if root is not None:
        return _local_page(root / package / "index.html", index)
    return _remote_page(f"{index.address.rstrip('/')}/{package}/", index, package, session)


def _local_page(page: Path, index: Index) -> dict[str, str]:
    if not page.is_file():
        raise BuildError(f"the index `{index.name}` does not know `{page.parent.name}`")
    return _links(page.read_text(), page.as_uri())


def _remote_page(url: str, index: Index, package: str, session: requests.Session) -> dict[str, str]:
    try:
        answer = session.get(url, headers={"Accept": _ACCEPT}, timeout=_TIMEOUT)
    except requests.RequestException as error:
        raise BuildError(
            f"the index `{index.name}` cannot be reached: {type(error).__name__}",
            hint="check the network, or build `--offline` from a filled wheelhouse",
        ) from error
    if answer.status_code in (403, 404):
        raise BuildError(f"the index `{index.name}` does not know `{package}` (HTTP {answer.status_code})")
    if not answer.ok:
        raise BuildError(f"the index `{index.name}` answered HTTP {answer.status_code} for `{package}`")
    if "json" in answer.headers.get("Content-Type", ""):
        return {file["filename"]: urljoin(answer.url, file["url"]) for file in answer.json()["files"]}
    return _links(answer.text, answer.url)


def _links(page: str, base: str) -> dict[str, str]:
    reader = _Links()
    reader.feed(page)
    found = {}
    for link in reader.links:
        address = urljoin(base, link).split("#")[0]
        path = local_path(address)
        found[unquote(urlsplit(address).path).rsplit("/", 1)[-1]] = str(path) if path is not None else address
    return found


class _Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [value for name, value in attrs if tag == "a" and name == "href" and value]

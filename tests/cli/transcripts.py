"""The transcripts in the documents: read from a page, played in a project of their own, compared with what is printed.

What a page's source says:

    ```console              commands after `$ `, and what they print, stdout and stderr together; `...` stands for
                            anything, a line of it for any lines. `$ echo $?` shows the exit code; without it 0 is
                            expected.
    ```yaml title="a/b.yaml"    a file that the reader writes: it is written before the next command.
    <!-- not run: WHY -->   before a block of commands: they are not carried out; they must still be commands that
                            there are, and a recipe that is run in it must plan.
    <!-- session: empty -->     the page plays in an empty project, not in a copy of this one.
    <!-- session: wheel NAME VERSION -->    a wheel lies in wheels/.
    <!-- session: run -->   a stored run lies in runs/simulated.
    <!-- session: results -->   results of other tools lie in results/.
"""

import contextlib
import io
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from fakes.packages import make_wheel

from harness.cli import main

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PORT = "30123"  # what pages call the port of a server they start; a free one is taken in its place
RESULTS = {"vllm.json": "vllm-0.32-chat.json", "guidellm.json": "guidellm-0.8.1.json"}
_FENCE = re.compile(r"^(\s*)```(\S*)(.*)$")
_COPIED = (
    "envspecs",
    "recipes",
    "docs",
    "README.md",
    "LOGBOOK.md",
    "CHANGELOG.md",
    "Dockerfile.cuda13",
    "pyproject.toml",
)
_SHELL = set("|<>;&$*`")
_HARMLESS = {"harness", "python", "ls", "cat", "head", "tail", "grep", "sed", "wc", "cp", "mkdir", "rm"}


@dataclass(frozen=True)
class Command:
    """One command, and what the page says that it prints."""

    line: int
    text: str
    expected: str

    @property
    def words(self) -> list[str]:
        """The command's words, without what a shell does with its output."""
        words = shlex.split(self.text, comments=True)
        return words[: next((at for at, word in enumerate(words) if word in {"|", "&&", ">", "&"}), len(words))]


@dataclass(frozen=True)
class Block:
    """One fenced block: a file to write, or commands to carry out (or not, and why)."""

    line: int
    title: str | None
    text: str
    not_run: str | None = None
    commands: tuple[Command, ...] = ()


@dataclass(frozen=True)
class Page:
    """What one document holds."""

    path: Path
    session: tuple[str, ...]
    blocks: tuple[Block, ...]

    @property
    def name(self) -> str:
        return str(self.path.relative_to(ROOT))

    @property
    def played(self) -> list[Command]:
        return [command for block in self.blocks if block.not_run is None for command in block.commands]


def read(path: Path) -> Page:
    """The blocks of a page, in order."""
    lines = path.read_text().splitlines()
    blocks, session, not_run, at = [], [], None, 0
    while at < len(lines):
        line = lines[at]
        if found := re.match(r"\s*<!-- session: (.*) -->", line):
            session.append(found[1])
        elif found := re.match(r"\s*<!-- not run: (.+) -->", line):
            not_run = found[1]
        elif fence := _FENCE.match(line):
            end = next(i for i in range(at + 1, len(lines)) if lines[i].strip() == "```")
            body = [text.removeprefix(fence[1]) for text in lines[at + 1 : end]]
            titled = re.search(r'title="([^"]+)"', fence[3])
            commands = tuple(_commands(body, at + 2)) if fence[2] == "console" else ()
            if commands or titled:
                blocks.append(Block(at + 1, titled[1] if titled else None, "\n".join(body) + "\n", not_run, commands))
            not_run, at = None, end
        elif line.strip():
            not_run = None
        at += 1
    return Page(path, tuple(session), tuple(blocks))


def _commands(body: list[str], first: int) -> Iterator[Command]:
    starts = [at for at, line in enumerate(body) if line.startswith("$ ")]
    for at, following in zip(starts, [*starts[1:], len(body)], strict=True):
        head = at
        text = body[head][2:]
        while text.endswith("\\"):
            head += 1
            text = text[:-1] + body[head].strip()
        yield Command(first + at, text, "\n".join(body[head + 1 : following]))


@dataclass
class Session:
    """A project in which a page is played."""

    root: Path
    port: str = field(default_factory=lambda: str(_free_port()))
    code: int = 0
    said: str = ""
    servers: list["subprocess.Popen[bytes]"] = field(default_factory=list)

    def prepare(self, page: Page) -> None:
        """The project as the page wants it."""
        wanted = [told.split() for told in page.session]
        if ["empty"] in wanted:
            (self.root / "envspecs").mkdir()
        else:
            for name in _COPIED:
                source = ROOT / name
                copy = shutil.copytree if source.is_dir() else shutil.copyfile
                copy(source, self.root / name)
        if ["run"] in wanted:
            shutil.copytree(ROOT / "tests" / "files" / "runs" / "simulated", self.root / "runs" / "simulated")
        if ["results"] in wanted:
            (self.root / "results").mkdir()
            for name, source in RESULTS.items():
                shutil.copyfile(ROOT / "tests" / "files" / "interop" / source, self.root / "results" / name)
        for told in wanted:
            if told[0] == "wheel":
                (self.root / "wheels").mkdir(exist_ok=True)
                make_wheel(self.root / "wheels", told[1], told[2])

    def play(self, block: Block) -> Iterator[tuple[Command, str]]:
        """Each command with what it printed."""
        if block.title is not None:
            path = self.root / block.title
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text)
        for command in block.commands:
            self.said = self.carry_out(command.text.replace(PORT, self.port))
            yield command, self.said

    def carry_out(self, text: str) -> str:
        """One command; what it printed on stdout and stderr, in order."""
        if text == "echo $?":
            code, self.code = self.code, 0
            return f"{code}\n"
        assert self.code == 0, f"before `{text}`: exit code {self.code}, and no `echo $?` shows it:\n{self.said}"
        assert text.split()[0] in _HARMLESS, f"`{text}` is nothing for a test to carry out: say `<!-- not run: WHY -->`"
        if text.endswith(" &"):
            return self._background(text[:-2])
        words = shlex.split(text, comments=True)
        if words[0] == "harness" and not _SHELL & set(text.partition(" #")[0]):
            self.code, said = in_process(words[1:])
            return said
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        done = subprocess.run(
            ["bash", "-c", text],
            check=False,
            cwd=self.root,
            capture_output=True,
            text=True,
            env={**os.environ, "PATH": path},
            timeout=120,
        )
        self.code = done.returncode
        return done.stdout + done.stderr

    def _background(self, text: str) -> str:
        words = shlex.split(text)
        words[0] = sys.executable if words[0] in {"python", "python3"} else words[0]
        self.servers.append(
            subprocess.Popen(words, cwd=self.root, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        )
        until = time.monotonic() + 30
        while time.monotonic() < until:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", int(self.port)), 1):
                return ""
            time.sleep(0.1)
        raise AssertionError(f"`{text}` opened no port {self.port}")

    def end(self) -> None:
        for server in self.servers:
            server.terminate()
            server.wait(20)


def rewrite(page: Page, printed: dict[int, str], session: Session) -> None:
    """Put what commands printed, by their lines, into the page; what holds a `...` is left as it is."""
    lines = page.path.read_text().splitlines()
    for command in reversed(page.played):
        if command.line in printed and "..." not in command.expected:
            start = command.line - 1
            while lines[start].endswith("\\"):
                start += 1
            old = len(command.expected.splitlines())
            indent = lines[command.line - 1].partition("$ ")[0]
            new = local(printed[command.line], session.root).replace(session.port, PORT).rstrip("\n").splitlines()
            lines[start + 1 : start + 1 + old] = [(indent + line).rstrip() for line in new]
    page.path.write_text("\n".join(lines) + "\n")


def in_process(words: list[str]) -> tuple[int, str]:
    """`harness WORDS` in this process: exit code, and stdout with stderr."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            code = main(words)
        except SystemExit as end:
            code = int(end.code or 0)
    return code, said.getvalue()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# Lines on what this machine was like just then, which are no part of what a command is for.
_MOOD = re.compile(r"^(warning: (CPU|GPU|disk|memory|clock)|[^\n]*\bsuspect: )[^\n]*\n", re.MULTILINE)
# What may differ between two runs of one command, and what it is called in its place.
_ALIKE = (
    (r"\b(valid|suspect)\b", "STATE"),
    (r"\d{4}-\d\d-\d\dT\d{6}-([A-Za-z0-9._-]+?)-[0-9a-f]{8}", r"RUN-\1"),
    (r"\d{4}-\d\d-\d\d(T[0-9:.]+(\+00:00|Z)?)?", "DATE"),
    (r"\b[0-9a-f]{8,64}\b", "HEX"),
    (r"127\.0\.0\.1:\d+", "127.0.0.1:PORT"),
    (r"port \d+", "port PORT"),
    (r"[-+]?\d+(\.\d+)+", "N"),
    (r"\b\d+ (s|ms|min|GB|GiB|MB|MiB|bytes)\b", r"N \1"),
    (r"[━─]+", "━"),
    (r" *([┃│]) *", r"\1"),
    (r"[ \t]+", " "),
    (r" +$", ""),
)


def local(text: str, root: Path) -> str:
    """A text without this machine's paths and moods."""
    text = _MOOD.sub("", text)
    for path, word in ((f"{root}/", ""), (str(root), "."), (sys.executable, "python")):
        text = text.replace(path, word)
    return text


def alike(text: str, root: Path | None = None) -> str:
    """A text without what differs from run to run: times, rates, identities, widths, this machine's paths."""
    text = local(text, root) if root else _MOOD.sub("", text)
    for pattern, word in _ALIKE:
        text = re.sub(pattern, word, text, flags=re.MULTILINE)
    return text.strip("\n") + "\n"


def matches(expected: str, printed: str, root: Path) -> bool:
    """Whether a command printed what the page says."""
    parts = []
    for line in alike(expected, root).splitlines():
        if line.strip() == "...":
            parts.append(r"(?:[^\n]*\n)*?")
        else:
            parts.append(re.escape(line).replace(re.escape("..."), "[^\n]*") + "\n")
    return re.fullmatch("".join(parts), alike(printed, root)) is not None

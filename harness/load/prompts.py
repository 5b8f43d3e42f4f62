"""Prompt sets: what is asked, in a fixed order, known by its digest.

A set is named by one string, as recipes write it:

    coding                       recipes/prompts/coding.jsonl
    path/to/set.jsonl            one object a line: `text` (or `prompt`), `messages`, or `turns`, and maybe `id`
    path/to/sharegpt.json        a list of `{"id": ..., "conversations": [{"from": "human", "value": ...}]}`
    synthetic:words=200,count=256,seed=0
                                 words without sense, each prompt of this length
    shared-prefix:prefix=800,words=100,groups=4
                                 the same, with `groups` prefixes shared by turns

Conversations become one prompt a turn, each with the turns before it; turns of one conversation carry its name, and one
slot plays them in order. Which answers stand between them the set says, by a key of the conversation's entry:

    "answers": "recorded"        those of the set (the default for `conversations`): every run sends the same bytes
    "answers": "served"          those of the server under test (the default for `turns`, which record none): the cache
                                 is hit as in real use, but two servers that answer differently are asked differently

Conversations are mostly collected, not written: ShareGPT's own file holds some in which nobody asks anything, and the
same question more than once. Such entries are left out, where in texts that somebody wrote they would be faults.

Words without sense are fine for load, and wrong for speculation: a draft model guesses them differently (SPEED-Bench
saw throughput 23 % off).
"""

import json
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.errors import Fault, InputError, Location
from harness.files import digest, sha256_bytes
from harness.load import answers
from harness.strict import suggest

Messages = Sequence[Mapping[str, Any]]

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_HUMAN = {"human", "user"}
_MACHINE = {"gpt", "assistant", "chatgpt", "bing", "bard"}


@dataclass(frozen=True, slots=True)
class Prompt:
    """One thing to ask: a text, or chat messages. `conversation` names the conversation that it is a turn of."""

    prompt_id: str
    prompt: str | Messages
    conversation: str | None = None


@dataclass(frozen=True, slots=True)
class PromptSet:
    """Prompts in their order. `sha256` is over the file's bytes, or over what was made."""

    name: str
    sha256: str
    prompts: tuple[Prompt, ...] = field(repr=False)

    def __len__(self) -> int:
        return len(self.prompts)

    def slice(self, first: int, count: int) -> Iterator[Prompt]:
        """`count` prompts from `first` on, from the start again after the last: disjoint slices share no prompt."""
        for index in range(first, first + count):
            yield self.prompts[index % len(self.prompts)]

    def wraps(self, first: int, count: int) -> bool:
        """Whether that slice holds a prompt that an earlier slice already held, all slices being laid end to end."""
        return first + count > len(self.prompts)


def load(name: str, *, beside: Path | None = None) -> PromptSet:
    """Find and read a prompt set.

    Args:
        name: as recipes write it; see the module.
        beside: the folder that relative paths and `prompts/` start from: the recipe's own. Its parents are tried too.

    Raises:
        InputError: there is no such set, or it has faults; every fault with its line.
    """
    kind, colon, options = name.partition(":")
    if colon and kind in _MADE:
        return _MADE[kind](name, _options(name, kind, options))
    path = _find(name, beside or Path.cwd())
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise InputError(f"cannot read `{path}`: {error.strerror}") from error
    prompts = _read(path, raw)
    if not prompts:
        raise InputError(f"`{path}` holds no prompts")
    return PromptSet(name, sha256_bytes(raw), tuple(prompts))


def file_of(name: str, *, beside: Path | None = None) -> Path | None:
    """The file that `load` would read; None for a set that is made rather than read.

    Raises:
        InputError: there is no such set.
    """
    return None if name.partition(":")[0] in _MADE else _find(name, beside or Path.cwd())


def _find(name: str, beside: Path) -> Path:
    given = Path(name)
    # The last place is the project that this harness itself lies in, for sweeps started outside any project.
    folders = [beside, *beside.resolve().parents, Path(__file__).resolve().parents[2]]
    if given.suffix in {".jsonl", ".json"} or len(given.parts) > 1:
        path = given if given.is_absolute() else next((at / given for at in folders if (at / given).is_file()), given)
        if path.is_file():
            return path
        raise InputError(
            f"there is no prompt set `{name}`", hint=f"looked beside `{beside}` and in the folders above it"
        )
    places = [folder / below for folder in folders for below in ("prompts", "recipes/prompts")]
    for place in places:
        if (path := place / f"{name}.jsonl").is_file():
            return path
    known = {path.stem for place in places for path in place.glob("*.jsonl")}
    made = [f"{kind}:..." for kind in _MADE]
    raise InputError(f"there is no prompt set `{name}`", hint=suggest(name, [*known, *made]))


# Files


def _read(path: Path, raw: bytes) -> list[Prompt]:
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"`{path}` is not UTF-8 text: {error.reason} at byte {error.start}") from error
    faults: list[Fault] = []
    prompts: list[Prompt] = []
    collected: set[str] = set()
    for where, item in _items(path, text, faults):
        try:
            made = _prompts(item, f"{path.stem}-{len(prompts):03d}")
            prompts += _fresh(made, collected) if isinstance(item, dict) and "conversations" in item else made
        except _Unfit as unfit:
            faults.append(Fault(str(unfit), where))
    faults += _twice(prompts, path)
    if faults:
        raise InputError.of(faults)
    return prompts


def _items(path: Path, text: str, faults: list[Fault]) -> Iterator[tuple[Location, Any]]:
    """Each entry of a JSON list, or of a file of JSON lines, with where it stands."""
    if text.lstrip()[:1] == "[":
        try:
            for item in _parsed(text):
                yield Location(str(path), 1, 1), item
        except (ValueError, RecursionError) as error:
            faults.append(Fault(f"not valid JSON: {error}", Location(str(path), 1, 1)))
        return
    # Split at line feeds alone: str.splitlines would also split inside strings, at U+2028 and its like.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        where = Location(str(path), number, 1)
        try:
            yield where, _parsed(line)
        except (ValueError, RecursionError) as error:
            faults.append(Fault(f"not valid JSON: {error}", where))


def _parsed(text: str) -> Any:
    """What JSON says, if it is text that can be sent: half of a UTF-16 pair, written as an escape, cannot."""
    value = json.loads(text)
    if _SURROGATE.search(text):
        json.dumps(value, ensure_ascii=False).encode()
    return value


class _Unfit(ValueError):
    pass


def _prompts(item: Any, default_id: str) -> list[Prompt]:
    """The prompts of one entry: one, or one a turn of a conversation."""
    if isinstance(item, str):
        return [Prompt(default_id, item)]
    if not isinstance(item, dict):
        raise _Unfit(f"an object was expected, got a {type(item).__name__}")
    name = str(item.get("id", default_id))
    if "messages" in item:
        return [Prompt(name, _messages(item["messages"]))]
    if "conversations" in item:
        exchange = _exchange(item["conversations"])
        return _turns(name, _unanswered(exchange) if _answers(item, "recorded") == "served" else exchange)
    if "turns" in item:
        turns = item["turns"]
        if not isinstance(turns, list) or not all(isinstance(turn, str) and turn for turn in turns):
            raise _Unfit("`turns` must be a list of texts")
        if _answers(item, "served") == "recorded":
            raise _Unfit("`turns` hold no answers, so that none are recorded; `conversations` do")
        return _turns(name, _unanswered([("user", turn) for turn in turns]))
    text = item.get("text", item.get("prompt"))
    if not isinstance(text, str) or not text:
        raise _Unfit("an entry needs `text`, `prompt`, `messages`, `turns` or `conversations`")
    return [Prompt(name, text)]


def _fresh(made: list[Prompt], collected: set[str]) -> list[Prompt]:
    """The prompts of a collected conversation; none where its last one, which holds the others, came before."""
    keys = [digest(prompt.prompt) for prompt in made]
    if not keys or keys[-1] in collected:
        return []
    collected.update(keys)
    return made


def _messages(value: Any) -> Messages:
    fits = isinstance(value, list) and value and all(isinstance(item, dict) and "role" in item for item in value)
    if not fits:
        raise _Unfit("`messages` must be a list of objects with `role` and `content`")
    return list(value)


def _exchange(value: Any) -> list[tuple[str, str]]:
    """ShareGPT's `conversations` as (role, text), empty where nobody asks; an opening answer is left out."""
    if not isinstance(value, list):
        raise _Unfit("`conversations` must be a list")
    exchange: list[tuple[str, str]] = []
    for entry in value:
        speaker = entry.get("from", entry.get("role")) if isinstance(entry, dict) else None
        text = entry.get("value", entry.get("content")) if isinstance(entry, dict) else None
        if not isinstance(speaker, str) or not isinstance(text, str):
            raise _Unfit("each of `conversations` needs `from` and `value`")
        role = "user" if speaker in _HUMAN else "assistant" if speaker in _MACHINE else "system"
        if exchange or role != "assistant":
            exchange.append((role, text))
    return exchange if any(role == "user" for role, _ in exchange) else []


def _answers(item: Mapping[str, Any], default: str) -> str:
    """Whose answers a conversation goes on with."""
    value = item.get("answers", default)
    if value not in {"recorded", "served"}:
        raise _Unfit(f"`answers` is `recorded` or `served`, not `{value}`")
    return str(value)


def _unanswered(exchange: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """An exchange with a mark after each question, where the server's answer will stand, in place of recorded ones."""
    kept: list[tuple[str, str]] = []
    questions = 0
    for role, text in exchange:
        if role == "assistant":
            continue
        if role == "user" and questions:
            kept.append(("assistant", answers.mark(questions - 1)))
        questions += role == "user"
        kept.append((role, text))
    return kept


def _turns(name: str, exchange: Sequence[tuple[str, str]]) -> list[Prompt]:
    """One prompt for each thing the user says, with everything before it."""
    prompts: list[Prompt] = []
    history: list[dict[str, str]] = []
    questions = sum(role == "user" for role, _ in exchange)
    for role, text in exchange:
        history.append({"role": role, "content": text})
        if role == "user":
            label = f"{name}/{len(prompts)}" if questions > 1 else name
            prompts.append(Prompt(label, list(history), name if questions > 1 else None))
    return prompts


def _twice(prompts: Sequence[Prompt], path: Path) -> Iterator[Fault]:
    """Prompts that occur more than once: the second would be answered from a prefix cache."""
    seen: dict[str, str] = {}
    names: set[str] = set()
    for prompt in prompts:
        if prompt.prompt_id in names:
            yield Fault(f"two prompts of `{path}` are called `{prompt.prompt_id}`")
        names.add(prompt.prompt_id)
        key = digest(prompt.prompt)
        if key in seen and prompt.conversation is None:
            yield Fault(f"prompts `{seen[key]}` and `{prompt.prompt_id}` of `{path}` are the same")
        seen.setdefault(key, prompt.prompt_id)


# Made

_DEFAULTS: Mapping[str, Mapping[str, int]] = {
    "synthetic": {"words": 200, "count": 256, "seed": 0},
    "shared-prefix": {"prefix": 800, "words": 100, "groups": 1, "count": 256, "seed": 0},
}
# Short, common, and one token each in the usual vocabularies, so that words are tokens to within a few per cent.
_WORDS = tuple(
    """time year people way day man thing woman life child world school state family student group country problem hand
    part place case week company system program question work government number night point home water room mother area
    money story fact month lot right study book eye job word business issue side kind head house service friend father
    power hour game line end member law car city community name president team minute idea body information back parent
    face others level office door health person art war history party result change morning reason research girl guy
    moment air teacher force education foot boy age policy music market sense nation plan college interest death
    experience effect use class control field development role effort rate heart drug show leader light voice wife
    police mind price report decision son view relationship town road arm difference value building action season
    society tax director position player record paper space ground form event official matter center couple site
    project activity star table need court oil half situation cost industry figure street image phone data picture
    practice piece land product doctor wall news test movie north love""".split()  # noqa: SIM905 - two hundred quoted words read worse
)


def _options(name: str, kind: str, text: str) -> dict[str, int]:
    """`key=number,...` over the kind's defaults."""
    options, faults = dict(_DEFAULTS[kind]), []
    for part in filter(None, text.split(",")):
        match = re.fullmatch(r"\s*([a-z]+)\s*=\s*(\d+)\s*", part)
        if match is None:
            faults.append(Fault(f"prompt set `{name}`: `{part}` is not `option=number`"))
        elif match[1] not in options:
            hint = suggest(match[1], options)
            faults.append(Fault(f"prompt set `{name}`: unknown option `{match[1]}`", hint=hint))
        elif int(match[2]) < 1 and match[1] != "seed":
            faults.append(Fault(f"prompt set `{name}`: `{match[1]}` must be at least 1"))
        else:
            options[match[1]] = int(match[2])
    if faults:
        raise InputError.of(faults)
    return options


def _synthetic(name: str, options: Mapping[str, int]) -> PromptSet:
    source = random.Random(f"synthetic {options['seed']}")
    texts = [_text(source, options["words"]) for _ in range(options["count"])]
    return _made(name, "synthetic", texts)


def _shared_prefix(name: str, options: Mapping[str, int]) -> PromptSet:
    source = random.Random(f"shared-prefix {options['seed']}")
    prefixes = [_text(source, options["prefix"]) for _ in range(options["groups"])]
    tails = (_text(source, options["words"]) for _ in range(options["count"]))
    texts = [f"{prefixes[index % len(prefixes)]} {tail}" for index, tail in enumerate(tails)]
    return _made(name, "shared-prefix", texts)


def _text(source: random.Random, words: int) -> str:
    return " ".join(source.choice(_WORDS) for _ in range(words))


def _made(name: str, kind: str, texts: Sequence[str]) -> PromptSet:
    prompts = tuple(Prompt(f"{kind}-{index:03d}", text) for index, text in enumerate(texts))
    return PromptSet(name, digest(list(texts)), prompts)


_MADE: Mapping[str, Callable[[str, Mapping[str, int]], PromptSet]] = {
    "synthetic": _synthetic,
    "shared-prefix": _shared_prefix,
}

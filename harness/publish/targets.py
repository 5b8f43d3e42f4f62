"""Where a run's results go: marked blocks in documents, the logbook, and the records that documents are checked by."""

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.errors import HarnessError, InputError
from harness.publish import docs, logbook, records
from harness.publish.blocks import Result, content
from harness.publish.docs import Block, Content
from harness.recipe.plan import Plan
from harness.run.answer import Answer
from harness.run.facts import busy_before
from harness.run.store import Run
from harness.run.verify import has_requests, verify

LOGBOOK = "LOGBOOK.md"


def check(plan: Plan, root: Path) -> None:
    """Before anything starts: can everything be published that the recipe says?

    Raises:
        InputError: documents or their markers are missing, or the logbook is; names all of them.
    """
    found = missing(plan, root)
    if len(found) == 1:
        raise found[0]
    if found:
        details = [f"{error.message} ({error.hint})" if error.hint else error.message for error in found]
        raise InputError(f"{len(found)} of what the recipe publishes into are missing", details=details)


def missing(plan: Plan, root: Path) -> list[InputError]:
    """Why what the recipe says cannot be published, an error for each document; empty where it can."""
    found = []
    for target in plan.publish:
        try:
            if target["kind"] == "doc":
                docs.check(root / target["doc"], target["block"])
            elif target["kind"] == "logbook" and not (root / LOGBOOK).is_file():
                hint = "make it with a title line; the harness appends"
                raise InputError(f"there is no `{root / LOGBOOK}`", hint=hint)
        except InputError as error:
            found.append(error)
    return found


def publish(run: Run, plan: Plan, answer: Answer | None, root: Path) -> Iterator[str]:
    """Write everything the plan names; yields a line for each thing written.

    One target that fails does not keep the others from being written; the first failure is raised at the end.
    """
    first: HarnessError | None = None
    result = Result(run, plan, answer)
    for target in plan.publish:
        try:
            if target["kind"] == "doc":
                path = root / target["doc"]
                _draw(result, path, target["block"])
                changed = docs.publish(path, target["block"], _content(result, path, target["block"]))
                yield f"{target['doc']}: block {target['block']} {'updated' if changed else 'is up to date'}"
            elif target["kind"] == "record":
                if not has_requests(run):  # it is a record itself
                    continue
                yield f"{records.keep(run, root / records.FOLDER).relative_to(root)}: record written"
            else:
                added = logbook.append(root / LOGBOOK, entry(run, plan, answer))
                yield f"{LOGBOOK}: {'entry added' if added else 'has its entry already'}"
        except HarnessError as error:
            first = first or error
            yield f"not published: {error.message}"
    if first is not None:
        raise first


def stale(run: Run, root: Path) -> list[str]:
    """What `publish` would change, as diffs; empty when every document says what the run says."""
    result = Result.of(run)
    found = [
        docs.stale(path, target["block"], _content(result, path, target["block"]))
        for target in result.plan.publish
        if target["kind"] == "doc"
        for path in [root / target["doc"]]
    ]
    return [difference for difference in found if difference]


@dataclass(frozen=True, slots=True)
class Checked:
    """What came of checking every document of a project.

    Attributes:
        current: blocks that say what their run says, as `FILE: BLOCK`.
        stale: diffs.
        lost: blocks whose run is nowhere, with its name.
        changed: runs that documents repeat and that no longer are what was measured.
    """

    current: tuple[str, ...]
    stale: tuple[str, ...]
    lost: tuple[str, ...]
    changed: tuple[str, ...] = ()


def check_documents(root: Path, folders: Sequence[Path]) -> Checked:
    """Hold every marked block of a project's Markdown files against the run that it names.

    Args:
        root: the project.
        folders: where runs and records lie; the first that has a run counts.

    Raises:
        InputError: every broken marker, with its line.
    """
    known: dict[str, Result | None] = {}
    current: list[str] = []
    different: list[str] = []
    lost: list[str] = []
    changed: list[str] = []
    for path in _documents(root):
        text = docs.read(path)
        if "harness:" not in text:
            continue

        def wanted(block: Block, path: Path = path) -> str | None:
            run_id = _run_of(block)
            if run_id is None:  # never filled, or by something that is no run
                return None
            if run_id not in known:
                run = records.find(run_id, folders)
                known[run_id] = Result.of(run) if run else None
                if run and (found := verify(run)).differences:
                    changed.append(found.sentence)
            label = f"{path.relative_to(root)}: block {block}"
            if (result := known[run_id]) is None:
                lost.append(f"{label}: run `{run_id}`")
                return None
            current.append(label)
            return _content(result, path, block.name)(block.part)

        said = docs.rewrite(text, wanted, path=str(path))
        if difference := docs.difference(path, text, said):
            different.append(difference)
    return Checked(tuple(current), tuple(different), tuple(lost), tuple(changed))


def _documents(root: Path) -> Iterator[Path]:
    """The Markdown files of a project: not those of environments, caches and runs."""
    for folder, below, files in os.walk(root):
        below[:] = sorted(name for name in below if not name.startswith((".", "_")) and name not in _NOT_OURS)
        yield from (Path(folder) / name for name in sorted(files) if name.endswith(".md"))


_NOT_OURS = {"runs", "node_modules", "site", "build", "dist", "inputs"}
_RUN = re.compile(r"<!-- run (\S+); plan ")


def _run_of(block: Block) -> str | None:
    found = _RUN.match(block.content)
    return found[1] if found else None


def _content(result: Result, path: Path, name: str) -> Content:
    """What the blocks of a name say in a document, by part."""
    return lambda part: content(result, part, figure=_figure(path, name), beside=path.parent)


def _figure(path: Path, name: str) -> Path:
    """Where the figure of a block lies: beside its document."""
    return path.parent / "figures" / f"{name}.svg"


def _draw(result: Result, path: Path, name: str) -> None:
    """Draw the figure of a block, where the document shows one."""
    shown = docs.blocks(docs.read(path), str(path))
    if any(block.name == name and block.part == "figure" for block in shown):
        from harness.publish import figures  # noqa: PLC0415 - half a second, where a document shows one

        figures.write_figure([result.run.path], _figure(path, name))


def entry(run: Run, plan: Plan, answer: Answer | None) -> logbook.Entry:
    """The logbook's entry for a run, failed ones included."""
    state = run.state()
    results = list(run.levels())
    simulated = " (simulated)" if any(result.simulated for _, result in results) else ""
    verdict = answer.sentence if answer else f"{len(results)} levels measured"
    if state["state"] != "done":
        said = str(state.get("error") or "").splitlines()  # a run that was refused before it began has none
        verdict = f"{state['state']}: {said[0]}" if said else str(state["state"])
    surprises = [f"suspect: {line}" for line in busy_before(run.facts())]
    surprises += [
        f"{launch} {result.level['name']}: {result.verdict.state}: {reason.message}"
        for launch, result in results
        for reason in result.verdict.reasons
    ]
    return logbook.Entry(
        date=str(state.get("at", ""))[:10],
        run_id=run.run_id,
        recipe=plan.recipe,
        question=plan.question,
        verdict=verdict + simulated,
        environments=sorted({f"{arm.env} {str(arm.env_id)[:16]}" for arm in plan.arms.values() if arm.env}),
        surprises=surprises,
        state=None if state["state"] == "done" else str(state["state"]),
    )


def log_failure(run: Run, plan: Plan, root: Path) -> str | None:
    """The logbook's entry for a run that did not end well; None where the plan asks for none, or it is there.

    One that was refused before anything started is no run, and one that another process carries out is that one's.
    """
    ended = run.state()["state"] in {"interrupted", "failed"}
    wanted = any(target["kind"] == "logbook" for target in plan.publish)
    if ended and wanted and logbook.append(root / LOGBOOK, entry(run, plan, None)):
        return f"{LOGBOOK}: entry added"
    return None

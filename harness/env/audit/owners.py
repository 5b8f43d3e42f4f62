"""One owner per file, and every file as its RECORD says.

Two distributions that install the same path overwrite each other, and the last one wins without a word. It is how
`sgl-kernel` beside `sglang-kernel` ends in one half of each (both own the folder `sgl_kernel`).
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from harness.env.audit.report import Finding
from harness.env.audit.survey import Contents, Survey

_SHOWN = 5
# Two names for one package: only one of them may be in an environment, which can be said without opening either.
_RENAMED = (("sgl-kernel", "sglang-kernel", "both install the package `sgl_kernel`, which was renamed at 0.4.0"),)
_CUDA_SUFFIX = re.compile(r"^(?P<stem>nvidia-.+)-cu(?P<major>\d\d)$")
# Split by CUDA major on purpose, with disjoint files; what they own is judged by path like everything else.
_SPLIT = ("nvidia-cutlass-dsl-libs",)
# What builds leave at the top of wheels by mistake. Nothing imports it, so it does no harm whose it is.
_LEFT_OVER = re.compile(
    r"^(build_backend|setup|conftest|noxfile|tasks)\.py$|^(tests?|docs?|examples?|benchmarks?|scripts)/|^[A-Z]+(\.\w+)?$"
)


def one_owner(survey: Survey) -> list[Finding]:
    """Rivals by name, and paths that two distributions install with different contents."""
    found = [*_rivals(survey.versions()), *_shared(survey.contents)]
    if not found and survey.contents:
        count = sum(len(item.paths) for item in survey.contents)
        subject = f"{len(survey.contents)} distributions"
        message = f"each of their {count} files has one owner"
        found = [Finding(check="one-owner", state="ok", subject=subject, message=message)]
    return found


def record(survey: Survey) -> list[Finding]:
    """Files that are not what RECORD says they are."""
    found = [finding for item in survey.contents for finding in _recorded(item)]
    if found or not survey.contents:
        return found
    count = sum(len(item.paths) for item in survey.contents)
    message = f"{count} files are what their RECORD says, by sha256"
    return [Finding(check="record", state="ok", subject=f"{len(survey.contents)} distributions", message=message)]


def _rivals(versions: Mapping[str, str]) -> Iterator[Finding]:
    for old, new, why in _RENAMED:
        if old in versions and new in versions:
            yield Finding(
                check="one-owner",
                state="fail",
                subject=f"{old} {versions[old]} and {new} {versions[new]}",
                message=why,
                remedy=f"keep one of `{old}` and `{new}`: the one that this engine version pins",
            )
    by_stem: dict[str, list[str]] = defaultdict(list)
    for name in sorted(versions):
        by_stem[_stem(name)].append(name)
    for stem, names in by_stem.items():
        if len(names) > 1 and stem not in _SPLIT:
            yield Finding(
                check="one-owner",
                state="fail",
                subject=" and ".join(f"{name} {versions[name]}" for name in names),
                message="the same NVIDIA library for two CUDA majors in one environment",
                remedy="leave out the one that PyTorch's own CUDA major does not ask for",
            )


def _stem(name: str) -> str:
    match = _CUDA_SUFFIX.match(name)
    return match["stem"] if match else name


def _shared(contents: Sequence[Contents]) -> Iterator[Finding]:
    owners: dict[str, list[Contents]] = defaultdict(list)
    for item in contents:
        for path in item.paths:
            owners[path].append(item)
    clashes: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for path, holders in owners.items():
        # The same bytes twice (an empty `__init__.py` of a namespace) do no harm whoever comes last.
        if len({item.paths[path] for item in holders}) > 1:
            clashes[tuple(sorted(item.label for item in holders))].append(path)
    for labels, paths in sorted(clashes.items()):
        harmless = all(map(_LEFT_OVER.match, paths))
        yield Finding(
            check="one-owner",
            state="note" if harmless else "fail",
            subject=" and ".join(labels),
            message=f"both own {len(paths)} files with different contents; what is installed depends on the order",
            remedy="left over from a build, and not imported"
            if harmless
            else "keep one, or versions that do not overlap",
            details=_few(paths),
        )


def _recorded(item: Contents) -> Iterator[Finding]:
    again = "install it again: `harness build`, or `harness fetch` for a wheel"
    changed = "do not use it: it was changed after it was built"
    for paths, what, remedy in (
        (item.altered, "files differ from what RECORD, or a patch of this spec, says they are", again),
        (item.lost, "files that RECORD lists are missing", again),
        (item.unlisted, "files are not in RECORD", changed),
    ):
        if paths:
            message = f"{len(paths)} {what}"
            yield Finding(
                check="record", state="fail", subject=item.label, message=message, remedy=remedy, details=_few(paths)
            )


def _few(paths: Sequence[str]) -> tuple[str, ...]:
    shown = tuple(sorted(paths)[:_SHOWN])
    return shown if len(paths) <= _SHOWN else (*shown, f"and {len(paths) - _SHOWN} more")

"""The CUDA major: does every library find the CUDA libraries it was linked with in this environment?

Decided from `DT_NEEDED` alone. A kernel built for CUDA 12 asks for `libcudart.so.12`; an environment of CUDA 13 has
none, and the import dies with "cannot open shared object file", or worse, finds one elsewhere on the machine.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from harness.env.audit import variants
from harness.env.audit.report import Finding, State
from harness.env.audit.survey import Contents, Survey

# Which distribution brings which library (stems of names, without `-cuNN`). The library's number is the distribution's
# major version except where a number is given. Seen in the released wheels of CUDA 12.8, 12.9 and 13.0.
_BROUGHT_BY: Mapping[str, tuple[str, str | None]] = {
    "libcudart": ("nvidia-cuda-runtime", None),
    "libnvrtc": ("nvidia-cuda-nvrtc", None),
    "libcublas": ("nvidia-cublas", None),
    "libcublasLt": ("nvidia-cublas", None),
    "libcupti": ("nvidia-cuda-cupti", None),
    "libnvJitLink": ("nvidia-nvjitlink", None),
    "libcufft": ("nvidia-cufft", None),
    "libcurand": ("nvidia-curand", None),
    "libcusolver": ("nvidia-cusolver", None),
    "libcusparse": ("nvidia-cusparse", None),
    "libcusparseLt": ("nvidia-cusparselt", "0"),
    "libcufile": ("nvidia-cufile", "0"),
    "libcudnn": ("nvidia-cudnn", None),
    "libnccl": ("nvidia-nccl", None),
    "libnvshmem_host": ("nvidia-nvshmem", None),
}
# Those whose number is the CUDA major itself; the others count on their own.
_NUMBERED_BY_CUDA = frozenset({"libcudart", "libnvrtc", "libcublas", "libcublasLt", "libcupti", "libnvJitLink"})
_SONAME = re.compile(r"^(?P<stem>lib[^.]+)\.so\.(?P<number>\d+)")

# The driver's own libraries, which come with the machine's kernel module and never with a wheel.
_DRIVER = re.compile(r"^lib(cuda|nvidia-ml|nvcuvid|nvidia-encode|nvoptix)\.so\.1$")
# Every Linux with a C and C++ runtime: the libraries that manylinux wheels may take for granted (PEP 600).
_RUNTIME = re.compile(
    r"^(ld-linux.*|lib(c|m|mvec|dl|rt|pthread|util|nsl|resolv|crypt|z|gcc_s|stdc\+\+|atomic|anl|expat|"
    r"GL|X11|Xext|Xrender|ICE|SM|gobject-2\.0|gthread-2\.0|glib-2\.0))\.so(\.\d+)*$"
)
_SHOWN = 5  # names in one line
_TORCH = ("libtorch", "libc10")  # the check `abi` looks after these
_PYTHON = re.compile(r"^libpython3(\.\d+)?\.so")


@dataclass(frozen=True, slots=True)
class _Provided:
    """File names and sonames that the opened distributions bring, and the versions of all those in the environment."""

    names: frozenset[str]
    versions: Mapping[str, str]
    toolkit: str | None
    complete: bool


def cuda_major(survey: Survey) -> int | None:
    """The environment's CUDA major: what PyTorch links, else what the NVIDIA runtime package or the toolkit says."""
    if torch := survey.of("torch"):
        for binary in torch.binaries:
            for needed in binary.library.needed if binary.library else ():
                if (match := _SONAME.match(needed)) and match["stem"] == "libcudart":
                    return int(match["number"])
    versions = survey.versions()
    for name, version in versions.items():
        if _stem(name) == "nvidia-cuda-runtime":
            return int(version.split(".")[0])
    return int(survey.toolkit.split(".")[0]) if survey.toolkit else None


def findings(survey: Survey) -> list[Finding]:
    """Per distribution: CUDA libraries of another major, or that nobody brings; system libraries it counts on."""
    major = cuda_major(survey)
    provided = _provided(survey)
    found = [finding for item in survey.contents for finding in _judged(item, provided, major)]
    if found or not survey.contents:
        return found
    return [_finding("ok", "every library", "nothing that was opened needs a CUDA library")]


def _judged(item: Contents, provided: _Provided, major: int | None) -> Iterator[Finding]:
    needed: dict[str, list[str]] = {}
    aside = variants.unused(item, "cuda", str(major) if major else None)
    for binary in item.binaries:
        if binary.path in aside:
            continue
        for soname in binary.library.needed if binary.library else ():
            needed.setdefault(soname, []).append(binary.path)
        if binary.problem:
            yield _finding(
                "cannot tell", f"{item.label} {binary.path}", f"the library cannot be read: {binary.problem}"
            )
    foreign = sorted(soname for soname in needed if major is not None and _foreign(soname, major))
    missing = sorted(soname for soname in needed if soname not in foreign and not _given(soname, provided))
    cuda = [soname for soname in missing if _brought_by(soname)]
    if foreign:
        yield _foreign_finding(item, {soname: needed[soname] for soname in foreign}, major, provided)
    yield from _missing_findings(item, {soname: needed[soname] for soname in cuda}, provided)
    if system := [soname for soname in missing if not _brought_by(soname) and not soname.startswith(_TORCH)]:
        yield _finding(
            "note",
            item.label,
            f"needs what no wheel here brings: {_few(system)}",
            "optional parts, or libraries of the system: see that the base image has those that are used",
            tuple(f"{soname}: {_few(needed[soname])}" for soname in system[:_SHOWN]),
        )
    links = [soname for soname in needed if _brought_by(soname)]
    if links and not foreign and not cuda:
        yield _finding("ok", item.label, f"finds every CUDA library it needs: {_few(links)}")


def _foreign_finding(
    item: Contents, foreign: Mapping[str, list[str]], major: int | None, provided: _Provided
) -> Finding:
    absent = all(soname not in provided.names for soname in foreign)
    seen = (
        "which nothing here brings" if absent else "and this environment then loads two CUDA runtimes into one process"
    )
    other = min(map(_number, foreign))
    return _finding(
        "fail",
        item.label,
        f"was built for CUDA {other}, the environment is CUDA {major}: it needs {', '.join(foreign)}, {seen}",
        f"take a build of `{item.name}` for CUDA {major} (a `+cu{major}0` wheel or a newer release), or drop it",
        tuple(f"{soname}: {_few(paths)}" for soname, paths in foreign.items()),
    )


def _missing_findings(item: Contents, missing: Mapping[str, list[str]], provided: _Provided) -> Iterator[Finding]:
    """CUDA libraries that nothing opened brings, told apart by who may still bring them."""
    groups: dict[str, list[str]] = {"locked": [], "image": [], "nobody": []}
    for soname in missing:
        groups[_origin(soname, provided)].append(soname)
    if groups["locked"]:
        names = sorted(
            {name for soname in groups["locked"] for name in provided.versions if _brings(name, provided, soname)}
        )
        message = f"needs {', '.join(groups['locked'])}, which {', '.join(names)} should bring by name and version"
        yield _finding("cannot tell", item.label, message, "open them to be sure: run `harness fetch`")
    if groups["image"]:
        message = (
            f"needs {', '.join(groups['image'])}, which no wheel brings, but the CUDA {provided.toolkit} image may"
        )
        stems = ", ".join(sorted({f"`{_brought_by(soname)[0]}`" for soname in groups["image"]}))  # type: ignore[index]
        yield _finding("cannot tell", item.label, message, f"see that the image holds them, or add {stems} to the spec")
    if groups["nobody"]:
        wanted = sorted({f"`{_brought_by(soname)[0]}` for {soname}" for soname in groups["nobody"]})  # type: ignore[index]
        yield _finding(
            "fail" if provided.complete else "cannot tell",
            item.label,
            f"needs {', '.join(groups['nobody'])}, which nothing here brings",
            f"add {_few(wanted)}, or take another build of `{item.name}`",
            tuple(f"{soname}: {_few(missing[soname])}" for soname in groups["nobody"][:_SHOWN]),
        )


def _origin(soname: str, provided: _Provided) -> str:
    if any(_brings(name, provided, soname) for name in provided.versions):
        return "locked"
    toolkit = (provided.toolkit or "").split(".")[0]
    return "image" if toolkit and soname_stem(soname) in _NUMBERED_BY_CUDA and toolkit == _number(soname) else "nobody"


def soname_stem(soname: str) -> str:
    """`libcudart` of `libcudart.so.13`; cuDNN's parts count as cuDNN."""
    stem = soname.partition(".so")[0]
    return "libcudnn" if stem.startswith("libcudnn") else stem


def _provided(survey: Survey) -> _Provided:
    files = {path.rpartition("/")[2] for item in survey.contents for path in item.paths if ".so" in path}
    sonames = {
        binary.library.soname
        for item in survey.contents
        for binary in item.binaries
        if binary.library and binary.library.soname
    }
    return _Provided(frozenset(files | sonames), survey.versions(), survey.toolkit, survey.complete)


def _given(soname: str, provided: _Provided) -> bool:
    if soname in provided.names:
        return True
    return any(pattern.match(soname) for pattern in (_DRIVER, _RUNTIME, _PYTHON))


def _foreign(soname: str, major: int) -> bool:
    return soname_stem(soname) in _NUMBERED_BY_CUDA and _number(soname) not in ("", str(major))


def _brought_by(soname: str) -> tuple[str, str | None] | None:
    return _BROUGHT_BY.get(soname_stem(soname))


def _brings(name: str, provided: _Provided, soname: str) -> bool:
    stem, number = _brought_by(soname) or ("", None)
    return _stem(name) == stem and (number or provided.versions[name].split(".")[0]) == _number(soname)


def _number(soname: str) -> str:
    match = _SONAME.match(soname)
    return match["number"] if match else ""


def _stem(name: str) -> str:
    return re.sub(r"-cu\d\d$", "", name)


def _few(names: Sequence[str]) -> str:
    shown = ", ".join(sorted(names)[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"


def _finding(
    state: State, subject: str, message: str, remedy: str | None = None, details: tuple[str, ...] = ()
) -> Finding:
    return Finding(check="cuda-major", state=state, subject=subject, message=message, remedy=remedy, details=details)

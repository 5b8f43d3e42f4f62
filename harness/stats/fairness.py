"""Whether two arms differ in the declared treatment and in nothing else.

Three things are compared: the plans, what the servers said of their effective configuration after launch, and the facts
of environment and machine. A difference is the treatment, or a derived value that the recipe accepts by name, or it
makes the arms not comparable. On top of that, `TRAPS` know the settings that fake a comparison of speculation even
where they are the same in both arms.
"""

import fnmatch
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from harness.stats.arms import Arm
from harness.stats.level import Reason, Stored

# What differs from launch to launch and says nothing about the configuration.
VOLATILE = (
    "port",
    "*_port",
    "*.port",
    "host",
    "pid",
    "*_pid",
    "random_seed",
    "dist_init_addr",
    "*last_gen_throughput",
    "*avg_spec_accept_length",
    "*step_time*",
    "*uptime*",
    "startup_time*",
    "*_timestamp",
)
# Measured by the server at start, so equal only to within this share.
MEASURED = ("max_total_num_tokens", "*.max_total_num_tokens", "*kv_cache_memory*", "*num_gpu_blocks", "*memory_usage*")
MEASURED_SHARE = 0.01

# Names of one concept in the engines' own words.
RUNNING_LIMIT = ("max_running_requests", "max_num_seqs", "total_slots", "slots", "max_batch")
GRAPH_LIMIT = ("cuda_graph_max_bs", "cuda_graph_max_bs_decode", "max_cudagraph_capture_size")
SPECULATION = (
    "speculative_algorithm",
    "speculative",
    "speculative_config",
    "speculative_config.method",
    "speculative_tokens",
    "spec_type",
)
STREAM_INTERVAL = ("stream_interval",)
STREAM_MODE = ("incremental_streaming_output", "stream_output")

Kind = Literal["plan", "effective", "fact", "level"]
Status = Literal["treatment", "accepted", "blocks"]


class Difference(Stored):
    """One thing that differs between the arms, and whether it may."""

    kind: Kind
    name: str
    base: Any
    treatment: Any
    status: Status

    def __str__(self) -> str:
        return f"{self.name} differs ({_shown(self.base)} / {_shown(self.treatment)})"


class Fairness(Stored):
    """The differences between two arms, and the traps they stand in.

    `blockers` make every row not comparable; `warnings` do not. `checked` names what there was to compare.
    """

    differences: tuple[Difference, ...]
    blockers: tuple[Reason, ...]
    warnings: tuple[Reason, ...]
    checked: tuple[Kind, ...]


class Permission(NamedTuple):
    """What may differ: patterns of the treatment (`server.args.speculative-*`), and derived values by name."""

    treatment: Sequence[str] = ()
    accepted: Sequence[str] = ()


class Sides(NamedTuple):
    """What the trap rules look at: each arm's effective configuration and plan, and the highest concurrency."""

    base: Mapping[str, Any]
    treatment: Mapping[str, Any]
    base_plan: Mapping[str, Any]
    treatment_plan: Mapping[str, Any]
    highest: int


class Trap(NamedTuple):
    """A trap that was found."""

    blocks: bool
    code: str
    message: str
    about: str  # the setting whose acceptance by name lifts the block


def check(base: Arm, treatment: Arm, permission: Permission) -> Fairness:
    """Compare everything two arms should have in common.

    Args:
        base: the base arm.
        treatment: the treatment arm.
        permission: what may differ.
    """
    known: list[tuple[Kind, Mapping[str, Any], Mapping[str, Any]]] = [
        ("plan", base.plan, treatment.plan),
        ("effective", _settled(base, "effective"), _settled(treatment, "effective")),
        ("fact", _settled(base, "facts"), _settled(treatment, "facts")),
        ("level", _levels(base, treatment), _levels(treatment, base)),
    ]
    checked = [(kind, one, other) for kind, one, other in known if one and other]
    differences = tuple(
        difference for kind, one, other in checked for difference in _differences(kind, one, other, permission)
    )
    traps = [trap for rule in TRAPS for trap in rule(_sides(base, treatment))]
    blocking = [trap for trap in traps if trap.blocks and not _matches(trap.about, permission.accepted)]
    warnings = [trap for trap in traps if trap not in blocking]
    blockers = [Reason(code=trap.code, message=trap.message) for trap in blocking]
    blockers += [
        Reason(code="differs", message=str(difference)) for difference in differences if difference.status == "blocks"
    ]
    return Fairness(
        differences=differences,
        blockers=tuple(blockers),
        warnings=(*(Reason(code=trap.code, message=trap.message) for trap in warnings), *_unsettled(base, treatment)),
        checked=tuple(kind for kind, _, _ in checked),
    )


def flatten(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as `dotted.name: scalar`; lists stay whole, because their order means something."""
    flat: dict[str, Any] = {}
    for key, item in value.items():
        name = f"{prefix}{key}"
        if isinstance(item, Mapping):
            flat.update(flatten(item, f"{name}."))
        else:
            flat[name] = item
    return flat


def _differences(
    kind: Kind, base: Mapping[str, Any], treatment: Mapping[str, Any], permission: Permission
) -> Iterator[Difference]:
    for name in sorted(base.keys() | treatment.keys()):
        one, other = base.get(name), treatment.get(name)
        if not _same(name, one, other) and not (kind == "effective" and _any(name, VOLATILE)):
            status = _status(name, permission)
            yield Difference(kind=kind, name=name, base=one, treatment=other, status=status)


def _status(name: str, permission: Permission) -> Status:
    if _matches(name, permission.treatment):
        return "treatment"
    return "accepted" if _matches(name, permission.accepted) else "blocks"


def _matches(name: str, patterns: Sequence[str]) -> bool:
    """Whether a name is meant by a pattern; a server says `speculative_num_steps` for `server.args.speculative-*`.

    A pattern also means everything below it: `env` allows `env.packages.torch`, and the `env_id` that follows. One that
    means speculation allows the server to say that it speculates (llama.cpp's `speculative` for `server.args.spec-*`).
    """
    plain = _plain(name)
    for pattern in patterns:
        meant = _plain(pattern)
        if fnmatch.fnmatchcase(plain, meant) or fnmatch.fnmatchcase(plain, f"{meant}.*"):
            return True
        if pattern == "env" and name in {"env", "env_id"}:
            return True
        if meant.startswith("spec") and name in SPECULATION:
            return True
    return False


def _plain(name: str) -> str:
    return name.removeprefix("server.").removeprefix("args.").replace("-", "_")


def _any(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _same(name: str, one: Any, other: Any) -> bool:
    if isinstance(one, bool) or isinstance(other, bool) or not _any(name, MEASURED):
        return bool(one == other)
    if isinstance(one, int | float) and isinstance(other, int | float):
        return abs(one - other) <= MEASURED_SHARE * max(abs(one), abs(other))
    return bool(one == other)


def _settled(arm: Arm, kind: Literal["effective", "facts"]) -> dict[str, Any]:
    """An arm's values that are the same at every launch; the others are `_unsettled`."""
    launches = [values for launch in arm.launches if (values := getattr(launch, kind))]
    if not launches:
        return {}
    first, *rest = launches
    return {name: value for name, value in first.items() if all(_same(name, value, other.get(name)) for other in rest)}


def _unsettled(base: Arm, treatment: Arm) -> Iterator[Reason]:
    """Values that change between launches of one arm: the launches are not repeats of each other."""
    for arm in (base, treatment):
        for kind in ("effective", "facts"):
            launches = [values for launch in arm.launches if (values := getattr(launch, kind))]
            for name in sorted({name for values in launches for name in values}):
                seen = [values.get(name) for values in launches]
                if any(not _same(name, seen[0], other) for other in seen[1:]) and not _any(name, VOLATILE):
                    values = " / ".join(_shown(value) for value in seen)
                    message = f"`{name}` changes between the launches of `{arm.name}`: {values}"
                    yield Reason(code="launches-differ", message=message)


def _levels(arm: Arm, other: Arm) -> dict[str, Any]:
    """How much each level asked for that both arms have; a level of one arm alone is its own row's business."""
    shared = set(arm.level_keys()) & set(other.level_keys())
    asked = {
        f"levels.{cell.key}.{name}": cell.level[name]
        for launch in arm.launches
        for cell in launch.cells
        for name in ("requests", "duration_s")
        if cell.key in shared and cell.level.get(name) is not None
    }
    return {} if arm.published else asked


def _sides(base: Arm, treatment: Arm) -> Sides:
    shared = set(base.level_keys()) & set(treatment.level_keys())
    levels = [cell.concurrency or 0 for launch in base.launches for cell in launch.cells if cell.key in shared]
    return Sides(
        _settled(base, "effective"), _settled(treatment, "effective"), base.plan, treatment.plan, max(levels, default=0)
    )


def _value(values: Mapping[str, Any], names: Sequence[str]) -> Any:
    return next((values[name] for name in names if values.get(name) is not None), None)


def speculates(effective: Mapping[str, Any], plan: Mapping[str, Any]) -> bool:
    """Whether an arm asks for speculation: the server says so, or else its plan does."""
    said = _value(effective, SPECULATION)
    if said is not None:
        return bool(said) and str(said).lower() not in {"none", "false"}
    planned = _value({_plain(name): value for name, value in plan.items()}, SPECULATION)
    return bool(planned) and str(planned).lower() not in {"none", "false"}


def _running_limit(sides: Sides) -> Iterator[Trap]:
    """SGLang lowers an unset max_running_requests to 48 under EAGLE (sglang#34290, #33483; facts 4a)."""
    one, other = _value(sides.base, RUNNING_LIMIT), _value(sides.treatment, RUNNING_LIMIT)
    if not isinstance(one, int) or not isinstance(other, int):
        return
    lower = min(one, other)
    if one != other and lower < sides.highest:
        speculation = speculates(sides.treatment, sides.treatment_plan) and other == 48
        cause = "speculation lowered it to 48 by itself" if speculation else "the arms admit different batches"
        message = (
            f"max_running_requests is {one} in one arm and {other} in the other: {cause}, so above C={lower} the arms "
            f"differ in queueing and not in speed; pin it to at least {sides.highest} in both"
        )
        yield Trap(True, "running-limit", message, "max_running_requests")
    elif one == other and lower < sides.highest:
        message = f"both arms run at most {lower} requests at once: levels above that measure the queue"
        yield Trap(False, "running-limit", message, "max_running_requests")


def _graph_limit(sides: Sides) -> Iterator[Trap]:
    """A running batch above the largest captured CUDA graph falls to the slow eager path (anchors C 22, D)."""
    for name, values in (("base", sides.base), ("treatment", sides.treatment)):
        largest, running = _value(values, GRAPH_LIMIT), _value(values, RUNNING_LIMIT)
        batch = min(sides.highest, running) if isinstance(running, int) else sides.highest
        if isinstance(largest, int) and largest < batch:
            other = _value(sides.treatment if name == "base" else sides.base, GRAPH_LIMIT)
            message = (
                f"the {name} arm captured CUDA graphs up to batch {largest} and runs up to {batch}: above {largest} it "
                "leaves the graphs and decodes on the slow path; raise cuda-graph-max-bs or lower the levels"
            )
            yield Trap(other != largest, "graph-limit", message, "cuda_graph_max_bs")


def _streaming(sides: Sides) -> Iterator[Trap]:
    """Streaming mode and interval move throughput by up to 25 % (sglang#22548)."""
    for names, what in ((STREAM_INTERVAL, "stream interval"), (STREAM_MODE, "streaming mode")):
        one, other = _value(sides.base, names), _value(sides.treatment, names)
        if one != other:
            message = (
                f"the {what} differs ({_shown(one)} / {_shown(other)}): that alone moves throughput by up to 25 %; "
                "pin it in both arms"
            )
            yield Trap(True, "streaming", message, names[0])
    interval = _value(sides.base, STREAM_INTERVAL)
    if isinstance(interval, int) and interval > 1 and interval == _value(sides.treatment, STREAM_INTERVAL):
        message = (
            f"tokens are streamed {interval} steps at a time: TTFT and chunk gaps show the interval, not the model"
        )
        yield Trap(False, "streaming", message, STREAM_INTERVAL[0])


def _template(sides: Sides) -> Iterator[Trap]:
    """Random prompts without a chat template inflate the accept length: 3.55 against 2.50 (InferenceX#649)."""
    for effective, plan in ((sides.base, sides.base_plan), (sides.treatment, sides.treatment_plan)):
        prompts, dialect = str(plan.get("workload.prompts", "")), plan.get("workload.dialect")
        if speculates(effective, plan) and prompts.startswith("random") and dialect in {"completions", "generate"}:
            message = (
                "random prompts without a chat template flatter speculation (accept length 3.55 against 2.50 on real "
                "prompts): use real prompts and the chat dialect"
            )
            yield Trap(True, "chat-template", message, "workload.prompts")
            return


def _scheduler(sides: Sides) -> Iterator[Trap]:
    """Older releases turn the overlap scheduler and mixed chunks off under speculation (facts 0.4)."""
    for name in ("disable_overlap_schedule", "enable_mixed_chunk"):
        one, other = sides.base.get(name), sides.treatment.get(name)
        if one != other and speculates(sides.treatment, sides.treatment_plan):
            message = (
                f"{name} is {_shown(one)} without and {_shown(other)} with speculation: part of the difference is the "
                "scheduler's; accept it by name if the release leaves no choice"
            )
            yield Trap(True, "scheduler", message, name)


TRAPS: tuple[Callable[[Sides], Iterator[Trap]], ...] = (_running_limit, _graph_limit, _streaming, _template, _scheduler)


def cumulative_acceptance(arm: Arm) -> Reason | None:
    """What to say of an arm whose accept length is only known as an average over its server's life.

    SGLang's `avg_spec_accept_length` counts since the server's start, on one data-parallel rank, and survives a flush
    (sglang#34743), so it belongs to no level and is never shown as a level's.
    """
    for launch in arm.launches:
        for name, value in launch.effective.items():
            if name.endswith("avg_spec_accept_length") and isinstance(value, int | float) and value:
                message = (
                    f"`{arm.name}`: the server tells its accept length only as an average since its start "
                    f"({value:.2f}), which is that of no level; counter deltas or per-request verify counts would tell"
                )
                return Reason(code="cumulative-acceptance", message=message)
    return None


def _shown(value: Any) -> str:
    if value is None:
        return "not set"
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."

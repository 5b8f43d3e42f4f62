"""A plan as people read it: what is asked, every argv, every launch and level, what fires."""

import json
import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.text import Text

from harness.engines import get as engine_of
from harness.engines.engine import Model, Server
from harness.errors import HarnessError
from harness.files import escape_control
from harness.recipe.plan import Plan, PlannedArm
from harness.recipe.where import Value

if TYPE_CHECKING:
    from rich.table import Table


def plan_text(plan: Plan) -> Text:
    """The head of a plan: question, arms with their argv, comparison."""
    lines = [
        f"{plan.recipe}: {plan.question}",
        f"plan {plan.digest[:16]}, measurement {plan.measurement}",
        "",
    ]
    for arm in plan.arms.values():
        lines += _arm_lines(arm)
    if plan.compare:
        lines.append(
            f"compare: every arm against {plan.compare['base']}, {plan.compare['launches']} launch(es) each,"
            f" order {plan.compare['order']}; may differ: {', '.join(plan.compare['treatment']) or 'nothing'}"
        )
    shared = [f"{launch.name} goes on with {launch.shares}" for launch in plan.launches if launch.shares]
    if shared:
        lines.append(f"the same server, asked differently: {', '.join(shared)}")
    # Not folded: a command is there to be copied.
    return Text("\n".join(map(escape_control, lines)), no_wrap=True, overflow="ignore")


def plan_table(plan: Plan, fates: Sequence[Any]) -> "Table":
    """Every launch and level in order, with what would be reused and why not."""
    from rich.table import Table  # noqa: PLC0415 - only where a table is shown

    known = {(fate.launch, fate.level): fate for fate in fates}
    table = Table(header_style="bold")
    for name in ("launch", "level", "requests", "warm-up", "deadline s", "cell", "what"):
        table.add_column(name, justify="right" if name in {"requests", "warm-up", "deadline s"} else "left")
    for launch, cell in plan.cells():
        level, fate = cell.level, known.get((launch.name, cell.level.name))
        what = fate.fate + (f": {'; '.join(fate.why)}" if fate.why else "") if fate else "run"
        asked = str(level.requests) if level.requests else f"{level.duration_s:g} s"
        table.add_row(
            escape_control(launch.name), level.name, asked, str(level.warmup_requests), f"{level.level_timeout_s:.0f}",
            cell.cell_id[:12], escape_control(what),
        )  # fmt: skip
    return table


def where_table(values: Sequence[Value]) -> "Table":
    """Every value that somebody wrote, and where; what several arms have alike stands there once."""
    from rich.table import Table  # noqa: PLC0415 - as above

    table = Table(header_style="bold")
    for name in ("arm", "value", "written at"):
        table.add_column(name, overflow="fold")
    arms: dict[tuple[str, str], list[str]] = {}
    for value in values:
        text = f"{value.path}: " + ("(deleted)" if value.deleted else _shown(value.value))
        arms.setdefault((text, value.where), []).extend([value.arm] if value.arm else [])
    every = len({value.arm for value in values if value.arm})
    for (text, place), names in arms.items():
        about = "every arm" if len(names) == every > 1 else _several(names)
        table.add_row(*map(escape_control, (about, text, place)))
    return table


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def findings_text(plan: Plan) -> list[Text]:
    """The rules that fire, and other things worth knowing before the run."""
    found = []
    for finding in plan.findings:
        where = f" ({finding.where})" if finding.where else ""
        some = finding.arms if len(finding.arms) < len(plan.arms) else ()
        about = f"\n  in: {_several(some)}" if some else ""
        accepted = f"\n  accepted: {finding.accepted}" if finding.accepted else ""
        remedy = f"\n  do: {finding.remedy}" if finding.remedy else ""
        source = f"\n  source: {finding.source}" if finding.source else ""
        text = f"{finding.severity}: {finding.id}{where}: {finding.message}{about}{remedy}{source}{accepted}"
        found.append(Text(escape_control(text, keep="\t\n")))
    return found


def _several(names: Sequence[str]) -> str:
    """Names of arms; of many the first ones."""
    more = f" and {len(names) - 3} more" if len(names) > 4 else ""
    return ", ".join(names if not more else names[:3]) + more


def argv(arm: PlannedArm) -> list[str]:
    """What an arm's server would be started with; PORT and PYTHON stand for what is chosen at launch."""
    if arm.url:
        return ["(already running at", arm.url + ")"]
    engine = engine_of(arm.engine)
    model = Model(arm.model.path or f"ENV/{arm.model.from_env}", arm.model.name) if arm.model else None
    server = Server(
        engine=arm.engine,
        host=arm.host,
        port=arm.port or 0,
        model=model,
        args=arm.args,
        variables=arm.variables,
        python="PYTHON" if arm.env else None,
        unchecked=arm.unchecked,
    )
    try:
        command = engine.command(server)
    except HarnessError as error:
        return [f"({error.message})"]
    return [*command.argv, *arm.unchecked]


def _arm_lines(arm: PlannedArm) -> list[str]:
    head = f"arm {arm.name}: {arm.engine}"
    if arm.env:
        head += f", env {arm.env} ({str(arm.env_id)[:16]})"
    if arm.expect:
        head += f", expects {', '.join(arm.expect)}"
    lines = [head, "  " + shlex.join(argv(arm))]
    lines += [f"  {name}={value}" for name, value in arm.variables.items()]
    work = arm.workload
    lines.append(
        f"  asks: {work['prompts']} ({work['prompts_sha256'][:12]}), {work['max_tokens']} tokens,"
        f" temperature {work['temperature']:g}, seed {work['seed']}, {work['dialect']}"
    )
    return lines

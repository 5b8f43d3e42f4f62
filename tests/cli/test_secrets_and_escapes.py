"""What servers say is stored without secrets and shown without what a terminal, Markdown or HTML would act on."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from cli.conftest import QUICK, Workplace
from processes import FAKES

from harness.engines.simulated import Simulated
from harness.publish.tables import markdown_table

SECRET = "hunter2-of-the-night"
RECIPE = QUICK.replace("engine: simulated", "engine: simulated\n  secrets: [LEAKY_TOKEN]")


@pytest.fixture
def leaky(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every server of this test is `fakes/leaky.py`; the list takes more arguments for it."""
    more: list[str] = []
    command = Simulated.command

    def told(self, server):
        made = command(self, server)
        return replace(made, argv=(sys.executable, str(FAKES / "leaky.py"), *made.argv[3:], *more))

    monkeypatch.setattr(Simulated, "command", told)
    monkeypatch.setenv("LEAKY_TOKEN", SECRET)
    return more


def holding(folder: Path, text: str) -> list[str]:
    return [path.name for path in folder.rglob("*") if path.is_file() and text.encode() in path.read_bytes()]


def acts_on_terminals(text: str) -> bool:
    return any(char in text for char in "\x1b\x07\u202e")


def test_a_secret_that_a_server_tells_is_stored_and_shown_nowhere(workplace: Workplace, leaky: list[str]) -> None:
    done = workplace.harness("run", workplace.recipe(RECIPE))
    assert done.code in {0, 1}, done.err
    assert holding(workplace.root, SECRET) == []
    assert holding(workplace.root, "sk-never-seen") == []
    assert SECRET not in done.out + done.err
    assert "login as [LEAKY_TOKEN]" in (workplace.run() / "launches/01-baseline/launch.json").read_text()
    assert "logged in with [LEAKY_TOKEN]" in (workplace.run() / "launches/01-baseline/server.log").read_text()


def test_a_servers_last_words_hold_no_secret_and_cannot_steer_a_terminal(
    workplace: Workplace, leaky: list[str]
) -> None:
    leaky.append("--leaky-fails")
    done = workplace.harness("run", workplace.recipe(RECIPE))
    assert done.code == 5
    assert "the first generation got HTTP 500" in done.err
    assert "[LEAKY_TOKEN]" in done.err
    assert not acts_on_terminals(done.err)
    assert holding(workplace.root, SECRET) == []
    shown = workplace.harness("show", workplace.run())
    assert "\\x1b]0;owned" in shown.out
    assert not acts_on_terminals(shown.out)


@pytest.mark.parametrize("verb", ["plan", "run"])
def test_a_secret_in_a_recipe_is_refused_before_it_is_shown_or_stored(workplace: Workplace, verb: str) -> None:
    text = f"engine: simulated\n  variables: {{MY_TOKEN: {SECRET}}}\n  unchecked: [--api-key, {SECRET}]"
    done = workplace.harness(verb, workplace.changed(("engine: simulated", text)))
    assert done.code == 2
    assert "`server.variables.MY_TOKEN` holds a secret" in done.err
    assert "`server.unchecked` holds a secret" in done.err
    assert SECRET not in done.out + done.err
    assert not (workplace.root / "runs").exists()


@pytest.mark.parametrize(
    ("text", "place"),
    [
        (f"engine: attach\n  url: http://me:{SECRET}@127.0.0.1:1", "`server.url` holds a user name"),
        (f"engine: simulated\n  unchecked: [--proxy=http://me:{SECRET}@host/]", "`server.unchecked` holds a secret"),
        (f'engine: simulated\n  variables: {{PROXY: "http://me:{SECRET}@host/"}}', "`server.variables.PROXY` holds"),
    ],
)
def test_a_password_in_an_address_is_a_secret(workplace: Workplace, text: str, place: str) -> None:
    done = workplace.harness("plan", workplace.changed(("engine: simulated", text)))
    assert done.code == 2
    assert place in done.err
    assert SECRET not in done.out + done.err


@pytest.mark.parametrize("name", ["AUTHORIZATION", "HF_TOKEN_2", "BEARER", "PASSPHRASE", "TOKENS"])
def test_a_secret_by_any_usual_name_is_refused_and_only_its_name_is_told(workplace: Workplace, name: str) -> None:
    done = workplace.harness(
        "plan", workplace.changed(("engine: simulated", f"engine: simulated\n  variables: {{{name}: {SECRET}}}"))
    )
    assert done.code == 2
    assert f"`server.variables.{name}` holds a secret" in done.err
    assert SECRET not in done.out + done.err


@pytest.mark.parametrize("value", ["https://{}@host/", "Bearer {}", "hf_{}", "ghp_{}", "sk-{}"])
def test_a_secret_under_a_harmless_name_is_refused(workplace: Workplace, value: str) -> None:
    variable = f'engine: simulated\n  variables: {{WHERE: "{value.format(SECRET)}"}}'
    done = workplace.harness("plan", workplace.changed(("engine: simulated", variable)))
    assert (done.code, "`server.variables.WHERE` holds a secret" in done.err) == (2, True)
    assert SECRET not in done.out + done.err


def test_faults_of_keys_names_and_flags_come_in_one_list(workplace: Workplace) -> None:
    path = workplace.changed(
        ("engine: simulated", "engine: simulated\n  prt: 8000"),
        ("synthetic:words=8,count=64", "no-such-set"),
        ("step-ms: 2", "stp-ms: 2"),
    )
    done = workplace.harness("plan", path)
    assert done.code == 2
    for fault in ("`server.prt`", "no-such-set", "stp-ms"):
        assert fault in done.err


def test_a_strangers_recipe_cannot_steer_the_terminal_that_shows_its_plan(workplace: Workplace) -> None:
    escape = '"\\e]0;owned\\a\\e[2J\\u202e"'
    text = f"engine: simulated\n  variables: {{MODE: {escape}}}\n  unchecked: [--note, {escape}]"
    recipe = workplace.changed(("engine: simulated", text), ("Does it help?", escape))
    for more in ([], ["--where"]):
        done = workplace.harness("plan", recipe, *more)
        assert done.code == 0, done.err
        assert not acts_on_terminals(done.out + done.err)
    shown = workplace.harness("plan", recipe).out
    assert "MODE=\\x1b]0;owned\\x07\\x1b[2J\\u202e" in shown
    assert shown.count("\\x1b]0;owned") == 5  # the question, and a variable and an argument of each of two arms


def test_planning_a_strangers_recipe_executes_nothing(workplace: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    touched = workplace.root / "touched"
    text = QUICK.replace("step-ms: 2", f'step-ms: "$(touch {touched})"').replace(
        "question: Does it help?", f'question: "`touch {touched}` ; touch {touched}"'
    )

    def started(event: str, arguments: tuple[object, ...]) -> None:
        if started.watching and event in {"subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork"}:
            raise AssertionError(f"{event} {arguments}")

    started.watching = True
    sys.addaudithook(started)  # stays for the life of this process, asleep
    try:
        done = workplace.harness("plan", workplace.recipe(text))
    finally:
        started.watching = False
    assert done.code in {0, 2}, done.err
    assert not touched.exists()
    assert not (workplace.root / "runs").exists()


def test_what_a_server_says_cannot_break_out_of_a_table_cell() -> None:
    hostile = "a|b\n| c | <img src=x onerror=alert(1)> \x1b[2J\u202e"
    [_, _, row] = markdown_table(("name", "said"), [("server", hostile)])
    assert row == r"| server | a\|b \| c \| &lt;img src=x onerror=alert(1)> \x1b[2J\u202e |"

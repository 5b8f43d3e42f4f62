"""`harness init`, `schema` and `completion`: what one has before the first run."""

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cli.conftest import Workplace
from jsonschema import Draft202012Validator, ValidationError
from ruamel.yaml import YAML

from harness.cli.starting import ENGINES
from harness.publish import schemas

ROOT = Path(__file__).parents[2]
RECIPES = [path for path in sorted((ROOT / "recipes").rglob("*.yaml")) if "references" not in path.parts]
SPECS = sorted((ROOT / "envspecs").glob("*.yaml"))
SHIPPED = [*(("recipe", path) for path in RECIPES), *(("spec", path) for path in SPECS)]


def name(value: Any) -> str:
    return str(value.relative_to(ROOT)) if isinstance(value, Path) else str(value)


def faults(kind: str, text: str) -> list[str]:
    """What a checker that only knows the schema says of a file."""
    data = json.loads(json.dumps(YAML(typ="safe").load(text)))
    found = Draft202012Validator(schemas.schema(kind)).iter_errors(data)
    return [f"{'.'.join(map(str, error.absolute_path))}: {error.message}" for one in found for error in leaves(one)]


def leaves(error: ValidationError) -> Iterator[ValidationError]:
    """An error, or what lies behind it where a value fits none of several forms."""
    yield error
    for inner in error.context or ():
        yield from leaves(inner)


# init


@pytest.mark.parametrize("engine", ENGINES)
def test_what_init_writes_plans_without_edits_and_fits_its_schema(workplace: Workplace, engine: str) -> None:
    done = workplace.harness("init", engine)
    assert done.code == 0, done.err
    recipe = Path("recipes") / f"{engine}.yaml"
    written = done.out.split()
    assert written[0] == str(recipe)
    assert ("envspecs/" + recipe.name in written) == (engine in {"sglang", "vllm", "llamacpp"})
    plan = workplace.harness("plan", recipe, "--json")
    assert plan.code == 0, plan.err
    assert plan.json["recipe"] == engine
    for kind, path in (("recipe", recipe), ("spec", Path("envspecs") / recipe.name)):
        if path.is_file():
            text = path.read_text()
            assert faults(kind, text) == []
            assert text.count("#") > 4  # commented
            head = text.splitlines()[0].removeprefix("# yaml-language-server: $schema=")
            assert json.loads((path.parent / head).read_text()) == schemas.schema(kind)


def test_init_of_the_simulated_engine_runs_as_it_is(workplace: Workplace) -> None:
    workplace.harness("init", "simulated", "fresh")
    recipe = workplace.root / "fresh" / "recipes" / "simulated.yaml"
    recipe.write_text(recipe.read_text().replace("[1, 2, 4, 8, 16], requests: 24", "[1, 2], requests: 2"))
    done = workplace.harness("run", recipe)
    assert done.code in {0, 1}, done.err


def test_init_says_what_to_do_next_where_it_wrote(workplace: Workplace) -> None:
    done = workplace.harness("init", "llamacpp", "my project")
    steps = [line.strip() for line in done.err.splitlines()]
    assert steps == [
        "next:",
        "cd 'my project'",
        "harness plan recipes/llamacpp.yaml",
        "harness lock llamacpp",
        "harness build llamacpp",
        "harness run recipes/llamacpp.yaml",
    ]


def test_init_never_overwrites_and_writes_nothing_beside_a_file_that_is_there(workplace: Workplace) -> None:
    recipe = workplace.root / "recipes" / "sglang.yaml"
    recipe.parent.mkdir()
    recipe.write_text("mine\n")
    done = workplace.harness("init", "sglang")
    assert (done.code, "never overwrites: `recipes/sglang.yaml`" in done.err) == (2, True)
    assert recipe.read_text() == "mine\n"
    assert not (workplace.root / "envspecs" / "sglang.yaml").exists()
    assert not (workplace.root / "schemas").exists()


def test_an_unknown_engine_is_an_input_error_that_names_those_there_are(workplace: Workplace) -> None:
    done = workplace.harness("init", "tensorrt")
    assert (done.code, "`sglang`" in done.err) == (2, True)


# schema


def test_the_schemas_in_the_repository_are_those_of_the_models(workplace: Workplace) -> None:
    done = workplace.harness("schema", "--check", ROOT / "schemas")
    assert (done.code, done.out) == (0, "3 schemas are current\n")


def test_a_stale_schema_is_exit_1_with_the_command(workplace: Workplace) -> None:
    workplace.harness("schema", "--write", "schemas")
    (workplace.root / "schemas" / "spec.schema.json").write_text("{}")
    done = workplace.harness("schema", "--check", "schemas")
    assert (done.code, done.out) == (1, "schemas/spec.schema.json\n")
    assert "harness schema --write schemas" in done.err


@pytest.mark.parametrize("kind", schemas.KINDS)
def test_every_schema_is_one_of_its_draft_and_describes_every_key(kind: str) -> None:
    schema = schemas.schema(kind)
    Draft202012Validator.check_schema(schema)
    silent = [where for where, value in properties(schema) if "description" not in value]
    assert silent == []


def properties(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every property that a person may write, with its place."""
    for model, value in (("", schema), *schema.get("$defs", {}).items()):
        for key, item in value.get("properties", {}).items():
            yield f"{model}.{key}", item


@pytest.mark.parametrize(("kind", "path"), SHIPPED, ids=name)
def test_a_shipped_file_fits_its_schema_and_names_it_in_its_first_line(kind: str, path: Path) -> None:
    text = path.read_text()
    assert text.splitlines()[0] == schemas.first_line(kind, path, ROOT)
    assert faults(kind, text) == []


@pytest.mark.parametrize(
    ("kind", "text", "where"),
    [
        ("recipe", "{recipe: x}", "'question' is a required property"),
        ("recipe", "{extends: y.yaml, sweep: {concurency: [1]}}", "concurency"),
        ("recipe", "{extends: y.yaml, sweep: {concurrency: [0]}}", "sweep.concurrency"),
        ("recipe", "{extends: y.yaml, arms: {a: {serve: {}}}}", "serve"),
        ("recipe", "{extends: y.yaml, publish: [{doc: d.md}]}", "publish.0"),
        ("recipe", "{extends: y.yaml, workload: {dialect: chatty}}", "workload.dialect"),
        ("spec", '{env: x, python: "3.12"}', "'packages' is a required property"),
        ("spec", '{env: X!, python: "3.12", packages: [six]}', "env"),
        ("spec", "{extends: y, packages: [1]}", "packages.0"),
        ("site", "{variables: {MODELS: 3}}", "variables.MODELS"),
    ],
)
def test_a_wrong_file_does_not_fit(kind: str, text: str, where: str) -> None:
    assert any(where in fault for fault in faults(kind, text)), faults(kind, text)


@pytest.mark.parametrize(
    "text",
    [
        "{extends: y.yaml, recipe: x, arms: {a: null, b: {server: {args: {tp: null}}}}, expect: {a: null}}",
        '{extends: y.yaml, arms: {a: {matrix: {"server.args.tp": [1, 2]}}}, sweep: {requests: 30}}',
    ],
)
def test_a_part_of_a_recipe_may_take_values_away(text: str) -> None:
    assert faults("recipe", text) == []


# completion


def test_bash_completes_verbs_and_options(workplace: Workplace) -> None:
    script = workplace.root / "harness.bash"
    script.write_text(workplace.harness("completion", "bash").out)
    assert words(script, "har", "ver")[:1] == ["verify"]
    assert "--check" in words(script, "har", "publish", "--")
    assert "simulated" in words(script, "har", "init", "simu")
    (workplace.root / "quick.yaml").write_text("")
    (workplace.root / "runs" / "one").mkdir(parents=True)
    assert words(script, "har", "run", "qui") == ["quick.yaml"]
    assert words(script, "har", "verify", "runs/o") == ["runs/one"]
    assert "docs" in words(script, "har", "publish", "--record", "do")


def words(script: Path, *typed: str) -> list[str]:
    """What bash offers for the last word of a line."""
    line = " ".join(f'"{word}"' for word in typed)
    ask = (
        f'source "{script}"; COMP_WORDS=({line}); COMP_CWORD={len(typed) - 1}; _shtab_harness; echo "${{COMPREPLY[@]}}"'
    )
    done = subprocess.run(["bash", "-c", ask], capture_output=True, text=True, timeout=30, check=True)
    return done.stdout.split()


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_a_completion_script_is_one_that_its_shell_reads(workplace: Workplace, shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell} on this machine")
    script = workplace.root / "script"
    script.write_text(workplace.harness("completion", shell).out)
    subprocess.run([shell, "-n", str(script)], timeout=30, check=True)


# Words that are missing or misspelt


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["lok"], "argument VERB: there is no `lok`; did you mean `lock`?"),
        (["init"], "ENGINE is one of sglang, vllm, llamacpp, simulated, attach"),
        (["init", "vlm"], "argument ENGINE: there is no `vlm`; did you mean `vllm`?"),
        (["plan", "recipes/smulated.yaml"], "hint: did you mean `recipes/simulated.yaml`?"),
        (["plan", "recipes/none.yaml"], "hint: there are: `recipes/simulated.yaml`"),
        (["plan", "recipe/simulated.yaml"], "hint: there is no folder `recipe`"),
    ],
)
def test_a_word_that_is_missing_or_misspelt_is_told_with_what_there_is(
    workplace: Workplace, words: list[str], said: str
) -> None:
    workplace.harness("init", "simulated")
    done = workplace.harness(*words)
    assert done.code == 2
    assert said in done.err


def test_verify_takes_the_newest_run_where_none_is_named(workplace: Workplace) -> None:
    stored = ROOT / "tests" / "files" / "runs" / "simulated"
    shutil.copytree(stored, workplace.root / "runs" / "1-older")
    shutil.copytree(stored, workplace.root / "runs" / "2-newer")
    done = workplace.harness("verify")
    assert done.out.startswith("2-newer: "), done.err
    assert "1-older" not in done.out


def test_documents_are_checked_in_a_project_that_has_recipes_and_no_specs(workplace: Workplace) -> None:
    workplace.harness("init", "simulated")
    (workplace.root / "envspecs").rmdir()  # git keeps no empty folder
    done = workplace.harness("publish", "--check")
    assert done.code == 0, done.err
    assert done.out == "blocks that say what their run says: 0\n"

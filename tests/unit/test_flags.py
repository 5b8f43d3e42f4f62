import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from harness.engines import flags
from harness.engines.flags import read_sglang, read_vllm
from harness.engines.flags.source import Sources
from harness.engines.flags.table import Flag, FlagTable, collect
from harness.engines.flags.tables import read, shipped_versions
from harness.errors import InputError, Location

CHECKED = json.loads((Path(__file__).parents[1] / "files" / "checked_flags.json").read_text())
SEED = {
    "tp": 8,
    "trust-remote-code": True,
    "cuda-graph-max-bs": 128,
    "disable-custom-all-reduce": True,
    "attention-backend": "flashinfer",
    "enable-flashinfer-allreduce-fusion": True,
}


def place(name: str) -> Location:
    return Location("recipe.yaml", 7, 3)


def of(files: Mapping[str, str]) -> Sources:
    return Sources(files.get, files)


def told(engine: str, version: str, args: Mapping[str, object]) -> list[str]:
    table = flags.table(engine, version)
    assert table is not None
    return [str(fault) for fault in flags.check(table, args, lambda name: None)]  # type: ignore[arg-type]


@pytest.mark.parametrize("case", CHECKED, ids=lambda case: f"{case['version']}-{next(iter(case['args']))}")
def test_shipped_tables_accept_what_the_engines_own_parsers_accept(case: dict[str, object]) -> None:
    # `accepted` is what the release's own argparse answered (tests/real/test_flags_of_engines.py asks it again).
    faults = told(str(case["engine"]), str(case["version"]), case["args"])  # type: ignore[arg-type]

    assert bool(faults) is not case["accepted"], faults


def test_every_fault_comes_at_once_and_where_it_was_written() -> None:
    table = flags.table("sglang", "0.5.23")
    assert table is not None
    args = {"bogus-flag": 1, "tp": "two", "attention-backend": "flash_infer"}

    faults = flags.check(table, args, place)

    assert [str(fault.where) for fault in faults] == ["recipe.yaml:7:3"] * 3
    assert faults[0].message == "`bogus-flag` is not an option of sglang 0.5.23"
    assert faults[1].message == "`tp` must be a whole number, got `two`"
    assert faults[2].message.startswith("`attention-backend` must be one of `triton`, `torch_native`")
    assert faults[2].hint == "did you mean `flashinfer`?"


def test_a_removed_option_names_its_successor() -> None:
    assert told("sglang", "0.5.9", SEED) == []
    assert told("sglang", "0.5.23", SEED) == [
        "`cuda-graph-max-bs` is not an option of sglang 0.5.23 any more (write `cuda-graph-max-bs-decode`)"
    ]


def test_an_option_of_another_release_is_known_to_be_one() -> None:
    assert told("sglang", "0.5.9", {"speculative-adaptive": True}) == [
        "`speculative-adaptive` is not an option of sglang 0.5.9; sglang 0.5.23 has it "
        "(under `unchecked:` an option is passed on as it is)"
    ]


def test_a_misspelt_option_gets_a_suggestion() -> None:
    assert told("sglang", "0.5.23", {"mem_fraction_static": 0.8}) == [
        "`mem_fraction_static` is not an option of sglang 0.5.23 (did you mean `mem-fraction-static`?)"
    ]


def test_the_beginning_of_several_options_is_ambiguous() -> None:
    assert told("sglang", "0.5.9", {"speculative-num": 2}) == [
        "`speculative-num` is the beginning of 2 options of sglang 0.5.9 "
        "(write one in full: `speculative-num-draft-tokens`, `speculative-num-steps`)"
    ]


def test_values_are_held_against_what_the_option_takes() -> None:
    assert told("sglang", "0.5.23", {"trust-remote-code": "yes"}) == [
        "`trust-remote-code` takes no value, got `yes` (write `trust-remote-code: true`)"
    ]
    assert told("sglang", "0.5.23", {"context-length": True}) == ["`context-length` needs a value (a whole number)"]
    assert told("sglang", "0.5.23", {"tp-size": [1, 2]}) == ["`tp-size` takes one value, got 2"]
    assert told("vllm", "0.33.0", {"speculative-config": "{method: ngram}"}) == [
        "`speculative-config` must be JSON, got `{method: ngram}`"
    ]


def test_false_does_not_turn_an_on_or_off_option_off() -> None:
    assert told("vllm", "0.33.0", {"enable-prefix-caching": False}) == [
        "`enable-prefix-caching: false` leaves the option out, which keeps its default "
        "(write `no-enable-prefix-caching: true` to turn it off)"
    ]
    assert told("vllm", "0.33.0", {"no-enable-prefix-caching": True, "enforce-eager": None}) == []


def test_pairs_that_exclude_each_other_are_faults() -> None:
    faults = told("sglang", "0.5.23", {"enable-hierarchical-cache": True, "disable-radix-cache": True})

    assert len(faults) == 1
    assert faults[0].startswith("`enable-hierarchical-cache` and `disable-radix-cache` exclude each other")


def test_an_option_that_does_nothing_alone_is_a_fault() -> None:
    faults = told("sglang", "0.5.9", {"speculative-draft-model-path": "/models/draft"})

    assert len(faults) == 1
    assert faults[0].startswith("`speculative-draft-model-path` needs `speculative-algorithm`: ")


def test_an_option_the_release_will_drop_is_told_apart_from_a_fault() -> None:
    table = flags.table("sglang", "0.5.23")
    assert table is not None

    assert flags.check(table, {"enable-flashinfer-allreduce-fusion": True}, place) == []
    [notice] = flags.deprecations(table, {"enable-flashinfer-allreduce-fusion": True}, place)
    assert notice.message == "`enable-flashinfer-allreduce-fusion` is deprecated in sglang 0.5.23"
    assert "--flashinfer-allreduce-fusion-backend=auto" in (notice.hint or "")


def test_a_variable_the_release_never_reads_is_a_fault() -> None:
    def unread(version: str, *names: str) -> list[str]:
        table = flags.table("sglang", version)
        assert table is not None
        return [str(fault) for fault in flags.check_variables(table, dict.fromkeys(names, "1"), lambda name: None)]

    assert unread("0.5.9", "SGLANG_ENABLE_SPEC_V2", "NCCL_PROTO") == []
    # Gone from 0.5.14: speculation is v2 only.
    assert unread("0.5.23", "SGLANG_ENABLE_SPEC_V2") == [
        "sglang 0.5.23 does not read the variable `SGLANG_ENABLE_SPEC_V2`; sglang 0.5.9 does "
        "(leave it out for this release)"
    ]
    # A prefix that was renamed: two public launch scripts differ in it, and one of them is ignored.
    assert unread("0.5.23", "SGL_ENABLE_JIT_DEEPGEMM") == [
        "sglang 0.5.23 does not read the variable `SGL_ENABLE_JIT_DEEPGEMM` "
        "(did you mean `SGLANG_ENABLE_JIT_DEEPGEMM`?)"
    ]


def test_an_unknown_release_or_engine_has_no_table() -> None:
    assert flags.table("sglang", "0.4.0") is None
    assert flags.table("attach", "1") is None


def test_a_local_version_takes_the_flags_of_its_public_one() -> None:
    assert flags.table("vllm", "0.32.0+cpu") == flags.table("vllm", "0.32.0")


def test_shipped_tables_say_what_they_were_read_from() -> None:
    tables = [*shipped_versions("sglang").values(), *shipped_versions("vllm").values()]

    assert {(table.engine, table.version) for table in tables} >= {
        ("sglang", "0.5.9"), ("sglang", "0.5.23"), ("vllm", "0.33.0"),
    }  # fmt: skip
    assert all(len(table.sha256 or "") == 64 and table.source.endswith(".whl") for table in tables)


def test_a_table_survives_being_stored() -> None:
    table = flags.table("sglang", "0.5.9")
    assert table is not None

    assert FlagTable.from_json(json.loads(json.dumps(table.to_json()))) == table


ARGUMENTS = """
import argparse
from .choices import KINDS, EXTRA
from sglang.srt.names import NAMES as TABLE

class DeprecatedAction(argparse.Action):
    def __init__(self, option_strings, dest, nargs=0, error_message=None, **kwargs): ...

class ServerArgs:
    @staticmethod
    def add_cli_args(parser):
        kinds = list(TABLE.keys())
        parser.add_argument("--model-path", "--model", type=str, required=True)
        parser.add_argument("--count", type=int, choices=[1, 2] + EXTRA)
        parser.add_argument("--kind", type=str, choices=[*KINDS, "other"])
        parser.add_argument("--from-table", choices=kinds)
        parser.add_argument("--quiet", action="store_true")
        parser.add_argument("--many", type=float, nargs="+")
        parser.add_argument("--parsed", type=parse_it)
        parser.add_argument("--old", action=DeprecatedAction, error_message="gone; use --new")
        parser.add_argument("--computed", choices=compute())
"""


def test_add_argument_calls_are_read_through_constants_and_imports() -> None:
    sources = of(
        {
            "sglang/srt/server_args.py": ARGUMENTS,
            "sglang/srt/choices.py": "KINDS = ('a', 'b')\nEXTRA = [3]\n",
            "sglang/srt/names.py": "NAMES = {'x': object, 'y': object}\n",
        }
    )

    assert collect(read_sglang.flags(sources)) == {
        "model-path": Flag("model-path", aliases=("model",), required=True),
        "count": Flag("count", kind="int", choices=("1", "2", "3")),
        "kind": Flag("kind", choices=("a", "b", "other")),
        "from-table": Flag("from-table", choices=("x", "y")),
        "quiet": Flag("quiet", takes="nothing"),
        "many": Flag("many", takes="many", kind="float"),
        "parsed": Flag("parsed", kind="other"),
        "old": Flag("old", takes="nothing", removed="gone; use --new"),
        # `compute` is nowhere in the wheel: any value may be legal.
        "computed": Flag("computed"),
    }


FIELDS = """
class Spec:
    _NS_PATH = "spec"
    steps: A[Optional[int], "help"] = None
    mode: A[Literal["fast", "exact"], Arg(help="h", aliases=["--how"])] = "fast"
    sizes: A[Optional[List[int]], "help"] = None
    verbose: A[bool, "help"] = False
    overlap: A[bool, Arg(action=argparse.BooleanOptionalAction)] = True
    length: A[Optional[int], Arg(type_parser=human_readable_int)] = None
    hidden: A[int, Arg(no_cli=True)] = 0
    model_path: A[str, Arg(cli_name="--model")]
    plain: int = 0
"""


def test_annotated_fields_become_the_options_upstream_makes_of_them() -> None:
    sources = of(
        {
            "sglang/srt/server_args.py": "from .fields import Spec\n_INPUT_NAMESPACES = [Spec]\nclass ServerArgs: 1\n",
            "sglang/srt/fields.py": FIELDS,
        }
    )

    assert collect(read_sglang.flags(sources)) == {
        "steps": Flag("steps", kind="int"),
        "mode": Flag("mode", choices=("fast", "exact"), aliases=("how",)),
        "sizes": Flag("sizes", takes="many", kind="int"),
        "verbose": Flag("verbose", takes="nothing"),
        "overlap": Flag("overlap", takes="on or off"),
        "length": Flag("length", kind="size"),
        "model": Flag("model", required=True),
    }


VLLM = {
    "vllm/entrypoints/common/cli_args.py": '''
class Base:
    role: str = "assistant"

    @classmethod
    def _customize_cli_kwargs(cls, frontend_kwargs):
        return frontend_kwargs

@config
class FrontendArgs(Base):
    origins: list[str] = field(default_factory=list)

    @classmethod
    def _customize_cli_kwargs(cls, frontend_kwargs):
        frontend_kwargs = super()._customize_cli_kwargs(frontend_kwargs)
        frontend_kwargs["origins"]["type"] = json.loads
        del frontend_kwargs["origins"]["nargs"]
        return frontend_kwargs

def make_arg_parser(parser):
    parser.add_argument("model_tag", type=str, nargs="?")
    parser.add_argument("--headless", action="store_true")
    return parser
''',
    "vllm/engine/arg_utils.py": '''
from vllm.config import ModelConfig
GONE = "gone"

class EngineArgs:
    @staticmethod
    def add_cli_args(parser):
        words = get_kwargs(ModelConfig)
        group = parser.add_argument_group(title="m")
        group.add_argument("--dtype", **words["dtype"])
        group.add_argument("--tokenizer-mode", **words["tokenizer_mode"])
        group.add_argument("--max-model-len", **words["max_model_len"])
        group.add_argument("--enforce-eager", **words["enforce_eager"])
        words["backend"]["choices"].remove(GONE)
        group.add_argument("--backend", **{**words["backend"], "default": None})
        group.add_argument("--overrides", **words["overrides"])
        group.add_argument("--pooler", "-p", **words["pooler"])
''',
    "vllm/config.py": '''
DType = Literal["auto", "half"]

@config
class PoolerConfig: ...

@config
class ModelConfig:
    dtype: DType | torch.dtype = "auto"
    tokenizer_mode: Literal["auto", "slow"] | str = "auto"
    max_model_len: int | None = None
    enforce_eager: bool = False
    backend: Literal["one", "gone"] = "one"
    overrides: dict[str, Any] = {}
    pooler: PoolerConfig | None = None
''',
}  # fmt: skip


def test_configuration_classes_become_the_options_upstream_makes_of_them() -> None:
    assert collect(read_vllm.flags(of(VLLM))) == {
        "headless": Flag("headless", takes="nothing"),
        "role": Flag("role"),
        "origins": Flag("origins", kind="json"),
        "dtype": Flag("dtype", choices=("auto", "half")),
        "tokenizer-mode": Flag("tokenizer-mode"),
        "max-model-len": Flag("max-model-len", kind="size"),
        "enforce-eager": Flag("enforce-eager", takes="on or off"),
        "backend": Flag("backend", choices=("one",)),
        "overrides": Flag("overrides", kind="json"),
        "pooler": Flag("pooler", kind="json"),
    }


def test_a_wheel_of_another_release_is_refused() -> None:
    with pytest.raises(InputError, match=r"`sglang-0\.5\.9-py3-none-any\.whl` is not sglang 0\.5\.23"):
        read("sglang", "0.5.23", "sglang-0.5.9-py3-none-any.whl", of({}), None)


def test_a_wheel_without_server_arguments_is_refused() -> None:
    with pytest.raises(InputError, match="no `ServerArgs` in"):
        read("sglang", "0.5.9", "sglang-0.5.9-py3-none-any.whl", of({}), None)


def test_a_file_that_is_no_wheel_is_refused(tmp_path: Path) -> None:
    (tmp_path / "sglang-0.5.9-py3-none-any.whl").write_text("not a zip")

    with pytest.raises(InputError, match=r"cannot read .* as a wheel"):
        flags.table("sglang", "0.5.9", tmp_path / "sglang-0.5.9-py3-none-any.whl")


HELP = """usage: llama-server [options]

----- common params -----

-h,    --help, --usage                  print usage and exit
-c,    --ctx-size N                     size of the prompt context (default: 4096)
-sm,   --split-mode {none,layer,row}    how to split the model across multiple GPUs
--spec-type [none|draft-simple]         kind of speculation
-md,   --model-draft FNAME              draft model
--cont-batching                         continuous batching
"""


def test_a_help_text_gives_a_table_where_there_is_no_source() -> None:
    table = flags.from_help("llamacpp", "b11434", HELP)

    assert table.flags == {
        "help": Flag("help", takes="nothing", aliases=("usage",)),
        "ctx-size": Flag("ctx-size", kind="int"),
        "split-mode": Flag("split-mode", choices=("none", "layer", "row")),
        "spec-type": Flag("spec-type", choices=("none", "draft-simple")),
        "model-draft": Flag("model-draft"),
        "cont-batching": Flag("cont-batching", takes="nothing"),
    }
    [fault] = flags.check(table, {"draft-max": 4}, place)
    assert fault.message == "`draft-max` is not an option of llamacpp b11434"

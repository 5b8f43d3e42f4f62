"""llama.cpp's HTTP server from the `xllamacpp` package, with llama-server's flags, exit codes and signals.

Run by the python of an environment that holds xllamacpp but not the harness: standard library and xllamacpp only.

    python llamacpp_server.py --model M.gguf --port 8080 --parallel 8 --ctx-size 16384 --metrics --slots

As llama-server does: a bad flag, a model that does not load or a taken port end it with code 1; the first SIGTERM may
wait 30 s for open streams; a second one ends it at once.
"""

import argparse
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn


@dataclass(frozen=True)
class Flag:
    """One flag: its names, the fields of `xllamacpp.CommonParams` it sets, how its text is read."""

    names: tuple[str, ...]
    fields: tuple[str, ...]
    read: Callable[[str], Any] = int
    constant: bool | None = None  # for a flag without a value
    help: str = ""


def numbers(text: str) -> list[float]:
    """`0.9,0.5` as numbers."""
    return [float(part) for part in text.split(",")]


FLAGS = (
    Flag(("-m", "--model"), ("model.path",), str, help="GGUF file"),
    Flag(("-a", "--alias"), ("model_alias",), lambda text: set(text.split(",")), help="the model's name in the API"),
    Flag(("--host",), ("hostnames",), lambda text: [text], help="address to listen on (127.0.0.1)"),
    Flag(("--port",), ("port",), help="port to listen on (8080)"),
    Flag(("-c", "--ctx-size"), ("n_ctx",), help="context, shared by all slots; 0: from the model"),
    Flag(("-np", "--parallel"), ("n_parallel",), help="slots: requests served at the same time"),
    Flag(("-t", "--threads"), ("cpuparams.n_threads", "cpuparams_batch.n_threads"), help="threads"),
    Flag(("-tb", "--threads-batch"), ("cpuparams_batch.n_threads",), help="threads for prompts and batches"),
    Flag(("--threads-http",), ("n_threads_http",), help="threads that answer HTTP"),
    Flag(("-b", "--batch-size"), ("n_batch",), help="logical batch"),
    Flag(("-ub", "--ubatch-size"), ("n_ubatch",), help="physical batch"),
    Flag(("-n", "--predict", "--n-predict"), ("n_predict",), help="tokens to generate at most"),
    Flag(("-ngl", "--gpu-layers", "--n-gpu-layers"), ("n_gpu_layers",), help="layers on the GPU"),
    Flag(("-to", "--timeout"), ("timeout_read", "timeout_write"), help="seconds a connection may be silent"),
    Flag(("-cram", "--cache-ram"), ("cache_ram_mib",), help="MiB of prompt cache in memory; 0: none"),
    Flag(("--cache-reuse",), ("n_cache_reuse",), help="smallest chunk to reuse from the cache"),
    Flag(("-lv", "--verbosity", "--log-verbosity"), ("verbosity",), help="how much is logged"),
    Flag(("--slot-save-path",), ("slot_save_path",), str, help="folder for saved slots; also allows erasing them"),
    Flag(("--metrics",), ("endpoint_metrics",), constant=True, help="serve /metrics"),
    Flag(("--slots",), ("endpoint_slots",), constant=True, help="serve /slots"),
    Flag(("--no-slots",), ("endpoint_slots",), constant=False, help="do not serve /slots"),
    Flag(("--props",), ("endpoint_props",), constant=True, help="allow changing /props"),
    Flag(("-cb", "--cont-batching"), ("cont_batching",), constant=True, help="continuous batching (default)"),
    Flag(("-nocb", "--no-cont-batching"), ("cont_batching",), constant=False, help="no continuous batching"),
    Flag(("--cache-prompt",), ("cache_prompt",), constant=True, help="keep prompts in the cache (default)"),
    Flag(("--no-cache-prompt",), ("cache_prompt",), constant=False, help="do not keep prompts"),
    Flag(("-kvu", "--kv-unified"), ("kv_unified",), constant=True, help="one KV buffer for all slots"),
    Flag(("--warmup",), ("warmup",), constant=True, help="warm up when loading (default)"),
    Flag(("--no-warmup",), ("warmup",), constant=False, help="do not warm up"),
    Flag(("--jinja",), ("use_jinja",), constant=True, help="use the model's chat template (default)"),
    Flag(("--chat-template",), ("chat_template",), str, help="a chat template in place of the model's"),
    Flag(("-md", "--model-draft", "--spec-draft-model"), ("speculative.draft.mparams.path",), str, help="draft model"),
    Flag(("--spec-draft-n-max",), ("speculative.draft.n_max",), help="tokens to draft at most"),
    Flag(("--spec-draft-n-min",), ("speculative.draft.n_min",), help="tokens to draft at least"),
    Flag(("--spec-draft-p-min",), ("speculative.draft.p_min",), float, help="least probability of a drafted token"),
    Flag(("--spec-ngram-simple-size-n",), ("speculative.ngram_simple.size_n",), help="n-gram to look up"),
    Flag(("--spec-ngram-simple-size-m",), ("speculative.ngram_simple.size_m",), help="tokens to draft from it"),
    Flag(("--spec-ngram-simple-min-hits",), ("speculative.ngram_simple.min_hits",), help="hits needed"),
    Flag(("--spec-ngram-map-k-size-n",), ("speculative.ngram_map_k.size_n",), help="n-gram to look up"),
    Flag(("--spec-ngram-map-k-size-m",), ("speculative.ngram_map_k.size_m",), help="tokens to draft from it"),
    Flag(("--spec-ngram-map-k-min-hits",), ("speculative.ngram_map_k.min_hits",), help="hits needed"),
    Flag(("--spec-ngram-mod-n-match",), ("speculative.ngram_mod.n_match",), help="tokens that must match"),
    Flag(("--spec-ngram-mod-n-max",), ("speculative.ngram_mod.n_max",), help="tokens to draft at most"),
    Flag(("--spec-ngram-mod-n-min",), ("speculative.ngram_mod.n_min",), help="tokens to draft at least"),
    # With a forced acceptance the text is wrong: for benchmarks of speed only.
    Flag(("--spec-synth-rates",), ("speculative.synth_rates",), numbers, help="forced acceptance a position"),
    Flag(("--spec-synth-len",), ("speculative.synth_len",), float, help="forced acceptance length"),
)
REMOVED = ("--draft", "--draft-n", "--draft-max", "--draft-min", "--draft-n-min", "--draft-p-min")
DEFAULTS = {"hostnames": ["127.0.0.1"], "port": 8080, "n_gpu_layers": 0}


class Parser(argparse.ArgumentParser):
    """An argument parser with llama-server's messages and exit code."""

    def error(self, message: str) -> NoReturn:
        """One line on stderr, exit code 1."""
        unknown = message.removeprefix("unrecognized arguments: ")
        said = f"invalid argument: {unknown.split()[0]}" if unknown != message else message
        self.exit(1, f"error: {said}\n")


def parser() -> Parser:
    """The flags."""
    # No abbreviations: llama-server has none, and a recipe that works here must work there.
    command = Parser(
        prog="llamacpp_server",
        description=__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for flag in FLAGS:
        kind: dict[str, Any] = {"type": flag.read, "metavar": "X"}
        if flag.constant is not None:
            kind = {"action": "store_const", "const": flag.constant}
        command.add_argument(*flag.names, dest=flag.names[-1], default=None, help=flag.help, **kind)
    command.add_argument("--spec-type", type=lambda text: text.split(","), help="kinds of speculation, by comma")
    return command


def settings(argv: Sequence[str]) -> dict[str, Any]:
    """Flags as `field of CommonParams: value`, in the order of `FLAGS`; `speculative.types` as names."""
    command = parser()
    if removed := next((word for word in argv if word.split("=")[0] in REMOVED), None):
        said = f'error while handling argument "{removed}": the argument has been removed. use --spec-draft-n-max'
        command.exit(1, f"{said}\n")
    given = vars(command.parse_args(argv))
    if given["--model"] is None:
        command.error("--model is required")
    chosen = dict(DEFAULTS)
    for flag in FLAGS:
        if (value := given[flag.names[-1]]) is not None:
            chosen.update(dict.fromkeys(flag.fields, value))
    if given["spec_type"] is not None:
        chosen["speculative.types"] = given["spec_type"]
    return chosen


def parameters(chosen: dict[str, Any], library: Any) -> Any:
    """`CommonParams` with these settings."""
    result = library.CommonParams()
    for path, value in chosen.items():
        *parents, name = path.split(".")
        target = result
        for parent in parents:
            target = getattr(target, parent)
        setattr(target, name, types(value, library) if path == "speculative.types" else value)
    return result


def types(names: Sequence[str], library: Any) -> list[Any]:
    """Kinds of speculation by name; an unknown one ends the program and lists what there is."""
    prefix = "COMMON_SPECULATIVE_TYPE_"
    kinds = {kind.name.removeprefix(prefix).lower().replace("_", "-"): kind for kind in library.common_speculative_type}
    kinds.pop("count", None)
    for name in names:
        if name not in kinds:
            sys.exit(_say(f"error: argument --spec-type: unknown type `{name}`, known: {', '.join(sorted(kinds))}"))
    return [kinds[name] for name in names]


def _say(line: str) -> int:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()
    return 1


def serve(library: Any, params: Any) -> int:
    """Serve until told to stop; returns the exit code."""
    try:
        server = library.Server(params)
    except RuntimeError as error:
        return _say(f"error: the server did not start, the lines above say why: {error}")
    # Handlers are set only now: while a model loads a signal ends the process at once, as it should.
    asked = threading.Event()
    for name in (signal.SIGTERM, signal.SIGINT):
        signal.signal(name, lambda _number, _frame: asked.set())
    _say(f"llamacpp_server: listening on {server.listening_address}")
    while not asked.wait(0.5):
        pass
    _say("llamacpp_server: stopping")
    for name in (signal.SIGTERM, signal.SIGINT):
        signal.signal(name, signal.SIG_DFL)
    # Dropping the last reference stops the server's threads, which may wait half a minute for open streams.
    del server
    return 0


def main() -> int:
    """The program."""
    chosen = settings(sys.argv[1:])
    # Imported only now: flags can be checked, and are tested, without the package.
    import xllamacpp  # noqa: PLC0415

    return serve(xllamacpp, parameters(chosen, xllamacpp))


if __name__ == "__main__":
    sys.exit(main())

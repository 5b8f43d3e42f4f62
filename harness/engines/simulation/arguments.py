"""The simulated server's flags, times in milliseconds of model time, and the batcher that they describe."""

import argparse
from collections.abc import Callable
from typing import Any

from harness.engines.simulation import faults
from harness.engines.simulation.model import Batcher, Cost, Noise, Speculation, tiers_of


def parser(described: str) -> argparse.ArgumentParser:
    """The flags; `described` is the program's own description."""
    command = argparse.ArgumentParser(
        prog="simulated_server",
        description=described,
        epilog="faults:\n" + faults.table(),
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = command.add_argument
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=8000)
    add("--served-model-name", default="simulated")
    add("--context-length", type=_whole, default=131072, help="prompt and output tokens of one request at most")
    add("--max-running-requests", type=_positive, default=1024, help="batch at most; more requests wait")
    add("--step-ms", type=_real, default=9.5, help="a: time of every step")
    add("--sequence-ms", type=_real, default=1.29, help="k: and for every running sequence")
    add("--prefill-token-ms", type=_real, default=0.0, help="f: and for every new prompt token that is not cached")
    add("--speculative-tokens", type=_whole, default=0, help="g: tokens drafted a step; 0: no speculation")
    add("--speculative-acceptance", type=_share, default=0.7, help="p: chance that a draft token is accepted")
    add("--speculative-step-ms", type=_real, default=0.0, help="s: time of every step that drafts")
    add("--speculative-token-ms", type=_real, default=0.0, help="d: and for every drafted token")
    add("--speculative-max-batch", type=_whole, default=None, help="adaptive: no drafting above this batch")
    add("--speculative-tiers", type=_tiers, default=(), help="adaptive: BATCH:TOKENS,... as in 1:4,8:2,32:0")
    add("--noise", type=_real, default=0.0, help="sigma of the lognormal factor on each step")
    add("--launch-noise", type=_real, default=0.0, help="sigma of the lognormal factor on a whole launch")
    add("--seed", type=int, default=None, help="of all noise; left out: drawn at start, and told on /server_info")
    add("--prefix-cache-tokens", type=_whole, default=0, help="size of the prefix cache; 0: none")
    add("--output-tokens", type=_whole, default=0, help="mean natural length of an output; 0: as long as asked for")
    add("--divergence-share", type=_share, default=0.0, help="share of prompts whose output leaves the reference")
    add("--divergence-mean", type=_real, default=64.0, help="mean token at which it does")
    add("--load-s", type=_real, default=0.0, help="seconds until it is ready (real time)")
    add("--time-scale", type=_above_zero, default=1.0, help="real seconds a second of model time takes")
    add("--nnodes", type=_positive, default=1)
    add("--node-rank", type=_whole, default=0)
    add("--dist-init-addr", default="127.0.0.1:0", help="HOST:PORT where rank 0 meets the others")
    add("--on-rank-loss", choices=("die", "hang"), default="die")
    add("--fault", action="append", default=[], metavar="NAME[=VALUE]")
    add("--fault-rank", type=_whole, default=None, help="only this rank has the faults; left out: every rank")
    add("--fault-from", type=_whole, default=0)
    add("--fault-every", type=_positive, default=1)
    add("--fault-count", type=_whole, default=None)
    return command


def _number(text: str, kind: Callable[[str], Any], good: Callable[[Any], bool], noun: str) -> Any:
    try:
        value = kind(text)
    except ValueError:
        value = None
    if value is None or not good(value):
        raise argparse.ArgumentTypeError(f"{noun} was expected, got `{text}`")
    return value


def _whole(text: str) -> int:
    return int(_number(text, int, lambda value: value >= 0, "a whole number not below 0"))


def _positive(text: str) -> int:
    return int(_number(text, int, lambda value: value >= 1, "a whole number not below 1"))


def _real(text: str) -> float:
    return float(_number(text, float, lambda value: 0 <= value < 1e9, "a number not below 0"))


def _above_zero(text: str) -> float:
    return float(_number(text, float, lambda value: 0 < value < 1e9, "a number above 0"))


def _share(text: str) -> float:
    return float(_number(text, float, lambda value: 0 <= value <= 1, "a number from 0 to 1"))


def _tiers(text: str) -> tuple[tuple[int, int], ...]:
    try:
        pairs = [part.split(":") for part in text.split(",") if part]
        return tuple((int(batch), int(drafts)) for batch, drafts in pairs)
    except ValueError:
        raise argparse.ArgumentTypeError(f"BATCH:TOKENS,... was expected, got `{text}`") from None


def batcher(arguments: argparse.Namespace, seed: int) -> Batcher:
    """The batcher of these arguments, in real seconds: model time times the time scale."""
    milliseconds = Cost(
        arguments.step_ms,
        arguments.sequence_ms,
        arguments.prefill_token_ms,
        arguments.speculative_step_ms,
        arguments.speculative_token_ms,
    )
    tiers = tiers_of(arguments.speculative_tokens, arguments.speculative_max_batch, arguments.speculative_tiers)
    return Batcher(
        milliseconds.scaled(arguments.time_scale / 1000),
        Speculation(tiers, arguments.speculative_acceptance),
        max_running=arguments.max_running_requests,
        noise=Noise(arguments.noise, arguments.launch_noise, seed),
    )

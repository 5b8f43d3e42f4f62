"""How one server is started, asked and stopped: data to argv; starts nothing itself."""

import importlib

from harness.engines.engine import Engine
from harness.errors import InputError
from harness.strict import suggest

# Each is a module of this room with an `ENGINE`; loaded when asked for, so that one engine costs one import.
NAMES = ("attach", "llamacpp", "sglang", "simulated", "vllm")


def get(name: str) -> Engine:
    """The engine of this name.

    Raises:
        InputError: there is none; says which there are.
    """
    if name not in NAMES:
        raise InputError(f"unknown engine `{name}`", hint=suggest(name, NAMES))
    engine: Engine = importlib.import_module(f"harness.engines.{name}").ENGINE
    return engine

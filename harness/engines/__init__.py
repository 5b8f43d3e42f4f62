"""How one server is started, asked and stopped: data to argv; starts nothing itself."""

import importlib

from harness.engines.engine import Engine
from harness.errors import InputError

# Each is a module of this room with an `ENGINE`; loaded when asked for, so that one engine costs one import.
NAMES = ("attach", "llamacpp", "sglang", "simulated", "vllm")


def get(name: str) -> Engine:
    """The engine of this name.

    Raises:
        InputError: there is none; says which there are.
    """
    if name not in NAMES:
        # Only here: the simulated server is part of this package and has to start at once, without pydantic and YAML.
        from harness.strict import suggest  # noqa: PLC0415

        raise InputError(f"unknown engine `{name}`", hint=suggest(name, NAMES))
    engine: Engine = importlib.import_module(f"harness.engines.{name}").ENGINE
    return engine

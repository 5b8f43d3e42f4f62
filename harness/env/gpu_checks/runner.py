"""Run one check: `runner.py CHECK SETTINGS ANSWER`, where SETTINGS is JSON and ANSWER the file to write."""

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any


def main(name: str, settings: str, answer: str) -> None:
    """Call the check and write what it answers; what it raises is an answer too."""
    path = Path(__file__).with_name(f"{name}.py")
    spec = importlib.util.spec_from_file_location(f"harness_gpu_check_{name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
        said: dict[str, Any] = module.check(json.loads(settings))
    except Exception as error:  # noqa: BLE001 - whatever a library raises is what this check found
        said = {"ok": False, "message": f"{type(error).__name__}: {error}", "facts": {}}
    partial = Path(f"{answer}.partial")
    partial.write_text(json.dumps(said))
    partial.replace(answer)
    sys.stdout.flush()
    sys.stderr.flush()
    # A CUDA or NCCL library that hangs while the interpreter ends must not take the answer with it.
    os._exit(0)


if __name__ == "__main__":
    # The folder of a script comes first on the path, and a file here could hide a library of the same name.
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != Path(__file__).resolve().parent]
    main(*sys.argv[1:4])

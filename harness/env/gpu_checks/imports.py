"""Can the packages that the spec names be imported?"""

import importlib
import importlib.metadata
from typing import Any


def check(settings: dict[str, Any]) -> dict[str, Any]:
    """Every top-level module of the distributions in `distributions`; names each that cannot be imported."""
    modules: dict[str, str] = {}
    for module, owners in importlib.metadata.packages_distributions().items():
        for owner in owners:
            name = owner.lower().replace("_", "-").replace(".", "-")
            if name in settings["distributions"] and module.isidentifier() and not module.startswith("_"):
                modules[module] = name
    wrong = {}
    for module in sorted(modules):
        try:
            importlib.import_module(module)
        except Exception as error:  # noqa: BLE001 - whatever an import raises is what this check found
            first = str(error).strip().splitlines()
            wrong[module] = f"{type(error).__name__}: {first[0] if first else ''}"
    facts = {"modules": sorted(modules), "failed": wrong}
    if wrong:
        text = "; ".join(f"`{module}`: {why}" for module, why in wrong.items())
        return {"ok": False, "message": f"cannot import {text}", "facts": facts}
    return {"ok": True, "message": f"imported {', '.join(sorted(modules)) or 'nothing'}", "facts": facts}

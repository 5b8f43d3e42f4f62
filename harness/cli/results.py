"""Verbs: show, compare, publish."""

from harness.cli.talk import Verbs


def register(verbs: Verbs) -> None:
    """Add this room's verbs."""

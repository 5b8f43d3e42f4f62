"""Verbs: lock, fetch, build, validate, patch, image."""

from harness.cli.talk import Verbs


def register(verbs: Verbs) -> None:
    """Add this room's verbs."""

"""Declare an environment and an experiment in git; get back numbers that can be trusted, and their proof."""

__version__ = "0.1.0"

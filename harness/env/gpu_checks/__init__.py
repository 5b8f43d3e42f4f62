"""Checks that need a GPU: small programs that run under the Python of the environment they check.

Nothing here may import the harness: that Python has never heard of it. `runner.py` is started as a script; it loads one
sibling by its file, calls `check(settings)` and writes the answer to a file, because libraries print what they like.
An answer is `{"ok": bool, "message": text, "facts": {...}}`, and may say `"no_gpu": true`.
"""

"""A page in a browser, for tests."""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Opened:
    """A page in a browser, and everything that it complained about or asked for."""

    page: Any
    console: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    dialogs: list[str] = field(default_factory=list)

    def drawn(self) -> None:
        """Wait until everything that is not inside a closed part is drawn."""
        waiting = (
            "[...document.querySelectorAll('[data-figure]:not([data-drawn])')]"
            ".filter(one => !one.closest('details:not([open])')).length"
        )
        for _ in range(600):
            if self.page.evaluate(waiting) == 0:
                return
            self.page.wait_for_timeout(50)
        raise AssertionError(f"still not drawn: {self.page.evaluate(waiting)}; {self.console}")

    def open_everything(self) -> None:
        """Open every closed part, down to the last."""
        self.page.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true; })")
        self.drawn()

    def dismiss(self, dialog: Any) -> None:
        self.dialogs.append(dialog.message)
        dialog.dismiss()

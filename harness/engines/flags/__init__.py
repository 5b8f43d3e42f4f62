"""Whether the flags in a recipe are flags of the engine's locked release: checked from its wheel, before anything runs.

`table` gives what one release accepts: read from its wheel when that is at hand, else from the tables shipped here.
`check` holds a recipe's arguments against it. An option passed under `unchecked:` never comes here.
"""

from harness.engines.flags.check import check, check_variables, deprecations
from harness.engines.flags.help_text import from_help
from harness.engines.flags.table import Flag, FlagTable
from harness.engines.flags.tables import ENGINES, table

__all__ = ["ENGINES", "Flag", "FlagTable", "check", "check_variables", "deprecations", "from_help", "table"]

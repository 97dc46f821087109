"""The one way from the core to a tool.

The core works where the folders of the tools are not there. A few of its public names are made by a tool all the same,
such as `build("auto")` by the search: these load it here, by its name, and a copy without it reports what is missing.
"""

from __future__ import annotations

import importlib
from types import ModuleType

from penstock.errors import UsageError


def tool(module: str, purpose: str) -> ModuleType:
    """Import a module of Penstock by its dotted name, or raise what is missing and what it is needed for."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as missing:
        if missing.name is None or not f"{module}.".startswith(f"{missing.name}."):
            raise
        raise UsageError(
            f"{purpose} is the work of {module}, and this copy of Penstock has no {missing.name}; install the whole "
            "package: pip install penstock"
        ) from None

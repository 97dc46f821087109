"""The one way from the core to a tool.

The core works without the folder `penstock.tools`. A few of its public names are made by a tool all the same, such as
`build("auto")` by the search: these load it here, by its name, and so a copy without it can report what is missing.
"""

from __future__ import annotations

import importlib
from types import ModuleType

from penstock.errors import UsageError


def tool(name: str, purpose: str) -> ModuleType:
    """Import a module of `penstock.tools`, or raise what is missing and what it is needed for."""
    module = f"penstock.tools.{name}"
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as missing:
        if missing.name is None or not f"{module}.".startswith(f"{missing.name}."):
            raise
        raise UsageError(
            f"{purpose} is the work of {module}, and this copy of Penstock has no {missing.name}; install the whole "
            "package: pip install penstock"
        ) from None

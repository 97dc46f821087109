"""The rooms of the house, in the order in which they may import each other."""

# The rooms of the house: each may import those above it in this list, and itself. A model becomes a pipeline and trains
# in the core; no room of it imports a tool.
CORE = [
    "errors",
    "rules",
    "reading",
    "writing",
    "devices",
    "tool",
    "schedule",
    "messages",
    "files",
    "model",
    "runtime.state",
    "runtime.transport",
    "runtime.backward",
    "runtime.batch",
    "runtime.loss",
    "optim",
    "runtime.engine",
    "group",
    "parallel",
    "pipeline",
    "checkpoint",
]
TOOLS = [
    "tools.search",
    "view",
    "gpipe",
    "parity_check",
    "compat",
    "integrations",
    "train",
    "rehearsal",
    "planner",
    "doctor",
    "cli",
    "__main__",
]
ROOMS = [*CORE, *TOOLS]
FOLDERS_OF_ROOMS = ("runtime", "tools")

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
    "runtime.messages",
    "checkpoint.files",
    "model",
    "runtime.state",
    "runtime.transport",
    "runtime.backward",
    "runtime.batch",
    "runtime.loss",
    "runtime.optim",
    "runtime.engine",
    "parallel.group",
    "parallel",
    "pipeline",
    "checkpoint",
]
TOOLS = [
    "tools.search",
    "view",
    "compat.gpipe",
    "tools.parity_check",
    "compat",
    "integrations",
    "tools.train",
    "tools.rehearsal",
    "planner",
    "tools.doctor",
    "cli",
    "__main__",
]
ROOMS = [*CORE, *TOOLS]
FOLDERS_OF_ROOMS = ("runtime", "tools")

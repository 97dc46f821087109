"""A case as a program: Python text that trains its model as a plain loop and as a pipeline, and says what differs.

What the fuzz runs is this text, so what it prints of a difference is what has differed, and stands by itself. It has
only the lines of `template.py` that the case needs, and the sources of the layers that it has.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

from fuzz import blocks
from fuzz.case import CHANGING, NESTS, RANDOM, Case

__all__ = ["program"]

TEMPLATE = Path(__file__).with_name("template.py").read_text().splitlines()[3:]
NEEDED = {"Custom": ("Cube",), "Rewrites": ("Double",), "Trap": ("spring",)}
ROUNDING = 1e-9  # of the largest number of a tensor, in double precision


def program(case: Case) -> str:
    """The text. It defines `plain()`, `piped()` and `differences()`; run by itself, it prints what differs."""
    flags = flags_of(case)
    own = {"constants": constants, "classes": classes, "layers": layers, "options": options}
    lines: list[str] = []
    dropped: int | None = None  # the indentation of a line that was left out, and of what is below it
    for line in TEMPLATE:
        indent = len(line) - len(line.lstrip())
        if dropped is not None and (not line.strip() or indent > dropped):
            continue
        dropped = None
        text, _, conditions = line.partition("  # if: ")
        if not all((name[1:] not in flags) if name[0] == "!" else (name in flags) for name in conditions.split()):
            dropped = indent
        elif text.lstrip().startswith("# here: "):
            lines += [" " * indent + each for each in own[text.split()[2]](case)]
        else:
            lines.append(text.replace("OPTIMIZER", str(case.optimizer)))
    return _spaced(lines)


def _spaced(lines: list[str]) -> str:
    """Two empty lines before what stands at the left, as ever."""
    kept: list[str] = []
    for line in "\n".join(lines).splitlines():
        if line.startswith(("def ", "class ", "if __name__")):
            while kept and not kept[-1].strip():
                kept.pop()
            kept += ["", ""]
        if line.strip() or (kept and kept[-1].strip()):
            kept.append(line)
    return "\n".join(kept) + "\n"


def flags_of(case: Case) -> set[str]:
    """What the case has, in the words of the template."""
    found = {
        "checkpointed": case.has("Checkpointed"),
        "extra": case.has("Extra"),
        "attributes": case.has("Calls", "Seen"),
        "table": case.has("Table"),
        "fault": case.fault is not None,
        "skip": case.skip is not None,
        "side": case.side is not None,
        "rows": case.side == "rows",
        "evaluate": case.evaluate,
        "optimizer": case.optimizer is not None,
        "inside": case.inside,
        "clip": case.clip is not None,
        "owners": case.owners > 0,
        "units": case.way == "replay" and case.has(*RANDOM),
        "replicas": case.replicate is not None,
        "alone": case.replicate is None,
        "classes": case.loss in ("cross", "known"),
        "changing": case.loss in CHANGING,
        "threads": case.where.startswith("threads"),
        "unbuffered": case.where == "threads-0",
        "whole": case.whole,
        "staged": not case.whole,
    }
    return {name for name, has in found.items() if has} | {case.loss, case.batch, case.way}


def constants(case: Case) -> Iterator[str]:
    yield f"SEED, WIDTH, DTYPE = {case.seed % 1000}, {case.width}, torch.{case.dtype}"
    yield f"PRECISION = {case.precision == 'bf16'}  # autocast"
    yield f"SIZES = {list(case.sizes)}  # rows of each microbatch"
    yield f"STEPS, EVERY, TO_NONE, REPLICAS = {case.steps}, {case.every}, {case.to_none}, {2 if case.replicate else 1}"
    yield f"OUTPUTS, TOLERANCE = {case.loss != 'own'}, {0.0 if case.exact else ROUNDING}"
    if case.optimizer == "AdamW":
        yield "SETTINGS = {'lr': 0.05, 'eps': 1e-3}  # with less, the rounding of a gradient that is 0 becomes a step"
    elif case.optimizer is not None:
        yield "SETTINGS = {'lr': 0.05}"
    if case.fault is not None:
        yield f"FAULT = {case.fault}  # step, stage, where, microbatch"
    if case.side is not None and not case.whole:
        yield f"SIDE_AT = {case.side_at}  # the stages that take it"
    if case.skip is not None:
        yield f"SKIP = {case.skip}  # from where to where"
    if case.clip is not None:
        yield f"CLIP = {case.clip}"
    if case.owners:
        yield f"OWNERS = {case.owners}  # layers with parameters, each of which can begin a stage"
    if case.way == "sequential":
        yield f"BALANCE = {[len(stage) for stage in case.stages]}"


def classes(case: Case) -> Iterator[str]:
    names = [layer.kind for layer in case.layers]
    names += ["Several"] * any(stage[0].kind == "Join" for stage in case.stages)
    names += ["Trap"] * (case.fault is not None)
    if not case.whole:
        names += ["Side"] * (case.side is not None) + ["Sends", "Takes"] * (case.skip is not None)
    for each in dict.fromkeys(need for name in names for need in (*NEEDED.get(name, ()), name)):
        yield source_of(each)
    if case.loss == "own":
        yield "class Own(nn.Module):\n    def forward(self, x):\n        return x.square().mean()"
    if case.nest == "group":
        yield source_of("Group")
    if case.whole:
        if case.nest != "list":
            yield source_of("inside")
        yield from net(case)


def net(case: Case) -> Iterator[str]:
    """A model with a forward of its own, which calls its layers."""
    yield "class Net(nn.Module):"
    yield "    def __init__(self, *layers):"
    yield "        super().__init__()"
    yield f"        self.layers = {NESTS[case.nest].replace('LAYERS', 'layers')}"
    yield ""
    yield f"    def forward(self, x{'' if case.side is None else ', side=None'}):"
    yield f"        for number, layer in enumerate({'self.layers' if case.nest == 'list' else 'inside(self.layers)'}):"
    if case.skip is not None:
        yield "            x = x + kept if number == SKIP[1] else x"
    units = case.way == "replay" and case.has(*RANDOM)
    yield f"            x = {'drawing(number, layer, x)' if units else 'layer(x)'}"
    if case.skip is not None:
        yield "            kept = x if number == SKIP[0] else kept if number else None"
    if case.side is not None:
        at = [sum(len(each) for each in case.stages[:stage]) for stage in case.side_at]
        yield f"            x = x * side[:, None] if number in {at} and side is not None else x"
    yield "        return x"


def layers(case: Case) -> Iterator[str]:
    names: list[str] = []
    again = {second: first for first, second in case.shared}
    for number, layer in enumerate(case.layers):
        if number in again:
            names.append(names[again[number]])
        else:
            names.append(f"l{number}")
            yield f"l{number} = {layer}"
    if case.way == "list":
        yield f"model = nn.ModuleList([{', '.join(stage_texts(case, names))}])"
        return
    if case.fault is not None:
        first = sum(len(stage) for stage in case.stages[: case.fault[1]])
        names[first] = f"Trap({names[first]})"
    names += ["Own()"] * (case.loss == "own")
    yield f"model = {'Net' if case.whole else 'nn.Sequential'}({', '.join(names)})"


def stage_texts(case: Case, names: list[str]) -> Iterator[str]:
    for number, kinds in enumerate(case.stages):
        mine, names = names[: len(kinds)], names[len(kinds) :]
        if case.loss == "own" and number == len(case.stages) - 1:
            mine.append("Own()")
        kind = "Several" if kinds[0].kind == "Join" else "nn.Sequential"
        text = mine[0] if len(mine) == 1 else f"{kind}({', '.join(mine)})"
        if case.fault is not None and case.fault[1] == number:
            text = f"Trap({text})"
        if number in case.side_at:
            text = f"Side({text})"
        if case.skip is not None and number in case.skip:
            text = f"Sends({text}, {case.skip[1]})" if number == case.skip[0] else f"Takes({text})"
        yield text


def options(case: Case) -> Iterator[str]:
    threads = case.where.startswith("threads")
    yield "list(model)," if case.way == "list" else "model,"
    yield f"microbatches={case.microbatches},"
    yield f"schedule={case.family!r},"
    yield f'ranks={case.ranks},\n        transport="threads",' if threads else f"transport={case.where!r},"
    if case.way == "sequential":
        yield "balance=BALANCE,"
    if case.whole:
        side = {None: "", "none": ', "side": None', "rows": ', "side": batch(0)[1][:2]'}[case.side]
        yield f"stages={len(case.stages)},"
        yield f"cut_options=penstock.CutOptions(method={case.way!r}),"
        yield f'example={{"x": batch(0)[0][:2]{side}}},'
    if case.skip is not None and not case.whole:
        yield "cut_options=penstock.CutOptions(skips=[SKIP]),"
    names = {"own": "None", "exchanged": "loss_at(0)"}
    yield f"loss_fn={names.get(case.loss, 'loss_fn')},"
    yield from ['loss_options=penstock.LossOptions(reduction="sum"),'] * (case.loss == "sum")
    yield from ["loss_options=penstock.LossOptions(weight=weigh),"] * (case.loss in ("weighted", "cross"))
    if case.replicate is not None:
        yield f"mesh=mesh,\n        parallel_options=penstock.ParallelOptions(replicate={case.replicate!r}),"
    yield f"recompute={case.recompute!r},"
    yield f"precision={case.precision!r},"
    yield "seed=7,"


@cache
def source_of(name: str) -> str:
    """A block's class or function without types and descriptions, which only a reader of the fuzz needs."""
    tree = ast.parse(inspect.getsource(getattr(blocks, name)))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            node.returns = None
            for argument in _arguments(node.args):
                argument.annotation = None
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node):
            node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(tree)


def _arguments(given: ast.arguments) -> Iterable[ast.arg]:
    return (each for each in (*given.args, *given.kwonlyargs, given.vararg) if each is not None)

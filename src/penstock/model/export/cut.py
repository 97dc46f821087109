"""The way in: an ordinary module and an example, out comes a split of its captured graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from penstock.errors import ModelError
from penstock.model.balance.request import stage_count
from penstock.model.export.capture import Arguments, capture
from penstock.model.export.cut_places import choose_cuts, count_pieces, find_cuts, modules_of
from penstock.model.export.operations import Values
from penstock.model.export.part import GraphPart, GraphPrograms, Program, all_tensors, device_of
from penstock.model.export.proof import runs
from penstock.model.export.stage_graphs import build_stages
from penstock.model.lazy import is_lazy
from penstock.model.names import dotted_name
from penstock.model.part import first_names, hang
from penstock.model.staged_model import StagedModel
from penstock.model.transformers_models import default_inputs, origin_of


def split_by_graph(
    model: nn.Module,
    stages: int | None,
    example: tuple[Any, ...] | Mapping[str, Any],
    balance: Sequence[int] | None = None,
    split_at: Sequence[str] = (),
) -> StagedModel:
    """Cut the graph of a model; see `capture`, `operations`, `cut_places`, `stage_graphs` and `part`."""
    args, kwargs = ((), dict(example)) if isinstance(example, Mapping) else (tuple(example), {})
    count = stage_count(stages, balance, split_at)
    if count < 1:
        raise ModelError(f"a model cannot make {count} stages; pass stages=1 or more")
    arguments = Arguments(model, default_inputs(model, kwargs))
    inputs = arguments.inputs(args, kwargs)
    if not is_lazy(model):
        runs(model, arguments, inputs)  # The capture of what has no graph would take long.
    values = Values(capture(model, arguments, inputs))
    tensors = all_tensors(model)
    cuts = choose_cuts(values, tensors, count, balance, split_at)
    program = Program(values.capture, build_stages(values, find_cuts(values, tensors, cuts), device_of(model)))
    programs = GraphPrograms(model, arguments, cuts, program)
    programs.held = _holders(model, tensors, program)
    programs.prove(inputs)
    parts = tuple(_part(index, model, tensors, programs) for index in range(count))
    balance = count_pieces(values, tensors, cuts)
    sizes = "sizes may change" if program.capture.is_dynamic else "for the example's sizes"
    counts = ", ".join(map(str, balance))
    how = f"torch.export graph ({sizes}), operations with parameters of their own per stage: {counts}"
    order = tuple(model.state_dict(keep_vars=True))
    names, origin = first_names(model), origin_of(model)
    return StagedModel(parts, programs.topology, how, model, names, balance=balance, order=order, origin=origin)


def _part(index: int, model: nn.Module, tensors: dict[str, Tensor], programs: GraphPrograms) -> GraphPart:
    saved = set(model.state_dict(keep_vars=True))
    module = nn.Module()
    here: dict[int, str] = {}
    for name, tensor in tensors.items():
        if name in programs.held[index]:
            hang(module, name, tensor, persistent=isinstance(tensor, nn.Parameter) or name in saved)
            here.setdefault(id(tensor), name)
    module.train(any(programs.modes))
    aliases = {name: here[id(tensor)] for name, tensor in tensors.items() if id(tensor) in here}
    return GraphPart(index, model, programs, module, aliases)


def _holders(model: nn.Module, tensors: dict[str, Tensor], program: Program) -> list[set[str]]:
    """Return the names of what each stage holds: all that it reads, and neighbours that nobody reads.

    A tensor with several names goes by the one of the module that reads it: a tied head by the head's name on the last
    stage and by the embedding's on the first.
    """
    names: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        names.setdefault(id(tensor), []).append(name)
    held: list[set[str]] = [set() for _ in program.stages]
    stage_of: dict[str, int] = {}
    for index, stage in enumerate(program.stages):
        for name, readers in stage.state:
            around = {module for reader in readers for module in modules_of(reader)[-1:]}
            known = names[id(tensors[name])]
            mine = [other for other in known if other.rpartition(".")[0] in around] or [name]
            held[index].update(mine)
            for other in mine:
                stage_of.setdefault(other, index)
    first = {id(tensors[name]): index for name, index in reversed(stage_of.items())}
    last = 0
    for prefix, module in model.named_modules(remove_duplicate=False):
        own = [dotted_name(prefix, leaf) for leaf in (*module._parameters, *module._buffers)]
        own = [name for name in own if name in tensors]
        last = next((stage_of[name] for name in own if name in stage_of), last)
        for name in own:
            if name not in stage_of:
                stage_of[name] = first.get(id(tensors[name]), last)
                held[stage_of[name]].add(name)
    return held

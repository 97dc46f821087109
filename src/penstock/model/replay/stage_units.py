"""What a stage of a replayed model owns, as one module, and where its glue reads of that."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn


class StageUnits(nn.Module):
    """The units that a stage owns, as one module: what is trained, moved, saved."""

    def __init__(
        self, units: list[nn.Module], loose: list[Tensor], others: list[nn.Module], twins: list[nn.Module]
    ) -> None:
        super().__init__()
        for number, unit in enumerate(units):
            self.add_module(str(number), unit)
        for number, tensor in enumerate(loose):
            if isinstance(tensor, nn.Parameter):
                self.register_parameter(f"loose_{number}", tensor)
            else:
                self.register_buffer(f"loose_{number}", tensor)
        foreign = {
            id(inner) for module in others if getattr(module, "is_asked", False) for inner in nn.Module.modules(module)
        }
        self.__dict__["_others"] = others  # containers and glue modules of the stage's tree, and stand-ins for units
        self.__dict__["_glue"] = [module for module in others if id(module) not in foreign]
        self.__dict__["_running"] = {id(unit): twin for unit, twin in zip(units, twins, strict=True)}

    def modules(self, remove_duplicate: bool = True) -> Iterator[nn.Module]:
        """All modules, also those of the stage's tree that hold no parameter: they too have a mode."""
        yield from super().modules(remove_duplicate)
        yield from self.__dict__["_others"]

    def own_modules(self) -> Iterator[nn.Module]:
        """The modules whose state is this stage's: its units and the glue, but no stand-ins for other stages' units.

        These share their tables with the units themselves, which another rank, on a thread, may be running.
        """
        yield from super().modules()
        yield from self.__dict__["_glue"]

    def running_modules(self) -> Iterator[nn.Module]:
        """As `own_modules`, with the copy of a unit that runs, and has its attributes, in the unit's place."""
        running = self.__dict__["_running"]
        yield from (running.get(id(module), module) for module in self.own_modules() if module is not self)

    def train(self, mode: bool = True) -> StageUnits:
        super().train(mode)
        for module in self.__dict__["_others"]:
            module.training = mode
        return self


class GlueTensors:
    """Parameters that the glue reads (`self.class_token`), in the stage's tree, and which its module owns.

    Others may take their place in the module: a shard, and what is gathered of it. The tree has to follow, or the glue
    would go on with what it was made with. With buffers it is the other way round: the tree shares the user's tables of
    them, and the module follows where the user puts another into one.
    """

    def __init__(self, root: nn.Module, owned: StageUnits) -> None:
        owners = {
            id(parameter): (owner, name)
            for owner in nn.Module.modules(owned)
            for name, parameter in owner._parameters.items()
            if parameter is not None
        }
        self._parameters = [
            (holder, name, *owners[id(parameter)], parameter)
            for holder in root.modules()
            for name, parameter in holder._parameters.items()
            if parameter is not None
            and id(parameter) in owners
            and owners[id(parameter)][0]._parameters is not holder._parameters
        ]
        held = {id(buffer): name for name, buffer in owned._buffers.items() if buffer is not None}
        self._own = owned._buffers
        self._buffers: dict[tuple[str, str], tuple[nn.Module, Tensor | None]] = {
            (held[id(buffer)], leaf): (holder, buffer)
            for holder in root.modules()
            for leaf, buffer in holder._buffers.items()
            if buffer is not None and id(buffer) in held
        }

    def follow_buffers(self) -> None:
        for (name, leaf), (holder, known) in self._buffers.items():
            now = holder._buffers.get(leaf)
            if now is not known:
                self._own[name] = now
                self._buffers[name, leaf] = holder, now

    def follow_parameters(self) -> None:
        for holder, name, owner, own_name, first in self._parameters:
            now = owner._parameters[own_name]
            if now is not first and holder._parameters[name] is not now:
                holder.__dict__["_parameters"] = {**holder._parameters, name: now}  # the user's module has the old one

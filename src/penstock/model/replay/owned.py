"""What a stage of a replayed model owns, as one module."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

__all__ = ["StageUnits"]


class StageUnits(nn.Module):
    """The units that a stage owns, as one module: what is trained, moved, saved."""

    def __init__(self, units: list[nn.Module], loose: list[Tensor], others: list[nn.Module]) -> None:
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

    def modules(self, remove_duplicate: bool = True) -> Iterator[nn.Module]:
        """Also those of the tree that hold no parameter: they too know whether they are training."""
        yield from super().modules(remove_duplicate)
        yield from self.__dict__["_others"]

    def own_modules(self) -> Iterator[nn.Module]:
        """Those whose state is this stage's: its units, and the glue, but not what stands for units of other stages.

        These share their tables with the units themselves, which another rank, on a thread, may be running.
        """
        yield from super().modules()
        yield from self.__dict__["_glue"]

    def train(self, mode: bool = True) -> StageUnits:
        super().train(mode)
        for module in self.__dict__["_others"]:
            module.training = mode
        return self

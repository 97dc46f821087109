"""A case: one model, loss, batch and schedule, drawn from a seed, as plain values that can be made smaller."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

from exactness.cases import sums_in_order
from transports import ON_PROCESSES

from penstock.schedule import FAMILIES, build
from penstock.schedule.builders import TRAINING

OPTIONS = {
    "Bias": 5,
    "Part": 3,
    "Mean": 2,
    "Seen": 2,
    "Fork": 5,
    "Join": 3,
}  # layers with an option: from 0 to below this
PLAIN = (
    "Dense", "Gelu", "Norm", "Bias", "BiasOnly", "Cat", "CatFirst", "Residual", "Square", "Scale", "InPlace", "Part",
    "Columns", "Same", "Frozen", "HalfFrozen", "Detached", "Weighted", "Checkpointed", "Hooked", "HookedInput",
    "Attend", "Convolve", "Recur", "Custom",
)  # fmt: skip
STATE = ("BatchNorm", "Count", "Mean", "Calls", "Seen")
RANDOM = ("Drop", "Noise")
WRITING = ("WritesInput", "ReluOfInput")
BRANCH = ("Branch",)
EXTRA = ("Extra",)
FIRST = ("Table", "Scratch")
BARE = ("Same", "Scratch")  # without parameters
UNSAVED = (  # whose output autograd does not keep, so that a layer behind may write to it
    "Norm", "Bias", "BiasOnly", "Cat", "Residual", "Square", "Scale", "Part", "HalfFrozen", "Detached", "Hooked",
    "Attend", "BatchNorm", "Count", "Mean", "Calls", "Seen", "Noise", "Join",
)  # fmt: skip
NESTS = {  # containers within containers, of the layers `LAYERS`
    "list": "nn.ModuleList(LAYERS)",
    "list in dict": "nn.ModuleDict(dict(zip('abc', [LAYERS[0], nn.ModuleList(LAYERS[1:-1]), *LAYERS[1:][-1:]])))",
    "lists in list": "nn.ModuleList(nn.ModuleList(LAYERS[n : n + 2]) for n in range(0, len(LAYERS), 2))",
    "dict in dict": "nn.ModuleDict({'0': nn.ModuleDict({str(n): layer for n, layer in enumerate(LAYERS)})})",
    "group": "Group(LAYERS[0], nn.ModuleList(LAYERS[1:-1]), *LAYERS[1:][-1:])",
}
WAYS = ("list", "list", "list", "sequential", "replay", "replay", "graph")
CHANGING = ("masked", "selected", "switched")  # a mean over rows, and from the last step on over some of them
LOSSES = ("mse", "mse", "sum", "weighted", "cross", "known", "own", "kwargs", "exchanged", "exchanged", *CHANGING)

# What can be left out while it is known not to work; `without` of the command.
CLASSES = (
    "state", "random", "writing", "branch", "extra", "forks", "skips", "shared", "side", "faults", "evaluate",
    "precision", "recompute", "clip", "losses", "microbatches", "replay", "graph", "sequential", "frozen", "scratch",
    "hooks", "nests",
)  # fmt: skip


@dataclass(frozen=True)
class Layer:
    """One of `blocks`, and its option."""

    kind: str
    option: int | None = None

    def __str__(self) -> str:
        return f"{self.kind}(WIDTH)" if self.option is None else f"{self.kind}(WIDTH, {self.option})"


@dataclass(frozen=True)
class Case:
    """Everything that a program needs to know. The defaults are the simplest there is."""

    stages: tuple[tuple[Layer, ...], ...]
    way: str = "list"
    width: int = 4
    sizes: tuple[int, ...] = (1, 1)  # rows of each microbatch
    dtype: str = "float32"
    family: str = "gpipe"
    ranks: int = 1
    where: str = "threads"  # or another of `transports.KINDS`
    replicate: str | None = None  # "ddp" or "fsdp", with two replicas
    loss: str = "mse"
    batch: str = "plain"  # or "offset", "columns", "microbatches"
    side: str | None = None  # "rows" or "none"
    side_at: tuple[int, ...] = ()
    skip: tuple[int, int] | None = None  # from stage, to stage; in a whole model from layer to layer
    shared: tuple[tuple[int, int], ...] = ()  # layers by number: the second is the first once more
    steps: int = 1
    every: int = 1  # steps between those of the optimizer
    optimizer: str | None = None
    to_none: bool = True  # what zero_grad does
    inside: bool = False  # each parameter's hook updates it when its gradient is complete
    clip: float | None = None  # the norm of all gradients, before the optimizer
    recompute: str = "never"
    precision: str | None = None
    evaluate: bool = False
    nest: str = "list"  # where a whole model has its layers; see `NESTS`
    fault: tuple[int, int, str, int] | None = None  # step, stage, forward or backward, microbatch
    seed: int = 0

    @property
    def layers(self) -> tuple[Layer, ...]:
        return tuple(layer for stage in self.stages for layer in stage)

    @property
    def microbatches(self) -> int:
        return len(self.sizes)

    @property
    def whole(self) -> bool:
        """One module with a forward of its own, which is cut."""
        return self.way in ("replay", "graph")

    def has(self, *kinds: str) -> bool:
        return any(layer.kind in kinds for layer in self.layers)

    def stage_of(self, number: int) -> int:
        """The stage of a layer, by its number among all."""
        for stage, layers in enumerate(self.stages):
            number -= len(layers)
            if number < 0:
                return stage
        raise IndexError(number)

    @cached_property
    def exact(self) -> bool:
        """Whether bits are promised: sums in the order of microbatches, one tensor at a time from stage to stage."""
        if self.skip is not None or self.replicate is not None or self.way == "graph" or self.loss == "known":
            return False
        if self.clip is not None:  # each rank has the norm of its own
            return False
        if self.precision is not None and self.shared:  # where W is apart, uses of a weight are added in float32
            return False
        if any(self.whole or self.stage_of(a) != self.stage_of(b) for a, b in self.shared):
            return False
        if any(layer.kind == "Fork" and layer.option in (0, 1, 2) for layer in self.layers):
            return False
        schedule = build(self.family, self.ranks, self.microbatches, len(self.stages) // self.ranks)
        return sums_in_order(schedule)

    @property
    def owners(self) -> int:
        """How many layers of a whole model can begin a stage, at least; 0: not known beforehand."""
        if self.way != "replay" or self.shared or len(self.stages) < 2:
            return 0
        return sum(layer.kind not in BARE for layer in self.layers)

    @property
    def refusable(self) -> bool:
        """Whether it may be: if the library cuts it, one layer with state is on two stages, or a shard has no hooks."""
        if self.loss in CHANGING:  # in the step in which it changes: the program sees to that
            return True
        return self.whole or bool(self.shared) or (self.replicate == "fsdp" and self.has("Hooked"))

    def fits(self) -> bool:
        """Whether it is a case at all: what was drawn, or made smaller, may be none."""
        rules = (self._schedule_fits, self._layers_fit, self._batch_fits, self._extras_fit, self._skip_fits)
        return all(rule() for rule in rules)

    def _schedule_fits(self) -> bool:
        stages, each = len(self.stages), len(self.stages) // max(1, self.ranks)
        if self.ranks < 1 or not all(self.stages) or stages != each * self.ranks or not self.sizes:
            return False
        return stages >= 1 and (FAMILIES[self.family].layout != "v" or each == 2)

    def _layers_fit(self) -> bool:
        kinds = [layer.kind for layer in self.layers]
        if any(b >= len(kinds) or kinds[b] != kinds[a] or kinds[a] in (*FIRST, "Fork", "Join") for a, b in self.shared):
            return False
        joined = [n for n, kind in enumerate(kinds) if kind == "Join"]
        forked = [n for n, kind in enumerate(kinds) if kind == "Fork"]
        if [n + 1 for n in forked] != joined or (forked and self.way == "graph"):
            return False
        if (
            any(kind in FIRST for kind in kinds[1:])
            or (self.whole and self.has(*BRANCH))
            or (self.way == "graph" and self.has(*RANDOM))
        ):
            return False
        if self.way == "replay" and self.has(*RANDOM) and not self._units_are_layers:
            return False
        if any(kind in WRITING and before not in UNSAVED for before, kind in pairwise(kinds)):
            return False
        if self.has("Rewrites") and (
            self.whole or any(layer.kind == "Rewrites" for stage in self.stages for layer in stage[1:])
        ):
            return False
        if kinds[0] == "Scratch" and (len(self.stages[0]) > 1 or self.whole):
            return False
        return bool(set(kinds) - {"Frozen", "Same", "Scratch", "Detached"})

    def _batch_fits(self) -> bool:
        if min(self.sizes) < (2 if self.has("BatchNorm") else 1) or self.width % 2:
            return False
        if self.batch == "microbatches":
            return not self.whole
        even = sorted(self.sizes, reverse=True) == list(self.sizes) and self.sizes[0] - self.sizes[-1] <= 1
        return even and not (self.has("Table") and self.batch in ("columns", "offset"))

    def _extras_fit(self) -> bool:
        stages = len(self.stages)
        ends = [stage[-1].kind for stage in self.stages]
        if self.nest not in NESTS or (self.nest != "list" and not self.whole):
            return False
        if (self.dtype != "float64" and not self.exact) or (self.precision and self.dtype != "float32"):
            return False
        if (self.side is None) != (not self.side_at) or (self.side and self.way == "sequential"):
            return False
        if any(stage >= stages or ends[stage] == "Fork" for stage in self.side_at):
            return False
        if self.replicate is not None and (self.where not in ON_PROCESSES or self.shared):
            return False
        if self.loss == "own" and (self.way == "sequential" or stages - 1 in self.side_at):
            return False
        if (self.clip is not None or self.inside) and self.optimizer is None:
            return False
        if self.inside and (self.clip is not None or self.every > 1 or self.replicate is not None):
            return False
        if self.has("HookedInput") and (self.skip is not None or self.has("Fork")):
            return False  # a value with two readers, of which one has the hook
        if self.loss in CHANGING and (self.fault is not None or self.replicate is not None or self.microbatches < 2):
            return False
        if self.fault is None:
            return True
        step, stage, _, microbatch = self.fault
        if step >= self.steps or stage >= stages or microbatch >= self.microbatches or self.way == "graph":
            return False
        return "Fork" not in (ends[stage], self.stages[stage][0].kind)

    @property
    def _units_are_layers(self) -> bool:
        """Whether there are enough of them for the stages: else layers are opened, and draw in another order."""
        owners = sum(layer.kind not in BARE for layer in self.layers)
        return not self.shared and owners >= len(self.stages)

    def _skip_fits(self) -> bool:
        if self.skip is None:
            return True
        first, last = self.skip
        if (
            self.way == "sequential"
            or first + 1 >= last
            or last >= (len(self.layers) if self.whole else len(self.stages))
        ):
            return False
        if self.whole:
            return not self.has("Fork")
        forks = any(self.stages[stage][-1].kind == "Fork" for stage in (first, last - 1, last))
        return not forks and not {first, last} & set(self.side_at)


def draw(
    seed: int, where: str = "threads", ranks: int | None = None, replicas: bool = False, without: Sequence[str] = ()
) -> Case:
    """The case of that seed. Where ranks are processes, how many there are is given."""
    chance = random.Random(f"penstock {where} {ranks} {replicas} {seed}")
    while True:
        case = _drawn(chance, seed, where, ranks, set(without))
        if replicas:
            case = replace(case, replicate=chance.choice(("ddp", "fsdp")), dtype="float64", precision=None)
        if case.fits():
            return case


def _drawn(chance: random.Random, seed: int, where: str, ranks: int | None, without: set[str]) -> Case:
    def maybe(share: float, name: str = "") -> bool:
        return chance.random() < share and name not in without

    way = chance.choice([way for way in WAYS if way not in without])
    family = chance.choice(TRAINING)
    count = ranks or chance.choice((1, 2, 2, 3, 4))
    each = {"v": 2, "loop": chance.choice((1, 2, 2, 3)), "block": chance.choice((1, 1, 2))}[FAMILIES[family].layout]
    microbatches = chance.choice((1, 2, 3, 4, 4, 5, 6))
    rows = [chance.choice((1, 1, 2, 2, 3, 5))] * microbatches
    ragged = chance.randrange(microbatches)
    sizes = [size + (number < ragged) for number, size in enumerate(rows)]
    batch = chance.choice(("plain", "plain", "offset", "offset", "columns", "microbatches"))
    if batch == "microbatches" and ("microbatches" in without or way in ("replay", "graph")):
        batch = "plain"
    if batch == "microbatches":
        sizes = [chance.choice((1, 2, 3, 4)) for _ in sizes]
    stages = _stages(chance, count * each, without)
    case = Case(
        stages=stages,
        way=way,
        width=chance.choice((4, 6, 8)),
        sizes=tuple(sizes),
        family=family,
        ranks=count,
        where=where if where != "threads" or maybe(0.7) else "threads-0",
        loss="mse" if "losses" in without else chance.choice(LOSSES),
        batch=batch,
        steps=chance.choice((1, 2, 2, 3)),
        every=chance.choice((1, 1, 1, 2)),
        optimizer=chance.choice((None, "SGD", "SGD", "AdamW")),
        to_none=maybe(0.7),
        recompute=chance.choice(("never", "never", "except_last", "always")) if "recompute" not in without else "never",
        evaluate=maybe(0.3, "evaluate"),
        clip=0.1 if maybe(0.2, "clip") else None,
        seed=seed,
    )
    case = _with_more(chance, case, without, maybe)
    dtype = chance.choice(("float32", "float32", "bfloat16", "float64"))
    if not case.fits():
        case = replace(case, dtype="float64")
    elif case.exact:
        case = replace(case, dtype=dtype)
        if dtype == "float32" and maybe(0.15, "precision"):
            case = replace(case, precision="bf16")
    return case


def _stages(chance: random.Random, count: int, without: set[str]) -> tuple[tuple[Layer, ...], ...]:
    pool = [*PLAIN * 2]
    groups = {"state": STATE * 2, "random": RANDOM * 2, "writing": WRITING, "branch": BRANCH, "extra": EXTRA * 2}
    for name, kinds in groups.items():
        if name not in without:
            pool += kinds
    if "hooks" in without:
        pool = [kind for kind in pool if kind not in ("Hooked", "HookedInput")]
    if "frozen" in without:
        pool = [kind for kind in pool if kind not in ("Frozen", "HalfFrozen", "Detached")]

    def layer(kind: str) -> Layer:
        return Layer(kind, chance.randrange(OPTIONS[kind]) if kind in OPTIONS else None)

    stages = [[layer(chance.choice(pool)) for _ in range(chance.choice((1, 1, 2)))] for _ in range(count)]
    if chance.random() < 0.15:
        stages[0].insert(0, layer("Table"))
    elif chance.random() < 0.08 and "scratch" not in without:
        stages[0] = [layer("Scratch")]
    if count > 1 and chance.random() < 0.15 and "scratch" not in without:
        stages[chance.randrange(1, count)].insert(0, layer("Rewrites"))
    if count > 1 and chance.random() < 0.15 and "hooks" not in without:
        stages[chance.randrange(1, count)].insert(0, layer("HookedInput"))
    if "forks" not in without and chance.random() < 0.2:  # between two stages, or inside of one
        at = chance.randrange(count)
        stages[at].append(layer("Fork"))
        if at + 1 < count:
            stages[at + 1].insert(0, layer("Join"))
        else:
            stages[at].append(layer("Join"))
    return tuple(tuple(stage) for stage in stages)


def _with_more(chance: random.Random, case: Case, without: set[str], maybe: Any) -> Case:
    """What only some cases have."""
    stages = len(case.stages)
    if maybe(0.6, "nests") and case.whole:
        case = replace(case, nest=chance.choice(tuple(NESTS)))
    if maybe(0.25, "side") and case.way != "sequential":
        where = tuple(sorted({chance.randrange(stages) for _ in range(2)}))
        case = replace(case, side=chance.choice(("rows", "rows", "none")), side_at=where)
    if maybe(0.15, "skips"):
        ends = len(case.layers) if case.whole else stages
        if ends > 2:
            first = chance.randrange(ends - 2)
            case = replace(case, skip=(first, chance.randrange(first + 2, ends)))
    if maybe(0.2, "shared"):
        case = _with_a_shared_layer(chance, case)
    if case.optimizer is not None and maybe(0.15, "hooks"):
        case = replace(case, inside=True, every=1, clip=None)
    if maybe(0.15, "faults"):
        fault = (chance.randrange(case.steps), chance.randrange(stages), chance.choice(("forward", "backward")))
        case = replace(case, fault=(*fault, chance.randrange(case.microbatches)))
    return case


def _with_a_shared_layer(chance: random.Random, case: Case) -> Case:
    """Two layers become one. Where it has state and is on two stages, the case is refused, so most are plain."""
    plain = [number for number, layer in enumerate(case.layers) if layer.kind in PLAIN]
    state = [number for number, layer in enumerate(case.layers) if layer.kind in (*STATE, *RANDOM)]
    among = plain + (state if chance.random() < 0.2 else [])
    if len(among) < 2:
        return case
    first, second = sorted(chance.sample(among, 2))
    numbers = iter(range(len(case.layers)))
    again = {second: case.layers[first]}
    stages = tuple(tuple(again.get(next(numbers), layer) for layer in stage) for stage in case.stages)
    return replace(case, stages=stages, shared=((first, second),))

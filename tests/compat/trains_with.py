"""A training script of a user of torch's pipelining; which library it imports is all that its argument changes.

torchrun --nproc-per-node 2 tests/compat/trains_with.py torch.distributed.pipelining losses.json
"""

import json
import sys
from importlib import import_module

import torch
import torch.distributed as dist
from torch import nn

library = import_module(sys.argv[1])

LAYERS, WIDTH, ROWS, STEPS = 4, 16, 16, 3


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def stages_by_hand(model, indices):
    return [library.PipelineStage(model.layers[index], index, LAYERS, device) for index in indices]


def two_blocks(model):
    module = nn.Sequential(*model.layers[2 * rank : 2 * rank + 2])
    return library.PipelineStage(module, rank, 2, device)


def by_split(model):
    spec = {f"layers.{LAYERS // 2}": library.SplitPoint.BEGINNING}
    pipe = library.pipeline(model, mb_args=(torch.randn(ROWS // 4, WIDTH, dtype=torch.float64),), split_spec=spec)
    return pipe.build_stage(rank, device)


def train(make_schedule, last_rank):
    torch.manual_seed(0)
    model = Model().double()
    schedule, stages = make_schedule(model)
    optimizer = torch.optim.AdamW([p for stage in stages for p in stage.submod.parameters()], lr=0.01)
    found = []
    for step in range(STEPS):
        some = torch.Generator().manual_seed(step)
        x, y = (torch.randn(ROWS, WIDTH, generator=some, dtype=torch.float64) for _ in range(2))
        losses = []
        if rank == 0 and last_rank == 0:
            schedule.step(x, target=y, losses=losses)
        elif rank == 0:
            schedule.step(x)
        elif rank == last_rank:
            schedule.step(target=y, losses=losses)
        else:
            schedule.step()
        optimizer.step()
        optimizer.zero_grad()
        found.append([loss.item() for loss in losses])
    return found


def single(name, make_stage):
    def make(model):
        stage = make_stage(model)
        return getattr(library, name)(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss), [stage]

    return make


def several(name, indices):
    def make(model):
        stages = stages_by_hand(model, indices)
        return getattr(library, name)(stages, n_microbatches=4, loss_fn=nn.functional.mse_loss), stages

    return make


dist.init_process_group("gloo")
rank, device = dist.get_rank(), torch.device("cpu")
results = {
    "1F1B": train(single("Schedule1F1B", two_blocks), 1),
    "GPipe": train(single("ScheduleGPipe", two_blocks), 1),
    "split": train(single("Schedule1F1B", by_split), 1),
    "interleaved": train(several("ScheduleInterleaved1F1B", [rank, rank + 2]), 1),
    "interleaved zero bubble": train(several("ScheduleInterleavedZeroBubble", [rank, rank + 2]), 1),
    "ZBV": train(several("ScheduleZBVZeroBubble", [rank, 3 - rank]), 0),
}
gathered = [None, None]
dist.all_gather_object(gathered, results)
if rank == 0:
    with open(sys.argv[2], "w") as file:
        json.dump(gathered, file)
dist.destroy_process_group()

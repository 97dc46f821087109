"""What a rank's process takes before it has a model: Python, torch, and what training loads of other libraries.

Run as a program of its own, in a fresh process. It trains the smallest GPT there is for one step, because torch
loads much of itself with the first kernels and the first optimizer, and prints the bytes that are resident then. Ranks
that `penstock train` starts are forked from a process that has torch loaded, and of what they never use, nothing is
resident in them; so this forks as well, and like a rank loads the code of the model and opens the data, with their
tokenizer and the libraries that read them, after that. Python's collector walks over all objects sooner or later in a
run, by which they become the rank's own; so it does here.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterable

from penstock.errors import RunError
from penstock.tools.train.config.read import read_config, to_document
from penstock.tools.train.config.settings import TrainConfig
from penstock.tools.train.config.source import is_trusted


def process_bytes(
    libraries: list[str], code: Iterable[str] = (), config: TrainConfig | None = None, *, forked: bool = True
) -> int:
    """Measure the bytes of a process that has trained a model too small to count.

    It has loaded `libraries` before it was forked, and afterwards `code`, the modules that the model is from; it has
    opened the data of `config`.
    """
    how = "forked" if forked else "alone"
    # The working folder is not searched (-P): what lies there by the name of a library is nobody's wish.
    program = [sys.executable, "-P", "-m", "penstock.tools.train.run.baseline"]
    command = [*program, how, ",".join(libraries), ",".join(code)]
    document = "" if config is None else json.dumps([to_document(config), is_trusted(config)])
    done = subprocess.run(command, input=document, capture_output=True, text=True)
    if done.returncode:
        raise RunError(f"a process that only loads what training needs has failed: {done.stderr.strip()[-500:]}")
    return int(done.stdout.split()[-1])


def code_of(modules: Iterable[object]) -> list[str]:
    """Return the modules of installed libraries with a model's layers, which each rank loads for itself."""
    names = {type(module).__module__ for module in modules}
    return sorted(name for name in names if name.partition(".")[0] in ("transformers", "peft"))


def main(how: str, libraries: str, code: str) -> int:
    """Load, train one step of next to nothing, and print; the exit code."""
    document = sys.stdin.read()
    _load("penstock.tools.train.worker", *libraries.split(","))
    if how == "forked":
        child = os.fork()
        if child:
            return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    _load(*code.split(","))
    if not document:
        _train(spread=False)
        return 0
    from penstock.tools.train.data.batches import open_data

    content, trust = json.loads(document)
    config = read_config(content, "the configuration", trust=trust)
    if config.logging.wandb != "off":  # The first rank uses it for figures.
        _load("wandb")
    data = open_data(config)
    first = data.first()
    _train(spread=config.mesh.replicas * config.mesh.tp > 1)
    del first
    return 0


def _load(*names: str) -> None:
    for name in filter(None, names):
        importlib.import_module(name)


def _train(spread: bool) -> None:
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import HashStore

    from penstock.pipeline import Pipeline
    from penstock.tools.train.config.settings import GPTOptions
    from penstock.tools.train.loss import TokenLoss
    from penstock.tools.train.models.gpt import build_gpt
    from penstock.tools.train.run.allocations import Allocations
    from penstock.tools.train.run.progress import memory_now

    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    model = build_gpt(GPTOptions(layers=2, width=16, heads=2), 16)
    rows, loss = torch.zeros(4, 16, dtype=torch.int64, device="cpu"), TokenLoss()
    options = {"stages": 2, "microbatches": 2, "loss_fn": loss, "loss_options": loss.options, "transport": "threads"}
    with Pipeline(model, **options) as pipe:  # type: ignore[arg-type]
        optimizer = torch.optim.AdamW(pipe.parameters())
        with Allocations():  # The first steps of a run count their memory, too.
            pipe.step(rows, target=rows)
        pipe.clip_grad_norm_(1.0)
        optimizer.step()
    if spread:
        _train_spread()
    gc.collect()
    print(memory_now(), flush=True)
    dist.destroy_process_group()


def _train_spread() -> None:
    """Train a layer whose tensors are divided over a group of one, with what torch loads for that."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (1,))
    for spread in (fully_shard, lambda layer, mesh: parallelize_module(layer, mesh, ColwiseParallel())):
        layer = torch.nn.Linear(4, 4)
        spread(layer, mesh=mesh)
        layer(torch.ones(2, 4, device="cpu")).sum().backward()
        torch.optim.AdamW(layer.parameters()).step()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

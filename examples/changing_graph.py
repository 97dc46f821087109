"""A graph network in a pipeline: another graph in every microbatch, another set of graphs in every batch, early exit.

Each microbatch is one graph: a dict of node features, edges and plain values, which travels from stage to stage. How
many rounds of messages a graph needs, and in which way its nodes listen, is in the data; stages decide by it as they
run, and a graph that needs no more rounds passes the rest untouched. Nothing is declared: sizes, structure and control
flow may differ each time. Run it as it is (ranks are threads), or with
`torchrun --nproc-per-node 4 examples/changing_graph.py` (ranks are processes).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import penstock

WIDTH, GRAPHS, STEPS = 24, 6, 40
Graph = dict[str, Any]


class Encode(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, WIDTH)

    def forward(self, graph: Graph) -> Graph:
        return {**graph, "nodes": self.layer(graph["nodes"])}


class Round(nn.Module):
    """Every node hears its neighbours once; in a graph of kind "weighted", the more alike they are."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.own, self.heard = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.exits = 0

    def forward(self, graph: Graph) -> Graph:
        if graph["rounds"] <= self.number:
            self.exits += 1
            return graph
        nodes, (source, target) = graph["nodes"], graph["edges"]
        weights = torch.ones(len(source), 1)
        if graph["kind"] == "weighted":
            weights = torch.sigmoid((nodes[source] * nodes[target]).sum(1, keepdim=True) / WIDTH)
        total = torch.zeros(len(nodes), 1).index_add(0, target, weights)
        heard = torch.zeros_like(nodes).index_add(0, target, weights * nodes[source]) / total.clamp(min=1e-6)
        return {**graph, "nodes": nodes + torch.tanh(self.own(nodes) + self.heard(heard))}


class Decode(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 1)

    def forward(self, graph: Graph) -> Tensor:
        return self.layer(graph["nodes"]).squeeze(1)


def stages() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(Encode(), Round(0)), Round(1), Round(2), Decode()]


def draw(step: int) -> tuple[list[Graph], list[Tensor]]:
    """Random graphs; what to find is the mean over the nodes that are `rounds` edges away."""
    numbers = torch.Generator().manual_seed(step)

    def whole(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=numbers))

    graphs, targets = [], []
    for _ in range(GRAPHS):
        count, rounds = whole(5, 40), whole(1, 4)
        edges = torch.randint(0, count, (2, 3 * count), generator=numbers)
        edges = torch.cat([edges, edges.flip(0), torch.arange(count).repeat(2, 1)], dim=1)
        nodes = torch.randn(count, 2, generator=numbers)
        heard = nodes[:, 0]
        for _ in range(rounds):
            total = torch.zeros(count).index_add(0, edges[1], torch.ones(edges.shape[1]))
            heard = torch.zeros(count).index_add(0, edges[1], heard[edges[0]]) / total
        kind = "weighted" if whole(0, 2) else "plain"
        graphs.append({"nodes": nodes, "edges": edges, "rounds": rounds, "kind": kind})
        targets.append(heard)
    return graphs, targets


def plain_step(model: nn.Module, graphs: list[Graph], targets: list[Tensor]) -> None:
    """Gradient accumulation over the same graphs, each counting by its nodes."""
    nodes = sum(map(len, targets))
    for graph, target in zip(graphs, targets, strict=True):
        (F.mse_loss(model(graph), target) * (len(target) / nodes)).backward()


def main() -> None:
    modules, plain = stages(), nn.Sequential(*stages())
    pipe = penstock.Pipeline(
        modules, microbatches=GRAPHS, schedule="1f1b", loss_fn=F.mse_loss, loss_options=penstock.LossOptions(weight=len)
    )
    optimizer = torch.optim.Adam(pipe.parameters(), lr=1e-2)
    losses = []
    for step in range(STEPS):
        graphs, targets = draw(step)
        result = pipe.step(penstock.Microbatches(graphs), target=penstock.Microbatches(targets))
        if step == 0:
            plain_step(plain, graphs, targets)
            wanted = dict(plain.named_parameters())
            for name, parameter in pipe.named_parameters():
                assert torch.equal(parameter.grad, wanted[name].grad), name
            print("gradients equal those of the plain model, bit for bit")
        optimizer.step()
        optimizer.zero_grad()
        losses.append(result.loss.item())
        if step % 10 == 0 or step == STEPS - 1:
            sizes = ", ".join(f"{len(graph['nodes'])} nodes x {graph['rounds']}" for graph in graphs)
            print(f"step {step:2}: loss {losses[-1]:.3f}  ({sizes})")
    assert sum(losses[-5:]) < sum(losses[:5]) / 2, losses
    for module in modules:
        if isinstance(module, Round):
            print(f"{module.exits} of {STEPS * GRAPHS} graphs needed no round {module.number}")
            assert 0 < module.exits < STEPS * GRAPHS
    pipe.close()


if __name__ == "__main__":
    main()

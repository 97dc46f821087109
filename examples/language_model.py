"""A language model through GPipe: embedding, transformer blocks, head, cross-entropy, and an ordinary training loop.

It learns, letter by letter, a few lines about water. All in one process; the four stages are threads.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import penstock

TEXT = (
    "water runs down the pipe and turns the wheel. the wheel turns the shaft and the shaft turns the mill. "
    "when the gate is shut the water waits, and when the gate is open the water runs again. "
)
LETTERS = sorted(set(TEXT))
LENGTH, WIDTH, BLOCKS, CHUNKS, ROWS, STEPS = 32, 64, 4, 4, 16, 60


class Embed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.letter, self.place = nn.Embedding(len(LETTERS), WIDTH), nn.Embedding(LENGTH, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        return self.letter(ids) + self.place(torch.arange(ids.shape[1], device=ids.device))


class Block(nn.Module):
    """Attention to what came before, then two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.project, self.join = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.05))

    def forward(self, x: Tensor) -> Tensor:
        heads = (part.unflatten(2, (4, -1)).transpose(1, 2) for part in self.project(self.first(x)).chunk(3, dim=2))
        seen = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.join(seen.transpose(1, 2).flatten(2))
        return x + self.mlp(self.second(x))


def network() -> nn.Sequential:
    torch.manual_seed(0)
    head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, len(LETTERS)))
    return nn.Sequential(Embed(), *[Block() for _ in range(BLOCKS)], head)


def batch() -> tuple[Tensor, Tensor]:
    ids = torch.tensor([LETTERS.index(letter) for letter in TEXT])
    starts = torch.randint(0, len(TEXT) - LENGTH - 1, (ROWS,)).tolist()
    return tuple(torch.stack([ids[at + shift : at + shift + LENGTH] for at in starts]) for shift in (0, 1))


def loss_of(logits: Tensor, wanted: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), wanted.flatten())


def same_as_plain() -> None:
    """Without dropout, the gradients are those of the plain model on the same microbatches, bit for bit."""
    plain, model = network().eval(), penstock.GPipe(network(), balance=4, chunks=CHUNKS).eval()
    ids, wanted = batch()
    loss_of(torch.cat([plain(piece) for piece in ids.chunk(CHUNKS)]), wanted).backward()
    loss_of(model(ids), wanted).backward()
    for (name, have), want in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(have.grad, want.grad), name
    print(f"{sum(1 for _ in model.parameters())} gradients equal those of the plain model, bit for bit")


def go_on(model: nn.Module, text: str, letters: int) -> str:
    """What the model would write next."""
    model.eval()
    with torch.no_grad():
        for _ in range(letters):
            ids = torch.tensor([[LETTERS.index(letter) for letter in text[-LENGTH:]]])
            text += LETTERS[int(model(ids)[0, -1].argmax())]
    model.train()
    return text


def main() -> None:
    same_as_plain()
    model = penstock.GPipe(network(), balance=[2, 1, 1, 2], chunks=CHUNKS, checkpoint="except_last")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(STEPS):
        ids, wanted = batch()
        loss = loss_of(model(ids), wanted)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        if step % 10 == 0 or step == STEPS - 1:
            print(f"step {step:2}: loss {losses[-1]:.3f}")
    assert losses[-1] < losses[0] / 3, losses
    print(go_on(model, "water runs", 40))


if __name__ == "__main__":
    main()

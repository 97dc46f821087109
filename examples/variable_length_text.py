"""Text of very different lengths: padded, masked, split by tokens, and equal to the model without a pipeline.

Short made-up reviews are to be told good from bad by which kind of word is more frequent; "not" turns the next word
around. Most have a few words, some have a hundred. Run it as it is (ranks are threads), or with
`torchrun --nproc-per-node 4 examples/variable_length_text.py` (ranks are processes).
"""

from __future__ import annotations

import random

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import penstock

GOOD, BAD = ["good", "great", "fine", "lovely"], ["bad", "poor", "awful", "dull"]
OTHER = ["the", "a", "film", "plot", "was", "and", "its", "cast", "very"]
WORDS = ["<pad>", "not", *GOOD, *BAD, *OTHER]
IDS = {word: number for number, word in enumerate(WORDS)}
WIDTH, ROWS, MAX_TOKENS = 32, 32, 256


def review(chance: random.Random) -> tuple[list[str], int]:
    """Words, and 1 if they are good on the whole."""
    while True:
        words, score = [], 0
        for _ in range(chance.choice([2, 3, 4, 5, 6, 8, 90])):
            sign = 1
            if chance.random() < 0.2:
                words.append("not")
                sign = -1
            kind = chance.choice([GOOD, BAD, OTHER, OTHER])
            words.append(chance.choice(kind))
            score += sign * (1 if kind is GOOD else -1 if kind is BAD else 0)
        if score:
            return words, int(score > 0)


def batch(step: int) -> tuple[Tensor, Tensor, Tensor]:
    """Padded ids, lengths, labels."""
    chance = random.Random(step)
    texts, labels = zip(*(review(chance) for _ in range(ROWS)), strict=True)
    lengths = torch.tensor([len(text) for text in texts])
    ids = torch.zeros(ROWS, int(lengths.max()), dtype=torch.int64)
    for row, text in enumerate(texts):
        ids[row, : len(text)] = torch.tensor([IDS[word] for word in text])
    return ids, lengths, torch.tensor(labels)


class Embed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.before = nn.Embedding(len(WORDS), WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        words = self.words(ids)
        return words + F.pad(self.before(words)[:, :-1], (0, 0, 1, 0))  # each word sees the one before it


class Block(nn.Module):
    """Attention over the valid words of each row."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        valid = torch.arange(x.shape[1]) < lengths[:, None]
        query, key, value = self.mix(self.norm(x)).chunk(3, -1)
        mask = valid[:, None, :].expand(-1, x.shape[1], -1)
        return x + self.out(F.gelu(F.scaled_dot_product_attention(query, key, value, mask)))


class Head(nn.Module):
    """The mean of the valid words."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        valid = (torch.arange(x.shape[1]) < lengths[:, None]).unsqueeze(-1)
        return self.linear((x * valid).sum(1) / lengths[:, None])


class Classifier(nn.Module):
    """The same without a pipeline."""

    def __init__(self, stages: list[nn.Module]) -> None:
        super().__init__()
        self.stages = nn.ModuleList(stages)

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        x = self.stages[0](ids)
        for stage in self.stages[1:]:
            x = stage(x, lengths)
        return x


def stages() -> list[nn.Module]:
    torch.manual_seed(0)
    return [stage.double() for stage in (Embed(), Block(), Block(), Head())]


def train_plain(steps: int) -> tuple[list[float], dict[str, Tensor]]:
    model = Classifier(stages())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(steps):
        ids, lengths, labels = batch(step)
        loss = F.cross_entropy(model(ids, lengths), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name.removeprefix("stages."): value for name, value in model.state_dict().items()}


def main() -> None:
    torch.set_num_threads(1)
    compared, steps = 10, 120
    wanted, state = train_plain(compared)
    with penstock.Pipeline(
        stages(),
        loss_fn=F.cross_entropy,
        schedule="1f1b",
        batch_options=penstock.BatchOptions(split=penstock.by_tokens(MAX_TOKENS)),
    ) as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=3e-3)
        losses = []
        for step in range(steps):
            ids, lengths, labels = batch(step)
            losses.append(float(pipe.step(ids, lengths=lengths, target=labels).loss))
            optimizer.step()
            optimizer.zero_grad()
            if step == 0:
                padded, valid = ids.numel(), int(lengths.sum())
                print(f"a batch of {valid} words is {padded} with padding; {pipe.microbatches} microbatches of at most")
                print(f"{MAX_TOKENS} tokens instead of {padded // pipe.microbatches} each")
            if step == compared - 1:
                apart = max(float((value - state[name]).abs().max()) for name, value in pipe.state_dict().items())
                losses_apart = max(abs(one - other) for one, other in zip(losses, wanted, strict=True))
                print(f"after {compared} steps: losses differ by {losses_apart:.1e}, weights by {apart:.1e}")
                assert losses_apart < 1e-9
                assert apart < 1e-9
        ids, lengths, labels = batch(10**6)
        output = pipe.predict(ids, lengths=lengths)
        if output is not None:
            right = (output.argmax(1) == labels).double().mean().item()
            print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, {right:.0%} of unseen reviews right")
            assert right > 0.8


if __name__ == "__main__":
    main()

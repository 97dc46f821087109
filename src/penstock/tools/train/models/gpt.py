"""The built-in model: a GPT over bytes or a tokenizer's tokens, as an `nn.Sequential` that is cut by position.

Small and plain on purpose: it is what a newcomer trains first, and what they read to see that nothing in a
model has to know about the pipeline. Without a tokenizer, 256 bytes are its vocabulary.

Packed rows come as (rows, 2, tokens): tokens and their positions, which begin again with each document of a row. The
positions then travel with what passes from block to block, and attention stays within a document.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from penstock.tools.train.config.settings import GPTOptions

Passing = Tensor | tuple[Tensor, Tensor]  # what goes from block to block; in packed rows with the positions


class Embed(nn.Module):
    """Tokens and their places as vectors."""

    def __init__(self, vocabulary: int, context: int, width: int, dropout: float) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.place = nn.Embedding(context, width)
        self.drop = nn.Dropout(dropout)
        nn.init.normal_(self.token.weight, std=0.02)
        nn.init.normal_(self.place.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Passing:
        """Map (rows, tokens) to (rows, tokens, width)."""
        length = tokens.shape[-1]
        if length > self.place.num_embeddings:
            raise ValueError(f"a row has {length} tokens, the model takes {self.place.num_embeddings} at most")
        if tokens.dim() == 3:
            tokens, positions = tokens.unbind(1)
            return self.drop(self.token(tokens) + self.place(positions)), positions
        embedded: Tensor = self.drop(self.token(tokens) + self.place.weight[:length])
        return embedded


class Block(nn.Module):
    """Attention to what came before, then a small network, each added to what passes by."""

    def __init__(self, width: int, heads: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention = nn.LayerNorm(width)
        self.project = nn.Linear(width, 3 * width)
        self.join = nn.Linear(width, width)
        self.before_network = nn.LayerNorm(width)
        self.widen = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)
        self.drop = nn.Dropout(dropout)
        for linear in (self.project, self.join, self.widen, self.narrow):
            nn.init.normal_(linear.weight, std=0.02)
            nn.init.zeros_(linear.bias)
        for last in (self.join, self.narrow):  # Many blocks must not add up to more.
            nn.init.normal_(last.weight, std=0.02 / (2 * layers) ** 0.5)

    def forward(self, passing: Passing) -> Passing:
        """Map (rows, tokens, width) to the same."""
        x, positions = passing if isinstance(passing, tuple) else (passing, None)
        x = x + self.drop(self.join(self._attend(self.before_attention(x), positions)))
        hidden = F.gelu(self.widen(self.before_network(x)), approximate="tanh")
        out: Tensor = x + self.drop(self.narrow(hidden))
        return out if positions is None else (out, positions)

    def _attend(self, x: Tensor, positions: Tensor | None) -> Tensor:
        rows, length, width = x.shape
        # head by head, so that a part of the projection's outputs is some whole heads (tensor_plan="gpt")
        parts = self.project(x).view(rows, length, -1, 3, width // self.heads).permute(3, 0, 2, 1, 4)
        query, key, value = parts.unbind(0)
        mask = None if positions is None else within_documents(positions)
        found = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=mask is None)
        return found.transpose(1, 2).flatten(2)


def within_documents(positions: Tensor) -> Tensor:
    """Compute which token may look at which, (rows, 1, tokens, tokens): itself and what came before in its document."""
    document = (positions == 0).cumsum(1)
    length = positions.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=positions.device).tril()
    return ((document[:, :, None] == document[:, None, :]) & causal).unsqueeze(1)


class Head(nn.Module):
    """Vectors to a score for each token that may come next."""

    def __init__(self, width: int, vocabulary: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.scores = nn.Linear(width, vocabulary, bias=False)
        nn.init.normal_(self.scores.weight, std=0.02)

    def forward(self, passing: Passing) -> Tensor:
        """Map (rows, tokens, width) to (rows, tokens, vocabulary)."""
        x = passing[0] if isinstance(passing, tuple) else passing
        scores: Tensor = self.scores(self.norm(x))
        return scores


def build_gpt(options: GPTOptions, sequence: int) -> nn.Sequential:
    """Build the model, with weights from torch's generator."""
    context = options.context or sequence
    parts: OrderedDict[str, nn.Module] = OrderedDict()
    parts["embed"] = Embed(options.vocabulary, context, options.width, options.dropout)
    for number in range(options.layers):
        parts[f"block{number}"] = Block(options.width, options.heads, options.layers, options.dropout)
    parts["head"] = Head(options.width, options.vocabulary)
    return nn.Sequential(parts)

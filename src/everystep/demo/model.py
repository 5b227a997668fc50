"""A small GPT in plain torch; its parameters bear GPT-2's Hugging Face names and shapes, so that its checkpoints load there as they are."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

from everystep.demo.sizes import VOCABULARY, Size

STATE_SEED = 1337


class Conv1D(nn.Module):
    """A linear layer with its weight as GPT-2 keeps it: ``(inputs, outputs)``, transposed against ``nn.Linear``."""

    def __init__(self, inputs: int, outputs: int, *, std: float = 0.02) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs) * std)
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``(..., inputs)`` to ``(..., outputs)``."""
        return torch.addmm(self.bias, x.flatten(0, -2), self.weight).view(*x.shape[:-1], -1)


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.c_attn = Conv1D(size.width, 3 * size.width)
        self.c_proj = Conv1D(size.width, size.width, std=0.02 / math.sqrt(2 * size.layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``(batch, length, width)`` to the same."""
        batch, length, width = x.shape
        query, key, value = self.c_attn(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.c_proj(mixed.transpose(1, 2).reshape(batch, length, width))  # type: ignore[no-any-return]


class MLP(nn.Module):
    """The block's feed-forward half."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.c_fc = Conv1D(size.width, 4 * size.width)
        self.c_proj = Conv1D(4 * size.width, size.width, std=0.02 / math.sqrt(2 * size.layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``(batch, length, width)`` to the same."""
        return self.c_proj(functional.gelu(self.c_fc(x), approximate="tanh"))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Attention and feed-forward, each behind a layer norm and added to its input."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.dropout = size.dropout
        self.ln_1 = nn.LayerNorm(size.width)
        self.attn = Attention(size)
        self.ln_2 = nn.LayerNorm(size.width)
        self.mlp = MLP(size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``(batch, length, width)`` to the same."""
        x = x + functional.dropout(self.attn(self.ln_1(x)), self.dropout, self.training)
        return x + functional.dropout(self.mlp(self.ln_2(x)), self.dropout, self.training)


class Transformer(nn.Module):
    """Embeddings, blocks and the last layer norm."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.dropout = size.dropout
        self.wte = nn.Embedding(VOCABULARY, size.width)
        self.wpe = nn.Embedding(size.context, size.width)
        self.h = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.ln_f = nn.LayerNorm(size.width)
        nn.init.normal_(self.wte.weight, std=0.02)
        nn.init.normal_(self.wpe.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """``(batch, length)`` of token numbers to ``(batch, length, width)``."""
        x = self.wte(tokens) + self.wpe.weight[: tokens.shape[1]]
        x = functional.dropout(x, self.dropout, self.training)
        for block in self.h:
            x = block(x)
        return self.ln_f(x)  # type: ignore[no-any-return]


class GPT(nn.Module):
    """GPT-2 with a head that is tied to the token embedding."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.context = size.context
        self.transformer = Transformer(size)
        self.lm_head = nn.Linear(size.width, VOCABULARY, bias=False)
        self.lm_head.weight = self.transformer.wte.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits ``(batch, length, vocabulary)`` for ``tokens`` ``(batch, length)``."""
        return self.lm_head(self.transformer(tokens))  # type: ignore[no-any-return]

    def loss(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy in nats a byte."""
        return functional.cross_entropy(self(inputs).flatten(0, 1), targets.flatten())

    @torch.no_grad()
    def sample(self, prompt: bytes, *, count: int, seed: int, temperature: float = 0.7, top_k: int = 20) -> bytes:
        """``prompt`` and ``count`` more bytes, drawn from the model."""
        self.eval()
        generator = torch.Generator().manual_seed(seed)
        tokens = list(prompt)
        for _ in range(count):
            logits = self(torch.tensor([tokens[-self.context :]]))[0, -1] / temperature
            best, where = logits.topk(top_k)
            tokens.append(int(where[torch.multinomial(best.softmax(0), 1, generator=generator)]))
        return bytes(tokens)


def build(size: Size, *, steps: int) -> tuple[GPT, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """A fresh model with its optimizer and schedule, the same ones every time."""
    torch.manual_seed(STATE_SEED)
    model = GPT(size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, betas=(0.9, 0.95), weight_decay=0.05)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, _schedule(steps))
    return model, optimizer, scheduler


def _schedule(steps: int) -> Callable[[int], float]:
    warm = max(1, steps // 10)

    def factor(step: int) -> float:
        return min(1.0, (step + 1) / warm) * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * min(1.0, step / steps))))

    return factor

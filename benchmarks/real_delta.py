"""A real delta to code: a small byte-level transformer, trained on the sources of Python's standard library."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, LAYERS, HEADS, CONTEXT, BATCH = 128, 4, 4, 128, 8


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv, self.project = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        batch, length, _ = x_BTD.shape
        q, k, v = self.qkv(self.norm1(x_BTD)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BTD = x_BTD + self.project(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        return x_BTD + self.down(F.silu(self.up(self.norm2(x_BTD))))


class ByteModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x_BTD = self.embed(tokens_BT) + self.position.weight[: tokens_BT.shape[1]]
        for layer in self.layers:
            x_BTD = layer(x_BTD)
        return self.head(self.norm(x_BTD))


def text(limit_bytes: int = 4_000_000) -> Tensor:
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    joined = b"".join(path.read_bytes() for path in files)[:limit_bytes]
    return torch.frombuffer(bytearray(joined), dtype=torch.uint8).long()


def train(warmup_steps: int = 100, local_steps: int = 32, seed: int = 0) -> dict[str, Tensor]:
    """anchor − weights of each parameter after `local_steps` of AdamW that follow `warmup_steps`.

    On one thread: operations this small do not gain from more, and suffer where cores are shared.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _train(warmup_steps, local_steps, seed)
    finally:
        torch.set_num_threads(threads)


def _train(warmup_steps: int, local_steps: int, seed: int) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    model, data = ByteModel(), text()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    anchor: dict[str, Tensor] = {}
    for step in range(warmup_steps + local_steps):
        if step == warmup_steps:
            anchor = {name: p.detach().clone() for name, p in model.named_parameters()}
        starts = torch.randint(len(data) - CONTEXT - 1, (BATCH,))
        window = torch.stack([data[s : s + CONTEXT + 1] for s in starts])
        loss = F.cross_entropy(model(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return {name: anchor[name] - p.detach() for name, p in model.named_parameters()}


def load(path: Path) -> dict[str, Tensor]:
    """A delta saved with torch.save: one tensor, or a dict of tensors by parameter name."""
    saved = torch.load(path, weights_only=True)
    return {"delta": saved} if isinstance(saved, Tensor) else saved

"""A small byte-level transformer on thresher.nn.MsaAttention."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thresher.nn import MsaAttention, RMSNorm


@dataclass(frozen=True)
class ModelConfig:
    layers: int = 3
    width: int = 128
    heads: int = 8
    kv_heads: int = 2
    proxy_heads: int = 2
    proxy_kv_heads: int = 1
    head_dim: int = 32
    top_k_blocks: int = 8
    block_size: int = 64

    def dict(self) -> dict:
        return asdict(self)


class Layer(nn.Module):
    def __init__(self, c: ModelConfig):
        super().__init__()
        self.attention_norm, self.mlp_norm = RMSNorm(c.width), RMSNorm(c.width)
        self.attention = MsaAttention(
            c.width,
            c.heads,
            c.kv_heads,
            c.head_dim,
            c.proxy_heads,
            c.proxy_kv_heads,
            top_k_blocks=c.top_k_blocks,
            block_size=c.block_size,
            qk_norm=True,
        )
        self.up = nn.Linear(c.width, 3 * c.width, bias=False)
        self.down = nn.Linear(3 * c.width, c.width, bias=False)

    def forward(self, x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cu_seqlens)
        return x + self.down(F.relu(self.up(self.mlp_norm(x))).square())


class ByteLM(nn.Module):
    """tokens int64 [T] and cu_seqlens -> logits [T, 256]."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(256, config.width)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.width)
        self.head = nn.Linear(config.width, 256, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.5)
        nn.init.zeros_(self.head.weight)
        for layer in self.layers:  # every layer starts as the identity
            nn.init.zeros_(layer.attention.o_proj.weight)
            nn.init.zeros_(layer.down.weight)

    def forward(self, tokens: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, cu_seqlens)
        return self.head(self.norm(x))

    def loss(self, batch) -> Tensor:
        """Mean cross entropy in nats a byte."""
        logits = self(batch.tokens, batch.cu_seqlens)
        return F.cross_entropy(logits.float(), batch.targets, ignore_index=-100)

    @torch.no_grad()
    def generate(self, prompt: bytes, count: int, temperature: float, seed: int) -> bytes:
        """`count` bytes more; the whole text is read again for every byte (no cache)."""
        device = self.embedding.weight.device
        generator = torch.Generator().manual_seed(seed)
        text = [0, *prompt]
        for _ in range(count):
            logits = self(torch.tensor(text, device=device))[-1].float().cpu()
            p = (logits / temperature).softmax(0)
            text.append(int(torch.multinomial(p, 1, generator=generator)))
        return bytes(text[1:])

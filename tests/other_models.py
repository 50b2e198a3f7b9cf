"""Small copies of how other code bases write attention, and their weights by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS, LAYERS, WORDS = 16, 4, 3, 20


def spread(module: nn.Module) -> nn.Module:
    """Weights wide enough for maps that are far from uniform, which do not depend on the global generator."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.dim() > 1 or name.endswith("bias"):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)
    return module.eval()


def heads_of(x: Tensor, heads: int = HEADS) -> Tensor:
    return x.view(*x.shape[:2], heads, -1).transpose(1, 2)


class NanoAttention(nn.Module):
    """nanoGPT: fused attention."""

    def __init__(self, causal: bool = True) -> None:
        super().__init__()
        self.c_attn, self.c_proj, self.causal = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), causal

    def projected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.c_attn(x).split(WIDTH, dim=2)
        return heads_of(q), heads_of(k), heads_of(v)

    def forward(self, x: Tensor, mask: Any = None) -> Tensor:
        q, k, v = self.projected(x)
        y = self.attend(q, k, v, mask)
        return self.c_proj(y.transpose(1, 2).contiguous().view(x.shape))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
        causal = self.causal and mask is None
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)


class MinAttention(NanoAttention):
    """minGPT: a softmax of masked scores."""

    def __init__(self, causal: bool = True) -> None:
        super().__init__(causal)
        self.attn_dropout = nn.Dropout(0.1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, _mask: Any) -> Tensor:
        scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        if self.causal:
            seen = torch.ones(q.shape[2], q.shape[2]).tril()[None, None]
            scores = scores.masked_fill(seen == 0, float("-inf"))
        return self.attn_dropout(F.softmax(scores, dim=-1)) @ v


class DinoAttention(nn.Module):
    """DINO: heads and projections in one axis, no mask."""

    def __init__(self, causal: bool = False) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.attn_drop, self.causal = nn.Dropout(0.0), causal

    def projected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        batch, tokens, width = x.shape
        qkv = self.qkv(x).reshape(batch, tokens, 3, HEADS, width // HEADS).permute(2, 0, 3, 1, 4)
        return qkv[0], qkv[1], qkv[2]

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.projected(x)
        attn = (q @ k.transpose(-2, -1)) * (WIDTH // HEADS) ** -0.5
        attn = self.attn_drop(attn.softmax(dim=-1))
        return self.proj((attn @ v).transpose(1, 2).reshape(x.shape))


class TuneAttention(nn.Module):
    """torchtune: grouped-query heads, keys and values of a second argument, a mask of positions."""

    def __init__(self, causal: bool = True) -> None:
        super().__init__()
        self.q_proj, self.output_proj = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.k_proj, self.v_proj, self.causal = nn.Linear(WIDTH, 8), nn.Linear(WIDTH, 8), causal

    def projected(self, x: Tensor, y: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        y = x if y is None else y
        q, k, v = heads_of(self.q_proj(x)), heads_of(self.k_proj(y), 2), heads_of(self.v_proj(y), 2)
        return q, k.repeat_interleave(2, dim=1), v.repeat_interleave(2, dim=1)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        y = x if y is None else y
        q, k, v = heads_of(self.q_proj(x)), heads_of(self.k_proj(y), 2), heads_of(self.v_proj(y), 2)
        mask = torch.ones(x.shape[1], y.shape[1], dtype=torch.bool).tril() if self.causal else None
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.4, enable_gqa=True)
        return self.output_proj(mixed.transpose(1, 2).flatten(2))


class EinsumAttention(NanoAttention):
    """x-transformers and others: products as equations."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, _mask: Any) -> Tensor:
        scores = torch.einsum("b h i d, b h j d -> b h i j", q, k) * q.shape[-1] ** -0.5
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, -torch.finfo(scores.dtype).max)
        return torch.einsum("bhij,bhjd->bhid", F.softmax(scores, dim=-1, dtype=torch.float32), v)


class JoinedAttention(NanoAttention):
    """ESM, BLOOM: batch and heads in one axis, products by bmm."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, _mask: Any) -> Tensor:
        batch, heads, tokens, dim = q.shape
        q, k, v = (x.reshape(batch * heads, tokens, dim) for x in (q, k, v))
        scores = torch.bmm(q, k.transpose(1, 2)) * dim**-0.5
        scores = scores + torch.full((tokens, tokens), -torch.inf).triu(1)
        return torch.bmm(scores.softmax(-1), v).view(batch, heads, tokens, dim)


class ColumnAttention(NanoAttention):
    """Diffusion models: keys before queries in the last product."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, _mask: Any) -> Tensor:
        scores = (q @ k.mT) * q.shape[-1] ** -0.5
        scores = scores + torch.full(scores.shape[-2:], -torch.inf).triu(1)
        return (v.mT @ scores.softmax(dim=-1).transpose(-2, -1)).mT


class Block(nn.Module):
    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = nn.LayerNorm(WIDTH), attention, nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 24), nn.GELU(), nn.Linear(24, WIDTH))

    def forward(self, x: Tensor, *others: Any) -> Tensor:
        x = x + self.attn(self.ln_1(x), *others)
        return x + self.mlp(self.ln_2(x))


class Text(nn.Module):
    """A language model of blocks, whose forward takes `idx`."""

    def __init__(self, attention: Callable[[], nn.Module], layers: int = LAYERS) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(WORDS, WIDTH), nn.Embedding(32, WIDTH)
        self.h = nn.ModuleList([Block(attention()) for _ in range(layers)])
        self.head = nn.Linear(WIDTH, WORDS)
        spread(self)

    def embedded(self, idx: Tensor) -> Tensor:
        return self.wte(idx) + self.wpe(torch.arange(idx.shape[1]))

    def forward(self, idx: Tensor, mask: Any = None) -> Tensor:
        x = self.embedded(idx)
        for block in self.h:
            x = block(x) if mask is None else block(x, mask)
        return self.head(x)


class Picture(nn.Module):
    """A network of patches, as DINO's and timm's are."""

    def __init__(self, attention: Callable[[], nn.Module] = DinoAttention) -> None:
        super().__init__()
        self.patch_embed, self.cls_token = nn.Conv2d(3, WIDTH, 4, 4), nn.Parameter(torch.randn(1, 1, WIDTH))
        self.blocks = nn.Sequential(*(Block(attention()) for _ in range(LAYERS)))
        self.head = nn.Linear(WIDTH, 5)
        spread(self)

    def embedded(self, x: Tensor) -> Tensor:
        x = self.patch_embed(x).flatten(2).transpose(1, 2)
        return torch.cat([self.cls_token.expand(len(x), -1, -1), x], dim=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.embedded(x))[:, 0])


class Decoding(nn.Module):
    """A layer of an encoder–decoder's decoder."""

    def __init__(self, own: nn.Module, across: nn.Module) -> None:
        super().__init__()
        self.ln_1, self.own, self.ln_2, self.across = nn.LayerNorm(WIDTH), own, nn.LayerNorm(WIDTH), across

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        x = x + self.own(self.ln_1(x))
        return x + self.across(self.ln_2(x), memory)


class Pair(nn.Module):
    """An encoder–decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.encoder = nn.ModuleList([Block(NanoAttention(causal=False)) for _ in range(2)])
        self.decoder = nn.ModuleList(
            [Decoding(MinAttention(), TuneAttention(causal=False)) for _ in range(2)]
        )
        spread(self)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory, x = self.words(source), self.words(target)
        for block in self.encoder:
            memory = block(memory)
        for block in self.decoder:
            x = block(x, memory)
        return x


def weights_by_hand(
    attention: Any, x: Tensor, y: Tensor | None = None, scale: float = (WIDTH // HEADS) ** -0.5
) -> Tensor:
    """softmax(q·k · scale) of visible keys, (batch, head, query, key)."""
    q, k, _ = attention.projected(x) if y is None else attention.projected(x, y)
    scores = torch.einsum("bhid,bhjd->bhij", q, k) * scale
    if attention.causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -torch.inf)
    return scores.softmax(dim=-1)


@torch.no_grad()
def maps_by_hand(blocks: Any, x: Tensor, scale: float = (WIDTH // HEADS) ** -0.5) -> list[Tensor]:
    """Maps of blocks one after another, each from its own queries and keys."""
    maps = []
    for block in blocks:
        maps.append(weights_by_hand(block.attn, block.ln_1(x), scale=scale))
        x = block(x)
    return maps

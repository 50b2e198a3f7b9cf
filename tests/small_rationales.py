"""A small classifier of rationales, and one in which planted words decide."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from overt.models.rationale import RationaleClassifier
from small_text import small_bert


def small_rationale(folder: Path, window: int = 8, hidden: int = 6) -> Any:
    """A `RationaleClassifier` on a small BERT, in evaluation mode; the tokenizer is in the folder."""
    path = small_bert(folder, max_position_embeddings=32)
    torch.manual_seed(1)
    return RationaleClassifier.from_encoder(path, window=window, hidden=hidden, num_labels=2).eval()


class Planted(nn.Module):
    """Two words decide: the log-odds of class 1 are the sum of the words' weights."""

    def __init__(self, tokenizer: Any, weights: dict[str, float]) -> None:
        super().__init__()
        self.config = SimpleNamespace(num_labels=2, max_position_embeddings=64)
        self.embedding = nn.Embedding(len(tokenizer), 1)
        nn.init.zeros_(self.embedding.weight)
        with torch.no_grad():
            for word, weight in weights.items():
                self.embedding.weight[tokenizer.convert_tokens_to_ids(word)] = weight

    def forward(self, input_ids: Any, attention_mask: Any, token_type_ids: Any = None) -> Any:
        del token_type_ids
        total = (self.embedding(input_ids).squeeze(-1) * attention_mask).sum(dim=1)
        return SimpleNamespace(logits=torch.stack([torch.zeros_like(total), total], dim=1))

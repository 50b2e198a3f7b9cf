"""A small classifier of rationales, and one in which planted words decide."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from overt.models.rationale import RationaleClassifier
from small_text import small_bert


def small_rationale(folder: Path, window: int = 8, hidden: int = 6) -> Any:
    """A `RationaleClassifier` on a small BERT, in evaluation mode; the tokenizer is in the folder."""
    path = small_bert(folder, max_position_embeddings=32)
    torch.manual_seed(1)
    return RationaleClassifier.from_encoder(path, window=window, hidden=hidden, num_labels=2).eval()

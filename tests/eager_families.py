"""Which families' eager attention is more than a softmax of scaled products under a mask.

The eager function of every family of transformers is taken from its source, without importing the family, and
run on random numbers in a module that has no attributes but those of plain attention.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from torch import nn

MODELS = Path(transformers.__file__).parent / "models"


def own_eager() -> set[str]:
    """Names of the folders of those families."""
    return {path.parent.name for path in sorted(MODELS.glob("*/modeling_*.py")) if _differs(path)}


def _differs(path: Path) -> bool:
    text = path.read_text()
    if "def eager_attention_forward" not in text:
        return False
    found = re.findall(r"^def (?:eager_attention_forward|repeat_kv)\(.*?(?=^[^\s)#])", text, re.S | re.M)
    return not _is_plain("\n".join(found))


@cache
def _is_plain(source: str) -> bool:
    """Whether functions of this source attend as torch's attention does, with all heads and in groups."""
    scope: dict[str, Any] = {"torch": torch, "nn": nn, "F": nn.functional}
    exec("from __future__ import annotations\n" + source, scope)
    generator = torch.Generator().manual_seed(0)
    for groups in (1, 2):
        query = torch.randn(2, 4, 3, 8, generator=generator)
        key, value = (torch.randn(2, 4 // groups, 5, 8, generator=generator) for _ in range(2))
        mask = torch.zeros(2, 1, 3, 5)
        mask[1, :, :, 3:] = torch.finfo(torch.float32).min
        module = SimpleNamespace(num_key_value_groups=groups, training=False)
        try:
            given = scope["eager_attention_forward"](
                module, query, key, value, mask, scaling=0.3, dropout=0.0
            )[0]
        except Exception:  # it takes something that plain attention has not
            if groups == 1:
                return False
            continue  # a family without groups
        want = nn.functional.scaled_dot_product_attention(
            query, key, value, mask, scale=0.3, enable_gqa=groups > 1
        )
        if not torch.allclose(given, want.transpose(1, 2), atol=1e-5):
            return False
    return True

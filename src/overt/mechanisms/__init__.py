"""How attention maps are computed. Tensors only: no model, no tokenizer, no Hugging Face."""

from overt.mechanisms.attention_map import AttentionMap
from overt.mechanisms.site import Site

__all__ = ["AttentionMap", "Site"]

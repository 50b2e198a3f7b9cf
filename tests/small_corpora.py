"""Small models of text with their tokenizers, and texts for them."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from small_text import WORDS, small_bert

TEXTS = [
    "good film",
    "bad plot dull actor scene",
    "nice",
    "poor scene film plot actor film fine",
    "fine actor dull",
    "good good bad",
    "film plot scene actor nice dull poor bad good fine",
    "dull film",
]
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}


def small_classifier(folder: Path, seed: int = 0, **config: Any) -> str:
    """Store a small BERT with a classifier's head and its tokenizer; return the folder."""
    from transformers import BertConfig, BertForSequenceClassification

    small_bert(folder)
    torch.manual_seed(seed)
    labels = {"id2label": {0: "bad", 1: "good"}, "label2id": {"bad": 0, "good": 1}}
    sizes = {**SIZES, "max_position_embeddings": 12, **labels, **config}
    model = BertForSequenceClassification(BertConfig(vocab_size=len(WORDS) + 4, **sizes))
    with torch.no_grad():  # maps that differ from uniform ones
        for name, parameter in model.named_parameters():
            if name.endswith("weight") and parameter.dim() == 2:
                parameter.mul_(10)
    model.save_pretrained(folder)
    return str(folder)


def small_language_model(folder: Path) -> str:
    """Store a small GPT-2 and a tokenizer without special tokens; return the folder."""
    from tokenizers.processors import TemplateProcessing
    from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

    small_bert(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="$A", pair="$A $B")
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=len(WORDS) + 4, n_embd=16, n_layer=2, n_head=2, n_positions=12)
    GPT2LMHeadModel(config).save_pretrained(folder)
    return str(folder)


def small_causal_classifier(folder: Path, pad: int) -> str:
    """Store a small GPT-2 that classifies by the last token, which it finds by `pad`; return the folder."""
    from transformers import GPT2Config, GPT2ForSequenceClassification

    small_language_model(folder)
    torch.manual_seed(0)
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 12}
    special = {"pad_token_id": pad, "bos_token_id": 1, "eos_token_id": 1}
    model = GPT2ForSequenceClassification(GPT2Config(vocab_size=len(WORDS) + 4, **sizes, **special))
    with torch.no_grad():  # predictions that differ between tokens
        for parameter in model.parameters():
            parameter.mul_(6)
    model.save_pretrained(folder)
    return str(folder)


class DyingOnce:
    """In place of a job: the process that performs task 1 dies, the first time or always."""

    tracer = SimpleNamespace(device="cpu")

    def __init__(self, marker: Path, always: bool = False) -> None:
        self.marker, self.always = marker, always

    def perform(self, number: int, tell: Any) -> dict[str, Any]:
        del tell
        if number == 1 and (self.always or not self.marker.exists()):
            self.marker.write_text("")
            os._exit(1)
        return {"rows": number}

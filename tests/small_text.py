"""A small BERT and a small CoLA, for recipes of language understanding."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

WORDS = ["good", "bad", "fine", "poor", "plot", "actor", "film", "scene", "nice", "dull"]


def small_bert(folder: Path, words: Sequence[str] = WORDS, **config: Any) -> str:
    """Store a small BERT without a head and its tokenizer of whole words; return the folder."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from tokenizers.processors import TemplateProcessing
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    vocabulary = {word: number for number, word in enumerate([*special, *words])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()  # type: ignore[assignment]
    tokenizer.post_processor = TemplateProcessing(  # type: ignore[assignment]
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token"), special, strict=True))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    BertModel(BertConfig(vocab_size=len(vocabulary), **sizes, **config)).save_pretrained(folder)
    return str(folder)


def cola(folder: Path) -> Path:
    """A folder with CoLA in its original layout: the first word tells the class.

    A quarter of the development rows is from a source that has no training rows.
    """
    place = folder / "CoLA"
    place.mkdir(parents=True)
    for file, count in (("train.tsv", 80), ("dev.tsv", 20)):
        sources = ["new", "src", "src", "src"] if file == "dev.tsv" else ["src"]
        lines = [
            f"{sources[number % len(sources)]}\t{number % 2}\t\t{WORDS[number % 2]} {WORDS[4 + number % 6]}"
            for number in range(count)
        ]
        (place / file).write_text("\n".join(lines) + "\n")
    return folder

"""A small classifier in which known words decide, and texts for it."""

from __future__ import annotations

from pathlib import Path
from random import Random

import torch

from small_text import WORDS, small_bert

DECIDE = {"good": 1, "nice": 1, "bad": 0, "dull": 0}
OTHERS = [word for word in WORDS if word not in DECIDE]
NAMES = {"id2label": {0: "negative", 1: "positive"}, "label2id": {"negative": 0, "positive": 1}}


def texts_of(count: int, words: int = 6, seed: int = 0) -> tuple[list[str], list[int]]:
    """Texts in which one word decides, and their classes."""
    random = Random(seed)
    texts, labels = [], []
    for number in range(count):
        label = number % 2
        text = [random.choice(OTHERS) for _ in range(words)]
        text[random.randrange(words)] = random.choice([word for word in DECIDE if DECIDE[word] == label])
        texts.append(" ".join(text))
        labels.append(label)
    return texts, labels


def judged_classifier(folder: Path) -> str:
    """Store a small BERT whose answer the words of `DECIDE` make, with its tokenizer; return the folder.

    Attention is uniform, so that no map can tell which words these are; values carry what a word says to CLS.
    """
    from transformers import BertConfig, BertForSequenceClassification

    small_bert(folder)
    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 8}
    config = BertConfig(vocab_size=len(WORDS) + 4, max_position_embeddings=48, **sizes, **NAMES)
    model = BertForSequenceClassification(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "LayerNorm" not in name:
                parameter.zero_()
        words = model.bert.embeddings.word_embeddings.weight
        words[:, 2], words[:, 3] = 1.0, -1.0  # a word that says nothing
        # What follows is a LayerNorm, which only sees directions: without another summand, gradient × input
        # would be zero, and its sign that of rounding.
        places = model.bert.embeddings.position_embeddings.weight
        places[:, 2], places[:, 3] = 1.0, -1.0
        for word, label in DECIDE.items():
            sign = 1.0 if label else -1.0
            words[4 + WORDS.index(word)] = sign * torch.tensor([1.0, -1.0, 0, 0, 0, 0, 0, 0])
        for layer in model.bert.encoder.layer:
            layer.attention.self.value.weight.copy_(torch.eye(8))
            layer.attention.output.dense.weight.copy_(torch.eye(8))
        model.bert.pooler.dense.weight.copy_(torch.eye(8))
        model.classifier.weight[0, 0], model.classifier.weight[1, 0] = -4.0, 4.0
    model.save_pretrained(folder)
    return str(folder)

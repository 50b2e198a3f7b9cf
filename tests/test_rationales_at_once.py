"""What judging explanations does for many sets of words or texts at once is what it does one by one."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import nn
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from overt.judge.rationales.words import Text, WordClassifier
from small_rationales import small_rationale
from writing import byte_tokenizer

PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "un", "##for", "##gett", "##able", "film", "so", "good"]


def classifier_of(kind: str, folder: Path) -> WordClassifier:
    """A classifier that codes texts, with a tokenizer of some kind; it need not run."""
    if kind == "windowed":
        model = small_rationale(folder, window=8)
        return WordClassifier(model, AutoTokenizer.from_pretrained(folder))
    stub: Any = nn.Module()
    stub.config = SimpleNamespace(num_labels=2)
    if kind in ("bytes", "bytes after a sign"):
        tokenizer = byte_tokenizer(pad_token="<|end|>")
        if kind == "bytes after a sign":
            number = tokenizer.convert_tokens_to_ids("<|user|>")
            tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
                single="<|user|> $A", pair="<|user|> $A <|user|> $B", special_tokens=[("<|user|>", number)]
            )
        return WordClassifier(stub, tokenizer)
    inner = Tokenizer(models.WordPiece({piece: n for n, piece in enumerate(PIECES)}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    if kind == "pieces":
        inner.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token"), PIECES, strict=False))
    types = ["input_ids", "attention_mask", "token_type_ids"]
    made = PreTrainedTokenizerFast(tokenizer_object=inner, model_input_names=types, **names)
    return WordClassifier(stub, made)


def drawn_text(classifier: WordClassifier, asked: bool, random: np.random.Generator) -> Text:
    """A text of drawn pieces: some words have none, and some have others where no word is before them."""

    def draw(words: int) -> list[list[int]]:
        return [random.integers(4, 11, size).tolist() for size in random.integers(0, 4, words)]

    words = int(random.integers(1, 9))
    pieces = draw(words)
    starts = pieces
    if classifier._spaced:
        starts = [[*own, 4] if random.random() < 0.7 else own for own in pieces]
    return Text("0", ("word",) * words, pieces, starts, draw(3) if asked else [])


@pytest.mark.parametrize("asked", [False, True], ids=["alone", "with a query"])
@pytest.mark.parametrize("kind", ["pieces", "nothing around", "bytes", "bytes after a sign", "windowed"])
def test_sets_that_are_coded_at_once_are_those_that_are_coded_one_by_one(
    kind: str, asked: bool, tmp_path: Path
) -> None:
    classifier, random = classifier_of(kind, tmp_path), np.random.default_rng(0)
    assert classifier._spaced == kind.startswith("bytes")
    written = classifier.read("so unforgettable good film so good", "good film" if asked else "")
    texts = [written, *(drawn_text(classifier, asked, random) for _ in range(30))]
    for text in texts:
        kept = random.random((20, len(text.words))) < random.random((20, 1))
        kept[0], kept[1] = True, False
        found = classifier._rows(text, kept)
        expected = [classifier.code(text, row).arguments for row in kept]
        assert found.lengths.tolist() == [len(each["input_ids"]) for each in expected]
        assert set(found.values) == set(expected[0])
        for name, values in found.values.items():
            assert np.split(values, found.starts[1:])[3].tolist() == expected[3][name]
            assert values.tolist() == [number for each in expected for number in each[name]], name


def test_rows_of_a_batch_are_padded_on_the_right_in_the_order_that_is_asked_for(tmp_path: Path) -> None:
    classifier = classifier_of("pieces", tmp_path)
    classifier.model.weight = nn.Parameter()
    text = classifier.read("so unforgettable good film")
    kept = np.array([[1, 1, 1, 1], [0, 0, 0, 0], [1, 0, 0, 1]], dtype=bool)
    found = classifier._batch(classifier._rows(text, kept), np.array([1, 2]))
    assert {name: table.tolist() for name, table in found.items()} == {
        "input_ids": [[2, 3, 0, 0], [2, 9, 8, 3]],
        "attention_mask": [[1, 1, 0, 0], [1, 1, 1, 1]],
        "token_type_ids": [[0, 0, 0, 0], [0, 0, 0, 0]],
    }

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

from overt.judge.rationales import attainable, evaluate, methods, words
from overt.judge.rationales.evaluation import _Judge
from overt.judge.rationales.methods import Scorer
from overt.judge.rationales.words import Text, WordClassifier
from small_rationales import Planted, small_rationale
from small_text import WORDS, small_bert
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


# --- The best order ---


def one_beam(words: int, predict: Any, sign: float) -> tuple[float, list[int]]:
    """Mean probability and order that a beam of 5 finds, by plain loops: lowest for 1, highest for −1."""
    beam: list[tuple[float, list[int]]] = [(0.0, [])]
    for _ in range(words):
        ways: dict[frozenset[int], tuple[float, list[int]]] = {}
        for total, gone in beam:
            for word in sorted(set(range(words)) - set(gone)):
                key = frozenset([*gone, word])
                if key not in ways or sign * total < sign * ways[key][0]:
                    ways[key] = total, [*gone, word]
        sums = []
        for total, gone in ways.values():
            kept = np.ones((1, words), dtype=bool)
            kept[0, gone] = False
            sums.append((total + predict(kept)[0], gone))
        beam = sorted(sums, key=lambda way: sign * way[0])[:5]
    return beam[0][0] / words, beam[0][1]


@pytest.mark.parametrize("seed", range(3))
def test_both_beams_together_find_what_each_finds_alone(seed: int) -> None:
    weights = np.random.default_rng(seed).normal(size=(15, 15))

    def predict(kept: Any) -> Any:
        """Words count in pairs, so that which ways a beam drops matters."""
        return 1 / (1 + np.exp(-np.einsum("sw,sv,wv->s", kept * 1.0, kept * 1.0, weights)))

    found = attainable(15, predict)
    assert found is not None
    (lowest, order), (highest, _) = one_beam(15, predict, 1.0), one_beam(15, predict, -1.0)
    full = predict(np.ones((1, 15), dtype=bool))[0]
    assert list(found.order) == order
    assert (found.least, found.greatest) == pytest.approx((full - highest, full - lowest), abs=1e-12)


def planted_texts(folder: Path) -> tuple[WordClassifier, list[Text]]:
    """A classifier in which each word has its own weight; texts with beams, all orders, and neither."""
    small_bert(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    random = np.random.default_rng(0)
    weights = dict(zip(WORDS, random.normal(size=len(WORDS)).tolist(), strict=True))
    classifier = WordClassifier(Planted(tokenizer, weights).double().eval(), tokenizer)
    sizes = (14, 3, 31, 20, 13, 8, 16, 40, 1)
    texts = [classifier.read(random.choice(WORDS, size).tolist(), name=str(size)) for size in sizes]
    return classifier, texts


def test_orders_that_are_searched_for_together_are_those_found_text_by_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(methods, "TOGETHER", 4)  # two groups
    monkeypatch.setattr(words, "FEW", 2**16)  # so that a step is a pass
    classifier, texts = planted_texts(tmp_path)
    passes: list[int] = []
    classifier.model.register_forward_hook(lambda *_: passes.append(1))
    alone = [Scorer(classifier, 0.2).attainable(text) for text in texts]
    each = len(passes)
    told: list[tuple[int, int]] = []
    scorer = Scorer(classifier, 0.2)
    scorer.search(texts, lambda *own: told.append(own))
    assert len(passes) - each <= (2 + 20) + (2 + 16), "two groups, each with as many steps as its longest"
    assert each > 14 + 20 + 13 + 16, "alone, each text has its own"
    assert set(scorer.scales) == {text for text in texts if len(text.words) <= 30}
    for text, expected in zip(texts, alone, strict=True):
        found = scorer.attainable(text)
        if found is None or expected is None:
            assert found is expected is None
            continue
        assert (found.order, found.exact) == (expected.order, expected.exact)
        assert (found.least, found.greatest) == pytest.approx((expected.least, expected.greatest), abs=1e-12)
    assert told == sorted(told)
    assert len(set(told)) > 2, "it is told within a group, too"
    assert told[-1] == (7, 7), "long texts have no search"
    before = len(passes)
    scorer.search(texts)
    assert len(passes) == before, "what is known is not searched for again"


def test_the_best_order_alone_tells_how_far_its_search_is(tmp_path: Path) -> None:
    classifier, texts = planted_texts(tmp_path)
    told: list[tuple[str, int, int]] = []
    evaluate(
        classifier.model,
        classifier.tokenizer,
        [text.words for text in texts if len(text.words) < 31],
        methods=["oracle"],
        progress=lambda *own: told.append(own),
    )
    assert told[0] == ("best order, deleting words one by one", 1, 7)
    assert ("best order, deleting words one by one", 7, 7) in told


def test_sets_of_several_measures_are_read_once(tmp_path: Path) -> None:
    classifier, texts = planted_texts(tmp_path)
    rows: list[int] = []
    classifier.model.register_forward_hook(lambda _model, _given, output: rows.append(len(output.logits)))
    long = [text for text in texts if 12 < len(text.words) <= 30]  # of shorter ones, all sets are read
    scorer = Scorer(classifier, 0.2)
    judge = _Judge(scorer, long, None, None, (0.01, 0.05, 0.1, 0.2, 0.5), 6, "random", False)
    scorer.search(long)
    before = sum(rows)
    random = np.random.default_rng(0)
    values = [random.normal(size=len(text.words)) for text in long]
    judge.judged("random", list(range(len(long))), values, lambda *_: None)
    # None, and those that are left as one after the other is deleted, from either end; all words are known.
    assert sum(rows) - before == sum(2 * len(text.words) - 1 for text in long)


@pytest.mark.parametrize("room", [1000, 0], ids=["room", "no room"])
def test_sets_of_a_long_text_are_read_again_only_where_there_is_no_room_to_keep_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    monkeypatch.setattr(methods, "KEPT", room)
    classifier, texts = planted_texts(tmp_path)
    rows: list[int] = []
    classifier.model.register_forward_hook(lambda _model, _given, output: rows.append(len(output.logits)))
    long = [text for text in texts if len(text.words) > 12]
    random = np.random.default_rng(0)
    asked = [(text, random.random((9, len(text.words))) < 0.5) for text in long]
    alone = [classifier.probabilities(*each) for each in asked]
    scorer = Scorer(classifier, 0.2)
    for expected, found in zip(alone, scorer.ask(asked), strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-12)
    before = sum(rows)
    other = [(text, np.concatenate([~kept[:2], kept[::-1]])) for text, kept in asked]
    for (text, kept), found in zip(other, scorer.ask(other), strict=True):
        np.testing.assert_allclose(found, classifier.probabilities(text, kept), atol=1e-12)
    asked_again = 11 if room == 0 else 2
    assert sum(rows) - before == len(long) * (asked_again + 11), "11 to compare, alone"
    assert len(scorer._some) == (0 if room == 0 else len(long))
    twice = scorer.ask([asked[0], other[0], asked[0]])
    for found, (text, kept) in zip(twice, (asked[0], other[0], asked[0]), strict=True):
        np.testing.assert_allclose(found, classifier.probabilities(text, kept), atol=1e-12)


# --- LIME ---


def test_lime_reads_what_is_known_of_short_texts_but_is_timed_where_it_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(methods, "TIMED", 2)
    classifier, _ = planted_texts(tmp_path)
    random = np.random.default_rng(0)
    texts = [classifier.read(random.choice(WORDS, size).tolist()) for size in (6, 5, 8, 7, 14)]
    alone = [Scorer(classifier, 0.2, samples=80).scores("lime", text) for text in texts]
    scorer = Scorer(classifier, 0.2, samples=80)
    scorer.search(texts)
    passes: list[int] = []
    classifier.model.register_forward_hook(lambda *_: passes.append(1))
    counts = []
    for text, expected in zip(texts, alone, strict=True):
        before = len(passes)
        np.testing.assert_allclose(scorer.scores("lime", text), expected, atol=1e-9)
        counts.append(len(passes) - before)
    assert [count > 0 for count in counts] == [True, True, False, False, True]
    assert len(scorer.seconds["lime"]) == 2


def problem_of(kind: str, words: int, random: np.random.Generator) -> tuple[Any, Any, Any]:
    """Samples, labels and weights as LIME has them, of a classifier of which most words are a part."""
    samples = 200
    data = np.ones((samples, words))
    for row in range(1, samples):
        data[row, random.choice(words, random.integers(1, words + 1), replace=False)] = 0.0
    x = data @ random.normal(size=words) + (data @ random.normal(size=words)) * (
        data @ random.normal(size=words)
    )
    labels = 1 / (1 + np.exp(-x / 3))
    if kind == "one column twice":
        data[:, -1] = data[:, 0]
    if kind == "words that do the same":
        labels = 1 / (1 + np.exp(-data.sum(axis=1) / 3))
    if kind == "nearly sure":
        labels = (1 - 1e-5 * labels).astype(np.float32).astype(np.float64)
    if kind == "always sure":
        labels = np.ones(samples)
    distances = 100 * (1 - np.sqrt(data.mean(axis=1)))
    return data, labels, np.sqrt(np.exp(-(distances**2) / 25**2))


@pytest.mark.filterwarnings("ignore:.*ill-conditioned")  # its own regressions, of columns that are alike
@pytest.mark.parametrize(
    "kind", ["random", "one column twice", "words that do the same", "nearly sure", "always sure"]
)
@pytest.mark.parametrize(("words", "most"), [(1, 2), (2, 2), (6, 4), (4, 6), (15, 6)])
def test_lime_selects_the_words_that_its_package_selects(kind: str, words: int, most: int) -> None:
    lime_base = pytest.importorskip("lime.lime_base", reason="needs the extra rationales")
    theirs = lime_base.LimeBase(None, random_state=0).forward_selection
    asked = []

    def counted(*problem: Any) -> Any:
        asked.append(problem)
        return theirs(*problem)

    seeds = 4 if words < 15 else 1
    for seed in range(seeds):
        problem = *problem_of(kind, words, np.random.default_rng(seed)), most
        assert methods.selected(counted, *problem).tolist() == theirs(*problem).tolist()
    assert kind != "random" or not asked, "the package is asked for ties alone"
    assert kind != "always sure" or len(asked) == seeds

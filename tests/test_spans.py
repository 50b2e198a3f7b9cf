"""Windows of SQuAD's contexts, and answers out of logits: those that point at a span give its text."""

from __future__ import annotations

import itertools
import re
from random import Random
from typing import Any

import numpy as np
import pytest
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from overt.data.squad import Question
from overt.judge import understanding
from overt.recipes import spans
from overt.recipes.spans import Window, predict, windows

WORDS = [f"w{number}" for number in range(40)]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """Words and punctuation marks, with BERT's special tokens."""
    vocabulary = {word: code for code, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    inner.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )


def question(words: list[str], first: int, last: int, name: str = "q", text: str = "w1 w2") -> Question:
    """A question whose answer is words first … last, its words parted by various spaces."""
    gaps = Random(len(words)).choices([" ", "  ", "\n"], k=len(words))
    pieces = [word + gap for word, gap in zip(words, gaps, strict=True)]
    start = len("".join(pieces[:first]))
    answer = "".join(pieces[first : last + 1]).rstrip()
    return Question(name, "", "".join(pieces), text, (answer,), (start,))


def oracle(parts: list[Window], padding: int = 0) -> tuple[list[Any], list[Any]]:
    """Logits that are high at the labels of each window that has the answer, and flat in the others."""
    logits = []
    for place in ("start", "end"):
        rows = [np.zeros(len(window.inputs["input_ids"]) + padding) for window in parts]
        for row, window in zip(rows, parts, strict=True):
            row[getattr(window, place)] = 1.0 if window.start == window.null else 10.0
        logits.append(rows)
    return logits[0], logits[1]


@pytest.mark.parametrize(("longest", "stride"), [(10, 0), (10, 3), (13, 3), (64, 8)])
def test_right_logits_give_the_right_answer_wherever_it_is(longest: int, stride: int, tokenizer: Any) -> None:
    """Answers of one to four words at every place, so at all borders of windows, too."""
    words = [WORDS[(7 * place) % 40] for place in range(23)]
    asked = [
        question(words, first, first + more, f"{first}+{more}")
        for more in range(min(4, stride + 1))
        for first in range(len(words) - more)
    ]
    parts = windows(asked, tokenizer, longest, stride, longest_question=2)
    found = predict(asked, parts, *oracle(parts, padding=2))
    right = understanding.squad(
        {name: prediction.text() for name, prediction in found.items()},
        {one.id: one.answers for one in asked},
    )
    assert right["all"] == (1.0, 1.0, len(asked))
    for one in asked:
        best = found[one.id].answers[0]
        assert (best.start, best.text, best.score) == (one.starts[0], one.answers[0], 20.0)


@pytest.mark.parametrize(("longest", "stride"), [(10, 0), (10, 3), (12, 4)])
def test_windows_cover_the_context_and_share_a_stride(longest: int, stride: int, tokenizer: Any) -> None:
    one = question(WORDS[:23], 0, 0)
    parts = windows([one], tokenizer, longest, stride, longest_question=2)
    covered = [[one.context[start:end] for start, end in window.offsets] for window in parts]
    for before, after in itertools.pairwise(covered):
        assert before[len(before) - stride :] == after[:stride]
    joined = covered[0] + [word for part in covered[1:] for word in part[stride:]]
    assert joined == WORDS[:23]
    for window, texts in zip(parts, covered, strict=True):
        ids = window.inputs["input_ids"]
        assert len(ids) <= longest
        assert tokenizer.convert_ids_to_tokens(ids)[window.first : window.first + len(texts)] == texts
        assert tokenizer.convert_ids_to_tokens(ids[:4]) == ["[CLS]", "w1", "w2", "[SEP]"]
        assert window.inputs.keys() == {"input_ids", "token_type_ids", "attention_mask"}


def test_a_window_without_the_whole_answer_points_at_cls(tokenizer: Any) -> None:
    one = question(WORDS[:10], 4, 5)
    parts = windows([one], tokenizer, longest=10, stride=0, longest_question=2)
    assert [window.offsets.shape for window in parts] == [(5, 2), (5, 2)]  # w0 … w4, w5 … w9
    assert [(window.start, window.end) for window in parts] == [(0, 0), (0, 0)]
    parts = windows([one], tokenizer, longest=11, stride=0, longest_question=2)
    assert [(window.start, window.end) for window in parts] == [(8, 9), (0, 0)]
    never = one._replace(answers=(), starts=(), impossible=True)
    assert [(window.start, window.end) for window in windows([never], tokenizer, 11, 0, 2)] == [(0, 0)] * 2


def test_an_answer_within_a_token_is_labelled_with_the_whole_token(tokenizer: Any) -> None:
    one = Question("q", "", "w1 w23 w4", "w1", ("23 w",), (4,))
    [window] = windows([one], tokenizer)
    assert (window.start - window.first, window.end - window.first) == (1, 2)


def test_spaces_that_belong_to_tokens_do_not_belong_to_answers() -> None:
    pieces = [("[UNK]", 0.0), ("[CLS]", 0.0), ("▁", -2.0), *((f"▁{word}", -1.0) for word in WORDS)]
    inner = Tokenizer(models.Unigram(pieces, unk_id=0))
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    inner.post_processor = processors.TemplateProcessing(
        single="[CLS] $A", pair="[CLS] $A $B:1", special_tokens=[("[CLS]", 1)]
    )
    metaspace = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="[UNK]", cls_token="[CLS]"
    )
    one = Question("q", "", "w1 w2  w3", "w4", ("w2",), (3,))
    parts = windows([one], metaspace)
    assert one.context[slice(*parts[0].offsets[1])] == " w2", "as sentencepiece has it"
    found = predict([one], parts, *oracle(parts))["q"]
    assert (found.text(), found.answers[0].start) == ("w2", 3)
    assert all(answer.text == answer.text.strip() != "" for answer in found.answers)


def test_long_questions_are_cut_and_contexts_kept(tokenizer: Any) -> None:
    one = question(WORDS[:5], 0, 0, text="  " + " ".join(WORDS * 3))
    [window] = windows([one], tokenizer, longest=20, stride=3, longest_question=7)
    tokens = tokenizer.convert_ids_to_tokens(window.inputs["input_ids"])
    assert tokens == ["[CLS]", *WORDS[:7], "[SEP]", *WORDS[:5], "[SEP]"]


def test_the_best_answers_are_those_of_all_pairs() -> None:
    """Against an enumeration of every start and end."""
    random = np.random.default_rng(0)
    words = [f"x{number}" for number in range(30)]
    context = " ".join(words)
    offsets = np.array([match.span() for match in re.finditer(r"\S+", context)], np.int32)
    one = Question("q", "", context, "?", (), (), True)
    parts = [Window(0, {"input_ids": [0] * 22}, 1, offsets[low : low + 20], 0, 0, 0) for low in (0, 10)]
    starts, ends = random.normal(size=(2, 2, 22))
    found = predict([one], parts, starts, ends, best=7, longest_answer=4)["q"]
    every: dict[str, float] = {}
    for place, low in enumerate((0, 10)):
        for first in range(20):
            for last in range(first, min(20, first + 4)):
                text = " ".join(words[low + first : low + last + 1])
                score = starts[place, 1 + first] + ends[place, 1 + last]
                every[text] = max(score, every.get(text, -9.0))
    best = sorted(every.items(), key=lambda item: -item[1])[:7]
    assert [answer.text for answer in found.answers] == [text for text, _ in best]
    assert [answer.score for answer in found.answers] == pytest.approx([score for _, score in best])
    assert found.null == pytest.approx(min(starts[:, 0] + ends[:, 0]))
    assert found.margin == pytest.approx(found.null - best[0][1])
    assert found.text(threshold=found.margin) == best[0][0]
    assert found.text(threshold=found.margin - 1e-6) == ""


def test_a_threshold_tells_the_impossible_questions_apart(tokenizer: Any) -> None:
    possible = [question(WORDS[:20], place, place + 1, f"p{place}") for place in range(5)]
    never = [one._replace(id=f"n{one.id}", answers=(), starts=(), impossible=True) for one in possible]
    asked = possible + never
    parts = windows(asked, tokenizer, 12, 2, 2)
    found = predict(asked, parts, *oracle(parts))
    references = {one.id: one.answers for one in asked}
    texts = {name: one.text() for name, one in found.items()}
    assert understanding.squad(texts, references)["all"].exact == 0.5
    margins = {name: one.margin for name, one in found.items()}
    threshold, f1 = understanding.best_threshold(texts, margins, references)
    assert f1 == 1.0
    chosen = {name: one.text(threshold) for name, one in found.items()}
    assert understanding.squad(chosen, references)["all"].exact == 1.0


def test_a_context_without_tokens_has_no_answer(tokenizer: Any) -> None:
    empty = Question("q", "", "", "w1", (), (), True)
    parts = windows([empty], tokenizer)
    found = predict([empty], parts, *oracle(parts))["q"]
    assert (found.answers, found.text(), found.margin) == ([], "", float("inf"))


class Slow:
    """A tokenizer that does not know where its tokens are."""

    is_fast = False


def test_unfit_tokenizers_and_settings_are_refused(tokenizer: Any) -> None:
    one = question(WORDS[:9], 0, 0)
    with pytest.raises(ValueError, match=r"needs a fast tokenizer, .*; Slow is not one"):
        windows([one], Slow())
    without = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    with pytest.raises(ValueError, match=r"needs a tokenizer with a \[CLS\] token .*; \w+ has none"):
        windows([one], without)
    with pytest.raises(ValueError, match="longest must be a whole number of at least 196, got 195"):
        windows([one], tokenizer, longest=195)
    parts = windows([one], tokenizer)
    with pytest.raises(ValueError, match="must be as many as windows, 1; got 0 and 1"):
        predict([one], parts, [], [[0.0]])
    with pytest.raises(ValueError, match="starts of window 0 must be 14 finite logits"):
        predict([one], parts, [[0.0]], [[0.0]])
    broken = [[float("nan")] * 14]
    with pytest.raises(ValueError, match="ends of window 0 must be 14 finite logits"):
        predict([one], parts, [[0.0] * 14], broken)
    with pytest.raises(ValueError, match="every question must have a window, and other has none"):
        predict([one, one._replace(id="other")], parts, [[0.0] * 14], [[0.0] * 14])


def test_defaults_leave_room_for_the_context() -> None:
    assert spans.LONGEST - spans.LONGEST_QUESTION - spans.STRIDE > 100

"""SQuAD as a task of the tables of language understanding: its windows, settings and scores."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from torch import nn

from overt.data import squad
from overt.data.squad import Question, Questions
from overt.judge import understanding
from overt.recipes import spans
from overt.recipes.spans import Asked, Prediction
from overt.recipes.text_training import Encoded, Texts, TextTraining, load_model, predict_ends

EXACT, F1 = METRICS = ("EM", "F1")
THRESHOLD = "threshold"


@dataclass(frozen=True)
class SpanTraining(TextTraining):
    """Settings of a training on windows of contexts.

    Attributes:
        stride: tokens of the context that a window shares with the next.
        longest_question: tokens of a question; the rest is cut off.
    """

    stride: int = spans.STRIDE
    longest_question: int = spans.LONGEST_QUESTION


def most_tokens(path: str, tokenizer: Any) -> tuple[int, list[str]]:
    """How many tokens a question-answering model takes, and the weights of it that are drawn at random.

    Raises:
        ValueError: there is no such model, or its tokenizer does not know where its tokens are.
    """
    spans.null_token(tokenizer)
    model, new = load_model(path, None, 0)
    limits = [tokenizer.model_max_length, getattr(model.config, "max_position_embeddings", None)]
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and name.endswith("position_embeddings"):
            unused = 0 if module.padding_idx is None else module.padding_idx + 1  # RoBERTa's first positions
            limits.append(module.num_embeddings - unused)
    return int(min(limit for limit in limits if limit is not None and limit > 0)), new


def with_windows(training: TextTraining, most: int) -> SpanTraining:
    """Settings with the windows that a model can take."""
    sizes = spans.sizes(training.longest, most)
    return SpanTraining(**{**asdict(training), **sizes._asdict()})


def texts_of(data: Questions, tokenizer: Any, training: SpanTraining, share: float, held_out: str) -> Texts:
    """The windows of a data set, with a share of the training questions held out as a part of that name."""

    def cut(questions: list[Question]) -> Asked:
        sizes = training.longest, training.stride, training.longest_question
        return Asked(questions, spans.windows(questions, tokenizer, *sizes))

    train, held = squad.set_apart(data.train, share) if share else (data.train, [])
    parts = {held_out: held, data.name: data.test}
    asked = {part: cut(questions) for part, questions in parts.items() if questions}
    coded = {part: encode(each) for part, each in asked.items()}
    return Texts(encode(cut(train)), coded, (), asked=asked)


def encode(asked: Asked) -> list[Encoded]:
    """The windows as a model takes them, with the places of their answers."""
    return [
        {
            **{name: np.array(codes, np.int32) for name, codes in window.inputs.items()},
            "start_positions": window.start,
            "end_positions": window.end,
        }
        for window in asked.windows
    ]


def answer(model: Any, texts: Texts, part: str, tokenizer: Any) -> dict[str, Prediction]:
    """A model's best answers to the questions of a part, by their ids."""
    assert texts.asked is not None
    starts, ends = predict_ends(model, texts.parts[part], tokenizer)
    return spans.predict(*texts.asked[part], starts, ends)


def measure(
    model: Any, texts: Texts, parts: Iterable[str], tokenizer: Any, held_out: str
) -> tuple[dict[str, float], dict[str, dict[str, str]]]:
    """Exact match and F1 of each part in %, and the answers by part and question.

    Where some questions have no answer, none is given if it scores higher than the best answer by more than
    a threshold: the one that is best on held-out questions, or 0 if there are none.
    """
    assert texts.asked is not None
    found = {part: answer(model, texts, part, tokenizer) for part in parts}
    threshold = math.inf
    numbers: dict[str, float] = {}
    if any(question.impossible for each in texts.asked.values() for question in each.questions):
        threshold = numbers[THRESHOLD] = _best_threshold(found, texts.asked, held_out)
    texts_by_part: dict[str, dict[str, str]] = {}
    for part, predictions in found.items():
        answers = {name: each.text(threshold) for name, each in predictions.items()}
        scores = understanding.squad(answers, _references(texts.asked[part]))["all"]
        assert scores.exact is not None
        assert scores.f1 is not None
        numbers |= {f"{part} {EXACT}": 100 * scores.exact, f"{part} {F1}": 100 * scores.f1}
        texts_by_part[part] = answers
    return numbers, texts_by_part


def _best_threshold(found: dict[str, dict[str, Prediction]], asked: Any, held_out: str) -> float:
    if held_out not in found:
        return 0.0
    held = found[held_out]
    return understanding.best_threshold(
        {name: each.text() for name, each in held.items()},
        {name: each.margin for name, each in held.items()},
        _references(asked[held_out]),
    ).threshold


def _references(asked: Asked) -> dict[str, tuple[str, ...]]:
    return {question.id: question.answers for question in asked.questions}

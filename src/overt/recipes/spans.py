"""SQuAD questions as windows of tokens, and answers out of the logits of their starts and ends.

As in BERT (Devlin et al. 2019): a long context is cut into overlapping windows, each with the question in
front. A window without the whole answer points at its [CLS] token, and so does an impossible question.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from overt import _check
from overt.data.squad import Question

if TYPE_CHECKING:
    from numpy.typing import NDArray

LONGEST = 384  # tokens of a window
STRIDE = 128  # tokens of the context that a window shares with the next
LONGEST_QUESTION = 64  # tokens
LONGEST_ANSWER = 30  # tokens
BEST = 20  # answers kept of each question
CHUNK = 256  # questions tokenised at a time


class Sizes(NamedTuple):
    """How contexts are cut into windows: the arguments of `windows`, in tokens."""

    longest: int
    stride: int
    longest_question: int


def sizes(longest: int = LONGEST, most: float = math.inf) -> Sizes:
    """The usual sizes; for a model that takes fewer than 384 tokens, `most`, in the same proportions."""
    longest = int(min(longest, most))
    return Sizes(
        longest,
        min(STRIDE, longest * STRIDE // LONGEST),
        min(LONGEST_QUESTION, longest * LONGEST_QUESTION // LONGEST),
    )


class Window(NamedTuple):
    """Part of a context, with its question.

    Attributes:
        question: place of the question among those given.
        inputs: what the model is given, such as input_ids, without padding.
        first: place of the first token of the context.
        offsets: (tokens, 2), first character of each token of the context, and the one after its last.
        null: place of the token that stands for no answer, such as [CLS].
        start: place of the answer's first token; `null` if the whole answer is not here.
        end: place of its last token.
    """

    question: int
    inputs: dict[str, list[int]]
    first: int
    offsets: NDArray[np.int32]
    null: int
    start: int
    end: int


class Asked(NamedTuple):
    """Questions and their windows."""

    questions: list[Question]
    windows: list[Window]


def windows(
    questions: Sequence[Question],
    tokenizer: Any,
    longest: int = LONGEST,
    stride: int = STRIDE,
    longest_question: int = LONGEST_QUESTION,
) -> list[Window]:
    """The windows of questions, in their order; starts and ends are those of the first answer.

    Args:
        questions: with their contexts.
        tokenizer: a fast one, which knows where in the text its tokens are, with a [CLS] token or one that
            ends a text, as T5's.
        longest: tokens of a window, the question and special tokens included.
        stride: tokens of the context that a window shares with the next.
        longest_question: tokens of a question; the rest is cut off.
    """
    none = null_token(tokenizer)
    _check.whole("stride", stride, 0)
    _check.whole("longest_question", longest_question, 1)
    least = longest_question + tokenizer.num_special_tokens_to_add(pair=True) + stride + 1
    _check.whole("longest", longest, least)
    made = []
    for start in range(0, len(questions), CHUNK):
        chunk = questions[start : start + CHUNK]
        codes = tokenizer(
            _cut([question.text.strip() for question in chunk], tokenizer, longest_question),
            [question.context for question in chunk],
            truncation="only_second",
            max_length=longest,
            stride=stride,
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
        )
        for place, sample in enumerate(codes["overflow_to_sample_mapping"]):
            made.append(_window(codes, place, start + sample, chunk[sample], tokenizer, none))
    return made


def null_token(tokenizer: Any) -> int:
    """The token that stands for no answer: [CLS], or else the first that ends a text; others are refused."""
    name = type(tokenizer).__name__
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(f"SQuAD needs a fast tokenizer, which knows where its tokens are; {name} is not one")
    special = tokenizer("a", "a")["input_ids"]
    for token in (tokenizer.cls_token_id, tokenizer.eos_token_id):
        if token is not None and token in special:
            return int(token)
    raise ValueError(
        f"SQuAD needs a tokenizer with a [CLS] token or an end to stand for no answer; {name} has none"
    )


def _cut(texts: list[str], tokenizer: Any, longest: int) -> list[str]:
    """Texts of at most `longest` tokens."""
    codes = tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    return [
        text[: offsets[longest - 1][1]] if len(offsets) > longest else text
        for text, offsets in zip(texts, codes["offset_mapping"], strict=True)
    ]


def _window(codes: Any, place: int, number: int, question: Question, tokenizer: Any, none: int) -> Window:
    inputs = {key: list(codes[key][place]) for key in tokenizer.model_input_names if key in codes}
    owners = codes.sequence_ids(place)
    context = [token for token, owner in enumerate(owners) if owner == 1]
    first = context[0] if context else 0
    offsets = np.array(codes["offset_mapping"][place], np.int32).reshape(-1, 2)[context]
    null = inputs["input_ids"].index(none)
    span = None if question.impossible else _tokens(offsets, question.starts[0], question.answers[0])
    start, end = (null, null) if span is None else (first + span[0], first + span[1])
    return Window(number, inputs, first, offsets, null, start, end)


def _tokens(offsets: NDArray[np.int32], start: int, answer: str) -> tuple[int, int] | None:
    """First and last token that share characters with an answer, or None if not all of it is here."""
    end = start + len(answer)
    if not len(offsets) or offsets[0, 0] > start or offsets[-1, 1] < end:
        return None
    [inside] = np.nonzero((offsets[:, 1] > start) & (offsets[:, 0] < end))
    return (int(inside[0]), int(inside[-1])) if len(inside) else None


class Answer(NamedTuple):
    """A part of a context.

    Attributes:
        text: what it says.
        score: logit of its start plus logit of its end.
        start: its first character in the context.
        end: the character after its last.
    """

    text: str
    score: float
    start: int
    end: int


class Prediction(NamedTuple):
    """The best answers to a question, best first, and the score of no answer."""

    answers: list[Answer]
    null: float

    @property
    def margin(self) -> float:
        """How much better than the best answer none is; infinite if there is no answer at all."""
        return self.null - self.answers[0].score if self.answers else math.inf

    def text(self, threshold: float = math.inf) -> str:
        """The best answer, or "" if the margin is above the threshold; SQuAD 1.1 has none."""
        return "" if not self.answers or self.margin > threshold else self.answers[0].text


def predict(
    questions: Sequence[Question],
    parts: Sequence[Window],
    starts: Sequence[Any],
    ends: Sequence[Any],
    best: int = BEST,
    longest_answer: int = LONGEST_ANSWER,
) -> dict[str, Prediction]:
    """The best answers to each question, by its id, over all of its windows.

    Args:
        questions: those that the windows were made of.
        parts: their windows.
        starts: for each window, the logits of its tokens (and padding after them) to be the start.
        ends: the same for the end.
        best: number of answers kept of each question.
        longest_answer: tokens of an answer at most.
    """
    _check.whole("best", best, 1)
    _check.whole("longest_answer", longest_answer, 1)
    if not len(parts) == len(starts) == len(ends):
        raise ValueError(
            f"starts and ends must be as many as windows, {len(parts)}; got {len(starts)} and {len(ends)}"
        )
    spans: dict[int, dict[tuple[int, int], float]] = defaultdict(dict)
    nulls: dict[int, float] = {}
    for place, window in enumerate(parts):
        size = len(window.inputs["input_ids"])
        start, end = (np.asarray(values, np.float64) for values in (starts[place], ends[place]))
        for name, logits in (("starts", start), ("ends", end)):
            if logits.ndim != 1 or len(logits) < size or not np.isfinite(logits[:size]).all():
                raise ValueError(
                    f"{name} of window {place} must be {size} finite logits, got shape {logits.shape}"
                )
        null = float(start[window.null] + end[window.null])
        nulls[window.question] = min(null, nulls.get(window.question, math.inf))
        found, context = spans[window.question], questions[window.question].context
        for (first, last), score in _best_spans(window, start, end, best, longest_answer):
            characters = _trimmed(context, first, last)
            if characters is not None:
                found[characters] = max(score, found.get(characters, -math.inf))
    if len(nulls) < len(questions):
        absent = min(set(range(len(questions))) - nulls.keys())
        raise ValueError(f"every question must have a window, and {questions[absent].id} has none")
    return {
        question.id: Prediction(_ranked(question.context, spans[number], best), nulls[number])
        for number, question in enumerate(questions)
    }


def _best_spans(
    window: Window, start: NDArray[np.float64], end: NDArray[np.float64], best: int, longest: int
) -> list[tuple[tuple[int, int], float]]:
    """First and last character of the best spans of a window, and their scores; not in order."""
    count = len(window.offsets)
    if not count:
        return []
    context = slice(window.first, window.first + count)
    # Row i has the scores of the spans from token i to token i, i + 1, …
    padded = np.concatenate([end[context], np.full(longest - 1, -np.inf)])
    scores = start[context, None] + np.lib.stride_tricks.sliding_window_view(padded, longest)
    flat = scores.ravel()
    chosen = np.argpartition(-flat, best - 1)[:best] if len(flat) > best else np.arange(len(flat))
    spans = []
    for place in chosen[np.isfinite(flat[chosen])].tolist():
        token, more = divmod(place, longest)
        characters = int(window.offsets[token, 0]), int(window.offsets[token + more, 1])
        spans.append((characters, float(flat[place])))
    return spans


def _trimmed(context: str, start: int, end: int) -> tuple[int, int] | None:
    """A span without the spaces that some tokenizers count to their tokens; None if nothing is left."""
    text = context[start:end]
    end = start + len(text.rstrip())
    start += len(text) - len(text.lstrip())
    return (start, end) if start < end else None


def _ranked(context: str, spans: dict[tuple[int, int], float], best: int) -> list[Answer]:
    """The best answers; those of the same score in the order of the context."""
    order = sorted(spans.items(), key=lambda item: (-item[1], item[0]))
    return [Answer(context[start:end], score, start, end) for (start, end), score in order[:best]]

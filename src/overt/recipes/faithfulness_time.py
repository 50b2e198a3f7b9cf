"""How long judging every method takes: passes are counted, and the model's speed is measured."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from overt._modes import device_of
from overt.judge.rationales.deleting import BEAM, EXACT, SEARCHED, SHARES
from overt.judge.rationales.evaluation import WITHOUT
from overt.judge.rationales.methods import (
    ABSOLUTE,
    BLANKOUT,
    LIME,
    ORACLE,
    POOLING,
    RANDOM,
    TOGETHER,
    ZEROING,
    Scorer,
    over_maps,
)
from overt.judge.rationales.words import Text, WordClassifier

INTEGRAL = 50  # steps of integrated gradients
BACKWARD = 3  # passes that one with gradients takes
TRACE = 5  # calls that a trace takes, most of which is not the model's
READ = 0.5  # calls that a method takes to read a trace
TIMED = {"cuda": 2**17}  # tokens whose reading is timed, by device
FEW = 2**10  # on others
WORDS = 5  # on which methods are tried
MANY = 2**60  # sets of words, of which no two samples are alike; a float cannot hold all of long texts
# Tokens that are left of those of parts of a text, where what they begin with is read once: of LIME's samples
# 0.2 to 0.6 for 6 to 30 words, of the sets of a measure and of a search 0.4 to 0.5.
SHARED = 0.4


class Expected(NamedTuple):
    """Seconds of a model.

    Attributes:
        update: of its training.
        methods: of each method on all texts, of the model and of its copy with shuffled weights.
    """

    update: float
    methods: dict[str, float]


class Speed(NamedTuple):
    """Seconds of passes.

    Attributes:
        call: of a pass, however little there is to read.
        token: of a token, where many texts are read at once.
    """

    call: float
    token: float


class Work(NamedTuple):
    """Passes that something takes: calls one after the other, and tokens that they read."""

    calls: float
    tokens: float

    def plus(self, other: Work) -> Work:
        """Both."""
        return Work(self.calls + other.calls, self.tokens + other.tokens)

    def seconds(self, speed: Speed) -> float:
        """How long it takes."""
        return self.calls * speed.call + self.tokens * speed.token


def parts_of(sets: float, words: int, tokens: int, prefixes: bool) -> Work:
    """What it takes to read a text with sets of its words, at once.

    Args:
        sets: how many.
        words: of the text.
        tokens: of the text.
        prefixes: whether what parts begin with is read once, token by token.
    """
    if prefixes:
        return Work(tokens, min(SHARED * sets * tokens / 2, 2.0 ** min(words, 64)))
    return Work(1.0, sets * tokens / 2)


def tokens_of(classifier: WordClassifier, text: Text) -> int:
    """Tokens of a whole text, with those around it."""
    return len(classifier.code(text).places)


def speed_of(classifier: WordClassifier, texts: Sequence[Text]) -> Speed:
    """The speed of a model, on a text of median length and on parts of it.

    The first pass over each is not timed: kernels may be compiled for its shape.
    """
    classifier = copy.copy(classifier)
    classifier.prefixes = False
    text = sorted(texts, key=lambda text: len(text.words))[len(texts) // 2]
    words, tokens = len(text.words), tokens_of(classifier, text)
    most = TIMED.get(device_of(classifier.model).type, FEW)
    rows = max(2, min(2 * most // tokens, 2 ** min(words, 20) // 2))
    kept = np.random.default_rng(0).random((rows, words)) < 0.5
    whole = np.ones((1, words), dtype=bool)
    seconds = []
    for sets in (whole, kept, whole, kept):
        begun = time.perf_counter()
        classifier.probabilities(text, sets)
        seconds.append(time.perf_counter() - begun)
    *_, alone, many = seconds
    different = np.unique(kept, axis=0)
    token = many / sum(len(classifier.code(text, row).places) for row in different)
    return Speed(max(0.0, alone - token * tokens), token)


def scores_of(
    method: str,
    methods: Sequence[str],
    words: int,
    tokens: int,
    samples: int,
    window: int | None = None,
    prefixes: bool = False,
) -> Work:
    """What the scores of a text take.

    Args:
        method: whose scores.
        methods: all that are judged; the first over a mixing makes the trace that the others read.
        words: of the text.
        tokens: of the text.
        samples: of LIME.
        window: tokens of the windows that a text is read in; where one of them changes, the others are not
            read again. None for a model that reads all at once.
        prefixes: whether what parts of a text begin with is read once.
    """
    again = min(tokens, window or tokens)
    maps = {**over_maps(), ZEROING: ("rollout", ZEROING)}
    if method in maps:
        mixing = maps[method][1]
        if method != next(name for name in methods if name in maps and maps[name][1] == mixing):
            return Work(READ, 0.0)
        return Work(TRACE, BACKWARD * tokens + (2.0 * tokens * again if mixing == ZEROING else 0.0))
    if method in (RANDOM, ORACLE, ABSOLUTE):  # the best order is searched for in any case
        return Work(0.0, 0.0)
    if method == POOLING:
        return Work(1.0, tokens)
    if method == BLANKOUT:
        return Work(1.0, tokens * again)
    if method == LIME:
        return parts_of(different(words, samples), words, tokens, prefixes)
    return Work(BACKWARD, BACKWARD * tokens * (INTEGRAL if method == "integrated" else 1))


def different(words: int, samples: int) -> float:
    """How many different sets of words LIME is expected to draw: equal ones are asked for once.

    A sample's number of words is drawn first, from 1 to all, and then which ones.
    """
    drawn, found = samples / words, 0.0
    for size in range(1, words + 1):
        fewer = min(size, words - size, 60)  # beyond, there are far more than MANY
        sets = min(math.comb(words, fewer), MANY)
        found += -sets * math.expm1(drawn * math.log1p(-1 / sets)) if sets > 1 else min(1.0, drawn)
    return found


def once_of(words: int, tokens: int, prefixes: bool = False) -> Work:
    """What a text takes once for all methods: the range of the normalised measures."""
    if words <= EXACT:
        return parts_of(2**words, words, tokens, prefixes)
    if words <= SEARCHED:
        found = parts_of(BEAM * words * (words + 1), words, tokens, prefixes)
        return found._replace(calls=words / TOGETHER * found.calls)
    return Work(0.0, 0.0)


def deleting_of(words: int, tokens: int, points: int, prefixes: bool = False) -> Work:
    """What the measures of a method take for a text; its calls are shared by many texts."""
    if words <= EXACT:  # all sets are known
        return Work(0.0, 0.0)
    # Those of the other measures are among those without one word after the other.
    sets = 2 * words if words <= SEARCHED else 2 * (len(SHARES) + 1 + points)
    return parts_of(sets, words, tokens, prefixes)._replace(calls=0.0)


def refusing(classifier: WordClassifier, text: Text, methods: Sequence[str]) -> set[str]:
    """Methods that do not apply to a model, found by trying them on a text, of which a few words do."""
    scorer = Scorer(classifier, WITHOUT, methods=methods)
    found = set()
    for method in methods:
        if method not in (LIME, RANDOM, ORACLE):  # these apply to all
            try:
                scorer.scores(method, text)
            except ValueError:
                found.add(method)
    return found


def expected_seconds(
    classifier: WordClassifier,
    texts: Sequence[Text],
    methods: Sequence[str],
    samples: int,
    points: int,
) -> dict[str, float]:
    """Method → seconds that all texts take, of the model and of its copy with shuffled weights.

    Args:
        classifier: the model, trained or not.
        texts: those that are judged.
        methods: that are judged.
        samples: of LIME.
        points: of curves.
    """
    short = min(texts, key=lambda text: len(text.words))
    refused = refusing(classifier, classifier.read(short.words[:WORDS]), methods)
    applied = [method for method in methods if method not in refused]
    speed = speed_of(classifier, texts)
    model: Any = classifier.model
    prefixes = classifier.prefixes
    window: int | None = model.config.window if classifier.windowed else None
    sizes = [(len(text.words), tokens_of(classifier, text)) for text in texts]
    found = {}
    for method in methods:
        if method in refused:
            found[method] = 0.0
            continue
        work = Work(0.0, 0.0)
        for words, tokens in sizes:
            scores = scores_of(method, applied, words, tokens, samples, window, prefixes)
            work = work.plus(scores).plus(scores).plus(deleting_of(words, tokens, points, prefixes))
            if method == ORACLE:
                work = work.plus(once_of(words, tokens, prefixes))
        found[method] = work.seconds(speed)
    return found

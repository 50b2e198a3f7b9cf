"""Scores of captions, as COCO's evaluation computes them (Chen et al. 2015, arXiv:1504.00325).

All scores are in points: 100 times what the formulas give, as papers print them; CIDEr-D's own factor of 10
comes on top. Captions and references are ordinary text: `overt.data.vocabulary.tokenise` is applied to both.
"""

from __future__ import annotations

import importlib
import math
import shutil
import threading
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from random import Random
from statistics import fmean
from typing import Any, NamedTuple, TypeAlias

from overt import _check
from overt._extras import need, present
from overt.data.vocabulary import tokenise

ORDERS = 4  # of n-grams
BETA = 1.2  # weight of recall in ROUGE-L
SIGMA = 6.0  # of CIDEr-D's penalty for lengths that differ
OPENING = 4  # words of the constant caption

Words: TypeAlias = list[str]


class Scores(NamedTuple):
    """Scores of a system's captions, in points.

    Attributes:
        bleu: BLEU-1 to BLEU-4.
        rouge_l: mean over images.
        cider_d: mean over images.
    """

    bleu: tuple[float, float, float, float]
    rouge_l: float
    cider_d: float


class Meteor(NamedTuple):
    """METEOR 1.5, in points, or None and the reason."""

    score: float | None
    reason: str = ""


def score(captions: Sequence[str], references: Sequence[Sequence[str]]) -> Scores:
    """BLEU-1 to 4, ROUGE-L and CIDEr-D of a caption for each image.

    Args:
        captions: of the images; an empty one scores 0.
        references: captions that people wrote for each of them. CIDEr-D weighs words by how many of these
            images they occur in, so that all of a test set belong together.
    """
    said, wanted = _tokenised(captions, references)
    rouge, cider = (100.0 * fmean(measure(said, wanted)) for measure in (_rouge_l, _cider_d))
    return Scores(_bleu(said, wanted), rouge, cider)


def rouge_l(captions: Sequence[str], references: Sequence[Sequence[str]]) -> list[float]:
    """ROUGE-L of each caption, in points (Lin 2004).

    F-measure of the longest common subsequence, with the highest precision and the highest recall over the
    references, each taken for itself, and recall weighed by β = 1.2.
    """
    return [100.0 * value for value in _rouge_l(*_tokenised(captions, references))]


def cider_d(captions: Sequence[str], references: Sequence[Sequence[str]]) -> list[float]:
    """CIDEr-D of each caption, in points (Vedantam et al. 2015, arXiv:1411.5726, section 4).

    Mean over n = 1 to 4 and over references of the cosine of clipped counts of n-grams, weighed by how rare
    they are among the images' references, times a Gaussian of the difference of lengths (σ = 6), times 10.
    """
    said, wanted = _tokenised(captions, references)
    return [100.0 * value for value in _cider_d(said, wanted)]


def meteor(captions: Sequence[str], references: Sequence[Sequence[str]]) -> Meteor:
    """METEOR 1.5 by its own program, if Java and pycocoevalcap are installed."""
    said, wanted = _tokenised(captions, references)
    if shutil.which("java") is None:
        return Meteor(None, "METEOR needs Java")
    if not present("pycocoevalcap"):
        return Meteor(None, "METEOR needs pycocoevalcap: pip install pycocoevalcap")
    program: Any = importlib.import_module("pycocoevalcap.meteor.meteor").Meteor()
    try:
        value, _ = program.compute_score(
            {row: [" ".join(words) for words in texts] for row, texts in enumerate(wanted)},
            {row: [" ".join(words)] for row, words in enumerate(said)},
        )
    except (ValueError, OSError) as error:
        return Meteor(None, f"METEOR's program failed: {error}")
    finally:
        process = program.meteor_p
        process.kill()
        for pipe in (process.stdin, process.stdout, process.stderr):
            with suppress(OSError):
                pipe.close()
        process.wait()
        program.lock = threading.Lock()  # where it failed, it holds its own, and waits for it when deleted
    return Meteor(100.0 * float(value))


# --- Floors and a ceiling ---


def human(references: Sequence[Sequence[str]], number: int = 0) -> tuple[list[str], list[list[str]]]:
    """One reference of each image as a caption, and the others as its references: what people reach."""
    _check.whole("number", number, 0)
    for image, texts in enumerate(references):
        if len(texts) <= max(number, 1):
            raise ValueError(
                f"image {image} must have more than {max(number, 1)} references to set one apart, got "
                f"{len(texts)}"
            )
    return (
        [texts[number] for texts in references],
        [[*texts[:number], *texts[number + 1 :]] for texts in references],
    )


def random_captions(pool: Sequence[str], count: int, seed: int = 0) -> list[str]:
    """Captions out of a pool, those of training, without a look at the image: a floor."""
    if not pool:
        raise ValueError("pool must hold captions, got none")
    random = Random(seed)
    return [random.choice(pool) for _ in range(count)]


def constant_caption(pool: Sequence[str], words: int = OPENING) -> str:
    """How most captions of a pool begin, such as "a man in a", to be said of every image: a floor."""
    _check.whole("words", words, 1)
    openings = Counter(" ".join(tokenise(text)[:words]) for text in pool)
    if not openings:
        raise ValueError("pool must hold captions, got none")
    return min(openings, key=lambda opening: (-openings[opening], opening))


def floors(pool: Sequence[str], references: Sequence[Sequence[str]], seed: int = 0) -> dict[str, Scores]:
    """Scores of one human caption against the others, a random one, and the same one for all images.

    Args:
        pool: captions of training, for the two floors.
        references: of the test images; at least two each.
        seed: of the random captions.
    """
    constant = constant_caption(pool)
    return {
        "human, against the others": score(*human(references)),
        "random caption": score(random_captions(pool, len(references), seed), references),
        f"always “{constant}”": score([constant] * len(references), references),
    }


# --- The measures ---


def _tokenised(
    captions: Sequence[str], references: Sequence[Sequence[str]]
) -> tuple[list[Words], list[list[Words]]]:
    if len(captions) != len(references):
        raise ValueError(
            f"captions must be one for each image: got {len(captions)}, and references of {len(references)}"
        )
    if not references:
        raise ValueError("captions must be of at least one image, got none")
    wanted = [[tokenise(text) for text in texts] for texts in references]
    for image, texts in enumerate(wanted):
        if isinstance(references[image], str) or not texts or not all(texts):
            raise ValueError(
                f"references of image {image} must be captions with words, got {references[image]!r}"
            )
    return [tokenise(caption) for caption in captions], wanted


def _bleu(said: list[Words], wanted: list[list[Words]]) -> tuple[float, float, float, float]:
    """BLEU-1 to 4 of the corpus, by sacrebleu; 0 where no n-gram is right."""
    sacrebleu: Any = need("sacrebleu", "translation")
    most = max(map(len, wanted))
    streams = [[" ".join(texts[n]) if n < len(texts) else None for texts in wanted] for n in range(most)]
    metric = sacrebleu.BLEU(tokenize="none", smooth_method="none", force=True)
    found = metric.corpus_score([" ".join(words) for words in said], streams)
    logs = [math.log(precision / 100.0) if precision else -math.inf for precision in found.precisions]
    one, two, three, four = (
        100.0 * found.bp * math.exp(sum(logs[:order]) / order) for order in range(1, ORDERS + 1)
    )
    return one, two, three, four


def _rouge_l(said: list[Words], wanted: list[list[Words]]) -> list[float]:
    scores = []
    for words, texts in zip(said, wanted, strict=True):
        common = [_common(words, text) for text in texts]
        precision = max(common) / max(len(words), 1)
        recall = max(length / len(text) for length, text in zip(common, texts, strict=True))
        divisor = recall + BETA**2 * precision
        scores.append((1 + BETA**2) * precision * recall / divisor if divisor else 0.0)
    return scores


def _common(one: Words, other: Words) -> int:
    """Length of the longest common subsequence."""
    row = [0] * (len(other) + 1)
    for word in one:
        before = 0  # the entry above and to the left
        for place, match in enumerate(other, 1):
            above = row[place]
            row[place] = before + 1 if word == match else max(above, row[place - 1])
            before = above
    return row[-1]


def _grams(words: Words) -> list[Counter[tuple[str, ...]]]:
    """Counts of n-grams, for each n."""
    return [
        Counter(tuple(words[start : start + n]) for start in range(len(words) - n + 1))
        for n in range(1, ORDERS + 1)
    ]


def _cider_d(said: list[Words], wanted: list[list[Words]]) -> list[float]:
    references = [[_grams(text) for text in texts] for texts in wanted]
    frequency: Counter[tuple[str, ...]] = Counter()  # images in whose references an n-gram occurs
    for texts in references:
        frequency.update({gram for grams in texts for counts in grams for gram in counts})
    images = math.log(len(wanted))

    def weighed(grams: list[Counter[tuple[str, ...]]]) -> list[dict[tuple[str, ...], float]]:
        return [
            {gram: count * (images - math.log(max(1, frequency[gram]))) for gram, count in counts.items()}
            for counts in grams
        ]

    scores = []
    for words, texts in zip(said, references, strict=True):
        own = weighed(_grams(words))
        total = 0.0
        for grams in texts:
            # The standard program measures length in pairs of words.
            difference = sum(grams[1].values()) - max(len(words) - 1, 0)
            penalty = math.exp(-(difference**2) / (2 * SIGMA**2))
            total += penalty * sum(map(_cosine, own, weighed(grams)))
        scores.append(10.0 * total / ORDERS / len(texts))
    return scores


def _cosine(own: dict[tuple[str, ...], float], other: dict[tuple[str, ...], float]) -> float:
    """Of weighed counts, where one's own count for no more than the other's."""
    clipped = sum(min(weight, other[gram]) * other[gram] for gram, weight in own.items() if gram in other)
    norms = math.hypot(*own.values()) * math.hypot(*other.values())
    return clipped / norms if norms else 0.0

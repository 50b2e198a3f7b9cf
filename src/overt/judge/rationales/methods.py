"""Scores of a text's words: by every way to explain that there is, and by two controls.

| name | scores |
|---|---|
| "pooling" | the attention that pools the words' states, which a `RationaleClassifier` has |
| "raw", "rollout", "flow" | a method that reads maps, of attention weights |
| "rollout/alti", "flow/gradient", … | the same over the maps of a mixing: METHOD/MIXING, any two registered |
| "value-zeroing" | rollout/value-zeroing |
| "rollout/relevance" | gradient-weighted attention (Chefer et al. 2021) |
| "gradients", "gradient-input", "integrated" | gradient at the embeddings: norm, × input, integrated |
| "blankout", "blankout-absolute" | what replacing a word by the unknown token does, signed or not |
| "lime" | LIME |
| "random" | control: numbers at random |
| "oracle" | control: the best order of deletion, of texts up to 30 words |

`every_method` lists them, and those that were registered since. Names in `SAME` are left out of it: they rank
words as another does.
"""

from __future__ import annotations

import time
import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from overt import _check
from overt._extras import need
from overt._modes import evaluating
from overt.judge.rationales.deleting import EXACT, SEARCHED, Attainable, count_of, ranges
from overt.judge.rationales.words import Coded, Text, WordClassifier
from overt.tracing.inputs import prepare
from overt.tracing.methods.method import Method, read_subject
from overt.tracing.methods.method import methods as traced
from overt.tracing.mixing.mixing import mixing_of, mixings
from overt.tracing.subject import Subject
from overt.tracing.tracer import trace

if TYPE_CHECKING:
    from numpy.typing import NDArray

EXTRA = "rationales"
POOLING, ZEROING, LIME, RANDOM = "pooling", "value-zeroing", "lime", "random"
BLANKOUT, ABSOLUTE = "blankout", "blankout-absolute"
ORACLE = "oracle"
# Differences of R² above this are no rounding error, if this part of each column and of the labels is left.
CLEAR, COLUMN_LEFT, LABELS_LEFT = 1e-9, 1e-4, 1e-9
TOGETHER = 32  # texts whose best orders are searched for at once
KEPT = 2**20  # sets of words whose answers are kept, of all texts that are not short
TIMED = 20  # texts for which LIME asks the classifier, whether or not the answers are known
CONTROLS = (RANDOM, ORACLE)
ATTENTION = "attention"  # the mixing of a method that names none
METHODS = (
    POOLING,
    "raw",
    "rollout",
    "flow",
    ZEROING,
    "gradients",
    "gradient-input",
    "integrated",
    BLANKOUT,
    LIME,
    RANDOM,
)
TITLES = {
    POOLING: "pooling attention",
    ZEROING: "value zeroing",
    "gradients": "gradient norm",
    "gradient-input": "gradient × input",
    "integrated": "integrated gradients",
    BLANKOUT: "blank-out",
    ABSOLUTE: "blank-out, absolute",
    LIME: "LIME",
    ORACLE: "best order",
}
SAME = {  # a name → another that gives the same order of words
    f"rollout/{ZEROING}": ZEROING,
    "raw/relevance": "raw/gradient",  # it differs in sums of rows alone
    "flow/relevance": "flow/gradient",  # flow makes rows sum to one
}
SAMPLES = 1000  # of LIME


class NotFiniteError(ValueError):
    """A method's scores of a text are not finite: that text has none."""


class Scorer:
    """Scores of words by method; higher scores speak for the predicted class, or say that a word is used.

    Args:
        classifier: the classifier.
        share: of the words that LIME is asked for, twice.
        seed: of LIME and of random scores.
        samples: texts with words deleted that LIME learns from.
        methods: all that will be asked for. Those that read the same maps of a text share a trace.
    """

    def __init__(
        self,
        classifier: WordClassifier,
        share: float,
        seed: int = 0,
        samples: int = SAMPLES,
        methods: Sequence[str] = (),
    ) -> None:
        self.classifier, self.share, self.seed, self.samples = classifier, share, seed, samples
        self.methods = tuple(methods)
        self.scales: dict[Text, Attainable] = {}
        self.seconds: dict[str, list[float]] = {}  # of each text that a method has scored
        self._every: dict[Text, NDArray[np.float64]] = {}  # of all sets of words of a short text
        self._some: dict[Text, dict[bytes, NDArray[np.float64]]] = {}  # of sets of a longer one
        self._room = KEPT
        self._kept: dict[tuple[Text, str], tuple[NDArray[np.float64] | ValueError, float]] = {}
        self._blanked: dict[Text, tuple[Tensor, float]] = {}  # effects of tokens, and the seconds they took

    def scores(self, method: str, text: Text) -> NDArray[np.float64]:
        """A number for each word; ValueError where a method does not apply to the model."""
        begun = time.perf_counter()
        if method in over_maps() or method == ZEROING:
            found, seconds = self._shared(method, text)
        elif method in (BLANKOUT, ABSOLUTE):
            found, seconds = self._blankout(method, text)
        else:
            found = self._function(method)(text)
            seconds = time.perf_counter() - begun
        if isinstance(found, ValueError):
            raise found
        timed = self.seconds.setdefault(method, [])
        if method != LIME or len(timed) < TIMED:  # of later texts it may know the answers
            timed.append(seconds)
        if not np.isfinite(found).all():
            raise NotFiniteError(f"{title_of(method)} gives scores that are not finite, for text {text.name}")
        return found

    def _function(self, method: str) -> Callable[[Text], NDArray[np.float64]]:
        own: dict[str, Callable[[Text], NDArray[np.float64]]] = {
            POOLING: self._pooling,
            LIME: self._lime,
            RANDOM: self._random,
            ORACLE: self._oracle,
        }
        if method in own:
            return own[method]
        _check.one_of("methods", method, known_methods())
        known, options = _running()[method]
        return lambda text: _by_word(self._run(text, known, options), self.classifier.code(text), text)

    def _blankout(self, method: str, text: Text) -> tuple[NDArray[np.float64], float]:
        """Scores by blank-out or its absolute values, and the seconds that they took alone.

        Both are read from the same passes of the model, which are as many as the text has tokens.
        """
        if text not in self._blanked:
            begun = time.perf_counter()
            effects = self._run(text, *_running()[BLANKOUT])
            self._blanked[text] = effects, time.perf_counter() - begun
        effects, seconds = self._blanked[text]
        effects = effects.abs() if method == ABSOLUTE else effects
        return _by_word(effects, self.classifier.code(text), text), seconds

    def _shared(self, method: str, text: Text) -> tuple[NDArray[np.float64] | ValueError, float]:
        """Scores by a method that reads maps, or why there are none, and the seconds that they took alone.

        Other methods over the same maps are read from the same trace, and kept until they are asked for.
        """
        if (text, method) not in self._kept:
            known = {**over_maps(), ZEROING: ("rollout", ZEROING)}
            mixing = known[method][1]
            names = [method, *(name for name in self.methods if name in known and name != method)]
            names = [name for name in names if known[name][1] == mixing]
            begun = time.perf_counter()
            read: Callable[[str], NDArray[np.float64]] | ValueError
            try:
                read = self._maps(text, mixing)
            except ValueError as error:
                read = error
            traced_in = time.perf_counter() - begun
            for name in names:
                begun = time.perf_counter()
                found: NDArray[np.float64] | ValueError
                try:
                    found = read if isinstance(read, ValueError) else read(known[name][0])
                except ValueError as error:
                    found = error
                self._kept[text, name] = found, traced_in + time.perf_counter() - begun
        return self._kept.pop((text, method))

    def _pooling(self, text: Text) -> NDArray[np.float64]:
        """The attention that pools the words' states."""
        classifier = self.classifier
        if not classifier.windowed:
            name = type(classifier.model).__name__
            raise ValueError(f"{name} has no attention that pools; a RationaleClassifier has")
        coded = classifier.code(text)
        with torch.no_grad(), evaluating(classifier.model):
            weights = classifier.model(**classifier.batch([coded.arguments])).pooling[0].double().cpu()
        first = [place for place, flag in zip(coded.places, coded.arguments["words"], strict=True) if flag]
        found = np.zeros(len(text.words))
        for place, weight in zip(first, weights.tolist(), strict=True):
            if place >= 0:
                found[place] = weight
        return found

    def _maps(self, text: Text, mixing: str) -> Callable[[str], NDArray[np.float64]]:
        """A method → what the token that the class is read from draws on, in the last layer.

        It is the first token of an encoder (CLS), the last one of a causal model. Where a text has several
        windows, each has its own CLS; a window's weights are scaled by the number of its words.
        """
        classifier = self.classifier
        coded = classifier.code(text)
        model: Any = classifier.model
        arguments = classifier.batch([coded.arguments])
        if classifier.windowed:
            if mixing_of(mixing).gradients:
                raise ValueError(
                    f"{type(model).__name__} classifies by its words' states, not by the first token's, "
                    "whose weights have no gradient in the last layer"
                )
            length = min(len(coded.places), model.config.window)
            arguments = {name: value.view(-1, length) for name, value in arguments.items() if name != "words"}
            model = model.encoder
        found = trace(model, arguments, tokenizer=classifier.tokenizer, mixing=mixing)
        query = 0 if found.kind == "encoder" else arguments["input_ids"].shape[1] - 1

        def read(method: str) -> NDArray[np.float64]:
            options: dict[str, Any] = {}
            if method == "flow":  # beside other processes, as many threads as torch has
                options = {"progress": False, "threads": 1 if torch.get_num_threads() == 1 else None}
            rows = found.read(method, [query], layers=[-1], **options)[:, 0, 0]
            if classifier.windowed:
                places = torch.tensor(coded.places).view(rows.shape)
                words = torch.tensor([len(row[row >= 0].unique()) for row in places], dtype=rows.dtype)
                rows = rows * words.unsqueeze(1)
            return _by_word(rows.flatten(), coded, text)

        return read

    def _run(self, text: Text, method: Method, options: Mapping[str, Any]) -> Tensor:
        """A number for each token, (tokens,), by a method that runs the model."""
        classifier = self.classifier
        coded = classifier.code(text)
        arguments = classifier.batch([coded.arguments])
        inputs = prepare(classifier.model, arguments, tokenizer=classifier.tokenizer)
        mask = arguments["attention_mask"].bool().cpu()
        if "rows" in method.takes:  # it runs many changed texts, without gradients
            rows = max(1, classifier.at_once // mask.shape[1])
            with classifier.quickly() as model:
                subject = Subject(model, inputs, mask, 0, "encoder", None)
                values = read_subject(method, subject, None, {**options, "rows": rows})
        else:
            subject = Subject(classifier.model, inputs, mask, 0, "encoder", None)
            values = read_subject(method, subject, None, options)
        return values.flatten()

    def _lime(self, text: Text) -> NDArray[np.float64]:
        """LIME (Ribeiro et al. 2016) over positions, by its authors' package; negative weights become 0.

        Samples are drawn as `LimeTextExplainer.explain_instance` draws them, and the package's regression is
        asked for their weights; the strings that it would make and we would take apart again are left out.
        """
        explainer = need("lime.lime_text", EXTRA).LimeTextExplainer
        count = len(text.words)
        drawn = np.random.RandomState(seed_of(self.seed, text))  # lime takes this kind alone
        kept = np.ones((self.samples, count), dtype=bool)
        for row, size in enumerate(drawn.randint(1, count + 1, self.samples - 1), start=1):
            kept[row, drawn.choice(count, size, replace=False)] = False
        if text in self._every and len(self.seconds.get(LIME, ())) >= TIMED:
            probabilities = self._every[text][_number(kept)]
        else:
            probabilities = self.classifier.probabilities(text, kept)
        label = int(probabilities[0].argmax())  # the first sample is the whole text
        cosine = np.sqrt(kept.mean(axis=1))  # of a sample and the whole text
        with warnings.catch_warnings():
            # A text with more words than samples: its regression is held up by the ridge alone.
            warnings.filterwarnings("ignore", message=".*ill-conditioned")
            base = explainer(random_state=drawn).base
            base.forward_selection = partial(selected, base.forward_selection)
            _, weights, _, _ = base.explain_instance_with_data(
                kept.astype(np.float64),
                probabilities,
                100 * (1 - cosine),
                label,
                2 * count_of(self.share, count),
                feature_selection="auto",
            )
        found = np.zeros(count)
        for place, weight in weights:
            found[place] = max(0.0, float(weight))
        return found

    def _random(self, text: Text) -> NDArray[np.float64]:
        return np.random.default_rng(seed_of(self.seed, text)).random(len(text.words))

    def _oracle(self, text: Text) -> NDArray[np.float64]:
        """The order of deletion that makes the probability of the predicted class fall most."""
        scale = self.attainable(text)
        if scale is None:
            raise ValueError(f"the best order is searched for up to {SEARCHED} words, got {len(text.words)}")
        found = np.empty(len(text.words))
        found[list(scale.order)] = np.arange(len(text.words), 0, -1)
        return found

    def attainable(self, text: Text) -> Attainable | None:
        """What any order of deleting a text's words attains; None for a long one."""
        if len(text.words) > SEARCHED:
            return None
        self.search([text])
        return self.scales[text]

    def search(
        self, texts: Sequence[Text], told: Callable[[int, int], object] = lambda _done, _of: None
    ) -> None:
        """Find what `attainable` says of texts, where it is not known yet, of several at once.

        Args:
            texts: of which long ones are left out.
            told: called with how many texts were searched, and how many there are.
        """
        new = [text for text in texts if len(text.words) <= SEARCHED and text not in self.scales]
        for start in range(0, len(new), TOGETHER):
            group = new[start : start + TOGETHER]
            wholes = self.ask([(text, np.ones((1, len(text.words)), dtype=bool)) for text in group])
            labels = [int(whole[0].argmax()) for whole in wholes]

            def ask(
                sets: list[tuple[int, NDArray[np.bool_]]],
                group: Sequence[Text] = group,
                labels: Sequence[int] = labels,
            ) -> list[NDArray[np.float64]]:
                answers = self.ask([(group[number], kept) for number, kept in sets], keep=False)
                return [each[:, labels[number]] for each, (number, _) in zip(answers, sets, strict=True)]

            def step(done: int, of: int, start: int = start, texts: int = len(group)) -> None:
                told(start + texts * done // of, len(new))

            found = ranges([len(text.words) for text in group], ask, step)
            self.scales |= dict(zip(group, found, strict=True))
            told(start + len(group), len(new))

    def probabilities(self, text: Text, kept: NDArray[np.bool_]) -> NDArray[np.float64]:
        """Probabilities of the classes for each set of kept words, (sets, classes)."""
        return self.ask([(text, kept)])[0]

    def ask(
        self,
        asked: Sequence[tuple[Text, NDArray[np.bool_]]],
        told: Callable[[int, int], object] = lambda _done, _of: None,
        keep: bool = True,
    ) -> list[NDArray[np.float64]]:
        """As `WordClassifier.ask`; what is known is not asked for again.

        All sets of a short text's words are asked for at once, and kept.

        Args:
            asked: texts, and boolean (sets, words).
            told: called after each pass with how many sets were run, and how many there are.
            keep: the answers for longer texts too, while there is room.
        """
        new: dict[Text, list[NDArray[np.bool_]]] = {}
        known: dict[Text, dict[bytes, NDArray[np.float64]]] = {}
        for text, kept in asked:
            if len(text.words) > EXACT:
                own = known.setdefault(text, dict(self._some.get(text, {})))
                unknown = np.array([key not in own for key in _keys(kept)])
                if unknown.any():
                    new.setdefault(text, []).append(kept[unknown])
            elif text not in self._every:
                new[text] = [_all_sets(text)]
        wanted = [(text, np.concatenate(sets)) for text, sets in new.items()]
        answers = self.classifier.ask(wanted, told) if wanted else []
        for (text, kept), found in zip(wanted, answers, strict=True):
            if text not in known:
                self._every[text] = found
                continue
            known[text] |= zip(_keys(kept), found, strict=True)
            more = len(known[text]) - len(self._some.get(text, {}))
            if keep and more <= self._room:
                self._some[text] = known[text]
                self._room -= more
        return [
            np.stack([known[text][key] for key in _keys(kept)])
            if text in known
            else self._every[text][_number(kept)]
            for text, kept in asked
        ]


def _keys(kept: NDArray[np.bool_]) -> list[bytes]:
    """A key for each set of words."""
    return [row.tobytes() for row in np.packbits(kept, axis=1)]


def selected(
    theirs: Callable[..., NDArray[np.int64]],
    data: NDArray[np.float64],
    labels: NDArray[np.float64],
    weights: NDArray[np.float64],
    most: int,
) -> NDArray[np.int64]:
    """The features that LIME's package selects, one after the other, without a regression for each.

    The package adds the feature with which a weighted regression with an intercept has the greatest R². What
    a feature adds to R² is (c · y)² / (c · c) / (y · y), of the part c of its column that those selected do
    not explain, and of the labels y; both are centred, and products weighted.

    Args:
        theirs: the package's own selection, for what rounding could decide: features that add the same,
            columns that the selected ones nearly explain, and labels that are nearly all the same.
        data: (samples, features).
        labels: (samples,).
        weights: of the samples, (samples,).
        most: features to select.
    """
    x, y = (each - np.average(each, axis=0, weights=weights) for each in (data, labels))
    products, answers = x.T @ (weights[:, None] * x), x.T @ (weights * y)  # c · c of all pairs, and c · y
    total, sizes = float(weights @ y**2), weights @ data**2
    if total <= LABELS_LEFT * float(weights @ labels**2):
        return theirs(data, labels, weights, most)
    found, left = list[int](), list(range(data.shape[1]))
    while left and len(found) < most:
        own = products.diagonal()[left]
        if (own <= COLUMN_LEFT * sizes[left]).any():
            return theirs(data, labels, weights, most)
        gains = answers[left] ** 2 / own / total
        best, others = int(gains.argmax()), np.delete(gains, gains.argmax())
        if (others > gains[best] - CLEAR).any():
            return theirs(data, labels, weights, most)
        found.append(left.pop(best))
        column = products[:, found[-1]] / products[found[-1], found[-1]]
        answers = answers - column * answers[found[-1]]
        products = products - np.outer(column, products[found[-1]])
    return np.array(found)


def _all_sets(text: Text) -> NDArray[np.bool_]:
    """All sets of kept words, (2^words, words); a set's number has the bits of the words that it keeps."""
    words = len(text.words)
    found: NDArray[np.bool_] = (np.arange(2**words)[:, None] >> np.arange(words)) & 1 == 1
    return found


def _number(kept: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Numbers of sets among all of them."""
    return np.asarray(kept @ (1 << np.arange(kept.shape[1])))


def seed_of(seed: int, text: Text) -> int:
    """A seed that differs between texts, and does not depend on their order."""
    return (seed * 1_000_003 + zlib.crc32(" ".join(text.words).encode())) % 2**32


def _by_word(values: Tensor, coded: Coded, text: Text) -> NDArray[np.float64]:
    """The sum over each word's tokens."""
    places = np.array(coded.places)
    found = np.zeros(len(text.words))
    np.add.at(found, places[places >= 0], values.double().cpu().numpy()[places >= 0])
    return found


def _running() -> dict[str, tuple[Method, Mapping[str, Any]]]:
    """Methods that run the model and their variants, by name."""
    found: dict[str, tuple[Method, Mapping[str, Any]]] = {}
    for name, method in traced("model").items():
        found[name] = method, {}
        found |= {variant: (method, options) for variant, options in method.variants.items()}
    return found


def over_maps() -> dict[str, tuple[str, str]]:
    """Name → a method that reads maps, and the mixing that makes them."""
    return {
        method if mixing == ATTENTION else f"{method}/{mixing}": (method, mixing)
        for mixing in sorted(mixings(), key=lambda name: name != ATTENTION)
        for method in traced("maps")
    }


def every_method() -> tuple[str, ...]:
    """Names of all ways to explain, each order of words once, and at the end the controls."""
    maps = [name for name in over_maps() if name not in SAME]
    return (POOLING, *maps, ZEROING, *_running(), LIME, *CONTROLS)


def known_methods() -> tuple[str, ...]:
    """Names of all methods that score words."""
    return tuple(dict.fromkeys([*METHODS, *over_maps(), *_running(), ORACLE]))


def title_of(method: str) -> str:
    """A method's name in tables."""
    if method in TITLES:
        return TITLES[method]
    reads, mixing = over_maps().get(method, (method, ATTENTION))
    if mixing == ATTENTION:
        return method
    title = mixing_of(mixing).titled(reads)
    return f"raw {title}" if reads == "raw" else title  # rollout may have the mixing's own name

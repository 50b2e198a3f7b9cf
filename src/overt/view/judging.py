"""`overt judge` as one self-contained page: a table of methods, and texts as each method reads them.

The page has at most 50 texts, and says of how many. What the classifier says as words are deleted is computed
beforehand, so that the page needs no model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from overt import _check
from overt._version import __version__
from overt.judge.intervals import Interval
from overt.judge.rationales.deleting import Ties, aopc, count_of, without_and_only
from overt.judge.rationales.evaluation import LESS_IS_BETTER, Evaluation
from overt.judge.rationales.methods import CONTROLS, ORACLE, Scorer, title_of
from overt.judge.rationales.ranking import (
    apart,
    beating_chance,
    columns_of,
    coverage,
    coverage_after_shuffling,
    heading_of,
    leading,
)
from overt.judge.rationales.steps import STEPS, steps
from overt.judge.rationales.words import Text, WordClassifier
from overt.view.index import printable, short
from overt.view.pages import Page

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import nn

MOST = 50  # texts on a page
SHARE = 0.2  # of the words that LIME is asked for, twice
HEAD = "ForSequenceClassification"  # how the classes of classifiers end
# Methods that take no more than a few passes for a text.
LIVE = (
    "raw", "rollout", "flow", "rollout/gradient", "flow/gradient", "rollout/relevance", "rollout/alti",
    "gradients", "gradient-input", "blankout", "random",
)  # fmt: skip
MEANINGS = {
    "comprehensiveness": "How much the probability of the predicted class falls without the highest words: "
    "the mean over 1, 5, 10, 20 and 50 % of the words. More is better.",
    "sufficiency": "How much it falls with these words alone. Less is better.",
    "between": "How far apart the curves are of that probability as the least and as the most relevant words "
    "are deleted first. More is better; random scores have 0 on average.",
    "normalised_comprehensiveness": "Comprehensiveness on a scale from the worst (0) to the best order of "
    "deletion (1), of texts of up to 30 words. Compares models, too.",
    "normalised_sufficiency": "Sufficiency on that scale; less is better.",
    "correlation": "Spearman’s correlation of the sizes of a text’s scores, whatever their signs, with how "
    "far the answer changes when a word is blanked out. More is better, if one trusts blank-out.",
    "auprc": "Agreement with the words that people marked: area under the precision–recall curve. Ties are "
    "flattered.",
    "average_precision": "The same as average precision, which has no bonus for ties.",
    "token_f1": "F1 of the highest words against those that people marked.",
}
SHUFFLED = {
    "key": "shuffled",
    "title": "ρ shuffled",
    "better": "zero",
    "about": "Spearman’s correlation with the same method’s scores after the model’s weights are shuffled. "
    "Near 1, a method does not show what the model has learnt; it should be near 0, on either side. "
    "It is no ranking. Random scores have 1.",
}
INTERVALS = (
    "Means over texts, with 95 % intervals. Bold: the best method, and all that these texts do not tell "
    "apart from it (paired differences on the same texts, one by one). °: not told to be better than random "
    "scores. In italics: controls."
)
Report = Callable[[int, int], object]


class JudgePage(Page):
    """Methods judged on texts, as a page. Made by `judge_page`; a notebook displays it.

    Attributes:
        index: the table and the texts, as JSON values.
    """

    entry: ClassVar[str] = "judge_page.js"
    looks: ClassVar[tuple[str, ...]] = ("page.css", "judge.css")

    def __repr__(self) -> str:
        return f"JudgePage({self.title!r}, {len(self.index['texts'])} texts)"

    def widget(self, height: int = 0) -> Any:
        """There is none: a notebook displays the page itself."""
        del height
        raise TypeError("the page of a judgement has no widget: display it, or save it")


def judge_page(
    found: Evaluation,
    model: nn.Module,
    tokenizer: Any,
    texts: Sequence[str | Sequence[str]],
    *,
    queries: Sequence[str] | None = None,
    labels: Sequence[int] | None = None,
    names: Sequence[str] | None = None,
    title: str = "Which explanation to believe",
    facts: Sequence[str] = (),
    notes: Sequence[str] = (),
    shuffled: Mapping[str, Interval] | None = None,
    sort: str | None = None,
    most: int = MOST,
    ties: Ties = "random",
    seed: int = 0,
    report: Report | None = None,
) -> JudgePage:
    """Methods that `overt.judge.rationales.evaluate` judged, and texts with their words deleted.

    The texts and the arguments that they share with `evaluate` must be those that it was given.

    Args:
        found: from `evaluate`.
        model: the classifier.
        tokenizer: its tokenizer.
        texts: as for `evaluate`.
        queries: as for `evaluate`.
        labels: as for `evaluate`; each text says whether its prediction is right.
        names: of the texts; by default their numbers, from 1.
        title: of the page.
        facts: short statements that stand beside the title.
        notes: sentences that the reader should not miss.
        shuffled: from `after_shuffling`, for a column of its own.
        sort: the measure that methods are sorted by at first; by default the first column.
        most: texts on the page, spread evenly over all.
        ties: as for `evaluate`.
        seed: as for `evaluate`.
        report: called with the number of texts that are ready, and of all on the page.
    """
    _check.whole("most", most, 1)
    if len(texts) != found.texts:
        raise ValueError(f"texts must be the {found.texts} that were judged, got {len(texts)}")
    for name, column in (("queries", queries), ("labels", labels), ("names", names)):
        if column is not None and len(column) != len(texts):
            raise ValueError(f"{name} must be {len(texts)}, one for each text, got {len(column)}")
    columns = columns_of(found)
    if sort is not None:
        _check.one_of("sort", sort, columns)
    classifier = WordClassifier(model, tokenizer)
    numbers = spread_evenly(len(texts), most)
    entries = []
    for place, number in enumerate(numbers):
        label = f"{number + 1}" if names is None else str(names[number])
        text = classifier.read(texts[number], "" if queries is None else queries[number], label)
        right = None if labels is None else int(labels[number])
        scores = {
            name: own.scores[own.texts.index(number)]
            for name, own in found.methods.items()
            if number in own.texts
        }
        if any(len(own) != len(text.words) for own in scores.values()):
            raise ValueError(f"text {text.name} is not the one that was judged: it has other words")
        # Ties as `evaluate` breaks them.
        entries.append(_entry(classifier, text, scores, right, ties, seed + number))
        if report is not None:
            report(place + 1, len(numbers))
    kept = len(numbers)
    shown = (
        [f"{len(texts):,} texts"] if kept == len(texts) else [f"{len(texts):,} texts, {kept} on this page"]
    )
    index = {
        "format": 1,
        "version": __version__,
        "title": title,
        "about": {
            "facts": [*facts, *shown],
            "notes": list(notes),
            "intervals": INTERVALS,
            "shares": list(STEPS),
            "classes": class_names(model, classifier.classes),
            "texts": found.texts,
            "sort": sort or (columns[0] if columns else "name"),
        },
        "measures": [_measure(name, coverage(found, name)) for name in columns]
        + ([_with(SHUFFLED, coverage_after_shuffling(found, shuffled))] if shuffled else []),
        "methods": _methods(found, columns, shuffled or {}),
        "refused": [{"title": title_of(name), "reason": why} for name, why in found.refused.items()],
        "texts": entries,
    }
    return JudgePage(short(index), [], printable(title))


def class_names(model: Any, classes: int) -> list[str]:
    """The names of a model's classes, by its config; numbers where it has none."""
    known = getattr(model.config, "id2label", None) or {}
    return [str(known.get(number, number)) for number in range(classes)]


def spread_evenly(count: int, most: int) -> list[int]:
    """Numbers of at most so many of the texts, spread evenly."""
    if most >= count:
        return list(range(count))
    return [int(place) for place in np.linspace(0, count - 1, most).round()]


def _measure(name: str, some: tuple[str, str] | None = None) -> dict[str, str]:
    better = "less" if name in LESS_IS_BETTER else "more"
    about = MEANINGS.get(name, "")
    return _with({"key": name, "title": heading_of(name), "better": better, "about": about}, some)


def _with(measure: dict[str, str], some: tuple[str, str] | None) -> dict[str, str]:
    """A column, and how many texts it has where it has not all."""
    if some is None:
        return measure
    count, why = some
    return {**measure, "texts": count, "about": f"{measure['about']} Of {count} texts: {why}."}


def _methods(
    found: Evaluation, columns: Sequence[str], shuffled: Mapping[str, Interval]
) -> list[dict[str, Any]]:
    """The table's rows. A method that is `apart` by a measure says so.

    Each measure is a mean, both ends of its interval, whether it is among the best, how many texts it is of,
    and whether they do not tell it to beat random scores.
    """
    ahead = {measure: leading(found, measure) for measure in columns}
    beats = {measure: beating_chance(found, measure) for measure in columns}
    others = {measure: apart(found, measure) for measure in columns}
    rows = []
    for name, own in found.methods.items():
        measures: dict[str, list[Any]] = {}
        for measure in columns:
            if own.measures.get(measure) is not None:
                mean, low, high, texts, _ = found.interval(name, measure)
                chance = not beats[measure].get(name, True)
                measures[measure] = [mean, low, high, name in ahead[measure], texts, chance]
        if name in shuffled:
            measures[SHUFFLED["key"]] = [*shuffled[name][:3], False, shuffled[name].texts, False]
        rows.append(
            {
                "name": name,
                "title": title_of(name),
                "texts": len(own.texts),
                # The best order comes from a search whose answers the normalised measures use as well.
                "seconds": None if name == ORACLE else own.seconds,
                "measures": measures,
                "apart": [measure for measure in columns if name in others[measure]],
                "control": name in CONTROLS,
            }
        )
    return rows


def _entry(
    classifier: WordClassifier,
    text: Text,
    scores: Mapping[str, NDArray[np.float64]],
    label: int | None,
    ties: Ties,
    seed: int,
) -> dict[str, Any]:
    """A text for the page: its words, and what each method makes of them."""
    whole = classifier.probabilities(text, np.ones((1, len(text.words)), dtype=bool))[0]
    predicted = int(whole.argmax())
    methods = {}
    counts = [count_of(share, len(text.words)) for share in STEPS]  # also where no method was judged
    all_steps = steps(classifier, text, list(scores.values()), ties=ties, seed=seed) if scores else []
    for (name, values), own in zip(scores.items(), all_steps, strict=True):
        methods[name] = {
            "scores": values.tolist(),
            "order": own.order[: counts[-1]].tolist(),
            "probabilities": own.probabilities[:, predicted].tolist(),
            "now": own.probabilities.argmax(axis=1).tolist(),
            "top": own.probabilities.max(axis=1).tolist(),
        }
    return {
        "name": text.name,
        "words": list(text.words),
        "cut": text.cut,
        "label": label,
        "predicted": predicted,
        "probability": float(whole[predicted]),
        "counts": counts,
        "methods": methods,
    }


# --- One text, at once ---


def has_head(model: Any) -> bool:
    """Whether a model is a classifier of texts, by its class."""
    from overt.models.rationale import RationaleClassifier

    return type(model).__name__.endswith(HEAD) or isinstance(model, RationaleClassifier)


def live_index(
    model: nn.Module,
    tokenizer: Any,
    text: str,
    *,
    methods: Sequence[str] = LIVE,
    title: str = "",
    why_not: Callable[[str], str | None] = lambda _: None,
    seed: int = 0,
) -> dict[str, Any]:
    """The index of a page with one text, of methods that are quick: nothing is measured but this text.

    Args:
        model: the classifier.
        tokenizer: its tokenizer.
        text: the text.
        methods: of `every_method()`.
        title: of the page.
        why_not: called before each method with its name; a reason leaves it out.
        seed: of ties and random scores.
    """
    classifier = WordClassifier(model, tokenizer)
    read = classifier.read(text, name="1")
    scorer = Scorer(classifier, SHARE, seed, methods=methods)
    scores: dict[str, NDArray[np.float64]] = {}
    refused: dict[str, str] = {}
    for method in methods:
        reason = why_not(method)
        if reason is None:
            try:
                scores[method] = scorer.scores(method, read)
            except ValueError as error:
                reason = str(error).split("\n", 1)[0]
        if reason is not None:
            refused[method] = reason
    entry = _entry(classifier, read, scores, None, "random", seed)
    found = _of_one_text(classifier, read, scores, entry, seed)
    index = {
        "format": 1,
        "version": __version__,
        "title": title,
        "about": {
            "facts": [],
            "notes": [],
            "intervals": "Of this text alone: `overt judge` compares methods over many.",
            "shares": list(STEPS),
            "classes": class_names(model, classifier.classes),
            "texts": 1,
            "sort": "comprehensiveness",
        },
        "measures": [_measure(name) for name in ("comprehensiveness", "sufficiency")],
        "methods": [
            {
                "name": name,
                "title": title_of(name),
                "texts": 1,
                "seconds": scorer.seconds[name][0],
                "measures": found[name],
                "control": name in CONTROLS,
            }
            for name in scores
        ],
        "refused": [{"title": title_of(name), "reason": why} for name, why in refused.items()],
        "texts": [entry],
    }
    plain: dict[str, Any] = short(index)
    return plain


def _of_one_text(
    classifier: WordClassifier,
    text: Text,
    scores: Mapping[str, NDArray[np.float64]],
    entry: Mapping[str, Any],
    seed: int,
) -> dict[str, dict[str, list[Any]]]:
    """Comprehensiveness and sufficiency of each method, without intervals."""
    if not scores:
        return {}
    sets = [np.concatenate(without_and_only(own, seed=seed)) for own in scores.values()]
    asked = classifier.probabilities(text, np.concatenate(sets))[:, entry["predicted"]]
    found = {}
    for name, own in zip(scores, asked.reshape(len(sets), 2, -1), strict=True):
        falls = aopc([entry["probability"]] * 2, own)
        found[name] = {
            measure: [float(fall), None, None, False]
            for measure, fall in zip(("comprehensiveness", "sufficiency"), falls, strict=True)
        }
    return found

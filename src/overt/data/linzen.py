"""Number prediction of Linzen, Dupoux & Goldberg 2016: a sentence up to its verb, and the verb's number.

Read from a folder in the published layout: numpred.train, numpred.val, numpred.test and numpred.test.0 … 5
(by number of attractors), plain or gzipped; a line is a label (VBZ singular, VBP plural), a tab and words.
Where the training file is missing, the rest is split anew, and honestly: see `load`. Without a folder the
sentences come from the package's own grammar.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from random import Random
from typing import Any

from torch import Tensor

from overt.data import agreement
from overt.data.batching import padded
from overt.data.files import data_folder, find_file, read_text

LONGEST = 50  # words; longer prefixes lose their first ones
VALIDATION, TEST = 0.03, 0.12  # of the different prefixes of each file
LEAST = 2  # times that a word must come in different training prefixes to be in the vocabulary
SEED = 0  # of the split, which is the same for every seed of training

SPLIT = "Linzen et al. 2016, the published validation and attractor test files"  # split anew

SPECIAL = ("[PAD]", "[CLS]", "[UNK]")
PAD, CLS, UNK = range(3)
_LABELS = {"VBZ": False, "VBP": True}


@dataclass(frozen=True)
class Prefix:
    """A sentence up to its verb.

    Attributes:
        tokens: the words.
        plural: whether the verb is.
        attractors: nouns of the other number between subject and verb, where the file tells.
    """

    tokens: tuple[str, ...]
    plural: bool
    attractors: int | None = None


@dataclass(frozen=True)
class Corpus:
    """Parts to train, choose and test on.

    Attributes:
        name: what it is.
        train: prefixes to learn from.
        validation: to look at while choosing settings.
        test: for the final numbers.
        by_attractors: number of attractors → prefixes that were not trained on.
        how: how it was split, in words.
        shortened: prefixes that lost words to `LONGEST`.
        overlap: test prefixes that were also trained on; above zero in the published files alone.
    """

    name: str
    train: list[Prefix]
    validation: list[Prefix]
    test: list[Prefix]
    by_attractors: dict[int, list[Prefix]]
    how: str
    shortened: int = 0
    overlap: int = field(init=False)

    def __post_init__(self) -> None:
        learnt = {prefix.tokens for prefix in self.train}
        object.__setattr__(self, "overlap", sum(prefix.tokens in learnt for prefix in self.test))

    @property
    def natural(self) -> list[Prefix]:
        """Test prefixes of the natural mix: those that no file of attractors has."""
        return [prefix for prefix in self.test if prefix.attractors is None]

    @cached_property
    def vocabulary(self) -> tuple[str, ...]:
        """[PAD], [CLS], [UNK], then the words that come at least `LEAST` times in what is trained on.

        Copies of a prefix count once, so that some words are unknown in training too, and [UNK] is learnt.
        """
        counts = Counter(word for tokens in {prefix.tokens for prefix in self.train} for word in tokens)
        return (*SPECIAL, *sorted(word for word, count in counts.items() if count >= LEAST))

    @cached_property
    def index(self) -> dict[str, int]:
        """Word → its place in the vocabulary."""
        return {word: place for place, word in enumerate(self.vocabulary)}

    def encode(self, prefix: Prefix) -> list[int]:
        """The places of the words, with [CLS] put first; [UNK] for a word that the vocabulary has not."""
        return [CLS, *(self.index.get(word, UNK) for word in prefix.tokens)]

    def collate(self, items: Sequence[tuple[int, Prefix]]) -> dict[str, Tensor]:
        """Numbered prefixes as a padded batch for `AgreementClassifier`."""
        return padded(items, self.encode)

    def describe(self) -> dict[str, Any]:
        """Sizes and label balance of the parts, and how they came about."""
        parts = {"train": self.train, "validation": self.validation, "test": self.test}
        parts |= {f"test, {n} attractors": part for n, part in self.by_attractors.items()}
        known = [word in self.index for prefix in self.test for word in prefix.tokens]
        text = "\n".join(
            f"{name} {prefix.plural} {' '.join(prefix.tokens)}" for name in parts for prefix in parts[name]
        )
        parts["test, natural mix"] = self.natural  # not in the sum: the test part has them
        return {
            "name": self.name,
            "split": self.how,
            "parts": {
                name: {
                    "prefixes": len(part),
                    "distinct": len({prefix.tokens for prefix in part}),
                    "plural": round(sum(prefix.plural for prefix in part) / len(part), 4),
                }
                for name, part in parts.items()
                if part
            },
            "vocabulary": len(self.vocabulary),
            "unknown_words_in_test": round(1 - sum(known) / len(known), 4),
            "longest": LONGEST,
            "shortened": self.shortened,
            "test_prefixes_also_trained_on": self.overlap,
            "sha256": hashlib.sha256(text.encode()).hexdigest(),
        }


def sizes(described: dict[str, Any]) -> dict[str, int]:
    """How many prefixes each part has, "natural" and "1", "2", … among them, by what `describe` gave."""
    counts = {name: part["prefixes"] for name, part in described["parts"].items()}
    found = {name: counts[name] for name in ("train", "validation", "test") if name in counts}
    by_attractors = {
        name.removeprefix("test, ").removesuffix(" attractors"): count
        for name, count in counts.items()
        if name.endswith(" attractors")
    }
    if "test, natural mix" in counts:
        found["natural"] = counts["test, natural mix"]
    elif described["name"] == SPLIT:  # described before that part was: what no file of attractors has
        found["natural"] = found["test"] - sum(by_attractors.values())
    return found | by_attractors


def find(folder: Path) -> dict[str, Path]:
    """The files of a folder, or of agreement/ in it: "train", "val", "test" and "test.0" to "test.5"."""
    names = ("train", "val", "test", *(f"test.{n}" for n in range(6)))
    for place in (folder, folder / "agreement"):
        found = {name: find_file(place, f"numpred.{name}") for name in names}
        paths = {name: path for name, path in found.items() if path is not None}
        if "val" in paths and any(name.startswith("test") for name in paths):
            return paths
    raise FileNotFoundError(
        f"{folder} holds no agreement data: numpred.val and numpred.test.1 … 5, here or in agreement/"
    )


def read(path: Path, attractors: int | None = None) -> list[Prefix]:
    """The prefixes of one file, whole."""
    prefixes = []
    for number, line in enumerate(read_text(path).splitlines(), 1):
        label, _, words = line.partition("\t")
        if label not in _LABELS or not words.strip():
            raise ValueError(f"{path}, line {number} must be VBZ or VBP, a tab and words, got {line[:40]!r}")
        prefixes.append(Prefix(tuple(words.split()), _LABELS[label], attractors))
    return prefixes


def load(data: Path | None, seed: int = 0) -> Corpus:
    """The agreement data of a folder (else of OVERT_DATA), or else sentences of the package's grammar.

    With numpred.train and a test set of the natural mix (numpred.test, or numpred.test.0 and the others) the
    published parts are used as published. Otherwise the same share of numpred.val, which is of the natural
    mix, and of each numpred.test.n is held out to test and to validate on, and the rest is trained on. Every
    prefix counts once then and belongs to one part.

    Args:
        data: the folder, or the one that holds agreement/.
        seed: of the grammar's sentences; files are split alike for every seed.
    """
    folder = data_folder(data)
    if folder is None:
        return _grammar(seed)
    paths = find(folder)
    files = {name: read(path, int(name[5:]) if name[5:] else None) for name, path in paths.items()}
    shortened = sum(len(prefix.tokens) > LONGEST for part in files.values() for prefix in part)
    files = {name: [_cut(prefix) for prefix in part] for name, part in files.items()}
    by_attractors = {int(name[5:]): part for name, part in files.items() if name.startswith("test.")}
    if "train" in files and ("test" in files or 0 in by_attractors):
        whole = files.get("test") or [prefix for part in by_attractors.values() for prefix in part]
        return Corpus(
            "Linzen et al. 2016, the published parts",
            files["train"],
            files["val"],
            whole,
            by_attractors,
            "as published; duplicates across parts are in the published files too",
            shortened,
        )
    extra = files.get("train", [])
    return _split(files["val"], by_attractors, extra, shortened)


def _cut(prefix: Prefix) -> Prefix:
    """The last words of a long prefix: those near the verb."""
    return Prefix(prefix.tokens[-LONGEST:], prefix.plural, prefix.attractors)


def _split(
    natural: Sequence[Prefix],
    by_attractors: dict[int, list[Prefix]],
    extra: Sequence[Prefix],
    shortened: int,
) -> Corpus:
    """A split of the published validation and test files in which no prefix is in two parts.

    The same share of every file is held out, so that what is tested on is of the mix that is learnt from.
    """
    seen: set[tuple[str, ...]] = set()
    test: list[Prefix] = []
    validation: list[Prefix] = []
    train: list[Prefix] = []
    held: dict[int, list[Prefix]] = {}
    for n, prefixes in (None, natural), *sorted(by_attractors.items()):
        distinct = list({prefix.tokens: prefix for prefix in prefixes if prefix.tokens not in seen}.values())
        seen.update(prefix.tokens for prefix in distinct)
        Random(SEED).shuffle(distinct)
        tested, chosen = round(TEST * len(distinct)), round(VALIDATION * len(distinct))
        test += distinct[:tested]
        validation += distinct[tested : tested + chosen]
        train += distinct[tested + chosen :]
        if n is not None and tested:
            held[n] = distinct[:tested]
    train += [prefix for prefix in dict.fromkeys(extra) if prefix.tokens not in seen]
    if not (train and test and validation):
        raise ValueError(f"the agreement files hold {len(seen)} different prefixes, too few to split")
    for part in (test, validation, train):
        Random(SEED).shuffle(part)
    return Corpus(
        SPLIT,
        train,
        validation,
        test,
        held,
        "numpred.train is not in the folder: each different prefix once, in one part only; of every file "
        f"{TEST:.0%} are tested on and {VALIDATION:.0%} validated on, the rest is learnt from. Most of it is "
        "from the files with attractors, which are rare in running text",
        shortened,
    )


def _grammar(seed: int) -> Corpus:
    """Sentences of the package's own grammar, in the same form."""
    learnt, measured = agreement.split(16_000, 2_000, seed)
    train, test = ([Prefix(s.tokens, s.plural, s.attractors) for s in part] for part in (learnt, measured))
    first = {prefix.tokens for prefix in train[:1_000]}
    counts = sorted({prefix.attractors or 0 for prefix in test})
    return Corpus(
        "no data: sentences of the package's own grammar, easier than Linzen's",
        [prefix for prefix in train[1_000:] if prefix.tokens not in first],
        train[:1_000],
        test,
        {n: [prefix for prefix in test if prefix.attractors == n] for n in counts},
        "generated: trained on a natural mix of attractors, tested on a balanced one; "
        "no test or validation sentence is trained on",
    )

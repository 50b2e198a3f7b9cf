"""Number prediction of Linzen, Dupoux & Goldberg 2016: predict a verb's number from the words before it.

The folder has the published layout: numpred.train, numpred.val, numpred.test and numpred.test.0 … 5 (by
number of attractors), plain or gzipped. Each line is a label (VBZ singular, VBP plural), a tab and words.
If the training file is missing, the other files are split anew, without overlap: see `load`. Without a folder
the sentences come from the package's own grammar.
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
from overt.data.batching import pad_batch
from overt.data.files import data_folder, find_file, read_text

LONGEST = 50  # words; longer prefixes lose their first words
VALIDATION, TEST = 0.03, 0.12  # shares of the distinct prefixes of each file
LEAST = 2  # occurrences in distinct training prefixes that a word needs to be in the vocabulary
SEED = 0  # of the split, which is the same for every training seed

SPLIT = "Linzen et al. 2016, the published validation and attractor test files"  # split by `_split`

SPECIAL = ("[PAD]", "[CLS]", "[UNK]")
END = "<eos>"  # ends every prefix of a corpus that is `ended`
PAD, CLS, UNK = range(3)
_LABELS = {"VBZ": False, "VBP": True}


@dataclass(frozen=True)
class Prefix:
    """A sentence cut off before its verb.

    Attributes:
        tokens: the words.
        plural: whether the verb is plural.
        attractors: number of nouns between subject and verb with the opposite number of the verb; None if the
            file does not say.
    """

    tokens: tuple[str, ...]
    plural: bool
    attractors: int | None = None


@dataclass(frozen=True)
class Corpus:
    """Training, validation and test prefixes.

    Attributes:
        name: description of the data.
        train: prefixes to train on.
        validation: prefixes to choose settings on.
        test: prefixes for the final numbers.
        by_attractors: number of attractors → held-out prefixes.
        how: description of the split.
        shortened: number of prefixes cut to `LONGEST` words.
        ended: whether `END` follows the words of every prefix.
        overlap: number of test prefixes that are also in the training set; positive only in the published
            files.
    """

    name: str
    train: list[Prefix]
    validation: list[Prefix]
    test: list[Prefix]
    by_attractors: dict[int, list[Prefix]]
    how: str
    shortened: int = 0
    ended: bool = False
    overlap: int = field(init=False)

    def __post_init__(self) -> None:
        training_tokens = {prefix.tokens for prefix in self.train}
        object.__setattr__(self, "overlap", sum(prefix.tokens in training_tokens for prefix in self.test))

    @property
    def natural(self) -> list[Prefix]:
        """Test prefixes of the natural mix: those not taken from an attractor file."""
        return [prefix for prefix in self.test if prefix.attractors is None]

    @cached_property
    def vocabulary(self) -> tuple[str, ...]:
        """[PAD], [CLS], [UNK], then the words that occur at least `LEAST` times in the training prefixes.

        Copies of a prefix count once, so that some training words are unknown and [UNK] is learnt. The last
        is `END`, if prefixes are ended.
        """
        counts = Counter(word for tokens in {prefix.tokens for prefix in self.train} for word in tokens)
        words = sorted(word for word, count in counts.items() if count >= LEAST)
        return (*SPECIAL, *words, *((END,) if self.ended else ()))

    @property
    def end(self) -> int | None:
        """Id of the token that ends every prefix; None if there is none."""
        return len(self.vocabulary) - 1 if self.ended else None

    @property
    def longest(self) -> int:
        """Tokens of the longest input."""
        return LONGEST + 1 + self.ended

    @cached_property
    def index(self) -> dict[str, int]:
        """Word → its index in the vocabulary."""
        return {word: place for place, word in enumerate(self.vocabulary)}

    def encode(self, prefix: Prefix) -> list[int]:
        """Token ids, from [CLS] on, and to `END` if there is one; unknown words become [UNK]."""
        words = [self.index.get(word, UNK) for word in prefix.tokens]
        return [CLS, *words, *([] if self.end is None else [self.end])]

    def collate(self, items: Sequence[tuple[int, Prefix]]) -> dict[str, Tensor]:
        """Numbered prefixes as a padded batch for `AgreementClassifier`."""
        return pad_batch(items, self.encode)

    def describe(self) -> dict[str, Any]:
        """Sizes and label balance of the parts, and how the data were split."""
        parts = {"train": self.train, "validation": self.validation, "test": self.test}
        parts |= {f"test, {n} attractors": part for n, part in self.by_attractors.items()}
        known = [word in self.index for prefix in self.test for word in prefix.tokens]
        text = "\n".join(
            f"{name} {prefix.plural} {' '.join(prefix.tokens)}" for name in parts for prefix in parts[name]
        )
        parts["test, natural mix"] = self.natural  # not in the hash: these are part of test
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


def part_sizes(description: dict[str, Any]) -> dict[str, int]:
    """Number of prefixes of each part, including "natural" and "1", "2", …, from a `Corpus.describe`."""
    counts = {name: part["prefixes"] for name, part in description["parts"].items()}
    sizes = {name: counts[name] for name in ("train", "validation", "test") if name in counts}
    by_attractors = {
        name.removeprefix("test, ").removesuffix(" attractors"): count
        for name, count in counts.items()
        if name.endswith(" attractors")
    }
    if "test, natural mix" in counts:
        sizes["natural"] = counts["test, natural mix"]
    elif description["name"] == SPLIT:  # an older description, without that part
        sizes["natural"] = sizes["test"] - sum(by_attractors.values())
    return sizes | by_attractors


def find(folder: Path) -> dict[str, Path]:
    """The files of a folder, or of agreement/ in it: "train", "val", "test" and "test.0" to "test.5"."""
    names = ("train", "val", "test", *(f"test.{n}" for n in range(6)))
    for place in (folder, folder / "agreement"):
        candidates = {name: find_file(place, f"numpred.{name}") for name in names}
        paths = {name: path for name, path in candidates.items() if path is not None}
        if "val" in paths and any(name.startswith("test") for name in paths):
            return paths
    raise FileNotFoundError(
        f"{folder} has no agreement data: put numpred.val and numpred.test.1 … 5 there or in agreement/"
    )


def read(path: Path, attractors: int | None = None) -> list[Prefix]:
    """The prefixes of one file, at full length."""
    prefixes = []
    for number, line in enumerate(read_text(path).splitlines(), 1):
        label, _, words = line.partition("\t")
        if label not in _LABELS or not words.strip():
            raise ValueError(f"{path}, line {number} must be VBZ or VBP, a tab and words, got {line[:40]!r}")
        prefixes.append(Prefix(tuple(words.split()), _LABELS[label], attractors))
    return prefixes


def load(data: Path | None, seed: int = 0) -> Corpus:
    """The agreement data of a folder (by default OVERT_DATA), or else sentences of the package's grammar.

    With numpred.train and a test set of the natural mix (numpred.test, or numpred.test.0 and the others) the
    parts are used as published. Otherwise the same share of numpred.val, which has the natural mix, and of
    each numpred.test.n is held out for testing and validation, and the rest is for training. In that case
    every prefix counts once and belongs to one part.

    Args:
        data: the folder, or the folder that contains agreement/.
        seed: of the grammar's sentences; the split of files does not depend on it.
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
    """Cut a long prefix to its last words, those near the verb."""
    return Prefix(prefix.tokens[-LONGEST:], prefix.plural, prefix.attractors)


def _split(
    natural: Sequence[Prefix],
    by_attractors: dict[int, list[Prefix]],
    extra: Sequence[Prefix],
    shortened: int,
) -> Corpus:
    """Split the published validation and test files so that no prefix is in two parts.

    The same share of every file is held out, so that test and training data have the same mix.
    """
    seen: set[tuple[str, ...]] = set()
    test: list[Prefix] = []
    validation: list[Prefix] = []
    train: list[Prefix] = []
    held_out: dict[int, list[Prefix]] = {}
    for n, prefixes in (None, natural), *sorted(by_attractors.items()):
        distinct = list({prefix.tokens: prefix for prefix in prefixes if prefix.tokens not in seen}.values())
        seen.update(prefix.tokens for prefix in distinct)
        Random(SEED).shuffle(distinct)
        tested, chosen = round(TEST * len(distinct)), round(VALIDATION * len(distinct))
        test += distinct[:tested]
        validation += distinct[tested : tested + chosen]
        train += distinct[tested + chosen :]
        if n is not None and tested:
            held_out[n] = distinct[:tested]
    train += [prefix for prefix in dict.fromkeys(extra) if prefix.tokens not in seen]
    if not (train and test and validation):
        raise ValueError(f"the agreement files have {len(seen)} distinct prefixes, which is too few to split")
    for part in (test, validation, train):
        Random(SEED).shuffle(part)
    return Corpus(
        SPLIT,
        train,
        validation,
        test,
        held_out,
        "numpred.train is not in the folder, so each distinct prefix is used once, in one part only: of "
        f"every file {TEST:.0%} for testing, {VALIDATION:.0%} for validation and the rest for training. Most "
        "prefixes come from the files with attractors, which are rare in running text",
        shortened,
    )


def _grammar(seed: int) -> Corpus:
    """Sentences of the package's own grammar, as a corpus."""
    parts = agreement.split(16_000, 2_000, seed)
    train, test = ([Prefix(s.tokens, s.plural, s.attractors) for s in part] for part in parts)
    validation_tokens = {prefix.tokens for prefix in train[:1_000]}
    counts = sorted({prefix.attractors or 0 for prefix in test})
    return Corpus(
        "no data: sentences of the package's own grammar, easier than Linzen's",
        [prefix for prefix in train[1_000:] if prefix.tokens not in validation_tokens],
        train[:1_000],
        test,
        {n: [prefix for prefix in test if prefix.attractors == n] for n in counts},
        "generated: a natural mix of attractors for training, a balanced one for testing; "
        "no test or validation sentence is in the training set",
    )

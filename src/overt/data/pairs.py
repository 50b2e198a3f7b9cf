"""Parallel corpora: Multi30k, IWSLT'14 and any folder of train, valid and test files, plain or gzipped."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from overt.data.files import data_folder, find_file, read_text

MULTI30K, IWSLT14 = "multi30k", "iwslt14"
IWSLT14_TRAIN = 160_239  # pairs of the whole training set
_SPLITS = {"train": ("train", "train_partial"), "valid": ("valid", "val", "dev"), "test": ("test",)}
_PIECE = "@@ "  # marks a word that goes on, in text already split into BPE pieces


class Pair(NamedTuple):
    """A sentence and its translation."""

    source: str
    target: str


@dataclass(frozen=True)
class Corpus:
    """A parallel corpus in one direction.

    Attributes:
        name: of the data set, or of its folder.
        source: language that is translated from.
        target: language that is translated to.
        train: training pairs.
        valid: validation pairs.
        test: test pairs.
        references: targets of the test pairs as they were before tokenisation, if there are such files.
        tokenised: whether words and punctuation marks are separated by spaces, as Moses does.
        codes: the merges of published BPE codes, if the folder has them.
        remark: what a reader of the results needs to know about the data.
        stand_in: whether it is the package's own language.
        was_in_pieces: whether its files were split into BPE pieces, which have been joined.
    """

    name: str
    source: str
    target: str
    train: list[Pair]
    valid: list[Pair]
    test: list[Pair]
    references: list[str] | None = None
    tokenised: bool = True
    codes: str | None = None
    remark: str | None = None
    stand_in: bool = False
    was_in_pieces: bool = False

    @property
    def direction(self) -> str:
        """Source and target, as in "de-en"."""
        return f"{self.source}-{self.target}"

    def sha256(self) -> str:
        """Hash of all sentences, which tells whether two runs had the same data."""
        digest = hashlib.sha256()
        for pairs in (self.train, self.valid, self.test):
            for pair in pairs:
                digest.update(f"{pair.source}\t{pair.target}\n".encode())
            digest.update(b"\n")
        return digest.hexdigest()

    def describe(self) -> dict[str, Any]:
        """Sizes and hash, for a result file."""
        return {
            "name": self.name,
            "direction": self.direction,
            "train": len(self.train),
            "valid": len(self.valid),
            "test": len(self.test),
            "remark": self.remark,
            "sha256": self.sha256(),
        }

    def shortened(self, train: int | None = None, test: int | None = None) -> Corpus:
        """The corpus with fewer training or test pairs: the first ones."""
        references = None if self.references is None else self.references[:test]
        return replace(self, train=self.train[:train], test=self.test[:test], references=references)


def load(dataset: str, data: Path | None = None, direction: str = "de-en") -> Corpus:
    """Load a data set by its name, or from a folder.

    Args:
        dataset: "multi30k", "iwslt14", or a folder with train, valid and test files ending in the languages.
        data: folder with data sets; by default OVERT_DATA.
        direction: source and target language, such as "de-en".
    """
    source, target = languages(direction)
    if dataset in (MULTI30K, IWSLT14):
        data = data_folder(data)
        if data is None:
            raise FileNotFoundError(f"--dataset {dataset} needs --data DIR (or OVERT_DATA)")
        if {source, target} != {"de", "en"}:
            raise ValueError(f"--direction must be de-en or en-de for {dataset}, got {direction}")
        return (_multi30k if dataset == MULTI30K else _iwslt14)(data, source, target)
    folder = Path(dataset)
    if not folder.is_dir():
        raise FileNotFoundError(f"--dataset must be {MULTI30K}, {IWSLT14} or a folder, got {dataset}")
    return _folder(folder, source, target)


def has(dataset: str, data: Path | None = None) -> bool:
    """Whether a data set of that name, or the folder, is there at all."""
    data = data_folder(data)
    if dataset not in (MULTI30K, IWSLT14):
        return True  # `load` names what is wrong with a folder
    if data is None:
        return False
    return any(_multi30k_folders(data)) if dataset == MULTI30K else bool(_iwslt14_folder(data))


def languages(direction: str) -> tuple[str, str]:
    """Source and target of a direction."""
    match = re.fullmatch(r"([a-z]{2,3})-([a-z]{2,3})", direction)
    if match is None or match[1] == match[2]:
        raise ValueError(f"--direction must be two languages, such as de-en, got {direction}")
    return match[1], match[2]


def _multi30k_folders(data: Path) -> tuple[Path | None, Path | None]:
    """Multi30k's folders of tokenised and of raw text, as far as they exist."""
    for folder in (data / MULTI30K, data / MULTI30K / "data" / "task1", data / "data" / "task1", data):
        tokenised = folder / "tok" if find_file(folder / "tok", "train.lc.norm.tok.en") else None
        raw = folder / "raw" if find_file(folder / "raw", "train.en") else None
        if tokenised or raw:
            return tokenised, raw
    return None, None


def _multi30k(data: Path, source: str, target: str) -> Corpus:
    tokenised, raw = _multi30k_folders(data)
    if tokenised is None and raw is None:
        raise FileNotFoundError(
            f"{data} has no Multi30k data: put its tok/ (train.lc.norm.tok.de, …) or raw/ (train.de, …) "
            f"there, or into {MULTI30K}/"
        )
    suffix = "" if tokenised is None else ".lc.norm.tok"
    folder = raw if tokenised is None else tokenised
    assert folder is not None
    names = {"train": "train", "valid": "val", "test": "test_2016_flickr"}
    train, valid, test = (_pairs(folder, f"{name}{suffix}", source, target) for name in names.values())
    references = None
    if tokenised is not None and raw is not None:
        references = read_lines(_file(raw, f"test_2016_flickr.{target}"))
        _check_counts(len(test), tokenised, len(references), raw)
    return Corpus(
        MULTI30K, source, target, train, valid, test, references, tokenised=tokenised is not None,
        remark="test set 2016",
    )  # fmt: skip


def _iwslt14_folder(data: Path) -> Path | None:
    folders = (data / IWSLT14, data / "iwslt14.tokenized.de-en", data)
    return next((folder for folder in folders if _stem(folder, "train", "de", "en")), None)


def _iwslt14(data: Path, source: str, target: str) -> Corpus:
    folder = _iwslt14_folder(data)
    if folder is None:
        raise FileNotFoundError(
            f"{data} has no IWSLT'14 data: put train, valid and test files ending in .de and .en there, into "
            f"{IWSLT14}/ or into iwslt14.tokenized.de-en/"
        )
    corpus = replace(_folder(folder, source, target), name=IWSLT14, tokenised=True)
    if len(corpus.train) >= IWSLT14_TRAIN:
        return corpus
    part = f"{len(corpus.train):,} of the {IWSLT14_TRAIN:,} training pairs"
    return replace(corpus, remark=part)


def _folder(folder: Path, source: str, target: str) -> Corpus:
    """A folder of train, valid and test files that end in the languages, plain or split into BPE pieces."""
    splits: dict[str, list[Pair]] = {}
    for split in _SPLITS:
        stem = _stem(folder, split, source, target)
        if stem is None:
            names = " or ".join(f"{name}.{source} and {name}.{target}" for name in _SPLITS[split])
            found = ", ".join(sorted(path.name for path in folder.iterdir() if path.is_file())[:12])
            raise FileNotFoundError(f"{folder} must have {names}; it has {found or 'no files'}")
        splits[split] = _pairs(folder, stem, source, target)
    codes = next((path for place in ("", "10k_bpe") if (path := find_file(folder / place, "code"))), None)
    tokenised = _looks_tokenised([pair.target for pair in splits["test"]])
    text = None if codes is None else read_text(codes)
    pieces = any(in_pieces(side for pair in pairs for side in pair) for pairs in splits.values())
    train, valid, test = ([Pair(*map(join_pieces, pair)) for pair in pairs] for pairs in splits.values())
    return Corpus(
        folder.resolve().name,
        source,
        target,
        train,
        valid,
        test,
        tokenised=tokenised,
        codes=text,
        was_in_pieces=pieces,
    )


def _stem(folder: Path, split: str, source: str, target: str) -> str | None:
    """The name of a split's files without the language; None if there is neither of them."""
    pairs = f"{source}-{target}", f"{target}-{source}"
    stems = [stem for name in _SPLITS[split] for stem in (name, *(f"{name}.{pair}" for pair in pairs))]
    for stem in stems:
        if find_file(folder, f"{stem}.{source}") or find_file(folder, f"{stem}.{target}"):
            return stem
    return None


def _file(folder: Path, name: str) -> Path:
    path = find_file(folder, name)
    if path is None:
        raise FileNotFoundError(f"{folder} has no {name} (or {name}.gz)")
    return path


def read_lines(path: Path) -> list[str]:
    """The lines of a text file."""
    text = read_text(path).removeprefix("\ufeff")
    # Only line feeds separate lines: some sentences hold other characters that Python would split at.
    lines = text.replace("\r\n", "\n").split("\n")
    return lines[:-1] if lines and not lines[-1] else lines


def _check_counts(count: int, path: Path, other: int, other_path: Path) -> None:
    if count != other:
        raise ValueError(
            f"{path} has {count:,} lines and {other_path} {other:,}: line n of one must translate line n of "
            "the other"
        )


def _pairs(folder: Path, stem: str, source: str, target: str) -> list[Pair]:
    """The pairs of two files."""
    paths = _file(folder, f"{stem}.{source}"), _file(folder, f"{stem}.{target}")
    sources, targets = map(read_lines, paths)
    _check_counts(len(sources), paths[0], len(targets), paths[1])
    if not sources:
        raise ValueError(f"{paths[0]} and {paths[1]} are empty")
    pairs = zip(sources, targets, strict=True)
    return [Pair(one.strip(), other.strip()) for one, other in pairs]


def join_pieces(line: str) -> str:
    """A line with words that were split into BPE pieces ("vern@@ ü@@ gen") joined."""
    return line.replace(_PIECE, "") if _PIECE in line else line


def in_pieces(lines: Iterable[str]) -> bool:
    """Whether text is already split into BPE pieces."""
    return any(_PIECE in line for line in lines)


def _looks_tokenised(lines: Sequence[str]) -> bool:
    """Whether most sentences have a space before their final mark, or some have Moses' escapes."""
    if any(" @-@ " in line or "&apos;" in line for line in lines):
        return True
    final = [line for line in lines if line[-1:] in (".", "!", "?")]
    return sum(line[-2:-1] == " " for line in final) > len(final) / 2

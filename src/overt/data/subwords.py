"""Byte pair encoding (Sennrich et al. 2016) by `tokenizers`: trained and made canonical, or read from codes.

Words are separated by spaces. A piece that ends a word has the suffix "</w>".
"""

from __future__ import annotations

import hashlib
import heapq
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from overt import _check

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

PAD, EOS, UNKNOWN = "<pad>", "</s>", "<unk>"
SPECIAL = (PAD, EOS, UNKNOWN)
PAD_ID, EOS_ID, UNKNOWN_ID = range(3)
END = "</w>"
Merge = tuple[str, str]


def train(lines: Sequence[str], size: int) -> Tokenizer:
    """Train a vocabulary of `size` pieces, special tokens included.

    `tokenizers` numbers pieces differently from run to run, and orders merges of equal frequency differently.
    Here merges are sorted by frequency and then by their letters, so that equal text gives equal ids.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    _check.whole("the size of the vocabulary", size, len(SPECIAL) + 1)
    raw = Tokenizer(models.BPE(unk_token=UNKNOWN, end_of_word_suffix=END))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=list(SPECIAL), end_of_word_suffix=END, show_progress=False
    )
    raw.train_from_iterator(lines, trainer)
    learned = json.loads(raw.to_str())["model"]
    merges = _canonical([(one, other) for one, other in learned["merges"]], lines)
    joined = {one + other for one, other in merges}
    return _tokenizer(sorted(set(learned["vocab"]) - joined - set(SPECIAL)), merges)


def from_codes(codes: str, lines: Iterable[str]) -> Tokenizer:
    """The vocabulary of published codes, in the format of subword-nmt, and of the letters in `lines`."""
    merges: list[Merge] = []
    made: set[str] = set()
    if codes.startswith("#version: 0.1"):
        raise ValueError(
            "codes of version 0.1 mark ends of words differently: make them anew with subword-nmt"
        )
    for number, line in enumerate(codes.split("\n"), start=1):
        parts = line.split()
        if not parts or line.startswith("#version"):
            continue
        if len(parts) not in (2, 3):  # the third is a frequency
            raise ValueError(f"codes, line {number}: a merge is two pieces, got {line[:60]!r}")
        for part in parts[:2]:
            if len(part.removesuffix(END)) != 1 and part not in made:
                raise ValueError(f"codes, line {number}: {part!r} is no letter, and no earlier line makes it")
        merges.append((parts[0], parts[1]))
        made.add(parts[0] + parts[1])
    letters = {letter for line in lines for letter in line if not letter.isspace()}
    letters |= {piece for merge in merges for piece in merge if len(piece.removesuffix(END)) == 1}
    alphabet = {letter.removesuffix(END) for letter in letters}
    return _tokenizer(sorted(alphabet | {letter + END for letter in alphabet}), merges)


def _tokenizer(alphabet: Sequence[str], merges: Sequence[Merge]) -> Tokenizer:
    """The tokenizer of an alphabet and of merges: special tokens, letters, then joined pieces, in order."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    pieces = [*SPECIAL, *alphabet, *(one + other for one, other in merges)]
    vocabulary = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=list(merges), unk_token=UNKNOWN, end_of_word_suffix=END)
    )
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.BPEDecoder(suffix=END)
    ends = [(EOS, EOS_ID)]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {EOS}", pair=f"$A {EOS} $B {EOS}", special_tokens=ends
    )
    return tokenizer


def _canonical(merges: Sequence[Merge], lines: Sequence[str]) -> list[Merge]:
    """Merges by falling frequency, equal ones in alphabetical order, each after those it is built on."""
    used = _frequencies(merges, lines)
    products = {one + other for one, other in merges}
    made: set[str] = set()
    waiting: dict[str, list[int]] = defaultdict(list)
    ready: list[tuple[int, Merge, int]] = []

    def queue(number: int) -> None:
        missing = next((part for part in merges[number] if part in products and part not in made), None)
        if missing is None:
            heapq.heappush(ready, (-used[number], merges[number], number))
        else:
            waiting[missing].append(number)

    for number in range(len(merges)):
        queue(number)
    order = []
    while ready:
        _, merge, _ = heapq.heappop(ready)
        order.append(merge)
        made.add("".join(merge))
        for number in waiting.pop("".join(merge), []):
            queue(number)
    return order


def _frequencies(merges: Sequence[Merge], lines: Sequence[str]) -> list[int]:
    """How often each merge is applied to the text."""
    rank = {merge: number for number, merge in enumerate(merges)}
    used = [0] * len(merges)
    never = len(merges)
    for word, count in Counter(word for line in lines for word in line.split()).items():
        parts = [*word[:-1], word[-1] + END]
        while len(parts) > 1:
            best = min(rank.get(pair, never) for pair in pairwise(parts))
            if best == never:
                break
            joined, place = [], 0
            while place < len(parts):
                if tuple(parts[place : place + 2]) == merges[best]:
                    joined.append(parts[place] + parts[place + 1])
                    used[best] += count
                    place += 2
                else:
                    joined.append(parts[place])
                    place += 1
            parts = joined
    return used


def sha256(tokenizer: Tokenizer) -> str:
    """Hash of a vocabulary and its merges."""
    model = json.loads(tokenizer.to_str())["model"]
    content = json.dumps([sorted(model["vocab"].items(), key=lambda item: item[1]), model["merges"]])
    return hashlib.sha256(content.encode()).hexdigest()


def fast(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """The tokenizer as one of Hugging Face's, which is saved with a model."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS, unk_token=UNKNOWN,
        model_input_names=["input_ids", "attention_mask"],
    )  # fmt: skip

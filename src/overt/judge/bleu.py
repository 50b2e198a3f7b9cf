"""BLEU by sacrebleu, in the two ways that papers on translation report it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from overt._extras import need

_MOSES = re.compile(r" @-@ |&(apos|quot|amp|lt|gt|#91|#93|#124);")


class Bleu(NamedTuple):
    """A score, with sacrebleu's description of how it was computed."""

    score: float
    signature: str


def tokenised_bleu(hypotheses: Sequence[str], references: Sequence[str]) -> Bleu:
    """BLEU on tokenised text as it stands, with hyphenated words split: what Evolving Attention reports.

    Without the split it is that of Moses' `multi-bleu.perl`.
    """
    _check(hypotheses, references)
    return _bleu(map(split_hyphens, hypotheses), map(split_hyphens, references), tokenize="none")


def multi_bleu(hypotheses: Sequence[str], references: Sequence[str]) -> Bleu:
    """BLEU on tokenised text as it stands, as Moses' `multi-bleu.perl` computes it."""
    _check(hypotheses, references)
    return _bleu(hypotheses, references, tokenize="none")


def plain_bleu(hypotheses: Sequence[str], references: Sequence[str], lowercase: bool = False) -> Bleu:
    """BLEU on ordinary text, tokenised by sacrebleu ("13a"), which other papers can be compared with.

    Text that was tokenised before is refused: it scores some three points too high. `detokenise` it first.
    """
    _check(hypotheses, references)
    for lines in (hypotheses, references):
        tokenised = next((line for line in lines if _MOSES.search(line)), None)
        if tokenised is not None:
            raise ValueError(
                f"BLEU with 13a needs ordinary text, and this is tokenised: {tokenised[:80]!r}; detokenise it"
            )
    return _bleu(hypotheses, references, tokenize="13a", lowercase=lowercase)


def detokenise(lines: Sequence[str], language: str) -> list[str]:
    """Text without the spaces and escapes of Moses' tokeniser."""
    moses = need("sacremoses", "translation").MosesDetokenizer(lang=language)
    return [str(moses.detokenize(line.split())) for line in lines]


def tokenise(lines: Sequence[str], language: str) -> list[str]:
    """Text with words and punctuation marks separated, as Moses' tokeniser does, without its escapes."""
    moses = need("sacremoses", "translation").MosesTokenizer(lang=language)
    return [str(moses.tokenize(line, return_str=True, escape=False)) for line in lines]


def split_hyphens(line: str) -> str:
    """A line with "word-word" as "word ##AT##-##AT## word", as in HAT's evaluation."""
    return re.sub(r"(\S)-(\S)", r"\1 ##AT##-##AT## \2", line)


def paired_bootstrap(
    references: Sequence[str], baseline: Sequence[str], other: Sequence[str], samples: int = 1000
) -> float:
    """p of sacrebleu's paired bootstrap (Koehn 2004) for equal BLEU of two systems on tokenised text."""
    sacrebleu: Any = need("sacrebleu", "translation")
    significance: Any = need("sacrebleu.significance", "translation")

    for lines in (baseline, other):
        _check(lines, references)
    systems = [
        (name, [split_hyphens(line) for line in lines]) for name, lines in (("a", baseline), ("b", other))
    ]
    metric = sacrebleu.BLEU(tokenize="none", smooth_method="none", force=True)
    reference = [[split_hyphens(line) for line in references]]
    test = significance.PairedTest(systems, {"BLEU": metric}, reference, test_type="bs", n_samples=samples)
    _, results = test()
    first, second = results["BLEU"]
    # sacrebleu counts samples that differ by more than the systems do; none does where the systems are equal.
    return 1.0 if first.score == second.score else float(second.p_value)


def _bleu(hypotheses: Any, references: Any, **settings: Any) -> Bleu:
    sacrebleu: Any = need("sacrebleu", "translation")
    metric = sacrebleu.BLEU(smooth_method="none", force=True, **settings)
    score = metric.corpus_score(list(hypotheses), [list(references)])
    return Bleu(float(score.score), str(metric.get_signature()))


def _check(hypotheses: Sequence[str], references: Sequence[str]) -> None:
    if len(hypotheses) != len(references):
        raise ValueError(
            f"BLEU needs one reference each: got {len(hypotheses)} hypotheses, {len(references)}"
        )
    if not references:
        raise ValueError("BLEU needs at least one sentence, got none")

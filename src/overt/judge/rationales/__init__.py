"""Rationales: do the words that a method names agree with people's, and do they matter to the classifier?

Measures of the ERASER benchmark (DeYoung et al. 2020) on plain arrays, and `evaluate` for a classifier.
"""

from overt.judge.rationales.deleting import (
    SHARES,
    Attainable,
    Curves,
    Normalised,
    aopc,
    attainable,
    chosen,
    curves,
    log_odds,
    normalised_aopc,
    ranked,
    without_and_only,
)
from overt.judge.rationales.evaluation import Evaluation, Rationales, evaluate
from overt.judge.rationales.measures import Agreement, auprc, iou_f1, spans_of, token_f1, words_in
from overt.judge.rationales.methods import METHODS, every_method, title_of

__all__ = [
    "METHODS",
    "SHARES",
    "Agreement",
    "Attainable",
    "Curves",
    "Evaluation",
    "Normalised",
    "Rationales",
    "aopc",
    "attainable",
    "auprc",
    "chosen",
    "curves",
    "evaluate",
    "every_method",
    "iou_f1",
    "log_odds",
    "normalised_aopc",
    "ranked",
    "spans_of",
    "title_of",
    "token_f1",
    "without_and_only",
    "words_in",
]

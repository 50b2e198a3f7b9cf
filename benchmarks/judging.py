"""All parts of a sentence, read by a causal language model: each beginning once, and each part for itself.

A model of SmolLM2-135M's width with random weights, or the one of `--model`, says of the verb that follows
whether it is singular. The 2ⁿ parts of n words are what the best order of deletion asks about. The rival is
what a user would write: parts sorted by length, in padded batches, of whichever size is the fastest here.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from overt.data.agreement import VOCABULARY
from overt.judge.rationales import words
from overt.judge.rationales.words import Text, WordClassifier
from overt.recipes.faithfulness_models import VERBS, VerbNumber, grammar_tokenizer, load_verb_number

# All different: equal words make equal parts, which are read once in any case.
SENTENCE = (
    "the",
    "keys",
    "near",
    "my",
    "cabinet",
    "beside",
    "your",
    "doors",
    "behind",
    "our",
    "old",
    "house",
)
SIZES = (2**9, 2**10, 2**11, 2**12, 2**13)  # tokens of a batch


def random_model(layers: int) -> tuple[VerbNumber, Any]:
    """A network of SmolLM2's width, and a tokenizer of whole words."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=576,
        intermediate_size=1536,
        num_attention_heads=9,
        num_key_value_heads=3,
        num_hidden_layers=layers,
    )
    ids = {verb: [number] for number, verb in enumerate((*VERBS[0], *VERBS[1]), start=4)}  # any six words
    made: Any = LlamaForCausalLM(config)  # type: ignore[no-untyped-call]
    return VerbNumber(made, lambda verb, **_: {"input_ids": ids[verb]}).eval(), grammar_tokenizer()


def seconds(classifier: WordClassifier, text: Text, kept: Any, repeats: int) -> tuple[float, Any]:
    """The least time of several, and the probabilities."""
    spent, found = [], None
    for _ in range(repeats):
        begun = time.perf_counter()
        found = classifier.probabilities(text, kept)
        spent.append(time.perf_counter() - begun)
    return min(spent), found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="a causal language model, a folder; by default a random one")
    parser.add_argument("--layers", type=int, default=4, help="of the random one")
    parser.add_argument("--words", type=int, nargs="+", default=[6, 8, 10, 12])
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    if not all(1 <= count <= len(SENTENCE) for count in options.words):
        raise SystemExit(f"--words must be from 1 to {len(SENTENCE)}, got {options.words}")
    name = options.model or f"random, {options.layers} layers × 576"
    try:
        model, tokenizer = load_verb_number(options.model) if options.model else random_model(options.layers)
    except ValueError as error:
        raise SystemExit(str(error).replace("--language-model", "--model")) from None
    if not model.prefixes:
        raise SystemExit(f"{name} has a cache of another kind: it reads each part for itself in any case")
    table = Table("words", "parts", "each for itself, s", "batches of", "beginnings once, s", "×", title=name)
    usual = words.FEW, words.TOKENS
    for count in options.words:
        classifier = WordClassifier(model, tokenizer)
        text = classifier.read(SENTENCE[:count])
        kept = (np.arange(2**count)[:, None] >> np.arange(count)) & 1 == 1
        once, found = seconds(classifier, text, kept, options.repeats)
        classifier.prefixes, rivals = False, {}
        for size in SIZES:
            words.FEW = words.TOKENS = size
            rivals[size], expected = seconds(classifier, text, kept, options.repeats)
            np.testing.assert_allclose(found, expected, atol=1e-4)
        words.FEW, words.TOKENS = usual
        best = min(rivals, key=rivals.__getitem__)
        cells = [f"{rivals[best]:.2f}", f"{best:,} tokens", f"{once:.2f}", f"{rivals[best] / once:.1f}"]
        table.add_row(str(count), f"{2**count:,}", *cells)
    Console().print(table)
    threads = torch.get_num_threads()
    print(f"torch {torch.__version__}, {threads} threads, float32, least of {options.repeats}")


if __name__ == "__main__":
    main()

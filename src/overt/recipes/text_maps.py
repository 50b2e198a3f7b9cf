"""Maps of text classifiers: all heads of one layer, sentence by sentence; and words as tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

import overt
from overt.mechanisms.mechanism import Mechanism
from overt.recipes.map_probing import layers_named
from overt.recipes.text_training import Encoded, by_length
from overt.tracing.capture import CapturedAttention, watching

LONGEST = 32  # tokens of a sentence
BATCH = 256  # sentences of a pass


class SentenceMaps(NamedTuple):
    """Maps of sentences.

    Attributes:
        maps: (sentences, heads, LONGEST, LONGEST), float16 on the CPU; tokens stand before padding, whose
            cells are zeros.
        lengths: number of tokens of each.
    """

    maps: Tensor
    lengths: Tensor


def layers_of(path: str, text: str | None, default: Callable[[int], Iterable[int]]) -> tuple[int, ...]:
    """The layers that `--layers` names, from 1 on, of a pretrained model.

    Args:
        path: folder or name of the model.
        text: the option's value; None for the default.
        default: number of layers → the numbers of some; those that a small model lacks are left out.
    """
    from transformers import AutoConfig

    count = getattr(AutoConfig.from_pretrained(path), "num_hidden_layers", None)
    if not isinstance(count, int) or count < 1:
        raise ValueError(f"--model {path} must have layers of attention, got num_hidden_layers {count}")
    if text is not None:
        return layers_named(text, count)
    return tuple(sorted({number for number in default(count) if 1 <= number <= count}))


def untrained(path: str, classes: Sequence[str], mechanisms: Sequence[Mechanism], seed: int) -> Any:
    """A model as at a pretrained one's path, with mechanisms, whose weights are all drawn at random."""
    from transformers import AutoConfig, AutoModelForSequenceClassification, set_seed

    config: Any = AutoConfig.from_pretrained(path)
    config.num_labels = len(classes)
    set_seed(seed)
    model: Any = AutoModelForSequenceClassification.from_config(  # type: ignore[no-untyped-call]
        config, dtype=torch.float32
    )
    if mechanisms:
        overt.attach(model, *mechanisms, seed=seed)
    return model.eval()


@torch.no_grad()
def sentence_maps(model: Any, rows: Sequence[Encoded], tokenizer: Any, layer: int) -> SentenceMaps:
    """The maps of all heads of one layer; those of an encoder–decoder's encoder.

    Args:
        model: a classifier, plain or attached.
        rows: tokenized sentences of at most LONGEST tokens.
        tokenizer: of the model.
        layer: number of the layer, from 1 on.
    """
    calls: list[CapturedAttention] = []

    def keep(call: CapturedAttention) -> None:
        first = calls[0] if calls else call
        if call.chain == first.chain:  # an encoder runs before its decoder
            weights = call.weights if len(calls) + 1 == layer else torch.empty(0)
            calls.append(CapturedAttention(call.path, call.chain, call.kind, weights))

    maps = torch.empty(0)
    lengths = torch.tensor([len(row["input_ids"]) for row in rows])
    if int(lengths.max()) > LONGEST:
        raise ValueError(f"sentences must have at most {LONGEST} tokens, got {int(lengths.max())}")
    with watching(model, keep):
        for places, inputs in by_length(model, rows, tokenizer, BATCH):
            calls.clear()
            model(**inputs)
            cells = _tokens_first(_weights(calls, layer, inputs["input_ids"]), inputs["attention_mask"])
            if not maps.numel():
                maps = torch.zeros(len(rows), cells.shape[1], LONGEST, LONGEST, dtype=torch.float16)
            maps[places, :, : cells.shape[2], : cells.shape[3]] = cells.to("cpu", torch.float16)
    return SentenceMaps(maps, lengths)


def _weights(calls: Sequence[CapturedAttention], layer: int, ids: Tensor) -> Tensor:
    """The layer's map, (batch, head, query, key)."""
    if len(calls) < layer:
        raise ValueError(f"layer {layer} has no map: {len(calls)} attentions ran, one after the other")
    weights = calls[layer - 1].weights
    if weights.shape[2:] != (ids.shape[1], ids.shape[1]):
        raise ValueError(
            f"{calls[layer - 1].path} must have a map from every token to every token, {ids.shape[1]} × "
            f"{ids.shape[1]}, got {weights.shape[2]} × {weights.shape[3]}"
        )
    return weights


def _tokens_first(weights: Tensor, mask: Tensor) -> Tensor:
    """Maps whose tokens stand before padding, on whichever side that is; zeros in all its cells."""
    real = mask.bool()
    order = (~real).int().argsort(dim=1, stable=True)
    weights = weights.take_along_dim(order[:, None, :, None], 2).take_along_dim(order[:, None, None, :], 3)
    real = real.take_along_dim(order, 1)
    return weights.masked_fill(~(real[:, None, :, None] & real[:, None, None, :]), 0.0)


def uniform_maps(rows: Sequence[Encoded]) -> SentenceMaps:
    """Maps of one head that attends equally to all tokens: they hold the number of tokens alone."""
    lengths = torch.tensor([len(row["input_ids"]) for row in rows])
    real = torch.arange(LONGEST) < lengths.unsqueeze(1)
    both = (real.unsqueeze(2) & real.unsqueeze(1)).unsqueeze(1)
    return SentenceMaps((both / lengths.view(-1, 1, 1, 1)).half(), lengths)


def tokens_in(offsets: Sequence[Sequence[int]], start: int, end: int) -> list[int]:
    """Tokens that overlap with a span of text."""
    return [place for place, (first, last) in enumerate(offsets) if first < end and start < last]

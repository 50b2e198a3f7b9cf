"""Posterior samples of a language model for each token of a text, given or generated."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from overt._predictions import entropy as entropy_of
from overt._predictions import mutual_information
from overt.attaching.attention import AttachedAttention
from overt.attaching.state import parameters_of

PIECE = 2**22  # how many numbers, tokens × vocabulary, are processed at once


@dataclass(frozen=True, eq=False)
class TokenPosterior:
    """Posterior samples for each token of a language model. Entropies are in nats.

    Entry (example, t) describes token t of the labels, whichever position it is predicted from; with
    `generate`, the t-th generated token. Values outside `mask` are NaN. Without labels all tokens except
    padding are reported, and only entropies are known.

    Attributes:
        samples: (samples, batch, length), the label's log-probability under each sample.
        log_probability: its average over the samples, (batch, length).
        spread: its standard deviation over the samples (divided by their number), (batch, length).
        entropy: of the mean of the samples' distributions over the vocabulary, (batch, length).
        expected_entropy: average entropy of the samples' distributions.
        mutual_information: entropy − expected_entropy: how much the samples disagree.
        mask: (batch, length), which tokens are reported: those with a label.
        sequences: with `generate`, the tokens of prompt and continuation, as `model.generate` returns them.
    """

    samples: Tensor
    log_probability: Tensor
    spread: Tensor
    entropy: Tensor
    expected_entropy: Tensor
    mutual_information: Tensor
    mask: Tensor
    sequences: Tensor | None = None


class TokenQuery(NamedTuple):
    """The tokens to report on.

    Attributes:
        labels: (batch, length); None without labels.
        mask: (batch, length), which of them to report on.
        shift: offset from a label's position to that of the logits that predict it.
    """

    labels: Tensor | None
    mask: Tensor
    shift: int


def vocabulary_of(base: Any) -> int | None:
    """A model's vocabulary size; None if its config has none."""
    text = getattr(base.config, "get_text_config", lambda **_: base.config)(decoder=True)
    return getattr(text, "vocab_size", None)


def is_vocabulary(base: Any, logits: Tensor) -> bool:
    """Whether logits are distributions over the vocabulary, one per token."""
    size = logits.shape[-1]
    return (
        logits.dim() == 3 and size == vocabulary_of(base) and size != getattr(base.config, "num_labels", None)
    )


def real_positions(base: Any, inputs: dict[str, Any], shape: tuple[int, int], device: torch.device) -> Tensor:
    """Which positions of the output, (batch, length), are not padding."""
    decodes = getattr(base.config, "is_encoder_decoder", False) and "decoder_input_ids" in inputs
    mask = inputs.get("decoder_attention_mask" if decodes else "attention_mask")
    if isinstance(mask, Tensor) and mask.shape == shape:
        return mask.to(device) != 0
    return torch.ones(shape, dtype=torch.bool, device=device)


def token_query(
    base: Any, inputs: dict[str, Any], labels: Any, shape: tuple[int, int], device: torch.device
) -> TokenQuery:
    """The labels of a batch, or the input of a causal model, for logits of this shape, (batch, length)."""
    real = real_positions(base, inputs, shape, device)
    causal = _is_causal(base)
    if str(getattr(base, "loss_type", None)) == "ForCTC":
        labels = None  # they do not belong to single frames
    shift = -1 if causal and (labels is None or _shifts_labels(type(base))) else 0
    if causal and labels is None:
        labels = inputs.get("input_ids")
    mask = real
    if labels is not None:
        if labels.shape != shape:
            raise ValueError(
                f"labels must have one entry for each of the logits' {shape} tokens, got shape "
                f"{tuple(labels.shape)}"
            )
        labels = labels.to(device)
        mask = real & (labels != -100)
    if shift:  # the first token is predicted from nothing, or from padding
        mask = mask & torch.cat([torch.zeros_like(real[:, :1]), real[:, :-1]], dim=1)
    return TokenQuery(labels, mask, shift)


def _is_causal(base: Any) -> bool:
    """Whether a token is predicted from the position before it, in one stack."""
    parts = (module for module in base.modules() if isinstance(module, AttachedAttention))
    encodes = getattr(base.config, "is_encoder_decoder", False)
    return not encodes and any(part.kind == "decoder" for part in parts)


def _shifts_labels(kind: type) -> bool:
    """Whether a causal model's loss shifts its labels; decoders of encoder–decoders do not shift them."""
    forwards = (vars(parent)["forward"] for parent in kind.__mro__ if "forward" in vars(parent))
    for forward in forwards:
        try:
            source = inspect.getsource(inspect.unwrap(forward))
        except (OSError, TypeError):
            return True
        if "loss_function(" in source or "1:]" in source:
            return True
    return False


def score_tokens(
    run: Callable[[Tensor, Tensor], Any], ready: list[Tensor], query: TokenQuery, samples: int, rows: int
) -> TokenPosterior:
    """Samples of a language model, run one after another: no tensor has both a sample and a vocabulary axis.

    Args:
        run: runs the model, given the numbers of samples and examples.
        ready: the logits of sample 0 and the first `rows` examples; removed from the list.
        query: which tokens to report on.
        samples: number of samples.
        rows: how many examples run at once.
    """
    count, vocabulary = query.mask.shape[0], ready[0].shape[-1]
    results: list[tuple[Tensor, Tensor, Tensor]] = []
    for start in range(0, count, rows):
        index = torch.arange(start, min(start + rows, count))
        where = query.mask[start : start + rows].nonzero()
        example, place = where.unbind(dim=1)
        labels = None if query.labels is None else query.labels[start : start + rows][example, place]
        size = max(PIECE // vocabulary, 1)
        pieces = [slice(first, first + size) for first in range(0, len(where), size)]
        mean = torch.zeros(len(where), vocabulary, device=where.device)
        expected = mean.new_zeros(len(where))
        scores = mean.new_full((samples, len(where)), torch.nan)
        for number in range(samples):
            logits = ready.pop() if ready else run(torch.full_like(index, number), index).logits
            for piece in pieces:
                logs = logits[example[piece], place[piece] + query.shift].float().log_softmax(dim=-1)
                if labels is not None:
                    scores[number, piece] = logs.gather(1, labels[piece].unsqueeze(1)).squeeze(1)
                distribution = logs.exp_()
                mean[piece] += distribution / samples
                expected[piece] += entropy_of(distribution) / samples
            del logits  # free the memory before the next run
        entropies = [entropy_of(mean[piece]) for piece in pieces]
        results.append((scores, torch.cat([expected[:0], *entropies]), expected))

    def spread_out(values: Tensor) -> Tensor:
        """The values at their tokens' places, NaN elsewhere."""
        whole = values.new_full((*values.shape[:-1], *query.mask.shape), torch.nan)
        whole[..., query.mask] = values
        return whole

    scores, entropy, expected = (torch.cat(parts, dim=-1) for parts in zip(*results, strict=True))
    return TokenPosterior(
        spread_out(scores),
        spread_out(scores.mean(dim=0)),
        spread_out(scores.std(dim=0, correction=0)),
        spread_out(entropy),
        spread_out(expected),
        spread_out(mutual_information(entropy, expected)),
        query.mask,
    )


# Text that the model generates.


def generate_text(
    model: nn.Module, base: Any, inputs: dict[str, Any], limit: int
) -> tuple[dict[str, Any], TokenQuery, Tensor]:
    """Inputs extended by at most `limit` generated tokens, which of them to report on, and all tokens."""
    from transformers import GenerationMixin, LogitsProcessorList

    if not base.can_generate():
        raise ValueError(f"generate needs a model that generates text, got {type(base).__name__}")
    if type(base).generate is not GenerationMixin.generate:
        raise ValueError(
            f"{type(base).__name__} has its own generate method, which is not supported: generate with it, "
            "and pass the output as labels"
        )
    pair = bool(base.config.is_encoder_decoder)
    if not pair:
        if "input_ids" not in inputs:
            raise ValueError("generate needs input_ids")
        inputs.setdefault("attention_mask", torch.ones_like(inputs["input_ids"]))
        if not bool(inputs["attention_mask"][:, -1].all()):
            raise ValueError("generate continues from the last token: pad on the left")
    lengths: list[int] = []

    def note(tokens: Tensor, scores: Tensor) -> Tensor:
        lengths.append(tokens.shape[1])
        return scores

    greedy = {"do_sample": False, "num_beams": 1, "num_return_sequences": 1, "return_dict_in_generate": False}
    write: Any = model.generate
    sequences = write(**inputs, max_new_tokens=limit, logits_processor=LogitsProcessorList([note]), **greedy)
    prompt = lengths[0]
    new = sequences[:, prompt:]
    ends = base.generation_config.eos_token_id
    ended = torch.isin(new, torch.as_tensor([] if ends is None else ends, device=new.device).to(new.dtype))
    query = TokenQuery(new, ended.cumsum(dim=1) - ended.long() == 0, prompt - 1)
    tokens = sequences[:, :-1]
    more = tokens.shape[1] - prompt
    longer = {**inputs, "decoder_input_ids" if pair else "input_ids": tokens}
    # Extended as generate() extends them, step by step.
    last: dict[str, Callable[[Tensor], Tensor]] = {
        "attention_mask": torch.ones_like,
        "token_type_ids": torch.clone,
        "mm_token_type_ids": torch.zeros_like,
    }
    for name, of_last in ({"decoder_attention_mask": torch.ones_like} if pair else last).items():
        if isinstance(known := inputs.get(name), Tensor):
            longer[name] = torch.cat([known, of_last(known[:, -1:]).expand(-1, more)], dim=1)
    if not pair and "position_ids" in parameters_of(base):
        if (positions := inputs.get("position_ids")) is None:
            positions = base._prepare_position_ids_for_generation(tokens, longer)
        else:
            steps = torch.arange(1, more + 1, device=positions.device)
            positions = torch.cat([positions, positions[:, -1:] + steps], dim=1)
        if positions.dim() == 2:  # multi-dimensional positions are computed by the model from the tokens
            longer["position_ids"] = positions
    return longer, query, sequences

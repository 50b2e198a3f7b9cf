"""What posterior samples of a language model say of each token, and of a text that it writes itself."""

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

PIECE = 2**22  # numbers of a vocabulary's distributions that are looked at together


@dataclass(frozen=True, eq=False)
class TokenPosterior:
    """What samples say of each token of a language model. Entropies are in nats.

    Place (example, t) is about token t of the labels, whichever position it is predicted from; with
    `generate`, about the t-th token that was written. Values outside `mask` are NaN. Without any labels all
    tokens but padding are told of, and only entropies are known.

    Attributes:
        samples: (samples, batch, length), the label's log-probability under each sample.
        log_probability: its average over the samples, (batch, length).
        spread: its standard deviation over the samples (divided by their number), (batch, length).
        entropy: of the mean of the samples' distributions over the vocabulary, (batch, length).
        expected_entropy: average entropy of the samples' distributions.
        mutual_information: entropy − expected_entropy: how much the samples disagree.
        mask: (batch, length), which tokens are told of: those with a label.
        sequences: with `generate`, the tokens of prompt and continuation, as `model.generate` gives them.
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
    """The tokens that a language model is asked about.

    Attributes:
        labels: (batch, length); None where there are none.
        mask: (batch, length), which of them to tell of.
        shift: from a label's place to that of the logits that predict it.
    """

    labels: Tensor | None
    mask: Tensor
    shift: int


def vocabulary_of(base: Any) -> int | None:
    """How many words a model knows."""
    text = getattr(base.config, "get_text_config", lambda **_: base.config)(decoder=True)
    return getattr(text, "vocab_size", None)


def is_vocabulary(base: Any, logits: Tensor) -> bool:
    """Whether these are distributions over a vocabulary, one per token."""
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


def asked_of(
    base: Any, inputs: dict[str, Any], labels: Any, shape: tuple[int, int], device: torch.device
) -> TokenQuery:
    """The labels of a batch, or a causal model's own input, where logits have this shape, (batch, length)."""
    real = real_positions(base, inputs, shape, device)
    causal = _is_causal(base)
    if str(getattr(base, "loss_type", None)) == "ForCTC":
        labels = None  # they are not of single frames
    shift = -1 if causal and (labels is None or _shifts_labels(type(base))) else 0
    own = causal and labels is None
    labels = inputs.get("input_ids") if own else labels
    mask = real
    if labels is not None:
        if labels.shape != shape:
            raise ValueError(
                f"labels must be those of the logits' {shape} tokens, got shape {tuple(labels.shape)}"
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
    """Whether a causal model's loss shifts its labels; that of halves of encoder–decoders does not."""
    forwards = (vars(one)["forward"] for one in kind.__mro__ if "forward" in vars(one))
    for forward in forwards:
        try:
            source = inspect.getsource(inspect.unwrap(forward))
        except (OSError, TypeError):
            return True
        if "loss_function(" in source or "1:]" in source:
            return True
    return False


def tell_tokens(
    run: Callable[[Tensor, Tensor], Any], ready: list[Tensor], asked: TokenQuery, samples: int, rows: int
) -> TokenPosterior:
    """Samples of a language model, one after the other: what has a vocabulary axis has no sample axis.

    Args:
        run: the model, for numbers of samples and examples.
        ready: the logits of sample 0 and the first `rows` examples, which is taken out.
        asked: which tokens are told of.
        samples: how many.
        rows: how many examples run at once.
    """
    count, vocabulary = asked.mask.shape[0], ready[0].shape[-1]
    told: list[tuple[Tensor, Tensor, Tensor]] = []
    for start in range(0, count, rows):
        index = torch.arange(start, min(start + rows, count))
        where = asked.mask[start : start + rows].nonzero()
        example, place = where.unbind(dim=1)
        labels = None if asked.labels is None else asked.labels[start : start + rows][example, place]
        size = max(PIECE // vocabulary, 1)
        pieces = [slice(first, first + size) for first in range(0, len(where), size)]
        mean = torch.zeros(len(where), vocabulary, device=where.device)
        expected = mean.new_zeros(len(where))
        scores = mean.new_full((samples, len(where)), torch.nan)
        for number in range(samples):
            logits = ready.pop() if ready else run(torch.full_like(index, number), index).logits
            for piece in pieces:
                logs = logits[example[piece], place[piece] + asked.shift].float().log_softmax(dim=-1)
                if labels is not None:
                    scores[number, piece] = logs.gather(1, labels[piece].unsqueeze(1)).squeeze(1)
                distribution = logs.exp_()
                mean[piece] += distribution / samples
                expected[piece] += entropy_of(distribution) / samples
            del logits  # before there are more of them
        entropies = [entropy_of(mean[piece]) for piece in pieces]
        told.append((scores, torch.cat([expected[:0], *entropies]), expected))

    def placed(values: Tensor) -> Tensor:
        empty = values.new_full((*values.shape[:-1], *asked.mask.shape), torch.nan)
        empty[..., asked.mask] = values
        return empty

    scores, entropy, expected = (torch.cat(parts, dim=-1) for parts in zip(*told, strict=True))
    return TokenPosterior(
        placed(scores),
        placed(scores.mean(dim=0)),
        placed(scores.std(dim=0, correction=0)),
        placed(entropy),
        placed(expected),
        placed(mutual_information(entropy, expected)),
        asked.mask,
    )


# A continuation of the model's own.


def continued(
    model: nn.Module, base: Any, inputs: dict[str, Any], most: int
) -> tuple[dict[str, Any], TokenQuery, Tensor]:
    """Inputs with the tokens that the model writes, which of them are told of, and all tokens."""
    from transformers import GenerationMixin, LogitsProcessorList

    if not base.can_generate():
        raise ValueError(f"generate needs a model that writes text, which {type(base).__name__} does not")
    if type(base).generate is not GenerationMixin.generate:
        raise ValueError(
            f"{type(base).__name__} has a generate of its own, of which nothing is known here: "
            "give what it wrote as labels"
        )
    pair = bool(base.config.is_encoder_decoder)
    if not pair:
        if "input_ids" not in inputs:
            raise ValueError("generate needs input_ids")
        inputs.setdefault("attention_mask", torch.ones_like(inputs["input_ids"]))
        if not bool(inputs["attention_mask"][:, -1].all()):
            raise ValueError("generate goes on from the last token: pad on the left")
    lengths: list[int] = []

    def note(tokens: Tensor, scores: Tensor) -> Tensor:
        lengths.append(tokens.shape[1])
        return scores

    once = {"do_sample": False, "num_beams": 1, "num_return_sequences": 1, "return_dict_in_generate": False}
    write: Any = model.generate
    sequences = write(**inputs, max_new_tokens=most, logits_processor=LogitsProcessorList([note]), **once)
    prompt = lengths[0]
    new = sequences[:, prompt:]
    ends = base.generation_config.eos_token_id
    ended = torch.isin(new, torch.as_tensor([] if ends is None else ends, device=new.device).to(new.dtype))
    asked = TokenQuery(new, ended.cumsum(dim=1) - ended.long() == 0, prompt - 1)
    tokens = sequences[:, :-1]
    more = tokens.shape[1] - prompt
    longer = {**inputs, "decoder_input_ids" if pair else "input_ids": tokens}
    # As generate() does it, step by step.
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
        if positions.dim() == 2:  # those in several dimensions the model makes of the tokens
            longer["position_ids"] = positions
    return longer, asked, sequences

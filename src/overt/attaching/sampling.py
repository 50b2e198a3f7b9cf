"""Predictive samples from an attached Bayesian model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from overt import _check
from overt.attaching.api import base_of, the_state
from overt.mechanisms.attention_map import AttentionMap

# Never repeated for each sample: the target of a loss that is not asked for.
LEFT_OUT = ("labels", "start_positions", "end_positions", "return_loss")


@dataclass(frozen=True, eq=False)
class Posterior:
    """Predictive samples of a batch. Entropies are in nats, and None where outputs are not probabilities.

    Attributes:
        samples: (samples, batch, …, classes), probabilities; for a regression or a model without a head, the
            outputs themselves.
        mean: average over the samples, (batch, …, classes).
        spread: standard deviation over the samples (divided by their number), (batch, …, classes).
        entropy: of the mean, (batch, …): the total uncertainty.
        expected_entropy: average entropy of the samples: what stays even if the weights were known.
        mutual_information: entropy − expected_entropy: how much the samples disagree.
    """

    samples: Tensor
    mean: Tensor
    spread: Tensor
    entropy: Tensor | None
    expected_entropy: Tensor | None
    mutual_information: Tensor | None


@torch.no_grad()
def posterior(
    model: nn.Module,
    batch: Mapping[str, Any],
    samples: int = 20,
    dropout: bool = False,
    *,
    seed: int = 0,
    first: int = 0,
    rows: int = 256,
) -> Posterior:
    """Predictive distribution of a batch, by drawing the attention weights `samples` times.

    Draws depend on the seed, the model's step count and the numbers of sample, example, row and column alone:
    the same come back whatever else is in the batch and however many rows run at once. Rows count from the
    left, so pad on the right if an example is to have the same draws at another length.

    Args:
        model: with a `Bayesian` attached; in any mode, which is restored.
        batch: the model's inputs, as tokenizers and collators give them; labels are left out.
        samples: number of samples.
        dropout: leave dropout on while sampling, as the released code does. Its masks come from torch's own
            generator, seeded here, and depend on `rows` and the batch.
        seed: key of the noise.
        first: number of the batch's first example in the data set. Count it up from batch to batch, and
            results do not depend on how the data set was cut.
        rows: how many rows, samples × examples, run at once.
    """
    base, state = base_of(model), the_state(model)
    maps = (module for module in base.modules() if isinstance(module, AttentionMap))
    if not dropout and not any(one.random for one in maps):
        raise ValueError("posterior needs random weights: attach Bayesian(…), or pass dropout=True")
    _check.whole("samples", samples, 1)
    _check.whole("first", first, 0)
    _check.whole("rows", rows, 1)
    inputs = _inputs(base, dict(batch))
    sizes = {value.shape[0] for value in inputs.values() if isinstance(value, Tensor) and value.dim() > 0}
    if len(sizes) != 1:
        raise ValueError(f"batch must hold tensors of one batch size, got sizes {sorted(sizes)}")
    count = sizes.pop()

    sample = torch.arange(samples).repeat_interleave(count)
    example = torch.arange(count).repeat(samples)
    outputs = []
    with _sampling(base, dropout, seed):
        for start in range(0, samples * count, rows):
            part = slice(start, start + rows)
            index = example[part]
            state.override = {"sample": sample[part], "examples": index + first}
            folded = {key: _take(value, index) for key, value in inputs.items()}
            kept_seed, state.seed = state.seed, seed
            try:
                outputs.append(_prediction(base, model(**folded)))
            finally:
                state.override, state.seed = None, kept_seed
    drawn = torch.cat([values for values, _ in outputs])
    drawn = drawn.view(samples, count, *drawn.shape[1:])
    return _summary(drawn, outputs[0][1])


def _inputs(base: Any, batch: dict[str, Any]) -> dict[str, Any]:
    """What the model is given: no targets, but what an encoder–decoder makes of them for its decoder."""
    inputs = {key: value for key, value in batch.items() if key not in LEFT_OUT}
    labels = batch.get("labels")
    if getattr(base.config, "is_encoder_decoder", False) and labels is not None:
        shift = getattr(base, "prepare_decoder_input_ids_from_labels", None)
        if "decoder_input_ids" not in inputs and "decoder_inputs_embeds" not in inputs:
            if shift is None:
                raise ValueError(
                    "batch must hold decoder_input_ids; they cannot be made from its labels here"
                )
            inputs["decoder_input_ids"] = shift(labels=labels)
    for key, value in inputs.items():
        if not isinstance(value, Tensor | bool | int | float | str | None):
            raise TypeError(f"batch[{key!r}] must be a tensor, got {type(value).__name__}")
    return inputs


def _take(value: Any, index: Tensor) -> Any:
    if isinstance(value, Tensor) and value.dim() > 0:
        return value.index_select(0, index.to(value.device))
    return value


@contextmanager
def _sampling(base: nn.Module, dropout: bool, seed: int) -> Iterator[None]:
    """Evaluation mode, or training mode for all without running statistics; modes come back as they were."""
    modes = [(module, module.training) for module in base.modules()]
    devices = sorted({p.device.index or 0 for p in base.parameters() if p.device.type == "cuda"})
    try:
        base.eval()
        if dropout:
            for module, _ in modes:
                module.training = not isinstance(module, nn.modules.batchnorm._NormBase)
        with torch.random.fork_rng(devices=devices, enabled=dropout):
            if dropout:
                torch.manual_seed(seed)
            yield
    finally:
        for module, mode in modes:
            module.training = mode


def _prediction(base: Any, output: Any) -> tuple[Tensor, bool]:
    """The model's prediction in float32, and whether it is probabilities."""
    logits = getattr(output, "logits", None)
    if logits is None:
        hidden = getattr(output, "last_hidden_state", None)
        if hidden is None:
            keys = ", ".join(output.keys()) if hasattr(output, "keys") else type(output).__name__
            raise ValueError(f"posterior needs an output with logits or last_hidden_state, got {keys}")
        return hidden.float(), False
    problem = getattr(base.config, "problem_type", None)
    if problem == "multi_label_classification":
        return torch.sigmoid(logits.float()), False
    text = getattr(base.config, "get_text_config", lambda: base.config)()
    classes = {getattr(base.config, "num_labels", None), getattr(text, "vocab_size", None)}
    # Pixels, or one logit per token, are no distribution over their last axis.
    if problem == "regression" or logits.shape[-1] < 2 or logits.dim() > 3 or logits.shape[-1] not in classes:
        return logits.float(), False
    return torch.softmax(logits.float(), dim=-1), True


def _summary(drawn: Tensor, probabilities: bool) -> Posterior:
    mean, spread = drawn.mean(dim=0), drawn.std(dim=0, correction=0)
    if not probabilities:
        return Posterior(drawn, mean, spread, None, None, None)
    entropy = torch.special.entr(mean).sum(dim=-1)
    expected = torch.special.entr(drawn).sum(dim=-1).mean(dim=0)
    return Posterior(drawn, mean, spread, entropy, expected, (entropy - expected).clamp(min=0.0))

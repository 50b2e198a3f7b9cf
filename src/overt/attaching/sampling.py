"""Predictive samples from a Bayesian model: an attached one, or any module that takes a chain."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from overt import _check
from overt._modes import device_of, in_other_mode, switched
from overt._predictions import LINKS, Link, link_of, linked, summarize
from overt.attaching.api import base_of, state_in, the_state
from overt.attaching.settings import temperature_of
from overt.attaching.state import AttachedState, parameters_of
from overt.attaching.tokens import (
    TokenPosterior,
    generate_text,
    is_vocabulary,
    real_positions,
    score_tokens,
    token_query,
    vocabulary_of,
)
from overt.mechanisms.attention_map import AttentionMap
from overt.mechanisms.chain import Chain

# Targets of a loss, which is not computed here.
LEFT_OUT = ("labels", "start_positions", "end_positions", "return_loss")
WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel)
_seeding = threading.Lock()  # torch has one generator for all threads
_one_by_one = threading.Lock()  # modules change their mode


@dataclass(frozen=True, eq=False)
class Posterior:
    """Predictive samples of a batch. Entropies are in nats, and None if outputs are not probabilities.

    Sigmoids are probabilities of one class each: their entropies are added, as is the mutual information.

    Attributes:
        samples: (samples, batch, …, classes), probabilities; for regression or a model without a head, the
            outputs themselves. In multiple choice, the classes are the choices.
        mean: average over the samples, (batch, …, classes).
        spread: standard deviation over the samples (divided by their number), (batch, …, classes).
        entropy: of the mean, (batch, …): the total uncertainty.
        expected_entropy: average entropy of the samples: what would remain if the weights were known.
        mutual_information: entropy − expected_entropy: how much the samples disagree.
    """

    samples: Tensor
    mean: Tensor
    spread: Tensor
    entropy: Tensor | None
    expected_entropy: Tensor | None
    mutual_information: Tensor | None


@dataclass(frozen=True, eq=False)
class SpanPosterior:
    """Predictive samples of question answering: distributions over tokens for an answer's start and end.

    Attributes:
        start: a `Posterior` whose classes are the tokens, (samples, batch, length). Tokens that the attention
            mask hides have probability 0; special tokens and the question's tokens count as they do in the
            model's loss.
        end: the same for the answer's last token.
    """

    start: Posterior
    end: Posterior


@torch.no_grad()
def posterior(
    model: nn.Module,
    batch: Mapping[str, Any] | Tensor,
    samples: int = 20,
    dropout: bool = False,
    *,
    seed: int = 0,
    first: int = 0,
    rows: int = 256,
    generate: int | None = None,
    problem_type: Link | None = None,
    calibrated: bool = True,
) -> Posterior | SpanPosterior | TokenPosterior:
    """Predictive distribution of a batch, by drawing the attention weights `samples` times.

    Draws depend only on the seed, the model's step count and the numbers of the sample, example, row and
    column: they do not change with the rest of the batch or with the number of rows run at once. Rows count
    from the left, so pad on the right if an example should have the same draws at another length.

    Several threads may sample from one attached model at once, while others evaluate it or generate. Modules
    that take a chain are sampled one after the other, and must not run elsewhere meanwhile unless they are in
    evaluation mode.

    Args:
        model: a model with a `Bayesian` attached, or a module whose `forward` takes `chain=`, such as those
            of `overt.vision`; in any mode, which is restored. With `dropout`, any Hugging Face model that is
            not a language model.
        batch: the model's inputs, as tokenizers and collators return them; for a module, its keyword
            arguments, or its first argument alone. Labels are ignored, except those of a language model,
            whose log-probability is computed; a causal model without labels uses its input as labels.
        samples: number of samples.
        dropout: leave dropout on while sampling, as the released code does. Its masks come from torch's
            generator, seeded here, and depend on `rows` and the batch. Modules change their mode meanwhile:
            no other thread may evaluate the model.
        seed: random seed of the noise.
        first: number of the batch's first example in the data set. If it counts up from batch to batch,
            results do not depend on how the data set is divided into batches.
        rows: how many rows (samples × examples) run at once; for a language model, how many examples, one
            sample after another.
        generate: generate at most this many tokens, once, greedily and with the mean of the weights, and
            report on these: each sample scores the same text.
        problem_type: what turns outputs into predictions: "softmax", "sigmoid" or "identity". None takes it
            from an attached model's config; without one, outputs (batch, classes) are taken for logits of a
            softmax, all others as they are.
        calibrated: divide the logits of a softmax by the temperature that `overt.calibrate` found for this
            model, if it did. A temperature that was fitted with dropout on is refused for samples without,
            and the other way round.

    Returns:
        A `TokenPosterior` for a language model, a `SpanPosterior` for question answering, a `Posterior` for
        anything else.
    """
    _check.whole("samples", samples, 1)
    _check.whole("first", first, 0)
    _check.whole("rows", rows, 1)
    if problem_type is not None:
        _check.one_of("problem_type", problem_type, LINKS)
    if not isinstance(batch, Tensor | Mapping):
        raise TypeError(f"batch must be a tensor, or inputs by name, got a {type(batch).__name__}")
    if takes_chain(_inner(model)) or hasattr(_inner(model), "_overt_augmented"):
        if generate is not None:
            raise ValueError(f"generate is for language models, got a {type(_inner(model)).__name__}")
        return _of_module(_inner(model), batch, samples, dropout, seed, first, rows, problem_type)
    inside = _inner(model)
    base, state = base_of(inside), state_in(inside)
    if state is None and not dropout:
        the_state(inside)  # refuses
    _check_random(base, dropout)
    temperature = _temperature(base, state, dropout) if calibrated else 1.0
    arguments = arguments_of(base, batch)
    query, sequences = None, None
    if generate is not None:
        _check.whole("generate", generate, 1)
        arguments = {key: value for key, value in arguments.items() if key not in LEFT_OUT}
    sampler = Sampler(model, arguments, samples, dropout, seed=seed, first=first, rows=rows)
    if generate is not None:
        with _modes(base, state, dropout=False):
            sampler.inputs, query, sequences = generate_text(inside, base, sampler.inputs, generate)
    with sampler.ready():
        output = sampler.start()
        if sampler.predicts_tokens(output):
            if state is None:
                raise ValueError(
                    f"posterior of a language model needs one with mechanisms attached, got a plain "
                    f"{type(base).__name__}: call overt.attach(model, …) first"
                )
            ready = [output.logits]
            if query is None:
                shape = sampler.count, int(output.logits.shape[1])
                labels, device = arguments.get("labels"), output.logits.device
                query = token_query(base, sampler.inputs, labels, shape, device)
            del output
            return replace(score_tokens(sampler.run, ready, query, samples, rows), sequences=sequences)
        if query is not None:
            raise ValueError(f"generate needs logits over a vocabulary, which {type(base).__name__} lacks")
        scores = sampler.finish(output, problem_type)
    return _summarize(scores, temperature)


class Scores(NamedTuple):
    """Outputs of predictive samples, before they become predictions.

    Attributes:
        drawn: (samples, batch, …, classes); for answers (samples, batch, 2, length), the logits of their
            starts and ends, −inf at tokens that the attention mask hides.
        link: what turns them into predictions.
        spans: whether they are starts and ends of answers.
    """

    drawn: Tensor
    link: Link
    spans: bool = False


class Sampler:
    """Runs a Hugging Face or timm model on a batch, `rows` rows (samples × examples) at once.

    A plain model takes part too; its samples differ by dropout alone.
    """

    def __init__(
        self,
        model: nn.Module,
        arguments: dict[str, Any],
        samples: int,
        dropout: bool,
        *,
        seed: int,
        first: int,
        rows: int,
    ) -> None:
        self.model = _inner(model)
        self.base, self.state = base_of(self.model), state_in(self.model)
        self.samples, self.dropout, self.seed, self.first, self.rows = samples, dropout, seed, first, rows
        self.inputs = _inputs(self.base, arguments)
        if self.model is not model:  # the wrapper would move inputs to the model's device
            self.inputs = on_device(self.base, self.inputs)
        self.count = _batch_size(self.inputs)
        self.sample = torch.arange(samples).repeat_interleave(self.count)
        self.example = torch.arange(self.count).repeat(samples)

    @contextmanager
    def ready(self) -> Iterator[None]:
        """The mode and the seed that passes need."""
        with _modes(self.base, self.state, self.dropout), _seeded(self.base, self.seed, self.dropout):
            yield

    def run(self, sample: Tensor, example: Tensor) -> Any:
        """The output for these examples under samples of these numbers."""
        folded = {key: _take(value, example) for key, value in self.inputs.items()}
        drawing: Any = nullcontext()
        if self.state is not None:
            drawing = self.state.drawing(sample, example + self.first, self.seed)
        with drawing:
            return self.model(**folded)

    def start(self) -> Any:
        """The output of the first rows, of a single sample: it shows whether there is a vocabulary."""
        start = min(self.rows, self.count)
        return self.run(self.sample[:start], self.example[:start])

    def predicts_tokens(self, output: Any) -> bool:
        """Whether an output holds logits over a vocabulary."""
        logits = getattr(output, "logits", None)
        return logits is not None and is_vocabulary(self.base, logits)

    def finish(self, output: Any, problem_type: Link | None = None) -> Scores:
        """All scores, given the output of `start`."""
        first = min(self.rows, self.count)
        parts = [slice(place, place + self.rows) for place in range(first, len(self.sample), self.rows)]
        outputs = [_prediction(output)]
        outputs += [_prediction(self.run(self.sample[part], self.example[part])) for part in parts]
        drawn = torch.cat(outputs)
        drawn = drawn.view(self.samples, self.count, *drawn.shape[1:])
        return _scores(self.base, self.inputs, drawn, output, problem_type)


def arguments_of(base: Any, batch: Mapping[str, Any] | Tensor) -> dict[str, Any]:
    """A batch by the names of the model's arguments; a model without a config may get its first one alone."""
    if not isinstance(batch, Tensor):
        return dict(batch)
    if hasattr(base, "config"):
        raise TypeError("batch must hold the inputs of an attached model by name, got a tensor")
    return {parameters_of(base)[0]: batch}


def on_device(base: nn.Module, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Inputs on the model's device."""
    device = device_of(base)
    return {key: value.to(device) if isinstance(value, Tensor) else value for key, value in inputs.items()}


def _temperature(base: nn.Module, state: AttachedState | None, dropout: bool) -> float:
    """What logits are divided by; refuses a temperature that was fitted to other samples."""
    fitted = temperature_of(base, state)
    if fitted is None:
        return 1.0
    if fitted.dropout != dropout:
        with_or_without = "with dropout on" if fitted.dropout else "without dropout"
        raise ValueError(
            f"the model's temperature, {fitted.value:.4g}, was fitted {with_or_without}: call "
            f"overt.calibrate(model, data, dropout={dropout}), or posterior(…, calibrated=False)"
        )
    return fitted.value


def takes_chain(model: nn.Module) -> bool:
    """Whether a module's forward pass takes a chain."""
    inside: Any = getattr(model, "_orig_mod", model)  # what torch.compile wraps
    return "chain" in signature(inside.forward).parameters


def _of_module(
    model: nn.Module,
    batch: Mapping[str, Any] | Tensor,
    samples: int,
    dropout: bool,
    seed: int,
    first: int,
    rows: int,
    problem_type: Link | None,
) -> Posterior:
    """`posterior` of a module that takes a chain."""
    _check_random(model, dropout)
    inputs: dict[str, Any] = {"": batch}
    if not isinstance(batch, Tensor):
        inputs = {key: value for key, value in batch.items() if key not in LEFT_OUT}
    count, step, passed = _batch_size(inputs), getattr(model, "step", 0), takes_chain(model)
    if count == 0:
        raise ValueError("batch must hold at least one example, got none")
    sample = torch.arange(samples).repeat_interleave(count)
    example = torch.arange(count).repeat(samples)

    def run(part: slice) -> Tensor:
        folded = {key: _take(value, example[part]) for key, value in inputs.items()}
        first_argument = [folded.pop("")] if "" in folded else []
        # With dropout, layers are in training mode, and would compute a KL that nobody reads.
        address: dict[str, Any] = {"sample": sample[part], "examples": example[part] + first, "seed": seed}
        chain = Chain(step=step, kl=False, **address)
        if passed:
            output = model(*first_argument, **folded, chain=chain)
        else:
            with chain:
                output = model(*first_argument, **folded)
        if isinstance(output, Mapping):
            output = output.get("logits")
        if not isinstance(output, Tensor):
            raise ValueError(f"posterior needs a tensor, or logits by name, from a {type(model).__name__}")
        return output.float()

    def trains(module: nn.Module) -> bool:
        return dropout and not isinstance(module, nn.modules.batchnorm._NormBase)

    with _one_by_one, switched(in_other_mode(model, trains)), _seeded(model, seed, dropout):
        drawn = torch.cat([run(slice(start, start + rows)) for start in range(0, samples * count, rows)])
    scores = _scores_of_tensor(drawn.view(samples, count, *drawn.shape[1:]), problem_type)
    return _summary(linked(scores.drawn, scores.link), scores.link)


def _check_random(model: nn.Module, dropout: bool) -> None:
    maps = (module for module in model.modules() if isinstance(module, AttentionMap))
    if not dropout and not any(attention_map.random for attention_map in maps):
        raise ValueError(
            "posterior needs random weights: attach Bayesian(…), or make the network with "
            "mechanisms=[Bayesian(…)], or pass dropout=True"
        )


# Running the model.


def _inner(model: nn.Module) -> nn.Module:
    """The model without wrappers that run it in other threads, or wait for other processes."""
    while isinstance(inside := getattr(model, "_orig_mod", model), WRAPPERS):
        model = inside.module
    return model


def _inputs(base: Any, batch: dict[str, Any]) -> dict[str, Any]:
    """The model's inputs: no targets, except decoder inputs that an encoder–decoder makes from its labels."""
    inputs = {key: value for key, value in batch.items() if key not in LEFT_OUT}
    labels = batch.get("labels")
    if getattr(getattr(base, "config", None), "is_encoder_decoder", False) and labels is not None:
        shift = getattr(base, "prepare_decoder_input_ids_from_labels", None)
        if "decoder_input_ids" not in inputs and "decoder_inputs_embeds" not in inputs:
            if shift is None:
                raise ValueError("batch must hold decoder_input_ids: this model cannot make them from labels")
            inputs["decoder_input_ids"] = shift(labels=labels)
    for key, value in inputs.items():
        if not isinstance(value, Tensor | bool | int | float | str | None):
            raise TypeError(f"batch[{key!r}] must be a tensor, got {type(value).__name__}")
    return inputs


def _batch_size(inputs: dict[str, Any]) -> int:
    sizes = {value.shape[0] for value in inputs.values() if isinstance(value, Tensor) and value.dim() > 0}
    if len(sizes) != 1:
        raise ValueError(f"batch must hold tensors of one batch size, got sizes {sorted(sizes)}")
    return int(sizes.pop())


def _take(value: Any, index: Tensor) -> Any:
    if isinstance(value, Tensor) and value.dim() > 0:
        return value.index_select(0, index.to(value.device))
    return value


@contextmanager
def _modes(base: nn.Module, state: AttachedState | None, dropout: bool) -> Iterator[None]:
    """Evaluation mode; with dropout, training mode except for modules with running statistics.

    Modes are restored at the end. If every module is in the right mode already, other threads may run the
    model too.
    """

    def trains(module: nn.Module) -> bool:
        return dropout and not isinstance(module, nn.modules.batchnorm._NormBase)

    if state is None:
        with _one_by_one, switched(in_other_mode(base, trains)):
            yield
        return
    with state.turns.together():
        if not in_other_mode(base, trains):
            yield
            return
    with state.turns.alone(), switched(in_other_mode(base, trains)):
        yield


@contextmanager
def _seeded(base: nn.Module, seed: int, dropout: bool) -> Iterator[None]:
    """Seed torch's generators for dropout, and restore them afterwards."""
    if not dropout:
        yield
        return
    devices = sorted({p.device.index or 0 for p in base.parameters() if p.device.type == "cuda"})
    with _seeding, torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield


# Summarising its outputs.


def _prediction(output: Any) -> Tensor:
    """The model's predictions, in float32; start and end logits of answers are stacked."""
    if isinstance(output, Tensor):
        return output.float()
    for name in ("logits", "last_hidden_state"):
        if (prediction := getattr(output, name, None)) is not None:
            return prediction.float()  # type: ignore[no-any-return]
    if _has_spans(output):
        return torch.stack([output.start_logits, output.end_logits], dim=1).float()
    keys = ", ".join(output.keys()) if hasattr(output, "keys") else type(output).__name__
    known = "logits, start_logits and end_logits, or last_hidden_state"
    raise ValueError(f"posterior needs an output with {known}, got {keys}")


def _has_spans(output: Any) -> bool:
    return all(isinstance(getattr(output, name, None), Tensor) for name in ("start_logits", "end_logits"))


def _scores(
    base: Any, inputs: dict[str, Any], drawn: Tensor, output: Any, problem_type: Link | None
) -> Scores:
    """What outputs, (samples, batch, …), of the same type as this one, are scores of."""
    if isinstance(output, Tensor):
        return _scores_of_tensor(drawn, problem_type)
    if getattr(output, "logits", None) is None:
        if getattr(output, "last_hidden_state", None) is not None:
            return Scores(drawn, "identity")
        real = real_positions(base, inputs, (drawn.shape[1], drawn.shape[-1]), drawn.device)
        return Scores(drawn.masked_fill(~real.unsqueeze(1), -torch.inf), "softmax", spans=True)
    if _are_choices(inputs, drawn.shape[1:]):
        return Scores(drawn, "softmax")
    if problem_type is not None:
        return Scores(drawn, problem_type)
    link = link_of(base.config, drawn.shape[-1])
    classes = {getattr(base.config, "num_labels", None), vocabulary_of(base)}
    # Pixels, or one logit per token, are not a distribution over their last axis.
    if link == "softmax" and (drawn.dim() > 4 or drawn.shape[-1] not in classes):
        link = "identity"
    return Scores(drawn, link)


def _scores_of_tensor(drawn: Tensor, problem_type: Link | None) -> Scores:
    """Scores of outputs that no config describes."""
    link = problem_type
    if link is None:
        link = "softmax" if drawn.dim() == 3 and drawn.shape[-1] > 1 else "identity"
    return Scores(drawn, link)


def _are_choices(inputs: dict[str, Any], shape: torch.Size) -> bool:
    """Whether logits of this shape, (batch, choices), have one entry for each of an example's texts."""
    ids, embedded = inputs.get("input_ids"), inputs.get("inputs_embeds")
    texts = ids if isinstance(ids, Tensor) else embedded[..., 0] if isinstance(embedded, Tensor) else None
    return texts is not None and texts.dim() == 3 and texts.shape[:2] == shape


def _summarize(scores: Scores, temperature: float = 1.0) -> Posterior | SpanPosterior:
    """A summary of scores, whose softmax has this temperature."""
    drawn = scores.drawn / temperature if scores.link == "softmax" else scores.drawn
    drawn = linked(drawn, scores.link)
    if scores.spans:
        return SpanPosterior(*(_summary(drawn[:, :, place], "softmax") for place in (0, 1)))
    return _summary(drawn, scores.link)


def _summary(drawn: Tensor, link: Link) -> Posterior:
    if link == "identity":
        return Posterior(drawn, drawn.mean(dim=0), drawn.std(dim=0, correction=0), None, None, None)
    return Posterior(drawn, *summarize(drawn, link))

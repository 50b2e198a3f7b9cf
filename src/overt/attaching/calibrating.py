"""Calibrate a trained classifier on held-out data: a temperature and, on request, the amount of noise."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from overt import _check
from overt.attaching.adapters import peft_models
from overt.attaching.api import base_of, state_in
from overt.attaching.sampling import Sampler, Scores, on_device, takes_chain
from overt.attaching.settings import TEMPERATURE, Temperature, head_of
from overt.attaching.state import AttachedState
from overt.mechanisms.attention_map import AttentionMap
from overt.mechanisms.mechanism import Mechanism, MechanismLayer

LEAST, MOST = 0.05, 20.0  # temperatures
IGNORED = -100  # the label that losses of transformers leave out
_STEPS = 40  # of the search's grid on each side of temperature 1


@dataclass(frozen=True)
class Calibration:
    """What `calibrate` found. Negative log-likelihoods are in nats, means over the held-out labels.

    Attributes:
        temperature: what logits are divided by, from 0.05 to 20.
        noise: with `noise`, the chosen k of a Weibull or sigma of a Lognormal; else None.
        nll_before: with temperature 1 and the noise that the model had.
        nll_after: with the temperature and noise that were chosen; at most `nll_before`.
        examples: number of labels.
        tried: with `noise`, each amount of noise with its NLL at its best temperature; else empty.
    """

    temperature: float
    noise: float | None
    nll_before: float
    nll_after: float
    examples: int
    tried: Mapping[float, float]


@torch.no_grad()
def calibrate(
    model: nn.Module,
    data: Iterable[Mapping[str, Any]],
    noise: bool | Sequence[float] = False,
    *,
    samples: int = 20,
    dropout: bool = False,
    seed: int = 0,
    rows: int = 256,
) -> Calibration:
    """Fit a temperature to held-out data, and keep it with the model.

    Logits are divided by the temperature, one number for all classes, that makes the data likeliest (Guo et
    al. 2017, arXiv:1706.04599, section 4.2): their negative log-likelihood under one pass, or under the mean
    of `samples` predictive samples if the model is random, is minimised over temperatures from 0.05 to 20,
    with a warning if the minimum is at an end. Predictions of one pass stay the same, only probabilities
    change.

    From then on `overt.posterior` and `Trace.predictions`, and so pages and the local server, use the
    temperature. `save_pretrained` saves it: with the mechanisms of an attached model, which drops it when it
    is trained further or detached; in the config of a plain one, as `config.overt_temperature`. A model with
    another head does not use it. Calibrate on data that the model was not trained on, and report on data that
    it was not calibrated on.

    Args:
        model: a Hugging Face classifier of texts, images or tokens, for multiple choice or question answering
            (starts and ends share the temperature), plain or attached; in any mode, which is restored. Must
            not run elsewhere meanwhile.
        data: batches with labels, as a `DataLoader` with the Trainer's collator gives them; labels of −100
            are left out. Tensors are moved to the model's device.
        noise: also choose how much noise the attention has, from these values of k (Weibull) or sigma
            (Lognormal), or with True from a list, and the present value: that with the lowest negative
            log-likelihood, each at its best temperature and with the same random numbers. The choice replaces
            the setting of the attached mechanism, for training as well. To use noise in a model that was
            trained without, attach `Bayesian(prior=None)` first.
        samples: number of predictive samples of a random model.
        dropout: leave dropout on; the temperature then is one for `posterior(…, dropout=True)`.
        seed: random seed of the noise.
        rows: how many rows (samples × examples) run at once.
    """
    _check.whole("samples", samples, 1)
    _check.whole("rows", rows, 1)
    base, state = _calibrated(model)
    mechanisms = _candidates(state, noise)
    maps = (module for module in base.modules() if isinstance(module, AttentionMap))
    random = dropout or any(attention_map.random for attention_map in maps)
    blocks: dict[Mechanism | None, list[_Block]] = {mechanism: [] for mechanism in mechanisms}
    first = 0
    for number, batch in enumerate(_batches(data)):
        arguments = on_device(base, batch)
        count = samples if random else 1
        sampler = Sampler(model, arguments, count, dropout, seed=seed, first=first, rows=rows)
        for mechanism in mechanisms:
            with _noise_of(base, state, mechanisms[0], mechanism):
                scores = _run(sampler)
            blocks[mechanism].append(_block(base, scores, batch, number))
        first += sampler.count
    examples = sum(len(block.labels) for block in blocks[mechanisms[0]])
    if examples == 0:
        raise ValueError("data must hold at least one label, got " + ("none" if first else "no batch"))
    fitted = {mechanism: _fit(blocks[mechanism]) for mechanism in mechanisms}
    best = min(mechanisms, key=lambda mechanism: fitted[mechanism].nll)
    temperature, after = fitted[best]
    if not LEAST * 1.001 < temperature < MOST / 1.001:
        warnings.warn(
            f"the temperature, {temperature:.4g}, is at an end of its range, {LEAST:g} to {MOST:g}: these "
            f"{examples} labels do not determine it (all predicted right, or none better than by chance?)",
            UserWarning,
            stacklevel=2,
        )
    _keep(base, state, mechanisms[0], best, Temperature(temperature, dropout, *head_of(base)))
    values = {m: _amount(m) for m in mechanisms if m is not None}
    return Calibration(
        temperature=temperature,
        noise=None if best is None else values[best],
        nll_before=_nll(blocks[mechanisms[0]], 1.0),
        nll_after=after,
        examples=examples,
        tried={values[m]: fitted[m].nll for m in values},
    )


def _run(sampler: Sampler) -> Scores:
    """All samples of a batch; refuses language models."""
    with sampler.ready():
        output = sampler.start()
        if sampler.predicts_tokens(output):
            raise ValueError(
                f"calibrate needs a classifier, got {type(sampler.base).__name__}, a language model, whose "
                "classes are the tokens of a vocabulary"
            )
        return sampler.finish(output)


# The model and its noise.


def _calibrated(model: nn.Module) -> tuple[Any, AttachedState | None]:
    """The Hugging Face model and its state; refuses models whose temperature could not be kept."""
    if not isinstance(model, nn.Module) or takes_chain(model) or hasattr(model, "_overt_augmented"):
        raise TypeError(f"calibrate needs a Hugging Face model, got a {type(model).__name__}")
    base = base_of(model)
    state = state_in(base)
    if not hasattr(base, "config"):
        raise TypeError(f"calibrate needs a Hugging Face model, got a {type(base).__name__}")
    if state is None and peft_models(model):
        raise ValueError(
            f"calibrate needs a {type(base).__name__} without an adapter, or one with mechanisms attached: "
            "PEFT saves no config, which a plain model's temperature is in (merge_and_unload first)"
        )
    return base, state


def _candidates(state: AttachedState | None, noise: bool | Sequence[float]) -> list[Any]:
    """The mechanism whose noise is chosen, as it is and with other amounts; [None] without `noise`."""
    if noise is False:
        return [None]
    present: tuple[Any, ...] = () if state is None else state.mechanisms
    noisy = [mechanism for mechanism in present if mechanism.noise_setting() is not None]
    if len(noisy) != 1:
        got = " and ".join(type(mechanism).__name__ for mechanism in present) or "nothing"
        raise ValueError(
            f"noise needs one mechanism with a setting for its noise, and {got} is attached: call "
            "overt.attach(model, overt.Bayesian(prior=None)) first, which adds noise to a trained model"
        )
    setting = noisy[0].noise_setting()
    values = setting.values if noise is True else noise
    if not isinstance(values, list | tuple) or not values:
        raise ValueError(
            f"noise must be True, False or values of {setting.name} such as (1.0, 10.0), got {noise!r}"
        )
    others: list[Any] = []
    for value in values:
        _check.positive(f"noise ({setting.name})", value)
        others.append(replace(noisy[0], **{setting.name: float(value)}))
    return list(dict.fromkeys([noisy[0], *others]))


def _amount(mechanism: Mechanism) -> float:
    """How much noise a mechanism has, by its own measure."""
    setting = mechanism.noise_setting()
    assert setting is not None
    return float(getattr(mechanism, setting.name))


@contextmanager
def _noise_of(
    base: nn.Module, state: AttachedState | None, present: Mechanism | None, other: Mechanism | None
) -> Iterator[None]:
    """Replace a mechanism by one with another amount of noise, and put it back at the end."""
    _replace(base, state, present, other)
    try:
        yield
    finally:
        _replace(base, state, other, present)


def _replace(
    base: nn.Module, state: AttachedState | None, old: Mechanism | None, new: Mechanism | None
) -> None:
    if state is None or old is None or new is None:
        return
    for layer in base.modules():
        if isinstance(layer, MechanismLayer) and layer.config == old:
            layer.reconfigure(new)
    state.mechanisms = tuple(new if mechanism == old else mechanism for mechanism in state.mechanisms)


def _keep(
    base: Any,
    state: AttachedState | None,
    present: Mechanism | None,
    best: Mechanism | None,
    temperature: Temperature,
) -> None:
    """Put what was chosen where `save_pretrained` finds it."""
    if state is None:
        setattr(base.config, TEMPERATURE, temperature._asdict())
        return
    _replace(base, state, present, best)
    state.temperature = temperature


# The data.


class _Block(NamedTuple):
    """Labelled logits, on the CPU: (samples, labels, classes) and (labels,)."""

    logits: Tensor
    labels: Tensor


def _batches(data: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    if isinstance(data, Mapping | str | Tensor) or not isinstance(data, Iterable):
        raise TypeError(
            f"data must give batches, mappings with labels; got a {type(data).__name__} (put one batch in a "
            "list)"
        )
    for number, batch in enumerate(data):
        if not isinstance(batch, Mapping):
            raise TypeError(f"batch {number} of data must be a mapping, got a {type(batch).__name__}")
        yield batch


def _block(base: Any, scores: Scores, batch: Mapping[str, Any], number: int) -> _Block:
    """The labelled logits of a batch."""
    if scores.link != "softmax":
        problem = "several labels at once" if scores.link == "sigmoid" else "a regression, or no classes"
        raise ValueError(
            f"calibrate needs a classifier with one label per example, got {type(base).__name__} "
            f"with {problem}"
        )
    drawn, where = scores.drawn, f"batch {number} of data"
    if bool((drawn.isnan() | drawn.isposinf()).any()):
        raise ValueError(f"the logits of {where} hold NaN or infinity")
    names = ("start_positions", "end_positions") if scores.spans else ("labels",)
    columns = [_labels(batch, name, where, drawn.shape[1 : 2 if scores.spans else -1]) for name in names]
    classes = drawn.shape[-1]
    if scores.spans:
        labels = torch.stack(columns, dim=1)
        # As in the loss of transformers' models, for answers beyond the end of a text that was cut.
        labels = labels.masked_fill(labels >= classes, IGNORED)
    else:
        labels = columns[0]
    labels, logits = labels.flatten(), drawn.flatten(1, -2).cpu()
    kept = labels != IGNORED
    labels, logits = labels[kept], logits[:, kept]
    wrong = labels[(labels < 0) | (labels >= classes)]
    if len(wrong):
        raise ValueError(
            f"{' and '.join(names)} of {where} must lie in 0 to {classes - 1}, or be {IGNORED}, got "
            f"{int(wrong[0])}"
        )
    if bool(logits.gather(-1, labels.expand(len(logits), -1).unsqueeze(-1)).isneginf().any()):
        raise ValueError(f"{' and '.join(names)} of {where} must not name a token that the mask hides")
    return _Block(logits, labels)


def _labels(batch: Mapping[str, Any], name: str, where: str, shape: Sequence[int]) -> Tensor:
    """Labels of this shape, on the CPU; the last axis may be one more, of size 1, as in losses."""
    labels = batch.get(name)
    if not isinstance(labels, Tensor):
        raise ValueError(f"{where} has no {name}, or they are no tensor; it has {', '.join(batch)}")
    if labels.is_floating_point() or labels.dtype == torch.bool:
        raise ValueError(f"{name} of {where} must be integer classes, got {labels.dtype}")
    if labels.shape == (*shape, 1):
        labels = labels.squeeze(-1)
    if labels.shape != tuple(shape):
        raise ValueError(f"{name} of {where} must have shape {tuple(shape)}, got {tuple(labels.shape)}")
    return labels.long().cpu()


# The search.


class _Fit(NamedTuple):
    temperature: float
    nll: float


def _nll(blocks: list[_Block], temperature: float) -> float:
    """Negative log-likelihood of the labels under the mean of the samples, in float64."""
    total, count = 0.0, 0
    for logits, labels in blocks:
        index = labels.expand(len(logits), -1).unsqueeze(-1)
        log_p = (logits.double() / temperature).log_softmax(dim=-1).gather(-1, index).squeeze(-1)
        total -= float((log_p.logsumexp(dim=0) - math.log(len(logits))).sum())
        count += len(labels)
    return total / count


def _fit(blocks: list[_Block]) -> _Fit:
    """The best temperature: the best of a grid, which holds 1, then a bounded search around it.

    One pass has a single minimum; the mean of samples may have several, hence the grid.
    """
    from scipy.optimize import minimize_scalar  # type: ignore[import-untyped, unused-ignore]

    step = math.log(MOST) / _STEPS
    grid = [number * step for number in range(-_STEPS, _STEPS + 1)]
    values = {place: _nll(blocks, math.exp(place)) for place in grid}
    best = min(grid, key=lambda place: values[place])
    bounds = max(grid[0], best - step), min(grid[-1], best + step)
    found = minimize_scalar(
        lambda place: _nll(blocks, math.exp(place)), bounds=bounds, method="bounded", options={"xatol": 1e-7}
    )
    if found.fun < values[best]:
        return _Fit(math.exp(float(found.x)), float(found.fun))
    return _Fit(math.exp(best), values[best])

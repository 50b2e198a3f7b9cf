"""Laplace's approximation of the last linear layer of a classifier: uncertainty after training.

The weights and bias of the layer that makes the logits get a Gaussian posterior around their trained values;
the rest of the model stays as it is. Its precision is that of the prior times the identity plus the full
Gauss–Newton matrix of the training labels' softmax likelihood, Σ Jᵀ (diag p − p pᵀ) J, which for a linear
layer is the Hessian (Daxberger et al. 2021, arXiv:2106.14806, sections 2 and 3).

```python
train = laplace.last_layer(model, train_batches)
posterior = laplace.fit(train.weight, train.bias, train.features, train.labels)
held_out = laplace.last_layer(model, held_out_batches)
posterior = posterior.tuned(held_out.features, held_out.labels)
probabilities = posterior.probabilities(laplace.last_layer(model, test_batches).features)
```

`probabilities` has the shape that `overt.judge.uncertainty` takes. The arithmetic is torch's, in float64 and
on the CPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from overt import _check
from overt._modes import evaluating
from overt.attaching.sampling import on_device
from overt.judge.uncertainty import nll

PRIOR_PRECISIONS = tuple(10.0 ** (power / 2) for power in range(-8, 9))  # 1e-4 to 1e4
MOST_PARAMETERS = 20_000  # whose matrix takes 3.2 GB


@dataclass(frozen=True, eq=False)
class Laplace:
    """A Gaussian posterior of a last layer's parameters, those of class 0 first, each class's bias last.

    Attributes:
        mean: (classes, columns), the trained weights, with the bias, if there is one, in the last column.
        biased: whether there is a bias.
        curvature: eigenvalues of the Gauss–Newton matrix, (parameters,), none negative.
        directions: its eigenvectors, (parameters, parameters), one per column.
        prior_precision: of the prior, a Gaussian around zero with the same precision for all parameters.
    """

    mean: Tensor
    biased: bool
    curvature: Tensor
    directions: Tensor
    prior_precision: float

    @property
    def covariance(self) -> Tensor:
        """(parameters, parameters)."""
        return self.directions / (self.curvature + self.prior_precision) @ self.directions.mT

    def logits(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Mean (examples, classes) and covariance (examples, classes, classes) of the logits.

        Logits are linear in the parameters, so that this is their exact distribution under the posterior.
        """
        inputs = _inputs(features, self.mean, self.biased)
        classes, width = self.mean.shape
        blocks = self.covariance.view(classes, width, classes, width)
        # One class at a time, so that nothing has examples × parameters × classes entries.
        rows = [torch.einsum("ni,icj,nj->nc", inputs, block, inputs) for block in blocks]
        return inputs @ self.mean.mT, torch.stack(rows, dim=1)

    def probabilities(self, features: Tensor, samples: int = 100, seed: int = 0) -> Tensor:
        """Probabilities under draws of the parameters, (samples, examples, classes).

        The same seed draws the same parameters for any features, so that data may come in pieces.
        """
        _check.whole("samples", samples, 1)
        inputs = _inputs(features, self.mean, self.biased)
        generator = torch.Generator().manual_seed(seed)
        normal = torch.randn(samples, len(self.curvature), generator=generator, dtype=torch.float64)
        steps = normal / (self.curvature + self.prior_precision).sqrt() @ self.directions.mT
        parameters = self.mean + steps.view(samples, *self.mean.shape)
        return (inputs @ parameters.mT).softmax(dim=-1)

    def probit(self, features: Tensor) -> Tensor:
        """Probabilities (examples, classes) without sampling: softmax of logits / √(1 + π/8 · variance).

        An approximation (MacKay 1992), which ignores how the logits of the classes are correlated.
        """
        mean, covariance = self.logits(features)
        variance = covariance.diagonal(dim1=1, dim2=2)
        return (mean / (1.0 + math.pi / 8.0 * variance).sqrt()).softmax(dim=-1)

    def tuned(
        self,
        features: Tensor,
        labels: Tensor,
        precisions: Sequence[float] = PRIOR_PRECISIONS,
        *,
        samples: int = 100,
        seed: int = 0,
    ) -> Laplace:
        """The same with the prior precision under which held-out labels are likeliest.

        Args:
            features: (examples, dim), of held-out examples.
            labels: (examples,), their classes.
            precisions: the prior precisions to try.
            samples: number of draws, whose mean predicts; the same ones for each precision.
            seed: random seed of the draws.
        """
        if not isinstance(precisions, list | tuple) or not precisions:
            raise ValueError(f"precisions must be a list of numbers such as (0.1, 1.0), got {precisions!r}")
        _check_labels(labels, len(_inputs(features, self.mean, self.biased)), len(self.mean))
        choices = [_with_prior(self, precision) for precision in precisions]
        losses = [
            nll(choice.probabilities(features, samples, seed).mean(dim=0), labels) for choice in choices
        ]
        return choices[losses.index(min(losses))]


def fit(
    weight: Tensor, bias: Tensor | None, features: Tensor, labels: Tensor, prior_precision: float = 1.0
) -> Laplace:
    """The posterior of a trained linear layer.

    Args:
        weight: (classes, dim).
        bias: (classes,), or None.
        features: (examples, dim), the layer's inputs for the training examples; see `last_layer`.
        labels: (examples,), their classes. The Gauss–Newton matrix depends on their number alone; they are
            taken to catch labels that do not fit.
        prior_precision: of the prior; see `Laplace.tuned`.
    """
    if weight.dim() != 2:
        raise ValueError(f"weight must have shape (classes, dim), got {tuple(weight.shape)}")
    classes = len(weight)
    if bias is not None and bias.shape != (classes,):
        raise ValueError(f"bias must have shape ({classes},), got {tuple(bias.shape)}")
    mean = _exact(weight) if bias is None else torch.cat([_exact(weight), _exact(bias).unsqueeze(1)], dim=1)
    if mean.numel() > MOST_PARAMETERS:
        raise ValueError(
            f"the layer must have at most {MOST_PARAMETERS:,} parameters, whose full matrix fits in memory, "
            f"got {mean.numel():,}"
        )
    if not bool(mean.isfinite().all()):
        raise ValueError("weight and bias must be finite, got NaN or infinity")
    inputs = _inputs(features, mean, bias is not None)
    _check_labels(labels, len(inputs), classes)
    p = (inputs @ mean.mT).softmax(dim=-1)
    matrix = mean.new_zeros(*mean.shape, *mean.shape)
    for one in range(classes):
        for other in range(one, classes):
            curved = p[:, one] * (float(one == other) - p[:, other])
            matrix[one, :, other] = matrix[other, :, one] = (inputs * curved.unsqueeze(1)).mT @ inputs
    curvature, directions = torch.linalg.eigh(matrix.view(mean.numel(), mean.numel()))
    posterior = Laplace(mean, bias is not None, curvature.clamp(min=0.0), directions, 1.0)
    return _with_prior(posterior, prior_precision)


@dataclass(frozen=True, eq=False)
class LastLayer:
    """What the last linear layer of a model saw: its weight and bias, its inputs, and the labels.

    Attributes:
        weight: (classes, dim).
        bias: (classes,), or None.
        features: (examples, dim), the layer's inputs.
        labels: (examples,).
    """

    weight: Tensor
    bias: Tensor | None
    features: Tensor
    labels: Tensor


@torch.no_grad()
def last_layer(model: nn.Module, data: Iterable[Mapping[str, Any]]) -> LastLayer:
    """The inputs of a classifier's last linear layer, in evaluation mode, which is restored.

    The layer is the `nn.Linear` that runs last and whose output is the model's logits; a model whose logits
    are changed after it is refused. A model with random attention uses the mean of its weights.

    Args:
        model: a classifier that returns logits, (examples, classes), as `.logits`.
        data: batches with `labels`, as a `DataLoader` with the Trainer's collator gives them. Tensors are
            moved to the model's device.
    """
    calls: list[tuple[nn.Linear, Tensor, Tensor]] = []

    def note(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        assert isinstance(module, nn.Linear)
        calls[:] = [(module, args[0], output)]

    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    hooks = [linear.register_forward_hook(note) for linear in linears]
    layer, features, labels = None, [], []
    try:
        with evaluating(model):
            for number, batch in enumerate(data):
                classes = _labels(batch, number)
                inputs = {key: value for key, value in batch.items() if key != "labels"}
                calls.clear()
                logits = getattr(model(**on_device(model, inputs)), "logits", None)
                layer = _checked_layer(model, logits, calls)
                features.append(calls[0][1].detach().cpu())
                labels.append(classes)
    finally:
        for hook in hooks:
            hook.remove()
    if layer is None:
        raise ValueError("data must hold at least one batch, got none")
    bias = None if layer.bias is None else layer.bias.detach().cpu()
    return LastLayer(layer.weight.detach().cpu(), bias, torch.cat(features), torch.cat(labels))


def _checked_layer(
    model: nn.Module, logits: object, calls: list[tuple[nn.Linear, Tensor, Tensor]]
) -> nn.Linear:
    """The layer that made the logits."""
    name = type(model).__name__
    if not isinstance(logits, Tensor) or logits.dim() != 2:
        got = tuple(logits.shape) if isinstance(logits, Tensor) else "none"
        raise ValueError(f"last_layer needs logits of shape (examples, classes) from {name}, got {got}")
    if not calls or calls[0][2].shape != logits.shape or not torch.equal(calls[0][2], logits):
        raise ValueError(
            f"the logits of {name} are not the output of its last linear layer: something follows it"
        )
    return calls[0][0]


def _labels(batch: object, number: int) -> Tensor:
    if not isinstance(batch, Mapping):
        raise TypeError(f"batch {number} of data must be a mapping, got a {type(batch).__name__}")
    labels = batch.get("labels")
    if not isinstance(labels, Tensor) or labels.dim() != 1:
        raise ValueError(f"batch {number} of data must have labels of shape (examples,), a class each")
    return labels.cpu()


def _with_prior(posterior: Laplace, precision: float) -> Laplace:
    _check.positive("prior_precision", precision)
    return replace(posterior, prior_precision=float(precision))


def _exact(value: Tensor) -> Tensor:
    return value.detach().to("cpu", torch.float64)


def _inputs(features: Tensor, mean: Tensor, biased: bool) -> Tensor:
    """Features, (examples, dim), in float64, with a column of ones for a bias."""
    width = mean.shape[1] - biased
    if features.dim() != 2 or features.shape[1] != width or len(features) == 0:
        raise ValueError(f"features must have shape (examples, {width}), got {tuple(features.shape)}")
    exact = _exact(features)
    if not bool(exact.isfinite().all()):
        raise ValueError("features must be finite, got NaN or infinity")
    return torch.cat([exact, exact.new_ones(len(exact), 1)], dim=1) if biased else exact


def _check_labels(labels: Tensor, examples: int, classes: int) -> None:
    if labels.is_floating_point() or labels.dtype == torch.bool or labels.shape != (examples,):
        raise ValueError(
            f"labels must be {examples} integer classes, one per example, got {labels.dtype} of shape "
            f"{tuple(labels.shape)}"
        )
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= classes:
        raise ValueError(f"labels must lie in 0 to {classes - 1}, got {low if low < 0 else high}")

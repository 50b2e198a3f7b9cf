"""Losses and gradients as CUDA graphs, for networks whose kernels take longer to start than to run."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

WARM_UP = 2  # passes before a graph is recorded: kernels are compiled and chosen in them
LOSSES = "overt_losses"  # what a network keeps of its last pass, for logs


@dataclass(frozen=True, eq=False)
class Recorded:
    """The forward and backward pass of batches of one shape.

    Attributes:
        graph: of both passes.
        inputs: the tensors that it reads.
        loss: that it writes.
        gradients: that it writes, with their parameters.
        losses: what modules keep for logs, which it writes, too.
    """

    graph: torch.cuda.CUDAGraph
    inputs: dict[str, Tensor]
    loss: Tensor
    gradients: list[tuple[nn.Parameter, Tensor]]
    losses: list[tuple[nn.Module, Any]]


class GraphedLoss:
    """The loss of a batch, with the gradients in the parameters, by replaying a CUDA graph.

    One is recorded for each shape of a batch, when the first of them comes. What changes from update to
    update must be in tensors on the GPU, whose addresses stay: inputs, parameters, the number of the update.
    The model must not wait for the GPU, nor keep anything of a pass but `overt_losses` and stored buffers.
    Dropout and noise are drawn anew at each replay, as they would be without a graph.

    Args:
        model: in training mode, on a GPU; it takes a batch as keyword arguments and returns a dict with the
            loss.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.recorded: dict[Hashable, Recorded] = {}
        self.stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def __call__(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """The loss; gradients of an earlier batch are replaced, not added to."""
        shape = tuple((name, value.shape, value.dtype) for name, value in inputs.items())
        if shape not in self.recorded:
            self.recorded[shape] = self._record(inputs)
        found = self.recorded[shape]
        for name, value in inputs.items():
            found.inputs[name].copy_(value)
        found.graph.replay()
        for parameter, gradient in found.gradients:
            parameter.grad = gradient
        for module, losses in found.losses:
            setattr(module, LOSSES, losses)
        return found.loss

    def clear(self) -> None:
        """Give the graphs' memory back, and the gradients in it."""
        self.recorded.clear()
        self.model.zero_grad(set_to_none=True)

    def _record(self, inputs: Mapping[str, Tensor]) -> Recorded:
        own = {name: value.clone() for name, value in inputs.items()}
        drawn = torch.cuda.get_rng_state()
        stored, parameters = self.model.state_dict(), {name for name, _ in self.model.named_parameters()}
        buffers = [(value, value.clone()) for name, value in stored.items() if name not in parameters]
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            for _ in range(WARM_UP):
                self._run(own)
        torch.cuda.current_stream().wait_stream(self.stream)
        torch.cuda.set_rng_state(drawn)
        for buffer, before in buffers:
            buffer.copy_(before)
        self.model.zero_grad(set_to_none=True)  # so that the backward pass writes, and does not add
        graph = torch.cuda.CUDAGraph()
        pool = next(iter(self.recorded.values())).graph.pool() if self.recorded else None
        with torch.cuda.graph(graph, pool, stream=self.stream):
            loss = self._run(own)
        gradients = [(each, each.grad) for each in self.model.parameters() if each.grad is not None]
        modules = [module for module in self.model.modules() if LOSSES in vars(module)]
        return Recorded(graph, own, loss, gradients, [(each, vars(each)[LOSSES]) for each in modules])

    def _run(self, inputs: Mapping[str, Tensor]) -> Tensor:
        loss: Tensor = self.model(**inputs)["loss"]
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

"""ALTI (Ferrando et al. 2022): how much of what a token becomes in a layer each token accounts for.

A layer's attention makes of token i the vector y_i, to which token j adds T_i(x_j): the heads' weighted and
projected values, and, for j = i, the residual connection. Where a normalisation follows, it is applied to
each part with the mean and deviation of the whole. The contribution of j is how much closer to y_i its part
brings one, in the L1 norm: c_ij ∝ max(0, ‖y_i‖₁ − ‖y_i − T_i(x_j)‖₁), with rows that sum to one. The residual
is part of y_i, so methods that read the maps add none by default.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from overt.mechanisms.attention import MultiheadAttention
from overt.tracing.capture import CapturedAttention, Watch
from overt.tracing.levels import unit_rows
from overt.tracing.mixing.layers import is_layer, layer_of, states_in
from overt.tracing.mixing.mixing import Mixing, register_mixing
from overt.tracing.mixing.projected import projected

MOST_CELLS = 2**24  # numbers of the parts that are held at once
NEAR = 1e-3  # relative to the largest number: two results of the same sum, in float32
NEAR_HALF = 5e-2


@register_mixing
class Alti(Mixing):
    """Contributions of tokens to what attention makes of each, with rows that sum to one."""

    name = "alti"
    title = "ALTI"
    cost = "one pass of the model, and a vector for each pair of tokens and layer"
    values = True
    unit = False
    signed = False
    residual = 0.0
    heads = False

    def __init__(self, keep: bool = False) -> None:
        super().__init__(keep)
        self.running: dict[str, _Layer] = {}
        self.maps: dict[int, Tensor] = {}

    def map(self, call: CapturedAttention) -> None:
        """Wait for the layer to end: what normalises the attention's output runs after it."""
        if call.kind == "cross":
            raise ValueError(
                f"mixing={self.name!r} is for models with self-attention alone, and {call.path} is "
                "cross-attention: not supported"
            )
        layer = self.running.get(layer_of(call) or "")
        if layer is None:
            return
        if layer.part is not None:
            raise ValueError(f"{layer.path} has several attentions: {self.title} is for layers with one")
        layer.part = _Part(call.number, call.weights.detach().double(), projected(call))

    def why_no_map(self, call: CapturedAttention) -> str:
        """It is in no layer."""
        del call
        return "it is in no layer whose inputs can be seen"

    @contextmanager
    def around(self, model: nn.Module, watch: Watch) -> Iterator[None]:
        """Record the inputs of each layer, and what the normalisations in it read and return."""
        del watch
        with ExitStack() as stack:
            for path, module in model.named_modules():
                handles = []
                if is_layer(path):
                    handles.append(module.register_forward_pre_hook(self._begin(path), with_kwargs=True))
                    handles.append(module.register_forward_hook(self._end(path), always_call=True))
                if "norm" in path.rpartition(".")[2].lower() or "norm" in type(module).__name__.lower():
                    handles.append(module.register_forward_hook(self._look))
                for handle in handles:
                    stack.callback(handle.remove)
            yield

    def maps_after(self, score: Callable[[], Tensor]) -> dict[int, Tensor]:
        """The maps of the layers that have ended."""
        del score
        maps, self.maps = self.maps, {}
        return maps

    def _begin(self, path: str) -> Callable[..., None]:
        def begin(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            value = args[0] if args else kwargs.get("hidden_states")
            self.running[path] = _Layer(path, module, value)

        return begin

    def _look(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not args or not isinstance(args[0], Tensor) or not isinstance(output, Tensor):
            return
        for layer in self.running.values():
            if layer.part is not None:  # those before attention are not needed
                layer.norms.append(_Norm(module, args[0].detach(), output.detach()))

    def _end(self, path: str) -> Callable[..., None]:
        def end(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            del module, args
            layer = self.running.pop(path, None)
            if layer is not None and layer.part is not None and output is not None:
                self.maps[layer.part.number] = contributions(layer, states_in(output, self.title))

        return end


class _Part(NamedTuple):
    """An attention: its number, weights (batch, head, query, key), values (batch, head, key, width)."""

    number: int
    weights: Tensor
    vectors: Tensor


class _Norm(NamedTuple):
    """A normalisation that ran."""

    module: nn.Module
    read: Tensor
    made: Tensor


@dataclass
class _Layer:
    """A layer that is running."""

    path: str
    module: nn.Module
    value: Any
    part: _Part | None = None
    norms: list[_Norm] = field(default_factory=list)

    def tokens(self, states: Tensor) -> Tensor:
        """Hidden states as (batch, token, width), in float64."""
        assert self.part is not None
        batch, _, queries, _ = self.part.weights.shape
        states = states.detach().double()
        if states.dim() == 2 and batch == 1:
            states = states.unsqueeze(0)
        ordered = states
        if states.dim() == 3 and (states.shape[:2] != (batch, queries) or self._second(batch, queries)):
            ordered = states.transpose(0, 1)
        if ordered.dim() != 3 or ordered.shape[:2] != (batch, queries):
            raise ValueError(
                f"{self.path} must read hidden states of shape ({batch}, {queries}, width) for ALTI, got "
                f"{tuple(states.shape)}"
            )
        return ordered

    def _second(self, batch: int, queries: int) -> bool:
        """Whether tokens come before examples, where their numbers do not tell."""
        kinds = nn.MultiheadAttention | MultiheadAttention
        attentions = [module for module in self.module.modules() if isinstance(module, kinds)]
        return batch == queries and any(not attention.batch_first for attention in attentions)


def contributions(layer: _Layer, output: Tensor) -> Tensor:
    """c_ij of one layer, float64 (batch, query, key).

    Args:
        layer: the layer, once it has ended.
        output: its hidden states.
    """
    assert layer.part is not None
    weights, vectors = layer.part.weights, layer.part.vectors
    near = NEAR if output.dtype in (torch.float32, torch.float64) else NEAR_HALF
    x = layer.tokens(states_in(layer.value, "ALTI"))
    batch, _, queries, keys = weights.shape
    if vectors.shape[-1] != x.shape[-1] or queries != keys:
        raise ValueError(f"{layer.path}: its attention adds nothing to the tokens that it reads: not ALTI's")
    total = torch.einsum("bhqk,bhkw->bqw", weights, vectors) + x
    norm = next((norm for norm in layer.norms if _same_but_bias(_whole(layer, norm.read), total, near)), None)
    if norm is None:
        raise ValueError(
            f"{layer.path} normalises nothing that is the sum of its input and its attention's output: ALTI "
            "is for layers with this residual connection"
        )
    ends = _whole(layer, output)
    # A layer that ends in a normalisation has one after each sum; others have them before.
    is_last = any(_near(ends, _whole(layer, made.made), near) for made in layer.norms)
    whole = _whole(layer, norm.made if is_last else norm.read)
    scale = _Scale(norm, _whole(layer, norm.read)) if is_last else None
    if scale is not None and not _same_but_bias(whole, scale(_whole(layer, norm.read), slice(None)), near):
        raise ValueError(
            f"{layer.path} has a {type(norm.module).__name__} that is neither a LayerNorm nor an RMSNorm: "
            "ALTI cannot tell the parts of what it makes"
        )
    out = torch.zeros(batch, queries, keys, dtype=torch.float64, device=x.device)
    step = max(1, MOST_CELLS // (batch * keys * x.shape[-1]))
    size = whole.abs().sum(dim=-1)
    for start in range(0, queries, step):
        rows = slice(start, min(start + step, queries))
        parts = torch.einsum("bhqk,bhkw->bqkw", weights[:, :, rows], vectors)
        at = torch.arange(rows.start, rows.stop)
        parts[:, at - start, at] += x[:, rows]
        if scale is not None:
            parts = scale(parts, rows)
        rest = (whole[:, rows].unsqueeze(2) - parts).abs().sum(dim=-1)
        out[:, rows] = (size[:, rows].unsqueeze(2) - rest).clamp(min=0.0)
    return unit_rows(out)


class _Scale:
    """A normalisation with the mean and deviation of a whole, applied to its parts."""

    def __init__(self, norm: _Norm, whole: Tensor) -> None:
        module: Any = norm.module
        self.centred = not type(module).__name__.lower().endswith("rmsnorm")
        eps = next(
            (e for n in ("eps", "variance_epsilon") if (e := getattr(module, n, None)) is not None), 0.0
        )
        centre = whole.mean(dim=-1, keepdim=True) if self.centred else 0.0
        self.deviation = ((whole - centre).square().mean(dim=-1, keepdim=True) + float(eps)).sqrt()
        weight = getattr(module, "weight", None)
        self.weight = 1.0 if weight is None else weight.detach().double()

    def __call__(self, parts: Tensor, rows: slice) -> Tensor:
        """Parts of some rows, (batch, row, [key,] width)."""
        deviation = self.deviation[:, rows]
        if parts.dim() == 4:
            deviation = deviation.unsqueeze(2)
        centred = parts - parts.mean(dim=-1, keepdim=True) if self.centred else parts
        scaled: Tensor = centred / deviation * self.weight
        return scaled


def _whole(layer: _Layer, states: Tensor) -> Tensor:
    """What a normalisation read or made, (batch, token, width); empty if its shape is another."""
    try:
        return layer.tokens(states)
    except ValueError:
        return states.new_zeros(0)


def _near(a: Tensor, b: Tensor, near: float) -> bool:
    return a.shape == b.shape and bool((a - b).abs().amax() <= near * b.abs().amax())


def _same_but_bias(a: Tensor, b: Tensor, near: float) -> bool:
    """Whether two differ by the same vector at all tokens, such as the bias of a projection."""
    if a.shape != b.shape:
        return False
    apart = a - b
    bias = apart.flatten(0, 1).mean(dim=0)
    return bool((apart - bias).abs().amax() <= near * b.abs().amax())

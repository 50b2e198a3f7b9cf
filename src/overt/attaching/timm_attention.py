"""timm's plain attention: a module that projects, attends and projects back by itself.

It is recognised by its parts, not by its class: `qkv`, `proj`, `num_heads`, and a `forward(x)` that may also
take a mask. Before anything is attached, the module's own output is compared with ours on random numbers.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from overt._modes import evaluating
from overt.attaching.attention import attention
from overt.attaching.find import AttentionSite, number_layers, refuse, undispatched

ARGUMENTS = ("x", "attn_mask", "is_causal")  # of its forward; only the first is required
# What the forward pass of `_projected` and `_output` knows of; and what attaching adds.
PARTS = ("qkv", "proj", "q_norm", "k_norm", "norm", "gate", "attn_drop", "proj_drop", "overt")
LOUD = 8.0  # deviation of the numbers that outputs are compared on: initial weights are small


def plain_attentions(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Path and module of each attention that has timm's parts, in order."""
    return [(path, module) for path, module in model.named_modules() if _has_its_parts(module)]


def _has_its_parts(module: nn.Module) -> bool:
    parts = (getattr(module, name, None) for name in ("qkv", "proj", "attn_drop", "proj_drop"))
    if not all(isinstance(part, nn.Module) for part in parts) or not isinstance(
        getattr(module, "num_heads", None), int
    ):
        return False
    names = tuple(inspect.signature(type(module).forward).parameters)[1:]
    return names[:1] == ARGUMENTS[:1] and set(names) <= set(ARGUMENTS)


def find(model: nn.Module) -> list[AttentionSite]:
    """Every plain attention of a model; refuses models that have others in their layers."""
    found = plain_attentions(model)
    for path, module in undispatched(model, [path for path, _ in found]):
        if re.search(r"(^|\.)\d+(\.|$)", path):
            raise refuse(
                model, f"{path} ({type(module).__name__}) is not a plain attention, though others of it are"
            )
    sites = []
    for path, module in found:
        heads, width = int(module.num_heads), _head_dim(module)  # type: ignore[arg-type]
        _check_output(model, path, module)
        chain = re.split(r"(?:^|\.)\d+(?:\.|$)", path)[0]
        eager = not getattr(module, "fused_attn", False)
        sites.append(AttentionSite(path, module, "", chain, "encoder", 0, heads, heads, width, eager=eager))
    return number_layers(model, sites)


def connect(module: nn.Module) -> None:
    """Let an attention compute its weights in its submodule `overt`."""
    # partial: unlike a method or a lambda, it is copied and pickled together with the module.
    module.__dict__["forward"] = partial(_forward, module)


def disconnect(module: nn.Module) -> None:
    """Undo `connect`."""
    module.__dict__.pop("forward", None)


def _forward(module: Any, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
    """timm's forward, with `module.overt` between queries and outputs."""
    if is_causal:
        raise ValueError(f"{module.overt.path} was taken for bidirectional, but is_causal is set")
    query, key, value = _projected(module, x)
    while attn_mask is not None and attn_mask.dim() < 4:
        attn_mask = attn_mask.unsqueeze(0)
    mixed, _ = attention(
        module, query, key, value, attn_mask, scaling=_scaling(module), dropout=module.attn_drop.p
    )
    return _output(module, x, mixed)


def _head_dim(module: Any) -> int:
    width = getattr(module, "head_dim", None)
    return width if isinstance(width, int) else int(module.qkv.out_features) // (3 * module.num_heads)


def _scaling(module: Any) -> float:
    """The factor of the scores; torch's attention, which `fused_attn` calls, takes its own."""
    plain: float = _head_dim(module) ** -0.5
    return plain if getattr(module, "fused_attn", False) else float(getattr(module, "scale", plain))


def _projected(module: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values, (batch, heads, token, dim)."""
    parts = module.qkv(x).unflatten(-1, (3, module.num_heads, _head_dim(module)))
    query, key, value = parts.permute(2, 0, 3, 1, 4).unbind(0)
    for_query, for_key = (getattr(module, name, None) for name in ("q_norm", "k_norm"))
    query = query if for_query is None else for_query(query)
    return query, key if for_key is None else for_key(key), value


def _output(module: Any, x: Tensor, mixed: Tensor) -> Tensor:
    """The module's output from mixed values, (batch, token, heads, dim)."""
    joined = mixed.flatten(-2)
    norm, gate = (getattr(module, name, None) for name in ("norm", "gate"))
    joined = joined if norm is None else norm(joined)
    joined = joined if gate is None else joined * gate(x).sigmoid()
    out: Tensor = module.proj_drop(module.proj(joined))
    return out


@torch.no_grad()
def _check_output(model: nn.Module, path: str, module: Any) -> None:
    """Refuse a module whose output is not what its parts suggest."""
    name = f"{path} ({type(module).__name__})"
    own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    strange = [part for part, _ in [*module.named_children(), *own] if part not in PARTS]
    if strange:  # it may do nothing yet, such as a bias that starts at zero
        raise refuse(model, f"{name} has {strange[0]}, which timm's plain attention has not")
    weight = next(module.qkv.parameters())
    if weight.is_meta or torch.get_default_device().type == "meta":
        return  # being loaded: there are no numbers to compare yet
    noise = torch.randn(2, 5, int(module.qkv.in_features), generator=torch.Generator().manual_seed(0))
    x = LOUD * noise.to(weight)
    try:
        with evaluating(module):
            theirs = list(_seen(module, lambda: module(x)))
            query, key, value = _projected(module, x)
            mixed = F.scaled_dot_product_attention(query, key, value, scale=_scaling(module))
            ours = list(_seen(module, lambda: _output(module, x, mixed.transpose(1, 2))))
    except Exception as error:
        raise refuse(model, f"the output of {name} could not be compared: {error}") from error
    near = 1e-3 if weight.dtype == torch.float32 else 5e-2
    if any(
        a.shape != b.shape or float((a - b).abs().max()) > near * float(a.abs().max())
        for a, b in zip(theirs, ours, strict=True)
    ):
        raise refuse(model, f"{name} is not a softmax of scaled scores between its projections")


def _seen(module: Any, run: Any) -> Iterator[Tensor]:
    """What enters the last projection, whose weights may be zero, and the output, in float32."""
    entered: list[Tensor] = []
    hook = module.proj.register_forward_pre_hook(lambda _module, inputs: entered.append(inputs[0].float()))
    try:
        output = run().float()
    finally:
        hook.remove()
    yield from (*entered, output)

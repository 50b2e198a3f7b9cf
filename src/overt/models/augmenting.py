"""Attention beside the convolutions of a ResNet that was made elsewhere, such as timm's or torchvision's."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from overt import _check
from overt._files import check_folder, read_tensors, write_tensors
from overt._modes import evaluating
from overt.mechanisms.chain import Chain, around
from overt.mechanisms.mechanism import Mechanism
from overt.models.augmented_conv import AugmentedConv2d, Size, channels, pair
from overt.models.resnet import DEPTHS, HEADS

STAGES = "layer2", "layer3", "layer4"
_STATE = "_overt_augmented"  # attribute of an augmented network


class Pass:
    """One forward pass of an augmented network."""

    def __init__(self, chain: Chain, opened: bool) -> None:
        self.chain, self.opened = chain, opened


class Passes:
    """Which chain the layers of an augmented network use, also where they run again in the backward pass.

    Its blocks call their convolutions with one argument, so the chain of a pass is looked up. A checkpointed
    block runs again in the backward pass, which the outputs' gradients announce.
    """

    def __init__(self) -> None:
        self._local = threading.local()
        self._used: WeakSet[Chain] = WeakSet()
        self._again: dict[int, Pass | None] = {}  # number of a backward pass → its pass, None for several

    def __reduce__(self) -> tuple[Any, ...]:
        return Passes, ()  # a copied network's passes are its own

    def now(self) -> Chain:
        """The chain of the pass that is running in this thread."""
        number = torch._C._current_graph_task_id()
        if number != -1:  # a block is running again
            found = self._again.get(number)
            if found is None:
                several = "of several forward passes again" if number in self._again else "of an unknown pass"
                raise RuntimeError(
                    f"this backward pass runs checkpointed blocks {several}, and cannot tell their maps "
                    "apart: call backward once for each forward pass, on the network's own outputs"
                )
            return found.chain
        chain = around()
        if chain is None:
            raise RuntimeError(
                "an augmented network's layers ran outside its forward pass, and have no chain of maps: call "
                "the network itself, or run its parts in `with overt.Chain():`"
            )
        return chain

    def before(self, module: nn.Module, args: Any) -> None:
        """A pass begins: it gets a chain, unless the caller made one."""
        del module, args
        chain = around()
        if chain is not None and chain in self._used and torch.is_grad_enabled():
            raise RuntimeError("a chain is for one forward pass: use a new overt.Chain for the next")
        current = Pass(Chain() if chain is None else chain, chain is None)
        if current.opened:
            current.chain.__enter__()
        self._used.add(current.chain)
        self._local.__dict__.setdefault("stack", []).append(current)

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        """A pass ends; its chain is kept as long as its outputs may be differentiated."""
        del module, args
        if not self._local.__dict__.get("stack"):  # it did not begin
            return
        current = self._local.stack.pop()
        if current.opened:
            current.chain.__exit__(None, None, None)
        for tensor in _tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(partial(self._begin, current))  # type: ignore[no-untyped-call]

    def _begin(self, current: Pass, gradient: Tensor) -> None:
        del gradient
        number = torch._C._current_graph_task_id()
        if number not in self._again:
            self._again[number] = current
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(lambda: self._again.pop(number, None))
        elif self._again[number] is not current:
            self._again[number] = None


def _tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from _tensors(value)
    elif isinstance(output, Sequence) and not isinstance(output, str):
        for value in output:
            yield from _tensors(value)


@dataclass
class Augmentation:
    """What `augment` changed.

    Attributes:
        passes: the chains of passes.
        replaced: path → the convolution that was there.
        norms: path → the state of the batch norm behind it, before.
        hooks: on the network.
    """

    passes: Passes = field(default_factory=Passes)
    replaced: dict[str, nn.Conv2d] = field(default_factory=dict)
    norms: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    hooks: list[Any] = field(default_factory=list)


def augmentation_of(model: nn.Module) -> Augmentation | None:
    """What `augment` changed in a network; None if it did not."""
    return getattr(model, _STATE, None)


def augment(
    model: nn.Module,
    *mechanisms: Mechanism,
    size: Size = 224,
    heads: int = HEADS,
    key_share: float | None = None,
    value_share: float | None = None,
    least_key: int | None = None,
) -> nn.Module:
    """Put attention beside the 3×3 convolutions of a ResNet's last three stages, in place.

    The network's modules must be called as in torchvision and timm: layer2 to layer4, conv1, bn1 and so on.
    Each convolution keeps its first filters, and the batch norm behind it their statistics; the others make
    room for the attention. `overt.detach` puts back what was there. Maps of one forward pass form a chain;
    with random weights, run the network in `with overt.Chain(step=t) as chain:`, and add `chain.penalty()` to
    the loss.

    Args:
        model: the network.
        mechanisms: of the maps; none for plain attention.
        size: of the largest images.
        heads: number of heads.
        key_share: κ, the share of a convolution's channels that keys have; by default 0.2, or 0.25 in blocks
            of two convolutions.
        value_share: υ, that of values, which take the place of filters; by default 0.1, or 0.125.
        least_key: least width of a head's keys; by default 20, or 1.
    """
    if augmentation_of(model) is not None:
        raise ValueError(f"this {type(model).__name__} is augmented already: call overt.detach first")
    if any(isinstance(module, AugmentedConv2d) for module in model.modules()):
        raise ValueError(f"this {type(model).__name__} has attention already: make it with mechanisms=[…]")
    _check.whole("heads", heads, 1)
    for name, share in (("key_share", key_share), ("value_share", value_share)):
        if share is not None:
            _check.number(name, share)
            if not 0.0 < share < 1.0:
                raise ValueError(f"{name} must lie between 0 and 1, got {share}")
    if least_key is not None:
        _check.whole("least_key", least_key, 1)
    found = _convolutions(model)
    sizes = _output_sizes(model, found, pair("size", size))
    last, layers = None, {}
    for number, (path, conv) in enumerate(found.items()):
        block = model.get_submodule(path.rpartition(".")[0])
        depth = DEPTHS[50 if hasattr(block, "conv3") else 34]
        pool = 2 if path.startswith(STAGES[0]) else 1
        shape = tuple(-(-length // pool) for length in sizes[path])
        out = conv.out_channels
        values = channels((depth.value_share if value_share is None else value_share) * out, heads)
        if values >= out:
            raise ValueError(
                f"{path} has {out} channels, of which the values of {heads} heads would take {values}: use "
                "fewer heads, or a smaller value_share"
            )
        layers[path] = AugmentedConv2d(
            conv.in_channels,
            out,
            conv.kernel_size[0],
            conv.stride[0],
            heads=heads,
            key_channels=channels(
                (depth.key_share if key_share is None else key_share) * out,
                heads,
                depth.least_key if least_key is None else least_key,
            ),
            value_channels=values,
            size=sizes[path],
            pool=pool,
            mechanisms=mechanisms,
            layer=number,
            start=shape != last,
            bias=conv.bias is not None,
        ).to(conv.weight)
        last = shape
    state = Augmentation()
    for path, layer in layers.items():
        conv, kept = found[path], layer.conv.out_channels
        with torch.no_grad():
            layer.conv.weight.copy_(conv.weight[:kept])
            if conv.bias is not None and layer.conv.bias is not None:
                layer.conv.bias.copy_(conv.bias[:kept])
        layer.conv.requires_grad_(conv.weight.requires_grad)
        layer.surrounding = state.passes.now
        layer.train(conv.training)
        _reset_norm(model, path, kept, state)
        state.replaced[path] = conv
        model.set_submodule(path, layer)
    state.hooks = [
        model.register_forward_pre_hook(state.passes.before),
        model.register_forward_hook(state.passes.after, always_call=True),
    ]
    object.__setattr__(model, _STATE, state)
    return model


def restore(model: nn.Module) -> nn.Module:
    """Undo `augment`: put back the convolutions and batch norms that were there."""
    state = augmentation_of(model)
    assert state is not None
    trained = 0
    for path, conv in state.replaced.items():
        layer = model.get_submodule(path)
        like = next(layer.parameters())
        now = layer.get_parameter("conv.weight").detach()
        trained += not torch.equal(now, conv.weight.detach()[: len(now)].to(now))
        model.set_submodule(path, conv.to(like.device, like.dtype).train(layer.training))
    for path, before in state.norms.items():
        model.get_submodule(path).load_state_dict(before)
    for hook in state.hooks:
        hook.remove()
    object.__delattr__(model, _STATE)
    if trained:
        warnings.warn(
            f"{trained} convolutions have been trained since overt.vision.augment: their filters are dropped",
            stacklevel=3,
        )
    return model


def save_originals(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write what `augment` replaced to a safetensors file: convolutions, and the norms behind them.

    A network's state dict does not hold them. Written beside it, they let `overt.detach` put back the
    original convolutions, bit for bit, when the network is made, augmented and loaded again.

    Args:
        model: an augmented network.
        path: of the file.
    """
    write_tensors(check_folder("path", os.fspath(path)), _originals(model))


def load_originals(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Read what `save_originals` wrote: `overt.detach` will put it back.

    Args:
        model: a network that was augmented as the saved one.
        path: of the file.
    """
    originals = _originals(model)
    tensors = read_tensors(os.fspath(path), {name: tensor.shape for name, tensor in originals.items()})
    with torch.no_grad():
        for name, tensor in originals.items():
            tensor.data = tensors[name].to(tensor.device)


def _originals(model: nn.Module) -> dict[str, Tensor]:
    """Name → tensor of the convolutions and norms that were there."""
    state = augmentation_of(model)
    if state is None:
        raise ValueError(f"this {type(model).__name__} is not augmented: call overt.vision.augment first")
    parts = {path: conv.state_dict(keep_vars=True) for path, conv in state.replaced.items()} | state.norms
    return {f"{path}.{name}": tensor for path, part in parts.items() for name, tensor in part.items()}


def _convolutions(model: nn.Module) -> dict[str, nn.Conv2d]:
    """Path → 3×3 convolution, in order; refuses those that attention cannot stand beside."""
    found = {
        path: module
        for path, module in model.named_modules()
        if path.startswith(tuple(f"{stage}." for stage in STAGES))
        and isinstance(module, nn.Conv2d)
        and module.kernel_size == (3, 3)
    }
    if not found:
        raise ValueError(
            f"a {type(model).__name__} has no 3×3 convolutions in {', '.join(STAGES)}: augment takes ResNets "
            "whose modules are called as in timm and torchvision"
        )
    for path, conv in found.items():
        if conv.groups != 1:
            raise ValueError(f"{path} is grouped (groups={conv.groups}), and cannot be augmented")
        if conv.dilation != (1, 1):
            raise ValueError(f"{path} is dilated (dilation={conv.dilation[0]}), and cannot be augmented")
        if conv.stride not in ((1, 1), (2, 2)) or conv.padding != (1, 1):
            raise ValueError(
                f"{path} has stride {conv.stride} and padding {conv.padding}; augment takes stride 1 or 2, "
                "padding 1"
            )
    return found


def _output_sizes(
    model: nn.Module, found: dict[str, nn.Conv2d], size: tuple[int, int]
) -> dict[str, tuple[int, int]]:
    """Path → height and width of a convolution's output, for images of a size."""
    sizes: dict[str, tuple[int, int]] = {}

    def note(path: str, module: nn.Module, args: Any, output: Tensor) -> None:
        del module, args
        sizes[path] = output.shape[-2], output.shape[-1]

    hooks = [conv.register_forward_hook(partial(note, path)) for path, conv in found.items()]
    first = next(module for module in model.modules() if isinstance(module, nn.Conv2d))
    try:
        with torch.no_grad(), evaluating(model):
            model(first.weight.new_zeros(1, first.in_channels, *size))
    finally:
        for hook in hooks:
            hook.remove()
    return sizes


def _reset_norm(model: nn.Module, path: str, kept: int, state: Augmentation) -> None:
    """Start the batch norm behind a convolution anew for the channels of the attention."""
    parent, _, name = path.rpartition(".")
    norm_path = f"{parent}.{name.replace('conv', 'bn')}"
    norm = getattr(model.get_submodule(parent), name.replace("conv", "bn"), None)
    if not isinstance(norm, nn.BatchNorm2d):
        return
    state.norms[norm_path] = {key: value.clone() for key, value in norm.state_dict().items()}
    with torch.no_grad():
        for tensor, value in (
            (norm.weight, 1),
            (norm.bias, 0),
            (norm.running_mean, 0),
            (norm.running_var, 1),
        ):
            if tensor is not None:
                tensor[kept:] = value

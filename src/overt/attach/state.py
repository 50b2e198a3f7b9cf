"""What an attached model holds as a whole: the step count, the hooks around its forward, the KL it joins."""

from __future__ import annotations

import inspect
import warnings
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from overt.attach.passes import KEYWORD, Kept, Pass, keep_on, pop, push, running
from overt.mechanisms.attention_map import Mechanism

if TYPE_CHECKING:
    from transformers import Cache

NOT_JOINED = (
    "the KL of the last training forward joined no loss: the model returned none (label smoothing and "
    "compute_loss_func compute their own), so add overt.penalty(model) to yours"
)


class _Last:
    """KL and penalty of the last forward. They hang on a graph, which no copy or file can hold."""

    def __init__(self, kl: Tensor | None = None, penalty: Tensor | None = None, unused: bool = False) -> None:
        self.kl, self.penalty, self.unused = kl, penalty, unused

    def __deepcopy__(self, memo: object) -> _Last:
        return _Last()

    def __reduce__(self) -> tuple[type[_Last], tuple[()]]:
        return _Last, ()


class AttachedState(nn.Module):
    """Put into the model under the name `overt_state`.

    Buffers:
        step: optimizer steps so far, t of λ(t) and of the noise's address; saved with the weights.
        seen: examples since the last optimizer step, so that accumulated batches draw their own noise.
    """

    step: Tensor
    seen: Tensor

    def __init__(self, token: str, mechanisms: tuple[Mechanism, ...], where: Any, seed: int) -> None:
        super().__init__()
        self.token, self.mechanisms, self.where, self.seed = token, mechanisms, where, seed
        self.register_buffer("step", torch.zeros((), dtype=torch.int64))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64), persistent=False)
        self.convolving: set[str] = set()  # stacks whose decoding reads rows of earlier maps
        self.implementations: list[tuple[Any, str]] = []
        self.hooks: list[Any] = []
        self.last = _Last()
        self.override: dict[str, Any] | None = None
        self.model: weakref.ref[nn.Module] | None = None
        self.watched: list[nn.Parameter] = []  # the model's, so that a copy knows its own
        self.optimizer: weakref.ref[torch.optim.Optimizer] | None = None
        _states.add(self)

    def __getstate__(self) -> dict[str, Any]:
        # Weak references belong to one model; a copy finds its own at its next forward.
        return {**self.__dict__, "model": None, "optimizer": None, "override": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        _states.add(self)

    def hook(self, module: nn.Module) -> None:
        """Watch a model's forward."""
        self.hooks.append(module.register_forward_pre_hook(self.open, with_kwargs=True))
        self.hooks.append(module.register_forward_hook(self.close, with_kwargs=True, always_call=True))

    def open(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Before a model's forward: begin a pass, or join the one that is running."""
        root = "overt_state" in module._modules
        current = kwargs.get(KEYWORD)
        if current is None and not root:
            current = running(self.token)
        if current is None:
            current = self._begin(module)
        push(current)
        stack = module.__dict__.get("overt_stack")
        if stack is not None:
            self._look_at_inputs(module, stack, args, kwargs, current)
            if accepts_keywords(module):
                kwargs = {**kwargs, KEYWORD: current}
        return args, kwargs

    def close(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """After it: leave kept rows on the cache, and join the KL to the loss."""
        current = kwargs.get(KEYWORD)
        if current is None:
            current = running(self.token)
        if current is None:
            return output
        pop(current)
        if output is None:  # the forward failed
            return None
        stack = module.__dict__.get("overt_stack")
        if stack is not None and not current.training:
            self._keep_rows(stack, output, current)
        if running(self.token) is current:
            return output
        return self._finish(module, args, kwargs, output, current)

    def _begin(self, module: nn.Module) -> Pass:
        if not torch.compiler.is_compiling() and (self.model is None or self.model() is None):
            root = module if "overt_state" in module._modules else None
            self.model = None if root is None else weakref.ref(root)
        if not torch.compiler.is_compiling() and module.training and self.last.unused:
            self.last.unused = False
            warnings.warn(NOT_JOINED, UserWarning, stacklevel=2)
        address: dict[str, Any] = {"step": self.step.clone()}
        if self.override is not None:
            address.update(self.override)
        seen = self.seen.clone() if self.override is None and module.training else None
        return Pass(self.token, module.training, address, self.seed, seen)

    def _look_at_inputs(
        self, module: nn.Module, stack: str, args: tuple[Any, ...], kwargs: dict[str, Any], current: Pass
    ) -> None:
        """Find the cache that a stack is given, and inputs that may pack several sequences into one."""
        given = {**dict(zip(parameters_of(module), args, strict=False)), **kwargs}
        current.unusual = _may_be_packed(given)
        cache = given.get("past_key_values")
        current.wants_kl[stack] = cache is None
        length = 0 if cache is None else int(cache.get_seq_length())
        kept = getattr(cache, "overt_kept", None)
        keeps = stack in self.convolving
        if length > 0 and keeps and (kept is None or current.training):
            raise ValueError(
                "the cache holds tokens but no rows of their maps, which evolving attention needs: "
                "fill it with this model, in evaluation mode"
            )
        if keeps and kept is not None and kept.length != length:
            raise ValueError(
                f"the cache holds {length} tokens, and map rows of {kept.length}: do not change it by hand"
            )
        current.past[stack] = length
        if not keeps or current.training:
            return
        if kept is None:
            kept = Kept()
            if cache is not None:
                keep_on(cache, kept)
        current.kept[stack] = kept

    def _keep_rows(self, stack: str, output: Any, current: Pass) -> None:
        cache, kept = _cache_in(output), current.kept.get(stack)
        if cache is None or kept is None:
            return
        kept.length = int(cache.get_seq_length())
        # A compiled graph cannot hang anything on a cache that it makes; without its rows, the cache will be
        # refused when it comes back.
        if getattr(cache, "overt_kept", None) is not kept and not torch.compiler.is_compiling():
            keep_on(cache, kept)

    def _finish(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, current: Pass
    ) -> Any:
        chains = [chain for chain in current.chains.values() if chain.has_kl]
        kls = [chain.kl() for chain in chains]
        total = sum((kl.to(kls[0].device) for kl in kls[1:]), kls[0]) if kls else None
        # A new one each time: a compiled graph would look into the tensors that the old one holds.
        self.last = _Last(total)
        if not current.training or self.override is not None:
            return output
        if current.batch is not None:
            self.seen += current.batch
        if not chains:
            return output
        given = {**dict(zip(parameters_of(module), args, strict=False)), **kwargs}
        parts = [joining(chain.penalty(per_example=True), given, module) for chain in chains]
        penalty = sum((part.to(parts[0].device) for part in parts[1:]), parts[0])
        joined = _add_to_loss(output, given, penalty)
        self.last = _Last(total, penalty, unused=joined is None and torch.is_grad_enabled())
        return output if joined is None else joined

    def used(self) -> None:
        """Note that the KL was asked for, and so was not forgotten."""
        self.last.unused = False

    def advance(self) -> None:
        """Count an optimizer step."""
        self.step += 1
        self.seen.zero_()


def joining(penalty: Tensor, given: dict[str, Any], module: nn.Module) -> Tensor:
    """λ·KL per example, (batch,), as it joins the loss.

    Examples weigh by their number of labels, as they do in the loss. Where the Trainer says how many labels
    all accumulated batches of all processes hold, the sum is divided by that number: the parts of one
    optimizer step then add up to the same average, however they are cut.
    """
    labels = given.get("shift_labels")
    total = given.get("num_items_in_batch")
    if labels is None:
        labels = given.get("labels")
        if isinstance(labels, Tensor) and labels.dim() > 1 and _loss_shifts(module, total is not None):
            labels = labels[..., 1:]
    if not isinstance(labels, Tensor) or labels.dim() == 0 or labels.shape[0] != penalty.shape[0]:
        return penalty.mean()
    items = labels.ne(-100).reshape(labels.shape[0], -1).sum(dim=1).to(penalty.device)
    if total is None:
        total = items.sum()
    elif isinstance(total, Tensor):
        total = total.reshape(-1)[0].to(penalty.device)
    return (penalty * items).sum() / torch.as_tensor(total, device=penalty.device).clamp(min=1)


def _loss_shifts(module: nn.Module, counted: bool) -> bool:
    """Whether a causal loss leaves out the first label, and the Trainer's count of labels with it."""
    from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

    causal = LOSS_MAPPING.get(str(getattr(module, "loss_type", None))) is ForCausalLMLoss
    if not causal or getattr(module.config, "is_encoder_decoder", False):
        return False
    return not counted or _trainer_shifts()


def _trainer_shifts() -> bool:
    from transformers.trainer import Trainer

    return "_loss_shifts_labels" in inspect.unwrap(Trainer.__init__).__code__.co_names


def _add_to_loss(output: Any, given: dict[str, Any], penalty: Tensor) -> Any:
    """The output with the penalty in its loss; None if it has no loss."""
    if isinstance(output, tuple) and not hasattr(output, "_fields"):
        first = output[0] if output else None
        if given.get("labels") is None or not isinstance(first, Tensor) or first.dim() > 0:
            return None
        return (first + penalty.to(first.device, first.dtype), *output[1:])
    loss = output.get("loss") if isinstance(output, dict) else None
    if not isinstance(loss, Tensor):
        return None
    output["loss"] = loss + penalty.to(loss.device, loss.dtype)
    return output


def _cache_in(output: Any) -> Cache | None:
    from transformers.cache_utils import Cache

    values = output.values() if isinstance(output, dict) else output if isinstance(output, tuple) else ()
    return next((value for value in values if isinstance(value, Cache)), None)


def _may_be_packed(given: dict[str, Any]) -> str | None:
    """The input that may pack several sequences into one row, or give a mask of its own making."""
    for name in ("cu_seq_lens_q", "cu_seqlens", "seq_idx"):
        if given.get(name) is not None:
            return name
    mask = given.get("attention_mask")
    if isinstance(mask, Tensor) and mask.dim() > 2:
        return "a mask of 3 or 4 axes"
    if mask is None and given.get("position_ids") is not None:
        return "position_ids without attention_mask"
    return None


_accepts: dict[type, tuple[list[str], bool]] = {}


def _signature(module: nn.Module) -> tuple[list[str], bool]:
    known = _accepts.get(type(module))
    if known is None:
        parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
        keywords = any(p.kind is p.VAR_KEYWORD for p in parameters)
        known = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD], keywords
        _accepts[type(module)] = known
    return known


def parameters_of(module: nn.Module) -> list[str]:
    """Names of a forward's positional arguments."""
    return _signature(module)[0]


def accepts_keywords(module: nn.Module) -> bool:
    """Whether a forward takes any keyword argument."""
    return _signature(module)[1]


_states: weakref.WeakSet[AttachedState] = weakref.WeakSet()


def _after_optimizer_step(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
    del args, kwargs
    for state in list(_states):
        bound = None if state.optimizer is None else state.optimizer()
        if bound is None and _trains(optimizer, state):
            state.optimizer, bound = weakref.ref(optimizer), optimizer
        if bound is optimizer:
            state.advance()


def _trains(optimizer: torch.optim.Optimizer, state: AttachedState) -> bool:
    model = None if state.model is None else state.model()
    ours = {id(parameter) for parameter in state.watched}
    if model is not None:  # it may have got new ones, such as LoRA's
        ours |= {id(parameter) for parameter in model.parameters()}
    return any(id(parameter) in ours for group in optimizer.param_groups for parameter in group["params"])


register_optimizer_step_post_hook(_after_optimizer_step)

"""The state of an attached model as a whole: step count, hooks around its forward pass, KL in its loss."""

from __future__ import annotations

import inspect
import re
import threading
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from overt.attaching.adapters import watch
from overt.attaching.attention import register
from overt.attaching.passes import (
    KEYWORD,
    DecodingState,
    Pass,
    pass_in,
    pop,
    push,
    running,
    store_on,
    tokens_in,
)
from overt.attaching.settings import Temperature
from overt.attaching.turns import Turns
from overt.mechanisms.backend import maps_wanted
from overt.mechanisms.chain import Chain, recomputing
from overt.mechanisms.losses import Losses
from overt.mechanisms.mechanism import Mechanism

if TYPE_CHECKING:
    from transformers import Cache

NOT_JOINED = (
    "the {adds} of the last training forward pass was not added to a loss: the model returned none (label "
    "smoothing and compute_loss_func compute their own), so add overt.penalty(model, labels) to yours"
)


class Last(NamedTuple):
    """The record of the last forward pass; sums and averages are computed on demand.

    Attributes:
        training: whether it was in training mode; None if there was no pass.
        kls: what mechanisms add to the loss, unweighted, per example, (batch,), one tensor per chain.
        penalties: the same, weighted; in training only.
        weight: the factor between `kls` and `penalties`; None if mechanisms differ in it.
        labels: the labels that the loss counts.
        total: number of labels that the Trainer counted.
        joined: what was added to the loss.
        task: the loss before that, detached.
        divides: whether the model divides its loss by `total`.
        batch: number of examples.
    """

    training: bool | None = None
    kls: tuple[Tensor, ...] = ()
    penalties: tuple[Tensor, ...] = ()
    weight: Tensor | float | None = None
    labels: Tensor | None = None
    total: Any = None
    joined: Tensor | None = None
    task: Tensor | None = None
    divides: bool = False
    batch: int | None = None

    def but(self, **changed: Any) -> Last:
        """A copy with some fields changed, like `_replace`, which torch 2.11 cannot compile."""
        return Last(**{**dict(zip(Last._fields, self, strict=True)), **changed})

    def kl(self) -> Tensor:
        """The KL: sum over layers, mean over the batch."""
        first, *rest = [kl.mean() for kl in self.kls]
        return sum((kl.to(first.device) for kl in rest), first)

    def losses(self) -> Losses:
        """The parts of the loss, each averaged over this batch, whatever the Trainer divides by."""
        task, labels = self.task, self.labels
        items: Tensor | int | None = self.batch
        divides = self.divides and self.total is not None
        if labels is not None and labels.dim() > 0:
            items = labels.ne(-100).sum()
            divides = divides and not labels.is_floating_point()  # a regression's loss is a mean anyway
        if task is not None and divides and items is not None:
            total = torch.as_tensor(self.total).reshape(-1)[0].to(task.device)
            task = task * total / torch.as_tensor(items).to(task.device).clamp(min=1)
        if not self.kls:
            return Losses(task, None, None, items)
        kl = average_by_labels(tuple(kl.detach() for kl in self.kls), labels, None)
        assert kl is not None
        weight = self.weight
        if weight is None and self.penalties:
            penalty = average_by_labels(tuple(term.detach() for term in self.penalties), labels, None)
            assert penalty is not None
            weight = penalty / kl
        return Losses(task, kl, weight, items)


class _Last:
    """Placeholder for the class that older pickles have in place of `Last`; its instances are dropped."""


class _ThreadState(threading.local):
    """What a thread has requested of a model, and its last forward pass, with the autograd graph."""

    def __init__(self) -> None:  # not class attributes: compilers would not see them change
        self.with_kl = 0
        self.drawn: dict[str, Any] | None = None  # the address of the samples to draw
        # A list, since compilers do not carry out assignments to a thread-local attribute.
        self.lasts = [Last()]

    @property
    def last(self) -> Last:
        return self.lasts[0]


class AttachedState(nn.Module):
    """The state of an attached model; a submodule of it named `overt_state`.

    Buffers:
        step: optimizer steps so far, the t of λ(t) and of the noise's address; saved with the weights.
        seen: examples since the last optimizer step, so that each accumulated batch draws different noise.
    """

    step: Tensor
    seen: Tensor
    hands_on = True  # whether models hand keyword arguments on to their attentions
    loaded = False  # whether step and mechanisms come from files or another model rather than from attach
    temperature: Temperature | None = None  # what calibrate fitted

    def __init__(self, token: str, mechanisms: tuple[Mechanism, ...], where: Any, seed: int) -> None:
        super().__init__()
        self.token, self.mechanisms, self.where, self.seed = token, mechanisms, where, seed
        self.register_buffer("step", torch.zeros((), dtype=torch.int64))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64), persistent=False)
        self.keeping: set[str] = set()  # stacks whose decoding reads earlier rows of their maps
        self.counting: dict[str, int] = {}  # stack → the cache layer whose length gives the number of tokens
        self.adds: set[str] = set()  # names of what mechanisms add to the loss
        self.implementations: list[tuple[Any, str]] = []
        self.hooks: list[Any] = []
        self.here = _ThreadState()
        # The last training pass of any thread, detached; a list, so that the replicas of a DataParallel
        # share it.
        self.trainings: list[Last] = [Last()]
        self.unjoined = False  # whether the last training pass's KL was neither added to a loss nor read
        self.trained = False  # whether there was a training pass since the last optimizer step
        self.turns = Turns()
        self.model: weakref.ref[nn.Module] | None = None
        self.watched: list[nn.Parameter] = []  # the model's parameters; a copy of the model has its own
        _install()
        _states.add(self)

    def __getstate__(self) -> dict[str, Any]:
        # Weak references belong to one model; a copy sets its own in its next forward pass. The threads'
        # autograd graphs, and locks, cannot be copied or saved.
        return {**self.__dict__, "model": None, "here": None, "trainings": None, "turns": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        for name in ("last", "override"):  # from older pickles
            self.__dict__.pop(name, None)
        self.here, self.trainings, self.turns = _ThreadState(), [Last()], Turns()
        self.__dict__.setdefault("counting", {})
        _install()
        _states.add(self)

    @contextmanager
    def drawing(self, sample: Tensor, examples: Tensor, seed: int) -> Iterator[None]:
        """Make passes that this thread starts inside draw the samples and examples with these numbers."""
        before, self.here.drawn = self.here.drawn, {"sample": sample, "examples": examples, "seed": seed}
        try:
            yield
        finally:
            self.here.drawn = before

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        self.loaded = self.loaded or f"{prefix}step" in state_dict

    def hook(self, module: nn.Module) -> None:
        """Open and close a pass around a model's forward."""
        self.hooks.append(module.register_forward_pre_hook(self.open, with_kwargs=True))
        self.hooks.append(module.register_forward_hook(self.close, with_kwargs=True, always_call=True))

    def hook_layer(self, layer: nn.Module) -> None:
        """Reopen the pass while gradient checkpointing recomputes a layer, after the pass has ended.

        Checkpointing stores the layer's keyword arguments, which some families do not pass on to attention.
        """
        self.hooks.append(layer.register_forward_pre_hook(self._before_layer, with_kwargs=True))
        self.hooks.append(layer.register_forward_hook(self._after_layer, with_kwargs=True, always_call=True))

    def _before_layer(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        del layer, args
        if recomputing() and KEYWORD in kwargs:
            push(kwargs[KEYWORD])

    def _after_layer(self, layer: nn.Module, args: object, kwargs: dict[str, Any], output: object) -> None:
        del layer, args, output
        if recomputing() and KEYWORD in kwargs:
            pop(kwargs[KEYWORD])

    def open(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Before a model's forward: begin a pass, or join the running one."""
        root = "overt_state" in module._modules
        current = kwargs.get(KEYWORD) if root else pass_in(kwargs, self.token)
        if current is None:
            current = self._begin(module)
        push(current)
        output_attentions = _arguments(module, args, kwargs).get("output_attentions")
        if output_attentions is None:
            output_attentions = getattr(getattr(module, "config", None), "output_attentions", False)
        if output_attentions:
            current.weights = True
        stack = module.__dict__.get("overt_stack")
        if stack is not None:
            self._look_at_inputs(module, stack, args, kwargs, current)
            if self.hands_on and accepts_keywords(module):
                kwargs = {**kwargs, KEYWORD: current}
        return args, kwargs

    def close(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """After a model's forward: store map rows with the cache, and add the KL to the loss."""
        current = pass_in(kwargs, self.token)
        if current is None:
            raise RuntimeError(
                f"the forward pass of this {type(module).__name__} was lost: was it called re-entrantly?"
            )
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
        """A new pass; warns if the last training pass's KL was never used."""
        if not torch.compiler.is_compiling() and (self.model is None or self.model() is None):
            root = module if "overt_state" in module._modules else None
            self.model = None if root is None else weakref.ref(root)
        if not torch.compiler.is_compiling() and module.training and self.unjoined:
            self.unjoined = False
            adds = " and ".join(sorted(self.adds)) or "penalty"
            warnings.warn(NOT_JOINED.format(adds=adds), UserWarning, stacklevel=2)
        address: dict[str, Any] = {"step": self.step.clone()}
        seed, drawn = self.seed, self.here.drawn
        if drawn is not None:
            address.update(sample=drawn["sample"], examples=drawn["examples"])
            seed = drawn["seed"]
        seen = self.seen.clone() if drawn is None and module.training else None
        wants_kl = seen is not None or self.here.with_kl > 0
        current = Pass(self.token, module.training, wants_kl, address, seed, seen)
        current.weights = maps_wanted()
        return current

    def _look_at_inputs(
        self, module: nn.Module, stack: str, args: tuple[Any, ...], kwargs: dict[str, Any], current: Pass
    ) -> None:
        """Note a stack's number of inputs and its cache."""
        arguments = _arguments(module, args, kwargs)
        current.passed.update(kwargs)
        names = (getattr(module, "main_input_name", "input_ids"), "inputs_embeds", "hidden_states")
        for value in (*(arguments.get(name) for name in names), *args):
            if isinstance(value, Tensor) and value.dim() > 1:
                current.sizes[stack] = value.shape[0] // _rows_of_an_input(module, value)
                break
        self._look_at_cache(stack, arguments.get("past_key_values"), current)

    def _look_at_cache(self, stack: str, cache: Any, current: Pass) -> None:
        """Note a stack's cache, its number of tokens, and the map rows stored with it."""
        if cache is not None:
            current.cached[stack] = cache
        length = tokens_in(cache, self.counting.get(stack, 0))
        decoding = getattr(cache, "overt_decoding", None)
        if decoding is not None and decoding.token != self.token:
            decoding = None  # another model's
        keeps = stack in self.keeping
        if length > 0 and keeps and (decoding is None or current.training):
            raise ValueError(
                "the cache holds tokens but no rows of their maps, which "
                f"{' and '.join(type(mechanism).__name__ for mechanism in self.mechanisms)} needs: "
                "fill it with this model, in evaluation mode"
            )
        if keeps and decoding is not None and decoding.length != length:
            raise ValueError(
                f"the cache holds {length} tokens, but map rows of {decoding.length}: do not modify it"
            )
        current.past[stack] = length
        if not keeps or current.training:
            return
        if decoding is None:
            decoding = DecodingState(self.token, self.counting.get(stack, 0))
            if cache is not None:
                store_on(cache, decoding)
        current.decoding[stack] = decoding

    def _keep_rows(self, stack: str, output: Any, current: Pass) -> None:
        """Store this pass's map rows with the cache that the stack returned."""
        cache, decoding = _cache_in(output), current.decoding.get(stack)
        if cache is None:  # a few stacks do not return the cache that they were given
            cache = current.cached.get(stack)
        if cache is None or decoding is None:
            return
        decoding.length = tokens_in(cache, decoding.layer)
        # A compiled graph cannot set attributes on a cache that it creates; without its rows, the cache is
        # refused when it is passed in again.
        if getattr(cache, "overt_decoding", None) is not decoding and not torch.compiler.is_compiling():
            store_on(cache, decoding)

    def _finish(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, current: Pass
    ) -> Any:
        """End a pass: record it, and in training add the penalty to the loss of the output."""
        if not current.ran:
            raise RuntimeError(
                f"no attention of this {type(module).__name__} ran through overt: was its attention "
                "implementation set after attach, or that of a model that shares its config?"
            )
        chains = [chain for chain in current.chains.values() if chain.has_loss]
        arguments = _arguments(module, args, kwargs)
        task = _loss_in(output)
        # A new record each time: a compiled graph would guard on the tensors of the old one.
        last = Last(
            current.training,
            tuple(chain.kl(per_example=True) for chain in chains),
            weight=_weight(chains),
            labels=_counted_labels(arguments, module),
            total=arguments.get("num_items_in_batch"),
            task=None if task is None else task.detach(),
            divides=divides_by_count(type(module)),
            batch=current.batch,
        )
        self.here.lasts[0] = last
        if current.seen is None:  # an evaluation, or posterior samples with dropout
            return output
        self.trained = True
        self.trainings[0] = last.but(kls=tuple(kl.detach() for kl in last.kls))
        if current.batch is not None:
            self.seen += current.batch
        if not chains:
            return output
        penalties = tuple(chain.penalty(per_example=True) for chain in chains)
        penalty = average_by_labels(penalties, last.labels, last.total)
        joined = None if penalty is None else _add_to_loss(output, penalty)
        self.here.lasts[0] = last.but(penalties=penalties, joined=None if joined is None else penalty)
        if last.weight is None:
            self.trainings[0] = self.trainings[0].but(penalties=tuple(p.detach() for p in penalties))
        self.unjoined = joined is None and torch.is_grad_enabled()
        return output if joined is None else joined

    def advance(self) -> None:
        """Count an optimizer step, which makes the temperature another model's."""
        self.step += 1
        self.temperature = None
        self.seen.zero_()
        self.trained = False


def _arguments(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a forward call by name."""
    return {**dict(zip(parameters_of(module), args, strict=False)), **kwargs}


def _rows_of_an_input(stack: nn.Module, tokens: Tensor) -> int:
    """How many rows of input tokens a stack turns into one sequence: MusicGen sums over codebooks."""
    config = getattr(stack, "config", None)
    if tokens.is_floating_point() or not str(getattr(config, "model_type", "")).startswith("musicgen"):
        return 1
    return int(getattr(config, "num_codebooks", 1))


def _weight(chains: list[Chain]) -> Tensor | float | None:
    """The factor by which all chains' terms are multiplied; None if mechanisms differ in it."""
    first = chains[0].mechanism() if chains else None
    if first is None or any(chain.mechanism() is not first for chain in chains):
        return None
    return chains[0].weight()


def average_by_labels(terms: tuple[Tensor, ...], labels: Tensor | None, total: Any) -> Tensor | None:
    """The sum over chains of terms per example, (batch,) each, averaged as the loss averages.

    Examples are weighted by their number of labels. If the Trainer gives the number of labels in all
    accumulated batches of all processes, the sum is divided by that number: the parts of one optimizer step
    then add up to the same average, however the data are split. Without labels, this batch's share of that
    number is unknown, and the result is None.
    """
    parts = []
    for term in terms:
        if labels is None or labels.dim() == 0:
            if total is not None:
                return None
            parts.append(term.mean())
            continue
        # Several rows may belong to one example: the choices of a question, the windows of an image. If
        # texts have different numbers of images, rows cannot be assigned to examples: all weigh the same.
        equal = term.shape[0] % labels.shape[0] != 0
        folded = term.mean() if equal else term.view(labels.shape[0], -1).mean(dim=1)
        items = labels.ne(-100).reshape(labels.shape[0], -1).sum(dim=1).to(folded.device)
        count = items.sum() if total is None else total
        if isinstance(count, Tensor):
            count = count.reshape(-1)[0].to(folded.device)
        parts.append((folded * items).sum() / torch.as_tensor(count, device=folded.device).clamp(min=1))
    return sum((part.to(parts[0].device) for part in parts[1:]), parts[0])


_divides: dict[type, bool] = {}


def divides_by_count(kind: type[nn.Module]) -> bool:
    """Whether a model divides its loss by the Trainer's label count; some accept the count and ignore it."""
    if kind not in _divides:
        forward = inspect.unwrap(kind.forward)
        try:
            source = inspect.getsource(forward)
        except (OSError, TypeError):
            source = " ".join(forward.__code__.co_names)
        passed_on = re.search(r"loss_function\((?:[^()]|\([^()]*\))*\*\*", source)
        _divides[kind] = passed_on is not None or "num_items_in_batch" in source
    return _divides[kind]


divides_by_count._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _counted_labels(arguments: dict[str, Any], module: nn.Module) -> Tensor | None:
    """The labels that the loss counts."""
    labels = arguments.get("shift_labels")
    if labels is None:
        labels = arguments.get("labels")
        counted = arguments.get("num_items_in_batch") is not None
        if isinstance(labels, Tensor) and labels.dim() > 1 and _loss_shifts(module, counted):
            labels = labels[..., 1:]
    return labels if isinstance(labels, Tensor) else None


def _loss_shifts(module: nn.Module, counted: bool) -> bool:
    """Whether a causal loss drops the first label, and so does the Trainer's label count."""
    from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

    causal = LOSS_MAPPING.get(str(getattr(module, "loss_type", None))) is ForCausalLMLoss
    if not causal or getattr(module.config, "is_encoder_decoder", False):
        return False
    return not counted or _trainer_shifts()


def _trainer_shifts() -> bool:
    from transformers.trainer import Trainer

    return "_loss_shifts_labels" in inspect.unwrap(Trainer.__init__).__code__.co_names


def _loss_in(output: Any) -> Tensor | None:
    """The loss of an output; None if it has no loss."""
    if isinstance(output, tuple) and not hasattr(output, "_fields"):
        first = output[0] if output else None
        return first if isinstance(first, Tensor) and first.dim() == 0 else None
    loss = output.get("loss") if isinstance(output, dict) else None
    return loss if isinstance(loss, Tensor) else None


def _add_to_loss(output: Any, penalty: Tensor) -> Any:
    """The output with the penalty added to its loss; None if it has no loss."""
    loss = _loss_in(output)
    if loss is None:
        return None
    total = loss + penalty.to(loss.device, loss.dtype)
    if isinstance(output, tuple):
        return (total, *output[1:])
    output["loss"] = total
    return output


def _cache_in(output: Any) -> Cache | None:
    from transformers.cache_utils import Cache

    values = output.values() if isinstance(output, dict) else output if isinstance(output, tuple) else ()
    return next((value for value in values if isinstance(value, Cache)), None)


_signatures: dict[type, tuple[list[str], bool]] = {}


def _signature(module: nn.Module) -> tuple[list[str], bool]:
    """Names of a forward's positional arguments, and whether it takes any keyword argument."""
    signature = _signatures.get(type(module))
    if signature is None:
        parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
        keywords = any(p.kind is p.VAR_KEYWORD for p in parameters)
        signature = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD], keywords
        _signatures[type(module)] = signature
    return signature


def parameters_of(module: nn.Module) -> list[str]:
    """Names of a forward's positional arguments."""
    return _signature(module)[0]


def accepts_keywords(module: nn.Module) -> bool:
    """Whether a forward takes any keyword argument."""
    return _signature(module)[1]


_states: weakref.WeakSet[AttachedState] = weakref.WeakSet()


def attached_states() -> list[AttachedState]:
    """The states of all attached models."""
    return [state for state in _states if state.implementations]


def _after_optimizer_step(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
    del args, kwargs
    for state in list(_states):
        # If several optimizers of one model step after the same forward pass, they count once.
        if state.trained and _trains(optimizer, state):
            state.advance()


def _trains(optimizer: torch.optim.Optimizer, state: AttachedState) -> bool:
    """Whether an optimizer updates parameters of an attached model."""
    updated = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if any(id(parameter) in updated for parameter in state.watched):
        return True
    model = None if state.model is None else state.model()
    # The model may have new parameters, such as LoRA's, or shards; then the whole weights must be released.
    parameters = [] if model is None else list(model.parameters())
    if not any(id(parameter) in updated for parameter in parameters):
        return False
    state.watched = parameters
    return True


_installed = False
_installing = threading.Lock()


def _install() -> None:
    """Prepare the process for its first attached model: register the attention, hook PEFT and optimizers."""
    global _installed
    with _installing:
        if not _installed:
            register()
            watch()
            register_optimizer_step_post_hook(_after_optimizer_step)
            _installed = True

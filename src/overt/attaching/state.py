"""What an attached model holds as a whole: the step count, the hooks around its forward, the KL it joins."""

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
    keep_on,
    pass_in,
    pop,
    push,
    running,
    tokens_in,
)
from overt.attaching.turns import Turns
from overt.mechanisms.backend import maps_wanted
from overt.mechanisms.chain import Chain, recomputing
from overt.mechanisms.losses import Losses
from overt.mechanisms.mechanism import Mechanism

if TYPE_CHECKING:
    from transformers import Cache

NOT_JOINED = (
    "the {adds} of the last training forward joined no loss: the model returned none (label smoothing and "
    "compute_loss_func compute their own), so add overt.penalty(model, labels) to yours"
)


class Last(NamedTuple):
    """What the last forward pass left; what may be made of it is made when somebody asks.

    Attributes:
        training: whether it was in training mode; None if there was none.
        kls: what mechanisms add to the loss, unweighted, per example, (batch,), one per chain.
        penalties: the same, weighted; of training alone.
        weight: what lies between them; None where mechanisms differ in it.
        labels: as the loss counts them.
        total: number of labels that the Trainer counted.
        joined: what was added to the loss.
        task: the loss before, cut off from its graph.
        divides: whether the model divides it by `total`.
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
        """With some fields changed, as `_replace`, which torch 2.11 cannot compile."""
        return Last(**{**dict(zip(Last._fields, self, strict=True)), **changed})

    def kl(self) -> Tensor:
        """Sum over layers, mean over the batch."""
        first, *rest = [kl.mean() for kl in self.kls]
        return sum((kl.to(first.device) for kl in rest), first)

    def losses(self) -> Losses:
        """The parts of the loss, as means over what this batch holds, whatever the Trainer divides by."""
        task, labels = self.task, self.labels
        items: Tensor | int | None = self.batch
        divides = self.divides and self.total is not None
        if labels is not None and labels.dim() > 0:
            items = labels.ne(-100).sum()
            divides = divides and not labels.is_floating_point()  # whose losses are means all the same
        if task is not None and divides and items is not None:
            total = torch.as_tensor(self.total).reshape(-1)[0].to(task.device)
            task = task * total / torch.as_tensor(items).to(task.device).clamp(min=1)
        if not self.kls:
            return Losses(task, None, None, items)
        kl = joining(tuple(kl.detach() for kl in self.kls), labels, None)
        assert kl is not None
        weight = self.weight
        if weight is None and self.penalties:
            together = joining(tuple(penalty.detach() for penalty in self.penalties), labels, None)
            assert together is not None
            weight = together / kl
        return Losses(task, kl, weight, items)


class _Last:
    """Stands in pickles of before for what is now `Last`, and is dropped."""


class _OfThread(threading.local):
    """What a thread asked of a model and has of its last forward, which hangs on a graph."""

    def __init__(self) -> None:  # not on the class, where compilers would not see it change
        self.with_kl = 0
        self.drawn: dict[str, Any] | None = None  # the address of samples that are asked for
        # A list, since compilers do not carry out assignments to a thread's attributes.
        self.lasts = [Last()]

    @property
    def last(self) -> Last:
        return self.lasts[0]


class AttachedState(nn.Module):
    """Put into the model under the name `overt_state`.

    Buffers:
        step: optimizer steps so far, t of λ(t) and of the noise's address; saved with the weights.
        seen: examples since the last optimizer step, so that accumulated batches draw their own noise.
    """

    step: Tensor
    seen: Tensor
    loaded = False  # whether step and mechanisms come from files or another model, and not from attach

    def __init__(self, token: str, mechanisms: tuple[Mechanism, ...], where: Any, seed: int) -> None:
        super().__init__()
        self.token, self.mechanisms, self.where, self.seed = token, mechanisms, where, seed
        self.register_buffer("step", torch.zeros((), dtype=torch.int64))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64), persistent=False)
        self.keeping: set[str] = set()  # stacks whose decoding reads rows of earlier maps
        self.counting: dict[str, int] = {}  # stack → the layer of a cache that its tokens are counted by
        self.adds: set[str] = set()  # names of what mechanisms add to the loss
        self.implementations: list[tuple[Any, str]] = []
        self.hooks: list[Any] = []
        self.here = _OfThread()
        # What the last training forward left, of whichever thread, cut off from its graph; a list, which the
        # replicas of a DataParallel share.
        self.trainings: list[Last] = [Last()]
        self.unjoined = False  # whether the last training forward's KL joined no loss and was not asked for
        self.trained = False  # whether there was a training forward since the last optimizer step
        self.turns = Turns()
        self.model: weakref.ref[nn.Module] | None = None
        self.watched: list[nn.Parameter] = []  # the model's, so that a copy knows its own
        _install()
        _states.add(self)

    def __getstate__(self) -> dict[str, Any]:
        # Weak references belong to one model; a copy finds its own at its next forward. What threads have of
        # this one hangs on graphs, which no copy or file can hold, nor can they hold locks.
        return {**self.__dict__, "model": None, "here": None, "trainings": None, "turns": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        for name in ("last", "override"):  # of pickles that were written before
            self.__dict__.pop(name, None)
        self.here, self.trainings, self.turns = _OfThread(), [Last()], Turns()
        self.__dict__.setdefault("counting", {})
        _install()
        _states.add(self)

    @contextmanager
    def drawing(self, sample: Tensor, examples: Tensor, seed: int) -> Iterator[None]:
        """Passes that begin in this thread inside draw these samples, of examples of these numbers."""
        before, self.here.drawn = self.here.drawn, {"sample": sample, "examples": examples, "seed": seed}
        try:
            yield
        finally:
            self.here.drawn = before

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        self.loaded = self.loaded or f"{prefix}step" in state_dict

    def hook(self, module: nn.Module) -> None:
        """Watch a model's forward."""
        self.hooks.append(module.register_forward_pre_hook(self.open, with_kwargs=True))
        self.hooks.append(module.register_forward_hook(self.close, with_kwargs=True, always_call=True))

    def hook_layer(self, layer: nn.Module) -> None:
        """Bring the pass along where gradient checkpointing runs a layer again, after its pass has ended.

        Checkpointing keeps the layer's keyword arguments, which some families hand no further.
        """
        self.hooks.append(layer.register_forward_pre_hook(self._again, with_kwargs=True))
        self.hooks.append(layer.register_forward_hook(self._done_again, with_kwargs=True, always_call=True))

    def _again(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        del layer, args
        if recomputing() and KEYWORD in kwargs:
            push(kwargs[KEYWORD])

    def _done_again(self, layer: nn.Module, args: object, kwargs: dict[str, Any], output: object) -> None:
        del layer, args, output
        if recomputing() and KEYWORD in kwargs:
            pop(kwargs[KEYWORD])

    def open(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Before a model's forward: begin a pass, or join the one that is running."""
        root = "overt_state" in module._modules
        current = kwargs.get(KEYWORD) if root else pass_in(kwargs, self.token)
        if current is None:
            current = self._begin(module)
        push(current)
        asked = {**dict(zip(parameters_of(module), args, strict=False)), **kwargs}.get("output_attentions")
        config = getattr(module, "config", None)
        if asked or (asked is None and getattr(config, "output_attentions", False)):
            current.weights = True
        stack = module.__dict__.get("overt_stack")
        if stack is not None:
            self._look_at_inputs(module, stack, args, kwargs, current)
            if accepts_keywords(module):
                kwargs = {**kwargs, KEYWORD: current}
        return args, kwargs

    def close(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """After it: leave kept rows on the cache, and join the KL to the loss."""
        current = pass_in(kwargs, self.token)
        if current is None:
            raise RuntimeError(
                f"the pass of this {type(module).__name__} is gone; was it called re-entrantly?"
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
        """Find the cache that a stack is given, and how many inputs."""
        given = {**dict(zip(parameters_of(module), args, strict=False)), **kwargs}
        current.passed.update(kwargs)
        names = (getattr(module, "main_input_name", "input_ids"), "inputs_embeds", "hidden_states")
        for value in (*(given.get(name) for name in names), *args):
            if isinstance(value, Tensor) and value.dim() > 1:
                current.sizes[stack] = value.shape[0] // _rows_of_an_input(module, value)
                break
        cache = given.get("past_key_values")
        if cache is not None:
            current.cached[stack] = cache
        length = tokens_in(cache, self.counting.get(stack, 0))
        kept = getattr(cache, "overt_kept", None)
        if kept is not None and kept.token != self.token:
            kept = None  # another model's
        keeps = stack in self.keeping
        if length > 0 and keeps and (kept is None or current.training):
            raise ValueError(
                "the cache holds tokens but no rows of their maps, which "
                f"{' and '.join(type(mechanism).__name__ for mechanism in self.mechanisms)} needs: "
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
            kept = DecodingState(self.token, self.counting.get(stack, 0))
            if cache is not None:
                keep_on(cache, kept)
        current.kept[stack] = kept

    def _keep_rows(self, stack: str, output: Any, current: Pass) -> None:
        made, kept = _cache_in(output), current.kept.get(stack)
        cache = (
            current.cached.get(stack) if made is None else made
        )  # a few return none of what they were given
        if cache is None or kept is None:
            return
        kept.length = tokens_in(cache, kept.layer)
        # A compiled graph cannot hang anything on a cache that it makes; without its rows, the cache will be
        # refused when it comes back.
        if getattr(cache, "overt_kept", None) is not kept and not torch.compiler.is_compiling():
            keep_on(cache, kept)

    def _finish(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, current: Pass
    ) -> Any:
        if not current.ran:
            raise RuntimeError(
                f"no attention of this {type(module).__name__} ran through overt: was its attention "
                "implementation set after attach, or that of a model that shares its config?"
            )
        chains = [chain for chain in current.chains.values() if chain.has_loss]
        given = {**dict(zip(parameters_of(module), args, strict=False)), **kwargs}
        task = _loss_in(output)
        # A new one each time: a compiled graph would look into the tensors that the old one holds.
        last = Last(
            current.training,
            tuple(chain.kl(per_example=True) for chain in chains),
            weight=_weight(chains),
            labels=_counted_labels(given, module),
            total=given.get("num_items_in_batch"),
            task=None if task is None else task.detach(),
            divides=divides_by_count(type(module)),
            batch=current.batch,
        )
        self.here.lasts[0] = last
        if current.seen is None:  # an evaluation, or samples with dropout
            return output
        self.trained = True
        self.trainings[0] = last.but(kls=tuple(kl.detach() for kl in last.kls))
        if current.batch is not None:
            self.seen += current.batch
        if not chains:
            return output
        penalties = tuple(chain.penalty(per_example=True) for chain in chains)
        penalty = joining(penalties, last.labels, last.total)
        joined = None if penalty is None else _add_to_loss(output, penalty)
        self.here.lasts[0] = last.but(penalties=penalties, joined=None if joined is None else penalty)
        if last.weight is None:
            self.trainings[0] = self.trainings[0].but(penalties=tuple(p.detach() for p in penalties))
        self.unjoined = joined is None and torch.is_grad_enabled()
        return output if joined is None else joined

    def advance(self) -> None:
        """Count an optimizer step."""
        self.step += 1
        self.seen.zero_()
        self.trained = False


def _rows_of_an_input(stack: nn.Module, given: Tensor) -> int:
    """How many rows of its input tokens a stack makes one sequence of: MusicGen sums over codebooks."""
    config = getattr(stack, "config", None)
    if given.is_floating_point() or not str(getattr(config, "model_type", "")).startswith("musicgen"):
        return 1
    return int(getattr(config, "num_codebooks", 1))


def _weight(chains: list[Chain]) -> Tensor | float | None:
    """What terms of all chains are multiplied by; None where mechanisms differ in it."""
    first = chains[0].mechanism() if chains else None
    if first is None or any(chain.mechanism() is not first for chain in chains):
        return None
    return chains[0].weight()


def joining(penalties: tuple[Tensor, ...], labels: Tensor | None, total: Any) -> Tensor | None:
    """λ·KL per example, (batch,) for each chain, as it joins the loss.

    Examples weigh by their number of labels, as they do in the loss. Where the Trainer says how many labels
    all accumulated batches of all processes hold, the sum is divided by that number: the parts of one
    optimizer step then add up to the same average, however they are cut. Without labels nobody can tell this
    batch's share of that number: None.
    """
    parts = []
    for penalty in penalties:
        if labels is None or labels.dim() == 0:
            if total is not None:
                return None
            parts.append(penalty.mean())
            continue
        # Several rows may be one example: the choices of a question, the windows of an image. Images of
        # which texts have different numbers cannot be told apart: they weigh alike.
        alike = penalty.shape[0] % labels.shape[0] != 0
        folded = penalty.mean() if alike else penalty.view(labels.shape[0], -1).mean(dim=1)
        items = labels.ne(-100).reshape(labels.shape[0], -1).sum(dim=1).to(folded.device)
        count = items.sum() if total is None else total
        if isinstance(count, Tensor):
            count = count.reshape(-1)[0].to(folded.device)
        parts.append((folded * items).sum() / torch.as_tensor(count, device=folded.device).clamp(min=1))
    return sum((part.to(parts[0].device) for part in parts[1:]), parts[0])


_divides: dict[type, bool] = {}


def divides_by_count(kind: type[nn.Module]) -> bool:
    """Whether a model divides its loss by the Trainer's count of labels; some take the count and do not."""
    if kind not in _divides:
        forward = inspect.unwrap(kind.forward)
        try:
            source = inspect.getsource(forward)
        except (OSError, TypeError):
            source = " ".join(forward.__code__.co_names)
        handed = re.search(r"loss_function\((?:[^()]|\([^()]*\))*\*\*", source)
        _divides[kind] = handed is not None or "num_items_in_batch" in source
    return _divides[kind]


divides_by_count._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _counted_labels(given: dict[str, Any], module: nn.Module) -> Tensor | None:
    """The labels as the loss counts them."""
    labels = given.get("shift_labels")
    if labels is None:
        labels = given.get("labels")
        counted = given.get("num_items_in_batch") is not None
        if isinstance(labels, Tensor) and labels.dim() > 1 and _loss_shifts(module, counted):
            labels = labels[..., 1:]
    return labels if isinstance(labels, Tensor) else None


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


def _loss_in(output: Any) -> Tensor | None:
    """The loss of an output; None if it has none."""
    if isinstance(output, tuple) and not hasattr(output, "_fields"):
        first = output[0] if output else None
        return first if isinstance(first, Tensor) and first.dim() == 0 else None
    loss = output.get("loss") if isinstance(output, dict) else None
    return loss if isinstance(loss, Tensor) else None


def _add_to_loss(output: Any, penalty: Tensor) -> Any:
    """The output with the penalty in its loss; None if it has no loss."""
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


def attached_states() -> list[AttachedState]:
    """Those of all models that are attached to."""
    return [state for state in _states if state.implementations]


def _after_optimizer_step(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
    del args, kwargs
    for state in list(_states):
        # Several optimizers of one model step after the same forward, and count once.
        if state.trained and _trains(optimizer, state):
            state.advance()


def _trains(optimizer: torch.optim.Optimizer, state: AttachedState) -> bool:
    theirs = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if any(id(parameter) in theirs for parameter in state.watched):
        return True
    model = None if state.model is None else state.model()
    # It may have got new ones, such as LoRA's, or shards, beside which the whole weights must not be held.
    now = [] if model is None else list(model.parameters())
    if not any(id(parameter) in theirs for parameter in now):
        return False
    state.watched = now
    return True


_installed = False
_installing = threading.Lock()


def _install() -> None:
    """What the first attached model needs of the process: attention, PEFT noticed, and steps counted."""
    global _installed
    with _installing:
        if not _installed:
            register()
            watch()
            register_optimizer_step_post_hook(_after_optimizer_step)
            _installed = True

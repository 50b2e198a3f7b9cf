"""Attach mechanisms to a Hugging Face model, take them off again, and ask what is there."""

from __future__ import annotations

import functools
import uuid
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from overt import _check
from overt.attaching.adapters import adopt, peft_models, release
from overt.attaching.attention import NAME, AttachedAttention
from overt.attaching.find import AttentionSite, find, undispatched
from overt.attaching.refusals import check_type
from overt.attaching.saving import Saving
from overt.attaching.settings import Uploading
from overt.attaching.state import AttachedState, attached_states, joining
from overt.mechanisms.losses import Losses
from overt.mechanisms.mechanism import Mechanism, check_mechanisms
from overt.mechanisms.site import KINDS

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Where = str | Iterable[str] | Mapping[str, Iterable[int] | None] | None


def attach(model: nn.Module, *mechanisms: Mechanism, where: Where = None, seed: int = 0) -> nn.Module:
    """Put mechanisms into the attentions of a Hugging Face model, in place.

    Any encoder, decoder or encoder–decoder that dispatches its attention through transformers' attention
    interface will do; others are refused by name. In training the KL of `Bayesian` joins the model's loss by
    itself.

    Args:
        model: a `PreTrainedModel`, or a PEFT model around one.
        mechanisms: `Evolving(…)`, `Bayesian(…)` or any other that is registered, at most one of a kind.
        where: which attentions. None is all of them; "encoder", "decoder" (its self-attention) or "cross", or
            a list of these; or a mapping from those names to layer numbers (None for all), such as
            `{"encoder": [4, 5], "cross": None}`. Negative numbers count from the last layer. A chain of maps
            starts at the first layer chosen.
        seed: key of the noise.

    Returns:
        The model, for convenience.
    """
    base = base_of(model)
    _refuse_attached(model, base)
    if not mechanisms:
        raise ValueError("nothing to attach: give mechanisms, such as overt.attach(model, overt.Evolving())")
    check_mechanisms(mechanisms)
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"seed must be a whole number, got {seed!r}")
    where = _plain_where(where)
    found = find(base)
    chosen = choose(found, where)
    pair = any(one.kind == "encoder" for one in found) and any(one.kind == "cross" for one in found)
    pair = pair or bool(getattr(base.config, "is_encoder_decoder", False))
    reads_rows = functools.partial(_reads_rows, found, chosen, mechanisms, pair)
    check_type(base, [(one.kind, one.module) for one in found if one.path in chosen], reads_rows)

    token = uuid.uuid4().hex
    state = AttachedState(token, mechanisms, where, seed)
    chains = {name: number for number, name in enumerate(dict.fromkeys(one.chain for one in found))}
    parts: list[tuple[AttentionSite, AttachedAttention]] = []
    for one in found:
        layer, here = chosen.get(one.path, (0, ()))
        part = AttachedAttention(one, chains[one.chain], mechanisms if here else (), layer, token, pair)
        parts.append((one, part.to(device=_device(one.module), dtype=_dtype(base, one.module))))
    _set_implementation(base, found, state)
    decoding = {one.stack for one in found if one.kind == "decoder"}
    keeping = decoding & {one.stack for one, part in parts if _reads_earlier_rows(part)}
    for one, part in parts:
        one.module.add_module("overt", part.train(one.module.training))
        part.keeps = one.stack in keeping and one.kind != "encoder"
    state.keeping = keeping
    for one, part in parts:
        if one.kind == "decoder":
            state.counting.setdefault(one.stack, part.layer_of_cache)
    layers = [layer for _, part in parts if part.map is not None for layer in part.map.layers]
    state.adds = {layer.adds for layer in layers if layer.adds is not None}
    state.to(_device(base))
    base.add_module("overt_state", state.train(base.training))
    state.model, state.watched = weakref.ref(base), list(base.parameters())
    _hook(base, {one.stack for one in found}, state)
    saving = Saving(base)
    base.__dict__.update(save_pretrained=saving, _upload_modified_files=Uploading(saving))
    # generate() would compile each step for a static cache on a GPU, whose kept rows change with each.
    base.__dict__["_valid_auto_compile_criteria"] = _never
    for wrapper in peft_models(model):
        adopt(wrapper)
    return model


def detach(model: nn.Module) -> nn.Module:
    """Take off what `attach` put on: parameters, hooks and settings, so that the model is as it was."""
    state = the_state(base_of(model))
    owner = next(module for module in model.modules() if module._modules.get("overt_state") is state)
    for handle in state.hooks:
        handle.remove()
    for module in list(owner.modules()):
        module._modules.pop("overt", None)
        module.__dict__.pop("overt_stack", None)
    owner._modules.pop("overt_state", None)
    for name in ("save_pretrained", "_upload_modified_files", "_valid_auto_compile_criteria"):
        owner.__dict__.pop(name, None)
    release(model)
    restore_implementations(state)
    return model


@contextmanager
def with_kl(model: nn.Module) -> Iterator[None]:
    """Evaluation passes of the model that begin in this thread inside compute the KL, too.

    In training it is always there; an evaluation leaves it out, which is quicker.

    ```python
    with torch.no_grad(), overt.with_kl(model.eval()):
        model(**batch)
    print(overt.kl(model))
    ```
    """
    here = the_state(model).here
    here.with_kl += 1
    try:
        yield
    finally:
        here.with_kl -= 1


def kl(model: nn.Module) -> Tensor:
    """KL of this thread's last forward pass, unweighted: sum over layers, mean over the batch.

    What other mechanisms than `Bayesian` add to the loss is counted in. An evaluation computes it inside
    `with overt.with_kl(model):` alone.
    """
    state = the_state(model)
    state.unjoined = False
    last = state.here.last
    if last.kls:
        return last.kl()
    if not state.adds:
        raise ValueError(
            "no KL to be had: nothing is attached that adds to the loss, such as a Bayesian with a prior"
        )
    if last.training is None:
        raise ValueError("no KL to be had: this thread has run no forward pass of the model yet")
    raise ValueError(
        "no KL to be had: the last forward was an evaluation, which leaves it out (run it inside "
        "`with overt.with_kl(model):`), or used a cache"
    )


def losses(model: nn.Module) -> Losses:
    """Task loss, KL and the KL's weight of this thread's last forward pass: `.task`, `.kl`, `.weight`.

    They are cut off from the graph, for logs; `overt.LossLog` puts them into the Trainer's.
    """
    made = getattr(model, "overt_losses", None)
    if isinstance(made, Losses):  # a model of overt's own
        return made
    last = the_state(model).here.last
    if last.training is None:
        raise ValueError("no losses to be had: this thread has run no forward pass of the model yet")
    return last.losses()


def penalty(model: nn.Module, labels: Tensor | None = None) -> Tensor:
    """kl_weight·λ(t)·KL of this thread's last training forward pass, as it joins the loss.

    For a loss of your own.

    Args:
        model: after a forward pass in training mode.
        labels: those that your loss sees, when the model does not: examples weigh by their number of labels.
            The Trainer's `compute_loss_func` needs them, since it divides by the labels of all accumulated
            batches. Of a causal model they are the shifted ones.
    """
    state = the_state(model)
    state.unjoined = False
    last = state.here.last
    if not last.penalties:
        raise ValueError(
            "no penalty to be had: the last forward was not in training, or nothing attached adds to the loss"
        )
    if labels is None and last.joined is not None:
        return last.joined
    value = joining(last.penalties, labels, last.total)
    if value is None:
        raise ValueError("the Trainer counts labels over batches: overt.penalty(model, labels) needs them")
    return value


def describe(model: nn.Module) -> None:
    """Print what is attached where: what each mechanism says of itself, and the number of parameters."""
    base = base_of(model)
    state = the_state(base)
    print(f"{type(base).__name__} ({base.config.model_type}), step {int(state.step)}")
    for mechanism in state.mechanisms:
        print(f"  {mechanism}")
    parts: list[tuple[str, AttachedAttention]] = []
    for path, module in base.named_modules():
        part = module._modules.get("overt")
        part = getattr(part, "original_module", part)  # PEFT keeps what it trains in a wrapper
        if isinstance(part, AttachedAttention):
            parts.append((path, part))
    said = [_said(part) for _, part in parts]
    columns = list(dict.fromkeys(column for one in said for column in one))
    rows = [("attention", "kind", "layer", "heads", *columns, "parameters")]
    total = 0
    for (path, part), shown in zip(parts, said, strict=True):
        count = sum(parameter.numel() for parameter in part.parameters())
        total += count
        layer = "–" if part.map is None else str(part.site.layer)
        if part.shared:
            layer = f"0–{part.layers - 1}"
        cells = [shown.get(column, "–") for column in columns]
        rows.append((path, part.site.kind, layer, str(part.site.heads), *cells, f"{count:,}"))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    share = 100.0 * total / max(1, sum(parameter.numel() for parameter in base.parameters()))
    print(f"  {total:,} parameters of mechanisms, {share:.2f} % of the model's")
    plain = dict(undispatched(base, [path for path, _ in parts]))
    for path, module in plain.items():
        if not any(other.startswith(f"{path}.") for other in plain):
            print(f"  {path} ({type(module).__name__}) is not dispatched, and stays plain")


def _said(part: AttachedAttention) -> dict[str, str]:
    """What an attention's mechanisms say of themselves: column → text."""
    layers = [] if part.map is None else part.map.layers
    return {column: str(text) for layer in layers for column, text in layer.describe().items()}


def base_of(model: nn.Module) -> PreTrainedModel:
    """The Hugging Face model itself, out of PEFT, DDP and compiled wrappers."""
    from transformers import PreTrainedModel

    inner = model
    while not isinstance(inner, PreTrainedModel):
        for name in ("_orig_mod", "module", "get_base_model"):
            part = getattr(inner, name, None)
            part = part() if name == "get_base_model" and callable(part) else part
            if isinstance(part, nn.Module):
                inner = part
                break
        else:
            raise TypeError(f"model must be a Hugging Face PreTrainedModel, got {type(model).__name__}")
    return inner


def state_in(base: nn.Module) -> AttachedState | None:
    """What is attached to a model, or None."""
    return next((module for module in base.modules() if isinstance(module, AttachedState)), None)


def _refuse_attached(model: nn.Module, base: PreTrainedModel) -> None:
    """Refuse a model that has mechanisms already, in itself or in a part, or as a part of another."""
    taken = {path: module for path, module in base.named_modules() if "overt_state" in module._modules}
    if "" in taken:
        raise ValueError("the model already has mechanisms attached: overt.detach(model) takes them off")
    for path, part in taken.items():
        raise ValueError(
            f"a part of the model, {path} ({type(part).__name__}), already has mechanisms attached: "
            "overt.detach(model) takes them off"
        )
    if any("overt" in module._modules for module in base.modules()):
        raise ValueError(
            f"this {type(base).__name__} is a part of a model that has mechanisms attached: give that model "
            "to overt.detach first"
        )
    inside = any(hasattr(module, "base_layer") for module in base.modules()) and hasattr(base, "peft_config")
    if inside and not peft_models(model) and not getattr(base, "_hf_peft_config_loaded", False):
        raise ValueError(
            f"this {type(base).__name__} is inside of a PEFT model, which would not save the mechanisms: "
            "attach to that, overt.attach(peft_model, …)"
        )


def the_state(model: nn.Module) -> AttachedState:
    """What is attached to a model, or an error."""
    state = state_in(model)
    if state is None:
        raise ValueError(f"nothing is attached to this {type(model).__name__}: overt.attach(model, …) first")
    return state


def choose(found: list[AttentionSite], where: Where) -> dict[str, tuple[int, bool]]:
    """The attentions that `where` selects: path → (its layer in the chain, True)."""
    kinds = sorted({one.kind for one in found}, key=KINDS.index)
    wanted: dict[str, list[int] | None]
    if where is None:
        wanted = dict.fromkeys(kinds)
    elif isinstance(where, str):
        wanted = {where: None}
    elif isinstance(where, Mapping):
        wanted = {kind: None if layers is None else list(layers) for kind, layers in where.items()}
    else:
        wanted = dict.fromkeys(where)
    if not wanted:
        raise ValueError(f"where selects nothing; this model has {', '.join(kinds)}")
    for kind in wanted:
        _check.one_of("where", kind, KINDS)
        if kind not in kinds:
            raise ValueError(f"where names {kind!r}, but this model has only {', '.join(kinds)} attention")
    chosen: dict[str, tuple[int, bool]] = {}
    for kind, layers in wanted.items():
        for chain in dict.fromkeys(one.chain for one in found if one.kind == kind):
            members = [one for one in found if one.kind == kind and one.chain == chain]
            if layers is None:
                chosen.update({one.path: (number, True) for number, one in enumerate(members)})
                continue
            if members[0].shared:
                raise ValueError(f"where cannot choose layers of {kind}: they share one module")
            numbers = sorted({_layer(kind, layer, len(members)) for layer in layers})
            if numbers and numbers != list(range(numbers[0], numbers[-1] + 1)):
                raise ValueError(f"where must choose neighbouring layers, a chain has no gaps; got {numbers}")
            chosen.update({members[number].path: (place, True) for place, number in enumerate(numbers)})
    if not chosen:
        raise ValueError(f"where selects nothing, got {where!r}")
    return chosen


def _layer(kind: str, layer: object, count: int) -> int:
    if isinstance(layer, bool) or not isinstance(layer, int) or not -count <= layer < count:
        raise ValueError(f"where names layer {layer!r} of {kind}, which has layers 0 to {count - 1}")
    return layer % count


def _reads_rows(
    found: list[AttentionSite],
    chosen: dict[str, tuple[int, bool]],
    mechanisms: tuple[Mechanism, ...],
    pair: bool,
) -> bool:
    """Whether a row of a map would depend on others, as the last layers' would."""
    last = {one.kind: (one, chosen[one.path][0]) for one in found if one.path in chosen}
    with torch.device("meta"):
        parts = [
            AttachedAttention(one, 0, mechanisms, max(1, layer), "", pair) for one, layer in last.values()
        ]
    return any(part.map is not None and part.map.reads_rows for part in parts)


def _plain_where(where: Where) -> Any:
    """`where` as it is written into a config file."""
    if where is None or isinstance(where, str):
        return where
    try:
        if isinstance(where, Mapping):
            return {kind: None if layers is None else list(layers) for kind, layers in where.items()}
        return list(where)
    except TypeError:
        raise TypeError(
            f"where must be None, a kind, a list of kinds, or lists of layers by kind, got {where!r}"
        ) from None


def _never(*args: object, **kwargs: object) -> bool:
    del args, kwargs
    return False


def _reads_earlier_rows(part: AttachedAttention) -> bool:
    """Whether a decoder's rows read rows above them, which a cache must keep."""
    return part.map is not None and part.kind != "encoder" and part.map.earlier_rows > 0


def _device(module: nn.Module) -> torch.device:
    """Where a module computes: where its weights are, or where accelerate brings offloaded ones."""
    if torch.get_default_device().type == "meta":
        # A model that is being loaded, and what is made meanwhile; some families make weights elsewhere.
        return torch.get_default_device()
    for part in module.modules():
        place = getattr(getattr(part, "_hf_hook", None), "execution_device", None)
        if place is not None:
            return torch.device(place)
    return next((parameter.device for parameter in module.parameters()), torch.device("cpu"))


def _dtype(base: PreTrainedModel, module: nn.Module) -> torch.dtype:
    floating = (parameter.dtype for parameter in module.parameters() if parameter.is_floating_point())
    return next(floating, base.dtype)


def _set_implementation(base: PreTrainedModel, found: list[AttentionSite], state: AttachedState) -> None:
    from transformers import PreTrainedModel

    configs = [module.config for module in base.modules() if isinstance(module, PreTrainedModel)]
    configs += [config for one in found if (config := getattr(one.module, "config", None)) is not None]
    unique = {id(config): config for config in configs}
    state.implementations = [(config, config._attn_implementation) for config in unique.values()]
    base.set_attn_implementation(NAME)
    for one in found:
        config = getattr(one.module, "config", None)
        if config is not None and config._attn_implementation != NAME:
            config._attn_implementation_internal = NAME


def restore_implementations(state: AttachedState) -> None:
    """Give configs their attention implementations back, unless another attached model shares them."""
    mine, state.implementations = state.implementations, []
    for config, implementation in mine:
        others = [
            other for other in attached_states() if any(one is config for one, _ in other.implementations)
        ]
        for other in others:
            other.implementations = [
                (one, implementation if one is config else was) for one, was in other.implementations
            ]
        if not others:
            config._attn_implementation_internal = implementation


def _hook(base: PreTrainedModel, stacks: set[str], state: AttachedState) -> None:
    from transformers import PreTrainedModel
    from transformers.modeling_layers import GradientCheckpointingLayer

    for path, module in base.named_modules():
        if isinstance(module, PreTrainedModel):
            state.hook(module)
            if path in stacks:
                module.__dict__["overt_stack"] = path
        elif isinstance(module, GradientCheckpointingLayer):
            state.hook_layer(module)

"""Attach mechanisms to a Hugging Face or timm model, detach them, and query what is attached."""

from __future__ import annotations

import functools
import uuid
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from overt import _check
from overt._modes import device_of
from overt.attaching.adapters import adopt, peft_models, refuse_without_config, release
from overt.attaching.attention import AttachedAttention
from overt.attaching.find import AttentionSite, name_of, undispatched
from overt.attaching.hosts import Host, host_of
from overt.attaching.refusals import check_type
from overt.attaching.settings import Temperature, temperature_of
from overt.attaching.state import AttachedState, average_by_labels
from overt.mechanisms.losses import Losses
from overt.mechanisms.mechanism import Mechanism, check_mechanisms
from overt.mechanisms.site import KINDS

Where = str | Iterable[str] | Mapping[str, Iterable[int] | None] | None


def attach(model: nn.Module, *mechanisms: Mechanism, where: Where = None, seed: int = 0) -> nn.Module:
    """Put mechanisms into the attentions of a Hugging Face or timm model, in place.

    Works with any encoder, decoder or encoder–decoder that dispatches its attention through transformers'
    attention interface, and with timm's vision transformers whose attention is plain; other models are
    refused by name. In training the KL of `Bayesian` is added to the loss of a Hugging Face model
    automatically; timm's return none, so add `overt.penalty(model)` to yours.

    Args:
        model: a `PreTrainedModel`, a PEFT model around one, or a timm model.
        mechanisms: `Evolving(…)`, `Bayesian(…)` or any other registered mechanism, at most one of each kind.
        where: which attentions. None selects all; "encoder", "decoder" (its self-attention), "cross" or a
            list of these selects by kind; a mapping from kinds to layer numbers (None for all), such as
            `{"encoder": [4, 5], "cross": None}`, selects layers. Negative numbers count from the last layer.
            A chain of maps starts at the first selected layer.
        seed: random seed of the noise.

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
    host = _host(base)
    sites = host.find(base)
    chosen = choose(sites, where)
    pair = {"encoder", "cross"} <= {site.kind for site in sites}
    pair = pair or bool(getattr(getattr(base, "config", None), "is_encoder_decoder", False))
    reads_rows = functools.partial(_reads_rows, sites, chosen, mechanisms, pair)
    check_type(base, [(site.kind, site.module) for site in sites if site.path in chosen], reads_rows)

    token = uuid.uuid4().hex
    state = AttachedState(token, mechanisms, where, seed)
    chains = {name: number for number, name in enumerate(dict.fromkeys(site.chain for site in sites))}
    parts: list[tuple[AttentionSite, AttachedAttention]] = []
    for site in sites:
        selected, layer = mechanisms if site.path in chosen else (), chosen.get(site.path, 0)
        part = AttachedAttention(site, chains[site.chain], selected, layer, token, pair)
        parts.append((site, part.to(device=_device(site.module), dtype=_dtype(base, site.module))))
    host.connect(base, sites, state)
    decoders = {site.stack for site in sites if site.kind == "decoder"}
    keeping = decoders & {site.stack for site, part in parts if _reads_earlier_rows(part)}
    for site, part in parts:
        site.module.add_module("overt", part.train(site.module.training))
        part.keeps = site.stack in keeping and site.kind != "encoder"
    state.keeping = keeping
    for site, part in parts:
        if site.kind == "decoder":
            state.counting.setdefault(site.stack, part.layer_of_cache)
    layers = [layer for _, part in parts if part.map is not None for layer in part.map.layers]
    state.adds = {layer.adds for layer in layers if layer.adds is not None}
    state.to(_device(base))
    base.add_module("overt_state", state.train(base.training))
    state.model, state.watched = weakref.ref(base), list(base.parameters())
    for wrapper in peft_models(model):
        adopt(wrapper)
    return model


def detach(model: nn.Module) -> nn.Module:
    """Undo `attach` or `vision.augment`: remove parameters, hooks and settings; the model is as before.

    A convolution that was augmented gets its own filters back; those trained since are dropped, with a
    warning.
    """
    if hasattr(model, "_overt_augmented"):
        from overt.models.augmenting import restore

        return restore(model)
    if not hasattr(model, "config") and state_in(model) is None:
        raise ValueError(
            f"nothing is attached to this {type(model).__name__}, and overt.vision.augment has not changed it"
        )
    state = the_state(base_of(model))
    owner = next(module for module in model.modules() if module._modules.get("overt_state") is state)
    for handle in state.hooks:
        handle.remove()
    for module in list(owner.modules()):
        module._modules.pop("overt", None)
        module.__dict__.pop("overt_stack", None)
    owner._modules.pop("overt_state", None)
    release(model)
    _host(owner).disconnect(owner, state)
    return model


@contextmanager
def with_kl(model: nn.Module) -> Iterator[None]:
    """Also compute the KL in evaluation passes that this thread starts inside the context.

    Training passes always compute it; evaluation passes skip it by default, which is faster.

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

    It includes whatever mechanisms other than `Bayesian` add to the loss. Evaluation passes compute it only
    inside `with overt.with_kl(model):`.
    """
    state = the_state(model)
    state.unjoined = False
    last = state.here.last
    if last.kls:
        return last.kl()
    if not state.adds:
        raise ValueError(
            "no KL available: nothing is attached that adds to the loss, such as a Bayesian with a prior"
        )
    if last.training is None:
        raise ValueError("no KL available: this thread has run no forward pass of the model yet")
    raise ValueError(
        "no KL available: the last forward pass was an evaluation, which skips it (run it inside "
        "`with overt.with_kl(model):`), or used a cache"
    )


def losses(model: nn.Module) -> Losses:
    """Task loss, KL and the KL's weight of this thread's last forward pass: `.task`, `.kl`, `.weight`.

    They are detached, for logging; `overt.LossLog` adds them to the Trainer's logs.
    """
    losses = getattr(model, "overt_losses", None)
    if isinstance(losses, Losses):  # one of overt's own models
        return losses
    last = the_state(model).here.last
    if last.training is None:
        raise ValueError("no losses available: this thread has run no forward pass of the model yet")
    return last.losses()


def penalty(model: nn.Module, labels: Tensor | None = None) -> Tensor:
    """kl_weight·λ(t)·KL of this thread's last training forward pass, as it is added to the loss.

    For custom losses.

    Args:
        model: after a forward pass in training mode.
        labels: the labels of your loss, if the model does not see them: examples are weighted by their number
            of labels. The Trainer's `compute_loss_func` needs them, since it divides by the labels of all
            accumulated batches. For a causal model, pass the shifted labels.
    """
    state = the_state(model)
    state.unjoined = False
    last = state.here.last
    if not last.penalties:
        raise ValueError(
            "no penalty available: the last forward pass was not in training mode, or nothing attached adds "
            "to the loss"
        )
    if labels is None and last.joined is not None:
        return last.joined
    value = average_by_labels(last.penalties, labels, last.total)
    if value is None:
        raise ValueError(
            "the Trainer counts labels over several batches: pass yours, overt.penalty(model, labels)"
        )
    return value


def describe(model: nn.Module) -> None:
    """Print what is attached where, with each mechanism's description and the number of parameters.

    The temperature that `overt.calibrate` found is there too, also that of a plain model.
    """
    base = base_of(model)
    state = state_in(base)
    temperature = temperature_of(base, state)
    fitted = "" if temperature is None else _describe_temperature(temperature)
    if state is None and temperature is not None:
        print(f"{name_of(base)}, nothing attached\n  {fitted}")
        return
    state = the_state(base)
    print(f"{name_of(base)}, step {int(state.step)}")
    if fitted:
        print(f"  {fitted}")
    for mechanism in state.mechanisms:
        print(f"  {mechanism}")
    parts: list[tuple[str, AttachedAttention]] = []
    for path, module in base.named_modules():
        part = module._modules.get("overt")
        part = getattr(part, "original_module", part)  # PEFT wraps the modules it trains
        if isinstance(part, AttachedAttention):
            parts.append((path, part))
    descriptions = [_describe_part(part) for _, part in parts]
    columns = list(dict.fromkeys(column for description in descriptions for column in description))
    rows = [("attention", "kind", "layer", "heads", *columns, "parameters")]
    total = 0
    for (path, part), description in zip(parts, descriptions, strict=True):
        count = sum(parameter.numel() for parameter in part.parameters())
        total += count
        layer = "–" if part.map is None else str(part.site.layer)
        if part.shared:
            layer = f"0–{part.layers - 1}"
        cells = [description.get(column, "–") for column in columns]
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


def _describe_temperature(temperature: Temperature) -> str:
    dropout = "on" if temperature.dropout else "off"
    return f"temperature {temperature.value:.4g}, fitted with dropout {dropout}"


def _describe_part(part: AttachedAttention) -> dict[str, str]:
    """The descriptions of an attention's mechanisms: column → text."""
    layers = [] if part.map is None else part.map.layers
    return {column: str(text) for layer in layers for column, text in layer.describe().items()}


def base_of(model: nn.Module) -> Any:
    """The Hugging Face or timm model inside PEFT, DDP and compiled wrappers."""
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
            _host(inner)
            break
    return inner


def _host(model: nn.Module) -> Host:
    host = host_of(model)
    if host is None:
        raise TypeError(
            f"model must be a Hugging Face PreTrainedModel, or one whose attention is timm's, got "
            f"{type(model).__name__}"
        )
    return host


def state_in(base: nn.Module) -> AttachedState | None:
    """The state of an attached model; None if nothing is attached."""
    return next((module for module in base.modules() if isinstance(module, AttachedState)), None)


def _refuse_attached(model: nn.Module, base: nn.Module) -> None:
    """Refuse a model that is attached already, that contains an attached model, or that is part of one."""
    attached = {path: module for path, module in base.named_modules() if "overt_state" in module._modules}
    if "" in attached:
        raise ValueError("the model already has mechanisms attached: overt.detach(model) removes them")
    for path, part in attached.items():
        raise ValueError(
            f"a part of the model, {path} ({type(part).__name__}), already has mechanisms attached: "
            "overt.detach(model) removes them"
        )
    if any("overt" in module._modules for module in base.modules()):
        raise ValueError(
            f"this {type(base).__name__} is a part of a model that has mechanisms attached: call "
            "overt.detach on that model first"
        )
    if peft_models(model):
        refuse_without_config(base)
    inside = any(hasattr(module, "base_layer") for module in base.modules()) and hasattr(base, "peft_config")
    if inside and not peft_models(model) and not getattr(base, "_hf_peft_config_loaded", False):
        raise ValueError(
            f"this {type(base).__name__} is inside a PEFT model, which would not save the mechanisms: "
            "attach to the PEFT model, overt.attach(peft_model, …)"
        )


def the_state(model: nn.Module) -> AttachedState:
    """The state of an attached model; an error if nothing is attached."""
    state = state_in(model)
    if state is None:
        raise ValueError(
            f"nothing is attached to this {type(model).__name__}: call overt.attach(model, …) first"
        )
    return state


def choose(sites: list[AttentionSite], where: Where) -> dict[str, int]:
    """The attentions that `where` selects: path → place in its chain."""
    kinds = sorted({site.kind for site in sites}, key=KINDS.index)
    layers_by_kind: dict[str, list[int] | None]
    if where is None:
        layers_by_kind = dict.fromkeys(kinds)
    elif isinstance(where, str):
        layers_by_kind = {where: None}
    elif isinstance(where, Mapping):
        layers_by_kind = {kind: None if layers is None else list(layers) for kind, layers in where.items()}
    else:
        layers_by_kind = dict.fromkeys(where)
    if not layers_by_kind:
        raise ValueError(f"where selects nothing; this model has {', '.join(kinds)}")
    for kind in layers_by_kind:
        _check.one_of("where", kind, KINDS)
        if kind not in kinds:
            raise ValueError(f"where names {kind!r}, but this model has only {', '.join(kinds)} attention")
    chosen: dict[str, int] = {}
    for kind, layers in layers_by_kind.items():
        for chain in dict.fromkeys(site.chain for site in sites if site.kind == kind):
            members = [site for site in sites if site.kind == kind and site.chain == chain]
            if layers is None:
                chosen.update({site.path: place for place, site in enumerate(members)})
                continue
            if members[0].shared:
                raise ValueError(f"where cannot choose layers of {kind}: they share one module")
            numbers = sorted({_layer(kind, layer, len(members)) for layer in layers})
            if numbers and numbers != list(range(numbers[0], numbers[-1] + 1)):
                raise ValueError(f"where must choose consecutive layers (a chain has no gaps), got {numbers}")
            chosen.update({members[number].path: place for place, number in enumerate(numbers)})
    if not chosen:
        raise ValueError(f"where selects nothing, got {where!r}")
    return chosen


def _layer(kind: str, layer: object, count: int) -> int:
    if isinstance(layer, bool) or not isinstance(layer, int) or not -count <= layer < count:
        raise ValueError(f"where names layer {layer!r} of {kind}, which has layers 0 to {count - 1}")
    return layer % count


def _reads_rows(
    sites: list[AttentionSite],
    chosen: dict[str, int],
    mechanisms: tuple[Mechanism, ...],
    pair: bool,
) -> bool:
    """Whether a row of a map would depend on other rows; decided by the last layer of each kind."""
    last = {site.kind: (site, chosen[site.path]) for site in sites if site.path in chosen}
    with torch.device("meta"):
        parts = [
            AttachedAttention(site, 0, mechanisms, max(1, layer), "", pair) for site, layer in last.values()
        ]
    return any(part.map is not None and part.map.reads_rows for part in parts)


def _plain_where(where: Where) -> Any:
    """`where` in the form that is written to a config file."""
    if where is None or isinstance(where, str):
        return where
    try:
        if isinstance(where, Mapping):
            return {kind: None if layers is None else list(layers) for kind, layers in where.items()}
        return list(where)
    except TypeError:
        raise TypeError(
            f"where must be None, a kind, a list of kinds, or a mapping of kinds to layers, got {where!r}"
        ) from None


def _reads_earlier_rows(part: AttachedAttention) -> bool:
    """Whether a decoder's map rows read earlier rows, which must then be stored with the cache."""
    return part.map is not None and part.kind != "encoder" and part.map.earlier_rows > 0


def _device(module: nn.Module) -> torch.device:
    """Where a module computes: the device of its weights, or the one that accelerate moves them to."""
    if torch.get_default_device().type == "meta":
        # The model is being loaded on the meta device, though some families create weights elsewhere.
        return torch.get_default_device()
    return device_of(module)


def _dtype(base: nn.Module, module: nn.Module) -> torch.dtype:
    parameters = (parameter for part in (module, base) for parameter in part.parameters())
    floating = (parameter.dtype for parameter in parameters if parameter.is_floating_point())
    return next(floating, torch.get_default_dtype())

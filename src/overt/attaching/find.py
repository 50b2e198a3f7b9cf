"""Find a Hugging Face model's attentions from the model itself, not from a list of families.

An attention is a module whose code dispatches through transformers' `ALL_ATTENTION_FUNCTIONS`. Before
anything is attached, the output of the family's eager function is compared with ours on random numbers, so
that a family with its own sink, bias or mask is refused rather than silently changed.
"""

from __future__ import annotations

import inspect
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from overt.attaching.plain import logits_of, mix_values, split_mask
from overt.mechanisms.maps import softmax
from overt.mechanisms.site import Kind

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Arguments of a family's eager attention that ours honours; it would ignore any other.
HONOURED = {
    "module",
    "query",
    "key",
    "value",
    "attention_mask",
    "scaling",
    "dropout",
    "softcap",
    "position_bias",
    "sliding_window",  # already in the mask
}
CROSS = re.compile(r"cross|enc(oder)?_?dec|encoder_attn|encoder_attention|perceiver|x_attn")
PICTURES = re.compile(r"vision|visual|image")
CAUSAL_MASKS = {"create_causal_mask", "create_sliding_window_causal_mask", "create_chunked_causal_mask"}


@dataclass(frozen=True)
class AttentionSite:
    """One attention of a model.

    Attributes:
        path: its name in the model.
        module: the attention module.
        stack: path of the innermost model that contains it; the pass is handed to that model.
        chain: path of the list of layers that it is in; its maps evolve along that list.
        kind: "encoder", "decoder" or "cross".
        layer: place among the attentions of its kind in the chain.
        heads: number of query heads.
        key_heads: number of key heads.
        head_dim: width of a head's queries and keys.
        shared: whether several layers call this one module (ALBERT).
        layers: number of attentions of its kind in the chain, counting each call.
        eager: whether the plain model uses its family's eager attention rather than torch's.
    """

    path: str
    module: nn.Module
    stack: str
    chain: str
    kind: Kind
    layer: int
    heads: int
    key_heads: int
    head_dim: int
    shared: bool = False
    layers: int = 0
    eager: bool = False


def name_of(model: nn.Module) -> str:
    """A model's name in error messages: its class and family."""
    family = getattr(getattr(model, "config", None), "model_type", None)
    return f"{type(model).__name__} ({family})" if family else type(model).__name__


def refuse(model: nn.Module, reason: str) -> ValueError:
    """The error for a model that cannot be attached to."""
    return ValueError(f"{name_of(model)} cannot be attached to: {reason}")


def find(model: PreTrainedModel) -> list[AttentionSite]:
    """Every dispatched attention of a model, in order; errors name the family and the reason."""
    from transformers import PreTrainedModel

    places = dispatched(model)
    if not places:
        raise refuse(
            model,
            "its attention is not dispatched through transformers' attention interface "
            "(ALL_ATTENTION_FUNCTIONS), so there is no place to put a mechanism",
        )
    for path, module in undispatched(model, [place.path for place in places]):
        if re.search(r"\.\d+(\.|$)", path):
            raise refuse(
                model,
                f"{path} ({type(module).__name__}) is not dispatched through transformers' "
                "attention interface, though other attentions of the model are",
            )
    models = {path: module for path, module in model.named_modules() if isinstance(module, PreTrainedModel)}
    sites = []
    for path, module, stack, chain, kind in places:
        if not models[stack]._can_set_attn_implementation():
            raise refuse(
                model, f"{type(models[stack]).__name__} does not let its attention implementation be set"
            )
        heads, key_heads, head_dim = _shape(model, path, module)
        check_eager(model, module, heads)
        eager = getattr(getattr(module, "config", model.config), "_attn_implementation", None) == "eager"
        sites.append(
            AttentionSite(path, module, stack, chain, kind, 0, heads, key_heads, head_dim, eager=eager)
        )
    return number_layers(model, sites)


class Dispatched(NamedTuple):
    """An attention that transformers dispatches; fields as in `AttentionSite`."""

    path: str
    module: nn.Module
    stack: str
    chain: str
    kind: Kind


def dispatched(model: PreTrainedModel) -> list[Dispatched]:
    """Every attention of a model that transformers dispatches, in order; may be empty."""
    from transformers import PreTrainedModel

    modules = list(model.named_modules())
    models = {path: module for path, module in modules if isinstance(module, PreTrainedModel)}
    attentions = []
    for path, module in modules:
        if _dispatches(module):
            stack = max((p for p in models if _inside(path, p)), key=len)
            chain = re.split(r"\.\d+(?:\.|$)", path)[0]
            attentions.append(Dispatched(path, module, stack, chain, _kind(path, module, models[stack])))
    return attentions


def _inside(path: str, ancestor: str) -> bool:
    return ancestor == "" or path == ancestor or path.startswith(ancestor + ".")


def _names(function: Callable[..., Any]) -> set[str]:
    code = getattr(inspect.unwrap(function), "__code__", None)
    return set(code.co_names) if code is not None else set()


def _dispatches(module: nn.Module) -> bool:
    if type(module).__module__.startswith("torch."):
        return False
    return "ALL_ATTENTION_FUNCTIONS" in _names(type(module).forward)


def undispatched(model: nn.Module, dispatched: list[str]) -> Iterator[tuple[str, nn.Module]]:
    """Attentions of a model, recognised by class name, other than the dispatched ones (given by path)."""
    for path, module in model.named_modules():
        if "attention" not in type(module).__name__.lower() or next(module.parameters(), None) is None:
            continue
        if not any(_inside(path, other) or _inside(other, path) for other in dispatched):
            yield path, module


def _kind(path: str, module: nn.Module, stack: nn.Module) -> Kind:
    names = ".".join([*path.split(".")[-3:], type(module).__name__]).lower()
    if getattr(module, "is_cross_attention", False) or CROSS.search(names):
        return "cross"
    if getattr(module, "is_causal", False):
        return "decoder"
    if PICTURES.search(path) and not hasattr(module, "is_decoder"):
        return "encoder"  # in a model that builds a causal mask for its text
    # CLIP's text tower builds a causal mask for attentions that are not marked causal. NLLB-MoE's decoder
    # does too, and also builds a mask for its cross-attention.
    masks = _names(type(stack).forward)
    if getattr(module, "is_decoder", None) is True and masks & CAUSAL_MASKS:
        return "decoder"
    causal = bool(masks & CAUSAL_MASKS) and not any("bidirectional" in name for name in masks)
    return "decoder" if causal else "encoder"


def _shape(model: nn.Module, path: str, module: nn.Module) -> tuple[int, int, int]:
    """Query heads, key heads and head width, from the module or its config."""
    config = getattr(module, "config", None)

    def look(*names: str) -> int | None:
        for source in (module, config):
            for name in names:
                value = getattr(source, name, None)
                if isinstance(value, int) and value > 0:
                    return value
        return None

    heads = look("num_heads", "num_attention_heads", "n_heads", "n_head")
    if heads is None:
        raise refuse(model, f"the number of heads of {path} ({type(module).__name__}) cannot be determined")
    groups = getattr(module, "num_key_value_groups", None)
    key_heads = heads // groups if isinstance(groups, int) else look("num_key_value_heads") or heads
    head_dim = look("qk_head_dim", "head_dim", "attention_head_size", "key_value_proj_dim", "head_size")
    if head_dim is None:
        width = look("embed_dim", "dim", "hidden_size", "d_model")
        if width is None:
            raise refuse(model, f"the head width of {path} ({type(module).__name__}) cannot be determined")
        head_dim = width // heads
    return heads, min(key_heads, heads), head_dim


def number_layers(model: nn.Module, sites: list[AttentionSite]) -> list[AttentionSite]:
    """The sites with their places in the chains; a chain restarts where the number of heads changes."""
    groups: dict[tuple[str, str], list[AttentionSite]] = defaultdict(list)
    for site in sites:
        groups[site.chain, site.kind].append(site)
    placed: dict[str, AttentionSite] = {}
    for (chain, _), members in groups.items():
        layers = _layers(model, members[0], chain)
        shared = layers is not None
        count = layers if layers is not None else len(members)
        for layer, (site, part) in enumerate(zip(members, _parts(members), strict=True)):
            first = next(i for i, other in enumerate(_parts(members)) if other == part)
            name = chain if part == 0 else f"{chain}#{part}"
            place = layer if shared else layer - first
            placed[site.path] = replace(site, chain=name, layer=place, shared=shared, layers=count)
    return [placed[site.path] for site in sites]


def _parts(members: list[AttentionSite]) -> list[int]:
    """A number for each member, which increases where the number of heads changes."""
    part, parts = 0, []
    for before, site in zip([members[0], *members], members, strict=False):
        part += before.heads != site.heads
        parts.append(part)
    return parts


def _layers(model: nn.Module, site: AttentionSite, chain: str) -> int | None:
    """Number of calls in a chain whose layers share modules (it has `num_hidden_groups`); else None.

    Any other family whose layers share modules would run a module twice in a pass, which is an error then.
    """
    config = getattr(site.module, "config", getattr(model, "config", None))
    groups, layers = getattr(config, "num_hidden_groups", None), getattr(config, "num_hidden_layers", None)
    if not isinstance(groups, int) or not isinstance(layers, int) or groups >= layers:
        return None
    if len(model.get_submodule(chain)) != groups:  # type: ignore[arg-type]
        return None
    return layers * int(getattr(config, "inner_group_num", 1))


def eager_of(module: nn.Module) -> Callable[..., Any] | None:
    """The eager attention function of a module's family."""
    eager = inspect.unwrap(type(module).forward).__globals__.get("eager_attention_forward")
    return eager if callable(eager) else None


_probed: set[tuple[type, int, int, bool]] = set()


def check_eager(model: nn.Module, module: nn.Module, heads: int) -> None:
    """Refuse a family whose attention is not a softmax of scaled scores, softcap, bias and mask."""
    eager = eager_of(module)
    name = type(module).__name__
    if eager is None:
        raise refuse(model, f"{name} has no eager attention to compare with")
    parameters = inspect.signature(eager).parameters.values()
    arguments = {parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD}
    if unknown := sorted(arguments - HONOURED):
        raise refuse(model, f"the attention of {name} takes {', '.join(unknown)}, which is not honoured")
    tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    if any(tensor.is_meta for tensor in tensors) or torch.get_default_device().type == "meta":
        return  # being loaded or offloaded: there are no numbers to compare yet
    device = tensors[0].device if tensors else torch.device("cpu")
    groups = getattr(module, "num_key_value_groups", 1)
    # A family has one attention function; its modules may differ in these attributes only.
    signature = (type(module), heads, groups, getattr(module, "sinks", None) is not None)
    if signature in _probed:
        return
    for extra in _extras(arguments, heads, device):
        try:
            same = _agrees(eager, module, heads, heads // groups, device, extra)
        except Exception as error:
            raise refuse(model, f"the attention of {name} could not be compared: {error}") from error
        if not same:
            options = f" with {', '.join(extra)}" if extra else ""
            raise refuse(
                model,
                f"the attention of {name}{options} is not a softmax of scaled scores and mask "
                "(it has a sink, perhaps, or a bias of its own)",
            )
    _probed.add(signature)


_plain: dict[tuple[type, int, bool], bool] = {}


def is_plain(module: nn.Module) -> bool:
    """Whether a module's eager attention is a softmax of scaled scores and mask, by random numbers."""
    eager = eager_of(module)
    tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    if eager is None or any(tensor.is_meta for tensor in tensors):
        return eager is not None and not tensors
    groups = getattr(module, "num_key_value_groups", 1)
    kind = type(module), groups, getattr(module, "sinks", None) is not None
    if kind not in _plain:
        device = tensors[0].device if tensors else torch.device("cpu")
        try:
            _plain[kind] = _agrees(eager, module, 2 * groups, 2, device, {})
        except Exception:  # it takes more than queries, keys, values and a mask
            _plain[kind] = False
    return _plain[kind]


def _extras(arguments: set[str], heads: int, device: torch.device) -> Iterator[dict[str, Any]]:
    yield {}
    if "softcap" in arguments:
        yield {"softcap": 0.7}
    if "position_bias" in arguments:
        yield {"position_bias": _random(4, (1, heads, 3, 5), device)}


def _random(seed: int, shape: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)


@torch.no_grad()
def _agrees(
    eager: Callable[..., Any],
    module: nn.Module,
    heads: int,
    key_heads: int,
    device: torch.device,
    extra: dict[str, Any],
) -> bool:
    query = _random(0, (2, heads, 3, 4), device)
    key, value = (_random(seed, (2, key_heads, 5, 4), device) for seed in (1, 2))
    mask = torch.zeros(2, 1, 3, 5, device=device)
    mask[1, :, :, 3:] = torch.finfo(torch.float32).min
    theirs, their_weights = eager(module, query, key, value, mask, scaling=0.3, dropout=0.0, **extra)
    logits = logits_of(query, key, 0.3, extra.get("softcap"), extra.get("position_bias"))
    visible, _ = split_mask(mask)
    weights = softmax(logits, visible)
    ours = mix_values(weights, value)
    close = torch.allclose(theirs.float(), ours, atol=1e-4)
    return close and torch.allclose(their_weights.float(), weights, atol=1e-4)

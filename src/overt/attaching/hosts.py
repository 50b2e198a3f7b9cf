"""The kinds of models that mechanisms can be attached to: where they attend, and how to come between."""

from __future__ import annotations

from typing import Any, Protocol

from torch import nn

from overt.attaching import find, timm_attention
from overt.attaching.attention import NAME
from overt.attaching.find import AttentionSite
from overt.attaching.saving import Saving
from overt.attaching.settings import Uploading
from overt.attaching.state import AttachedState, attached_states


class Host(Protocol):
    """What `attach` and `detach` ask of a kind of models."""

    def find(self, model: Any) -> list[AttentionSite]:
        """Its attentions, in order; errors name the model and the reason."""

    def connect(self, model: Any, sites: list[AttentionSite], state: AttachedState) -> None:
        """Make attentions call their submodule `overt`, and passes begin and end with the model's."""

    def disconnect(self, model: Any, state: AttachedState) -> None:
        """Undo `connect`, but for the state's hooks."""


class HuggingFace:
    """Models that dispatch their attention through transformers' attention interface."""

    METHODS = ("save_pretrained", "_upload_modified_files", "_valid_auto_compile_criteria")

    def find(self, model: Any) -> list[AttentionSite]:
        """The dispatched attentions."""
        return find.find(model)

    def connect(self, model: Any, sites: list[AttentionSite], state: AttachedState) -> None:
        """Set the attention implementation of configs, hook all models, and replace `save_pretrained`."""
        from transformers import PreTrainedModel
        from transformers.modeling_layers import GradientCheckpointingLayer

        configs = [module.config for module in model.modules() if isinstance(module, PreTrainedModel)]
        configs += [config for site in sites if (config := getattr(site.module, "config", None)) is not None]
        unique = {id(config): config for config in configs}
        state.implementations = [(config, config._attn_implementation) for config in unique.values()]
        model.set_attn_implementation(NAME)
        for site in sites:
            config = getattr(site.module, "config", None)
            if config is not None and config._attn_implementation != NAME:
                config._attn_implementation_internal = NAME
        stacks = {site.stack for site in sites}
        for path, module in model.named_modules():
            if isinstance(module, PreTrainedModel):
                state.hook(module)
                if path in stacks:
                    module.__dict__["overt_stack"] = path
            elif isinstance(module, GradientCheckpointingLayer):
                state.hook_layer(module)
        saving = Saving(model)
        # On a GPU, generate() would compile the step for a static cache; the number of stored map rows
        # changes from step to step.
        model.__dict__.update(zip(self.METHODS, (saving, Uploading(saving), _never), strict=True))

    def disconnect(self, model: Any, state: AttachedState) -> None:
        """Restore methods and attention implementations, except those that another attached model shares."""
        for name in self.METHODS:
            model.__dict__.pop(name, None)
        originals, state.implementations = state.implementations, []
        for config, implementation in originals:
            others = [
                other
                for other in attached_states()
                if any(shared is config for shared, _ in other.implementations)
            ]
            for other in others:
                other.implementations = [
                    (shared, implementation if shared is config else before)
                    for shared, before in other.implementations
                ]
            if not others:
                config._attn_implementation_internal = implementation


class Timm:
    """Models with timm's plain attention."""

    def find(self, model: Any) -> list[AttentionSite]:
        """The plain attentions."""
        return timm_attention.find(model)

    def connect(self, model: Any, sites: list[AttentionSite], state: AttachedState) -> None:
        """Replace the attentions' forward, and hook the model."""
        state.hands_on = False
        for site in sites:
            timm_attention.connect(site.module)
        state.hook(model)
        model.__dict__["overt_stack"] = ""

    def disconnect(self, model: Any, state: AttachedState) -> None:
        """Restore the attentions' forward."""
        del state
        for _, module in timm_attention.plain_attentions(model):
            timm_attention.disconnect(module)


def host_of(model: nn.Module) -> Host | None:
    """The kind of a model; None if nothing can be attached to it."""
    from transformers import PreTrainedModel

    if isinstance(model, PreTrainedModel):
        return HuggingFace()
    return Timm() if timm_attention.plain_attentions(model) else None


def _never(*args: object, **kwargs: object) -> bool:
    del args, kwargs
    return False

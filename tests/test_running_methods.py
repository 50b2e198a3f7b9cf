"""Methods that run the model: which inputs they explain, what they compute, and what they leave behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache

import families
import other_models as other
import overt

IDS = torch.randint(1, other.WORDS, (2, 6), generator=torch.Generator().manual_seed(3))


class Classifier(nn.Module):
    """Attention over a token of its own and the text's, or over the text's tokens pooled in pairs."""

    def __init__(self, change: str = "") -> None:
        super().__init__()
        self.change, self.emb = change, nn.Embedding(other.WORDS, other.WIDTH)
        self.cls = nn.Parameter(torch.ones(1, 1, other.WIDTH))
        self.blocks = nn.ModuleList([other.Block(other.NanoAttention(causal=False)) for _ in range(2)])
        self.head = nn.Linear(other.WIDTH, 3)
        other.spread(self)

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = self.emb(x) if not x.is_floating_point() else x
        if self.change == "added":
            x = torch.cat([self.cls.expand(len(x), -1, -1), x], dim=1)
        elif self.change == "pooled":
            x = x.unflatten(1, (-1, 2)).mean(dim=2)
        shown = None if attention_mask is None else attention_mask.bool()[:, None, None, :]
        for block in self.blocks:
            x = block(x, shown)
        return self.head(x.mean(dim=1))


@pytest.mark.parametrize(("change", "tokens"), [("added", 7), ("pooled", 3)])
def test_tokens_that_are_not_ids_are_not_given_the_effects_of_ids(change: str, tokens: int) -> None:
    traced = overt.trace(Classifier(change), IDS)
    message = rf"an id for each token: x has shape \(2, 6\), and attention runs over {tokens} tokens"
    with pytest.raises(ValueError, match=f"^blank-out needs {message}"):
        traced.blankout(unk=0)
    with pytest.raises(ValueError, match=f"^a gradient for each token needs {message}"):
        traced.gradients()


def test_ids_in_a_mapping_are_explained_whatever_they_are_called() -> None:
    model, mask = Classifier(), torch.ones(2, 6, dtype=torch.int64)
    plain, named = overt.trace(model, IDS), overt.trace(model, {"x": IDS, "attention_mask": mask})
    assert named.tokens == plain.tokens == [[str(number) for number in row] for row in IDS.tolist()]
    torch.testing.assert_close(named.gradients(), plain.gradients())
    torch.testing.assert_close(named.blankout(unk=0), plain.blankout(unk=0))
    assert (named.blankout(unk=0) != 0).any()


def test_inputs_without_ids_or_pixels_have_no_gradients() -> None:
    message = "^gradients need token ids that an nn.Embedding reads, or pixel_values; the model was given "
    vectors = torch.randn(2, 6, other.WIDTH)
    with pytest.raises(ValueError, match=f"{message}x$"):
        overt.trace(Classifier(), vectors).gradients()
    bert = families.BY_NAME["BERT"].make()
    with pytest.raises(ValueError, match=f"{message}inputs_embeds$"):
        overt.trace(bert, {"inputs_embeds": torch.randn(2, 6, families.WIDTH)}).gradients()


def test_gradients_of_the_last_token_need_no_other_logits() -> None:
    family = families.BY_NAME["Llama"]
    model, inputs = family.make(), families.inputs_of(family)
    made: list[torch.Size] = []
    model.lm_head.register_forward_hook(lambda *given: made.append(given[2].shape))
    traced = overt.trace(model, inputs)
    made.clear()
    for kind in ("norm", "input"):
        both, last = traced.gradients([2, 8], kind=kind), traced.gradients(-1, kind=kind)
        assert [shape[1] for shape in made] == [7, 1]
        torch.testing.assert_close(last[:, :, 0], both[:, :, 1], rtol=1e-4, atol=1e-9)
        made.clear()
    chosen = traced.gradients([8], target=[3, 4, 5])
    torch.testing.assert_close(chosen[:, :, 0], traced.gradients([2, 8], target=[3, 4, 5])[:, :, 1])


def test_a_callers_cache_is_left_alone() -> None:
    family = families.BY_NAME["Llama"]
    model, inputs = family.make(), families.inputs_of(family)
    cache = DynamicCache(config=model.config)
    traced = overt.trace(model, {**inputs, "past_key_values": cache})
    assert torch.equal(traced.maps[1], overt.trace(model, inputs).maps[1])
    assert cache.get_seq_length() == 0
    model(**inputs, past_key_values=cache, use_cache=True)
    assert cache.get_seq_length() == 9
    with pytest.raises(ValueError, match=r"^past_key_values holds tokens already, .*: trace without a"):
        overt.trace(model, {"input_ids": IDS[:, :2].repeat(2, 1)[:3], "past_key_values": cache})
    assert cache.get_seq_length() == 9


def test_a_forward_of_an_instances_own_is_kept() -> None:
    """As those by which other libraries load a layer's weights when it runs."""
    family = families.BY_NAME["Llama"]
    model, inputs = family.make(), families.inputs_of(family)
    layer, ran = model.model.layers[1], []
    plain = layer.forward

    def loading(*args: Any, **kwargs: Any) -> Any:
        ran.append(layer)
        return plain(*args, **kwargs)

    layer.forward = loading
    states = overt.trace(model, inputs, memory=1000)
    assert states.of_states
    ran.clear()
    states.gradients(-1)
    assert len(ran) == 2  # in the backward pass again
    assert layer.forward is loading
    assert "forward" not in vars(model.model.layers[0])

"""Attention of any PyTorch model: weights against those by hand, and refusals."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.overrides import _get_current_function_mode_stack

import families
import other_models as other
import overt
import support
from other_models import Block, MinAttention, NanoAttention, Pair, Picture, Text, TuneAttention
from overt.mechanisms.attention import MultiheadAttention
from overt.tracing.capture import CapturedAttention, watching

IDS = torch.randint(0, other.WORDS, (2, 7), generator=torch.Generator().manual_seed(3))


def captured(model: nn.Module, *args: Any) -> list[CapturedAttention]:
    calls: list[CapturedAttention] = []
    with watching(model, calls.append), torch.no_grad():
        model(*args)
    return calls


TEXTS = {
    "nanoGPT": (NanoAttention, 0.5),
    "minGPT": (MinAttention, 0.5),
    "torchtune": (TuneAttention, 0.4),
    "einsum": (other.EinsumAttention, 0.5),
    "batch and heads joined": (other.JoinedAttention, 0.5),
    "columns": (other.ColumnAttention, 0.5),
}


@pytest.mark.parametrize("name", TEXTS)
def test_maps_of_a_text_are_those_by_hand(name: str) -> None:
    attention, scale = TEXTS[name]
    model = Text(attention)
    want = other.maps_by_hand(model.h, model.embedded(IDS), scale)
    traced = overt.trace(model, IDS, heads=True)
    assert traced.kind == "causal"
    assert traced.paths == ["h.0.attn", "h.1.attn", "h.2.attn"]
    for ours, theirs in zip(traced.maps, want, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(
        traced.rollout(), overt.rollout([cells.double() for cells in want]), atol=1e-6, rtol=1e-5
    )
    assert traced.tokens[0] == [str(number) for number in IDS[0].tolist()]


def test_maps_of_an_image_are_those_by_hand() -> None:
    model, images = Picture(), torch.randn(2, 3, 12, 12)
    want = other.maps_by_hand(model.blocks, model.embedded(images).detach())
    traced = overt.trace(model, images, heads=True)
    assert (traced.kind, traced.paths) == ("encoder", ["blocks.0.attn", "blocks.1.attn", "blocks.2.attn"])
    for ours, theirs in zip(traced.maps, want, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("length", [5, 7], ids=["shorter", "as long as the source"])
def test_an_encoder_decoders_kinds_are_inferred(length: int) -> None:
    model, target = Pair(), IDS.flip(1)[:, :length]
    traced = overt.trace(model, {"source": IDS, "target": target}, heads=True)
    assert traced.kind == "encoder–decoder"
    assert traced.paths == [
        "decoder.0.own", "decoder.1.own", "encoder.0.attn", "encoder.1.attn", "decoder.0.across",
        "decoder.1.across",
    ]  # fmt: skip
    with torch.no_grad():
        memory, x, layer = model.words(IDS), model.words(target), model.decoder[0]
        want = other.maps_by_hand(model.encoder, memory)
        for block in model.encoder:
            memory = block(memory)
        own = other.weights_by_hand(layer.own, layer.ln_1(x))
        x = x + layer.own(layer.ln_1(x))
        across = other.weights_by_hand(layer.across, layer.ln_2(x), memory, scale=0.4)
    torch.testing.assert_close(traced.encoder_maps, want, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(traced.maps[0], own, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(traced.cross[0], across, atol=1e-6, rtol=1e-5)


MASKS = {
    "booleans for keys": torch.arange(7) < torch.tensor([7, 5])[:, None, None, None],
    "booleans for cells": torch.ones(7, 7, dtype=torch.bool).tril() & (torch.arange(7) != 2),
    "numbers": torch.randn(2, 1, 7, 7, generator=torch.Generator().manual_seed(5)),
    "numbers for each head": torch.randn(1, 4, 7, 7, generator=torch.Generator().manual_seed(6)),
    "−inf": torch.full((7, 7), -torch.inf).triu(1),
    "the least number": torch.full((7, 7), torch.finfo(torch.float32).min).triu(1),
    "only the least number": torch.full((1, 1, 7, 7), torch.finfo(torch.float32).min),
    "upper left": causal_upper_left(7, 7),
    "lower right": causal_lower_right(7, 7),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks_are_read_in_parts(name: str) -> None:
    mask, model = MASKS[name], Text(NanoAttention, layers=1)
    (call,) = captured(model, IDS, mask)
    with torch.no_grad():
        q, k, _ = model.h[0].attn.projected(model.h[0].ln_1(model.embedded(IDS)))
        # What attention gives for values that are unit vectors is its weights.
        unit = torch.eye(7).expand(2, 4, 7, 7)
        want = F.scaled_dot_product_attention(q, k, unit, attn_mask=mask)
    torch.testing.assert_close(call.weights, want, atol=1e-6, rtol=1e-5)
    assert call.asked is not None
    torch.testing.assert_close(call.asked.weights(torch.float32), want, atol=1e-6, rtol=1e-5)
    sight = call.asked.sight
    if name in ("−inf", "the least number", "upper left", "lower right", "booleans for cells"):
        assert (sight.causal, sight.bias) == (True, None), "a part of a few bytes, not a map"
    if name.startswith("booleans"):
        assert sight.keys is not None
        assert sight.bias is None


class Flex(NanoAttention):
    """FlexAttention, with a mask and a change of scores."""

    def __init__(self, score_mod: Any = None, run: Any = flex_attention) -> None:
        super().__init__()
        self.score_mod, self.run = score_mod, run

    def attend(self, q: Tensor, k: Tensor, v: Tensor, _mask: Any) -> Tensor:
        seen = create_block_mask(lambda _b, _h, i, j: i >= j, None, None, 7, 7, device="cpu")
        mixed: Tensor = self.run(q, k, v, score_mod=self.score_mod, block_mask=seen)
        return mixed


SLOPES = torch.tensor([0.1, 0.2, 0.4, 0.8])


def alibi(score: Tensor, _b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return score - SLOPES[h] * (i - j)


def softcap(score: Tensor, *_: Tensor) -> Tensor:
    return torch.tanh(score / 0.5) * 0.5


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("name", ["plain", "alibi", "softcap", "compiled"])
def test_flex_attention_is_understood(name: str) -> None:
    score_mod = {"alibi": alibi, "softcap": softcap}.get(name)
    run = torch.compile(flex_attention, backend="eager") if name == "compiled" else flex_attention
    model = Text(lambda: Flex(score_mod, run), layers=2)
    calls = captured(model, IDS)
    with torch.no_grad():
        q, k, _ = model.h[0].attn.projected(model.h[0].ln_1(model.embedded(IDS)))
    scores = q @ k.mT * 0.5
    if name == "alibi":
        away = torch.arange(7)[:, None] - torch.arange(7)
        scores = scores - SLOPES[:, None, None] * away
    if name == "softcap":
        scores = torch.tanh(scores / 0.5) * 0.5
    want = scores.masked_fill(torch.ones(7, 7).triu(1).bool(), -torch.inf).softmax(dim=-1)
    torch.testing.assert_close(calls[0].weights, want, atol=1e-6, rtol=1e-5)
    assert calls[0].kind == "decoder"
    asked = calls[0].asked
    assert (asked is None) == (name == "softcap"), "which is not something added to scores"
    if asked is not None:
        torch.testing.assert_close(asked.weights(torch.float32), want, atol=1e-6, rtol=1e-5)


class Functional(nn.Module):
    """torch's functional attention, as fairseq calls it."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.MultiheadAttention(other.WIDTH, other.HEADS)  # its weights alone are used

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        y, inside = x.transpose(0, 1), self.inside
        mixed, _ = F.multi_head_attention_forward(
            y, y, y, other.WIDTH, other.HEADS, inside.in_proj_weight, inside.in_proj_bias, None, None, False,
            0.0, inside.out_proj.weight, inside.out_proj.bias, False, padding, False,
        )  # fmt: skip
        return mixed.transpose(0, 1)


def test_functional_multi_head_attention_is_read() -> None:
    model = Text(Functional, layers=2)
    padding = torch.tensor([[False] * 7, [False] * 5 + [True] * 2])
    calls = captured(model, IDS, padding)
    with torch.no_grad():
        x, attention = model.h[0].ln_1(model.embedded(IDS)), model.h[0].attn.inside
        _, want = attention(*[x.transpose(0, 1)] * 3, key_padding_mask=padding, average_attn_weights=False)
    torch.testing.assert_close(calls[0].weights, want, atol=1e-6, rtol=1e-5)
    assert [call.path for call in calls] == ["h.0.attn", "h.1.attn"]
    assert calls[0].asked is not None
    torch.testing.assert_close(calls[0].asked.weights(torch.float32), want, atol=1e-6, rtol=1e-5)
    assert torch.equal(overt.trace(model, {"idx": IDS, "mask": padding}).mask, ~padding)


@pytest.mark.parametrize("attention", [NanoAttention, MinAttention, Functional])
@pytest.mark.parametrize("mixing", ["norm", "effective", "gradient", "relevance", "value-zeroing", "alti"])
def test_every_mixing_is_that_of_torchs_own_attention(attention: Any, mixing: str) -> None:
    """The same weights in torch's MultiheadAttention, which is watched in another way."""

    class Known(nn.Module):
        def __init__(self, like: Any) -> None:
            super().__init__()
            self.known = nn.MultiheadAttention(other.WIDTH, other.HEADS, batch_first=True)
            projection, output = getattr(like, "inside", like), getattr(like, "c_proj", None)
            packed = getattr(projection, "c_attn", None)
            source = projection.state_dict() if packed is None else {
                "in_proj_weight": packed.weight, "in_proj_bias": packed.bias,
                "out_proj.weight": output.weight, "out_proj.bias": output.bias,
            }  # fmt: skip
            self.known.load_state_dict(source)
            self.causal = packed is not None

        def forward(self, x: Tensor) -> Tensor:
            hidden = torch.ones(7, 7).triu(1).bool() if self.causal else None
            mixed: Tensor = self.known(x, x, x, attn_mask=hidden)[0]
            return mixed

    model, same = Text(attention, layers=2), Text(attention, layers=2)
    for block in same.h:
        block.attn = Known(block.attn)

    def chosen(result: Tensor) -> Tensor:
        return result[:, -1]

    options: dict[str, Any] = {"mixing": mixing, "output": chosen, "target": 3}
    ours, theirs = (overt.trace(each, IDS, **options) for each in (model, same))
    for found, want in zip(ours.maps, theirs.maps, strict=True):
        torch.testing.assert_close(found, want, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(ours.outputs, theirs.outputs, atol=1e-5, rtol=1e-5)


class Towers(nn.Module):
    """Two towers, side by side, in one list."""

    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleList(
            [nn.Sequential(*(Block(NanoAttention(causal=False)) for _ in range(2))) for _ in range(2)]
        )
        other.spread(self)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.towers[0](a).mean(dim=1) @ self.towers[1](b).mean(dim=1).T


def test_towers_are_not_taken_for_layers() -> None:
    model = Towers()
    inputs = {"a": torch.randn(2, 6, other.WIDTH), "b": torch.randn(2, 6, other.WIDTH)}
    with pytest.raises(
        ValueError, match=r"side by side.*calls seen: towers\.0\.0\.attn, towers\.0\.1"
    ) as caught:
        overt.trace(model, inputs)
    assert "\n" not in str(caught.value)
    want = other.maps_by_hand(model.towers[1], inputs["b"])
    for stack in ({"encoder": "towers.1"}, {"encoder": ["towers.1.0.attn", "towers.1.1.attn"]}, "towers.1"):
        traced = overt.trace(model, inputs, stack=stack, heads=True)
        assert traced.paths == ["towers.1.0.attn", "towers.1.1.attn"]
        torch.testing.assert_close(traced.maps, want, atol=1e-6, rtol=1e-5)
    with pytest.raises(ValueError, match="side by side"):
        overt.trace(model, inputs, stack={"encoder": ["towers.1.1", "towers.1.0"]})


def test_chains_can_be_named() -> None:
    model, inputs = Pair(), {"source": IDS, "target": IDS[:, :5]}
    plain = overt.trace(model, inputs)
    named = overt.trace(
        model,
        inputs,
        stack={
            "encoder": "encoder",
            "decoder": ["decoder.0.own", "decoder.1.own"],
            "cross": ["decoder.0.across", "decoder.1.across"],
        },
    )
    assert named.paths == plain.paths
    assert torch.equal(named.rollout(), plain.rollout())
    alone = overt.trace(model, inputs, stack={"encoder": ["encoder"]})
    assert torch.equal(alone.rollout(), plain.encoder.rollout())


@pytest.mark.parametrize(
    ("stack", "message"),
    [
        (
            {"encoder": "nowhere"},
            r"no attention ran at 'nowhere' \(stack\['encoder'\]\); calls seen: encoder\.0",
        ),
        ({"towers": "encoder"}, "a chain in stack must be"),
        ({}, "stack must name the calls of a chain"),
        ({"encoder": "encoder", "decoder": "decoder"}, "towers are traced one at a time"),
        ({"cross": "decoder"}, "the decoder's calls as well"),
        (
            {"decoder": ["decoder.0.own"], "cross": ["decoder.0.across", "decoder.1.across"]},
            "1 calls of the decoder and 2 of cross-attention",
        ),
    ],
)
def test_chains_that_are_none_are_refused(stack: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        overt.trace(Pair(), {"source": IDS, "target": IDS[:, :5]}, stack=stack)
    with pytest.raises(TypeError, match="stack must be a path or a mapping"):
        overt.trace(Pair(), {"source": IDS, "target": IDS[:, :5]}, stack=3)  # type: ignore[arg-type]


@pytest.mark.parametrize("attention", [NanoAttention, MinAttention, other.JoinedAttention])
def test_keys_from_elsewhere_than_the_arguments_are_another_sequences(attention: Any) -> None:
    class Remembering(attention):  # type: ignore[misc]
        memory: Any = None

        def projected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            q, k, v = super().projected(x)
            return (q, k, v) if self.memory is None else (q, *super().projected(self.memory)[1:])

    class Remembered(Text):
        def forward(self, idx: Tensor, mask: Any = None) -> Tensor:
            x = self.embedded(idx)
            self.h[1].attn.memory = self.embedded(idx.flip(1)) * 1.5
            return super().forward(idx, mask) + x.sum()

    calls = captured(Remembered(Remembering, layers=2), IDS)
    assert [call.kind for call in calls] == ["decoder", "cross"]


def test_a_layer_may_be_in_its_list_more_than_once() -> None:
    model = Text(MinAttention, layers=1)
    model.h = nn.ModuleList([model.h[0]] * 3)
    want = other.maps_by_hand(model.h, model.embedded(IDS))
    torch.testing.assert_close(overt.trace(model, IDS, heads=True).maps, want, atol=1e-6, rtol=1e-5)


class Funnel(Text):
    """A second layer in which every other token asks, and all are asked."""

    def __init__(self) -> None:
        super().__init__(NanoAttention, layers=1)
        self.h.append(Block(TuneAttention(causal=False)))

    def forward(self, idx: Tensor) -> Tensor:
        x = self.h[0](self.embedded(idx))
        shorter: Tensor = self.h[1](x[:, ::2], x)
        return shorter


def test_states_of_the_decoder_itself_are_no_memory() -> None:
    with pytest.raises(ValueError, match=r"h\.1\.attn attends to states of its own decoder.*seen: h\.0"):
        overt.trace(Funnel(), IDS)


def test_cross_attention_is_to_the_encoders_last_states() -> None:
    class Early(Pair):
        def forward(self, source: Tensor, target: Tensor) -> Tensor:
            memory, x = self.words(source), self.words(target)
            early = self.encoder[0](memory)
            self.encoder[1](early)
            for block in self.decoder:
                x = block(x, early)
            return x

    with pytest.raises(
        ValueError, match=r"decoder\.0\.across does not attend to what encoder\.1\.attn wrote"
    ):
        overt.trace(Early(), {"source": IDS, "target": IDS[:, :5]})


class Heads(nn.Module):
    """One module for each head, as in lectures."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList([nn.Linear(other.WIDTH, 12) for _ in range(other.HEADS)])

    def forward(self, x: Tensor) -> Tensor:
        parts = []
        for head in self.heads:
            q, k, v = head(x).split(4, dim=-1)
            parts.append((q @ k.mT).softmax(dim=-1) @ v)
        return torch.cat(parts, dim=-1)


class Windows(NanoAttention):
    """Swin: windows in the batch."""

    def forward(self, x: Tensor, _mask: Any = None) -> Tensor:
        batch, tokens, width = x.shape
        return super().forward(x.view(batch * 2, tokens // 2, width)).reshape(batch, tokens, width)


class Opaque(Tensor):
    """A mask that torch cannot be asked about."""


class Unreadable(NanoAttention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor, _mask: Any) -> Tensor:
        opaque = torch.ones(7, 7, dtype=torch.bool).as_subclass(Opaque)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=opaque).as_subclass(Tensor)


class Dropping(NanoAttention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor, _mask: Any) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.1)


class Inverted(NanoAttention):
    """A softmax over queries."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, _mask: Any) -> Tensor:
        return (q @ k.mT).softmax(dim=-2) @ v


class HeadsFirst(NanoAttention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor, _mask: Any) -> Tensor:
        q, k, v = (x.transpose(0, 1).reshape(-1, *x.shape[2:]) for x in (q, k, v))
        mixed = (q @ k.mT).softmax(dim=-1) @ v
        return mixed.view(other.HEADS, 2, *mixed.shape[1:]).transpose(0, 1)


class Convolved(nn.Module):
    """Tokens that are mixed without attention."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(other.WIDTH, other.WIDTH, 3, padding=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x.mT)[..., :-2].mT


REFUSED = {
    "windows": (Windows, r"h\.0\.attn cannot be traced: Windows attends in windows.*a batch of 4 where"),
    "heads side by side": (Heads, r"h\.0\.attn does not read what h\.0\.attn wrote.*calls seen: h\.0\.attn"),
    "a mask that cannot be read": (Unreadable, r"h\.0\.attn cannot be traced: its mask is a Opaque"),
    "dropout": (Dropping, r"it drops out in evaluation, too \(dropout_p=0\.1\)"),
    "over queries": (Inverted, "its softmax is not over the keys"),
    "heads before the batch": (HeadsFirst, "an order that is not known: trace one example at a time"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_be_wrong_is_refused_in_one_line(name: str) -> None:
    attention, message = REFUSED[name]
    ids = IDS[:, :6] if name == "windows" else IDS
    with pytest.raises(ValueError, match=message) as caught:
        overt.trace(Text(attention), ids)
    assert "\n" not in str(caught.value)


def test_heads_before_the_batch_are_known_of_one_example() -> None:
    class Single(HeadsFirst):
        def attend(self, q: Tensor, k: Tensor, v: Tensor, _mask: Any) -> Tensor:
            return (q[0] @ k[0].mT * 0.5).softmax(dim=-1).__matmul__(v[0])[None]

    model = Text(Single)
    for block in model.h:
        block.attn.causal = False
    want = other.maps_by_hand(model.h, model.embedded(IDS[:1]))
    traced = overt.trace(model, IDS[:1], heads=True)
    torch.testing.assert_close(traced.maps, want, atol=1e-6, rtol=1e-5)


class Alternating(Text):
    """Layers and others, one after another in one list."""

    def __init__(self, between: Any) -> None:
        super().__init__(NanoAttention, layers=2)
        self.h.insert(1, between)
        other.spread(self)


def test_layers_that_mix_tokens_without_attention_are_missed() -> None:
    each = nn.Sequential(nn.LayerNorm(other.WIDTH), nn.Linear(other.WIDTH, other.WIDTH))
    assert len(overt.trace(Alternating(each), IDS).maps) == 2
    with pytest.raises(ValueError, match=r"layers 1 of h do not attend"):
        overt.trace(Alternating(Convolved()), IDS)


def test_a_sequence_may_begin_and_end_with_something_else() -> None:
    class Sequence(Text):
        def __init__(self, *entries: nn.Module) -> None:
            super().__init__(NanoAttention, layers=1)
            self.h = nn.Sequential(*entries)
            other.spread(self)

        def forward(self, idx: Tensor) -> Tensor:
            return self.h(self.embedded(idx))

    first, second = Block(NanoAttention()), Block(NanoAttention())
    each = nn.Sequential(nn.Linear(other.WIDTH, other.WIDTH), nn.GELU())
    traced = overt.trace(Sequence(Convolved(), first, each, second, Convolved()), IDS)
    assert traced.paths == ["h.1.attn", "h.3.attn"]
    with pytest.raises(ValueError, match="layers 1 of h do not attend"):
        overt.trace(Sequence(first, Convolved(), second), IDS)


class Classifier(nn.Module):
    """A softmax that is no attention."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(other.WORDS, 6), nn.Linear(6, 4)

    def forward(self, idx: Tensor) -> Tensor:
        return self.head(self.words(idx)).softmax(dim=-1) @ self.head.weight


def test_a_model_that_never_attends_is_refused_with_the_calls_seen() -> None:
    with pytest.raises(ValueError, match=r"Classifier cannot be traced: .*calls seen: softmax in Classifier"):
        overt.trace(Classifier(), IDS)
    with pytest.raises(ValueError, match="it calls nothing of the kind"):
        overt.trace(nn.Linear(2, 2), torch.ones(1, 3, 2))


@pytest.mark.filterwarnings("ignore:.torch.jit.trace:DeprecationWarning")
def test_scripted_models_are_refused_by_name() -> None:
    scripted = torch.jit.trace(Text(NanoAttention, layers=1), IDS)
    with pytest.raises(ValueError, match=r"^Text is scripted"):
        overt.trace(scripted, IDS)
    model = Text(NanoAttention, layers=2)
    x = torch.randn(2, 7, other.WIDTH)
    model.h[1] = torch.jit.trace(model.h[1], x)
    with pytest.raises(ValueError, match=r"h\.1 cannot be traced: Block is scripted"):
        overt.trace(model, IDS)
    model = Text(NanoAttention, layers=2)
    model.h[1].mlp = torch.jit.trace(model.h[1].mlp, x)
    assert len(overt.trace(model, IDS).maps) == 2, "it leaves each token to itself"


@pytest.mark.parametrize("way", ["wrapped", "in place", "a layer", "a layer in place", "a function"])
def test_compiled_models_are_traced_uncompiled(way: str) -> None:
    model = Text(NanoAttention)
    want = overt.trace(model, IDS).maps
    calls: list[int] = []

    def count(graph: Any, inputs: Any) -> Any:
        del inputs
        calls.append(1)
        return graph.forward

    if way == "in place":
        model.compile(backend=count)
    elif way == "a layer":
        model.h[1] = torch.compile(model.h[1], backend=count)
    elif way == "a layer in place":
        model.h[1].compile(backend=count)
    elif way == "a function":
        model.h[1].attn.attend = torch.compile(model.h[1].attn.attend, backend=count)
    compiled = torch.compile(model, backend=count) if way == "wrapped" else model
    found = overt.trace(compiled, IDS)
    assert not calls, "nothing was compiled"
    assert torch.equal(torch.stack(found.maps), torch.stack(want))
    with torch.no_grad():
        compiled(IDS)
    assert calls, "it is compiled as before"


def state(model: nn.Module) -> Any:
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    modes = _get_current_function_mode_stack()
    return hooks, modes, [m.training for m in model.modules()], torch._guards.TracingContext.try_get()


def test_nothing_is_left_behind_even_after_an_error() -> None:
    model = Text(MinAttention).train()
    model.h[0].eval()
    before = state(model)
    overt.trace(model, IDS)
    assert state(model) == before

    def fail(*_: Any) -> None:
        raise RuntimeError("in the middle")

    handle = model.h[1].mlp.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="in the middle"):
        overt.trace(model, IDS)
    handle.remove()
    assert state(model) == before
    assert before[1] == []
    assert overt.trace(model, IDS).paths == ["h.0.attn", "h.1.attn", "h.2.attn"]


def test_outputs_are_those_of_the_model() -> None:
    for attention in (NanoAttention, MinAttention, other.JoinedAttention):
        model = Text(attention)
        seen: list[Tensor] = []
        with torch.no_grad():
            want = model(IDS)
        overt.trace(model, IDS, output=lambda result, seen=seen: seen.append(result) or result)
        torch.testing.assert_close(seen[0], want)


def test_token_ids_are_explained_whatever_their_argument_is_called() -> None:
    model = Text(MinAttention)
    traced = overt.trace(model, IDS, output=lambda result: result)
    found = traced.blankout(unk=0, queries=-1, target=3)
    with torch.no_grad():
        changed = IDS.clone()
        changed[:, 2] = 0
        plain, other_one = (model(ids)[:, -1].double().softmax(dim=-1)[:, 3] for ids in (IDS, changed))
    torch.testing.assert_close(found[:, 0, 0, 2], plain - other_one, atol=1e-6, rtol=1e-4)
    assert (traced.gradients(queries=-1) > 0).all()


def test_threads_take_turns_and_leave_each_other_alone() -> None:
    models = [Text(NanoAttention), Text(MinAttention)]
    want = [overt.trace(model, IDS).maps[2] for model in models]

    def work(number: int) -> bool:
        model = models[number % 2]
        if number % 3 == 0:
            with torch.no_grad():
                model(IDS)  # beside the trace of another thread
        return torch.equal(overt.trace(model, IDS).maps[2], want[number % 2])

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(16)))


class Own(nn.Module):
    """A layer with Overt's attention."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = MultiheadAttention(16, 4, batch_first=True)

    def forward(self, input: Tensor) -> Tensor:
        mixed: Tensor = self.attend(input, input, input, need_weights=False)[0]
        return input + mixed


@pytest.mark.parametrize("name", ["torch", "ours", "attached", "recognised", "transformers"])
def test_a_thread_that_does_not_trace_is_neither_seen_nor_changed(name: str) -> None:
    """It is in the middle of the model while a trace begins, and leaves it while the trace ends."""
    model: nn.Module = Text(NanoAttention)
    given: dict[str, Any] = {"idx": IDS}
    if name == "torch":
        layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
        model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        given = {"src": torch.randn(2, 7, 16)}
    elif name == "ours":
        model, given = nn.Sequential(Own(), Own()), {"input": torch.randn(2, 7, 16)}
    elif name != "recognised":
        family = families.BY_NAME["Llama"]
        model, given = family.make(), families.inputs_of(family)
        if name == "attached":
            overt.attach(model, overt.Bayesian())
    model.eval()
    begun, traced = threading.Event(), threading.Event()
    calls: list[CapturedAttention] = []
    parts = [module for path, module in model.named_modules() if path.rpartition(".")[2] == "0"]

    def wait(*_: Any) -> None:
        if threading.current_thread().name.startswith("other") and not begun.is_set():
            begun.set()
            assert traced.wait(60)

    def run() -> Any:
        with torch.no_grad():
            found = model(**given)
        return found if isinstance(found, Tensor) else found[0]

    want = run()
    handle = parts[0].register_forward_hook(wait)
    with ThreadPoolExecutor(1, thread_name_prefix="other") as pool:
        other_run = pool.submit(run)
        assert begun.wait(60)
        with watching(model, calls.append):
            traced.set()
            torch.testing.assert_close(other_run.result(), want, atol=1e-6, rtol=1e-5)
            torch.testing.assert_close(pool.submit(run).result(), want, atol=1e-6, rtol=1e-5)
            assert not calls
            run()
            assert calls
    handle.remove()


def test_parts_that_are_not_known_are_recognised_beside_those_that_are() -> None:
    """torch's own layers below, another's above."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(other.WIDTH, other.HEADS, 24, batch_first=True)
            self.below = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            self.above = nn.ModuleList([Block(MinAttention(causal=False)) for _ in range(2)])
            other.spread(self)

        def forward(self, x: Tensor) -> Tensor:
            x = self.below(x)
            for block in self.above:
                x = block(x)
            return x

    model, x = Both(), torch.randn(2, 5, other.WIDTH)
    with pytest.raises(ValueError, match=r"several stacks .* 'below\.layers', 'above'"):
        overt.trace(model, x)
    traced = overt.trace(model, x, stack="above", heads=True)
    with torch.no_grad():
        want = other.maps_by_hand(model.above, model.below(x))
    torch.testing.assert_close(traced.maps, want, atol=1e-5, rtol=1e-5)
    whole = overt.trace(model, x, stack={"encoder": ["below", "above"]})
    assert len(whole.maps) == 4


def test_low_precision_is_recognised() -> None:
    for attention in (NanoAttention, MinAttention):
        model = Text(attention).bfloat16()
        with torch.no_grad():
            q, k, _ = model.h[0].attn.projected(model.h[0].ln_1(model.embedded(IDS)))
        scores = (q.float() @ k.float().mT * 0.5).masked_fill(torch.ones(7, 7).triu(1).bool(), -torch.inf)
        found = overt.trace(model, IDS, heads=True).maps[0]
        torch.testing.assert_close(found, scores.softmax(dim=-1), atol=0.02, rtol=0.02)


def test_the_page_of_supported_models_has_its_table() -> None:
    page = (Path(__file__).parent.parent / "docs" / "support.md").read_text()
    assert support.OTHERS in page, "which `make support` writes"


def test_undispatched_families_are_recognised() -> None:
    import transformers as hf

    torch.manual_seed(0)
    config = hf.BloomConfig(hidden_size=32, n_layer=2, n_head=4, vocab_size=60, initializer_range=0.2)
    model = hf.BloomModel(config).eval()
    mask = torch.tensor([[1] * 7, [0] * 2 + [1] * 5])
    traced = overt.trace(model, {"input_ids": IDS, "attention_mask": mask}, heads=True)
    with torch.no_grad():
        want = model(IDS, attention_mask=mask, output_attentions=True).attentions
    assert traced.kind == "causal"
    real = mask.bool()[:, None, :, None].expand(-1, 4, -1, 7)
    for ours, theirs in zip(traced.maps, want, strict=True):
        torch.testing.assert_close(ours[real], theirs[real], atol=1e-6, rtol=1e-5)

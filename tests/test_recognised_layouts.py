"""Attention of any PyTorch model: layers that are run again, layouts, masks, and what is refused."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import other_models as other
import overt
from long_traces import states_of
from other_models import Block, NanoAttention, Text
from overt.tracing import running

IDS = torch.randint(0, other.WORDS, (2, 6), generator=torch.Generator().manual_seed(3))


def close_to(found: Any, want: Any) -> None:
    for ours, theirs in zip(found, want, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)


class InPlace(nn.Module):
    """A layer that changes its own argument, and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(other.WIDTH, other.WIDTH), 0
        self.losses: list[float] = []
        self.sizes: dict[int, int] = {}
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.losses.append(float(x.sum()))
        self.sizes[len(self.sizes)] = x.shape[1]
        self.seen += 1
        x += self.linear(x).tanh()
        return x


def activated(activation: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(other.WIDTH, 24), activation, nn.Linear(24, other.WIDTH))


ACTIVATIONS = {"hardswish": nn.Hardswish(inplace=True), "leaky": nn.LeakyReLU(0.3, inplace=True)}


@pytest.mark.parametrize("name", [*ACTIVATIONS, "entry"])
def test_layers_that_are_run_again_leave_the_model_alone(name: str) -> None:
    model = Text(lambda: NanoAttention(causal=False))
    if name == "entry":
        model.h.insert(1, InPlace())
    else:
        for block in model.h:
            block.mlp = activated(ACTIVATIONS[name])
        model.h.insert(1, nn.Sequential(nn.Linear(other.WIDTH, other.WIDTH), ACTIVATIONS[name]))
    other.spread(model)
    results: list[Tensor] = []
    with torch.no_grad():
        want, x, maps = model(IDS), model.embedded(IDS), []
        for layer in model.h:
            if isinstance(layer, Block):
                maps.append(other.weights_by_hand(layer.attn, layer.ln_1(x)))
            x = layer(x)
    if name == "entry":
        model.h[1].calls, model.h[1].seen[:] = 0, 0
        model.h[1].losses.clear()
        model.h[1].sizes.clear()
    traced = overt.trace(model, IDS, heads=True, output=lambda result: results.append(result) or result)
    torch.testing.assert_close(results[0], want)
    close_to(traced.maps, maps)
    if name == "entry":
        assert (model.h[1].calls, model.h[1].seen.tolist()) == (1, [1, 1]), "as if it had run once"
        assert (len(model.h[1].losses), model.h[1].sizes) == (1, {0: IDS.shape[1]})


def test_a_module_that_is_run_again_has_its_attributes_in_other_threads_too() -> None:
    module, x = nn.BatchNorm1d(4).eval(), torch.randn(3, 4)
    ended = threading.Event()

    def run() -> int:
        count = 0
        while not ended.is_set():
            module(x)
            count += 1
        return count

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(1) as pool:
            runs = pool.submit(run)
            try:
                for _ in range(4000):
                    with running.kept_as_it_is(module):
                        pass
            finally:
                ended.set()
            assert runs.result() > 0
    finally:
        sys.setswitchinterval(interval)


class Floats(nn.Module):
    """Layers over states that are given."""

    def __init__(self, attention: Any, layers: int = 2) -> None:
        super().__init__()
        self.h = nn.ModuleList([Block(attention()) for _ in range(layers)])
        other.spread(self)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.h:
            x = block(x)
        return x


class Joined(NanoAttention):
    """Batch and heads in one axis, in either order."""

    heads_first = False

    def attend(self, q: Tensor, k: Tensor, v: Tensor, _mask: Any) -> Tensor:
        shape = q.transpose(0, 1).shape if self.heads_first else q.shape
        turn = (lambda x: x.transpose(0, 1)) if self.heads_first else (lambda x: x)
        q, k, v = (turn(x).reshape(-1, *x.shape[2:]) for x in (q, k, v))
        return turn(((q @ k.mT * 0.5).softmax(dim=-1) @ v).view(shape))


class HeadsJoined(Joined):
    heads_first = True


class TokensFirst(NanoAttention):
    """fairseq: (token, batch, width)."""

    def forward(self, x: Tensor, _mask: Any = None) -> Tensor:
        q, k, v = (each.reshape(len(x), -1, 4).transpose(0, 1) for each in self.c_attn(x).chunk(3, dim=-1))
        mixed = (q @ k.mT * 0.5).softmax(dim=-1) @ v
        return self.c_proj(mixed.transpose(0, 1).reshape(x.shape))


class Turned(NanoAttention):
    """Heads before the batch."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, _mask: Any) -> Tensor:
        return super().attend(*(x.transpose(0, 1) for x in (q, k, v)), None).transpose(0, 1)


class Channels(NanoAttention):
    """XCiT: attention between channels."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, _mask: Any) -> Tensor:
        return F.scaled_dot_product_attention(q.mT, k.mT, v.mT).mT


class Patches(Floats):
    """PatchTST: variables in the batch, time in patches."""

    def __init__(self) -> None:
        super().__init__(NanoAttention)
        self.patch = nn.Linear(4, other.WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.patch(x.mT.reshape(-1, x.shape[1] // 4, 4)))


class Axial(NanoAttention):
    """Along one axis, then the other."""

    def forward(self, x: Tensor, _mask: Any = None) -> Tensor:
        x = x + super().forward(x)
        return super().forward(x.transpose(0, 1)).transpose(0, 1)


class RowsAndColumns(Text):
    """The MSA Transformer: sequences, then positions, are examples."""

    def forward(self, idx: Tensor) -> Tensor:
        x = self.embedded(idx)
        for block in self.h:
            x = block(x).transpose(0, 1)
        return x


SIZES = [(2, 6), (2, 8), (2, 4), (1, 4), (4, 4), (4, 6)]


@pytest.mark.parametrize("size", SIZES)
def test_batch_and_heads_are_told_apart(size: tuple[int, int]) -> None:
    x = torch.randn(*size, other.WIDTH, generator=torch.Generator().manual_seed(2))
    model = Floats(lambda: Joined(causal=False))
    close_to(overt.trace(model, x, heads=True).maps, other.maps_by_hand(model.h, x))
    model = Floats(lambda: HeadsJoined(causal=False))
    if size[0] == 1:
        close_to(overt.trace(model, x, heads=True).maps, other.maps_by_hand(model.h, x))
    else:
        with pytest.raises(ValueError, match="an order that is not known: trace one example at a time"):
            overt.trace(model, x)
    model, same = Floats(TokensFirst), Floats(lambda: NanoAttention(causal=False))
    close_to(overt.trace(model, x.transpose(0, 1), heads=True).maps, other.maps_by_hand(same.h, x))


CROSSED = {
    "heads first": (Text(Turned), IDS.repeat(2, 1), "an order that is not known"),
    "heads first, joined": (Text(HeadsJoined), IDS.repeat(2, 1), "an order that is not known"),
    "channels": (Text(Channels), IDS, "between channels, not tokens"),
    "as many channels as tokens": (Text(Channels), IDS[:, :4], "between channels, not tokens"),
    "patches": (Patches(), torch.randn(2, 16, 8), "regroups its batch .*a batch of 16 of other axes"),
    "rows and columns": (RowsAndColumns(NanoAttention), IDS.repeat(3, 1), "a batch of 6 of other axes"),
    "both axes": (Floats(Axial), torch.randn(3, 3, other.WIDTH), "its tokens for examples"),
}


@pytest.mark.parametrize("name", CROSSED)
def test_axes_that_are_not_examples_heads_and_tokens_are_refused(name: str) -> None:
    model, inputs, message = CROSSED[name]
    with pytest.raises(ValueError, match=message) as caught:
        overt.trace(model, inputs)
    assert "\n" not in str(caught.value)


def test_as_many_examples_as_heads_are_traced() -> None:
    ids = torch.randint(0, other.WORDS, (4, 4), generator=torch.Generator().manual_seed(4))
    for attention in (NanoAttention, other.MinAttention, other.EinsumAttention, other.TuneAttention):
        model = Text(attention)
        scale = 0.4 if attention is other.TuneAttention else 0.5
        want = other.maps_by_hand(model.h, model.embedded(ids), scale)
        close_to(overt.trace(model, ids, heads=True).maps, want)


class Latents(Text):
    """Perceiver: a few latents ask about the tokens, then attend to each other."""

    def __init__(self) -> None:
        super().__init__(lambda: NanoAttention(causal=False))
        self.latents = nn.Parameter(torch.randn(1, 4, other.WIDTH))
        self.across = other.TuneAttention(causal=False)
        other.spread(self)

    def forward(self, idx: Tensor) -> Tensor:
        z = self.latents.expand(len(idx), -1, -1)
        z = z + self.across(z, self.embedded(idx))
        for block in self.h:
            z = block(z)
        return z


def test_latents_are_not_taken_for_tokens() -> None:
    with pytest.raises(ValueError, match=r"h\.0\.attn reads what across wrote.*seen: across, h\.0\.attn"):
        overt.trace(Latents(), IDS)
    assert overt.trace(Latents(), IDS, stack="h").tokens[0] == ["#0", "#1", "#2", "#3"], "if asked for"


def test_names_of_added_tokens_are_not_made_up() -> None:
    class Pooled(Text):
        def embedded(self, idx: Tensor) -> Tensor:
            x = super().embedded(idx)
            return torch.cat([x.new_ones(len(x), 1, other.WIDTH), x], dim=1)

    traced = overt.trace(Pooled(NanoAttention), IDS)
    assert traced.tokens[0] == [f"#{number}" for number in range(7)]


class Masked(NanoAttention):
    """A softmax of scores that are masked in one of several ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
        later = torch.ones(q.shape[-2], q.shape[-2]).triu(1)
        scores = q @ k.mT * 0.5
        if self.way == "added":
            scores = scores + later * -10000.0
            if mask is not None:
                scores = scores + (1 - mask.float())[:, None, None] * -10000.0
            return scores.softmax(dim=-1) @ v
        if self.way == "keys first":
            scores = (k @ q.mT * 0.5).masked_fill(later.mT.bool(), -torch.inf)
            if mask is not None:
                scores = scores.masked_fill(~mask[:, None, :, None], -1e9)
            return torch.einsum("bhkq,bhkd->bhqd", scores.softmax(dim=-2), v)
        if self.way == "heads last":
            scores = scores.permute(0, 2, 3, 1).masked_fill(later.bool()[:, :, None], -torch.inf)
            if mask is not None:
                scores = scores.masked_fill(~mask[:, None, :, None], -torch.inf)
            return torch.einsum("bqkh,bhkd->bhqd", scores.softmax(dim=2), v)
        seen = 1 - later if mask is None else (1 - later) * mask[:, None, None].float()
        weights = scores.softmax(dim=-1)
        if self.way == "multiplied":
            return (weights * seen) @ v
        return torch.where(seen.bool(), weights, 0.0) @ v


LEFT = torch.tensor([[True] * 4, [False] + [True] * 3])  # as many tokens as heads


@pytest.mark.parametrize("way", ["added", "keys first", "heads last", "multiplied", "where"])
def test_masks_of_a_softmax_are_seen_in_every_layout(way: str) -> None:
    model, ids = Text(lambda: Masked(way)), IDS[:, :4]
    traced = overt.trace(model, ids)
    assert (traced.kind, traced.main_queries()) == ("causal", [3, 3])
    right = LEFT.flip(1)
    for mask in (LEFT, right):
        traced = overt.trace(model, {"idx": ids, "mask": mask})
        assert torch.equal(traced.mask, mask)
    assert traced.main_queries() == [3, 2]


def test_finite_masks_of_torchs_attention_hide() -> None:
    layer = nn.TransformerEncoderLayer(other.WIDTH, other.HEADS, 24, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    hidden = torch.full((6, 6), -1e9).triu(1)
    padding = torch.zeros(2, 6).masked_fill(torch.arange(6) > torch.tensor([[5], [3]]), -1e9)
    inputs = {"src": torch.randn(2, 6, other.WIDTH), "mask": hidden, "src_key_padding_mask": padding}
    traced = overt.trace(model, inputs)
    assert (traced.kind, traced.main_queries()) == ("causal", [5, 3])


class Sloped(NanoAttention):
    """MPT: a bias that falls with each token, counted from the last; here as steep in every head."""

    SLOPE = 400.0  # over 30 tokens, as 0.5 over 24,000

    def __init__(self, way: str, hidden: float = float("-inf")) -> None:
        super().__init__()
        self.way, self.hidden = way, hidden

    def bias(self, tokens: int) -> Tensor:
        falling = (torch.arange(tokens) - tokens + 1) * self.SLOPE
        later = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
        return falling.expand(tokens, -1).masked_fill(later, self.hidden)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, _mask: Any) -> Tensor:
        bias = self.bias(q.shape[2])
        if self.way == "torch":
            return F.scaled_dot_product_attention(q, k, v, bias)
        return (q @ k.mT * 0.5 + bias).softmax(dim=-1) @ v


@pytest.mark.parametrize("hidden", [float("-inf"), -1e9, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("way", ["torch", "softmax"])
def test_tokens_with_a_very_negative_bias_are_no_padding(way: str, hidden: float) -> None:
    """Only differences of scores count, and the first token is all that its own query sees."""
    model: Any = Text(lambda: Sloped(way, hidden))
    ids = torch.arange(60).view(2, 30) % other.WORDS
    traces = [overt.trace(model, ids)]
    if way == "torch":
        traces.append(states_of(model, ids, memory=4000))
    with torch.no_grad():
        block = model.h[0]
        q, k, _ = block.attn.projected(block.ln_1(model.embedded(ids)))
    scores = q.double() @ k.double().mT * 0.5 + block.attn.bias(30)
    want = scores.softmax(dim=-1).mean(dim=1)
    for traced in traces:
        assert traced.mask.all()
        assert traced.kind == "causal"
        torch.testing.assert_close(traced.raw(range(30))[:, 0], want, atol=1e-5, rtol=0.0)
        torch.testing.assert_close(traced.rollout(range(30)).sum(dim=-1), torch.ones(2, 3, 30).double())


class Known(nn.Module):
    """torch's own attention, as a module of one argument."""

    def __init__(self, causal: bool = False) -> None:
        super().__init__()
        self.inside = nn.MultiheadAttention(other.WIDTH, other.HEADS, batch_first=True)
        self.norm = nn.LayerNorm(other.WIDTH) if causal else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        mixed: Tensor = self.inside(self.norm(x), x, x)[0]
        return mixed


class Beside(nn.Module):
    """Two attentions that read the same."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Known(), Known()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.a(x) + self.b(x)


class Twice(nn.Module):
    """One tower for two inputs."""

    def __init__(self, tower: Any) -> None:
        super().__init__()
        self.tower = tower

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return sum(getattr(y, "last_hidden_state", y) for y in (self.tower(a), self.tower(b)))  # type: ignore


def bert() -> nn.Module:
    import transformers as hf

    sizes = {"hidden_size": 16, "num_attention_heads": 4, "intermediate_size": 16, "num_hidden_layers": 2}
    return hf.BertModel(hf.BertConfig(vocab_size=20, **sizes))


@pytest.mark.parametrize("name", ["beside", "torch", "transformers"])
def test_calls_that_were_not_recognised_must_form_a_chain_too(name: str) -> None:
    if name == "beside":
        model: nn.Module = Text(Known)
        model.h[1].attn = Beside()
        inputs: Any = IDS
    elif name == "torch":
        model, inputs = Twice(Text(Known)), {"a": IDS, "b": IDS.flip(1)}
    else:
        model, inputs = Twice(bert()), {"a": IDS, "b": IDS.flip(1)}
    with pytest.raises(ValueError, match=r"does not read what .* wrote, so they are no layers of one chain"):
        overt.trace(model, inputs)


def test_parts_of_transformers_are_traced_in_any_model() -> None:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bert = bert()

        def forward(self, idx: Tensor) -> Tensor:
            states: Tensor = self.bert(idx).last_hidden_state
            return states

    assert len(overt.trace(Wrapped(), IDS).maps) == 2


def test_queries_that_are_normalised_alone_are_still_of_the_same_tokens() -> None:
    model = Text(lambda: Known(causal=True), layers=2)
    traced = overt.trace(model, IDS, heads=True)
    assert traced.kind == "encoder"
    with torch.no_grad():
        x = model.h[0].ln_1(model.embedded(IDS))
        inside = model.h[0].attn.inside
        want = inside(model.h[0].attn.norm(x), x, x, average_attn_weights=False)[1]
    close_to(traced.maps[:1], [want])


@pytest.mark.parametrize("way", ["first", "beside"])
def test_cross_attention_comes_after_self_attention(way: str) -> None:
    class Other(other.Decoding):
        def forward(self, x: Tensor, memory: Tensor) -> Tensor:
            if way == "first":
                x = x + self.across(self.ln_2(x), memory)
                return x + self.own(self.ln_1(x))
            return x + self.own(self.ln_1(x)) + self.across(self.ln_2(x), memory)

    model = other.Pair()
    for layer in model.decoder:
        layer.__class__ = Other
    with pytest.raises(
        ValueError, match=r"decoder\.0\.across does not read what decoder\.0\.own wrote: only layers of self"
    ):
        overt.trace(model, {"source": IDS, "target": IDS[:, :5]})


class Gated(NanoAttention):
    """Attention, and a softmax that is something else."""

    def __init__(self, way: str) -> None:
        super().__init__(causal=False)
        self.way, self.router = way, nn.Linear(other.WIDTH, 3)
        self.codes = nn.Parameter(torch.randn(5, other.WIDTH))
        self.experts = nn.ModuleList([nn.Linear(other.WIDTH, other.WIDTH) for _ in range(3)])

    def projected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().projected(x)
        return (q * other.heads_of(x).softmax(dim=-1), k, v) if self.way == "queries" else (q, k, v)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, _mask: Any) -> Tensor:
        return (q @ k.mT * 0.5).softmax(dim=-1) @ v

    def forward(self, x: Tensor, mask: Any = None) -> Tensor:
        y = super().forward(x, mask)
        if self.way == "codes":
            codes = F.normalize(self.codes, dim=-1)
            y = y + (x @ codes.T).softmax(dim=-1) @ codes
        if self.way == "experts":
            each = torch.stack([expert(x) for expert in self.experts], dim=2)
            y = y + (self.router(x).softmax(dim=-1).unsqueeze(-2) @ each).squeeze(-2)
        return y


@pytest.mark.parametrize("tokens", [6, 4])
@pytest.mark.parametrize("way", ["queries", "codes", "experts"])
def test_gates_codes_and_experts_are_not_taken_for_attention(way: str, tokens: int) -> None:
    model, ids = Text(lambda: Gated(way)), IDS[:, :tokens]
    traced = overt.trace(model, ids, heads=True)
    assert traced.kind == "encoder"
    close_to(traced.maps, other.maps_by_hand(model.h, model.embedded(ids)))


class Linear(NanoAttention):
    """Linear attention: a softmax over tokens for each channel, another over channels."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, _mask: Any) -> Tensor:
        return q.softmax(dim=-1) @ (k.softmax(dim=-2).mT @ v)


@pytest.mark.parametrize("tokens", [6, 4])
def test_linear_attention_is_refused(tokens: int) -> None:
    for ids in (IDS, IDS[:1]):
        with pytest.raises(ValueError, match="0 self-attentions and 3 cross-attentions"):
            overt.trace(Text(Linear), ids[:, :tokens])


@pytest.mark.parametrize("cast", [False, True], ids=["low", "cast back"])
def test_weights_under_autocast_are_those_of_its_queries_and_keys(cast: bool) -> None:
    class Kept(NanoAttention):
        def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
            q, k = (x.float() if cast else x for x in (q, k))
            self.kept = q, k
            return super().attend(q, k, v.float() if cast else v, mask)

    model = Text(Kept)
    for block in model.h:
        block.attn.c_attn.weight.data *= 8  # scores of hundreds
    with torch.autocast("cpu", torch.bfloat16):
        traced = overt.trace(model, IDS, heads=True)
    for cells, block in zip(traced.maps, model.h, strict=True):
        q, k = (x.bfloat16().double() for x in block.attn.kept)
        scores = (q @ k.mT * 0.5).masked_fill(torch.ones(6, 6).triu(1).bool(), -torch.inf)
        assert scores.max() > 100
        torch.testing.assert_close(cells, scores.softmax(dim=-1).float(), atol=1e-5, rtol=1e-5)


class Convolved(nn.Module):
    def __init__(self, kernel: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(other.WIDTH, other.WIDTH, kernel, padding=kernel // 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x.mT).mT


class Shifted(nn.Module):
    """A convolution of tokens that were padded outside it."""

    def __init__(self) -> None:
        super().__init__()
        self.beside = nn.Conv1d(other.WIDTH, other.WIDTH, 2, dilation=3)

    def forward(self, x: Tensor) -> Tensor:
        return self.beside(F.pad(x.mT, (3, 0))).mT


class TokenMixer(nn.Module):
    """MLP-Mixer: a matrix over tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.mT).mT


class Conformer(Block):
    """A block with something beside attention."""

    def __init__(self, beside: nn.Module) -> None:
        super().__init__(NanoAttention(causal=False))
        self.beside = beside

    def forward(self, x: Tensor, *others: Any) -> Tensor:
        return super().forward(x + self.beside(x), *others)


class Recurrent(Text):
    """A recurrent network between layers."""

    def __init__(self, after: bool) -> None:
        super().__init__(NanoAttention)
        self.gru, self.after = nn.GRU(other.WIDTH, other.WIDTH, batch_first=True), after
        other.spread(self)

    def forward(self, idx: Tensor) -> Tensor:
        x = self.gru(self.embedded(idx))[0]
        for block in self.h:
            x = block(x) if self.after else self.gru(block(x))[0]
        return self.gru(x)[0]


BESIDE = [Convolved(3), nn.Conv1d(6, 6, 1), TokenMixer(), Shifted()]


@pytest.mark.parametrize("beside", BESIDE, ids=lambda module: type(module).__name__)
def test_mixing_beside_attention_is_refused(beside: nn.Module) -> None:
    model = Text(NanoAttention, layers=2)
    model.h[1] = other.spread(Conformer(beside))
    with pytest.raises(ValueError, match=r"^h\.1\.beside mixes tokens without attention") as caught:
        overt.trace(model, IDS)
    assert "\n" not in str(caught.value)


def test_modules_that_leave_each_token_to_itself_are_not() -> None:
    class Scaled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * torch.linspace(0.5, 1.5, x.shape[1])[:, None]  # by position

    for beside in (Convolved(1), Scaled(), nn.Sequential(nn.Linear(other.WIDTH, other.WIDTH), nn.Tanh())):
        model = Text(NanoAttention, layers=2)
        model.h[1] = other.spread(Conformer(beside))
        assert len(overt.trace(model, IDS).maps) == 2


def test_mixing_between_layers_is_refused_but_not_before_or_after_them() -> None:
    with pytest.raises(ValueError, match=r"^gru mixes tokens without attention"):
        overt.trace(Recurrent(after=False), IDS)
    assert len(overt.trace(Recurrent(after=True), IDS).maps) == 3


class Padded(nn.Module):
    """A model whose attention_mask is given to its attention in some way."""

    def __init__(self, use: Any) -> None:
        super().__init__()
        self.text, self.use = Text(lambda: NanoAttention(causal=False)), use

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        mask = self.use(attention_mask)
        logits: Tensor = self.text(input_ids, None if mask is None else mask[:, None, None])
        return logits


def test_a_mask_means_what_the_model_makes_of_it() -> None:
    real = torch.tensor([[True] * 6, [True] * 4 + [False] * 2])
    plain = overt.trace(Padded(lambda mask: mask), {"input_ids": IDS, "attention_mask": real})
    other_way = overt.trace(Padded(lambda mask: ~mask), {"input_ids": IDS, "attention_mask": ~real})
    ignoring = overt.trace(Padded(lambda _mask: None), {"input_ids": IDS, "attention_mask": real})
    for traced in (plain, other_way, ignoring):
        assert torch.equal(traced.mask, real)
    assert torch.equal(plain.rollout(), other_way.rollout())
    with pytest.raises(
        ValueError, match=r"attention_mask must be 1 at tokens and 0 at padding.*ones, 1 are at"
    ) as e:
        overt.trace(Padded(lambda mask: mask.roll(1, dims=1)), {"input_ids": IDS, "attention_mask": real})
    assert "\n" not in str(e.value)


def test_padding_of_a_target_is_found() -> None:
    class Translator(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(other.WORDS, other.WIDTH)
            self.net = nn.Transformer(other.WIDTH, 4, 1, 1, 24, batch_first=True)

        def forward(self, source: Tensor, target: Tensor, padding: Tensor) -> Tensor:
            later = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
            pair = self.words(source), self.words(target)
            states: Tensor = self.net(*pair, tgt_mask=later, tgt_key_padding_mask=padding)
            return states

    padding = torch.tensor([[0.0] * 5, [0.0] * 3 + [-torch.inf] * 2])
    traced = overt.trace(Translator(), {"source": IDS, "target": IDS[:, :5], "padding": padding})
    assert torch.equal(traced.mask[:, 6:], padding == 0)
    assert traced.main_queries() == [4, 2]


class Bare(nn.Module):
    """Attention without projections."""

    def forward(self, x: Tensor) -> Tensor:
        return (x @ x.mT * 0.25).softmax(dim=-1) @ x


class NonLocal(nn.Module):
    """SAGAN: attention over the pixels of what a convolution made."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Conv2d(other.WIDTH, other.WIDTH, 1) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each(x).flatten(2) for each in (self.q, self.k, self.v))
        self.kept = (q.mT @ k).softmax(dim=-1)
        return x + (v @ self.kept.mT).view(x.shape)


def test_self_attention_without_projections_or_by_convolutions_is_self_attention() -> None:
    model = Text(Bare)
    traced = overt.trace(model, IDS)
    with torch.no_grad():
        x = model.h[0].ln_1(model.embedded(IDS))
    assert traced.kind == "encoder"
    close_to(traced.maps[:1], [(x @ x.mT * 0.25).softmax(dim=-1)])
    pixels = other.spread(nn.Sequential(nn.Conv2d(3, other.WIDTH, 4, 4), NonLocal(), NonLocal()))
    traced = overt.trace(pixels, torch.randn(2, 3, 8, 12))
    assert (traced.kind, traced.paths) == ("encoder", ["1", "2"])
    close_to(traced.maps, [layer.kept for layer in list(pixels)[1:]])


class Written(NanoAttention):
    """A softmax and a product, written in some way."""

    def __init__(self, way: str) -> None:
        super().__init__(causal=False)
        self.way = way

    def attend(self, q: Tensor, k: Tensor, v: Tensor, _mask: Any) -> Tensor:
        scores = q @ k.mT * 0.5
        if self.way == "special":
            return torch.special.softmax(scores, dim=-1) @ v
        if self.way == "right":
            return v.__rmatmul__(scores.softmax(dim=-1))
        if self.way == "dropout":
            return F.dropout(scores.softmax(dim=-1), 0.5) @ v
        if self.way == "off":
            return F.dropout(scores.softmax(dim=-1), 0.5, training=self.training) @ v
        return torch.vmap(lambda q, k, v: (q @ k.mT).softmax(dim=-1) @ v)(q, k, v)


@pytest.mark.parametrize("way", ["special", "right", "off"])
def test_other_ways_to_write_a_softmax_are_known(way: str) -> None:
    model = Text(lambda: Written(way))
    close_to(overt.trace(model, IDS, heads=True).maps, other.maps_by_hand(model.h, model.embedded(IDS)))


@pytest.mark.parametrize(("way", "message"), [("dropout", r"\(p=0\.5\)"), ("vmap", "inside torch.vmap")])
def test_refusals_name_what_came(way: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        overt.trace(Text(lambda: Written(way)), IDS)
    assert "\n" not in str(caught.value)


def test_a_tower_that_runs_twice_is_to_be_traced_by_itself() -> None:
    model = Twice(Text(NanoAttention))
    with pytest.raises(ValueError, match="trace a module that runs more than once by itself"):
        overt.trace(model, {"a": IDS, "b": IDS.flip(1)})
    assert len(overt.trace(model.tower, IDS).maps) == 3


def test_layers_that_are_attributes_are_ordered_by_what_they_read() -> None:
    class Named(Text):
        def __init__(self) -> None:
            super().__init__(NanoAttention)
            self.first, self.second, self.third = self.h
            del self.h

        def forward(self, idx: Tensor) -> Tensor:
            return self.third(self.second(self.first(self.embedded(idx))))

    model = Named()
    traced = overt.trace(model, IDS, heads=True)
    assert traced.paths == ["first.attn", "second.attn", "third.attn"]
    layers = [model.first, model.second, model.third]
    close_to(traced.maps, other.maps_by_hand(layers, model.embedded(IDS)))


def test_inputs_that_a_forward_has_no_argument_for_are_refused_in_one_line() -> None:
    class Unnamed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.text = Text(NanoAttention)

        def forward(self, *args: Tensor) -> Tensor:
            logits: Tensor = self.text(*args)
            return logits

    class Only(Unnamed):
        def forward(self, *, words: Tensor) -> Tensor:
            return super().forward(words)

    with pytest.raises(
        ValueError, match=r"Text has no attention_mask to hide padding .*give texts of one length"
    ):
        overt.trace(Text(NanoAttention), [[1, 2, 3, 4], [5, 6]])
    with pytest.raises(ValueError, match=r"Unnamed has no argument input_ids \(its forward takes \*args"):
        overt.trace(Unnamed(), IDS)
    with pytest.raises(
        ValueError, match=r"Pair needs target as well: give a mapping of its arguments, {'source'"
    ):
        overt.trace(other.Pair(), IDS)
    assert len(overt.trace(Only(), IDS).maps) == 3


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_axes_are_known_beyond_a_module_that_cannot_be_seen() -> None:
    class Fused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.run = torch.jit.trace(lambda x: x / x.norm(dim=-1, keepdim=True), torch.ones(1, 2, 3))

        def forward(self, x: Tensor) -> Tensor:
            normed: Tensor = self.run(x)
            return normed

    model, ids = Text(NanoAttention), IDS.repeat(2, 1)
    for block in model.h:
        block.ln_1 = Fused()
    with torch.inference_mode():
        close_to(overt.trace(model, ids, heads=True).maps, other.maps_by_hand(model.h, model.embedded(ids)))


class CausalLayer(nn.Module):
    """torch's attention, as a module or as a function, under a causal mask and padding."""

    def __init__(self, functional: bool) -> None:
        super().__init__()
        self.inside, self.functional = nn.MultiheadAttention(other.WIDTH, other.HEADS), functional

    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        states, inside = x.transpose(0, 1), self.inside
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        if not self.functional:
            options = {"need_weights": False, "key_padding_mask": hidden, "attn_mask": later}
            return x + inside(states, states, states, **options)[0].transpose(0, 1)
        mixed, _ = F.multi_head_attention_forward(
            states, states, states, other.WIDTH, other.HEADS, inside.in_proj_weight, inside.in_proj_bias,
            None, None, False, 0.0, inside.out_proj.weight, inside.out_proj.bias, False, hidden, False, later,
        )  # fmt: skip
        return x + mixed.transpose(0, 1)


class CausalLayers(nn.Module):
    def __init__(self, functional: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(CausalLayer(functional) for _ in range(3))

    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, hidden)
        return x


@pytest.mark.parametrize("functional", [False, True], ids=["module", "function"])
def test_padding_on_the_left_of_torchs_causal_attention_leaves_no_nan(functional: bool) -> None:
    """Padding sees no key, and torch's weights are then NaN, but what a model goes on with is not."""
    model: Any = other.spread(CausalLayers(functional))
    x = torch.randn(2, 6, other.WIDTH)
    hidden = torch.tensor([[False] * 6, [True] * 2 + [False] * 4])
    inputs: list[Tensor] = []
    handles = [
        layer.register_forward_pre_hook(lambda _, args: inputs.append(args[0].detach()))
        for layer in model.layers
    ]
    output = model(x, hidden)  # with gradients, torch does not take its fast path
    for handle in handles:
        handle.remove()
    assert output.isfinite().all()
    given = {"x": x, "hidden": hidden}
    traces = overt.trace(model, given, heads=True), states_of(model, given)
    seen = torch.ones(6, 6, dtype=torch.bool).tril() & ~hidden[:, None, None, :]
    for number, states in enumerate(inputs):
        attention = model.layers[number].inside
        q, k = (
            other.heads_of(F.linear(states, weight, bias)).double()
            for weight, bias in zip(
                attention.in_proj_weight.chunk(3)[:2], attention.in_proj_bias.chunk(3)[:2], strict=True
            )
        )
        scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~seen, float("-inf"))
        want = scores.softmax(dim=-1).nan_to_num().float()
        torch.testing.assert_close(traces[0].maps[number], want, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(traces[1].maps[number], want.mean(dim=1), atol=1e-5, rtol=1e-4)
    assert [trace.kind for trace in traces] == ["causal", "causal"]
    assert all(torch.equal(trace.mask, ~hidden) for trace in traces)

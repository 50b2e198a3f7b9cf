"""Any PyTorch model over the budget: rows from queries and keys, against dense maps of the same model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

import other_models as other
import overt
from long_traces import BYTES, states_of
from other_models import Block, Decoding, MinAttention, NanoAttention, Pair, Text, TuneAttention
from overt.models.agreement import AgreementClassifier
from overt.tracing import read
from overt.tracing.asked import Sight
from overt.tracing.asking import sight_of_torch_in_parts
from overt.tracing.capture import CapturedAttention, watching
from overt.tracing.levels import held_of
from overt.tracing.masks import sight_of

IDS = torch.randint(0, other.WORDS, (2, 9), generator=torch.Generator().manual_seed(3))
REAL = torch.arange(9) < torch.tensor([[9], [6]])
LOWER = torch.ones(9, 9, dtype=torch.bool).tril()


def draws(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Repeated(TuneAttention):
    """Grouped-query heads whose keys are repeated by the model, as in older code."""

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        mixed = F.scaled_dot_product_attention(*self.projected(x, y), is_causal=self.causal, scale=0.4)
        return self.output_proj(mixed.transpose(1, 2).flatten(2))


class Functional(nn.Module):
    """torch's functional attention, as fairseq calls it."""

    def __init__(self, need_weights: bool = False) -> None:
        super().__init__()
        self.inside, self.need = nn.MultiheadAttention(other.WIDTH, other.HEADS), need_weights

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        y, inside = x.transpose(0, 1), self.inside
        mixed, weights = F.multi_head_attention_forward(
            y, y, y, other.WIDTH, other.HEADS, inside.in_proj_weight, inside.in_proj_bias, None, None, False,
            0.0, inside.out_proj.weight, inside.out_proj.bias, False, padding, self.need,
        )  # fmt: skip
        assert (weights is None) == (not self.need)
        return mixed.transpose(0, 1)


class Flex(NanoAttention):
    """FlexAttention, under a mask of its own."""

    def __init__(self, score_mod: Any = None, seen: Any = None, aux: bool = False) -> None:
        super().__init__()
        self.score_mod, self.aux = score_mod, aux
        self.seen = seen or create_block_mask(lambda _b, _h, i, j: i >= j, None, None, 9, 9, device="cpu")

    def attend(self, q: Tensor, k: Tensor, v: Tensor, _mask: Any) -> Tensor:
        options: dict[str, Any] = {"score_mod": self.score_mod, "block_mask": self.seen}
        if self.aux:
            options["return_aux"] = AuxRequest(lse=True)
        mixed = flex_attention(q, k, v, **options)
        found: Tensor = mixed[0] if self.aux else mixed
        return found


def alibi(score: Tensor, _b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return score - 0.1 * (h + 1) * (i - j)


def padded(b: Tensor, _h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (i >= j) & (j < 9 - 3 * b)


def by_heads(_b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (i - j).abs() <= h + 1


def flex(mask_mod: Any, batch: int | None, heads: int | None) -> Any:
    return text(lambda: Flex(seen=create_block_mask(mask_mod, batch, heads, 9, 9, device="cpu")))


class Sums(Pair):
    """An encoder–decoder, all of whose attention is torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = nn.ModuleList(
            [Decoding(NanoAttention(), TuneAttention(causal=False)) for _ in range(2)]
        )
        other.spread(self)


class TorchText(nn.Module):
    """Layers of torch's own MultiheadAttention."""

    def __init__(self, batch_first: bool = True, causal: bool = False) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 4, 24, batch_first=batch_first)
        self.body = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.turn, self.causal = not batch_first, causal
        other.spread(self)

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        x = x.transpose(0, 1) if self.turn else x
        hidden = mask if self.causal else None
        found: Tensor = self.body(x, hidden, padding, is_causal=self.causal)
        return found.transpose(0, 1) if self.turn else found


class TorchPair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.Transformer(16, 2, 2, 2, 24, batch_first=True)
        other.spread(self)

    def forward(self, source: Tensor, target: Tensor, padding: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1], dtype=torch.bool)
        mixed: Tensor = self.transformer(source, target, tgt_mask=mask, src_key_padding_mask=padding)
        return mixed


def text(attention: Any = NanoAttention) -> Any:
    return lambda: Text(attention)


def own(**options: Any) -> Any:
    return lambda: AgreementClassifier(20, options.pop("mechanisms", ()), layers=3, width=16, heads=4)


X, Y = draws(7, 2, 9, 16), draws(8, 2, 5, 16)
LEAST = torch.zeros(9, 9).masked_fill(~LOWER, torch.finfo(torch.float32).min)
CASES: dict[str, tuple[Any, Any]] = {
    "causal": (text(), IDS),
    "all": (text(lambda: NanoAttention(causal=False)), IDS),
    "padding": (text(), {"idx": IDS, "mask": REAL[:, None, None, :]}),
    "causal and padding": (text(), {"idx": IDS, "mask": LOWER & REAL[:, None, None, :]}),
    "left padding": (text(), {"idx": IDS, "mask": LOWER & REAL.flip(1)[:, None, None, :]}),
    "a window": (text(), {"idx": IDS, "mask": LOWER & ~LOWER.tril(-3)}),
    "lower right": (text(), {"idx": IDS, "mask": causal_lower_right(9, 9)}),
    "the least number": (text(), {"idx": IDS, "mask": LEAST}),
    "a bias of heads": (text(), {"idx": IDS, "mask": draws(6, 1, 4, 9, 9)}),
    "a bias and padding": (text(), {"idx": IDS, "mask": draws(5, 2, 1, 9, 9) + LEAST.where(REAL[1], -1e30)}),
    "grouped-query heads": (text(TuneAttention), IDS),
    "repeated keys": (text(Repeated), IDS),
    "flex": (text(Flex), IDS),
    "flex, padding": (flex(padded, 2, None), IDS),
    "flex, a bias by heads": (flex(by_heads, None, 4), IDS),
    "encoder–decoder": (Sums, {"source": IDS, "target": IDS.flip(1)[:, :5]}),
    "functional": (text(Functional), {"idx": IDS, "mask": ~REAL}),
    "functional, with weights": (text(lambda: Functional(True)), {"idx": IDS, "mask": ~REAL}),
    "torch": (TorchText, {"x": X, "padding": ~REAL}),
    "torch, causal": (lambda: TorchText(causal=True), X),
    "torch, causal and padding": (
        lambda: TorchText(causal=True),
        {"x": X, "padding": torch.zeros(2, 9).masked_fill(~REAL, -torch.inf)},
    ),
    "torch, tokens first": (lambda: TorchText(batch_first=False), {"x": X, "padding": ~REAL}),
    "torch's encoder–decoder": (TorchPair, {"source": X, "target": Y, "padding": ~REAL}),
    "own": (own(), {"input_ids": IDS, "attention_mask": REAL.long()}),
    "own, Bayesian": (own(mechanisms=[overt.Bayesian()]), {"input_ids": IDS, "attention_mask": REAL.long()}),
    "own decoder": (lambda: overt.Decoder(16, 2, 4, cross=True), {"x": Y, "memory": X}),
}


def made(name: str, dtype: torch.dtype) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    make, inputs = CASES[name]
    model = make().to(dtype).eval()
    if isinstance(inputs, dict):
        return model, {
            key: value.to(dtype) if type(value) is Tensor and value.is_floating_point() else value
            for key, value in inputs.items()
        }
    return model, inputs.to(dtype) if inputs.is_floating_point() else inputs


def dense(model: nn.Module, inputs: Any, traced: overt.Trace, method: str, **options: Any) -> Tensor:
    """A method over all weights of the same model, in its own precision."""
    calls: list[CapturedAttention] = []
    with watching(model, calls.append), torch.no_grad():
        model(**inputs) if isinstance(inputs, dict) else model(inputs)
    weights = {call.path: call.weights.double() for call in calls}
    assert len(weights) == len(calls) == len(traced.paths)
    maps = [weights[path] for path in traced.paths]
    layers = len(traced.maps)
    if traced.cross:
        options |= {"cross": maps[len(maps) - layers :], "encoder": maps[layers : len(maps) - layers] or None}
    return read(method, maps[:layers], mask=traced.mask, **options)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("name", CASES)
def test_rows_are_those_of_dense_maps(name: str) -> None:
    for dtype, apart in ((torch.float64, 1e-12), (torch.float32, 1e-6)):
        model, inputs = made(name, dtype)
        states = states_of(model, inputs, memory=2600 if "bias" in name else BYTES)
        maps = overt.trace(model, inputs)
        assert not maps.of_states
        assert all(not isinstance(held, Tensor) for held in held_of(states.maps))
        assert (states.kind, states.paths, states.tokens) == (maps.kind, maps.paths, maps.tokens)
        assert torch.equal(states.mask, maps.mask)
        for method in ("raw", "rollout"):
            got = states.read(method, range(states.queries))
            want = dense(model, inputs, states, method)
            torch.testing.assert_close(got, want, rtol=0.0, atol=apart)
            torch.testing.assert_close(got, maps.read(method), rtol=0.0, atol=1e-6)
        if maps.outputs is not None:
            torch.testing.assert_close(states.outputs, maps.outputs, rtol=1e-4, atol=1e-5)


def test_everything_else_that_reads_maps() -> None:
    for name in ("causal and padding", "encoder–decoder", "torch's encoder–decoder"):
        model, inputs = made(name, torch.float64)
        states = states_of(model, inputs, heads=True)
        for method, options in (
            ("raw", {"heads": "each"}), ("rollout", {"heads": "each"}), ("rollout", {"heads": [0, -1]}),
            ("flow", {"queries": [4]}),
        ):  # fmt: skip
            got = states.read(method, **{"queries": range(states.queries), **options})
            want = dense(model, inputs, states, method, **options)
            torch.testing.assert_close(got, want, rtol=0.0, atol=1e-6 if method == "flow" else 1e-12)
        maps = overt.trace(model, inputs)
        got, want = states.rollout(-1, receptive_field=True), maps.rollout(-1, receptive_field=True)
        torch.testing.assert_close(got, want, rtol=0.0, atol=1e-5)


def test_gradients_are_the_plain_ones() -> None:
    model = Text(NanoAttention)
    options: dict[str, Any] = {"output": lambda result: result}
    states, maps = states_of(model, IDS, **options), overt.trace(model, IDS, **options)
    assert states.subject is not None
    assert states.subject.layers == ["h.0", "h.1", "h.2"]
    got, want = states.gradients([8, 3], target=3), maps.gradients([8, 3], target=3)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6 * float(want.max()))


def test_masks_are_kept_in_parts_and_keys_once() -> None:
    for name, part in (
        ("causal", Sight(causal=True)),
        ("left padding", Sight(causal=True, keys=REAL.flip(1))),
        ("a window", Sight(causal=True, window=3)),
        ("the least number", Sight(causal=True)),
        ("torch, causal and padding", Sight(causal=True, keys=REAL)),
        ("own", Sight(keys=REAL)),
    ):
        held: Any = held_of(states_of(*made(name, torch.float32)).maps)
        for asked in held:
            sight = asked.sight
            assert (sight.causal, sight.window, sight.bias) == (part.causal, part.window, None), name
            assert (sight.keys is None) == (part.keys is None)
            assert sight.keys is None or torch.equal(sight.keys, part.keys)
    for name in ("grouped-query heads", "repeated keys"):
        held = held_of(states_of(*made(name, torch.float32)).maps)
        assert {asked.key.shape for asked in held} == {torch.Size([2, 2, 9, 4])}


def test_masks_in_blocks_are_the_masks() -> None:
    """Longer than a block, and with every kind of part."""
    count = 1100
    lower = torch.ones(count, count, dtype=torch.bool).tril()
    real = torch.arange(count) >= torch.tensor([[0], [500]])
    seen = (lower & real[:, None, None, :]).expand(-1, 3, -1, -1)
    sight = sight_of(seen, count, count)
    assert (sight.causal, sight.bias) == (True, None)
    assert torch.equal(sight.keys, real)  # type: ignore[arg-type]
    hidden = torch.zeros(seen.shape).masked_fill(~seen, -1e9)
    sight = sight_of(hidden, count, count)
    assert (sight.causal, sight.bias) == (True, None), "those that see only what is hidden are padding"
    hidden[0, :, 700] = -1e9  # a token that others see, and that sees all alike
    assert torch.equal(sight_of(hidden, count, count).bias, hidden[:, :1])  # type: ignore[arg-type]
    given = {"attn_mask": ~lower, "key_padding_mask": draws(1, 2, count).where(real, -torch.inf)}
    both = sight_of_torch_in_parts(given, (2, 3, count, count))
    assert both.causal
    assert both.bias is not None
    assert both.bias.shape == (2, 1, 1, count), "a bias of keys, not of cells"


def test_a_decision_for_all_layers() -> None:
    """Layers to come are counted by modules of the same kind, so that the first layer decides."""
    model, cells = Text(NanoAttention), 2 * 9 * 9
    needed = 4 * (3 * cells + 4 * cells)
    assert not overt.trace(model, IDS, memory=needed).of_states
    assert all(
        not isinstance(held, Tensor) for held in held_of(overt.trace(model, IDS, memory=needed - 1).maps)
    )


def test_calls_outside_the_stack_need_no_room() -> None:
    class Towers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.ModuleList([Block(MinAttention(causal=False)) for _ in range(2)])
            self.other = nn.ModuleList([Block(NanoAttention(causal=False)) for _ in range(2)])
            other.spread(self)

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            for block in self.one:
                a = block(a)
            for block in self.other:
                b = block(b)
            return a.mean(dim=1) @ b.mean(dim=1).T

    model, inputs = Towers(), {"a": draws(1, 2, 40, other.WIDTH), "b": draws(2, 2, 9, other.WIDTH)}
    cells = 2 * 9 * 9
    maps = overt.trace(model, inputs, stack="other", memory=4 * (2 * cells + 4 * cells))
    assert not maps.of_states
    states = states_of(model, inputs, stack="other")
    torch.testing.assert_close(states.rollout(range(9)), maps.rollout(), rtol=0.0, atol=1e-6)
    with pytest.raises(ValueError, match="no attention ran in 'third'; stacks that did: 'one', 'other'"):
        overt.trace(model, inputs, stack="third")


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_weights_that_the_model_makes_are_refused_with_their_bytes() -> None:
    cells = 2 * 9 * 9
    needed = 4 * (3 * cells + 4 * cells)
    for attention, reason in (
        (MinAttention, r"h\.0\.attn makes its weights itself, by a softmax"),
        (lambda: Flex(alibi), r"the score_mod of h\.0\.attn changes scores"),
        (lambda: Flex(aux=True), r"h\.0\.attn asks flex_attention for sums or maxima of scores"),
    ):
        model = Text(attention)
        with pytest.raises(
            ValueError, match=f"^maps would take {needed:,} bytes, over.*: {reason}.*; give memory={needed}$"
        ):
            overt.trace(model, IDS, memory=BYTES)
        assert not overt.trace(model, IDS, memory=needed).of_states
    evolving = AgreementClassifier(20, [overt.Evolving()], layers=3, width=16, heads=4)
    with pytest.raises(ValueError, match=r"^maps would take .*Evolving of .*blocks\.0\.attention makes"):
        overt.trace(evolving, {"input_ids": IDS, "attention_mask": REAL.long()}, memory=BYTES)


def test_maps_that_fit_stand_beside_states() -> None:
    """A model that makes the weights of one layer itself: its map is kept, if it fits."""
    model = Text(NanoAttention)
    model.h[1].attn = MinAttention()
    other.spread(model)
    states = states_of(model, IDS, memory=3300)
    held = held_of(states.maps)
    assert [isinstance(each, Tensor) for each in held] == [False, True, False]
    maps = overt.trace(model, IDS)
    torch.testing.assert_close(states.rollout(range(9)), maps.rollout(), rtol=0.0, atol=1e-6)


class Otherwise(NanoAttention):
    """Its output is not what follows from its mask."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, _mask: Any) -> Tensor:
        mask = torch.ones(9, 9, dtype=torch.bool)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask.as_subclass(Lying))
        return mixed.as_subclass(Tensor)


class Lying(Tensor):
    """A mask that torch cannot be asked about."""


def mamba() -> nn.Module:
    import transformers as hf

    config = hf.MambaConfig(hidden_size=16, num_hidden_layers=1, vocab_size=30, state_size=4)
    return hf.MambaModel(config)


NEVER, ROW = "cannot be traced: no attention was recognised", "^a single row of 9 tokens would take 144 bytes"
READ = r"^h\.0\.attn cannot be traced: its mask is a Lying, which cannot be read$"
BAD: dict[str, tuple[Any, Any, int, str]] = {
    "no attention": (lambda: nn.Linear(16, 16), X, BYTES, f"^Linear {NEVER}"),
    "no attention, transformers": (mamba, IDS, BYTES, rf"^MambaModel \(mamba\) {NEVER}"),
    "a row": (text(), IDS, 143, ROW),
    "a row, torch": (TorchText, X, 143, ROW),
    "a row, own": (own(), {"input_ids": IDS, "attention_mask": REAL.long()}, 143, ROW),
    "a mask": (text(lambda: Otherwise()), IDS, BYTES, READ),
    "a mask, under the budget": (text(lambda: Otherwise()), IDS, 2**20, READ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_in_one_line(name: str) -> None:
    make, inputs, memory, message = BAD[name]
    with pytest.raises(ValueError, match=message) as caught:
        overt.trace(make(), inputs, memory=memory)
    assert "\n" not in str(caught.value)
    if message is ROW:
        assert overt.trace(make(), inputs, memory=144).raw(0, layers=0).shape == (2, 1, 1, 9)


def test_a_mask_that_torch_refuses_has_torchs_error() -> None:
    with pytest.raises(RuntimeError, match="attn_mask dtype"):
        overt.trace(Text(NanoAttention), {"idx": IDS, "mask": torch.ones(9, 9).int()}, memory=BYTES)


def test_masks_that_mean_something_else_are_refused() -> None:
    model = TorchText(causal=True)
    model.causal = False
    wrong = nn.Transformer.generate_square_subsequent_mask(9).T.contiguous()

    def hint(_: nn.Module, args: Any, kwargs: Any) -> Any:
        return args, {**kwargs, "attn_mask": wrong, "is_causal": True}

    for layer in model.body.layers:
        layer.self_attn.register_forward_pre_hook(hint, with_kwargs=True)
    with pytest.raises(ValueError, match=r"layers\.0\.self_attn cannot be traced: its mask cannot be read"):
        overt.trace(model, X, memory=BYTES)
    large = {"idx": IDS, "mask": draws(5, 2, 4, 9, 9)}
    with pytest.raises(ValueError, match=r"^the mask of h\.0\.attn, which is more than .* 2,592 bytes, over"):
        overt.trace(Text(NanoAttention), large, memory=BYTES)


def test_nothing_is_left_behind() -> None:
    model, inputs = made("own", torch.float32)
    states_of(model, inputs)
    assert not any({"attend", "_project", "forward"} & set(vars(module)) for module in model.modules())


class Overwriting(NanoAttention):
    """Keys or masks in a buffer that all layers write to."""

    def __init__(self, what: str, buffer: Tensor) -> None:
        super().__init__()
        self.what, self.buffer = what, [buffer]  # a list, as a buffer of one module would be copied

    def attend(self, q: Tensor, k: Tensor, v: Tensor, _mask: Any) -> Tensor:
        (buffer,) = self.buffer
        if self.what == "keys":
            return F.scaled_dot_product_attention(q, buffer.copy_(k), v)
        if self.what == "queries":
            mixed = F.scaled_dot_product_attention(q, k, v)
            q.zero_()
            return mixed
        ahead = torch.arange(9) - torch.arange(9).unsqueeze(1)
        width = 2 + int(self.c_attn.weight[0, 0].abs() * 1e4) % 4  # another one in each layer
        return F.scaled_dot_product_attention(q, k, v, buffer.copy_((ahead <= 0) & (ahead > -width)))


@pytest.mark.parametrize("what", ["keys", "keys, in inference mode", "queries", "mask"])
def test_what_a_model_overwrites_is_not_kept_as_it_is_later(what: str) -> None:
    with torch.inference_mode("inference" in what):
        buffer = torch.zeros(9, 9, dtype=torch.bool) if what == "mask" else torch.zeros(2, 4, 9, 4)
        model = Text(lambda: Overwriting(what.split(",")[0], buffer))
        want = overt.trace(model, IDS)
        if what == "keys":
            with pytest.raises(ValueError, match=r"^h\.0\.attn changes its queries or keys in place after "):
                overt.trace(model, IDS, memory=BYTES)
            return
        got = states_of(model, IDS)
    for ours, theirs in zip(got.maps, want.maps, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0.0)

"""Modules against the definitions beneath them: the KL they record, rows in pieces, places, checkpoints."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import overt
from overt.mechanisms.bayesian.naive import map_kl, prior_of
from selection import covering
from stacks import BAYESIAN, EVOLVING, MECHANISMS, enliven, gradients, inputs


@pytest.mark.slow
@given(
    st.sampled_from(["encoder", "decoder", "cross"]),
    st.sampled_from(["weibull", "lognormal"]),
    st.sampled_from([None, 1, 2]),
    st.sampled_from(["none", "right", "left", "bias"]),
    st.sampled_from(["dot", "additive", "position", "evolving"]),
    st.booleans(),
)
def test_a_modules_kl_is_the_dense_kl_of_its_logits(
    kind: str, family: str, key_heads: int | None, padding: str, score: str, short: bool
) -> None:
    config = overt.Bayesian(family=family, prior_sigma=2.0, kl_reduction="sum")  # type: ignore[arg-type]
    attention = overt.MultiheadAttention(
        16,
        4,
        batch_first=True,
        kind=kind,  # type: ignore[arg-type]
        num_key_heads=key_heads,
        mechanisms=[overt.Evolving(), config] if score == "evolving" else [config],
        score="additive" if score == "additive" else "dot",
        position=overt.RelativePosition(4, 8) if score == "position" else None,
    ).double()
    keys = 7
    queries = 5 if kind == "cross" or (short and kind == "decoder") else keys
    memory, x = inputs(2, keys, 16, dtype=torch.float64), inputs(2, queries, 16, seed=1, dtype=torch.float64)
    mask, real_keys = None, torch.ones(2, keys, dtype=torch.bool)
    if padding == "bias":
        mask = inputs(2, keys, seed=2, dtype=torch.float64)
    elif padding != "none":
        real_keys[0, slice(0, 2) if padding == "left" else slice(5, 7)] = False
        mask = ~real_keys
    real_queries = torch.ones(2, queries, dtype=torch.bool)
    if kind == "cross":
        real_queries[1, 3:] = False
    elif mask is not None and padding != "bias":
        real_queries = real_keys[:, keys - queries :]

    seen: list[Tensor] = []
    layer: Any = attention.map.layer_of(overt.Bayesian)
    layer.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[1]))
    chain = overt.Chain(step=0)
    attention(x, memory, memory, mask, query_padding_mask=~real_queries, chain=chain)
    visible = real_keys.view(2, 1, 1, keys) & real_queries.view(2, 1, queries, 1)
    if kind == "decoder":
        visible = visible & (torch.arange(keys) <= torch.arange(keys - queries, keys).view(-1, 1))
    _, k, _ = attention._project(x, memory, memory)
    prior = prior_of(layer.prior, k, visible, config)
    want = map_kl(seen[0], visible, prior.repeat_interleave(4 // prior.shape[1], 1), config)
    torch.testing.assert_close(chain.kl(per_example=True), want, rtol=1e-9, atol=1e-9)
    parameters = list(attention.parameters())
    got = torch.autograd.grad(chain.kl(), parameters, retain_graph=True, allow_unused=True)
    expected = torch.autograd.grad(want.mean(), parameters, allow_unused=True)
    for a, b in zip(got, expected, strict=True):
        if b is not None:
            torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-8)


def padded_copy_differs(mask_queries: bool) -> bool:
    """Whether an example moves in a padded batch when padded queries are masked, or not."""
    layers = [
        overt.MultiheadAttention(16, 2, batch_first=True, mechanisms=[EVOLVING], layer=n) for n in range(3)
    ]
    for layer in layers:
        enliven(layer)
    x, batch = inputs(1, 5, 16), inputs(1, 8, 16, seed=4) * 3
    batch[:, :5] = x
    padding = torch.arange(8).view(1, 8) >= 5

    def run(x: Tensor, keys: Tensor | None, queries: Tensor | None) -> Tensor:
        chain = overt.Chain()
        for layer in layers:
            x = x + layer(x, x, x, keys, query_padding_mask=queries, chain=chain)[0]
        return x

    queries = padding if mask_queries else torch.zeros_like(padding)
    return not torch.allclose(run(batch, padding, queries)[:, :5], run(x, None, None), atol=1e-5)


def test_control_unmasked_padding_queries_move_a_real_example() -> None:
    assert not padded_copy_differs(mask_queries=True)
    assert padded_copy_differs(mask_queries=False)


@pytest.mark.parametrize("name", ["evolving", "bayesian", "both"])
def test_decoder_rows_in_pieces_equal_all_at_once(name: str) -> None:
    layers = [
        overt.MultiheadAttention(
            8,
            2,
            batch_first=True,
            mechanisms=MECHANISMS[name],
            kind="decoder",
            layer=n,
            position=overt.RelativePosition(4, 3),
        ).double()
        for n in range(3)
    ]
    for layer in layers:
        enliven(layer)
    x = inputs(2, 6, 8, dtype=torch.float64)

    def run(chain: overt.Chain, start: int, stop: int, below: list[Tensor]) -> Tensor:
        """Rows start … stop of every layer; `below` keeps each layer's input, as a cache of keys would."""
        rows = x[:, start:stop]
        for number, layer in enumerate(layers):
            below[number] = torch.cat([below[number], rows], dim=1)
            rows = rows + layer(rows, below[number], below[number], chain=chain)[0]
        return rows

    nothing = [x[:, :0]] * 3
    whole = run(overt.Chain(step=0), 0, 6, list(nothing))
    chain, below = overt.Chain(step=0, keep=True), list(nothing)
    pieces = torch.cat([run(chain, a, b, below) for a, b in ((0, 2), (2, 3), (3, 6))], dim=1)
    torch.testing.assert_close(pieces, whole)
    with pytest.raises(ValueError, match="after 6 rows fed in pieces, 2 more need 8 keys, got 2"):
        run(chain, 0, 2, list(nothing))


def test_in_bfloat16_noise_is_still_drawn_in_float32() -> None:
    attention = overt.MultiheadAttention(
        8, 1, batch_first=True, mechanisms=[overt.Bayesian(k=1.0)]
    ).bfloat16()
    with torch.no_grad():
        attention.in_proj_weight.zero_()  # equal logits: the weights are the normalised draws
    x = torch.zeros(1, 64, 8, dtype=torch.bfloat16)
    seen: list[Tensor] = []
    attention.map.register_forward_hook(lambda _, __, weights: seen.append(weights))
    attention(x, x, x, chain=overt.Chain(step=0))
    assert seen[0].dtype == torch.float32
    assert seen[0].unique().numel() > 4000, "bfloat16 has 128 numbers between 1/2 and 1"


def test_noise_differs_between_chains_and_two_attentions_in_one_place_are_refused() -> None:
    x = inputs(1, 4, 8)

    def draw(kind: str) -> Tensor:
        torch.manual_seed(0)
        attention = overt.MultiheadAttention(8, 2, batch_first=True, mechanisms=[BAYESIAN], kind=kind)  # type: ignore[arg-type]
        weights = attention(x, x, x, chain=overt.Chain(step=0))[1]
        assert weights is not None
        return weights

    assert not torch.allclose(draw("encoder"), draw("cross"))
    chain = overt.Chain(step=0)
    first, second = (
        overt.MultiheadAttention(8, 2, batch_first=True, mechanisms=[BAYESIAN]) for _ in range(2)
    )
    first(x, x, x, chain=chain)
    with pytest.raises(ValueError, match="two attentions are both layer 0 of the encoder chain"):
        second(x, x, x, chain=chain)


def test_an_encoder_decoder_has_no_skips_in_its_decoder_unless_asked() -> None:
    def alpha(cross: bool, site: str) -> float:
        block = overt.Decoder(8, 2, 2, [overt.Evolving(0.3)], cross=cross).blocks[1]
        return float(getattr(block, site).map.evolving.alpha)

    assert [alpha(True, "attention"), alpha(True, "cross_attention"), alpha(False, "attention")] == [
        0.0,
        0.0,
        0.3,
    ]


def test_dropout_acts_on_weights_in_training_only_and_weights_come_back_before_it() -> None:
    attention, x = overt.MultiheadAttention(8, 2, dropout=0.5, batch_first=True), inputs(2, 6, 8)
    trained, weights = attention(x, x, x)
    attention.eval()
    used, plain = attention(x, x, x)
    assert not torch.allclose(trained, used)
    torch.testing.assert_close(weights, plain)


@pytest.mark.slow
@pytest.mark.parametrize("backend", covering(["eager", "aot_eager"], ["eager"]))
def test_one_graph_serves_every_length(backend: str) -> None:
    torch.compiler.reset()
    model = overt.Decoder(16, 2, 2, [EVOLVING, overt.Bayesian(family="lognormal")], dropout=0.0)
    compiled = torch.compile(
        lambda x, chain: model(x, chain=chain).sum() + chain.penalty(), backend=backend, fullgraph=True
    )
    for length in range(4, 16):  # more lengths than torch would compile for one by one
        compiled(inputs(2, length, 16), overt.Chain(step=0))


@pytest.mark.parametrize("name", ["evolving", "both"])
def test_a_whole_stack_can_be_checkpointed(name: str) -> None:
    model, x = overt.Encoder(16, 2, 3, MECHANISMS[name], dropout=0.0), inputs(2, 5, 16)
    want = gradients(model, lambda x, chain: model(x, None, chain), x)
    got = gradients(model, lambda x, chain: checkpoint(model, x, None, chain, use_reentrant=False), x)
    for key, value in want.items():
        assert torch.equal(got[key], value), key
    # with a chain of its own, made anew when the block runs again
    assert gradients(model, lambda x, _: checkpoint(model.eval(), x, use_reentrant=False), x)


@pytest.mark.parametrize("low", [float("-inf"), torch.finfo(torch.float32).min, -1e9, -1e4])
def test_every_customary_minus_infinity_hides_a_key(low: float) -> None:
    layers = [
        overt.MultiheadAttention(8, 2, batch_first=True, mechanisms=MECHANISMS["both"], layer=n)
        for n in range(2)
    ]
    for layer in layers:
        enliven(layer)
    padding = torch.tensor([[False] * 4, [False, False, True, True]])

    def run(mask: Tensor) -> tuple[Tensor, Tensor]:
        x, chain = inputs(2, 4, 8), overt.Chain(step=0)
        for layer in layers:
            x = x + layer(x, x, x, mask, chain=chain)[0]
        return x, chain.kl()

    for got, want in zip(run(torch.where(padding, low, 0.0)), run(padding), strict=True):
        torch.testing.assert_close(got, want)


def test_masks_and_lengths_that_would_go_wrong_silently_are_refused() -> None:
    x = inputs(2, 4, 8)
    evolving = overt.MultiheadAttention(8, 2, batch_first=True, mechanisms=[EVOLVING])
    with pytest.raises(ValueError, match=r'is_causal=True with Evolving needs kind="decoder"'):
        evolving(x, x, x, is_causal=True)
    with pytest.raises(ValueError, match=r'kind="encoder" is self-attention, got 4 queries and 3 keys'):
        evolving(x, x[:, :3], x[:, :3], torch.zeros(2, 3, dtype=torch.bool))
    with pytest.raises(TypeError, match=r"query_padding_mask must be boolean, got torch.float32"):
        evolving(x, x, x, query_padding_mask=torch.zeros(2, 4))
    with pytest.raises(TypeError, match=r"padding must be boolean, True at padding, got torch.float32"):
        overt.Encoder(8, 2, 1)(x, torch.zeros(2, 4))
    with pytest.raises(ValueError, match=r"key and value must be 8 and 8 wide \(kdim, vdim\), got 6 and 8"):
        evolving(x, x[..., :6], x)
    with pytest.raises(ValueError, match="nothing to attend"):
        evolving(x[:, :0], x, x)
    with pytest.raises(ValueError, match="add_bias_kv and add_zero_attn must be False"):
        overt.MultiheadAttention(8, 2, add_zero_attn=True)
    with pytest.raises(TypeError, match=r"mechanisms must be a list, such as \[Evolving\(\)\], got None"):
        overt.MultiheadAttention(8, 2, mechanisms=None)  # type: ignore[arg-type]


def test_numbers_of_the_wrong_sort_are_named() -> None:
    with pytest.raises(ValueError, match=r"step must be a whole number of at least 0, got 3.7"):
        overt.Chain(step=3.7)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"seed must be a whole number, got 1.5"):
        overt.Chain(seed=1.5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"alpha must be a number, got '0.1'"):
        overt.Evolving(alpha="0.1")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="k must be a number, got None"):
        overt.Bayesian(k=None)  # type: ignore[arg-type]


@pytest.mark.parametrize("make", [overt.Encoder, overt.Decoder])
def test_activation_is_gelu_or_the_relu_of_equation_6(make: Any) -> None:
    x = torch.randn(1, 3, 8)
    outputs = {}
    for name in ("gelu", "relu"):
        torch.manual_seed(0)
        model = make(8, 2, 1, dropout=0.0, activation=name)
        block = model.blocks[0]
        normed = block.norm(x)
        mixed = x + block.attention(normed, normed, normed)[0]
        hidden = block.inner(block.mlp_norm(mixed))
        hidden = (
            hidden.clamp(min=0.0) if name == "relu" else torch.nn.functional.gelu(hidden, approximate="tanh")
        )
        torch.testing.assert_close(model(x), model.norm(mixed + block.outer(hidden)))
        outputs[name] = model(x)
    torch.manual_seed(0)
    assert torch.equal(make(8, 2, 1, dropout=0.0)(x), outputs["gelu"]), "the default is GELU, as before"
    assert not torch.allclose(outputs["gelu"], outputs["relu"])
    with pytest.raises(ValueError, match="activation must be one of 'gelu', 'relu'; got 'swish'"):
        make(8, 2, 1, activation="swish")

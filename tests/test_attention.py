"""The attention module and the stacks: torch's numbers without mechanisms, their promises with them."""

from __future__ import annotations

import logging

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import overt
from overt.mechanisms import attention
from overt.mechanisms.call import AttentionCall
from overt.mechanisms.site import Kind
from selection import covering
from stacks import BAYESIAN, EVOLVING, MECHANISMS, enliven, gradients, inputs

every_mechanism = pytest.mark.parametrize("mechanisms", MECHANISMS.values(), ids=MECHANISMS)


# --- Without mechanisms it is torch's module ---


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("widths", [(None, None), (6, 10)])
@pytest.mark.parametrize("average", [True, False])
def test_without_mechanisms_output_and_weights_are_torchs(
    batch_first: bool, bias: bool, widths: tuple[int | None, int | None], average: bool
) -> None:
    theirs = nn.MultiheadAttention(8, 2, bias=bias, kdim=widths[0], vdim=widths[1], batch_first=batch_first)
    ours = overt.MultiheadAttention(8, 2, bias=bias, kdim=widths[0], vdim=widths[1], batch_first=batch_first)
    ours.load_state_dict(theirs.state_dict())
    q, k, v = inputs(3, 5, 8), inputs(3, 7, widths[0] or 8, seed=1), inputs(3, 7, widths[1] or 8, seed=2)
    if not batch_first:
        q, k, v = (x.transpose(0, 1).contiguous() for x in (q, k, v))
    for got, want in zip(
        ours(q, k, v, average_attn_weights=average),
        theirs(q, k, v, average_attn_weights=average),
        strict=True,
    ):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-6)


def masks() -> dict[str, dict[str, Tensor]]:
    padding = torch.zeros(3, 5, dtype=torch.bool)
    padding[1, 3:] = True
    causal = torch.ones(5, 5, dtype=torch.bool).triu(1)
    additive = torch.zeros(5, 5).masked_fill(causal, float("-inf")) + inputs(5, 5).tril()
    return {
        "padding": {"key_padding_mask": padding},
        "additive padding": {"key_padding_mask": torch.where(padding, float("-inf"), inputs(3, 5, seed=9))},
        "boolean": {"attn_mask": causal},
        "additive": {"attn_mask": additive},
        "per head": {"attn_mask": causal.expand(6, 5, 5)},
        "both": {"attn_mask": causal, "key_padding_mask": padding},
    }


@pytest.mark.parametrize("mask", masks().values(), ids=masks())
def test_masks_mean_what_they_mean_in_torch_with_the_same_gradients(mask: dict[str, Tensor]) -> None:
    theirs = nn.MultiheadAttention(8, 2, batch_first=True)
    ours = overt.MultiheadAttention(8, 2, batch_first=True)
    ours.load_state_dict(theirs.state_dict())
    results = []
    for module in (ours, theirs):
        x = inputs(3, 5, 8).requires_grad_()
        output, weights = module(x, x, x, **mask)
        (output * inputs(3, 5, 8, seed=1)).sum().backward()
        results.append((output, weights, x.grad, *[p.grad for p in module.parameters()]))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=3e-6)


# --- What layers share about a mask ---


def seen_in(form: str) -> dict[str, Tensor | bool]:
    """Arguments of a call; the last example of a padded batch sees nothing."""
    padding = torch.zeros(3, 5, dtype=torch.bool)
    padding[1, 3:], padding[2] = True, True
    later = torch.ones(5, 5, dtype=torch.bool).triu(1)
    later[2] = True  # a query that sees no key
    return {
        "everything": {},
        "nothing hidden by a mask": {"key_padding_mask": torch.zeros(3, 5, dtype=torch.bool)},
        "padding": {"key_padding_mask": padding},
        "padded queries, too": {"key_padding_mask": padding, "query_padding_mask": padding.roll(1, 0)},
        "padded queries alone": {"query_padding_mask": padding},
        "a mask": {"attn_mask": later},
        "a mask and padding": {"attn_mask": later, "key_padding_mask": padding},
        "causal": {"is_causal": True},
        "causal and padding": {"is_causal": True, "key_padding_mask": padding},
    }[form]


def each_time_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every map hides cells by its own masks, twice, and whether or not there is anything to hide."""

    def plain(call: AttentionCall, logits: Tensor) -> Tensor:
        lowest, shown = torch.finfo(logits.dtype).min, call.visible()
        return torch.softmax(logits.masked_fill(~shown, lowest), dim=-1).masked_fill(~shown, 0.0)

    def blind(call: AttentionCall) -> Tensor:
        return ~call.visible().any(dim=-1).any(dim=1)

    monkeypatch.setattr(AttentionCall, "softmax", plain)
    monkeypatch.setattr(AttentionCall, "blind", blind)
    monkeypatch.setattr(attention, "_lasts", lambda *_: False)


@pytest.mark.parametrize("mechanism", [None, BAYESIAN], ids=["plain", "Bayesian"])
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize(
    "form",
    [
        "everything",
        "nothing hidden by a mask",
        "padding",
        "padded queries, too",
        "padded queries alone",
        "a mask",
        "a mask and padding",
        "causal",
        "causal and padding",
    ],
)
def test_what_layers_share_about_a_mask_changes_no_bit_of_outputs_and_gradients(
    form: str, training: bool, mechanism: overt.Mechanism | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    kind: Kind = "decoder" if form.startswith("causal") else "encoder"
    settings = {"batch_first": True, "kind": kind, "mechanisms": [] if mechanism is None else [mechanism]}
    layers = [overt.MultiheadAttention(8, 2, 0.2, layer=number, **settings) for number in range(2)]
    for layer in layers:
        layer.train(training)
        enliven(layer)
    seen = seen_in(form)

    def passed() -> list[Tensor]:
        torch.manual_seed(1)  # of dropout
        x = inputs(3, 5, 8).requires_grad_()
        chain, y = overt.Chain(step=0), x
        weights = []
        for layer in layers:
            y, each = layer(y, y, y, chain=chain, average_attn_weights=False, **seen)
            weights.append(each)
        loss = (y * inputs(3, 5, 8, seed=3)).sum() + chain.penalty()
        wanted = [x, *(parameter for layer in layers for parameter in layer.parameters())]
        found = torch.autograd.grad(loss, wanted, allow_unused=True)
        return [y, *weights, *(gradient for gradient in found if gradient is not None)]

    got = passed()
    each_time_anew(monkeypatch)
    want = passed()
    assert len(got) == len(want) > 5
    assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))


def test_a_mask_that_is_written_to_or_replaced_between_layers_is_read_again() -> None:
    layer, other = (overt.MultiheadAttention(8, 2, batch_first=True, layer=number) for number in range(2))
    x, chain = inputs(3, 5, 8), overt.Chain()
    mask = torch.zeros(3, 5, dtype=torch.bool)
    whole = layer(x, x, x, mask, chain=chain)[0]
    mask[1, 3:] = True
    assert torch.equal(layer(x, x, x, mask, chain=chain)[0], layer(x, x, x, mask)[0])
    assert not torch.equal(layer(x, x, x, mask)[0], whole)
    for number in range(5):  # each may take the place of the last one in memory
        hidden = torch.zeros(3, 5, dtype=torch.bool)
        hidden[:, number] = True
        assert torch.equal(other(x, x, x, hidden, chain=chain)[0], other(x, x, x, hidden)[0])
        queries = other(x, x, x, query_padding_mask=hidden, chain=chain)[0]
        assert torch.equal(queries, other(x, x, x, query_padding_mask=hidden)[0]), "rather than keys"


def test_a_mask_is_turned_round_once_for_all_layers() -> None:
    layers = [overt.MultiheadAttention(8, 2, batch_first=True, layer=number) for number in range(4)]
    x, chain, mask = inputs(3, 5, 8), overt.Chain(), torch.zeros(3, 5, dtype=torch.bool)
    counts = []
    for masks_given in ({"key_padding_mask": mask}, {}):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            for layer in layers:
                layer(x, x, x, chain=chain, **masks_given)
        names = [event.name for event in profile.events()]
        counts.append([names.count(f"aten::{name}") for name in ("bitwise_not", "eq", "masked_fill")])
    assert counts[0] == [2, 1, 3 * 4], "the mask to what is visible, and that to what is hidden"
    assert counts[1] == [0, 0, 0], "nothing is hidden where there is no mask"


def test_unbatched_input_and_no_weights_work_as_in_torch() -> None:
    theirs, ours = nn.MultiheadAttention(8, 2), overt.MultiheadAttention(8, 2)
    ours.load_state_dict(theirs.state_dict())
    x = inputs(5, 8)
    output, weights = ours(x, x, x)
    torch.testing.assert_close(output, theirs(x, x, x)[0], rtol=0, atol=1e-6)
    assert weights is not None
    assert weights.shape == (5, 5)
    assert ours(x, x, x, need_weights=False)[1] is None


def test_is_causal_and_kind_decoder_need_no_mask_beside_them() -> None:
    x = inputs(2, 5, 8)
    plain, decoder = (
        overt.MultiheadAttention(8, 2, batch_first=True),
        overt.MultiheadAttention(8, 2, batch_first=True, kind="decoder"),
    )
    decoder.load_state_dict(plain.state_dict())
    want = plain(x, x, x, attn_mask=torch.ones(5, 5, dtype=torch.bool).triu(1))[0]
    torch.testing.assert_close(plain(x, x, x, is_causal=True)[0], want)
    torch.testing.assert_close(decoder(x, x, x)[0], want)


def test_grouped_query_heads_equal_full_heads_with_repeated_keys() -> None:
    grouped = overt.MultiheadAttention(16, 4, batch_first=True, num_key_heads=2)
    full = overt.MultiheadAttention(16, 4, batch_first=True)

    def repeat(weight: Tensor) -> Tensor:
        return weight.view(2, 4, -1).repeat_interleave(2, dim=0).reshape(16, -1)

    with torch.no_grad():
        full.in_proj_weight.copy_(
            torch.cat([grouped.q_proj_weight, repeat(grouped.k_proj_weight), repeat(grouped.v_proj_weight)])
        )
        full.out_proj.load_state_dict(grouped.out_proj.state_dict())
    x = inputs(2, 5, 16)
    torch.testing.assert_close(grouped(x, x, x)[0], full(x, x, x)[0])


def test_additive_scores_are_bahdanaus_under_every_mechanism() -> None:
    attention = overt.MultiheadAttention(
        8, 2, batch_first=True, score="additive", mechanisms=[BAYESIAN]
    ).eval()
    x = inputs(1, 3, 8)
    assert attention.in_proj_bias is not None
    q, k, _ = (x @ attention.in_proj_weight.T + attention.in_proj_bias).view(1, 3, 3, 2, 4).unbind(2)
    _, weights = attention(x, x, x, average_attn_weights=False)
    score = attention.score
    assert score is not None
    for h in range(2):
        for i in range(3):
            row = torch.stack(
                [score.vector[h] @ torch.tanh(q[0, i, h] + k[0, j, h] + score.bias[h]) for j in range(3)]
            )
            torch.testing.assert_close(weights[0, h, i], torch.softmax(row, 0))
    chain = overt.Chain(step=0)
    attention.train()(x, x, x, chain=chain)
    chain.kl().backward()
    assert score.vector.grad is not None
    assert score.vector.grad.abs().sum() > 0


# --- Evolving and Bayesian together ---


def test_with_both_the_draw_is_around_the_evolved_map_and_the_carried_map_is_noise_free() -> None:
    x, chains, maps = inputs(2, 5, 8), [], []
    for mechanisms in ([EVOLVING], [EVOLVING, overt.Bayesian(k=2.0)], [overt.Bayesian(k=2.0), EVOLVING]):
        torch.manual_seed(0)
        layers = [
            overt.MultiheadAttention(8, 2, batch_first=True, mechanisms=mechanisms, layer=n) for n in range(2)
        ]
        for layer in layers:  # the same projections whatever parameters the mechanisms drew
            layer.load_state_dict(
                nn.MultiheadAttention(8, 2).state_dict() | dict(layer.state_dict()), strict=True
            )
            with torch.no_grad():
                layer.in_proj_weight.copy_(inputs(24, 8, seed=7))
        chain = overt.Chain(step=3)
        weights = [layer(x, x, x, average_attn_weights=False, chain=chain)[1] for layer in layers]
        chains.append(chain)
        maps.append(weights[1])
    plain, both, swapped = chains
    for place, carried in plain.maps.items():
        assert torch.equal(carried, both.maps[place])
    assert not torch.allclose(maps[0], maps[1])
    assert torch.equal(maps[1], maps[2]), "the order of the list does not matter"
    assert torch.equal(torch.softmax(both.maps["Evolving", "encoder", 1], -1), maps[0])
    del swapped


def test_a_model_without_noise_equals_its_plain_twin() -> None:
    plain = overt.Encoder(16, 2, 3).eval()
    for mechanisms in ([overt.Evolving(0.0, 0.0)], [BAYESIAN], [overt.Evolving(0.0, 0.0), BAYESIAN]):
        model = overt.Encoder(16, 2, 3, mechanisms).eval()
        enliven(model)
        missing = model.load_state_dict(plain.state_dict(), strict=False)
        assert not missing.unexpected_keys
        padding = torch.zeros(2, 6, dtype=torch.bool)
        padding[1, 4:] = True
        x = inputs(2, 6, 16)
        torch.testing.assert_close(
            model(x, padding)[~padding], plain(x, padding)[~padding], rtol=0, atol=1e-6
        )


def test_evolving_changes_a_model_from_layer_1_on() -> None:
    plain, model = overt.Encoder(16, 2, 3).eval(), overt.Encoder(16, 2, 3, [EVOLVING]).eval()
    enliven(model)
    model.load_state_dict(plain.state_dict(), strict=False)
    x = inputs(2, 6, 16)
    assert torch.equal(model.blocks[0](x, None, overt.Chain()), plain.blocks[0](x, None, overt.Chain()))
    assert not torch.allclose(model(x), plain(x), atol=1e-3)


def test_one_convolution_per_layer_and_attention_and_one_prior_per_layer() -> None:
    def extra(mechanisms: list[overt.Mechanism], **options: bool) -> int:
        sizes = [
            sum(p.numel() for p in overt.Decoder(16, 8, 6, m, **options).parameters())
            for m in (mechanisms, [])
        ]
        return sizes[0] - sizes[1]

    convolution, prior = 8 * 8 * 9 + 8, (2 * 5 + 5) + 5
    assert extra([EVOLVING]) == 5 * convolution
    assert extra([EVOLVING], cross=True) == 2 * 5 * convolution
    assert extra([BAYESIAN]) == 6 * prior
    assert extra([EVOLVING, BAYESIAN], cross=True) == 2 * (5 * convolution + 6 * prior)


# --- No leak, no padding, through whole networks ---


@pytest.mark.slow
@given(
    st.sampled_from(["evolving", "bayesian", "both"]),
    st.sampled_from([1, 3, 5]),
    st.integers(1, 6),
    st.booleans(),
)
def test_future_target_tokens_cannot_change_earlier_outputs(
    name: str, k: int, at: int, training: bool
) -> None:
    mechanisms = [overt.Evolving(0.3, 0.7, k, 0.3) if m is EVOLVING else m for m in MECHANISMS[name]]
    model = overt.Decoder(16, 2, 3, mechanisms, cross=True, dropout=0.0).train(training)
    enliven(model)
    x, memory = inputs(2, 7, 16), inputs(2, 4, 16, seed=1)
    changed = x.clone()
    changed[:, at:] = inputs(2, 7 - at, 16, seed=2)
    before = model(x, chain=overt.Chain(step=0), memory=memory)
    after = model(changed, chain=overt.Chain(step=0), memory=memory)
    assert torch.equal(before[:, :at], after[:, :at])
    assert not torch.equal(before[:, at:], after[:, at:])


@pytest.mark.parametrize("name", ["evolving", "bayesian", "both"])
def test_padding_of_the_target_does_not_reach_a_decoders_cross_attention(name: str) -> None:
    model = overt.Decoder(16, 2, 3, MECHANISMS[name], cross=True).eval()
    enliven(model)
    x, memory = inputs(1, 5, 16), inputs(1, 4, 16, seed=1)
    batch = torch.cat([3 * inputs(1, 2, 16, seed=4), x], dim=1)  # padding on the left, seen by later rows
    padding = torch.arange(7).expand(1, 7) < 2
    got = model(batch, padding, memory=memory)[:, 2:]
    torch.testing.assert_close(got, model(x, memory=memory), rtol=0, atol=2e-6)


@pytest.mark.parametrize("site", ["attention", "cross_attention"])
def test_control_centred_windows_in_a_decoder_leak(site: str) -> None:
    model = overt.Decoder(16, 2, 3, [EVOLVING], cross=True).eval()
    enliven(model)
    for block in model.blocks:
        evolving = getattr(block, site).map.evolving
        object.__setattr__(evolving.site, "kind", "encoder")
    x, memory = inputs(1, 7, 16), inputs(1, 4, 16, seed=1)
    changed = x.clone()
    changed[:, 4:] = inputs(1, 3, 16, seed=2)
    assert not torch.equal(model(x, memory=memory)[:, :4], model(changed, memory=memory)[:, :4])


@pytest.mark.slow
@given(st.sampled_from(["evolving", "bayesian", "both"]), st.booleans(), st.integers(0, 3), st.integers(0, 3))
def test_an_example_alone_equals_itself_in_a_padded_batch(
    name: str, decoder: bool, left: int, right: int
) -> None:
    model = (overt.Decoder if decoder else overt.Encoder)(16, 2, 3, MECHANISMS[name]).eval()
    enliven(model)
    x, total = inputs(1, 5, 16), left + 5 + right
    batch = inputs(2, total, 16, seed=4) * 3
    batch[0, left : left + 5] = x[0]
    padding = torch.zeros(2, total, dtype=torch.bool)
    padding[0, :left] = padding[0, left + 5 :] = True
    got = model(batch, padding)[0, left : left + 5]
    torch.testing.assert_close(got, model(x)[0], rtol=0, atol=2e-6)


def test_padded_examples_have_the_kl_of_the_example_alone() -> None:
    for mechanisms in ([BAYESIAN], [EVOLVING, BAYESIAN]):
        model = overt.Encoder(16, 2, 3, mechanisms, dropout=0.0)
        enliven(model)
        x = inputs(1, 5, 16)
        batch = torch.cat([x, inputs(1, 3, 16, seed=4).repeat(1, 1, 1)], dim=1)
        padding = torch.arange(8).view(1, 8) >= 5
        alone, padded = overt.Chain(step=0), overt.Chain(step=0)
        model(x, chain=alone)
        model(batch, padding, chain=padded)
        torch.testing.assert_close(padded.kl(), alone.kl())


def test_cross_attention_rows_in_pieces_equal_all_at_once() -> None:
    for mechanisms in MECHANISMS["evolving"], MECHANISMS["both"]:
        layers = [
            overt.MultiheadAttention(
                8, 2, batch_first=True, mechanisms=mechanisms, kind="cross", layer=n
            ).double()
            for n in range(3)
        ]
        for layer in layers:
            enliven(layer)
        x, memory = inputs(2, 6, 8, dtype=torch.float64), inputs(2, 4, 8, seed=1, dtype=torch.float64)

        def run(chain: overt.Chain, x: Tensor, layers: list = layers, memory: Tensor = memory) -> Tensor:
            for layer in layers:
                x = x + layer(x, memory, memory, chain=chain)[0]
            return x

        whole = run(overt.Chain(step=0), x)
        chain = overt.Chain(step=0, keep=True)
        pieces = torch.cat([run(chain, part) for part in x.split([1, 3, 2], dim=1)], dim=1)
        torch.testing.assert_close(pieces, whole)


# --- Batches, dtypes, compilers, checkpoints ---


def test_noise_follows_an_example_whatever_batch_it_is_in() -> None:
    model = overt.Encoder(16, 2, 2, MECHANISMS["both"], dropout=0.0)
    x = inputs(4, 5, 16)
    numbers = torch.tensor([40, 41, 42, 43])
    whole = model(x, chain=overt.Chain(step=1, examples=numbers))
    half = model(x[2:], chain=overt.Chain(step=1, examples=42))
    torch.testing.assert_close(whole[2:], half)


def test_dropout_masks_do_not_move_when_weights_become_random() -> None:
    def mask(mechanisms: list[overt.Mechanism]) -> Tensor:
        torch.manual_seed(5)
        attention = overt.MultiheadAttention(8, 2, batch_first=True, mechanisms=mechanisms)
        torch.manual_seed(6)
        attention(inputs(2, 5, 8), inputs(2, 5, 8), inputs(2, 5, 8), chain=overt.Chain(step=0))
        return torch.rand(8)

    assert torch.equal(mask([]), mask([BAYESIAN]))


@every_mechanism
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_every_dtype_trains_and_returns_its_own(
    mechanisms: list[overt.Mechanism], dtype: torch.dtype
) -> None:
    model, chain = overt.Encoder(16, 2, 2, mechanisms).to(dtype), overt.Chain(step=0)
    output = model(inputs(2, 5, 16).to(dtype), chain=chain)
    (output.float().square().mean() + chain.penalty()).backward()
    assert output.dtype == dtype
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name


def test_bfloat16_and_autocast_stay_near_float32() -> None:
    model = overt.Encoder(32, 4, 3, MECHANISMS["both"], dropout=0.0)
    x, chains = inputs(2, 7, 32), [overt.Chain(step=0) for _ in range(3)]
    want = model(x, chain=chains[0])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = model(x, chain=chains[1])
    low = model.bfloat16()(x.bfloat16(), chain=chains[2])
    for got, chain in ((cast, chains[1]), (low, chains[2])):
        torch.testing.assert_close(got.float(), want, rtol=0, atol=0.15)
        assert (got.float() - want).norm() / want.norm() < 0.02
        torch.testing.assert_close(chain.kl().float(), chains[0].kl(), rtol=0.02, atol=0)


@every_mechanism
def test_non_reentrant_checkpointing_gives_identical_gradients(mechanisms: list[overt.Mechanism]) -> None:
    model = overt.Encoder(16, 2, 4, mechanisms, dropout=0.1)
    enliven(model)

    def checkpointed(x: Tensor, chain: overt.Chain) -> Tensor:
        for block in model.blocks:
            x = checkpoint(block, x, None, chain, use_reentrant=False)
        return model.norm(x)

    x = inputs(2, 5, 16)
    torch.manual_seed(1)
    want = gradients(model, lambda x, chain: model(x, chain=chain), x)
    torch.manual_seed(1)
    got = gradients(model, checkpointed, x)
    for name in want:
        assert torch.equal(got[name], want[name]), name


@pytest.mark.parametrize("name", ["evolving", "bayesian"])
def test_reentrant_checkpointing_is_refused(name: str) -> None:
    model = overt.Encoder(16, 2, 3, MECHANISMS[name])

    def checkpointed(x: Tensor, chain: overt.Chain) -> Tensor:
        for block in model.blocks:
            x = checkpoint(block, x, None, chain, use_reentrant=True)
        return x

    with pytest.raises(RuntimeError, match="reentrant checkpointing cuts the chain of maps"):
        gradients(model, checkpointed, inputs(2, 5, 16).requires_grad_())


# Bayesian alone is compiled by the tests of attached models, too, and lognormal by those of a decoder.
@pytest.mark.slow
@pytest.mark.parametrize("name", covering(list(MECHANISMS), ["both"]))
def test_compiles_as_one_graph_with_the_same_outputs_and_gradients(name: str) -> None:
    torch.compiler.reset()
    model = overt.Encoder(16, 2, 2, MECHANISMS[name], dropout=0.0)
    enliven(model)

    def step(x: Tensor, chain: overt.Chain) -> Tensor:
        return model(x, chain=chain).square().sum() + chain.penalty()

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    for number in (0, 1):  # a new step must not be baked in
        results = []
        for run in (step, compiled):
            model.zero_grad()
            loss = run(inputs(2, 5, 16), overt.Chain(step=number))
            loss.backward()
            results.append(
                [loss.detach(), *[p.grad.clone() for p in model.parameters() if p.grad is not None]]
            )
        for want, got in zip(*results, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@every_mechanism
def test_per_example_gradients_by_vmap_equal_a_loop(mechanisms: list[overt.Mechanism]) -> None:
    model = overt.Encoder(16, 2, 2, mechanisms, dropout=0.0)
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    x = inputs(3, 5, 16)

    def loss(parameters: dict[str, Tensor], example: Tensor, number: Tensor) -> Tensor:
        chain = overt.Chain(step=0, examples=number.view(1))
        output = torch.func.functional_call(model, parameters, (example.unsqueeze(0),), {"chain": chain})
        return output.square().sum() + chain.penalty()

    got = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(parameters, x, torch.arange(3))
    for i in range(3):
        want = torch.func.grad(loss)(parameters, x[i], torch.tensor(i))
        for name in want:
            torch.testing.assert_close(got[name][i], want[name], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["evolving", "bayesian"])
def test_forward_mode_derivatives_agree_with_reverse_mode(name: str) -> None:
    model = overt.Encoder(8, 2, 2, MECHANISMS[name], dropout=0.0).double()
    x, direction = inputs(1, 4, 8, dtype=torch.float64), inputs(1, 4, 8, seed=1, dtype=torch.float64)

    def loss(x: Tensor) -> Tensor:
        return model(x, chain=overt.Chain(step=0)).square().sum()

    _, forward = torch.func.jvp(loss, (x,), (direction,))
    torch.testing.assert_close(forward, (torch.func.grad(loss)(x) * direction).sum())


def test_the_debug_log_says_when_the_kl_is_dense(caplog: pytest.LogCaptureFixture) -> None:
    x = inputs(1, 4, 8)
    with caplog.at_level(logging.DEBUG, logger="overt"):
        attention = overt.MultiheadAttention(8, 2, batch_first=True, mechanisms=[BAYESIAN])
        attention(x, x, x, chain=overt.Chain(step=0))
        assert "dense KL" not in caplog.text
        attention(x, x, x, attn_mask=inputs(4, 4), chain=overt.Chain(step=0))
    assert "encoder 0: dense KL, the map is not a plain dot product" in caplog.text


@pytest.mark.parametrize("seed", [0, 1, -5, 2**63, 2**64 - 1])
def test_any_integer_is_a_seed_and_a_generator_chooses_one(seed: int) -> None:
    assert int(overt.Chain(seed=seed).seed) % 2**64 == seed % 2**64
    first, second, third = (overt.Chain(generator=torch.Generator().manual_seed(s)).seed for s in (1, 1, 2))
    assert int(first) == int(second) != int(third)


# --- Bad input ---


@every_mechanism
def test_a_query_that_sees_no_key_gets_zeros_and_finite_gradients(mechanisms: list[overt.Mechanism]) -> None:
    layers = [
        overt.MultiheadAttention(8, 2, batch_first=True, mechanisms=mechanisms, layer=n) for n in range(2)
    ]
    hidden = torch.zeros(4, 4, dtype=torch.bool)
    hidden[2] = True
    x, chain = inputs(2, 4, 8).requires_grad_(), overt.Chain(step=0)
    y = x
    for layer in layers:
        y, weights = layer(y, y, y, attn_mask=hidden, average_attn_weights=False, chain=chain)
        assert not weights[:, :, 2].any()
        assert not y[:, 2].any()
    (y.square().sum() + chain.penalty()).backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()


@every_mechanism
def test_an_all_padding_example_gives_zero_weights_and_leaves_the_rest_alone(
    mechanisms: list[overt.Mechanism],
) -> None:
    attention = overt.MultiheadAttention(8, 2, batch_first=True, mechanisms=mechanisms)
    padding = torch.tensor([[False] * 4, [True] * 4])
    x, chain = inputs(2, 4, 8).requires_grad_(), overt.Chain(step=0)
    output, weights = attention(x, x, x, padding, chain=chain)
    assert not weights[1].any()
    (output.sum() + chain.penalty()).backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()


@every_mechanism
def test_nan_in_the_input_reaches_the_output_and_no_other_example(mechanisms: list[overt.Mechanism]) -> None:
    model, x = overt.Encoder(16, 2, 2, mechanisms).eval(), inputs(2, 4, 16)
    x[0, 1, 3] = float("nan")
    output = model(x)
    assert output[0].isnan().all()
    assert output[1].isfinite().all()


def test_wrong_calls_are_named_in_one_line() -> None:
    attention, x = overt.MultiheadAttention(8, 2, batch_first=True), inputs(2, 4, 8)
    calls = [
        ((x[0, 0], x, x), {}, ValueError, "query, key and value must all have 3 axes, or 2 without a batch"),
        ((x[..., :6], x, x), {}, ValueError, r"query must be 8 wide \(embed_dim\), got 6"),
        ((x, x, x[:, :3]), {}, ValueError, "key and value must have the same batch and length"),
        ((x[:1], x, x), {}, ValueError, "query and key must have the same batch size, got 1 and 2"),
        (
            (x.double(), x, x),
            {},
            TypeError,
            "query is torch.float64 but the module's weights are torch.float32",
        ),
        ((x, x.bfloat16(), x), {}, TypeError, "key is torch.bfloat16 but the module's weights"),
        (
            (x, x, x, torch.zeros(2, 3)),
            {},
            ValueError,
            r"key_padding_mask must have shape \(2, 4\), got \(2, 3\)",
        ),
        (
            (x, x, x),
            {"attn_mask": torch.zeros(3, 4)},
            ValueError,
            r"attn_mask must have shape \(4, 4\), got \(3, 4\)",
        ),
        (
            (x, x, x),
            {"attn_mask": torch.zeros(3, 4, 4)},
            ValueError,
            r"attn_mask must have shape \(4, 4, 4\)",
        ),
        (
            (x, x, x),
            {"attn_mask": torch.zeros(4, 4).long()},
            TypeError,
            "a mask must be boolean or floating-point",
        ),
        (
            (x, x[:, :3], x[:, :3]),
            {"is_causal": True},
            ValueError,
            "at least as many keys as queries, got 3 and 4",
        ),
    ]
    for arguments, options, kind, message in calls:
        with pytest.raises(kind, match=message) as error:
            attention(*arguments, **options)
        assert "\n" not in str(error.value)


def test_wrong_constructions_are_named_in_one_line() -> None:
    constructions = [
        ({"num_heads": 3}, ValueError, r"num_heads must divide embed_dim \(8\), got 3"),
        ({"num_heads": 4, "num_key_heads": 3}, ValueError, r"key_heads must divide heads \(4\), got 3"),
        (
            {"mechanisms": ["evolving"]},
            TypeError,
            r"mechanisms must be Bayesian\(…\), Evolving\(…\).* or .*got 'ev",
        ),
        ({"mechanisms": [EVOLVING, EVOLVING]}, ValueError, "mechanisms may hold one Evolving, got 2"),
        ({"mechanisms": EVOLVING}, TypeError, "mechanisms must be a list"),
        ({"kind": "self"}, ValueError, "kind must be one of 'encoder', 'decoder', 'cross'; got 'self'"),
        ({"layer": -1}, ValueError, "layer must be a whole number of at least 0, got -1"),
        ({"score": "cosine"}, ValueError, "score must be one of 'dot', 'additive'; got 'cosine'"),
        ({"dropout": 1.5}, ValueError, r"dropout must lie in \[0, 1\], got 1.5"),
    ]
    for options, kind, message in constructions:
        with pytest.raises(kind, match=message):
            overt.MultiheadAttention(8, **{"num_heads": 2, **options})  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match="memory, the encoder's output, is needed by a decoder with cross=True"
    ):
        overt.Decoder(8, 2, 1, cross=True)(inputs(1, 3, 8))
    with pytest.raises(ValueError, match="layers must be a whole number of at least 1, got 0"):
        overt.Encoder(8, 2, 0)


def test_wrong_chains_are_named_in_one_line() -> None:
    with pytest.raises(ValueError, match="step must be a whole number of at least 0, got -1"):
        overt.Chain(step=-1)
    with pytest.raises(TypeError, match=r"sample must hold whole numbers, got a torch.float32 tensor"):
        overt.Chain(sample=torch.tensor(0.5))
    attention, x = overt.MultiheadAttention(8, 2, batch_first=True, mechanisms=[BAYESIAN]), inputs(2, 4, 8)
    with pytest.raises(ValueError, match=r"examples must number the batch's 2 examples, got shape \(3,\)"):
        attention(x, x, x, chain=overt.Chain(step=0, examples=torch.arange(3)))
    with pytest.raises(
        ValueError, match=r"sample must be one number or one for each of the batch's 2 examples"
    ):
        attention(x, x, x, chain=overt.Chain(step=0, sample=torch.arange(3)))


def test_a_single_hidden_key_is_hidden() -> None:
    attention = overt.MultiheadAttention(8, 2, batch_first=True, mechanisms=[overt.Evolving()])
    nn.init.ones_(attention.out_proj.bias)
    x = inputs(1, 1, 8)
    output, weights = attention(x, x, x, torch.tensor([[True]]))
    assert not output.any()
    assert not weights.any()

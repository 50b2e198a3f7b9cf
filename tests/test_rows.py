"""A map that is made row by row, as recurrent decoders do, is the map that all rows at once would give."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

import overt
from conftest import random_maps
from overt.mechanisms import AttentionMap, Site
from overt.mechanisms.call import AttentionCall
from overt.mechanisms.seen import Seen

BATCH, HEADS, ROWS, KEYS, DIM = 3, 2, 5, 6, 4
# The second example's words end early, and the third's keys; the first has no padding.
REAL = torch.arange(ROWS) < torch.tensor([[5], [2], [4]])
SHOWN = torch.arange(KEYS) < torch.tensor([[6], [5], [3]])
LAWS = [
    overt.Bayesian(
        family=family, prior=prior, kl_reduction=reduction, k=3.0, sigma=0.4, prior_sigma=2.0, kl_weight=1.0
    )
    for family, prior, reduction in product(
        ("weibull", "lognormal"), ("contextual", "fixed"), ("mean", "sum")
    )
]
every_law = pytest.mark.parametrize(
    "law", LAWS, ids=lambda law: f"{law.family} {law.prior} {law.kl_reduction}"
)


def attention(law: overt.Bayesian) -> overt.MultiheadAttention:
    settings = {"mechanisms": [law], "kind": "cross", "score": "additive", "batch_first": True}
    return overt.MultiheadAttention(HEADS * DIM, HEADS, **settings).double()


def gradients(loss: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    found = torch.autograd.grad(loss, leaves, allow_unused=True)
    return [torch.zeros_like(leaf) if one is None else one for one, leaf in zip(found, leaves, strict=True)]


# --- Rows fed to an attention one at a time ---


@every_law
def test_rows_one_at_a_time_have_the_weights_outputs_kl_and_gradients_of_all_rows_at_once(
    law: overt.Bayesian,
) -> None:
    module = attention(law)
    query, key = (random_maps(BATCH, n, HEADS * DIM, seed=n).requires_grad_() for n in (ROWS, KEYS))
    leaves = [query, key, *module.parameters()]

    def run(chain: overt.Chain, pieces: list[int]) -> tuple[Tensor, ...]:
        outputs, maps = [], []
        queries = zip(query.split(pieces, 1), REAL.split(pieces, 1), strict=True)
        for rows, real in queries:
            output, weights = module(
                rows, key, key, ~SHOWN, average_attn_weights=False, query_padding_mask=~real, chain=chain
            )
            outputs.append(output)
            maps.append(weights)
        output, weights = torch.cat(outputs, 1), torch.cat(maps, 2)
        loss = output.square().sum() + chain.penalty()
        return output, weights, chain.kl(per_example=True), *gradients(loss, leaves)

    whole = run(overt.Chain(step=3, seed=7), [ROWS])
    for pieces in ([1] * ROWS, [2, 3]):
        torch.testing.assert_close(run(overt.Chain(step=3, seed=7, keep=True, kl=True), pieces), whole)
    learned = dict(zip(["query", "key", *dict(module.named_parameters())], whole[3:], strict=True))
    assert all(bool(slope.any()) for name, slope in learned.items() if "prior" in name)


def test_rows_that_start_anew_each_time_have_the_first_rows_noise_and_the_last_rows_kl() -> None:
    """The negative control: what a decoder gets that makes a new chain for each word."""
    module, key = attention(LAWS[0]), random_maps(1, KEYS, HEADS * DIM)
    same = random_maps(1, 1, HEADS * DIM, seed=1)
    kept = overt.Chain(step=0, keep=True, kl=True)
    fed = [module(same, key, key, chain=kept)[1] for _ in range(3)]
    anew = [module(same, key, key, chain=overt.Chain(step=0))[1] for _ in range(3)]
    assert all(torch.equal(row, fed[0]) for row in anew)
    assert not torch.allclose(fed[0], fed[1])
    assert not torch.allclose(fed[1], fed[2])


def test_the_kl_of_pieces_is_not_the_last_ones_nor_the_mean_of_their_means() -> None:
    module, key = attention(LAWS[0]), random_maps(BATCH, KEYS, HEADS * DIM)
    query, parts = random_maps(BATCH, ROWS, HEADS * DIM, seed=1), []
    chain = overt.Chain(step=0, keep=True, kl=True)
    for t in range(ROWS):
        alone = overt.Chain(step=0)
        for each in (chain, alone):
            module(query[:, t : t + 1], key, key, ~SHOWN, query_padding_mask=~REAL[:, t : t + 1], chain=each)
        parts.append(alone.kl(per_example=True))
    joined = chain.kl(per_example=True)
    means = torch.stack(parts)
    assert not torch.allclose(joined, means[-1])
    assert not torch.allclose(joined[1], means[:, 1].mean()), "the finished rows' zeros are no cells"
    torch.testing.assert_close(joined[1], means[:2, 1].mean())


def test_without_kl_rows_in_pieces_compute_none() -> None:
    module, chain = attention(LAWS[0]), overt.Chain(step=0, keep=True)
    query, key = random_maps(1, 1, HEADS * DIM), random_maps(1, KEYS, HEADS * DIM)
    module(query, key, key, chain=chain)
    assert not chain.has_loss


# --- Maps whose rows are announced beforehand ---


def made(
    maps: list[AttentionMap], chain: overt.Chain, logits: Tensor, key: Tensor, prepare: bool
) -> tuple[Tensor, bool]:
    """The weights of all layers, (layer, batch, heads, query, key), made row by row by a recurrence.

    Each row's logits depend on the weights before it, in the layers below and in the row above.
    """
    seen = Seen(SHOWN, REAL)
    makers = [one.rows(key, ROWS, chain, seen, prepare=prepare) for one in maps]
    rows, carried = [], torch.zeros_like(logits[:, :, :1])
    for t in range(ROWS):
        row = []
        for maker in makers:
            carried = maker.weights(logits[:, :, t : t + 1] - carried, key[:, :, :1])
            row.append(carried)
        rows.append(torch.stack(row))
    for maker in makers:
        maker.finish()
    return torch.cat(rows, dim=3), all(maker.prepared for maker in makers)


def maps_of(mechanisms: list[overt.Mechanism], layers: int = 1) -> list[AttentionMap]:
    maps = [AttentionMap(mechanisms, Site(HEADS, DIM, "cross", n)).double() for n in range(layers)]
    for one in maps:
        for parameter in one.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
    return maps


def run(
    maps: list[AttentionMap], chain: overt.Chain, prepare: bool
) -> tuple[tuple[Tensor, Tensor, Tensor, list[Tensor]], bool]:
    logits = random_maps(BATCH, HEADS, ROWS, KEYS).requires_grad_()
    key = random_maps(BATCH, HEADS, KEYS, DIM, seed=1).requires_grad_()
    weights, prepared = made(maps, chain, logits, key, prepare)
    probe = random_maps(*weights.shape, seed=2)
    leaves = [logits, key, *(parameter for one in maps for parameter in one.parameters())]
    kl = chain.kl(per_example=True)
    found = gradients((weights * probe).sum() + chain.penalty(), leaves)
    return (weights, kl, chain.penalty(), found), prepared


@every_law
def test_prepared_rows_equal_those_that_bayesian_makes_one_by_one(law: overt.Bayesian) -> None:
    maps = maps_of([law])
    got, prepared = run(maps, overt.Chain(step=2, examples=9), prepare=True)
    want, unprepared = run(maps, overt.Chain(step=2, examples=9), prepare=False)
    assert prepared
    assert not unprepared
    torch.testing.assert_close(got, want)
    assert bool(got[1].any())


def test_prepared_rows_equal_the_compiled_loops_in_float32() -> None:
    logits, key = random_maps(BATCH, HEADS, 1, KEYS).float(), random_maps(BATCH, HEADS, KEYS, DIM).float()
    one, chains, drawn = maps_of([LAWS[0]])[0].float(), [overt.Chain(step=2) for _ in range(2)], []
    for chain, prepare in zip(chains, (True, False), strict=True):
        rows = one.rows(key, 1, chain, Seen(SHOWN), prepare=prepare)
        drawn.append(rows.weights(logits))
        rows.finish()
    torch.testing.assert_close(*drawn, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(*(chain.kl() for chain in chains))


@every_law
def test_prepared_rows_equal_the_map_of_all_rows_at_once(law: overt.Bayesian) -> None:
    one, chain, whole = maps_of([law])[0], overt.Chain(step=2), overt.Chain(step=2)
    logits, key = random_maps(BATCH, HEADS, ROWS, KEYS), random_maps(BATCH, HEADS, KEYS, DIM, seed=1)
    rows = one.rows(key, ROWS, chain, Seen(SHOWN, REAL))
    weights = torch.cat([rows.weights(row) for row in logits.split(1, 2)], dim=2)
    rows.finish()
    call = AttentionCall(one.site, key[..., :1, :], key, key, logits=logits, seen=Seen(SHOWN, REAL))
    torch.testing.assert_close(weights, one(replace(call, left_alone="sdpa"), whole))
    torch.testing.assert_close(chain.kl(per_example=True), whole.kl(per_example=True))


@pytest.mark.parametrize(
    ("mechanisms", "layers"),
    [
        ([overt.Evolving(), LAWS[0]], 1),
        ([overt.Evolving(), LAWS[0]], 2),
        ([overt.Evolving()], 2),
        ([overt.Evolving(first=True, alpha=0.4), LAWS[0]], 1),
        ([overt.Synthesizer(max_length=8)], 1),
    ],
    ids=["Evolving and Bayesian", "two layers of them", "Evolving", "Evolving first", "Synthesizer"],
)
def test_mechanisms_that_must_see_each_row_are_called_row_by_row(
    mechanisms: list[overt.Mechanism], layers: int
) -> None:
    maps = maps_of(mechanisms, layers)
    asked, prepared = run(maps, overt.Chain(step=1), prepare=True)
    kept, _ = run(maps, overt.Chain(step=1, keep=True, kl=True), prepare=False)
    assert not prepared
    torch.testing.assert_close(asked, kept)
    weights = asked[0].detach()
    # All rows at once, from the logits that the recurrence had in the end.
    logits, key = random_maps(BATCH, HEADS, ROWS, KEYS), random_maps(BATCH, HEADS, KEYS, DIM, seed=1)
    steps = weights.permute(3, 0, 1, 2, 4).flatten(0, 1)  # (row · layer, batch, heads, key)
    before = torch.cat([torch.zeros_like(steps[:1]), steps[:-1]]).view(ROWS, layers, *steps.shape[1:])
    whole, query = overt.Chain(step=1), key[:, :, :1].expand(-1, -1, ROWS, -1)
    for n, one in enumerate(maps):
        scores = logits - before[:, n].permute(1, 2, 0, 3)
        call = AttentionCall(one.site, query, key, key, logits=scores, seen=Seen(SHOWN, REAL))
        torch.testing.assert_close(one(replace(call, left_alone="sdpa"), whole), weights[n])
    torch.testing.assert_close(whole.kl(per_example=True), asked[1])


def test_in_evaluation_rows_are_means_and_without_mechanisms_a_softmax() -> None:
    logits, key = random_maps(BATCH, HEADS, ROWS, KEYS), random_maps(BATCH, HEADS, KEYS, DIM)
    want = logits.masked_fill(~SHOWN.view(BATCH, 1, 1, KEYS), -torch.inf).softmax(dim=-1)
    for one in (maps_of([LAWS[0]])[0].eval(), maps_of([])[0]):
        chain = overt.Chain()
        rows = one.rows(key, ROWS, chain, Seen(SHOWN))
        got = torch.cat([rows.weights(row) for row in logits.split(1, 2)], dim=2)
        rows.finish()
        torch.testing.assert_close(got, want)
        assert rows.prepared
        assert not chain.has_loss


def test_rows_continue_where_an_earlier_piece_of_the_sequence_ended() -> None:
    one, key = maps_of([LAWS[0]])[0], random_maps(BATCH, HEADS, KEYS, DIM)
    logits = random_maps(BATCH, HEADS, ROWS, KEYS)
    whole, pieces, maps = overt.Chain(step=0), overt.Chain(step=0, keep=True, kl=True), []
    for chain, lengths in ((whole, [ROWS]), (pieces, [2, 3])):
        weights = []
        for part, real in zip(logits.split(lengths, 2), REAL.split(lengths, 1), strict=True):
            rows = one.rows(key, part.shape[2], chain, Seen(SHOWN, real))
            weights += [rows.weights(row) for row in part.split(1, 2)]
            rows.finish()
        maps.append(torch.cat(weights, dim=2))
    torch.testing.assert_close(*maps)
    torch.testing.assert_close(pieces.kl(), whole.kl())


def test_rows_are_counted_and_other_kinds_are_refused_by_name() -> None:
    one, key = maps_of([])[0], random_maps(BATCH, HEADS, KEYS, DIM)
    rows = one.rows(key, 1, overt.Chain())
    with pytest.raises(ValueError, match="1 rows were announced, and 0 made"):
        rows.finish()
    rows.weights(random_maps(BATCH, HEADS, 1, KEYS))
    with pytest.raises(ValueError, match="all 1 rows"):
        rows.weights(random_maps(BATCH, HEADS, 1, KEYS))
    with pytest.raises(ValueError, match="no causal mask"):
        one.rows(key, 1, overt.Chain(), Seen(causal=True))
    with pytest.raises(ValueError, match="kind=\"cross\", got kind='decoder'"):
        AttentionMap([], Site(HEADS, DIM, "decoder")).rows(key, 1, overt.Chain())

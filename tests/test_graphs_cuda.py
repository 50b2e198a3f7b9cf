"""Graph attention on a GPU: the CPU's noise and numbers, trainings that repeat bitwise, traces."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import overt
from conftest import random_maps
from graphs import blocks, karate
from overt.graphs import GAT, GATConv, GATv2Conv
from overt.graphs import trace as trace_nodes
from overt.mechanisms import noise
from overt.mechanisms.bayesian.edges import edge_noise, total_kl
from overt.mechanisms.edges import aggregate, edge_log_softmax, edge_softmax

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
# Read when cuBLAS starts, which is after every test file is read: without it, its sums have no order.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

MECHANISMS: dict[str, Any] = {
    "plain": [],
    "weibull": [overt.Bayesian(k=2.0, prior_beta=0.5)],
    "lognormal": [overt.Bayesian(family="lognormal", sigma=0.5)],
    "fixed": [overt.Bayesian(k=2.0, prior="fixed")],
    "official": [overt.Bayesian(k=2.0, preset="official")],
    "evolving": [overt.Evolving(alpha=0.3, beta=0.0)],
    "both": [overt.Evolving(alpha=0.3, beta=0.0), overt.Bayesian(k=2.0)],
}
STILL = overt.Bayesian(family="lognormal", sigma=1e-15)
every_mechanism = pytest.mark.parametrize("mechanisms", MECHANISMS.values(), ids=MECHANISMS)
both_scores = pytest.mark.parametrize("scores", ["gat", "gatv2"])


@pytest.fixture
def deterministic() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


def network(mechanisms: Any, scores: Any = "gat", dropout: float = 0.0) -> GAT:
    return GAT(24, 3, mechanisms, width=4, heads=2, out_heads=2, dropout=dropout, scores=scores)


def test_draws_on_edges_are_the_cpus_bit_for_bit() -> None:
    ends = torch.randint(0, 10_000, (2, 5000), generator=torch.Generator().manual_seed(0))
    key = noise.stream(torch.tensor(3), torch.tensor(5), 1, torch.tensor(2), 0)
    here = noise.uniform_edges(key, 5, *ends, 7)
    there = noise.uniform_edges(key.cuda(), 5, *ends.cuda(), 7)
    assert torch.equal(there.cpu(), here)
    for config in (STILL, overt.Bayesian(family="lognormal", sigma=1.0), overt.Bayesian()):
        torch.testing.assert_close(
            edge_noise(there, config).cpu(), edge_noise(here, config), rtol=1e-5, atol=1e-6
        )


def test_operations_on_edges_are_the_cpus_compiled_ones_with_gradients() -> None:
    ends = torch.randint(0, 50, (2, 400), generator=torch.Generator().manual_seed(0))
    found = []
    for device in ("cpu", "cuda"):
        source, target = ends.to(device)
        scores = (3 * random_maps(400, 4, dtype=torch.float32)).to(device).requires_grad_()
        values = random_maps(50, 4, 6, seed=1, dtype=torch.float32).to(device).requires_grad_()
        logs = edge_log_softmax(scores, target, 50)
        out = aggregate(edge_softmax(scores, target, 50), values, source, target, 50)
        kl = total_kl(logs, logs.flip(0), overt.Bayesian())
        loss = out.square().sum() + kl / 400
        found.append([logs, out, kl, *torch.autograd.grad(loss, (scores, values))])
    for here, there in zip(*found, strict=True):
        torch.testing.assert_close(there.detach().cpu(), here.detach(), rtol=1e-4, atol=1e-4)


def loss_and_gradients(model: nn.Module, x: Tensor, edge_index: Tensor) -> list[Tensor]:
    model.zero_grad()
    with overt.Chain(step=2) as chain:
        out = model(x, edge_index)
    (out.square().mean() + chain.penalty().to(out.device)).backward()
    gradients = [p.grad.cpu().clone() for p in model.parameters() if p.grad is not None]
    return [out.detach().cpu(), chain.kl().detach().cpu(), *gradients]


@both_scores
@every_mechanism
def test_outputs_kl_and_gradients_are_the_cpus(mechanisms: Any, scores: str) -> None:
    data = blocks(60)
    for dtype, tolerance in ((torch.float64, 1e-6), (torch.float32, 1e-3)):
        model = network(mechanisms, scores).to(dtype)
        want = loss_and_gradients(model, data.x.to(dtype), data.edge_index)
        got = loss_and_gradients(model.cuda(), data.x.to(dtype).cuda(), data.edge_index.cuda())
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("layer_of", [GATConv, GATv2Conv])
def test_drawn_weights_are_the_cpus(layer_of: Any) -> None:
    data = karate()
    layer = layer_of(34, 4, heads=3, mechanisms=MECHANISMS["weibull"])
    found = []
    for device in ("cpu", "cuda"):
        x, edge_index = data.x.to(device), data.edge_index.to(device)
        drawn = layer.to(device)(x, edge_index, return_attention_weights=True, chain=overt.Chain(step=1))
        found.append((drawn[1][0].cpu(), drawn[1][1].detach().cpu()))
    assert torch.equal(found[0][0], found[1][0])
    torch.testing.assert_close(found[1][1], found[0][1], rtol=1e-4, atol=1e-5)


def trained(mechanisms: Any, steps: int = 4) -> tuple[list[Tensor], list[Tensor]]:
    """Losses, and weights but for the prior's, after a few steps with dropout."""
    data = blocks(60).to("cuda")
    torch.manual_seed(0)
    model = network(mechanisms, dropout=0.6).cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    losses = []
    for step in range(steps):
        chain = overt.Chain(step=step)
        logits = model(data.x, data.edge_index, chain=chain)
        loss = nn.functional.cross_entropy(logits[data.train_mask], data.y[data.train_mask])
        optimizer.zero_grad()
        (loss + chain.penalty().to("cuda")).backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses, [value.detach() for name, value in model.named_parameters() if "prior" not in name]


@pytest.mark.usefixtures("deterministic")
@every_mechanism
def test_a_training_with_deterministic_algorithms_repeats_bitwise(mechanisms: Any) -> None:
    first, again = trained(mechanisms), trained(mechanisms)
    assert all(map(torch.equal, first[0], again[0]))
    assert all(map(torch.equal, first[1], again[1]))


@pytest.mark.usefixtures("deterministic")
def test_without_a_spread_and_a_kl_training_is_plain_training_bit_for_bit() -> None:
    still = overt.Bayesian(family="lognormal", sigma=1e-15, prior=None)
    got, want = trained([still]), trained([])
    assert all(map(torch.equal, got[0], want[0]))
    assert all(map(torch.equal, got[1], want[1]))
    other = trained([overt.Bayesian(family="lognormal", sigma=0.5, prior=None)])
    assert not torch.equal(other[0][-1], want[0][-1]), "a control with a spread"


@pytest.mark.usefixtures("deterministic")
def test_a_layer_without_a_spread_is_the_plain_one_bit_for_bit() -> None:
    data = blocks(60).to("cuda")
    plain, still = GATConv(24, 4, heads=2).cuda(), GATConv(24, 4, heads=2, mechanisms=[STILL]).cuda()
    still.load_state_dict(plain.state_dict(), strict=False)
    got = still(data.x, data.edge_index, chain=overt.Chain(step=0))
    assert torch.equal(got, plain(data.x, data.edge_index))


def test_checkpointing_gives_the_same_gradients() -> None:
    data = blocks(60).to("cuda")
    layer = GATConv(24, 4, heads=2, mechanisms=MECHANISMS["weibull"]).cuda()
    found = []
    for saved in (False, True):
        layer.zero_grad()
        chain, x = overt.Chain(step=0), data.x.clone().requires_grad_()
        if saved:
            out = checkpoint(layer, x, data.edge_index, chain=chain, use_reentrant=False)
        else:
            out = layer(x, data.edge_index, chain=chain)
        (out.square().mean() + chain.penalty()).backward()
        found.append([p.grad.clone() for p in layer.parameters() if p.grad is not None])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_autocast_gives_finite_numbers() -> None:
    data = blocks(60).to("cuda")
    for dtype in (torch.float16, torch.bfloat16):
        model, chain = network(MECHANISMS["both"]).cuda(), overt.Chain(step=0)
        with torch.autocast("cuda", dtype=dtype):
            out = model(data.x, data.edge_index, chain=chain)
        assert out.isfinite().all()
        assert chain.kl().dtype == torch.float32
        (out.float().square().mean() + chain.penalty()).backward()
        assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("samples", [0, 3])
def test_a_trace_on_the_gpu_is_the_trace_on_the_cpu(samples: int) -> None:
    data = blocks(60)
    model = network(MECHANISMS["weibull"], dropout=0.6)
    here = trace_nodes(model, data.x, data.edge_index, samples=samples)
    there = trace_nodes(model.cuda(), data.x.cuda(), data.edge_index.cuda(), samples=samples)
    for node in (0, 17):
        want, got = here.neighbours(node), there.neighbours(node)
        assert got.ids.device.type == "cpu"
        order, other = want.ids.argsort(), got.ids.argsort()
        assert torch.equal(got.ids[other], want.ids[order])
        for method in want.methods:
            torch.testing.assert_close(
                got.value(method)[other], want.value(method)[order], rtol=1e-3, atol=1e-4
            )
            spread, wanted = got.spread(method), want.spread(method)
            assert (spread is None) == (samples == 0)
            if spread is not None and wanted is not None:
                torch.testing.assert_close(spread[other], wanted[order], rtol=1e-2, atol=1e-4)

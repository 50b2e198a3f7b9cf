"""The same claims on a GPU: the CPU's noise and numbers, no leak beyond rounding, one graph, bfloat16."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import overt
from overt.mechanisms import noise
from overt.models.seq2seq import Seq2Seq
from stacks import MECHANISMS, enliven, inputs

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
every_mechanism = pytest.mark.parametrize("mechanisms", MECHANISMS.values(), ids=MECHANISMS)


def test_noise_on_the_gpu_is_the_cpus_bit_for_bit() -> None:
    key = noise.stream(torch.tensor(3), torch.tensor(5), 1, torch.tensor(0), 0)
    here = noise.uniform(key, torch.arange(4), 8, 33, 65, first_row=7)
    there = noise.uniform(key.cuda(), torch.arange(4).cuda(), 8, 33, 65, first_row=7)
    assert torch.equal(there.cpu(), here)


def test_keys_of_noise_on_the_gpu_are_the_cpus() -> None:
    address = torch.tensor(-3), torch.tensor(2**35), 1, torch.arange(5), 2
    there = noise.stream(*(x.cuda() if isinstance(x, Tensor) else x for x in address))  # type: ignore[arg-type]
    assert torch.equal(there.cpu(), noise.stream(*address))


@pytest.mark.parametrize("attention", ["soft", "bayesian", "marginal", "variational-enumerated"])
def test_the_lstm_has_the_cpus_loss_and_gradients_and_trains_under_autocast(attention: str) -> None:
    bayesian = attention == "bayesian"
    mechanisms = [overt.Bayesian.paper("WC", k=5, rho=1)] if bayesian else []
    sizes = {"embedding": 16, "encoder": 8, "decoder": 24, "score": 16, "dropout": 0.0}
    name = "soft" if bayesian else attention
    model = Seq2Seq(20, 20, name, mechanisms, **sizes).double()  # type: ignore[arg-type]
    ids = torch.randint(3, 20, (3, 6), generator=torch.Generator().manual_seed(0))
    mask, labels = torch.ones_like(ids), ids.flip(1)
    mask[1, 4:], labels[1, 3:] = 0, -100

    def run(device: str) -> list[Tensor]:
        model.to(device).zero_grad()
        loss = model(*(x.to(device) for x in (ids, mask, ids, labels)))["loss"]
        loss.backward()
        return [
            loss.detach().cpu(),
            *[p.grad.cpu().clone() for p in model.parameters() if p.grad is not None],
        ]

    want, got = run("cpu"), run("cuda")
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-8)
    model.float()
    with torch.autocast("cuda", torch.bfloat16):
        half = run("cuda")
    torch.testing.assert_close(half[0], want[0].float(), rtol=0.05, atol=0.0)
    assert all(bool(x.isfinite().all()) for x in half)
    assert model.translate(ids.cuda(), beam=3, max_length=9)[0].shape[0] == 3


def loss_and_gradients(model: torch.nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    chain = overt.Chain(step=2)
    loss = model(x, chain=chain).square().mean() + chain.penalty()
    loss.backward()
    return [loss.detach().cpu(), *[p.grad.cpu().clone() for p in model.parameters() if p.grad is not None]]


@every_mechanism
def test_outputs_and_gradients_are_the_cpus(mechanisms: list[overt.Mechanism]) -> None:
    model, x = (
        overt.Encoder(32, 4, 3, mechanisms, dropout=0.0).double(),
        inputs(2, 9, 32, dtype=torch.float64),
    )
    enliven(model)
    want = loss_and_gradients(model, x)
    got = loss_and_gradients(model.cuda(), x.cuda())
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("name", ["evolving", "bayesian", "both"])
def test_future_target_tokens_change_earlier_outputs_by_rounding_at_most(name: str) -> None:
    model = overt.Decoder(32, 4, 3, MECHANISMS[name], cross=True, dropout=0.0).cuda()
    enliven(model)
    x, memory = inputs(2, 40, 32).cuda(), inputs(2, 20, 32, seed=1).cuda()
    changed = x.clone()
    changed[:, 25:] = inputs(2, 15, 32, seed=2).cuda()
    before, after = (model(y, chain=overt.Chain(step=0), memory=memory) for y in (x, changed))
    torch.testing.assert_close(before[:, :25], after[:, :25], rtol=0, atol=1e-4)
    assert (before[:, 25:] - after[:, 25:]).abs().max() > 0.1


@pytest.mark.filterwarnings("default")  # the compiler warns of the card's unused modes, among others
@every_mechanism
def test_inductor_compiles_the_training_step(mechanisms: list[overt.Mechanism]) -> None:
    torch.compiler.reset()
    model, x = overt.Encoder(32, 4, 2, mechanisms, dropout=0.0).cuda(), inputs(2, 16, 32).cuda()
    enliven(model)
    want = loss_and_gradients(model, x)
    got = loss_and_gradients(torch.compile(model, fullgraph=True), x)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-3, atol=2e-4)


@every_mechanism
def test_bfloat16_autocast_trains(mechanisms: list[overt.Mechanism]) -> None:
    model, x = overt.Encoder(32, 4, 3, mechanisms).cuda(), inputs(2, 16, 32).cuda()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        values = loss_and_gradients(model, x)
    assert all(value.isfinite().all() for value in values)

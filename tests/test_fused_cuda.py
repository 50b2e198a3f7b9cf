"""What only a GPU can show of fused kernels: compilers, CUDA graphs, autocast, memory, fast logarithms."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor

import overt
from acting import attended
from fused_models import MECHANISMS, attached, kernels_in, spied
from overt.mechanisms.bayesian.layer import BayesianLayer
from overt.mechanisms.seen import Seen
from stacks import enliven

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
every_form = pytest.mark.parametrize("form", MECHANISMS)


def found(model: Any, x: Tensor, step: Tensor | int) -> list[Tensor]:
    chain = overt.Chain(step=step)
    loss = model(x, chain=chain).square().mean() + chain.penalty()
    gradients = torch.autograd.grad(
        loss, [p for p in model.parameters() if p.requires_grad], allow_unused=True
    )
    return [loss, *[gradient for gradient in gradients if gradient is not None]]


def encoder(form: str) -> tuple[Any, Tensor, Tensor]:
    torch.manual_seed(0)
    model = overt.Encoder(128, 4, 3, MECHANISMS[form], dropout=0.0).cuda()
    enliven(model)
    return model, torch.randn(2, 70, 128, device="cuda"), torch.tensor(3, device="cuda")


@pytest.mark.filterwarnings("default")
@every_form
def test_inductor_compiles_the_training_step_in_one_graph(form: str) -> None:
    torch.compiler.reset()
    model, x, step = encoder(form)
    want = found(model, x, step)
    graphs: list[torch.fx.GraphModule] = []
    got = found(torch.compile(model, backend=spied(graphs, "inductor"), fullgraph=True), x, step)
    assert kernels_in(graphs) == 3
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-3, atol=2e-4)


@pytest.mark.filterwarnings("default")
@every_form
def test_a_cuda_graph_replays_the_training_step_with_the_steps_own_noise(form: str) -> None:
    model, x, step = encoder(form)
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(2):
            found(model, x, step)
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = found(model, x, step)
    for number in (5, 6):
        step.fill_(number)
        graph.replay()
        for a, b in zip(got, found(model, x, step), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("form", [form for form in MECHANISMS if form != "evolving"])
def test_a_cuda_graph_does_not_take_a_step_of_the_host(form: str) -> None:
    model, x, step = encoder(form)
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        found(model, x, step)
        found(model, x, 3)  # outside of a capture either will do
    torch.cuda.current_stream().wait_stream(aside)
    message = "pass Chain a step tensor on the device"
    with pytest.raises(RuntimeError, match=message), torch.cuda.graph(torch.cuda.CUDAGraph()):
        found(model, x, 3)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = found(model, x, step)
    graph.replay()
    for a, b in zip(got, found(model, x, 3), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@every_form
def test_autocast_runs_the_kernels_in_bfloat16(form: str, caplog: pytest.LogCaptureFixture) -> None:
    model, x, step = encoder(form)
    want = found(model, x, step)
    with torch.autocast("cuda", torch.bfloat16), caplog.at_level("DEBUG", "overt"):
        got = found(model, x, step)
    assert any("fused kernels" in record.getMessage() for record in caplog.records)
    for a, b in zip(got, want, strict=True):
        assert (a - b).norm() < 0.05 * b.norm() + 1e-3


@every_form
def test_checkpointing_gives_the_same_gradients(form: str) -> None:
    model, inputs = attached("bert", MECHANISMS[form])
    parameters = [p for p in model.parameters() if p.requires_grad]

    def gradients() -> list[Tensor | None]:
        model.overt_state.seen.zero_()
        return list(torch.autograd.grad(model(**inputs).loss, parameters, allow_unused=True))

    want = gradients()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for a, b in zip(gradients(), want, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_bayesian_memory_is_linear_in_the_length() -> None:
    layer = BayesianLayer(overt.Bayesian(), overt.mechanisms.Site(4, 64)).cuda().train()

    def peak(length: int) -> int:
        q, k, v = (torch.randn(1, 4, length, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        q, k, v = q.requires_grad_(), k.requires_grad_(), v.requires_grad_()
        for _ in range(2):
            gc.collect()  # what other tests left must not be freed meanwhile
            torch.cuda.reset_peak_memory_stats()
            held = torch.cuda.memory_allocated()
            chain = overt.Chain(step=torch.tensor(0, device="cuda"))
            out = attended(layer, q, k, v, 0.125, Seen(), chain, 0, 0.0)
            torch.autograd.grad(out.float().sum() + chain.kl(), [q, k, v, *layer.parameters()])
            del out, chain
        return torch.cuda.max_memory_allocated() - held

    assert peak(8192) < 4.5 * peak(2048)


def test_fast_noise_has_the_moments_of_the_family() -> None:
    """In bfloat16 logarithms are the hardware's; of equal scores, weights have the draw's own moments."""
    length, heads, k = 4096, 4, 2.0
    layer = BayesianLayer(overt.Bayesian(k=k, prior=None), overt.mechanisms.Site(heads, 64)).cuda().train()
    q = torch.zeros(1, heads, 1024, 64, device="cuda", dtype=torch.bfloat16)
    keys = torch.zeros(1, heads, length, 64, device="cuda", dtype=torch.bfloat16)
    v = torch.zeros_like(keys)
    v[:, :, torch.arange(64) * 61, torch.arange(64)] = float(
        length
    )  # the output shows 64 weights of each row
    chain = overt.Chain(step=torch.tensor(0, device="cuda"))
    weights = attended(layer, q, keys, v, 0.125, Seen(), chain, 0, 0.0).double()
    # Weibull: E[S²]/E[S]² = Γ(1 + 2/k)/Γ(1 + 1/k)²; the row's sum is its mean times its length, nearly.
    lgamma = torch.lgamma(torch.tensor([1 + 2 / k, 1 + 1 / k], dtype=torch.float64))
    second = torch.exp(lgamma[0] - 2 * lgamma[1])
    assert abs(weights.mean() - 1.0) < 5e-3
    assert abs(weights.square().mean() - second) < 1e-2
    centred = weights - weights.mean()
    for axis in (1, 2, 3):  # heads, rows, columns
        assert abs((centred * centred.roll(1, dims=axis)).mean() / centred.square().mean()) < 2e-2

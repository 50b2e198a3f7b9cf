"""Fused kernels of Bayesian Attention are the definition: outputs, KL and every gradient.

On a GPU as they are; elsewhere in Triton's interpreter, at small sizes.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import overt
from acting import BayesianLayer, attended
from overt.mechanisms import backend as switch
from overt.mechanisms import noise
from overt.mechanisms.bayesian import fused
from overt.mechanisms.bayesian.naive import log_noise
from overt.mechanisms.maps import causal as causal_mask
from overt.mechanisms.maps import softmax
from overt.mechanisms.seen import Seen
from selection import covering

pytest.importorskip("triton", reason="triton is made for Linux alone")
CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
HALVES = [torch.float16, torch.bfloat16] if CUDA else [torch.float16]  # the interpreter's bfloat16 is wrong
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
SIZES = {
    "square": (2, 2, 2, 17, 17, 16),
    "odd": (2, 2, 1, 33, 65, 24),
    "one query": (2, 2, 2, 1, 37, 16),
    "one key": (2, 2, 2, 37, 1, 16),
    "grouped": (1, 4, 2, 20, 131, 32),
    "one whole tile": (1, 4, 2, 32, 32, 32),
}
if CUDA:
    SIZES |= {
        "whole tiles": (2, 4, 4, 256, 256, 64),
        "wide heads": (2, 4, 2, 200, 333, 128),
        "heads of 80": (2, 4, 2, 130, 257, 80),
        "long": (1, 2, 2, 1500, 2049, 64),
        "short, wide heads": (2, 4, 2, 29, 31, 128),
    }


@pytest.fixture(autouse=True)
def _kernels_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(switch, "KERNEL_DEVICES", {"cuda", "cpu"})


def error(got: Tensor, want: Tensor) -> float:
    """Relative norm of the difference; absolute where nothing is wanted."""
    got, want = got.detach().double().cpu(), want.detach().double().cpu()
    assert got.shape == want.shape
    assert got.isfinite().all()
    return float((got - want).norm() / (want.norm() if want.norm() > 0 else 1.0))


def drawn(shape: tuple[int, ...], seed: int, dtype: torch.dtype) -> Tensor:
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return values.to(dtype).to(DEVICE)


def seen_of(batch: int, queries: int, keys: int, padded: bool, causal: bool) -> Seen:
    if not padded:
        return Seen(None, None, causal)
    generator = torch.Generator().manual_seed(7)
    key_visible = torch.rand(batch, keys, generator=generator) > 0.3
    query_real = torch.rand(batch, queries, generator=generator) > 0.3
    key_visible[0] = False  # an example in which no query sees anything
    return Seen(key_visible.to(DEVICE), query_real.to(DEVICE), causal)


def visible_of(seen: Seen, batch: int, queries: int, keys: int) -> Tensor:
    visible = torch.ones(batch, 1, queries, keys, dtype=torch.bool, device=DEVICE)
    if seen.key_visible is not None:
        visible = visible & seen.key_visible.view(batch, 1, 1, keys)
    if seen.query_real is not None:
        visible = visible & seen.query_real.view(batch, 1, queries, 1)
    return visible & causal_mask(queries, keys, DEVICE) if seen.causal else visible


def layer_of(config: overt.Bayesian, heads: int, key_heads: int, width: int) -> BayesianLayer:
    torch.manual_seed(1)
    kind = "cross"  # the kind says nothing about masks here
    return BayesianLayer(config, overt.mechanisms.Site(heads, width, kind, 2, key_heads)).train().to(DEVICE)


def parameters(layer: BayesianLayer) -> list[Tensor]:
    return list(layer.parameters())


def compare(
    size: tuple[int, ...], config: overt.Bayesian, dtype: torch.dtype, padded: bool, causal: bool
) -> None:
    """Output, KL and all gradients of kernels in `dtype` against the definition in float64."""
    batch, heads, key_heads, queries, keys, width = size
    seen = seen_of(batch, queries, keys, padded, causal)
    layer, scale, first_row = layer_of(config, heads, key_heads, width), width**-0.5, 3
    shapes = (heads, queries), (key_heads, keys), (key_heads, keys)
    tensors = [drawn((batch, h, n, width), i, dtype).requires_grad_() for i, (h, n) in enumerate(shapes)]
    to_out = drawn((batch, heads, queries, width), 5, dtype)
    weight = torch.linspace(0.5, 1.5, batch, device=DEVICE)
    numbers = torch.arange(batch) + 11

    def chain() -> overt.Chain:
        return overt.Chain(step=7, seed=5, examples=numbers)

    mine = chain()
    out = attended(layer, *tensors, scale, seen, mine, first_row, 0.0)
    assert out.dtype == dtype
    loss = (out * to_out).sum().float()
    if config.prior is not None:
        loss = loss + (mine.kl(per_example=True) * weight).sum()
    got = [out, *torch.autograd.grad(loss, [*tensors, *parameters(layer)])]

    exact = [x.detach().double().requires_grad_() for x in tensors]
    layer.double()
    q, k, v = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in exact)
    visible = visible_of(seen, batch, queries, keys)
    logits, theirs = (q * scale) @ k.mT, chain()
    weights = layer(logits, visible, theirs, exact[1], None, first_row)
    out = weights.double() @ v
    loss = (out * to_out.double()).sum()
    if config.prior is not None:
        loss = loss + (theirs.kl(per_example=True) * weight).sum()
    want = [out, *torch.autograd.grad(loss, [*exact, *parameters(layer)])]
    for a, b in zip(got, want, strict=True):
        assert error(a, b) < TOLERANCE[dtype]
    if config.prior is not None:
        assert error(mine.kl(per_example=True), theirs.kl(per_example=True)) < TOLERANCE[torch.float32] * 50


CONFIGS = {
    "weibull": overt.Bayesian(k=2.0),
    "lognormal": overt.Bayesian(family="lognormal", sigma=0.7, prior_sigma=2.0),
    "weibull, scores, sum": overt.Bayesian(posterior="scores", kl_reduction="sum"),
    "lognormal, scores, sum": overt.Bayesian(
        family="lognormal", posterior="scores", kl_reduction="sum", prior_sigma=3.0
    ),
    "weibull, fixed": overt.Bayesian(prior="fixed", prior_alpha=0.3),
    "lognormal, official": overt.Bayesian(family="lognormal", preset="official", prior_sigma=5.0),
    "weibull, official": overt.Bayesian(preset="official"),
    "no KL": overt.Bayesian(prior=None, k=1.0),
}
MASKS = {"nothing hidden": (False, False), "padding": (True, False), "both": (True, True)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "mask"),
    covering(
        [(config, mask) for config in CONFIGS for mask in MASKS],
        # every law with every mask once, of each family
        [
            *[(config, list(MASKS)[number % 3]) for number, config in enumerate(CONFIGS)],
            *[(config, "both") for config in ("weibull", "lognormal")],
        ],
    ),
)
def test_outputs_kl_and_gradients_are_the_definitions(config: str, mask: str) -> None:
    compare((2, 2, 1, 17, 35, 16), CONFIGS[config], torch.float32, *MASKS[mask])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "family"),
    covering(
        [(size, family) for size in SIZES for family in ("weibull", "lognormal")],
        [(size, ("weibull", "lognormal")[number % 2]) for number, size in enumerate(SIZES)],
    ),
)
def test_every_shape_is_right(size: str, family: str) -> None:
    sizes = SIZES[size]
    masked = size != "one whole tile"  # where nothing is hidden and nothing sticks out, kernels do not look
    causal = masked and sizes[4] >= sizes[3]
    compare(sizes, overt.Bayesian(family=family, prior_sigma=2.0), torch.float32, masked, causal)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("family", ["weibull", "lognormal"])
@pytest.mark.parametrize("size", [size for name, size in SIZES.items() if CUDA or name == "odd"])
def test_half_precision_is_right_to_its_rounding(
    size: tuple[int, ...], family: str, dtype: torch.dtype
) -> None:
    compare(size, overt.Bayesian(family=family, prior_sigma=2.0), dtype, size[3] % 2 == 1, False)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("config", [overt.Bayesian(k=2.0), overt.Bayesian(family="lognormal", sigma=0.7)])
def test_the_noise_is_the_definitions_cell_by_cell(config: overt.Bayesian) -> None:
    # Values that pick out one key each: the output is the weights.
    batch, heads, queries, keys = 2, 3, 19, 64
    q, k = (
        drawn((batch, heads, queries, 64), 0, torch.float32),
        drawn((batch, heads, keys, 64), 1, torch.float32),
    )
    v = torch.eye(keys, device=DEVICE).expand(batch, heads, keys, keys).contiguous()
    chain = overt.Chain(step=3, seed=9, examples=torch.tensor([4, 1]))
    layer = layer_of(config, heads, heads, 64)
    weights = attended(layer, q, k, v, 0.125, Seen(), chain, 5, 0.0)
    unit = noise.uniform(
        noise.stream(chain.seed, torch.tensor(3), 2, torch.tensor(0), 2),
        chain.examples,
        heads,
        queries,
        keys,
        5,
    )
    logits = (q.double() * 0.125) @ k.double().mT + log_noise(unit.double(), config).to(DEVICE)
    want = softmax(logits, torch.ones(1, 1, 1, 1, dtype=torch.bool, device=DEVICE))
    torch.testing.assert_close(weights.double(), want, rtol=1e-4, atol=1e-7)


def test_the_mean_is_used_in_evaluation_and_its_kl_on_demand() -> None:
    layer = layer_of(overt.Bayesian(), 2, 2, 16).eval()
    q, k, v = (drawn((2, 2, 21, 16), i, torch.float32) for i in range(3))
    chain, plain = overt.Chain(kl=True), overt.Chain(kl=True)
    out = attended(layer, q, k, v, 0.25, Seen(), chain, 0, 0.0)
    torch.testing.assert_close(out, torch.nn.functional.scaled_dot_product_attention(q, k, v))
    layer(q @ k.mT * 0.25, torch.ones(1, 1, 1, 1, dtype=torch.bool, device=DEVICE), plain, k)
    torch.testing.assert_close(chain.kl(), plain.kl(), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_several_samples_at_once_are_the_samples_one_by_one() -> None:
    batch, heads, queries, keys, samples = 2, 2, 13, 40, 5
    q, k, v = (drawn((batch, heads, n, 16), i, torch.float32) for i, n in enumerate((queries, keys, keys)))
    layer = layer_of(overt.Bayesian(k=2.0, prior=None), heads, heads, 16)
    chain = overt.Chain(step=1, examples=torch.tensor([3, 8]))
    call = overt.AttentionCall(layer.site, q, k, v, 0.25)
    together = fused.draw({"Bayesian": layer}, call, chain, samples)
    assert together.shape == (samples, batch, heads, queries, 16)
    for number in range(samples):
        chain = overt.Chain(step=1, examples=torch.tensor([3, 8]), sample=number)
        alone = attended(layer, q, k, v, 0.25, Seen(), chain, 0, 0.0)
        torch.testing.assert_close(together[number], alone)


@pytest.mark.slow
@pytest.mark.parametrize("fused_way", [True, False])
@pytest.mark.parametrize("kind", ["encoder", "decoder"])
def test_draws_of_an_attention_are_its_samples(
    fused_way: bool, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not fused_way:
        monkeypatch.setattr(switch, "KERNEL_DEVICES", set())
    attention = overt.MultiheadAttention(32, 2, dropout=0.5, kind=kind, mechanisms=[overt.Bayesian(k=2.0)])  # type: ignore[arg-type]
    attention, x = attention.to(DEVICE).train(), drawn((7, 2, 32), 0, torch.float32)
    padding = (torch.arange(7) >= torch.tensor([[5], [7]])).to(DEVICE)
    found = attention.draws(x, x, x, 3, padding, chain=overt.Chain(step=4, examples=5))
    assert found.shape == (3, 7, 2, 32)
    assert attention.training
    attention.eval()
    for number in range(3):
        chain = overt.Chain(step=4, examples=5, sample=number)
        want, _ = attention(x, x, x, padding, need_weights=False, chain=chain)
        torch.testing.assert_close(found[number], want, rtol=1e-4, atol=1e-5)


def test_draws_need_random_weights() -> None:
    x = drawn((1, 3, 16), 0, torch.float32)
    with pytest.raises(ValueError, match="draws needs random weights"):
        overt.MultiheadAttention(16, 2).to(DEVICE).draws(x, x, x)


def test_dropout_drops_its_share_and_is_undone_in_the_mean() -> None:
    keys = 512
    v = torch.eye(keys, device=DEVICE)[:, :64].expand(1, 1, keys, 64).contiguous()
    q, k = torch.zeros(1, 1, 64, 64, device=DEVICE), torch.zeros(1, 1, keys, 64, device=DEVICE)
    layer = layer_of(overt.Bayesian(prior=None), 1, 1, 64).eval()
    torch.manual_seed(3)
    weights = attended(layer, q, k, v, 1.0, Seen(), overt.Chain(), 0, 0.25) * keys
    kept = weights != 0
    assert abs(kept.double().mean() - 0.75) < 4 * (0.25 * 0.75 / weights.numel()) ** 0.5
    torch.testing.assert_close(weights[kept], torch.full_like(weights[kept], 4 / 3))


def test_dropout_goes_the_same_way_backwards() -> None:
    # out is linear in v, so its gradient shows the dropped weights that the forward pass used.
    q, k = drawn((2, 2, 9, 16), 0, torch.float32), drawn((2, 2, 16, 16), 1, torch.float32)
    v = torch.eye(16, device=DEVICE).expand(2, 2, 16, 16).contiguous().requires_grad_()
    layer = layer_of(overt.Bayesian(prior=None), 2, 2, 16)
    torch.manual_seed(0)
    chain = overt.Chain(step=0, examples=torch.tensor([4, 4]))
    weights = attended(layer, q, k, v, 0.25, Seen(), chain, 0, 0.5)
    to_out = drawn((2, 2, 9, 16), 2, torch.float32)
    (to_value,) = torch.autograd.grad((weights * to_out).sum(), v)
    torch.testing.assert_close(to_value, weights.detach().mT @ to_out, rtol=1e-4, atol=1e-5)


def test_samples_of_one_example_drop_other_weights() -> None:
    """They have the number of their example, by which noise goes, and are in the same pass."""
    q, k = (
        drawn((1, 2, 9, 16), number, torch.float32).expand(3, -1, -1, -1).contiguous() for number in (0, 1)
    )
    v = torch.eye(9, 16, device=DEVICE).expand(3, 2, 9, 16).contiguous()
    layer = layer_of(overt.Bayesian(k=2.0, prior=None), 2, 2, 16)
    torch.manual_seed(0)
    chain = overt.Chain(step=0, examples=torch.tensor([4, 4, 4]), sample=torch.tensor([0, 0, 1]))
    weights = attended(layer, q, k, v, 0.25, Seen(), chain, 0, 0.5)[..., :9]
    dropped = weights == 0
    assert not torch.equal(dropped[0], dropped[1])
    assert not torch.equal(dropped[0], dropped[2])
    both = ~dropped[0] & ~dropped[1]
    torch.testing.assert_close(weights[0][both], weights[1][both], msg="the noise is the example's")


@pytest.mark.slow
def test_the_gradient_with_dropout_is_that_of_finite_differences() -> None:
    layer = layer_of(overt.Bayesian(k=2.0), 1, 1, 16)
    tensors = [drawn((1, 1, 8, 16), i, torch.float32).requires_grad_() for i in range(3)]

    def loss() -> Tensor:
        torch.manual_seed(0)
        chain = overt.Chain(step=0)
        out = attended(layer, *tensors, 0.25, Seen(None, None, True), chain, 0, 0.3)
        return out.square().sum() + chain.kl()

    gradients = torch.autograd.grad(loss(), tensors)
    for tensor, gradient in zip(tensors, gradients, strict=True):
        direction = torch.randn_like(tensor)
        with torch.no_grad():
            tensor += 1e-2 * direction
            above = loss()
            tensor -= 2e-2 * direction
            below = loss()
            tensor += 1e-2 * direction
        torch.testing.assert_close((above - below) / 2e-2, (gradient * direction).sum(), rtol=1e-2, atol=1e-2)


@pytest.mark.slow
def test_same_seed_same_bits() -> None:
    layer = layer_of(overt.Bayesian(), 2, 2, 16)
    q, k, v = (drawn((2, 2, 40, 16), i, torch.float32).requires_grad_() for i in range(3))

    def run() -> list[Tensor]:
        chain = overt.Chain(step=4, seed=1)
        out = attended(layer, q, k, v, 0.25, Seen(), chain, 0, 0.0)
        return [out, *torch.autograd.grad(out.square().sum() + chain.kl(), [q, k, v])]

    assert all(torch.equal(a, b) for a, b in zip(run(), run(), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("where", ["host", "device"])
def test_the_noise_follows_its_whole_address(where: str) -> None:
    """Seed, step, layer, kind, sample and example, as numbers or as tensors, are the definition's."""
    device = DEVICE if where == "device" else torch.device("cpu")
    big = torch.tensor(2**31 + 3, device=device)
    chains = [
        {"seed": -(2**62) + 12345, "step": big, "examples": torch.tensor(2**31 + 7, device=device)},
        {"seed": 5, "step": 0 * big, "sample": big + torch.arange(2, device=device)},
        {"seed": 5, "step": big, "sample": 3 + 0 * big, "examples": torch.arange(2, device=device) + big},
    ]
    layer = layer_of(overt.Bayesian(k=1.0, prior=None), 2, 2, 16)
    q, k, v = (drawn((2, 2, 9, 16), i, torch.float32) for i in range(3))
    every = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=DEVICE)
    for address in chains:
        got = attended(layer, q, k, v, 0.25, Seen(), overt.Chain(**address), 0, 0.0)
        want = layer(q @ k.mT * 0.25, every, overt.Chain(**address), k) @ v
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_the_log_says_which_path_ran_and_why(caplog: pytest.LogCaptureFixture) -> None:
    attention = overt.MultiheadAttention(16, 2, batch_first=True, mechanisms=[overt.Bayesian()]).to(DEVICE)
    x = drawn((1, 5, 16), 0, torch.float32)
    with caplog.at_level("DEBUG", "overt"):
        attention(x, x, x, need_weights=False, chain=overt.Chain(step=0))
        attention(x, x, x, chain=overt.Chain(step=0))
        with overt.naive():
            attention(x, x, x, need_weights=False, chain=overt.Chain(step=0))
    lines = [record.getMessage() for record in caplog.records if "encoder 0" in record.getMessage()]
    assert lines[0] == "encoder 0: fused kernels"
    assert "weights are wanted" in lines[1]
    assert "overt.naive()" in lines[2]


@pytest.mark.parametrize(
    ("config", "word"),
    [(overt.Bayesian(k=0.3), "k from"), (overt.Bayesian(family="lognormal", sigma=2.0), "sigma up to")],
)
def test_settings_that_the_kernels_do_not_take_go_the_plain_way(config: overt.Bayesian, word: str) -> None:
    layer = layer_of(config, 2, 2, 16)
    device = next(layer.parameters()).device
    q = torch.zeros(1, layer.site.heads, 2, layer.site.head_dim, device=device)
    reason = layer.unfit(overt.AttentionCall(layer.site, q, q, q))
    assert reason is not None
    assert word in reason

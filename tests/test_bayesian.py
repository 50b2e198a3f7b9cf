"""Bayesian Attention: distributions and KL against integration, limits, and the KL's two forms."""

from __future__ import annotations

import math

import mpmath
import numpy as np
import pytest
import scipy.integrate
import scipy.special
import scipy.stats
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import overt
from acting import BayesianEdgeLayer, BayesianLayer
from conftest import random_maps
from overt.mechanisms import noise
from overt.mechanisms.bayesian.chunked import chunked_kl
from overt.mechanisms.bayesian.closed import closed_kl
from overt.mechanisms.bayesian.naive import log_noise, lognormal_kl, map_kl, prior_of, weibull_gamma_kl
from overt.mechanisms.edges import edge_log_softmax
from overt.mechanisms.maps import causal, log_normalizer, softmax
from overt.mechanisms.seen import Seen
from selection import covering

# Appendix B: every published setting, by task and variant.
PUBLISHED = {
    "pubmed LF": {"family": "lognormal", "prior": "fixed", "prior_sigma": 1e6, "sigma": 1e-2, "rho": 0.2},
    "pubmed LC": {"family": "lognormal", "prior_sigma": 1e5, "sigma": 1e-2, "d_mid": 5, "rho": 0.2},
    "pubmed WF": {"prior": "fixed", "k": 10.0, "prior_beta": 1e-8, "prior_alpha": 1e-4, "rho": 0.2},
    "pubmed WC": {"k": 10.0, "prior_beta": 1e-4, "d_mid": 5, "rho": 0.2},
    "cora LF": {"family": "lognormal", "prior": "fixed", "prior_sigma": 1e15, "sigma": 1e-6, "rho": 0.2},
    "cora LC": {"family": "lognormal", "prior_sigma": 1e15, "sigma": 1e-15, "d_mid": 1, "rho": 0.1},
    "cora WF": {"prior": "fixed", "k": 1.0, "prior_beta": 1e-10, "prior_alpha": 1e-15, "rho": 0.2},
    "cora WC": {"k": 1.0, "prior_beta": 1e-10, "d_mid": 1, "rho": 0.1},
    "citeseer LF": {"family": "lognormal", "prior": "fixed", "prior_sigma": 1e15, "sigma": 1e-6, "rho": 0.1},
    "citeseer LC": {"family": "lognormal", "prior_sigma": 1e15, "sigma": 1e-5, "d_mid": 1, "rho": 0.1},
    "citeseer WF": {"prior": "fixed", "k": 100.0, "prior_beta": 1e-15, "prior_alpha": 1e-7, "rho": 0.1},
    "citeseer WC": {"k": 100.0, "prior_beta": 1e-15, "d_mid": 1, "rho": 0.1},
    "vqa LF": {"family": "lognormal", "prior": "fixed", "prior_sigma": 1e9, "sigma": 1e-9, "rho": 0.2},
    "vqa LC": {"family": "lognormal", "prior_sigma": 1e9, "sigma": 1e-9, "d_mid": 20, "rho": 0.2},
    "vqa WF": {"prior": "fixed", "k": 1000.0, "prior_beta": 1e-2, "prior_alpha": 1e-3, "rho": 0.2},
    "vqa WC": {"k": 1000.0, "prior_beta": 1e-6, "d_mid": 20, "rho": 0.1},
    "captioning LC": {"family": "lognormal", "prior_sigma": 1e3, "sigma": 0.1, "d_mid": 10, "rho": 1.0},
    "captioning WC": {"k": 10.0, "prior_beta": 1e-6, "d_mid": 10, "rho": 1.0},
    "translation WC": {"k": 5.0, "prior_beta": 1e-6, "d_mid": 5, "rho": 1.0},
    **{
        f"albert k={k}": {"k": float(k), "prior_beta": 1e-2, "d_mid": 5}
        for k in (5, 10, 20, 100, 500, 1000, 2000)
    },
    "no KL": {"prior": None},
}


def everything(queries: int, keys: int, batch: int = 1) -> Tensor:
    return torch.ones(batch, 1, queries, keys, dtype=torch.bool)


def bayesian(
    config: overt.Bayesian, heads: int = 2, dim: int = 4, key_heads: int | None = None
) -> BayesianLayer:
    return BayesianLayer(config, overt.mechanisms.Site(heads, dim, key_heads=key_heads))


# --- The KL against integration ---


def test_weibull_gamma_kl_equals_numerical_integration() -> None:
    ks = [0.5, 1.0, 5.0, 10.0, 100.0, 1000.0, 2000.0]
    priors = [(1.0, 1.0), (0.3, 1e-2), (1e-3, 1e-2), (1e-4, 1e-8), (1e-15, 1e-10)]
    cases = [(k, *prior, mean) for k in ks for prior in priors for mean in (1e-4, 0.2, 1.0)]
    k, alpha, beta, mean = np.array(cases).T
    scale = mean / scipy.special.gamma(1 + 1 / k)

    def integrand(t: float) -> np.ndarray:
        # S = scale·t^(1/k) with t exponential; the densities are scipy's.
        s = scale * t ** (1 / k)
        posterior = scipy.stats.weibull_min.logpdf(s, k, scale=scale)
        prior = scipy.stats.gamma.logpdf(s, alpha, scale=1 / beta)
        return np.asarray(math.exp(-t) * (posterior - prior))

    want = sum(
        scipy.integrate.quad_vec(integrand, a, b, epsabs=1e-9, epsrel=1e-9, norm="max", limit=500)[0]
        for a, b in ((0, 1e-3), (1e-3, 1), (1, 60))
    )
    for case, number in zip(cases, want, strict=True):
        got = weibull_gamma_kl(
            torch.tensor(math.log(case[3]), dtype=torch.float64),
            case[0],
            torch.tensor(math.log(case[1]), dtype=torch.float64),
            case[2],
        )
        assert float(got) == pytest.approx(number, rel=1e-5, abs=1e-5), case


SPREADS = [(own, prior) for prior in (1.0, 1e3, 1e9, 1e15) for own in (1e-15, 1e-6, 1e-2, 0.1, 1.0)]
MEANS = [(0.2, 0.0), (1e-4, -3.0), (3.0, 0.5)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sigma", "prior_sigma", "mean", "prior_mu"),
    covering(
        [(*spreads, *means) for spreads in SPREADS for means in MEANS],
        # every pair of spreads, and each of them with each of the means
        [(*spreads, *MEANS[number % 3]) for number, spreads in enumerate(SPREADS)],
    ),
)
def test_lognormal_kl_equals_numerical_integration(
    sigma: float, prior_sigma: float, mean: float, prior_mu: float
) -> None:
    # In high precision: with σ = 1e−15, exp(μ + σz) cannot be told from exp(μ) in float64.
    with mpmath.workdps(40):
        s1, s2 = mpmath.mpf(sigma), mpmath.mpf(prior_sigma)
        mu = mpmath.log(mpmath.mpf(mean)) - s1**2 / 2

        def log_density(x: mpmath.mpf, m: mpmath.mpf, s: mpmath.mpf) -> mpmath.mpf:
            return (
                -mpmath.log(x)
                - mpmath.log(s)
                - mpmath.log(2 * mpmath.pi) / 2
                - ((mpmath.log(x) - m) / s) ** 2 / 2
            )

        def integrand(z: mpmath.mpf) -> mpmath.mpf:
            x = mpmath.exp(mu + s1 * z)
            return mpmath.npdf(z) * (log_density(x, mu, s1) - log_density(x, mpmath.mpf(prior_mu), s2))

        want = float(mpmath.quad(integrand, [-12, 0, 12], method="gauss-legendre", maxdegree=5))
    got = lognormal_kl(
        torch.tensor(math.log(mean), dtype=torch.float64),
        sigma,
        torch.tensor(prior_mu, dtype=torch.float64),
        prior_sigma,
    )
    assert float(got) == pytest.approx(want, rel=1e-9)


def test_both_kls_vanish_where_posterior_and_prior_coincide_and_are_positive_elsewhere() -> None:
    # Weibull(1, λ) and Gamma(1, 1/λ) are the same exponential distribution.
    mean = torch.tensor(0.7, dtype=torch.float64)
    assert float(
        weibull_gamma_kl(mean.log(), 1.0, torch.zeros((), dtype=torch.float64), 1 / 0.7)
    ) == pytest.approx(0)
    assert float(weibull_gamma_kl(mean.log(), 2.0, torch.zeros((), dtype=torch.float64), 1 / 0.7)) > 1e-3
    mu = mean.log() - 0.3**2 / 2
    assert float(lognormal_kl(mean.log(), 0.3, mu, 0.3)) == pytest.approx(0)
    assert float(lognormal_kl(mean.log(), 0.3, mu, 0.4)) > 1e-3


# --- Sampling ---


def draws(count: int = 400_000) -> Tensor:
    key = noise.stream(torch.tensor(1), torch.tensor(0), 0, torch.tensor(0), 0)
    return noise.uniform(key, torch.zeros(1, dtype=torch.int64), 1, count // 1000, 1000).flatten().double()


@pytest.mark.parametrize("k", [0.5, 1.0, 5.0, 100.0])
def test_unnormalised_weibull_draws_have_the_distribution_and_mean_exp_phi(k: float) -> None:
    phi = -0.7
    s = (phi - math.lgamma(1 + 1 / k) + log_noise(draws(), overt.Bayesian(k=k))).exp().numpy()
    reference = scipy.stats.weibull_min(k, scale=math.exp(phi) / math.gamma(1 + 1 / k))
    assert scipy.stats.kstest(s, reference.cdf).pvalue > 0.001
    spread = reference.std() / len(s) ** 0.5
    assert s.mean() == pytest.approx(math.exp(phi), abs=4 * spread)
    assert s.std() == pytest.approx(reference.std(), rel=0.05)


@pytest.mark.parametrize("sigma", [0.05, 0.5, 1.0])
def test_unnormalised_lognormal_draws_have_the_distribution_and_mean_exp_phi(sigma: float) -> None:
    phi = 0.4
    config = overt.Bayesian(family="lognormal", sigma=sigma)
    s = (phi - sigma**2 / 2 + log_noise(draws(), config)).exp().numpy()
    reference = scipy.stats.lognorm(sigma, scale=math.exp(phi - sigma**2 / 2))
    assert scipy.stats.kstest(s, reference.cdf).pvalue > 0.001
    assert s.mean() == pytest.approx(math.exp(phi), abs=4 * reference.std() / len(s) ** 0.5)


@pytest.mark.parametrize("family", ["weibull", "lognormal"])
def test_log_space_weights_equal_normalised_draws(family: str) -> None:
    config = overt.Bayesian(family=family, k=3.0, sigma=0.4, prior=None)  # type: ignore[arg-type]
    layer, logits, chain = bayesian(config), random_maps(2, 2, 3, 5), overt.Chain(step=4)
    unit = noise.uniform(
        noise.stream(torch.tensor(0), torch.tensor(4), 0, torch.tensor(0), 0), torch.arange(2), 2, 3, 5
    ).double()
    if family == "weibull":
        s = logits.exp() / math.gamma(1 + 1 / 3.0) * (-torch.log(1 - unit)) ** (1 / 3.0)
    else:
        normal = torch.from_numpy(scipy.stats.norm.ppf(unit.numpy()))
        s = logits.exp() * torch.exp(normal * 0.4 - 0.4**2 / 2)
    got = layer(logits, everything(3, 5), chain, random_maps(2, 2, 5, 4))
    torch.testing.assert_close(got, s / s.sum(-1, keepdim=True), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("config", [overt.Bayesian(k=1e7), overt.Bayesian(family="lognormal", sigma=1e-8)])
def test_vanishing_noise_recovers_the_softmax(config: overt.Bayesian) -> None:
    logits = random_maps(1, 2, 4, 6)
    got = bayesian(config).double()(logits, everything(4, 6), overt.Chain(step=0), random_maps(1, 2, 6, 4))
    torch.testing.assert_close(got, torch.softmax(logits, -1), rtol=0, atol=1e-6)


def test_evaluation_uses_the_plain_softmax_unless_a_sample_is_asked_for() -> None:
    layer, logits, key = (
        bayesian(overt.Bayesian(k=2.0)).eval(),
        random_maps(1, 2, 4, 6).float(),
        torch.randn(1, 2, 6, 4),
    )
    visible = everything(4, 6)
    assert torch.equal(layer(logits, visible, overt.Chain(), key), torch.softmax(logits, -1))
    first, again, other = (layer(logits, visible, overt.Chain(step=0, sample=s), key) for s in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.allclose(first, other)


def test_samples_folded_into_the_batch_equal_samples_one_by_one() -> None:
    layer, logits, key = (
        bayesian(overt.Bayesian(k=2.0)).eval(),
        random_maps(2, 2, 4, 6),
        random_maps(2, 2, 6, 4),
    )
    layer = layer.double()
    folded = overt.Chain(step=0, sample=torch.tensor([0, 0, 5, 5]), examples=torch.tensor([3, 4, 3, 4]))
    both = layer(logits.repeat(2, 1, 1, 1), everything(4, 6), folded, key.repeat(2, 1, 1, 1))
    for part, sample in ((both[:2], 0), (both[2:], 5)):
        chain = overt.Chain(step=0, sample=sample, examples=3)
        assert torch.equal(part, layer(logits, everything(4, 6), chain, key))


def test_random_weights_without_a_step_say_what_is_missing() -> None:
    with pytest.raises(
        ValueError, match=r"random weights need an address for their noise: pass chain=Chain\(step=t\)"
    ):
        bayesian(overt.Bayesian())(
            torch.zeros(1, 2, 3, 3), everything(3, 3), overt.Chain(), torch.zeros(1, 2, 3, 4)
        )


# --- Prior ---


def kl_of(layer: BayesianLayer, logits: Tensor, visible: Tensor, key: Tensor) -> Tensor:
    chain = overt.Chain(step=0)
    layer(logits, visible, chain, key)
    return chain.kl(per_example=True)


def test_contextual_prior_is_a_softmax_over_the_non_padding_keys_causal_or_not() -> None:
    layer, key = bayesian(overt.Bayesian()).double(), random_maps(2, 2, 5, 4)
    padding = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]], dtype=torch.bool)
    for shape in (everything(5, 5, 2), causal(5, 5)):
        visible = shape & padding.view(2, 1, 1, 5) & padding.view(2, 1, 5, 1)
        got = prior_of(layer.prior, key, visible, layer.config).exp()
        scores = layer.prior(key)  # type: ignore[misc]
        torch.testing.assert_close(got[0], torch.softmax(scores[0], -1))
        torch.testing.assert_close(got[1, :, :3], torch.softmax(scores[1, :, :3], -1))


def test_grouped_query_heads_share_the_prior_of_their_key_head() -> None:
    config = overt.Bayesian(kl_reduction="sum")
    grouped = bayesian(config, heads=4, key_heads=2).double()
    full = bayesian(config, heads=4).double()
    full.load_state_dict(grouped.state_dict())
    logits, key = random_maps(2, 4, 3, 5), random_maps(2, 2, 5, 4)
    got = kl_of(grouped, logits, everything(3, 5), key)
    torch.testing.assert_close(got, kl_of(full, logits, everything(3, 5), key.repeat_interleave(2, dim=1)))


def test_official_preset_pins_the_released_codes_priors() -> None:
    key, visible = random_maps(1, 2, 5, 4), everything(3, 5)
    for family, of_softmax in (
        ("weibull", lambda psi: (psi * 1e-2).log()),  # α = softmax·β
        ("lognormal", lambda psi: psi.log()),  # μ = log-softmax
    ):
        layer = bayesian(overt.Bayesian(family=family, preset="official")).double()  # type: ignore[arg-type]
        psi = torch.softmax(layer.prior(key), -1)  # type: ignore[misc]
        torch.testing.assert_close(prior_of(layer.prior, key, visible, layer.config), of_softmax(psi))
        paper = bayesian(overt.Bayesian(family=family)).double()  # type: ignore[arg-type]
        paper.load_state_dict(layer.state_dict())
        want = psi.log() if family == "weibull" else psi
        torch.testing.assert_close(prior_of(paper.prior, key, visible, paper.config), want)


def test_prior_scores_200_apart_and_4096_keys_leave_gradients_finite() -> None:
    for config in (overt.Bayesian(), overt.Bayesian(kl_reduction="sum"), overt.Bayesian(family="lognormal")):
        layer = bayesian(config, heads=1, dim=2)
        assert layer.prior is not None
        with torch.no_grad():  # a prior whose scores are the keys' first component
            layer.prior.inner.weight.zero_()
            layer.prior.inner.weight[0, 0] = 1.0
            layer.prior.inner.bias.zero_()
            layer.prior.outer.weight.zero_()
            layer.prior.outer.weight[0, 0] = 1.0
        key = torch.zeros(1, 1, 4096, 2)
        key[..., ::2, 0] = 200.0
        key.requires_grad_()
        logits = torch.randn(1, 1, 2, 4096, requires_grad=True)
        kl = kl_of(layer, logits, everything(2, 4096), key).sum()
        kl.backward()
        assert kl.isfinite()
        for tensor in (logits, key, *layer.parameters()):
            assert tensor.grad is not None
            assert tensor.grad.isfinite().all()


def test_control_lgamma_of_an_underflowed_prior_weight_is_not_finite() -> None:
    scores = torch.tensor([0.0, -200.0], requires_grad=True)
    torch.lgamma(torch.softmax(scores, -1)).sum().backward()
    assert not scores.grad.isfinite().all()


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("posterior", ["probabilities", "scores"])
def test_every_published_setting_runs_and_trains_without_nan(name: str, posterior: str) -> None:
    config = overt.Bayesian(**PUBLISHED[name], posterior=posterior)  # type: ignore[arg-type]
    layer = bayesian(config)
    logits, key = torch.randn(2, 2, 4, 6, requires_grad=True), torch.randn(2, 2, 6, 4, requires_grad=True)
    chain = overt.Chain(step=10**6)
    weights = layer(logits, everything(4, 6), chain, key)
    ((weights * torch.randn(6)).sum() + chain.penalty()).backward()
    assert weights.isfinite().all()
    assert chain.kl().isfinite()
    for tensor in (logits, *layer.parameters()):
        assert tensor.grad is not None
        assert tensor.grad.isfinite().all()


# --- The KL of a map ---


@pytest.mark.parametrize("family", ["weibull", "lognormal"])
@pytest.mark.parametrize("posterior", ["probabilities", "scores"])
def test_map_kl_is_the_mean_over_visible_cells_and_heads_per_example(family: str, posterior: str) -> None:
    config = overt.Bayesian(family=family, posterior=posterior, prior="fixed", prior_mu=0.3)  # type: ignore[arg-type]
    logits = random_maps(2, 2, 3, 4)
    visible = random_maps(2, 1, 3, 4, seed=1) > -0.5
    got = kl_of(bayesian(config), logits, visible, random_maps(2, 2, 4, 4))
    probabilities = softmax(logits, visible)
    for b in range(2):
        cells = []
        for h in range(2):
            for i in range(3):
                for j in range(4):
                    if visible[b, 0, i, j]:
                        log_mean = (
                            logits[b, h, i, j] if posterior == "scores" else probabilities[b, h, i, j].log()
                        )
                        if family == "weibull":
                            prior = torch.tensor(config.prior_alpha, dtype=torch.float64).log()
                            cells.append(weibull_gamma_kl(log_mean, config.k, prior, config.prior_beta))
                        else:
                            prior = torch.tensor(0.3, dtype=torch.float64)
                            cells.append(lognormal_kl(log_mean, config.sigma, prior, config.prior_sigma))
        assert float(got[b]) == pytest.approx(float(torch.stack(cells).mean()))


def test_sum_reduction_is_the_mean_times_the_visible_cells() -> None:
    logits, key, visible = random_maps(1, 2, 3, 3), random_maps(1, 2, 3, 4), causal(3, 3)
    mean = bayesian(overt.Bayesian()).double()
    total = bayesian(overt.Bayesian(kl_reduction="sum")).double()
    total.load_state_dict(mean.state_dict())
    torch.testing.assert_close(kl_of(total, logits, visible, key), kl_of(mean, logits, visible, key) * 6 * 2)


def test_only_the_kl_depends_on_the_posteriors_parameterisation() -> None:
    logits, key = random_maps(1, 2, 3, 3) + 2.0, random_maps(1, 2, 3, 4)
    results = []
    for posterior in ("probabilities", "scores"):
        layer = bayesian(overt.Bayesian(posterior=posterior)).double()  # type: ignore[arg-type]
        torch.manual_seed(0)
        chain = overt.Chain(step=0)
        results.append((layer(logits, everything(3, 3), chain, key), chain.kl()))
    assert torch.equal(results[0][0], results[1][0])
    assert not torch.allclose(results[0][1], results[1][1])


@pytest.mark.slow
@given(
    st.sampled_from(["weibull", "lognormal"]),
    st.sampled_from(["probabilities", "scores"]),
    st.booleans(),
    st.booleans(),
    st.sampled_from([1, 2]),
    st.sampled_from([(5, 5), (3, 5), (1, 4), (300, 300)]),
    st.sampled_from(["none", "left", "right", "all"]),
)
def test_closed_form_equals_the_dense_one_with_every_gradient(
    family: str,
    posterior: str,
    is_causal: bool,
    with_bias: bool,
    group: int,
    size: tuple[int, int],
    padding: str,
) -> None:
    queries, keys = size
    key_heads, batch, dim = 2, 2, 3
    config = overt.Bayesian(family=family, posterior=posterior, kl_reduction="sum", prior_sigma=3.0)  # type: ignore[arg-type]
    q, k = (
        random_maps(batch, key_heads * group, queries, dim),
        random_maps(batch, key_heads, keys, dim, seed=1),
    )
    prior = torch.log_softmax(random_maps(batch, key_heads, keys, seed=2), -1)
    bias = random_maps(batch, keys, seed=3) if with_bias else None
    real_keys = torch.ones(batch, keys, dtype=torch.bool)
    hidden = {"none": slice(0, 0), "left": slice(0, 1), "right": slice(keys - 1, keys), "all": slice(0, keys)}
    real_keys[0, hidden[padding]] = False
    real_queries = real_keys[:, keys - queries :]
    visible = real_keys.view(batch, 1, 1, keys) & real_queries.view(batch, 1, queries, 1)
    if is_causal:
        visible = visible & causal(queries, keys)
    leaves = [t.requires_grad_() for t in (q, k, prior, bias) if t is not None]

    logits = 0.5 * q @ k.repeat_interleave(group, 1).mT
    if bias is not None:
        logits = logits + bias.view(batch, 1, 1, keys)
    dense = map_kl(logits, visible, prior.repeat_interleave(group, 1), config)
    shown = None if bias is None else bias.view(batch, 1, 1, keys)
    seen = Seen(real_keys, real_queries, is_causal)
    site = overt.mechanisms.Site(key_heads * group, dim, key_heads=key_heads)
    call = overt.AttentionCall(site, q, k, k, 0.5, seen=seen, bias=shown)
    assert call.is_dot()
    closed = closed_kl(call, log_normalizer(logits, visible), prior, config)
    torch.testing.assert_close(closed, dense, rtol=1e-10, atol=1e-10)
    if dense.requires_grad:
        toward = torch.tensor([1.0, -2.0], dtype=torch.float64)
        want = torch.autograd.grad((dense * toward).sum(), leaves, retain_graph=True, materialize_grads=True)
        got = torch.autograd.grad((closed * toward).sum(), leaves, materialize_grads=True)
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)


@pytest.mark.slow
@given(st.integers(1, 200))
def test_dense_kl_does_not_depend_on_how_rows_are_chunked(cells_at_once: int) -> None:
    logits, visible = random_maps(2, 3, 7, 5), random_maps(2, 1, 7, 5, seed=1) > 0
    prior = torch.log_softmax(random_maps(2, 3, 5, seed=2), -1)
    whole = map_kl(logits, visible, prior, overt.Bayesian())
    torch.testing.assert_close(chunked_kl(logits, visible, prior, overt.Bayesian(), cells_at_once), whole)


def test_evaluation_needs_no_step_and_computes_the_kl_only_when_asked() -> None:
    layer = bayesian(overt.Bayesian(rho=0.2)).eval()
    arguments = torch.randn(2, 2, 3, 3), everything(3, 3)
    silent, asked = overt.Chain(), overt.Chain(kl=True)
    layer(*arguments, silent, torch.randn(2, 2, 3, 4))
    layer(*arguments, asked, torch.randn(2, 2, 3, 4))
    assert float(silent.kl()) == 0.0
    assert float(asked.kl().detach()) > 0.0
    assert asked.kl(per_example=True).shape == (2,)


def test_annealing_is_half_at_zero_rises_to_one_and_stays_finite() -> None:
    config = overt.Bayesian(rho=0.2)
    assert float(config.annealing(torch.tensor(0))) == 0.5
    assert float(config.annealing(torch.tensor(10))) == pytest.approx(1 / (1 + math.exp(-2)))
    assert float(config.annealing(torch.tensor(10**12))) == 1.0
    assert overt.Bayesian().annealing(None) == 1.0
    with pytest.raises(ValueError, match=r"rho needs the training step: pass chain=Chain\(step=t\)"):
        config.annealing(None)


def test_penalty_is_the_annealed_and_weighed_kl() -> None:
    layer, chain = bayesian(overt.Bayesian(rho=0.1, kl_weight=0.5)), overt.Chain(step=7)
    layer(torch.randn(2, 2, 3, 3), everything(3, 3), chain, torch.randn(2, 2, 3, 4))
    torch.testing.assert_close(chain.penalty(), chain.kl() * 0.5 * float(torch.sigmoid(torch.tensor(0.7))))


@pytest.mark.parametrize("family", ["weibull", "lognormal"])
def test_minimising_the_kl_alone_lowers_it_and_moves_queries_keys_and_prior(family: str) -> None:
    config = overt.Bayesian(family=family, prior_sigma=1.0)  # type: ignore[arg-type]
    attention = overt.MultiheadAttention(8, 2, batch_first=True, mechanisms=[config])
    before = {name: value.detach().clone() for name, value in attention.named_parameters()}
    optimizer = torch.optim.Adam(attention.parameters(), lr=0.02)
    x, values = torch.randn(4, 6, 8), []
    for _ in range(40):
        chain = overt.Chain(step=0)
        attention(x, x, x, chain=chain)
        optimizer.zero_grad()
        chain.kl().backward()
        optimizer.step()
        values.append(float(chain.kl().detach()))
    assert values[-1] < values[0]
    projections, old = attention.in_proj_weight.detach(), before["in_proj_weight"]
    assert not torch.allclose(projections[:8], old[:8]), "queries"
    assert not torch.allclose(projections[8:16], old[8:16]), "keys"
    assert torch.equal(projections[16:], old[16:]), "values play no part in the KL"
    for name in ("map.bayesian.prior.inner.weight", "map.bayesian.prior.outer.weight"):
        assert not torch.allclose(attention.get_parameter(name), before[name]), name


@pytest.mark.slow
@pytest.mark.parametrize("family", ["weibull", "lognormal"])
@pytest.mark.parametrize("posterior", ["probabilities", "scores"])
def test_gradients_agree_with_finite_differences(family: str, posterior: str) -> None:
    config = overt.Bayesian(family=family, posterior=posterior, k=2.0, sigma=0.5, prior_sigma=2.0)  # type: ignore[arg-type]
    layer = bayesian(config).double()
    visible = causal(3, 3)
    parameters = [p.detach().clone().requires_grad_() for p in layer.parameters()]
    names = [name for name, _ in layer.named_parameters()]

    def weights_and_kl(logits: Tensor, key: Tensor, *parameters: Tensor) -> tuple[Tensor, Tensor]:
        chain = overt.Chain(step=1)
        state = dict(zip(names, parameters, strict=True))
        weights = torch.func.functional_call(layer, state, (logits, visible, chain, key))
        return weights, chain.kl()

    # Noise is drawn in float32, but does not move with the inputs, so differences are still clean.
    inputs = (
        random_maps(1, 2, 3, 3).requires_grad_(),
        random_maps(1, 2, 3, 4, seed=1).requires_grad_(),
        *parameters,
    )
    assert torch.autograd.gradcheck(weights_and_kl, inputs)


# --- Edge lists ---


def graph() -> tuple[Tensor, Tensor]:
    """A 5-node graph with self-loops, as edges and as visibility of a dense map (query = target)."""
    visible = torch.eye(5, dtype=torch.bool)
    visible[0, 3] = visible[3, 0] = visible[1, 2] = visible[4, 1] = visible[4, 2] = True
    target, source = visible.nonzero(as_tuple=True)
    return torch.stack([source, target]), visible.view(1, 1, 5, 5)


@pytest.mark.parametrize("sampled", [True, False])
@pytest.mark.parametrize("family", ["weibull", "lognormal"])
@pytest.mark.parametrize("posterior", ["probabilities", "scores"])
def test_edge_list_equals_the_dense_map_of_the_same_graph(sampled: bool, family: str, posterior: str) -> None:
    edges, visible = graph()
    config = overt.Bayesian(family=family, posterior=posterior, prior="fixed")  # type: ignore[arg-type]
    logits, key = random_maps(1, 3, 5, 5).requires_grad_(), random_maps(1, 3, 5, 4)
    dense = BayesianLayer(config, overt.mechanisms.Site(3, 4)).train(sampled)
    sparse = BayesianEdgeLayer(config, overt.mechanisms.Site(3, 4)).train(sampled)
    chains = overt.Chain(step=2), overt.Chain(step=2)
    want = dense(logits, visible, chains[0], key)
    scores = logits[0, :, edges[1], edges[0]].T
    got = sparse(scores, edges, 5, chains[1], key[0].transpose(0, 1))
    torch.testing.assert_close(got, want[0, :, edges[1], edges[0]].T)
    torch.testing.assert_close(chains[1].kl(), chains[0].kl())
    toward = random_maps(*want.shape, seed=4)
    (a,) = torch.autograd.grad((want * toward).sum() + chains[0].kl(), logits, retain_graph=True)
    (b,) = torch.autograd.grad((got * toward[0, :, edges[1], edges[0]].T).sum() + chains[1].kl(), logits)
    torch.testing.assert_close(a, b)


def test_contextual_prior_on_edges_is_a_softmax_over_each_neighbourhood_and_officially_over_all_nodes() -> (
    None
):
    edges, visible = graph()
    scores, key = random_maps(edges.shape[1], 3), random_maps(5, 3, 4)
    for preset in (None, "official"):
        config = overt.Bayesian(preset=preset)  # type: ignore[arg-type]
        layer, chain = BayesianEdgeLayer(config, overt.mechanisms.Site(3, 4)).double(), overt.Chain(step=0)
        layer(scores, edges, 5, chain, key)
        importance = layer.prior(key)  # type: ignore[misc]
        log_mean = edge_log_softmax(scores, edges[1], 5)
        cells = []
        for e in range(edges.shape[1]):
            source, target = edges[:, e]
            if preset is None:
                neighbours = visible[0, 0, target]
                psi = torch.softmax(importance[neighbours], 0)[int(neighbours[:source].sum())]
            else:
                psi = torch.softmax(importance, 0)[source] * config.prior_beta
            cells.append(weibull_gamma_kl(log_mean[e], config.k, psi.log(), config.prior_beta))
        torch.testing.assert_close(chain.kl(), torch.stack(cells).mean())


def test_edge_order_does_not_change_an_edges_weight() -> None:
    edges, _ = graph()
    scores, key = random_maps(edges.shape[1], 3), random_maps(5, 3, 4)
    layer = BayesianEdgeLayer(overt.Bayesian(k=1.0), overt.mechanisms.Site(3, 4)).double()
    order = torch.randperm(edges.shape[1])
    want = layer(scores, edges, 5, overt.Chain(step=0), key)
    got = layer(scores[order], edges[:, order], 5, overt.Chain(step=0), key)
    torch.testing.assert_close(got, want[order])


def test_edge_weights_sum_to_one_over_each_neighbourhood() -> None:
    edges, _ = graph()
    layer = BayesianEdgeLayer(overt.Bayesian(), overt.mechanisms.Site(3, 4)).double()
    weights = layer(random_maps(edges.shape[1], 3) * 100, edges, 5, overt.Chain(step=0), random_maps(5, 3, 4))
    sums = torch.zeros(5, 3, dtype=torch.float64).index_add(0, edges[1], weights)
    torch.testing.assert_close(sums, torch.ones_like(sums))


def test_two_graphs_draw_different_noise_and_batches_of_numbers_are_refused() -> None:
    edges, _ = graph()
    layer = BayesianEdgeLayer(overt.Bayesian(k=1.0), overt.mechanisms.Site(3, 4)).double()
    arguments = random_maps(edges.shape[1], 3), edges, 5
    first, other = (layer(*arguments, overt.Chain(step=0, examples=n), random_maps(5, 3, 4)) for n in (0, 7))
    assert not torch.allclose(first, other)
    for wrong in ({"sample": torch.arange(4)}, {"examples": torch.arange(4)}):
        with pytest.raises(ValueError, match="a graph is one example"):
            layer(*arguments, overt.Chain(step=0, **wrong), random_maps(5, 3, 4))


def test_bad_edges_are_named() -> None:
    layer, edges = BayesianEdgeLayer(overt.Bayesian(), overt.mechanisms.Site(3, 4)), graph()[0]
    key = torch.zeros(5, 3, 4)
    with pytest.raises(ValueError, match=r"scores must have shape \(edges, 3\), got \(10, 2\)"):
        layer(torch.zeros(10, 2), edges, 5, overt.Chain(step=0), key)
    with pytest.raises(ValueError, match=r"edge_index must have shape \(2, 9\), got \(2, 10\)"):
        layer(torch.zeros(9, 3), edges, 5, overt.Chain(step=0), key)
    with pytest.raises(ValueError, match="edge_index must number nodes from 0 to 3, got 0 … 4"):
        layer(torch.zeros(10, 3), edges, 4, overt.Chain(step=0), key[:4])
    with pytest.raises(ValueError, match="edge_index must number nodes from 0 to 3, got 0 … 4"):
        layer(torch.zeros(10, 3), edges, 5, overt.Chain(step=0), key[:4])
    with pytest.raises(ValueError, match=r"key must have shape \(nodes, 3, 4\), got \(5, 2, 4\)"):
        layer(torch.zeros(10, 3), edges, 5, overt.Chain(step=0), key[:, :2])


# --- Settings ---


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"family": "gamma"}, "family must be one of 'weibull', 'lognormal'; got 'gamma'"),
        ({"k": 0.0}, "k must be positive and finite, got 0.0"),
        ({"sigma": float("nan")}, "sigma must be positive and finite, got nan"),
        ({"prior": "learned"}, "prior must be one of 'contextual', 'fixed', None; got 'learned'"),
        ({"prior_beta": -1.0}, "prior_beta must be positive and finite, got -1.0"),
        ({"d_mid": 0}, "d_mid must be a whole number of at least 1, got 0"),
        ({"rho": 0.0}, "rho must be positive and finite, got 0.0"),
        ({"posterior": "logits"}, "posterior must be one of 'probabilities', 'scores'; got 'logits'"),
        ({"kl_reduction": "none"}, "kl_reduction must be one of 'mean', 'sum'; got 'none'"),
        ({"preset": "paper"}, "preset must be one of None, 'official'; got 'paper'"),
        ({"prior_mu": float("inf")}, "prior_mu must be finite, got inf"),
    ],
)
def test_settings_outside_their_range_are_refused_in_one_line(
    settings: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        overt.Bayesian(**settings)  # type: ignore[arg-type]


def test_the_closed_kl_is_float64_to_the_last_digit() -> None:
    config = overt.Bayesian(prior="fixed", prior_beta=0.7, kl_reduction="sum")
    q, k = random_maps(1, 1, 3, 4), random_maps(1, 1, 5, 4, seed=1)
    call = overt.AttentionCall(overt.mechanisms.Site(1, 4), q, k, k)
    prior = torch.full((1, 1, 1), math.log(config.prior_alpha), dtype=torch.float64)
    logits, visible = call.scores(), everything(3, 5)
    closed = closed_kl(call, log_normalizer(logits, visible), prior, config)
    # A rate that is rounded to float32 on the way would be off by 3·1.2e-8.
    torch.testing.assert_close(closed, map_kl(logits, visible, prior, config), rtol=0, atol=1e-11)

"""Rivals of the GPU benchmark compute what overt does: outputs, KL, gradients, and noise of the same law."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor
from transformers import BertConfig, BertForSequenceClassification

import overt
from overt.mechanisms.bayesian.naive import ContextualPrior, attention
from overt.mechanisms.evolving.naive import evolve
from overt.mechanisms.maps import softmax
from selection import covering

pytestmark = pytest.mark.slow
SHAPE = BATCH, HEADS, LENGTH, WIDTH = 3, 2, 21, 16
QUIET = torch.tensor(1e-7)
SEED = torch.tensor(5, dtype=torch.int32)
# FlexAttention says so on a CPU, and what torch's compiler traces it with warns of itself.
FLEX = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module", name="load")
def _load() -> Any:
    """Modules that lie beside the benchmark, which is no package."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parent.parent / "benchmarks"))
        yield importlib.import_module


@pytest.fixture(scope="module", name="rivals")
def _rivals(load: Any) -> ModuleType:
    return load("gpu_rivals")


@pytest.fixture(params=[False, True], ids=["whole", "padded"], name="real")
def _real(request: pytest.FixtureRequest) -> Tensor | None:
    lengths = torch.tensor([LENGTH, 13, 17]).unsqueeze(1)
    return torch.arange(LENGTH) < lengths if request.param else None


def inputs() -> tuple[list[Tensor], ContextualPrior, Tensor]:
    """Queries, keys and values, a prior's network, and a gradient of outputs."""
    q, k, v, to_out = (torch.randn(*SHAPE) for _ in range(4))
    return [x.requires_grad_() for x in (q, k, v)], ContextualPrior(WIDTH, 5), to_out


def prior_of(rivals: ModuleType, network: ContextualPrior) -> Any:
    return rivals.Prior(network.inner.weight, network.inner.bias, network.outer.weight)


def visible_of(real: Tensor | None) -> Tensor:
    if real is None:
        return torch.ones(1, 1, 1, 1, dtype=torch.bool)
    return real[:, None, :, None] & real[:, None, None]


def rows_of(real: Tensor | None) -> Tensor:
    return torch.ones(()) if real is None else real[:, None, :, None].float()


def same(
    got: tuple[Tensor, ...], want: tuple[Tensor, ...], trained: list[Tensor], given: list[Tensor]
) -> None:
    """Outputs, and gradients of each alone."""
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    for a, b, to in zip(got, want, given, strict=True):
        found, wanted = (
            torch.autograd.grad(x, trained, to, retain_graph=True, allow_unused=True) for x in (a, b)
        )
        for x, y in zip(found, wanted, strict=True):
            assert (x is None) == (y is None)
            if x is not None and y is not None:
                torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("family", ["weibull", "lognormal"])
def test_ten_lines_of_bayesian_are_the_definition(
    rivals: ModuleType, real: Tensor | None, family: Any
) -> None:
    (q, k, v), network, to_out = inputs()
    rows, weight = rows_of(real), torch.tensor([0.5, 1.0, 2.0])
    out, kl = rivals.bayesian(q, k, v, QUIET, prior_of(rivals, network), real, family)
    logits = q @ k.mT * WIDTH**-0.5
    config = overt.Bayesian(family=family)
    weights, wanted = attention(logits, visible_of(real), k, network, None, config)
    trained = [q, k, v, *network.parameters()]
    same((out * rows, kl), (weights @ v * rows, wanted), trained, [to_out, weight])
    (alone,) = rivals.bayesian(q, k, v, QUIET, None, real, family)
    torch.testing.assert_close(alone * rows, out * rows, rtol=1e-4, atol=1e-5)


def test_closed_form_is_the_definitions_kl(rivals: ModuleType, real: Tensor | None) -> None:
    (q, k, _), network, _ = inputs()
    visible, prior = visible_of(real), prior_of(rivals, network)
    logits = q @ k.mT * WIDTH**-0.5
    lse = torch.logsumexp(logits.masked_fill(~visible, -1e9), dim=-1)
    _, wanted = attention(logits, visible, k, network, None, overt.Bayesian())
    got = rivals.closed_kl(q, k, lse, prior, real)
    same((got,), (wanted,), [q, k, *network.parameters()], [torch.tensor([0.5, 1.0, 2.0])])


@pytest.mark.parametrize("random", [False, True], ids=["Evolving", "both"])
def test_ten_lines_of_evolving_are_the_definition(
    rivals: ModuleType, real: Tensor | None, random: bool
) -> None:
    (q, k, v), network, to_out = inputs()
    visible, rows = visible_of(real), rows_of(real)
    previous = torch.randn(BATCH, HEADS, LENGTH, LENGTH, requires_grad=True)
    weight = (torch.randn(HEADS, HEADS, 3, 3) * 0.5).requires_grad_()
    bias = torch.rand(HEADS).requires_grad_()
    config = overt.Evolving()
    logits = evolve(
        q @ k.mT * WIDTH**-0.5,
        previous.masked_fill(~visible, float("-inf")),
        (weight, bias),
        visible,
        "encoder",
        config.alpha,
        config.beta,
    )
    trained = [q, k, v, previous, weight, bias]
    given = [to_out, torch.randn(BATCH, HEADS, LENGTH, LENGTH)]
    parts = q, k, v, previous, weight, bias
    if random:
        trained, given = [*trained, *network.parameters()], [*given, torch.tensor([0.5, 1.0, 2.0])]
        weights, kl = attention(logits, visible, k, network, None, overt.Bayesian())
        out, evolved, got = rivals.both(*parts, QUIET, prior_of(rivals, network), real=real)
    else:
        weights = softmax(logits, visible)
        out, evolved = rivals.evolving(*parts, real=real)
    found = [out * rows, evolved.masked_fill(~visible, 0.0)]
    wanted = [weights @ v * rows, logits.masked_fill(~visible, 0.0)]
    if random:
        found, wanted = [*found, got], [*wanted, kl]
    same(tuple(found), tuple(wanted), trained, given)


def test_a_chain_starts_with_the_scores(rivals: ModuleType) -> None:
    (q, k, v), _, _ = inputs()
    weight, bias = torch.randn(HEADS, HEADS, 3, 3), torch.randn(HEADS)
    out, evolved = rivals.evolving(q, k, v, None, weight, bias)
    torch.testing.assert_close(evolved, q @ k.mT * WIDTH**-0.5)
    torch.testing.assert_close(out, torch.softmax(evolved, dim=-1) @ v)


@FLEX
def test_flex_attention_draws_the_hashed_noise(rivals: ModuleType, real: Tensor | None) -> None:
    tensors, network, _ = inputs()
    q, k, v = (x.detach() for x in tensors)
    spread, rows = torch.tensor(0.3), rows_of(real)
    blocks = None if real is None else rivals.padding_blocks(real)
    (want,) = rivals.dense_hashed(q, k, v, spread, SEED, real)
    (got,) = rivals.flexed(q, k, v, spread, SEED, None, real, blocks)
    torch.testing.assert_close(got * rows, want * rows)
    assert (got - rivals.flexed(q, k, v, spread, SEED + 1, None, real, blocks)[0]).abs().max() > 0.01
    _, wanted = rivals.bayesian(q, k, v, spread, prior_of(rivals, network), real)
    for way in rivals.WAYS:
        form = rivals.flexed(q, k, v, spread, SEED, prior_of(rivals, network), real, blocks, way)
        torch.testing.assert_close(form[1], wanted, rtol=1e-5, atol=1e-5)
        masked = rivals.masked_sdpa(q, k, v, QUIET, prior_of(rivals, network), real, blocks, way)
        torch.testing.assert_close(masked[1], wanted, rtol=1e-5, atol=1e-5)
        plain = rivals.bayesian(q, k, v, QUIET, None, real)[0]
        torch.testing.assert_close(masked[0] * rows, plain * rows, rtol=1e-4, atol=1e-5)


@FLEX
@pytest.mark.parametrize("way", covering(["narrow", "wide", "keys"], ["wide"]))
def test_the_log_sum_exp_of_flex_attention_has_its_gradients(
    rivals: ModuleType, real: Tensor | None, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By torch's formulas: a CPU has no kernel for FlexAttention's backward pass, but it can trace one."""
    flex = importlib.import_module("torch.nn.attention.flex_attention")
    monkeypatch.setattr(flex, "_validate_device", lambda *_: None)
    (q, k, v), _, _ = inputs()
    blocks = None if real is None else rivals.padding_blocks(real)
    seen = torch.ones(BATCH, 1, LENGTH, dtype=torch.bool) if real is None else real[:, None]
    logits = (q @ k.mT * WIDTH**-0.5).masked_fill(~seen.unsqueeze(2), -1e9)
    want = torch.logsumexp(logits, dim=-1).masked_fill(~seen, 0.0)

    def form(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return rivals.plain_lse(q, k, v, blocks, way).masked_fill(~seen, 0.0)

    run = torch.compile(form, backend="aot_eager", dynamic=False, fullgraph=True)
    same((run(q, k, v),), (want,), [q, k], [torch.randn(BATCH, HEADS, LENGTH)])


@pytest.mark.parametrize("seed", [0, 1, 123456789])
def test_hashed_noise_is_weibull_noise(rivals: ModuleType, seed: int) -> None:
    number = torch.tensor(seed, dtype=torch.int32)
    noise = rivals.hashed_map((2, 2, 128, WIDTH), number, torch.tensor(1.0 / rivals.K))
    assert noise.isfinite().all()
    drawn = torch.exp(noise.double()) * torch.tensor(2.0).log() ** (1.0 / rivals.K)
    assert stats.kstest(drawn.flatten().numpy(), stats.weibull_min(rivals.K).cdf).pvalue > 1e-3
    other = rivals.hashed_map((2, 2, 128, WIDTH), number + 1, torch.tensor(1.0 / rivals.K))
    neighbours = {
        "key": (noise[..., 1:], noise[..., :-1]),
        "query": (noise[:, :, 1:], noise[:, :, :-1]),
        "head": (noise[:, 1:], noise[:, :-1]),
        "example": (noise[1:], noise[:-1]),
        "seed": (noise, other),
    }
    for name, pair in neighbours.items():
        correlation = torch.corrcoef(torch.stack([x.flatten() for x in pair]))[0, 1]
        assert abs(float(correlation)) < 5.0 / pair[0].numel() ** 0.5, name


def test_uniform_numbers_of_the_hash_lie_inside_the_interval(rivals: ModuleType) -> None:
    unit = rivals.unit_of(SEED, torch.arange(2**20, dtype=torch.int32))
    assert 0.0 < float(unit.min()) < 1e-5
    assert 1.0 - 1e-5 < float(unit.max()) < 1.0
    assert stats.kstest(unit.numpy(), "uniform").pvalue > 1e-3


@FLEX
@pytest.mark.parametrize("name", ["bayesian", "masked_sdpa", "flexed"])
def test_weights_have_the_distribution_that_is_wanted(rivals: ModuleType, name: str) -> None:
    """The logarithm of the ratio of two normalised Weibull draws is logistic, of scale 1/k."""
    length = 64
    q = k = torch.zeros(4, 4, length, WIDTH)
    v = torch.eye(length).expand(4, 4, -1, -1).contiguous()
    more = (SEED,) if name == "flexed" else ()
    (weights,) = getattr(rivals, name)(q, k, v, torch.tensor(1.0 / rivals.K), *more)
    torch.testing.assert_close(weights.sum(dim=-1), torch.ones(4, 4, length))
    ratio = torch.log(weights[..., ::2] / weights[..., 1::2]).flatten().double().numpy()
    assert stats.kstest(ratio, stats.logistic(scale=1.0 / rivals.K).cdf).pvalue > 1e-3


def bert() -> Any:
    torch.manual_seed(0)
    settings: dict[str, Any] = {
        "vocab_size": 50,
        "hidden_size": 32,
        "num_attention_heads": 2,
        "num_hidden_layers": 3,
        "intermediate_size": 32,
        "attn_implementation": "sdpa",
    }
    return BertForSequenceClassification(BertConfig(**settings)).eval()


@pytest.mark.parametrize("group", ["Bayesian", "Evolving", "both"])
def test_a_model_of_a_rival_gives_what_an_attached_one_gives(
    load: Any, rivals: ModuleType, real: Tensor | None, group: str
) -> None:
    models = load("gpu_models")
    mechanisms = {"Bayesian": [overt.Bayesian()], "Evolving": [overt.Evolving()]}
    mechanisms["both"] = [*mechanisms["Evolving"], *mechanisms["Bayesian"]]
    attached, model = bert(), bert()
    overt.attach(attached, *mechanisms[group])
    (rule,) = models.rules_of(group, compiles=False).values()
    carried = rivals.install(model, f"test_{group}".lower(), rule, group != "Evolving", group != "Bayesian")
    carried.spread, carried.real = QUIET, real
    carried.begin()
    ids = torch.randint(5, 50, (BATCH, LENGTH))
    more = {} if real is None else {"attention_mask": real.long()}
    got, want = model(input_ids=ids, **more).logits, attached(input_ids=ids, **more).logits
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert len(carried.kl) == (0 if group == "Evolving" else 3)
    if carried.kl:
        total = carried.total_kl()
        assert total.isfinite()
        total.backward()
        assert all(x.grad is not None for name, x in model.named_parameters() if "prior" in name)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("group", "graphs"), [("Bayesian", 1), ("Evolving", 2), ("both", 2)])
def test_a_compiled_rival_is_compiled_once_for_all_layers(
    load: Any, rivals: ModuleType, monkeypatch: pytest.MonkeyPatch, group: str, graphs: int
) -> None:
    """Evolving's first layer has no map before it, hence its second graph."""
    from torch._dynamo.utils import counters

    models = load("gpu_models")
    monkeypatch.setattr(
        models, "compiled", lambda form: torch.compile(form, backend="eager", dynamic=False, fullgraph=True)
    )
    rule = models.rules_of(group, compiles=True)[f"{models.TEN_LINES}, compiled"]
    model = bert()
    carried = rivals.install(model, f"test_once_{group}".lower(), rule, group != "Evolving", True)
    torch._dynamo.reset()
    counters.clear()
    for _ in range(2):
        carried.begin()
        model(input_ids=torch.randint(5, 50, (BATCH, LENGTH)))
    assert counters["stats"]["unique_graphs"] == graphs


def row(group: str, name: str, kind: str, ms: float, device: float | None, **more: Any) -> dict[str, Any]:
    title = name if kind == "plain" else f"{group}, {name}"
    found = {"shape": [1, 2, 64, 16], "padded": False, "group": group, "name": name, "kind": kind}
    found |= {"form": title, "ms": ms, "device_ms": device, "low_ms": ms, "high_ms": ms, "peak_mib": 10.0}
    return {**found, "backend": None, **more}


def test_the_report_names_the_backend_and_the_fastest_rival(load: Any, tmp_path: Path) -> None:
    report = load("gpu_report")
    found = dict.fromkeys(("command", "device", "torch", "triton", "transformers"), "some")
    attention = [
        row("plain", report.AS_CHOSEN, "plain", 1.0, 0.5, backend="cuDNN"),
        row("Bayesian", "fused", "ours", 3.0, 2.0),
        row("Bayesian", "slow", "rival", 12.0, 6.0),
        row("Bayesian", "quick, compiled", "rival", 9.0, 8.0),
        row("Evolving", "fused", "ours", 4.0, 3.0),
        row("Evolving", "slow", "rival", 40.0, 30.0),  # a gain over nothing better would be none
    ]
    model = [{**one, "turns": 5, "shape": [2, 64]} for one in attention]
    left = [{"where": "here", "form": "Evolving, slow", "reason": "a | b"}]
    more = {"rep": 1, "layers": 12, "ceilings": {}, "attention": attention, "model": model, "left_out": left}
    report.report({**found, **more}, tmp_path, show=False)
    text = (tmp_path / "gpu.md").read_text()
    lines = [line for line in text.splitlines() if line.startswith("| **Bayesian, fused**")]
    assert "| 3.00 (4.00) | 3.0 (3.0) | quick, compiled |" in lines[0]
    assert "| 3.00 | 3.0 | quick, compiled |" in lines[1]
    assert all("|  |  |" in line for line in text.splitlines() if line.startswith("| **Evolving, fused**"))
    assert "(cuDNN)" in text
    assert "| here | Evolving, slow | a / b |" in text


@pytest.mark.slow
@pytest.mark.parametrize("family", ["weibull", "lognormal"])
@pytest.mark.parametrize("length", covering([512, 4096], [512]))
def test_noise_of_another_strength_is_refused(
    load: Any, rivals: ModuleType, monkeypatch: pytest.MonkeyPatch, family: str, length: int
) -> None:
    forms = load("gpu_forms")
    monkeypatch.setattr(forms, "DEVICE", "cpu")
    case = forms.Case((4 if length < 1024 else 1, 1, length, 16), padded=False)
    group = "Bayesian" if family == "weibull" else "Bayesian, lognormal"

    def form(factor: float) -> Any:
        def forward(quiet: bool) -> tuple[Tensor, ...]:
            spread = case.spread(quiet, family) * factor
            found: tuple[Tensor, ...] = rivals.bayesian(case.q, case.k, case.v, spread, family=family)
            return found

        return forms.Form(group, "some", "rival", forward, [case.q, case.k, case.v], [case.to_out])

    before = case.q.detach().clone()
    forms.check_noise(case, form(1.0))
    assert torch.equal(case.q, before)
    for factor in (0.0, 0.9, 1.1):
        with pytest.raises(forms.MismatchError, match="variance of its noise"):
            forms.check_noise(case, form(factor))


def found_of(report: ModuleType, **more: Any) -> dict[str, Any]:
    found: dict[str, Any] = dict.fromkeys((*report.SAME, "command"), "some")
    found |= {"rep": 1, "layers": 12, "way": "narrow", "ceilings": {}, "parts": {}}
    return {**found, **{key: [] for key in report.LISTS}, **more}


def note(**more: Any) -> dict[str, Any]:
    found = {"date": "2026-01-01 10:00 UTC", "code": "abc", "settings": {"rep": 1}, "seconds": 60.0}
    return {**found, "ceilings": {}, "missing": 0, "profiled": True, **more}


def test_complete_parts_are_kept_and_what_lacks_most_comes_first(load: Any) -> None:
    report = load("gpu_report")
    found = found_of(report)
    for name, one in {
        "whole": note(),
        "other": note(code="old"),
        "unprofiled": note(profiled=False),
        "late": note(missing=3),
        "otherwise": note(settings={"rep": 2}),
    }.items():
        assert report.put(found, name, {"attention": [{"form": "a"}]}, one)
    wanted = {name: {"rep": 1} for name in (*found["parts"], "new")}
    chosen = report.to_measure(found, wanted, "abc")
    assert list(chosen) == ["new", "otherwise", "late", "unprofiled", "other"]
    assert chosen["late"] == "rows missing"
    assert "other" not in report.to_measure(found, wanted, None)
    assert list(report.to_measure(found, wanted, "abc", fresh=True))[-1] == "whole"
    assert report.to_measure(found, {"whole": {"rep": 1}}, "abc") == {}


def test_a_run_begins_with_parts_of_the_same_machine_alone(load: Any) -> None:
    report = load("gpu_report")
    old = found_of(report, way="keys", ceilings={"bytes_per_s": 1.0})
    report.put(old, "step", {"model": [{"form": "a"}], "left_out": [{"form": "b"}]}, note())
    old["left_out"].append({"form": "c", "part": "never begun"})
    kept = report.resumed(old, found_of(report))
    assert kept["parts"] == old["parts"]
    assert kept["model"] == [{"form": "a", "part": "step"}]
    assert kept["left_out"] == [{"form": "b", "part": "step"}]
    assert kept["way"] == "keys"
    for key in report.SAME:
        new = found_of(report, **{key: "another"})
        assert report.resumed(old, new) == new
    for none in (None, {"device": "some"}):
        assert report.resumed(none, found_of(report)) == found_of(report)


def test_a_part_is_replaced_whole_unless_more_is_missing(load: Any) -> None:
    report = load("gpu_report")
    found = found_of(report)
    report.put(found, "step", {"model": [{"form": "a", "ms": 1}, {"form": "b", "ms": 1}]}, note(missing=1))
    report.put(found, "other", {"model": [{"form": "a", "ms": 5}]}, note())
    assert not report.put(found, "step", {"model": [{"form": "a", "ms": 2}]}, note(missing=2))
    assert [one["ms"] for one in found["model"]] == [1, 1, 5]
    assert report.put(found, "step", {"model": [{"form": "a", "ms": 3}]}, note(missing=2, code="new"))
    assert [one["ms"] for one in found["model"]] == [5, 3]
    assert found["parts"]["step"]["runs"] == 2
    assert found["parts"]["other"]["runs"] == 1


def test_the_report_says_that_parts_are_of_different_runs(load: Any, tmp_path: Path) -> None:
    report = load("gpu_report")
    assert report.kept_before(tmp_path) is None
    found = found_of(report, command="make bench-gpu")
    rates = {"bytes_per_s": 1e12, "flops_per_s": 1e14, "special_per_s": 1e12}
    rows = [row("Bayesian", "fused", "ours", 3.0, 2.0)]
    report.put(found, "attention-64", {"attention": rows}, note(ceilings=rates))
    report.report(found, tmp_path, show=False)
    text = (tmp_path / "gpu.md").read_text()
    assert "`make bench-gpu`" in text
    assert "One process, on 2026-01-01 10:00 UTC." in text
    floor = report.floors((1, 2, 64, 16), rates)["Bayesian"]
    assert f"| {2.0 / floor:.1f} |" in text
    model = [{**rows[0], "turns": 5, "shape": [2, 64]}]
    report.put(found, "step", {"model": model}, note(date="2026-01-02 10:00 UTC", code="new"))
    report.report(found, tmp_path, show=False)
    text = (tmp_path / "gpu.md").read_text()
    assert "they are of 2 runs, see the end, and the code changed between them." in text
    assert "| step | 2026-01-02 10:00 UTC | 1 | 60 | 0 |" in text
    assert report.kept_before(tmp_path) == found


def test_a_rival_that_computes_something_else_is_refused(load: Any) -> None:
    forms = load("gpu_forms")
    want = {"out": torch.ones(4), "kl": torch.full((2,), 7.0), "gradient of kl for key": torch.zeros(3)}
    assert forms.compare(want, want) == 0.0
    for name, value in (("out", torch.full((4,), 1.2)), ("kl", torch.full((2,), 7.1))):
        with pytest.raises(forms.MismatchError, match=f"{name} differs by"):
            forms.compare({**want, name: value}, want)
    with pytest.raises(forms.MismatchError, match="gradient of kl for key"):
        forms.compare({**want, "gradient of kl for key": torch.ones(3)}, want)
    with pytest.raises(forms.MismatchError):
        forms.compare({**want, "out": torch.full((4,), float("nan"))}, want)

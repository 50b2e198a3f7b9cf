"""What a mechanism is: the registry, the four points, and what a layer says of itself."""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import overt
from attached import enliven
from conftest import random_maps
from examples import SigmoidAttention, TalkingHeads
from families import FAMILIES, inputs_of
from fresh import fresh
from overt.mechanisms import backend, fused
from overt.mechanisms import mechanism as mechanisms
from overt.mechanisms.attention_map import AttentionMap
from overt.mechanisms.fused import FusedForm, form_of, register_fused
from overt.mechanisms.mechanism import as_dict, from_dict, key_of, registered
from overt.mechanisms.seen import Seen
from overt.mechanisms.site import Site

BY_NAME = {family.name: family for family in FAMILIES}
POINTS: list[str] = []


@pytest.fixture(autouse=True)
def _registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mechanisms, "_registered", dict(mechanisms._registered))
    POINTS.clear()


class Noting(overt.MechanismLayer):
    """Acts everywhere and changes nothing."""

    def logits(self, logits: Tensor, call: overt.AttentionCall, chain: overt.Chain) -> Tensor:
        del call, chain
        POINTS.append(f"{self.name} logits")
        return logits

    def refine(self, logits: Tensor, call: overt.AttentionCall, chain: overt.Chain) -> Tensor:
        del call, chain
        POINTS.append(f"{self.name} refine")
        return logits

    def mixed(self, weights: Tensor, call: overt.AttentionCall, chain: overt.Chain) -> Tensor:
        del call, chain
        POINTS.append(f"{self.name} mixed")
        return weights


@dataclass(frozen=True)
class First(overt.Mechanism):
    sizes: tuple[int, ...] = (1, 2)


@dataclass(frozen=True)
class Second(overt.Mechanism):
    pass


def attend(*listed: overt.Mechanism, dropout: float = 0.0) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    attention = overt.MultiheadAttention(8, 2, dropout, batch_first=True, mechanisms=list(listed))
    x = random_maps(2, 5, 8, dtype=torch.float32)
    output, weights = attention(x, x, x, average_attn_weights=False, chain=overt.Chain(step=0))
    return output, weights


# --- The four points ---


def test_points_come_in_their_order_and_within_a_point_in_that_of_the_list() -> None:
    for kind in (First, Second):
        overt.register_mechanism(kind, Noting)
    attend(Second(), First(), overt.Bayesian())
    by_point = [
        "Second logits",
        "First logits",
        "Second refine",
        "First refine",
        "Second mixed",
        "First mixed",
    ]
    assert by_point == POINTS


def test_points_that_a_layer_does_not_define_do_nothing() -> None:
    overt.register_mechanism(First, Noting)
    assert AttentionMap([First()], Site(2, 4)).layers[0].points == (
        "logits",
        "refine",
        "mixed",
    )
    for got, want in zip(attend(First()), attend(), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("point", ["logits", "refine", "weights", "mixed"])
def test_a_wrong_result_is_named_with_its_mechanism_and_point(point: str) -> None:
    wrong: list[Any] = [
        lambda _, x, *__: x[..., :-1],
        lambda _, x, *__: x.mean(dim=1, keepdim=True),
        lambda *_: None,
    ]
    for act in wrong:
        overt.register_mechanism(First, type("Wrong", (overt.MechanismLayer,), {point: act}))
        with pytest.raises(ValueError, match=rf"First\.{point} must return .* \(2, 2, 5, 5\), got"):
            attend(First())


def test_a_second_mechanism_that_makes_weights_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="Bayesian and SigmoidAttention both make the weights"):
        attend(overt.Bayesian(), SigmoidAttention())
    with pytest.raises(ValueError, match="SigmoidAttention and Bayesian both make the weights"):
        overt.attach(BY_NAME["BERT"].make(), SigmoidAttention(), overt.Bayesian())


def test_what_acts_after_the_softmax_acts_before_dropout() -> None:
    torch.manual_seed(3)
    attention = overt.MultiheadAttention(8, 2, 0.5, batch_first=True, mechanisms=[TalkingHeads()])
    layer: Any = attention.map.layer_of(TalkingHeads)
    with torch.no_grad():
        layer.after.copy_(torch.tensor([[0.0, 1.0], [1.0, 0.0]]))
    x = random_maps(1, 4, 8, dtype=torch.float32)
    _, swapped = attention(x, x, x, average_attn_weights=False)
    with torch.no_grad():
        layer.after.copy_(torch.eye(2))
    _, plain = attention(x, x, x, average_attn_weights=False)
    assert torch.equal(swapped, plain.flip(1)), "no weight was dropped before it"


def test_hooks_on_a_layer_see_each_point() -> None:
    attention = overt.MultiheadAttention(8, 2, batch_first=True, mechanisms=[TalkingHeads()])
    seen: list[str] = []
    attention.map.layers[0].register_forward_hook(lambda _, args, out: seen.append((args[0], out.shape)))
    x = random_maps(1, 4, 8, dtype=torch.float32)
    attention(x, x, x)
    assert seen == [("logits", (1, 2, 4, 4)), ("mixed", (1, 2, 4, 4))]


def test_talking_heads_is_its_formula() -> None:
    torch.manual_seed(0)
    attention = overt.MultiheadAttention(8, 2, batch_first=True, mechanisms=[TalkingHeads()]).double()
    plain = nn.MultiheadAttention(8, 2, batch_first=True).double()
    plain.load_state_dict({k: v for k, v in attention.state_dict().items() if not k.startswith("map.")})
    layer: Any = attention.map.layers[0]
    before, after = random_maps(2, 2, seed=1), random_maps(2, 2, seed=2)
    x = random_maps(1, 4, 8)
    q, k, _ = attention._project(x, x, x)
    with torch.no_grad():
        layer.before.copy_(before)
        layer.after.copy_(after)
    logits = (q / 2.0) @ k.mT
    want = torch.zeros(1, 2, 4, 4, dtype=torch.float64)
    for g in range(2):
        for h in range(2):
            want[:, g] += after[g, h] * torch.softmax(
                sum(before[h, f] * logits[:, f] for f in range(2)), dim=-1
            )
    _, weights = attention(x, x, x, average_attn_weights=False)
    torch.testing.assert_close(weights, want)


def test_sigmoid_attention_is_its_formula_under_padding() -> None:
    attention = overt.MultiheadAttention(
        8, 2, batch_first=True, mechanisms=[SigmoidAttention(bias=0.5)]
    ).double()
    x = random_maps(2, 4, 8)
    padding = torch.tensor([[False] * 4, [False, False, True, True]])
    q, k, _ = attention._project(x, x, x)
    _, weights = attention(x, x, x, padding, average_attn_weights=False)
    for b, keys in ((0, 4), (1, 2)):
        logits = (q[b, :, :keys] / 2.0) @ k[b, :, :keys].mT
        want = 1.0 / (1.0 + torch.exp(-(logits + 0.5 - torch.log(torch.tensor(float(keys))))))
        torch.testing.assert_close(weights[b, :, :keys, :keys], want)
    assert not weights[1, :, 2:].any()
    assert not weights[1, :, :, 2:].any()


# --- The registry ---


def test_the_built_in_mechanisms_are_registered() -> None:
    assert {"Bayesian", "Evolving", "Synthesizer"} <= set(registered())
    assert list(registered()) == sorted(registered())
    assert [key_of(m) for m in (overt.Evolving(), TalkingHeads())] == ["evolving", "talking_heads"]


def test_settings_go_through_json_and_back() -> None:
    overt.register_mechanism(First, Noting)
    for one in (First((3, 4)), overt.Bayesian(k=7.0), overt.Evolving.realformer(), TalkingHeads(after=False)):
        assert from_dict(json.loads(json.dumps(as_dict(one)))) == one


def test_only_registered_names_are_made_and_the_error_lists_them() -> None:
    for name in ("Exploding", "os.system", "Mechanism", None):
        with pytest.raises(ValueError, match=r"must name one of Bayesian, Evolving, .*Synthesizer.* got "):
            from_dict({"name": name})
    with pytest.raises(ValueError, match="Evolving has no setting gamma in this version of overt"):
        from_dict({"name": "Evolving", "gamma": 1})


def test_wrong_registrations_are_named_in_a_line() -> None:
    @dataclass
    class Loose(overt.Mechanism):
        pass

    @dataclass(frozen=True)
    class Named(overt.Mechanism):
        name: str = ""

    class Bare(overt.Mechanism):
        pass

    wrong: list[tuple[Any, Any, type[Exception], str]] = [
        (Loose, Noting, TypeError, r"Loose must be a dataclass\(frozen=True\)"),
        (Bare, Noting, TypeError, r"Bare must be a dataclass\(frozen=True\)"),
        (Named, Noting, TypeError, "Named must not have a setting called name"),
        (First, nn.Linear, TypeError, "the layer of First must be a subclass of overt.MechanismLayer"),
        (
            First,
            overt.MechanismLayer,
            TypeError,
            "defines none of logits, refine, weights, mixed",
        ),
        (dict, Noting, TypeError, "must be a subclass of overt.Mechanism, got <class 'dict'>"),
    ]
    for kind, layer, error, said in wrong:
        with pytest.raises(error, match=said) as caught:
            overt.register_mechanism(kind, layer)
        assert "\n" not in str(caught.value)
    with pytest.raises(TypeError, match=r"Second is not registered: call overt\.register_mechanism first"):
        attend(Second())
    stranger = dataclass(frozen=True)(type("Evolving", (overt.Mechanism,), {"__module__": "elsewhere"}))
    with pytest.raises(ValueError, match=r"Evolving is already registered by overt\.mechanisms\.evolving"):
        overt.register_mechanism(stranger, Noting)


@pytest.mark.parametrize("value", [torch.ones(2), [1, 2], {"a": 1}, torch.float16, (1, {2})])
def test_settings_that_no_file_could_hold_are_refused_when_they_are_used(value: Any) -> None:
    overt.register_mechanism(First, Noting)
    with pytest.raises(TypeError, match=r"First\.sizes must be a number, .*, None or a tuple of those"):
        attend(First(value))


def test_numbers_of_numpy_and_torch_are_settings_and_are_saved_as_numbers() -> None:
    config = overt.Bayesian(k=torch.tensor(3.0), sigma=np.float32(0.5))  # type: ignore[arg-type]
    assert as_dict(config)["k"] == 3.0
    assert json.dumps(as_dict(config))
    attend(config)


def test_a_layer_that_is_not_set_up_says_so() -> None:
    class Bare(Noting):
        def __init__(self, *_: Any) -> None:
            nn.Module.__init__(self)

    overt.register_mechanism(First, Bare)
    with pytest.raises(TypeError, match=r"Bare\.__init__ must call super\(\)\.__init__\(config, site\)"):
        attend(First())


def test_parts_have_names_of_their_own() -> None:
    for name, said in (
        ("fused", 'a part of First must be a plain word other than "fused"'),
        ("attention", "both have a part called"),
    ):
        overt.register_mechanism(First, type("Parted", (Noting,), {"part_names": (name,)}))
        with pytest.raises(ValueError, match=said):
            attend(First(), overt.Evolving())


def test_rows_are_kept_only_where_they_come_in_pieces() -> None:
    site, rows = Site(2, 4, "decoder", 1), random_maps(1, 2, 3, 3)
    whole, pieces = overt.Chain(), overt.Chain(keep=True)
    assert [whole.keep_rows(site, "First", rows, 1) for _ in range(2)] == [None, None]
    assert pieces.keep_rows(site, "First", rows, 1) is None
    kept = pieces.keep_rows(site, "First", rows, 1)
    assert kept is not None
    assert torch.equal(kept, rows[:, :, -1:])


def test_names_that_would_collide_in_a_model_are_refused() -> None:
    made = {
        name: dataclass(frozen=True)(type(name, (overt.Mechanism,), {"__module__": "elsewhere"}))
        for name in ("FooBar", "Foo_Bar", "Site")
    }
    overt.register_mechanism(made["FooBar"], Noting)
    with pytest.raises(ValueError, match="Foo_Bar and FooBar would both be called foo_bar in a model"):
        overt.register_mechanism(made["Foo_Bar"], Noting)
    overt.register_mechanism(made["Site"], Noting)
    with pytest.raises(ValueError, match="a mechanism cannot be called Site: the name site is taken"):
        attend(made["Site"]())


def test_a_class_that_is_defined_again_takes_the_place_of_the_first() -> None:
    for _ in range(2):
        again = dataclass(frozen=True)(type("Cell", (overt.Mechanism,), {"__module__": "__main__"}))
        overt.register_mechanism(again, Noting)
    assert from_dict({"name": "Cell"}) == again()


# --- In real models ---


@pytest.mark.slow
def test_a_saved_model_loads_in_a_fresh_process_with_one_import(tmp_path: Path) -> None:
    family = BY_NAME["BERT"]
    model = enliven(overt.attach(family.make(), TalkingHeads(), overt.Evolving()))
    inputs = inputs_of(family)
    want = model(**inputs).logits
    model.save_pretrained(tmp_path / "model")
    torch.save((inputs, want.detach()), tmp_path / "pair.pt")
    code = (
        "import torch, overt{0}\n"
        f"model = overt.load({str(tmp_path / 'model')!r})\n"
        f"inputs, want = torch.load({str(tmp_path / 'pair.pt')!r})\n"
        "torch.testing.assert_close(model(**inputs).logits, want)\nprint('same')"
    )
    assert fresh(code.format(", talking_heads")) == ("same", "")
    _, without = fresh(code.format(""))
    assert "must name one of Bayesian, Evolving, Synthesizer, got" in without
    assert "import the module that registers it first" in without


def test_describe_shows_what_each_mechanism_says(capsys: pytest.CaptureFixture[str]) -> None:
    overt.describe(overt.attach(BY_NAME["BERT"].make(), TalkingHeads(), overt.Evolving(alpha=0.2)))
    text = capsys.readouterr().out
    head, first, second = text.splitlines()[3:6]
    assert head.split() == [
        "attention",
        "kind",
        "layer",
        "heads",
        "TalkingHeads",
        "alpha",
        "beta",
        "parameters",
    ]
    assert "before=True, after=True" in first
    assert first.split()[-3:] == ["start", "start", "32"]
    assert second.split()[-3:-1] == ["0.2", "0.1"]


def test_a_trace_makes_rows_sum_to_one_before_the_residual_joins() -> None:
    family = BY_NAME["BERT"]
    model = overt.attach(family.make(), SigmoidAttention())
    traced = overt.trace(model, inputs_of(family))
    assert not traced.sums_to_one
    assert not traced.signed
    first = traced.maps[0].double()
    assert (first.sum(dim=-1) - 1.0).abs().max() > 0.05, "the weights themselves do not"
    unit = first / first.sum(dim=-1, keepdim=True)
    want = 0.5 * unit + 0.5 * torch.eye(unit.shape[-1], dtype=torch.float64)
    torch.testing.assert_close(traced.rollout(layers=0)[:, 0], want)
    torch.testing.assert_close(traced.flow(layers=0)[:, 0], want)


def test_a_signed_map_has_rollout_and_no_flow(tmp_path: Path) -> None:
    family = BY_NAME["Llama"]
    model = enliven(overt.attach(family.make(), TalkingHeads()))
    traced = overt.trace(model, inputs_of(family), heads=True)
    assert traced.signed
    assert bool((traced.maps[0] < 0).any())
    first = traced.maps[0].double().mean(dim=1)
    unit = first / first.sum(dim=-1, keepdim=True)
    want = 0.5 * unit + 0.5 * torch.eye(unit.shape[-1], dtype=torch.float64)
    torch.testing.assert_close(traced.rollout(layers=0)[:, 0], want)
    traced.save(tmp_path / "trace.safetensors")
    for one in (traced, traced[0], overt.Trace.load(tmp_path / "trace.safetensors")):
        with pytest.raises(ValueError, match="no flow over weights that may be negative"):
            one.flow()
    assert "rollout" in overt.page(traced).html(), "a page leaves flow out"
    norm = overt.trace(model, inputs_of(family), mixing="norm")
    assert bool((norm.maps[0] >= 0).all())
    assert norm.flow(layers=0).isfinite().all()


def test_parts_are_those_of_the_mechanisms_that_have_some() -> None:
    family = BY_NAME["BERT"]
    model = overt.attach(family.make(), TalkingHeads(), overt.Evolving())
    assert list(overt.trace(model, inputs_of(family), parts=True).parts) == [
        "attention",
        "convolution",
        "fused",
    ]


def test_what_a_mechanism_adds_to_the_loss_joins_it_with_its_weight() -> None:
    class Sharp(overt.MechanismLayer):
        adds = "entropy"

        def mixed(self, weights: Tensor, call: overt.AttentionCall, chain: overt.Chain) -> Tensor:
            term = torch.special.entr(weights).sum(dim=-1).mean(dim=(1, 2))
            chain.add_loss(call.site, term, self.config)
            return weights

    @dataclass(frozen=True)
    class Entropy(overt.Mechanism):
        def loss_weight(self, step: Tensor | None) -> Tensor | float:
            assert step is not None
            return 0.5 + step

    overt.register_mechanism(Entropy, Sharp)
    family = BY_NAME["BERT"]
    model = family.make()
    inputs = {**inputs_of(family), "labels": torch.tensor([0, 1, 1])}
    task = model(**inputs).loss
    overt.attach(model, Entropy())
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    model.train()
    model.overt_state.step.fill_(2)
    loss = model(**inputs).loss
    torch.testing.assert_close(loss - task, 2.5 * overt.kl(model), atol=1e-5, rtol=1e-5)
    assert overt.kl(model).item() > 1.0


def test_a_random_mechanism_of_ones_own_has_a_posterior() -> None:
    class Shaken(overt.MechanismLayer):
        random = True

        def refine(self, logits: Tensor, call: overt.AttentionCall, chain: overt.Chain) -> Tensor:
            del call
            if chain.sample is None:
                return logits
            sample = chain.sample.to(logits.dtype).view(-1, 1, 1, 1)
            return logits * (1.0 + 0.1 * sample)

    @dataclass(frozen=True)
    class Shake(overt.Mechanism):
        pass

    overt.register_mechanism(Shake, Shaken)
    family = BY_NAME["BERT"]
    model = overt.attach(family.make(), Shake())
    assert float(overt.posterior(model, inputs_of(family), samples=3).spread.max()) > 0.0
    assert len(overt.trace(model, inputs_of(family), samples=2).draws) == 2
    still = overt.attach(family.make(), TalkingHeads())
    with pytest.raises(ValueError, match="posterior needs random weights"):
        overt.posterior(still, inputs_of(family))


def test_a_graph_refuses_a_mechanism_with_the_reason() -> None:
    pytest.importorskip("torch_geometric", reason="graph attention is PyG's, an extra")
    from overt.graphs import GATConv

    with pytest.raises(ValueError, match="graph attention cannot have TalkingHeads, which has no form on"):
        GATConv(4, 2, mechanisms=[TalkingHeads()])


def test_a_fused_form_runs_for_exactly_the_mechanisms_that_it_covers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "_forms", dict(fused._forms))
    called: list[str] = []

    def attend_all(layers: Any, call: overt.AttentionCall, chain: overt.Chain) -> Tensor:
        del chain
        called.extend(layers)
        return torch.zeros_like(call.query)

    register_fused(FusedForm(frozenset({"TalkingHeads"}), attend_all, runs_on=backend.LOOPS))
    assert form_of(frozenset({"TalkingHeads", "Evolving"})) is None
    x = random_maps(1, 4, 8, dtype=torch.float32)
    for listed, ran in (([TalkingHeads()], True), ([TalkingHeads(), overt.Evolving()], False)):
        called.clear()
        attention = overt.MultiheadAttention(8, 2, batch_first=True, mechanisms=listed)
        attention(x, x, x, need_weights=False)
        assert bool(called) == ran
    called.clear()
    attention = overt.MultiheadAttention(8, 2, batch_first=True, mechanisms=[TalkingHeads()])
    with overt.naive():
        attention(x, x, x, need_weights=False)
    attention(x, x, x, need_weights=True)
    attention(x, x, x, need_weights=False, attn_mask=torch.zeros(4, 4))
    assert called == []


# --- overt.naive() ---


def test_naive_holds_for_passes_begun_in_its_own_thread() -> None:
    inside, outside = threading.Event(), threading.Event()
    found: list[str | None] = []

    def other() -> None:
        inside.wait()
        found.append(overt.Chain().switched_off)
        outside.set()

    thread = threading.Thread(target=other)
    thread.start()
    with overt.naive():
        begun = overt.Chain()
        found.append(begun.switched_off)
        inside.set()
        outside.wait()
        with overt.naive():
            pass
        assert overt.Chain().switched_off is not None, "the inner one ended, the outer one holds"
    thread.join()
    assert found == ["switched off by overt.naive()", None]
    assert begun.switched_off == "switched off by overt.naive()", "a pass ends as it began"
    assert overt.Chain().switched_off is None


def test_a_trace_leaves_compiled_loops_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    reasons: list[str | None] = []
    unfit = backend.unfit

    def noted(*arguments: Any, **named: Any) -> str | None:
        reasons.append(unfit(*arguments, **named))
        return reasons[-1]

    monkeypatch.setattr(backend, "unfit", noted)
    family = BY_NAME["BERT"]
    model = enliven(overt.attach(family.make(), overt.Evolving(0.3, 0.3)))
    overt.trace(model, inputs_of(family))
    assert None in reasons, "the compiled loops ran"
    assert not any("switched off" in str(reason) for reason in reasons)


def test_a_trace_switches_no_fused_form_off_in_other_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []

    def attend_all(layers: Any, call: overt.AttentionCall, chain: overt.Chain) -> Tensor:
        del layers, chain
        called.append(threading.current_thread().name)
        return torch.zeros_like(call.query)

    monkeypatch.setattr(fused, "_forms", dict(fused._forms))
    register_fused(FusedForm(frozenset({"TalkingHeads"}), attend_all, runs_on=backend.LOOPS))
    own = overt.Encoder(8, 2, 1, [TalkingHeads()])
    other = overt.Encoder(8, 2, 1, [TalkingHeads()])
    x = random_maps(1, 4, 8, dtype=torch.float32)

    def meanwhile(*_: Any) -> None:
        thread = threading.Thread(target=lambda: (own(x), other(x)), name="other")
        thread.start()
        thread.join()

    handle = own.blocks[0].norm.register_forward_hook(
        lambda *_: meanwhile() if threading.current_thread().name != "other" else None
    )
    traced = overt.trace(own, {"x": x})
    handle.remove()
    assert traced.maps[0].shape == (1, 4, 4)
    assert called == ["other", "other"], "fused in the other thread, and a map in the traced one"


@pytest.mark.slow
def test_a_compiled_function_notices_naive() -> None:
    found, failed = fresh(
        "import torch, overt\n"
        "from overt.mechanisms import backend\n"
        "model = overt.Encoder(8, 2, 2, [overt.Evolving(), overt.Bayesian()], dropout=0.0)\n"
        "graphs = []\n"
        "def noted(graph, inputs):\n"
        "    graphs.append('draw' in str(graph.graph))\n"
        "    return graph.forward\n"
        "run = torch.compile(lambda x: model(x, chain=overt.Chain(step=0)), backend=noted, fullgraph=True)\n"
        "x = torch.randn(1, 4, 8)\n"
        "run(x); run(x)\n"
        "with overt.naive():\n"
        "    run(x)\n"
        "run(x)\n"
        "print(graphs)\n"
    )
    assert found == "[True, False]", failed


# --- Masks in parts ---


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_counts_are_of_the_size_that_is_asked(causal: bool, padded: bool) -> None:
    shown = torch.tensor([[True, True, False, True]]) if padded else None
    seen, cpu = Seen(shown, None, causal), torch.device("cpu")
    for queries in (4, 2, 4, 1):
        dense = seen.dense(queries, 4, cpu)
        whole = torch.ones(1, 1, queries, 4, dtype=torch.bool) if dense is None else dense
        want = whole.expand(1, 1, queries, 4).sum(dim=-1)[:, 0].float()
        assert torch.equal(seen.counts(queries, 4, cpu), want)
        assert float(torch.as_tensor(seen.pairs(queries, 4)).sum()) == float(want.sum())

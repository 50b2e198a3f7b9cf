"""Methods and mixings are registered in one place, and everything that lists them takes them from there."""

from __future__ import annotations

import dataclasses
import io
import json
import warnings
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import Tensor
from typer.testing import CliRunner

import overt
from families import BY_NAME, inputs_of, tokens
from overt.graphs import trace as trace_nodes
from overt.tracing import (
    CapturedAttention,
    Cost,
    Levels,
    Method,
    MethodRequest,
    Mixing,
    Options,
    register_method,
    register_mixing,
)
from overt.tracing.methods import blankout, flow, gradients
from overt.tracing.methods import method as method_registry
from overt.tracing.methods.method import methods
from overt.tracing.mixing import mixing as mixing_registry
from overt.tracing.mixing.mixing import mixings
from overt.tracing.options import Arguments
from overt.view.neighbourhood import page_data
from overt.view.terminal import table
from traces import evolving, made, neighbourhood, sampled

pytestmark = pytest.mark.slow


@pytest.fixture
def mine(monkeypatch: pytest.MonkeyPatch) -> Method:
    """A method of our own: half of the rollout."""
    monkeypatch.setattr(method_registry, "_registered", dict(method_registry._registered))

    def half(levels: Levels, asked: MethodRequest) -> Tensor:
        return 0.5 * methods()["rollout"].run(levels, asked)

    def half_over_edges(walk: Any, asked: MethodRequest) -> Tensor:
        edges = methods()["rollout"].edges
        assert edges is not None
        return 0.5 * edges(walk, asked)

    return register_method(
        Method(
            "half", "half rollout", "maps", half, Cost("as rollout"), value="amount", edges=half_over_edges
        )
    )


@pytest.fixture
def doubled(monkeypatch: pytest.MonkeyPatch) -> type[Mixing]:
    """A mixing of our own: squares of the weights."""
    monkeypatch.setattr(mixing_registry, "_registered", dict(mixing_registry._registered))

    @register_mixing
    class Squared(Mixing):
        name, title, unit, signed = "squared", "squared attention", True, False

        def map(self, call: CapturedAttention) -> Tensor:
            return self.reduced(call.weights**2)

    return Squared


def printed(what: Any) -> str:
    out = io.StringIO()
    Console(file=out, width=160).print(what)
    return out.getvalue()


@pytest.mark.usefixtures("mine")
def test_a_new_method_shows_up_wherever_methods_are_listed(tmp_path: Path) -> None:
    trace = made()
    wanted = 0.5 * trace.rollout()
    torch.testing.assert_close(trace.read("half"), wanted)
    torch.testing.assert_close(overt.tracing.read("half", torch.stack(trace.maps, dim=1)), wanted)
    assert "half rollout" in printed(table(trace))
    (entry,) = trace.html().index["traces"]
    assert "half" in entry["fields"]
    assert {
        "name": "half",
        "title": "half rollout",
        "reads": "maps",
        "value": "amount",
        "paths": False,
    } in entry["methods"]
    axes = [one.get_title() or one.get_xlabel() for one in trace.plot("strip", columns=2).axes]
    assert any("half rollout" in words for words in axes), axes
    trace.plot("graph", method="half")
    trace.plot("graph", method="half", query=2)
    drawn = sampled()
    assert drawn.spread("half").mean.shape == drawn.rollout().shape
    model = BY_NAME["BERT"].make()
    found = overt.judge.correlate(overt.trace(model, tokens()), unk=1, bootstrap=1)
    assert ("half", "blankout") in found.mean
    np.testing.assert_allclose(found.mean["half", "gradients"], found.mean["rollout", "gradients"])
    assert "half" in overt.judge.randomised(model, tokens()).left
    del tmp_path


@pytest.mark.usefixtures("mine")
def test_a_new_method_with_a_form_on_edges_shows_up_on_graphs() -> None:
    trace = neighbourhood()
    torch.testing.assert_close(trace.read("half", 3), 0.5 * trace.rollout(3))
    assert "half" in str(trace.neighbours(3))
    data = page_data(trace, 3)
    assert all(one["half"] == pytest.approx(0.5 * one["rollout"]) for one in data["nodes"])
    assert "half" in [one["name"] for one in data["methods"]]


@pytest.mark.usefixtures("doubled")
def test_a_new_mixing_shows_up_wherever_mixings_are_listed(tmp_path: Path) -> None:
    model = BY_NAME["BERT"].make()
    trace = overt.trace(model, tokens(), mixing="squared")
    plain = overt.trace(model, tokens(), heads=True)
    torch.testing.assert_close(trace.maps[0], (plain.maps[0] ** 2).mean(dim=1))
    rows = trace.rollout(layers=0, residual=0.0)[0, 0]
    torch.testing.assert_close(rows.sum(dim=-1), torch.ones(9, dtype=torch.float64)), "made to sum to one"
    assert trace.html().index["traces"][0]["mixing_title"] == "squared attention"
    assert any("squared attention" in one.get_title() for one in trace.plot("strip", columns=2).axes)
    trace.save(tmp_path / "t.safetensors")
    assert overt.Trace.load(tmp_path / "t.safetensors").mixing == "squared"


def test_a_loaded_trace_of_an_unknown_mixing_says_what_is_missing(tmp_path: Path) -> None:
    trace = made()
    trace.mixing = "theirs"
    trace.save(tmp_path / "t.safetensors")
    with pytest.raises(
        ValueError, match="has the mixing 'theirs', which is not registered: import the module"
    ):
        overt.Trace.load(tmp_path / "t.safetensors").rollout()


def test_what_is_registered_is_checked(mine: Method) -> None:
    run = mine.run
    for wrong, words in (
        (dataclasses.replace(mine, name="two words"), "name must be a word"),
        (dataclasses.replace(mine, name="mean"), "name must not be one that pages use"),
        (dataclasses.replace(mine, name="rollout"), "there is a method 'rollout' already"),
        (
            dataclasses.replace(mine, name="blankout-absolute".replace("-", "_"), reads="map"),
            "reads must be one",
        ),
        (dataclasses.replace(mine, needless=("target",)), "needless must list shared arguments"),
        (dataclasses.replace(mine, needless="layers"), "needless must list shared"),  # type: ignore[arg-type]
        (dataclasses.replace(mine, value="shares"), "value must be one of"),  # type: ignore[arg-type]
        (
            dataclasses.replace(mine, name="other", variants={"integrated": {}}),
            "there is a method 'integrated'",
        ),
    ):
        with pytest.raises(ValueError, match=words):
            register_method(wrong)
    with pytest.raises(TypeError, match=r"options must be a subclass of overt\.tracing\.Options"):
        register_method(dataclasses.replace(mine, options=dict))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"cost must be an overt\.tracing\.Cost, got 'cheap'"):
        register_method(dataclasses.replace(mine, cost="cheap"))  # type: ignore[arg-type]

    class Loose(Options):
        keep: int = 3

    with pytest.raises(TypeError, match=r"Loose must be a dataclass\(frozen=True, kw_only=True\)"):
        register_method(dataclasses.replace(mine, options=Loose))
    with pytest.raises(TypeError, match=r"method must be an overt\.tracing\.Method"):
        register_method(run)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="a mixing must be a subclass"):
        register_mixing(int)  # type: ignore[type-var]
    register_method(mine)  # again, as a notebook does


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (lambda values: values[:, 0], r"'half' must return shape \(1, 3, 9, 9\), got \(1, 9, 9\)"),
        (lambda values: values.int(), "'half' must return a tensor of floats, got a tensor of torch.int32"),
        (lambda values: values.numpy(), "'half' must return a tensor of floats, got a ndarray"),
    ],
)
def test_what_a_method_gives_is_checked(mine: Method, given: Any, words: str) -> None:
    right = mine.run
    method_registry._registered["half"] = dataclasses.replace(mine, run=lambda *args: given(right(*args)))
    with pytest.raises((ValueError, TypeError), match=words):
        made().read("half")


def test_padding_has_zeros_whatever_a_method_gives(mine: Method) -> None:
    ones = dataclasses.replace(
        mine, run=lambda levels, asked: torch.ones_like(mine.run(levels, asked)).float()
    )
    method_registry._registered["half"] = ones
    trace = made([["[CLS]", "a", "[PAD]"]], mask=torch.tensor([[True, True, False]]))
    found = trace.read("half")[0, 0]
    assert found.tolist() == [[1.0, 1.0, 0.0], [1.0, 1.0, 0.0], [0.0, 0.0, 0.0]]
    assert found.dtype == torch.float64


def test_a_method_that_fails_leaves_the_others_on_the_page(mine: Method) -> None:
    def fail(levels: Levels, asked: MethodRequest) -> Tensor:
        raise ValueError(f"not today, with {levels.layers} layers and {asked.residual}")

    method_registry._registered["half"] = dataclasses.replace(mine, run=fail)
    (entry,) = made().html().index["traces"]
    assert entry["missing"]["half"] == "no half rollout: not today, with 3 layers and 0.5"
    assert "rollout" in entry["fields"]
    with pytest.raises(ValueError, match="not today"):
        made().html(methods=["half"])


def test_a_method_that_runs_the_model_finds_it_in_evaluation_mode(mine: Method) -> None:
    def seen(subject: Any, options: Options) -> Tensor:
        del options
        assert not subject.model.training
        return torch.zeros(*subject.mask.shape).view(subject.mask.shape[0], 1, 1, -1)

    register_method(Method("theirs", "theirs", "model", seen, Cost("a pass")))
    del mine
    model = BY_NAME["BERT"].make().train()
    trace = overt.trace(model, tokens())
    assert trace.read("theirs").shape == (3, 1, 1, 9)
    assert model.training
    with pytest.raises(ValueError, match="layers has no meaning for theirs"):
        trace.read("theirs", layers=0)


@pytest.mark.parametrize(
    ("cells", "words"),
    [
        (lambda _: None, "has no map of .*: map returned None for it"),
        (lambda weights: weights, r"'squared' must make maps of shape \(3, 9, 9\), got \(3, 4, 9, 9\)"),
        (lambda weights: weights.mean(1).numpy(), "got a ndarray"),
        (lambda weights: -weights.mean(1), "'squared' is not signed, but its map of .* has -"),
    ],
)
def test_what_a_mixing_makes_is_checked(doubled: type[Mixing], cells: Any, words: str) -> None:

    def made_of(self: Mixing, call: CapturedAttention) -> Any:
        del self
        return cells(call.weights)

    doubled.map = made_of  # type: ignore[method-assign]
    with pytest.raises(ValueError, match=words):
        overt.trace(BY_NAME["BERT"].make(), tokens(), mixing="squared")


def test_the_command_imports_what_registers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from overt.cli import app

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(method_registry, "_registered", dict(method_registry._registered))
    (tmp_path / "of_mine.py").write_text(
        "from dataclasses import replace\n"
        "from overt.tracing.methods.method import methods, register_method\n"
        "register_method(replace(methods()['rollout'], name='mine_too', title='mine'))\n"
    )
    overt.trace(BY_NAME["BERT"].make(), tokens(1)).save("t.safetensors")
    asked = ["plot", "t.safetensors", "--method", "mine_too", "--out", "x.png"]
    assert "must be one of" in str(CliRunner().invoke(app, asked).exception)
    assert CliRunner().invoke(app, ["--import", "of_mine", *asked]).exit_code == 0
    missing = CliRunner().invoke(app, ["--import", "not_there", *asked])
    assert "--import not_there: No module named" in str(missing.exception)


# Arguments


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        (Arguments, Options),
        (flow.FlowArguments, flow.FlowOptions),
        (blankout.BlankoutArguments, blankout.BlankoutOptions),
        (gradients.GradientsArguments, gradients.GradientsOptions),
    ],
)
def test_signatures_and_options_agree(arguments: Any, options: type[Options]) -> None:
    typed, held = get_type_hints(arguments), get_type_hints(options)
    assert {**typed, "queries": held["queries"]} == held


def test_options_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Options().residual = 0.1  # type: ignore[misc]


@pytest.mark.parametrize("name", methods())
def test_every_method_takes_the_same_arguments(name: str) -> None:
    """Anything but the default is used, or refused by name."""
    model = BY_NAME["BERT"].make()
    trace = overt.trace(model, tokens(), heads=True)
    own = {"unk": 1} if methods()[name].runs_model else {}
    usual = trace.read(name, **own)
    defaults = {one.name: one.default for one in dataclasses.fields(Options)}
    torch.testing.assert_close(trace.read(name, **{**own, **defaults}), usual)
    others = {"layers": [0], "heads": [1], "residual": 0.2, "receptive_field": True}
    for argument, value in others.items():
        if argument in methods()[name].idle:
            with pytest.raises(ValueError, match=f"{argument} has no meaning for .*: leave it out"):
                trace.read(name, **own, **{argument: value})
        else:
            other = trace.read(name, **own, **{argument: value})
            # Raw attention where every token sees all is its own receptive field.
            same = (name, argument) == ("raw", "receptive_field")
            assert other.shape != usual.shape or torch.allclose(other, usual) == same
    with pytest.raises(TypeError, match=f"{name} takes no colour; it takes queries"):
        trace.read(name, colour="red")


def test_what_means_nothing_is_as_the_issue_has_it() -> None:
    idle = {"layers", "heads", "residual", "receptive_field"}
    expected = {"raw": {"residual"}, "rollout": set(), "flow": set(), "blankout": idle, "gradients": idle}
    assert {name: set(one.idle) for name, one in methods().items()} == expected


def test_named_methods_are_read_by_name() -> None:
    trace = made()
    for name in methods("maps"):
        torch.testing.assert_close(getattr(trace, name)(1, layers=-1), trace.read(name, 1, layers=-1))
    with pytest.raises(ValueError, match="method must be one of 'raw', 'rollout', 'flow', 'blankout', 'grad"):
        trace.read("rolout")


# What is on by default


def test_nothing_that_runs_the_model_is_on_by_default(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from overt.cli import trace as command
    from overt.view.server.trace_request import TraceRequest

    model = BY_NAME["BERT"].make()
    trace = overt.trace(model, tokens())

    def refuse(*_: Any, **__: Any) -> Tensor:
        raise AssertionError("the model ran")

    for name, one in methods("model").items():
        monkeypatch.setitem(method_registry._registered, name, dataclasses.replace(one, run=refuse))
    assert trace.html().index["traces"][0]["importances"] == []
    table(trace)
    trace.plot("strip")
    assert set(TraceRequest(None).methods) == set(methods("maps"))  # type: ignore[arg-type]
    monkeypatch.setattr(command, "open_model", lambda _: model)
    monkeypatch.setattr(command, "read_input", lambda *_: tokens())
    command.run(["a"], ["b"], out=tmp_path / "page.html")
    with pytest.raises(AssertionError, match="the model ran"):
        command.run(["a"], ["b"], ["blankout"])
    assert all(mixings()[name].passes == 0 for name in mixings() if name != "value-zeroing")


def test_recipes_of_published_tables_name_their_methods(mine: Method) -> None:
    from overt.recipes import flow_measure

    assert mine.name not in flow_measure.METHODS
    assert flow_measure.METHODS == ("raw", "rollout", "flow")
    folder = Path(flow_measure.__file__).parent
    for path in folder.glob("flow_*.py"):
        assert "method import methods" not in path.read_text(), path


def test_the_command_lists_what_is_registered() -> None:
    from overt.cli import app

    said = CliRunner().invoke(app, ["trace", "--help"], env={"COLUMNS": "200"}).output
    for name in (*methods(), *mixings()):
        assert name in said, name


# Files


@pytest.mark.parametrize("samples", [0, 2])
def test_a_trace_with_parts_comes_back_as_it_was(samples: int, tmp_path: Path) -> None:
    model = BY_NAME["BERT"].make()
    overt.attach(model, overt.Evolving(), overt.Bayesian(k=3.0), where={"encoder": [1, 2]})
    trace = overt.trace(model, tokens(), parts=True, samples=samples, heads=True)
    assert trace.parts["fused"][0] is None, "no mechanism there"
    trace.save(tmp_path / "t.safetensors")
    back = overt.Trace.load(tmp_path / "t.safetensors")
    assert list(back.parts) == list(trace.parts)
    for name, maps in trace.parts.items():
        for before, after in zip(maps, back.parts[name], strict=True):
            assert (before is None) == (after is None), name
            assert before is None or torch.equal(before, after), name
    assert repr(back) == repr(trace)
    assert (back.samples, back.averaged) == (samples, False)


def test_a_part_that_is_not_the_map_is_kept_as_it_is(tmp_path: Path) -> None:
    trace = evolving()
    trace.parts["fused"] = [None if one is None else one / 2 for one in trace.parts["fused"]]
    trace.save(tmp_path / "t.safetensors")
    for before, after in zip(
        trace.parts["fused"], overt.Trace.load(tmp_path / "t.safetensors").parts["fused"], strict=True
    ):
        assert before is None or (after is not None and torch.equal(before, after))


def test_page_and_figure_show_the_same_fused_map() -> None:
    from traces import field

    model = BY_NAME["BERT"].make()
    overt.attach(model, overt.Evolving(), overt.Bayesian(k=1.0))
    trace = overt.trace(model, tokens(1), parts=True, samples=3)
    shown = field(trace.html(mass=1.0), "mean", 1)[0]
    figure = trace.parts["fused"][1]
    assert figure is not None
    assert float((shown - figure[0]).abs().max()) <= 0.005
    average = field(trace.html(mass=1.0), "average", 1)[0]
    wanted = trace.spread().mean[0, 1]
    assert float((average - wanted).abs().max()) <= 0.005
    assert float((figure[0] - wanted).abs().max()) > 0.01, "another map"


# Words that mean the same


def test_traces_of_tokens_and_of_nodes_mean_the_same() -> None:
    import inspect

    ours, theirs = inspect.signature(overt.trace).parameters, inspect.signature(trace_nodes).parameters
    for name in ("samples", "heads", "seed"):
        assert ours[name].default == theirs[name].default
    drawn, bare = sampled(3), made()
    assert (drawn.samples, bare.samples, neighbourhood().samples) == (3, 0, 0)


def test_moved_names_still_work_with_a_warning() -> None:
    for name, place in (
        ("Site", overt.mechanisms),
        ("AttentionMap", overt.mechanisms),
        ("Page", overt.view),
        ("Spread", overt.tracing),
    ):
        with pytest.warns(DeprecationWarning, match=f"overt.{name} has moved: overt"):
            found = getattr(overt, name)
        assert found is getattr(place, name)
        assert name not in overt.__all__
    with pytest.raises(AttributeError, match="no attribute 'Sight'"):
        _ = overt.Sight
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert overt.judge.uncertainty.ece([[0.5, 0.5]], [0]) == 0.5


def test_the_index_of_a_page_is_plain_data() -> None:
    family = BY_NAME["T5"]
    trace = overt.trace(family.make(), inputs_of(family), mixing="value-zeroing")
    (entry, *_) = trace.html().index["traces"]
    json.dumps(entry)
    assert (entry["mixing"], entry["joint"], entry["residual"]) == ("value-zeroing", True, 0.0)

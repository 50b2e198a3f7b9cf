"""Figures of traces: the numbers drawn are those of the methods, widths and text are a paper's."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
import torch
from matplotlib.collections import LineCollection, PathCollection, QuadMesh
from matplotlib.colors import to_hex
from matplotlib.container import ErrorbarContainer
from matplotlib.figure import Figure
from torch import Tensor

import overt
from families import BY_NAME, inputs_of
from overt.cli.plot import run
from overt.models.agreement import AgreementClassifier
from overt.view.plots import VIEWS, matrix, plot, plot_compare, save
from overt.view.plots.style import LESS, MORE
from selection import covering

WORDS = ["[CLS]", "the", "key", "to", "the", "$x_1$ <b>", "[SEP]", "[PAD]"]
LAYERS = 3


def softmaxed(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.softmax(2.0 * torch.randn(*shape, generator=generator), dim=-1)


def made(heads: int = 0, batch: int = 2, **more: Any) -> overt.Trace:
    """A trace of random maps with a CLS, a SEP and, in its second example, padding."""
    n = len(WORDS)
    shape = (batch, heads, n, n) if heads else (batch, n, n)
    mask = torch.ones(batch, n, dtype=torch.bool)
    mask[1:, -1] = False
    special = torch.zeros(batch, n, dtype=torch.bool)
    special[:, [0, 6]] = True
    maps = [softmaxed(*shape, seed=layer) for layer in range(LAYERS)]
    return overt.Trace("encoder", maps, mask, [WORDS] * batch, special, **more)


@pytest.fixture(scope="module")
def evolved() -> overt.Trace:
    torch.manual_seed(0)
    model = AgreementClassifier(20, [overt.Evolving()], layers=LAYERS, heads=2, width=16).eval()
    return agreement(model, parts=True)


@pytest.fixture(scope="module")
def sampled() -> overt.Trace:
    torch.manual_seed(0)
    model = AgreementClassifier(20, [overt.Bayesian(k=2)], layers=2, heads=2, width=16).eval()
    return agreement(model, samples=4)


def agreement(model: AgreementClassifier, **more: Any) -> overt.Trace:
    ids = torch.tensor([[1, 5, 6, 7, 8]])
    return overt.trace(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, **more)


def family(name: str, **more: Any) -> overt.Trace:
    return overt.trace(BY_NAME[name].make(), inputs_of(BY_NAME[name]), **more)


def sketch(trace: overt.Trace, view: str = "strip", **more: Any) -> Figure:
    """A figure of which the numbers matter: a given one is not laid out, which takes most of the time."""
    return plot(trace, view, figure=Figure(), **more)


def meshes(figure: Figure) -> list[np.ndarray[Any, Any]]:
    """The matrices of a figure in the order in which they were drawn, without colour bars."""
    kept = [axes for axes in figure.axes if axes.get_label() != "<colorbar>"]
    found = [one for axes in kept for one in axes.collections if isinstance(one, QuadMesh)]
    return [np.asarray(one.get_array()).reshape(one._coordinates.shape[0] - 1, -1) for one in found]


def labels(axes: Any, side: str = "x") -> list[str]:
    return [one.get_text() for one in getattr(axes, f"get_{side}ticklabels")() if one.get_text()]


def test_a_strip_shows_the_methods_values_without_special_tokens_and_padding() -> None:
    trace = made()
    figure = plot(trace, example=1, query=2)
    shown = [1, 2, 3, 4, 5]
    for drawn, method in zip(meshes(figure), ("raw", "rollout", "flow"), strict=True):
        expected = getattr(trace, method)(queries=2)[1, :, 0, shown]
        np.testing.assert_allclose(drawn, expected.numpy())
    assert labels(figure.axes[3]) == [WORDS[one] for one in shown]


def test_special_tokens_and_chosen_ones_can_be_shown() -> None:
    trace = made()
    every = sketch(trace, methods=("raw",), special=True)
    assert meshes(every)[0].shape == (LAYERS, len(WORDS))
    some = sketch(trace, methods="rollout", tokens=[-1, 2], layer=[0, 2], receptive_field=True)
    expected = trace.rollout(queries=0, layers=[0, 2], receptive_field=True)[0, :, 0, [2, 7]]
    np.testing.assert_allclose(meshes(some)[0], expected.numpy())


def test_a_method_is_the_only_one_of_a_strip_and_of_a_comparison() -> None:
    trace = made()
    for figure in (sketch(trace, method="raw", query=2), sketch(trace, method="raw", methods="raw", query=2)):
        (drawn,) = meshes(figure)
        np.testing.assert_allclose(drawn, trace.raw(queries=2)[0, :, 0, [1, 2, 3, 4, 5, 7]].numpy())
    both = plot_compare({"a": trace, "b": trace}, method="flow", query=2, figure=Figure())
    assert len(meshes(both)) == 2
    np.testing.assert_allclose(meshes(both)[1], trace.flow(queries=2)[0, :, 0, [1, 2, 3, 4, 5, 7]].numpy())


@pytest.mark.slow
def test_many_tokens_put_methods_under_each_other_and_labels_do_not_overlap() -> None:
    n = 40
    words = [[f"word{number}" for number in range(n)]]
    mask = torch.ones(1, n, dtype=torch.bool)
    trace = overt.Trace("encoder", [softmaxed(1, n, n)], mask, words, ~mask)
    figure = plot(trace, methods=("raw", "rollout"))
    first, second = (axes for axes in figure.axes if axes.get_label() != "<colorbar>")
    assert first.get_position().y0 > second.get_position().y1
    written = [one for one in second.get_xticklabels() if one.get_text()]
    assert 15 < len(written) < n
    figure.draw_without_rendering()
    boxes = [one.get_window_extent() for one in written]
    # The glyphs of a line are lower than its box, which has room for what hangs and stands.
    assert all(after.x0 - before.x0 > 0.75 * before.width for before, after in pairwise(boxes))


def lines(figure: Figure) -> dict[tuple[Any, ...], float]:
    """Ends of a graph's lines, and their opacity."""
    found = next(one for one in figure.axes[0].collections if isinstance(one, LineCollection))
    alphas = np.asarray(found.get_colors())[:, 3]
    ends = [tuple(np.asarray(one).flatten().tolist()) for one in found.get_segments()]
    return dict(zip(ends, alphas.tolist(), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["raw", "rollout", "flow"])
def test_lines_between_columns_are_as_dark_as_the_methods_value_at_the_upper_layer(method: str) -> None:
    trace = made()
    shown = [1, 2, 3, 4, 5, 7]
    values = getattr(trace, method)()[0][:, shown][:, :, shown]
    found = lines(sketch(trace, "graph", method=method))
    for layer in range(LAYERS):
        for source in range(len(shown)):
            for target in range(len(shown)):
                part = float(values[layer, source, target] / values.max())
                key = (layer, target + 0.5, layer + 1, source + 0.5)
                assert found.get(key, 0.0) == pytest.approx(part, abs=0.0101)
                assert (key in found) == (part >= 0.01)


@pytest.mark.parametrize("method", ["raw", "rollout"])
def test_paths_of_a_query_bring_to_the_input_what_the_method_gives(method: str) -> None:
    trace = made(batch=1)
    figure = sketch(trace, "graph", method=method, query=2, layer=1, special=True, residual=0.3)
    if method == "raw":
        expected = trace.raw(layers=1)[0, 0, 2] @ trace.raw(layers=0)[0, 0]
    else:
        expected = trace.rollout(queries=2, layers=1, residual=0.3)[0, 0, 0]
    largest = float(re.sub("−", "-", figure.axes[1].get_yticklabels()[-1].get_text()))
    arrived = np.zeros(len(WORDS))
    for (left, target, *_), alpha in lines(figure).items():
        if left == 0.0:
            arrived[int(target)] += alpha**2  # opacity is a root
    np.testing.assert_allclose(arrived * largest, expected.numpy(), atol=0.01)
    assert arrived.argmax() == int(expected.argmax())


def test_inputs_that_a_signed_path_reaches_below_zero_are_dots_of_the_other_colour() -> None:
    trace = made(batch=1, mixing="effective")
    trace.maps = [cells - 0.3 for cells in trace.maps]
    figure = sketch(trace, "graph", method="rollout", query=2, special=True)
    expected = trace.rollout(queries=2, layers=-1)[0, 0, 0].numpy()
    assert expected.min() < 0.0 < expected.max()
    dots = [one for one in figure.axes[0].collections if isinstance(one, PathCollection)][-1]
    assert len(dots.get_offsets()) == len(WORDS)
    np.testing.assert_allclose(dots.get_sizes(), 4.0 + 22.0 * np.abs(expected) / np.abs(expected).max())
    colours = [to_hex(one).upper() for one in np.asarray(dots.get_facecolors())]
    assert colours == [LESS if value < 0.0 else MORE for value in expected]


def test_paths_leave_padding_out_and_take_the_heads_that_are_asked_for() -> None:
    trace = made(heads=3)
    figure = sketch(trace, "graph", example=1, query=2, head=[0, 2], special=True)
    expected = trace.rollout(queries=2, layers=-1, heads=[0, 2])[1, 0, 0, :7].numpy()
    dots = [one for one in figure.axes[0].collections if isinstance(one, PathCollection)][-1]
    np.testing.assert_allclose(dots.get_sizes(), 4.0 + 22.0 * expected / expected.max())


def test_a_graph_goes_up_to_its_layer() -> None:
    found = lines(sketch(made(), "graph", method="raw", layer=1))
    assert {right for _, _, right, _ in found} == {1.0, 2.0}


def test_flow_to_a_query_is_direct_lines_from_the_input() -> None:
    trace = made(batch=1)
    found = lines(sketch(trace, "graph", method="flow", query=0, special=True))
    values = trace.flow(queries=0, layers=-1)[0, 0, 0]
    for token, value in enumerate(values.tolist()):
        key = (0.0, token + 0.5, float(LAYERS), 0.5)
        assert found[key] == pytest.approx(value / float(values.max()))


def test_heads_are_a_grid_and_one_of_them_has_its_tokens_on_both_sides() -> None:
    trace = made(heads=2)
    shown = [1, 2, 3, 4, 5]
    drawn = meshes(sketch(trace, "heads", example=1))
    expected = [trace.maps[layer][1, head][shown][:, shown] for layer in range(LAYERS) for head in range(2)]
    np.testing.assert_allclose(np.stack(drawn), torch.stack(expected).numpy())
    one = plot(trace, "heads", example=1, layer=-1, head=1)
    np.testing.assert_allclose(meshes(one)[0], trace.maps[2][1, 1][shown][:, shown].numpy())
    assert labels(one.axes[0]) == labels(one.axes[0], "y") == [WORDS[token] for token in shown]
    assert one.axes[0].get_title() == "layer 3, head 2"
    assert len(meshes(sketch(made(), "heads"))) == LAYERS


def wide_trace(layers: int, heads: int, n: int = 5) -> overt.Trace:
    shape = (1, heads, n, n) if heads else (1, n, n)
    maps = [softmaxed(*shape, seed=layer) for layer in range(layers)]
    mask = torch.ones(1, n, dtype=torch.bool)
    return overt.Trace("encoder", maps, mask, [[f"w{number}" for number in range(n)]], ~mask)


def overlap(boxes: list[Any]) -> bool:
    # A line's box has room for what hangs and stands, so glyphs are lower than it.
    inner = [(one.x0, one.x1, one.y0 + 0.15 * one.height, one.y1 - 0.15 * one.height) for one in boxes]
    return any(
        a[0] < b[1] and b[0] < a[1] and a[2] < b[3] and b[2] < a[3]
        for place, a in enumerate(inner)
        for b in inner[:place]
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layers", "heads"), covering([(25, 2), (25, 0), (48, 4), (70, 0)], [(25, 2), (25, 0)])
)
def test_many_layers_keep_maps_square_and_labels_apart(layers: int, heads: int) -> None:
    figure = plot(wide_trace(layers, heads), "heads")
    figure.draw_without_rendering()
    drawn = [axes for axes in figure.axes if axes.get_label() != "<colorbar>"]
    assert len(drawn) == layers * max(heads, 1)
    sizes = [axes.get_window_extent() for axes in drawn]
    assert all(0.8 < box.width / box.height < 1.25 for box in sizes)
    assert figure.get_size_inches()[1] < 9.0
    texts = [one for axes in drawn for one in (axes.yaxis.label, axes.xaxis.label, axes.title)]
    boxes = [one.get_window_extent() for one in texts if one.get_text()]
    assert len(boxes) > 20
    assert not overlap(boxes)


@pytest.mark.slow
def test_rows_lower_than_a_number_have_every_second_one() -> None:
    figure = plot(wide_trace(12, 12, n=2), "heads", figure=Figure(figsize=(1.6, 2.0)))
    named = [axes.get_ylabel() for axes in figure.axes if axes.get_ylabel().isdigit()]
    assert named == [str(number) for number in range(1, 12, 2)]


def test_evolution_has_a_row_for_each_part_and_none_where_a_chain_starts(evolved: overt.Trace) -> None:
    drawn = iter(meshes(sketch(evolved, "evolution")))
    for part in ("attention", "convolution", "fused"):
        for layer in range(LAYERS):
            cells = evolved.parts[part][layer]
            assert (cells is None) == (part == "convolution" and layer == 0)
            if cells is not None:
                np.testing.assert_allclose(next(drawn), cells[0].numpy())
    assert next(drawn, None) is None


def test_uncertainty_shows_mean_and_spread_and_whiskers_of_one_spread(sampled: overt.Trace) -> None:
    figure = sketch(sampled, "uncertainty", layer=0)
    mean, spread = meshes(figure)
    found = sampled.spread("raw", layers=0)
    np.testing.assert_allclose(mean, found.mean[0, 0].numpy())
    np.testing.assert_allclose(spread, found.spread[0, 0].numpy())
    row = sampled.spread("rollout", queries=0, layers=0)
    panel = next(axes for axes in figure.axes if axes.containers)
    heights = [patch.get_height() for patch in panel.patches]
    np.testing.assert_allclose(heights, row.mean[0, 0, 0].numpy())
    bars = next(one for one in panel.containers if isinstance(one, ErrorbarContainer))
    ends = np.stack(bars.lines[2][0].get_segments())[:, :, 1]
    np.testing.assert_allclose((ends[:, 1] - ends[:, 0]) / 2.0, row.spread[0, 0, 0].numpy())


@pytest.mark.parametrize("pictured", [True, False])
def test_image_shows_the_patches_of_each_layer_with_the_picture_and_without(pictured: bool) -> None:
    trace = family("ViT")
    picture = np.zeros((3, 24, 24, 3), dtype=np.uint8)
    picture[1] = 200
    trace.picture = torch.from_numpy(picture) if pictured else None
    figure = sketch(trace[1:2], "image", method="raw")
    expected = trace.patches(trace.raw(queries=0)[1, :, 0])
    np.testing.assert_allclose(np.stack(meshes(figure)), expected.numpy())
    shown = [one for axes in figure.axes for one in axes.images]
    assert len(shown) == (4 if pictured else 0)


def test_cross_shows_target_rows_by_source_columns() -> None:
    trace = family("Marian", heads=True)
    drawn = meshes(sketch(trace, "cross", layer=1, head=2, special=True))[0]
    np.testing.assert_allclose(drawn, trace.cross[1][0, 2].numpy(), rtol=1e-6)
    rolled = meshes(sketch(trace, "cross", method="rollout", special=True))[0]
    np.testing.assert_allclose(rolled, trace.rollout(layers=-1)[0, 0, :, :9].numpy())


def test_compared_traces_share_each_methods_scale() -> None:
    first, second = made(), made()
    second.maps = [torch.full_like(cells, 1.0 / len(WORDS)) for cells in first.maps]
    traces = {"sharp": first, "flat": second}
    figure = plot_compare(traces, methods=("raw", "rollout"), figure=Figure())
    found = [one for axes in figure.axes for one in axes.collections if isinstance(one, QuadMesh)]
    drawn = [one for one in found if np.asarray(one.get_array()).size == 18]
    assert len(drawn) == 4
    assert drawn[0].norm.vmax == drawn[2].norm.vmax != drawn[1].norm.vmax == drawn[3].norm.vmax
    assert {"sharp\nlayer", "flat\nlayer"} <= {axes.get_ylabel() for axes in figure.axes}


def test_importances_are_bars_beneath_and_need_the_model() -> None:
    trace = family("BERT")
    figure = sketch(trace, methods=("raw",), importances=True, unk=3, target=1)
    blanked, slopes = (axes for axes in figure.axes if axes.get_ylabel() in ("blank-out", "gradients"))
    heights = [patch.get_height() for patch in blanked.patches]
    np.testing.assert_allclose(heights, trace.blankout(unk=3, target=1)[0, 0, 0].numpy(), atol=1e-6)
    heights = [patch.get_height() for patch in slopes.patches]
    np.testing.assert_allclose(heights, trace.gradients(target=1)[0, 0, 0].numpy(), rtol=1e-4)
    with pytest.raises(ValueError, match="blank-out needs the model"):
        plot(made(), importances=True)


def test_negative_values_have_a_scale_around_zero() -> None:
    trace = made(mixing="effective")
    trace.maps = [cells - 0.2 for cells in trace.maps]
    figure = sketch(trace, methods=("raw",))
    mesh = next(one for axes in figure.axes for one in axes.collections if isinstance(one, QuadMesh))
    assert mesh.norm.vmin == -mesh.norm.vmax < 0.0
    sketch(trace, "graph", method="raw", query=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mixing", "words"),
    [
        ("attention", {"raw attention", "attention rollout", "attention flow"}),
        ("effective", {"effective attention", "effective attention rollout", "effective attention flow"}),
        ("gradient", {"attention × gradient", "attention × gradient rollout", "attention × gradient flow"}),
        ("norm", {"norm of what is added", "rollout of norms", "flow of norms"}),
    ],
)
def test_titles_say_what_the_maps_hold(mixing: str, words: set[str]) -> None:
    trace = made(mixing=mixing)
    figure = plot(trace)
    assert {axes.get_title().replace("\n", " ") for axes in figure.axes} - {""} == words
    figure.draw_without_rendering()
    titled = sorted((axes.title.get_window_extent() for axes in figure.axes if axes.get_title()), key=left)
    assert all(before.x1 < after.x0 for before, after in pairwise(titled))
    weights = next(one for one in words if "rollout" not in one and "flow" not in one)
    bars = {axes.get_ylabel() for axes in sketch(trace, "heads", layer=0).axes}
    assert weights.removeprefix("raw ") in bars
    drawn = {axes.get_ylabel() for axes in sketch(trace, "graph", method="raw").axes}
    assert weights in drawn


def left(box: Any) -> float:
    return float(box.x0)


def test_compared_traces_of_different_weights_are_named_by_method_alone() -> None:
    figure = plot_compare({"a": made(), "b": made(mixing="norm")}, methods="rollout", figure=Figure())
    assert {axes.get_title() for axes in figure.axes} - {""} == {"rollout"}


@pytest.mark.slow
@pytest.mark.parametrize("view", VIEWS)
def test_figures_have_a_columns_width_and_all_text_in_it_in_legible_sizes(
    view: str, evolved: overt.Trace, sampled: overt.Trace
) -> None:
    traces: dict[str, Callable[[], overt.Trace]] = {
        "heads": lambda: made(heads=2),
        "evolution": lambda: evolved,
        "uncertainty": lambda: sampled,
        "image": lambda: family("ViT"),
        "cross": lambda: family("Marian"),
    }
    figure = plot(traces.get(view, made)(), view)
    inches, tall = figure.get_size_inches()
    assert inches == 3.3
    assert 0.5 < tall < 9.0
    figure.draw_without_rendering()
    box = figure.get_tightbbox()
    assert min(box.x0, box.y0) >= -0.01
    assert max(box.x1 - inches, box.y1 - tall) <= 0.01
    texts = [one for one in figure.findobj(matplotlib.text.Text) if one.get_text()]
    assert len(texts) > 3
    assert all(6.0 <= one.get_fontsize() <= 8.0 for one in texts)


def test_two_columns_are_wider() -> None:
    assert plot(made(), methods=("raw",), columns=2).get_size_inches()[0] == 6.9


def test_drawing_and_saving_change_no_settings_and_bring_no_pyplot(tmp_path: Path) -> None:
    before = dict(matplotlib.rcParams)
    figure = plot(made(), methods=("raw",), title="a title with $ and _")
    save(figure, tmp_path / "figure.png", dpi=50)
    assert dict(matplotlib.rcParams) == before
    assert figure.canvas.manager is None


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two figures that were made alike, each as .svg and .pdf."""
    folder = tmp_path_factory.mktemp("written")
    for name in ("one", "two"):
        figure = plot(made(), "heads", layer=0, tokens=[2, 5])
        save(figure, folder / f"{name}.svg")
        save(figure, folder / f"{name}.pdf")
    return folder


@pytest.mark.slow
def test_tokens_stay_text_and_are_no_formula(written: Path) -> None:
    assert (written / "one.svg").read_text().count("$x_1$ &lt;b&gt;</text>") == 2
    assert b"/Type3" not in (written / "one.pdf").read_bytes()


def test_equal_figures_are_equal_files(written: Path) -> None:
    for kind in ("svg", "pdf"):
        assert (written / f"one.{kind}").read_bytes() == (written / f"two.{kind}").read_bytes()


@pytest.mark.slow
def test_letters_of_any_script_pass_without_a_warning(tmp_path: Path) -> None:
    trace = made()
    trace.tokens = [["[CLS]", "שלום", "مرحبا", "猫", "नमस्ते", "\n", "[SEP]", "\U00012000"]] * 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure = plot(trace, methods=("raw",))
        for kind in ("png", "svg", "pdf"):
            save(figure, tmp_path / f"figure.{kind}", dpi=50)
    written = (tmp_path / "figure.svg").read_text()
    assert "猫" in written
    assert "שלום" in written


def test_a_failed_save_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "figure.svg"
    path.write_text("before")
    figure = sketch(made(), methods=("raw",))

    def broken(target: Path, **_: Any) -> None:
        target.write_text("half")
        raise OSError("disk full")

    monkeypatch.setattr(figure, "savefig", broken)
    with pytest.raises(OSError, match=r"figure\.svg cannot be written: disk full"):
        save(figure, path)
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


def test_large_matrices_are_pictures_and_small_ones_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    def rastered() -> list[bool]:
        figure = sketch(made(), "heads", layer=0)
        return [bool(one.get_rasterized()) for one in figure.axes[0].findobj(QuadMesh)]

    monkeypatch.setattr(matrix, "MOST_CELLS", 36)
    assert rastered() == [False]
    monkeypatch.setattr(matrix, "MOST_CELLS", 35)
    assert rastered() == [True]


@pytest.mark.slow
def test_a_figure_that_is_given_is_drawn_in_and_keeps_its_size() -> None:
    figure = Figure(figsize=(7.0, 3.0), layout="constrained")
    left, right = figure.subfigures(1, 2)
    assert plot(made(), figure=left, methods=("raw",)) is figure
    plot(made(), "graph", figure=right)
    assert tuple(figure.get_size_inches()) == (7.0, 3.0)
    assert left.axes
    assert right.axes


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"view": "pie"}, "view must be one of 'strip', 'graph', .*; got 'pie'"),
        ({"columns": 3}, "columns must be one of 1, 2; got 3"),
        ({"method": "blankout"}, "method must be one of 'raw', 'rollout', 'flow'; got 'blankout'"),
        ({"methods": ("raw", "grad")}, "methods must be one of .*; got 'grad'"),
        ({"methods": ()}, "methods must name at least one of raw, rollout, flow, got none"),
        ({"example": 2}, "example must lie in 0 to 1 .*, got 2"),
        ({"query": 8}, "query must lie in 0 to 7 .*, got 8"),
        ({"query": [1, 2]}, r"query must be one number, got \[1, 2\]"),
        ({"layer": 3}, "layer must lie in 0 to 2 .*, got 3"),
        ({"tokens": [9]}, "tokens must lie in 0 to 7 .*, got 9"),
        ({"view": "graph", "query": 0, "layer": [0, 1]}, "layer must be one number for view='graph'"),
        ({"view": "graph", "layer": [1]}, r"one number for view='graph', the uppermost; got \[1\]"),
        ({"view": "graph", "layer": torch.tensor([1])}, r"one number for view='graph', .*; got \[1\]"),
        ({"view": "heads", "method": "raw"}, "view='heads' shows the maps themselves.*got method='raw'"),
        ({"view": "evolution", "method": "flow"}, "view='evolution' shows the maps themselves"),
        ({"method": "raw", "methods": ["flow"]}, r"not both: got method='raw' and methods=\['flow'\]"),
        ({"query": 7, "example": 1}, "query 7 is padding in example 1; its tokens are 0 to 6"),
        ({"query": -1, "example": 1, "view": "graph"}, "query 7 is padding in example 1"),
        ({"view": "graph", "query": 0, "normalize": True}, "not to the paths of a query"),
        ({"view": "heads", "head": 1}, r"head=1 needs the maps of single heads.*heads=True"),
        ({"view": "evolution"}, r"evolution needs .*overt\.trace\(…, parts=True\)"),
        ({"view": "uncertainty"}, r"uncertainty needs posterior samples: overt\.trace\(…, samples=20\)"),
        ({"view": "image"}, "image needs a trace of an image"),
        ({"view": "cross"}, "cross needs a trace of an encoder–decoder, got one of kind 'encoder'"),
    ],
)
def test_what_cannot_be_drawn_is_refused_in_a_line(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said) as refused:
        plot(made(), **arguments)
    assert "\n" not in str(refused.value)


def test_other_refusals(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"trace must be a Trace .*got list"):
        plot([1, 2])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="figure must be a matplotlib Figure or SubFigure, got int"):
        plot(made(), figure=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="traces must be a mapping of names to traces, got list"):
        plot_compare([made()])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="plot_compare takes the arguments of a strip, got view"):
        plot_compare({"a": made()}, view="graph")
    with pytest.raises(ValueError, match=r"path must end in \.pdf, \.svg, \.png, got figure\.gif"):
        save(Figure(), "figure.gif")
    (tmp_path / "folder.pdf").mkdir()
    with pytest.raises(IsADirectoryError, match="is a folder"):
        save(Figure(), tmp_path / "folder.pdf")
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        save(Figure(), tmp_path / "none" / "figure.pdf")
    with pytest.raises(ValueError, match=r"use trace\.encoder, or view=\"cross\""):
        plot(family("Marian"), "graph")


@pytest.mark.slow
def test_the_command_draws_saved_traces_and_compares_them(tmp_path: Path) -> None:
    for name in ("one", "two"):
        made().save(tmp_path / f"{name}.safetensors")
    one, two = (str(tmp_path / f"{name}.safetensors") for name in ("one", "two"))
    run(one, tmp_path / "strip.svg", methods=["raw"], query=None)
    assert "raw attention" in (tmp_path / "strip.svg").read_text()
    assert len(meshes(run(one, tmp_path / "strip.svg", method="rollout"))) == 1
    figure = run([one, two], tmp_path / "both.png", "compare", columns=2, dpi=50, methods=["rollout"])
    assert {"one\nlayer", "two\nlayer"} <= {axes.get_ylabel() for axes in figure.axes}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"source": "a sentence"}, "or a sentence or picture with --model; got 'a sentence'"),
        ({"source": "a.safetensors"}, "trace a.safetensors does not exist"),
        ({"source": "a.safetensors", "model": "m"}, "a.safetensors is a saved trace, which takes no --model"),
        (
            {"source": "a.safetensors", "mixing": "norm"},
            "--mixing applies only to tracing with --model, got norm",
        ),
        (
            {"source": "a.safetensors", "decoder": "b"},
            "--decoder applies only to tracing with --model, got b",
        ),
        ({"source": "a.safetensors", "samples": 5}, "--samples applies only to tracing with --model, got 5"),
        ({"source": "a.png", "model": "m"}, "picture a.png does not exist"),
        ({"source": ["a", "b"], "model": "m"}, "--view strip draws one source, got 2"),
        ({"source": "a", "view": "pie"}, "--view must be one of .*'compare'; got 'pie'"),
        ({"source": "a", "out": "a.gif"}, "--out must end in"),
        ({"source": "a", "columns": 4}, "--columns must be one of 1, 2; got 4"),
    ],
)
def test_the_command_refuses_before_it_opens_a_model(
    arguments: dict[str, Any], said: str, tmp_path: Path
) -> None:
    given = {"out": tmp_path / "figure.pdf", **arguments}
    with pytest.raises((ValueError, OSError), match=said):
        run(**given)


def test_every_view_has_a_test_of_its_numbers() -> None:
    assert set(VIEWS) == {"strip", "graph", "heads", "evolution", "uncertainty", "image", "cross"}

"""Raw, rollout and flow on plain arrays, against path enumeration, networkx and hand-written sums."""

from __future__ import annotations

from itertools import product
from typing import Any

import networkx as nx
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import overt
from families import BY_NAME, eager, inputs_of, tokens
from overt.tracing import maxflow
from overt.tracing.levels import Levels
from overt.tracing.maxflow import solver
from overt.tracing.methods import flow as flow_file
from overt.tracing.methods.method import request_of
from overt.tracing.methods.rollout import rollout_of
from overt.tracing.options import Options


def maps(batch: int, layers: int, heads: int, n: int, seed: int = 0, causal: bool = False) -> np.ndarray:
    rng = np.random.default_rng(seed)
    logits = 2.0 * rng.standard_normal((batch, layers, heads, n, n))
    if causal:
        logits = np.where(np.tril(np.ones((n, n), dtype=bool)), logits, -np.inf)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def with_residual(cells: np.ndarray, residual: float = 0.5) -> np.ndarray:
    mixed = (1 - residual) * cells + residual * np.eye(cells.shape[-1])
    return mixed / mixed.sum(-1, keepdims=True)


def sum_over_paths(levels: list[np.ndarray], source: int, sink: int) -> float:
    """The paper's words: multiply the weights along each path, sum over paths."""
    n = levels[0].shape[0]
    total = 0.0
    for inner in product(range(n), repeat=len(levels) - 1):
        path = [source, *inner, sink]
        weights = [level[i, j] for level, i, j in zip(levels, path, path[1:], strict=False)]
        total += float(np.prod(weights))
    return total


def max_flow(levels: list[np.ndarray], source: int, sink: int) -> float:
    """networkx on the levels from the top down."""
    graph = nx.DiGraph()
    for depth, level in enumerate(levels):
        for i, j in zip(*np.nonzero(level), strict=True):
            capacity = {} if np.isinf(level[i, j]) else {"capacity": level[i, j]}
            graph.add_edge((depth, i), (depth + 1, j), **capacity)
    if (0, source) not in graph or (len(levels), sink) not in graph:
        return 0.0
    return float(nx.maximum_flow_value(graph, (0, source), (len(levels), sink)))


@pytest.mark.parametrize("residual", [0.5, 0.0, 0.3])
def test_rollout_is_the_sum_over_paths(residual: float) -> None:
    attentions = maps(2, 3, 2, 4)
    found = overt.rollout(attentions, residual=residual)
    assert found.shape == (2, 3, 4, 4)
    for example, layer, query, token in product(range(2), range(3), range(4), range(4)):
        means = with_residual(attentions[example].mean(axis=1), residual)
        levels = [means[number] for number in range(layer, -1, -1)]
        expected = sum_over_paths(levels, query, token)
        assert found[example, layer, query, token] == pytest.approx(expected, abs=1e-14)


@pytest.mark.parametrize("residual", [0.5, 0.0])
def test_flow_is_networkx_maximum_flow(residual: float) -> None:
    attentions = maps(2, 3, 2, 5, causal=True)
    found = overt.flow(attentions, residual=residual)
    for example, layer, query, token in product(range(2), range(3), range(5), range(5)):
        means = with_residual(attentions[example].mean(axis=1), residual)
        expected = max_flow([means[number] for number in range(layer, -1, -1)], query, token)
        assert found[example, layer, query, token] == pytest.approx(expected, abs=1e-12)


def test_the_first_layer_of_rollout_and_flow_is_the_map_with_its_residual() -> None:
    attentions = maps(1, 2, 3, 6)
    first = with_residual(attentions[0, 0].mean(axis=0))
    np.testing.assert_allclose(overt.rollout(attentions)[0, 0], first, atol=1e-15)
    np.testing.assert_allclose(overt.flow(attentions)[0, 0], first, atol=1e-15)
    with pytest.raises(ValueError, match=r"residual has no meaning for raw, got residual=0\.9"):
        overt.raw(attentions, residual=0.9)
    np.testing.assert_allclose(overt.raw(attentions)[0], attentions[0].mean(axis=1), atol=1e-15)


@pytest.mark.parametrize("method", [overt.raw, overt.rollout, overt.flow])
def test_asking_for_less_gives_the_same_numbers(method: Any) -> None:
    attentions = maps(2, 4, 2, 7)
    whole = method(attentions)
    np.testing.assert_allclose(method(attentions, queries=3), whole[:, :, 3:4], atol=1e-12)
    np.testing.assert_allclose(method(attentions, queries=[-1, 0]), whole[:, :, [6, 0]], atol=1e-12)
    np.testing.assert_allclose(method(attentions, layers=-1), whole[:, 3:], atol=1e-12)
    some = method(attentions, queries=[2], layers=[3, 1])
    np.testing.assert_allclose(some, whole[:, [3, 1]][:, :, [2]], atol=1e-12)
    np.testing.assert_allclose(method(attentions, heads=[0, 1]), whole, atol=1e-12)
    np.testing.assert_allclose(method(attentions, heads=[1]), method(attentions[:, :, 1:]), atol=1e-12)
    unit = method(attentions, normalize=True)
    np.testing.assert_allclose(unit, whole / whole.sum(-1, keepdims=True), atol=1e-12)


def test_one_row_of_rollout_multiplies_no_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    plain = Tensor.__matmul__

    def counted(self: Tensor, other: Tensor) -> Tensor:
        sizes.append(self.shape[-2] * self.shape[-1] * other.shape[-1])
        return plain(self, other)

    levels = Levels([torch.rand(1, 50, 50) for _ in range(6)], torch.ones(1, 50, dtype=torch.bool))
    monkeypatch.setattr(Tensor, "__matmul__", counted)
    rollout_of(levels, request_of(levels, Options(queries=0)))
    assert sum(sizes) == 50 * 50 * sum(range(6)), "a vector–matrix product per level below each layer"
    sizes.clear()
    rollout_of(levels, request_of(levels, Options()))
    assert sum(sizes) <= 11 * 50**3, "all rows: a product of matrices per layer, not per pair of layers"


def test_a_single_head_stands_on_the_layers_below_it() -> None:
    attentions = maps(1, 3, 2, 4)
    means = with_residual(attentions[0].mean(axis=1))
    rolled, flowed = overt.rollout(attentions, heads="each"), overt.flow(attentions, heads="each")
    assert rolled.shape == flowed.shape == (1, 3, 2, 4, 4)
    for layer, head in product(range(3), range(2)):
        own = with_residual(attentions[0, layer, head])
        below = overt.rollout(attentions)[0, layer - 1] if layer else np.eye(4)
        np.testing.assert_allclose(rolled[0, layer, head], own @ below, atol=1e-14)
        levels = [own, *(means[number] for number in range(layer - 1, -1, -1))]
        assert flowed[0, layer, head, 1, 2] == pytest.approx(max_flow(levels, 1, 2), abs=1e-12)
    np.testing.assert_array_equal(overt.raw(attentions, heads="each")[0], attentions[0])


@pytest.mark.parametrize("method", [overt.raw, overt.rollout, overt.flow])
def test_uniform_causal_attention_is_flat_in_its_receptive_field(method: Any) -> None:
    n = 6
    uniform = np.tril(np.ones((n, n))) / np.arange(1, n + 1)[:, None]
    attentions = np.broadcast_to(uniform, (1, 4, 2, n, n))
    found = method(attentions, receptive_field=True)
    for query in range(n):
        expected = np.where(np.arange(n) <= query, 1 / (query + 1), 0.0)
        np.testing.assert_allclose(found[0, :, query], np.broadcast_to(expected, (4, n)), atol=1e-12)
    if method is not overt.raw:  # which is what it corrects: more than its share to the first token
        assert method(attentions, normalize=True)[0, -1, -1, 0] > 1.2 / n


def test_the_receptive_field_divides_by_the_same_method_of_uniform_attention() -> None:
    attentions = maps(1, 3, 2, 5, causal=True)
    n = 5
    uniform = np.tril(np.ones((n, n))) / np.arange(1, n + 1)[:, None]
    flat = np.broadcast_to(uniform, attentions.shape)
    for method in (overt.rollout, overt.flow):
        for options in ({}, {"heads": "each"}, {"residual": 0.2}):
            ours, base = method(attentions, **options), method(flat, **options)
            ratio = np.divide(ours, base, out=np.zeros_like(ours), where=base > 0)
            expected = ratio / ratio.sum(-1, keepdims=True)
            found = method(attentions, receptive_field=True, **options)
            np.testing.assert_allclose(found, expected, atol=1e-10)


def test_a_row_of_zeros_stays_zero_without_a_residual() -> None:
    attentions = maps(1, 2, 1, 4)
    attentions[0, 1, 0, 2] = 0.0
    for method in (overt.rollout, overt.flow):
        assert not method(attentions, residual=0.0)[0, 1, 2].any()
        with_one = method(attentions, residual=0.5)[0, 1, 2]
        np.testing.assert_allclose(with_one, method(attentions, residual=0.5)[0, 0, 2], atol=1e-12)


@given(st.integers(1, 6), st.integers(1, 4), st.integers(0, 10_000))
def test_padding_changes_nothing(real: int, layers: int, seed: int) -> None:
    attentions = maps(1, layers, 2, 7, seed)
    mask = np.zeros((1, 7))
    left = seed % (8 - real)
    keep = slice(left, left + real)
    mask[0, keep] = 1
    # What models do with padding: no weight on its keys, anything in its rows.
    attentions *= mask[:, None, None, None]
    attentions /= attentions.sum(-1, keepdims=True)
    for method in (overt.raw, overt.rollout, overt.flow):
        found = method(attentions, mask=mask)
        alone = method(attentions[..., keep, keep])
        np.testing.assert_allclose(found[..., keep, keep], alone, atol=1e-12)
        found[..., keep, keep] = 0.0
        assert not found.any()


def pair_levels(
    encoder: np.ndarray, own: np.ndarray, cross: np.ndarray, layer: int, residual: float, passing: float
) -> list[np.ndarray]:
    """Levels of an encoder–decoder from the top of a decoder layer down, written out."""
    source, target = encoder.shape[-1], own.shape[-1]
    levels = []
    for number in range(layer, -1, -1):
        for cells in ("cross", "own"):
            level = np.zeros((source + target, source + target))
            level[:source, :source] = (
                passing * np.eye(source) if passing == 1 else np.diag([passing] * source)
            )
            weights = cross[number].mean(axis=0) if cells == "cross" else own[number].mean(axis=0)
            columns = slice(0, source) if cells == "cross" else slice(source, None)
            level[source:, columns] = (1 - residual) * weights
            level[source:, source:] += residual * np.eye(target)
            level[source:] /= level[source:].sum(-1, keepdims=True)
            levels.append(level)
    for number in range(len(encoder) - 1, -1, -1):
        level = np.zeros((source + target, source + target))
        level[source:, source:] = passing * np.eye(target) if passing == 1 else np.diag([passing] * target)
        level[:source, :source] = with_residual(encoder[number].mean(axis=0), residual)
        levels.append(level)
    return levels


def test_encoder_decoders_have_two_levels_per_layer_and_pass_the_encoder_through() -> None:
    rng = np.random.default_rng(3)
    encoder, own = maps(1, 2, 2, 3, seed=1), maps(1, 2, 2, 4, seed=2, causal=True)
    cross = rng.random((1, 2, 2, 4, 3)) ** 3
    cross /= cross.sum(-1, keepdims=True)
    rolled = overt.rollout(own, encoder=encoder, cross=cross)
    flowed = overt.flow(own, encoder=encoder, cross=cross)
    raw = overt.raw(own, encoder=encoder, cross=cross)
    assert rolled.shape == flowed.shape == raw.shape == (1, 2, 4, 7)
    np.testing.assert_allclose(raw[0, 1], np.concatenate([cross[0, 1].mean(0), own[0, 1].mean(0)], -1))
    for layer, query, token in product(range(2), range(4), range(7)):
        levels = pair_levels(encoder[0], own[0], cross[0], layer, 0.5, 1.0)
        expected = np.linalg.multi_dot(levels)[3 + query, token]
        assert rolled[0, layer, query, token] == pytest.approx(expected, abs=1e-14)
        levels = pair_levels(encoder[0], own[0], cross[0], layer, 0.5, np.inf)
        expected = max_flow(levels, 3 + query, token)
        assert flowed[0, layer, query, token] == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("name", ["BERT", "Llama", "T5"])
def test_attentions_of_hugging_face_go_in_as_they_come(name: str) -> None:
    family = BY_NAME[name]
    model = eager(family.make())
    inputs = inputs_of(family, padded=True)
    with torch.no_grad():
        output = model(**inputs, output_attentions=True)
    traced = overt.trace(model, inputs)
    more: dict[str, Any] = {"mask": traced.mask}
    attentions = output.get("attentions")
    if name == "T5":
        attentions = output.decoder_attentions
        more |= {"encoder": output.encoder_attentions, "cross": output.cross_attentions}
    for method in ("raw", "rollout", "flow"):
        found = getattr(overt, method)(attentions, **more)
        assert isinstance(found, Tensor)
        torch.testing.assert_close(found, getattr(traced, method)(), atol=1e-6, rtol=1e-5)


GOOD = maps(1, 2, 2, 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attentions": GOOD[0]}, r"attentions must have shape \(batch, layer, head, query, key\)"),
        ({"attentions": GOOD - 1.0}, "attentions must not be negative"),
        ({"attentions": GOOD * np.nan}, "attentions must be finite"),
        ({"attentions": ()}, "attentions must hold at least one layer"),
        ({"attentions": GOOD[..., :2]}, "attentions must be square, got 3 queries and 2 keys"),
        ({"attentions": [GOOD[:, 0], GOOD[:, 1, :, :2, :2]]}, "same size in every layer"),
        ({"mask": np.ones((1, 4))}, r"mask must have shape \(1, 3\), got \(1, 4\)"),
        ({"queries": 3}, "queries must lie in 0 to 2"),
        ({"queries": []}, "queries must name at least one of 3"),
        ({"queries": "CLS"}, "queries must be whole numbers, got 'CLS'"),
        ({"layers": 1.5}, "layers must be whole numbers"),
        ({"heads": "all"}, 'heads must be "mean", "each" or a list'),
        ({"heads": [2]}, "heads must be numbers from 0 to 1, got 2"),
        ({"residual": 1.5}, r"residual must lie in \[0, 1\]"),
        ({"encoder": GOOD}, "need its cross-attention"),
        ({"cross": GOOD[:, :1]}, "cross must have one map per decoder layer, 2 of 3 queries, got 1"),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(iter(value)),
)
def test_mistakes_are_named_in_one_line(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"attentions": GOOD, **change}
    for method in (overt.raw, overt.rollout, overt.flow):
        if method is overt.raw and "residual" in change:
            continue  # it means nothing there, whatever it is
        with pytest.raises(ValueError, match=message) as caught:
            method(arguments["attentions"], **{k: v for k, v in arguments.items() if k != "attentions"})
        assert "\n" not in str(caught.value)


def test_heads_that_were_not_kept_are_missed() -> None:
    traced = overt.trace(BY_NAME["BERT"].make(), tokens())
    for heads in ("each", [0]):
        with pytest.raises(ValueError, match="trace with heads=True"):
            traced.rollout(heads=heads)


def test_equal_graphs_of_a_batch_share_their_flow() -> None:
    attentions = np.repeat(maps(1, 3, 2, 5), 3, axis=0)
    found = overt.flow(attentions)
    np.testing.assert_array_equal(found[0], found[2])


def test_large_batches_are_solved_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    attentions = maps(5, 3, 2, 6)
    whole = overt.flow(attentions), overt.flow(attentions, heads="each")
    monkeypatch.setattr(flow_file, "MOST_CELLS", 2 * 3 * 36)
    np.testing.assert_array_equal(overt.flow(attentions), whole[0])
    np.testing.assert_array_equal(overt.flow(attentions, heads="each"), whole[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_signs_of_zeros_are_no_negative_weights(dtype: torch.dtype) -> None:
    plain = torch.from_numpy(maps(1, 2, 1, 3, causal=True)).to(dtype)
    signed = torch.where(plain == 0, -plain, plain)
    assert bool(torch.signbit(signed).any())
    assert torch.equal(overt.rollout(signed), overt.rollout(plain))
    with pytest.raises(ValueError, match=r"must not be negative, got -0\.5"):
        overt.rollout(torch.where(plain == 0, torch.tensor(-0.5, dtype=dtype), plain))


def test_a_graph_is_solved_once_in_all_parts_of_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    attentions = maps(6, 3, 2, 5)
    attentions[[1, 3, 4]] = attentions[[0, 0, 2]]
    mask = np.ones((6, 5))
    mask[3, -1] = 0  # the same maps under other padding
    alone = np.concatenate([overt.flow(attentions[e : e + 1], mask=mask[e : e + 1]) for e in range(6)])
    solved: list[int] = []

    def counting(levels: Any, *arguments: Any, **options: Any) -> Any:
        solved.append(len(levels))
        return solver.solve_batch(levels, *arguments, **options)

    monkeypatch.setattr(maxflow, "solve_batch", counting)
    for most, parts in ((2**23, [4]), (2 * 3 * 25, [1, 2, 1]), (1, [1, 1, 1, 1])):
        monkeypatch.setattr(flow_file, "MOST_CELLS", most)
        solved.clear()
        np.testing.assert_array_equal(overt.flow(attentions, mask=mask), alone)
        assert solved == parts


@pytest.mark.parametrize("heads", ["mean", [1, 0]])
def test_stacked_levels_are_the_levels(heads: Any) -> None:
    for whole in (maps(2, 3, 2, 4), maps(2, 3, 2, 4).astype(np.float32)):
        # Layers in one array, in arrays of their own, in another order, of half precision.
        evenly = list(torch.from_numpy(whole).unbind(1))
        kinds = [evenly, [layer.clone() for layer in evenly], evenly[::-1], [evenly[0], *evenly[::-1]]]
        kinds.append([layer.to(torch.bfloat16) for layer in evenly])
        for layers in kinds:
            levels = Levels(layers, torch.ones(2, 4, dtype=torch.bool))
            found = levels.stack(3, heads, 0.3)
            for number, cells in enumerate(layers[:3]):
                picked = cells if heads == "mean" else cells[:, heads]
                mixed = 0.7 * picked.double().mean(1) + 0.3 * torch.eye(4, dtype=torch.float64)
                expected = mixed / mixed.sum(-1, keepdim=True)
                np.testing.assert_allclose(found[:, number], expected, rtol=0, atol=1e-14)


def test_flow_shows_a_bar_only_where_asked(capfd: pytest.CaptureFixture[str]) -> None:
    attentions = maps(1, 2, 2, 5)
    quiet = overt.flow(attentions)
    watched = overt.flow(attentions, progress=True)
    np.testing.assert_array_equal(quiet, watched)
    assert capfd.readouterr().err == "", "nothing worth a bar"


def test_equal_maps_under_other_padding_are_other_graphs() -> None:
    small = maps(1, 2, 1, 3)
    both = np.zeros((2, 2, 1, 4, 4))
    both[0, ..., :3, :3], both[1, ..., 1:, 1:] = small[0], small[0]
    found = overt.flow(both, mask=np.array([[1, 1, 1, 0], [0, 1, 1, 1]]))
    np.testing.assert_allclose(found[0, :, :3, :3], overt.flow(small)[0])
    np.testing.assert_allclose(found[1, :, 1:, 1:], overt.flow(small)[0])


def test_left_padding_hides_no_causality() -> None:
    causal = maps(1, 3, 2, 4, causal=True)
    padded = np.full((1, 3, 2, 6, 6), 1 / 6)  # rows of padding hold anything
    padded[..., 2:, :] = 0.0
    padded[..., 2:, 2:] = causal
    mask = np.array([[0, 0, 1, 1, 1, 1]])
    found = overt.rollout(padded, mask=mask, receptive_field=True)
    np.testing.assert_allclose(found[..., 2:, 2:], overt.rollout(causal, receptive_field=True), atol=1e-12)


def test_a_window_can_be_told_for_the_receptive_field() -> None:
    n = 6
    seen = np.tril(np.ones((n, n), dtype=bool)) & ~np.tril(np.ones((n, n), dtype=bool), -3)
    uniform = seen / seen.sum(-1, keepdims=True)
    attentions = np.broadcast_to(uniform, (1, 3, 2, n, n))
    found = overt.rollout(attentions, visible=seen[None], receptive_field=True)[0, 0]
    np.testing.assert_allclose(found, uniform, atol=1e-12)
    with pytest.raises(ValueError, match=r"visible must have shape \(1, 6, 6\)"):
        overt.rollout(attentions, visible=seen, receptive_field=True)


@pytest.mark.parametrize("wrong", [None, (None, None), {"attentions": 1}])
def test_what_is_no_map_is_named(wrong: Any) -> None:
    with pytest.raises(ValueError, match="attentions must be attention maps, such as a model's output"):
        overt.rollout(wrong)


def test_threads_are_counted() -> None:
    for threads in (0, "2", 1.5):
        with pytest.raises(ValueError, match="threads must be a whole number of at least 1"):
            overt.flow(GOOD, threads=threads)
    np.testing.assert_array_equal(overt.flow(GOOD, threads=2), overt.flow(GOOD, threads=1))


def test_heads_come_as_arrays_too() -> None:
    attentions = maps(1, 2, 3, 4)
    np.testing.assert_array_equal(
        overt.rollout(attentions, heads=np.array([0, 2])), overt.rollout(attentions, heads=[0, 2])
    )
    with pytest.raises(ValueError, match="cross must have the batch of attentions, 1, got 2"):
        overt.rollout(attentions, cross=maps(2, 2, 3, 4))

"""The page without a browser: packed maps, what the index says against the trace, text that stays text."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
import struct
import zlib
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import transformers as hf
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from torch import Tensor

import overt
from overt.tracing.methods import method as registry
from overt.tracing.methods.method import Cost, methods
from overt.view import bundle
from overt.view.index import DROWNED, drowned
from overt.view.pack import MASS, pack, unpack
from overt.view.pages import page
from traces import WORDS, evolving, field, image, made, maps, pair, sampled

# --- packing

NUMBERS = st.one_of(
    st.floats(-1, 1, width=32),
    st.floats(-(2.0**100), 2.0**100, width=32),
    st.sampled_from([0.0, 1.0, 2.0**-60, -(2.0**-60), 0.5]),
)
FIELDS = arrays(np.float32, array_shapes(min_dims=3, max_dims=3, max_side=9), elements=NUMBERS)


WIDTHS = {1: -1, 2: 1 << 60}  # bytes of a code, and the size of field that gets so many


def checked(cells: Tensor, mass: float = MASS) -> Tensor:
    """Pack and unpack in both widths, and hold the results to what pack.py says of them."""
    for width, small in WIDTHS.items():
        with mock.patch("overt.view.pack.SMALL", small):
            about, data = pack(cells, mass)
        assert about["bytes"] == width
        assert json.loads(json.dumps(about, allow_nan=False)) == about
        found, dropped = unpack(about, data)
        held_to(about, found, dropped, cells, mass)
    return found


def held_to(about: dict[str, Any], found: Tensor, dropped: Tensor, cells: Tensor, mass: float) -> None:
    sizes = cells.double().abs()
    there = found != 0.0
    assert int(there.sum()) == about["kept"]
    assert ((found < 0) == ((cells < 0) & there)).all(), "signs stay"
    total = sizes.sum(dim=-1)
    held = torch.where(there, sizes, 0.0).sum(dim=-1)
    assert (held >= mass * total * (1 - 1e-6)).all(), "what is kept holds the mass"
    # The dropped share, to half a step of its byte.
    share = torch.where(total > 0, 1 - held / total.where(total > 0, 1.0), 0.0)
    torch.testing.assert_close(dropped, share, rtol=0.0, atol=(1 - mass) / 510 + 1e-6)
    if not sizes.shape[-1]:
        return
    # The largest comes back as it was; all are coded against a scale near the median of those kept.
    top = sizes.amax(dim=-1)
    torch.testing.assert_close(found.abs().amax(dim=-1).double(), top, rtol=1e-5, atol=0.0)
    middle = there.sum(dim=-1, keepdim=True) // 2
    median = sizes.sort(dim=-1, descending=True).values.gather(-1, middle)
    reach, near = {1: (2.0**25, 0.04), 2: (2.0**65, 0.0004)}[about["bytes"]]
    median = torch.maximum(median, top[..., None] / reach)
    off = (found.double().abs() - sizes).abs()
    # The least code is 1, so that what is far below the median is not lost.
    least = 1.05 * (2 ** (1 / about["steps"]) - 1) * median
    assert ((off <= near * (sizes + median)) | (found.abs() <= least))[there].all()


@pytest.mark.slow
@given(FIELDS)
def test_packed_fields_keep_what_they_promise(cells: np.ndarray[Any, Any]) -> None:
    checked(torch.from_numpy(cells))


@given(FIELDS, st.sampled_from([0.0, 0.5, 0.9, 1.0]))
def test_any_mass_may_be_kept(cells: np.ndarray[Any, Any], mass: float) -> None:
    checked(torch.from_numpy(cells), mass)


def test_rows_of_softmax_keep_their_mass_in_few_bytes() -> None:
    cells = maps(12, 64, 64, sharp=4.0)
    found = checked(cells)
    assert (found.sum(dim=-1) > MASS * 0.97).all()
    assert len(pack(cells)[1]) < 0.05 * len(json.dumps(cells.tolist()))


def test_what_is_left_out_is_the_smallest_and_equals_stay_together() -> None:
    row = torch.tensor([[[0.5, 0.3, 0.1, 0.05, 0.03, 0.0001, 0.0001]]])
    found = checked(row, 0.9)
    assert (found[0, 0] != 0).tolist() == [True, True, True, False, False, False, False]
    assert bool((checked(torch.full((1, 3, 50), 0.02)) != 0).all()), "none of equals is worse"


@pytest.mark.parametrize(
    "cells",
    [
        torch.zeros(2, 3, 4),
        torch.zeros(2, 3, 0),
        torch.zeros(0, 3, 4),
        torch.zeros(2, 0, 4),
        torch.rand(2, 3, 1) + 0.1,
        -torch.rand(1, 5, 5),
        torch.rand(1, 4, 4, dtype=torch.float64) * 1e-8,
        torch.full((1, 1, 3), 3e38),
        torch.tensor([[[3e38, 1e-38, 1e-38, 1e-38]]]),
        torch.tensor([[[1.0, 0.0, 0.0]], [[0.0, 0.0, 0.0]]]),
        torch.rand(3, 7, 7).half(),
        torch.rand(2, 5, 5).requires_grad_(),
        torch.rand(4, 5, 6).transpose(1, 2),
    ],
    ids=["zeros", "no column", "no map", "no row", "one column", "negative", "float64", "huge", "far apart",
         "a row of zeros", "half", "with history", "strided"],
)  # fmt: skip
def test_odd_fields_are_packed(cells: Tensor) -> None:
    assert checked(cells.detach()).shape == cells.shape
    pack(cells)


def test_what_is_no_number_counts_as_zero_and_is_counted() -> None:
    cells = torch.tensor([[[0.5, torch.nan, 0.5], [torch.inf, -torch.inf, 1.0]]])
    about, data = pack(cells)
    assert about["broken"] == 3
    torch.testing.assert_close(unpack(about, data)[0], torch.tensor([[[0.5, 0.0, 0.5], [0.0, 0.0, 1.0]]]))
    assert "broken" not in pack(torch.ones(1, 1, 1))[0]


@pytest.mark.parametrize("width", WIDTHS)
def test_codes_read_as_the_format_says(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # By hand: two equal weights have a scale equal to both, and the code steps · log2(1 + 1).
    monkeypatch.setattr("overt.view.pack.SMALL", WIDTHS[width])
    about, data = pack(torch.tensor([[[0.25, 0.0, 0.25]]]))
    first = zlib.decompress(data[: about["parts"][0]], -15)
    codes = zlib.decompress(data[about["parts"][0] :], -15)
    assert struct.unpack("<f", first[:4]) == (0.25,)
    assert first[4:] == bytes([0, 0b10100000])
    assert codes == 2 * (bytes([10]) if width == 1 else struct.pack("<H", 1000))
    assert about["steps"] == (10 if width == 1 else 1000)


def test_small_fields_are_finer_than_large_ones() -> None:
    assert pack(torch.rand(1, 10, 10))[0]["bytes"] == 2
    assert pack(torch.rand(1, 400, 400))[0]["bytes"] == 1


def test_wrong_fields_are_refused_in_one_line() -> None:
    with pytest.raises(ValueError, match=r"^cells must have shape \(map, row, column\), got \(3, 3\)$"):
        pack(torch.ones(3, 3))
    with pytest.raises(ValueError, match=r"^mass must lie in \[0, 1\], got 1.5$"):
        pack(torch.ones(1, 3, 3), 1.5)


# --- the index


def alike(found: Tensor, expected: Tensor) -> None:
    """Equal to within what packing may change of small fields: a thousandth, and the share left out."""
    total = expected.abs().sum(dim=-1, keepdim=True)
    off = (found - expected).abs()
    assert (off <= expected.abs() / 1000 + 0.02 * total + 1e-6).all(), f"off by up to {float(off.max()):.3g}"


def test_the_index_holds_the_maps_and_the_methods_of_the_trace() -> None:
    trace = made()
    shown = page(trace)
    (entry,) = shown.index["traces"]
    assert entry["tokens"] == WORDS
    assert entry["special"] == [1, 0, 0, 0, 0, 0, 0, 0, 1]
    assert (entry["layers"], entry["heads"], entry["main"], entry["source"]) == (3, 4, 0, 0)
    assert shown.title == "the key to the cabinets is lost"
    rollout, flow = trace.rollout(), trace.flow(progress=False)
    for layer, cells in enumerate(trace.maps):
        alike(field(shown, "heads", layer), cells[0])
        alike(field(shown, "mean", layer), cells.mean(dim=1))
        alike(field(shown, "rollout", layer)[0], rollout[0, layer])
        alike(field(shown, "flow", layer)[0], flow[0, layer])
    assert entry["queries"] == {}
    assert json.loads(json.dumps(shown.index, allow_nan=False))["traces"][0]["tokens"] == WORDS


def test_maps_without_heads_have_their_mean_alone() -> None:
    shown = page(made(heads=0))
    (entry,) = shown.index["traces"]
    assert entry["heads"] == 0
    assert "mean" in entry["fields"]
    assert "heads" not in entry["fields"]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("causal", [False, True])
def test_padding_is_cut_off(side: str, causal: bool) -> None:
    words, pads = ["the", "key", "is", "lost"], ["[PAD]", "[PAD]"]
    padded = pads + words if side == "left" else words + pads
    trace = made([padded, list("abcdef")], causal=causal)
    here = slice(2, 6) if side == "left" else slice(0, 4)
    trace.mask[0] = False
    trace.mask[0, here] = True
    shown = page(trace, importances=False)
    first, second = shown.index["traces"]
    assert first["tokens"] == words
    assert second["tokens"] == list("abcdef")
    assert first["main"] == (3 if causal else 0)
    rollout = trace.rollout()
    for layer, cells in enumerate(trace.maps):
        alike(field(shown, "heads", layer), cells[0][:, here, here])
        alike(field(shown, "rollout", layer)[0], rollout[0, layer, here, here])
        alike(field(shown, "rollout", layer, 1)[0], rollout[1, layer])


def test_an_encoder_decoder_has_three_groups_of_maps() -> None:
    trace = pair()
    shown = page(trace)
    (entry,) = shown.index["traces"]
    assert entry["source"] == 4
    assert entry["main"] == 4
    assert json.loads(json.dumps(entry["groups"])) == {
        "": {"layers": 2, "heads": 3, "rows": [4, 9], "columns": [4, 9]},
        "encoder": {"layers": 3, "heads": 3, "rows": [0, 4], "columns": [0, 4]},
        "cross": {"layers": 2, "heads": 3, "rows": [4, 9], "columns": [0, 4]},
    }
    for layer in range(2):
        alike(field(shown, "cross heads", layer), trace.cross[layer][0])
        alike(field(shown, "rollout", layer)[0], trace.rollout()[0, layer])
    for layer in range(3):
        alike(field(shown, "encoder mean", layer), trace.encoder_maps[layer].mean(dim=1))


@pytest.mark.parametrize(
    ("queries", "rows"),
    [
        ("all", None),
        ("main", [0]),
        ("auto", None),
        (3, [3]),
        (-1, [8]),
        ([5, 2], [5, 2]),
        (list(range(9)), None),
        (list(reversed(range(9))), list(reversed(range(9)))),
    ],
    ids=str,
)
def test_rows_of_methods_are_those_asked_for(queries: Any, rows: list[int] | None) -> None:
    trace = made()
    shown = page(trace, queries=queries)
    (entry,) = shown.index["traces"]
    kept = list(range(9)) if rows is None else rows
    for method, found in (("rollout", trace.rollout()), ("flow", trace.flow(progress=False))):
        assert entry["queries"].get(method) == rows
        alike(field(shown, method, 2)[0], found[0, 2, kept])


def costs(monkeypatch: pytest.MonkeyPatch, name: str, **bounds: int) -> None:
    """Let a method have other bounds."""
    other = replace(methods()[name], cost=Cost("", **bounds))
    monkeypatch.setitem(registry._registered, name, other)


def test_long_texts_have_flow_for_the_main_token_then_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    # The bounds themselves are a matter of taste; here they are small.
    monkeypatch.setattr("overt.view.index.EVERY_SPREAD", 4)
    for name in ("rollout", "flow"):
        costs(monkeypatch, name, every=4)
    (entry,) = page(made()).index["traces"]
    assert entry["queries"] == {"rollout": [0], "flow": [0]}
    (entry,) = page(sampled()).index["traces"]
    assert entry["queries"]["rollout spread"] == [0]
    costs(monkeypatch, "flow", every=4, most=8)
    (entry,) = page(made()).index["traces"]
    assert "flow" not in entry["fields"]
    assert 'queries="main"' in entry["missing"]["flow"]
    assert "flow" in page(made(), queries="main").index["traces"][0]["fields"]


def test_methods_that_were_not_asked_for_are_missing_with_a_reason() -> None:
    (entry,) = page(made(), methods=["raw"], importances=False).index["traces"]
    assert set(entry["fields"]) == {"mean", "heads"}
    assert set(entry["missing"]) == {"rollout", "flow", "blankout", "gradients"}


SPECIAL = torch.tensor([True, False, False, True])


@pytest.mark.parametrize(
    ("row", "token"),
    [
        ([0.9, 0.1, 0.05, 0.0], 0),
        ([0.1, 0.1, 0.05, 0.9], 3),
        ([-0.9, 0.1, -0.05, 0.0], 0),  # by size
        ([0.5, 0.5 * DROWNED, 0.0, 0.0], None),  # a word reaches the second of the scale's colours
        ([0.9, 0.0, 0.0, 0.1], None),  # no scale would show words that have nothing
    ],
)
def test_words_are_drowned_where_none_has_a_share_of_a_special_token(
    row: list[float], token: int | None
) -> None:
    found = drowned({"raw": torch.tensor(row)}, SPECIAL, 0)
    assert (found and found["token"]) == token
    if found:
        assert found["special"] == pytest.approx(0.9)
        assert found["word"] == pytest.approx(0.1)


def test_the_method_that_drowns_most_is_told() -> None:
    rows = {"raw": [0.6, 0.1, 0.3, 0.0], "flow": [1.0, 0.01, 0.0, 0.0], "rollout": [0.9, 0.1, 0.0, 0.0]}
    found = drowned({name: torch.tensor(row) for name, row in rows.items()}, SPECIAL, 0)
    assert found == {"method": "flow", "token": 0, "special": 1.0, "word": pytest.approx(0.01)}


def test_the_query_is_no_word_and_without_special_tokens_or_words_nothing_drowns() -> None:
    own = {"raw": torch.tensor([0.5, 0.45, 0.05, 0.0])}
    assert drowned(own, SPECIAL, 1) is not None, "a token that holds to itself"
    assert drowned(own, SPECIAL, 0) is None
    assert drowned(own, torch.zeros(4, dtype=torch.bool), 0) is None
    assert drowned(own, torch.ones(4, dtype=torch.bool), 0) is None
    assert drowned(own, torch.tensor([True, False, True, True]), 1) is None
    assert drowned({}, SPECIAL, 0) is None


def sinking() -> overt.Trace:
    """[CLS] takes nearly everything."""
    trace = made()
    for cells in trace.maps:
        cells *= 0.05
        cells[..., 0] += 0.95
    return trace


def test_the_index_tells_of_words_that_are_drowned() -> None:
    trace = sinking()
    assert "drowned" not in page(made(heads=0)).index["traces"][0]
    (entry,) = page(trace).index["traces"]
    found = entry["drowned"]
    row = trace.read(found["method"], [0], layers=-1)[0, 0, 0]
    assert found["token"] == 0
    assert found["special"] == pytest.approx(float(row[0]), rel=1e-4)
    assert found["word"] == pytest.approx(float(row[1:-1].max()), rel=1e-4)
    json.dumps(found, allow_nan=False)
    # Over even maps [CLS] keeps most of the first layer by its residual, and little of the last.
    even = made(layers=6, maps=[torch.full((1, 9, 9), 1 / 9)] * 6)
    assert "drowned" not in page(even).index["traces"][0]
    # Of rows that the page does not have nothing is told: raw ones are always there.
    (entry,) = page(trace, queries=[3]).index["traces"]
    assert entry["drowned"]["method"] == "raw"


def test_padding_and_the_source_are_counted_as_the_page_counts_them() -> None:
    trace = made([["[PAD]", *WORDS]])
    trace.mask[0, 0] = False
    for cells in trace.maps:
        cells[..., 0] = 0.0
        cells *= 0.05
        cells[..., 1] += 0.95
    assert page(trace).index["traces"][0]["drowned"]["token"] == 0
    both = pair()
    both.special[0, 3] = True  # the end of the source, behind which the target begins
    assert both.cross is not None
    for cells in both.cross:
        cells *= 0.01
        cells[..., 3] += 0.99
    for cells in both.maps:
        cells *= 0.01
    assert page(both, methods=["raw"]).index["traces"][0]["drowned"]["token"] == 3


def test_residual_and_mass_are_passed_on() -> None:
    trace = made()
    shown = page(trace, residual=0.2, mass=1.0)
    rows = trace.rollout(residual=0.2)
    assert ((field(shown, "rollout", 2)[0] - rows[0, 2]).abs() <= rows[0, 2] / 500).all()
    assert shown.index["mass"] == 1.0
    assert all(about["unit"] == 0.0 for about in shown.index["traces"][0]["fields"]["mean"])


def test_samples_have_their_spread_and_predictions() -> None:
    trace = sampled(5)
    shown = page(trace)
    (entry,) = shown.index["traces"]
    assert entry["samples"] == 5
    spread = torch.stack([draw.maps[1] for draw in trace.draws]).std(dim=0, correction=0)
    alike(field(shown, "spread heads", 1), spread[0])
    found = trace.spread("rollout")
    alike(field(shown, "rollout average", 2)[0], found.mean[0, 2])
    alike(field(shown, "rollout spread", 2)[0], found.spread[0, 2])
    expected = trace.predictions()[0]
    assert entry["outputs"]["labels"] == expected.labels
    assert entry["outputs"]["mean"] == pytest.approx(expected.mean.tolist(), rel=1e-4)
    assert np.shape(entry["outputs"]["draws"]) == (5, 3)


def test_parts_of_evolving_attention_are_there_and_the_first_has_no_convolution() -> None:
    trace = evolving()
    shown = page(trace)
    fields = shown.index["traces"][0]["fields"]
    assert fields["part convolution"][0] is None
    alike(field(shown, "part convolution", 1), trace.parts["convolution"][1].mean(dim=1))  # type: ignore[union-attr]
    alike(field(shown, "part attention heads", 0), trace.parts["attention"][0][0])  # type: ignore[index]
    assert not any("fused" in name for name in fields), "the fused maps are the trace's own"


def test_a_picture_goes_in_as_it_is() -> None:
    from matplotlib import image as reader

    trace = image()
    (entry,) = page(trace).index["traces"]
    assert (list(entry["grid"]), list(entry["image"])) == ([4, 5], [32, 40])
    kind, _, data = entry["picture"].partition(",")
    assert kind == "data:image/png;base64"
    import io

    pixels = reader.imread(io.BytesIO(base64.b64decode(data)), format="png")
    np.testing.assert_array_equal(np.round(255 * pixels).astype(np.uint8), trace.picture[0].numpy())  # type: ignore[index]
    assert entry["name"] == "image, 4 × 5 patches"


@pytest.fixture(scope="module")
def traced() -> overt.Trace:
    """Two examples of a small classifier, one of them padded."""
    torch.manual_seed(0)
    config = hf.BertConfig(
        vocab_size=30, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16
    )
    model = hf.BertForSequenceClassification(config).eval()
    ids = torch.randint(5, 30, (2, 6))
    mask = torch.ones_like(ids)
    mask[1, 4:] = 0
    return overt.trace(model, {"input_ids": ids, "attention_mask": mask}, heads=True)


def test_importances_are_those_of_the_trace(traced: overt.Trace) -> None:
    shown = page(traced, unk=1, target=[1, 0], importances=True)
    for number, entry in enumerate(shown.index["traces"]):
        count = len(entry["tokens"])
        found = {one["method"]: one for one in entry["importances"]}
        expected = {
            "blankout": traced.blankout(unk=1, target=[1, 0]),
            "gradients": traced.gradients(target=[1, 0]),
        }
        for method, values in expected.items():
            assert found[method]["queries"] is None, "one output for all tokens"
            wanted = values[number, 0, :, :count]
            got = torch.tensor(found[method]["values"], dtype=torch.float64)
            torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-7)


def test_what_cannot_be_had_says_why(traced: overt.Trace) -> None:
    (entry, _) = page(traced, importances="auto").index["traces"]  # no tokenizer, hence no unknown token
    assert entry["missing"]["blankout"].startswith("no blank-out: ")
    (entry, _) = page(traced).index["traces"]
    assert entry["importances"] == [], "what runs the model is not on by default"
    assert "importances=True" in entry["missing"]["gradients"]
    (entry,) = page(made()).index["traces"]
    assert "this trace has no model" in entry["missing"]["gradients"]


# --- names and errors


def test_examples_have_names_of_their_own() -> None:
    both = made([["the", "key"], ["a", "lock"]])

    def names(*given: Any, **arguments: Any) -> list[str]:
        return [entry["name"] for entry in page(*given, **arguments).index["traces"]]

    assert names(both) == ["the key", "a lock"]
    assert names([made(["x", "##y"]), both]) == ["xy", "the key", "a lock"]
    assert names({"before": made(), "after": made(seed=1)}) == ["before", "after"]
    assert names({"before": both}) == ["before: the key", "before: a lock"]
    assert names(both, names=["one", "two"]) == ["one", "two"]
    assert page(both, title="keys").title == "keys"
    assert names(made(["word"] * 60, layers=1))[0] == " ".join(["word"] * 9) + " …"
    assert names(made(["[CLS]", "[SEP]"])) == ["encoder"]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (
            {"methods": ["raw", "flows"]},
            "methods must be one of 'raw', 'rollout', 'flow', 'blankout', ",
        ),
        ({"queries": "some"}, "queries must be one of 'auto', 'all', 'main'; got 'some'"),
        ({"queries": 9}, "queries"),
        ({"importances": "maybe"}, "importances must be one of True, False, 'auto'; got 'maybe'"),
        ({"mass": 2}, "mass must lie in [0, 1], got 2"),
        ({"names": ["a", "b"]}, "names must have 1 entries, one for each example, got 2"),
        ({"residual": 1.5}, "residual"),
    ],
    ids=lambda one: str(one)[:30],
)
def test_wrong_arguments_are_refused_in_one_line(arguments: Any, error: str) -> None:
    with pytest.raises((ValueError, IndexError)) as caught:
        page(made(), **arguments)
    assert str(caught.value).startswith(error)
    assert "\n" not in str(caught.value)


def test_what_is_no_trace_is_refused() -> None:
    with pytest.raises(TypeError, match=r"^traces must come from overt.trace, got Tensor$"):
        page([torch.ones(3)])  # type: ignore[list-item]
    with pytest.raises(ValueError, match=r"^traces must hold at least one trace, got none$"):
        page([])
    with pytest.raises(ValueError, match=r"^height must be a whole number of at least 100, got 5$"):
        page(made()).widget(height=5)


# --- text that stays text

HOSTILE = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "</script>",
    "<!--",
    "]]>",
    "'\"`${x}\\",
    "\0\x07\x1b",
    "\u2028\u2029",
    "\ud800",
    "\u202eevil",
    "&lt;&#60;",
]  # fmt: skip


class Scripts(HTMLParser):
    """The elements of a page, and the text of its scripts, as a browser's first look has them."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.texts: list[tuple[dict[str, str | None], str]] = []
        self.inside: dict[str, str | None] | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.inside = dict(attrs) if tag == "script" else None

    def handle_endtag(self, tag: str) -> None:
        self.inside = None if tag == "script" else self.inside

    def handle_data(self, data: str) -> None:
        if self.inside is not None:
            self.texts.append((self.inside, data))


def parsed(text: str) -> Scripts:
    parser = Scripts()
    parser.feed(text)
    parser.close()
    return parser


def test_hostile_text_stays_in_the_index(tmp_path: Path) -> None:
    shown = page(made(HOSTILE), title="</title><script>alert(1)</script>", names=["</script><!--"])
    plain = page(made(["a"] * len(HOSTILE)))
    shown.save(tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    found = parsed(text)
    assert found.tags == parsed(plain.html()).tags, "no element more than a dull page has"
    (index,) = [json.loads(data) for about, data in found.texts if about.get("id") == "overt-index"]
    kept = [token.replace("\ud800", "\ufffd") for token in HOSTILE]
    assert index["traces"][0]["tokens"] == kept
    assert index["title"] == "</title><script>alert(1)</script>"
    raw = re.search(r'id="overt-index">(.*?)</script>', text, re.S)
    assert raw is not None
    assert not re.search("[<>&\u2028\u2029\0]", raw[1])


@pytest.mark.parametrize(
    "arguments", [{"title": "a\ud800b"}, {"names": ["a\ud800b"]}, {"traces": {"a\ud800b": made()}}], ids=str
)
def test_names_that_utf8_cannot_hold_become_signs(arguments: dict[str, Any], tmp_path: Path) -> None:
    shown = page(arguments.pop("traces", made()), **arguments)
    shown.save(tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "a\ufffdb" in text
    assert "a\ufffdb" in shown._repr_html_()


def test_the_policy_lets_in_the_pages_own_script_and_style_alone() -> None:
    text = page(made()).html()
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)
    assert policy is not None
    rules = dict(part.strip().split(" ", 1) for part in html.unescape(policy[1]).split(";"))
    assert rules["default-src"] == "'none'"
    (script,) = [data for about, data in parsed(text).texts if about.get("type") == "module"]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert rules["script-src"] == f"'sha256-{digest}'"
    assert "unsafe" not in policy[1]
    assert not re.search(r"https?://(?!www\.w3\.org/)", text), "no address of anything else"


def test_every_block_of_the_index_is_in_the_page() -> None:
    shown = page([made(), pair()])
    blocks = [base64.b64decode(data) for about, data in parsed(shown.html()).texts if "class" in about]
    assert blocks == shown.blocks
    used = [
        about["at"]
        for entry in shown.index["traces"]
        for layers in entry["fields"].values()
        for about in layers
        if about is not None
    ]
    assert sorted(used) == list(range(len(blocks)))


def test_a_page_is_saved_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "page.html"
    shown = page(made())
    assert shown.save(str(path)) is shown
    before = path.read_bytes()
    assert before.decode() == shown.html()

    def broken(*_: Any) -> None:
        raise OSError("no room")

    monkeypatch.setattr("overt._files.os.replace", broken)
    with pytest.raises(OSError, match="no room"):
        page(made(seed=1)).save(path)
    shown.index["traces"][0]["residual"] = float("nan")
    with pytest.raises(ValueError, match="JSON"):
        shown.save(path)
    assert path.read_bytes() == before
    assert [one.name for one in tmp_path.iterdir()] == ["page.html"]


def test_a_notebook_gets_a_frame_of_its_own() -> None:
    shown = page(made(), title='"><b>')
    text = shown._repr_html_()
    pattern = r'<iframe srcdoc="([^"]*)" sandbox="([^"]*)" style="[^"]*" title="([^"]*)"></iframe>'
    found = re.fullmatch(pattern, text)
    assert found is not None
    assert html.unescape(found[1]) == shown.html()
    assert "allow-same-origin" not in found[2], "a script of the page must not reach the notebook"
    assert html.unescape(found[3]) == '"><b>'


# --- one script of many modules


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`modules(name=text, …)` makes a folder of modules and inlines the one called `entry`."""

    def inlined(**files: str) -> str:
        for name, text in files.items():
            (tmp_path / f"{name}.js").write_text(text)
        monkeypatch.setattr(bundle, "FOLDER", tmp_path)
        return str(bundle.script.__wrapped__("entry.js"))

    return inlined


def test_modules_are_inlined_once_each_what_is_needed_first(modules: Any) -> None:
    whole = modules(
        entry='import { one } from "./one.js";\nimport { two } from "./two.js";\nconst sum = one + two();\n',
        one="export const one = 1;\n",
        two='import { one } from "./one.js";\nexport function two() {\n  return 2 * one;\n}\n',
    )
    assert re.findall(r"^// (\w+)\.js$", whole, re.M) == ["one", "two", "entry"]
    assert not re.search(r"\b(import|export)\b", whole)


@pytest.mark.parametrize(
    ("files", "error"),
    [
        (
            {"entry": 'import { a } from "./b.js";\nlet same;\n', "b": "export let a;\nconst same = 2;\n"},
            "same is a top-level name of both b.js and entry.js",
        ),
        (
            {"entry": 'import { a } from "./b.js";\n', "b": 'import { c } from "./entry.js";\n'},
            "modules import each other in a circle: entry.js → b.js → entry.js",
        ),
        ({"entry": 'import { a, z } from "./b.js";\n', "b": "export const a = 1;\n"},
         "entry.js imports z, which b.js does not export"),
        ({"entry": "export default 1;\n"}, "entry.js has a line that cannot be inlined: export default 1;"),
        ({"entry": 'import * as b from "./b.js";\n', "b": ""},
         'entry.js has a line that cannot be inlined: import * as b from "./b.js";'),
        ({"entry": 'const a = "</SCRIPT>";\n'}, "entry.js: a script with its own end tag cannot be inlined"),
        ({"entry": "// <!-- \n"}, "entry.js: a script with its own end tag cannot be inlined"),
    ],
    ids=["same name", "circle", "no export", "default", "star", "ends itself", "comment"],
)  # fmt: skip
def test_modules_that_cannot_be_inlined_are_refused(modules: Any, files: dict[str, str], error: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(error)}$"):
        modules(**files)


@pytest.mark.parametrize("entry", ["page.js", "widget.js"])
def test_the_scripts_use_nothing_that_turns_text_into_code_or_markup(entry: str) -> None:
    whole = bundle.script(entry)
    words = ["innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function"]
    assert [word for word in (*words, "import(") if word in whole] == []


def test_weights_that_are_no_numbers_are_counted_and_stop_no_page() -> None:
    trace = made()
    trace.maps[1][0, 0, 2, 3] = torch.nan
    [entry] = page(trace).index["traces"]
    assert entry["missing"]["flow"] == "no flow: the maps contain NaN or infinite weights"
    assert entry["fields"]["mean"][1]["broken"] == 1
    assert "broken" not in entry["fields"]["mean"][0]


def test_padding_may_hold_anything() -> None:
    trace = made(["a", "b", "c", "d"])
    trace.mask[0, :2] = False
    for cells in trace.maps:
        cells[:, :, :2] = torch.nan
        cells[..., :2] = 0.0
        cells[:, :, :2] = torch.nan
    [entry] = page(trace).index["traces"]
    assert entry["tokens"] == ["c", "d"]
    assert "rollout" in entry["fields"]
    assert not {"rollout", "flow"} & set(entry["missing"])


def test_a_page_speaks_of_itself_in_a_line() -> None:
    assert repr(page(made(), title="one")) == repr(page(made(), title="one"))
    assert re.fullmatch(r"Page\('one', 1 trace, 0\.\d MB of maps\)", repr(page(made(), title="one")))


def test_where_a_page_cannot_be_written_is_said(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"path .*x\.html: there is no folder .*none$"):
        made().html(tmp_path / "none" / "x.html", importances=False)
    with pytest.raises(IsADirectoryError, match="is a folder: give the name of a file in it"):
        made().html(tmp_path, importances=False)


def test_one_method_is_a_list_of_one() -> None:
    [entry] = page(made(), methods="rollout").index["traces"]
    assert set(entry["missing"]) >= {"flow"}
    assert "rollout" in entry["fields"]


def test_a_target_that_is_none_stops_the_page() -> None:
    model = hf.BertForSequenceClassification(hf.BertConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1,
        num_attention_heads=2, intermediate_size=8)).eval()  # fmt: skip
    trace = overt.trace(model, torch.tensor([[1, 2, 3]]))
    with pytest.raises(ValueError, match="target must lie in 0 to 1"):
        trace.html(target=99, unk=0, importances="auto")
    with pytest.raises(ValueError, match="importances=True includes them"):
        trace.html(target=1, unk=0)
    [entry] = trace.html(target=1, unk=0, importances=True).index["traces"]
    assert {one["target"] for one in entry["importances"]} == {"“LABEL_1”"}

"""The page in a real browser: it draws, answers, links, exports, and lets no text become code."""

from __future__ import annotations

import base64
import json
import os
import re
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from overt.tracing.result import Trace
from overt.view.answers import Likely, Reply, answers_page
from overt.view.index import picture_link
from overt.view.pages import Page, caption_page, node_page, page
from selection import covering
from traces import WORDS, caption, evolving, image, made, neighbourhood, pair, recurrent, rows_of, sampled

pytest_plugins = ["browser"]

Shown = Any  # playwright's Page; what is in it has no types here
Opener = Callable[..., Shown]

pytestmark = pytest.mark.slow
LONG_CAPTION = tuple(f"word{number}" for number in range(20))
NODES = [f"paper {number}" for number in range(7)]
# Every kind of page, with the views that it must have, and what they must name.
KINDS: dict[str, tuple[Callable[[], Page], set[str], list[str]]] = {
    "encoder": (lambda: page(made()), {"graph", "strip", "heads"}, WORDS),
    "causal": (lambda: page(made(causal=True)), {"graph", "strip", "heads"}, WORDS),
    "no heads": (lambda: page(made(heads=0)), {"graph", "strip", "heads"}, WORDS),
    "encoder–decoder": (lambda: page(pair()), {"graph", "strip", "heads", "cross"}, ["Schlüssel", "missing"]),
    "recurrent": (
        lambda: page(recurrent(4)),
        {"strip", "heads", "cross", "uncertainty"},
        ["Schlüssel", "missing"],
    ),
    "evolving": (lambda: page(evolving()), {"graph", "strip", "heads", "evolution"}, WORDS),
    "samples": (lambda: page(sampled()), {"graph", "strip", "heads", "uncertainty"}, WORDS),
    "image": (lambda: page(image()), {"graph", "strip", "heads", "image"}, ["[CLS]"]),
    "rows": (lambda: page(rows_of(WORDS * 30)), {"text", "top", "strip"}, WORDS),
    "caption": (lambda: caption_page([caption()]), {"caption"}, ["a", "dog"]),
    "nodes": (lambda: node_page(neighbourhood(), [0, 3], names=NODES), {"nodes"}, NODES),
}


def seeing() -> Page:
    """Words that were generated after two pictures, the first of which is there itself."""
    start, stop = len(WORDS) * 29, len(WORDS) * 30
    written = torch.arange(stop).unsqueeze(0) >= start
    shown = page(rows_of(WORDS * 30, queries=list(range(start - 1, stop - 1)), generated=written))
    tiles = [{"start": 4, "rows": 4, "columns": 6, "box": [0.25, 0, 0.75, 1]}]
    more = [{"start": 40, "rows": 3, "columns": 3, "box": [0, -0.5, 1, 1.5]}]
    shades = torch.arange(12 * 24 * 3).view(12, 24, 3) % 256
    shown.index["traces"][0]["pictures"] = {
        "photos": [{"link": picture_link(shades)}],
        "panels": [
            {"name": "picture 1", "photo": 0, "size": [12, 24], "tiles": tiles},
            {"name": "picture 2", "photo": None, "size": [3, 3], "tiles": more},
        ],
    }
    return shown


KINDS["pictures"] = (seeing, {"pictures", "text", "top", "strip"}, WORDS)

INK = """(view) => {
  const canvas = document.querySelector(`.pane[data-view="${view}"] canvas.drawing`);
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  const colours = new Set();
  let drawn = 0;
  for (let i = 0; i < data.length; i += 4) if (data[i + 3]) {
    drawn++;
    colours.add((data[i] << 16) | (data[i + 1] << 8) | data[i + 2]);
  }
  return { share: drawn / (data.length / 4), colours: colours.size };
}"""
# The views once each: of a page with several traces, which trace has them; of a page of nodes.
SEVERAL = {"graph": 0, "strip": 0, "heads": 0, "cross": 1, "evolution": 2, "uncertainty": 3, "image": 4}
ONCE = pytest.mark.parametrize("places", [SEVERAL, {"nodes": 0}], ids=["tokens", "nodes"])


def once(places: dict[str, int]) -> str:
    if "nodes" in places:
        return KINDS["nodes"][0]().html()
    return page([made(), pair(), evolving(), sampled(), image()]).html()


CUT = """() => {
  const line = document.querySelector(".status");
  return line.scrollHeight > line.clientHeight + 1 && line.clientHeight < 60;
}"""
OVERFLOW = "() => document.scrollingElement.scrollWidth - innerWidth"


def state(shown: Shown) -> dict[str, Any]:
    return dict(shown.evaluate("overt.state()"))


def settle(shown: Shown) -> None:
    shown.evaluate("overt.settled()")


def choose(shown: Shown, **changes: Any) -> None:
    shown.evaluate("(changes) => overt.select(changes)", changes)
    settle(shown)


def views(shown: Shown) -> list[str]:
    return [str(tab.get_attribute("data-view")) for tab in shown.query_selector_all('[role="tab"]')]


def drawing(shown: Shown, pane: int = 0) -> ElementTree.Element:
    """A pane's SVG, which must be well-formed."""
    return ElementTree.fromstring(shown.evaluate("(pane) => overt.svg(pane)", pane))


def texts(shown: Shown, pane: int = 0) -> list[str]:
    return ["".join(one.itertext()) for one in drawing(shown, pane).findall(".//{*}text")]


def spot(shown: Shown, pane: int, text: str) -> tuple[float, float]:
    """Where on the screen a pane has a text."""
    found = next(one for one in drawing(shown, pane).findall(".//{*}text") if "".join(one.itertext()) == text)
    left, top = shown.evaluate(
        """(pane) => {
          const scroll = document.querySelectorAll(".scroll")[pane];
          const box = scroll.querySelector("canvas").getBoundingClientRect();
          return [box.left - scroll.scrollLeft, box.top - scroll.scrollTop];
        }""",
        pane,
    )
    return left + float(found.attrib["x"]), top + float(found.attrib["y"])


def status(shown: Shown) -> str:
    return str(shown.inner_text(".status"))


# --- every view


@pytest.mark.parametrize("kind", KINDS)
def test_every_view_draws(opened: Opener, kind: str) -> None:
    make, wanted, names = KINDS[kind]
    shown = opened(make().html())
    assert set(views(shown)) == wanted
    for view in views(shown):
        choose(shown, view=view, beside=None)
        assert state(shown)["view"] == view
        ink = shown.evaluate(INK, view)
        assert ink["share"] > 0.01, f"{view} is blank"
        assert ink["colours"] > 20, f"{view} has hardly a colour"
        written = texts(shown)
        there = [name for name in names if any(one.startswith(name[:6]) for one in written)]
        assert len(there) >= len(names) / 2, f"{view} names {there} alone: {written}"
        assert any(re.fullmatch(r"[−≤ \d.·⁰-⁹⁻%]+", one) for one in written), f"{view}: no numbers"
        assert status(shown)


def test_every_view_is_among_those_tested() -> None:
    folder = Path(__file__).parent.parent / "src" / "overt" / "view" / "viewer"
    listed = (folder / "views.js").read_text().split("VIEWS = [")[1].split("]")[0]
    known = {view for _, some, _ in KINDS.values() for view in some}
    assert {one.strip().removesuffix("View") for one in listed.split(",")} == known


@ONCE
def test_a_phone_shows_every_view_without_scrolling_sideways(opened: Opener, places: dict[str, int]) -> None:
    shown = opened(once(places), width=390, height=800, has_touch=True, is_mobile=True)
    assert state(shown)["beside"] is None
    for view, trace in places.items():
        choose(shown, view=view, trace=trace)
        assert shown.evaluate(OVERFLOW) <= 0, view
        assert shown.evaluate(INK, view)["share"] > 0.005, f"{view} is blank"
        size = shown.evaluate("document.querySelector('.scroll').clientHeight")
        assert size > 200, f"{view} has {size} pixels of height left"
        assert not shown.evaluate(CUT), f"{view}: the status is cut, where it may have four lines"


# --- captions


def two_captions() -> Page:
    """Of a model with random weights, which was cut, and of one without; the picture is dark on the left."""
    picture = torch.full((3, 32, 32), 255, dtype=torch.uint8)
    picture[:, :, :16] = 0
    first = replace(caption(LONG_CAPTION), ended=False, picture=picture, size=(300, 400))
    assert first.weights is not None
    weights = first.weights.clone()
    weights[0] = torch.tensor([0.0, 0.9, 0.45, 0.05])
    first = replace(first, weights=weights)
    soft = replace(first, model="soft", weights=weights / 2, prior=None, spread=None, samples=0, draws=[])
    return caption_page([first, soft], title="photo.jpg")


def test_two_captions_are_side_by_side_and_line_up(opened: Opener) -> None:
    shown = opened(two_captions().html(), "query=0", height=1000)
    assert state(shown)["other"] == 1
    assert shown.evaluate("document.querySelectorAll('.pane').length") == 2
    for left, right in (("Posterior", "Attention"), ("Word by word",) * 2, ("Likeliest",) * 2):
        at = [
            next(
                one
                for one in drawing(shown, pane).findall(".//{*}text")
                if (one.text or "").startswith(start)
            )
            for pane, start in enumerate((left, right))
        ]
        places = [(one.attrib["x"], one.attrib["y"]) for one in at]
        assert places[0] == places[1], left
    choose(shown, other=None)
    assert shown.evaluate("document.querySelectorAll('.pane').length") == 1
    assert "other=none" in shown.evaluate("location.hash")
    alone = opened(caption_page([caption()]).html())
    assert state(alone)["other"] is None


def test_a_phone_has_both_names_of_captions_and_the_whole_status(opened: Opener) -> None:
    shown = opened(two_captions().html(), width=400, height=900)
    assert state(shown)["other"] is None, "one below the other, neither would have room"
    for label in ("Trace", "Compare with", "Word", "log scale"):
        box = shown.query_selector(f'[aria-label="{label}"]').bounding_box()
        assert box["x"] >= 0, label
        assert box["x"] + box["width"] <= 400, label
    shown.select_option('[aria-label="Compare with"]', index=1)
    settle(shown)
    for query in (0, 19):
        choose(shown, query=query)
        assert shown.evaluate("(l => l.scrollHeight <= l.clientHeight)(document.querySelector('.status'))")
    assert not [
        one for one in texts(shown) if "…" in one and "cut at 20 words" not in one and "(cut" not in one
    ]


def test_words_of_a_caption_have_one_numbering(opened: Opener) -> None:
    shown = opened(two_captions().html(), "query=17")
    assert shown.input_value('[aria-label="Word"]') == "18"
    assert "word 18 of 20" in status(shown)
    shown.fill('[aria-label="Word"]', "20")
    shown.keyboard.press("Enter")
    settle(shown)
    assert state(shown)["query"] == 19
    assert "word 20 of 20, where it was cut" in status(shown)
    assert "query=19" in shown.evaluate("location.hash")


PIXELS = """(places) => {
  const canvas = document.querySelector("canvas.drawing");
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  const first = ([x, y]) => 4 * (Math.round(y) * canvas.width + Math.round(x));
  return places.map((place) => [...data.slice(first(place), first(place) + 3)]);
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_weight_over_a_picture_has_the_colour_that_it_has_on_the_scale(opened: Opener, scheme: str) -> None:
    shown = opened(two_captions().html(), "query=0&other=none", color_scheme=scheme, height=1100)
    svg = drawing(shown)
    title = next(one for one in svg.findall(".//{*}text") if (one.text or "").startswith("Posterior"))
    x, y = float(title.attrib["x"]), float(title.attrib["y"]) + 12
    image = next(one for one in svg.findall(".//{*}image") if abs(float(one.attrib["x"]) - x) < 1)
    wide, tall = float(image.attrib["width"]), float(image.attrib["height"])
    assert tall / wide == pytest.approx(300 / 400, abs=0.01)
    weights = {0.0: (0.1, 0.1), 0.9: (0.9, 0.1), 0.45: (0.1, 0.9)}  # of regions, where the picture is even
    cells = [[x + across * wide, y + down * tall] for across, down in weights.values()]
    bar = [[x + (2 + 156 * weight / 0.9), y + tall + 8 + 17] for weight in weights]
    colours = shown.evaluate(PIXELS, cells + bar)
    for weight, cell, scale in zip(weights, colours[:3], colours[3:], strict=True):
        apart = max(abs(one - other) for one, other in zip(cell, scale, strict=True))
        assert apart < 16, f"weight {weight}: {cell}, on the scale {scale}"


# --- one selection for all


def test_a_click_on_a_token_is_followed_everywhere(opened: Opener) -> None:
    shown = opened(page(made()).html())
    assert state(shown)["view"] == "graph"
    assert state(shown)["beside"] == "strip"
    before = shown.evaluate("overt.svg(0)")
    assert "“[CLS]”" in status(shown)
    shown.mouse.click(*spot(shown, 1, "cabinets"))
    settle(shown)
    assert state(shown)["query"] == WORDS.index("cabinets")
    assert "“cabinets”" in status(shown)
    assert "query=5" in shown.evaluate("location.hash")
    assert shown.input_value('[aria-label="Token"]') == "5"
    assert shown.evaluate("overt.svg(0)") != before, "the graph stayed as it was"


def test_the_pointer_shows_what_lies_under_it_and_chooses_nothing(opened: Opener) -> None:
    shown = opened(page(made()).html(), "view=strip")
    before = state(shown)
    shown.mouse.move(*spot(shown, 0, "lost"))
    settle(shown)
    assert shown.inner_text(".tip") == "lost\ntoken 7"
    assert "“lost”" in status(shown)
    assert state(shown) == before
    shown.mouse.move(2, 2)
    settle(shown)
    assert shown.is_hidden(".tip")
    assert "“lost”" not in status(shown)


def test_keys_move_the_selection(opened: Opener) -> None:
    shown = opened(page(made()).html(), "view=strip&query=4")
    keys: list[tuple[str, str, Any]] = [
        ("ArrowDown", "query", 5), ("ArrowUp", "query", 4),
        ("ArrowLeft", "layer", 1), ("ArrowRight", "layer", 2), ("ArrowRight", "layer", 2),
        ("]", "head", 0), ("]", "head", 1), ("[", "head", 0), ("[", "head", None),
        ("m", "method", "flow"), ("m", "method", "raw"), ("g", "log", True), ("w", "words", True),
        ("3", "view", "heads"), ("1", "view", "graph"),
    ]  # fmt: skip
    for key, what, value in keys:
        shown.keyboard.press(key)
        assert state(shown)[what] == value, key
    shown.keyboard.press("Enter")
    assert state(shown)["picked"], "a node is picked without a mouse"
    choose(shown, token=3, picked=True)
    shown.keyboard.press("Escape")
    assert (state(shown)["token"], state(shown)["picked"]) == (None, False)
    for _ in range(12):
        shown.keyboard.press("ArrowUp")
    assert state(shown)["query"] == 0
    shown.keyboard.press("?")
    assert shown.is_visible("dialog")
    shown.keyboard.press("ArrowDown")
    assert state(shown)["query"] == 0, "a key in the help is for the help"
    shown.keyboard.press("Escape")
    assert shown.is_hidden("dialog")


def test_keys_in_a_control_are_the_controls(opened: Opener) -> None:
    shown = opened(page(made()).html(), "view=strip")
    shown.focus('[aria-label="Layer"]')
    shown.keyboard.press("ArrowLeft")
    settle(shown)
    assert state(shown)["layer"] == 1
    assert state(shown)["query"] == 0
    assert shown.evaluate("document.activeElement.getAttribute('aria-label')") == "Layer"
    assert shown.get_attribute('[aria-label="Layer"]', "aria-valuetext") == "2 of 3"
    choose(shown, query=3, layer=0)
    assert shown.input_value('[aria-label="Token"]') == "3", "the others follow while one has the focus"
    assert shown.get_attribute('[aria-label="Layer"]', "aria-valuetext") == "1 of 3"
    shown.fill('[aria-label="Token"]', "7")
    shown.keyboard.press("Enter")
    assert state(shown)["query"] == 7
    shown.select_option('[aria-label="Head"]', index=3)
    assert state(shown)["head"] == 2


def test_tabs_are_walked_with_arrows_and_keep_the_focus(opened: Opener) -> None:
    shown = opened(page(made()).html())
    shown.focus('[role="tab"][aria-selected="true"]')
    order = views(shown)
    for step in (*order[1:], order[0]):
        shown.keyboard.press("ArrowRight")
        assert state(shown)["view"] == step
        assert shown.evaluate("document.activeElement.dataset.view") == step
    shown.click('[role="tab"][data-view="heads"]')
    assert state(shown)["view"] == "heads"
    assert shown.get_attribute('[role="tab"][data-view="heads"]', "aria-selected") == "true"


def test_a_click_on_a_label_chooses_its_token_in_every_view_that_has_labels(opened: Opener) -> None:
    shown = opened(once(SEVERAL), height=1000)
    for view, trace in SEVERAL.items():
        if view == "image":
            continue
        choose(shown, view=view, trace=trace, query=0, beside=None)
        name, place = ("key", 2) if view == "cross" else ("cabinets", 5)
        shown.mouse.click(*spot(shown, 0, name))
        settle(shown)
        assert state(shown)["query"] == place, view
        assert f"“{name}”" in status(shown), view


def test_a_control_that_was_used_by_key_keeps_the_focus(opened: Opener) -> None:
    shown = opened(page(made()).html(), "view=strip&beside=graph")
    for control, key, what, value in (
        ('[aria-label="Method: raw"]', "Enter", "method", "raw"),
        ('[aria-label="log scale"]', "Space", "log", True),
        ('[role="tab"][data-view="heads"]', "Enter", "view", "heads"),
    ):
        shown.focus(control)
        shown.keyboard.press(key)
        settle(shown)
        assert state(shown)[what] == value
        assert shown.evaluate("(control) => document.activeElement.matches(control)", control), control


@pytest.mark.parametrize(
    "kind", covering(["encoder", "encoder–decoder", "samples", "recurrent"], ["encoder–decoder"])
)
def test_clicks_anywhere_lead_to_a_state_that_can_be_shown(opened: Opener, kind: str) -> None:
    shown = opened(KINDS[kind][0]().html(), height=900)
    for view in views(shown):
        choose(shown, view=view, beside=None)
        box = shown.query_selector(".scroll").bounding_box()
        for across in (0.15, 0.6):
            for down in (0.12, 0.4):
                shown.mouse.click(box["x"] + across * box["width"], box["y"] + down * box["height"])
                settle(shown)
                if state(shown)["view"] != view:
                    choose(shown, view=view)
        assert shown.evaluate(INK, view)["share"] > 0.01, f"{view} went blank"


# --- long texts

LONG = [f"word{number}" for number in range(20_000)]


def test_a_long_text_is_searched_and_its_top_tokens_lead_to_their_places(opened: Opener) -> None:
    shown = opened(page(rows_of(LONG)).html(), width=1400)
    assert (state(shown)["view"], state(shown)["beside"], state(shown)["method"]) == ("text", "top", "raw")
    assert "word19999" in texts(shown), "the query"
    assert len(texts(shown)) < 2000, "and not all of the text"
    shown.keyboard.press("/")
    shown.keyboard.type("WORD7000 ")
    settle(shown)
    assert state(shown)["token"] == 7000
    assert "word7000" in texts(shown)
    assert shown.inner_text(".found") == "1 of 1"
    assert "“word7000” (token 7000)" in status(shown)
    shown.keyboard.press("Control+a")
    shown.keyboard.type("word70001")
    assert shown.inner_text(".found") == "not found"
    assert shown.evaluate("document.activeElement.type") == "search", "one can go on typing"
    shown.keyboard.press("Control+a")
    shown.keyboard.type("word700")
    for key, place in (("Enter", 3), ("Enter", 4), ("Shift+Enter", 3)):
        shown.keyboard.press(key)
        assert shown.inner_text(".found").startswith(f"{place} of 1")
    # The second line of the list is the largest after the first token.
    second = next(text for text in texts(shown, 1) if re.fullmatch(r"word\d+", text) and text != "word0")
    shown.mouse.click(*spot(shown, 1, second))
    settle(shown)
    token = int(second.removeprefix("word"))
    assert state(shown)["token"] == token
    assert second in texts(shown), "the text shows it"
    assert f"token={token}" in shown.evaluate("location.hash")


def test_the_map_of_a_long_text_goes_where_it_is_pressed(opened: Opener) -> None:
    shown = opened(page(rows_of(LONG)).html(), "beside=none&token=5")
    box = shown.query_selector(".scroll").bounding_box()
    tops = []
    shown.mouse.move(box["x"] + 0.3 * box["width"], box["y"] + 100)
    shown.mouse.down()
    for part in (0.3, 0.5, 0.9):
        shown.mouse.move(box["x"] + part * box["width"], box["y"] + 100)
        settle(shown)
        tops.append(shown.evaluate("document.querySelector('.scroll').scrollTop"))
    assert state(shown)["token"] == 5, "dragging only scrolls"
    shown.mouse.up()
    settle(shown)
    whole = shown.evaluate("document.querySelector('.scroll').scrollHeight")
    assert 0.2 < tops[0] / whole < tops[1] / whole < 0.6 < tops[2] / whole
    assert 0.8 < state(shown)["token"] / len(LONG) < 0.95, "letting go chooses what is there"


def test_a_phone_shows_a_long_text(opened: Opener) -> None:
    text = page({"long": rows_of(LONG, queries=[100, 19_999]), "maps": made()}).html()
    shown = opened(text, width=390, height=800, has_touch=True, is_mobile=True)
    for view in ("text", "top", "strip"):
        choose(shown, view=view, trace=0)
        assert shown.evaluate(OVERFLOW) <= 0, view
        assert shown.evaluate(INK, view)["share"] > 0.005, f"{view} is blank"
    choose(shown, view="text", query=3)
    assert state(shown)["query"] == 100, "the nearest that there is"
    choose(shown, trace=1)
    assert "this trace has maps" in " ".join(texts(shown))


MARKUP = ["<img src=x onerror=alert(1)>", "</script>", "\u202eevil", "\0", "&lt;"]


def test_hostile_tokens_of_a_long_text_are_drawn_as_text(opened: Opener) -> None:
    shown = opened(page(rows_of([*MARKUP, *WORDS] * 40, layers=2)).html(), "find=%3Cimg")
    assert shown.inner_text(".found") == "40 found"
    for view in ("text", "top"):
        choose(shown, view=view, token=0)
        assert any(one.startswith("<img") for one in texts(shown)), view


# --- scales


def sinking(**arguments: Any) -> Trace:
    """A trace whose tokens look at [CLS] and hardly at a word."""
    trace = made(**arguments)
    for cells in trace.maps:
        cells *= 0.05
        cells[..., 0] += 0.95
    return trace


BOX = '[aria-label="scale by words"]'


def by_words(shown: Shown, pane: int) -> bool:
    return "Scaled by words: by r" in " ".join(texts(shown, pane))


def test_words_that_are_drowned_have_a_scale_of_their_own_until_somebody_chooses(opened: Opener) -> None:
    text = page({"deep": sinking(), "level": made(heads=0)}).html()
    shown = opened(text)
    assert (state(shown)["view"], state(shown)["beside"]) == ("graph", "strip")
    assert by_words(shown, 0), texts(shown, 0)
    assert by_words(shown, 1), texts(shown, 1)
    assert shown.is_checked(BOX)
    assert shown.evaluate("location.hash") == "", "it is no choice of anybody's"
    automatic = shown.evaluate("overt.svg(1)")
    choose(shown, trace=1)
    assert not shown.is_checked(BOX), "the other trace does not need it"
    choose(shown, trace=0, view="heads")
    assert shown.evaluate("(box) => document.querySelector(box).indeterminate", BOX), "heads have none"
    choose(shown, view="graph")
    shown.click(BOX)
    settle(shown)
    assert state(shown)["words"] is False
    assert not by_words(shown, 0)
    assert not by_words(shown, 1)
    choose(shown, trace=1)
    choose(shown, trace=0)
    assert not by_words(shown, 1), "the choice is kept"
    link = shown.evaluate("location.hash").removeprefix("#")
    assert "words=0" in link
    again = opened(text, link)
    assert not by_words(again, 1)
    assert not again.is_checked(BOX)
    again.keyboard.press("w")
    settle(again)
    assert again.evaluate("overt.svg(1)") == automatic


# --- tabs without data


OFFERS = """[...document.querySelectorAll(".pane")].map((pane) =>
  [...pane.querySelectorAll(".offers button")].map((one) => one.textContent))"""


def test_a_tab_without_data_offers_the_traces_that_have_some(opened: Opener) -> None:
    hostile = "<img src=x onerror=alert(1)>"
    traces = {"plain": made(), hostile: evolving(), "sure": sampled(), "again": evolving(seed=2)}
    shown = opened(page(traces).html(), "beside=none")
    assert shown.evaluate(OFFERS) == [[]]
    shown.click('[role="tab"][data-view="evolution"]')
    settle(shown)
    assert shown.evaluate(OFFERS) == [[hostile, "again"]]
    assert shown.inner_text(".offers p") == "These traces on the page have data for Evolution:"
    assert "no parts: trace an evolving model with overt.trace(…, parts=True)" in texts(shown), (
        "and how to have some"
    )
    assert shown.evaluate(OVERFLOW) <= 0
    shown.click(".offers button >> nth=1")
    settle(shown)
    assert (state(shown)["view"], state(shown)["trace"]) == ("evolution", 3)
    assert shown.evaluate(OFFERS) == [[]]
    assert shown.evaluate(INK, "evolution")["colours"] > 20
    shown.keyboard.press("ArrowDown")
    assert state(shown)["query"] == 1, "the keys go to what is shown now"
    shown.click('[role="tab"][data-view="uncertainty"]')
    settle(shown)
    shown.focus(".offers button")
    shown.keyboard.press("Enter")
    settle(shown)
    assert (state(shown)["view"], state(shown)["trace"]) == ("uncertainty", 2)


def test_an_offer_is_for_the_pane_that_makes_it(opened: Opener) -> None:
    traces = {"plain": made(), "evolving": evolving(), "sure": sampled()}
    shown = opened(page(traces).html(), "view=evolution&trace=1&other=0&beside=uncertainty")
    assert shown.evaluate(OFFERS) == [[], ["evolving"], ["sure"]]
    choose(shown, trace=0, other=2)
    assert shown.evaluate(OFFERS) == [["evolving"], ["evolving"], ["sure"]]
    shown.click(".pane:nth-child(2) .offers button")
    settle(shown)
    assert (state(shown)["trace"], state(shown)["other"]) == (0, 1), "the compared one"
    shown.click(".pane:nth-child(3) .offers button")
    settle(shown)
    assert (state(shown)["trace"], state(shown)["other"]) == (2, 1)
    assert shown.evaluate(OFFERS) == [["evolving"], [], []]


def test_where_no_trace_has_data_it_is_said_what_would_give_some(opened: Opener) -> None:
    shown = opened(page([made(), made(seed=1)]).html(), "view=uncertainty&beside=none")
    assert shown.evaluate(OFFERS) == [[]]
    assert "no posterior samples: trace a Bayesian model with overt.trace(…, samples=20)" in texts(shown)


# --- links


def test_a_link_leads_back(opened: Opener) -> None:
    text = page(made()).html()
    shown = opened(text)
    choose(shown, view="heads", layer=1, head=2, query=6, token=3, log=True, method="raw", beside=None)
    link = shown.evaluate("location.hash")
    again = opened(text, link.removeprefix("#"))
    assert state(again) == state(shown)
    assert again.evaluate("overt.svg(0)") == shown.evaluate("overt.svg(0)")
    again.evaluate("location.hash = 'query=2'")
    again.wait_for_function("overt.state().query === 2")
    assert state(again)["layer"] == 2, "what a link does not say is as at the beginning"


def test_nonsense_links_are_harmless(opened: Opener) -> None:
    shown = opened(page(made()).html(), "view=nothing&layer=99&head=-3&query=1e9&method=%00&trace=7&other=7")
    first = state(shown)
    links = ["%", "&&==&&", "__proto__=1", "view=%E0%A4%A", "query=<img src=x>", "beside=graph&view=graph"]
    for link in (*links, "group=cross", "part=x&token=9999", "other=0", "x" * 5000):
        shown.evaluate("(link) => { location.hash = link; }", link)
        settle(shown)
        found = state(shown)
        assert 0 <= found["query"] < 9
        assert 0 <= found["layer"] < 3
        assert found["view"] in views(shown)
    assert first["layer"] == 2
    assert first["trace"] == 0
    assert first["other"] is None


# --- files to keep


@ONCE
def test_views_are_saved_as_svg_and_png(opened: Opener, places: dict[str, int], tmp_path: Path) -> None:
    shown = opened(once(places), accept_downloads=True)
    for view, trace in places.items():
        choose(shown, view=view, trace=trace, beside=None)
        for name in ("SVG", "PNG"):
            with shown.expect_download() as coming:
                shown.click(f".tools button:text-is('{name}')")
            coming.value.save_as(tmp_path / name)
            assert coming.value.suggested_filename.endswith(f"-{view}.{name.lower()}")
        root = ElementTree.parse(tmp_path / "SVG").getroot()
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        written = " ".join("".join(one.itertext()) for one in root.findall(".//{*}text"))
        names = {"nodes": "paper 0", "cross": "Schlüssel", "image": "[CLS]"}
        assert names.get(view, "cabinets") in written, view
        facts = [value for one in root.iter() for key, value in one.items() if key != "href"]
        assert not any("NaN" in value for value in facts), f"{view} draws at no place"
        data = (tmp_path / "PNG").read_bytes()
        assert data[:8] == b"\x89PNG\r\n\x1a\n"
        sizes = [2 * float(root.attrib[side]) for side in ("width", "height")]
        assert struct.unpack(">II", data[16:24]) == pytest.approx(sizes, abs=2)


# --- looks


def test_themes_follow_the_system_until_one_is_chosen(opened: Opener) -> None:
    shown = opened(page(made()).html(), "view=strip", color_scheme="dark")

    def paper() -> str:
        return str(shown.evaluate("getComputedStyle(document.querySelector('.overt')).backgroundColor"))

    dark = paper()
    drawn = shown.evaluate("overt.svg(0)")
    assert shown.get_attribute(".overt", "data-theme") == "dark"
    button = ".tools button:text-matches('^(Auto|Light|Dark)$')"
    shown.click(button)
    settle(shown)
    assert shown.inner_text(button) == "Light"
    assert paper() == "rgb(255, 255, 255)" != dark
    assert shown.evaluate("overt.svg(0)") != drawn
    shown.reload()
    shown.wait_for_function("globalThis.overt")
    settle(shown)
    assert shown.get_attribute(".overt", "data-theme") == "light", "the choice is remembered"
    shown.click(button)
    shown.click(button)
    assert shown.inner_text(button) == "Auto"
    assert shown.get_attribute(".overt", "data-theme") == "dark"
    shown.emulate_media(color_scheme="light")
    settle(shown)
    assert shown.get_attribute(".overt", "data-theme") == "light"


def test_two_traces_are_compared_with_one_selection(opened: Opener) -> None:
    words = [*WORDS[:4], "my", "drawers", *WORDS[6:]]
    shown = opened(page({"before": made(), "after": made(words, seed=1)}).html(), "view=strip")
    assert shown.evaluate("document.querySelectorAll('.pane').length") == 1
    shown.select_option('[aria-label="Compare with"]', label="after")
    settle(shown)
    assert state(shown)["other"] == 1
    assert shown.evaluate("[...document.querySelectorAll('.pane h2')].map((one) => one.textContent)") == [
        "Token strip · before", "Token strip · after",
    ]  # fmt: skip
    assert "cabinets" in texts(shown, 0)
    assert "drawers" in texts(shown, 1)
    old = shown.evaluate("overt.svg(1)")
    shown.mouse.click(*spot(shown, 0, "lost"))
    settle(shown)
    assert state(shown)["query"] == 7
    assert shown.evaluate("overt.svg(1)") != old, "the other trace follows"
    shown.select_option('[aria-label="Trace"]', label="after")
    settle(shown)
    assert state(shown)["trace"] == 1
    assert state(shown)["other"] is None, "a trace is not compared with itself"


def test_traces_of_different_sizes_are_compared(opened: Opener) -> None:
    four = [made(), pair(), made(["a", "b"], layers=1, heads=0), image()]
    shown = opened(page(four).html(), "query=8&layer=2")
    for number in (1, 2, 3):
        choose(shown, trace=number, other=0, view="strip")
        for view in views(shown):
            choose(shown, view=view, trace=0, other=number, query=8, layer=2, head=3)
            assert shown.evaluate(OVERFLOW) <= 0


def test_the_larger_of_two_compared_traces_can_be_reached(opened: Opener) -> None:
    small, large = made(["a", "b"], layers=1), made()
    shown = opened(page({"small": small, "large": large}).html(), "view=strip&other=1&beside=none")
    shown.mouse.click(*spot(shown, 1, WORDS[7]))
    settle(shown)
    assert state(shown)["query"] == 7
    shown.mouse.move(5, 5)
    choose(shown, layer=2, method="raw")
    assert state(shown)["layer"] == 2, "which the small one has not"
    assert shown.input_value('[aria-label="Layer"]') == "2"
    assert status(shown).startswith("small: “b” (token 1), layer 1 of 1, raw")
    shown.mouse.move(*spot(shown, 1, WORDS[4]))
    settle(shown)
    assert status(shown).startswith("large: “" + WORDS[7]), "the words are of the trace under the pointer"


def test_the_encoders_layers_stay_with_the_views_of_the_encoder(opened: Opener) -> None:
    shown = opened(page(pair()).html(), "view=heads&group=encoder&beside=none")
    layers = int(shown.get_attribute('[aria-label="Layer"]', "max")) + 1
    choose(shown, layer=layers - 1)
    shown.keyboard.press("ArrowDown")
    assert state(shown)["row"] == 0, "rows of the encoder are no queries"
    choose(shown, view="strip")
    assert shown.get_attribute('[aria-label="Layer"]', "max") == "1"
    assert "layer 2 of 2" in status(shown)


# --- text that stays text

HOSTILE = {
    "<script>alert(1)</script>": None, '"><img src=x onerror=alert(1)>': None, "</script>": "</script>",
    "<!--": "<!--", "'\"`\\": "'\"`\\", "${alert(1)}": "${alert(1)}", "__proto__": "__proto__",
    "\0\x07": "␀␇", "a\u2028b": "a·b", "\ud800": "\ufffd", "\u202egnp.exe": "·gnp.exe", "&lt;": "&lt;",
    "Z" + "\u0351\u0357" * 60: None, "": "∅", " ": "␣", "\n": "↵",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467": "\U0001f468\u200d\U0001f469\u200d\U0001f467",
    "مفتاح": "مفتاح", "מפתח": "מפתח", "鑰匙": "鑰匙",
}  # fmt: skip


def test_hostile_tokens_do_no_harm(opened: Opener) -> None:
    tokens = list(HOSTILE)
    shown = opened(page(made(tokens, layers=2), title="</title><img src=x>", names=["<b>&amp;</b>"]).html())
    for view in views(shown):
        choose(shown, view=view, beside="strip" if view != "strip" else None)
        drawing(shown)
    choose(shown, view="strip")
    written = texts(shown)
    for token, seen in HOSTILE.items():
        assert seen is None or seen in written, f"{token!r} is not shown as {seen!r}"
    assert any(one.startswith("<script>alert(1)") for one in written)
    shown.evaluate("for (let query = 0; query < 99; query++) overt.select({ query })")
    settle(shown)
    assert shown.evaluate("document.querySelectorAll('img, iframe, object, embed, b').length") == 0
    assert shown.title() == "</title><img src=x>"
    assert shown.inner_text("h1") == "</title><img src=x>"


@pytest.mark.parametrize("words", [["מפתח", "הארונות", "אבד"], ["鑰匙", "遺失", "了"]], ids=["rtl", "wide"])
def test_other_scripts_are_laid_out_within_the_page(opened: Opener, words: list[str]) -> None:
    shown = opened(page(made(5 * words, layers=2)).html(), width=640)
    for view in views(shown):
        choose(shown, view=view, beside=None)
        assert shown.evaluate(OVERFLOW) <= 0
        assert any(word in texts(shown) for word in words), view
    choose(shown, view="strip")
    labels = [one for one in drawing(shown).findall(".//{*}text") if "".join(one.itertext()) in words]
    places = [float(one.attrib["x"]) for one in labels]
    assert (places[0] > places[1]) == (words[0] == "מפתח"), "Hebrew begins at the right"


def test_a_token_of_ten_megabytes_is_cut_when_shown(opened: Opener) -> None:
    shown = opened(page(made(["the", "x" * 10_000_000, "end"], layers=1, heads=1), methods=["raw"]).html())
    for view in views(shown):
        choose(shown, view=view, query=1)
        assert max(map(len, texts(shown))) < 200
    assert len(status(shown)) < 1000
    assert shown.evaluate("document.querySelector('.overt').textContent.length") < 20_000


def test_the_policy_stops_scripts_that_were_put_into_the_page(opened: Opener) -> None:
    text = page(made()).html()
    added = (
        "<script>globalThis.harm = 1</script><script type=module>globalThis.harm = 2</script>"
        '<img src="data:," onerror="globalThis.harm = 3"><img src="https://overt.invalid/x.png">'
        '<style>.overt { display: none }</style><iframe src="data:text/html,x"></iframe>'
        '<script src="https://overt.invalid/x.js"></script>'
    )
    expected = "Content Security Policy|^request: (https://overt.invalid/|data:)"
    shown = opened(text.replace("</body>", f"{added}</body>"), faults=expected)
    shown.wait_for_timeout(100)
    assert shown.evaluate("globalThis.harm") is None
    assert shown.evaluate("getComputedStyle(document.querySelector('.overt')).display") == "flex"
    # A control: without the policy they would have run.
    free = text.replace('http-equiv="Content-Security-Policy"', 'name="nothing"')
    control = opened(free.replace("</body>", "<script>globalThis.harm = 1</script></body>"))
    assert control.evaluate("globalThis.harm") == 1


def test_a_damaged_page_says_so_and_rests(opened: Opener) -> None:
    shown = page(made(), methods=["raw"])
    shown.blocks = [b"\xff" * len(block) for block in shown.blocks]
    seen = opened(shown.html(), "view=strip")
    assert "cannot be read" in status(seen)
    assert "cannot be read" in " ".join(texts(seen))
    seen.keyboard.press("ArrowDown")
    settle(seen)
    assert state(seen)["query"] == 1


# --- sizes


def structured(layers: int, heads: int, count: int) -> list[torch.Tensor]:
    """Maps such as models have: sharp, near the diagonal, with a sink at the first token."""
    place = torch.arange(count)
    near = -(place[:, None] - place).abs() / 2.0
    near[:, 0] += 4.0
    return [
        (near + 1.5 * torch.randn(1, heads, count, count, generator=torch.Generator().manual_seed(layer)))
        .mul(1.5)
        .softmax(dim=-1)
        for layer in range(layers)
    ]


def test_a_page_is_far_smaller_than_its_maps_as_text(tmp_path: Path) -> None:
    cells = structured(6, 8, 64)
    trace = made(["word"] * 64, layers=6, heads=8)
    trace.maps = cells
    page(trace, methods=["raw", "rollout"]).save(tmp_path / "page.html")
    bare = page(made(["a"], layers=1, heads=1)).html()
    size = (tmp_path / "page.html").stat().st_size - len(bare)
    assert size < 0.1 * len(json.dumps([one.tolist() for one in cells]))


@pytest.mark.slow
def test_a_long_text_with_many_heads_opens(opened: Opener, record_property: Any, tmp_path: Path) -> None:
    trace = made(["[CLS]", *(f"word{number}" for number in range(511))], layers=1, heads=12)
    trace.maps = structured(1, 12, 512)
    whole = page(trace, methods=["raw", "rollout"])
    # One layer packed and put there twelve times: as large as twelve, and sooner ready.
    (entry,) = whole.index["traces"]
    count = len(whole.blocks)
    for layers in entry["fields"].values():
        layers *= 12
        layers[:] = [{**about, "at": about["at"] + count * number} for number, about in enumerate(layers)]
    whole.blocks *= 12
    entry["layers"] = entry["groups"][""]["layers"] = 12
    path = tmp_path / "long.html"
    whole.save(path)
    start = time.perf_counter()
    shown = opened(path)
    record_property("seconds to the first view", time.perf_counter() - start)
    record_property("bytes", path.stat().st_size)
    print(f"512 tokens × 144 heads: {path.stat().st_size / 1e6:.1f} MB, {time.perf_counter() - start:.1f} s")
    for view in views(shown):
        choose(shown, view=view, beside=None, query=300)
        assert shown.evaluate(INK, view)["share"] > 0.01, f"{view} is blank"
        assert shown.evaluate(OVERFLOW) <= 0
        with shown.expect_download() as coming:
            shown.click(".tools button:text-is('PNG')")
        coming.value.save_as(tmp_path / "long.png")
        assert (tmp_path / "long.png").read_bytes()[:4] == b"\x89PNG"
        drawing(shown)


# --- notebooks


def test_a_notebook_shows_the_page_in_its_frame(opened: Opener) -> None:
    text = page(made())._repr_html_()
    look = "<style>button { display: none }</style>"  # of the notebook; the page's buttons stay
    shown = opened(f"<!doctype html><meta charset=utf-8>{look}{text}", ready="")
    frame = shown.frames[1]
    frame.wait_for_function("globalThis.overt")
    frame.evaluate("overt.settled()")
    assert frame.evaluate(INK, "graph")["share"] > 0.01
    frame.click('[role="tab"][data-view="strip"]')
    frame.evaluate("overt.settled()")
    assert frame.evaluate(INK, "strip")["share"] > 0.01
    assert frame.evaluate("overt.state().view") == "strip"
    button = ".tools button:text-matches('^(Auto|Light|Dark)$')"
    frame.click(button)
    assert frame.inner_text(button) == "Light", "without storage, too"


WIDGET = """async ({ esm, css, index, blocks, height }) => {
  const style = document.createElement("style");
  style.textContent = css;
  document.head.append(style);
  const url = URL.createObjectURL(new Blob([esm], { type: "text/javascript" }));
  const { default: widget } = await import(url);
  const bytes = blocks.map((text) => {
    const one = Uint8Array.from(atob(text), (sign) => sign.charCodeAt(0));
    const padded = new Uint8Array(one.length + 8); // a kernel's buffers may begin anywhere
    padded.set(one, 5);
    return new DataView(padded.buffer, 5, one.length);
  });
  const values = { index, blocks: bytes, height, selection: {} };
  const heard = {};
  globalThis.saved = [];
  globalThis.model = {
    get: (name) => values[name],
    set: (name, value) => { values[name] = value; (heard[`change:${name}`] || []).forEach((one) => one()); },
    save_changes: () => saved.push({ ...values.selection }),
    on: (name, listener) => (heard[name] ||= []).push(listener),
    off: (name, listener) => { heard[name] = (heard[name] || []).filter((one) => one !== listener); },
  };
  globalThis.place = document.createElement("div");
  document.body.append(place);
  globalThis.leave = await widget.render({ model, el: place });
}"""


def test_a_widget_mounts_and_its_selection_flows_both_ways(opened: Opener) -> None:
    pytest.importorskip("anywidget")
    source = page(made())
    widget = source.widget(height=500)
    assert widget.height == 500
    shown = opened("<!doctype html><meta charset=utf-8><body>", ready="")
    parts = {
        "esm": str(widget._esm),
        "css": str(widget._css),
        "index": widget.index,
        "blocks": [base64.b64encode(block).decode() for block in widget.blocks],
        "height": widget.height,
    }
    shown.evaluate(WIDGET, parts)
    shown.wait_for_function("document.querySelector('.status').textContent.includes('“[CLS]”')")
    shown.wait_for_function(f"({INK})('graph').share > 0.01")
    assert shown.evaluate("place.getBoundingClientRect().height") == 500
    assert shown.evaluate("location.hash") == ""
    assert shown.evaluate("saved.at(-1).view") == "graph", "the kernel knows how it began"
    # From the page to the kernel,
    shown.click('[role="tab"][data-view="strip"]')
    shown.keyboard.press("ArrowDown")
    assert shown.evaluate("saved.at(-1).view") == "strip"
    assert shown.evaluate("saved.at(-1).query") == 1
    assert shown.evaluate("location.hash") == "", "a notebook's address is its own"
    # and from the kernel to the page, which does not echo for ever.
    shown.evaluate("model.set('selection', { query: 5 })")
    shown.wait_for_function("document.querySelector('.status').textContent.includes('“cabinets”')")
    assert shown.evaluate("saved.length") < 10
    shown.evaluate("leave()")
    assert shown.evaluate("place.childElementCount") == 0
    shown.evaluate("model.set('selection', { query: 2 })")  # nobody is there to fail


# --- `make browser`


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="apt-get is of Debian and its kin")
@pytest.mark.parametrize("fresh", [False, True], ids=["lists are old", "lists are fresh"])
def test_a_missing_browser_is_installed(fresh: bool, tmp_path: Path) -> None:
    def program(name: str, text: str) -> None:
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)

    program("sudo", 'exec "$@"')
    (tmp_path / "env").symlink_to("/usr/bin/env")
    log, mark = tmp_path / "log", tmp_path / "fresh"
    made_up = f"printf '#!/bin/sh\\n' > {tmp_path}/chromium; /bin/chmod +x {tmp_path}/chromium"
    program(
        "apt-get",
        f'echo "$2" >> {log}\n[ "$2" = update ] && : > {mark}\n[ -e {mark} ] || exit 100\n'
        f'if [ "$2" = install ]; then {made_up}; fi',
    )
    if fresh:
        mark.touch()
    here = {"PATH": str(tmp_path), "PLAYWRIGHT_BROWSERS_PATH": str(tmp_path), "HOME": str(tmp_path)}
    command = [sys.executable, str(Path(__file__).parent / "browser.py")]

    def run() -> str:
        return subprocess.run(command, env=here, capture_output=True, text=True, check=True).stdout

    assert "installed chromium" in run()
    assert log.read_text().split() == (["install"] if fresh else ["install", "update", "install"])
    assert run() == "", "and is left alone when it is there"


# --- Answers to a question about a picture ---

QUESTION = [
    "what",
    "shape",
    "is",
    "just",
    "left",
    "of",
    "the",
    "green",
    "circle",
    "and",
    "above",
    "the",
    "purple",
    "square",
]
BOXES = """(selector) => [...document.querySelectorAll(selector)].map((each) => {
  const { x, y, width, height } = each.getBoundingClientRect();
  return { x, y, width, height, size: parseFloat(getComputedStyle(each).fontSize) };
})"""


def answers(size: tuple[int, int]) -> str:
    from PIL import Image

    weights = torch.arange(16.0).view(4, 4) / 120
    likely = [Likely("circle", 0.6, 0.1), Likely("square", 0.2, 0.05)]
    words = torch.full((len(QUESTION),), 1 / len(QUESTION))
    reply = Reply("Soft", "circle", 0.6, likely, 20, 0.001, QUESTION, words, weights, weights - 0.05, 20)
    return answers_page(Image.new("RGB", size), " ".join(QUESTION), [reply, reply])


@pytest.mark.parametrize("size", [(900, 300), (300, 900), (400, 400)], ids=["wide", "tall", "square"])
@pytest.mark.parametrize("width", [1280, 400])
def test_answers_fit_and_can_be_read_with_pictures_of_any_shape(
    opened: Opener, size: tuple[int, int], width: int
) -> None:
    shown = opened(answers(size), ready="", width=width, color_scheme="dark" if width == 400 else "light")
    assert shown.evaluate(OVERFLOW) <= 0
    pictures = shown.evaluate(BOXES, "main image")
    assert len(pictures) == 1 + 2 * 2
    for each in pictures:
        assert each["width"] / each["height"] == pytest.approx(size[0] / size[1], rel=0.02)
        assert each["width"] >= 100 * min(1, size[0] / size[1])
        assert 0 <= each["x"] <= each["x"] + each["width"] <= width
    words = shown.evaluate(BOXES, ".word")[: len(QUESTION)]
    assert all(each["size"] >= 12 and each["x"] + each["width"] <= width for each in words)
    lines = {round(each["y"]) for each in words}
    assert len(lines) > 1, "a long question is broken into lines"
    bars = shown.evaluate(BOXES, ".word svg")[: len(QUESTION)]
    for word, bar in zip(words, bars, strict=True):
        assert bar["width"] == pytest.approx(word["width"], abs=1), "each word has its own bar"

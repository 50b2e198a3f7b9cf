"""Pages of traces without maps: rows against the trace, their size, the text around tokens, refusals."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from typer.testing import CliRunner

import families
import overt
from families import BY_NAME
from overt.cli.shared import app
from overt.view import rows as view_rows
from overt.view.pages import Page, page
from overt.view.terminal import MOST_ROWS, table
from traces import WORDS, field, made, rows_of

BYTES = 1000  # enough for a row, not for maps
NEAR = {1: (0.04, 0.08), 2: (0.001, 0.001)}  # of itself, and of the row's median, by bytes of a weight
LONG = [f"word{number % 977}" for number in range(32_768)]
TEXT = "The keys to the cabinets lie here.\n\nUnbelievable, isn't it?  Keys!\nThe end"


def states_of(name: str = "Llama", **options: Any) -> overt.Trace:
    """A trace of states, whose results may then be of any size."""
    family = BY_NAME[name]
    inputs = families.inputs_of(family, padded=family.pads)
    found = overt.trace(family.make(), inputs, memory=BYTES, **options)
    assert found.of_states
    found.memory = 2**20
    return found


def held_to(shown: Page, name: str, want: Tensor, entry: int = 0, head: int = 0) -> None:
    """Rows of a page within the error that the documentation states; `want` is (layer, query, token)."""
    for layer, rows in enumerate(want):
        about = shown.index["traces"][entry]["fields"][name][layer]
        part, floor = NEAR[about["bytes"]]
        found = field(shown, name, layer, entry)[head].double()
        median = torch.stack([row[row > 0].median() for row in rows]).unsqueeze(-1)
        assert ((found - rows).abs() <= part * rows + floor * median + 1e-9).all()
        top = rows.amax(dim=-1)
        torch.testing.assert_close(found.amax(dim=-1), top, rtol=1e-5, atol=1e-12)


@pytest.mark.parametrize("name", ["Llama", "BART", "BERT", "ViT"])
def test_the_page_of_states_has_the_rows_of_the_main_query(name: str) -> None:
    trace = states_of(name)
    shown = trace.html()
    assert len(shown.index["traces"]) == len(trace)
    for number, entry in enumerate(shown.index["traces"]):
        one = trace[number]
        real = one.mask[0].nonzero().flatten()
        query = one.main_queries()[0]
        assert entry["tokens"] == [one.tokens[0][place] for place in real.tolist()]
        assert set(entry["fields"]) == {"raw", "rollout"}, "and no maps"
        assert entry["queries"] == dict.fromkeys(("raw", "rollout"), entry["rows"]["queries"])
        assert entry["rows"]["queries"] == [entry["main"]]
        assert int(real[entry["source"] + entry["main"]]) == one.first + query
        for method in ("raw", "rollout"):
            held_to(shown, method, one.read(method, query)[0][..., real], number)
    assert "maps" in entry["missing"]["flow"]
    json.dumps(shown.index, allow_nan=False)


@pytest.mark.parametrize("few", [10**9, 0], ids=["two bytes", "one byte"])
def test_weights_come_back_as_stated(monkeypatch: pytest.MonkeyPatch, few: int) -> None:
    monkeypatch.setattr(view_rows, "FEW", few)
    trace = rows_of([f"w{number}" for number in range(3000)], queries=[5, 2999], sharp=4.0)
    shown = page(trace)
    assert trace.rows is not None
    for method in ("raw", "rollout"):
        held_to(shown, method, trace.rows.values[method][0])
    assert all(not layer["kept"] < 2 * 3000 for layer in shown.index["traces"][0]["fields"]["raw"])
    less = page(trace, mass=0.5)
    assert all(layer["kept"] < 2 * 3000 for layer in less.index["traces"][0]["fields"]["raw"])
    assert (shown.index["mass"], less.index["mass"]) == (1.0, 0.5)


def test_a_page_of_32_thousand_tokens_and_32_layers_is_small(tmp_path: Path) -> None:
    trace = rows_of(LONG, layers=32, sharp=3.0)
    page(trace).save(tmp_path / "page.html")
    assert (tmp_path / "page.html").stat().st_size < 5_000_000


def test_rows_that_were_saved_have_the_same_page(tmp_path: Path) -> None:
    trace = states_of()[0]
    trace.save(tmp_path / "rows.safetensors", queries=[2, trace.main_queries()[0]])
    back = overt.Trace.load(tmp_path / "rows.safetensors")
    one, two = trace.html(queries=[2, trace.main_queries()[0]]), back.html()
    for name in ("tokens", "rows", "main", "special", "layers"):
        assert one.index["traces"][0][name] == two.index["traces"][0][name]
    assert one.blocks == two.blocks
    assert back.html(queries=2).index["traces"][0]["main"] == 2
    with pytest.raises(ValueError, match=r"^queries must be among those whose rows this trace was saved wit"):
        back.html(queries=3)
    with pytest.raises(ValueError, match=r"saved with, 2, 8, got 'all': \"auto\" has these"):
        back.html(queries="all")
    with pytest.raises(ValueError, match="rows, which are fixed: residual cannot be given"):
        back.html(residual=0.2)
    with pytest.raises(ValueError, match="no flow: this trace was saved as rows"):
        back.html(methods=["raw", "flow"])


def test_queries_and_methods_are_chosen_as_for_maps() -> None:
    trace = states_of()[0]
    every = trace.html(queries="all").index["traces"][0]
    assert every["rows"]["queries"] == list(range(int(trace.mask[0].sum())))
    flow = trace.html(methods=["rollout", "flow"], residual=0.3)
    held_to(flow, "flow", trace.flow(trace.main_queries(), residual=0.3)[0][..., trace.mask[0]])
    held_to(flow, "rollout", trace.rollout(residual=0.3)[0][..., trace.mask[0]])
    assert "was not requested" in trace.html(methods=["raw"]).index["traces"][0]["missing"]["rollout"]
    with pytest.raises(ValueError, match="queries must name at least one of 9, got"):
        trace.html(queries=[])
    trace.memory = 100
    with pytest.raises(ValueError, match=r"bytes"):
        trace.html(queries="all")


def test_single_heads_are_there_if_they_were_traced_and_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = states_of(heads=True)[0]
    shown = trace.html()
    heads = trace.raw(heads="each")[0][..., trace.mask[0]]
    assert shown.index["traces"][0]["heads"] == heads.shape[1]
    for head in range(heads.shape[1]):
        held_to(shown, "raw heads", heads[:, head], head=head)
    assert states_of()[0].html().index["traces"][0]["heads"] == 0
    monkeypatch.setattr(view_rows, "MOST_HEADS", 10)
    entry = trace.html().index["traces"][0]
    assert entry["heads"] == 0
    assert "single heads were left out" in entry["missing"]["heads"]


def test_maps_and_rows_share_a_page_and_the_first_token_is_said_to_drown_the_others() -> None:
    even = rows_of([f"w{number}" for number in range(60)], sharp=0.5)
    shown = page({"maps": made(), "rows": even})
    first, second = shown.index["traces"]
    assert "rows" not in first
    assert second["drowned"]["token"] == 0
    assert shown.index["mass"] == 0.98
    held_to(shown, "raw", even.raw()[0], 1)


def byte_level() -> Any:
    pieces = Tokenizer(models.BPE())
    pieces.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pieces.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    pieces.train_from_iterator([TEXT], trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet))
    return hf.PreTrainedTokenizerFast(tokenizer_object=pieces)


@pytest.fixture(scope="module")
def small() -> tuple[Any, Any]:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    return hf.LlamaForCausalLM(hf.LlamaConfig(vocab_size=300, **sizes)).eval(), byte_level()


def written(entry: dict[str, Any]) -> str:
    """The text of a page: tokens with what comes before them."""
    signs = {"0": "", "1": " ", "2": "\n"}
    before = entry["rows"]["before"]
    return "".join(
        signs[b] + token.translate({0x10A: "\n", 0x120: " "})
        for b, token in zip(before, entry["tokens"], strict=True)
    )


@pytest.mark.parametrize("saved", [False, True])
def test_the_text_is_joined_as_it_was_written(small: tuple[Any, Any], tmp_path: Path, saved: bool) -> None:
    model, tokenizer = small
    trace = overt.trace(model, [TEXT, "A key, and\nnothing"], tokenizer=tokenizer, memory=6000)
    assert trace.of_states
    trace.memory = 2**20
    if saved:
        trace.save(tmp_path / "rows.safetensors")
        trace = overt.Trace.load(tmp_path / "rows.safetensors")
    for entry, text in zip(trace.html().index["traces"], (TEXT, "A key, and\nnothing"), strict=True):
        assert any(sign == "0" for sign in entry["rows"]["before"][1:]), "pieces of words"
        assert re.sub(r"\s+", " ", written(entry)).strip() == re.sub(r"\s+", " ", text)


def test_word_pieces_are_joined_without_offsets() -> None:
    entry = page(rows_of(["[CLS]", "un", "##real", "key", "[SEP]"])).index["traces"][0]
    assert entry["rows"]["before"] == "11011"


HOSTILE = [
    "</script><script>alert(1)</script>",
    "<!--",
    "\u2028",
    "&lt;",
    "<img src=x onerror=alert(1)>",
    "\ud800",
]


def test_hostile_tokens_stay_text() -> None:
    text = page(rows_of([*HOSTILE, *WORDS])).html()
    found = re.search(r'<script type="application/json" id="overt-index">(.*?)</script>', text, re.S)
    assert found
    tokens = json.loads(found[1])["traces"][0]["tokens"]
    assert tokens == [token.replace("\ud800", "\ufffd") for token in [*HOSTILE, *WORDS]]
    assert not re.search(r"[<>&\u2028]", found[1])


def test_figures_are_refused_and_say_what_would_do() -> None:
    for trace, kept in ((states_of()[0], "queries and keys"), (rows_of(), "rows")):
        with pytest.raises(
            ValueError, match=rf"this trace has {kept}: trace with a larger memory=…, or show it"
        ):
            trace.plot("strip")


def test_a_long_table_has_the_tokens_with_the_largest_values() -> None:
    trace = rows_of([f"w{number}" for number in range(500)])
    grid = table(trace)
    assert grid.row_count == MOST_ROWS
    shown = {int(cell) for cell in grid.columns[0].cells}  # type: ignore[call-overload]
    for method in ("raw", "rollout"):
        best = trace.read(method, layers=-1)[0, 0, 0].argsort(descending=True)[: MOST_ROWS // 2]
        assert set(best.tolist()) <= shown
    assert str(grid.caption) == "the tokens with the largest values, of 500"
    assert table(rows_of()).row_count == len(WORDS)


def test_the_command_writes_the_page_of_a_long_file(
    small: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = small
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text(TEXT)
    monkeypatch.setattr(overt, "trace", functools.partial(overt.trace, memory=8000))
    out = tmp_path / "page.html"
    arguments = ["trace", str(tmp_path / "text.txt"), "--model", str(tmp_path / "model"), "--out", str(out)]
    run = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert run.exit_code == 0, run.output
    assert "what 'end' draws" in run.output
    found = re.search(r'id="overt-index">(.*?)</script>', out.read_text(), re.S)
    assert found
    entry = json.loads(found[1])["traces"][0]
    assert entry["rows"]["queries"] == [len(entry["tokens"]) - 1]
    assert re.sub(r"\s+", " ", written(entry)) == re.sub(r"\s+", " ", TEXT)
    arguments[1] = "absent.txt"
    with pytest.raises(FileNotFoundError, match=r"text absent\.txt does not exist"):
        CliRunner().invoke(app, arguments, catch_exceptions=False)

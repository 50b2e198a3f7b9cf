"""Pages and tables of generated text: rows of the words that were written, their size, the command."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import transformers as hf
from typer.testing import CliRunner

import overt
from overt.cli.shared import app
from overt.view import rows as view_rows
from overt.view.pack import pack, unpack
from overt.view.pages import page
from traces import field, rows_of
from writing import SIZES, TEMPLATE, TEXT, byte_tokenizer, tiny


@pytest.mark.parametrize("memory", [2**30, 3000], ids=["maps", "states"])
def test_the_page_of_generated_text_has_the_rows_that_wrote_it(memory: int) -> None:
    known = byte_tokenizer(chat_template=TEMPLATE)
    trace = overt.trace(tiny("Llama"), [TEXT, "Keep it"], tokenizer=known, generate=6, memory=memory)
    trace.memory = trace.memory and 2**20
    shown = trace.html()
    for number, entry in enumerate(shown.index["traces"]):
        start, stop = trace.turns[number][1][1:]
        assert entry["rows"]["generated"] == [start, stop]
        assert entry["rows"]["turns"] == [["prompt", 0, start], ["output", start, stop]]
        assert entry["rows"]["queries"] == list(range(start - 1, stop - 1))
        assert entry["main"] == start - 1
        real = trace.mask[number]
        for layer in range(2):
            want = trace.raw(entry["rows"]["queries"], layers=layer)[number, 0][:, real]
            found = field(shown, "raw", layer, number)[0].double()
            torch.testing.assert_close(found, want, rtol=2e-3, atol=2e-3)
    text = "".join(
        {"0": "", "1": " ", "2": "\n"}[sign] + word
        for sign, word in zip(entry["rows"]["before"], entry["tokens"], strict=True)
    )
    assert text.startswith("Keep it")


def test_characters_of_several_pieces_can_be_read_on_the_page() -> None:
    text = "Keep 今天 safe 🙂🙃 مع"
    trace = overt.trace(tiny("Llama"), text, tokenizer=byte_tokenizer(), generate=2)
    entry = trace.html().index["traces"][0]
    assert trace.tokens[0].count("�") > 10, "there are pieces"
    assert entry["name"].startswith(text)
    signs = {"0": "", "1": " ", "2": "\n"}
    pairs = zip(entry["rows"]["before"], entry["tokens"], strict=True)
    joined = "".join(signs[sign] + word for sign, word in pairs)
    assert joined.replace("\u0120", " ").strip().startswith(text), "lone spaces are tokens here"
    assert len(entry["tokens"]) == len(trace.tokens[0])


def test_single_heads_of_generated_words_are_there_if_they_were_traced() -> None:
    trace = overt.trace(tiny("Llama"), [[5, 6, 7]], generate=4, heads=True)
    shown = trace.html()
    assert shown.index["traces"][0]["heads"] == 4
    want = trace.raw(trace.generating_queries(), heads="each")[0]
    for head in range(4):
        torch.testing.assert_close(
            field(shown, "raw heads", 1)[head].double(), want[1, head], rtol=0.05, atol=0.02
        )


def test_an_encoder_decoder_has_its_output_after_the_source() -> None:
    trace = overt.trace(tiny("T5"), "Keep it safe", tokenizer=byte_tokenizer(), generate=4)
    entry = trace.html().index["traces"][0]
    source = entry["source"]
    assert entry["rows"]["generated"] == [source + 1, source + 5]
    assert entry["rows"]["queries"] == [0, 1, 2, 3]


def test_rows_keep_their_largest_weights_and_say_what_they_leave_out() -> None:
    cells = torch.softmax(3 * torch.randn(1, 5, 400), dim=-1)
    about, data = pack(cells, 1.0, 1, most=30)
    found, dropped = unpack(about, data)
    top = cells.topk(30)
    assert about["kept"] == 5 * 30
    assert torch.equal(found[0].nonzero()[:, 1].view(5, 30), top.indices[0].sort().values)
    torch.testing.assert_close(dropped.float(), 1 - top.values.sum(dim=-1), atol=0.005, rtol=0)
    assert pack(cells, 1.0, 1, most=400)[1] == pack(cells, 1.0, 1)[1]


def test_the_size_of_a_page_does_not_grow_with_the_number_of_words(monkeypatch: pytest.MonkeyPatch) -> None:
    count, words = 4096, 32
    monkeypatch.setattr(view_rows, "MOST_KEPT", 100_000)
    tokens = [f"word{number % 977}" for number in range(count)]
    written = torch.arange(count).unsqueeze(0) >= count - words
    queries = range(count - words - 1, count - 1)
    trace = rows_of(tokens, layers=4, queries=list(queries), sharp=3.0, generated=written)
    shown = page(trace)
    assert sum(map(len, shown.blocks)) < 3 * 100_000, "bytes, of 1,048,576 weights"
    entry = shown.index["traces"][0]
    assert entry["rows"]["generated"] == [count - words, count]
    about = entry["fields"]["raw"][0]
    assert about["kept"] == pytest.approx(100_000 / 8, rel=0.1)
    assert about["unit"] > 0.01, "what was left out is on the page"


runner = CliRunner()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    tiny("Llama").save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return path


def test_the_command_writes_and_names_the_sources_of_each_word(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    asked = ["trace", TEXT, "--model", str(folder), "--generate", "5", "--out", str(out)]
    result = runner.invoke(app, [*asked, "--method", "raw", "--method", "gradients"], env={"COLUMNS": "140"})
    assert result.exit_code == 0, result.output
    text = re.sub(r"\x1b\[[0-9;]*m", "", result.output)
    assert "what each word that was generated draws on" in text
    assert "raw, mean of 2 layers: most from" in text
    assert "gradients: most from" in text
    trace = overt.trace(tiny("Llama"), TEXT, tokenizer=byte_tokenizer(), generate=5)
    start = trace.turns[0][1].start
    (values,) = trace.spans(queries="generated words", tokens="words")

    def says(text: str, row: torch.Tensor) -> bool:
        row[0] = 0.0
        best = values.tokens[int(row.argmax())]
        line = next(line for line in text.splitlines() if line.strip().startswith(f"{start} "))
        return f"({best.start}) {float(row.max()):.2g}" in line

    assert says(text, values.values[:, 0].mean(dim=0))
    asked = ["trace", TEXT, "--model", str(folder), "--generate", "5", "--layer", "0", "--method", "raw"]
    single = runner.invoke(app, [*asked, "--method", "rollout"], env={"COLUMNS": "140"}).output
    assert "raw, layer 1 of 2: most from" in single
    assert "rollout, layer 1 of 2: most from" in single
    assert says(single, values.values[0, 0].clone())
    assert not says(single, values.values[:, 0].mean(dim=0))
    assert "page in" in text
    assert '"generated":' in out.read_text()


def test_white_space_has_signs_in_the_terminal(folder: Path) -> None:
    result = runner.invoke(app, ["trace", "Keep  it\n\tsafe", "--model", str(folder)], env={"COLUMNS": "140"})
    assert result.exit_code == 0, result.output
    shown = [line.split()[1] for line in result.output.splitlines() if re.match(r"\s*\d+ ", line)]
    assert [sign for sign in shown if sign in "␣↵⇥"] == ["␣", "↵", "⇥"]
    assert not set("ĠĊĉ") & set(result.output)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--query", "1"], r"^--query is for texts that are given"),
        (["--decoder", "it"], r"^decoder is for enc"),
        (["--layer", "7"], r"^layers must lie in 0 to 1 .*, got 7$"),
        (["--image", "absent.png"], r"^--image is for models that see pictures beside a text, and .* does n"),
    ],
)
def test_mistakes_beside_generate(folder: Path, more: list[str], message: str) -> None:
    result = runner.invoke(app, ["trace", TEXT, "--model", str(folder), "--generate", "2", *more])
    assert isinstance(result.exception, ValueError)
    assert re.search(message, str(result.exception))


def test_the_command_refuses_what_cannot_be_written(folder: Path, tmp_path: Path) -> None:
    result = runner.invoke(app, ["trace", "", "--model", str(folder), "--generate", "2"])
    assert str(result.exception) == "inputs must hold text with at least one token, got ['']"
    config = hf.BertConfig(**SIZES, intermediate_size=48, vocab_size=290)
    hf.BertForSequenceClassification(config).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    result = runner.invoke(app, ["trace", TEXT, "--model", str(tmp_path), "--generate", "2"])
    assert str(result.exception).startswith(
        "BertForSequenceClassification (bert) cannot generate: use a lang"
    )

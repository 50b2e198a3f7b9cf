"""Traces of text: tokens, offsets, tokenizers of several kinds, and the command."""

from __future__ import annotations

import io
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from typer.testing import CliRunner

import overt
from families import PAIR, SMALL, TEXT, build, llama_like
from overt.cli import app
from overt.view.terminal import bar, table

WORDS = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "the", "key", "to", "cabinets", "##s", "cabinet", "lies", "here"]
runner = CliRunner()


def tokenizer(kind: str = "bert") -> Any:
    pieces = Tokenizer(
        models.WordPiece({word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]")
    )
    pieces.pre_tokenizer = pre_tokenizers.Whitespace()
    if kind == "bert":
        pieces.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
        )
        names = {"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]", "unk_token": "[UNK]"}
        return hf.PreTrainedTokenizerFast(tokenizer_object=pieces, **names)
    return hf.PreTrainedTokenizerFast(tokenizer_object=pieces, eos_token="[SEP]", bos_token="[CLS]")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bert")
    build(hf.BertForSequenceClassification, lambda: hf.BertConfig(**TEXT))().save_pretrained(path)
    tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return hf.BertForSequenceClassification.from_pretrained(folder)


def test_a_sentence_is_traced_with_the_tokenizer_beside_the_weights(model: Any) -> None:
    traced = overt.trace(model, "the key to cabinets")
    assert traced.tokens == [["[CLS]", "the", "key", "to", "cabinets", "[SEP]"]]
    assert traced.special.tolist() == [[True, False, False, False, False, True]]
    assert traced.offsets is not None
    assert traced.offsets[0, 2].tolist() == [4, 7]
    assert traced.blankout().shape == (1, 1, 1, 6), "the tokenizer knows its unknown token"


def test_a_batch_of_texts_equals_each_alone(model: Any) -> None:
    texts = ["the key", "the key to cabinets lies here", "here"]
    whole = overt.trace(model, texts)
    assert whole.mask.sum(dim=1).tolist() == [4, 8, 3]
    for number, text in enumerate(texts):
        alone = overt.trace(model, text)
        n = alone.mask.shape[1]
        for method in ("raw", "rollout", "flow"):
            ours = getattr(whole, method)()[number : number + 1, :, :n, :n]
            torch.testing.assert_close(ours, getattr(alone, method)(), atol=1e-6, rtol=1e-5)
        assert whole.tokens[number][:n] == alone.tokens[0]


def test_tokenizers_without_padding_will_do() -> None:
    made = llama_like("Llama", vocab_size=len(WORDS))()
    known = tokenizer("llama")
    assert known.pad_token is None
    traced = overt.trace(made, ["the key to cabinets", "here"], tokenizer=known)
    assert known.pad_token is None, "the tokenizer is not changed"
    alone = overt.trace(made, "the key to cabinets", tokenizer=known)
    torch.testing.assert_close(traced.flow()[:1], alone.flow(), atol=1e-6, rtol=1e-5)
    assert traced.kind == "causal"


def test_decoders_are_given_text_too() -> None:
    config = {**PAIR, "vocab_size": len(WORDS)}
    made = build(hf.BartForConditionalGeneration, lambda: hf.BartConfig(**config))()
    traced = overt.trace(made, "the key to cabinets", decoder="key lies here", tokenizer=tokenizer())
    assert traced.tokens[0][6:] == ["[CLS]", "[CLS]", "key", "lies", "here", "[SEP]"]
    assert traced.rollout().shape == (1, 3, 6, 12)
    with pytest.raises(ValueError, match="decoder must be text or token ids, got float"):
        overt.trace(made, "the key", decoder=1.5, tokenizer=tokenizer())


@pytest.mark.parametrize("text", ["", [], ["the", ""]])
def test_empty_text_is_refused(text: Any) -> None:
    made = llama_like("Llama", vocab_size=len(WORDS))()
    with pytest.raises(ValueError, match=r"inputs must (hold|be) text"):
        overt.trace(made, text, tokenizer=tokenizer("llama"))


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def test_the_command_prints_a_table_and_saves(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "t.safetensors"
    asked = ["trace", "the key to [b]cabinets", "--model", str(folder), "--out", str(out)]
    result = runner.invoke(app, [*asked, "--method", "flow", "--method", "blankout"], env={"COLUMNS": "120"})
    assert result.exit_code == 0, result.output
    text = plain(result.output)
    assert "encoder, layer 3 of 3, what '[CLS]' draws on" in text
    for word in ("the", "key", "flow", "blank-out", "[SEP]", "◂"):
        assert word in text
    assert overt.Trace.load(out).tokens[0][1] == "the"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--method", "magic"], "--method must be one of 'raw', 'rollout'"),
        (["--mixing", "magic"], "--mixing must be one of 'attention'"),
        (["--layer", "7"], "layers must lie in 0 to 2"),
        (["--query", "99"], "queries must lie in 0 to"),
        (["--residual", "2"], r"residual must lie in \[0, 1\]"),
        (["--out", "trace.json"], r"--out must end in \.html \(a page\) or \.safetensors"),
    ],
)
def test_mistakes_on_the_command_line(folder: Path, more: list[str], message: str) -> None:
    result = runner.invoke(app, ["trace", "the key", "--model", str(folder), *more])
    assert result.exit_code != 0
    assert isinstance(result.exception, ValueError)
    assert re.search(message, str(result.exception))


@pytest.mark.slow
def test_a_page_holds_every_text_by_every_model(folder: Path, tmp_path: Path) -> None:
    made = build(hf.BertForSequenceClassification, lambda: hf.BertConfig(**TEXT))()
    overt.attach(made, overt.Evolving(), overt.Bayesian())
    made.save_pretrained(tmp_path / "both")
    tokenizer().save_pretrained(tmp_path / "both")
    models = ["--model", str(folder), "--model", str(tmp_path / "both")]
    result = runner.invoke(
        app, ["trace", "the key", "the <cabinets>", *models, "--out", str(tmp_path / "p.html")]
    )
    assert result.exit_code == 0, result.output
    assert "open it in any browser" in plain(result.output)
    text = (tmp_path / "p.html").read_text()
    index = json.loads(re.findall(r'id="overt-index">(.*?)</script>', text)[0])
    names = [entry["name"] for entry in index["traces"]]
    words = ("the key", "the <cabinets>")
    assert names == [f"{one} · {two}" for one in (folder.name, "both") for two in words]
    assert "<cabinets>" not in text, "tokens are escaped"
    plain_one, both = index["traces"][0], index["traces"][2]
    assert "part convolution" in both["fields"]
    assert both["samples"] == 20
    assert "samples" not in plain_one
    assert plain_one["heads"] == TEXT["num_attention_heads"]

    result = runner.invoke(
        app, ["trace", "a", "b", "--model", str(folder), "--out", str(tmp_path / "t.safetensors")]
    )
    assert "stores one trace: give one text and one model" in str(result.exception)
    result = runner.invoke(
        app, ["trace", "a", "--model", str(folder), "--out", str(tmp_path / "no" / "p.html")]
    )
    assert "there is no folder" in str(result.exception)


def test_a_table_is_the_same_with_a_page_and_without(folder: Path, tmp_path: Path) -> None:
    asked = ["trace", "the key", "--model", str(folder), "--mixing", "norm"]
    one = runner.invoke(app, asked, env={"COLUMNS": "120"})
    two = runner.invoke(app, [*asked, "--out", str(tmp_path / "p.html")], env={"COLUMNS": "120"})
    assert plain(two.output).startswith(plain(one.output).rstrip())


def test_text_is_no_markup(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "p[red].html"
    result = runner.invoke(app, ["trace", "the", "key [/dim] to", "--model", str(folder), "--out", str(out)])
    assert result.exit_code == 0, result.exception
    assert "key [/dim] to: encoder" in plain(result.output)
    assert "p[red].html" in plain(result.output).replace("\n", "")
    assert out.is_file()


@pytest.mark.slow
def test_a_figure_from_the_command(folder: Path, tmp_path: Path) -> None:
    asked = ["plot", "the key to cabinets", "--model", str(folder), "--out", str(tmp_path / "strip.svg")]
    result = runner.invoke(app, asked)
    assert result.exit_code == 0, result.output
    assert "cabinets" in (tmp_path / "strip.svg").read_text()
    result = runner.invoke(app, [*asked, "--view", "magic"])
    assert "--view must be one of 'strip', 'graph'" in str(result.exception)


def test_the_server_names_what_it_cannot_serve(folder: Path) -> None:
    result = runner.invoke(app, ["serve", "--model", "./nowhere", "--port", "0"])
    assert "--model ./nowhere must be a folder with config.json" in str(result.exception)
    result = runner.invoke(app, ["serve", "--model", str(folder), "--model", str(folder), "--port", "0"])
    assert "another model is already named" in str(result.exception)


def test_a_folder_that_is_no_model_is_named() -> None:
    result = runner.invoke(app, ["trace", "the key", "--model", "./nowhere"])
    assert isinstance(result.exception, FileNotFoundError)
    assert "--model ./nowhere must be a folder with config.json" in str(result.exception)


def test_what_is_there_but_is_no_model_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    Path("words.txt").write_text("the key")
    for name in ("empty", "words.txt", ""):
        result = runner.invoke(app, ["trace", "the key", "--model", name])
        assert isinstance(result.exception, FileNotFoundError)
        assert "must be a folder with config.json" in str(result.exception)


def test_a_name_that_the_hub_does_not_give_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any, **__: Any) -> Any:
        raise OSError("no such model\nread the documentation")

    monkeypatch.setattr(hf.PreTrainedConfig, "get_config_dict", missing)
    result = runner.invoke(app, ["trace", "the key", "--model", "nowhere/x"])
    assert isinstance(result.exception, OSError)
    assert str(result.exception) == (
        "--model nowhere/x is not a folder, and cannot be had from the hub: no such model"
    )


def test_weights_that_are_cut_off_are_named(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "cut")
    weights = tmp_path / "cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    result = runner.invoke(app, ["trace", "the key", "--model", str(tmp_path / "cut")])
    assert isinstance(result.exception, OSError)
    assert re.search(r"--model .*cut: its weights cannot be read", str(result.exception))


def test_a_target_is_for_encoder_decoders(folder: Path) -> None:
    result = runner.invoke(app, ["trace", "the key", "--model", str(folder), "--decoder", "the"])
    assert isinstance(result.exception, ValueError)
    assert "BertForSequenceClassification is not one: leave it out" in str(result.exception)


def test_a_picture_that_is_not_there_is_no_sentence(folder: Path) -> None:
    result = runner.invoke(app, ["trace", "nowhere.png", "--model", str(folder)])
    assert isinstance(result.exception, FileNotFoundError)


def test_a_picture_without_pillow_names_the_extra(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.png").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "PIL", None)
    result = runner.invoke(app, ["trace", str(tmp_path / "a.png"), "--model", str(folder)])
    assert str(result.exception) == "PIL is required but not installed: pip install 'overt[view]'"


def test_attached_models_are_opened_with_their_mechanisms(model: Any, tmp_path: Path) -> None:
    made = build(hf.BertForSequenceClassification, lambda: hf.BertConfig(**TEXT))()
    overt.attach(made, overt.Evolving())
    made.save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    result = runner.invoke(app, ["trace", "the key", "--model", str(tmp_path)])
    assert result.exit_code == 0, result.output
    del model


def test_pictures_are_traced_by_the_command(tmp_path: Path) -> None:
    pytest.importorskip("PIL", reason="needs pillow")
    from PIL import Image

    config = {**SMALL, "intermediate_size": 40, "image_size": 24, "patch_size": 8, "num_labels": 2}
    made = build(hf.ViTForImageClassification, lambda: hf.ViTConfig(**config))()
    picture = Image.new("RGB", (24, 24), (200, 30, 30))

    class Processor:
        def __call__(self, images: Any, return_tensors: str) -> dict[str, torch.Tensor]:
            assert return_tensors == "pt"
            return {"pixel_values": torch.rand(len(images), 3, 24, 24)}

    traced = overt.trace(made, picture, processor=Processor())
    assert traced.grid == (3, 3)
    with pytest.raises(ValueError, match="need its image processor"):
        overt.trace(made, picture)
    del tmp_path


def test_bars_are_as_long_as_their_values() -> None:
    assert bar(1.0, 1.0, 4) == "████"
    assert bar(0.5, 1.0, 4) == "██  "
    assert bar(0.0, 0.0, 4) == "    "
    assert bar(-1.0, 1.0, 4) == "    "


def test_tokens_cannot_move_the_cursor_or_paint() -> None:
    from rich.console import Console

    made = overt.Encoder(16, 2, 1)
    words = [["[red]x[/red]", "\x1b[31m", "ok"]]
    traced = overt.trace(made, {"x": torch.randn(1, 3, 16)}, tokens=words)
    console = Console(record=True, width=100, file=io.StringIO())
    console.print(table(traced))
    text = console.export_text()
    assert "[red]x[/red]" in text
    assert "\x1b[31m" not in text


def test_unknown_words_are_words_whichever_way_they_come(model: Any) -> None:
    known = tokenizer()
    by_text = overt.trace(model, "the zebra lies", tokenizer=known)
    by_ids = overt.trace(model, dict(known("the zebra lies", return_tensors="pt")), tokenizer=known)
    assert by_text.tokens[0][2] == "[UNK]"
    assert by_text.special.tolist() == by_ids.special.tolist() == [[True, False, False, False, True]]


def test_a_folder_without_a_vocabulary_has_no_tokenizer(tmp_path: Path) -> None:
    """transformers makes up one, which calls every token None."""
    config = hf.BertConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=4, intermediate_size=16
    )
    hf.BertModel(config).save_pretrained(tmp_path)
    model = hf.BertModel.from_pretrained(tmp_path)
    assert overt.trace(model, torch.tensor([[5, 6, 30]])).tokens == [["5", "6", "30"]]
    with pytest.raises(
        ValueError, match=r"no tokenizer in .* \(the folder has no tokenizer files\): give tokenizer="
    ):
        overt.trace(model, "a word")

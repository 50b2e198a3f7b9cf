"""Translate text with a trained model."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Any

import typer

from overt._extras import need
from overt._files import check_folder, write_whole
from overt.cli.inputs import open_model
from overt.cli.shared import app
from overt.data.pairs import read_lines
from overt.models.folders import CONFIG
from overt.models.seq2seq import MODEL_TYPE
from overt.recipes import lstm_training
from overt.recipes._training import torch_device
from overt.recipes.translation_training import CARD, translate_lines


def run(text: str, model: str, beam: int = 5, device: str = "auto", out: Path | None = None) -> list[str]:
    """Translate a text, or the lines of a file; print the translations or write them to `out`."""
    from transformers import AutoTokenizer

    if beam < 1:
        raise ValueError(f"--beam must be a whole number of at least 1, got {beam}")
    where = torch_device(device)
    if out is not None:
        check_folder("--out", out)
    lines = _read(text)
    if _is_lstm(model):
        translations = lstm_training.translate_lines(Path(model), lines, _card(model), beam, where)
        _show(translations, out)
        return translations
    opened = open_model(model)
    if not getattr(opened.config, "is_encoder_decoder", False) or not hasattr(opened, "generate"):
        raise ValueError(
            f"--model {model} is a {type(opened).__name__}, which does not translate: give a folder that "
            "`overt reproduce ea-table-5` wrote, or another encoder–decoder with a language model's head"
        )
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    translations = translate_lines(opened.to(where), tokenizer, lines, _card(model), beam)
    _show(translations, out)
    return translations


def _show(translations: list[str], out: Path | None) -> None:
    from rich.console import Console

    if out is None:
        for line in translations:
            typer.echo(line)
        return
    write_whole(out, "\n".join(translations) + "\n")
    line = f"{len(translations)} translations in {out}"
    Console().print(line, style="dim", markup=False, soft_wrap=True)


def _is_lstm(model: str) -> bool:
    """Whether a folder has the LSTM of `models.seq2seq`."""
    path = Path(model) / CONFIG
    if not path.is_file():
        return False
    settings = json.loads(path.read_text())
    return isinstance(settings, dict) and settings.get("model_type") == MODEL_TYPE


def _read(text: str) -> list[str]:
    """The text, or the lines of the file at that path."""
    looks_like_path = re.fullmatch(r"\S+(/\S*|\.[a-z]{2,4})", text) is not None
    path = Path(text)
    try:
        is_file = path.is_file()
    except OSError:  # too long for a path
        is_file = False
    if not is_file:
        if looks_like_path:
            raise FileNotFoundError(f"file {text} does not exist")
        if not text.strip():
            raise ValueError("nothing to translate: give a text, or a file with one sentence per line")
        return [text]
    lines = read_lines(path)
    if not any(line.strip() for line in lines):
        raise ValueError(f"file {text} has no text")
    return lines


def _card(model: str) -> dict[str, Any]:
    """What a model's folder says about its text; models from elsewhere say nothing."""
    path = Path(model) / CARD
    if not path.is_file():
        return {}
    card = json.loads(path.read_text())
    if not isinstance(card, dict):
        raise ValueError(f"{path} must hold an object, got {type(card).__name__}")
    if card.get("tokenised"):
        need("sacremoses", "translation")
    return card


@app.command(rich_help_panel="Read attention")
def translate(
    text: Annotated[str, typer.Argument(help="Sentence, or path of a file with one sentence per line.")],
    model: Annotated[str, typer.Option(help="Folder with weights and tokenizer, or a name on the hub.")],
    beam: Annotated[int, typer.Option(help="Beams of the beam search; 1 is greedy.")] = 5,
    device: Annotated[str, typer.Option(help="Device: cpu, cuda or auto.")] = "auto",
    out: Annotated[Path | None, typer.Option(help="File for the translations. Default: print them.")] = None,
) -> None:
    """Translate a sentence or a file with a model that `overt reproduce` trained, or another one."""
    run(text, model, beam, device, out)

"""What mechanisms cost in translation: training steps and beam search of Marian, training steps of the LSTM.

Each number is the median over rounds in which the forms take turns, in one process. `--data DIR` reads
Multi30k from there; without it, the made-up language stands in. `--runs FOLDER` takes the weights that
`overt reproduce` trained (runs/translation/multi30k-de-en); without it, or where a row is missing, they are
random. Marian runs in bfloat16 on a GPU, the LSTM in the float32 of its recipe and in bfloat16.
"""

from __future__ import annotations

import argparse
import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import overt
from generate import milliseconds
from overt._modes import any_shape
from overt.data import pairs, reordered
from overt.data.subwords import PAD_ID
from overt.models.seq2seq import Seq2Seq
from overt.models.word_by_word import IGNORED
from overt.recipes import bam_translation, ea_translation, lstm_training, translation_training
from overt.recipes._rows import folder_name
from overt.recipes.lstm_training import LstmRow, LstmTraining, vocabularies
from overt.recipes.translation_runs import tokenizer_of
from overt.recipes.translation_training import Encoded, encode, padded
from ratios import Report, compared

BOUND = "no attention, one nn.LSTM"
# The most that each may cost, as a ratio.
STEP_TARGET, SEARCH_TARGET, LSTM_TARGET = {"EA-Lite": 1.15}, {"EA-Lite": 2.0}, {"BAM-WC": 1.2}
DROPOUT = 0.2


class WithoutAttention(nn.Module):
    """The LSTM translator's encoder and decoder without attention: nothing waits for the word before it."""

    step: Tensor

    def __init__(self, like: Seq2Seq) -> None:
        super().__init__()
        memory, decoder = 2 * like.encoder.lstm.hidden_size, like.upper.hidden_size
        embedding = like.target_words.embedding_dim
        self.source_words, self.target_words, self.encoder = (
            like.source_words,
            like.target_words,
            like.encoder,
        )
        self.decoder = nn.LSTM(embedding + memory, decoder, 2, batch_first=True, dropout=like.dropout)
        self.output, self.generator, self.dropout = like.output, like.generator, like.dropout
        self.register_buffer("step", torch.zeros((), dtype=torch.int64))

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, decoder_input_ids: Tensor, labels: Tensor
    ) -> dict[str, Tensor]:
        """The loss per target word; the context is the mean of what was read."""
        lengths = attention_mask.sum(dim=1).cpu()
        memory = self.encoder(self._dropped(self.source_words(input_ids)), lengths)
        context = memory.mean(dim=1, keepdim=True).expand(-1, labels.shape[1], -1)
        words = self._dropped(self.target_words(decoder_input_ids))
        queries, _ = self.decoder(torch.cat([words, context], dim=-1))
        hidden = self._dropped(torch.tanh(self.output(torch.cat([queries, context], dim=-1))))
        return {"loss": F.cross_entropy(self.generator(hidden).mT, labels, ignore_index=IGNORED)}

    def _dropped(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training)


def means_in_turns(forms: Mapping[str, Callable[[], list[float]]], rounds: int) -> dict[str, list[float]]:
    """Form → mean milliseconds of an update in each round."""
    seen = translation_training.in_turns(forms, rounds)
    return {form: [statistics.fmean(times) for times in each] for form, each in seen.items()}


# --- Marian ---


def trained(folder: Path | None, row: str) -> Path | None:
    """The folder of a row's trained network, if there is one."""
    if folder is None:
        return None
    place = folder / folder_name(row) / "seed-0" / "model"
    return place if (place / "model.safetensors").is_file() else None


def weights_of(options: argparse.Namespace, names: Sequence[str]) -> str:
    """Whether the weights of rows are trained."""
    without = [name for name in names if trained(options.runs, name) is None]
    if len(without) in (0, len(names)):
        return "random" if without else "trained"
    return f"trained (random: {', '.join(without)})"


def targets(options: argparse.Namespace, ratios: dict[str, float]) -> dict[str, float]:
    """The targets, which are for the networks of the papers on a GPU."""
    return ratios if options.device == "cuda" and not options.small else {}


def marian_of(name: str, data: Encoded, options: argparse.Namespace) -> Any:
    """A row's Marian, never attached where it is plain."""
    place = trained(options.runs, name)
    row = ea_translation.ROWS[name]
    if place is None:
        row = ea_translation.small(row) if options.small else row
        model: Any = translation_training.network(row, data.tokenizer.get_vocab_size(), DROPOUT, 0)
        for parameter_name, parameter in model.named_parameters():
            if ".overt." in parameter_name:  # as those of a trained model, they do something
                nn.init.normal_(parameter, std=0.1)
        return model
    if row.mechanisms:
        return overt.load(place)
    from transformers import MarianMTModel

    return MarianMTModel.from_pretrained(place, attn_implementation="sdpa")


def time_marian(data: Encoded, options: argparse.Namespace, report: Report) -> None:
    """Training steps and beam search of Lite and EA-Lite."""
    names = ("Lite", "EA-Lite")
    models = {name: marian_of(name, data, options) for name in names}
    weights = weights_of(options, names)
    training = ea_translation.plan(options.corpus, {"steps": None, "tokens": options.tokens})

    def steps(name: str) -> Callable[[], list[float]]:
        row = ea_translation.ROWS[name]
        return lambda: translation_training.step_times(
            data, row, training, options.device, options.updates, models[name]
        )

    seen = means_in_turns({name: steps(name) for name in names}, options.rounds)
    lines = compared(seen, "Lite", targets(options, STEP_TARGET))
    columns = ["ms", "× Lite", "spread", "target"]
    title = f"Training step of Marian Lite, {training.tokens:,} target tokens, {weights} weights"
    report.table(title, columns, [[form, *cells] for form, cells in lines])

    half = torch.bfloat16 if options.device == "cuda" else torch.float32
    models = {name: marian_of(name, data, options).eval().to(options.device, half) for name in names}
    sources = [source for source, _ in data.test[: options.sentences]]
    input_ids = padded(sources, PAD_ID).to(options.device)
    inputs = {"input_ids": input_ids, "attention_mask": input_ids.ne(PAD_ID).long()}
    lengths = {}

    @any_shape()
    @torch.no_grad()
    def search(name: str) -> None:
        found = models[name].generate(
            **inputs, num_beams=5, do_sample=False, max_new_tokens=options.new_tokens
        )
        lengths[name] = found.shape[1] - 1
        if options.device == "cuda":
            torch.cuda.synchronize()

    forms: dict[str, Callable[[], object]] = {name: partial(search, name) for name in names}
    lines = compared(milliseconds(forms, options.rounds), "Lite", targets(options, SEARCH_TARGET))
    title = (
        f"Beam search of Marian Lite, beam 5, {len(sources)} sentences, at most {options.new_tokens} new "
        f"tokens, {weights} weights"
    )
    columns = ["ms", "× Lite", "spread", "target", "tokens of the longest"]
    report.table(title, columns, [[form, *cells, str(lengths[form])] for form, cells in lines])


# --- The LSTM ---


def lstm_of(name: str, data: Encoded, training: LstmTraining, options: argparse.Namespace) -> nn.Module:
    """A row's network; for `BOUND`, the one without attention."""
    row = bam_translation.ROWS["soft" if name == BOUND else name]
    row = bam_translation.small(row) if options.small else row
    place = trained(options.runs, name)
    model = (
        Seq2Seq.load(place) if place else lstm_training.network(row, vocabularies(data), training.dropout, 0)
    )
    return WithoutAttention(model) if name == BOUND else model


def time_lstm(data: Encoded, options: argparse.Namespace, report: Report) -> None:
    """Training steps and words per second of each attention."""
    training = bam_translation.plan(options.corpus, {"steps": None, "batch": options.batch})
    batches = lstm_training.sentence_batches(data.train, training.batch, 0)
    schedule = translation_training.Schedule(len(batches), options.updates + 1, 0)
    timed = [batches[schedule[number][0]] for number in range(1, options.updates + 1)]
    words = sum(len(data.train[pair][1]) for batch in timed for pair in batch) / options.updates
    names = [*bam_translation.ROWS, BOUND]
    weights = weights_of(options, [name for name in names if name != BOUND])
    row = LstmRow("soft")  # the models are given
    for bf16 in (False, True) if options.device == "cuda" else (False,):
        forms = {}
        for name in names:
            model = lstm_of(name, data, training, options)
            arguments = data, row, training, options.device, options.updates, model, bf16
            forms[name] = partial(lstm_training.step_times, *arguments)
        seen = means_in_turns(forms, options.rounds)
        lines = []
        for form, cells in compared(seen, "soft", targets(options, LSTM_TARGET)):
            rate = 1000 * words / statistics.median(seen[form])
            lines.append([form, *cells, f"{rate:,.0f}"])
        columns = ["ms", "× soft", "spread", "target", "target words per second"]
        precision = "bfloat16" if bf16 else "float32"
        title = f"Training step of the LSTM, {training.batch} pairs, {precision}, {weights} weights"
        report.table(title, columns, lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, help="folder with multi30k")
    parser.add_argument("--runs", type=Path, help="folder of trained rows")
    parser.add_argument("--tokens", type=int, default=4096, help="target tokens of Marian's batches")
    parser.add_argument("--batch", type=int, default=64, help="pairs of the LSTM's batches")
    parser.add_argument("--updates", type=int, default=20, help="in each round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sentences", type=int, default=250)
    parser.add_argument("--new-tokens", type=int, default=24)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--small", action="store_true", help="the stand-in's small networks")
    parser.add_argument("--only", choices=("marian", "lstm"), help="one half of it")
    parser.add_argument("--report", type=Path, help="file for the tables")
    options = parser.parse_args()
    for name in ("tokens", "batch", "updates", "rounds", "sentences", "new_tokens"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {getattr(options, name)}")
    for name in ("data", "runs"):
        if (folder := getattr(options, name)) is not None and not folder.is_dir():
            parser.error(f"--{name} must be a folder, got {folder}")
    options.corpus = pairs.load(pairs.MULTI30K, options.data) if options.data else reordered.corpus()
    tokenizer, _ = tokenizer_of(options.corpus)
    where = torch.cuda.get_device_name() if options.device == "cuda" else f"{torch.get_num_threads()} threads"
    report = Report()
    report.say(
        f"torch {torch.__version__}, {where}, {platform.machine()}; {options.corpus.name}; medians of "
        f"{options.rounds} rounds of {options.updates} updates, or of {options.rounds} searches"
    )
    if options.only != "lstm":
        time_marian(encode(options.corpus, tokenizer, 250), options, report)
    if options.only != "marian":
        time_lstm(encode(options.corpus, tokenizer, 125), options, report)
    if options.report is not None:
        options.report.write_text("\n".join(report.lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

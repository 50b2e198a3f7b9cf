"""What the recipes of translation share: data and vocabulary, rows and seeds, and the runs side by side."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from html import unescape
from pathlib import Path
from typing import Any, NamedTuple

from overt._extras import need
from overt._files import write_whole
from overt._workers import Tell, Throttled
from overt.data import pairs, reordered, subwords
from overt.data.files import data_folder, read_text
from overt.data.pairs import Corpus
from overt.judge.bleu import Bleu, detokenise, paired_bootstrap, plain_bleu, tokenise, tokenised_bleu
from overt.recipes import lstm_training, translation_training
from overt.recipes._recipe import WORKERS, Option, Outcome, Request
from overt.recipes._rows import Task, folder_name, look_up, rows_of, stored_result
from overt.recipes._runs import finish_run, finished, run_record
from overt.recipes._training import (
    be_quiet,
    hardware,
    is_main_process,
    one_thread,
    processes,
    torch_device,
    versions,
)
from overt.recipes.lstm_training import LstmRow, LstmTraining
from overt.recipes.translation_training import GREEDY, WEIGHTS, Encoded, Row, Training, encode

HYPOTHESES = "test.txt"  # a run's translations of the test set
PIECES = {pairs.IWSLT14: 10_000, reordered.NAME: 3000}
# Pieces by the number of training pairs, for other corpora: at most so many pairs → pieces.
PIECES_BY_PAIRS = ((100_000, 8000), (1_000_000, 16_000), (math.inf, 32_000))
OPTIONS = {
    "dataset": Option(
        "multi30k, iwslt14 or a folder of train, valid and test files", pairs.MULTI30K, names=True
    ),
    "direction": Option("source and target language", "de-en", names=True),
    "rows": Option("rows to train, separated by commas; all by default", moves=False),
    "steps": Option("most updates of one training; by default those of the data set", least=1),
    "codes": Option("file of BPE codes; by default those of the data set, or new ones"),
    "workers": WORKERS,
}


class Runs(NamedTuple):
    """Finished runs, and what they were trained on."""

    outcome: Outcome
    data: Encoded


def kind_of(row: Row | LstmRow) -> Any:
    """The module that trains, measures and saves the networks of a row."""
    return lstm_training if isinstance(row, LstmRow) else translation_training


def corpus_of(request: Request) -> Corpus:
    """The data that a request names, or the stand-in where there are none."""
    dataset, direction = request.options["dataset"], request.options["direction"]
    pairs.languages(direction)
    if pairs.has(dataset, request.data) or data_folder(request.data) is not None:
        return pairs.load(dataset, request.data, direction)
    request.console.print(
        f"[yellow]no data: give --data DIR for {dataset}. A made-up language stands in, and the numbers say "
        "nothing about the paper's.[/yellow]"
    )
    return reordered.corpus()


def tokenizer_of(corpus: Corpus, codes: str | None = None) -> tuple[Any, dict[str, Any]]:
    """The vocabulary of a corpus, and its description."""
    lines = [side for pair in corpus.train for side in pair]
    if codes is not None:
        if corpus.was_in_pieces:
            raise ValueError(
                f"--codes {codes} would split words again: the files of {corpus.name} are already split into "
                "BPE pieces (@@)"
            )
        if not Path(codes).is_file():
            raise FileNotFoundError(f"--codes must be a file of BPE codes, got {codes}")
        tokenizer, origin = subwords.from_codes(read_text(Path(codes)), lines), "codes given"
    elif corpus.codes is not None:
        tokenizer, origin = subwords.from_codes(corpus.codes, lines), "published codes"
    else:
        by_pairs = next(pieces for most, pieces in PIECES_BY_PAIRS if len(corpus.train) <= most)
        tokenizer, origin = subwords.train(lines, PIECES.get(corpus.name, by_pairs)), "trained"
    description = {
        "origin": origin,
        "pieces": tokenizer.get_vocab_size(),
        "sha256": subwords.sha256(tokenizer),
    }
    return tokenizer, description


def run_rows(
    request: Request,
    rows: Mapping[str, Row | LstmRow],
    default: Sequence[str],
    baselines: Mapping[str, str],
    plan: Callable[[Corpus, Mapping[str, Any]], Training | LstmTraining],
    small: Callable[[Any], Any],
    partly: bool = True,
) -> Runs:
    """Train the rows and seeds that neither a folder of a run nor the earlier result file holds.

    Args:
        request: of the run.
        rows: all rows of the table.
        default: those that are trained if none are named.
        baselines: row → the row that it is compared with.
        plan: corpus and options → settings of the training.
        small: a row → its network for the stand-in.
        partly: as for `Known.fill`.
    """
    need("sacrebleu", "translation")
    need("accelerate", "translation")
    console, options = request.console, request.options
    processes(request.device)  # several, if started by `accelerate launch`, meet before folders are made
    chosen = rows_of(options["rows"], rows, default)
    corpus = corpus_of(request)
    tokenizer, vocabulary = tokenizer_of(corpus, options["codes"])
    training = plan(corpus, options)
    data = encode(corpus, tokenizer, training.longest)
    device = torch_device(request.device).type
    common = {
        "data": corpus.sha256(),
        "vocabulary": vocabulary["sha256"],
        "training": training.settings(),
        "beam": options["beam"],
        "references": "raw" if corpus.references else "tokenised" if corpus.tokenised else "plain",
        "precision": "bfloat16" if device == "cuda" and isinstance(training, Training) else "float32",
    }
    place = request.out / f"{corpus.name}-{corpus.direction}"
    rows = {name: small(row) if corpus.stand_in else row for name, row in rows.items()}
    known = look_up(request, rows, chosen, place, common, training, device)
    console.print(
        f"{corpus.name} {corpus.direction}: {len(data.train):,} training pairs ({data.left_out} left out, "
        f"too long or empty), {len(data.valid):,} for validation, {len(data.test):,} for testing; "
        f"{vocabulary['pieces']:,} pieces ({vocabulary['origin']})"
    )
    known.fill(
        request,
        data,
        perform,
        milliseconds=lambda task: fastest_update(task, data),
        line=lambda numbers: f"BLEU {numbers['bleu']:.2f}",
        prepare=one_thread,
        together=processes(request.device) > 1,
        partly=partly,
    )
    bootstrap(known.numbers, baselines, data, place)
    config = {
        "data": corpus.describe(),
        "left_out": data.left_out,
        "vocabulary": vocabulary,
        "training": training.settings(),
        "beam": options["beam"],
        "rows": {name: row.settings() for name, row in rows.items()},
    }
    return Runs(known.outcome(config, rows, corpus.stand_in), data)


def fastest_update(task: Task, data: Encoded) -> float:
    """Milliseconds of a row's fastest update, as others include compilation."""
    times = kind_of(task.row).step_times(data, task.row, task.training, task.device, updates=4)
    return float(min(times))


def perform(task: Task, shared: Encoded, tell: Tell) -> dict[str, Any]:
    """Train, translate, and store model, translations and numbers in the task's folder."""
    be_quiet()
    told = Throttled(tell, every=20)
    began = time.perf_counter()
    kind = kind_of(task.row)
    model, numbers = kind.train(task.folder, shared, task.row, task.training, task.seed, task.device, told)
    told.rest(numbers["updates"])
    trained = time.perf_counter()
    if is_main_process():
        numbers |= measure(model, shared, task)
        numbers["seconds"] = {"training": trained - began, "testing": time.perf_counter() - trained}
        kind.save(model.cpu(), shared, task.folder / "model")
        numbers["run"] = run_record(task.settings, task.command, hardware(task.device), versions())
        finish_run(task.folder, numbers)
        shutil.rmtree(task.folder / WEIGHTS)
    return stored_result(task.folder)


def measure(model: Any, data: Encoded, task: Task) -> dict[str, Any]:
    """BLEU of translations, and of greedy translations of training sentences, as a check; and losses."""
    kind = kind_of(task.row)
    texts, greedy, numbers = kind.measure(
        model, data, task.training, task.settings["beam"], task.device == "cuda"
    )
    write_whole(task.folder / HYPOTHESES, "\n".join(texts) + "\n")
    known = data.tokenizer.decode_batch([target for _, target in data.train[:GREEDY]])
    tokenised, plain = tokenised_score(texts, data.references, data), plain_score(texts, data)
    return {
        **numbers,
        "bleu": tokenised.score,
        "bleu_signature": tokenised.signature,
        "bleu_13a": plain.score,
        "bleu_13a_signature": plain.signature,
        "bleu_of_training": tokenised_score(greedy, known, data).score,
    }


def tokenised(texts: Sequence[str], data: Encoded) -> list[str]:
    """Text with words and punctuation marks separated, as it is where the corpus is like that."""
    return list(texts) if data.tokenised else tokenise(texts, data.target)


def tokenised_score(texts: Sequence[str], references: Sequence[str], data: Encoded) -> Bleu:
    """BLEU on tokenised text."""
    return tokenised_bleu(tokenised(texts, data), tokenised(references, data))


def plain_score(texts: Sequence[str], data: Encoded) -> Bleu:
    """BLEU with 13a, of detokenised text where it is tokenised; in lower case where the corpus is."""
    if data.tokenised:
        references = data.raw_references or detokenise(data.references, data.target)
        texts = detokenise(texts, data.target)
    else:  # entities in ordinary text are the text's own
        references, texts = ([unescape(line) for line in lines] for lines in (data.references, texts))
    return plain_bleu(texts, references, lowercase=data.lowercase)


def bootstrap(
    numbers: dict[tuple[str, int], dict[str, Any]], baselines: Mapping[str, str], data: Encoded, folder: Path
) -> None:
    """Add the paired bootstrap of each row against its baseline with the same seed, where both have texts."""
    for (name, seed), entry in numbers.items():
        baseline = baselines.get(name)
        texts = []
        for row in (baseline, name):
            place = folder / folder_name(row or "") / f"seed-{seed}"
            known = numbers.get((row or "", seed))
            # The folder may hold another run than the one in the result file.
            here = None if known is None else finished(place, known["run"]["settings"])
            if known is not None and here is not None and here["run"] == known["run"]:
                path = place / HYPOTHESES
                texts += [path.read_text(encoding="utf-8").split("\n")[:-1]] if path.exists() else []
        if len(texts) == 2:
            one, other, references = (tokenised(lines, data) for lines in (*texts, data.references))
            entry["bootstrap"] = {"baseline": baseline, "p": paired_bootstrap(references, one, other)}

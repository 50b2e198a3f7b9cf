"""What the recipes of translation share: data and vocabulary, rows and seeds, and the runs side by side."""

from __future__ import annotations

import json
import math
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import unescape
from pathlib import Path
from typing import Any

import torch

from overt import _check
from overt._extras import need
from overt._files import write_whole
from overt.data import pairs, reordered, subwords
from overt.data.files import data_folder, read_text
from overt.data.pairs import Corpus
from overt.judge.bleu import Bleu, detokenise, paired_bootstrap, plain_bleu, tokenise, tokenised_bleu
from overt.recipes import lstm_training, translation_training
from overt.recipes._recipe import Option, Outcome, Request
from overt.recipes._runs import RESULT, earlier_result, finish_run, finished, run_record, stored_numbers
from overt.recipes._training import (
    hardware,
    is_main_process,
    progress_bar,
    torch_device,
    versions,
    wait_for_everyone,
)
from overt.recipes._workers import Tell, cores, side_by_side
from overt.recipes.lstm_training import LstmRow, LstmTraining
from overt.recipes.translation_training import GREEDY, WEIGHTS, Encoded, Row, Training, encode, processes

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
    "workers": Option("trainings side by side; by default 8 on a GPU and 1 on a CPU", least=1, moves=False),
}


@dataclass(frozen=True)
class Task:
    """One training: a row with one seed.

    Attributes:
        name: of the row.
        seed: of initial weights, batches, dropout and noise.
        row: network and mechanisms.
        training: settings of the training.
        beam: beams of the beam search.
        folder: for model and numbers.
        device: "cpu" or "cuda".
        settings: everything that the numbers depend on.
        command: of the run.
    """

    name: str
    seed: int
    row: Row | LstmRow
    training: Training | LstmTraining
    beam: int
    folder: Path
    device: str
    settings: dict[str, Any]
    command: str = ""


@dataclass(frozen=True)
class Runs:
    """Finished runs.

    Attributes:
        per_seed: seed → row → numbers.
        config: settings that all share, for the result file.
        stand_in: whether the data were the package's own.
        continued: whether some numbers are an earlier result file's.
        drops: whether the earlier result file has runs with other settings, which are left out.
        measured: whether some numbers are from no result file.
        data: what they were trained on.
    """

    per_seed: dict[int, dict[str, Any]]
    config: dict[str, Any]
    stand_in: bool
    continued: bool
    drops: bool
    measured: bool
    data: Encoded

    @property
    def outcome(self) -> Outcome:
        """For the result file."""
        return Outcome(self.config, self.per_seed, self.stand_in, self.continued, self.drops, self.measured)


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
) -> Runs:
    """Train the rows and seeds that neither a folder of a run nor the earlier result file holds.

    Args:
        request: of the run.
        rows: all rows of the table.
        default: those that are trained if none are named.
        baselines: row → the row that it is compared with.
        plan: corpus and options → settings of the training.
        small: a row → its network for the stand-in.
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
    tasks, numbers, stored, shared, dropped = [], dict[tuple[str, int], dict[str, Any]](), 0, 0, 0
    for name, row in rows.items():
        for seed in sorted({*request.stored, *range(request.seeds)}):
            settings = {**common, "row": row.settings(), "seed": seed}
            wanted = name in chosen and seed < request.seeds
            folder = place / folder_name(name) / f"seed-{seed}"
            known = None if request.fresh and wanted else stored_numbers(request.stored, name, seed, settings)
            stored += known is not None
            if known is None and wanted and not request.fresh and finished(folder, settings) is None:
                found = (stored_numbers(each, name, seed, settings) for each in request.elsewhere)
                known = next(filter(None, found), None)
                shared += known is not None
            if known is not None:
                numbers[name, seed] = known
                continue
            dropped += name in request.stored.get(seed, {}) and not wanted
            if wanted:
                result = _prepared(folder, settings, request.fresh)
                task = Task(
                    name, seed, row, training, options["beam"], folder, device, settings, request.command
                )
                if result is None:
                    tasks.append(task)
                else:
                    numbers[name, seed] = result
    console.print(
        f"{corpus.name} {corpus.direction}: {len(data.train):,} training pairs ({data.left_out} left out, "
        f"too long or empty), {len(data.valid):,} for validation, {len(data.test):,} for testing; "
        f"{vocabulary['pieces']:,} pieces ({vocabulary['origin']})"
    )
    from_files = stored + shared
    if len(numbers) > from_files:
        console.print(f"[dim]{len(numbers) - from_files} trainings are already finished[/dim]")
    if from_files:
        console.print(
            f"[dim]{from_files} trainings are in result files, with their numbers alone; --fresh trains "
            "the rows that are asked for again, and makes their models[/dim]"
        )
    if dropped:
        console.print(
            f"[yellow]{dropped} runs of the stored result have other settings, and are left out[/yellow]"
        )
    measured = len(numbers) + len(tasks) > from_files
    if tasks:
        numbers |= _train_all(tasks, data, request, training)
    bootstrap(numbers, baselines, data, place)
    config = {
        "data": corpus.describe(),
        "left_out": data.left_out,
        "vocabulary": vocabulary,
        "training": training.settings(),
        "beam": options["beam"],
        "rows": {name: row.settings() for name, row in rows.items()},
        "trained_on": sorted({entry["run"]["hardware"] for entry in numbers.values()}),
    }
    seeds = sorted({seed for _, seed in numbers})
    per_seed = {
        seed: {name: numbers[name, seed] for name in rows if (name, seed) in numbers} for seed in seeds
    }
    return Runs(per_seed, config, corpus.stand_in, stored > 0, dropped > 0, measured, data)


def _prepared(folder: Path, settings: dict[str, Any], fresh: bool) -> dict[str, Any] | None:
    """As `earlier_result`, with the first of several processes ahead of the others."""
    if is_main_process():
        result = earlier_result(folder, settings, fresh)
        wait_for_everyone()
        return result
    wait_for_everyone()
    return earlier_result(folder, settings, fresh=False)


def rows_of(text: str | None, rows: Mapping[str, object], default: Sequence[str]) -> list[str]:
    """The rows that an option names."""
    if text is None:
        return list(default)
    names = [name.strip() for name in text.split(",")]
    for name in names:
        _check.one_of("--rows", name, tuple(rows))
    return names


def folder_name(row: str) -> str:
    """A row's name as that of a folder."""
    return row.replace("/", "").replace(" ", "-").replace("×", "x")


def _train_all(
    tasks: list[Task], data: Encoded, request: Request, training: Training | LstmTraining
) -> dict[tuple[str, int], dict[str, Any]]:
    """Perform tasks, several at a time; says how long it will take."""
    console, device = request.console, tasks[0].device
    workers = request.options["workers"] or (min(8, cores()) if device == "cuda" else 1)
    workers = min(workers, len(tasks))
    one_of_each = {task.name: task for task in tasks}.values()
    milliseconds = max(  # of each row's fastest update, as others include compilation
        min(kind_of(task.row).step_times(data, task.row, task.training, device, updates=4))
        for task in one_of_each
    )
    # On a GPU, which small networks leave idle most of the time, trainings hardly slow each other down.
    rounds = math.ceil(len(tasks) / workers) * 1.3 if device == "cuda" else len(tasks)
    minutes = rounds * training.updates * milliseconds / 60_000
    console.print(
        f"{len(tasks)} training{'s' if len(tasks) > 1 else ''} of up to {training.updates:,} updates, "
        f"{workers} at a time: {duration(minutes)} at {milliseconds:.0f} ms an update"
    )
    tasks.sort(key=lambda task: task.seed)
    numbers = {}
    with progress_bar(console) as progress:
        bar = progress.add_task("training", total=training.updates * len(tasks))

        def tell(steps: int) -> None:
            progress.update(bar, advance=steps)

        for task, result in perform_all(tasks, data, workers, tell):
            numbers[task.name, task.seed] = result
            line = f"{task.name}, seed {task.seed}: BLEU {result['bleu']:.2f}"
            progress.update(bar, description=line, advance=training.updates - result["updates"])
            if not console.is_terminal:  # a log has no bar
                console.print(f"{line}, {len(numbers)} of {len(tasks)}")
    return numbers


def duration(minutes: float) -> str:
    """An estimate in words."""
    whole = round(minutes)
    return "a minute or less" if whole < 2 else f"about {whole} minutes"


def perform_all(tasks: list[Task], data: Encoded, workers: int, tell: Tell) -> Any:
    """Perform tasks in this process or in several; yield each as it finishes."""
    if workers == 1 or processes() > 1:
        for task in tasks:
            yield task, perform(task, data, tell)
    else:
        yield from side_by_side(tasks, perform, data, workers, _one_thread, tell)


def _one_thread() -> None:
    torch.set_num_threads(1)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def perform(task: Task, shared: Encoded, tell: Tell) -> dict[str, Any]:
    """Train, translate, and store model, translations and numbers in the task's folder."""
    from transformers.utils import logging

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    last = [0]

    def told(update: int) -> None:
        if update >= last[0] + 20 or update == task.training.updates:
            tell(update - last[0])
            last[0] = update

    began = time.perf_counter()
    kind = kind_of(task.row)
    model, numbers = kind.train(task.folder, shared, task.row, task.training, task.seed, task.device, told)
    trained = time.perf_counter()
    if is_main_process():
        numbers |= measure(model, shared, task)
        numbers["seconds"] = {"training": trained - began, "testing": time.perf_counter() - trained}
        kind.save(model.cpu(), shared, task.folder / "model")
        numbers["run"] = run_record(task.settings, task.command, hardware(task.device), versions())
        finish_run(task.folder, numbers)
        shutil.rmtree(task.folder / WEIGHTS)
    wait_for_everyone()
    stored: dict[str, Any] = json.loads((task.folder / RESULT).read_text())
    return stored


def measure(model: Any, data: Encoded, task: Task) -> dict[str, Any]:
    """BLEU of translations, and of greedy translations of training sentences, as a check; and losses."""
    kind = kind_of(task.row)
    texts, greedy, numbers = kind.measure(model, data, task.training, task.beam, task.device == "cuda")
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

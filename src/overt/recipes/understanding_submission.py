"""Predictions of fine-tuned models for GLUE's server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from overt.data import glue
from overt.data.glue import Row, Splits
from overt.recipes import glue_submission
from overt.recipes._rows import Numbers, folder_name
from overt.recipes._training import torch_device
from overt.recipes.text_training import encode, predict
from overt.recipes.understanding_forms import TextRow, trained_model

if TYPE_CHECKING:
    from overt.recipes._recipe import Request

DIAGNOSTIC, FROM = "AX", "MNLI"  # the diagnostic rows, and the task whose model predicts them


def check(request: Request, splits: Mapping[str, Splits]) -> None:
    """Refuse a request whose submission would fail, before anything is trained for it.

    Args:
        request: of the run.
        splits: the rows of the tasks that are asked for.
    """
    if not splits:
        raise ValueError(f"--submission needs a task of GLUE, got --tasks {request.options['tasks']}")
    if request.options["discard-models"]:
        raise ValueError("--submission needs the models that --discard-models discards: give one of the two")
    parts = {task: test_parts(task, each, request.data) for task, each in splits.items()}
    if not any(parts.values()):
        raise FileNotFoundError(f"--submission needs test files, and none of {', '.join(splits)} has one")
    for files in parts.values():
        for name, rows in files.items():
            glue_submission.check_count(name, len(rows))


def write_all(
    request: Request,
    rows: Sequence[TextRow],
    splits: Mapping[str, Splits],
    tokenizer: Any,
    numbers: Numbers,
    place: Path,
) -> list[Path]:
    """Write a zip file for each form, from the model of each task that is best on held-out rows.

    Without held-out rows it is the model of the first seed: development rows do not choose.

    Args:
        request: of the run.
        rows: forms on tasks.
        splits: the tasks' rows.
        tokenizer: of the models.
        numbers: of all rows and seeds.
        place: folder of the runs.
    """
    folder, written = request.out / "submission", []
    folder.mkdir(parents=True, exist_ok=True)
    for form in dict.fromkeys(row.form for row in rows):
        predictions: dict[str, list[float]] = {}
        for row in (each for each in rows if each.form == form):
            seed = best_seed(row, numbers)
            model = trained_model(row, place / folder_name(row.name) / f"seed-{seed}", "--submission")
            model = model.to(torch_device(request.device)).eval()
            for part, texts in test_parts(row.task, splits[row.task], request.data).items():
                coded = encode([Row(each.texts, None) for each in texts], tokenizer, row.training.longest)
                logits = predict(model, coded, tokenizer)
                best = logits.argmax(dim=-1) if splits[row.task].task.classes else logits.squeeze(-1)
                predictions[part] = best.tolist()
        path = folder / f"{folder_name(form)}.zip"
        remarks = glue_submission.write(path, predictions)
        request.console.print(f"submission in {path}: {'; '.join(remarks)}", markup=False, highlight=False)
        written.append(path)
    return written


def best_seed(row: TextRow, numbers: Numbers) -> int:
    """The seed whose model is best on held-out rows; the first one if there are none."""
    metric = f"held out {glue.TASKS[row.task].metrics[0]}"
    scores = {seed: entry.get(metric) for (name, seed), entry in numbers.items() if name == row.name}
    known = {seed: score for seed, score in scores.items() if score is not None}
    return max(sorted(known), key=lambda seed: known[seed]) if known else min(scores)


def test_parts(task: str, splits: Splits, data: Path | None) -> dict[str, list[Row]]:
    """The server's files that a task's model predicts, and their rows."""
    parts = dict(splits.test)
    if task == FROM:
        found, _ = glue.load_available(data, [DIAGNOSTIC])
        parts |= found[DIAGNOSTIC].test if DIAGNOSTIC in found else {}
    return parts

"""Fine-tune a pretrained model on labelled texts or questions, with any mechanisms, on the Trainer.

Two lines differ from an ordinary script: `overt.attach`, and `overt.posterior` for samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

import overt
from overt.data.batching import Epochs
from overt.data.glue import Row
from overt.mechanisms.mechanism import Mechanism
from overt.recipes._training import Run, be_quiet, in_tf32, processes, times, torch_device

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from rich.console import Console

    from overt.recipes.spans import Asked

CHECKPOINTS, PAUSE = 3, 60.0  # per training, and at least so many seconds apart
LOGS = 20  # points of a learning curve
TEST_BATCH = 64
ROWS = 256  # samples × examples of one pass when sampling; more of short texts
# Names of the dropout of layers in configs of transformers; a classifier's own is left alone.
DROPOUTS = (
    "hidden_dropout_prob",
    "attention_probs_dropout_prob",
    "dropout_rate",
    "attention_dropout",
    "mlp_dropout",
    "embedding_dropout",
    "hidden_dropout",
    "dropout",
)
POSITIONS = ("start_positions", "end_positions")
LABELS = ("labels", *POSITIONS)
Encoded = dict[str, Any]


@dataclass(frozen=True)
class TextTraining:
    """Settings of a training.

    Attributes:
        updates: steps of the optimizer.
        batch: rows of a batch.
        learning_rate: at its peak; it rises during `warmup` updates and then falls to 0 linearly.
        warmup: updates.
        longest: tokens of the longest text; longer ones are cut.
        dropout: of the model's layers; None for its own.
        weight_decay: of all weights but those of norms and biases.
    """

    updates: int
    batch: int = 32
    learning_rate: float = 1e-4
    warmup: int = 0
    longest: int = 128
    dropout: float | None = None
    weight_decay: float = 0.0

    def settings(self) -> dict[str, Any]:
        """As plain JSON."""
        return asdict(self)


class Texts(NamedTuple):
    """A task's rows as a model takes them.

    Attributes:
        train: to train on.
        parts: name → rows to predict, such as those that were held out.
        classes: names of the classes; none if labels are scores.
        subsets: name → a part, and the places of some of its rows.
        asked: where the model finds answers in texts, part → its questions, whose windows are the rows.
    """

    train: list[Encoded]
    parts: Mapping[str, list[Encoded]]
    classes: tuple[str, ...]
    subsets: Mapping[str, tuple[str, list[int]]] = {}
    asked: Mapping[str, Asked] | None = None

    @property
    def head(self) -> tuple[str, ...] | None:
        """What `load_model` makes a head for."""
        return self.classes if self.asked is None else None


def encode(rows: Sequence[Row], tokenizer: Any, longest: int) -> list[Encoded]:
    """Tokenized rows, with labels where they are known."""
    if not rows:
        return []
    columns = [list(column) for column in zip(*(row.texts for row in rows), strict=True)]
    codes = tokenizer(*columns, truncation=True, max_length=longest)
    encoded = []
    for place, row in enumerate(rows):
        values = {key: lists[place] for key, lists in codes.items()}
        encoded.append(values if row.label is None else {**values, "labels": row.label})
    return encoded


def load_model(
    path: str, classes: Sequence[str] | None, seed: int, dropout: float | None = None
) -> tuple[Any, list[str]]:
    """A pretrained model with a head, and the names of weights that are new.

    Args:
        path: folder, or name on the hub.
        classes: names of the classes; none for scores, None for the start and end of an answer in the text.
        seed: of the head's first weights.
        dropout: of the model's layers; None for its own.
    """
    from transformers import (
        MODEL_FOR_QUESTION_ANSWERING_MAPPING,
        AutoConfig,
        AutoModelForQuestionAnswering,
        AutoModelForSequenceClassification,
        set_seed,
    )

    config: Any = AutoConfig.from_pretrained(path)
    if classes is None and type(config) not in MODEL_FOR_QUESTION_ANSWERING_MAPPING:
        raise ValueError(
            f"transformers has no question-answering model for the {type(config).__name__} of {path}"
        )
    if dropout is not None:
        names = [name for name in DROPOUTS if isinstance(getattr(config, name, None), int | float)]
        if not names:
            raise ValueError(
                f"no dropout of {type(config).__name__} is known that could be set to {dropout:g}"
            )
        for name in names:
            setattr(config, name, dropout)
    if classes is None:
        config.num_labels = 2  # scores of each token: to be the start, and to be the end
    else:
        config.num_labels = len(classes) or 1
        config.problem_type = "single_label_classification" if classes else "regression"
    if classes:
        config.id2label = dict(enumerate(classes))
        config.label2id = {name: number for number, name in enumerate(classes)}
    set_seed(seed)
    kind: Any = AutoModelForQuestionAnswering if classes is None else AutoModelForSequenceClassification
    model, loaded = kind.from_pretrained(path, config=config, dtype=torch.float32, output_loading_info=True)
    return model, sorted(loaded["missing_keys"])


def attached(
    path: str, texts: Texts, mechanisms: Sequence[Mechanism], training: TextTraining, seed: int
) -> Any:
    """The model that a training starts from, with its mechanisms."""
    model, _ = load_model(path, texts.head, seed, training.dropout)
    if mechanisms:
        overt.attach(model, *mechanisms, seed=seed)
    return model


class Batches(Dataset[dict[str, Tensor]]):
    """The padded batch of each update, in the same order for all models with the same seed."""

    def __init__(self, rows: Sequence[Encoded], epochs: Epochs, collate: Callable[[Any], Any]) -> None:
        self.rows, self.epochs, self.collate = rows, epochs, collate

    def __len__(self) -> int:
        return len(self.epochs)

    def __getitem__(self, update: int) -> dict[str, Tensor]:
        batch: dict[str, Tensor] = self.collate(
            [self.rows[number] for number in self.epochs[update].tolist()]
        )
        return batch


def collator_of(tokenizer: Any) -> Callable[[Sequence[Encoded]], dict[str, Tensor]]:
    """Pads rows of a batch; scores become float32.

    As transformers' `DataCollatorWithPadding`, but several times faster, which long texts need.
    """
    if tokenizer.pad_token_id is None:
        raise ValueError(
            f"batches need a tokenizer with a token for padding; {type(tokenizer).__name__} has none"
        )
    fills = {
        "input_ids": tokenizer.pad_token_id,
        "token_type_ids": tokenizer.pad_token_type_id,
        "special_tokens_mask": 1,
    }
    return partial(_padded, fills, tokenizer.padding_side == "left")


def _padded(fills: Mapping[str, int], left: bool, rows: Sequence[Encoded]) -> dict[str, Tensor]:
    batch = {}
    for name in rows[0]:
        values = [row[name] for row in rows]
        if isinstance(values[0], list | np.ndarray):
            longest = max(map(len, values))
            table = np.full((len(values), longest), fills.get(name, 0), np.int64)
            for place, codes in enumerate(values):
                table[place, longest - len(codes) if left else 0 :][: len(codes)] = codes
            batch[name] = torch.from_numpy(table)
        else:
            batch[name] = torch.tensor(values)
    if left:  # answers move with their tokens
        sizes = torch.tensor([len(row["input_ids"]) for row in rows])
        for name in batch.keys() & POSITIONS:
            batch[name] += batch["input_ids"].shape[1] - sizes
    return batch


def train(
    folder: Path,
    texts: Texts,
    tokenizer: Any,
    path: str,
    mechanisms: Sequence[Mechanism],
    training: TextTraining,
    seed: int,
    device: str = "auto",
    told: Callable[[int], object] | None = None,
    console: Console | None = None,
) -> tuple[Any, dict[str, Any]]:
    """Fine-tune one model; return it in evaluation mode, and the numbers of its training.

    Args:
        folder: of the run, for checkpoints.
        texts: the task.
        tokenizer: of the model.
        path: the pretrained model.
        mechanisms: to attach.
        training: settings.
        seed: of the head, batches, dropout and noise. Models with the same seed start from the same weights
            and see the same batches, whatever their mechanisms.
        device: "cpu", "cuda" or "auto".
        told: called with the number of finished updates after each of them.
        console: shows the progress; None for none.
    """
    from rich.console import Console
    from transformers import set_seed

    be_quiet()
    model = attached(path, texts, mechanisms, training, seed)
    set_seed(seed)
    folder.mkdir(parents=True, exist_ok=True)
    epochs = Epochs(len(texts.train), training.batch, training.updates, seed, processes(device))
    run = Run(
        model,
        folder,
        steps=training.updates,
        checkpoints=CHECKPOINTS,
        seed=seed,
        data=Batches(texts.train, epochs, collator_of(tokenizer)),
        collate=lambda ready: ready[0],
        console=console or Console(quiet=True),
        name=folder.name,
        on_step=told,
        device=device,
        in_order=True,
        pause=PAUSE if epochs.processes == 1 else 0.0,
        learning_rate=training.learning_rate,
        warmup_steps=training.warmup,
        weight_decay=training.weight_decay,
        adam_epsilon=1e-8,
        logging_steps=max(1, training.updates // LOGS),
        **in_tf32(device),
    )
    run.train()
    model.eval()
    logs = [entry for entry in run.trainer.state.log_history if "loss" in entry]
    return model, {
        "updates": run.trainer.state.global_step,
        "curve": [[entry["step"], entry.get("task_loss", entry["loss"])] for entry in logs],
        "kl": [[entry["step"], entry["kl"]] for entry in logs if "kl" in entry],
        "step_ms": run.step_ms,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "added": sum(p.numel() for name, p in model.named_parameters() if ".overt." in name),
    }


def without_label(row: Encoded) -> Encoded:
    """What a model sees of a row when it is tested."""
    return {name: value for name, value in row.items() if name not in LABELS}


def by_length(
    model: Any, rows: Sequence[Encoded], tokenizer: Any, size: int = TEST_BATCH
) -> Iterator[tuple[list[int], dict[str, Tensor]]]:
    """Places of rows of similar length, and a model's inputs for them, on its device."""
    collate = collator_of(tokenizer)
    order = sorted(range(len(rows)), key=lambda place: len(rows[place]["input_ids"]))
    for start in range(0, len(order), size):
        places = order[start : start + size]
        batch = collate([without_label(rows[place]) for place in places])
        yield places, {name: value.to(model.device) for name, value in batch.items()}


@torch.no_grad()
def outputs(model: Any, rows: Sequence[Encoded], tokenizer: Any) -> Iterator[tuple[list[int], Any]]:
    """Places of rows of similar length, and what the model makes of them in one pass."""
    for places, inputs in by_length(model, rows, tokenizer):
        yield places, model(**inputs)


@torch.no_grad()
def predict(model: Any, rows: Sequence[Encoded], tokenizer: Any) -> Tensor:
    """Logits (rows, classes) of one pass, or scores (rows, 1); float32 on the CPU, in the rows' order."""
    parts: dict[int, Tensor] = {}
    for places, output in outputs(model, rows, tokenizer):
        parts |= dict(zip(places, output.logits.float().cpu(), strict=True))
    return torch.stack([parts[place] for place in range(len(rows))])


def predict_ends(
    model: Any, rows: Sequence[Encoded], tokenizer: Any
) -> tuple[list[NDArray[np.float32]], list[NDArray[np.float32]]]:
    """For each row, the logits of its tokens to be an answer's start, and those to be its end."""
    found: dict[int, NDArray[np.float32]] = {}
    left = tokenizer.padding_side == "left"
    for places, output in outputs(model, rows, tokenizer):
        both = torch.stack([output.start_logits, output.end_logits], dim=1).float().cpu().numpy()
        for place, logits in zip(places, both, strict=True):
            size = len(rows[place]["input_ids"])
            found[place] = logits[:, -size:] if left else logits[:, :size]
    each = [found[place] for place in range(len(rows))]
    return [logits[0] for logits in each], [logits[1] for logits in each]


def rows_at_once(rows: Sequence[Encoded]) -> int:
    """Samples × examples of one pass, whose maps are no larger than those of `ROWS` texts of 128 tokens."""
    return max(ROWS, ROWS * 128**2 // max(len(row["input_ids"]) for row in rows) ** 2)


def sample(model: Any, rows: Sequence[Encoded], tokenizer: Any, samples: int, **options: Any) -> Tensor:
    """Predictive samples of every row, (samples, rows, classes); `options` are those of `overt.posterior`."""
    parts, collate = [], collator_of(tokenizer)
    for start in range(0, len(rows), TEST_BATCH):
        batch = collate([without_label(row) for row in rows[start : start + TEST_BATCH]])
        inputs = {name: value.to(model.device) for name, value in batch.items()}
        at_once = rows_at_once(rows[start : start + TEST_BATCH])
        posterior = overt.posterior(model, inputs, samples, first=start, rows=at_once, **options)
        assert isinstance(posterior, overt.Posterior)
        parts.append(posterior.samples.cpu())
    return torch.cat(parts, dim=1)


def step_times(
    texts: Texts,
    tokenizer: Any,
    path: str,
    mechanisms: Sequence[Mechanism],
    training: TextTraining,
    device: str,
    updates: int,
) -> list[float]:
    """Milliseconds of updates, after one that is not timed."""
    where = torch_device(device)
    model = attached(path, texts, mechanisms, training, 0).to(where).train()
    batches = Batches(
        texts.train, Epochs(len(texts.train), training.batch, updates + 1, 0), collator_of(tokenizer)
    )
    optimizer = torch.optim.AdamW(model.parameters(), training.learning_rate)
    return times(model, optimizer, batches.__getitem__, where, updates)

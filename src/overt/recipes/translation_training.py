"""Train a Transformer on a parallel corpus with the Hugging Face Trainer, and translate with it.

Batches hold about the same number of tokens. The learning rate warms up linearly and falls with the inverse
square root of the step; labels are smoothed; training stops when the validation loss has not fallen for some
epochs; the weights are averaged over the last epochs.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import overt
from overt._extras import need
from overt._files import write_whole, written_whole
from overt._modes import any_shape
from overt.attaching.api import state_in
from overt.data import subwords
from overt.data.pairs import Corpus
from overt.data.subwords import EOS_ID, PAD_ID
from overt.judge.bleu import detokenise
from overt.mechanisms.mechanism import Mechanism
from overt.models.marian import LONGEST, SIZES, marian, size_without_embeddings
from overt.recipes._rows import settings_of
from overt.recipes._training import Run, processes, torch_device, wait_for_everyone

if TYPE_CHECKING:
    from tokenizers import Tokenizer

IGNORED = -100  # label of padding
WEIGHTS = "weights"  # folder of the last epochs' weights
CARD = "translation.json"  # what a model's folder says about its text
GREEDY = 100  # training sentences that are translated greedily, as a check
CHECKPOINTS = 6  # per training
MOST_PER_EPOCH = 2500  # updates; epochs of larger corpora are counted as several
MOST_KEPT = 5000  # batches kept as tensors
# Kernels are compiled anew for lengths that are multiples of 16 and for those that are not.
MULTIPLE = 16
LOGS = 60  # points of a learning curve
_NUMBERED = re.compile(r"epoch-(\d+)\.safetensors")
Ids = list[int]


@dataclass(frozen=True)
class Training:
    """Settings of a training.

    Attributes:
        updates: most steps of the optimizer.
        tokens: most target tokens of a batch.
        learning_rate: the highest, reached after `warmup` steps.
        warmup: steps until then.
        dropout: on embeddings and block outputs.
        smoothing: of labels.
        weight_decay: of AdamW.
        betas: of Adam.
        patience: epochs without a lower validation loss after which training stops.
        average: number of last epochs whose weights are averaged.
        longest: most tokens of a sentence in training; longer pairs are left out.
    """

    updates: int
    tokens: int = 4096
    learning_rate: float = 1e-3
    warmup: int = 4000
    dropout: float = 0.2
    smoothing: float = 0.1
    weight_decay: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.98)
    patience: int = 5
    average: int = 10
    longest: int = 250

    def settings(self) -> dict[str, Any]:
        """As plain JSON."""
        return {**asdict(self), "betas": list(self.betas)}


@dataclass(frozen=True)
class Row:
    """A row of a table: a network and its mechanisms.

    Attributes:
        size: a name in `models.marian.SIZES`.
        mechanisms: what is attached.
        where: the kinds of attention that it is attached to; None for all.
    """

    size: str
    mechanisms: tuple[Mechanism, ...] = ()
    where: tuple[str, ...] | None = None

    def settings(self) -> dict[str, Any]:
        """The row as plain JSON."""
        mechanisms = settings_of(self.mechanisms)
        return {
            "size": self.size,
            "mechanisms": mechanisms,
            "where": None if self.where is None else list(self.where),
        }


@dataclass(frozen=True)
class Encoded:
    """A corpus as token ids, each sentence with its end.

    Attributes:
        source: language that is translated from.
        target: language that is translated to.
        train: training pairs.
        valid: validation pairs.
        test: test pairs.
        references: test targets as text, tokenised as in training.
        raw_references: test targets before tokenisation, if there are files of them.
        vocabulary: the tokenizer, as JSON.
        tokenised: whether words and punctuation marks were separated.
        lowercase: whether all text is lower case.
        escaped: whether apostrophes and the like are written as entities, as Moses does.
        dashes: whether hyphens inside words are separated (" @-@ "), as Moses can do.
        left_out: number of training pairs that were too long or empty.
    """

    source: str
    target: str
    train: list[tuple[Ids, Ids]]
    valid: list[tuple[Ids, Ids]]
    test: list[tuple[Ids, Ids]]
    references: list[str]
    raw_references: list[str] | None
    vocabulary: str
    tokenised: bool
    lowercase: bool
    escaped: bool
    dashes: bool
    left_out: int

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer."""
        from tokenizers import Tokenizer

        return Tokenizer.from_str(self.vocabulary)


def encode(corpus: Corpus, tokenizer: Tokenizer, longest: int) -> Encoded:
    """A corpus as token ids; pairs that are too long or have an empty side leave the training set only.

    Sentences for validation and testing that the networks have no positions for are refused.
    """

    def ids(pairs: Sequence[Any]) -> list[tuple[Ids, Ids]]:
        sources = tokenizer.encode_batch([pair.source for pair in pairs])
        targets = tokenizer.encode_batch([pair.target for pair in pairs])
        return [(source.ids, target.ids) for source, target in zip(sources, targets, strict=True)]

    train = [pair for pair in ids(corpus.train) if all(1 < len(side) <= longest for side in pair)]
    if not train:
        raise ValueError(f"no training pair has between 1 and {longest - 1} pieces on both sides")
    valid, test = ids(corpus.valid), ids(corpus.test)
    for name, pairs in (("validation", valid), ("test", test)):
        for number, pair in enumerate(pairs, start=1):
            if max(map(len, pair)) > LONGEST:
                raise ValueError(
                    f"{name} pair {number} has {max(map(len, pair)):,} pieces: at most {LONGEST:,} may be"
                )
    lines = [side for pair in corpus.train for side in pair]
    return Encoded(
        corpus.source,
        corpus.target,
        train,
        valid,
        test,
        [pair.target for pair in corpus.test],
        corpus.references,
        tokenizer.to_str(),
        corpus.tokenised,
        all(line == line.lower() for line in lines),
        any("&apos;" in line or "&quot;" in line for line in lines),
        any(" @-@ " in line for line in lines),
        len(corpus.train) - len(train),
    )


# --- Batches ---


def token_batches(
    pairs: Sequence[tuple[Ids, Ids]], tokens: int, seed: int, least: int = 1
) -> list[list[int]]:
    """Numbers of pairs in batches of similar length: at most `tokens` target tokens, padding included.

    Batches of fewer than `least` pairs, which could not be shared among so many processes, are joined.
    """
    order = list(range(len(pairs)))
    Random(seed).shuffle(order)
    order.sort(key=lambda number: (len(pairs[number][1]), len(pairs[number][0])))
    batches: list[list[int]] = [[]]
    longest = 0
    for number in order:
        longest = max(longest, *map(len, pairs[number]))
        if batches[-1] and longest * (len(batches[-1]) + 1) > tokens:
            batches.append([])
            longest = max(map(len, pairs[number]))
        batches[-1].append(number)
    joined: list[list[int]] = []
    for batch in batches:
        if joined and min(len(batch), len(joined[-1])) < least:
            joined[-1] = joined[-1] + batch
        else:
            joined.append(batch)
    return joined


class Schedule(torch.utils.data.Dataset[tuple[int, int]]):
    """The batch of every update, one after the other: each epoch has all batches in another order.

    With several processes, which take turns, each batch comes in as many parts as there are processes.
    """

    def __init__(self, batches: int, updates: int, seed: int, processes: int = 1) -> None:
        self.batches, self.updates, self.seed, self.processes = batches, updates, seed, processes
        self._epoch, self._order = -1, list[int]()

    def __len__(self) -> int:
        return self.updates * self.processes

    def __getitem__(self, index: int) -> tuple[int, int]:
        """Number of a batch, and of its part."""
        update, part = divmod(index, self.processes)
        epoch, place = divmod(update, self.batches)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, list(range(self.batches))
            Random(f"{self.seed} {epoch}").shuffle(self._order)
        return self._order[place], part


class Batches:
    """Batches as tensors, kept after their first use unless there are too many."""

    def __init__(
        self,
        pairs: Sequence[tuple[Ids, Ids]],
        numbers: Sequence[list[int]],
        collate: Callable[[Sequence[tuple[Ids, Ids]]], dict[str, Tensor]],
        processes: int = 1,
    ) -> None:
        self.pairs, self.numbers, self.collate, self.processes = pairs, numbers, collate, processes
        self._kept: dict[tuple[int, int], dict[str, Tensor]] = {}

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, place: tuple[int, int]) -> dict[str, Tensor]:
        """A part of a batch, by the numbers of `Schedule`."""
        batch = self._kept.get(place)
        if batch is None:
            number, part = place
            pairs = [self.pairs[pair] for pair in self.numbers[number][part :: self.processes]]
            if not pairs:
                raise ValueError("a batch has fewer pairs than there are processes: make it larger")
            batch = self.collate(pairs)
            if len(self.numbers) <= MOST_KEPT:
                self._kept[place] = batch
        return dict(batch)


def collate(pairs: Sequence[tuple[Ids, Ids]], multiple: int = 1, start: int = EOS_ID) -> dict[str, Tensor]:
    """A batch; the decoder's inputs are made here.

    A model that sees no labels, because the loss is computed outside of it, would not make them.

    Args:
        pairs: ids of sources and targets.
        multiple: lengths are rounded up to a multiple of it.
        start: the decoder's first input, by default the end of a sentence.
    """
    sources, targets = zip(*pairs, strict=True)
    input_ids, labels = padded(sources, PAD_ID, multiple), padded(targets, IGNORED, multiple)
    shifted = torch.full_like(labels, start)
    shifted[:, 1:] = labels[:, :-1].masked_fill(labels[:, :-1] == IGNORED, PAD_ID)
    return {
        "input_ids": input_ids,
        "attention_mask": input_ids.ne(PAD_ID).long(),
        "decoder_input_ids": shifted,
        "labels": labels,
    }


def padded(rows: Sequence[Ids], filler: int, multiple: int = 1) -> Tensor:
    """Rows of equal length, filled up; (rows, length)."""
    longest = -(-max(map(len, rows)) // multiple) * multiple
    return torch.tensor([row + [filler] * (longest - len(row)) for row in rows])


# --- The loss and its average ---


class SmoothedLoss:
    """Cross-entropy with smoothed labels per target token, plus what mechanisms add to the loss.

    The Trainer's own label smoothing would drop the latter.
    """

    def __init__(self, model: nn.Module, smoothing: float) -> None:
        self.model, self.smoothing = model, smoothing
        state = state_in(model)
        self.adds = state is not None and bool(state.adds)

    def __call__(self, outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        """The Trainer's `compute_loss_func`."""
        count = (labels != IGNORED).sum() if num_items_in_batch is None else num_items_in_batch
        logits = outputs["logits"].flatten(0, 1).float()
        loss = F.cross_entropy(
            logits, labels.flatten(), ignore_index=IGNORED, label_smoothing=self.smoothing, reduction="sum"
        )
        loss = loss / count
        return loss + overt.penalty(self.model, labels) if self.adds and self.model.training else loss


@any_shape()
@torch.no_grad()
def loss_of(model: nn.Module, pairs: Sequence[tuple[Ids, Ids]], tokens: int, bf16: bool = False) -> float:
    """Mean negative log-likelihood of a target token, without smoothing."""
    was_training = model.training
    model.eval()
    device = next(model.parameters()).device
    total = torch.zeros((), dtype=torch.float64, device=device)
    for numbers in token_batches(pairs, tokens, 0):
        batch = collate([pairs[number] for number in numbers])
        labels = batch.pop("labels").to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
            logits = model(**{name: value.to(device) for name, value in batch.items()}).logits
        loss = F.cross_entropy(logits.float().mT, labels, ignore_index=IGNORED, reduction="none")
        total += loss.double().sum()
    model.train(was_training)
    return float(total) / sum(len(target) for _, target in pairs)


def average(model: nn.Module, snapshots: Sequence[Path]) -> None:
    """Set a model's parameters to their mean over snapshots; buffers, such as step counters, stay."""
    from safetensors import safe_open

    if not snapshots:
        raise ValueError("there are no weights to average: the run's folder has lost them, train it anew")
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, parameter in parameters.items():
            total = torch.zeros(parameter.shape, dtype=torch.float64)
            for path in snapshots:
                with safe_open(path, framework="pt") as file:
                    total += file.get_tensor(name)
            parameter.copy_(total / len(snapshots))


def make_epochs_callback(
    folder: Path,
    per_epoch: int,
    patience: int,
    keep: int | None,
    validate: Callable[[nn.Module], float],
    told: Callable[[int], object] | None = None,
    halves: bool = True,
) -> Any:
    """The Trainer's callback that validates after each epoch, keeps weights and stops early.

    Args:
        folder: of the run; its epochs.json has the validation losses, weights/ the weights kept.
        per_epoch: updates of an epoch.
        patience: epochs without a lower loss after which training stops.
        keep: number of last epochs whose weights are kept. None keeps those of the best epoch alone, and
            halves the learning rate after epochs without a lower loss.
        validate: model → validation loss.
        told: called with the number of finished updates after each of them.
        halves: whether the learning rate is halved at all.
    """
    from safetensors.torch import save_file
    from transformers import TrainerCallback

    class Epochs(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            del args, control, kwargs
            self.records = epochs_until(folder, state.global_step)
            # Those of later epochs are from before an interruption.
            for path in snapshots_in(folder):
                if epoch_of(path) not in {record["epoch"] for record in self.records}:
                    path.unlink()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            update = state.global_step
            if told is not None:
                told(update)
            if update % per_epoch and update != args.max_steps:
                return
            model = kwargs["model"]
            model = getattr(model, "module", model)
            epoch = -(-update // per_epoch)
            self.records.append({"epoch": epoch, "update": update, "loss": validate(model)})
            best = min(self.records, key=lambda record: record["loss"])
            if out_of_patience(self.records, patience):
                control.should_training_stop = True
            is_best = best["epoch"] == epoch
            if keep is None and not is_best and halves:
                halve(kwargs["optimizer"], kwargs["lr_scheduler"])
            if state.is_world_process_zero and (is_best or keep is not None):
                weights = folder / WEIGHTS
                weights.mkdir(exist_ok=True)
                tensors = {name: value.detach().contiguous() for name, value in model.named_parameters()}
                with written_whole(weights / f"epoch-{epoch}.safetensors") as part:
                    save_file(tensors, part)
                for path in snapshots_in(folder)[: -(keep or 1)]:
                    path.unlink()
            if state.is_world_process_zero:
                write_whole(folder / "epochs.json", json.dumps(self.records))

    return Epochs()


def halve(optimizer: Any, scheduler: Any) -> None:
    """Halve the learning rate, now and for what a scheduler makes of it."""
    scheduler.base_lrs = [rate / 2 for rate in scheduler.base_lrs]
    for group in optimizer.param_groups:
        group["lr"] /= 2


def snapshots_in(folder: Path) -> list[Path]:
    """The kept weights of a run, in the order of their epochs."""
    paths = [path for path in (folder / WEIGHTS).glob("epoch-*") if _NUMBERED.fullmatch(path.name)]
    return sorted(paths, key=epoch_of)


def epoch_of(snapshot: Path) -> int:
    """The epoch of kept weights."""
    match = _NUMBERED.fullmatch(snapshot.name)
    assert match is not None
    return int(match[1])


def read_epochs(folder: Path) -> list[dict[str, Any]]:
    """The epochs that a run has finished, with their validation losses."""
    path = folder / "epochs.json"
    records: list[dict[str, Any]] = json.loads(path.read_text()) if path.exists() else []
    return records


def epochs_until(folder: Path, update: int) -> list[dict[str, Any]]:
    """The epochs that a run had finished at an update."""
    return [record for record in read_epochs(folder) if record["update"] <= update]


def out_of_patience(records: Sequence[dict[str, Any]], patience: int) -> bool:
    """Whether the last epochs have brought no lower loss."""
    if not records:
        return False
    best = min(records, key=lambda record: record["loss"])
    return bool(records[-1]["epoch"] - best["epoch"] >= patience)


# --- Training and translating ---


def network(row: Row, vocabulary: int, dropout: float, seed: int) -> Any:
    """The untrained model of a row."""
    from transformers import set_seed

    set_seed(seed)
    model = marian(SIZES[row.size], vocabulary, pad=PAD_ID, eos=EOS_ID, dropout=dropout)
    if row.mechanisms:
        overt.attach(model, *row.mechanisms, where=None if row.where is None else list(row.where), seed=seed)
    return model


def _batches(
    data: Encoded, row: Row, training: Training, seed: int, cuda: bool, processes: int = 1
) -> Batches:
    numbers = token_batches(data.train, training.tokens, seed, processes)
    multiple = MULTIPLE if cuda and row.mechanisms else 1
    return Batches(data.train, numbers, lambda pairs: collate(pairs, multiple), processes)


class ReadyBatches(Protocol):
    """Batches as tensors, by the numbers of `Schedule`."""

    processes: int

    def __len__(self) -> int:
        """How many there are."""

    def __getitem__(self, place: tuple[int, int]) -> dict[str, Tensor]:
        """A part of a batch."""


def fit(
    model: Any,
    folder: Path,
    batches: ReadyBatches,
    validate: Callable[[Any], float],
    training: Any,
    keep: int | None,
    seed: int,
    device: str,
    told: Callable[[int], object] | None,
    halves: bool = True,
    **arguments: Any,
) -> dict[str, Any]:
    """Train a model on ready-made batches, give it the kept weights, and return the numbers of the training.

    Args:
        model: the network.
        folder: of the run: checkpoints, kept weights, validation losses.
        batches: of the training set.
        validate: model → validation loss.
        training: settings: `updates`, `learning_rate`, `patience`.
        keep: as for `make_epochs_callback`.
        seed: of the order of batches, and of dropout.
        device: "cpu", "cuda" or "auto".
        told: called with the number of finished updates after each of them.
        halves: as for `make_epochs_callback`.
        arguments: further arguments of `Run`.
    """
    from rich.console import Console

    folder.mkdir(parents=True, exist_ok=True)
    updates, per_epoch = training.updates, min(len(batches), MOST_PER_EPOCH)
    epochs = make_epochs_callback(folder, per_epoch, training.patience, keep, validate, told, halves)
    run = Run(
        model,
        folder,
        steps=updates,
        checkpoints=CHECKPOINTS,
        seed=seed,
        data=Schedule(len(batches), updates, seed, batches.processes),
        collate=lambda places: batches[places[0]],
        console=Console(quiet=True),  # the recipe shows the progress of all trainings
        name=folder.name,
        device=device,
        callbacks=[epochs],
        over=lambda update: out_of_patience(epochs_until(folder, update), training.patience),
        in_order=True,
        learning_rate=training.learning_rate,
        optim="adamw_torch_fused" if torch_device(device).type == "cuda" else "adamw_torch",
        logging_steps=max(1, updates // LOGS),
        **arguments,
    )
    with any_shape():
        run.train()
    wait_for_everyone()
    records, kept, state = read_epochs(folder), snapshots_in(folder), run.trainer.state
    average(model, kept)
    model.eval()
    return {
        "updates": state.global_step,
        "epochs": len(records),
        "per_epoch": per_epoch,
        "averaged": len(kept),
        "best_epoch": min(records, key=lambda record: record["loss"])["epoch"],
        "valid_losses": [record["loss"] for record in records],
        "curve": [[entry["step"], entry["loss"]] for entry in state.log_history if "loss" in entry],
        "step_ms": run.step_ms,
        "valid_loss": validate(model),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
    }


def train(
    folder: Path,
    data: Encoded,
    row: Row,
    training: Training,
    seed: int,
    device: str = "auto",
    told: Callable[[int], object] | None = None,
) -> tuple[Any, dict[str, Any]]:
    """Train one model; return it with averaged weights, in evaluation mode, and the numbers of its training.

    Args:
        folder: of the run: checkpoints, the last epochs' weights, validation losses.
        data: the corpus.
        row: network and mechanisms.
        training: settings.
        seed: of initial weights, batches, dropout and noise.
        device: "cpu", "cuda" or "auto".
        told: called with the number of finished updates after each of them.
    """
    model = network(row, data.tokenizer.get_vocab_size(), training.dropout, seed)
    cuda = torch_device(device).type == "cuda"
    batches = _batches(data, row, training, seed, cuda, processes(device))

    def validate(model: nn.Module) -> float:
        return loss_of(model, data.valid, 2 * training.tokens, bf16=cuda)

    numbers = fit(
        model,
        folder,
        batches,
        validate,
        training,
        training.average,
        seed,
        device,
        told,
        loss=SmoothedLoss(model, training.smoothing),
        lr_scheduler_type="inverse_sqrt",
        warmup_steps=training.warmup,
        adam_beta1=training.betas[0],
        adam_beta2=training.betas[1],
        weight_decay=training.weight_decay,
        max_grad_norm=0.0,
        bf16=cuda,
        # A prior is used by the loss alone, which DDP does not see: it would take its parameters for unused.
        ddp_find_unused_parameters=False,
    )
    return model, {
        **numbers,
        "without_embeddings": size_without_embeddings(model),
        "of_mechanisms": sum(p.numel() for name, p in model.named_parameters() if ".overt." in name),
    }


@any_shape()
def step_times(
    data: Encoded, row: Row, training: Training, device: str, updates: int = 100, model: Any = None
) -> list[float]:
    """Milliseconds of updates, which mean something if nothing else is running.

    Args:
        data: the corpus.
        row: network and mechanisms.
        training: settings of the training.
        device: "cpu" or "cuda".
        updates: number of updates that are timed, after one that is not.
        model: the row's network, trained; None for a new one.
    """
    cuda = device == "cuda"
    if model is None:
        model = network(row, data.tokenizer.get_vocab_size(), training.dropout, 0)
    loss_function = SmoothedLoss(model, training.smoothing)

    def loss(batch: dict[str, Tensor], number: int) -> Tensor:
        del number
        labels = batch.pop("labels")
        with torch.autocast(device, torch.bfloat16, enabled=cuda):
            outputs = model(**batch)
        return loss_function(outputs, labels)

    return time_updates(model, _batches(data, row, training, 0, cuda), loss, device, updates)


def time_updates(
    model: nn.Module,
    batches: Batches,
    loss: Callable[[dict[str, Tensor], int], Tensor],
    device: str,
    updates: int,
    clip: float | None = None,
) -> list[float]:
    """Milliseconds of updates, after one that is not timed.

    Args:
        model: the network.
        batches: of the training set.
        loss: batch and number of the update → loss.
        device: "cpu" or "cuda".
        updates: number of updates.
        clip: largest norm of the gradient.
    """
    cuda = device == "cuda"
    model.to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=cuda)
    schedule = Schedule(len(batches), updates + 1, 0)
    seconds = []
    for number in range(updates + 1):
        batch = batches[schedule[number]]
        if cuda:
            torch.cuda.synchronize()
        began = time.perf_counter()
        on_device = {name: value.to(device) for name, value in batch.items()}
        loss(on_device, number).backward()  # type: ignore[no-untyped-call]
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        if cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return [1000 * each for each in seconds[1:]]


def in_turns(forms: Mapping[str, Callable[[], list[float]]], rounds: int = 5) -> dict[str, list[list[float]]]:
    """Form → the times of each round, in which all forms take turns; a round before them is not counted.

    A machine that is slower for a while is then slower for all of them.
    """
    seen: dict[str, list[list[float]]] = {form: [] for form in forms}
    for number in range(rounds + 1):
        for form, run in forms.items():
            times = run()
            if number:
                seen[form].append(times)
    return seen


def most_new_tokens(model: Any, sources: Sequence[Ids]) -> int:
    """A limit for all translations of these sentences, so that they do not depend on the batch.

    Sentences that the model has no positions for are refused.
    """
    positions = getattr(model.config, "max_position_embeddings", None)
    for number, source in enumerate(sources, start=1):
        if positions is not None and len(source) > positions:
            raise ValueError(
                f"sentence {number} has {len(source):,} pieces, and the model takes up to {positions:,}: "
                "split it"
            )
    most = 2 * max(map(len, sources), default=0) + 10
    return most if positions is None else min(most, positions - 1)


@any_shape()
@torch.no_grad()
def translate(
    model: Any,
    tokenizer: Tokenizer,
    sources: Sequence[Ids],
    beam: int = 5,
    tokens: int = 8192,
    bf16: bool = False,
    told: Any = None,
) -> list[str]:
    """Translations of sentences given as ids, by beam search with the cache.

    Args:
        model: of Hugging Face, in evaluation mode.
        tokenizer: of both languages.
        sources: ids of each sentence, with its end.
        beam: number of beams; 1 is greedy.
        tokens: most source tokens of a batch, padding included.
        bf16: whether to translate in bfloat16.
        told: called with the number of sentences translated so far.
    """
    if beam < 1:
        raise ValueError(f"--beam must be a whole number of at least 1, got {beam}")
    device = next(model.parameters()).device
    texts = [""] * len(sources)
    most = most_new_tokens(model, sources)
    done = 0
    for numbers in _by_length(sources, max(tokens // beam, 1)):
        input_ids = padded([sources[number] for number in numbers], PAD_ID).to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
            output = model.generate(
                input_ids=input_ids,
                attention_mask=input_ids.ne(PAD_ID).long(),
                num_beams=beam,
                do_sample=False,
                max_new_tokens=most,
            )
        for number, text in zip(numbers, tokenizer.decode_batch(output.tolist()), strict=True):
            texts[number] = text.strip()
        done += len(numbers)
        if told is not None:
            told(done)
    return texts


def as_trained(lines: Sequence[str], card: Mapping[str, Any]) -> list[str]:
    """Ordinary text as a model's training text was: in lower case, tokenised, escaped."""
    texts = [line.strip() for line in lines]
    if card.get("lowercase"):
        texts = [text.lower() for text in texts]
    if card.get("tokenised"):
        moses: Any = need("sacremoses", "translation")
        split = moses.MosesTokenizer(lang=card["source"])
        how = {"escape": bool(card.get("escaped")), "aggressive_dash_splits": bool(card.get("dashes"))}
        texts = [split.tokenize(text, return_str=True, **how) for text in texts]
    return texts


def as_written(texts: Sequence[str], card: Mapping[str, Any]) -> list[str]:
    """A model's translations as ordinary text."""
    return detokenise(texts, card["target"]) if card.get("tokenised") else list(texts)


def translate_lines(
    model: Any,
    tokenizer: Any,
    lines: Sequence[str],
    card: Mapping[str, Any],
    beam: int = 5,
    tokens: int = 2048,
) -> list[str]:
    """Translations of ordinary text with any encoder–decoder of Hugging Face; empty lines stay empty.

    Args:
        model: the model.
        tokenizer: its tokenizer.
        lines: the sentences.
        card: what text the model takes and gives (`save`); empty for models from elsewhere.
        beam: number of beams; 1 is greedy.
        tokens: most source tokens of a batch, padding included.
    """
    texts = as_trained(lines, card)
    full = [number for number, text in enumerate(texts) if text]
    sources = [tokenizer(texts[number])["input_ids"] for number in full]
    translations = [""] * len(texts)
    most = most_new_tokens(model, sources)
    device = next(model.parameters()).device
    for batch in _by_length(sources, max(tokens // beam, 1)):
        inputs = tokenizer.pad({"input_ids": [sources[number] for number in batch]}, return_tensors="pt")
        inputs = {name: inputs[name].to(device) for name in ("input_ids", "attention_mask")}
        with any_shape(), torch.no_grad():
            output = model.generate(
                **inputs,
                num_beams=beam,
                do_sample=False,
                max_new_tokens=most,
            )
        for number, text in zip(batch, tokenizer.batch_decode(output, skip_special_tokens=True), strict=True):
            translations[full[number]] = text.strip()
    return as_written(translations, card)


def _by_length(sources: Sequence[Ids], tokens: int) -> Iterator[list[int]]:
    """Numbers of sentences in batches of similar length, the longest first."""
    batch: list[int] = []
    for number in sorted(range(len(sources)), key=lambda number: -len(sources[number])):
        if batch and len(sources[batch[0]]) * (len(batch) + 1) > tokens:
            yield batch
            batch = []
        batch.append(number)
    if batch:
        yield batch


def measure(
    model: Any, data: Encoded, training: Training, beam: int, cuda: bool
) -> tuple[list[str], list[str], dict[str, Any]]:
    """Translations of the test set, greedy ones of training sentences, and the test loss."""
    tokenizer = data.tokenizer
    texts = translate(model, tokenizer, [source for source, _ in data.test], beam, bf16=cuda)
    greedy = translate(model, tokenizer, [source for source, _ in data.train[:GREEDY]], 1, bf16=cuda)
    return texts, greedy, {"test_loss": loss_of(model, data.test, 2 * training.tokens, cuda)}


def save(model: Any, data: Encoded, folder: Path) -> None:
    """Write an ordinary model folder: weights, settings, a fast tokenizer, and what text it takes."""
    model.save_pretrained(folder)
    save_text(data, folder)


def save_text(data: Encoded, folder: Path) -> None:
    """Write the tokenizer to a model's folder, and what text the model takes."""
    subwords.fast(data.tokenizer).save_pretrained(folder)
    card = {
        "source": data.source,
        "target": data.target,
        "tokenised": data.tokenised,
        "lowercase": data.lowercase,
        "escaped": data.escaped,
        "dashes": data.dashes,
    }
    write_whole(folder / CARD, json.dumps(card, indent=1))

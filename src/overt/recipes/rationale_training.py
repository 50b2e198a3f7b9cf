"""Train classifiers whose rationales are judged: an encoder over windows, a biLSTM, attention that pools."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import overt
from overt._files import write_whole
from overt._modes import evaluating
from overt.data.eraser import Example
from overt.judge.rationales.words import WordClassifier
from overt.mechanisms.mechanism import Mechanism
from overt.models.rationale import RationaleClassifier
from overt.recipes._rows import settings_of
from overt.recipes._training import leave_memory, short_products, times, torch_device
from overt.recipes.translation_training import Batches, fit

TEST_BATCH = 8  # long texts, whose encoder keeps maps
TRAINED, MODEL = "trained.json", "model"  # of a run, once it is trained: its numbers, and the model
Row = tuple[dict[str, list[int]], int]  # a text's arguments, and its class


@dataclass(frozen=True)
class RationaleTraining:
    """Settings of a training: those of DeYoung et al. 2020, but for the encoder.

    Attributes:
        updates: of the optimizer at most.
        batch: texts of a batch, of similar length.
        learning_rate: of Adam, constant.
        clip: greatest norm of the gradients.
        patience: epochs without a higher validation accuracy after which training stops; the best epoch's
            weights are kept.
        layers: of the encoder that are trained, the last ones; 0 for all, and its embeddings.
        hidden: width of the LSTM in each direction.
        dropout: around the LSTM.
        window: tokens of a window.
    """

    updates: int
    batch: int = 4
    learning_rate: float = 2e-5
    clip: float = 10.0
    patience: int = 5
    layers: int = 2
    hidden: int = 128
    dropout: float = 0.2
    window: int = 512

    def settings(self) -> dict[str, Any]:
        """As plain JSON."""
        return asdict(self)


@dataclass(frozen=True)
class RationaleRow:
    """A form of attention.

    Attributes:
        form: its name.
        mechanisms: of the encoder.
        methods: that are judged.
    """

    form: str
    mechanisms: tuple[Mechanism, ...]
    methods: tuple[str, ...]

    def settings(self) -> dict[str, Any]:
        """As plain JSON."""
        return {
            "form": self.form,
            "mechanisms": settings_of(self.mechanisms),
            "methods": list(self.methods),
        }


class Reviews(NamedTuple):
    """The texts.

    Attributes:
        name: of the data.
        splits: "train", "val" and "test".
        classes: their names.
        stand_in: whether they are generated.
    """

    name: str
    splits: dict[str, list[Example]]
    classes: tuple[str, ...]
    stand_in: bool

    @property
    def sha256(self) -> str:
        """Of all texts, classes and rationales."""
        rows = [
            [example.name, example.words, example.label, example.evidence, example.query]
            for examples in self.splits.values()
            for example in examples
        ]
        return hashlib.sha256(json.dumps(rows).encode()).hexdigest()

    def share(self, split: str) -> float:
        """Mean share of the words that is in rationales, of the texts that have one."""
        marked = [example.rationale.mean() for example in self.splits[split] if example.evidence]
        return float(sum(marked) / len(marked))

    def describe(self) -> dict[str, Any]:
        """For the result file."""
        return {
            "name": self.name,
            "sizes": {split: len(examples) for split, examples in self.splits.items()},
            "shares": {split: self.share(split) for split in self.splits},
            "words": {
                split: sum(len(example.words) for example in examples) / len(examples)
                for split, examples in self.splits.items()
            },
            "sha256": self.sha256,
        }


def network(
    path: str, classes: int, mechanisms: Sequence[Mechanism], training: RationaleTraining, seed: int
) -> Any:
    """The model that a training starts from; the same but for the mechanisms for all forms."""
    from transformers import set_seed

    set_seed(seed)
    model = RationaleClassifier.from_encoder(
        path,
        window=training.window,
        hidden=training.hidden,
        dropout=training.dropout,
        num_labels=classes,
    )
    if mechanisms:
        overt.attach(model, *mechanisms, seed=seed)
    freeze(model, training.layers)
    return model


def freeze(model: Any, layers: int) -> None:
    """Train the encoder's last layers alone, beside the head and mechanisms' parameters; 0 trains all."""
    if layers == 0:
        return
    stacks = [module for module in model.encoder.modules() if isinstance(module, nn.ModuleList)]
    stack = max(stacks, key=len, default=None)
    if stack is None or len(stack) < layers:
        found = 0 if stack is None else len(stack)
        raise ValueError(f"the encoder must have at least {layers} layers to train, got {found}")
    last = {id(parameter) for layer in list(stack)[-layers:] for parameter in layer.parameters()}
    for name, parameter in model.encoder.named_parameters():
        parameter.requires_grad_(id(parameter) in last or ".overt." in f".{name}")


def coded(classifier: WordClassifier, examples: Sequence[Example]) -> list[Row]:
    """Arguments and labels of texts."""
    return [
        (
            classifier.code(classifier.read(example.words, example.query, example.name)).arguments,
            example.label,
        )
        for example in examples
    ]


def collate(classifier: WordClassifier, rows: Sequence[Row]) -> dict[str, Tensor]:
    """A padded batch with labels."""
    batch = classifier.batch([arguments for arguments, _ in rows])
    return {**batch, "labels": torch.tensor([label for _, label in rows], device=batch["input_ids"].device)}


def similar(rows: Sequence[Row], size: int, seed: int) -> list[list[int]]:
    """Numbers of rows in batches of similar length; a smaller last one is left out."""
    order = list(range(len(rows)))
    Random(seed).shuffle(order)
    order.sort(key=lambda number: len(rows[number][0]["input_ids"]))
    size = min(size, len(rows))
    return [order[start : start + size] for start in range(0, len(order) - size + 1, size)]


def batches_of(
    classifier: WordClassifier, examples: Sequence[Example], training: RationaleTraining, seed: int
) -> Batches:
    """The training set in batches."""
    rows: Any = coded(classifier, examples)
    return Batches(rows, similar(rows, training.batch, seed), partial(collate, classifier))


@torch.no_grad()
def accuracy(classifier: WordClassifier, rows: Sequence[Row]) -> float:
    """Share of texts whose class is predicted, without dropout."""
    hits = 0
    order = sorted(range(len(rows)), key=lambda number: len(rows[number][0]["input_ids"]))
    with evaluating(classifier.model):
        for start in range(0, len(order), TEST_BATCH):
            batch = collate(classifier, [rows[number] for number in order[start : start + TEST_BATCH]])
            labels = batch.pop("labels")
            hits += int((classifier.model(**batch).logits.argmax(dim=-1) == labels).sum())
    return hits / len(rows)


def train(
    folder: Path,
    reviews: Reviews,
    tokenizer: Any,
    path: str,
    mechanisms: Sequence[Mechanism],
    training: RationaleTraining,
    seed: int,
    device: str = "auto",
    told: Callable[[int], object] | None = None,
) -> tuple[Any, dict[str, Any]]:
    """Train one classifier; return it with the best epoch's weights, and the numbers of its training.

    Both are stored, so that one that is trained already is loaded: what was measured of it, and what will be,
    are of the same weights.

    Args:
        folder: of the run: checkpoints, the best epoch's weights, validation accuracies, the trained model.
        reviews: the texts.
        tokenizer: of the encoder.
        path: of the encoder.
        mechanisms: to attach.
        training: settings.
        seed: of the head, batches, dropout and noise. Models with the same seed see the same batches.
        device: "cpu", "cuda" or "auto".
        told: called with the number of finished updates after each of them.
    """
    if (folder / TRAINED).is_file():
        known: dict[str, Any] = json.loads((folder / TRAINED).read_text())
        loaded: Any = (
            overt.load(folder / MODEL, cls=RationaleClassifier)
            if mechanisms
            else RationaleClassifier.from_pretrained(folder / MODEL)
        )
        return loaded.to(torch_device(device)).eval(), known
    model = network(path, len(reviews.classes), mechanisms, training, seed)
    classifier = WordClassifier(model, tokenizer)
    batches = batches_of(classifier, reviews.splits["train"], training, seed)
    held = coded(classifier, reviews.splits["val"])
    with short_products(device):
        numbers = fit(
            model,
            folder,
            batches,
            lambda _: -accuracy(classifier, held),
            training,
            None,
            seed,
            device,
            told,
            halves=False,
            lr_scheduler_type="constant",
            weight_decay=0.0,
            max_grad_norm=training.clip,
        )
    numbers["valid_accuracy"] = -numbers.pop("valid_loss")
    numbers["valid_accuracies"] = [-loss for loss in numbers.pop("valid_losses")]
    numbers["trained"] = sum(p.numel() for p in model.parameters() if p.requires_grad)
    numbers["added"] = sum(p.numel() for name, p in model.named_parameters() if ".overt." in name)
    model.save_pretrained(folder / MODEL)
    tokenizer.save_pretrained(folder / MODEL)
    write_whole(folder / TRAINED, json.dumps(numbers))
    leave_memory(device)
    return model.to(torch_device(device)).eval(), numbers


def step_times(
    reviews: Reviews,
    tokenizer: Any,
    path: str,
    mechanisms: Sequence[Mechanism],
    training: RationaleTraining,
    device: str,
    updates: int,
) -> list[float]:
    """Milliseconds of updates, on some of the texts."""
    where = torch_device(device)
    model = network(path, len(reviews.classes), mechanisms, training, 0).to(where).train()
    some = reviews.splits["train"][: (updates + 1) * training.batch]
    batches = batches_of(WordClassifier(model, tokenizer), some, training, 0)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], training.learning_rate)
    return times(model, optimizer, lambda update: batches[(update % len(batches), 0)], where, updates)


def small_encoder(folder: Path, words: Sequence[str]) -> str:
    """A small BERT with random weights and a tokenizer of whole words, for generated texts."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from tokenizers.processors import TemplateProcessing
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast, set_seed

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    numbers = {word: number for number, word in enumerate([*special, *words])}
    tokenizer = Tokenizer(WordLevel(numbers, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token"), special, strict=True))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)  # type: ignore[no-untyped-call]
    set_seed(0)
    config = BertConfig(
        vocab_size=len(numbers),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=64,
    )
    BertModel(config).save_pretrained(folder)  # type: ignore[no-untyped-call]
    return str(folder)

"""Train the LSTM of Deng et al. 2018 on a parallel corpus with the Hugging Face Trainer; translate with it.

The learning rate is halved after epochs whose validation loss did not fall, and the best epoch's weights are
kept. Source and target have vocabularies of their own, the pieces that occur on their side of the training
set, as in the paper.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from overt._files import write_whole
from overt.data import subwords
from overt.data.subwords import EOS_ID as JOINT_EOS
from overt.data.subwords import PAD_ID as JOINT_PAD
from overt.data.subwords import UNKNOWN_ID as JOINT_UNKNOWN
from overt.mechanisms.mechanism import Mechanism
from overt.models.folders import CONFIG
from overt.models.seq2seq import Seq2Seq
from overt.models.word_by_word import IGNORED
from overt.recipes._rows import settings_of
from overt.recipes._training import processes
from overt.recipes.translation_training import (
    GREEDY,
    Batches,
    Encoded,
    Ids,
    as_trained,
    as_written,
    fit,
    padded,
    save_text,
    time_updates,
)
from overt.recipes.translation_training import collate as collate_ids

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

PAD, BOS, EOS, UNKNOWN = range(4)
VOCABULARIES = "vocabularies.json"
TEST_BATCH = 64


@dataclass(frozen=True)
class LstmTraining:
    """Settings of a training.

    Attributes:
        updates: most steps of the optimizer.
        batch: pairs of a batch.
        learning_rate: of Adam, at the start.
        dropout: see `Seq2Seq`.
        clip: largest norm of the gradient.
        patience: epochs without a lower validation loss after which training stops.
        pretraining: share of the updates that relaxed attention trains on Jensen's bound.
        longest: most tokens of a sentence in training; longer pairs are left out.
    """

    updates: int
    batch: int = 64
    learning_rate: float = 1e-3
    dropout: float = 0.3
    clip: float = 5.0
    patience: int = 4
    pretraining: float = 0.3
    longest: int = 125

    def settings(self) -> dict[str, Any]:
        """As plain JSON."""
        return asdict(self)


@dataclass(frozen=True)
class LstmRow:
    """A row of a table: an attention and its mechanisms.

    Attributes:
        attention: one of `models.seq2seq.ATTENTIONS`.
        mechanisms: of the attention.
        sizes: arguments of `Seq2Seq` other than its defaults.
    """

    attention: str
    mechanisms: tuple[Mechanism, ...] = ()
    sizes: dict[str, int] = field(default_factory=dict)

    def settings(self) -> dict[str, Any]:
        """The row as plain JSON."""
        mechanisms = settings_of(self.mechanisms)
        return {"attention": self.attention, "mechanisms": mechanisms, "sizes": self.sizes}


class Vocabulary:
    """The pieces of one language: ids of both languages' tokenizer ↔ ids of the network."""

    def __init__(self, pieces: Sequence[int]) -> None:
        self.pieces = list(pieces)
        self.ids = {piece: number for number, piece in enumerate(self.pieces, start=4)}
        self.ids |= {JOINT_PAD: PAD, JOINT_EOS: EOS, JOINT_UNKNOWN: UNKNOWN}

    @classmethod
    def of(cls, sentences: Sequence[Ids]) -> Vocabulary:
        """The pieces that occur in sentences."""
        special = {JOINT_PAD, JOINT_EOS, JOINT_UNKNOWN}
        return cls(sorted({piece for sentence in sentences for piece in sentence} - special))

    def __len__(self) -> int:
        return len(self.pieces) + 4

    def encode(self, sentence: Ids) -> Ids:
        """Ids of the network; unknown pieces become UNKNOWN."""
        return [self.ids.get(piece, UNKNOWN) for piece in sentence]

    def decode(self, sentence: Ids) -> Ids:
        """Ids of the tokenizer, up to the end of the sentence."""
        end = sentence.index(EOS) if EOS in sentence else len(sentence)
        words = [number for number in sentence[:end] if number not in (PAD, BOS)]
        return [JOINT_UNKNOWN if number == UNKNOWN else self.pieces[number - 4] for number in words]


class SideTokenizer:
    """The tokenizer of one language, as `overt.trace` takes it: text → ids of the network and their names.

    Attributes:
        target: the tokenizer of the other language, if this is the source's.
    """

    is_fast = True  # it knows where in the text its pieces are
    pad_token_id, bos_token_id, eos_token_id, unk_token_id = PAD, BOS, EOS, UNKNOWN
    all_special_ids = (PAD, BOS, EOS, UNKNOWN)
    names = (subwords.PAD, "<s>", subwords.EOS, subwords.UNKNOWN)

    def __init__(
        self, joint: PreTrainedTokenizerFast, vocabulary: Vocabulary, target: SideTokenizer | None = None
    ) -> None:
        self.joint, self.vocabulary = joint, vocabulary
        self.target = self if target is None else target

    def __len__(self) -> int:
        return len(self.vocabulary)

    def __call__(
        self, text: str | None = None, *, text_target: str | None = None, **how: Any
    ) -> dict[str, Any]:
        """As the tokenizer of both languages, with ids of this one; those of `text_target` are `target`'s."""
        if text_target is not None:
            return self.target(text_target, **how)
        coded = dict(self.joint(text, **how))
        return {**coded, "input_ids": self.vocabulary.encode(coded["input_ids"])}

    def convert_ids_to_tokens(self, ids: Ids) -> list[str]:
        """Pieces."""
        pieces = self.vocabulary.pieces
        return [self.names[n] if n < 4 else str(self.joint.convert_ids_to_tokens(pieces[n - 4])) for n in ids]

    def decode(self, ids: Ids, **how: Any) -> str:
        """Text."""
        return str(self.joint.decode(self.vocabulary.decode(ids), **how))


def vocabularies(data: Encoded) -> tuple[Vocabulary, Vocabulary]:
    """Those of source and target."""
    source, target = zip(*data.train, strict=True)
    return Vocabulary.of(source), Vocabulary.of(target)


def collate(both: tuple[Vocabulary, Vocabulary], pairs: Sequence[tuple[Ids, Ids]]) -> dict[str, Tensor]:
    """A batch, in the network's ids."""
    ours = [(both[0].encode(source), both[1].encode(target)) for source, target in pairs]
    return collate_ids(ours, start=BOS)


def sentence_batches(
    pairs: Sequence[tuple[Ids, Ids]], size: int, seed: int, least: int = 1
) -> list[list[int]]:
    """Numbers of pairs in batches of `size`, of similar length; a last one below `least` is joined."""
    order = list(range(len(pairs)))
    Random(seed).shuffle(order)
    order.sort(key=lambda number: (len(pairs[number][1]), len(pairs[number][0])))
    batches = [order[start : start + size] for start in range(0, len(order), size)]
    if len(batches) > 1 and len(batches[-1]) < least:
        batches[-2:] = [batches[-2] + batches[-1]]
    return batches


def network(row: LstmRow, both: tuple[Vocabulary, Vocabulary], dropout: float, seed: int) -> Seq2Seq:
    """The untrained network of a row."""
    from transformers import set_seed

    set_seed(seed)
    ids = {"pad_id": PAD, "bos_id": BOS, "eos_id": EOS}
    arguments: dict[str, Any] = {**row.sizes, **ids, "dropout": dropout}
    return Seq2Seq(len(both[0]), len(both[1]), row.attention, row.mechanisms, **arguments)  # type: ignore[arg-type]


def train(
    folder: Path,
    data: Encoded,
    row: LstmRow,
    training: LstmTraining,
    seed: int,
    device: str = "auto",
    told: Callable[[int], object] | None = None,
) -> tuple[Any, dict[str, Any]]:
    """Train one network; return it with the best epoch's weights, in evaluation mode, and its numbers.

    Args:
        folder: of the run: checkpoints, the best epoch's weights, validation losses.
        data: the corpus.
        row: attention and mechanisms.
        training: settings.
        seed: of initial weights, batches and dropout. The noise of random weights goes by update and by the
            place in a batch, with the same key for all seeds.
        device: "cpu", "cuda" or "auto".
        told: called with the number of finished updates after each of them.
    """
    both = vocabularies(data)
    model = network(row, both, training.dropout, seed)
    count = processes(device)
    batched = sentence_batches(data.train, training.batch, seed, count)
    batches = Batches(data.train, batched, partial(collate, both), count)
    relaxed = row.attention == "variational-relaxed"

    def validate(model: Any) -> float:
        return likelihood(model, both, data.valid)[0]

    def on_step(step: int) -> None:
        model.step.fill_(step)
        model.jensen = relaxed and step < training.pretraining * training.updates

    numbers = fit(
        model,
        folder,
        batches,
        validate,
        training,
        None,
        seed,
        device,
        told,
        on_step=on_step,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=training.clip,
    )
    return model, {**numbers, "vocabularies": [len(vocabulary) for vocabulary in both]}


@torch.no_grad()
def likelihood(
    model: Any, both: tuple[Vocabulary, Vocabulary], pairs: Sequence[tuple[Ids, Ids]]
) -> tuple[float, float]:
    """Mean negative log-likelihood of a target token, and mean entropy of the prior attention."""
    was_training = model.training
    model.eval()
    device = next(model.parameters()).device
    total, entropy, count = 0.0, 0.0, 0
    for numbers in sentence_batches(pairs, TEST_BATCH, 0):
        batch = {name: value.to(device) for name, value in collate(both, [pairs[n] for n in numbers]).items()}
        output = model(**batch, output_attentions=True)
        real = batch["labels"] != IGNORED
        total -= float(output["log_probs"].double().sum())
        entropy += float(output["entropy"].double()[real].sum())
        count += int(real.sum())
    model.train(was_training)
    return total / count, entropy / count


def translate(
    model: Any, tokenizer: Tokenizer, both: tuple[Vocabulary, Vocabulary], sources: Sequence[Ids], beam: int
) -> list[str]:
    """Translations of sentences given as the tokenizer's ids."""
    device = next(model.parameters()).device
    texts = [""] * len(sources)
    longest = 2 * max(map(len, sources)) + 10  # of all, so that translations do not depend on the batch
    order = sorted(range(len(sources)), key=lambda number: -len(sources[number]))
    for start in range(0, len(order), TEST_BATCH):
        numbers = order[start : start + TEST_BATCH]
        input_ids = padded([both[0].encode(sources[number]) for number in numbers], PAD).to(device)
        tokens, _ = model.translate(input_ids, input_ids.ne(PAD).long(), beam=beam, max_length=longest)
        rows = [both[1].decode(row) for row in tokens.tolist()]
        for number, text in zip(numbers, tokenizer.decode_batch(rows), strict=True):
            texts[number] = text.strip()
    return texts


def measure(
    model: Any, data: Encoded, training: LstmTraining, beam: int, cuda: bool
) -> tuple[list[str], list[str], dict[str, Any]]:
    """Translations of the test set, greedy ones of training sentences, perplexity and entropy."""
    del training, cuda
    both = vocabularies(data)
    texts = translate(model, data.tokenizer, both, [source for source, _ in data.test], beam)
    greedy = translate(model, data.tokenizer, both, [source for source, _ in data.train[:GREEDY]], 1)
    loss, entropy = likelihood(model, both, data.test)
    return texts, greedy, {"test_loss": loss, "perplexity": math.exp(loss), "entropy": entropy}


def save(model: Seq2Seq, data: Encoded, folder: Path) -> None:
    """Write the network, its vocabularies and the tokenizer to a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    model.save(folder)
    save_text(data, folder)
    pieces = {name: each.pieces for name, each in zip(("source", "target"), vocabularies(data), strict=True)}
    write_whole(folder / VOCABULARIES, json.dumps(pieces))


def load(folder: str | Path) -> Seq2Seq:
    """The network in a folder that `save` wrote, with its tokenizer: `overt.trace(load(folder), text)`."""
    from transformers import PreTrainedTokenizerFast

    folder = Path(folder)
    model, (source, target) = Seq2Seq.load(folder), read_vocabularies(folder)
    sizes = model.source_words.num_embeddings, model.target_words.num_embeddings
    if sizes != (len(source), len(target)):
        found = f"{len(source)} and {len(target)} ids, the network {sizes[0]} and {sizes[1]}"
        raise ValueError(f"{folder / VOCABULARIES} does not fit {CONFIG}: the vocabularies have {found}")
    try:
        joint = PreTrainedTokenizerFast.from_pretrained(folder)
    except Exception as error:  # of several kinds, some of them tokenizers' own
        raise ValueError(f"{folder} holds no tokenizer that can be read: is it complete?") from error
    model.tokenizer = SideTokenizer(joint, source, SideTokenizer(joint, target))
    return model


def read_vocabularies(folder: Path) -> tuple[Vocabulary, Vocabulary]:
    """Those of source and target, from a folder that `save` wrote."""
    path = folder / VOCABULARIES
    if not path.is_file():
        raise FileNotFoundError(f"{folder} holds no {VOCABULARIES}: give a folder that training wrote")
    try:
        pieces = json.loads(path.read_text())
        return Vocabulary(pieces["source"]), Vocabulary(pieces["target"])
    except (ValueError, KeyError, TypeError):
        raise ValueError(f'{path} must hold {{"source": […], "target": […]}}: is it complete?') from None


def translate_lines(
    folder: Path, lines: Sequence[str], card: Mapping[str, Any], beam: int, device: torch.device
) -> list[str]:
    """Translations of ordinary text with the network in a folder that `save` wrote; empty lines stay empty.

    Args:
        folder: of the network.
        lines: the sentences.
        card: what text the network takes and gives (`translation_training.save_text`).
        beam: number of beams; 1 is greedy.
        device: where to translate.
    """
    from tokenizers import Tokenizer

    model = Seq2Seq.load(folder).to(device).eval()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    both = read_vocabularies(folder)
    texts = as_trained(lines, card)
    full = [number for number, text in enumerate(texts) if text]
    sources = [tokenizer.encode(texts[number]).ids for number in full]
    translations = [""] * len(texts)
    for number, text in zip(full, translate(model, tokenizer, both, sources, beam), strict=True):
        translations[number] = text
    return as_written(translations, card)


def step_times(
    data: Encoded,
    row: LstmRow,
    training: LstmTraining,
    device: str,
    updates: int = 100,
    model: Any = None,
    bf16: bool = False,
) -> list[float]:
    """Milliseconds of updates, which mean something if nothing else is running; see `translation_training`.

    A `model` of another kind needs a buffer `step`, and a loss in what it returns; `bf16` is autocast.
    """
    both = vocabularies(data)
    if model is None:
        model = network(row, both, training.dropout, 0)

    def loss(batch: dict[str, Tensor], number: int) -> Tensor:
        model.step.fill_(number)
        with torch.autocast(device, torch.bfloat16, enabled=bf16):
            value: Tensor = model(**batch)["loss"]
        return value

    batches = Batches(data.train, sentence_batches(data.train, training.batch, 0), partial(collate, both))
    return time_updates(model, batches, loss, device, updates, training.clip)

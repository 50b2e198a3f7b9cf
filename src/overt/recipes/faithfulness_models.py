"""Models that the faithfulness recipe judges, as classifiers of texts whose words may be deleted."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from overt._files import write_whole
from overt.data.agreement import VOCABULARY, Sentence, encode
from overt.data.batching import batches, pad_batch
from overt.mechanisms.mechanism import Mechanism
from overt.models.agreement import AgreementClassifier
from overt.models.folders import WEIGHTS, load_weights
from overt.recipes._rows import folder_name
from overt.recipes._runs import read_settings
from overt.recipes._training import times
from overt.recipes.ea_rationales import MOVIES_NAME
from overt.recipes.grammar_training import BATCH, LEARNING_RATE, train_on_grammar
from overt.recipes.rationale_training import MODEL, TRAINED

if TYPE_CHECKING:
    from rich.console import Console

LONGEST = 32  # tokens
OF_TABLE_8 = Path(folder_name(MOVIES_NAME))  # where a folder of ea-table-8's runs has those on movie reviews
# Verbs that follow a subject, with a space before them.
VERBS = ((" is", " was", " has"), (" are", " were", " have"))


def grammar_tokenizer() -> Any:
    """A tokenizer of whole words for the grammar's sentences, which begin with [CLS]."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    numbers = {word: number for number, word in enumerate(VOCABULARY)}
    tokenizer = Tokenizer(WordLevel(numbers, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    first = "[CLS]"
    tokenizer.post_processor = TemplateProcessing(
        single=f"{first} $A", special_tokens=[(first, numbers[first])]
    )
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token=first,
        model_input_names=["input_ids", "attention_mask"],
        model_max_length=LONGEST,
    )


def grammar_classifier(mechanisms: Sequence[Mechanism]) -> Any:
    """The demo's network, untrained, with what the judge asks of a classifier."""
    model: Any = AgreementClassifier(len(VOCABULARY), mechanisms, max_length=LONGEST, dropout=0.0)
    model.config = SimpleNamespace(num_labels=2, id2label={0: "singular", 1: "plural"})
    return model


def train_grammar(
    folder: Path,
    mechanisms: Sequence[Mechanism],
    train: Sequence[Sentence],
    steps: int,
    seed: int,
    device: str,
    console: Console,
) -> Any:
    """The demo's network, trained as in the demo, or loaded where it has been; in evaluation mode."""
    from transformers import set_seed

    set_seed(seed)
    model = grammar_classifier(mechanisms)
    if (folder / WEIGHTS).exists():
        return load_weights(model, folder).eval()
    train_on_grammar(model, folder, train, steps, seed, console, device)
    return model.eval()


def update_seconds(model: Any, train: Sequence[Sentence], device: torch.device) -> float:
    """Seconds of an update of the demo's network, the fastest of as many as there are batches but one."""
    ready = [pad_batch(items, encode) for items in batches(train, BATCH, 0)]
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE)
    spent = times(model.to(device).train(), optimizer, ready.__getitem__, device, len(ready) - 1)
    return min(spent) / 1000


class VerbNumber(nn.Module):
    """A causal language model as a classifier of the number of the verb that follows a text.

    Logits (batch, 2) are the log-sums of the probabilities of "is", "was" and "has", and of "are", "were" and
    "have", up to a constant.

    Args:
        model: a causal language model.
        tokenizer: its tokenizer.

    Attributes:
        prefixes: whether `by_prefix` can be asked. It can where the model's cache holds keys and values of
            each text and nothing else.
    """

    verbs: Tensor

    def __init__(self, model: Any, tokenizer: Any) -> None:
        super().__init__()
        self.model = model
        self.config = SimpleNamespace(
            num_labels=2,
            id2label={0: "singular", 1: "plural"},
            max_position_embeddings=model.config.max_position_embeddings,
        )
        ids = [[tokenizer(verb, add_special_tokens=False)["input_ids"] for verb in verbs] for verbs in VERBS]
        for verb, pieces in zip((*VERBS[0], *VERBS[1]), (*ids[0], *ids[1]), strict=True):
            if len(pieces) != 1:
                raise ValueError(f"the tokenizer must have a token for {verb!r}, got {len(pieces)} pieces")
        self.register_buffer("verbs", torch.tensor(ids).squeeze(-1), persistent=False)
        self.prefixes = keeps_keys(model)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> SimpleNamespace:
        """Logits of both numbers, after each row's last token.

        Args:
            input_ids: (batch, sequence), padded on the right.
            attention_mask: (batch, sequence), 0 at padding.
        """
        hidden = self.model.base_model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False)[0]
        last = attention_mask.sum(dim=1) - 1
        return SimpleNamespace(logits=self._logits(hidden[torch.arange(len(last), device=last.device), last]))

    def by_prefix(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """The logits that `forward` gives, where what several rows begin with is read once.

        Token by token, from the first on: rows that have been the same so far are one row of the model, which
        has the keys and values of its beginning from the cache. The 2ⁿ parts of a text of n words take 2ⁿ
        tokens in all, and not n · 2ⁿ⁻¹ and more.
        """
        lengths = attention_mask.sum(dim=1)
        found = torch.empty(len(input_ids), len(VERBS), device=input_ids.device)
        beginnings, cache = torch.zeros_like(lengths), None  # of each row, its number in the model's batch
        for place in range(input_ids.shape[1]):
            left = (lengths > place).nonzero().squeeze(1)
            pairs = torch.stack([beginnings[left], input_ids[left, place]], dim=1)
            new, numbers = torch.unique(pairs, dim=0, return_inverse=True)
            if cache is not None:
                cache.batch_select_indices(new[:, 0])
            read = self.model.base_model(input_ids=new[:, 1:], past_key_values=cache, use_cache=True)
            cache, beginnings[left] = read.past_key_values, numbers
            ended = lengths[left] == place + 1
            found[left[ended]] = self._logits(read[0][numbers[ended], 0]).to(found.dtype)
        return found

    def _logits(self, states: Tensor) -> Tensor:
        """Logits of both numbers from states of the last token, (batch, width)."""
        head: Any = self.model.get_output_embeddings()
        bias = None if head.bias is None else head.bias[self.verbs.flatten()]  # of all words, these alone
        logits = nn.functional.linear(states, head.weight[self.verbs.flatten()], bias)
        return logits.view(-1, *self.verbs.shape).logsumexp(dim=-1)


def keeps_keys(model: Any) -> bool:
    """Whether the cache of a causal model holds keys and values alone, so that a text's can be taken out."""
    from transformers.cache_utils import DynamicCache, DynamicLayer

    first = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    with torch.no_grad():
        cache = getattr(model.base_model(input_ids=first, use_cache=True), "past_key_values", None)
    return isinstance(cache, DynamicCache) and all(type(layer) is DynamicLayer for layer in cache.layers)


def load_verb_number(path: str) -> tuple[VerbNumber, Any]:
    """A causal language model from a folder, as `VerbNumber`, and its tokenizer.

    Texts begin with the token that begins or ends a document, so that there is something to read when all
    words are deleted.
    """
    from tokenizers.processors import TemplateProcessing
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(path)
        model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    except (OSError, ValueError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)[:120]
        raise ValueError(
            f"--language-model {path} must be a causal language model, a folder or on the hub: {reason}"
        ) from None
    first = tokenizer.bos_token or tokenizer.eos_token
    if first is None:
        raise ValueError(f"--language-model {path} must have a token that begins or ends a text")
    number = tokenizer.convert_tokens_to_ids(first)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{first} $A", special_tokens=[(first, number)]
    )
    if tokenizer.pad_token is None:
        tokenizer.pad_token = first
    return VerbNumber(model, tokenizer).eval(), tokenizer


def run_of_table_8(runs: Path, form: str, seed: int, wanted: Mapping[str, Any]) -> Path | None:
    """The run of ea-table-8 whose classifier of movie reviews is there; None if it was not trained or kept.

    Args:
        runs: folder of ea-table-8's runs.
        form: of the attention.
        seed: of the training.
        wanted: settings that a run must have.
    """
    place = runs / OF_TABLE_8
    if not place.is_dir():
        raise FileNotFoundError(
            f"--trained {runs} must be a folder in which ea-table-8 has run: it has no {OF_TABLE_8}"
        )
    run = place / folder_name(form) / f"seed-{seed}"
    if not ((run / TRAINED).is_file() and (run / MODEL / WEIGHTS).is_file()):
        return None
    settings = read_settings(run) or {}
    found = {**settings, "mechanisms": settings.get("row", {}).get("mechanisms")}
    for name, value in wanted.items():
        if found.get(name) != value:
            raise ValueError(f"--trained {run} has {name} {found.get(name)}, but {value} is judged here")
    return run


def adopt(run: Path, folder: Path) -> None:
    """Copy the classifier that a run of ea-table-8 has trained to the folder of another run."""
    shutil.rmtree(folder / MODEL, ignore_errors=True)
    shutil.copytree(run / MODEL, folder / MODEL)
    write_whole(folder / TRAINED, (run / TRAINED).read_text())  # the last, as it says that the model is there

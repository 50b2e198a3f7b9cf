"""The classifier of the ERASER benchmark: an encoder over windows, a biLSTM, and attention that pools.

DeYoung et al. 2020, section 5, "BERT-LSTM", which Wang et al. 2021 use with evolving attention. Texts may be
longer than the encoder takes: it sees them in windows, and the LSTM joins what it makes of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoConfig, AutoModel, PreTrainedConfig, PreTrainedModel
from transformers.utils.generic import ModelOutput

from overt import _check

if TYPE_CHECKING:
    from numpy.typing import NDArray

MULTIPLE = 16  # lengths of encoded windows are rounded up to one, so that there are few shapes


class RationaleConfig(PreTrainedConfig):  # type: ignore[no-untyped-call]
    """Settings of a `RationaleClassifier`.

    Args:
        encoder: config of the encoder, such as a `BertConfig`.
        window: tokens of a window, with those at its ends.
        hidden: width of the LSTM in each direction, of the pooling and of the layer before the last.
        dropout: before and after the LSTM.
        kwargs: as for any config, such as `num_labels`.
    """

    model_type = "overt-rationale"
    sub_configs = {"encoder": AutoConfig}  # noqa: RUF012

    def __init__(
        self,
        encoder: PreTrainedConfig | dict[str, Any] | None = None,
        window: int = 512,
        hidden: int = 128,
        dropout: float = 0.2,
        **kwargs: Any,
    ) -> None:
        if isinstance(encoder, dict):
            encoder = CONFIG_MAPPING[encoder.get("model_type", "bert")](**encoder)
        self.encoder: Any = CONFIG_MAPPING["bert"]() if encoder is None else encoder
        self.window, self.hidden, self.dropout = window, hidden, dropout
        super().__init__(**kwargs)
        _check.whole("window", window, 3)
        _check.whole("hidden", hidden, 1)
        _check.fraction("dropout", dropout)
        most = getattr(self.encoder, "max_position_embeddings", window)
        if window > most:
            raise ValueError(f"window must be at most the encoder's {most} positions, got {window}")


@dataclass
class RationaleOutput(ModelOutput):
    """What a `RationaleClassifier` returns.

    Attributes:
        loss: mean cross-entropy, where labels are given.
        logits: (batch, classes).
        pooling: attention that pools, (batch, words); 0 beyond a text's last word.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    pooling: Tensor | None = None


class TwoWayLSTM(nn.Module):
    """An LSTM that reads sequences of words in both directions.

    It is `nn.LSTM(…, bidirectional=True)` of packed sequences, at the words; what it returns at padding means
    nothing. Each direction reads padded sequences, because cuDNN takes all steps of a narrow LSTM in one
    kernel, but those of packed sequences one by one.

    Args:
        width: of a word's state.
        hidden: width of the LSTM in each direction.
    """

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.width = width
        self.onward = nn.LSTM(width, hidden, batch_first=True)
        self.back = nn.LSTM(width, hidden, batch_first=True)

    def forward(self, x: Tensor, sizes: Tensor) -> Tensor:
        """States, (batch, words, 2 · hidden), of words, (batch, words, width); sizes: (batch,)."""
        place = torch.arange(x.shape[1], device=x.device)
        mirrored = sizes.unsqueeze(1) - 1 - place
        turned = torch.where(mirrored < 0, place, mirrored).unsqueeze(-1)  # padding stays where it is
        onward, _ = self.onward(x)
        back, _ = self.back(x.gather(1, turned.expand_as(x)))
        return torch.cat([onward, back.gather(1, turned.expand_as(back))], dim=-1)


class RationaleClassifier(PreTrainedModel):  # type: ignore[no-untyped-call]
    """Predicts a class from a text of any length, and says how much it attends to each word."""

    config: RationaleConfig
    config_class = RationaleConfig
    base_model_prefix = "encoder"
    main_input_name = "input_ids"
    _supports_sdpa = True
    _supports_attention_backend = True

    def __init__(self, config: RationaleConfig) -> None:
        super().__init__(config)
        self.encoder: Any = AutoModel.from_config(config.encoder)  # type: ignore[no-untyped-call]
        width, hidden = config.encoder.hidden_size, config.hidden
        self.dropout = nn.Dropout(config.dropout)
        self.lstm = TwoWayLSTM(width, hidden)
        self.key = nn.Linear(2 * hidden, hidden)  # additive attention, v · tanh(W h + q)
        self.query = nn.Parameter(torch.zeros(hidden))
        self.value = nn.Linear(hidden, 1, bias=False)
        self.feed_forward = nn.Linear(2 * hidden, hidden)
        self.classifier = nn.Linear(hidden, config.num_labels or 1)
        nn.init.normal_(self.query, std=hidden**-0.5)
        self.post_init()  # type: ignore[no-untyped-call]

    @classmethod
    def from_encoder(cls, path: str, **settings: Any) -> RationaleClassifier:
        """A classifier on a pretrained encoder, with a head drawn at random.

        Args:
            path: of the encoder, a folder or a name on the hub.
            settings: of `RationaleConfig`.
        """
        model = cls(RationaleConfig(AutoConfig.from_pretrained(path), **settings))
        model.encoder = AutoModel.from_pretrained(path, dtype=torch.float32)
        model.config.encoder = model.encoder.config
        return model

    def _init_weights(self, module: nn.Module) -> None:
        """Weights of the head that a file lacks keep those that they were made with."""

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        words: Tensor,
        labels: Tensor | None = None,
    ) -> RationaleOutput:
        """Logits, the attention that pools, and the loss where labels are given.

        Args:
            input_ids: (batch, tokens), windows one after the other: one of any length up to `window`, or
                several of exactly that length, the last ones padded.
            attention_mask: (batch, tokens), 0 at padding.
            words: (batch, tokens), 1 at the first token of each word; the encoder's states of these alone
                are read.
            labels: (batch,).
        """
        ids, mask = self._windows(input_ids, attention_mask)
        real = mask.any(dim=1).cpu()  # a shorter text has fewer windows
        row = (real.cumsum(0) - 1).to(ids.device)
        if not real.all():
            kept = real.nonzero().flatten().to(ids.device)
            ids, mask = ids[kept], mask[kept]
        states = self.encoder(input_ids=ids, attention_mask=mask).last_hidden_state
        return self._pooled(states, row, words, labels)

    def _windows(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        """Ids and mask with a row for each window, (batch · windows, length)."""
        tokens = input_ids.shape[1]
        length = min(tokens, self.config.window)
        if tokens % length:
            raise ValueError(f"input_ids must hold windows of {length} tokens, got {tokens} tokens")
        return input_ids.view(-1, length), attention_mask.view(-1, length)

    def _pooled(
        self, states: Tensor, row: Tensor, words: Tensor, labels: Tensor | None = None
    ) -> RationaleOutput:
        """The output from the encoder's states, (rows, length, width), and the row of each window."""
        (batch, tokens), length = words.shape, states.shape[1]
        sizes = words.sum(dim=1)
        first = words.eq(0).long().argsort(dim=1, stable=True)[:, : int(sizes.max())]  # (batch, words)
        seen = torch.arange(first.shape[1], device=words.device) < sizes.unsqueeze(1)
        window = torch.arange(batch, device=words.device).unsqueeze(1) * (tokens // length) + first // length
        place = row[window] * length + first % length
        x = states.flatten(0, 1).index_select(0, place.flatten()).view(*place.shape, -1)
        x = self.dropout(x)
        h = self.dropout(self.lstm(x, sizes))  # (batch, words, 2 · hidden)

        scores = self.value(torch.tanh(self.key(h) + self.query)).squeeze(-1)
        pooling = scores.masked_fill(~seen, float("-inf")).softmax(dim=1)
        pooled = torch.einsum("bw,bwd->bd", pooling, h)
        logits = self.classifier(F.relu(self.feed_forward(pooled)))
        loss = None if labels is None else F.cross_entropy(logits, labels)
        return RationaleOutput(loss=loss, logits=logits, pooling=pooling)


class InParts(nn.Module):
    """A `RationaleClassifier` that reads many texts at once, without gradients.

    The encoder sees windows of similar length together, without the padding, and windows that are alike once.

    Args:
        model: the classifier.
        most: tokens that the encoder takes at once.
        dtype: of the encoder's products (autocast), such as torch.float16; None for the model's own.
    """

    def __init__(self, model: RationaleClassifier, most: int, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.model, self.most, self.dtype = model, most, dtype

    @property
    def config(self) -> RationaleConfig:
        """That of the classifier."""
        return self.model.config

    @torch.no_grad()
    def forward(self, input_ids: Tensor, attention_mask: Tensor, words: Tensor) -> RationaleOutput:
        """What the classifier returns."""
        model = self.model
        ids, mask = model._windows(input_ids, attention_mask)
        length = ids.shape[1]
        alike, row = different_rows(torch.cat([ids, mask], dim=1))
        ids, mask = alike[:, :length], alike[:, length:]
        # A window ends with its last token that is not padding.
        lengths = (mask * torch.arange(1, length + 1, device=mask.device)).amax(dim=1).tolist()
        order = sorted((number for number, size in enumerate(lengths) if size), key=lengths.__getitem__)
        states = model.query.new_zeros(len(ids), length, model.lstm.width)
        while order:
            longest = min(length, -(-lengths[order[-1]] // MULTIPLE) * MULTIPLE)
            count = max(1, self.most // longest)
            part = torch.tensor(order[-count:], device=ids.device)
            del order[-count:]
            # Not within the classifier's own forward, in which an attention may run once.
            with torch.autocast(ids.device.type, self.dtype, enabled=self.dtype is not None):
                found = model.encoder(input_ids=ids[part, :longest], attention_mask=mask[part, :longest])
            states[part, :longest] = found.last_hidden_state.to(states.dtype)
        return model._pooled(states, row, words)


def different_rows(table: Tensor) -> tuple[Tensor, Tensor]:
    """The rows of a table of whole numbers, (rows, columns), each once, and each row's place among them.

    `torch.unique` sorts whole rows, which takes a GPU long. Here their hashes are sorted; should different
    rows share one, rows are sorted after all.
    """
    odd = torch.randint(2**62, (table.shape[1],), generator=torch.Generator().manual_seed(0)) * 2 + 1
    hashes, row = torch.unique((table * odd.to(table.device)).sum(dim=1), return_inverse=True)
    place = torch.empty_like(hashes).scatter_(0, row, torch.arange(len(table), device=table.device))
    found = table[place]
    if not torch.equal(found[row], table):
        return torch.unique(table, dim=0, return_inverse=True)  # type: ignore[no-any-return]
    return found, row


class Windows(NamedTuple):
    """A text as a `RationaleClassifier` takes it.

    Attributes:
        input_ids: of the windows, one after the other.
        attention_mask: 0 at padding.
        words: 1 at the first token of each word.
        places: number of the document's word that a token belongs to; −1 for all others.
    """

    input_ids: list[int]
    attention_mask: list[int]
    words: list[int]
    places: list[int]


def windows_of(
    document: Sequence[Sequence[int]],
    query: Sequence[Sequence[int]],
    *,
    start: int,
    end: int,
    pad: int,
    window: int,
) -> Windows:
    """Document, separator, query, separator, cut into windows with a token at either end.

    Args:
        document: ids of the pieces of each of its words.
        query: the same; if it is empty, so is the part after the first separator.
        start: id of the token at the start of a window, such as [CLS].
        end: id of the token at its end, such as [SEP], which also separates.
        pad: id of padding.
        window: tokens of a window. A single window is not padded.
    """
    ids, first, places = list[int](), list[int](), list[int]()
    separator: Sequence[Sequence[int]] = [[end]]
    after = [*separator, *query, *separator] if query else separator
    for number, pieces in enumerate([*document, *after]):
        place = number if number < len(document) else -1
        ids += pieces
        first += [1, *[0] * (len(pieces) - 1)][: len(pieces)]
        places += [place] * len(pieces)
    return Windows(*(values.tolist() for values in windowed(ids, first, places, start, end, pad, window)))


def windowed(
    ids: Any, first: Any, places: Any, start: int, end: int, pad: int, window: int
) -> tuple[NDArray[np.int64], ...]:
    """The arrays of `Windows`, from a text's tokens without windows: ids, flags of first ones, places."""
    layout = _layout(len(ids), window)

    def laid(values: Any, *others: int) -> NDArray[np.int64]:
        return np.concatenate([np.asarray(values, dtype=np.int64), others])[layout]

    mask = (layout != len(ids) + 2).astype(np.int64)
    return laid(ids, start, end, pad), mask, laid(first, 0, 0, 0), laid(places, -1, -1, -1)


@lru_cache(maxsize=2048)
def _layout(count: int, window: int) -> NDArray[np.int32]:
    """Which of a text's tokens stands where; its count stands for the start, + 1 the end, + 2 padding."""
    inner = window - 2
    rows = max(1, -(-count // inner))
    table = np.full((rows, window), count + 2, dtype=np.int32)
    tokens = np.full(rows * inner, count + 2, dtype=np.int32)
    tokens[:count] = np.arange(count)
    table[:, 0], table[:, 1:-1] = count, tokens.reshape(rows, inner)
    ends = np.clip(count - inner * np.arange(rows), 0, inner) + 1
    table[np.arange(rows), ends] = count + 1
    return table[0, : count + 2] if rows == 1 else table.reshape(-1)

"""The classifier of rationales: windows, an independent reading of its definition, mechanisms, files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import overt
from overt.models.rationale import (
    RationaleClassifier,
    RationaleConfig,
    TwoWayLSTM,
    Windows,
    different_rows,
    windows_of,
)
from small_rationales import small_rationale

DOCUMENT = [[4], [5, 6], [7], [8, 9], [10], [11]]
IDS = {"start": 2, "end": 3, "pad": 0, "window": 8}


def tensors(*windows: Windows) -> dict[str, torch.Tensor]:
    longest = max(len(each.input_ids) for each in windows)
    columns = zip(*(each[:3] for each in windows), strict=True)
    names = ("input_ids", "attention_mask", "words")
    return {
        name: torch.tensor([row + [0] * (longest - len(row)) for row in rows])
        for name, rows in zip(names, columns, strict=True)
    }


def test_windows_start_anew_and_know_the_first_piece_of_each_word() -> None:
    found = windows_of(DOCUMENT, [[12]], **IDS)
    assert found.input_ids == [2, 4, 5, 6, 7, 8, 9, 3, 2, 10, 11, 3, 12, 3, 3, 0]
    assert found.attention_mask == [1] * 15 + [0]
    assert found.words == [0, 1, 1, 0, 1, 1, 0, 0, 0, 1, 1, 1, 1, 1, 0, 0]
    assert found.places == [-1, 0, 1, 1, 2, 3, 3, -1, -1, 4, 5, -1, -1, -1, -1, -1]
    short = windows_of(DOCUMENT[:1], [], **IDS)
    assert short.input_ids == [2, 4, 3, 3], "a single window is not padded, and no query has no separator"
    assert sum(windows_of([], [], **IDS).words) == 1, "even an empty text has a word to read: the separator"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return small_rationale(tmp_path_factory.mktemp("bert"))


def as_one(lstm: TwoWayLSTM) -> nn.LSTM:
    """The LSTM of torch with the weights of both directions."""
    one = nn.LSTM(lstm.width, lstm.onward.hidden_size, batch_first=True, bidirectional=True)
    weights = lstm.onward.state_dict() | {f"{k}_reverse": w for k, w in lstm.back.state_dict().items()}
    one.load_state_dict(weights)
    return one


def test_the_lstm_reads_padded_texts_as_packed_ones_with_all_gradients() -> None:
    torch.manual_seed(0)
    lstm = TwoWayLSTM(5, 3).double()
    one = as_one(lstm).double()
    sizes = torch.tensor([4, 1, 7])
    x = torch.randn(3, 7, 5, dtype=torch.float64, requires_grad=True)
    words = (torch.arange(7) < sizes.unsqueeze(1)).unsqueeze(-1)
    found = lstm(x, sizes) * words
    packed = pack_padded_sequence(x, sizes, batch_first=True, enforce_sorted=False)
    expected, _ = pad_packed_sequence(one(packed)[0], batch_first=True)
    torch.testing.assert_close(found, expected)
    factor = torch.randn_like(found)
    gradients = [
        torch.autograd.grad((output * factor).sum(), [x, *module.parameters()])
        for output, module in ((found, lstm), (expected, one))
    ]
    torch.testing.assert_close(*gradients)
    assert not lstm(x, sizes)[1, 0].allclose(lstm(x, torch.tensor([4, 2, 7]))[1, 0]), "the length matters"


@torch.no_grad()
def by_hand(model: Any, document: list[list[int]], query: list[list[int]]) -> tuple[Any, Any]:
    """Window by window and word by word."""
    found = windows_of(document, query, **IDS)
    states = []
    for begin in range(0, len(found.input_ids), 8):
        ids = found.input_ids[begin : begin + 8]
        real = sum(found.attention_mask[begin : begin + 8])
        hidden = model.encoder(input_ids=torch.tensor([ids[:real]])).last_hidden_state[0]
        states += [hidden[place] for place in range(real) if found.words[begin + place]]
    h, _ = as_one(model.lstm)(torch.stack(states).unsqueeze(0))
    scores = [
        model.value.weight[0] @ torch.tanh(model.key.weight @ x + model.key.bias + model.query) for x in h[0]
    ]
    weights = torch.stack(scores).exp() / torch.stack(scores).exp().sum()
    pooled = sum(w * x for w, x in zip(weights, h[0], strict=True))
    inner = torch.clamp(model.feed_forward.weight @ pooled + model.feed_forward.bias, min=0)
    return model.classifier.weight @ inner + model.classifier.bias, weights


@torch.no_grad()
def test_it_is_its_definition_alone_and_in_a_padded_batch(model: Any) -> None:
    texts = [(DOCUMENT, [[12]]), (DOCUMENT[:2], [[12], [13]]), (DOCUMENT * 3, [])]
    output = model(**tensors(*(windows_of(*text, **IDS) for text in texts)))
    for row, text in enumerate(texts):
        logits, weights = by_hand(model, *text)
        torch.testing.assert_close(output.logits[row], logits, atol=1e-5, rtol=1e-4)
        pooling = output.pooling[row]
        torch.testing.assert_close(pooling[: len(weights)], weights, atol=1e-5, rtol=1e-4)
        assert not pooling[len(weights) :].any()


@pytest.mark.parametrize(
    "mechanism", [overt.Evolving(), overt.Bayesian()], ids=lambda each: type(each).__name__
)
def test_mechanisms_attach_train_and_are_saved_with_it(tmp_path: Path, mechanism: Any) -> None:
    model = small_rationale(tmp_path / "bert")
    batch = tensors(windows_of(DOCUMENT, [[12]], **IDS), windows_of(DOCUMENT[:2], [], **IDS))
    overt.attach(model, mechanism)
    model.train()
    model(**batch, labels=torch.tensor([0, 1])).loss.backward()
    own = [parameter for name, parameter in model.named_parameters() if ".overt." in name]
    assert own
    assert all(parameter.grad is not None for parameter in own)
    model.eval()
    with torch.no_grad():
        expected = model(**batch).logits
        model.save_pretrained(tmp_path / "saved")
        again = overt.load(tmp_path / "saved", cls=RationaleClassifier)
        torch.testing.assert_close(again.eval()(**batch).logits, expected)


def test_bad_settings_and_inputs_are_named(model: Any) -> None:
    with pytest.raises(ValueError, match="window must be at most the encoder's 512 positions, got 600"):
        RationaleConfig(window=600)
    with pytest.raises(ValueError, match=r"dropout must lie in \[0, 1\], got 2"):
        RationaleConfig(dropout=2.0)
    ids = torch.full((1, 12), 4)
    with pytest.raises(ValueError, match="input_ids must hold windows of 8 tokens, got 12 tokens"):
        model(ids, torch.ones_like(ids), torch.ones_like(ids))


@given(
    rows=st.lists(st.lists(st.integers(-3, 3), min_size=4, max_size=4), min_size=1, max_size=12),
    collide=st.booleans(),
)
def test_different_rows_are_those_of_torch_even_where_hashes_collide(
    rows: list[list[int]], collide: bool
) -> None:
    table = torch.tensor(rows)
    with pytest.MonkeyPatch.context() as patched:
        if collide:
            patched.setattr(torch, "randint", lambda *_, **__: torch.full((4,), -1))  # odd numbers of −1
        found, place = different_rows(table)
    assert torch.equal(found[place], table)
    assert len(found) == len({tuple(row) for row in rows})

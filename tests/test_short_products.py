"""Products in TF32 for a time, beside trainings that ask for them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from overt.recipes import _training


@pytest.fixture
def _shared_products() -> Iterator[None]:
    """Leaves torch's precision of products as it was."""
    shared, own = torch.backends.fp32_precision, torch.backends.cuda.matmul.fp32_precision
    yield
    torch.backends.fp32_precision = shared
    torch.backends.cuda.matmul.fp32_precision = "none" if own == shared else own


@pytest.mark.usefixtures("_shared_products")
def test_products_are_short_in_a_training_that_follows_another_measurement(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Trainings set what all backends share, which does not reach a backend that has its own setting."""

    def enable_tf32(enabled: bool) -> None:  # as transformers does; it does so once in a process
        torch.backends.fp32_precision = "tf32" if enabled else "ieee"

    products = torch.backends.cuda.matmul
    monkeypatch.setattr(_training, "precision_of_products", lambda _: "tf32")
    before = products.fp32_precision
    assert before != "tf32"
    for _ in range(2):  # before a training, and after one
        with _training.short_products("cuda"):
            assert products.fp32_precision == "tf32"
        assert products.fp32_precision == before
        enable_tf32(True)
        assert products.fp32_precision == "tf32"
        with _training.short_products("cuda"):
            assert products.fp32_precision == "tf32"
        enable_tf32(False)
        assert products.fp32_precision == "ieee", "it was not made this backend's own"
        before = "ieee"
    products.fp32_precision = "ieee"
    enable_tf32(True)
    with _training.short_products("cuda"):
        assert products.fp32_precision == "tf32"
    assert products.fp32_precision == "ieee", "its own setting is left to it"

"""The image encoder: its size, its regions and their places, precision, training, files, bad input."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from overt.mechanisms.attention_map import AttentionMap
from overt.models.image_encoder import ImageEncoder, words_loss


def small(words: int = 3, **settings: Any) -> ImageEncoder:
    torch.manual_seed(0)
    return ImageEncoder(words, **{"channels": (4, 6, 8, 10), "width": 12, "blocks": 1, **settings}).eval()


def pictures(batch: int = 2, height: int = 32, width: int = 64) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(256, (batch, 3, height, width), generator=generator, dtype=torch.uint8)


def test_it_is_small_and_so_is_its_file(tmp_path: Path) -> None:
    model = ImageEncoder(2_534)  # the words of Flickr8k that occur five times or more
    assert sum(parameter.numel() for parameter in model.parameters()) <= 3_000_000
    model.save(tmp_path)
    assert (tmp_path / "model.safetensors").stat().st_size <= 12_000_000
    kinds = [module for module in model.modules() if isinstance(module, AttentionMap | nn.MultiheadAttention)]
    assert kinds == []


@pytest.mark.parametrize(("side", "regions"), [(128, 64), (160, 100)])
def test_a_region_is_256_wide_and_stands_for_16_pixels_squared(side: int, regions: int) -> None:
    model = ImageEncoder(5).eval()
    with torch.no_grad():
        assert model.regions(pictures(1, side, side)).shape == (1, regions, 256)
        assert model(pictures(1, side, side)).shape == (1, 5)


def test_regions_come_row_by_row() -> None:
    model = small()
    for height, width in ((32, 256), (256, 32)):
        images = torch.full((1, 3, height, width), 0.5)
        changed = images.clone()
        changed[..., height - 16 :, width - 16 :] = 1.0  # the last cell
        with torch.no_grad():
            moved = (model.regions(changed) - model.regions(images)).abs().sum(dim=-1)
        cells = moved.view(height // 16, width // 16)
        long = cells.sum(dim=0 if width > height else 1)  # along the longer side, 16 cells
        assert float(long[:8].max()) == 0.0
        assert float(long[-2:].min()) > 0.0
    images = pictures().float() / 255
    cells = model.widen(model.body(model.stem(images * 2 - 1)))
    torch.testing.assert_close(model.regions(images)[:, 1 * 4 + 2], cells[:, :, 1, 2])


def test_bytes_are_numbers_from_0_to_1() -> None:
    model, images = small(), pictures()
    torch.testing.assert_close(model(images), model(images.float() / 255))


def test_memory_format_and_autocast_change_rounding_alone() -> None:
    model, images = small(), pictures()
    want = model.regions(images)
    torch.testing.assert_close(model.regions(images.to(memory_format=torch.channels_last)), want)
    with torch.autocast("cpu", torch.bfloat16):
        half = model.regions(images)
        loss = words_loss(model(images), torch.ones(2, 3))
    assert half.dtype == torch.bfloat16
    assert loss.dtype == torch.float32
    torch.testing.assert_close(half.float(), want, rtol=0.1, atol=0.1)


def test_the_loss_is_summed_over_words_and_averaged_over_images() -> None:
    logits = torch.tensor([[0.0, 2.0], [-1.0, 3.0]])
    held = torch.tensor([[True, False], [False, True]])
    p = logits.sigmoid()
    want = -(p[0, 0].log() + (1 - p[0, 1]).log() + (1 - p[1, 0]).log() + p[1, 1].log()) / 2
    torch.testing.assert_close(words_loss(logits, held), want)
    with pytest.raises(ValueError, match=r"targets must have shape \(2, 2\), got \(2, 3\)"):
        words_loss(logits, torch.zeros(2, 3))


@pytest.mark.slow
def test_it_learns_which_words_an_image_holds_and_every_parameter_takes_part() -> None:
    model = small(words=2).train()
    held = torch.tensor([[1, 0], [0, 1], [1, 1], [0, 0]] * 4)
    images = torch.zeros(16, 3, 32, 32)
    images[:, 0, 4:12, 4:12] = held[:, :1, None].float()  # word 0 is red, word 1 is blue
    images[:, 2, 20:28, 20:28] = held[:, 1:, None].float()
    optimizer = torch.optim.Adam(model.parameters(), 3e-2)
    for step in range(25):
        optimizer.zero_grad()
        words_loss(model(images), held).backward()
        if step == 0:
            for name, parameter in model.named_parameters():
                assert parameter.grad is not None, name
                assert parameter.grad.abs().max() > 0, name
        optimizer.step()
    assert torch.equal(model(images) > 0, held == 1)


def test_an_encoder_comes_back_from_its_folder(tmp_path: Path) -> None:
    model = small()
    model.word_names = ["dog", "cat", "a"]
    model.save(tmp_path / "new")
    again = ImageEncoder.load(tmp_path / "new")
    assert torch.equal(again.regions(pictures()), model.regions(pictures()))
    assert again.settings == model.settings
    assert again.word_names == model.word_names
    assert not again.training
    with pytest.raises(
        FileNotFoundError, match=r"holds no config\.json: give a folder that ImageEncoder\.save"
    ):
        ImageEncoder.load(tmp_path)
    model.word_names = ["dog"]
    with pytest.raises(ValueError, match="word_names must be 3 strings, got 1"):
        model.save(tmp_path / "new")


@pytest.mark.parametrize(
    ("images", "error", "message"),
    [
        (
            torch.zeros(3, 32, 32),
            ValueError,
            r"images must have shape \(batch, 3, height, width\), got \(3, 32, 32\)",
        ),
        (torch.zeros(1, 1, 32, 32), ValueError, r"got \(1, 1, 32, 32\)"),
        (torch.zeros(1, 3, 32, 40), ValueError, "sides of images must be multiples of 16, got 1 of 32×40"),
        (torch.zeros(0, 3, 32, 32), ValueError, "got 0 of 32×32"),
        (
            torch.zeros(1, 3, 32, 32, dtype=torch.int64),
            TypeError,
            r"images must be bytes \(uint8\) or numbers",
        ),
    ],
)
def test_bad_images_are_named(images: Tensor, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        small()(images)


def test_bad_settings_are_named() -> None:
    with pytest.raises(ValueError, match="words must be a whole number of at least 1, got 0"):
        small(words=0)
    with pytest.raises(ValueError, match=r"channels must be 4 whole numbers, got \(4, 6\)"):
        small(channels=(4, 6))

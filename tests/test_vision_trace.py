"""Maps of networks over pixels: they are those of the forward pass, shown over the picture, and no more."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import Result
from torch import Tensor, nn
from typer.testing import CliRunner

import overt
from overt import vision
from overt.cli import app
from overt.mechanisms.attention_map import AttentionMap
from overt.tracing.pixels import fitting
from overt.view.index import PageContents, entry_of
from overt.view.terminal import pixel_map
from overt.vision import AugmentedConv2d, ResNet, resnet

Image = pytest.importorskip("PIL.Image", reason="extra vision is not installed")
LABELS = ["cat", "dog", "<b>fish"]
MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.3, 0.25)
BOTH = [overt.Evolving(), overt.Bayesian()]


def network(
    name: str = "aa-resnet-34", mechanisms: list[overt.Mechanism] | None = None, **arguments: Any
) -> ResNet:
    """A small network whose batch norms have seen images; maps are 8 × 8 and 4 × 4."""
    torch.manual_seed(0)
    sizes = {"stem": "cifar", "width": 8, "blocks": [1, 1, 1, 1], "zero_init_last": False, **arguments}
    model = resnet(name, 3, mechanisms=mechanisms, **sizes).train()
    with torch.no_grad():
        side = model.size[0]
        model(images(8, side), overt.Chain(step=0))
    model.labels, model.mean, model.std = LABELS, MEAN, STD
    return model.eval()


def images(batch: int = 2, side: int = 32) -> Tensor:
    return torch.randn(batch, 3, side, side, generator=torch.Generator().manual_seed(3))


def photo(width: int = 60, height: int = 40) -> Any:
    """Red grows to the right, green downwards."""
    red = torch.linspace(0, 255, width).expand(height, width)
    green = torch.linspace(0, 255, height).view(-1, 1).expand(height, width)
    pixels = torch.stack([red, green, torch.full_like(red, 90.0)], dim=-1)
    return Image.fromarray(pixels.to(torch.uint8).numpy())


def softmax_by_hand(layer: AugmentedConv2d, projected: Tensor) -> Tensor:
    """Weights from the 1×1 convolution's output, pair by pair of pixels (Bello et al. 2019, equation 2)."""
    batch, _, height, width = projected.shape
    q, k, _ = projected.split([layer.key_channels, layer.key_channels, layer.value_channels], dim=1)
    q, k = (x.reshape(batch, layer.heads, -1, height, width).double() for x in (q, k))
    down, across = layer.position.vertical.double(), layer.position.horizontal.double()
    middle_down, middle_across = layer.position.height - 1, layer.position.width - 1
    logits = torch.zeros(batch, layer.heads, height, width, height, width, dtype=torch.float64)
    for y in range(height):
        for x in range(width):
            query = q[:, :, :, y, x]
            for row in range(height):
                for column in range(width):
                    key = k[:, :, :, row, column]
                    key = key + down[middle_down + row - y] + across[middle_across + column - x]
                    logits[:, :, y, x, row, column] = (query * key).sum(-1) / query.shape[-1] ** 0.5
    pixels = height * width
    return logits.view(batch, layer.heads, pixels, pixels).softmax(dim=-1)


@torch.no_grad()
def test_maps_are_a_softmax_of_products_and_positions() -> None:
    model, x = network(), images(1, 20)  # smaller images than it was built for: 5 × 5 and 3 × 3
    projected: dict[str, Tensor] = {}
    layers = {path: each for path, each in model.named_modules() if isinstance(each, AugmentedConv2d)}
    for path, layer in layers.items():
        layer.qkv.register_forward_hook(lambda _, __, out, path=path: projected.update({path: out}))
    fine, coarse = overt.trace(model, x, heads=True), overt.trace(model, x, heads=True, stack="3x3")
    assert (fine.grid, coarse.grid) == ((5, 5), (3, 3))
    assert fine.paths + coarse.paths == list(layers)
    for path, cells in zip(fine.paths + coarse.paths, fine.maps + coarse.maps, strict=True):
        expected = softmax_by_hand(layers[path], projected[path])
        assert torch.allclose(cells.double(), expected, atol=1e-5), path


@pytest.mark.parametrize("mechanisms", [[], [overt.Evolving()], BOTH], ids=["plain", "evolving", "both"])
@torch.no_grad()
def test_maps_are_those_of_the_forward_pass(mechanisms: list[overt.Mechanism]) -> None:
    model, x = network(mechanisms=mechanisms), images()
    seen: list[Tensor] = []
    for module in model.modules():
        if isinstance(module, AttentionMap):
            module.register_forward_hook(lambda _, __, weights: seen.append(weights))
    plain = model(x)
    with overt.mechanisms.backend.wanting_maps():
        seen.clear()
        logits = model(x)
    maps = list(seen)
    assert len(maps) == model.attentions == 6
    fine, coarse = overt.trace(model, x, heads=True), overt.trace(model, x, heads=True, stack="4x4")
    assert [len(fine.maps), len(coarse.maps)] == [4, 2]
    for cells, expected in zip(fine.maps + coarse.maps, maps, strict=True):
        assert torch.equal(cells, expected.float())
    assert fine.outputs is not None
    assert torch.equal(fine.outputs, logits)
    assert torch.allclose(fine.outputs, plain, atol=1e-5)
    for cells in fine.maps + coarse.maps:
        assert torch.allclose(cells.sum(dim=-1), torch.ones(()), atol=1e-5)
    assert torch.equal(overt.trace(model, x).maps[0], fine.maps[0].mean(dim=1))


@torch.no_grad()
def test_a_stage_is_a_stack_too_and_an_unknown_one_is_refused() -> None:
    model, x = network(), images(1)
    whole, part = overt.trace(model, x), overt.trace(model, x, stack="layer3")
    assert part.paths == ["layer3.0.conv1", "layer3.0.conv2"] == whole.paths[2:]
    assert torch.equal(part.maps[0], whole.maps[2])
    with pytest.raises(ValueError, match=r"no attention ran in '7x7'; stacks that did: '8x8', '4x4'"):
        overt.trace(model, x, stack="7x7")


@torch.no_grad()
def test_parts_and_draws_are_kept() -> None:
    model, x = network(mechanisms=BOTH), images(1)
    traced = overt.trace(model, x, parts=True, samples=3)
    assert list(traced.parts) == ["attention", "convolution", "fused"]
    starts = [cells is None for cells in traced.parts["convolution"]]
    assert starts == [True, False, False, False], "one chain over both stages of 8 × 8"
    own = traced.parts["attention"]
    sums = torch.stack([cells.sum(dim=-1) for cells in own if cells is not None])
    assert torch.allclose(sums, torch.ones(4, 1, 64), atol=1e-5)
    expected = model(x, overt.Chain(step=0, sample=1, seed=0))
    assert torch.allclose(traced.draws[1].outputs, expected, atol=1e-5)  # type: ignore[arg-type]
    spread = traced.spread("raw").spread
    drawn = torch.stack([draw.maps[2].double() for draw in traced.draws])
    assert torch.allclose(spread[:, 2], drawn.std(dim=0, correction=0))
    assert float(spread.max()) > 0


def test_paths_to_pixels_are_refused_with_the_reason() -> None:
    traced = overt.trace(network(), images(1))
    for read in (traced.rollout, traced.flow):
        with pytest.raises(
            ValueError, match="convolutions and shortcuts pass information on outside attention"
        ):
            read()
    for run in (traced.blankout, traced.gradients):
        with pytest.raises(ValueError, match="so they are not its inputs; raw shows the maps"):
            run()
    with pytest.raises(ValueError, match="has no levels"):
        traced.levels().level(1, "mean", 0.5)
    with pytest.raises(ValueError, match=r"mixing='norm' needs more than weights, and an attention beside"):
        overt.trace(network(), images(1), mixing="norm")


def test_a_saved_trace_is_still_one_of_pixels(tmp_path: Path) -> None:
    traced = overt.trace(network(), images(2))
    traced.save(tmp_path / "trace.safetensors")
    again = overt.Trace.load(tmp_path / "trace.safetensors")
    assert (again.kind, again.grid, again.image) == ("pixels", (8, 8), (32, 32))
    assert again.main_queries() == traced.main_queries() == [4 * 8 + 4] * 2
    assert again.why_not("rollout") == traced.why_not("rollout")
    assert traced.tokens[0][4 * 8 + 4] == "4,4"


# --- Pictures ---


@pytest.mark.parametrize(
    ("size", "given", "resized"),
    [
        ((224, 224), (480, 640), (256, 341)),
        ((224, 224), (640, 480), (341, 256)),
        ((224, 224), (256, 256), (256, 256)),
        ((224, 224), (10, 10), (256, 256)),
        ((112, 224), (100, 100), (256, 256)),
    ],
)
def test_the_middle_of_a_picture_is_kept(
    size: tuple[int, int], given: tuple[int, int], resized: tuple[int, int]
) -> None:
    with torch.device("meta"):
        model = resnet("aa-resnet-34", size=size)
    assert fitting(model, *given).resized == resized
    assert fitting(model, *given).kept == size
    with torch.device("meta"):
        model = resnet("aa-resnet-34", stem="cifar")
    assert str(fitting(model, *given)) == f"{given[0]} × {given[1]} pixels, resized to 32 × 32"


def test_a_picture_is_fitted_and_normalised(tmp_path: Path) -> None:
    model = network(stem="imagenet", size=64)
    picture = photo(219, 73)  # 73 = 64 · 256 / 224: nothing is resized
    picture.save(tmp_path / "photo.png")
    traced = overt.trace(model, tmp_path / "photo.png")
    middle = torch.from_numpy(np.array(picture))[4 : 4 + 64, 77 : 77 + 64]
    assert traced.picture is not None
    assert torch.equal(traced.picture[0], middle)
    normal = (middle / 255 - torch.tensor(MEAN)) / torch.tensor(STD)
    by_tensor = overt.trace(model, normal.permute(2, 0, 1))
    assert torch.allclose(by_tensor.maps[0], traced.maps[0], atol=1e-6)
    assert torch.equal(by_tensor.picture, traced.picture)  # type: ignore[arg-type]
    assert traced.subject is not None
    assert traced.subject.inputs.extra["fittings"] == ["73 × 219 pixels, of which the middle 64 × 64"]
    assert traced.grid == (4, 4)


def test_a_picture_lying_on_its_side_is_set_upright(tmp_path: Path) -> None:
    model, picture = network(), photo(60, 40)
    tags = Image.Exif()
    tags[0x0112] = 6  # the camera was turned: show it turned by 90° clockwise
    picture.save(tmp_path / "photo.png", exif=tags)
    upright = picture.transpose(Image.Transpose.ROTATE_270)
    seen, expected = overt.trace(model, str(tmp_path / "photo.png")), overt.trace(model, upright)
    assert torch.equal(seen.picture, expected.picture)  # type: ignore[arg-type]
    assert not torch.equal(seen.picture, overt.trace(model, picture).picture)  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "CMYK", "1"])
def test_any_8_bit_picture_is_read_in_colour(mode: str) -> None:
    traced = overt.trace(network(), [photo(), photo().convert(mode)])
    assert len(traced) == 2
    assert traced.predictions(1)[1].labels[0] in LABELS


def test_a_network_of_one_channel_sees_grey() -> None:
    model = resnet("aa-resnet-34", 3, stem="cifar", width=8, blocks=[1, 1, 1, 1], in_chans=1).eval()
    model.mean, model.std = (0.5,), (0.2,)
    traced = overt.trace(model, photo())
    assert traced.picture is not None
    assert traced.picture.shape == (1, 32, 32, 3)
    assert torch.equal(traced.picture[..., 0], traced.picture[..., 2])


def test_what_is_no_picture_is_refused_by_name(tmp_path: Path) -> None:
    model = network()
    (tmp_path / "notes.jpg").write_text("not a picture")
    photo().save(tmp_path / "whole.jpg")
    (tmp_path / "torn.jpg").write_bytes((tmp_path / "whole.jpg").read_bytes()[:300])
    refused: list[tuple[Any, type[Exception], str]] = [
        (tmp_path / "gone.jpg", FileNotFoundError, r"picture .*gone\.jpg does not exist"),
        (str(tmp_path), IsADirectoryError, r"is a folder: give a file in it"),
        (tmp_path / "notes.jpg", ValueError, r"notes\.jpg cannot be read as an image$"),
        (tmp_path / "torn.jpg", ValueError, r"torn\.jpg cannot be read as an image: .+$"),
        (
            Image.new("I;16", (9, 9)),
            ValueError,
            r"the picture has more than 8 bits per channel \(mode I;16\)",
        ),
        (
            torch.zeros(3, 8, 8, dtype=torch.uint8),
            ValueError,
            r"normalised float tensor, got a tensor of torch.uint8",
        ),
        (torch.zeros(8, 8), ValueError, r"images must be \(batch, channels, height, width\), got \(8, 8\)"),
        (
            torch.zeros(1, 4, 8, 8),
            ValueError,
            r"images must be \(batch, 3, height, width\), got \(1, 4, 8, 8\)",
        ),
        (photo(303, 3), ValueError, r"a picture of 3 × 303 pixels is too long and narrow"),
        (images(1, 40), ValueError, r"images of 40 × 40 are larger than this network was built for"),
        ({"x": images()}, ValueError, r"inputs must be pictures .* got a dict"),
        ([], ValueError, r"inputs must be pictures .* got a list"),
    ]
    for inputs, kind, error in refused:
        with pytest.raises(kind, match=error):
            overt.trace(model, inputs)
    with pytest.raises(ValueError, match=r"tokenizer has no meaning for a network that attends to pixels"):
        overt.trace(model, images(), tokenizer=object())
    model.mean = None
    with pytest.raises(ValueError, match=r"how to normalise pictures for this ResNet is not known"):
        overt.trace(model, photo())


def test_features_are_no_predictions() -> None:
    model = network()
    model.reset_classifier(0)
    assert overt.trace(model, photo()).outputs is None


def test_a_network_without_attention_has_no_maps() -> None:
    with pytest.raises(ValueError, match=r"^resnet-34 has no attention, and so no maps to trace"):
        overt.trace(network("resnet-34"), photo())


class Plain(nn.Module):
    """A ResNet made elsewhere, with one convolution in each stage."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1)
        for stage, stride in ((1, 1), (2, 2), (3, 2), (4, 2)):
            self.add_module(f"layer{stage}", nn.Sequential(nn.Conv2d(16, 16, 3, stride, 1)))

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv1(x)
        for stage in range(1, 5):
            x = self.get_submodule(f"layer{stage}")(x).relu()
        return x.mean(dim=(2, 3))


def test_an_augmented_network_is_traced_with_its_draws() -> None:
    torch.manual_seed(0)
    model = vision.augment(Plain(), *BOTH, size=32)
    traced = overt.trace(model, images(1), samples=2)
    assert traced.paths == ["layer2.0", "layer3.0"]
    assert (traced.kind, traced.grid, traced.samples) == ("pixels", (8, 8), 2)
    assert not torch.equal(traced.draws[0].maps[0], traced.draws[1].maps[0])
    assert traced.picture is not None
    with pytest.raises(ValueError, match=r"how to normalise pictures for this Plain is not known"):
        overt.trace(model, photo())


# --- Showing ---


def index_of(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="overt-index">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    index: dict[str, Any] = json.loads(found[1])
    return index


def test_a_page_has_the_picture_and_the_grid_beneath_maps_parts_and_spread() -> None:
    model = network(mechanisms=BOTH)
    arguments: dict[str, Any] = {"heads": True, "parts": True, "samples": 2}
    fine = overt.trace(model, photo(), **arguments)
    coarse = overt.trace(model, photo(), stack="4x4", **arguments)
    text = overt.page({"fine": fine, "coarse": coarse}).html()
    assert "<b>fish" not in text
    entries = index_of(text)["traces"]
    assert [entry["grid"] for entry in entries] == [[8, 8], [4, 4]]
    assert [entry["main"] for entry in entries] == [36, 10]
    for entry in entries:
        assert entry["picture"].startswith("data:image/png;base64,")
        assert (entry["kind"], entry["image"]) == ("pixels", [32, 32])
        for name in ("mean", "heads", "part attention", "part convolution heads", "spread", "spread heads"):
            assert name in entry["fields"], name
        assert set(entry["missing"]) == {"rollout", "flow", "blankout", "gradients"}
    assert fine.html().index["title"] == "image, 8 × 8 pixels"


def test_a_page_whose_other_traces_have_a_rollout_has_pixels_too() -> None:
    traced = overt.trace(network(mechanisms=BOTH), photo(), samples=2)
    contents = PageContents(("raw", "rollout"), False, {}, "auto", None, None, None, 0.99, None)
    entry = entry_of(traced, contents, [], 0, 1)
    assert "spread" in entry["fields"]
    assert "rollout spread" not in entry["fields"]
    assert "there is no rollout to pixels" in entry["missing"]["rollout"]


def test_a_figure_shows_raw_maps_and_no_paths() -> None:
    pytest.importorskip("matplotlib")
    traced = overt.trace(network(), photo(), stack="4x4")
    figure = traced.plot("image")
    assert [axes.get_title() for axes in figure.axes[:3]] == ["input", "layer 1", "layer 2"]
    with pytest.raises(ValueError, match="there is no rollout to pixels"):
        traced.plot("graph", method="raw")


def test_a_terminal_shows_a_map_as_shades() -> None:
    traced = overt.trace(network(), photo(), stack="4x4")
    cells = torch.full((1, 16, 16), 0.01)
    cells[0, 5, 2], cells[0, 5, 5] = 0.4, 0.45
    traced.maps[1] = cells
    assert pixel_map(traced, query=5).splitlines() == [
        "  ····██··",
        "  ··[]····",
        "  ········",
        "  ········",
        "  most elsewhere on 0,2: 0.400; on itself: 0.450",
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vision")
    vision.save(network(mechanisms=BOTH), folder / "model", labels=["cat", "dog", "[b]fish"])
    vision.save(network("resnet-34"), folder / "plain")
    photo().save(folder / "photo.png")
    return folder


def overt_command(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(each) for each in arguments])


def test_the_command_prints_classes_and_maps_and_writes_a_page(folder: Path, tmp_path: Path) -> None:
    picture, page = folder / "photo.png", tmp_path / "page.html"
    result = overt_command("trace", picture, "--model", folder / "model", "--samples", 3, "--out", page)
    assert result.exit_code == 0, result.output
    assert "40 × 60 pixels, resized to 32 × 32" in result.output
    assert "[b]fish" in result.output
    assert "mean of 3 posterior samples" in result.output
    shares = [float(share) for share in re.findall(r"([\d.]+) %  ", result.output)]
    assert len(shares) == 3
    assert sum(shares) == pytest.approx(100, abs=0.2)
    assert shares == sorted(shares, reverse=True)
    assert "8x8 pixels, layer 4 of 4 (layer3.0.conv2), raw: what 4,4 draws on" in result.output
    assert "4x4 pixels, layer 2 of 2 (layer4.0.conv2), raw: what 2,2 draws on" in result.output
    index = index_of(page.read_text())
    assert index["title"] == "photo.png"
    assert [(entry["name"], entry["samples"]) for entry in index["traces"]] == [
        ("8x8 pixels", 3),
        ("4x4 pixels", 3),
    ]


def test_the_command_stores_one_size_and_refuses_by_name(folder: Path, tmp_path: Path) -> None:
    picture, model, out = folder / "photo.png", folder / "model", tmp_path / "trace.safetensors"
    (tmp_path / "notes.txt").write_text("not a picture")
    tracing = ("trace", picture, "--model", model)
    assert overt_command(*tracing, "--stack", "4x4", "--out", out).exit_code == 0
    assert overt.Trace.load(out).grid == (4, 4)
    refused = [
        ((*tracing, "--out", out), r"stores one trace: choose a size of maps with --stack: 8x8 or 4x4"),
        ((*tracing, "--method", "rollout"), r"--method rollout: there is no rollout to pixels"),
        (
            (*tracing, "--layer", 3),
            r"--layer must lie in 0 to 1 for 4x4 pixels, got 3: --stack chooses a size",
        ),
        ((*tracing, "--mixing", "norm"), r"mixing='norm' needs more than weights"),
        (("trace", tmp_path / "notes.txt", "--model", model), r"notes\.txt cannot be read as an image"),
        (("trace", tmp_path / "gone.png", "--model", model), r"picture .*gone\.png does not exist"),
        (("trace", picture, "--model", folder / "plain"), r"resnet-34 has no attention, and so no maps"),
        (("serve", "--model", model), r"is a vision network, which is not served: overt trace photo\.jpg"),
    ]
    for arguments, error in refused:
        result = overt_command(*arguments)
        assert result.exit_code != 0
        said = str(result.exception) + result.output
        assert re.search(error, said), (arguments, said)


def test_a_figure_is_drawn_of_a_folder(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    arguments = (
        "--model",
        folder / "model",
        "--view",
        "image",
        "--stack",
        "4x4",
        "--out",
        tmp_path / "f.png",
    )
    result = overt_command("plot", folder / "photo.png", *arguments)
    assert result.exit_code == 0, result.output
    assert (tmp_path / "f.png").stat().st_size > 1000

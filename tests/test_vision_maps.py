"""What maps of vision networks hold: the middle pixel's rows, the second network, Table 7, the figures."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import overt
from overt.models.map_probe import MapProbe
from overt.recipes import ea_probe, ea_vision, ea_vision_figures
from overt.recipes.ea_vision import AA, EA
from overt.recipes.map_probing import Probed, permuted, scores_of
from overt.recipes.vision_maps import attentions_of, layers_of, middle_maps, settle
from overt.vision import ResNet
from small_vision import TINY, recipes_in


def small_net(name: str = "ea-aa-resnet-34") -> ResNet:
    torch.manual_seed(0)
    net = overt.vision.resnet(name, 4, stem="cifar", size=16, zero_init_last=False, **TINY).eval()
    net.mean, net.std = (0.2, 0.3, 0.4), (0.25, 0.2, 0.3)
    return net


def test_rows_of_the_middle_pixel_are_those_that_a_trace_has() -> None:
    net, images = small_net(), torch.randint(256, (3, 3, 16, 16), dtype=torch.uint8)
    assert [layer.map_size for layer in attentions_of(net)] == [(4, 4)] * 4 + [(2, 2)] * 2
    found = middle_maps(net, images, [2, 5])
    assert {layer: tuple(rows.shape) for layer, rows in found.items()} == {2: (3, 8, 4, 4), 5: (3, 8, 2, 2)}
    for layer, stack, place in ((2, "4x4", 1), (5, "2x2", 0)):
        traced = overt.trace(net, net.normalised(images), stack=stack, heads=True)
        side = int(stack[0])
        middle = (side // 2) * side + side // 2
        expected = traced.maps[place][:, :, middle].unflatten(-1, (side, side))
        torch.testing.assert_close(found[layer].float(), expected.float(), atol=1e-3, rtol=0)
    assert not any(module._forward_hooks for module in net.modules()), "nothing is left behind"


def test_layers_are_counted_from_one_and_the_papers_by_default() -> None:
    with torch.device("meta"):
        large = overt.vision.resnet("aa-resnet-34", 10, stem="cifar")
    assert layers_of(None, large) == ((16, 17, 18), (8, 8))
    assert layers_of(None, small_net()) == ((2, 3, 4), (4, 4))
    assert layers_of("9, 10,11", large) == ((9, 10, 11), (8, 8))
    for text in ("0", "27", "two", "1,,2"):
        with pytest.raises(ValueError, match="--layers must be numbers of attentions, from 1 to 26"):
            layers_of(text, large)
    with pytest.raises(ValueError, match=r"--layers must have maps of one size, got 20,21: 8 × 8, 4 × 4"):
        layers_of("20,21", large)


def test_the_untrained_networks_norms_have_the_statistics_of_images() -> None:
    net, images = small_net(), torch.randint(256, (64, 3, 16, 16), dtype=torch.uint8)
    before = [norm.momentum for norm in net.modules() if isinstance(norm, torch.nn.BatchNorm2d)]
    settle(net, images)
    assert not net.training
    assert [n.momentum for n in net.modules() if isinstance(n, torch.nn.BatchNorm2d)] == before
    seen: list[Tensor] = []
    net.layer4[0].bn1.register_forward_hook(lambda _module, _inputs, out: seen.append(out.clone()))  # type: ignore[operator]
    with torch.no_grad():
        net(net.normalised(images))
    assert seen[0].mean(dim=(0, 2, 3)).abs().max() < 0.01
    assert seen[0].var(dim=(0, 2, 3)).sub(1).abs().max() < 0.1


def test_the_second_network_has_twelve_convolutions_and_pools_after_the_fourth_and_seventh() -> None:
    probe = MapProbe(8, 10)
    seen: list[tuple[int, ...]] = []
    for segment in probe.segments:
        segment.register_forward_hook(lambda _module, _inputs, out: seen.append(tuple(out.shape[1:])))
    assert probe(torch.rand(2, 8, 14, 14)).shape == (2, 10)
    assert seen == [(256, 14, 14), (512, 7, 7), (1024, 4, 4)]
    assert sum(isinstance(module, torch.nn.Conv2d) for module in probe.modules()) == 12


def probe_accuracy(maps: Tensor, labels: Tensor, shuffled: bool = False) -> float:
    """In %, on the second half, after a short training on the first."""
    torch.manual_seed(0)
    half = len(maps) // 2
    told = permuted(labels, seed=0) if shuffled else labels
    model = Probed(MapProbe(maps.shape[1], 4, width=8), maps[:half], told[:half])
    optimizer = torch.optim.SGD(model.parameters(), 0.05, 0.9)
    for update in range(40):
        numbers = torch.arange(64) + 64 * (update % (half // 64))
        optimizer.zero_grad()
        model(numbers)["loss"].backward()
        optimizer.step()
    scores = scores_of(model.eval(), maps[half:])
    return 100 * float((scores.argmax(dim=1) == labels[half:]).double().mean())


def test_it_learns_from_maps_that_tell_the_class_and_from_no_others() -> None:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(4, (512,), generator=generator)
    logits = torch.randn(512, 2, 16, generator=generator)
    logits[torch.arange(512), :, 5 * labels] += 3.0  # the class is where the heads look
    maps = logits.softmax(dim=-1).view(512, 2, 4, 4)
    assert probe_accuracy(maps, labels) > 85
    assert probe_accuracy(maps, labels, shuffled=True) < 40
    assert probe_accuracy(torch.full_like(maps, 1 / 16), labels) < 40


def test_entropies_are_those_of_the_rows() -> None:
    uniform, single = torch.full((2, 3, 4, 4), 1 / 16), torch.zeros(2, 3, 4, 4)
    single[..., 0, 0] = 1.0
    assert ea_vision_figures.entropy_of(uniform.half()) == pytest.approx(math.log(16), abs=1e-3)
    assert ea_vision_figures.entropy_of(single.half()) == 0.0
    both = torch.cat([uniform, single]).half()
    assert ea_vision_figures.entropy_of(both) == pytest.approx(math.log(16) / 2, abs=1e-3)


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(ea_probe, "STAND_IN_WIDTH", 8)
    return recipes_in(tmp_path, monkeypatch)


@pytest.mark.slow
def test_table_7_has_both_networks_and_its_controls_and_figures_share_the_runs(
    recipe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"epochs": "1", "probe-epochs": "1"}
    with pytest.raises(ValueError, match=r"--layers must have maps of one size, got 4,5: 3 × 3, 2 × 2"):
        recipe("ea-table-7", layers="4,5", **options)
    assert not list(Path("runs").rglob("result.json")), "nothing is trained before that is known"
    given: dict[str, Probed] = {}
    fit = ea_vision.vision_training.fit

    def note(model: Any, folder: Path, *rest: Any, **arguments: Any) -> dict[str, Any]:
        if isinstance(model, Probed):
            given[folder.parent.name] = model
        return fit(model, folder, *rest, **arguments)

    monkeypatch.setattr(ea_vision.vision_training, "fit", note)
    result = recipe("ea-table-7", **options)
    trained, other, shuffled = (
        given[f"{name}-layer-3"] for name in (EA, f"untrained-{EA}", f"{EA}-permuted-labels")
    )
    assert torch.equal(trained.maps, shuffled.maps)
    assert not torch.equal(trained.labels, shuffled.labels)
    assert torch.equal(trained.labels.bincount(), shuffled.labels.bincount())
    assert torch.equal(trained.labels, other.labels)
    assert not torch.equal(trained.maps, other.maps)
    assert given["the-image-at-3-x-3"].maps.shape[1:] == (3, 3, 3)
    rows = dict(result["tables"][0]["rows"])
    assert list(rows) == [
        AA, f"{AA}, published (ImageNet)", EA, f"{EA}, published (ImageNet)", f"untrained {EA}",
        f"{EA}, permuted labels", "the image at 3 × 3",
    ]  # fmt: skip
    assert rows[f"{EA}, permuted labels"][1::2] == ["–", "–"], "the middle layer alone"
    assert "not a number" not in json.dumps(result)
    assert len(result["per_seed"]["0"]) == 3 * 3 + 2

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("everything is there")

    monkeypatch.setattr(ea_vision.vision_training, "fit", refuse)
    assert recipe("ea-table-7", **options)["per_seed"] == result["per_seed"]
    figure = recipe("ea-figure-4", epochs="1")
    assert {row for row, _ in figure["tables"][0]["rows"]} == {AA, EA, "uniform weights"}
    assert Path("results/ea-figure-4.svg").read_text().count("<image") >= 4 * 7
    assert Path("results/ea-figure-4.png").read_bytes()[1:4] == b"PNG"
    page = Path("runs/relations/ea-figure-4.html").read_text()
    assert f"difference 0, {EA}" in page


@pytest.mark.slow
def test_figures_have_costs_beside_accuracies_and_a_cell_for_each_pair(recipe: Any) -> None:
    costs = recipe("ea-figure-1", epochs="1")["config"]["costs"]
    assert list(costs) == ["ResNet-34", AA, EA]
    assert costs[EA]["flops"] > costs[AA]["flops"]
    assert Path("results/ea-figure-1.svg").exists()
    sweep = recipe("ea-figure-a1", epochs="1", rows="α 0 β 0,α 0.5 β 1")
    assert sweep["config"]["data"]["test"] == 5, "a tenth of each class of the training set"
    rows = dict(sweep["tables"][0]["rows"])
    assert [cell != "–" for cell in rows["α = 0"]] == [True, False, False]
    assert [cell != "–" for cell in rows["α = 0.5"]] == [False, False, True]
    assert Path("results/ea-figure-a1.svg").exists()

"""Pictures in the prompts of language models: their tokens, grids and rows; pages of them; refusals."""

from __future__ import annotations

import base64
import io
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from PIL import Image
from torch import Tensor
from typer.testing import CliRunner

import overt
from overt.cli.shared import app
from overt.tracing.images import ImageTokens, language_stack
from writing import SIZES, byte_tokenizer

SIGN = 299
TEXT = {**SIZES, "intermediate_size": 48, "vocab_size": 300, "num_key_value_heads": 4}
ENDLESS = {"eos_token_id": None, "bos_token_id": None, "pad_token_id": 0}
EYE = {**SIZES, "intermediate_size": 48, "image_size": 32, "patch_size": 8}


def prompt(*counts: int) -> Tensor:
    """Ids of a text with pictures of so many tokens."""
    ids = [5, 6]
    for count in counts:
        ids += [*[SIGN] * count, 7, 8]
    return torch.tensor([ids])


def arguments(ids: Tensor, **more: Any) -> dict[str, Any]:
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **more}


def llava() -> Any:
    config = hf.LlavaConfig(
        vision_config=hf.CLIPVisionConfig(**EYE, projection_dim=32),
        text_config=hf.LlamaConfig(**TEXT, **ENDLESS),
        image_token_index=SIGN,
        vision_feature_layer=-1,
    )
    return hf.LlavaForConditionalGeneration(config).eval()


def idefics() -> Any:
    text = {"model_type": "llama", **TEXT, **ENDLESS}
    config = hf.Idefics3Config(
        text_config=text, vision_config=EYE, image_token_id=SIGN, scale_factor=2, pad_token_id=0
    )
    return hf.Idefics3ForConditionalGeneration(config).eval()


def qwen() -> Any:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
    eye = {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "patch_size": 4, "mlp_ratio": 2}
    config = hf.Qwen2VLConfig(
        text_config={**TEXT, **ENDLESS, "rope_parameters": rope},
        vision_config={**eye, "spatial_merge_size": 2, "temporal_patch_size": 2, "in_channels": 3},
        image_token_id=SIGN,
        video_token_id=298,
        vision_start_token_id=297,
        vision_end_token_id=296,
    )
    return hf.Qwen2VLForConditionalGeneration(config).eval()


def spotted(height: int, width: int, rows: int, columns: int, cell: tuple[int, int]) -> np.ndarray[Any, Any]:
    """A grey picture with a spot in one cell of a grid."""
    picture = np.full((height, width, 3), 100, dtype=np.uint8)
    tall, wide = height // rows, width // columns
    top, left = cell[0] * tall, cell[1] * wide
    picture[top + 1 : top + tall - 1, left + 1 : left + wide - 1] = [250, 20, 20]
    return picture


def seen(name: str, pictures: list[np.ndarray[Any, Any]]) -> tuple[Any, dict[str, Any]]:
    """A model, and a prompt with pictures of 32 × 32 pixels; of Qwen's, of 16 × 24."""
    torch.manual_seed(0)
    pixels = [torch.from_numpy(each).permute(2, 0, 1) / 255.0 for each in pictures]
    if name == "LLaVA":
        return llava(), arguments(prompt(*[16] * len(pictures)), pixel_values=torch.stack(pixels))
    if name == "Idefics3":
        one = torch.stack(pixels).unsqueeze(0)
        return idefics(), arguments(prompt(*[4] * len(pictures)), pixel_values=one)
    processor = hf.Qwen2VLImageProcessorPil(
        patch_size=4, merge_size=2, temporal_patch_size=2, size={"shortest_edge": 16, "longest_edge": 10**6}
    )
    coded = processor(images=pictures, do_resize=False, return_tensors="pt")
    ids = prompt(*[int(grid.prod()) // 4 for grid in coded["image_grid_thw"]])
    return qwen(), arguments(ids, **coded, mm_token_type_ids=(ids == SIGN).int())


CASES = {"LLaVA": (32, 32, 4, 4), "Idefics3": (32, 32, 2, 2), "Qwen2-VL": (16, 24, 2, 3)}


@pytest.mark.parametrize("name", CASES)
def test_a_spot_in_a_picture_changes_the_token_of_its_cell_most(name: str) -> None:
    height, width, rows, columns = CASES[name]
    plain = [np.full((height, width, 3), 100, dtype=np.uint8) for _ in range(2)]
    cell = (rows - 1, 1)
    states: list[Tensor] = []
    for pictures in (plain, [plain[0], spotted(height, width, rows, columns, cell)]):
        model, given = seen(name, pictures)
        layers = model.get_decoder().layers
        handle = layers[0].register_forward_pre_hook(
            lambda _, args, kwargs: states.append((args or (kwargs["hidden_states"],))[0].detach()),
            with_kwargs=True,
        )
        with torch.no_grad():
            model(**given)
        handle.remove()
    trace = overt.trace(model, given, generate=3)
    assert [len(each) for each in trace.images()] == [2]
    first, second = trace.images()[0]
    assert (first.rows, first.columns) == (second.rows, second.columns) == (rows, columns)
    assert first == ImageTokens(2, 2 + rows * columns, rows, columns)
    change = (states[1] - states[0]).norm(dim=-1)[0]
    assert not first.patches(change).any(), "the other picture is the same"
    at = int(second.patches(change).argmax())
    assert divmod(at, columns) == cell


@pytest.mark.parametrize("name", CASES)
def test_generated_words_have_rows_over_pictures(name: str) -> None:
    height, width, rows, columns = CASES[name]
    pictures = [spotted(height, width, rows, columns, (0, n)) for n in range(2)]
    model, given = seen(name, pictures)
    trace = overt.trace(model, given, generate=4)
    assert trace.kind == "causal", "the language model was chosen"
    with torch.no_grad():
        written = model.generate(**given, max_new_tokens=4, do_sample=False)
    assert trace.subject is not None
    assert torch.equal(trace.subject.inputs.arguments["input_ids"], written)
    weights = trace.raw(trace.generating_queries())[0]
    second = trace.images()[0][1]
    grid = second.patches(weights)
    assert grid.shape == (2, 4, rows, columns)
    torch.testing.assert_close(grid[1, 2, 1, 0], weights[1, 2, second.start + columns])
    (found,) = trace.spans(queries="generated tokens", tokens="images")
    assert [span.name for span in found.tokens] == ["image 1", "image 2"]
    torch.testing.assert_close(found.values[..., 1], grid.sum(dim=(-1, -2)))


@pytest.mark.parametrize("name", ["LLaVA", "Qwen2-VL"])
def test_examples_of_a_batch_have_their_own_pictures(name: str) -> None:
    """Of Qwen's, two pictures have as many patches, in other rows and columns."""
    sizes = [(32, 32)] * 3 if name == "LLaVA" else [(16, 24), (24, 16), (16, 16)]
    model, given = seen(name, [noisy(*size, seed) for seed, size in enumerate(sizes)])
    runs = [16] * 3 if name == "LLaVA" else [6, 6, 4]
    rows = [prompt(runs[0])[0].tolist(), prompt(*runs[1:])[0].tolist(), [5, 6, 7]]
    longest = max(map(len, rows))
    ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
    kinds = {"mm_token_type_ids": (ids == SIGN).int()} if name == "Qwen2-VL" else {}
    given |= {"input_ids": ids, "attention_mask": (ids > 0).long(), **kinds}
    trace = overt.trace(model, given, generate=2)
    assert [len(each) for each in trace.images()] == [1, 2, 0]
    query = max(trace.generating_queries()) - 1
    for number, places in enumerate(trace.images()):
        alone = trace[number]
        assert alone.images() == [places]
        for kind in ("gradients", "blankout"):
            more = {"unk": 3} if kind == "blankout" else {}
            found, want = (each.read(kind, query, target=9, against=10, **more) for each in (alone, trace))
            torch.testing.assert_close(found[0], want[number], atol=1e-6, rtol=1e-4)
    changed = {**given, "input_ids": ids.clone()}
    changed["input_ids"][1, 0] = 3  # its first token: it is the longest prompt
    at = len(rows[1]) - 1
    with torch.no_grad():
        logits = [model(**each).logits[1, -1].double() for each in (given, changed)]
    effect = [float(each[9] - each[10]) for each in logits]
    found = trace.blankout(at, target=9, against=10, unk=3)[1, 0, 0, 0]
    assert float(found) == pytest.approx(effect[0] - effect[1], abs=1e-5)


def test_pictures_without_a_grid_are_refused() -> None:
    model, given = seen("LLaVA", [spotted(32, 32, 4, 4, (0, 0))])
    trace = overt.trace(model, given, generate=2)
    assert trace.subject is not None
    trace.subject.inputs.arguments["image_sizes"] = torch.tensor([[32, 32]])  # as processors of LLaVA-NeXT do
    with pytest.raises(
        ValueError, match=r"^no grid of patches is known for the pictures of Llava.*image_siz"
    ):
        trace.images()
    model, given = seen("Qwen2-VL", [spotted(16, 24, 2, 3, (0, 0))])
    trace = overt.trace(model, given, generate=2)
    assert trace.subject is not None
    trace.subject.inputs.arguments["image_grid_thw"] = torch.tensor([[1, 8, 8]])
    with pytest.raises(
        ValueError, match=r"^tokens 2 to 7 stand for a picture, and the grids that are known d"
    ):
        trace.images()
    text = overt.trace(hf.LlamaForCausalLM(hf.LlamaConfig(**TEXT, **ENDLESS)), [[5, 6]])
    with pytest.raises(
        ValueError, match=r"^LlamaForCausalLM \(llama\) has no tokens that stand for a picture"
    ):
        text.images()
    tower = overt.trace(
        llava(), seen("LLaVA", [spotted(32, 32, 4, 4, (0, 0))])[1], stack="model.vision_tower"
    )
    with pytest.raises(ValueError, match=r"^pictures have a place among the tokens of a language model"):
        tower.images()


def noisy(height: int, width: int, seed: int = 0) -> np.ndarray[Any, Any]:
    """A picture of coarse squares at random, which is like no other and like no part of itself."""
    cells = np.random.default_rng(seed).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    return np.array(Image.fromarray(cells).resize((width, height), Image.Resampling.BICUBIC))


def pixels_of(*pictures: np.ndarray[Any, Any]) -> Tensor:
    return torch.stack([torch.from_numpy(np.array(each)).permute(2, 0, 1) / 127.5 - 1 for each in pictures])


def panels_of(trace: Any, images: Any = None, example: int = 0) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = trace.html(images=images).index["traces"][example]["pictures"]["panels"]
    return found


@pytest.mark.parametrize("name", CASES)
def test_a_page_has_the_patches_of_each_picture_over_it(name: str, tmp_path: Path) -> None:
    height, width, rows, columns = CASES[name]
    pictures = [noisy(height, width, seed) for seed in (1, 2)]
    model, given = seen(name, pictures)
    trace = overt.trace(model, given, generate=3)
    Image.fromarray(pictures[1]).save(tmp_path / "second.png")
    shown = trace.html(images=[pictures[0], tmp_path / "second.png"])
    entry = shown.index["traces"][0]
    panels, photos = entry["pictures"]["panels"], entry["pictures"]["photos"]
    for number, (panel, tokens) in enumerate(zip(panels, trace.images()[0], strict=True)):
        assert (panel["name"], panel["photo"]) == (f"picture {number + 1}", number)
        assert panel["size"] == [height, width]
        tile = {"start": tokens.start, "rows": rows, "columns": columns, "box": [0.0, 0.0, 1.0, 1.0]}
        assert panel["tiles"] == [tile]
        assert entry["tokens"][tokens.start : tokens.stop] == ["▪"] * (rows * columns)
        data = photos[number]["link"].removeprefix("data:image/jpeg;base64,")
        back = np.asarray(Image.open(io.BytesIO(base64.b64decode(data))))
        assert back.shape == pictures[number].shape
        like = [np.corrcoef(back.ravel(), each.ravel())[0, 1] for each in pictures]
        assert like[number] > 0.95 > 0.5 > like[1 - number]
    bare = panels_of(trace)
    assert [panel["photo"] for panel in bare] == [None, None]
    assert [panel["size"] for panel in bare] == [[rows, columns]] * 2
    assert [panel["tiles"] for panel in bare] == [panel["tiles"] for panel in panels]
    given_text = overt.trace(model, given, stack=language_stack(model))
    assert panels_of(given_text, pictures) == panels, "also on the page of maps of what was not generated"


def fitted(picture: Image.Image, how: str) -> np.ndarray[Any, Any]:
    """A picture as 32 × 32 pixels: stretched, its middle, or padded, at both sides or after its end."""
    wide, high = picture.size
    side = min(wide, high) if how == "cut" else max(wide, high)
    if how == "stretched":
        return np.asarray(picture.resize((32, 32)))
    left, top = ((wide - side) // 2, (high - side) // 2) if how != "after" else (0, 0)
    return np.asarray(picture.crop((left, top, left + side, top + side)).resize((32, 32)))


@pytest.mark.parametrize(
    ("how", "box"),
    [
        ("stretched", [0, 0, 1, 1]),
        ("cut", [1 / 6, 0, 5 / 6, 1]),
        ("padded", [0, -1 / 4, 1, 5 / 4]),
        ("after", [0, 0, 1, 3 / 2]),
    ],
)
def test_patches_lie_where_the_processor_took_them_from(how: str, box: list[float]) -> None:
    model = seen("LLaVA", [noisy(32, 32)])[0]
    for picture, want in (
        (noisy(160, 240), box),
        (noisy(240, 160), [box[1], box[0], box[3], box[2]]),
    ):
        pixels = pixels_of(fitted(Image.fromarray(picture), how))
        trace = overt.trace(model, arguments(prompt(16), pixel_values=pixels), generate=2)
        (panel,) = panels_of(trace, picture)
        assert panel["tiles"][0]["box"] == pytest.approx(want, abs=1e-4)


def tile_names() -> Any:
    """A tokenizer whose last ids name tiles and pictures, as that of SmolVLM does."""
    known = byte_tokenizer()
    names = [f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2, 3)]
    names += ["<global-img>", "<fake>", "<x>", "<image>"]
    known.add_special_tokens({"additional_special_tokens": names})
    return known


def test_tiles_lie_on_their_part_of_the_picture_beside_the_whole() -> None:
    known = tile_names()
    code = {name: known.convert_tokens_to_ids(name) for name in known.all_special_tokens}
    model, sign = idefics(), code["<image>"]
    assert sign == SIGN
    first, second = noisy(64, 96, 3), noisy(32, 32, 4)
    tiles = [first[32 * row :, 32 * column :][:32, :32] for row in (0, 1) for column in (0, 1, 2)]
    whole = np.asarray(Image.fromarray(first).resize((32, 32)))
    ids = [5]
    for row, column in ((row, column) for row in (1, 2) for column in (1, 2, 3)):
        ids += [code["<fake>"], code[f"<row_{row}_col_{column}>"], *[sign] * 4]
    ids += [code["<fake>"], code["<global-img>"], *[sign] * 4, code["<fake>"], 6]
    ids += [code["<fake>"], code["<global-img>"], *[sign] * 4, code["<fake>"], 7]
    pixels = pixels_of(*tiles, whole, second).unsqueeze(0)
    given = arguments(torch.tensor([ids]), pixel_values=pixels)
    trace = overt.trace(model, given, tokenizer=known, generate=2)
    panels = panels_of(trace, [first, second])
    names = ["picture 1, its 6 tiles", "picture 1, the whole", "picture 2"]
    assert [(panel["name"], panel["photo"]) for panel in panels] == list(zip(names, (0, 0, 1), strict=True))
    boxes = [tile["box"] for tile in panels[0]["tiles"]]
    assert boxes[4] == pytest.approx([1 / 3, 1 / 2, 2 / 3, 1], abs=1e-4)
    starts = [tile["start"] for panel in panels for tile in panel["tiles"]]
    assert starts == [tokens.start for tokens in trace.images()[0]]
    bare = panels_of(trace)
    assert [panel["name"] for panel in bare] == names
    assert [panel["size"] for panel in bare] == [[4, 6], [2, 2], [2, 2]]
    with pytest.raises(ValueError, match=r"^images must have 2 pictures, all those of the prompt, got 7"):
        trace.html(images=[first] * 7)
    with pytest.raises(ValueError, match=r"^images\[0\] is not like what the model saw at tokens 3 to 42 "):
        trace.html(images=[first[:, ::-1].copy(), second])


def test_tiles_without_a_token_between_them_are_found_on_the_picture() -> None:
    model = seen("LLaVA", [noisy(32, 32)])[0]
    picture = noisy(64, 96, 5)
    parts = [picture[32 * row :, 32 * column :][:32, :32] for row in (0, 1) for column in (0, 1, 2)]
    pixels = pixels_of(*parts, np.asarray(Image.fromarray(picture).resize((32, 32))))
    trace = overt.trace(model, arguments(prompt(7 * 16), pixel_values=pixels), generate=2)
    tiles, whole = panels_of(trace, [picture])
    assert tiles["tiles"][5]["box"] == pytest.approx([2 / 3, 1 / 2, 1, 1], abs=1e-4)
    assert whole["tiles"][0]["box"] == [0, 0, 1, 1]


def test_pictures_of_a_batch_come_one_after_the_other() -> None:
    pictures = [noisy(32, 32, seed) for seed in range(3)]
    model, _ = seen("LLaVA", pictures)
    ids = torch.zeros(2, 38, dtype=torch.long)
    ids[0] = prompt(16, 16)[0]
    ids[1, 18:] = prompt(16)[0]
    given = {"input_ids": ids, "attention_mask": (ids > 0).long(), "pixel_values": pixels_of(*pictures)}
    trace = overt.trace(model, given, generate=2)
    shown = trace.html(images=pictures)
    entries = shown.index["traces"]
    assert [len(entry["pictures"]["panels"]) for entry in entries] == [2, 1]
    assert entries[1]["pictures"]["panels"][0]["tiles"][0]["start"] == 2
    with pytest.raises(ValueError, match=r"^images must have 3 pictures, all those of the prompts, got 2"):
        trace.html(images=pictures[:2])


def test_wrong_pictures_are_refused_in_a_line(tmp_path: Path) -> None:
    pictures = [noisy(32, 32, seed) for seed in (1, 2)]
    model, given = seen("LLaVA", pictures)
    trace = overt.trace(model, given, generate=2)
    assert len(panels_of(trace, pictures)) == 2
    with pytest.raises(ValueError, match=r"^images must have 2 pictures, all those of the prompt, got 1"):
        trace.html(images=pictures[0])
    with pytest.raises(ValueError, match=r"^images\[0\] is not like what the model saw at tokens 2 to 17 "):
        trace.html(images=pictures[::-1])
    with pytest.raises(ValueError, match=r"^images\[1\] must be a path, an image.*got float64 \(32, 32, 3\)"):
        trace.html(images=[pictures[0], pictures[1] / 255])
    with pytest.raises(FileNotFoundError, match=r"absent\.png does not exist$"):
        trace.html(images=[pictures[0], tmp_path / "absent.png"])
    assert trace.subject is not None
    pixels = trace.subject.inputs.arguments.pop("pixel_values")
    with pytest.raises(ValueError, match=r"^images cannot be laid over the patches: pixel_values are absent"):
        trace.html(images=pictures)
    trace.subject.inputs.arguments |= {"pixel_values": pixels, "image_sizes": torch.tensor([[32, 32]])}
    with pytest.raises(ValueError, match=r"^no grid of patches is known for the pictures of Llava"):
        trace.html(images=pictures)
    entry = trace.html().index["traces"][0]
    assert "pictures" not in entry
    assert entry["missing"]["pictures"].startswith("no grid of patches is known")
    text = overt.trace(hf.LlamaForCausalLM(hf.LlamaConfig(**TEXT, **ENDLESS)), [[5, 6]], generate=2)
    assert "pictures" not in text.html().index["traces"][0]["missing"]
    with pytest.raises(ValueError, match=r"^LlamaForCausalLM \(llama\) has no tokens that stand for"):
        text.html(images=pictures)


def test_the_command_shows_a_picture_to_a_model_that_sees(tmp_path: Path) -> None:
    known = tile_names()
    torch.manual_seed(0)
    llava().save_pretrained(tmp_path / "m")
    known.save_pretrained(tmp_path / "m")
    Image.fromarray(noisy(40, 60)).save(tmp_path / "p.png")
    asked = ["trace", "What is it?", "--model", str(tmp_path / "m"), "--image", str(tmp_path / "p.png")]
    runner, out = CliRunner(), tmp_path / "page.html"
    result = runner.invoke(app, [*asked, "--generate", "3"])
    assert re.match(r"--image needs the processor of .*, which does not load \(", str(result.exception))
    eye = hf.CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    more = {"vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    made = hf.LlavaProcessor(eye, known, patch_size=8, image_token="<image>", **more)
    made.save_pretrained(tmp_path / "m")
    result = runner.invoke(app, [*asked, "--generate", "3", "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert '"box":[0.16667,0.0,0.83333,1.0]' in out.read_text()
    result = runner.invoke(app, asked)
    assert re.search(r"a language model that sees pictures needs --generate", str(result.exception))
    twice = ["trace", "<image> or <image>?", *asked[2:], "--generate", "3"]
    result = runner.invoke(app, twice)
    assert re.match(r"the prompt must have one <image>, for --image .*, got 2", str(result.exception))

"""Pictures in the prompts of language models: their tokens, grids and rows; refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from torch import Tensor

import overt
from overt.tracing.images import ImageTokens
from writing import SIZES

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
    pixels = torch.stack([torch.from_numpy(each).permute(2, 0, 1) / 255.0 for each in pictures])
    if name == "LLaVA":
        return llava(), arguments(prompt(*[16] * len(pictures)), pixel_values=pixels)
    if name == "Idefics3":
        return idefics(), arguments(prompt(*[4] * len(pictures)), pixel_values=pixels.unsqueeze(0))
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

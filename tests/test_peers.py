"""Real libraries whose attention is recognised, against the weights that they return themselves.

`make test-peers` installs x-transformers and fair-esm, and runs these tests. timm needs a torchvision that
fits the installed torch.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import pytest
import torch
from torch import Tensor

import overt
from long_traces import states_of

pytestmark = pytest.mark.filterwarnings("ignore:::x_transformers", "ignore::DeprecationWarning")

IDS = torch.randint(3, 30, (2, 9), generator=torch.Generator().manual_seed(0))
MISSING = "{} is not installed: `make test-peers` installs it"
SMALL: dict[str, Any] = {"dim": 32, "depth": 2, "heads": 4, "attn_dim_head": 8}


@pytest.fixture(scope="module")
def xt() -> Any:
    return pytest.importorskip("x_transformers", reason=MISSING.format("x-transformers"))


@pytest.fixture(scope="module")
def esm() -> Any:
    return pytest.importorskip("esm", reason=MISSING.format("fair-esm"))


@pytest.fixture(scope="module")
def timm() -> Any:
    try:
        import timm
    except (ImportError, RuntimeError) as error:
        return pytest.skip(f"timm cannot be imported: {error}")
    return timm


def spread(model: Any) -> Any:
    """Weights wide enough for maps that are far from uniform."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 or name.endswith("bias"):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model.eval()


def close(found: list[Tensor], want: Any) -> None:
    for ours, theirs in zip(found, want, strict=True):
        torch.testing.assert_close(ours, theirs.detach(), atol=1e-6, rtol=1e-5)


KINDS = {
    "plain": {},
    "rotary": {"rotary_pos_emb": True, "rotary_emb_dim": 8},
    "grouped queries": {"attn_kv_heads": 2},
    "one key head": {"attn_kv_heads": 1},
    "biases": {"alibi_pos_bias": True},
    "clamped scores": {"attn_softclamp_logits": True},
    "residual scores": {"residual_attn": True},
    "macaron": {"macaron": True},
    "qk norm": {"attn_qk_norm": True},
}


@pytest.mark.parametrize("name", KINDS)
def test_x_transformers_decoders_are_traced_as_they_come(xt: Any, name: str) -> None:
    layers = xt.Decoder(**SMALL, **KINDS[name])
    model = spread(xt.TransformerWrapper(num_tokens=30, max_seq_len=16, attn_layers=layers))
    traced = overt.trace(model, IDS, heads=True)
    with torch.no_grad():
        _, want = model(IDS, return_attn=True)
    assert traced.kind == "causal"
    assert all(path.endswith(".attend") for path in traced.paths)
    close(traced.maps, want)
    close([traced.rollout()], [overt.rollout([cells.double() for cells in want])])


def test_x_transformers_flash_attention_has_the_maps_of_the_plain_one(xt: Any) -> None:
    def model(flash: bool) -> Any:
        layers = xt.Encoder(**SMALL, attn_flash=flash)
        return spread(xt.TransformerWrapper(num_tokens=30, max_seq_len=16, attn_layers=layers))

    mask = torch.tensor([[True] * 9, [True] * 5 + [False] * 4])
    fused, plain = (
        overt.trace(model(flash), {"x": IDS, "mask": mask}, heads=True) for flash in (True, False)
    )
    assert torch.equal(fused.mask, mask)
    assert torch.equal(plain.mask, mask)
    close(fused.maps, plain.maps)


@pytest.mark.parametrize("kind", ["Encoder", "Decoder"])
def test_x_transformers_flash_attention_is_traced_from_queries_and_keys(xt: Any, kind: str) -> None:
    layers = getattr(xt, kind)(**SMALL, **KINDS["grouped queries"], attn_flash=True)
    model = spread(xt.TransformerWrapper(num_tokens=30, max_seq_len=16, attn_layers=layers))
    inputs = {"x": IDS, "mask": torch.tensor([[True] * 9, [True] * 5 + [False] * 4])}
    maps, states = overt.trace(model, inputs), states_of(model, inputs)
    assert (states.kind, states.paths) == (maps.kind, maps.paths)
    assert torch.equal(states.mask, maps.mask)
    close([states.rollout(range(9))], [maps.rollout()])


@pytest.mark.parametrize("length", [6, 9], ids=["shorter", "as long as the source"])
def test_x_transformers_encoder_decoders_have_all_three_kinds_of_map(xt: Any, length: int) -> None:
    sides: dict[str, Any] = {}
    for side in ("enc", "dec"):
        sides |= {f"{side}_{name}": SMALL[name] for name in ("depth", "heads", "attn_dim_head")}
        sides |= {f"{side}_num_tokens": 30, f"{side}_max_seq_len": 16}
    model = spread(xt.XTransformer(dim=32, **sides))
    target = IDS.flip(1)[:, : length + 1]
    target = torch.cat([target, target[:, :1]], dim=1)[:, : length + 1]
    traced = overt.trace(model, {"src": IDS, "tgt": target}, heads=True)
    with torch.no_grad():
        memory, encoder = model.encoder(IDS, return_embeddings=True), model.encoder(IDS, return_attn=True)[1]
        shown = target[:, : traced.maps[0].shape[-1]]
        decoder = model.decoder.net(shown, context=memory, return_attn=True)[1]
    assert traced.kind == "encoder–decoder"
    close(traced.encoder_maps, encoder)
    close(traced.maps, decoder[0::2])
    close(traced.cross, decoder[1::2])


def test_x_transformers_images_are_traced(xt: Any) -> None:
    model = spread(
        xt.ViTransformerWrapper(image_size=32, patch_size=8, num_classes=5, attn_layers=xt.Encoder(**SMALL))
    )
    traced = overt.trace(model, torch.randn(2, 3, 32, 32))
    assert (traced.kind, [tuple(cells.shape) for cells in traced.maps]) == ("encoder", [(2, 16, 16)] * 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"attn_post_talking_heads": True},
            r"cannot be traced: .*calls seen: softmax in attn_layers\.layers\.0",
        ),
        ({"attn_num_mem_kv": 2}, "9 queries and 11 keys.*keys that are not tokens are not supported"),
    ],
)
def test_x_transformers_that_are_no_plain_attention_are_refused(xt: Any, options: Any, message: str) -> None:
    layers = xt.Decoder(**SMALL, **options)
    model = xt.TransformerWrapper(num_tokens=30, max_seq_len=16, attn_layers=layers)
    with pytest.raises(ValueError, match=message):
        overt.trace(model, IDS)


def proteins(esm: Any, name: str) -> tuple[Any, Tensor]:
    alphabet = esm.data.Alphabet.from_architecture(name)
    _, _, tokens = alphabet.get_batch_converter()([("a", "MKTAYIAK"), ("b", "MKTA")])
    return alphabet, tokens


ROBERTA = {"layers": 2, "embed_dim": 32, "ffn_embed_dim": 40, "attention_heads": 4, "max_positions": 64}


def esm_1b(esm: Any) -> tuple[Any, Tensor]:
    alphabet, tokens = proteins(esm, "ESM-1b")
    options = {"emb_layer_norm_before": True, "token_dropout": True, "final_bias": True}
    return esm.ProteinBertModel(Namespace(arch="roberta_large", **ROBERTA, **options), alphabet), tokens


def esm_2(esm: Any) -> tuple[Any, Tensor]:
    alphabet, tokens = proteins(esm, "ESM-1b")
    return esm.ESM2(num_layers=2, embed_dim=32, attention_heads=4, alphabet=alphabet), tokens


@pytest.mark.parametrize("make", [esm_1b, esm_2])
def test_esm_has_the_maps_that_it_returns(esm: Any, make: Any) -> None:
    model, tokens = make(esm)
    spread(model)
    traced = overt.trace(model, tokens, heads=True)
    with torch.no_grad():
        want = model(tokens, need_head_weights=True)["attentions"]
    real = tokens != model.padding_idx
    assert torch.equal(traced.mask, real)
    assert traced.paths == ["layers.0.self_attn", "layers.1.self_attn"]
    # Rows of padding, which esm sets to zero, are left out.
    rows = real[:, None, :, None].expand_as(traced.maps[0])
    close([cells[rows] for cells in traced.maps], [want[:, layer][rows] for layer in range(2)])
    assert traced.outputs is not None
    if make is esm_1b:
        states = states_of(model, tokens)
        assert torch.equal(states.mask, real)
        close([states.rollout(range(tokens.shape[1]))], [traced.rollout()])


def test_esm_models_that_attend_to_more_than_tokens_are_refused(esm: Any) -> None:
    alphabet, tokens = proteins(esm, "ESM-1")
    model = esm.ProteinBertModel(Namespace(arch="protein_bert_base", final_bias=True, **ROBERTA), alphabet)
    with pytest.raises(ValueError, match=r"layers\.0\.self_attn cannot be traced: bias_k"):
        overt.trace(model, tokens)
    alphabet = esm.data.Alphabet.from_architecture("msa_transformer")
    rates = dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), 0.0)
    model = esm.MSATransformer(
        Namespace(**ROBERTA, **rates, embed_positions_msa=False, max_tokens=1000, logit_bias=True), alphabet
    )
    _, _, tokens = alphabet.get_batch_converter()([[("a", "MKTA"), ("b", "MKTA"), ("c", "MKTA")]])
    with pytest.raises(ValueError, match=r"row_self_attention\.layer cannot be traced: its softmax"):
        overt.trace(model, {"tokens": tokens})


@pytest.mark.parametrize("fused", [True, False])
def test_timm_has_the_maps_of_its_softmax(timm: Any, fused: bool) -> None:
    model = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=2, num_classes=5).eval()
    for block in model.blocks:
        block.attn.fused_attn = fused
    images = torch.randn(2, 3, 64, 64)
    found: list[Tensor] = []
    traced = overt.trace(model, images, heads=True)
    for block in model.blocks:
        block.attn.fused_attn = False
        block.attn.attn_drop.register_forward_hook(lambda _module, _args, out: found.append(out))
    with torch.no_grad():
        model(images)
    assert traced.paths == ["blocks.0.attn", "blocks.1.attn"]
    close(traced.maps, found)


def test_timms_windows_are_refused_by_name(timm: Any) -> None:
    model = timm.create_model("swin_tiny_patch4_window7_224").eval()
    with pytest.raises(ValueError, match="WindowAttention attends in windows"):
        overt.trace(model, torch.randn(1, 3, 224, 224))

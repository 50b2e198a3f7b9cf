"""Mechanisms in vision transformers whose attention is timm's: a small copy of its structure, and timm's own.

timm needs a torchvision that fits the installed torch; without one, its own models are skipped.
"""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import overt
from overt.attaching.attention import AttachedAttention

NOTHING = overt.Evolving(alpha=0.0, beta=0.0)
EVOLVING = overt.Evolving(alpha=0.3, beta=0.4, init="kaiming")
WIDTH, HEADS = 24, 3


class Attention(nn.Module):
    """As timm's: it projects, attends and projects back by itself."""

    def __init__(self, fused: bool, normed: bool, gated: bool = False) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, WIDTH) if gated else None
        self.num_heads, self.head_dim, self.scale = HEADS, WIDTH // HEADS, (WIDTH // HEADS) ** -0.5
        self.fused_attn = fused
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.q_norm, self.k_norm = (nn.LayerNorm(8) if normed else nn.Identity() for _ in range(2))
        self.attn_drop, self.proj_drop = nn.Dropout(0.1), nn.Dropout(0.1)

    def forward(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        batch, tokens, width = x.shape
        gate = 1.0 if self.gate is None else self.gate(x).sigmoid()
        q, k, v = self.qkv(x).reshape(batch, tokens, 3, HEADS, 8).permute(2, 0, 3, 1, 4)
        q, k = self.q_norm(q), self.k_norm(k)
        if self.fused_attn:
            out = F.scaled_dot_product_attention(
                q, k, v, attn_mask, self.attn_drop.p if self.training else 0.0
            )
        else:
            scores = q * self.scale @ k.mT
            scores = scores if attn_mask is None else scores.masked_fill(~attn_mask, -torch.inf)
            out = self.attn_drop(scores.softmax(dim=-1)) @ v
        return self.proj_drop(self.proj(out.transpose(1, 2).reshape(batch, tokens, width) * gate))


class Block(nn.Module):
    def __init__(self, fused: bool, normed: bool) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(WIDTH), Attention(fused, normed)

    def forward(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        return x + self.attn(self.norm1(x), attn_mask)


class Small(nn.Module):
    def __init__(self, fused: bool = True, normed: bool = False) -> None:
        super().__init__()
        self.patch, self.checkpointing = nn.Conv2d(3, WIDTH, 8, 8), False
        self.blocks = nn.ModuleList(Block(fused, normed) for _ in range(3))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        x = 4 * self.patch(x).flatten(2).mT
        for block in self.blocks:
            again = self.checkpointing
            x = checkpoint(block, x, use_reentrant=False) if again else block(x, attn_mask)
        return self.head(x.mean(dim=1))


def vit(**arguments: Any) -> nn.Module:
    try:
        from timm.models.vision_transformer import VisionTransformer
    except (ImportError, RuntimeError) as error:
        pytest.skip(f"timm cannot be imported: {error}")
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 3, "num_heads": 3, "num_classes": 5}
    model: nn.Module = VisionTransformer(**sizes, **arguments)
    for name, parameter in model.named_parameters():
        if name.endswith("qkv.weight"):
            nn.init.normal_(parameter, std=0.4)  # maps far from uniform
    return model


def gated() -> nn.Module:
    model = Small()
    model.blocks[1].attn = Attention(True, True, gated=True)
    return model


def timm_unfused() -> nn.Module:
    model = vit(qk_norm=True, init_values=0.5)
    for module in model.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = False
    return model


MODELS = {
    "copy": Small,
    "copy, unfused, normed": lambda: Small(fused=False, normed=True),
    "copy, gated": gated,
    "timm": vit,
    "timm, unfused, normed": timm_unfused,
    "timm, registers": lambda: vit(reg_tokens=2, scale_attn_norm=True),
}


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> Any:
    torch.manual_seed(0)
    return MODELS[request.param]().eval()


def images(batch: int = 2) -> Tensor:
    return torch.randn(batch, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def test_nothing_changes_at_alpha_and_beta_zero_and_detach_restores_all(model: Any) -> None:
    model.double()
    keys, names = list(model.state_dict()), [name for name, _ in model.named_parameters()]
    x = images().double()
    before = model(x)
    parameters = dict(model.named_parameters())
    wanted = torch.autograd.grad(before.square().sum(), [parameters[name] for name in names])
    attributes = {path: set(vars(module)) for path, module in model.named_modules()}
    overt.attach(model, NOTHING)
    parts = [path for path, module in model.named_modules() if isinstance(module, AttachedAttention)]
    assert parts == [f"blocks.{number}.attn.overt" for number in range(3)]
    after = model(x)
    torch.testing.assert_close(after, before, rtol=1e-9, atol=1e-11)
    got = torch.autograd.grad(after.square().sum(), [parameters[name] for name in names])
    torch.testing.assert_close(got, wanted, rtol=1e-8, atol=1e-10)
    assert overt.detach(model) is model
    assert list(model.state_dict()) == keys
    assert {path: set(vars(module)) for path, module in model.named_modules()} == attributes
    assert not model._forward_hooks
    assert torch.equal(model(x), before)


def test_maps_evolve_from_layer_to_layer_as_the_definition_says(model: Any) -> None:
    overt.attach(model, EVOLVING)
    seen: list[tuple[Tensor, ...]] = []
    for block in model.blocks:
        block.attn.overt.register_forward_hook(lambda _, inputs, out: seen.append((*inputs[:2], out[1])))
    with overt.naive():
        model(images())
    below = None
    for block, (query, key, weights) in zip(model.blocks, seen, strict=True):
        logits = query @ key.mT / 8**0.5
        layer = block.attn.overt.map.layers[0]
        convolution = None if layer.weight is None else (layer.weight, layer.bias)
        visible = torch.ones(1, 1, 1, 1, dtype=torch.bool)
        below = overt.evolve(logits, below, convolution, visible, "encoder", 0.3, 0.4)
        torch.testing.assert_close(weights, below.softmax(dim=-1), rtol=1e-4, atol=1e-5)


def test_random_weights_train_and_are_sampled(model: Any) -> None:
    overt.attach(model, EVOLVING, overt.Bayesian(k=2.0))
    drawn = overt.posterior(model, images(3), samples=4)
    assert drawn.mean.shape == (3, 5)
    torch.testing.assert_close(drawn.mean.sum(dim=-1), torch.ones(3))
    assert float(drawn.spread.max()) > 0.0
    assert torch.equal(overt.posterior(model, {"x": images(3)}, samples=4).samples, drawn.samples)
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = F.cross_entropy(model(images()), torch.tensor([0, 1])) + overt.penalty(model)
    loss.backward()
    optimizer.step()
    assert int(model.overt_state.step) == 1
    unmoved = [
        n for n, p in model.named_parameters() if "overt" in n and (p.grad is None or not p.grad.any())
    ]
    assert unmoved == []


def test_copies_pickles_and_state_dicts_have_the_mechanisms(model: Any) -> None:
    plain = copy.deepcopy(model)
    overt.attach(model, EVOLVING)
    with torch.no_grad():
        want = model(images())
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(other(images()), want)
            other.blocks[1].attn.qkv.weight.zero_()
            assert not torch.equal(other(images()), want)
            assert torch.equal(model(images()), want)
        overt.attach(plain, EVOLVING).load_state_dict(model.state_dict())
        assert torch.equal(plain(images()), want)


def test_masks_reach_the_mechanisms() -> None:
    torch.manual_seed(0)
    model, mask = Small().eval(), torch.ones(16, 16, dtype=torch.bool)
    mask[:, 12:] = False
    with torch.no_grad():
        want = model(images(), mask)
        torch.testing.assert_close(overt.attach(model, NOTHING)(images(), mask), want, rtol=1e-4, atol=1e-5)


def test_what_cannot_be_attached_to_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    model = Small()
    model.blocks[1].attn.scale = 1.0  # unused, as torch's attention has its own
    overt.attach(model, EVOLVING, where={"encoder": [1, 2]})
    overt.describe(model)
    assert "Small, step 0" in capsys.readouterr().out
    with pytest.raises(ValueError, match="already has mechanisms attached"):
        overt.attach(model, EVOLVING)
    with pytest.raises(RuntimeError, match=r"blocks.0.attn ran outside a forward pass of its model"):
        model.blocks[0](torch.zeros(1, 4, WIDTH))
    model.checkpointing = True
    out = model.train()(images())
    with pytest.raises(RuntimeError, match="gradient checkpointing fails this way"):
        out.sum().backward()

    class Other(Attention):
        def forward(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
            return super().forward(x.flip(1), attn_mask)

    odd = Small()
    odd.blocks[2].attn = Other(True, False)
    with pytest.raises(ValueError, match=r"blocks.2.attn \(Other\) is not a softmax of scaled"):
        overt.attach(odd, EVOLVING)

    class RotaryAttention(Attention):
        def forward(self, x: Tensor, rope: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x + rope)

    odd.blocks[2].attn = RotaryAttention(True, False)
    with pytest.raises(ValueError, match=r"blocks.2.attn \(RotaryAttention\) is not a plain attention"):
        overt.attach(odd, EVOLVING)
    with pytest.raises(
        TypeError,
        match=r"PreTrainedModel, or one whose attention is timm's, got Linear",
    ):
        overt.attach(nn.Linear(2, 2), EVOLVING)


def test_peft_around_it_is_refused() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["proj"])
    with pytest.raises(ValueError, match="a Small with mechanisms cannot be inside a PEFT model"):
        peft.get_peft_model(overt.attach(Small(), EVOLVING), config)
    with pytest.raises(ValueError, match="a Small with mechanisms cannot be inside a PEFT model"):
        overt.attach(peft.get_peft_model(Small(), config), EVOLVING)


def test_maps_of_attached_models_are_traced(model: Any) -> None:
    overt.attach(model, EVOLVING)
    seen: list[Tensor] = []
    for block in model.blocks:
        block.attn.overt.register_forward_hook(lambda _module, _inputs, out: seen.append(out[1]))
    trace = overt.trace(model, {"x": images(1)})
    assert trace.paths == [f"blocks.{number}.attn" for number in range(3)]
    for traced, used in zip(trace.maps, seen, strict=True):
        torch.testing.assert_close(traced, used.mean(dim=1))


def test_an_attention_with_a_part_that_does_nothing_yet_is_refused() -> None:
    model = Small()
    model.blocks[1].attn.relative_bias = nn.Parameter(torch.zeros(HEADS, 1, 1))
    with pytest.raises(
        ValueError, match=r"blocks\.1\.attn \(Attention\) has relative_bias, which timm's plain"
    ):
        overt.attach(model, EVOLVING)

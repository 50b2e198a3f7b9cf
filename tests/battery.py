"""What the battery tries on every family, by the names that `docs/support.md` gives to features."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import families
import overt
import reference
from attached import LIVE, enliven, loss_inputs, tokens_of
from examples import RowSmoothing, SigmoidAttention, TalkingHeads
from families import FAMILIES, Family, inputs_of

STILL = overt.Evolving(alpha=0.0, beta=0.0)


@dataclass(frozen=True)
class Mechanisms:
    """One entry of the battery's other axis.

    Attributes:
        name: of the entry.
        live: what is attached to see it work.
        still: what leaves a model's outputs as they are; none where there is no such setting.
        families: on which of them; all by default.
    """

    name: str
    live: tuple[overt.Mechanism, ...]
    still: tuple[overt.Mechanism, ...] = ()
    families: tuple[str, ...] = tuple(family.name for family in FAMILIES)

    def attached(self, family: Family, **settings: Any) -> Any:
        return enliven(overt.attach(family.make(), *self.live, **settings))

    def layers(self) -> list[overt.MechanismLayer]:
        return [mechanism.layer(overt.mechanisms.Site(4, 8, "decoder", 1)) for mechanism in self.live]

    @property
    def adds(self) -> bool:
        return any(layer.adds for layer in self.layers())

    @property
    def reads_below(self) -> bool:
        return any(layer.reads_below for layer in self.layers())

    @property
    def keeps_rows(self) -> bool:
        return any(layer.earlier_rows for layer in self.layers())

    @property
    def sums_to_one(self) -> bool:
        return all(layer.sums_to_one for layer in self.layers())


OURS = Mechanisms(
    "Evolving and Bayesian",
    (LIVE, overt.Bayesian()),
    (STILL, overt.Bayesian(), overt.Bayesian(family="lognormal", prior="fixed")),
)
# What docs/extend.md writes, alone and with ours.
PAIR = ("BERT", "Llama")
TALKING, SIGMOID = TalkingHeads(), SigmoidAttention()
MECHANISMS = [
    OURS,
    Mechanisms("talking heads", (TALKING,), (TALKING,), PAIR),
    Mechanisms("talking heads with ours", (TALKING, LIVE, overt.Bayesian()), (), PAIR),
    Mechanisms("sigmoid", (SIGMOID,), (), PAIR),
    Mechanisms("sigmoid with Evolving", (LIVE, SIGMOID), (), PAIR),
    Mechanisms("row smoothing", (RowSmoothing(0.4),), (RowSmoothing(0.0),), PAIR),
]


def assert_same(
    ours: list[tuple[Tensor, Tensor]], theirs: list[tuple[Tensor, Tensor]], tolerance: float = 2e-5
) -> None:
    """Equal at positions that are real."""
    assert len(ours) == len(theirs)
    for (a, real), (b, _) in zip(ours, theirs, strict=True):
        picked = real.bool()
        torch.testing.assert_close(a[picked], b[picked], atol=tolerance, rtol=tolerance)


def same_as_before(family: Family, of: Mechanisms) -> None:
    model = family.make()
    for padded in (False, True):
        inputs = inputs_of(family, padded)
        plain = tokens_of(family, model, inputs)
        for mechanism in of.still:
            overt.attach(model, mechanism)
            assert_same(tokens_of(family, model, inputs), plain)
            overt.detach(model)


def equals_the_reference(family: Family, of: Mechanisms) -> None:
    model = family.make()
    plain = copy.deepcopy(model)
    enliven(overt.attach(model, *of.live))
    plain.set_attn_implementation(reference.NAME)
    for module in plain.modules():  # transformers 5.17 leaves out T5's stacks
        if hasattr(module, "config"):
            module.config._attn_implementation_internal = reference.NAME
    for padded, left in ((False, False), (True, False), (True, True)):
        if padded and not family.pads:
            continue
        inputs = inputs_of(family, padded, left)
        reference.open_book(book_of(family, model, plain, inputs))
        slow = tokens_of(family, plain, inputs)
        reference.open_book(None)
        still = tokens_of(family, family.make(), inputs)
        fast = tokens_of(family, model, inputs)
        assert_same(fast, slow, 1e-4)
        moved = [
            (a - b)[real.bool()].abs().max().item() for (a, real), (b, _) in zip(fast, still, strict=True)
        ]
        assert max(moved) > 1e-3, "the mechanism does something"


def farthest(a: Tensor, b: Tensor, real: Tensor) -> float:
    return (a - b)[real.bool()].abs().max().item()


def all_equal(ours: list[tuple[Tensor, Tensor]], theirs: list[tuple[Tensor, Tensor]]) -> bool:
    return all(torch.equal(a, b) for (a, _), (b, _) in zip(ours, theirs, strict=True))


def book_of(family: Family, attached: Any, plain: Any, inputs: dict[str, Tensor]) -> reference.Book:
    places = {}
    for kind in family.attends:
        for layer, path in enumerate(family.paths(kind)):
            evolving = attached.get_submodule(path).overt.map.evolving
            kernel = None if evolving.weight is None else reference.array(evolving.weight)
            bias = None if evolving.bias is None else reference.array(evolving.bias)
            tower = path.split(".")[0]
            place = reference.Place(kind, tower, layer, kernel, bias, family.calls)
            places[plain.get_submodule(path)] = place
    real = {}
    mask, target = inputs.get("attention_mask"), inputs.get("decoder_attention_mask")
    if family.inputs == "pair":
        real = {"encoder": mask.numpy(), "decoder": target.numpy(), "cross": target.numpy()}
    elif family.inputs == "both":
        real = {"decoder": mask.numpy()}
    elif family.inputs == "text":
        real = {next(iter(family.attends)): mask.numpy()}
    return reference.Book(places, real, LIVE.alpha, LIVE.beta)


def alone_as_in_a_padded_batch(family: Family, of: Mechanisms) -> None:
    model = of.attached(family)
    positions = "position_ids" in inspect.signature(type(model).forward).parameters
    relative = family.name in ("T5", "Llama", "Mistral", "Qwen 2", "Qwen 3", "Gemma", "Gemma 2", "GPT-NeoX")
    relative = relative or family.name in ("ModernBERT", "OPT", "RoBERTa", "XLM-R")
    for left in (False, True):
        batch = inputs_of(family, padded=True, left=left)
        if left and positions and not relative and "input_ids" in batch:
            batch["position_ids"] = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
        together = tokens_of(family, model, batch)
        garbled = dict(batch)
        # RoBERTa's positions, and where CLIP pools, depend on the tokens themselves.
        if family.name not in ("RoBERTa", "XLM-R") and family.inputs != "both":
            hidden = batch["attention_mask"] == 0
            garbled["input_ids"] = batch["input_ids"].masked_fill(hidden, families.WORDS - 1)
            assert_same(tokens_of(family, model, garbled), together)
        if left and not (positions or relative):
            continue  # its positions count from the left edge, padding or not
        for row in range(3):
            alone = {key: cut(value, row, key, batch) for key, value in batch.items()}
            apart = tokens_of(family, model, alone)
            for (one, real), (all_, mask) in zip(apart, together, strict=True):
                assert bool(real.bool().all())
                torch.testing.assert_close(one[0], all_[row][mask[row].bool()], atol=2e-5, rtol=2e-5)


def cut(value: Tensor, row: int, key: str, batch: dict[str, Tensor]) -> Tensor:
    if key == "pixel_values":
        return value[row : row + 1]
    mask = batch["decoder_attention_mask" if key.startswith("decoder") else "attention_mask"][row]
    return value[row : row + 1, mask.bool()]


def returns_the_map_used(family: Family, of: Mechanisms) -> None:
    model = of.attached(family)
    inputs = inputs_of(family, padded=True)
    used: list[Tensor] = []

    def note(_module: Any, _args: Any, output: tuple[Tensor, Tensor]) -> None:
        used.append(output[1].detach())

    for module in model.modules():
        if "overt" in module._modules:
            module.overt.register_forward_hook(note)
    for training in (False, True):
        used.clear()
        model.train(training)
        output = model(**inputs, output_attentions=True)
        maps = []
        for part in (output, *(getattr(output, f"{t}_model_output", None) for t in ("text", "vision"))):
            for name in ("encoder_attentions", "attentions", "decoder_attentions", "cross_attentions"):
                maps += list((part.get(name) if part is not None else None) or ())
        assert len(maps) == len(used) > 0
        for one in maps:
            sums = one.sum(dim=-1)
            whole = ((sums - 1.0).abs() < 1e-5).logical_or(sums == 0).all()
            assert bool(whole) or not of.sums_to_one, "before dropout"
            assert any(torch.equal(one, other) for other in used)


def trains_with_its_loss(family: Family, of: Mechanisms) -> None:
    model = family.make()
    inputs = loss_inputs(family, model)
    task = model(**inputs).loss
    for mechanism in of.still:
        overt.attach(model, mechanism)
        loss = model(**inputs).loss
        torch.testing.assert_close(loss, task, atol=1e-4, rtol=1e-4)  # evaluation: the task's alone
        overt.detach(model)
    enliven(overt.attach(model, *of.live))
    model.train()
    output = model(**inputs)
    if of.adds:
        assert overt.penalty(model).item() > 0.0
    assert output.loss.requires_grad
    output.loss.backward()
    for name, parameter in model.named_parameters():
        if ".overt." in name:
            assert parameter.grad is not None, f"{name} is not used"
            assert bool(parameter.grad.isfinite().all())
            assert float(parameter.grad.abs().sum()) > 0.0, f"{name} does not learn"


def gradients(family: Family, of: Mechanisms, model: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    model.train()
    model.zero_grad(set_to_none=True)
    model.overt_state.seen.zero_()  # the same examples of the same step, so the same noise
    torch.manual_seed(11)
    outputs = tokens_of(family, model, inputs)
    loss = sum((x * real.unsqueeze(-1)).square().mean() for x, real in outputs)
    (loss + overt.penalty(model) if of.adds else loss).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def checkpointing_changes_nothing(family: Family, of: Mechanisms) -> str | None:
    if not family.checkpoints:
        with pytest.raises(ValueError, match="does not support gradient checkpointing"):
            family.make().gradient_checkpointing_enable()
        return "the family has no gradient checkpointing"
    model = of.attached(family)
    inputs = inputs_of(family, padded=True)
    expected = gradients(family, of, model, inputs)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    again = gradients(family, of, model, inputs)
    assert again.keys() == expected.keys()
    for name, grad in expected.items():
        torch.testing.assert_close(again[name], grad, atol=1e-6, rtol=1e-5, msg=name)
    if not (of.adds or of.reads_below):
        return None  # nothing that reentrant checkpointing would cut
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    if family.inputs != "image" and hasattr(model, "enable_input_require_grads"):
        model.enable_input_require_grads()
    with pytest.raises(RuntimeError, match="reentrant checkpointing"):
        gradients(family, of, model, inputs)
    return None


def prompt_of(family: Family, left: bool) -> dict[str, Tensor]:
    inputs = inputs_of(family, padded=left, left=left)
    return {key: value for key, value in inputs.items() if not key.startswith("decoder")}


def generate(family: Family, model: Any, **settings: Any) -> Any:
    torch.manual_seed(3)
    settings = {"max_new_tokens": 7, "min_new_tokens": 7, "do_sample": False, **settings}
    if family.inputs == "sound":
        settings["decoder_input_ids"] = torch.tensor([[families.BOS]] * 3)
        return transformers.GenerationMixin.generate(
            model, **prompt_of(family, False), **settings, return_dict_in_generate=True, output_logits=True
        )
    prompt = prompt_of(family, left=True)
    return model.generate(**prompt, **settings, return_dict_in_generate=True, output_logits=True)


def assert_generates_the_same(family: Family, model: Any, cached: dict[str, Any], **settings: Any) -> None:
    slow = generate(family, model, use_cache=False, **settings)
    fast = generate(family, model, **cached, **settings)
    assert torch.equal(slow.sequences, fast.sequences)
    for a, b in zip(slow.logits, fast.logits, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
    plain = generate(family, family.make(), **cached, **settings)
    differ = any(not torch.allclose(a, b, atol=1e-4) for a, b in zip(plain.logits, fast.logits, strict=True))
    assert differ, "the mechanism does something"


def generates_with_a_cache(family: Family, of: Mechanisms) -> None:
    model = of.attached(family)
    assert_generates_the_same(family, model, {"use_cache": True})
    assert_generates_the_same(family, model, {"use_cache": True}, do_sample=True, top_k=0, temperature=1.5)


def searches_with_beams(family: Family, of: Mechanisms) -> None:
    assert_generates_the_same(family, of.attached(family), {"use_cache": True}, num_beams=3)


def generates_with_a_static_cache(family: Family, of: Mechanisms) -> None:
    assert_generates_the_same(family, of.attached(family), {"cache_implementation": "static"})


def another(family: Family) -> Any:
    """A model of the family that disagrees with its fellow."""
    model = family.make()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.5)
    return model


def crops_where_it_can(family: Family, of: Mechanisms) -> str | None:
    model = of.attached(family)
    prompt: dict[str, Any] = {key: value[:1] for key, value in prompt_of(family, left=False).items()}
    prompt |= {"max_new_tokens": 7, "do_sample": False, "assistant_model": another(family)}
    if family.inputs == "sound":
        prompt["decoder_input_ids"] = torch.tensor([[families.BOS]])
    if not of.keeps_rows:
        assisted = transformers.GenerationMixin.generate(model, **prompt)
        del prompt["assistant_model"]
        assert torch.equal(assisted, transformers.GenerationMixin.generate(model, **prompt))
        return None
    # transformers 5.17 fails by itself where windows slide.
    with pytest.raises(RuntimeError, match=r"cannot be cropped.*assisted|must match the size of tensor b"):
        transformers.GenerationMixin.generate(model, **prompt)
    return "cropping the cache loses rows of maps that the convolutions need"


def saves_and_loads(family: Family, of: Mechanisms) -> None:
    model = of.attached(family, seed=4)
    model.overt_state.step += 12
    inputs = inputs_of(family, padded=True)
    with TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        loaded = overt.load(folder)
    assert type(loaded) is type(model)
    before, after = model.state_dict(), loaded.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert loaded.overt_state.mechanisms == model.overt_state.mechanisms
    assert (loaded.overt_state.seed, int(loaded.overt_state.step)) == (4, 12)
    for (a, _), (b, _) in zip(
        tokens_of(family, model, inputs), tokens_of(family, loaded, inputs), strict=True
    ):
        assert torch.equal(a, b)


def detaches_bit_for_bit(family: Family, of: Mechanisms) -> None:
    model, twin = family.make(), family.make()
    inputs = inputs_of(family, padded=True)
    before = tokens_of(family, model, inputs)
    tokens_of(family, twin, inputs)  # transformers leaves marks of its own
    overt.attach(model, *of.live)
    tokens_of(family, model, inputs)
    overt.detach(model)
    assert all(
        torch.equal(a, b) for (a, _), (b, _) in zip(tokens_of(family, model, inputs), before, strict=True)
    )
    assert model.config.to_dict() == twin.config.to_dict()
    assert model.config._attn_implementation == twin.config._attn_implementation
    assert str(model) == str(twin)
    for (path, a), (_, b) in zip(model.named_modules(), twin.named_modules(), strict=True):
        assert a.__dict__.keys() == b.__dict__.keys(), path
        assert len(a._forward_hooks) == len(b._forward_hooks), path
        assert len(a._forward_pre_hooks) == len(b._forward_pre_hooks), path


def copies_deeply(family: Family, of: Mechanisms) -> None:
    model = of.attached(family)
    inputs = inputs_of(family, padded=True)
    model.train()
    tokens_of(family, model, inputs)  # leaves a KL with a graph behind
    model.eval()
    twin = copy.deepcopy(model)
    expected = tokens_of(family, model, inputs)
    assert all_equal(tokens_of(family, twin, inputs), expected)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert all_equal(tokens_of(family, model, inputs), expected)
    assert twin.overt_state is not model.overt_state


def runs_in_bfloat16(family: Family, of: Mechanisms) -> None:
    model = of.attached(family)
    inputs = inputs_of(family, padded=True)
    exact = tokens_of(family, model, inputs)
    with torch.autocast("cpu", torch.bfloat16), overt.with_kl(model):
        rough = tokens_of(family, model, inputs)
        kl = overt.kl(model) if of.adds else None
    assert kl is None or kl.dtype == torch.float32
    for (a, real), (b, _) in zip(rough, exact, strict=True):
        error = ((a.float() - b)[real.bool()].norm() / b[real.bool()].norm()).item()
        assert error < 0.05, error
    model.train()
    with torch.autocast("cpu", torch.bfloat16):
        output = model(**loss_inputs(family, model))
    output.loss.backward()
    assert all(p.grad.isfinite().all() for name, p in model.named_parameters() if ".overt." in name)


def sees_no_future(family: Family, of: Mechanisms) -> None:
    model = of.attached(family)
    inputs = inputs_of(family)
    name = "decoder_input_ids" if family.inputs in ("pair", "sound") else "input_ids"
    number = 1 if family.inputs in ("pair", "sound") else 0
    expected = tokens_of(family, model, inputs)[number][0]
    for last in range(1, inputs[name].shape[1]):
        changed = inputs[name].clone()
        changed[:, last:] = (changed[:, last:] + 11) % 40 + 5
        after = tokens_of(family, model, {**inputs, name: changed})[number][0]
        assert torch.equal(after[:, :last], expected[:, :last])
        assert not torch.equal(after[:, last], expected[:, last])


Feature = Callable[[Family, Mechanisms], str | None]
FEATURES: dict[str, Feature] = {
    "same outputs at α = β = 0": same_as_before,
    "α = β = 0.3 equals the reference": equals_the_reference,
    "padding": alone_as_in_a_padded_batch,
    "output_attentions": returns_the_map_used,
    "training with the KL": trains_with_its_loss,
    "gradient checkpointing": checkpointing_changes_nothing,
    "no look ahead": sees_no_future,
    "cached decoding": generates_with_a_cache,
    "beam search": searches_with_beams,
    "static cache": generates_with_a_static_cache,
    "assisted decoding": crops_where_it_can,
    "save and load": saves_and_loads,
    "detach": detaches_bit_for_bit,
    "deepcopy": copies_deeply,
    "bfloat16 autocast": runs_in_bfloat16,
}
DECODING = ("no look ahead", "cached decoding", "beam search", "static cache", "assisted decoding")
# Features that not every family has.
NEEDS: dict[str, Callable[[Family], bool]] = {
    "padding": lambda family: family.pads,
    "no look ahead": lambda family: "decoder" in family.attends,
    **dict.fromkeys(
        ("cached decoding", "beam search", "static cache", "assisted decoding"),
        lambda family: family.generates,
    ),
}
# Features that not every mechanism has.
ASKS: dict[str, Callable[[Mechanisms], bool]] = {
    "same outputs at α = β = 0": lambda of: bool(of.still),
    "α = β = 0.3 equals the reference": lambda of: of is OURS,
}
QUICK = ("BERT", "T5")  # they have every kind of attention; the others are slow
# `make test` tries every feature on the first of families that are built alike, and on the others what
# depends on their code for attention most; `make test-all` and `make support` try all of it.
LIKE = {
    **dict.fromkeys(("RoBERTa", "XLM-R", "ELECTRA", "DistilBERT", "ALBERT", "ModernBERT"), "BERT"),
    **dict.fromkeys(("Mistral", "Qwen 2", "Qwen 3", "Gemma", "Gemma 2"), "Llama"),
    **dict.fromkeys(("OPT", "GPT-NeoX"), "GPT-2"),
    **dict.fromkeys(("mBART", "Pegasus", "Marian"), "BART"),
    "DeiT": "ViT",
}
OWN = ("same outputs at α = β = 0", "α = β = 0.3 equals the reference", "padding", "cached decoding")


def marks_of(family: Family, feature: str, of: Mechanisms) -> tuple[pytest.MarkDecorator, ...]:
    # What is alone here is tried in every way together with ours, too.
    alone = of.name in ("talking heads", "sigmoid")
    if (family.name in LIKE or alone) and feature not in OWN:
        return (pytest.mark.exhaustive,)
    return () if of is OURS and family.name in QUICK else (pytest.mark.slow,)


CASES = [
    pytest.param(
        family,
        feature,
        of,
        id=f"{family.name}-{feature}" + (f"-{of.name}" if of is not OURS else ""),
        marks=marks_of(family, feature, of),
    )
    for of in MECHANISMS
    for family in FAMILIES
    for feature in FEATURES
    if family.name in of.families
    if feature not in NEEDS or NEEDS[feature](family)
    if feature not in ASKS or ASKS[feature](of)
]

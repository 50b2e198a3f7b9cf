"""Attached models under masks and caches of every kind: rows of padding, odd masks, keys that do not fit."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor

import overt
from attached import shallow
from families import EOS, PAD, TEXT, WORDS, lengths_mask, llama_like, tokens
from overt.attaching.find import find
from zoo.checks import enliven
from zoo.inputs import batch_of, fitting
from zoo.models import build

pytestmark = pytest.mark.slow
NEUTRAL: list[Any] = [
    pytest.param(lambda: (overt.Bayesian(),), id="bayesian"),
    pytest.param(lambda: (overt.Evolving(alpha=0, beta=0),), id="evolving at 0"),
    pytest.param(lambda: (overt.Evolving(alpha=0, beta=0), overt.Bayesian()), id="both"),
]
Make = Callable[[], tuple[overt.Mechanism, ...]]


def bert(implementation: str = "sdpa") -> Any:
    torch.manual_seed(1)
    return hf.BertModel(hf.BertConfig(**TEXT, attn_implementation=implementation)).eval()


def conformer() -> Any:
    """Speech: between attentions, convolutions read the frames beside each frame, padding too."""
    torch.manual_seed(1)
    config = hf.Wav2Vec2ConformerConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        conv_dim=(16, 16),
        conv_kernel=(8, 4),
        conv_stride=(4, 4),
        num_feat_extract_layers=2,
        conv_depthwise_kernel_size=3,
    )
    return hf.Wav2Vec2ConformerModel(config).eval()


def recurrent() -> Any:
    """A decoder whose first layers are recurrent, and which attends through a window."""
    torch.manual_seed(1)
    config = hf.RecurrentGemmaConfig(
        vocab_size=WORDS,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=6,
        num_attention_heads=4,
        lru_width=32,
        attention_window_size=8,
        initializer_range=1.0,
        pad_token_id=PAD,
    )
    made = hf.RecurrentGemmaForCausalLM(config).eval()
    made.generation_config.update(pad_token_id=PAD, eos_token_id=EOS)
    return made


# Rows of padding.


@torch.no_grad()
@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("mechanisms", NEUTRAL)
@pytest.mark.parametrize("kind", ["encoder", "decoder"])
def test_rows_of_padding_are_what_the_plain_model_has(
    kind: str, mechanisms: Make, implementation: str, left: bool
) -> None:
    model: Any = bert(implementation) if kind == "encoder" else llama_like("Llama")()
    model.set_attn_implementation(implementation)
    mask = lengths_mask([9, 6, 4], 9, left)
    batch = {"input_ids": tokens().masked_fill(mask == 0, PAD), "attention_mask": mask}
    plain = model(**batch, output_hidden_states=True).hidden_states
    overt.attach(model, *mechanisms())
    found = model(**batch, output_hidden_states=True).hidden_states
    for ours, theirs in zip(found, plain, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("mechanisms", NEUTRAL)
def test_weights_of_padding_are_plain_too_where_they_are_asked_for(mechanisms: Make) -> None:
    model, mask = bert("eager"), lengths_mask([9, 6, 4], 9)
    batch = {"input_ids": tokens(), "attention_mask": mask, "output_attentions": True}
    plain = model(**batch).attentions
    overt.attach(model, *mechanisms())
    for ours, theirs in zip(model(**batch).attentions, plain, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)


def test_rows_of_padding_have_the_plain_models_gradients() -> None:
    mask = lengths_mask([9, 6, 4], 9)
    batch = {"input_ids": tokens(), "attention_mask": mask}

    def gradients(model: Any) -> list[Tensor]:
        out = model(**batch).last_hidden_state
        weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(0))
        (out * weight * (mask == 0)[..., None]).sum().backward()  # of padding alone
        return [
            parameter.grad.clone()
            for name, parameter in model.named_parameters()
            if "overt" not in name and parameter.grad is not None
        ]

    plain = gradients(bert())
    attached = bert()
    overt.attach(attached, overt.Evolving(alpha=0, beta=0), overt.Bayesian())
    for ours, theirs in zip(gradients(attached), plain, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("mechanisms", NEUTRAL)
@pytest.mark.parametrize("kind", ["t5", "parakeet_ctc", "doge"])
def test_rows_that_see_no_key_are_plain_beside_a_bias(
    kind: str, mechanisms: Make, implementation: str
) -> None:
    """With a bias, sdpa's mask is an additive one, whose hidden rows are uniform and not zero."""
    model = build(kind)
    model.set_attn_implementation(implementation)
    batch = batch_of(model, fitting(model), "right" if kind == "parakeet_ctc" else "left")
    plain = model(**batch).logits
    overt.attach(model, *mechanisms())
    torch.testing.assert_close(model(**batch).logits, plain, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_mechanisms_do_not_touch_rows_of_padding_and_do_touch_the_others() -> None:
    model, mask = bert(), lengths_mask([9, 6, 4], 9)
    batch = {"input_ids": tokens(), "attention_mask": mask}
    layer = model.encoder.layer[0].attention.self
    seen: list[Tensor] = []
    layer.register_forward_hook(lambda *given: seen.append(given[-1][0]))
    model(**batch)
    overt.attach(model, overt.Evolving(alpha=0, beta=0.5), overt.Bayesian(k=1))
    with torch.random.fork_rng():
        for parameter in model.encoder.layer[0].attention.self.overt.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)))
    model.train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    layer.dropout.p = 0.0
    model(**batch)
    plain, drawn = seen
    assert torch.allclose(plain[mask == 0], drawn[mask == 0], atol=1e-5)
    assert not torch.allclose(plain[mask == 1], drawn[mask == 1], atol=1e-2)


@torch.no_grad()
@pytest.mark.parametrize("mechanisms", NEUTRAL)
def test_real_frames_stay_where_convolutions_read_rows_of_padding(mechanisms: Make) -> None:
    model, sound = conformer(), torch.randn(2, 400, generator=torch.Generator().manual_seed(0))
    mask = torch.ones(2, 400, dtype=torch.long)
    mask[1, 200:] = 0
    plain = model(sound * mask, attention_mask=mask).last_hidden_state
    overt.attach(model, *mechanisms())
    found = model(sound * mask, attention_mask=mask).last_hidden_state
    torch.testing.assert_close(found, plain, atol=1e-5, rtol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
@pytest.mark.parametrize("mechanisms", NEUTRAL)
def test_real_tokens_stay_where_a_recurrence_reads_rows_of_padding(mechanisms: Make, left: bool) -> None:
    model, mask = recurrent(), lengths_mask([9, 6, 4], 9, left)
    batch = {"input_ids": tokens(), "attention_mask": mask, "use_cache": False}
    plain = model(**batch).logits
    overt.attach(model, *mechanisms())
    torch.testing.assert_close(model(**batch).logits, plain, atol=1e-4, rtol=1e-4)


# Masks of one's own.


def own_mask(shown: Tensor) -> Tensor:
    return torch.zeros(shown.shape).masked_fill(~shown, torch.finfo(torch.float32).min)


def chunks() -> Tensor:
    """Three chunks of three tokens; each sees itself and those before it."""
    chunk = torch.arange(9) // 3
    return chunk[:, None] >= chunk[None]


def below_the_diagonal() -> Tensor:
    """A causal mask that hides tokens from themselves, but for the first, which would see nothing."""
    shown = torch.ones(9, 9, dtype=torch.bool).tril(-1)
    shown[0, 0] = True
    return shown


@torch.no_grad()
@pytest.mark.parametrize(
    ("kind", "shown", "reason"),
    [
        pytest.param("encoder", ~torch.eye(9, dtype=torch.bool), "is neither full nor causal", id="itself"),
        pytest.param("encoder", chunks(), "is neither full nor causal", id="chunks"),
        pytest.param("decoder", below_the_diagonal(), "hides tokens from themselves", id="causal itself"),
    ],
)
def test_a_mask_that_keeps_tokens_apart_silences_none_and_is_refused_where_rows_read_each_other(
    kind: str, shown: Tensor, reason: str
) -> None:
    model = bert("eager") if kind == "encoder" else llama_like("Llama")()
    model.set_attn_implementation("eager")
    batch = {"input_ids": tokens(), "attention_mask": own_mask(shown.expand(3, 1, 9, 9)), "use_cache": False}
    plain = model(**batch)[0]
    overt.attach(model, overt.Bayesian())
    torch.testing.assert_close(model(**batch)[0], plain, atol=1e-5, rtol=1e-5)
    overt.detach(model)
    overt.attach(model, overt.Evolving(), overt.Bayesian())
    with pytest.raises(ValueError, match=f"its mask {reason}, and Evolving would carry"):
        model(**batch)


@torch.no_grad()
def test_a_mask_of_ones_own_for_padding_is_understood() -> None:
    model, mask = bert("eager"), lengths_mask([9, 6, 4], 9)
    square = (mask[:, None, None] == 1).expand(3, 1, 9, 9)
    overt.attach(model, overt.Evolving(alpha=0.3, beta=0.3), overt.Bayesian())
    want = model(input_ids=tokens(), attention_mask=mask).last_hidden_state
    found = model(input_ids=tokens(), attention_mask=own_mask(square)).last_hidden_state
    torch.testing.assert_close(found, want, atol=1e-5, rtol=1e-5)


# Caches.


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize(
    "mechanisms",
    [
        pytest.param((overt.Bayesian(),), id="bayesian"),
        pytest.param((overt.Evolving(alpha=0.3, beta=0.3),), id="evolving"),
        pytest.param((overt.Evolving(alpha=0.3, beta=0.3), overt.Bayesian()), id="both"),
    ],
)
def test_cached_generation_of_a_model_whose_first_layer_has_no_keys(
    mechanisms: tuple[overt.Mechanism, ...], beams: int
) -> None:
    model = recurrent()
    overt.attach(model, *mechanisms)
    asked: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "num_beams": beams}
    ids = tokens(batch=2)
    cached = model.generate(ids, attention_mask=torch.ones_like(ids), **asked)
    whole = model.generate(ids, attention_mask=torch.ones_like(ids), use_cache=False, **asked)
    assert torch.equal(cached, whole)


@torch.no_grad()
def test_keys_that_do_not_add_up_are_refused() -> None:
    model = llama_like("Llama")()
    overt.attach(model, overt.Bayesian())
    attention = model.model.layers[0].self_attn
    plain = type(attention).forward

    def longer(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        update = hf.DynamicCache.update

        class More(hf.DynamicCache):
            def update(self, key: Tensor, value: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
                key, value = update(self, key, value, *args)
                return torch.cat([key, key], dim=-2), torch.cat([value, value], dim=-2)

        return plain(self, hidden_states, *args, **{**kwargs, "past_key_values": More()})

    attention.forward = longer.__get__(attention)
    with pytest.raises(ValueError, match="attends over 18 keys after 0 cached tokens, with 9 queries"):
        model(input_ids=tokens())


# Pictures and texts in one batch.


def test_the_kl_of_images_joins_however_many_images_texts_have() -> None:
    from overt.attaching.state import average_by_labels

    labels = torch.tensor([[1, 2, -100], [4, 5, 6]])
    texts, images = torch.tensor([1.0, 3.0]), torch.tensor([2.0, 4.0, 9.0])
    # Without the Trainer's count: means, by labels and alike.
    found = average_by_labels((texts, images), labels, None)
    assert found is not None
    assert found.item() == pytest.approx((1.0 * 2 + 3.0 * 3) / 5 + 5.0)
    # Two batches of one step, counted over both, add up to the mean of both by their labels.
    others = torch.tensor([[7, -100, -100], [8, 9, 1]])
    parts = [
        average_by_labels((texts, images), labels, 9),
        average_by_labels((texts, images[:2]), others, 9),
    ]
    assert all(part is not None for part in parts)
    want = (1.0 * 2 + 3.0 * 3 + 1.0 * 1 + 3.0 * 3) / 9 + (5.0 * 5 + (2.0 * 1 + 4.0 * 3)) / 9
    assert sum(part.item() for part in parts if part is not None) == pytest.approx(want)


@pytest.mark.filterwarnings("error:the KL of the last training forward")
def test_the_kl_of_a_vision_language_model_joins_with_three_images_for_two_texts() -> None:
    model = build("llava")
    batch = batch_of(model, fitting(model))
    image = int(model.config.image_token_id)
    ids, pixels = batch["input_ids"][:2], batch["pixel_values"][:1].expand(3, -1, -1, -1)
    patches = int((ids[0] == image).sum())
    more = torch.stack([torch.full((patches,), image), torch.full((patches,), 7)])
    ids = torch.cat([more, ids], dim=1)
    overt.attach(model.train(), overt.Bayesian(kl_weight=1.0))
    count = torch.tensor(ids[:, 1:].numel())
    for _ in range(2):  # a KL that was not added to a loss would be reported at the second
        loss = model(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            pixel_values=pixels,
            labels=ids,
            num_items_in_batch=count,
        ).loss
        found = overt.losses(model)
        assert found.task is not None
        assert found.kl is not None
        torch.testing.assert_close(loss.detach(), found.task + found.kl, rtol=1e-4, atol=1e-4)


# What attends to what.


@pytest.mark.parametrize(
    ("kind", "path", "expected"),
    [
        ("pix2struct", "encoder_decoder_attention", "cross"),
        ("idefics2", "perceiver_resampler", "cross"),
        ("kosmos-2", "x_attn", "cross"),
        ("idefics", "vision_model", "encoder"),
        ("clip", "text_model", "decoder"),
    ],
)
def test_the_kind_of_attention_is_what_it_does(kind: str, path: str, expected: str) -> None:
    kinds = {one.kind for one in find(build(kind)) if path in one.path}
    assert kinds == {expected}


def test_codebooks_are_rows_of_one_example() -> None:
    """MusicGen's tokens come as batch × codebooks rows, of which it attends over one sequence per example."""
    model = build("musicgen").eval()
    model.audio_encoder.decode = lambda codes, **_: SimpleNamespace(audio_values=codes)  # of tokens, no sound
    batch = {k: v for k, v in batch_of(model, fitting(model)).items() if not k.startswith("decoder")}
    overt.attach(model, overt.Evolving(alpha=0.3, beta=0.3, decoder_alpha=0.3), overt.Bayesian())
    enliven(model)
    settings = {"do_sample": False, "max_new_tokens": 8, "pad_token_id": 98, "decoder_start_token_id": 98}
    fast, slow = (model.generate(**batch, **settings, use_cache=use) for use in (True, False))
    assert fast.shape[1:3] == (2, 4)
    assert torch.equal(fast, slow)


@pytest.mark.parametrize("kind", ["llama", "t5"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_rows_that_see_no_key_have_the_plain_models_gradients(kind: str, implementation: str) -> None:
    model = build(kind)
    model.set_attn_implementation(implementation)
    batch = batch_of(model, fitting(model), "left")

    def gradients() -> dict[str, Tensor]:
        model.zero_grad()
        model(**batch).logits.square().mean().backward()
        return {n: p.grad for n, p in model.named_parameters() if p.grad is not None and "overt" not in n}

    plain = gradients()
    overt.attach(model, overt.Bayesian(prior=None))
    for name, gradient in gradients().items():
        torch.testing.assert_close(gradient, plain[name], atol=1e-5, rtol=1e-3)


@pytest.mark.slow
def test_a_compiler_does_not_let_odd_masks_through() -> None:
    model = overt.attach(shallow(llama_like("Llama")()), overt.Evolving(decoder_alpha=0.3))
    compiled: Any = torch.compile(model, backend="eager")
    ids, causal = tokens()[:1], torch.ones(1, 1, 9, 9, dtype=torch.bool).tril()
    prefix = causal.clone()
    prefix[..., :4, :4] = True
    with torch.no_grad():
        compiled(input_ids=ids, attention_mask=causal, use_cache=False)
        with pytest.raises(RuntimeError, match="lets queries see later keys"):
            compiled(input_ids=ids, attention_mask=prefix, use_cache=False)
        with pytest.raises(RuntimeError, match="packed sequences are not supported"):
            compiled(input_ids=ids, position_ids=torch.arange(9)[None] % 5, use_cache=False)

"""Models train the same with fused kernels and with the definitions; on a GPU, or in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import overt
from fused_models import CUDA, DEVICE, EVOLVING, MECHANISMS, attached, kernels_in, spied
from overt.mechanisms import backend as switch
from overt.mechanisms.evolving.layer import ROOM_FOR_MANY
from selection import covering
from stacks import enliven

pytest.importorskip("triton", reason="triton is made for Linux alone")
FORMS: dict[str, list[overt.Mechanism]] = {
    "both, lognormal": [EVOLVING, overt.Bayesian(family="lognormal", prior_sigma=2.0)],
    "kernel of 1": [overt.Evolving(kernel_size=1, alpha=0.3, beta=0.4)],
    "kernel of 5": [overt.Evolving(kernel_size=5, alpha=0.3, beta=0.4)],
    "no skip": [overt.Evolving(alpha=0.0, beta=0.4)],
    "first": [overt.Evolving(alpha=0.3, beta=0.4, first=True)],
    "no convolution": [overt.Evolving(alpha=0.3, beta=0.4, convolve=("decoder",))],
    "realformer": [overt.Evolving.realformer()],
    "ramp": [overt.Evolving(alpha=0.5, beta=0.5, ramp_steps=10), overt.Bayesian(rho=0.1)],
}


@pytest.fixture(autouse=True)
def _kernels_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(switch, "KERNEL_DEVICES", {"cuda", "cpu"})


def both_ways(model: nn.Module, run: Any, caplog: pytest.LogCaptureFixture, kernels: bool = True) -> None:
    """Loss and every gradient, fused and naive."""

    def found() -> list[Tensor | None]:
        loss = run()
        return [loss, *torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)]

    with caplog.at_level("DEBUG", "overt"):
        got = found()
    ways = [record.getMessage() for record in caplog.records if "kernels" in record.getMessage()]
    assert any("fused kernels" in way for way in ways) == kernels, ways
    with overt.naive():
        want = found()
    for a, b in zip(got, want, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            torch.testing.assert_close(a, b, rtol=2e-3, atol=3e-5)


def padded(length: int) -> Tensor:
    return (torch.arange(length) >= torch.tensor([[length - 3], [length]])).to(DEVICE)


# The interpreter is slow: there, one form of each kind of code.
ENCODERS = (
    [*MECHANISMS, *FORMS]
    if CUDA
    else covering(
        ["both", "first", "no convolution", "realformer"], ["first", "no convolution", "realformer"]
    )
)
DECODERS = list(MECHANISMS) if CUDA else ["both"]
ATTACHED = (
    [(kind, form) for kind in ("bert", "llama", "bart") for form in MECHANISMS]
    if CUDA
    else [("bert", "both"), ("llama", "bayesian")]
)


@pytest.mark.slow
@pytest.mark.parametrize("form", ENCODERS)
def test_an_encoder_trains_the_same(form: str, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(2)
    mechanisms = {**MECHANISMS, **FORMS}[form]
    layers = 1 if form == "first" else 3
    model = overt.Encoder(48, 3, layers, mechanisms, dropout=0.0).to(DEVICE)
    enliven(model)
    x = torch.randn(2, 11, 48, device=DEVICE)

    def run() -> Tensor:
        chain = overt.Chain(step=3)
        return model(x, padded(11), chain=chain).square().mean() + chain.penalty()

    both_ways(model, run, caplog)


@pytest.mark.slow
@pytest.mark.parametrize("form", DECODERS)
def test_a_decoder_with_cross_attention_trains_the_same(form: str, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(2)
    model = overt.Decoder(32, 2, 2, MECHANISMS[form], cross=True, dropout=0.0).to(DEVICE)
    enliven(model)
    x, memory = torch.randn(2, 9, 32, device=DEVICE), torch.randn(2, 6, 32, device=DEVICE)

    def run() -> Tensor:
        chain = overt.Chain(step=3)
        out = model(x, padded(9), chain=chain, memory=memory, memory_padding=padded(6))
        return out.square().mean() + chain.penalty()

    both_ways(model, run, caplog)


@pytest.fixture
def _precision_as_it_was() -> Iterator[None]:
    backends = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul
    asked, each = torch.get_float32_matmul_precision(), [backend.fp32_precision for backend in backends]
    yield
    torch.set_float32_matmul_precision(asked)
    for backend, precision in zip(backends, each, strict=True):
        backend.fp32_precision = precision


@pytest.mark.usefixtures("_precision_as_it_was")
def test_float32_products_are_exact_unless_torch_is_asked_for_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    from overt.mechanisms.kernels.launch import Ready

    model = overt.Encoder(32, 2, 2, MECHANISMS["both"], dropout=0.0).to(DEVICE)
    x = torch.randn(1, 3, 32, device=DEVICE)

    def used() -> set[str]:
        """How the kernels of a training step would multiply; none of them runs."""
        found: set[str] = set()

        def noted(ready: Ready, *_: Any) -> None:
            found.update({ready.constants["PRECISION"]} if "PRECISION" in ready.constants else ())

        monkeypatch.setattr(Ready, "run", noted)
        chain = overt.Chain(step=3)
        (model(x, chain=chain).square().mean() + chain.penalty()).backward()
        return found

    assert used() == {"tf32x3"}  # three products of TF32, which is float32 but for its last bits
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    assert used() == {"tf32"}
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    assert used() == {"tf32x3"}
    torch.set_float32_matmul_precision("high")
    assert used() == {"tf32"}
    torch.set_float32_matmul_precision("highest")
    assert used() == {"tf32x3"}


def little_room(form: str) -> tuple[nn.Module, int, str]:
    """A model, its width, and what it needs shared memory for."""
    if form == "wide heads":
        return overt.Encoder(2 * 72, 2, 1, [overt.Bayesian()], dropout=0.0), 2 * 72, "float32 heads of more"
    many = overt.Encoder(17 * 2, 17, 2, [EVOLVING], dropout=0.0)
    enliven(many)
    return many, 17 * 2, "convolutions of more than 16 heads"


@pytest.mark.slow
@pytest.mark.parametrize("form", ["wide heads", "many heads"])
def test_a_gpu_with_little_shared_memory_goes_the_plain_way_and_says_why(
    form: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(2)
    monkeypatch.setattr(switch, "room", lambda _: 101_376)
    model, width, reason = little_room(form)
    model, x = model.to(DEVICE), torch.randn(2, 5, width, device=DEVICE)

    def run() -> Tensor:
        chain = overt.Chain(step=3)
        return model(x, padded(5), chain=chain).square().mean() + chain.penalty()  # type: ignore[no-any-return]

    # The first layer of many heads has no convolution, and hands its map from kernels to plain operations.
    both_ways(model, run, caplog, kernels=form == "many heads")
    last = "encoder 0" if form == "wide heads" else "encoder 1"
    assert f"{last}: plain operations: {reason}" in caplog.text
    assert "need more shared memory than this GPU has" in caplog.text


def test_many_heads_need_just_so_much_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = overt.MultiheadAttention(17 * 2, 17, layer=1, mechanisms=[EVOLVING]).map.layers[0]
    query = torch.empty(1, 17, 3, 2, dtype=torch.float16)
    call = overt.AttentionCall(layer.site, query, query, query)
    monkeypatch.setattr(switch, "room", lambda _: ROOM_FOR_MANY)
    assert layer.unfit(call) is None
    long = torch.empty(1, 17, 2**30, 2, device="meta")
    assert "too large" in (layer.unfit(overt.AttentionCall(layer.site, query, long, long)) or "")
    monkeypatch.setattr(switch, "room", lambda _: ROOM_FOR_MANY - 1)
    assert "shared memory" in (layer.unfit(call) or "")


def test_gradients_of_gradients_are_refused_and_plain_operations_have_them() -> None:
    attention = overt.MultiheadAttention(8, 2, batch_first=True, mechanisms=[overt.Bayesian()]).to(DEVICE)
    x = torch.randn(1, 3, 8, device=DEVICE, requires_grad=True)

    def curvature() -> Tensor:
        y = attention(x, x, x, chain=overt.Chain(step=0), need_weights=False)[0] + x  # around it, x goes on
        slope = torch.autograd.grad(y.square().sum(), x, create_graph=True)[0]
        return torch.autograd.grad(slope.square().sum(), x)[0]

    with pytest.raises(RuntimeError, match=r"no second-order gradients.*overt\.naive"):
        curvature()
    with overt.naive():
        assert curvature().abs().sum() > 0


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "form"), ATTACHED)
def test_an_attached_model_trains_the_same(kind: str, form: str, caplog: pytest.LogCaptureFixture) -> None:
    model, inputs = attached(kind, MECHANISMS[form])

    def run() -> Tensor:
        model.overt_state.seen.zero_()
        loss: Tensor = model(**inputs).loss
        return loss

    both_ways(model, run, caplog)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch hides it by other means
@pytest.mark.parametrize(("kind", "form"), [("bert", "both"), ("llama", "bayesian")][0 if CUDA else 1 :])
def test_a_compiled_model_takes_kernels_under_padding_and_causality(kind: str, form: str) -> None:
    model, inputs = attached(kind, MECHANISMS[form])
    inputs |= {"use_cache": False} if kind == "llama" else {}  # type: ignore[dict-item]
    torch.compiler.reset()
    graphs: list[torch.fx.GraphModule] = []
    compiled = torch.compile(model, backend=spied(graphs, "aot_eager"), fullgraph=True)

    def found(run: Any) -> list[Tensor | None]:
        model.overt_state.seen.zero_()
        loss = run(**inputs).loss
        return [loss, *torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)]

    for a, b in zip(found(compiled), found(model), strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            # By the norm: what rounds otherwise may fall on the other side of ReLU's corner.
            assert float((a - b).detach().norm()) <= 2e-3 * float(b.detach().norm()) + 1e-4
    assert kernels_in(graphs) == 2


@pytest.mark.slow
def test_one_padding_mask_for_all_is_that_mask_for_each(caplog: pytest.LogCaptureFixture) -> None:
    model, inputs = attached("bart", MECHANISMS["bayesian"], where="cross")
    real = torch.arange(9, device=DEVICE) < 3
    one = (real & torch.ones(9, 9, dtype=torch.bool, device=DEVICE).tril()).view(1, 1, 9, 9)

    def run(mask: Tensor, **more: bool) -> Tensor:
        model.overt_state.seen.zero_()
        loss: Tensor = model(**inputs, decoder_attention_mask=mask, **more).loss
        return loss

    # Cross-attention takes the padding of its queries, (1, query), from the decoder.
    both_ways(model, lambda: run(one), caplog)
    for layer in range(2):
        assert f"cross {layer}: fused kernels" in caplog.text
    with torch.no_grad():
        for keys in (inputs["attention_mask"], inputs["attention_mask"][:1, None, None].bool()):
            inputs["attention_mask"] = keys
            shared = run(one)
            if keys.shape[0] == 1:
                inputs["attention_mask"] = keys.expand(2, -1, -1, -1).contiguous()
            each = one.expand(2, -1, -1, -1).contiguous()
            torch.testing.assert_close(shared, run(each))
            torch.testing.assert_close(shared, run(each, output_attentions=True), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("way", ["keyword", "position", "config"])
def test_weights_are_there_however_they_are_asked_for(way: str, caplog: pytest.LogCaptureFixture) -> None:
    import transformers as hf

    class Own(hf.BertModel):  # type: ignore[misc]
        """What models of one's own may look like, and some families do."""

        def forward(
            self,
            input_ids: Tensor,
            attention_mask: Tensor | None = None,
            output_attentions: bool | None = None,
        ) -> Any:
            asked = {} if output_attentions is None else {"output_attentions": output_attentions}
            return super().forward(input_ids, attention_mask, **asked)

    size = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    asked = {"attn_implementation": "eager", "output_attentions": way == "config"}
    model = Own(hf.BertConfig(**size, **asked, num_attention_heads=2)).eval().to(DEVICE)
    overt.attach(model, *MECHANISMS["both"])
    ids = torch.randint(3, 50, (2, 9), device=DEVICE)
    mask = (~padded(9)).long()

    def found() -> tuple[Tensor, ...]:
        if way == "keyword":
            return model(ids, mask, output_attentions=True).attentions  # type: ignore[no-any-return]
        return model(ids, mask, *([True] if way == "position" else [])).attentions  # type: ignore[no-any-return]

    with caplog.at_level("DEBUG", "overt"):
        maps = found()
    for layer in range(2):
        assert f"encoder {layer}: plain operations: weights are wanted (output_attentions)" in caplog.text
    with overt.naive():
        again = found()
    assert len(maps) == len(again) == 2
    for map, want in zip(maps, again, strict=True):
        assert map.shape == (2, 2, 9, 9)
        assert torch.equal(map, want)


def made_by_transformers(model: Any, padding: Tensor) -> Tensor:
    """The whole mask (batch, 1, query, key) of a padding mask, as a model makes it for itself."""
    from transformers.masking_utils import create_bidirectional_mask

    like = torch.zeros(*padding.shape, 32, device=DEVICE)
    mask: Tensor = create_bidirectional_mask(model.config, inputs_embeds=like, attention_mask=padding)
    return mask


def logits_and_kl(model: Any, inputs: dict[str, Tensor], mask: Tensor) -> Tensor:
    with torch.no_grad(), overt.with_kl(model):
        logits: Tensor = model(input_ids=inputs["input_ids"], attention_mask=mask).logits
    return torch.cat([logits.flatten(), overt.kl(model).view(1)])


@pytest.mark.slow
@pytest.mark.parametrize("which", ["padding", "whole"])
def test_a_mask_changed_in_place_is_seen_anew(which: str) -> None:
    model, inputs = attached("bert", MECHANISMS["bayesian"])
    model.eval()
    mask = inputs["attention_mask"]
    if which == "whole":
        mask = made_by_transformers(model, mask)
    before = logits_and_kl(model, inputs, mask)
    mask[1, ..., 3:] = torch.finfo(mask.dtype).min if which == "whole" else 0
    after, fresh = logits_and_kl(model, inputs, mask), logits_and_kl(model, inputs, mask.clone())
    assert not torch.allclose(before, after, atol=1e-3)
    torch.testing.assert_close(after, fresh)


@pytest.mark.slow
def test_a_whole_mask_does_not_change_with_the_padding_that_it_was_made_of() -> None:
    model, inputs = attached("bert", MECHANISMS["bayesian"])
    model.eval()
    padding = inputs["attention_mask"].bool()
    mask = made_by_transformers(model, padding)
    before = logits_and_kl(model, inputs, mask)
    padding[1, 3:] = False
    torch.testing.assert_close(logits_and_kl(model, inputs, mask), before)


def test_dropping_every_weight_is_the_definition(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    attention = overt.MultiheadAttention(32, 2, dropout=1.0, batch_first=True, mechanisms=[overt.Bayesian()])
    attention, x = attention.to(DEVICE), torch.randn(2, 5, 32, device=DEVICE)

    def run() -> Tensor:
        chain = overt.Chain(step=3)
        out = attention(x, x, x, padded(5), need_weights=False, chain=chain)[0]
        assert torch.equal(out[1], attention.out_proj.bias.expand(5, -1))
        return out.square().mean() + chain.penalty()  # type: ignore[no-any-return]

    nn.init.normal_(attention.out_proj.bias)
    both_ways(attention, run, caplog, kernels=False)
    assert "encoder 0: plain operations: every weight is dropped" in caplog.text


def test_a_trace_looks_at_the_same_maps() -> None:
    model, inputs = attached("bert", MECHANISMS["evolving"])
    del inputs["labels"]
    traced = overt.trace(model, inputs)
    with overt.naive():
        assert torch.equal(traced.maps[0], overt.trace(model, inputs).maps[0])


@pytest.mark.slow
def test_dropout_of_attention_is_drawn_from_torchs_generator() -> None:
    torch.manual_seed(0)
    attention = overt.MultiheadAttention(32, 2, dropout=0.5, batch_first=True, mechanisms=[overt.Bayesian()])
    attention, x = attention.to(DEVICE), torch.randn(1, 12, 32, device=DEVICE)

    def run(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return attention(x, x, x, need_weights=False, chain=overt.Chain(step=0))[0]  # type: ignore[no-any-return]

    assert torch.equal(run(1), run(1))
    assert not torch.equal(run(1), run(2))


@pytest.mark.slow
def test_cached_cross_attention_draws_the_rows_of_the_whole() -> None:
    model, inputs = attached("bart", [overt.Bayesian(k=1.0)])
    model.eval()
    ids = inputs["input_ids"][:, :4]
    given = {"input_ids": inputs["input_ids"], "attention_mask": inputs["attention_mask"]}
    drawing = model.overt_state.drawing(torch.tensor(0), torch.arange(2), seed=0)
    with torch.no_grad(), drawing:
        whole = model(**given, decoder_input_ids=ids, use_cache=False).logits
        cache, rows = None, []
        for place in range(4):
            step = {
                "decoder_input_ids": ids[:, place : place + 1],
                "past_key_values": cache,
                "use_cache": True,
            }
            out = model(**given, **step)
            cache, rows = out.past_key_values, [*rows, out.logits]
    torch.testing.assert_close(torch.cat(rows, dim=1), whole, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_addresses_may_be_views() -> None:
    torch.manual_seed(0)
    model = overt.Encoder(32, 2, 1, [overt.Bayesian(k=1.0, prior=None)], dropout=0.0).to(DEVICE)
    x = torch.randn(3, 5, 32, device=DEVICE)
    for view in (torch.arange(6, device=DEVICE)[::2], torch.tensor(4, device=DEVICE).expand(3)):
        for name in ("examples", "sample"):
            got = model(x, chain=overt.Chain(step=0, **{name: view}))  # type: ignore[arg-type]
            want = model(x, chain=overt.Chain(step=0, **{name: view.contiguous()}))  # type: ignore[arg-type]
            assert torch.equal(got, want)


@pytest.mark.slow
def test_a_model_used_in_inference_mode_trains_afterwards() -> None:
    torch.manual_seed(0)
    mechanisms = [overt.Evolving(alpha=0.123, beta=0.456)]
    model = overt.Encoder(32, 2, 2, mechanisms, dropout=0.0).to(DEVICE)  # type: ignore[arg-type]
    x = torch.randn(1, 5, 32, device=DEVICE)
    with torch.inference_mode():
        model.eval()(x, chain=overt.Chain())
    model.train()(x, chain=overt.Chain(step=0)).sum().backward()
    assert all(p.grad is not None for p in model.parameters() if p.dim() == 4)


def test_a_recomputed_block_goes_the_way_of_its_first_run() -> None:
    model, inputs = attached("bert", MECHANISMS["both"])
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    with overt.naive():
        loss = model(**inputs).loss
    loss.backward()


def test_a_wrapped_prior_network_goes_the_plain_way() -> None:
    class Wrapped(nn.Linear):
        pass

    attention = overt.MultiheadAttention(16, 2, batch_first=True, mechanisms=[overt.Bayesian()]).to(DEVICE)
    layer: Any = attention.map.layers[0]
    layer.prior.inner = Wrapped(8, 5).to(DEVICE)
    q = torch.zeros(1, layer.site.heads, 2, layer.site.head_dim, device=DEVICE)
    assert "wrapped" in (layer.unfit(overt.AttentionCall(layer.site, q, q, q)) or "")


@pytest.mark.slow
@pytest.mark.parametrize("form", ["bayesian", "evolving"])
def test_weights_that_hooks_bring_only_for_a_layers_own_pass_go_the_plain_way(
    form: str, caplog: pytest.LogCaptureFixture
) -> None:
    from accelerate import cpu_offload

    model, inputs = attached("bert", MECHANISMS[form])
    model.eval()
    here = torch.device("cuda:0") if CUDA else DEVICE
    with torch.no_grad(), overt.with_kl(model):  # without the KL there would be nothing for kernels to do
        before = model(**inputs).logits
        cpu_offload(model, execution_device=here)
        with caplog.at_level("DEBUG", "overt"):
            after = model(**inputs).logits
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-5)
    assert "weights are on meta" in caplog.text

"""Traces of states, made small by a small budget, against traces of maps."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast, masking_utils
from typer.testing import CliRunner

import families
import overt
from eager_families import MODELS, own_eager
from families import BY_NAME, FAMILIES, Family
from long_traces import BYTES, states_of
from overt import judge
from overt.attaching import find
from overt.cli import app
from overt.tracing import capture, masks
from overt.tracing.asked import Asked, Sight
from overt.tracing.capture import OWN_EAGER
from overt.tracing.levels import held_of
from overt.tracing.masks import sight_of
from overt.tracing.states import StateLevel

NOTHING = torch.zeros(2, dtype=torch.int64)
# One of each kind of layout and mask; the others are like one of these.
FIRST = {
    "ALBERT",
    "GPT-2",
    "Llama",
    "BART",
    "ViT",
    "ModernBERT",
    "Whisper",
    "Mistral",
    "Qwen 3",
    "OPT",
    "CLIP",
}
PLAIN = [
    pytest.param(family, id=family.name, marks=() if family.name in FIRST else pytest.mark.exhaustive)
    for family in FAMILIES
    if family.name not in ("T5", "Gemma 2")
]


def llama(**more: Any) -> tuple[Any, dict[str, Tensor]]:
    family = BY_NAME["Llama"]
    return family.make(), families.inputs_of(family, **more)


@pytest.mark.parametrize("family", PLAIN)
def test_rows_of_states_are_those_of_maps(family: Family) -> None:
    model, inputs = family.make(), families.inputs_of(family, padded=family.pads)
    options = {"stack": "vision_model"} if family.name == "CLIP" else {}
    maps, states = overt.trace(model, inputs, **options), states_of(model, inputs, **options)
    assert not maps.of_states
    assert (states.kind, states.paths, states.tokens) == (maps.kind, maps.paths, maps.tokens)
    assert torch.equal(states.mask, maps.mask)
    for method in ("raw", "rollout"):
        got, want = states.read(method, range(maps.queries)), maps.read(method)
        torch.testing.assert_close(got, want, rtol=0.0, atol=2e-6)
    if maps.outputs is not None:
        torch.testing.assert_close(states.outputs, maps.outputs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["Llama", "BART"])
def test_everything_else_that_reads_maps(name: str) -> None:
    family = BY_NAME[name]
    model, inputs = family.make(), families.inputs_of(family, padded=True, left=name == "Llama")
    maps, states = overt.trace(model, inputs, heads=True), states_of(model, inputs, heads=True)
    for options in ({"heads": "each"}, {"heads": [0, 2]}, {"receptive_field": True}, {"residual": 0.2}):
        got, want = states.rollout(-1, **options), maps.rollout(-1, **options)
        torch.testing.assert_close(got, want, rtol=0.0, atol=5e-6)
    torch.testing.assert_close(states.flow(-1), maps.flow(-1), rtol=0.0, atol=2e-6)
    torch.testing.assert_close(states[1].rollout(-1), maps[1].rollout(-1), rtol=0.0, atol=2e-6)
    real = maps.mask[:, maps.first :, None] & maps.mask[:, None, maps.first :]
    for one, other in zip(states.maps, maps.maps, strict=True):
        torch.testing.assert_close(one * real[:, None], other * real[:, None], rtol=0.0, atol=2e-6)
    if name == "BART":
        got, want = states.encoder.rollout(0), maps.encoder.rollout(0)
        torch.testing.assert_close(got, want, rtol=0.0, atol=2e-6)


def test_the_main_rows_are_the_default() -> None:
    model, inputs = llama(padded=True)
    states = states_of(model, inputs)
    chosen = sorted(set(states.main_queries()))
    assert 1 < len(chosen) < states.queries
    assert torch.equal(states.rollout(), states.rollout(chosen))


def test_states_are_freed_with_their_trace() -> None:
    model, inputs = llama()
    t = states_of(model, inputs)
    state = weakref.ref(t.maps.held[0])  # type: ignore[attr-defined]
    assert state() is not None
    gc.disable()  # long traces hold gigabytes, and a cycle would keep them until the next collection
    try:
        del t
        assert state() is None
    finally:
        gc.enable()


def test_shapes_decide() -> None:
    model, inputs = llama()
    batch, tokens = inputs["input_ids"].shape
    layers, heads = model.config.num_hidden_layers, model.config.num_attention_heads
    cells = batch * tokens**2
    for kept, many in ((False, 1), (True, heads)):
        needed = 4 * (layers * many * cells + heads * cells)
        assert not overt.trace(model, inputs, heads=kept, memory=needed).of_states
        assert overt.trace(model, inputs, heads=kept, memory=needed - 1).of_states
    needed = 4 * (layers * cells + heads * cells)
    zeroed = overt.trace(model, inputs, mixing="value-zeroing", memory=needed)  # runs layers again
    assert zeroed.memory is None
    refused(model, inputs, "mixing='value-zeroing' makes maps of its own", mixing="value-zeroing")


def test_what_the_error_advises_is_just_enough() -> None:
    t5 = BY_NAME["T5"].make()
    pair = {"input_ids": families.tokens(1, 200), "decoder_input_ids": families.tokens(1, 2)}
    needed = 4 * (3 * 200**2 + 3 * 2 * 2 + 3 * 2 * 200 + 4 * 200**2)
    for memory in (BYTES, needed - 1):
        with pytest.raises(ValueError, match=rf"^maps would take {needed:,} bytes.*; give memory={needed}$"):
            overt.trace(t5, pair, memory=memory)
    assert overt.trace(t5, pair, memory=needed).memory is None


def test_shapes_decide_for_torchs_and_our_own_models() -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 16, batch_first=True)
    torchs = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    both = nn.Transformer(16, 2, 2, 3, 16, batch_first=True)
    sides = {"src": torch.randn(2, 20, 16), "tgt": torch.randn(2, 7, 16)}
    own = overt.Encoder(16, 2, 3, hidden=16)
    cases: list[tuple[nn.Module, Any, int]] = [
        (torchs, {"src": torch.randn(2, 30, 16)}, 4 * (4 + 2) * 2 * 30**2),
        (both, sides, 4 * 2 * (2 * 20**2 + 3 * 7**2 + 3 * 7 * 20 + 2 * 20**2)),
        (own, torch.randn(2, 30, 16), 4 * (3 + 2) * 2 * 30**2),
    ]
    for model, inputs, needed in cases:
        assert not overt.trace(model, inputs, memory=needed).of_states
        states = overt.trace(model, inputs, memory=needed - 1)
        levels = states.levels()
        held = [*levels.maps, *levels.encoder, *levels.cross]
        assert all(isinstance(each, Asked) for each in held)  # the first layer knew


def test_layers_that_are_not_traced_do_not_count() -> None:
    family = BY_NAME["CLIP"]
    model, inputs = family.make(), families.inputs_of(family)
    batch, tokens = 3, 10  # of the image, with CLS
    needed = 4 * (3 + 4) * batch * tokens**2
    assert not overt.trace(model, inputs, stack="vision_model", memory=needed).of_states
    assert overt.trace(model, inputs, stack="vision_model", memory=needed - 1).of_states
    needed = 4 * (3 + 4) * batch * 9**2
    assert not overt.trace(model, inputs, stack="text_model", memory=needed).of_states
    states = overt.trace(model, inputs, stack="text_model", memory=needed - 1)
    assert states.of_states
    assert all(held.sight.bias is None for held in states.levels().maps)  # type: ignore[union-attr]


def test_an_encoder_decoder_has_states_in_all_of_its_layers_or_in_none() -> None:
    bart = BY_NAME["BART"].make()
    pair = {"input_ids": families.tokens(1, 4), "decoder_input_ids": families.tokens(1, 40)}
    states = overt.trace(bart, pair, memory=4000)
    assert all(isinstance(held, Asked) for held in (*states.levels().encoder, *states.levels().cross))
    assert states.rollout(-1, heads=[1, 2], layers=-1).shape == (1, 1, 1, 44)
    albert = families.BY_NAME["ALBERT"]
    needed = 4 * (3 + 4) * 3 * 9**2
    assert not overt.trace(albert.make(), families.inputs_of(albert), memory=needed).of_states
    states = overt.trace(albert.make(), families.inputs_of(albert), memory=needed - 1)
    assert all(isinstance(held, Asked) for held in states.levels().maps)


def test_results_over_the_budget_are_refused_with_their_bytes() -> None:
    model, inputs = llama()
    states = overt.trace(model, inputs, memory=700)
    batch, tokens = inputs["input_ids"].shape
    row = 3 * batch * tokens * 8  # of three layers
    with pytest.raises(
        ValueError, match=f"^rollout of 2 queries in 3 layers would take {2 * row:,} bytes, over"
    ):
        states.rollout([0, 1])
    assert states.rollout(0, layers=-1).shape == (batch, 1, 1, tokens)
    with pytest.raises(
        ValueError, match=f"^the map of layer 1 would take {batch * tokens**2 * 4:,} bytes, ov"
    ):
        states.maps[1]
    flow = batch * 3 * tokens**2 * 8
    with pytest.raises(
        ValueError, match=f"^flow through 3 levels of {tokens} tokens would take {flow:,} bytes"
    ):
        states.flow(0, layers=-1)
    with pytest.raises(
        ValueError, match=f"a single row of {tokens} tokens would take {row // 3} bytes, over me"
    ):
        overt.trace(model, inputs, memory=100)
    with pytest.raises(ValueError, match="memory must be a whole number"):
        overt.trace(model, inputs, memory=0)


def test_methods_that_do_not_fit_the_budget_are_known_before_they_run(tmp_path: Path) -> None:
    model, inputs = llama()
    states = overt.trace(model, inputs, memory=BYTES)
    reason = states.why_not("flow")
    assert reason is not None
    assert reason.startswith("flow through 3 levels of 9 tokens would take 5,832 bytes, over memory=1,000")
    assert states.why_not("rollout") is None
    states.memory = 2000  # for one layer
    assert states.why_not("flow", layers=0) is None
    assert states.flow(layers=0).shape == (3, 1, 1, 9)
    assert {method for method, _ in judge.correlate(states, unk=3, bootstrap=2).mean} == {"raw", "rollout"}

    words = {word: number for number, word in enumerate(["[UNK]", *"abcdefghijklmnopqrstuvwxyz"])}
    spelling = Tokenizer(WordLevel(words, unk_token="[UNK]"))
    spelling.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=spelling, unk_token="[UNK]").save_pretrained(tmp_path)
    model.save_pretrained(tmp_path)
    command = ["trace", " ".join(words), "--model", str(tmp_path)]
    few, enough = (CliRunner().invoke(app, [*command, "--memory", str(most)]) for most in (1000, 2**20))
    assert (few.exit_code, enough.exit_code) == (0, 0), few.output
    assert "rollout" in few.output
    assert "flow" not in few.output
    assert "flow" in enough.output
    refused_one = CliRunner().invoke(app, [*command, "--memory", "1000", "--method", "flow"])
    assert "--method flow: flow through 3 levels" in str(refused_one.exception)


def test_flow_of_states_on_another_device_is_solved_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    states = states_of(*llama())

    class Elsewhere(Tensor):
        def numpy(self, *_: Any, **__: Any) -> Any:
            raise TypeError("can't convert a cuda tensor to numpy")

        def cpu(self, *_: Any, **__: Any) -> Tensor:
            return self.as_subclass(Tensor)

    row = StateLevel.row
    monkeypatch.setattr(StateLevel, "row", lambda *given: row(*given).as_subclass(Elsewhere))
    assert type(states.levels().level(1, "mean", 0.5).row([0])) is Elsewhere
    assert states.flow(-1).shape == (3, 3, 1, 9)


def refused(model: nn.Module, inputs: dict[str, Tensor], reason: str, **options: Any) -> None:
    with pytest.raises(
        ValueError, match=f"^maps would take .* bytes, over memory=.*{reason}.*; give memory=\\d+$"
    ):
        overt.trace(model, inputs, memory=BYTES, **options)


def test_what_needs_maps_is_refused_with_the_reason() -> None:
    model, inputs = llama()
    refused(model, inputs, "mixing='norm' makes maps of its own", mixing="norm")
    for name, reason in (("T5", "attends with position_bias"), ("Gemma 2", "attends with softcap")):
        refused(BY_NAME[name].make(), families.inputs_of(BY_NAME[name]), reason)
    evolving = overt.attach(model, overt.Evolving(alpha=0.3, beta=0.3))
    refused(evolving, inputs, "Evolving of model.layers.0.self_attn makes its own weights")
    refused(evolving, inputs, "parts are maps", parts=True)


def test_a_bayesian_model_is_traced_at_the_mean_of_its_weights() -> None:
    model, inputs = llama(padded=True)
    overt.attach(model, overt.Bayesian())
    maps, states = overt.trace(model, inputs), states_of(model, inputs)
    torch.testing.assert_close(states.rollout(range(9)), maps.rollout(), rtol=0.0, atol=2e-6)
    torch.testing.assert_close(states.outputs, maps.outputs, rtol=1e-4, atol=1e-5)
    refused(model, inputs, "each posterior sample has maps", samples=2)
    model(**inputs)  # as before


def test_logits_of_the_last_position_are_the_same_alone() -> None:
    model, inputs = llama()
    asked: list[Any] = []
    model.register_forward_pre_hook(lambda *args: asked.append(args[2]), with_kwargs=True)
    maps = overt.trace(model, inputs)
    short = overt.trace(model, inputs, memory=BYTES)
    assert [kwargs.get("logits_to_keep") for kwargs in asked] == [None, 1]
    torch.testing.assert_close(short.outputs, maps.outputs, rtol=1e-4, atol=1e-5)
    overt.trace(*llama(padded=True), memory=BYTES)  # examples end earlier: all logits are needed


@pytest.mark.parametrize("name", ["Llama", "BERT", "BART", "ALBERT"])
def test_gradients_through_layers_that_run_again_are_the_plain_ones(name: str) -> None:
    family = BY_NAME[name]
    model, inputs = family.make(), families.inputs_of(family, padded=True)
    ran: list[nn.Module] = []
    for module in model.modules():
        if isinstance(module, nn.LayerNorm) or "RMSNorm" in type(module).__name__:
            module.register_forward_hook(lambda module, *_: ran.append(module))
    flags = [parameter.requires_grad for parameter in model.parameters()]
    maps, states = overt.trace(model, inputs), states_of(model, inputs)
    queries = [5, 2] if maps.queries > 5 else [3, 2]
    for kind in ("norm", "input"):
        ran.clear()
        want = maps.gradients(queries, kind=kind)
        once = len(ran)
        got = states.gradients(queries, kind=kind)
        assert len(ran) > 2 * once  # forward passes again
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6 * float(want.abs().max()))
    assert [parameter.requires_grad for parameter in model.parameters()] == flags
    assert not any("forward" in vars(module) for module in model.modules())
    assert states.gradients().shape[2] == (1 if want.shape[2] == 1 else len(set(maps.main_queries())))


def test_a_backward_pass_keeps_the_inputs_of_layers_alone() -> None:
    model, inputs = llama()
    kept: list[int] = []

    def keep(x: Tensor) -> Tensor:
        kept.append(x.numel())
        return x

    def amount(trace: overt.Trace) -> int:
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            trace.gradients(5)
        return sum(kept)

    maps, states = overt.trace(model, inputs), states_of(model, inputs)
    assert amount(states) < 0.5 * amount(maps)


@pytest.mark.parametrize("memory", [BYTES, 2**30])
def test_a_model_loaded_with_flash_attention_says_what_ran(memory: int) -> None:
    model, inputs = llama()
    want = overt.trace(model, inputs, memory=memory).rollout(8)
    model.config._attn_implementation_internal = "flash_attention_2"
    with pytest.warns(UserWarning, match="flash_attention_2") as said:
        found = overt.trace(model, inputs, memory=memory)
    assert [str(warning.message) for warning in said] == [
        "the model was loaded with flash_attention_2: while it is traced, its attention is torch's "
        "scaled_dot_product_attention"
    ]
    assert torch.equal(found.rollout(8), want)
    assert model.config._attn_implementation == "flash_attention_2"
    gemma = BY_NAME["Gemma 2"].make()
    gemma.config._attn_implementation_internal = "flash_attention_2"
    with pytest.warns(UserWarning, match="loaded with flash_attention_2: .* its family's eager attention$"):
        overt.trace(gemma, families.inputs_of(BY_NAME["Gemma 2"]))


@pytest.fixture
def eager_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the modules whose family's eager attention was looked up and run."""
    calls: list[str] = []

    def noting(module: nn.Module) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            calls.append(type(module).__name__)
            eager: Any = find.eager_of(module)
            return eager(*args, **kwargs)

        return run

    monkeypatch.setattr(capture, "eager_of", noting)
    return calls


@pytest.mark.parametrize("family", PLAIN)
def test_maps_are_made_from_queries_and_keys_without_eager_attention(
    family: Family, eager_calls: list[str]
) -> None:
    """The same maps as those of eager attention, rows of padding included."""
    model, inputs = family.make(), families.inputs_of(family, padded=family.pads)
    options: dict[str, Any] = {"stack": "vision_model"} if family.name == "CLIP" else {}
    traced = overt.trace(model, inputs, heads=True, **options)
    assert not eager_calls
    assert traced.memory is None
    weights: list[Tensor] = []

    def keep(call: capture.CapturedAttention) -> None:
        if not options or call.chain.startswith("vision_model"):
            weights.append(call.weights)

    with capture.watching(model, keep), torch.no_grad():
        model(**inputs)
    assert eager_calls
    found = [
        *traced.encoder_maps,
        *(x for pair in zip(traced.maps, traced.cross, strict=False) for x in pair),
    ]
    for ours, theirs in zip(found if traced.cross else traced.maps, weights, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0.0, atol=2e-6)


def test_outputs_are_those_of_the_model_as_it_runs() -> None:
    model, inputs = llama()
    assert model.config._attn_implementation == "sdpa"
    with torch.no_grad():
        want = model(**inputs).logits[:, -1]
    assert torch.equal(overt.trace(model, inputs).outputs, want)  # type: ignore[arg-type]


@pytest.mark.parametrize("eager", [False, True])
def test_a_mask_that_shows_what_is_true_hides_the_rest(eager: bool) -> None:
    family = BY_NAME["BERT"]
    model, inputs = family.make(), families.inputs_of(family)
    count = inputs["input_ids"].shape[1]
    shown = torch.ones(1, 1, count, count, dtype=torch.bool)
    shown[..., 2:4] = False
    inputs["attention_mask"] = shown
    with torch.no_grad():
        expected = model(**inputs).logits
    t = overt.trace(model, inputs, mixing="norm" if eager else "attention")
    torch.testing.assert_close(t.outputs, expected)
    for cells in t.maps:
        assert float(cells[..., 2:4].abs().max()) == 0.0
        assert eager or torch.allclose(cells.sum(dim=-1), torch.ones(()))


def test_a_model_that_adds_such_a_mask_is_traced_as_it_is() -> None:
    family = BY_NAME["BERT"]
    model, inputs = family.make(), families.inputs_of(family)
    model.config._attn_implementation = "eager"
    count = inputs["input_ids"].shape[1]
    inputs["attention_mask"] = torch.eye(count, dtype=torch.bool)[None, None]
    with torch.no_grad():
        expected = model(**inputs).logits
    torch.testing.assert_close(overt.trace(model, inputs).outputs, expected)


def test_padding_on_the_left_in_float64() -> None:
    model, inputs = llama()
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    inputs["attention_mask"][0, :2] = 0
    t = overt.trace(model.double(), inputs)
    assert all(bool(cells.isfinite().all()) for cells in t.maps)


def test_what_needs_eager_attention_keeps_it(eager_calls: list[str]) -> None:
    model, inputs = llama()
    for options in ({"mixing": "norm"}, {"mixing": "gradient"}, {"mixing": "value-zeroing"}):
        overt.trace(model, inputs, **options)  # type: ignore[arg-type]
        assert eager_calls
        eager_calls.clear()
    for name in ("T5", "Gemma 2"):
        overt.trace(BY_NAME[name].make(), families.inputs_of(BY_NAME[name]))
        assert eager_calls
        eager_calls.clear()
    hidden = torch.zeros(3, 1, 9, 9)
    hidden[1, :, 4] = -torch.inf  # a query that sees nothing: not a number, in eager attention
    nothing = overt.trace(model, {**inputs, "attention_mask": hidden}).maps[0]
    assert eager_calls
    assert bool(nothing[1, 4].isnan().all())
    eager_calls.clear()
    kept: list[Any] = []

    def output(result: Any) -> Tensor:
        kept.append(result.attentions)
        logits: Tensor = result.logits
        return logits

    traced = overt.trace(model, {**inputs, "output_attentions": True}, heads=True, output=output)
    assert eager_calls
    for ours, theirs in zip(traced.maps, kept[0], strict=True):
        torch.testing.assert_close(ours, theirs)


def test_half_precision_is_no_further_from_the_exact_map_than_eager_attention() -> None:
    model, inputs = llama(padded=True)
    model.bfloat16()
    held: Any = held_of(states_of(model, inputs).maps)
    ours = overt.trace(model, inputs, heads=True).maps[0]
    calls: list[capture.CapturedAttention] = []
    with capture.watching(model, calls.append), torch.no_grad():
        model(**inputs)
    real = inputs["attention_mask"].bool()[:, None, :, None]
    exact = held[0].weights() * real
    apart, eagers = (float((cells * real - exact).abs().max()) for cells in (ours, calls[0].weights))
    assert apart < 1e-6 < eagers


def test_rows_are_saved_in_place_of_maps(tmp_path: Path) -> None:
    model, inputs = llama(padded=True)
    states = states_of(model, inputs)
    states.save(tmp_path / "long.safetensors", queries=[8, 3])
    back = overt.Trace.load(tmp_path / "long.safetensors")
    assert (back.layers, back.queries, back.tokens) == (states.layers, states.queries, states.tokens)
    assert torch.equal(back.raw(3), states.raw(3))
    assert torch.equal(back.rollout([8, 3], layers=-1), states.rollout([8, 3], layers=-1))
    torch.testing.assert_close(back[1].rollout(), states[1].rollout([3, 8]), rtol=1e-6, atol=1e-7)
    assert repr(back) == "Trace(causal, 3 × 9 tokens, 3 layers, as rows)"
    back.save(tmp_path / "again.safetensors")
    assert torch.equal(overt.Trace.load(tmp_path / "again.safetensors").raw(), back.raw())
    with pytest.raises(ValueError, match=r"saved with rows of queries \[3, 8\], got \[4\]"):
        back.raw([3, 4])
    with pytest.raises(ValueError, match="no flow: this trace was saved as rows of raw and rollout"):
        back.flow(3)
    usual = {"heads": "mean", "receptive_field": False, "normalize": False, "layers": None, "residual": None}
    assert torch.equal(back.rollout(3, **usual), back.rollout(3))
    with pytest.raises(ValueError, match="rows, which are fixed: receptive_field cannot be given"):
        back.rollout(3, receptive_field=True)
    with pytest.raises(ValueError, match="rows, which are fixed: residual cannot be given"):
        back.rollout(3, residual=0.1)
    with pytest.raises(ValueError, match="a trace of maps is saved whole, got queries"):
        overt.trace(model, inputs).save(tmp_path / "maps.safetensors", queries=[1])


def mask_of(function: Any, padding: Tensor | None = None, **options: Any) -> Tensor:
    made = masking_utils.sdpa_mask(
        2, 700, 700, mask_function=function, attention_mask=padding, allow_is_causal_skip=False, **options
    )
    assert isinstance(made, Tensor)
    return made


def test_masks_of_transformers_are_turned_back_into_parts() -> None:
    real = torch.arange(700) < torch.tensor([[700], [600]])
    causal, window = masking_utils.causal_mask_function, masking_utils.sliding_window_causal_mask_function
    near = masking_utils.sliding_window_bidirectional_mask_function
    cases = [
        (mask_of(causal), Sight(causal=True)),
        (mask_of(causal, real), Sight(causal=True, keys=real)),
        (mask_of(causal, real.flip(1)), Sight(causal=True, keys=real.flip(1))),
        (mask_of(window(64), real), Sight(causal=True, window=64, keys=real)),
        (mask_of(masking_utils.bidirectional_mask_function, real), Sight(keys=real)),
        (real[:, None, None, :], Sight(keys=real)),
        (mask_of(near(50), real), Sight(causal=True, offset=50, window=101, keys=real)),
        (mask_of(masking_utils.chunked_causal_mask_function(100, NOTHING)), Sight(causal=True, chunk=100)),
        (mask_of(causal)[..., 300:, :], Sight(causal=True, offset=300)),
    ]
    for mask, want in cases:
        added = torch.where(mask, 0.0, torch.finfo(torch.float32).min)
        for form in (mask, added):
            got = sight_of(form, max(form.shape[-2], 400), 700)
            assert (got.causal, got.offset, got.window, got.chunk, got.bias) == (
                want.causal, want.offset, want.window, want.chunk, None,
            )  # fmt: skip
            assert (got.keys is None) == (want.keys is None)
            assert got.keys is None or torch.equal(got.keys, want.keys)  # type: ignore[arg-type]


def test_other_masks_are_kept_as_they_are() -> None:
    shifted = mask_of(masking_utils.chunked_causal_mask_function(100, torch.tensor([0, 7])))
    blocks = torch.block_diag(torch.ones(400, 400), torch.ones(300, 300)).bool().expand(2, 1, -1, -1)
    for mask in (shifted, blocks):
        bias = sight_of(mask, 700, 700).bias
        assert bias is not None
        assert torch.equal(bias == 0.0, mask)
    slope = torch.linspace(-1, 0, 49).view(1, 1, 7, 7)
    assert torch.equal(sight_of(slope, 7, 7).bias, slope)  # type: ignore[arg-type]


def test_a_mask_without_room_is_refused_before_it_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = llama()
    sizes: list[int] = []
    above = masks._above
    monkeypatch.setattr(
        masks, "_above", lambda mask, least: sizes.append(mask.shape[-2]) or above(mask, least)
    )
    monkeypatch.setattr(masks, "ROWS", 4)
    odd = torch.ones(1, 1, 9, 9, dtype=torch.bool).tril()
    odd[..., 5, 2] = False
    added = torch.where(odd, 0.0, torch.finfo(torch.float32).min)
    message = "^the mask of model.layers.0.self_attn, which is more than .* would take 324 bytes, over"
    for mask in (odd, added):
        given = {**inputs, "attention_mask": mask}
        with pytest.raises(ValueError, match=message):
            overt.trace(model, given, memory=300)
        assert max(sizes, default=4) == 4
    for mask in (odd, added):
        held: Any = held_of(states_of(model, {**inputs, "attention_mask": mask}).maps)
        assert torch.equal(held[0].sight.bias == 0.0, odd)


@pytest.mark.parametrize("sight", [Sight(True, chunk=4), Sight(True, 2), Sight(True, 2, 5), Sight(True, -1)])
def test_maps_and_states_under_any_part_are_those_of_eager_attention(sight: Sight) -> None:
    model, inputs = llama()
    places = torch.arange(9)
    shown = sight.shown(places, places)
    assert shown is not None
    mask = torch.where(shown, 0.0, torch.finfo(torch.float32).min)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        want = model.eval()(**{**inputs, "attention_mask": mask}, output_attentions=True).attentions
    model.set_attn_implementation("sdpa")
    given = {**inputs, "attention_mask": mask}
    maps, states = overt.trace(model, given), states_of(model, given)
    held: Any = held_of(states.maps)
    for layer, whole in enumerate(want):
        torch.testing.assert_close(maps.maps[layer], whole.mean(dim=1), rtol=0, atol=1e-6, check_dtype=False)
        rows = held[layer].weights().mean(dim=1)
        torch.testing.assert_close(rows, whole.mean(dim=1), rtol=0, atol=1e-6, check_dtype=False)
    assert states.kind == maps.kind


def test_windows_to_both_sides_need_no_bias() -> None:
    family = BY_NAME["ModernBERT"]
    states = states_of(family.make(), families.inputs_of(family, padded=True))
    held: Any = held_of(states.maps)
    sights = [asked.sight for asked in held]
    assert states.kind == "encoder"
    assert all(sight.bias is None for sight in sights)
    assert any(sight.window is not None for sight in sights)


def test_families_that_keep_eager_attention_are_those_that_differ_from_a_plain_softmax() -> None:
    found = own_eager()
    assert found == {name for name in OWN_EAGER if (MODELS / name).is_dir()}  # some came with later versions
    assert len(found) > 5

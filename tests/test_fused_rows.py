"""Cached decoding: one kernel for a row of every head gives what the definition gives for the whole map.

Without a GPU the kernel runs in Triton's interpreter, on small maps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import overt
from fused_models import CUDA, DEVICE
from overt.attaching.passes import DecodingState
from overt.mechanisms import backend as switch
from overt.mechanisms.attention_map import AttentionMap
from overt.mechanisms.call import AttentionCall
from overt.mechanisms.chain import Chain, Kept
from overt.mechanisms.evolving import naive
from overt.mechanisms.maps import HIDDEN, softmax
from overt.mechanisms.seen import Seen
from overt.mechanisms.site import Kind, Site
from selection import covering

pytest.importorskip("triton", reason="triton is made for Linux alone")
CLOSE = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}
ROW = "fused kernel for a row"


@pytest.fixture(autouse=True)
def _kernels_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(switch, "KERNEL_DEVICES", {"cuda", "cpu"})


@pytest.fixture
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that a kernel should have written and did not shows as NaN."""
    empty = torch.empty

    def poisoned(*size: Any, **options: Any) -> Tensor:
        made: Tensor = empty(*size, **options)
        return made.fill_(float("nan")) if made.is_floating_point() else made

    monkeypatch.setattr(torch, "empty", poisoned)


@pytest.fixture(autouse=True)
def _without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


class Case(NamedTuple):
    """A chain of maps to compute row by row."""

    kind: Kind = "decoder"
    settings: overt.Evolving = overt.Evolving(alpha=0.3, decoder_alpha=0.3, beta=0.4)
    dtype: torch.dtype = torch.float32
    heads: int = 3
    key_heads: int = 3
    width: int = 8
    padded: bool = False
    bayesian: bool = False
    biased: bool = False
    rows: int = 4
    layers: int = 2


def evolving(**settings: Any) -> overt.Evolving:
    return overt.Evolving(**{"alpha": 0.3, "decoder_alpha": 0.3, "beta": 0.4, **settings})


CASES = {
    "decoder": Case(layers=3),
    "cross": Case("cross", layers=3),
    "no skip": Case(settings=evolving(decoder_alpha=0.0), padded=True),
    "kernel of 1": Case(settings=evolving(kernel_size=1)),
    "kernel of 5": Case("cross", settings=evolving(kernel_size=5, first=True), padded=True, rows=6, layers=1),
    "kernel of 5, decoder": Case(settings=evolving(kernel_size=5), rows=6),
    "float16": Case("cross", dtype=torch.float16, padded=True),
    "bfloat16": Case(dtype=torch.bfloat16, padded=True),
    "first": Case(settings=evolving(first=True), padded=True),
    "no convolution": Case("cross", settings=evolving(convolve=("encoder", "decoder"))),
    "realformer": Case(settings=overt.Evolving.realformer(), padded=True),
    "shared key heads": Case(heads=4, key_heads=2, padded=True),
    "one head": Case("cross", heads=1, key_heads=1),
    "16 wide heads": Case(heads=16, key_heads=16, width=40),
    "with Bayesian": Case(bayesian=True, padded=True),
    "bias": Case(padded=True, biased=True),
    "bias, no convolution": Case("cross", evolving(convolve=()), biased=True),
    "ramp": Case(settings=evolving(ramp_steps=10)),
}
SOURCE, BATCH = 4, 2
# The interpreter is slow: there, every kind of code once.
KEPT = [
    "decoder", "no skip", "kernel of 1", "kernel of 5", "bfloat16", "first", "no convolution",
    "shared key heads", "with Bayesian", "bias",
]  # fmt: skip


def normal(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64).to(dtype).to(DEVICE)


class Stack:
    """Maps of several layers: queries, keys and values of each, and what they see."""

    def __init__(self, case: Case) -> None:
        self.case, self.keys = case, case.rows if case.kind == "decoder" else SOURCE
        mechanisms = [case.settings, *([overt.Bayesian()] if case.bayesian else [])]
        self.maps = [
            AttentionMap(mechanisms, Site(case.heads, case.width, case.kind, layer, case.key_heads)).eval()
            for layer in range(case.layers)
        ]
        for map in self.maps:
            for parameter in map.parameters():
                nn.init.normal_(parameter, std=0.3)
            map.to(DEVICE, case.dtype)
        self.query, self.key, self.value = (
            [
                # strides as they come out of a projection
                normal(BATCH, length, heads, case.width, dtype=case.dtype).transpose(1, 2)
                for _ in range(case.layers)
            ]
            for length, heads in (
                (case.rows, case.heads),
                (self.keys, case.key_heads),
                (self.keys, case.key_heads),
            )
        )
        self.shown = torch.ones(BATCH, self.keys, dtype=torch.bool, device=DEVICE)
        if case.padded:
            self.shown[0, :2] = False
        self.real = self.shown if case.kind == "decoder" else None
        # as T5 makes it
        self.bias = normal(case.rows, self.keys, case.heads, dtype=case.dtype).permute(2, 0, 1).unsqueeze(0)
        self.step = torch.tensor(4)

    def chain(self) -> Chain:
        return Chain(keep=True, step=self.step)

    def call(self, layer: int, row: int) -> AttentionCall:
        """The call of one row."""
        keys = row + 1 if self.case.kind == "decoder" else self.keys
        seen = Seen(self.shown[:, :keys].contiguous() if self.case.padded else None)
        if self.case.padded and self.real is not None:
            seen = replace(seen, query_real=self.real[:, row : row + 1].contiguous())
        q, k, v = self.query[layer][:, :, row : row + 1], self.key[layer], self.value[layer]
        scale = self.case.width**-0.5
        call = AttentionCall(
            self.maps[layer].site, q, k[:, :, :keys], v[:, :, :keys], scale, seen=seen, first_row=row
        )
        bias = self.bias[:, :, row : row + 1, :keys] if self.case.biased else None
        return replace(call, left_alone="sdpa", bias=bias)

    def visible(self) -> Tensor:
        whole = torch.ones(BATCH, 1, self.case.rows, self.keys, dtype=torch.bool, device=DEVICE)
        if self.case.kind == "decoder":
            whole = whole.tril()
        if self.case.padded:
            whole = whole & self.shown[:, None, None, :]
            if self.real is not None:
                whole = whole & self.real[:, None, :, None]
        return whole

    def definition(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Output, evolved map and mixed map of each layer, in float64."""
        settings, previous, visible = self.case.settings, None, self.visible()
        ramp = min(1.0, float(self.step) / settings.ramp_steps) if settings.ramp_steps else 1.0
        group, add = self.case.heads // self.case.key_heads, settings.skip == "add"
        for map, q, k, v in zip(self.maps, self.query, self.key, self.value, strict=True):
            layer: Any = map.layers[0]
            k, v = (x.double().repeat_interleave(group, dim=1) for x in (k, v))
            logits = q.double() @ k.mT * self.case.width**-0.5
            logits = logits + self.bias.double() if self.case.biased else logits
            convolution = None if layer.weight is None else (layer.weight.double(), layer.bias.double())
            alpha, beta = ramp * layer.alpha, ramp * settings.beta
            mixed = naive.mix(logits, previous, visible, alpha, add)
            previous = naive.evolve(
                logits, previous, convolution, visible, self.case.kind, alpha, beta, add=add,
                first=settings.first,
            )  # fmt: skip
            weights = softmax(previous, visible)
            if self.real is not None and self.case.padded:  # sdpa: padded queries attend plainly
                shown = self.shown[:, None, None, :].expand_as(visible).tril()
                weights = torch.where(self.real[:, None, :, None], weights, softmax(logits, shown))
            yield weights @ v, previous, mixed


def error(ours: Tensor, theirs: Tensor) -> float:
    """Relative norm of the difference; infinities must be the same ones."""
    assert ours.shape == theirs.shape
    ours, theirs = ours.double(), theirs.double()
    assert torch.equal(ours == HIDDEN, theirs == HIDDEN)
    ours, theirs = (x.masked_fill(x == HIDDEN, 0.0) for x in (ours, theirs))
    return float((ours - theirs).norm() / theirs.norm().clamp(min=1e-30))


@pytest.mark.usefixtures("_poisoned")
@pytest.mark.parametrize("name", list(CASES) if CUDA else covering(list(CASES), KEPT))
def test_rows_one_by_one_are_the_whole_map(name: str) -> None:
    case = CASES[name]
    stack = Stack(case)
    wanted, close, chain = list(stack.definition()), CLOSE[case.dtype], stack.chain()
    outputs: list[list[Tensor]] = [[] for _ in wanted]
    kept_rows = case.settings.kernel_size - 1
    for row in range(stack.case.rows):
        for layer, map in enumerate(stack.maps):
            call, (_, evolved, mixed) = stack.call(layer, row), wanted[layer]
            out = map.attend(call, chain)
            assert out is not None
            outputs[layer].append(out)
            keys = call.shape[-1]
            left = chain.maps["Evolving", case.kind, layer]
            assert error(left, evolved[:, :, row : row + 1, :keys]) < close
            kept = chain.rows.get(("Evolving", case.kind, layer))
            convolves = getattr(map.layers[0], "weight", None) is not None
            assert (kept is not None) == (convolves and kept_rows > 0)
            if kept is not None:
                first = max(0, row + 1 - kept_rows)
                assert error(kept.in_order(), mixed[:, :, first : row + 1, :keys]) < close
    for rows, (output, *_) in zip(outputs, wanted, strict=True):
        assert error(torch.cat(rows, dim=2), output) < close


@pytest.mark.parametrize("kind", ["decoder", "cross"])
def test_rows_of_plain_operations_and_of_the_kernel_follow_each_other(kind: Kind) -> None:
    stack = Stack(Case(kind, padded=True))
    wanted, chain = list(stack.definition()), stack.chain()
    order = torch.tensor([1, 0], device=DEVICE)
    for row in range(stack.case.rows):
        for layer, map in enumerate(stack.maps):
            call = stack.call(layer, row)
            out = map.attend(call, chain, "of a whim" if row % 3 == 1 else None)
            if out is None:
                out = map(call, chain).to(call.value.dtype) @ call.value
            assert error(out, wanted[layer][0][:, :, row : row + 1]) < 1e-5
        for place, kept in chain.rows.items():  # twice reordered is as it was
            chain.rows[place] = Kept(kept.in_order().index_select(0, order), order)


@pytest.mark.parametrize("left_alone", [None, "sdpa", "eager"])
@pytest.mark.parametrize("kind", ["decoder", "cross"])
def test_rows_that_mechanisms_leave_alone(kind: Kind, left_alone: Any) -> None:
    stack = Stack(Case(kind, padded=True))
    shown = torch.tensor([[False] * stack.keys, [True] * (stack.keys - 1) + [False]], device=DEVICE)
    for real in (None, torch.tensor([[False], [True]]), torch.tensor([[True], [False]])):
        seen = Seen(shown, None if real is None else real.to(DEVICE))
        fused, plain = stack.chain(), stack.chain()
        for layer, map in enumerate(stack.maps):
            call = stack.call(layer, 3)
            call = replace(call, seen=seen, left_alone=left_alone)
            out = map.attend(call, fused)
            assert out is not None
            torch.testing.assert_close(out, map(call, plain) @ call.value, rtol=1e-4, atol=1e-5)


def test_rows_that_do_not_fit_are_refused() -> None:
    stack = Stack(Case())
    chain = stack.chain()
    for layer, map in enumerate(stack.maps):
        map.attend(stack.call(layer, 0), chain)
    chain.rows["Evolving", "decoder", 1] = Kept(torch.zeros(BATCH, 3, 1, 1, device=DEVICE)[[0, 0, 1]])
    stack.maps[0].attend(stack.call(0, 1), chain)
    with pytest.raises(ValueError, match=r"\(3, 3, 1, 1\) do not fit on top of \(2, 3, 1, 2\)"):
        stack.maps[1].attend(stack.call(1, 1), chain)


def test_what_the_kernel_does_not_take_is_told(caplog: pytest.LogCaptureFixture) -> None:
    def reason_for(
        change: Callable[[AttentionCall], AttentionCall] = lambda call: call,
        chain: Chain | None = None,
        **case: Any,
    ) -> str:
        """Why plain operations compute a row, from the log."""
        stack = Stack(Case(**case))
        with caplog.at_level("DEBUG", "overt"):
            assert stack.maps[0].attend(change(stack.call(0, 1)), chain or stack.chain()) is None
        return caplog.records[-1].getMessage().removeprefix("decoder 0: plain operations: ")

    assert "up to 16 heads, got 17" in reason_for(heads=17, key_heads=17)
    assert "kernel_size of up to 5, got 7" in reason_for(settings=evolving(kernel_size=7, first=True))
    assert "no dropout" in reason_for(lambda call: replace(call, dropout=0.1))
    many = torch.zeros(1, 3, 2**18, 8, device=DEVICE)
    assert "would be slow with 262144 keys" in reason_for(lambda call: replace(call, key=many, value=many))
    odd = torch.zeros(2, 3, 1, 1, device=DEVICE)
    assert "not one for each key" in reason_for(lambda call: replace(call, bias=odd))
    two = torch.zeros(BATCH, 3, 2, 8, device=DEVICE)
    assert reason_for(lambda call: replace(call, query=two)) == "rows may be fed in pieces"
    with torch.enable_grad():
        assert "no gradients" in reason_for(
            lambda call: replace(call, query=call.query.clone().requires_grad_())
        )
        assert "no gradients" in reason_for(settings=evolving(first=True))
    draws = Chain(keep=True, step=0, sample=0)
    assert "draws no weights" in reason_for(bayesian=True, chain=draws)


def test_kept_rows_follow_the_cache() -> None:
    rows, index = torch.randn(3, 2, 2, 4), torch.tensor([2, 0, 0])
    state = DecodingState(
        rows={"a": {("Evolving", "decoder", 1): Kept(rows), ("Evolving", "cross", 1): Kept(rows)}}
    )
    kept = state.rows["a"]
    state.select(index)
    assert len({id(each.order) for each in kept.values()}) == 1
    state.select(torch.tensor([1, 2, 0, 1]))
    index.zero_()
    want = rows[[2, 0, 0]][[1, 2, 0, 1]]
    assert all(torch.equal(each.in_order(), want) for each in kept.values())
    state.repeat(2)
    assert all(torch.equal(each.in_order(), want.repeat_interleave(2, 0)) for each in kept.values())
    state.clear()
    assert not state.rows


# Generation -------------------------------------------------------------------------------------------------


def model_of(family: str, layers: int = 2, mechanisms: tuple[overt.Mechanism, ...] | None = None) -> Any:
    import transformers as hf

    torch.manual_seed(0)
    size = {"vocab_size": 40, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}
    if family == "llama":
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
        shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": layers}
        model: Any = hf.LlamaForCausalLM(hf.LlamaConfig(**size, **heads, **shape))
    elif family == "t5":
        shape = {"d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": layers, "num_heads": 4}
        config = hf.T5Config(**{**size, "decoder_start_token_id": 0}, **shape)
        model = hf.T5ForConditionalGeneration(config)
    else:
        shape = {"d_model": 32, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
        shape |= {"encoder_layers": layers, "decoder_layers": layers}
        shape |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "max_position_embeddings": 32}
        start = {"decoder_start_token_id": 2, "forced_eos_token_id": 1}
        model = hf.MarianMTModel(hf.MarianConfig(**size, **shape, **start))
    for name, parameter in model.named_parameters():  # else every token is as likely as any other
        if parameter.dim() > 1 and "embed_positions" not in name:
            nn.init.normal_(parameter, std=0.3)
    if mechanisms is None:
        mechanisms = (evolving(decoder_alpha=None),)
    if mechanisms:
        # Not to the encoder, whose kernels others test: the interpreter is slow.
        overt.attach(model, *mechanisms, where="decoder" if family == "llama" else ["decoder", "cross"])
    for name, parameter in model.named_parameters():
        if ".overt." in name:
            nn.init.normal_(parameter, std=0.3)
    return model.eval().to(DEVICE)


def generate(model: Any, tokens: int = 4, **settings: Any) -> Any:
    ids = torch.randint(3, 40, (2, 5), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    inputs = {"input_ids": ids.to(DEVICE), "attention_mask": mask.to(DEVICE)}
    limits = {"min_new_tokens": tokens, "max_new_tokens": tokens, "do_sample": False}
    return model.generate(**inputs, **limits, **settings)


GENERATED = [(family, beams) for family in ("marian", "t5", "llama") for beams in (1, 2)]


@pytest.mark.parametrize(
    ("family", "beams"),
    GENERATED if CUDA else covering(GENERATED, [("marian", 2), ("t5", 1), ("llama", 1)]),
)
def test_generation_with_the_kernel_is_that_without(
    family: str, beams: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    both = evolving(decoder_alpha=None), overt.Bayesian()
    model = model_of(family, mechanisms=both if beams == 1 else None)
    asked = {"num_beams": beams, "return_dict_in_generate": True, "output_logits": True}
    with caplog.at_level("DEBUG", "overt"):
        fused = generate(model, **asked)
    rows = [record.getMessage() for record in caplog.records if record.getMessage().endswith(ROW)]
    kinds = {"marian": {"decoder", "cross"}, "llama": {"decoder"}, "t5": {"decoder", "cross"}}[family]
    assert {row.split()[0] for row in rows} == kinds
    monkeypatch.setattr(switch, "KERNEL_DEVICES", set())
    for other in (generate(model, **asked), generate(model, **asked, use_cache=False)):
        assert torch.equal(fused.sequences, other.sequences)
        for ours, theirs in zip(fused.logits, other.logits, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_attention_weights_are_wanted_in_the_middle_of_generation() -> None:
    model = model_of("llama")
    ids = torch.randint(3, 40, (2, 6), device=DEVICE)
    wanted, cache, found = model(ids, use_cache=False).logits, None, []
    for token in range(6):
        asked = {"output_attentions": token in (2, 3)}
        step = model(ids[:, token : token + 1], past_key_values=cache, use_cache=True, **asked)
        cache = step.past_key_values
        found.append(step.logits)
    torch.testing.assert_close(torch.cat(found, dim=1), wanted, rtol=1e-4, atol=1e-4)


# What launches nothing on a GPU.
FREE = {
    "_reshape_alias", "_unsafe_view", "alias", "as_strided", "detach", "diagonal", "empty", "empty_like",
    "empty_strided", "expand", "lift_fresh", "new_empty", "permute", "promote_types", "reshape", "select",
    "slice", "split", "split_with_sizes", "squeeze", "t", "transpose", "unbind", "unsqueeze", "view",
}  # fmt: skip


class Launches(TorchDispatchMode):
    """Counts operations that would launch a kernel on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = operation._schema.name.split("::")[1]
        self.counts[name] += name not in FREE
        return operation(*args, **(kwargs or {}))


def launches_of_a_token(model: Any) -> tuple[int, int]:
    """How many operations one more token of a beam search needs, and how often the host waits for one."""
    counts = []
    for tokens in (5, 6):
        with Launches() as launches:
            generate(model, tokens, num_beams=3)
        counts.append(launches.counts)
    more = counts[1] - counts[0]
    return counts[1].total() - counts[0].total(), more["_local_scalar_dense"]


def test_a_token_takes_hardly_more_launches_than_in_a_plain_model(monkeypatch: pytest.MonkeyPatch) -> None:
    from overt.mechanisms.kernels.launch import Ready

    layers, kernels = 3, []

    def noted(ready: Ready, tensors: tuple[Tensor, ...], *rest: Any) -> None:
        del rest
        if ready.kernel.__name__ == "evolve_row":
            kernels.append(tensors[-1].zero_())  # the output, and so one operation: the launch

    monkeypatch.setattr(Ready, "run", noted)
    plain = launches_of_a_token(model_of("marian", layers, ()))
    model = model_of("marian", layers)
    fused = launches_of_a_token(model)
    assert len(kernels) == 2 * layers * (5 + 6)
    assert fused[0] <= plain[0] + 20
    assert fused[1] <= plain[1]
    monkeypatch.setattr(switch, "KERNEL_DEVICES", set())
    # Rows that come one after the other to plain operations, on a CPU, at 26 operations each.
    assert launches_of_a_token(model)[0] <= plain[0] + 20 + 2 * layers * 26

"""One attention in many forms, ours and baselines, for `gpu.py`, and checks that they agree."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask

import gpu_rivals as baselines
import overt
from overt.mechanisms.bayesian import fused as fused_bayesian
from overt.mechanisms.bayesian.layer import BayesianLayer
from overt.mechanisms.evolving import fused as fused_evolving
from overt.mechanisms.evolving.layer import EvolvingLayer
from overt.mechanisms.maps import softmax
from overt.mechanisms.seen import Seen

Shape = tuple[int, int, int, int]
Outputs = tuple[Tensor, ...]
Kind = Literal["plain", "ours", "rival"]  # "rival", a baseline, is the name in results/gpu.json

SHORT = 512  # up to this length our definition is compiled too
LONGEST_MAP = 2048  # of Evolving, which stores maps, and of checks against dense maps
DEVICE, DTYPE = "cuda", torch.bfloat16
# Relative norms of differences between a baseline and the kernels, both in half precision.
TOLERANCE, KL_TOLERANCE = 5e-2, 5e-3
# What a convolution adds to a row hardly affects outputs, and its gradients are sums that nearly cancel.
CANCELLING = {f"gradient of out for {name}": 0.5 for name in ("convolution", "its bias")}
NOISE_TOLERANCE = 5e-2  # of the noise's variance
AS_CHOSEN, PINNED = "sdpa, as torch chooses", "sdpa, FlashAttention-2"
FUSED, TEN_LINES, DEFINITION = "fused", "ten lines", "our definition"
FLEX, MASKED = "FlexAttention, compiled", "sdpa with noise as its mask, compiled"


# --- What all forms share ---


def lengths_of(batch: int, length: int) -> Tensor:
    """Lengths of a padded batch, drawn uniformly between half the length and all of it."""
    return torch.randint(length // 2, length + 1, (batch,), generator=torch.Generator().manual_seed(0))


class Case:
    """Inputs of one shape, padded or not, and incoming gradients; `way` as in `baselines.plain_lse`."""

    def __init__(self, shape: Shape, padded: bool, way: baselines.Way = "narrow") -> None:
        self.shape, self.padded, self.way = shape, padded, way
        batch, _, length, _ = shape
        torch.manual_seed(0)
        q, k, v, self.to_out = (torch.randn(*shape, device=DEVICE, dtype=DTYPE) for _ in range(4))
        v = v - v.mean(dim=-2, keepdim=True)  # centred at zero, up to rounding
        self.real: Tensor | None = None
        self.blocks: BlockMask | None = None
        self.seen = Seen()
        if padded:
            places = torch.arange(length, device=DEVICE)
            self.real = places < lengths_of(batch, length).to(DEVICE).unsqueeze(1)
            self.blocks = baselines.padding_blocks(self.real)
            self.seen = Seen(self.real, self.real)
            self.to_out = self.to_out * self.real[:, None, :, None]
        self.q, self.k, self.v = (x.requires_grad_() for x in (q, k, v))
        self.ones = torch.ones(batch, device=DEVICE)
        self.step = torch.tensor(3, device=DEVICE)
        self.seed = torch.tensor(12345, dtype=torch.int32, device=DEVICE)
        self.spreads = {
            "weibull": torch.tensor(1.0 / baselines.K, device=DEVICE),
            "lognormal": torch.tensor(baselines.SIGMA, device=DEVICE),
        }
        self.quiet = torch.tensor(1e-6, device=DEVICE)  # practically no noise
        self.layers = {
            "Bayesian": overt.Bayesian(),
            "Bayesian without KL": overt.Bayesian(prior=None),
            "Bayesian, lognormal": overt.Bayesian(family="lognormal"),
        }

    @cached_property
    def maps(self) -> tuple[Tensor, Tensor, Tensor]:
        """Our previous map, −inf in hidden cells; the baselines', zero there; gradient of the next map."""
        batch, heads, length, _ = self.shape
        previous, to_next = (
            torch.randn(batch, heads, length, length, device=DEVICE, dtype=DTYPE) for _ in range(2)
        )
        to_next += 1.0  # so that gradients of the convolution are not sums of numbers that cancel
        if (pairs := self.pairs) is None:
            return previous.requires_grad_(), previous, to_next
        zeros, to_next = previous.masked_fill(~pairs, 0.0), to_next.masked_fill(~pairs, 0.0)
        hidden = previous.masked_fill(~pairs, baselines.HIDDEN)
        return hidden.requires_grad_(), zeros.requires_grad_(), to_next

    @property
    def pairs(self) -> Tensor | None:
        """Visible cells, (batch, 1, query, key)."""
        return None if self.real is None else self.real[:, None, :, None] & self.real[:, None, None]

    def layer(self, group: str, number: int = 0) -> BayesianLayer:
        _, heads, _, width = self.shape
        torch.manual_seed(1)
        site = overt.mechanisms.Site(heads, width, layer=number)
        return BayesianLayer(self.layers[group], site).to(DEVICE).train()

    def evolving_layer(self) -> EvolvingLayer:
        _, heads, _, width = self.shape
        torch.manual_seed(2)
        layer = EvolvingLayer(overt.Evolving(), overt.mechanisms.Site(heads, width, layer=1))
        assert layer.weight is not None
        assert layer.bias is not None
        with torch.no_grad():  # away from the identity, so that checks see every tap
            layer.weight.add_(torch.randn_like(layer.weight) * 0.05)
            layer.bias.add_(torch.randn_like(layer.bias) * 0.05)
        return layer.to(DEVICE).train()

    def call(self, site: overt.mechanisms.Site, q: Tensor, k: Tensor, v: Tensor) -> overt.AttentionCall:
        return overt.AttentionCall(site, q, k, v, site.head_dim**-0.5, seen=self.seen)

    def spread(self, quiet: bool, family: str = "weibull") -> Tensor:
        return self.quiet if quiet else self.spreads[family]

    def visible(self, name: str, output: Tensor) -> Tensor:
        """An output with zeros at padding."""
        if self.real is None or name == "kl":
            return output
        hidden = ~self.real[:, None, :, None] if self.pairs is None or name == "out" else ~self.pairs
        return output.masked_fill(hidden, 0.0)


# --- The forms ---


@dataclass
class Named:
    """Something that is timed.

    Attributes:
        group: what it computes; all forms of a group compute the same.
        name: how it computes it.
        kind: ours, a baseline ("rival"), or attention without any mechanism ("plain").
    """

    group: str
    name: str
    kind: Kind

    @property
    def compiles(self) -> bool:
        """Whether anything is compiled, which takes long the first time."""
        return self.kind == "ours" or self.name.endswith("compiled")

    @property
    def title(self) -> str:
        return self.name if self.kind == "plain" else f"{self.group}, {self.name}"


@dataclass
class Form(Named):
    """One way to compute something, and how to check it.

    Attributes:
        forward: computes the outputs; its argument turns noise off.
        trained: the tensors whose gradients are computed.
        incoming: gradients of the outputs.
        outputs: names of the outputs.
        checked: whether it is compared with ours.
        twin: dense operations that draw the same numbers.
        way: one of the ways of `baselines.plain_lse`.
        instead: the form to try if this one fails.
    """

    forward: Callable[[bool], Outputs]
    trained: list[Tensor]
    incoming: list[Tensor]
    outputs: tuple[str, ...] = ("out",)
    checked: bool = True
    twin: Form | None = None
    way: baselines.Way | None = None
    instead: Form | None = None

    def gradients_of(self, output: str) -> list[str]:
        """Names of the gradients of an output."""
        names = ["query", "key", "value"]
        if "map" in self.outputs:
            names += ["previous map", "convolution", "its bias"]
        names += ["prior's inner weight", "prior's bias", "prior's outer weight"]
        return [f"gradient of {output} for {name}" for name in names[: len(self.trained)]]

    def run(self) -> None:
        torch.autograd.grad(self.forward(False), self.trained, self.incoming)


def set_training(quiet: bool, *layers: BayesianLayer) -> None:
    """Switch our noise on or off: there is none in evaluation mode."""
    for layer in layers:
        if layer.training == quiet:
            layer.train(not quiet)


def compiled(form: Callable[..., Outputs], whole: bool = True) -> Callable[..., Outputs]:
    """Compiled anew for each shape; as a single compiled graph or not at all, unless `whole` is False."""
    return torch.compile(form, dynamic=False, fullgraph=whole)


def plain_forms(case: Case) -> Iterator[Form]:
    mask = None if case.real is None else case.real[:, None, None]
    inputs = [case.q, case.k, case.v]

    def chosen(_: bool) -> Outputs:
        return (F.scaled_dot_product_attention(case.q, case.k, case.v, attn_mask=mask),)

    def pinned(quiet: bool) -> Outputs:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return chosen(quiet)

    yield Form("plain", AS_CHOSEN, "plain", chosen, inputs, [case.to_out])
    if mask is None:  # FlashAttention-2 takes no mask
        yield Form("plain", PINNED, "plain", pinned, inputs, [case.to_out])


def bayesian_forms(case: Case, group: str, compiles: bool) -> Iterator[Form]:
    q, k, v, real, length = case.q, case.k, case.v, case.real, case.shape[2]
    layer = case.layer(group)
    family, network = layer.config.family, layer.prior
    inputs, incoming = [q, k, v], [case.to_out]
    outputs: tuple[str, ...] = ("out",)
    prior = None
    if network is not None:
        prior = baselines.Prior(network.inner.weight, network.inner.bias, network.outer.weight)
        inputs, incoming, outputs = [*inputs, *prior], [*incoming, case.ones], ("out", "kl")

    def form(name: str, kind: Kind, forward: Any, **more: Any) -> Form:
        return Form(group, name, kind, forward, inputs, incoming, outputs, **more)

    def chain() -> overt.Chain:
        return overt.Chain(step=case.step, kl=prior is not None)

    def fused(quiet: bool) -> Outputs:
        set_training(quiet, layer)
        mine = chain()
        out = fused_bayesian.FORM.attend({"Bayesian": layer}, case.call(layer.site, q, k, v), mine)
        return (out,) if prior is None else (out, mine.kl(per_example=True))

    def definition(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        mine, call = chain(), case.call(layer.site, q, k, v)
        weights = layer("weights", call.scores(), call, mine)
        return weights.to(DTYPE) @ v, mine.kl(per_example=True)

    def defined(quiet: bool) -> Outputs:
        set_training(quiet, layer)
        with overt.naive():
            return definition(q, k, v)

    def ten_lines(run: Callable[..., Outputs]) -> Callable[[bool], Outputs]:
        return lambda quiet: run(q, k, v, case.spread(quiet, family), prior, real, family)

    yield form(FUSED, "ours", fused)
    yield form(TEN_LINES, "rival", ten_lines(baselines.bayesian))
    if group == "Bayesian" and length <= LONGEST_MAP:
        yield form(DEFINITION, "rival", defined)
    if not compiles:
        return
    few = case.padded or length > LONGEST_MAP
    if not (few and group != "Bayesian"):
        yield form(f"{TEN_LINES}, compiled", "rival", ten_lines(compiled(baselines.bayesian)))
    if group == "Bayesian" and not case.padded and length <= SHORT:
        define = compiled(definition, whole=False)

        def defined_compiled(_: bool) -> Outputs:
            set_training(False, layer)
            return define(q, k, v)

        yield form(f"{DEFINITION}, compiled", "rival", defined_compiled, checked=False)
    if family == "lognormal":
        return
    flex, masked = compiled(baselines.flexed), compiled(baselines.masked_sdpa)

    def flexed(way: baselines.Way, instead: Form | None) -> Form:
        def forward(quiet: bool) -> Outputs:
            return flex(q, k, v, case.spread(quiet), case.seed, prior, real, case.blocks, way)

        def dense(quiet: bool) -> Outputs:
            return baselines.dense_hashed(q, k, v, case.spread(quiet), case.seed, real)

        twin = Form(group, "dense", "rival", dense, [q, k, v], [case.to_out])
        fits = length <= LONGEST_MAP
        return form(FLEX, "rival", forward, twin=twin if fits else None, way=way, instead=instead)

    def masking(way: baselines.Way, instead: Form | None) -> Form:
        def forward(quiet: bool) -> Outputs:
            return masked(q, k, v, case.spread(quiet), prior, real, case.blocks, way)

        return form(MASKED, "rival", forward, way=way, instead=instead)

    ways = baselines.WAYS[baselines.WAYS.index(case.way) :] if prior is not None else baselines.WAYS[:1]
    for make in (flexed, masking):
        chosen: Form | None = None
        for way in reversed(ways):
            chosen = make(way, chosen)
        assert chosen is not None
        yield chosen


def evolving_forms(case: Case, group: str, compiles: bool) -> Iterator[Form]:
    q, k, v, real = case.q, case.k, case.v, case.real
    layer = case.evolving_layer()
    random = case.layer("Bayesian", 1) if group == "both" else None
    mine, theirs, to_next = case.maps
    weights = list(layer.parameters())
    incoming, parameters = [case.to_out, to_next], list[Tensor](weights)
    outputs: tuple[str, ...] = ("out", "map")
    layers: dict[str, Any] = {"Evolving": layer}
    more: tuple[Any, ...] = ()
    if random is not None:
        assert random.prior is not None
        prior = random.prior
        more = (baselines.Prior(prior.inner.weight, prior.inner.bias, prior.outer.weight),)
        layers["Bayesian"] = random
        parameters += more[0]
        incoming, outputs = [*incoming, case.ones], ("out", "map", "kl")

    def form(name: str, kind: Kind, forward: Any, **options: Any) -> Form:
        previous = theirs if name.startswith(TEN_LINES) else mine
        trained = [q, k, v, previous, *parameters]
        return Form(group, name, kind, forward, trained, incoming, outputs, **options)

    def chain_of(previous: Tensor) -> overt.Chain:
        chain = overt.Chain(step=case.step, kl=random is not None)
        chain.maps["Evolving", "encoder", 0] = previous
        return chain

    def fused(quiet: bool) -> Outputs:
        if random is not None:
            set_training(quiet, random)
        chain = chain_of(mine)
        out = fused_evolving.attend(layers, case.call(layer.site, q, k, v), chain)
        kl = () if random is None else (chain.kl(per_example=True),)
        return out, chain.maps["Evolving", "encoder", 1], *kl

    def definition(q: Tensor, k: Tensor, v: Tensor, previous: Tensor) -> Outputs:
        chain = chain_of(previous)
        with torch.autocast(DEVICE, DTYPE):
            call = case.call(layer.site, q, k, v)
            evolved = layer("refine", call.scores(), call, chain)
            return softmax(evolved, call.visible()).to(DTYPE) @ v, evolved

    def defined(_: bool) -> Outputs:
        with overt.naive():
            return definition(q, k, v, mine)

    def ten_lines(run: Callable[..., Outputs]) -> Callable[[bool], Outputs]:
        def forward(quiet: bool) -> Outputs:
            noise = (case.spread(quiet), *more) if more else ()
            return run(q, k, v, theirs, *weights, *noise, real=real)

        return forward

    rule = baselines.evolving if random is None else baselines.both
    yield form(FUSED, "ours", fused)
    yield form(TEN_LINES, "rival", ten_lines(rule))
    if random is None:
        yield form(DEFINITION, "rival", defined)
    if not compiles:
        return
    yield form(f"{TEN_LINES}, compiled", "rival", ten_lines(compiled(rule)))
    if random is None and not case.padded and case.shape[2] <= SHORT:
        define = compiled(definition, whole=False)
        yield form(f"{DEFINITION}, compiled", "rival", lambda _: define(q, k, v, mine), checked=False)


def groups_of(shape: Shape, padded: bool, quick: bool = False) -> list[str]:
    """The groups measured at a shape; `quick` skips variants of Bayesian."""
    groups = ["plain", "Bayesian"]
    if not quick:
        groups += ["Bayesian without KL"] if padded else ["Bayesian without KL", "Bayesian, lognormal"]
    return [*groups, "Evolving", "both"] if shape[2] <= LONGEST_MAP else groups


def forms_of(case: Case, group: str, compiles: bool) -> Iterator[Form]:
    """All forms of a group, ours first."""
    if group == "plain":
        return plain_forms(case)
    return (bayesian_forms if group in case.layers else evolving_forms)(case, group, compiles)


# --- Checks: a baseline must compute the same as ours ---


class MismatchError(Exception):
    """A baseline's results differ from ours."""


def outputs_and_gradients(case: Case, form: Form, quiet: bool) -> dict[str, Tensor]:
    """Outputs by name, and the gradients of each output separately."""
    tensors: dict[str, Tensor] = {}
    for place, name in enumerate(form.outputs):
        results = form.forward(quiet)
        tensors[name] = case.visible(name, results[place].detach())
        incoming = [x if at == place else torch.zeros_like(x) for at, x in enumerate(form.incoming)]
        gradients = torch.autograd.grad(results, form.trained, incoming)
        tensors |= dict(zip(form.gradients_of(name), gradients, strict=True))
    return tensors


def difference(got: Tensor, want: Tensor) -> float:
    """Relative norm of the difference; absolute if the expected tensor is zero."""
    norm = float(torch.linalg.vector_norm(want.float()))
    return float(torch.linalg.vector_norm(got.float() - want.float())) / (norm if norm > 0.0 else 1.0)


def compare(got: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    """The largest difference; raises an error if one is too large."""
    worst = 0.0
    for name, value in want.items():
        error = difference(got[name], value)
        allowed = KL_TOLERANCE if name == "kl" else CANCELLING.get(name, TOLERANCE)
        if not error <= allowed:
            raise MismatchError(f"{name} differs by {error:.3g}, allowed {allowed:g}")
        worst = worst if name in CANCELLING else max(worst, error)
    return worst


def check_noise(case: Case, form: Form) -> None:
    """Check the variance of a form's noise.

    With queries of zero, weights are pure noise, and the output's variance is that of the noise. Outputs vary
    around the mean of the values, which is not exactly zero, since values are rounded.
    """
    with torch.no_grad():
        before = case.q.detach().clone()
        case.q.zero_()
    try:
        out = form.forward(False)[0].detach().float()
    finally:
        with torch.no_grad():
            case.q.copy_(before)
    if "lognormal" in form.group:
        relative = math.exp(baselines.SIGMA**2) - 1.0
    else:
        relative = math.gamma(1.0 + 2.0 / baselines.K) / math.gamma(1.0 + 1.0 / baselines.K) ** 2 - 1.0
    values = case.v.detach().float()
    centre = values.mean(dim=-2, keepdim=True)
    expected = relative * float((values - centre).square().mean()) / case.shape[2]
    ratio = float((out - centre).square().mean()) / expected
    if not abs(ratio - 1.0) <= NOISE_TOLERANCE:
        raise MismatchError(f"the variance of its noise is {ratio:.3f} times what it should be")


def check(case: Case, form: Form, references: dict[str, dict[str, Tensor]]) -> float | None:
    """Compare a form with ours: outputs and gradients without noise, and the noise; largest difference."""
    if form.kind == "plain" or not form.checked:
        return None
    if form.group.startswith("Bayesian") and not case.padded:
        check_noise(case, form)
    if form.kind == "ours":
        references.clear()  # those of the previous group
        references[form.group] = outputs_and_gradients(case, form, quiet=True)
        return None
    if form.group not in references:
        raise MismatchError("ours failed, so there is nothing to compare with")
    worst = compare(outputs_and_gradients(case, form, quiet=True), references[form.group])
    if form.twin is not None:
        got = form.forward(False)
        incoming = [case.to_out, *(torch.zeros_like(x) for x in form.incoming[1:])]
        gradients = torch.autograd.grad(got, form.trained, incoming)[:3]
        mine = {"out": case.visible("out", got[0].detach())}
        mine |= dict(zip(form.gradients_of("out"), gradients, strict=False))
        worst = max(worst, compare(mine, outputs_and_gradients(case, form.twin, quiet=False)))
    return worst

"""One attention in many forms, ours and rivals', for `gpu.py`, and checks that they agree."""

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

import gpu_rivals as rivals
import overt
from overt.mechanisms.bayesian import fused as fused_bayesian
from overt.mechanisms.bayesian.layer import BayesianLayer
from overt.mechanisms.evolving import fused as fused_evolving
from overt.mechanisms.evolving.layer import EvolvingLayer
from overt.mechanisms.maps import softmax
from overt.mechanisms.seen import Seen

Shape = tuple[int, int, int, int]
Outputs = tuple[Tensor, ...]
Kind = Literal["plain", "ours", "rival"]

SHORT = 512  # up to this length our definition is compiled, too
LONGEST_MAP = 2048  # of Evolving, which keeps maps, and of checks by dense maps
DEVICE, DTYPE = "cuda", torch.bfloat16
# Relative norms of differences between a rival and the kernels, both of half precision.
TOLERANCE, KL_TOLERANCE = 5e-2, 5e-3
# Outputs hardly feel what a convolution adds to a row, and its gradients are sums that nearly cancel.
CANCELLING = {f"gradient of out for {name}": 0.5 for name in ("convolution", "its bias")}
NOISE_TOLERANCE = 5e-2  # of the noise's variance
AS_CHOSEN, PINNED = "sdpa, as torch chooses", "sdpa, FlashAttention-2"
FUSED, TEN_LINES, DEFINITION = "fused", "ten lines", "our definition"
FLEX, MASKED = "FlexAttention, compiled", "sdpa with noise as its mask, compiled"


# --- What all forms share ---


def lengths_of(batch: int, length: int) -> Tensor:
    """Lengths of a padded batch, evenly drawn between half and the whole."""
    return torch.randint(length // 2, length + 1, (batch,), generator=torch.Generator().manual_seed(0))


class Case:
    """Inputs of one shape, padded or not, and incoming gradients; `way` as in `rivals.plain_lse`."""

    def __init__(self, shape: Shape, padded: bool, way: rivals.Way = "narrow") -> None:
        self.shape, self.padded, self.way = shape, padded, way
        batch, _, length, _ = shape
        torch.manual_seed(0)
        q, k, v, self.to_out = (torch.randn(*shape, device=DEVICE, dtype=DTYPE) for _ in range(4))
        v = v - v.mean(dim=-2, keepdim=True)  # about zero, up to rounding
        self.real: Tensor | None = None
        self.blocks: BlockMask | None = None
        self.seen = Seen()
        if padded:
            places = torch.arange(length, device=DEVICE)
            self.real = places < lengths_of(batch, length).to(DEVICE).unsqueeze(1)
            self.blocks = rivals.padding_blocks(self.real)
            self.seen = Seen(self.real, self.real)
            self.to_out = self.to_out * self.real[:, None, :, None]
        self.q, self.k, self.v = (x.requires_grad_() for x in (q, k, v))
        self.ones = torch.ones(batch, device=DEVICE)
        self.step = torch.tensor(3, device=DEVICE)
        self.seed = torch.tensor(12345, dtype=torch.int32, device=DEVICE)
        self.spreads = {
            "weibull": torch.tensor(1.0 / rivals.K, device=DEVICE),
            "lognormal": torch.tensor(rivals.SIGMA, device=DEVICE),
        }
        self.quiet = torch.tensor(1e-6, device=DEVICE)  # of noise that is as good as off
        self.layers = {
            "Bayesian": overt.Bayesian(),
            "Bayesian without KL": overt.Bayesian(prior=None),
            "Bayesian, lognormal": overt.Bayesian(family="lognormal"),
        }

    @cached_property
    def maps(self) -> tuple[Tensor, Tensor, Tensor]:
        """Previous map of ours, −inf in hidden cells; that of rivals, zero there; gradient of the next."""
        batch, heads, length, _ = self.shape
        previous, to_next = (
            torch.randn(batch, heads, length, length, device=DEVICE, dtype=DTYPE) for _ in range(2)
        )
        to_next += 1.0  # so that gradients of the convolution are not sums of numbers that cancel
        if (pairs := self.pairs) is None:
            return previous.requires_grad_(), previous, to_next
        zeros, to_next = previous.masked_fill(~pairs, 0.0), to_next.masked_fill(~pairs, 0.0)
        hidden = previous.masked_fill(~pairs, rivals.HIDDEN)
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

    def visible(self, name: str, found: Tensor) -> Tensor:
        """An output without what padding left in it."""
        if self.real is None or name == "kl":
            return found
        hidden = ~self.real[:, None, :, None] if self.pairs is None or name == "out" else ~self.pairs
        return found.masked_fill(hidden, 0.0)


# --- The forms ---


@dataclass
class Named:
    """What is timed.

    Attributes:
        group: what it computes; those of a group compute the same.
        name: how.
        kind: ours, a rival, or attention without any mechanism.
    """

    group: str
    name: str
    kind: Kind

    @property
    def compiles(self) -> bool:
        """Whether something is compiled, which takes long the first time."""
        return self.kind == "ours" or self.name.endswith("compiled")

    @property
    def title(self) -> str:
        return self.name if self.kind == "plain" else f"{self.group}, {self.name}"


@dataclass
class Form(Named):
    """One way to compute something, and how to check it.

    Attributes:
        forward: whether noise is to be off → outputs.
        trained: what gradients are of.
        given: gradients of outputs.
        outputs: their names.
        checked: whether it is held against ours.
        twin: dense operations that draw the same numbers.
        way: of those of `rivals.plain_lse`.
        instead: what to try where it fails.
    """

    forward: Callable[[bool], Outputs]
    trained: list[Tensor]
    given: list[Tensor]
    outputs: tuple[str, ...] = ("out",)
    checked: bool = True
    twin: Form | None = None
    way: rivals.Way | None = None
    instead: Form | None = None

    def gradients_of(self, output: str) -> list[str]:
        """Names of the gradients of an output."""
        names = ["query", "key", "value"]
        if "map" in self.outputs:
            names += ["previous map", "convolution", "its bias"]
        names += ["prior's inner weight", "prior's bias", "prior's outer weight"]
        return [f"gradient of {output} for {name}" for name in names[: len(self.trained)]]

    def run(self) -> None:
        torch.autograd.grad(self.forward(False), self.trained, self.given)


def set_training(quiet: bool, *layers: BayesianLayer) -> None:
    """Ours has no noise in evaluation."""
    for layer in layers:
        if layer.training == quiet:
            layer.train(not quiet)


def compiled(form: Callable[..., Outputs], whole: bool = True) -> Callable[..., Outputs]:
    """Compiled for each shape anew, and unless `whole` is False as one graph or not at all."""
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
    inputs, given = [q, k, v], [case.to_out]
    outputs: tuple[str, ...] = ("out",)
    prior = None
    if network is not None:
        prior = rivals.Prior(network.inner.weight, network.inner.bias, network.outer.weight)
        inputs, given, outputs = [*inputs, *prior], [*given, case.ones], ("out", "kl")

    def form(name: str, kind: Kind, forward: Any, **more: Any) -> Form:
        return Form(group, name, kind, forward, inputs, given, outputs, **more)

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
    yield form(TEN_LINES, "rival", ten_lines(rivals.bayesian))
    if group == "Bayesian" and length <= LONGEST_MAP:
        yield form(DEFINITION, "rival", defined)
    if not compiles:
        return
    few = case.padded or length > LONGEST_MAP
    if not (few and group != "Bayesian"):
        yield form(f"{TEN_LINES}, compiled", "rival", ten_lines(compiled(rivals.bayesian)))
    if group == "Bayesian" and not case.padded and length <= SHORT:
        define = compiled(definition, whole=False)

        def defined_compiled(_: bool) -> Outputs:
            set_training(False, layer)
            return define(q, k, v)

        yield form(f"{DEFINITION}, compiled", "rival", defined_compiled, checked=False)
    if family == "lognormal":
        return
    flex, masked = compiled(rivals.flexed), compiled(rivals.masked_sdpa)

    def flexed(way: rivals.Way, instead: Form | None) -> Form:
        def forward(quiet: bool) -> Outputs:
            return flex(q, k, v, case.spread(quiet), case.seed, prior, real, case.blocks, way)

        def dense(quiet: bool) -> Outputs:
            return rivals.dense_hashed(q, k, v, case.spread(quiet), case.seed, real)

        twin = Form(group, "dense", "rival", dense, [q, k, v], [case.to_out])
        fits = length <= LONGEST_MAP
        return form(FLEX, "rival", forward, twin=twin if fits else None, way=way, instead=instead)

    def masking(way: rivals.Way, instead: Form | None) -> Form:
        def forward(quiet: bool) -> Outputs:
            return masked(q, k, v, case.spread(quiet), prior, real, case.blocks, way)

        return form(MASKED, "rival", forward, way=way, instead=instead)

    ways = rivals.WAYS[rivals.WAYS.index(case.way) :] if prior is not None else rivals.WAYS[:1]
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
    given, parameters = [case.to_out, to_next], list[Tensor](weights)
    outputs: tuple[str, ...] = ("out", "map")
    layers: dict[str, Any] = {"Evolving": layer}
    more: tuple[Any, ...] = ()
    if random is not None:
        assert random.prior is not None
        prior = random.prior
        more = (rivals.Prior(prior.inner.weight, prior.inner.bias, prior.outer.weight),)
        layers["Bayesian"] = random
        parameters += more[0]
        given, outputs = [*given, case.ones], ("out", "map", "kl")

    def form(name: str, kind: Kind, forward: Any, **options: Any) -> Form:
        previous = theirs if name.startswith(TEN_LINES) else mine
        trained = [q, k, v, previous, *parameters]
        return Form(group, name, kind, forward, trained, given, outputs, **options)

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

    rule = rivals.evolving if random is None else rivals.both
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
    """What is measured at a shape; `quick` leaves out variants of Bayesian."""
    groups = ["plain", "Bayesian"]
    if not quick:
        groups += ["Bayesian without KL"] if padded else ["Bayesian without KL", "Bayesian, lognormal"]
    return [*groups, "Evolving", "both"] if shape[2] <= LONGEST_MAP else groups


def forms_of(case: Case, group: str, compiles: bool) -> Iterator[Form]:
    """All forms of a group, ours first."""
    if group == "plain":
        return plain_forms(case)
    return (bayesian_forms if group in case.layers else evolving_forms)(case, group, compiles)


# --- Checks: a rival that computes something else is no rival ---


class MismatchError(Exception):
    """A rival and ours differ."""


def outputs_and_gradients(case: Case, form: Form, quiet: bool) -> dict[str, Tensor]:
    """Outputs by name, and gradients of each output alone."""
    found: dict[str, Tensor] = {}
    for place, name in enumerate(form.outputs):
        results = form.forward(quiet)
        found[name] = case.visible(name, results[place].detach())
        given = [x if at == place else torch.zeros_like(x) for at, x in enumerate(form.given)]
        gradients = torch.autograd.grad(results, form.trained, given)
        found |= dict(zip(form.gradients_of(name), gradients, strict=True))
    return found


def difference(got: Tensor, want: Tensor) -> float:
    """Relative norm of the difference; absolute where nothing is wanted."""
    norm = float(torch.linalg.vector_norm(want.float()))
    return float(torch.linalg.vector_norm(got.float() - want.float())) / (norm if norm > 0.0 else 1.0)


def compare(got: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    """The largest difference; raises where one is too large."""
    worst = 0.0
    for name, value in want.items():
        found = difference(got[name], value)
        allowed = KL_TOLERANCE if name == "kl" else CANCELLING.get(name, TOLERANCE)
        if not found <= allowed:
            raise MismatchError(f"{name} differs by {found:.3g}, allowed {allowed:g}")
        worst = worst if name in CANCELLING else max(worst, found)
    return worst


def check_noise(case: Case, form: Form) -> None:
    """Queries of zero make weights of pure noise, and the output's variance that of the noise.

    Outputs vary around the mean of values, which is not zero, as values are rounded.
    """
    with torch.no_grad():
        kept = case.q.detach().clone()
        case.q.zero_()
    try:
        out = form.forward(False)[0].detach().float()
    finally:
        with torch.no_grad():
            case.q.copy_(kept)
    if "lognormal" in form.group:
        relative = math.exp(rivals.SIGMA**2) - 1.0
    else:
        relative = math.gamma(1.0 + 2.0 / rivals.K) / math.gamma(1.0 + 1.0 / rivals.K) ** 2 - 1.0
    values = case.v.detach().float()
    centre = values.mean(dim=-2, keepdim=True)
    wanted = relative * float((values - centre).square().mean()) / case.shape[2]
    found = float((out - centre).square().mean())
    if not abs(found / wanted - 1.0) <= NOISE_TOLERANCE:
        raise MismatchError(f"the variance of its noise is {found / wanted:.3f} times what it should be")


def check(case: Case, form: Form, references: dict[str, dict[str, Tensor]]) -> float | None:
    """Hold a form against ours: outputs and gradients without noise, and the noise; largest difference."""
    if form.kind == "plain" or not form.checked:
        return None
    if form.group.startswith("Bayesian") and not case.padded:
        check_noise(case, form)
    if form.kind == "ours":
        references.clear()  # of the group before
        references[form.group] = outputs_and_gradients(case, form, quiet=True)
        return None
    if form.group not in references:
        raise MismatchError("ours failed, and there is nothing to hold it against")
    worst = compare(outputs_and_gradients(case, form, quiet=True), references[form.group])
    if form.twin is not None:
        got = form.forward(False)
        given = [case.to_out, *(torch.zeros_like(x) for x in form.given[1:])]
        gradients = torch.autograd.grad(got, form.trained, given)[:3]
        mine = {"out": case.visible("out", got[0].detach())}
        mine |= dict(zip(form.gradients_of("out"), gradients, strict=False))
        worst = max(worst, compare(mine, outputs_and_gradients(case, form.twin, quiet=False)))
    return worst

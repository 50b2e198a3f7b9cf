"""Evolving Attention near its memory's floor, on a GPU, and Bayesian over it; `naive` has the definitions.

Of a layer only its evolved map is kept, which the layer above needs anyway, and a byte per four cells for the
ReLU. The backward pass makes the mixed map again from the previous one, queries and keys, and writes over it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from overt.mechanisms._operator import Maybe, Operator, Tensors
from overt.mechanisms.bayesian.fused import Call, call_of, empty_heads_last, noise_of
from overt.mechanisms.evolving.layer import ramp
from overt.mechanisms.evolving.naive import reach
from overt.mechanisms.site import KINDS

if TYPE_CHECKING:
    from overt.mechanisms.bayesian.layer import BayesianLayer
    from overt.mechanisms.chain import Chain
    from overt.mechanisms.evolving.layer import EvolvingLayer
    from overt.mechanisms.seen import Seen
    from overt.mechanisms.site import Site

FEW_HEADS, ROOM_FOR_MANY = 16, 150_000  # bytes of shared memory
ALIGNED = 16  # cells at a multiple of which a map's rows start
MOST_CELLS = 2**31  # of one head's map, which kernels count in 32 bits
HIDDEN, MIXED = float("-inf"), 0.0
_FIRST = 6  # tensors of a `Call` that may have gradients


class EvolvingCall(NamedTuple):
    """One attention call, flat, as an operator takes it: `Call`'s fields around those of the map.

    Attributes:
        previous: the previous layer's evolved map; None starts a chain.
        weight: of the convolution, (heads, heads, k, k); None without one.
        shift: its bias, (heads,).
        numbers: float32 (2,) on the device, α and β.
        add: RealFormer's sum.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    inner: Tensor | None
    bias: Tensor | None
    outer: Tensor | None
    previous: Tensor | None
    weight: Tensor | None
    shift: Tensor | None
    numbers: Tensor
    key_visible: Tensor | None
    query_real: Tensor | None
    known: Tensor | None
    seers: Tensor | None
    pairs: Tensor | None
    step: Tensor | None
    sample: Tensor | None
    examples: Tensor | None
    drop_keys: Tensor | None
    step_number: int
    sample_number: int
    first_example: int
    seed: int
    layer: int
    kind: int
    draws: bool
    first_row: int
    dropout: float
    scale: float
    causal: bool
    wants_kl: bool
    per_cell: float
    settings: str
    add: bool

    @classmethod
    def of(
        cls,
        call: Call,
        previous: Tensor | None,
        convolution: tuple[Tensor, Tensor] | None,
        numbers: Tensor,
        add: bool,
    ) -> EvolvingCall:
        """The call with what makes its map."""
        weight, shift = (None, None) if convolution is None else convolution
        fields = (*call[:_FIRST], previous, weight, shift, numbers, *call[_FIRST:], add)
        return cls(*fields)  # type: ignore[arg-type]

    def call(self) -> Call:
        """Without what makes the map."""
        fields = (*self[:_FIRST], *self[_FIRST + 4 : -1])
        return Call(*fields)  # type: ignore[arg-type]

    def reach(self) -> tuple[int, int, int, int]:
        """Of the convolution's windows."""
        assert self.weight is not None
        return reach(KINDS[self.kind], self.weight.shape[-1])


def _rows_whole(call: Call) -> Call:
    from overt.mechanisms._attend_triton import rows_whole

    query, key = rows_whole(call.query), rows_whole(call.key)
    return call if query is call.query and key is call.key else call._replace(query=query, key=key)


def _mixed(given: EvolvingCall, call: Call, previous: Tensor | None, seen: Seen) -> Tensor:
    from overt.mechanisms.evolving import _evolve_triton as kernels

    hidden = HIDDEN if given.weight is None else MIXED
    return kernels.mix(call.query, call.key, call.scale, previous, seen, given.numbers, given.add, hidden)


def _forward(given: EvolvingCall) -> Tensors:
    """Output, evolved map, KL (batch,); and the ReLU's bits, `Attended.rows` and `Prior.keyed`."""
    from overt.mechanisms import _attend_triton as attention
    from overt.mechanisms.evolving import _evolve_triton as kernels

    call = _rows_whole(given.call())
    seen, prior = call.seen(), call.prior()
    previous = None if given.previous is None else kernels.as_padded(given.previous)
    evolved = _mixed(given, call, previous, seen)
    bits = call.query.new_empty(0, dtype=torch.uint8)
    if given.weight is not None and given.shift is not None:
        window = given.reach()
        evolved, bits = kernels.convolve(evolved, given.weight, given.shift, window, given.numbers, seen)
    done = attention.forward(call.query, call.key, call.value, evolved, seen, call.draw(), prior)
    keyed = done.kl.new_empty(0) if prior.keyed is None else prior.keyed
    return done.out, evolved, call.total(done.kl), bits, done.rows, keyed


def _backward(given: EvolvingCall, results: Tensors, gradients: Maybe, wanted: tuple[bool, ...]) -> Maybe:
    from overt.mechanisms import _attend_triton as attention
    from overt.mechanisms.evolving import _evolve_triton as kernels

    (out, evolved, _, bits, rows, keyed), (to_out, to_evolved, to_kl) = results, gradients
    call = _rows_whole(given.call())
    seen, prior, to_kl = call.seen(), call.prior_again(keyed), call.to_total(to_kl, rows)
    to_out = torch.zeros_like(out) if to_out is None else to_out
    batch, heads, queries, keys = evolved.shape
    gradient = kernels.padded(batch, heads, queries, keys, evolved.dtype, evolved.device)
    to_value, to_a = attention.map_backward(
        evolved, call.value, call.draw(), prior, out, rows, to_out, to_kl, to_evolved, gradient
    )
    to_weight = to_shift = None
    previous = None if given.previous is None else kernels.as_padded(given.previous)
    if given.weight is not None and given.shift is not None:
        mixed, window = _mixed(given, call, previous, seen), given.reach()
        to_weight, to_shift = kernels.convolve_to_weight(
            gradient, mixed, bits, given.weight, given.shift, window, given.numbers, seen
        )
        # The mixed map is done with, and its memory takes the gradient.
        kernels.convolve_to_mixed(gradient, bits, given.weight, window, given.numbers, seen, mixed)
        gradient = mixed
    to_previous, to_query, to_key = kernels.mix_backward(
        gradient, previous, call.query, call.key, call.scale, given.numbers, seen, given.add, wanted[_FIRST]
    )
    network = call.to_network(prior, to_a, to_kl, to_key)
    return to_query, to_key, to_value, *network, to_previous, to_weight, to_shift


def _map_like(given: EvolvingCall) -> Tensor:
    (batch, heads, queries, _), keys = given.query.shape, given.key.shape[2]
    width = -(-keys // ALIGNED) * ALIGNED
    return given.query.new_empty(batch, heads, queries, width)[..., :keys]


def _shapes(given: EvolvingCall) -> Tensors:
    evolved = _map_like(given)
    shape = (*evolved.shape[:3], evolved.stride(2) // 4) if given.weight is not None else (0,)
    kl, rows, keyed = given.call().empty_rows()
    bits = given.query.new_empty(shape, dtype=torch.uint8)
    return empty_heads_last(given.query), evolved, kl, bits, rows, keyed


def _to_shapes(given: EvolvingCall, wanted: list[bool]) -> Tensors:
    none = given.query.new_empty(0)
    previous = none if given.previous is None or not wanted[_FIRST] else _map_like(given)
    convolution = [none if x is None else x.new_empty(x.shape) for x in (given.weight, given.shift)]
    return *given.call().empty_gradients(), previous, *convolution


evolving = Operator(
    "evolving",
    EvolvingCall,
    _forward,
    _backward,
    _shapes,
    _to_shapes,
    trained=_FIRST + 3,
    results=6,
    differentiable=3,
)


_constants: dict[tuple[float, float, torch.device], Tensor] = {}


def _constant(alpha: float, beta: float, device: torch.device) -> Tensor:
    """α and β on a device, copied there once: a copy waits for the device."""
    if torch.compiler.is_compiling():
        return torch.tensor([alpha, beta], dtype=torch.float32, device=device)
    place = alpha, beta, device
    if place not in _constants:
        with torch.inference_mode(False):  # or no later training could keep it
            _constants[place] = torch.tensor([alpha, beta], dtype=torch.float32, device=device)
    return _constants[place]


def unfit(layer: EvolvingLayer, query: Tensor, keys: int, room: int) -> str | None:
    """Why a layer's map is not for the kernels; None if it is."""
    from overt.mechanisms.evolving._evolve_triton import convolvable

    if query.shape[2] * (keys + ALIGNED) >= MOST_CELLS:
        return f"one head's map of {query.shape[2]} × {keys} cells is too large for the kernels"
    if layer.weight is None:
        return None
    if layer.weight.device != query.device:
        return f"the convolution's weights lie on {layer.weight.device}, queries on {query.device}"
    if layer.site.heads > FEW_HEADS and room < ROOM_FOR_MANY:
        return f"convolutions of more than {FEW_HEADS} heads need more shared memory than this GPU has"
    return convolvable(layer.site.heads, layer.config.kernel_size, query.dtype)


def attended(
    layer: EvolvingLayer,
    bayesian: BayesianLayer | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    seen: Seen,
    chain: Chain,
    site: Site,
    first_row: int,
    dropout: float,
) -> Tensor:
    """Output (batch, heads, query, dim) of Evolving, and Bayesian over it; leaves map and KL in the chain."""
    from overt.mechanisms.bayesian.layer import wants_kl

    config, device = layer.config, query.device
    below = None if site.layer == 0 else chain.previous(site)
    shape = (*query.shape[:3], key.shape[2])
    if below is not None and below.shape[0] != shape[0]:
        raise ValueError(
            f"the previous map holds {below.shape[0]} examples, these queries {shape[0]}: "
            "make a fresh Chain for each forward pass"
        )
    previous = None if below is None or below.shape != shape else below.to(device, query.dtype)
    grown = ramp(config, chain, layer.training, device)
    numbers = _constant(layer.alpha, config.beta, device)
    numbers = numbers if grown is None else numbers * grown
    convolution = None
    if previous is not None and layer.weight is not None and layer.bias is not None:
        convolution = layer.weight, layer.bias
    noise = noise_of(bayesian, chain, site, shape[0], device, first_row, dropout)
    wanted = bayesian is not None and wants_kl(bayesian, bayesian.config, chain)
    call = call_of(bayesian, query, key, value, scale, seen, noise, wanted)
    out, evolved, kl, *_ = evolving(
        EvolvingCall.of(call, previous, convolution, numbers, config.skip == "add")
    )
    chain.carry(site, evolved)
    if wanted and bayesian is not None:
        chain.record_kl(site, kl, bayesian.config)
    return out

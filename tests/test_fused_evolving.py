"""Evolving Attention's kernels against the plain definition in float64: results and all gradients.

Without a GPU the kernels run in Triton's interpreter, on small maps.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from overt.mechanisms.evolving import naive
from overt.mechanisms.maps import HIDDEN
from overt.mechanisms.seen import Seen
from overt.mechanisms.site import Kind
from poisoned import poison
from selection import covering

fused = pytest.importorskip("overt.mechanisms.evolving.kernels", reason="triton is made for Linux alone")
CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
# the interpreter's products of bfloat16 are wrong
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if CUDA else [])]
CLOSE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
ALPHA, BETA = 0.3, 0.4


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch)


def convolve_backward(
    gradient: Tensor,
    mixed: Tensor,
    bits: Tensor,
    weight: Tensor,
    reach: tuple[int, int, int, int],
    numbers: Tensor,
    seen: Seen,
) -> tuple[Tensor, Tensor, Tensor]:
    bias = weight[:, 0, 0, 0].contiguous()  # of which only shape and dtype count
    to_weight, to_bias = fused.convolve_to_weight(gradient, mixed, bits, weight, bias, reach, numbers, seen)
    batch, heads, queries, keys = mixed.shape
    to_mixed = fused.padded(batch, heads, queries, keys, mixed.dtype, mixed.device)
    fused.convolve_to_mixed(gradient, bits, weight, reach, numbers, seen, to_mixed)
    return to_mixed, to_weight, to_bias


def laid(map: Tensor) -> Tensor:
    """A padded copy with NaN in the padding."""
    copy = fused.as_padded(map.clone())
    fused.whole(copy)[..., map.shape[-1] :] = float("nan")
    return copy


def numbers() -> Tensor:
    return torch.tensor([ALPHA, BETA], device=DEVICE)


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64).to(dtype).to(DEVICE)


def masks(batch: int, queries: int, keys: int, which: str) -> Seen:
    """Visibility by name: what is padded, what is causal, and what hides a whole example."""
    seen = Seen(causal="causal" in which)
    if "keys" in which:
        visible = torch.rand(batch, keys) < 0.7
        visible[0, 0] = False
        seen = replace(seen, key_visible=visible.to(DEVICE))
    if "queries" in which:
        seen = replace(seen, query_real=(torch.rand(batch, queries) < 0.7).to(DEVICE))
    if "blind" in which:
        visible = torch.ones(batch, keys, dtype=torch.bool)
        visible[-1] = False
        seen = replace(seen, key_visible=visible.to(DEVICE))
    return seen


def visible(seen: Seen, batch: int, queries: int, keys: int) -> Tensor:
    whole = torch.ones(batch, 1, queries, keys, dtype=torch.bool, device=DEVICE)
    if seen.causal:
        whole &= torch.ones(queries, keys, dtype=torch.bool, device=DEVICE).tril(keys - queries)
    if seen.key_visible is not None:
        whole &= seen.key_visible[:, None, None, :]
    if seen.query_real is not None:
        whole &= seen.query_real[:, None, :, None]
    return whole


def error(ours: Tensor, theirs: Tensor) -> float:
    """Relative norm of the difference; infinities must be the same ones."""
    assert ours.shape == theirs.shape
    ours = ours.detach().double()
    theirs = theirs.detach().double()
    hidden = theirs == HIDDEN
    assert torch.equal(ours == HIDDEN, hidden)
    ours, theirs = ours.masked_fill(hidden, 0.0), theirs.masked_fill(hidden, 0.0)
    norm = theirs.norm().item()
    difference = (ours - theirs).norm().item()
    return difference / norm if norm else difference


def exact(tensor: Tensor) -> Tensor:
    """The same numbers in float64, as a leaf."""
    return tensor.detach().double().requires_grad_()


def check_mix(
    dtype: torch.dtype,
    shape: tuple[int, int, int, int, int],
    masking: str = "keys queries",
    key_heads: int | None = None,
    past: bool = True,
    add: bool = False,
) -> None:
    """`mix` and `mix_backward` agree with the definition through autograd."""
    B, H, M, N, D = shape  # noqa: N806
    Hk = key_heads or H  # noqa: N806
    scale = D**-0.5
    # strides as they come out of a projection
    query = normal(B, M, H, D, dtype=dtype).transpose(1, 2)
    key = normal(B, N, Hk, D, dtype=dtype).transpose(1, 2)
    seen = masks(B, M, N, masking)
    whole = visible(seen, B, M, N)
    previous = None
    if past:
        before = normal(B, H, M, N, dtype=dtype)
        previous = laid(before.masked_fill((torch.rand(B, 1, M, N) < 0.3).to(DEVICE), HIDDEN))
        assert fused.is_padded(previous)
    q, k = exact(query), exact(key)
    p = None if previous is None else exact(previous)
    logits = scale * q @ k.repeat_interleave(H // Hk, 1).mT
    theirs = naive.mix(logits, p, whole, ALPHA, add)
    ours = fused.mix(query, key, scale, previous, seen, numbers(), add, 0.0)
    assert fused.is_padded(ours)
    assert ours.dtype == dtype
    assert error(ours, theirs) < CLOSE[dtype]
    ended = fused.mix(query, key, scale, previous, seen, numbers(), add, HIDDEN)
    assert error(ended, theirs.masked_fill(~whole, HIDDEN)) < CLOSE[dtype]

    gradient = normal(B, H, M, N, dtype=dtype) * whole
    wanted = torch.autograd.grad(theirs, [q, k] + ([] if p is None else [p]), gradient.double())
    for needs_previous in (False, True):
        given = laid(gradient)
        before_call = given.clone()
        to_previous, to_query, to_key = fused.mix_backward(
            given, previous, query, key, scale, numbers(), seen, add, needs_previous
        )
        assert error(to_query, wanted[0]) < CLOSE[dtype]
        assert error(to_key, wanted[1]) < CLOSE[dtype]
        if needs_previous and p is not None:
            assert to_previous is not None
            assert to_previous.data_ptr() == given.data_ptr()
            assert error(to_previous, wanted[2]) < CLOSE[dtype]
        else:
            assert to_previous is None
            assert torch.equal(given, before_call)


def check_convolve(
    dtype: torch.dtype,
    shape: tuple[int, int, int, int],
    kind: Kind = "encoder",
    size: int = 3,
    masking: str = "keys queries",
) -> None:
    """The convolution and its gradients agree with the definition through autograd."""
    B, H, M, N = shape  # noqa: N806
    seen = masks(B, M, N, masking)
    whole = visible(seen, B, M, N)
    mixed = laid(normal(B, H, M, N, dtype=dtype).masked_fill(~whole, 0.0))
    # in the map's own precision, so that only products and sums differ
    weight = (normal(H, H, size, size) / (H**0.5 * size)).to(dtype).float()
    bias = normal(H) * 0.3
    reach = naive.reach(kind, size)
    x, w, b = exact(mixed), exact(weight), exact(bias)
    theirs = naive.refine(x, (w, b), whole, kind, BETA)
    ours, bits = fused.convolve(mixed, weight, bias, reach, numbers(), seen)
    assert fused.is_padded(ours)
    assert ours.dtype == dtype
    assert error(ours, theirs) < CLOSE[dtype]

    let = (bits[..., None] >> torch.arange(4, device=DEVICE)) & 1
    let = let.flatten(-2)[..., :N].bool()
    positive = naive.convolve(x, w, b, kind) > 0
    assert ((let != positive) & whole).double().mean() < CLOSE[dtype]

    gradient = laid(normal(B, H, M, N, dtype=dtype).masked_fill(~whole, 0.0))
    # a cell near the ReLU's corner may fall on its other side: the gradient is compared on ours
    image = torch.nn.functional.pad(x, (reach[0], reach[1], reach[2], reach[3]))
    linear = torch.nn.functional.conv2d(image, w, b)
    evolved = BETA * linear * let + (1.0 - BETA) * x
    wanted = torch.autograd.grad(evolved, [x, w, b], gradient.double())
    to_mixed, to_weight, to_bias = convolve_backward(gradient, mixed, bits, weight, reach, numbers(), seen)
    assert fused.is_padded(to_mixed)
    assert to_mixed.dtype == dtype
    assert to_weight.dtype == to_bias.dtype == torch.float32
    assert error(to_mixed, wanted[0].masked_fill(~whole, 0.0)) < CLOSE[dtype]
    assert error(to_weight, wanted[1]) < CLOSE[dtype]
    assert error(to_bias, wanted[2]) < CLOSE[dtype]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("masking", ["", "keys", "queries", "causal", "keys queries causal", "blind"])
def test_mixing_and_its_gradients_are_the_definitions_under_every_mask(
    dtype: torch.dtype, masking: str
) -> None:
    check_mix(dtype, (2, 3, 17, 33, 24), masking)


@pytest.mark.parametrize("past", [False, True])
@pytest.mark.parametrize("add", [False, True])
def test_mixing_adds_or_averages_and_starts_a_chain_without_a_previous_map(past: bool, add: bool) -> None:
    check_mix(torch.float32, (2, 2, 7, 17, 16), past=past, add=add)


@pytest.mark.parametrize("key_heads", [1, 2])
def test_mixing_shares_key_heads_among_groups(key_heads: int) -> None:
    check_mix(torch.float32, (2, 4, 7, 9, 16), "causal", key_heads)


@pytest.mark.slow
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, 33), (33, 1), (65, 7), (7, 130)])
def test_mixing_takes_any_lengths(queries: int, keys: int) -> None:
    check_mix(torch.float32, (1, 2, queries, keys, 16))
    check_mix(torch.float32, (1, 1, queries, keys, 16), "causal")


WINDOWS = [(kind, size) for kind in ("encoder", "decoder", "cross") for size in (1, 3, 5)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "size", "dtype"),
    covering(
        [(*window, dtype) for window in WINDOWS for dtype in DTYPES],
        [(*window, DTYPES[number % 2]) for number, window in enumerate(WINDOWS)],  # every pair
    ),
)
def test_convolution_and_its_gradients_are_the_definitions_for_every_window(
    kind: Kind, size: int, dtype: torch.dtype
) -> None:
    rows = 5 if size == 5 and dtype == torch.float16 else 3
    check_convolve(
        dtype, (1, 3, rows, 17), kind, size, "causal keys" if kind == "decoder" else "keys queries"
    )


@pytest.mark.slow
@pytest.mark.parametrize("masking", ["", "queries", "keys queries causal", "blind"])
def test_convolution_and_its_gradients_are_the_definitions_under_every_mask(masking: str) -> None:
    check_convolve(torch.float16, (2, 2, 3, 20), "encoder", 3, masking)


@pytest.mark.slow
@pytest.mark.parametrize("heads", [1, 12, 17])
def test_convolution_takes_any_number_of_heads(heads: int) -> None:
    check_convolve(torch.float16, (1, heads, 3, 18))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "queries", "keys"),
    covering(
        [
            (kind, *lengths)
            for kind in ("encoder", "decoder")
            for lengths in ((1, 1), (1, 33), (10, 1), (3, 67))
        ],
        [("encoder", 1, 1), ("decoder", 1, 33), ("encoder", 10, 1), ("decoder", 3, 67)],
    ),
)
def test_convolution_takes_any_lengths(kind: Kind, queries: int, keys: int) -> None:
    check_convolve(torch.float16, (1, 2, queries, keys), kind, 3, "")


@pytest.mark.slow
def test_convolution_fills_what_causality_hides_and_joins_strips_and_blocks() -> None:
    check_convolve(torch.float16, (1, 2, 10, 260), "decoder", 3, "causal")


LARGE = [
    (torch.bfloat16, 12, "encoder", 3, "keys queries"),
    (torch.bfloat16, 12, "decoder", 3, "causal keys"),
    (torch.bfloat16, 12, "cross", 5, ""),
    (torch.bfloat16, 17, "encoder", 3, ""),
    (torch.bfloat16, 32, "encoder", 3, "keys"),
    (torch.float16, 16, "decoder", 5, "causal"),
    (torch.float32, 12, "encoder", 3, "keys queries"),
    (torch.bfloat16, 1, "encoder", 1, ""),
]


@pytest.mark.skipif(not CUDA, reason="needs a GPU: the interpreter is slow")
@pytest.mark.parametrize(("dtype", "heads", "kind", "size", "masking"), LARGE)
def test_large_maps_agree_too(dtype: torch.dtype, heads: int, kind: Kind, size: int, masking: str) -> None:
    check_mix(dtype, (2, heads, 300, 515, 80), masking)
    check_convolve(dtype, (2, heads, 200, 515), kind, size, masking)


@pytest.mark.slow
def test_results_are_the_same_bits_each_time() -> None:
    seen = Seen()
    mixed = laid(normal(1, 3, 2, 17))
    weight, bias = normal(3, 3, 3, 3), normal(3)
    runs = []
    for _ in range(2):
        evolved, bits = fused.convolve(mixed, weight, bias, (1, 1, 1, 1), numbers(), seen)
        runs.append((evolved, *convolve_backward(mixed, mixed, bits, weight, (1, 1, 1, 1), numbers(), seen)))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_a_padded_map_has_aligned_rows_and_others_are_copied() -> None:
    map = normal(2, 3, 5, 17)
    assert not fused.is_padded(map)
    copy = fused.as_padded(map)
    assert fused.is_padded(copy)
    assert fused.as_padded(copy) is copy
    assert torch.equal(copy, map)
    assert copy.stride() == (3 * 5 * 32, 5 * 32, 32, 1)
    assert fused.is_padded(normal(2, 3, 5, 32))
    assert not fused.is_padded(normal(2, 3, 5, 64)[..., :32])
    assert not fused.is_padded(copy.transpose(0, 1))
    assert not fused.is_padded(normal(1, 1, 1, 17))  # nothing behind the row
    assert not fused.is_padded(normal(2 * 16 + 1)[1:].view(1, 1, 2, 16))


def test_what_the_convolution_does_not_do_is_said() -> None:
    assert fused.convolvable(12, 3, torch.bfloat16) is None
    assert fused.convolvable(32, 5, torch.float16) is None
    assert fused.convolvable(16, 3, torch.float32) is None
    assert "32 heads in torch.float16 with kernel_size 3, got 33" in (
        fused.convolvable(33, 3, torch.float16) or ""
    )
    assert "16 heads in torch.float32 with kernel_size 3, got 17" in (
        fused.convolvable(17, 3, torch.float32) or ""
    )
    assert "kernel_size 1, 3 or 5, got 7" in (fused.convolvable(12, 7, torch.float32) or "")
    assert "float64" in (fused.convolvable(12, 3, torch.float64) or "")

"""The noise: the published generator, the same integers everywhere, and draws that look independent."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from overt.mechanisms import noise

# Random123's known answers for Philox 4×32 with ten rounds: counter, key, result.
KNOWN = [
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]
word32 = st.integers(0, 2**32 - 1)


def philox(
    counter: list[int],
    key: list[int],
    rounds: int,
    bits: int,
    multipliers: tuple[int, int],
    weyl: tuple[int, int],
) -> list[int]:
    """Philox 4×bits in Python integers, after Salmon et al. 2011."""
    mask = (1 << bits) - 1
    for _ in range(rounds):
        p0, p1 = counter[0] * multipliers[0], counter[2] * multipliers[1]
        counter = [
            (p1 >> bits) ^ counter[1] ^ key[0],
            p1 & mask,
            (p0 >> bits) ^ counter[3] ^ key[1],
            p0 & mask,
        ]
        key = [(key[0] + weyl[0]) & mask, (key[1] + weyl[1]) & mask]
    return counter


def philox32(counter: list[int], key: list[int], rounds: int) -> list[int]:
    return philox(counter, key, rounds, 32, (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85))


def test_the_plain_python_oracle_is_numpys_philox_at_64_bits() -> None:
    # numpy steps its counter before the first block.
    ours = philox(
        [1, 0, 0, 0],
        [7, 9],
        10,
        64,
        (0xD2E7470EE14C6C93, 0xCA5A826395121157),
        (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B),
    )
    generator = np.random.Philox(counter=[0, 0, 0, 0], key=[7, 9])
    assert ours == [int(x) for x in generator.random_raw(4)]


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN)
def test_words_are_the_published_ones(counter: list[int], key: list[int], result: list[int]) -> None:
    assert philox32(counter, key, 10) == result
    tensors = [torch.tensor(x) for x in (*key, *counter)]
    assert [int(w) for w in noise.words(tuple(tensors[:2]), tuple(tensors[2:]), rounds=10)] == result


@given(st.lists(word32, min_size=6, max_size=6))
def test_words_equal_the_oracle_for_any_counter_and_key(values: list[int]) -> None:
    key, counter = values[:2], values[2:]
    tensors = [torch.tensor(x) for x in values]
    got = noise.words(tuple(tensors[:2]), tuple(tensors[2:]))
    assert [int(w) for w in got] == philox32(counter, key, noise.ROUNDS)


def key(seed: int = 0, step: int = 3, layer: int = 1, sample: int = 0, kind: int = 0) -> Tensor:
    return noise.stream(torch.tensor(seed), torch.tensor(step), layer, torch.tensor(sample), kind)


def test_a_cell_is_word_column_mod_4_of_its_counter_under_its_calls_key() -> None:
    seed, step, layer, sample, kind = (5 << 32) + 6, 9, 2, 4, 1
    k0, k1, _, _ = philox32([step, layer, sample, kind], [6, 5], noise.ROUNDS)
    got = noise.uniform(key(seed, step, layer, sample, kind), torch.tensor([11, 7]), 3, 2, 7, first_row=20)
    for b, example in enumerate((11, 7)):
        for h in range(3):
            for i in range(2):
                for j in range(7):
                    word = philox32([j // 4, 20 + i, h, example], [k0, k1], noise.ROUNDS)[j % 4]
                    assert float(got[b, h, i, j]) == ((word >> 9) + 0.5) / 2**23


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 9), st.integers(1, 17), st.integers(0, 2**31))
def test_the_compiled_loop_gives_the_definitions_bits(b: int, h: int, q: int, k: int, row: int) -> None:
    assert noise.compiled_kernels() is not None, "numba is a dependency"
    examples = torch.arange(b) * 1_000_003
    keys = torch.stack([key(sample=s) for s in range(b)])
    got = noise.uniform(keys, examples, h, q, k, row)
    assert torch.equal(got, noise._uniform_definition(keys, examples, h, q, k, row))


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**40), st.lists(st.integers(0, 2**33), min_size=1))
def test_the_compiled_keys_are_the_definitions(seed: int, step: int, samples: list[int]) -> None:
    arguments = (torch.tensor(seed), torch.tensor(step), 3, torch.tensor(samples), 2)
    assert torch.equal(noise.stream(*arguments), noise._stream_definition(*arguments))


@pytest.mark.parametrize(
    ("b", "h", "q", "k", "row"), [(2, 3, 5, 7, 0), (1, 1, 40, 30, 2**31), (3, 2, 1, 4, 9)]
)
def test_the_kernels_for_maps_give_the_definitions_bits(b: int, h: int, q: int, k: int, row: int) -> None:
    pytest.importorskip("triton")
    from overt.mechanisms.kernels import dense

    device = "cuda" if torch.cuda.is_available() else "cpu"  # Triton's interpreter
    examples, samples = torch.arange(b) * 1_000_003 + 2**40, torch.arange(b) + 2**33
    address = torch.tensor(-5), torch.tensor(2**35 + 1), 3, samples, 2
    keys = noise._stream_definition(*address)
    there = [x.to(device) if isinstance(x, Tensor) else x for x in address]
    assert torch.equal(dense.stream(*there).cpu(), keys)
    assert torch.equal(dense.stream(*there[:3], there[3][0], 2).cpu(), keys[0])
    got = dense.uniform(keys.to(device), examples.to(device), h, q, k, row).cpu()
    assert torch.equal(got, noise._uniform_definition(keys, examples, h, q, k, row))


def test_without_numba_the_same_draws_come_from_the_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    want = noise.uniform(key(), torch.arange(2), 2, 3, 5)
    monkeypatch.setattr(noise, "compiled_kernels", lambda: None)
    assert torch.equal(noise.uniform(key(), torch.arange(2), 2, 3, 5), want)


@given(st.integers(1, 8), st.integers(1, 8))
def test_any_split_of_batch_and_rows_gives_the_same_draws(batch_at: int, row_at: int) -> None:
    whole = noise.uniform(key(), torch.arange(9), 2, 9, 6)
    top = noise.uniform(key(), torch.arange(batch_at), 2, row_at, 6)
    rest = noise.uniform(key(), torch.arange(batch_at, 9), 2, 9 - row_at, 6, first_row=row_at)
    assert torch.equal(whole[:batch_at, :, :row_at], top)
    assert torch.equal(whole[batch_at:, :, row_at:], rest)
    assert torch.equal(whole[..., :3], noise.uniform(key(), torch.arange(9), 2, 9, 3))


def test_edges_draw_what_the_dense_map_draws_in_any_order() -> None:
    dense = noise.uniform(key(), torch.zeros(1, dtype=torch.int64), 3, 6, 6)[0]
    rows, columns = torch.tensor([0, 5, 2, 2]), torch.tensor([1, 4, 3, 0])
    assert torch.equal(noise.uniform_edges(key(), 3, rows, columns), dense[:, rows, columns].T)


def test_draws_lie_strictly_inside_the_unit_interval() -> None:
    extremes = noise.open_unit(torch.tensor([0, 2**32 - 1]))
    assert extremes.dtype == torch.float32
    assert 0.0 < float(extremes[0]) < float(extremes[1]) < 1.0


def test_drawing_leaves_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    noise.uniform(key(), torch.arange(2), 2, 4, 4)
    assert torch.equal(torch.get_rng_state(), before)


# --- Statistics: thresholds hold for these fixed seeds and would catch a correlation of about 0.01 ---


def test_draws_are_uniform() -> None:
    draws = noise.uniform(key(), torch.arange(8), 8, 64, 64).flatten().double().numpy()
    assert scipy.stats.kstest(draws, "uniform").pvalue > 0.001
    counts = np.histogram(draws, bins=256, range=(0, 1))[0]
    assert scipy.stats.chisquare(counts).pvalue > 0.001


AXES = {
    "column": lambda u: (u[..., :-1], u[..., 1:]),
    "column, four apart": lambda u: (u[..., :-4], u[..., 4:]),
    "row": lambda u: (u[..., :-1, :], u[..., 1:, :]),
    "head": lambda u: (u[:, :-1], u[:, 1:]),
    "example": lambda u: (u[:-1], u[1:]),
    "transpose": lambda u: (u[..., :32, :32], u[..., :32, :32].mT),
}


@pytest.mark.parametrize("axis", AXES)
def test_neighbours_are_uncorrelated(axis: str) -> None:
    first, second = AXES[axis](noise.uniform(key(), torch.arange(8), 8, 64, 64))
    correlation = np.corrcoef(first.flatten().numpy(), second.flatten().numpy())[0, 1]
    bound = 4.0 / first.numel() ** 0.5 * (2**0.5 if axis == "transpose" else 1.0)
    if axis == "transpose":  # the diagonal meets itself
        bound += 1.0 / 32
    assert abs(correlation) < bound


@pytest.mark.parametrize("field", ["seed", "step", "layer", "sample", "kind"])
def test_neighbouring_addresses_give_unrelated_noise(field: str) -> None:
    first, second = (noise.uniform(key(**{field: n}), torch.arange(4), 8, 64, 64).flatten() for n in (0, 1))
    correlation = np.corrcoef(first.numpy(), second.numpy())[0, 1]
    assert abs(correlation) < 4.0 / first.numel() ** 0.5
    assert (
        scipy.stats.kstest((first - second).double().numpy(), scipy.stats.triang(0.5, -1, 2).cdf).pvalue
        > 0.001
    )

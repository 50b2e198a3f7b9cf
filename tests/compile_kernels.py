"""Compile GPU kernels without a GPU: `python tests/compile_kernels.py FORM`, without the interpreter.

The fused forms run on a CPU with a launch that compiles each kernel for a GPU in place of running it, for
exactly the argument kinds (types, alignment, constants) that it would have there.

Products that the compiler is known to get wrong are refused (`check_products`).

With `--digest`, a digest of each kernel's PTX follows, of its instructions alone: names, line numbers and
comments are left out. A change of names or of layout in the source leaves digests as they are. `--dtype` and
`--variant` choose among types and masks, `--tokens` the length, `--architecture` the GPU, whose shared memory
kernels must fit.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import re
from dataclasses import replace
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import overt
from overt.mechanisms import backend
from overt.mechanisms.attention_map import AttentionMap
from overt.mechanisms.kernels.launch import Ready
from overt.tracing.asked import Asked, Sight
from overt.tracing.kernels import carry
from overt.tracing.states import StateLevel

TYPES = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int64: "*i64",
    torch.uint8: "*u8",
}
FORMS: dict[str, list[overt.Mechanism]] = {
    "bayesian": [overt.Bayesian()],
    "lognormal": [overt.Bayesian(family="lognormal")],
    "evolving": [overt.Evolving()],
    "both": [overt.Evolving(), overt.Bayesian()],
}
STATES = "states"  # rows through queries and keys, in traces
PIXELS = "pixels"  # positions of pixels, in a network over images
VARIANTS = ("plain", "causal", "padded", "dropout", "left", "left causal", "left dropout")
SHARED = {75: 65_536, 80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448}  # bytes, by compute capability
architecture = 90
compiled: dict[str, int] = {}
shared: dict[str, int] = {}  # most bytes that a kernel wants
digests: dict[str, list[str]] = {}


PRODUCT = re.compile(
    r"tt\.dot .*: tensor<\d+x(\d+)x\w+, #ttg\.dot_op<\{opIdx = 0, parent = #\w+, kWidth = (\d+)\}>> \* "
)


def check_products(name: str, ttgir: str) -> None:
    """Refuse products of tensor cores over fewer terms than four threads hold side by side.

    How many terms a thread holds (kWidth) follows from the narrowest numbers that were read on the way to
    them: with a mask's bytes, and words that were joined, it is 8. Of fewer than 4 · 8 terms the compiler
    (Triton 3.6 and 3.7) then reads some for two threads, and others for none. Attention in tiles of 16 × 16
    fails the GPU's tests for that.
    """
    found = PRODUCT.findall(ttgir)
    written = len(re.findall(r"\btt\.dot\b", ttgir))
    assert len(found) == written, f"{name}: of {written} products, {len(found)} are written as known"
    for terms, width in found:
        assert int(terms) >= 4 * int(width), f"{name}: a product over {terms} terms, {width} to a thread"


def instructions(ptx: str, name: str) -> str:
    """PTX without a kernel's name, line numbers, debugging sections and comments."""
    ptx = re.sub(r"^\s*\.section\s+\.debug_\w+\s*\{.*?^\s*\}", "", ptx, flags=re.MULTILINE | re.DOTALL)
    lines = [re.sub(r"//.*", "", line).rstrip() for line in ptx.splitlines()]
    lines = [line for line in lines if line.strip() and not re.match(r"\s*\.(loc|file)\b|\$L__tmp\d+:", line)]
    return "\n".join(lines).replace(name, "kernel")


def compile_only(
    ready: Ready, tensors: tuple[Tensor, ...], floats: tuple[float, ...] = (), loose: tuple[int, ...] = ()
) -> None:
    kernel, integers, constants = ready.kernel, ready.integers, ready.constants
    names = kernel.arg_names
    signature, attributes, fixed = {}, {}, dict(constants)
    given = [*tensors, *map(float, floats), *integers, *loose]
    assert len(given) + len(constants) == len(names), kernel.__name__
    assert list(constants) == names[len(given) :], kernel.__name__
    for place, (name, value) in enumerate(zip(names, given, strict=False)):
        special = place < len(given) - len(loose)
        if isinstance(value, Tensor):
            signature[name] = TYPES[value.dtype]
            attributes[(place,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[name] = "fp32"
        elif special and value == 1:
            signature[name], fixed[name] = "constexpr", 1
        else:
            signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if special and value % 16 == 0:
                attributes[(place,)] = [["tt.divisibility", 16]]
    signature |= dict.fromkeys(constants, "constexpr")
    source = ASTSource(kernel, signature, fixed, attributes)
    made = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=ready.options)
    wanted = made.metadata.shared
    assert wanted <= SHARED[architecture], f"{kernel.__name__} wants {wanted} bytes, {fixed}"
    shared[kernel.__name__] = max(wanted, shared.get(kernel.__name__, 0))
    compiled[kernel.__name__] = compiled.get(kernel.__name__, 0) + 1
    if architecture >= 80:  # older GPUs have no such products, and theirs are written otherwise
        check_products(kernel.__name__, made.asm["ttgir"])
    text = f"{instructions(made.asm['ptx'], kernel.__name__)}\n{made.metadata.shared} {ready.options}"
    found = digests.setdefault(kernel.__name__, [])
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    found += [] if digest in found else [digest]


def leave_padding_plain() -> None:
    """Let padded queries have plain attention's outputs, as those of attached models have."""
    attend = AttentionMap.attend

    def changed(self: AttentionMap, call: overt.AttentionCall, *rest: Any) -> Tensor | None:
        return attend(self, replace(call, left_alone="sdpa"), *rest)

    AttentionMap.attend = changed  # type: ignore[method-assign]


def compile_pixels(dtype: torch.dtype) -> None:
    """Compile what an attention-augmented convolution runs, of ResNet-50 and of ResNet-34 on small images."""
    for channels, key_channels, value_channels, side in ((128, 160, 16, 28), (64, 32, 16, 16)):
        layer = overt.vision.AugmentedConv2d(
            channels, channels, 3, heads=8, key_channels=key_channels, value_channels=value_channels,
            size=(side, side), pool=2, mechanisms=[overt.Evolving()], layer=0, start=True,
        )  # fmt: skip
        x = torch.randn(2, channels, side, side, requires_grad=True)
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            layer(x, overt.Chain()).float().sum().backward()
    print(" ".join(f"{name}×{count}" for name, count in sorted(compiled.items())))


def compile_states(dtype: torch.dtype) -> None:
    """Compile what carries rows down through queries and keys: of 32 layers, and of each of 32 heads."""
    carry.shared_memory = lambda _: SHARED[architecture]
    carry.has_tf32 = lambda _: architecture >= 80
    window = Sight(causal=True, window=64, keys=torch.ones(1, 200) > 0)
    chunks = Sight(causal=True, chunk=64)
    everything = itertools.product((Sight(), Sight(causal=True), window, chunks), (128,), (32,))
    sizes = itertools.product((Sight(causal=True),), (64, 128, 256), (32, 128, 1024))
    for sight, width, rows in (*everything, *sizes):
        query, key = torch.randn(1, 32, 200, width, dtype=dtype), torch.randn(1, 8, 200, width, dtype=dtype)
        level = StateLevel(Asked(query, key, 0.1, sight))
        assert level._unfit() is None
        level.apply(torch.rand(1, rows, 200))
    print(" ".join(f"{name}×{count} ≤{shared[name]:,} B" for name, count in sorted(compiled.items())))


def main(form: str, dtype: torch.dtype = torch.bfloat16, variant: str = "plain", tokens: int = 128) -> None:
    Ready.run = compile_only  # type: ignore[method-assign]
    backend.KERNEL_DEVICES = {"cpu"}
    if "left" in variant:
        leave_padding_plain()
    torch.manual_seed(0)
    if form in (PIXELS, STATES):
        (compile_pixels if form == PIXELS else compile_states)(dtype)
        return
    kind = overt.Decoder if "causal" in variant else overt.Encoder
    model = kind(12 * 64, 12, 2, FORMS[form], dropout=0.1 if "dropout" in variant else 0.0, hidden=64)
    x = torch.randn(2, tokens, 12 * 64, requires_grad=True)
    ends = variant == "padded" or "left" in variant
    padding = torch.arange(tokens) >= torch.tensor([[max(1, tokens - 7)], [tokens]]) if ends else None
    chain = overt.Chain(step=torch.tensor(0))
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        loss = model(x, padding, chain=chain).float().sum() + chain.penalty()
    loss.backward()
    print(" ".join(f"{name}×{count}" for name, count in sorted(compiled.items())))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Compile GPU kernels without a GPU.")
    parser.add_argument("form", choices=[*FORMS, PIXELS, STATES])
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--variant", choices=VARIANTS, default="plain")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--architecture", type=int, choices=[*SHARED], default=architecture)
    parser.add_argument("--digest", action="store_true", help="print digests of the kernels' instructions")
    asked = parser.parse_args()
    architecture = asked.architecture
    main(asked.form, getattr(torch, asked.dtype), asked.variant, asked.tokens)
    if asked.digest:
        print("\n".join(f"{name} {' '.join(found)}" for name, found in sorted(digests.items())))

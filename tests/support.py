"""Writes `docs/support.md` from what the tests recorded: family × feature = works, refused, not tested."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

# `make families` (tests/sweep.py) writes the last part of the page, which begins with this heading.
FAMILIES_TITLE = "## Every model type of transformers"
HEAD = """\
# Supported model families

Which Hugging Face models [`overt.attach`](attach.md) works with. The 25 families of the first tables are
tested most thoroughly; [every model type](#every-model-type-of-transformers) has been checked for the most
important properties. A model that does not work is refused, with an error that gives the reason. Which other
PyTorch models can be traced is said [further down](#other-pytorch-models).

`make support` generates this part of the page from the results of the tests; do not edit it by hand. A cell
says *works* because a test (a function of `tests/test_battery.py`, which defines the feature) passed on a
small random model of that family, with transformers {transformers} and torch {torch}. An empty cell
means that the feature does not apply to the family.
"""
SOME = """
## Tested on some families only

The tests of these features use the families named here, and no others.

| feature | works with |
|---|---|
"""
REFUSED = """
## Refused

| family | reason |
|---|---|
"""

OTHERS = """
## Other PyTorch models

`overt.trace` [recognises attention](trace.md#any-other-pytorch-model) in models that neither transformers nor
Overt dispatches. Where a package is named, `make test-peers` compares with the weights that the package
returns itself, in the version of `constraints.txt`; the others are small copies of code, compared with
weights by hand (`tests/test_recognised.py`, `tests/test_recognised_layouts.py`,
`tests/test_recognised_places.py`). The last column says whether [long inputs](trace.md#long-inputs) are
traced from queries and keys (`tests/test_recognised_states.py`); *maps* means that maps must fit `memory=`.

| model | how it attends | tested on | `overt.trace` | long inputs |
|---|---|---|---|---|
| nanoGPT | `scaled_dot_product_attention`, `is_causal` | a copy | works | works |
| minGPT | softmax, dropout, `@ v` | a copy | works | maps |
| DINO | softmax, `@ v`, without a mask | a copy | works | maps |
| a cache of keys and values | `scaled_dot_product_attention`, in one pass | a copy | works | works |
| torchtune | `scaled_dot_product_attention`, grouped-query heads, cross-attention | a copy | works | works |
| fairseq | batch and heads in one axis, tokens first | a copy | works | maps |
| SAGAN | softmax, `@ v`, over pixels, by convolutions | a copy | works | maps |
| FlexAttention | `flex_attention`, also compiled, `block_mask`, `score_mod` | a copy | works | works (3) |
| decoders of x-transformers (1) | softmax and `einsum` | x-transformers | works | maps (2) |
| encoders of x-transformers, padded | the same, or torch's attention | x-transformers | works | maps (2) |
| encoder–decoders and images of x-transformers | softmax and `einsum` | x-transformers | works | maps |
| talking heads of x-transformers | weights made of those of several heads | x-transformers | refused |  |
| memory keys of x-transformers | keys that are not tokens | x-transformers | refused |  |
| ESM-2 | softmax and `bmm`, batch and heads in one axis | fair-esm | works | maps |
| ESM-1b | `multi_head_attention_forward` | fair-esm | works | works |
| ESM-1 | `bias_k`, a key that is not a token | fair-esm | refused |  |
| MSA Transformer | attention over rows and columns | fair-esm | refused |  |
| timm's vision transformers | as DINO or nanoGPT | timm, if it can be imported | not tried |  |
| Swin | windows, in the batch | a copy; timm, if it can be imported | refused |  |
| XCiT | attention between channels | a copy | refused |  |
| Perceiver | latents, which are not tokens | a copy | refused |  |
| PatchTST | variables in the batch | a copy | refused |  |
| Conformer, recurrent networks between layers | mix tokens beside attention | a copy | refused |  |
| token shifts, flips and means between layers | functions that mix or move tokens | a copy | refused |  |
| layers that share an earlier one's values | values of another layer | a copy | refused |  |
| linear attention | no weights of tokens | a copy | refused |  |
| a tower that runs twice | side by side | a copy; transformers | refused |  |
| a module for each head | softmax and `@ v`, side by side | a copy | refused |  |
| scripted models (`torch.jit`) | cannot be seen | a copy | refused |  |

- (1) with rotary positions, ALiBi, grouped-query heads, clamped scores, residual scores, normalised queries
  and keys, or feed-forward layers on both sides
- (2) works with `attn_flash=True`, which calls `scaled_dot_product_attention`; grouped-query heads are tested
- (3) without a `score_mod`; with one, maps must fit
"""

Record = tuple[str, str, str]


def render(
    records: Iterable[Record], features: list[str], decoding: list[str], versions: dict[str, str]
) -> str:
    """The page. `features` and `decoding` are the battery's, in order; other records are of single tests."""
    table: dict[str, dict[str, str]] = defaultdict(dict)
    single: dict[str, list[str]] = defaultdict(list)
    refused: list[tuple[str, str]] = []
    notes: list[str] = []
    for family, feature, status in records:
        if feature == "attach":
            refused.append((family, status.removeprefix("refused: ")))
        elif feature in features or feature in decoding:
            table[family][feature] = status
        else:
            single[feature].append(family)
    page = HEAD.format(**versions)
    for title, columns in (("Every family", features), ("Decoding", decoding)):
        rows = [name for name in table if any(column in table[name] for column in columns)]
        page += f"\n## {title}\n\n| | {' | '.join(columns)} |\n|---|{'---|' * len(columns)}\n"
        for name in rows:
            cells = []
            for column in columns:
                status = table[name].get(column, "")
                if status.startswith("refused: "):
                    reason = status.removeprefix("refused: ")
                    if reason not in notes:
                        notes.append(reason)
                    status = f"refused ({notes.index(reason) + 1})"
                cells.append(status)
            page += f"| {name} | {' | '.join(cells)} |\n"
    page += "\n" + "\n".join(f"- ({number}) {reason}" for number, reason in enumerate(notes, 1)) + "\n"
    page += SOME + "".join(f"| {feature} | {', '.join(names)} |\n" for feature, names in single.items())
    page += REFUSED + "".join(f"| {family} | {reason} |\n" for family, reason in refused)
    return page + OTHERS


def write(path: Path, page: str) -> None:
    """Write the page, and keep the part that `make families` wrote."""
    _, title, rest = (path.read_text() if path.exists() else "").partition(FAMILIES_TITLE)
    path.write_text(f"{page}\n{title}{rest}" if title else page)

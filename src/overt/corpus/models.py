"""Models by their path: hashes of their files, and loading without surprises."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from overt.attaching.loading import open_saved
from overt.attaching.state import AttachedState
from overt.corpus.reading import update_from_file
from overt.mechanisms.mechanism import as_dict

# Files that decide what a model computes: weights, configs and those of tokenizers.
SUFFIXES = {
    ".safetensors",
    ".bin",
    ".json",
    ".txt",
    ".model",
    ".vocab",
    ".spm",
    ".bpe",
    ".tiktoken",
    ".jinja",
}


def hash_of(name: str) -> str:
    """A hash of the files of a model's folder; of a model on the hub, its commit."""
    folder = Path(name)
    local = not name or name.startswith((".", "~", os.sep)) or folder.exists()
    if not local:
        return f"commit {_commit(name)}"
    if not (folder / "config.json").is_file():
        inside = folder / "model"  # of the folder of a run
        hint = f": {inside} is one" if (inside / "config.json").is_file() else ""
        raise FileNotFoundError(
            f"model {name or repr(name)} must be a folder with config.json, or a name on the hub{hint}"
        )
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.suffix in SUFFIXES:
            digest.update(f"{path.name} {path.stat().st_size}\n".encode())
            update_from_file(digest, path)
    return digest.hexdigest()


def _commit(name: str) -> str:
    from transformers import PreTrainedConfig

    try:
        settings, _ = PreTrainedConfig.get_config_dict(name)
    except OSError as error:
        reason = str(error).partition("\n")[0]
        raise OSError(f"model {name} is not a folder, and cannot be had from the hub: {reason}") from None
    return str(settings.get("_commit_hash"))


def hash_of_module(model: Any, tokenizer: Any) -> str:
    """A hash of a model's parameters, buffers, config and attached mechanisms, and of its tokenizer."""
    digest = hashlib.sha256()
    config = getattr(model, "config", None)
    digest.update(f"{type(model).__name__}\n{config.to_json_string() if config is not None else ''}".encode())
    for path, module in model.named_modules():
        if isinstance(module, AttachedState):  # mechanisms may have settings and no parameters
            attached = [as_dict(mechanism) for mechanism in module.mechanisms]
            digest.update(f"{path} {attached} {module.where} {module.seed} {module.temperature}\n".encode())
    for name, tensor in sorted(model.state_dict().items()):
        if isinstance(tensor, torch.Tensor):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
            digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    digest.update(_tokenizer_text(tokenizer).encode())
    return digest.hexdigest()


def _tokenizer_text(tokenizer: Any) -> str:
    """All that a tokenizer makes of texts, but not how it cut and padded the last ones, which it keeps."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return repr(tokenizer)
    return json.dumps({**json.loads(backend.to_str()), "truncation": None, "padding": None})


def open_named(name: str, expected: str, dtype: str | None) -> Any:
    """Load a model of the class that its config names, with its mechanisms, in evaluation mode.

    Args:
        name: its folder, or its name on the hub.
        expected: its hash; another is refused, as on a machine that has another model at the same path.
        dtype: of its weights; None for that of the files.
    """
    from transformers import PreTrainedConfig
    from transformers.utils import logging

    found = hash_of(name)
    if found != expected:
        raise ValueError(
            f"the model in {name} is not the one that the tracer was made with: its files have the hash "
            f"{found[:12]}…, not {expected[:12]}…"
        )
    # Its messages about unused heads are irrelevant here.
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    settings, _ = PreTrainedConfig.get_config_dict(name)
    return open_saved(name, settings, **({} if dtype is None else {"dtype": getattr(torch, dtype)}))


def limit_of(model: nn.Module, tokenizer: Any) -> int | None:
    """How many tokens a model takes: by its tokenizer, and by the positions that it has learnt."""
    limits = []
    known = getattr(tokenizer, "model_max_length", None)
    if isinstance(known, int) and known < 10**9:  # tokenizers without a limit have a huge one
        limits.append(known)
    positions = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    if isinstance(positions, int):
        limits.append(positions)
        for name, module in model.named_modules():
            table = isinstance(module, nn.Embedding) and "position" in name
            if table and module.num_embeddings == positions and module.padding_idx is not None:
                limits.append(positions - module.padding_idx - 1)  # positions start after it
    return min(limits, default=None)


@contextmanager
def cutting_the_end(tokenizer: Any) -> Iterator[None]:
    """Let a tokenizer keep the beginnings of long texts, also one that was saved to keep their ends."""
    side = getattr(tokenizer, "truncation_side", "right")
    if side == "right":
        yield
        return
    tokenizer.truncation_side = "right"
    try:
        yield
    finally:
        tokenizer.truncation_side = side

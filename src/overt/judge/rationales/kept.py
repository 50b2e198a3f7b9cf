"""What an interrupted judgement has measured, in a folder, so that the same judgement goes on from it."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from overt._files import write_whole
from overt._version import __version__
from overt.data.eraser import Prediction
from overt.judge.intervals import Interval
from overt.judge.rationales.evaluation import Rationales

if TYPE_CHECKING:
    from numpy.typing import NDArray

AFTER_SHUFFLING = "shuffled"  # no method's name
ARRAYS = ("probabilities", "without", "only", "without_spans", "only_spans")  # of a prediction


def digest_of(model: Any, tokenizer: Any, **given: Any) -> str:
    """A name for all that the numbers of a judgement depend on: the model, its weights and what is given."""
    words = {
        "overt": __version__,
        "torch": torch.__version__,
        "model": repr(model),
        "config": model.config.to_dict(),
        "tokenizer": tokenizer.backend_tokenizer.to_str(),
        "device": str(next(model.parameters()).device),
        **given,
    }
    digest = hashlib.sha256(json.dumps(words, sort_keys=True, default=str).encode())
    for name, tensor in model.state_dict().items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]


class Kept:
    """Methods that were judged before an interruption.

    Args:
        folder: of all judgements that were interrupted.
        digest: of this one, as `digest_of` gives it.
    """

    def __init__(self, folder: Path, digest: str) -> None:
        self.folder = folder / digest

    def methods(self) -> dict[str, Rationales | str]:
        """Method → what was measured, or why it does not apply, as `evaluate` takes them as `known`."""
        found: dict[str, Rationales | str] = {}
        for path in sorted(self.folder.glob("*.json")):
            read = _read(path)
            if path.stem != AFTER_SHUFFLING:
                own = read["found"]
                found[read["method"]] = own if isinstance(own, str) else rationales_from(own)
        return found

    def add(self, method: str, found: Rationales | str) -> None:
        """Keep what was measured of a method."""
        own = found if isinstance(found, str) else to_json(found)
        self._write(method.replace("/", "+"), {"method": method, "found": own})

    def shuffled(self, methods: Sequence[str]) -> dict[str, Interval] | None:
        """What was left of these methods' order of words when weights were shuffled; None if unknown."""
        path = self.folder / f"{AFTER_SHUFFLING}.json"
        read = _read(path) if path.is_file() else None
        if read is None or read["methods"] != list(methods):
            return None
        return {method: Interval(*values) for method, values in read["found"].items()}

    def add_shuffled(self, methods: Sequence[str], found: Mapping[str, Interval]) -> None:
        """Keep what was left of the order of words of these methods."""
        self._write(AFTER_SHUFFLING, {"methods": list(methods), "found": found})

    def discard(self) -> None:
        """Remove all that was kept, and folders that are then empty."""
        if not self.folder.is_dir():
            return
        shutil.rmtree(self.folder, ignore_errors=True)
        with suppress(OSError):
            for folder in (self.folder.parent, self.folder.parent.parent):
                folder.rmdir()

    def _write(self, name: str, words: Mapping[str, Any]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        write_whole(self.folder / f"{name}.json", json.dumps(words))


def to_json(found: Rationales) -> dict[str, Any]:
    """All that a method says, as plain JSON; `rationales_from` reads it."""
    return {
        "method": found.method,
        "texts": found.texts,
        "scores": [each.tolist() for each in found.scores],
        "measures": found.measures,
        "predictions": [_prediction(each) for each in found.predictions],
        "morf": found.morf.tolist(),
        "lerf": found.lerf.tolist(),
        "by_text": {name: values.tolist() for name, values in found.by_text.items()},
        "seconds": found.seconds,
    }


def rationales_from(words: Mapping[str, Any]) -> Rationales:
    """What `to_json` has written."""
    return Rationales(
        words["method"],
        words["texts"],
        [_array(each) for each in words["scores"]],
        words["measures"],
        [_prediction_from(each) for each in words["predictions"]],
        _array(words["morf"]),
        _array(words["lerf"]),
        {name: _array(values) for name, values in words["by_text"].items()},
        words["seconds"],
    )


def _prediction(found: Prediction) -> dict[str, Any]:
    words: dict[str, Any] = {"scores": found.scores.tolist(), "spans": list(found.spans)}
    words["shares"] = list(found.shares)
    for name in ARRAYS:
        value = getattr(found, name)
        words[name] = None if value is None else np.asarray(value).tolist()
    return words


def _prediction_from(words: Mapping[str, Any]) -> Prediction:
    arrays = {name: None if words[name] is None else _array(words[name]) for name in ARRAYS}
    spans = [(first, last) for first, last in words["spans"]]
    return Prediction(_array(words["scores"]), spans, shares=tuple(words["shares"]), **arrays)


def _array(values: Any) -> NDArray[np.float64]:
    return np.array(values, dtype=np.float64)


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        raise ValueError(
            f"{path}, which an interrupted run has left, cannot be read: delete {path.parent}"
        ) from None

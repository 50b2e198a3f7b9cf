"""What an interrupted judgement has measured, in a folder, so that the same judgement goes on from it."""

from __future__ import annotations

import hashlib
import json
import pickle
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from overt._files import write_whole
from overt.data.eraser import Prediction
from overt.judge.intervals import Interval
from overt.judge.rationales.evaluation import Rationales

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from overt.judge.rationales.words import Text

FORMAT = 1  # of the files
AFTER_SHUFFLING = "+shuffled"  # no method's name
ARRAYS = ("probabilities", "without", "only", "without_spans", "only_spans")  # of a prediction
# Of files that were changed by hand, or are not of this format.
UNREADABLE = (ValueError, TypeError, KeyError, IndexError, AttributeError)


def digest_of(model: Any, tokenizer: Any, read: Sequence[Text], **given: Any) -> str:
    """A name for all that the numbers of a method depend on.

    Args:
        model: the classifier.
        tokenizer: its tokenizer.
        read: the texts, as the classifier sees them.
        given: what else there is, as plain JSON.
    """
    words = {
        "format": FORMAT,
        "model": repr(model),
        "config": repr(sorted(model.config.to_dict().items())),
        "tokenizer": [tokenizer.backend_tokenizer.to_str(), repr(sorted(tokenizer.init_kwargs.items()))],
        "special": repr(sorted(tokenizer.special_tokens_map.items())),
        "device": str(next(model.parameters()).device),
        "texts": [[text.words, text.pieces, text.starts, text.query, text.cut] for text in read],
        **given,
    }
    digest = hashlib.sha256(json.dumps(words, sort_keys=True, default=str).encode())
    for name, tensor in model.state_dict().items():
        digest.update(name.encode())
        if isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided and not tensor.is_quantized:
            digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)
        else:
            digest.update(pickle.dumps(tensor))
    return digest.hexdigest()[:16]


class Kept:
    """Methods that were judged before an interruption.

    Args:
        folder: of this judgement; None to keep nothing.
        tell: told once if nothing can be written.
    """

    def __init__(self, folder: Path | None, tell: Callable[[str], object] = lambda _words: None) -> None:
        self.folder, self.tell = folder, tell

    def names(self, methods: Sequence[str]) -> list[str]:
        """Those of these methods that are kept."""
        return [method for method in methods if (path := self._path(method)) is not None and path.is_file()]

    def methods(self, methods: Sequence[str]) -> dict[str, Rationales | str]:
        """Method → what was measured, or why it does not apply, as `evaluate` takes them as `known`.

        Args:
            methods: of which those are left out that are not kept, or cannot be read.
        """
        found: dict[str, Rationales | str] = {}
        for method in self.names(methods):
            with suppress(*UNREADABLE):
                own = self._read(method)
                found[method] = own if isinstance(own, str) else rationales_from(own)
        return found

    def add(self, method: str, found: Rationales | str) -> None:
        """Keep what was measured of a method."""
        self._write(method, found if isinstance(found, str) else to_json(found))

    def shuffled(self, methods: Sequence[str]) -> dict[str, Interval] | None:
        """What was left of these methods' order of words when weights were shuffled; None if unknown."""
        if self.names([AFTER_SHUFFLING]):
            with suppress(*UNREADABLE):
                read = self._read(AFTER_SHUFFLING)
                if read["methods"] == list(methods):
                    return {method: Interval(*values) for method, values in read["found"].items()}
        return None

    def add_shuffled(self, methods: Sequence[str], found: Mapping[str, Interval]) -> None:
        """Keep what was left of the order of words of these methods."""
        self._write(AFTER_SHUFFLING, {"methods": list(methods), "found": found})

    def discard(self, methods: Sequence[str]) -> None:
        """Remove what is kept of these methods, and folders that are then empty."""
        if self.folder is None or not self.folder.is_dir():
            return
        with suppress(OSError):
            for name in (*methods, AFTER_SHUFFLING):
                (self.folder / _file_of(name)).unlink(missing_ok=True)
            for folder in (self.folder, self.folder.parent, self.folder.parent.parent):
                folder.rmdir()  # an error if it is not empty

    def _path(self, name: str) -> Path | None:
        return None if self.folder is None else self.folder / _file_of(name)

    def _read(self, name: str) -> Any:
        path = self._path(name)
        assert path is not None
        return json.loads(path.read_text(encoding="utf-8"))

    def _write(self, name: str, words: Mapping[str, Any] | str) -> None:
        if (path := self._path(name)) is None:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, json.dumps(words))
        except OSError as error:  # the judgement is worth more than its copy
            self.tell(f"what is measured is not kept, should this be interrupted: {error}")
            self.folder = None


def _file_of(name: str) -> str:
    return f"{name.replace('/', '+')}.json"


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

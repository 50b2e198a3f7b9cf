"""What may be asked of the server: requests checked, pictures opened, traces made."""

from __future__ import annotations

import base64
import hashlib
import hmac
import io
import json
import re
import secrets
import time
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import urlencode

from overt._extras import need
from overt.tracing.methods.method import methods as known_methods
from overt.tracing.mixing.mixing import mixing_of, mixings
from overt.tracing.result import Trace
from overt.tracing.tracer import everything, trace
from overt.view.pages import page
from overt.view.server.limits import GoneError, Limits, RefusedError, Served
from overt.view.server.work import StillWanted

FORMATS = {
    "image/png": "PNG",
    "image/jpeg": "JPEG",
    "image/webp": "WEBP",
    "image/gif": "GIF",
    "image/bmp": "BMP",
}
LINK = 6000  # characters; longer addresses are cut by somebody on their way
SAMPLES = 10  # of the posterior of a Bayesian model
CELLS = 3 * 10**6  # of all heads' maps; beyond, only their means are sent
TRACING = 0.5  # share of the time of a request that a mixing which runs the model again may take
RUNNING = 0.05  # share of the time of a request that a method which runs the model may take
DEEPEST = 10**4  # layers that anybody may ask for
# Names of pictures cannot be guessed, not even by somebody who has the same picture.
SECRET = secrets.token_bytes(32)
# Anything that looks like an absolute path, in whatever a library says.
PATHS = re.compile(r"(?:[A-Za-z]:)?[\\/](?:[^\s\\/:*?\"'<>|]+[\\/])+[^\s\\/:*?\"'<>|,;)]*")


def picture_key(name: str) -> tuple[str, str]:
    """By which the answer to an image is kept, from the name in its link."""
    return "picture", name


@dataclass(frozen=True)
class Ask:
    """One request that has been checked.

    Attributes:
        served: the model.
        text: of a text model.
        picture: the bytes of an image.
        format: of the image, as PIL calls it.
        decoder: what the decoder is fed.
        methods: to show.
        layers: how many of the last to show; None for all.
        mixing: what the maps are.
    """

    served: Served
    text: str = ""
    picture: bytes = b""
    format: str = ""
    decoder: str | None = None
    methods: tuple[str, ...] = field(default_factory=lambda: tuple(known_methods("maps")))
    layers: int | None = None
    mixing: str = "attention"

    def key(self) -> Hashable:
        """Equal for requests with equal answers."""
        options = (self.served.name, self.decoder, self.methods, self.layers, self.mixing)
        return self._picture() if self.picture else (self.text, *options)

    def _picture(self) -> tuple[str, str]:
        whole = hmac.new(SECRET, self.picture, hashlib.sha256)
        options = (self.served.name, self.format, self.decoder, self.methods, self.layers, self.mixing)
        whole.update(repr(options).encode())
        return picture_key(base64.urlsafe_b64encode(whole.digest()[:18]).decode("ascii"))

    def link(self) -> str | None:
        """The address that asks for the same; None where it would be too long."""
        if self.picture:
            return f"/?{urlencode([self._picture()])}"
        fields = [("model", self.served.name), ("text", self.text)]
        fields += [] if self.decoder is None else [("decoder", self.decoder)]
        fields += (
            [("method", method) for method in self.methods]
            if self.methods != tuple(known_methods("maps"))
            else []
        )
        fields += [] if self.layers is None else [("layers", str(self.layers))]
        fields += [] if self.mixing == "attention" else [("mixing", self.mixing)]
        link = f"/?{urlencode(fields)}"
        return link if len(link) <= LINK else None


def from_json(body: bytes, models: Mapping[str, Served], limits: Limits) -> Ask:
    """A request with text."""
    try:
        found = json.loads(body.decode("utf-8"), parse_constant=_no_constant)
    except RecursionError:
        raise RefusedError(400, "the body is JSON nested too deep") from None
    except ValueError as error:
        line = str(error).splitlines()[0]
        why = line if isinstance(error, json.JSONDecodeError) else "not UTF-8, or a number without end"
        raise RefusedError(400, f"the body must be JSON ({why[:100]})") from None
    if not isinstance(found, dict):
        raise RefusedError(400, f"the body must be a JSON object, got {_kind(found)}")
    fields = ("model", "text", "decoder", "methods", "layers", "mixing")
    _check_known(found, fields)
    served = _served(found.get("model"), models)
    if served.kind != "text":
        raise RefusedError(400, f"model {served.name!r} takes an image as the body, got JSON")
    text = _text("text", found.get("text"), limits)
    return Ask(served, text, **_common(found, served, limits))


def from_image(
    body: bytes, kind: str, query: Mapping[str, str], models: Mapping[str, Served], limits: Limits
) -> Ask:
    """A request whose body is an image, with everything else in the query string."""
    found: dict[str, Any] = dict(query)
    _check_known(found, ("model", "decoder", "methods", "layers", "mixing"))
    served = _served(found.get("model"), models)
    if served.kind != "image":
        raise RefusedError(400, f"model {served.name!r} takes text as JSON, got an image")
    if not body:
        raise RefusedError(400, "the body must be an image, got nothing")
    if "methods" in found:
        found["methods"] = found["methods"].split(",")
    if "layers" in found:
        told = found["layers"]
        found["layers"] = int(told) if told.isascii() and told.isdecimal() and len(told) < 9 else told
    return Ask(served, picture=body, format=FORMATS[kind], **_common(found, served, limits))


def _no_constant(name: str) -> Any:
    raise json.JSONDecodeError(f"{name} is no number of JSON", name, 0)


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a truth value", type(None): "null"}
    return names.get(type(value), "a number")


def _check_known(found: Mapping[str, Any], fields: tuple[str, ...]) -> None:
    for name in found:
        if name not in fields:
            raise RefusedError(400, f"there is no field {_shown(name)}; fields: {', '.join(fields)}")


def _shown(value: str) -> str:
    """What came, short and in printable letters."""
    return ascii(value if len(value) <= 60 else value[:60] + "…")


def _served(name: Any, models: Mapping[str, Served]) -> Served:
    if name is None and len(models) == 1:
        return next(iter(models.values()))
    if not isinstance(name, str):
        raise RefusedError(400, f"model must be a string, got {_kind(name)}")
    # Only ever a look into what was named at start: a name is no path, and nothing is loaded here.
    if name not in models:
        raise RefusedError(404, f"there is no model {_shown(name)} here; models: {', '.join(models)}")
    return models[name]


def _text(name: str, text: Any, limits: Limits) -> str:
    if not isinstance(text, str):
        raise RefusedError(400, f"{name} must be a string, got {_kind(text)}")
    if len(text) > limits.characters:
        raise RefusedError(
            413,
            f"{name} must have at most {limits.tokens} tokens, and {limits.characters:,} characters; "
            f"got {len(text):,} characters",
        )
    if "\0" in text:
        raise RefusedError(400, f"{name} must hold no NUL")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise RefusedError(400, f"{name} must be Unicode, got half of a surrogate pair") from None
    if not text.strip():
        raise RefusedError(400, f"{name} must hold words, got nothing")
    return text


def _common(found: Mapping[str, Any], served: Served, limits: Limits) -> dict[str, Any]:
    """Decoder, methods, layers and mixing."""
    decoder, methods = found.get("decoder"), found.get("methods")
    if decoder is not None:
        if not served.decodes:
            raise RefusedError(400, f"model {served.name!r} has no decoder to feed")
        decoder = _text("decoder", decoder, limits)
    known = known_methods()
    if methods is None:
        methods = tuple(known_methods("maps"))  # what runs the model has to be asked for
    wrong = not isinstance(methods, list | tuple) or not methods or len(methods) > len(known)
    if wrong or not all(isinstance(one, str) and one in known for one in methods):
        raise RefusedError(400, f"methods must be some of {', '.join(known)}")
    layers, mixing = found.get("layers"), found.get("mixing")
    if layers is not None and (isinstance(layers, bool) or not isinstance(layers, int)):
        raise RefusedError(400, "layers must be a whole number, how many of the last to show")
    if layers is not None and not 1 <= layers <= DEEPEST:
        raise RefusedError(400, f"layers must be at least 1 and at most {DEEPEST}")
    if mixing is not None and (not isinstance(mixing, str) or mixing not in mixings()):
        raise RefusedError(400, f"mixing must be one of {', '.join(mixings())}")
    chosen = tuple(one for one in known if one in methods)  # one order, so that equal requests are equal
    return {"decoder": decoder, "methods": chosen, "layers": layers, "mixing": mixing or "attention"}


def opened(picture: bytes, kind: str, limits: Limits) -> Any:
    """The first frame of an image, upright, as PIL has it; nothing but the format that was told is tried."""
    need("PIL", "view")
    from PIL import Image, ImageOps

    most = f"an image must have at most {limits.pixels:,} pixels"
    bombs = (Image.DecompressionBombError, Image.DecompressionBombWarning)
    try:
        image = Image.open(io.BytesIO(picture), formats=[kind])
        width, height = image.size
    except bombs:
        raise RefusedError(413, f"{most}, this has many more") from None
    except Exception:  # decoders raise whatever they meet
        raise RefusedError(400, f"the body must be a {kind} image that can be read") from None
    # The size stands in the head: a bomb is refused before it is unpacked.
    if width * height > limits.pixels:
        raise RefusedError(413, f"{most}, got {width} × {height}")
    try:
        image.load()
        return ImageOps.exif_transpose(image).convert("RGB")
    except Exception:
        raise RefusedError(400, f"the {kind} image is damaged and cannot be read") from None


def made(ask: Ask, limits: Limits, wanted: StillWanted) -> bytes:
    """Trace, and make the answer: {index, blocks, link, seconds}. Runs in a thread of its own."""
    with ask.served.turn:
        return _made(ask, limits, wanted)


def _made(ask: Ask, limits: Limits, wanted: StillWanted) -> bytes:
    if not wanted():
        raise GoneError
    began = time.monotonic()
    served = ask.served
    inputs: Any = ask.text
    if ask.picture:
        inputs = opened(ask.picture, ask.format, limits)
    else:
        _check_tokens(served, "text", ask.text, limits)
    if ask.decoder is not None:
        _check_tokens(served, "decoder", ask.decoder, limits)
    given = {"tokenizer": served.tokenizer, "processor": served.processor, "decoder": ask.decoder}
    kind = mixing_of(ask.mixing)
    try:
        plain = trace(served.model, inputs, **given) if kind.passes else None
        spent = time.monotonic() - began
        if plain is not None and spent * kind.passes * plain.mask.shape[1] > limits.seconds * TRACING:
            raise RefusedError(
                422,
                f"{kind.title} of {plain.mask.shape[1]} tokens would take the server too long: {kind.cost}",
            )
        # Where each sample would run the model for every token, there are none.
        kept = everything(served.model, ask.mixing, 0 if kind.passes else SAMPLES)
        traced = trace(served.model, inputs, mixing=ask.mixing, **given, **kept)
        if not wanted():
            raise GoneError
        slow = _slow(ask.methods, traced, spent if plain is not None else time.monotonic() - began, limits)
        asked = [one for one in ask.methods if one not in slow]
        shown = page(_lighter(traced), title=served.name, methods=asked, progress=False)
        left = {name: one.title for name, one in known_methods().items() if name not in ask.methods}
        for entry in shown.index["traces"]:
            entry["missing"] |= {name: f"{title} was not asked for" for name, title in left.items()} | slow
    except (ValueError, TypeError, NotImplementedError) as error:
        raise RefusedError(422, clean(str(error), served)) from error
    blocks = shown.blocks if ask.layers is None else _last(shown.index, shown.blocks, ask.layers)
    answer = {
        "index": shown.index,
        "blocks": [base64.b64encode(block).decode("ascii") for block in blocks],
        "link": ask.link(),
        "seconds": round(time.monotonic() - began, 3),
    }
    return json.dumps(answer, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def _slow(methods: Sequence[str], traced: Trace, spent: float, limits: Limits) -> dict[str, str]:
    """Methods that would run the model for too long, with a line on each."""
    tokens, found = traced.mask.shape[1], {}
    for name, method in known_methods("model").items():
        if name in methods and spent * max(1, method.cost.passes * tokens) > limits.seconds * RUNNING:
            found[name] = f"{method.title} of {tokens} tokens would take the server too long"
    return found


def _lighter(traced: Trace) -> Trace:
    """The trace without its single heads, where they are more than a page wants to be sent."""
    groups = {"maps": traced.maps, "encoder_maps": traced.encoder_maps, "cross": traced.cross}
    if sum(cells.numel() for maps in groups.values() for cells in maps) <= CELLS:
        return traced
    means = {
        name: [cells.mean(dim=1) if cells.dim() == 4 else cells for cells in maps]
        for name, maps in groups.items()
    }
    return replace(traced, maps=means["maps"], encoder_maps=means["encoder_maps"], cross=means["cross"])


def _last(index: dict[str, Any], blocks: list[bytes], count: int) -> list[bytes]:
    """The blocks of each field's last layers, which the index is made to point to; the others become null."""
    kept: list[bytes] = []
    for entry in index["traces"]:
        for layers in entry["fields"].values():
            for number, about in enumerate(layers):
                if about is None:
                    continue
                if number < len(layers) - count:
                    layers[number] = None
                else:
                    kept.append(blocks[about["at"]])
                    about["at"] = len(kept) - 1
        if entry["layers"] > count:
            entry["missing"]["layers"] = f"only the last {count} of {entry['layers']} layers were asked for"
    return kept


def _check_tokens(served: Served, name: str, text: str, limits: Limits) -> None:
    try:
        count = len(served.tokenizer(text)["input_ids"])
    except Exception as error:  # a tokenizer's own, whatever it is
        raise RefusedError(422, f"{name} cannot be cut into tokens by this model's tokenizer") from error
    if count > limits.tokens:
        raise RefusedError(413, f"{name} must have at most {limits.tokens} tokens, got {count}")


def clean(line: str, served: Served) -> str:
    """The first line of an error, without anything that is only this machine's."""
    line = line.strip().splitlines()[0][:1000] if line.strip() else "the model cannot trace this"
    for secret, name in served.secrets.items():
        line = line.replace(secret, name)
    return PATHS.sub("…", line)[:300]

"""Requests for traces: checking them, opening pictures, and computing the answers."""

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
from overt.tracing.generation import LENGTH, UNFINISHED, Generation, WrittenToken, ends_of, output_text
from overt.tracing.kept_rows import METHODS
from overt.tracing.methods.method import methods as known_methods
from overt.tracing.mixing.mixing import mixing_of, mixings
from overt.tracing.result import Trace
from overt.tracing.tracer import everything, trace
from overt.view.index import printable, short
from overt.view.pages import page
from overt.view.server.limits import GoneError, Limits, RefusedError, Served
from overt.view.server.work import StillWanted, Tell

FORMATS = {
    "image/png": "PNG",
    "image/jpeg": "JPEG",
    "image/webp": "WEBP",
    "image/gif": "GIF",
    "image/bmp": "BMP",
}
LINK = 6000  # characters; longer addresses may be cut in transit
SAMPLES = 10  # posterior samples of a Bayesian model
CELLS = 3 * 10**6  # of all heads' maps; above this, only their means are sent
TRACING = 0.5  # share of a request's time for a mixing that runs the model again
RUNNING = 0.05  # share of a request's time for a method that runs the model
DEEPEST = 10**4  # layers that a request may ask for
# Names of pictures cannot be guessed, not even by someone who has the same picture.
SECRET = secrets.token_bytes(32)
# Anything in a library's message that looks like an absolute path.
PATHS = re.compile(r"(?:[A-Za-z]:)?[\\/](?:[^\s\\/:*?\"'<>|]+[\\/])+[^\s\\/:*?\"'<>|,;)]*")


def picture_key(name: str) -> tuple[str, str]:
    """Cache key of the answer for an image, from the name in its link."""
    return "picture", name


@dataclass(frozen=True)
class TraceRequest:
    """A checked request for a trace.

    Attributes:
        served: the model.
        text: the input of a text model.
        picture: the bytes of an image.
        format: PIL's name for the image's format.
        decoder: the decoder's input.
        methods: methods to show.
        layers: how many of the last layers to show; None for all.
        mixing: what the maps hold.
        generate: most tokens that the model is to write after the text; None to trace the text itself.
    """

    served: Served
    text: str = ""
    picture: bytes = b""
    format: str = ""
    decoder: str | None = None
    methods: tuple[str, ...] = field(default_factory=lambda: tuple(known_methods("maps")))
    layers: int | None = None
    mixing: str = "attention"
    generate: int | None = None

    def key(self) -> Hashable:
        """Equal for requests with equal answers."""
        options = (self.served.name, self.decoder, self.methods, self.layers, self.mixing, self.generate)
        return self._picture() if self.picture else (self.text, *options)

    def _picture(self) -> tuple[str, str]:
        whole = hmac.new(SECRET, self.picture, hashlib.sha256)
        options = (self.served.name, self.format, self.decoder, self.methods, self.layers, self.mixing)
        whole.update(repr(options).encode())
        return picture_key(base64.urlsafe_b64encode(whole.digest()[:18]).decode("ascii"))

    def link(self) -> str | None:
        """The address of the same request; None if it would be too long."""
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
        fields += [] if self.generate is None else [("generate", str(self.generate))]
        link = f"/?{urlencode(fields)}"
        return link if len(link) <= LINK else None


def fields_of(body: bytes) -> dict[str, Any]:
    """The fields of a request in JSON."""
    try:
        fields = json.loads(body.decode("utf-8"), parse_constant=_no_constant)
    except RecursionError:
        raise RefusedError(400, "the body is JSON nested too deeply") from None
    except ValueError as error:
        line = str(error).splitlines()[0]
        why = line if isinstance(error, json.JSONDecodeError) else "not UTF-8, or a number that is too long"
        raise RefusedError(400, f"the body must be JSON ({why[:100]})") from None
    if not isinstance(fields, dict):
        raise RefusedError(400, f"the body must be a JSON object, got {_kind(fields)}")
    return fields


def from_json(body: bytes, models: Mapping[str, Served], limits: Limits) -> TraceRequest:
    """A request with text."""
    fields = fields_of(body)
    check_known(fields, ("model", "text", "decoder", "methods", "layers", "mixing", "generate"))
    served = served_of(fields.get("model"), models)
    if served.kind != "text":
        raise RefusedError(400, f"model {served.name!r} takes an image as the body, got JSON")
    text = text_of("text", fields.get("text"), limits)
    common = _common(fields, served, limits)
    return TraceRequest(
        served, text, **common, generate=_length(fields.get("generate"), common, limits, served)
    )


def _length(generate: Any, common: Mapping[str, Any], limits: Limits, served: Served) -> int | None:
    """How many tokens a model is to write, checked."""
    if generate is None:
        return None
    whole = isinstance(generate, int) and not isinstance(generate, bool)
    if not whole or not 1 <= generate <= limits.tokens:
        raise RefusedError(400, f"generate must be a whole number from 1 to {limits.tokens}")
    if not served.writes:
        raise RefusedError(400, f"model {served.name!r} cannot generate after a text: leave generate out")
    kind = mixing_of(common["mixing"])
    if kind.passes:
        raise RefusedError(400, f"{kind.title} of generated words would take the server too long")
    return int(generate)


def from_image(
    body: bytes, kind: str, query: Mapping[str, str], models: Mapping[str, Served], limits: Limits
) -> TraceRequest:
    """A request whose body is an image, with everything else in the query string."""
    fields: dict[str, Any] = dict(query)
    check_known(fields, ("model", "decoder", "methods", "layers", "mixing"))
    served = served_of(fields.get("model"), models)
    if served.kind != "image":
        raise RefusedError(400, f"model {served.name!r} takes text as JSON, got an image")
    if not body:
        raise RefusedError(400, "the body must be an image, got nothing")
    if "methods" in fields:
        fields["methods"] = fields["methods"].split(",")
    if "layers" in fields:
        count = fields["layers"]
        fields["layers"] = int(count) if count.isascii() and count.isdecimal() and len(count) < 9 else count
    return TraceRequest(served, picture=body, format=FORMATS[kind], **_common(fields, served, limits))


def _no_constant(name: str) -> Any:
    raise json.JSONDecodeError(f"{name} is not a JSON number", name, 0)


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a truth value", type(None): "null"}
    return names.get(type(value), "a number")


def check_known(given_fields: Mapping[str, Any], fields: tuple[str, ...]) -> None:
    """Refuse fields that a request does not have."""
    for name in given_fields:
        if name not in fields:
            raise RefusedError(400, f"there is no field {_shown(name)}; fields: {', '.join(fields)}")


def _shown(value: str) -> str:
    """A value from the request, shortened, in printable ASCII."""
    return ascii(value if len(value) <= 60 else value[:60] + "…")


def served_of(name: Any, models: Mapping[str, Served]) -> Served:
    """The model that a request names; a single model need not be named."""
    if name is None and len(models) == 1:
        return next(iter(models.values()))
    if not isinstance(name, str):
        raise RefusedError(400, f"model must be a string, got {_kind(name)}")
    # Only a lookup among the models given at start: a name is not a path, and nothing is loaded here.
    if name not in models:
        raise RefusedError(404, f"there is no model {_shown(name)} here; models: {', '.join(models)}")
    return models[name]


def text_of(name: str, text: Any, limits: Limits) -> str:
    """A field that is a text with words, within the limits."""
    if not isinstance(text, str):
        raise RefusedError(400, f"{name} must be a string, got {_kind(text)}")
    if len(text) > limits.characters:
        raise RefusedError(
            413,
            f"{name} must have at most {limits.tokens} tokens and {limits.characters:,} characters; "
            f"got {len(text):,} characters",
        )
    if "\0" in text:
        raise RefusedError(400, f"{name} must not contain NUL")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise RefusedError(400, f"{name} must be Unicode, got half of a surrogate pair") from None
    if not text.strip():
        raise RefusedError(400, f"{name} must contain words, got nothing")
    return text


def _common(fields: Mapping[str, Any], served: Served, limits: Limits) -> dict[str, Any]:
    """Decoder, methods, layers and mixing."""
    decoder, methods = fields.get("decoder"), fields.get("methods")
    if decoder is not None:
        if not served.decodes:
            raise RefusedError(400, f"model {served.name!r} has no decoder that takes a text")
        decoder = text_of("decoder", decoder, limits)
    known = known_methods()
    if methods is None:
        methods = tuple(known_methods("maps"))  # methods that run the model must be requested
    wrong = not isinstance(methods, list | tuple) or not methods or len(methods) > len(known)
    if wrong or not all(isinstance(name, str) and name in known for name in methods):
        raise RefusedError(400, f"methods must be a list of one or more of {', '.join(known)}")
    layers, mixing = fields.get("layers"), fields.get("mixing")
    if layers is not None and (isinstance(layers, bool) or not isinstance(layers, int)):
        raise RefusedError(400, "layers must be a whole number: how many of the last layers to show")
    if layers is not None and not 1 <= layers <= DEEPEST:
        raise RefusedError(400, f"layers must be at least 1 and at most {DEEPEST}")
    if mixing is not None and (not isinstance(mixing, str) or mixing not in mixings()):
        raise RefusedError(400, f"mixing must be one of {', '.join(mixings())}")
    chosen = tuple(name for name in known if name in methods)  # one order, so that equal requests are equal
    return {"decoder": decoder, "methods": chosen, "layers": layers, "mixing": mixing or "attention"}


def open_picture(picture: bytes, kind: str, limits: Limits) -> Any:
    """The first frame of an image, upright, as a PIL image; only the given format is tried."""
    need("PIL", "view")
    from PIL import Image, ImageOps

    most = f"an image must have at most {limits.pixels:,} pixels"
    bombs = (Image.DecompressionBombError, Image.DecompressionBombWarning)
    try:
        image = Image.open(io.BytesIO(picture), formats=[kind])
        width, height = image.size
    except bombs:
        raise RefusedError(413, f"{most}, this one has many more") from None
    except Exception:  # decoders may raise anything
        raise RefusedError(400, f"the body must be a {kind} image that can be read") from None
    # The size is in the header: a decompression bomb is refused before it is unpacked.
    if width * height > limits.pixels:
        raise RefusedError(413, f"{most}, got {width} × {height}")
    try:
        image.load()
        return ImageOps.exif_transpose(image).convert("RGB")
    except Exception:
        raise RefusedError(400, f"the {kind} image is damaged and cannot be read") from None


def trace_answer(
    request: TraceRequest, limits: Limits, still_wanted: StillWanted, tell: Tell = lambda _: None
) -> bytes:
    """Trace, and build the answer: {index, blocks, link, seconds}. Runs in a separate thread.

    Args:
        request: what to trace.
        limits: of requests.
        still_wanted: whether anyone still waits.
        tell: takes lines about words as they are written: {prompt: [pieces of text]}, then for each token
            {word: its text, row: raw attention of the query that wrote it, the mean of layers and heads}.
    """
    with request.served.turn:
        return _trace_answer(request, limits, still_wanted, tell)


def _trace_answer(request: TraceRequest, limits: Limits, still_wanted: StillWanted, tell: Tell) -> bytes:
    if not still_wanted():
        raise GoneError
    began = time.monotonic()
    served = request.served
    inputs: Any = request.text
    if request.picture:
        inputs = open_picture(request.picture, request.format, limits)
    else:
        check_tokens(served, "text", request.text, limits)
    if request.decoder is not None:
        check_tokens(served, "decoder", request.decoder, limits)
    preprocessing = {"tokenizer": served.tokenizer, "processor": served.processor, "decoder": request.decoder}
    kind = mixing_of(request.mixing)
    try:
        plain = trace(served.model, inputs, **preprocessing) if kind.passes else None
        spent = time.monotonic() - began
        if plain is not None and spent * kind.passes * plain.mask.shape[1] > limits.seconds * TRACING:
            raise RefusedError(
                422,
                f"{kind.title} of {plain.mask.shape[1]} tokens would take the server too long: {kind.cost}",
            )
        # No samples if each would run the model for every token.
        options = everything(served.model, request.mixing, 0 if kind.passes else SAMPLES)
        if request.generate is not None:
            options = {"heads": options["heads"], "generate": _written(request, still_wanted, tell)}
        traced = trace(served.model, inputs, mixing=request.mixing, **preprocessing, **options)
        if not still_wanted():
            raise GoneError
        slow = _slow(
            request.methods, traced, spent if plain is not None else time.monotonic() - began, limits
        )
        if request.generate is not None:
            slow |= {
                name: f"{known_methods()[name].title} of each generated word would take the server too long"
                for name in request.methods
                if name not in METHODS and not known_methods()[name].runs_model
            }
        unfit = {name: why for name in request.methods if (why := traced.why_not(name)) is not None}
        quick = [name for name in request.methods if name not in slow and name not in unfit]
        shown = page(_lighter(traced), title=served.name, methods=quick, progress=False)
        left = {name: method.title for name, method in known_methods().items() if name not in request.methods}
        unasked = {name: f"{title} was not requested" for name, title in left.items()}
        for entry in shown.index["traces"]:
            entry["missing"] |= unasked | slow | unfit
    except (ValueError, TypeError, NotImplementedError) as error:
        raise RefusedError(422, clean(str(error), served)) from error
    blocks = shown.blocks if request.layers is None else _last(shown.index, shown.blocks, request.layers)
    answer = {
        "index": shown.index,
        "blocks": [base64.b64encode(block).decode("ascii") for block in blocks],
        "link": request.link(),
        "seconds": round(time.monotonic() - began, 3),
    }
    return _line(answer)


def newest(tokenizer: Any, before: int, ids: list[int]) -> str:
    """What the last token of an output adds to its text: nothing as long as a character is not whole.

    Args:
        tokenizer: of the model.
        before: id of the token before the output.
        ids: what was generated so far.
    """
    text, places = output_text(tokenizer, before, ids)
    return text[slice(*places[-1])].rstrip(UNFINISHED)


def _written(request: TraceRequest, still_wanted: StillWanted, tell: Tell) -> Generation:
    """How a model writes for a request: each token is told, until no one waits."""
    served, tokenizer = request.served, request.served.tokenizer
    coded = tokenizer(request.text, return_offsets_mapping=bool(getattr(tokenizer, "is_fast", False)))
    ids: list[int] = coded["input_ids"]
    spans = coded.get("offset_mapping")
    if spans is None:
        pieces = [tokenizer.decode([one]) for one in ids]
    else:  # a space before a word belongs to its token
        ends = [0, *(stop for _, stop in spans)]
        pieces = [request.text[min(ends[n], stop) : stop] for n, (_, stop) in enumerate(spans)]
    final = set(ends_of(served.model))

    def told(token: WrittenToken) -> bool:
        if len(token.ids) == 1:  # nothing was refused
            tell(_line({"prompt": [printable(piece) for piece in pieces]}))
        if token.ids[-1] not in final:
            row = token.rows.mean(dim=0).tolist() if len(token.rows) else []
            tell(_line({"word": printable(newest(tokenizer, ids[-1], token.ids)), "row": short(row)}))
        if not still_wanted():
            raise GoneError
        return True

    return Generation({LENGTH: request.generate}, told=told)


def _line(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def _slow(methods: Sequence[str], traced: Trace, spent: float, limits: Limits) -> dict[str, str]:
    """Methods that would run the model for too long, each with a line that says so."""
    tokens, lines = traced.mask.shape[1], {}
    for name, method in known_methods("model").items():
        if name in methods and spent * max(1, method.cost.passes * tokens) > limits.seconds * RUNNING:
            lines[name] = f"{method.title} of {tokens} tokens would take the server too long"
    return lines


def _lighter(traced: Trace) -> Trace:
    """The trace without its single heads, if they are too many to send."""
    groups = {"maps": traced.maps, "encoder_maps": traced.encoder_maps, "cross": traced.cross}
    if sum(cells.numel() for maps in groups.values() for cells in maps) <= CELLS:
        return traced
    means = {
        name: [cells.mean(dim=1) if cells.dim() == 4 else cells for cells in maps]
        for name, maps in groups.items()
    }
    return replace(traced, maps=means["maps"], encoder_maps=means["encoder_maps"], cross=means["cross"])


def _last(index: dict[str, Any], blocks: list[bytes], count: int) -> list[bytes]:
    """The blocks of each field's last layers; the index is changed to point to them, or to null."""
    last_blocks: list[bytes] = []
    for entry in index["traces"]:
        for layers in entry["fields"].values():
            for number, about in enumerate(layers):
                if about is None:
                    continue
                if number < len(layers) - count:
                    layers[number] = None
                else:
                    last_blocks.append(blocks[about["at"]])
                    about["at"] = len(last_blocks) - 1
        if entry["layers"] > count:
            entry["missing"]["layers"] = f"only the last {count} of {entry['layers']} layers were requested"
    return last_blocks


def check_tokens(served: Served, name: str, text: str, limits: Limits) -> None:
    """Refuse a text of too many tokens."""
    try:
        count = len(served.tokenizer(text)["input_ids"])
    except Exception as error:  # a tokenizer may raise anything
        raise RefusedError(422, f"{name} cannot be tokenized by this model's tokenizer") from error
    if count > limits.tokens:
        raise RefusedError(413, f"{name} must have at most {limits.tokens} tokens, got {count}")


def clean(line: str, served: Served) -> str:
    """The first line of an error, without paths and secrets of this machine."""
    line = line.strip().splitlines()[0][:1000] if line.strip() else "the model cannot trace this"
    for secret, name in served.secrets.items():
        line = line.replace(secret, name)
    return PATHS.sub("…", line)[:300]

"""Tokens as plain text in any script: no formulas, and fonts that have the letters."""

from __future__ import annotations

import unicodedata
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

LONGEST = 16  # letters of a token that are shown
PLAIN = 0.9  # actual width of lower-case words, as a share of `width`


def word(token: str) -> str:
    """A token shortened to a few visible letters."""
    shown = "".join("↵" if sign in "\r\n" else sign if sign.isprintable() else "�" for sign in token).strip()
    return (shown if len(shown) <= LONGEST else shown[: LONGEST - 1] + "…") or "·"


def width(text: str) -> float:
    """Approximate width of a text, in font sizes."""
    return sum(1.0 if unicodedata.east_asian_width(letter) in "WF" else 0.6 for letter in text)


def wrapped(text: str, room: float) -> str:
    """A text in two lines of about equal length if it is wider than the room, in font sizes."""
    words = text.split(" ")
    if width(text) * PLAIN <= room or len(words) == 1:
        return text
    parts = [(" ".join(words[:place]), " ".join(words[place:])) for place in range(1, len(words))]
    return "\n".join(min(parts, key=lambda lines: max(map(width, lines))))


def plainly(text: str) -> dict[str, Any]:
    """Options with which a Text shows these letters, not a formula, in fonts that have them."""
    options: dict[str, Any] = {"parse_math": False, "usetex": False}
    families = _families(text)
    return {**options, "fontfamily": families} if families else options


def _families(text: str) -> list[str]:
    """The caller's fonts, then others for letters that those lack; empty if they lack none."""
    from matplotlib import rcParams
    from matplotlib.font_manager import FontProperties, findfont, get_font

    if text.isascii():
        return []
    usual_families = list(rcParams["font.family"])
    usual = get_font(findfont(FontProperties(family=usual_families)))
    lacking = [
        sign for sign in dict.fromkeys(text) if not sign.isspace() and not usual.get_char_index(ord(sign))
    ]
    if not lacking:
        return []
    scripts = {unicodedata.name(sign, "?").split(" ")[0]: sign for sign in lacking}
    fonts = [_font_of(script, sign) for script, sign in scripts.items()]
    return [*usual_families, *dict.fromkeys(name for name in fonts if name)]


_FONTS: dict[str, str | None] = {}  # script → font; a search opens every installed font


def _font_of(script: str, letter: str) -> str | None:
    """An installed upright font that has a script's letter, DejaVu or Noto if possible."""
    if script not in _FONTS:
        _FONTS[script] = _search_font(letter)
    return _FONTS[script]


def _search_font(letter: str) -> str | None:
    from matplotlib.font_manager import fontManager, get_font

    upright = [
        font for font in fontManager.ttflist if font.style == "normal" and "Last Resort" not in font.name
    ]

    def order(font: Any) -> Any:
        liked = ("DejaVu Sans", "Noto Sans", "Noto")
        rank = next((place for place, name in enumerate(liked) if font.name.startswith(name)), len(liked))
        return rank, font.weight != 400, "Mono" in font.name, font.name

    for entry in sorted(upright, key=order):
        try:
            if get_font(entry.fname).get_char_index(ord(letter)):
                return str(entry.name)
        except (OSError, RuntimeError):  # a missing or broken font
            continue
    return None


@contextmanager
def missing_letters_pass() -> Iterator[None]:
    """Suppress warnings about letters that no font has."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"(Glyph \d+ |Matplotlib currently does not support)")
        yield

"""Tokens as they are, whatever letters they have: no formulas, and fonts that have the letters."""

from __future__ import annotations

import unicodedata
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

LONGEST = 16  # letters of a token
PLAIN = 0.9  # how wide words of small letters are, of what `width` says


def word(token: str) -> str:
    """A token in a few letters that can be seen."""
    shown = "".join("↵" if one in "\r\n" else one if one.isprintable() else "�" for one in token).strip()
    return (shown if len(shown) <= LONGEST else shown[: LONGEST - 1] + "…") or "·"


def width(text: str) -> float:
    """About how wide a text is, in font sizes."""
    return sum(1.0 if unicodedata.east_asian_width(letter) in "WF" else 0.6 for letter in text)


def wrapped(text: str, room: float) -> str:
    """A text in two lines, about equally long, where one is wider than the room, in font sizes."""
    words = text.split(" ")
    if width(text) * PLAIN <= room or len(words) == 1:
        return text
    parts = [(" ".join(words[:place]), " ".join(words[place:])) for place in range(1, len(words))]
    return "\n".join(min(parts, key=lambda lines: max(map(width, lines))))


def plainly(text: str) -> dict[str, Any]:
    """What makes a Text show these letters and no formula, in fonts that have them."""
    given: dict[str, Any] = {"parse_math": False, "usetex": False}
    families = _families(text)
    return {**given, "fontfamily": families} if families else given


def _families(text: str) -> list[str]:
    """The caller's fonts, then others for letters that those lack; none where they lack none."""
    from matplotlib import rcParams
    from matplotlib.font_manager import FontProperties, findfont, get_font

    if text.isascii():
        return []
    own = list(rcParams["font.family"])
    usual = get_font(findfont(FontProperties(family=own)))
    lacking = [one for one in dict.fromkeys(text) if not one.isspace() and not usual.get_char_index(ord(one))]
    if not lacking:
        return []
    scripts = {unicodedata.name(one, "?").split(" ")[0]: one for one in lacking}
    found = [_font_of(script, one) for script, one in scripts.items()]
    return [*own, *dict.fromkeys(name for name in found if name)]


_FONTS: dict[str, str | None] = {}  # script → font; a search opens every font there is


def _font_of(script: str, letter: str) -> str | None:
    """An upright installed font that has a script's letter, a DejaVu or a Noto where possible."""
    if script not in _FONTS:
        _FONTS[script] = _searched(letter)
    return _FONTS[script]


def _searched(letter: str) -> str | None:
    from matplotlib.font_manager import fontManager, get_font

    upright = [one for one in fontManager.ttflist if one.style == "normal" and "Last Resort" not in one.name]

    def order(one: Any) -> Any:
        liked = ("DejaVu Sans", "Noto Sans", "Noto")
        rank = next((place for place, name in enumerate(liked) if one.name.startswith(name)), len(liked))
        return rank, one.weight != 400, "Mono" in one.name, one.name

    for entry in sorted(upright, key=order):
        try:
            if get_font(entry.fname).get_char_index(ord(letter)):
                return str(entry.name)
        except (OSError, RuntimeError):  # a font that is gone, or broken
            continue
    return None


@contextmanager
def missing_letters_pass() -> Iterator[None]:
    """No warning of letters that no font has."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"(Glyph \d+ |Matplotlib currently does not support)")
        yield

"""A page of answers to a question about a picture: a card for each model, and what its answer drew on."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from overt.view import bundle
from overt.view.index import printable
from overt.view.pages import html_head

if TYPE_CHECKING:
    from PIL.Image import Image

ASKED = (320, 240)  # most width and height of the picture beside the question
# The same of a map: of two beside each other, and of two below each other.
BESIDE, BELOW = (242, 400), (500, 240)
WIDE = 1.5  # from this proportion on, maps are below each other
BAR = 150  # of a probability of 1
LINE = 24  # height of an answer
LETTER = 7.6  # width of a letter, about
COVER = 0.75  # most opacity of a colour over the grey picture, which shows through it
SEVERAL = 4  # times as much as if all weights were equal: where the colour of weights is full
LEAST_LOST = 0.01  # change of a probability that the colour is full at, if none is larger
STEPS = 8  # of a colour, in a legend
AGREE = 0.05  # p-value below which passes are said to agree, the threshold of the paper


@dataclass(frozen=True, eq=False)
class Likely:
    """An answer and its probability.

    Attributes:
        name: the answer.
        mean: its probability, the mean of several passes with dropout on.
        spread: the standard deviation of these passes.
    """

    name: str
    mean: float
    spread: float


@dataclass(frozen=True, eq=False)
class Reply:
    """What a model answers to a question about a picture.

    Attributes:
        model: its name.
        answer: of one pass, without dropout and with the mean of random weights.
        probability: of that answer in that pass.
        likely: the likeliest answers, the first one first.
        samples: number of passes behind their probabilities.
        p: of Welch's test between the two likeliest: small where the passes agree which is first.
        words: of the question, as the model reads them.
        word_weights: (words,), of the last attention.
        region_weights: (rows, columns), of the last attention.
        lost: (rows, columns), probability that the answer loses if a region is hidden.
        asked: number of words of the question, of which `words` are the first.
        unknown: words of the question that the model does not know; all are the same to it.
    """

    model: str
    answer: str
    probability: float
    likely: Sequence[Likely]
    samples: int
    p: float
    words: Sequence[str]
    word_weights: Tensor
    region_weights: Tensor
    lost: Tensor
    asked: int
    unknown: Sequence[str] = ()

    @property
    def agree(self) -> bool:
        """Whether the passes agree which answer is first: the paper calls a model certain then."""
        return self.p < AGREE

    @property
    def unread(self) -> str:
        """That the model did not read all words; empty if it did."""
        return f"only the first {len(self.words)} of {self.asked} words are read" if self.hidden else ""

    @property
    def hidden(self) -> int:
        """Number of words that the model did not read."""
        return self.asked - len(self.words)

    @property
    def p_text(self) -> str:
        """The p-value as text."""
        return "< 0.001" if self.p < 0.001 else f"{self.p:.3f}"


def answers_page(picture: Image, question: str, replies: Sequence[Reply], name: str = "") -> str:
    """A self-contained page, without scripts.

    Args:
        picture: that the question is about, as the models see it or larger.
        question: as it was asked.
        replies: of one or more models.
        name: of the picture.
    """
    look = bundle.style("page.css", "answers.css")
    title = printable(question)
    colour, grey = _data(picture), _data(_greyed(picture))
    cards = "".join(_card(reply, grey, picture.size) for reply in replies)
    # Every word is in the heading.
    unread = "".join(
        f'<p class="about">{html.escape(text)}</p>'
        for text in dict.fromkeys(each.unread for each in replies)
        if text
    )
    about = f'<p class="soft">{html.escape(printable(name))}</p>' if name else ""
    size = _fitting(picture.size, ASKED)
    return "".join(
        [
            html_head(title, look),
            '<body><main class="overt answers">\n<header class="asked">',
            f'<svg {_box(size)} role="img" aria-label="the picture">{_image(colour, size)}</svg>',
            f"<div><h1>{html.escape(title)}</h1>{unread}{about}{_explained(replies)}</div>",
            f"</header>\n{cards}</main></body></html>\n",
        ]
    )


def _fitting(size: tuple[int, int], most: tuple[int, int]) -> tuple[float, float]:
    """Width and height in the proportions of `size` that fit into `most`."""
    scale = min(most[0] / size[0], most[1] / size[1])
    return size[0] * scale, size[1] * scale


def _box(size: tuple[float, float]) -> str:
    """The attributes of a drawing of a width and height; on a narrow page it is drawn smaller."""
    wide, tall = size
    return f'viewBox="0 0 {wide:.6g} {tall:.6g}" width="{wide:.6g}" height="{tall:.6g}"'


def explained_p() -> str:
    """What the p-value tells, in words."""
    return (
        "p compares the two likeliest answers over these passes (Welch’s test): below "
        f"{AGREE:g} the passes agree which of them is likelier, however unlikely both may be."
    )


def _explained(replies: Sequence[Reply]) -> str:
    samples = replies[0].samples
    text = (
        f"Probabilities are means of {samples} passes with dropout on; a bar’s thin line is one standard "
        "deviation to each side. Each answer has a probability of its own: they need not sum to 100 %. "
        + explained_p()
    )
    return f'<p class="soft">{html.escape(text)}</p>'


def _card(reply: Reply, grey: str, size: tuple[int, int]) -> str:
    """One model; `size` is the picture's width and height."""
    passes = "agree" if reply.agree else "differ"
    first = html.escape(printable(reply.answer))
    wide = size[0] >= WIDE * size[1]
    drawn = _fitting(size, BELOW if wide else BESIDE)
    weights, lost = reply.region_weights, reply.lost
    return (
        f'<section class="card"><h2>{html.escape(printable(reply.model))}</h2>\n<div class="parts">'
        f'<div class="said"><p class="answer {passes}">{first}</p>'
        f'<p class="soft">{100 * reply.probability:.1f} % in one pass · '
        f"p {html.escape(reply.p_text)}: the passes {passes}</p>"
        f"{_bars(reply)}{_words(reply)}{_unknown(reply)}</div>\n"
        f'<div class="maps{" wide" if wide else ""}">'
        f"<figure>{_map(weights, _strengths(weights), grey, drawn, 'weight of each region')}"
        f"<figcaption>weights of the last attention over regions{_scale_of_weights(weights)}"
        "</figcaption></figure>\n"
        f"<figure>{_map(lost, _signs(lost), grey, drawn, 'lost probability of each region')}"
        f"<figcaption>probability of “{first}” lost if a region is hidden{_scale_of_changes(lost)}"
        "</figcaption></figure></div></div></section>\n"
    )


def _full(weights: Tensor) -> float:
    """The weight whose colour is full: several times an equal one, or the largest if that is more."""
    return max(float(weights.max()), min(SEVERAL / weights.numel(), 1.0))


def _strengths(weights: Tensor) -> Tensor:
    """How strong the colours of weights are, from 0, where a weight is equal to the others or less, to 1."""
    equal = 1 / weights.numel()
    return ((weights - equal) / max(_full(weights) - equal, 1e-9)).clamp(0.0, 1.0)


def _signs(changes: Tensor) -> Tensor:
    """The same for changes, from -1 to 1; those of far less than a point stay pale."""
    return changes / _most(changes)


def _most(changes: Tensor) -> float:
    """The change whose colour is full."""
    return max(float(changes.abs().max()), LEAST_LOST)


def _scale_of_weights(weights: Tensor) -> str:
    """The legend of weights: what has no colour, what has the full one, and the largest weight."""
    largest, equal = f"{100 * float(weights.max()):.1f}&nbsp;%", f"{100 / weights.numel():.1f}&nbsp;%"
    line = f'<span class="soft">largest: {largest} (equal weights: {equal})</span>'
    if weights.numel() == 1:
        return line
    full = f"{100 * _full(weights):.1f}&nbsp;%"
    return f"{_scale(range(STEPS + 1), 'equal or less', full)}{line}"


def _scale_of_changes(changes: Tensor) -> str:
    """The legend of changes: both ends of the scale, and the largest changes of either sign."""
    most = f"{100 * _most(changes):.1f}"
    lost, gained = (_at_most(float(each.max())) for each in (changes, -changes))
    scale = _scale(range(-STEPS, STEPS + 1), f"gained {most}", f"lost {most}")
    return f'{scale}<span class="soft">percentage points; {lost} lost, {gained} gained</span>'


def _at_most(change: float) -> str:
    """The largest change of a sign, in words; zero or less if there is none."""
    if change <= 0:
        return "nothing"
    return "under 0.1" if change < 0.0005 else f"at most {100 * change:.1f}"


def _scale(steps: range, low: str, high: str) -> str:
    """Colours from one end to the other, and what the ends are; a step may be negative."""
    drawn = [
        f'<rect class="{_kind(step)}" x="{number}" width="1" height="1" '
        f'fill-opacity="{COVER * abs(step) / STEPS:.3f}"/>'
        for number, step in enumerate(steps)
    ]
    return (
        f'<span class="scale"><svg viewBox="0 0 {len(steps)} 1" preserveAspectRatio="none" '
        f'aria-hidden="true">{"".join(drawn)}</svg><span>{low}</span><span>{high}</span></span>'
    )


def _kind(strength: float) -> str:
    """The class of a colour: blue, or orange below zero."""
    return "less" if strength < 0 else "more"


def _map(cells: Tensor, strengths: Tensor, grey: str, size: tuple[float, float], label: str) -> str:
    """The grey picture under coloured regions.

    Args:
        cells: (rows, columns), the values.
        strengths: (rows, columns), of their colours, from -1 to 1.
        grey: the picture.
        size: width and height of the drawing.
        label: what is drawn.
    """
    rows, columns = cells.shape
    wide, tall = size[0] / columns, size[1] / rows
    drawn = []
    for row in range(rows):
        for column in range(columns):
            value, strength = float(cells[row, column]), float(strengths[row, column])
            place = f'x="{column * wide:.2f}" y="{row * tall:.2f}" width="{wide:.2f}" height="{tall:.2f}"'
            tip = f"<title>row {row + 1}, column {column + 1}: {100 * value:.2f} %</title>"
            drawn.append(
                f'<rect class="{_kind(strength)}" {place} '
                f'fill-opacity="{COVER * abs(strength):.3f}">{tip}</rect>'
            )
    return f'<svg {_box(size)} role="img" aria-label="{label}">{_image(grey, size)}{"".join(drawn)}</svg>'


def _bars(reply: Reply) -> str:
    """The likeliest answers."""
    height = LINE * len(reply.likely)
    longest = max((len(printable(likely.name)) for likely in reply.likely), default=0)
    start = max(104.0, LETTER * longest + 8)  # of the bars, after the names
    lines = []
    for number, likely in enumerate(reply.likely):
        middle = number * LINE + LINE / 2
        bar = f'x="{start:g}" y="{number * LINE + 5}" height="{LINE - 10}"'
        low, high = (BAR * min(max(likely.mean + sign * likely.spread, 0.0), 1.0) for sign in (-1.0, 1.0))
        name = html.escape(printable(likely.name))
        lines.append(
            f'<text x="{start - 8:g}" y="{middle + 4.5}" text-anchor="end">{name}</text>'
            f'<rect class="track" {bar} width="{BAR}"/>'
            f'<rect class="bar" {bar} width="{BAR * likely.mean:.2f}"/>'
            f'<line x1="{start + low:.2f}" x2="{start + high:.2f}" y1="{middle}" y2="{middle}"/>'
            f'<text x="{start + BAR + 8:g}" y="{middle + 4.5}">{100 * likely.mean:.1f} %</text>'
        )
    size = f'viewBox="0 0 {start + BAR + 64:g} {height}"'
    return f'<svg class="bars" {size} role="img" aria-label="likeliest answers">{"".join(lines)}</svg>'


def _words(reply: Reply) -> str:
    """The words of the question, underlined by the weights of the last attention."""
    drawn = []
    weights = reply.word_weights
    for word, weight, strength in zip(
        reply.words, weights.tolist(), _strengths(weights).tolist(), strict=True
    ):
        shown = html.escape(printable(word))
        drawn.append(
            f'<span class="word" title="{shown}: {100 * weight:.1f} %">{shown}'
            '<svg viewBox="0 0 1 1" preserveAspectRatio="none" aria-hidden="true">'
            f'<rect class="more" width="1" height="1" fill-opacity="{COVER * strength:.3f}"/></svg></span> '
        )
    if reply.hidden:
        drawn.append(f'<span class="soft">… {reply.hidden} not read</span>')
    return (
        f'<p class="words">{"".join(drawn)}</p>'
        f'<p class="about">weights of the last attention over words{_scale_of_weights(weights)}</p>'
    )


def _unknown(reply: Reply) -> str:
    """The words that the model does not know."""
    if not reply.unknown:
        return ""
    words = ", ".join(f"“{html.escape(printable(word))}”" for word in reply.unknown)
    return f'<p class="about">not in this model’s vocabulary: {words}</p>'


def _image(data: str, size: tuple[float, float]) -> str:
    wide, tall = size
    return f'<image href="{data}" width="{wide:.6g}" height="{tall:.6g}" preserveAspectRatio="none"/>'


def _data(picture: Image) -> str:
    """A picture as a data address."""
    file = io.BytesIO()
    picture.save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def _greyed(picture: Image) -> Image:
    """A pale grey picture: none of its colours is taken for a weight."""
    return picture.convert("L").point([round(130.0 + grey * (125.0 / 255.0)) for grey in range(256)])

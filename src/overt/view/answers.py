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

SIDE = 240  # of a picture on the page, in its own units
BAR = 150  # of a probability of 1
LINE = 24  # height of an answer
LETTER = 7.6  # width of a letter, about
# As in viewer/colour.js: from pale to strong; and from orange, below zero, to blue.
SIZES = [(247, 249, 252), (198, 217, 240), (120, 170, 219), (45, 112, 181), (12, 58, 120), (6, 27, 66)]
SIGNS = [
    (122, 56, 4),
    (201, 112, 27),
    (248, 222, 184),
    (248, 248, 248),
    (198, 217, 240),
    (45, 112, 181),
    (6, 40, 96),
]
COVER = 0.6  # opacity of weights over the grey picture
CERTAIN = 0.05  # p-value below which an answer is called certain


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
    unknown: Sequence[str] = ()

    @property
    def certain(self) -> bool:
        """Whether the p-value is below .05."""
        return self.p < CERTAIN

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
    cards = "".join(_card(reply, grey) for reply in replies)
    about = f'<p class="soft">{html.escape(printable(name))}</p>' if name else ""
    return "".join(
        [
            html_head(title, look),
            '<body><main class="overt answers">\n',
            f'<header class="asked"><svg viewBox="0 0 {SIDE} {SIDE}" role="img" aria-label="the picture">',
            f"{_image(colour)}</svg><div><h1>{html.escape(title)}</h1>{about}{_explained(replies)}</div>",
            f"</header>\n{cards}</main></body></html>\n",
        ]
    )


def _explained(replies: Sequence[Reply]) -> str:
    samples = replies[0].samples
    text = (
        f"Probabilities are means of {samples} passes with dropout on; a bar's thin line is one standard "
        "deviation to each side. Each answer has a probability of its own: they need not sum to 100 %. p "
        "compares the two likeliest answers over these passes (Welch's test): below "
        f"{CERTAIN:g} the model is called certain."
    )
    return f'<p class="soft">{html.escape(text)}</p>'


def _card(reply: Reply, grey: str) -> str:
    """One model."""
    certain = "certain" if reply.certain else "uncertain"
    first = html.escape(printable(reply.answer))
    weights, lost = _map(reply.region_weights, grey, signed=False), _map(reply.lost, grey, signed=True)
    return (
        f'<section class="card"><h2>{html.escape(printable(reply.model))}</h2>\n<div class="parts">'
        f'<div class="said"><p class="answer {certain}">{first}</p>'
        f'<p class="soft">{100 * reply.probability:.1f} % in one pass · '
        f"p {html.escape(reply.p_text)}, {certain}</p>"
        f"{_bars(reply)}{_words(reply)}{_unknown(reply)}</div>\n"
        '<div class="maps">'
        f"<figure>{weights}<figcaption>weights of the last attention over regions"
        f"{_range(reply.region_weights, signed=False)}</figcaption></figure>\n"
        f"<figure>{lost}<figcaption>probability of “{first}” lost if a region is hidden"
        f"{_range(reply.lost, signed=True)}</figcaption></figure></div></div></section>\n"
    )


def _range(cells: Tensor, signed: bool) -> str:
    """The scale of a map in words."""
    if signed:
        most = f"{100 * _top(cells, signed):.1f}"
        return f'<br><span class="soft">darkest blue: {most} points lost; orange: gained</span>'
    return f'<br><span class="soft">darkest: {_strongest(cells)}</span>'


def _strongest(weights: Tensor) -> str:
    """The largest weight, beside what each would be if all were equal."""
    return f"{100 * float(weights.max()):.1f}&nbsp;% (equal weights: {100 / weights.numel():.1f}&nbsp;%)"


def _top(cells: Tensor, signed: bool) -> float:
    """The value that has the strongest colour; changes of far less than a point stay pale."""
    return max(float(cells.abs().max()), 0.01 if signed else 1e-9)


def _map(cells: Tensor, grey: str, signed: bool) -> str:
    """The grey picture under coloured regions, (rows, columns)."""
    rows, columns = cells.shape
    tall, wide = SIDE / rows, SIDE / columns
    top = _top(cells, signed)
    drawn = []
    for row, line in enumerate(cells.tolist()):
        for column, value in enumerate(line):
            part = (value / top + 1) / 2 if signed else value / top
            place = f'x="{column * wide:.2f}" y="{row * tall:.2f}" width="{wide:.2f}" height="{tall:.2f}"'
            tip = f"<title>row {row + 1}, column {column + 1}: {100 * value:.2f} %</title>"
            drawn.append(f'<rect {place} fill="{_colour(part, SIGNS if signed else SIZES)}">{tip}</rect>')
    shown = f'<g fill-opacity="{COVER}" shape-rendering="crispEdges">{"".join(drawn)}</g>'
    label = "lost probability of each region" if signed else "weight of each region"
    return f'<svg viewBox="0 0 {SIDE} {SIDE}" role="img" aria-label="{label}">{_image(grey)}{shown}</svg>'


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
    top = max(float(reply.word_weights.max()), 1e-9)
    x, drawn = 0.0, []
    for word, weight in zip(reply.words, reply.word_weights.tolist(), strict=True):
        wide = 8.0 * len(word) + 10.0
        shown = html.escape(printable(word))
        drawn.append(
            f'<text x="{x + wide / 2:.1f}" y="14" text-anchor="middle">{shown}</text>'
            f'<rect x="{x + 2:.1f}" y="19" width="{wide - 4:.1f}" height="6" rx="2" '
            f'fill-opacity="{weight / top:.3f}">'
            f"<title>{shown}: {100 * weight:.1f} %</title></rect>"
        )
        x += wide
    size = f'viewBox="0 0 {max(x, 1.0):.0f} 28" width="{max(x, 1.0):.0f}" height="28"'
    return (
        f'<svg class="words" {size} role="img" aria-label="weights of the words">{"".join(drawn)}</svg>'
        '<p class="about">weights of the last attention over words<br>'
        f'<span class="soft">strongest: {_strongest(reply.word_weights)}</span></p>'
    )


def _unknown(reply: Reply) -> str:
    """The words that the model does not know."""
    if not reply.unknown:
        return ""
    words = ", ".join(f"“{html.escape(printable(word))}”" for word in reply.unknown)
    return f'<p class="about">not in this model’s vocabulary: {words}</p>'


def _colour(part: float, ramp: Sequence[tuple[int, int, int]]) -> str:
    """A colour of a ramp, from 0 to 1."""
    place = min(max(part, 0.0), 1.0) * (len(ramp) - 1)
    low = min(int(place), len(ramp) - 2)
    mixed = (round(a + (place - low) * (b - a)) for a, b in zip(ramp[low], ramp[low + 1], strict=True))
    return "#" + "".join(f"{value:02x}" for value in mixed)


def _image(data: str) -> str:
    return f'<image href="{data}" width="{SIDE}" height="{SIDE}" preserveAspectRatio="none"/>'


def _data(picture: Image) -> str:
    """A picture as a data address."""
    file = io.BytesIO()
    picture.save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def _greyed(picture: Image) -> Image:
    """A pale grey picture: none of its colours is taken for a weight."""
    return picture.convert("L").point([round(90.0 + grey * (165.0 / 255.0)) for grey in range(256)])

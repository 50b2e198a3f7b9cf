"""A trace as one self-contained page: no network, no server, no other files.

The page consists of three things: an index (`overt.view.index`: tokens, shapes, importances), packed maps
(`overt.view.pack`), and the viewer (`viewer/*.js`, inlined by `overt.view.bundle`). The same index and maps
serve a notebook's widget and the local server.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from overt import _check
from overt._extras import need
from overt._files import check_folder, written_whole
from overt._version import __version__
from overt.tracing.methods.method import method_of
from overt.tracing.methods.method import methods as known_methods
from overt.tracing.nodes import NodeTrace
from overt.tracing.result import Trace
from overt.view import bundle
from overt.view.index import PageContents, Queries, entry_of, label_of, printable, short
from overt.view.pack import MASS

if TYPE_CHECKING:
    from overt.view.captions import CaptionMaps

HEIGHT = 620  # pixels, in a notebook
COLOURS = 8  # for classes of nodes; if there are more classes, the last colour is for the rest


@dataclass(repr=False)
class Page:
    """One or more traces as a page. Made by `Trace.html` and `page`; a notebook displays it.

    Attributes:
        index: what the viewer loads first, as JSON values.
        blocks: packed maps, by their numbers in the index.
        title: of the page.
    """

    index: dict[str, Any]
    blocks: list[bytes] = field(repr=False)
    title: str = "Overt"

    # What runs, and how it looks.
    entry: ClassVar[str] = "page.js"
    looks: ClassVar[tuple[str, ...]] = ("page.css",)

    def html(self) -> str:
        """The whole page as text."""
        script, look = bundle.script(self.entry), bundle.style(*self.looks)
        parts = [
            html_head(self.title, look, script),
            '<body><div id="overt"></div>\n',
            "<noscript>This page needs JavaScript; it runs only its own.</noscript>\n",
            f'<script type="application/json" id="overt-index">{_json(self.index)}</script>\n',
        ]
        for block in self.blocks:
            text = base64.b64encode(block).decode()
            parts.append(f'<script type="text/plain" class="overt-block">{text}</script>\n')
        parts.append(f'<script type="module">{script}</script></body></html>\n')
        return "".join(parts)

    def save(self, path: str | Path) -> Page:
        """Write the page, atomically."""
        with written_whole(check_folder("path", path)) as part:
            part.write_text(self.html(), encoding="utf-8")
        return self

    def __repr__(self) -> str:
        count, size = len(self.index["traces"]), sum(map(len, self.blocks))
        traces = "1 trace" if count == 1 else f"{count} traces"
        return f"Page({self.title!r}, {traces}, {size / 1e6:.1f} MB of maps)"

    def _repr_html_(self) -> str:
        # A separate frame keeps the notebook's styles and scripts out and the page's in.
        text = html.escape(self.html())
        rules = "allow-scripts allow-downloads"
        look = f"width:100%;height:{HEIGHT}px;border:1px solid #8884;border-radius:8px"
        title = html.escape(printable(self.title))
        return f'<iframe srcdoc="{text}" sandbox="{rules}" style="{look}" title="{title}"></iframe>'

    def widget(self, height: int = HEIGHT) -> Any:
        """The page as an anywidget whose `selection` is kept in step with the viewer's, in both directions.

        Args:
            height: in pixels.
        """
        _check.whole("height", height, 100)
        return _widget_class()(index=self.index, blocks=self.blocks, height=height)


def page(
    traces: Trace | Sequence[Trace] | Mapping[str, Trace],
    *,
    title: str | None = None,
    names: Sequence[str] | None = None,
    methods: Sequence[str] | None = None,
    queries: Queries = "auto",
    residual: float | None = None,
    importances: bool | Literal["auto"] = False,
    target: Any = None,
    unk: int | None = None,
    mass: float | None = None,
    images: Any = None,
    progress: bool | None = None,
) -> Page:
    """Traces on one page; two or more can be compared side by side, with a shared selection.

    Args:
        traces: a trace, several, or a mapping from names to traces. Each example of a batch is one entry.
        title: of the page; by default the first tokens.
        names: of the examples, in order; by default their first words.
        methods: which methods to include; raw is always included. By default all that read maps and can read
            these: flow cannot if weights may be negative.
        queries: the tokens for which to compute rollout and flow: "all", "main" (`Trace.main_queries`),
            numbers, or "auto": all if that is quick, otherwise the main one, and no flow for very long texts.
            Numbers count an example's tokens as the page shows them, without padding. Of a trace of states,
            whose page has rows in place of maps, "auto" is the main one; of one that was saved, all it has.
            Of generated text, whose page has rows, too, "auto" are the queries that wrote it.
        residual: weight of the residual connection; by default that of each trace's mixing.
        importances: whether to include the methods that run the model, blank-out and gradients, for models
            that have outputs; "auto" leaves out what is slow or not possible.
        target: what the importances explain, as for `Trace.blankout`.
        unk: id of the replacement token, as for `Trace.blankout`.
        mass: share of each row's sum that its kept weights hold, and the page reports what was left out; by
            default 0.98 of maps, and all of the rows of a trace of states.
        images: the pictures of the prompts of a language model that sees pictures, in order: paths, images of
            PIL's or uint8 arrays (height, width, 3). Patches are shown over them; without them, alone.
        progress: show a progress bar for long flows; by default on a terminal.
    """
    if isinstance(traces, Mapping):
        named = [(printable(str(name)), trace) for name, trace in traces.items()]
    else:
        listed: list[Any] = list(traces) if isinstance(traces, list | tuple) else [traces]
        named = [("", trace) for trace in listed]
    for _, trace in named:
        if not isinstance(trace, Trace):
            raise TypeError(f"traces must come from overt.trace, got {type(trace).__name__}")
    if not named:
        raise ValueError("traces must hold at least one trace, got none")
    reading, named_methods = known_methods("maps"), methods is not None
    if methods is None:
        methods = [name for name, method in reading.items() if any(not t.why_not(method) for _, t in named)]
    methods = [methods] if isinstance(methods, str) else list(methods)
    for method in methods:
        method_of(method, argument="methods")
    if isinstance(queries, str):
        _check.one_of("queries", queries, ("auto", "all", "main"))
    _check.one_of("importances", importances, (True, False, "auto"))
    if mass is not None:
        _check.fraction("mass", mass)
    blocks: list[bytes] = []
    entries = []
    running: dict[str, bool | Literal["auto"]] = {}
    if importances is not False:
        running = dict.fromkeys(known_methods("model"), importances)
    running |= dict.fromkeys((name for name in methods if name not in reading), True)
    if target is not None and not running:
        raise ValueError(
            f"target is for methods that run the model, got {target!r} but none of them: "
            "importances=True includes them"
        )
    map_methods = tuple(name for name in methods if name in reading)
    from overt.view.pictures import mark_patches, picture_entries  # on first use

    pictures = list(picture_entries([trace for _, trace in named], images))  # wrong ones are refused at once
    for name, trace in named:
        of_rows = trace.of_states or trace.rows is not None or trace.generated is not None
        kept = (1.0 if of_rows else MASS) if mass is None else mass
        contents = PageContents(
            map_methods, named_methods, running, queries, residual, target, unk, kept, progress
        )
        make_entry = _entry_maker(of_rows)
        for number in range(len(trace)):
            example = trace if len(trace) == 1 else trace[number]
            label = label_of(example)
            if name:
                label = name if len(trace) == 1 else f"{name}: {label}"
            entries.append({"name": label, **make_entry(example, contents, blocks, number, len(trace))})
    for entry, more in zip(entries, pictures, strict=True):
        entry["missing"] |= more.pop("missing", {})
        entry |= more
        for panel in more.get("pictures", {}).get("panels", []):
            mark_patches(entry, panel["tiles"])
    if names is not None:
        if len(names) != len(entries):
            raise ValueError(
                f"names must have {len(entries)} entries, one for each example, got {len(names)}"
            )
        for entry, label in zip(entries, names, strict=True):
            entry["name"] = printable(str(label))
    title = str(entries[0]["name"] if title is None else title)
    kept = min(1.0 if "rows" in entry else MASS for entry in entries) if mass is None else mass
    return _page(title, entries, blocks, kept)


def _entry_maker(of_rows: bool) -> Callable[..., dict[str, Any]]:
    """What makes the entry of an example: of its maps, or of rows."""
    if of_rows:
        from overt.view.rows import rows_entry  # on first use

        return rows_entry
    return entry_of


def node_page(
    trace: NodeTrace,
    nodes: int | Iterable[int],
    *,
    title: str | None = None,
    labels: Any = None,
    names: Any = None,
    **arguments: Any,
) -> Page:
    """Neighbourhoods of a graph's nodes on one page.

    Args:
        trace: from `overt.graphs.trace`.
        nodes: the nodes whose neighbourhoods to show.
        title: of the page.
        labels: the nodes' classes, one for each node of the graph.
        names: the nodes' names, one for each node of the graph.
        arguments: further arguments of `overt.graphs.page_data`: by, layer, heads, residual, flow, top.
    """
    try:
        listed = [operator.index(nodes)]  # type: ignore[arg-type]
    except TypeError:
        listed = [operator.index(node) for node in nodes]  # type: ignore[union-attr]
    if not listed:
        raise ValueError("nodes must name at least one node, got none")
    from overt.view.neighbourhood import page_data

    hoods = [page_data(trace, node, labels=labels, names=names, **arguments) for node in listed]
    classes = _classes(trace.named("labels", labels), hoods)
    entries = []
    for about in hoods:
        node = next(row for row in about["nodes"] if row["id"] == about["node"])
        name = printable(f"node {node.get('name', node['id'])}")
        entries.append({"name": name, "kind": "nodes", "nodes": short({**about, "classes": classes})})
    return _page(title or entries[0]["name"], entries, [], 1.0)


def caption_page(captions: Sequence[CaptionMaps], *, title: str | None = None) -> Page:
    """Captions over their pictures, word by word, on one page, with one scale for all.

    Args:
        captions: at least one; the second is shown beside the first where there is room, and others can be.
        title: of the page; by default the first caption.
    """
    if not captions:
        raise ValueError("captions must hold at least one caption, got none")
    from overt.view.captions import caption_entry, peaks_of

    peaks = peaks_of(captions)
    entries = [caption_entry(each, peaks) for each in captions]
    title = entries[0]["name"] if title is None else title
    if len(captions) > 1:  # which may be the same
        for entry, each in zip(entries, captions, strict=True):
            entry["name"] = f"{printable(each.model)}: {entry['name']}"
    made = _page(title, entries, [], 1.0)
    if len(captions) > 1:
        made.index["beside"] = 1  # who gives two wants to see both
    return made


def _classes(labels: list[Any] | None, hoods: list[dict[str, Any]]) -> list[Any] | None:
    """The classes that get a colour, the same throughout the page; if there are many, the most frequent."""
    if labels is None:
        return None
    every = set(labels)
    if len(every) > COLOURS:
        often = Counter(row["label"] for about in hoods for row in about["nodes"])
        return [kind for kind, _ in often.most_common(COLOURS - 1)]
    try:
        return sorted(every)
    except TypeError:
        return sorted(every, key=str)


def _page(title: str, entries: list[dict[str, Any]], blocks: list[bytes], mass: float) -> Page:
    title = printable(title)
    index = {"format": 1, "version": __version__, "title": title, "mass": mass, "traces": entries}
    return Page(index, blocks, title)


def _json(value: Any) -> str:
    """JSON that is safe inside a script element."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text


def html_head(title: str, look: str, script: str | None = None) -> str:
    """The beginning of a page, up to its body.

    Only the style, and the script if there is one, may run on the page, whatever its texts contain.

    Args:
        title: of the page.
        look: its style sheet.
        script: the only one that it has.
    """
    scripts = "" if script is None else f"script-src '{content_hash(script)}'; "
    policy = (
        f"default-src 'none'; {scripts}style-src '{content_hash(look)}'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )
    return "".join(
        [
            "<!doctype html>\n",
            '<html lang="en" class="overt-page"><head><meta charset="utf-8">\n',
            f'<meta http-equiv="Content-Security-Policy" content="{html.escape(policy)}">\n',
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n',
            f"<title>{html.escape(printable(title))}</title>\n<style>{look}</style></head>\n",
        ]
    )


def content_hash(text: str) -> str:
    """The hash by which a content security policy allows an inline script or style."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


@lru_cache
def _widget_class() -> Any:
    anywidget, traitlets = need("anywidget", "notebook"), need("traitlets", "notebook")

    class TraceWidget(anywidget.AnyWidget):  # type: ignore[misc, name-defined]
        """The viewer in a notebook."""

        _esm = bundle.script("widget.js") + "\nexport default { render };\n"
        _css = bundle.style("page.css")
        index = traitlets.Dict().tag(sync=True)
        blocks = traitlets.List(traitlets.Bytes()).tag(sync=True)
        height = traitlets.Int(HEIGHT).tag(sync=True)
        selection = traitlets.Dict().tag(sync=True)

    return TraceWidget

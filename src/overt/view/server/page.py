"""The server's own page, and the headers that keep other pages away from it."""

from __future__ import annotations

import html
from dataclasses import dataclass

from overt.view import bundle
from overt.view.pages import content_hash

# Headers of every answer.
HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=(), payment=(), usb=()",
    "X-Frame-Options": "DENY",
    "Cache-Control": "no-store",
}
NOTHING = "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"

SHELL = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<link rel="icon" href="data:,">
<style>{style}</style>
</head>
<body>
<div id="serve" class="overt"><noscript>This page needs JavaScript; it runs only its own.</noscript></div>
<script type="module">{script}</script>
</body>
</html>
"""


@dataclass(frozen=True)
class Shell:
    """A page and the policy that allows only what is in it to run."""

    body: bytes
    policy: str


def shell(title: str = "Overt") -> Shell:
    """The page: form and viewer with script and style inline, without data."""
    code, look = bundle.script("serve.js"), bundle.style("page.css", "judge.css", "serve.css")
    if "</style" in look.lower():
        raise ValueError("a style sheet with its own end tag cannot be inlined")
    body = SHELL.format(title=html.escape(title), style=look, script=code)
    policy = "; ".join(
        (
            "default-src 'none'",
            f"script-src '{content_hash(code)}'",
            f"style-src '{content_hash(look)}'",
            "img-src 'self' data: blob:",
            "connect-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        )
    )
    return Shell(body.encode(), policy)

"""Take the screenshots of README.md and docs/gallery.md.

    python docs/screens.py [demo/index.html] [long.html]

The second page is of a long text; without it, its screenshot stays as it is.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))
from browser import QUIET, found  # noqa: E402

ASSETS = ROOT / "docs" / "assets"
SCREENS = {  # name → selection, colours
    "graph": ("trace=0&other=3&view=graph&picked=1&beside=none", "light"),
    "evolution": ("trace=1&view=evolution&layer=3&beside=none", "light"),
    "heads": ("trace=0&view=heads&layer=5&head=3&beside=none", "dark"),
}
LONG = {"text": ("layer=24&find=kl_weight&token=3191", "light")}


def main() -> None:
    """Open a page once for each screenshot."""
    page = Path(sys.argv[1] if len(sys.argv) > 1 else "demo/index.html").resolve()
    if not page.is_file():
        raise SystemExit(f"there is no page {page}: run `overt demo` first")
    screens = [(page, *screen) for screen in SCREENS.items()]
    if len(sys.argv) > 2:
        screens += [(Path(sys.argv[2]).resolve(), *screen) for screen in LONG.items()]
    args = [*QUIET, *(["--no-sandbox"] if os.geteuid() == 0 else [])]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found(), args=args)
        for page, name, (selection, colours) in screens:
            height = 560 if name == "graph" else 790
            shown = browser.new_page(viewport={"width": 1280, "height": height})
            shown.emulate_media(color_scheme="dark" if colours == "dark" else "light")
            shown.goto(f"{page.as_uri()}#{selection}")
            shown.wait_for_function("globalThis.overt")
            shown.evaluate("overt.settled()")
            shown.screenshot(path=ASSETS / f"page-{name}.png")
            shown.close()
        browser.close()


if __name__ == "__main__":
    main()

"""Makes the pictures of the dashboard that the documents show: `python -m tests.e2e.dashboard_screenshots`.

It starts a server on a tiny model, leads conversations by clients with habits that cost reuse, and takes the first
screen in light and in dark. All numbers in the pictures are that server's own.
"""

import argparse
import tempfile
import time
from pathlib import Path

from PIL import Image

from tests.e2e.browser import EXECUTABLE, Page, browsing
from tests.e2e.dashboard_traffic import lead
from tests.serving import serving_app

IMAGES = Path(__file__).resolve().parents[2] / "docs" / "images"
WIDTH, HEIGHT = 1_400, 900
SETTLE_SECONDS = 2.5
"""Two events of the page's stream: what was asked for a moment ago is drawn."""

NUM_COLOURS = 128
"""Of the picture's palette: it takes a third of its bytes, and letters stay sharp."""


def main() -> None:
    """Make both pictures."""
    parser = argparse.ArgumentParser(
        description="Make the pictures of the dashboard in docs/images.", allow_abbrev=False
    )
    parser.add_argument("--folder", type=Path, default=IMAGES, help="where they go (%(default)s)")
    options = parser.parse_args()
    if EXECUTABLE is None:
        parser.error("no Chromium is installed")
    options.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        with serving_app(folder / "server", prefill_step_size=256) as app:
            lead(app, num_sessions=7, num_turns=9, num_words=500)
            with browsing(folder) as page:
                page.open(f"http://127.0.0.1:{app.port}/dashboard")
                show(page)
                for dark in (False, True):
                    page.look_like(width=WIDTH, height=HEIGHT, dark=dark)
                    time.sleep(SETTLE_SECONDS)
                    file = options.folder / f"dashboard-{'dark' if dark else 'light'}.png"
                    page.screenshot(file, height=HEIGHT)
                    with Image.open(file) as picture:
                        picture.convert("RGB").quantize(NUM_COLOURS, dither=Image.Dither.NONE).save(file, optimize=True)


def show(page: Page) -> None:
    """What the pictures are to have: a session whose system prompt tells the time, with its turns."""
    page.look_like(width=WIDTH, height=HEIGHT)
    assert page.eventually("document.querySelectorAll('#sessions > li').length > 3")
    page.value(
        "[...document.querySelectorAll('#sessions summary')].find((each) => /work-0/.test(each.innerText)).click()"
    )
    assert page.eventually("document.querySelectorAll('#sessions canvas').length > 0")


if __name__ == "__main__":
    main()

"""The dashboard after fifty sessions, two thousand requests and a restart: what stands on its first screen, in light
and dark, wide and narrow; that it is accessible, and that each button does its work.

Twenty of the requests were led with a tiny model before the restart. The others were put where the server keeps what
ended (`dashboard_traffic.put_past`): numbers as it keeps them, which nobody computed.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.browser import Page, browsing
from tests.e2e.dashboard_traffic import lead, put_past
from tests.e2e.installing import library
from tests.serving import AppUnderTest, serving_app

pytestmark = pytest.mark.e2e

LOOKS = [(width, dark) for width in (1400, 420) for dark in (False, True)]
NUM_SESSIONS, NUM_REQUESTS = 50, 2_000
BOTTOM = """Math.max(...[...document.querySelectorAll({!r})].slice(0, {})
  .map((each) => each.getBoundingClientRect().bottom))"""
SCROLLERS = """[...document.querySelectorAll('main *')]
  .filter((each) => /auto|scroll/.test(getComputedStyle(each).overflowY))
  .filter((each) => each.scrollHeight > each.clientHeight).map((each) => each.id || each.className)"""
VIOLATIONS = """axe.run(document).then((found) => found.violations.map((each) =>
  `${each.id}: ${each.nodes.slice(0, 3).map((node) => node.html + ' ' + node.failureSummary).join(' | ')}`))"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the server before the restart has left."""
    folder = tmp_path_factory.mktemp("busy")
    with serving_app(folder, prefill_step_size=256) as app:
        put_past(app, num_requests=NUM_REQUESTS - 20, num_sessions=NUM_SESSIONS - 5)
        lead(app, num_sessions=5, num_turns=4, num_words=200)
    return folder


@pytest.fixture(scope="module")
def app(folder: Path) -> Iterator[AppUnderTest]:
    """The server after it, which was asked nothing yet."""
    with serving_app(folder, prefill_step_size=256) as app:
        yield app


@pytest.fixture
def page(app: AppUnderTest, tmp_path: Path) -> Iterator[Page]:
    with browsing(tmp_path) as page:
        page.open(f"http://127.0.0.1:{app.port}/dashboard")
        page.look_like(width=1400)
        assert page.eventually("document.querySelectorAll('#sessions > li').length > 0")
        assert page.eventually("document.querySelectorAll('#chart canvas').length > 0")
        yield page


def click(page: Page, selector: str) -> None:
    page.value(f"document.querySelector({selector!r}).click()")


def test_the_first_screen_has_what_matters(page: Page) -> None:
    """Three numbers, sessions and the dearest miss with what mends it, in the first 900 pixels; painted in a second."""
    for selector, number in ((".three dd", 6), ("#sessions > li", 8), ("#misses > li", 1)):
        assert 0 < page.value(BOTTOM.format(selector, number)) <= 900, selector
    assert page.value("performance.getEntriesByName('first-contentful-paint')[0].startTime") <= 1_000
    assert page.text("#num-sessions") == f"({NUM_SESSIONS})"
    assert f"{NUM_REQUESTS:,} requests" in page.text("#reused-of")
    assert " h " in page.text("#saved") and page.text("#now") == "0"
    assert "in the system prompt: a time" in page.text("#misses > li")
    assert "The system prompt has a time at character" in page.text("#misses > li")
    assert page.value("document.querySelectorAll('#last > tr').length") == 100
    assert page.complaints == []


@pytest.mark.parametrize(
    ("width", "dark"), LOOKS, ids=[f"{width}-{'dark' if dark else 'light'}" for width, dark in LOOKS]
)
def test_it_is_accessible_and_fits(page: Page, width: int, dark: bool) -> None:
    """No violation of axe's rules, with a session and all that folds open too; one scroller at most, nothing over the
    edge, no message in the console."""
    page.look_like(width=width, dark=dark)
    page.value(library("axe").read_text("utf-8"))
    click(page, "#sessions summary")
    assert page.eventually("document.querySelectorAll('#sessions canvas').length === 1")
    assert page.value(VIOLATIONS) == []
    assert len(page.value(SCROLLERS)) <= 1, page.value(SCROLLERS)
    page.value("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    assert page.eventually("[...document.querySelectorAll('.turn')].every((each) => each.innerText !== '')")
    assert page.value(VIOLATIONS) == []
    assert page.value("document.documentElement.scrollWidth") <= width
    assert page.complaints == []


def test_each_button_of_the_view_does_its_work(page: Page) -> None:
    """The time that is looked at, all sessions, turns, the order of the table, pause."""
    of = page.text("#reused-of")
    click(page, "input[value=hour]")
    assert page.text("#reused-of") != of and "last hour" in page.text("#reused-of")
    click(page, "input[value=week]")
    assert "last 7 days" in page.text("#reused-of")
    assert page.value("document.getElementById('chart').getAttribute('aria-label')").endswith("has each hour.")
    assert "since" in page.text("#sessions-of") and page.text("#misses-of") == page.text("#sessions-of")
    click(page, "#more-sessions")
    assert page.value("document.querySelectorAll('#sessions > li').length") == NUM_SESSIONS
    click(page, "#more-sessions")
    assert page.value("document.querySelectorAll('#sessions > li').length") == 8
    click(page, "#sessions summary")
    assert page.eventually("document.querySelector('.turn').innerText.startsWith('Turn')")
    number = max(2, int(page.text(".turn strong").split()[1]))
    for place, now in ((1, number - 1), (2, number)):
        click(page, f".timeline button:nth-of-type({place})")
        assert page.text(".turn strong") == f"Turn {now}"
    for column, is_down in (("In", True), ("In", False), ("Client", False)):
        page.value(
            f"[...document.querySelectorAll('#columns button')].find((each) => each.innerText === '{column}').click()"
        )
        place = {"In": 4, "Client": 2}[column]
        cells: list[str] = page.value(
            f"[...document.querySelectorAll('#last td:nth-child({place})')].map((each) => each.innerText)"
        )
        values: list[Any] = [int(each.replace(",", "")) if column == "In" else each.lower() for each in cells]
        assert values == sorted(values, reverse=is_down), column
        assert page.value("document.querySelectorAll('#columns [aria-sort]').length") == 1
    click(page, "#pause")
    foot = page.text("#foot")
    assert "paused" in page.text("#link") and not page.eventually(
        f"document.getElementById('foot').innerText !== {foot!r}", 2.5
    )
    click(page, "#pause")
    assert page.eventually(f"document.getElementById('foot').innerText !== {foot!r}")
    assert page.complaints == []


def test_a_bar_under_the_pointer_says_its_numbers(page: Page) -> None:
    """Of the time that is looked at, and of a turn that is clicked at."""
    before = page.text("#hover")
    page.point("#chart .u-over", 0.995, 0.5)
    assert page.eventually(f"document.getElementById('hover').innerText !== {before!r}")
    assert "reused" in page.text("#hover") and "computed" in page.text("#hover")
    click(page, "#sessions summary")
    assert page.eventually("document.querySelector('.turn').innerText.startsWith('Turn')")
    first = page.value("document.querySelector('#sessions .timeline tbody th').textContent").partition(",")[0]
    page.point("#sessions .u-over", 0.06, 0.5)
    assert page.eventually(f"document.querySelector('.timeline .chart + .soft').innerText.startsWith('Turn {first},')")
    page.point("#sessions .u-over", 0.06, 0.5, clicks=True)
    assert page.eventually(f"document.querySelector('.turn strong').innerText === 'Turn {first}'"), page.text(".turn")


def test_each_button_that_changes_something_does_its_work(app: AppUnderTest, page: Page) -> None:
    """A prompt is computed ahead; a client's configuration is copied, with the address of this page; the cache is
    cleared once that was said twice, and forgets the requests too."""
    page.allow_clipboard()
    page.value("document.getElementById('ahead').value = 'You help with gardens. '.repeat(40)")
    click(page, "#prewarm button[type=submit]")
    assert page.eventually("/tokens are ready: [1-9]/.test(document.getElementById('told').innerText)"), page.text(
        "#told"
    )
    assert app.get("/v1/cache").json["num_warmed_tokens"] > 0  # type: ignore[operator]
    page.value("document.querySelectorAll('#clients details').forEach((each) => { each.open = true; })")
    click(page, "#clients li:nth-child(2) button")
    assert page.eventually("document.querySelector('#clients li:nth-child(2) button').innerText === 'Copied'")
    assert (
        page.value("navigator.clipboard.readText()") == f"kvserve launch codex --server-url http://127.0.0.1:{app.port}"
    )
    assert f"http://127.0.0.1:{app.port}/v1" in page.text("#clients li:nth-child(2)")
    click(page, "#clear")
    click(page, "#keep")
    assert page.value("document.querySelectorAll('#sessions > li').length") > 0
    click(page, "#clear")
    click(page, "#really")
    assert page.eventually("document.getElementById('told').innerText === 'The cache is empty.'")
    assert page.eventually("document.querySelectorAll('#sessions > li').length === 0")
    assert page.eventually(f"document.getElementById('reused-of').innerText.includes('{NUM_REQUESTS:,} requests')"), (
        "sums stay"
    )
    assert page.complaints == []

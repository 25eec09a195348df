"""The dashboard in a real browser, beside a real server with traffic: what a person sees, and what they must not."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.browser import EXECUTABLE, Page, browsing
from tests.models import tiny_model
from tests.serving import CHAT_PATH, COMPLETION_PATH, AppUnderTest, chat_body, encode_request, eventually, serving_app

pytestmark = [pytest.mark.e2e, pytest.mark.skipif(EXECUTABLE is None, reason="no Chromium is installed")]

SECRET = "xylophone"
SYSTEM = {"role": "system", "content": f"You repair every {SECRET}. " * 30}
KEY = "open-sesame"


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AppUnderTest]:
    with serving_app(tmp_path_factory.mktemp("dashboard"), prefill_step_size=64) as app:
        lead(app)
        yield app


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Page]:
    with browsing(tmp_path) as page:
        yield page


def lead(app: AppUnderTest) -> None:
    """A conversation, its edited history, and one of another client."""
    history = [SYSTEM, {"role": "user", "content": f"Where is the {SECRET}?"}]
    for number in range(3):
        said = app.chat(history, session_id="workshop", enable_thinking=False, max_tokens=4).content
        history += [{"role": "assistant", "content": said}, {"role": "user", "content": f"And number {number}?"}]
    edited = [*history[:3], {"role": "user", "content": "And number 7?"}, *history[4:]]
    app.chat(edited, session_id="workshop", enable_thinking=False, max_tokens=4)
    app.chat("Good morning.", enable_thinking=False, max_tokens=4)


def watch(page: Page, app: AppUnderTest) -> None:
    page.open(f"http://127.0.0.1:{app.port}/dashboard")
    assert page.eventually("document.getElementById('link').textContent.includes('live')")
    assert page.eventually("document.querySelectorAll('#figures dd').length > 5")


def test_a_person_sees_what_happens(app: AppUnderTest, page: Page, tmp_path: Path) -> None:
    """Numbers move with traffic, branches nest in their session, the miss says what it was and what would mend it."""
    watch(page, app)
    page.look_like(width=1200)
    assert "branch" in page.text("#sessions") and "workshop" in page.text("#sessions")
    assert page.value("document.querySelectorAll('#sessions .fork').length") >= 1
    assert page.value("document.querySelectorAll('#sessions ul ul .fork').length") >= 1, "below the branch that it left"
    assert "message changed" in page.text("#misses") and "message 3 (user), character 11" in page.text("#misses")
    before = page.text("#figures")
    app.chat("Once more.", enable_thinking=False, max_tokens=4)
    assert page.eventually(f"document.getElementById('figures').innerText !== {before!r}")
    assert page.value("document.querySelectorAll('#chart rect.reused').length") >= 1
    page.value("document.querySelector('#misses summary').click()")
    assert "What would mend it" in page.text("#misses")
    named = str(page.value("document.querySelector('#misses details[open] .id').textContent"))
    assert app.get(f"/v1/cache/explain/{named}").json["request_id"] == named, "the whole id, to be looked up"
    page.screenshot(tmp_path / "light.png")
    page.look_like(width=1200, dark=True)
    page.screenshot(tmp_path / "dark.png")
    assert page.complaints == []


def test_a_running_request_shows_its_progress(app: AppUnderTest, page: Page, tmp_path: Path) -> None:
    """A long answer stands among the running requests with its tokens, and is gone when its client is."""
    watch(page, app)
    with app.connect() as client:
        client.send(encode_request("POST", CHAT_PATH, chat_body("Write on.", max_tokens=20_000, stream=True)))
        assert page.eventually("document.querySelectorAll('#running > li').length === 1")
        assert page.eventually("/[1-9][0-9,]* written/.test(document.getElementById('running').innerText)")
        assert page.value("document.querySelector('#running progress').max") > 1
        assert page.value("(({ value, max }) => value === max)(document.querySelector('#running progress'))"), (
            "all read"
        )
        page.screenshot(tmp_path / "running.png")
    assert page.eventually("document.querySelectorAll('#running > li').length === 0")
    assert page.complaints == []


def test_a_request_that_waits_for_a_model_is_listed(page: Page, tmp_path: Path) -> None:
    """With that model's name and its session, below the one that runs; as a running one once the model is there."""
    folders = tmp_path / "models"
    folders.mkdir()
    (folders / "small").symlink_to(tiny_model("llama"))
    with serving_app(tmp_path / "two", model_folders=(str(folders),)) as app:
        watch(page, app)
        with app.connect() as running, app.connect() as waiting:
            running.send(encode_request("POST", CHAT_PATH, chat_body(stream=True, max_tokens=20_000)))
            assert eventually(lambda: app.app.health()[1]["num_decoding"] == 1)
            body = chat_body("Next.", model="small", stream=True, max_tokens=20_000, session_id="workshop")
            waiting.send(encode_request("POST", CHAT_PATH, body))
            assert page.eventually("document.querySelectorAll('#running > li').length === 2")
            listed = page.text("#running > li:last-child")
            assert "waits for small" in listed and "session workshop-" in listed and "openai_chat" in listed, listed
            page.screenshot(tmp_path / "waiting.png")
            running.close()
            assert page.eventually("document.getElementById('running').innerText.includes('writes')")
            assert page.eventually("!document.getElementById('running').innerText.includes('waits for')")
        assert page.eventually("document.querySelectorAll('#running > li').length === 0")
        assert page.complaints == []


def test_memory_and_a_raw_prompt_are_shown(app: AppUnderTest, page: Page) -> None:
    """RAM and disk against their budgets; a raw prompt that was changed has its character and no message."""
    text = f"The {SECRET} by the window, the piano by the door and the drum by the stairs are tuned on Sundays. " * 3
    for day in range(2):
        assert (
            app.post(COMPLETION_PATH, {"prompt": f"Day {day}. {text}", "max_tokens": 1, "session_id": "raw"}).status
            == 200
        )
    watch(page, app)
    assert page.eventually("document.getElementById('misses').innerText.includes('prompt changed at character 4')")
    report = app.get("/v1/cache").json
    assert page.value("document.querySelector('meter[aria-label=RAM]').max") == report["max_ram_bytes"]
    assert 0 < page.value("document.querySelector('meter[aria-label=RAM]').value") <= report["max_ram_bytes"]
    assert page.value("document.querySelector('meter[aria-label=Disk]').max") == report["disk"]["max_bytes"]  # type: ignore[index]
    assert "exact_key_rejected_by_model_lcp" in page.text("#counters") and "Cause: prompt changed" in page.text(
        "#counters"
    )


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_a_narrow_window_and_dark_mode(app: AppUnderTest, page: Page, tmp_path: Path, dark: bool) -> None:
    """360 pixels wide nothing hangs over the edge, and dark is dark."""
    watch(page, app)
    page.look_like(width=360, dark=dark)
    assert page.value("document.documentElement.scrollWidth") <= 360
    drawn = "document.querySelector('#chart svg').viewBox.baseVal.width"
    assert page.eventually(f"{drawn} <= 360"), "the chart is drawn for the window, not shrunk with its letters"
    level = page.value("Number(getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0])")
    assert level < 60 if dark else level > 200
    page.screenshot(tmp_path / f"narrow-{dark}.png")
    assert page.complaints == []


def test_the_keyboard_is_enough(app: AppUnderTest, page: Page) -> None:
    """Tab reaches the skip link, the table and a miss; Enter opens it, and it stays open while numbers come."""
    watch(page, app)
    reached = []
    for _ in range(30):
        page.press("Tab")
        reached.append(str(page.value("document.activeElement.tagName + ' ' + document.activeElement.textContent")))
        if "message changed" in reached[-1]:
            break
    assert reached[0].startswith("A Skip") and "message changed" in reached[-1], reached
    page.press("Enter")
    assert page.value("document.activeElement.parentElement.open") is True
    stamp = page.text("#foot")
    assert page.eventually(f"document.getElementById('foot').innerText !== {stamp!r}")
    assert page.value("document.activeElement.parentElement.open") is True


def test_no_prompt_is_shown_unless_it_is_allowed(app: AppUnderTest, page: Page, tmp_path: Path) -> None:
    """The secret word stands nowhere on the page; with DASHBOARD_SHOW_TEXT the text around the difference does."""
    watch(page, app)
    page.value("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    assert SECRET not in str(page.value("document.documentElement.outerHTML"))
    assert "And number" not in page.text("body")
    with serving_app(tmp_path / "open", dashboard_show_text=True) as showing:
        lead(showing)
        watch(page, showing)
        page.value("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
        assert "And number 7?" in page.text("#misses")


def test_a_server_with_a_key_asks_for_it(page: Page, tmp_path: Path) -> None:
    """Without the key no number is shown; typed in, it is used and kept in the tab."""
    with serving_app(tmp_path / "locked", api_key=KEY) as app:
        page.open(f"http://127.0.0.1:{app.port}/dashboard")
        assert page.eventually("!document.getElementById('key-form').hidden")
        assert page.text("#figures") == ""
        page.type(KEY)
        page.press("Enter")
        assert page.eventually("document.getElementById('link').textContent.includes('live')")
        assert page.value("localStorage.length") == 0
    assert [each for each in page.complaints if "401" not in each] == []


def test_a_server_that_ends_does_not_wait_for_the_page(page: Page, tmp_path: Path) -> None:
    """The page is told the end of the stream and tries again, until a server answers."""
    with serving_app(tmp_path) as app:
        watch(page, app)
    assert page.eventually("!document.getElementById('link').textContent.includes('live')")

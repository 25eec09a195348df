"""The dashboard in a real browser, beside a real server with traffic: what a person sees, and what they must not."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.browser import Page, browsing
from tests.engine.led_drafts import drafts_tried
from tests.models import tiny_model
from tests.ports import free_port
from tests.serving import (
    CHAT_PATH,
    COMPLETION_PATH,
    AppUnderTest,
    chat_body,
    encode_request,
    eventually,
    serving_app,
    writing,
)
from tests.starts import always_paying

pytestmark = pytest.mark.e2e

SECRET = "xylophone"
SYSTEM = {"role": "system", "content": f"You repair every {SECRET}. " * 30}
KEY = "open-sesame"
OPEN_ALL = "document.querySelectorAll('details').forEach((each) => { each.open = true; })"


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
    client = {"User-Agent": "claude-cli/2.1.331 (external, cli)"}
    fields = {"session_id": "workshop", "enable_thinking": False, "max_tokens": 4, "headers": client}
    for number in range(3):
        said = app.chat(history, **fields).content  # type: ignore[arg-type]
        history += [{"role": "assistant", "content": said}, {"role": "user", "content": f"And number {number}?"}]
    edited = [*history[:3], {"role": "user", "content": f"And number 7? {'Tell me all. ' * 20}"}, *history[4:]]
    app.chat(edited, **fields)  # type: ignore[arg-type]
    edited[1] = {"role": "user", "content": f"Where was the {SECRET}?"}
    app.chat(edited, **fields)  # type: ignore[arg-type]
    app.chat("Good morning.", enable_thinking=False, max_tokens=4)


def watch(page: Page, app: AppUnderTest) -> None:
    page.open(f"http://127.0.0.1:{app.port}/")
    assert page.eventually("location.pathname === '/dashboard'"), "the root leads to the page"
    assert page.eventually("document.getElementById('link').textContent.includes('live')")
    assert page.eventually("document.getElementById('foot').textContent !== ''")


def test_a_person_sees_what_happens(app: AppUnderTest, page: Page) -> None:
    """Numbers move with traffic; sessions are folded and named by client; a session's turns say why they were a miss
    and which branch they left; a miss says what it cost and what would mend it."""
    watch(page, app)
    page.look_like(width=1400)
    assert page.eventually("/^[1-9]/.test(document.getElementById('reused').innerText)")
    assert page.text("#saved").startswith("about "), page.text("#saved")
    assert "Claude Code 2.1.331" in page.text("#sessions") and "workshop" in page.text("#sessions")
    assert page.value("document.querySelectorAll('#sessions details[open]').length") == 0
    page.value(
        "[...document.querySelectorAll('#sessions summary')].find((each) => /workshop/.test(each.innerText)).click()"
    )
    assert page.eventually("document.querySelectorAll('#sessions canvas').length === 1")
    assert page.eventually("/Turn [45] at/.test(document.querySelector('.turn').innerText)"), "the dearest is chosen"
    told = page.text(".turn")
    assert "message changed" in told and "which left branch" in told and "What would mend it" in told
    assert "message changed" in page.text("#misses") and "in a user's message" in page.text("#misses")
    assert "Mend it" in page.text("#misses")
    before = page.text("#reused-of")
    app.chat("Once more.", enable_thinking=False, max_tokens=4)
    assert page.eventually(f"document.getElementById('reused-of').innerText !== {before!r}")
    page.value("document.querySelector('#misses summary').click()")
    named = str(page.value("document.querySelector('#misses details[open] .id').textContent"))
    assert app.get(f"/v1/cache/explain/{named}").json["request_id"] == named, "the whole id, to be looked up"
    assert page.complaints == []


def test_a_shared_cache_is_shown_where_there_is_one(app: AppUnderTest, page: Page, tmp_path: Path) -> None:
    """How it is, what came and went, what went wrong; nothing of it where none is set."""
    watch(page, app)
    assert page.value("document.getElementById('shared-box').hidden")
    with serving_app(tmp_path / "sharing", remote_cache_url=f"redis://127.0.0.1:{free_port()}/0") as sharing:
        watch(page, sharing)
        assert page.eventually("document.getElementById('shared-state').innerText.startsWith('down: left alone')")
        assert page.eventually("/unreachable [1-9]/.test(document.getElementById('shared').innerText)")
        assert page.eventually("document.getElementById('shared').innerText.includes('0 of 0')"), page.text("#shared")
        assert page.complaints == []


def test_what_drafts_did_is_shown_with_where_they_came_from(page: Page, tmp_path: Path) -> None:
    """Of all requests; nothing of it before any was drafted."""
    with always_paying(), drafts_tried(), serving_app(tmp_path / "drafting", speculation="auto") as drafting:
        drafting.chat("Good morning.", max_tokens=4, speculation=False)
        watch(page, drafting)
        page.value(OPEN_ALL)
        assert "Drafted" not in page.text("#counters")
        text = "The swans swim on the lake. The geese fly over the hills."
        with writing(drafting, text) as fields:
            for _ in range(2):
                drafting.chat("What is there?", prediction={"type": "content", "content": text}, **fields)
        assert page.eventually("document.getElementById('counters').innerText.includes('Tokens a step, where drafted')")
        told = drafting.get("/v1/cache").json["speculation"]["by_source"]["prediction"]  # type: ignore[index]
        shown = f"{told['num_drafted_tokens']}, right {told['num_accepted_tokens']}"
        assert page.eventually(f"document.getElementById('counters').innerText.includes({shown!r})"), page.text(
            "#counters"
        )
        assert "Drafted from the client's prediction" in page.text("#counters")
        assert page.complaints == []


def test_a_running_request_shows_its_progress(app: AppUnderTest, page: Page) -> None:
    """A long answer stands among the running requests with its tokens and the speed, and is gone when its client is."""
    watch(page, app)
    assert page.text("#now") == "0"
    assert page.eventually("document.getElementById('now-of').innerText.startsWith('measured last: prefill ')")
    with app.connect() as client:
        client.send(encode_request("POST", CHAT_PATH, chat_body("Write on.", max_tokens=20_000, stream=True)))
        assert page.eventually("document.querySelectorAll('#running > li').length === 1")
        assert page.eventually("/[1-9][0-9,]* written/.test(document.getElementById('running').innerText)")
        assert page.value("document.querySelector('#running progress').max") > 1
        assert page.value("(({ value, max }) => value === max)(document.querySelector('#running progress'))"), (
            "all read"
        )
        assert page.eventually("document.getElementById('now').innerText === '1'")
        assert page.eventually("/decode [1-9]/.test(document.getElementById('now-of').innerText)")
    assert page.eventually("document.querySelectorAll('#running > li').length === 0")
    assert page.complaints == []


def test_a_request_that_waits_for_a_model_is_listed(page: Page, tmp_path: Path) -> None:
    """With that model's name and its session, below the one that runs; as a running one once the model is there. The
    button of a model loads it."""
    folders = tmp_path / "models"
    folders.mkdir()
    (folders / "small").symlink_to(tiny_model("llama"))
    with serving_app(tmp_path / "two", model_folders=(str(folders),)) as app:
        first = app.served.name
        watch(page, app)
        with app.connect() as running, app.connect() as waiting:
            running.send(encode_request("POST", CHAT_PATH, chat_body(stream=True, max_tokens=20_000)))
            assert eventually(lambda: app.app.health()[1]["num_decoding"] == 1)
            body = chat_body("Next.", model="small", stream=True, max_tokens=20_000, session_id="workshop")
            waiting.send(encode_request("POST", CHAT_PATH, body))
            assert page.eventually("document.querySelectorAll('#running > li').length === 2")
            listed = page.text("#running > li:last-child")
            assert "waits for small" in listed and "session workshop-" in listed and "openai_chat" in listed, listed
            running.close()
            assert page.eventually("document.getElementById('running').innerText.includes('writes')")
            assert page.eventually("!document.getElementById('running').innerText.includes('waits for')")
        assert page.eventually("document.querySelectorAll('#running > li').length === 0")
        assert page.eventually("/small\\s+loaded/.test(document.getElementById('models').innerText)")
        page.value("document.querySelector('#models button:not([hidden])').click()")
        assert page.eventually("document.getElementById('told').innerText.endsWith('is loaded.')")
        assert app.app.health()[1]["model"] == first
        assert page.complaints == []


def test_memory_and_a_raw_prompt_are_shown(app: AppUnderTest, page: Page) -> None:
    """RAM and disk against their budgets, and the machine's; a raw prompt that was changed has its character and no
    message; no counter has its own name only."""
    text = f"The {SECRET} by the window, the piano by the door and the drum by the stairs are tuned on Sundays. " * 9
    for day in range(2):
        asked = {"prompt": f"Day {day}. {text}", "max_tokens": 1, "session_id": "raw"}
        assert app.post(COMPLETION_PATH, asked).status == 200
    watch(page, app)
    assert page.eventually(
        "document.getElementById('misses').innerText.includes('prompt changed in the prompt: a number')"
    )
    assert "has a number at character 4" in page.text("#misses")
    report = app.get("/v1/cache").json
    meter = "document.querySelector('meter[aria-label^=\"{}\"]')"
    in_ram, on_disk, mlx = (
        meter.format(name) for name in ("Kept prompts (KV) in m", "Kept prompts (KV) on d", "MLX in use")
    )
    assert page.value(f"{in_ram}.max") == report["max_ram_bytes"]
    assert 0 < page.value(f"{in_ram}.value") <= report["max_ram_bytes"]
    assert page.value(f"{on_disk}.max") == report["disk"]["max_bytes"]  # type: ignore[index]
    assert page.value(f"{mlx}.max") > 2**30
    page.value(OPEN_ALL)
    assert "Requests: prompt changed" in page.text("#counters")
    assert "_" not in page.text("#counters")


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_a_narrow_window_and_dark_mode(app: AppUnderTest, page: Page, dark: bool) -> None:
    """360 pixels wide nothing hangs over the edge, and dark is dark."""
    watch(page, app)
    page.look_like(width=360, dark=dark)
    assert page.eventually("document.querySelector('#chart .uplot').clientWidth <= 360"), "drawn for the window"
    assert page.value("document.documentElement.scrollWidth") <= 360
    level = page.value("Number(getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0])")
    assert level < 60 if dark else level > 200
    assert page.complaints == []


def test_the_keyboard_is_enough(app: AppUnderTest, page: Page) -> None:
    """Tab reaches the skip link and a session; Enter opens it, it stays open while numbers come, and its turns are
    reached by buttons."""
    watch(page, app)
    reached = []
    for _ in range(30):
        page.press("Tab")
        reached.append(str(page.value("document.activeElement.tagName + ' ' + document.activeElement.textContent")))
        if "workshop" in reached[-1]:
            break
    assert reached[0].startswith("A Skip") and reached[-1].startswith("SUMMARY"), reached
    page.press("Enter")
    assert page.value("document.activeElement.parentElement.open") is True
    stamp = page.text("#foot")
    assert page.eventually(f"document.getElementById('foot').innerText !== {stamp!r}")
    assert page.value("document.activeElement.parentElement.open") is True
    assert page.eventually("document.querySelector('.turn').innerText.startsWith('Turn')")
    number = int(page.text(".turn strong").split()[1])
    page.press("Tab")
    assert page.value("document.activeElement.textContent") == "Earlier turn"
    page.press("Enter")
    assert page.text(".turn strong") == f"Turn {number - 1}"


def test_no_prompt_is_shown_unless_it_is_allowed(app: AppUnderTest, page: Page, tmp_path: Path) -> None:
    """The secret word stands nowhere on the page nor in what it fetches; with DASHBOARD_SHOW_TEXT the text around a
    difference does, and a session's first words."""
    watch(page, app)
    page.value(OPEN_ALL)
    assert page.eventually("document.querySelectorAll('.turn p').length > 0")
    assert SECRET not in str(page.value("document.documentElement.outerHTML"))
    assert "And number" not in page.text("body")
    with serving_app(tmp_path / "open", dashboard_show_text=True) as showing:
        lead(showing)
        watch(page, showing)
        page.value(OPEN_ALL)
        assert f"Where was the {SECRET}?" in page.text("#misses")
        assert f"Where is the {SECRET}?" in page.text("#sessions")
    kept = [path.read_bytes() for path in (tmp_path / "open" / "state").rglob("*") if path.is_file()]
    assert kept and all(SECRET.encode() not in each for each in kept)


def test_a_server_with_a_key_asks_for_it(page: Page, tmp_path: Path) -> None:
    """Without the key no number is shown; typed in, it is used and kept in the tab."""
    with serving_app(tmp_path / "locked", api_key=KEY) as app:
        page.open(f"http://127.0.0.1:{app.port}/dashboard")
        assert page.eventually("!document.getElementById('key-form').hidden")
        assert page.text("#reused") == "-" and page.text("#foot") == ""
        page.type(KEY)
        page.press("Enter")
        assert page.eventually("document.getElementById('link').textContent.includes('live')")
        assert page.eventually("document.querySelectorAll('#clients > li').length > 3")
        assert KEY not in str(page.value("document.documentElement.outerHTML"))
        assert page.value("localStorage.length") == 0
    assert [each for each in page.complaints if "401" not in each] == []


def test_a_server_that_ends_does_not_wait_for_the_page(page: Page, tmp_path: Path) -> None:
    """The page is told the end of the stream and tries again, until a server answers."""
    with serving_app(tmp_path) as app:
        watch(page, app)
    assert page.eventually("!document.getElementById('link').textContent.includes('live')")

"""The questions of docs/demo.md: the page is whole, and the script asks, compares and writes as it says."""

import re
from collections import Counter
from pathlib import Path

import pytest

from tests.scripts.conftest import run_script, script, start_script
from tests.serving import AppUnderTest

PAGE = """# A page

### 1. First

> One line
> and another?

**good**: because.

```text
nobody says this
```

Words between.

### 2. Second

> What?

**not judged**

```text
-
```
"""


def test_the_page_holds_twenty_questions_each_with_a_verdict() -> None:
    """Nothing of it is left out by the form that the script reads, and it says how many were good."""
    module = script("demo_answers.py")
    page = module.PAGE.read_text("utf-8")
    items = list(module.items_of(page))
    assert len(items) == page.count("\n### ") == 20
    assert all(str(item) in page and item.answer != "-" for item in items)
    verdicts = Counter(item.verdict for item in items)
    assert not verdicts["not judged"] and len({item.question for item in items}) == 20
    assert f"{verdicts['good']} good, {verdicts['half']} half, {verdicts['bad']} bad" in page


def test_changed_answers_are_told_and_written_without_a_verdict(
    server: AppUnderTest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second run finds all as it stands; a verdict stays with the answer that it judges, and words between stay."""
    module, page, url = script("demo_answers.py"), tmp_path / "page.md", f"http://127.0.0.1:{server.port}"
    monkeypatch.setattr(module, "MAX_TOKENS", 12)
    page.write_text(PAGE, "utf-8")
    command = (f"--base-url={url}", f"--page={page}")
    assert run_script("demo_answers.py", *command).returncode == 1 and page.read_text("utf-8") == PAGE
    done = run_script("demo_answers.py", *command, "--write")
    assert (
        done.returncode == 1
        and re.findall(r"^new   \d\.", done.stdout, re.MULTILINE) == ["new   1.", "new   2."]
        and done.stderr.startswith("2 answers")
    )
    first, second = module.items_of(page.read_text("utf-8"))
    assert (first.question, first.verdict, first.why) == ("One line\nand another?", "not judged", "")
    assert first.answer not in ("", "nobody says this") and "Words between." in page.read_text("utf-8")
    page.write_text(page.read_text("utf-8").replace("**not judged**", "**bad**: noise", 1), "utf-8")
    again = run_script("demo_answers.py", *command, "--write")
    assert again.returncode == 0 and re.findall(r"^same  \d\.", again.stdout, re.MULTILINE) == ["same  1.", "same  2."]
    assert next(iter(module.items_of(page.read_text("utf-8")))).verdict == "bad" and second.question == "What?"


@pytest.mark.long
def test_a_page_without_questions_is_an_error(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Nothing\n", "utf-8")
    done = start_script("demo_answers.py", f"--page={page}")
    assert done.returncode == 2 and "no questions" in done.stderr

"""Asks a running demo the questions of docs/demo.md, and says which answers are not the ones that stand there.

Each question is a conversation of its own, at temperature 0. The verdicts are a person's: `--write` puts new answers
into the file, with `not judged` before each that changed.
"""

import argparse
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from probing.report import run
from probing.wire import ProbeError, Server

PAGE = Path(__file__).resolve().parent.parent / "docs" / "demo.md"
MAX_TOKENS = 96
VERDICTS = ("good", "half", "bad", "not judged")
ITEM = re.compile(
    r"^(?P<heading>### \d+\. .+)\n\n(?P<asked>(?:> .*\n)+)\n"
    rf"\*\*(?P<verdict>{'|'.join(VERDICTS)})\*\*(?P<why>.*)\n\n```text\n(?P<answer>(?s:.*?))\n```$",
    re.MULTILINE,
)


@dataclass(frozen=True, slots=True)
class Item:
    """One question of the page. `why` is what stands behind the verdict, with its colon."""

    heading: str
    question: str
    verdict: str
    why: str
    answer: str

    def __str__(self) -> str:
        asked = "".join(f"> {line}\n" for line in self.question.splitlines())
        return f"{self.heading}\n\n{asked}\n**{self.verdict}**{self.why}\n\n```text\n{self.answer}\n```"

    def answered(self, answer: str) -> "Item":
        """With this answer; a verdict on another one is none."""
        return self if answer == self.answer else replace(self, verdict="not judged", why="", answer=answer)


def items_of(page: str) -> Iterator[Item]:
    """The questions of the page, in its order. Raises ProbeError where there are none."""
    found = list(ITEM.finditer(page))
    if not found:
        raise ProbeError("the page has no questions of the expected form")
    for match in found:
        question = "\n".join(line.removeprefix("> ") for line in match["asked"].splitlines())
        yield Item(match["heading"], question, match["verdict"], match["why"], match["answer"])


def ask(server: Server, item: Item) -> Item:
    """The item as the server answers it now."""
    messages = [{"role": "user", "content": item.question}]
    reply = server.chat({"model": "local", "messages": messages, "temperature": 0, "max_tokens": MAX_TOKENS})
    cut = " [...]" if reply.finish_reason == "length" else ""
    return item.answered(reply.content.strip().replace("```", "'''") + cut)


def main() -> int:
    """Ask, compare, perhaps write; returns the exit code."""
    parser = argparse.ArgumentParser(
        description="Ask the questions of docs/demo.md and compare the answers.",
        allow_abbrev=False,
        epilog="Exit code: 0 all answers as they stand there, 1 not, 2 where the server could not be asked.",
    )
    parser.add_argument("--base-url", default="http://127.0.0.1:8080", metavar="URL", help="the demo (%(default)s)")
    parser.add_argument("--write", action="store_true", help="put what changed into the page")
    parser.add_argument("--page", type=Path, default=PAGE, metavar="FILE", help="another page of that form")
    options = parser.parse_args()
    page = options.page.read_text("utf-8")
    server = Server(options.base_url.rstrip("/").removesuffix("/v1"), "none", 900.0)
    num_changed = 0
    for item in items_of(page):
        now = ask(server, item)
        is_same = now == item
        num_changed += not is_same
        print(f"{'same' if is_same else 'new '}  {item.heading.removeprefix('### ')}: {now.answer}", flush=True)
        page = page.replace(str(item), str(now))
    if options.write:
        options.page.write_text(page, "utf-8")
    print(f"{num_changed} answers are not those of the page.", file=sys.stderr)
    return 1 if num_changed else 0


if __name__ == "__main__":
    run(main)

"""Files in OpenAI's messages: text is read, and everything else is named instead of being guessed at."""

import base64
from collections.abc import Callable

import pytest

from kvserve.core import TextBlock
from kvserve.errors import BadRequest
from kvserve.protocols.openai_messages import read_message
from tests.protocols.responses_wire import parse

PDF = b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n"


def url(content: bytes, kind: str = "text/plain") -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def of_chat(**file: object) -> object:
    """What chat/completions makes of a file."""
    return read_message({"role": "user", "content": [{"type": "file", "file": file}]}, "m").blocks


def of_responses(**file: object) -> object:
    """What responses makes of it."""
    [message] = parse(input=[{"role": "user", "content": [{"type": "input_file", **file}]}]).turn.messages
    return message.blocks


both = pytest.mark.parametrize("read", [of_chat, of_responses])


@both
@pytest.mark.parametrize(
    "data",
    [
        url("näh\n".encode()),
        url("\ufeffnäh\n".encode(), "text/csv;charset=utf-8"),
        base64.b64encode("näh\n".encode()).decode(),
    ],
)
def test_a_text_file_is_its_text(read: Callable[..., object], data: str) -> None:
    """As a data URL or as base64 alone, below its name where it has one."""
    assert read(file_data=data) == (TextBlock("näh\n", is_ours=True),)
    assert read(file_data=data, filename="a.txt") == (TextBlock("a.txt\nnäh\n", is_ours=True),)
    assert read(file_data=data, filename=None, file_id=None) == (TextBlock("näh\n", is_ours=True),)


@both
def test_an_empty_file_says_nothing_but_its_name(read: Callable[..., object]) -> None:
    """A name is something."""
    assert read(file_data="data:text/plain;base64,", filename="a") == (TextBlock("a", is_ours=True),)


@both
@pytest.mark.parametrize(
    ("file", "told"),
    [
        ({"file_id": "file-1", "filename": "a.txt"}, "\nfilename: a.txt"),
        ({"file_url": "https://example.org/a.txt"}, "\nfile_url: https://example.org/a.txt"),
        ({"file_data": url(PDF, "application/pdf"), "filename": "a.pdf"}, "\nfilename: a.pdf"),
        ({"file_data": url(b"a\0b")}, ""),
    ],
)
def test_of_what_is_no_text_the_model_learns_the_name(
    read: Callable[..., object], file: dict[str, object], told: str
) -> None:
    """A client cannot take it out of its history; other documents would be guessed at."""
    assert read(**file) == (TextBlock(f"[file: cannot be read here]{told}", is_ours=True),)


@both
@pytest.mark.parametrize(
    ("file", "name", "words"),
    [
        ({"file_data": "data:text/plain,hello"}, "file_data", "expected base64"),
        ({"file_data": "@@@"}, "file_data", "expected base64"),
        ({"file_data": "näh"}, "file_data", "expected base64"),
        ({"file_data": ""}, "file_data", "not empty"),
        ({"file_data": 5}, "file_data", "string"),
        ({"filename": "a"}, "file_data", "required"),
        ({"file_data": url(b"a"), "filename": 5}, "filename", "string"),
    ],
)
def test_what_is_no_file_is_refused(
    read: Callable[..., object], file: dict[str, object], name: str, words: str
) -> None:
    """The error names the field."""
    with pytest.raises(BadRequest, match=words) as caught:
        read(**file)
    assert str(caught.value.param).endswith(f".{name}")


def test_a_nameless_empty_file_is_no_block() -> None:
    """As empty text is none."""
    content = [{"type": "file", "file": {"file_data": "data:;base64,"}}, {"type": "text", "text": "x"}]
    assert read_message({"role": "user", "content": content}, "m").blocks == (TextBlock("x"),)

"""What is read of an `.env` file without python-dotenv is what python-dotenv reads, or is said to be unknown."""

import io
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from dotenv import dotenv_values
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvserve.errors import StartupError
from kvserve.settings.env_file import UNKNOWN, Value, by_field, read_text, values_in
from kvserve.settings.kinds import KINDS
from tests.laws import num_examples

type Reader = Callable[[str], dict[str, Value] | None]

NAMES = st.sampled_from(("MLX_PORT", "mlx_port", "kv_bits", "A", "a.b", "É", "export", "'A'", '"A"', "'A", "A'", ""))
BEFORE = st.sampled_from(("", "export ", "export\t", "  ", "# ", "\ufeff", "\x0c", "export", "x "))
TEXTS = st.text(st.sampled_from("ab1 #'\"\\$={}:-\t\u00a0\x0b"), max_size=8)
LINES = st.builds("{}{}{}{}".format, BEFORE, NAMES, st.sampled_from(("=", " = ", "= ", "", " ")), TEXTS)
FILES = st.one_of(
    st.lists(st.tuples(LINES, st.sampled_from(("\n", "\r\n", "\r", "\n\n"))), max_size=4).map(
        lambda lines: "".join(line + end for line, end in lines)
    ),
    st.text(st.sampled_from("aA='\"\\ \n\r#$e{}\x85\ufeff"), max_size=16),
)


def contradiction(read: Reader, text: str) -> str:
    """Where the reader says something else than python-dotenv, "" where it does not: a name that it leaves out counts
    as one that is not set."""
    theirs = dotenv_values(stream=io.StringIO(text, newline=""), interpolate=True)
    if (ours := read(text)) is None:
        return ""
    if list(ours) != list(theirs):
        return f"{list(ours)} are not {list(theirs)}"
    wrong = {name: value for name, value in ours.items() if value is not UNKNOWN and value != theirs[name]}
    return f"{wrong} is not what is in {theirs}" if wrong else ""


@settings(max_examples=num_examples(400))
@given(FILES)
@example("A='x # y' # z\nB1=\"1\"\nMLX_PORT=8080 # mine\nkv_bits=a#b\nC= # c\nD=#d")
@example("A=1\nA=${B}\nB=$A")
@example("MLX_PORT=1\nmlx_port=2\nMLX_PORT=3")
@example("A=\"a\\\"b\"\nB='\\''\nC=1")
@example("FOO\nsource x.sh\nexport =5\n=1\nexport A\nexport  \n A = 1")
@example('A="x\nB=1\n"\nC="open\nD=1')
@example("'A\nB'=1\nexport 'C\nD'=2")
@example("\ufeffA=1\n\ufeffB=2")
def test_it_says_what_python_dotenv_says_or_that_it_does_not_know(text: str) -> None:
    """For any text: no value that differs, no name too many, none left out."""
    assert contradiction(values_in, text) == ""


def read_naively(text: str) -> dict[str, Value]:
    return {line.partition("=")[0]: line.partition("=")[2] for line in text.splitlines()}


def without(text: str, reader: Reader = values_in) -> dict[str, Value] | None:
    """A reader that leaves out what it does not know."""
    found = reader(text)
    return None if found is None else {name: value for name, value in found.items() if value is not UNKNOWN}


@pytest.mark.parametrize(
    ("reader", "text"),
    [
        (read_naively, "export A=1"),
        (read_naively, "A='1'"),
        (read_naively, "A=1 # one"),
        (without, "A=1\nB=${A}"),
        (without, 'A="\\""'),
        (lambda text: {}, "A=1"),
    ],
)
def test_another_reader_would_be_found_out(reader: Reader, text: str) -> None:
    """The control: one that takes texts as they are, one that leaves out what it does not know, one that says none."""
    assert contradiction(reader, text) != ""


def test_what_most_files_have_is_known() -> None:
    """Odd lines make nothing unknown but their own value; the example's own lines, put into force, are all read."""
    text = '\ufeffA=1\n export B = \'x y\' # z\r\nC=a # b\n\n# D=1\nE=\nF=$A\nA=2\nG\nsource x.sh\nH="\\""\nI=${A}\n'
    assert values_in(text) == {
        **{"A": "2", "B": "x y", "C": "a", "E": "", "F": "$A", "G": None},
        **{"H": UNKNOWN, "I": UNKNOWN},
    }
    assert values_in("A=1\nB='one\ntwo'\n") is None
    example_text = (Path(__file__).resolve().parents[2] / ".env.example").read_text("utf-8")
    put_in_force = re.sub("^#([A-Z][A-Z0-9_]*=)", r"\1", example_text, flags=re.MULTILINE)
    assert set(values_in(put_in_force) or ()) == {name.upper() for name in KINDS}


def test_the_first_source_that_sets_a_name_counts() -> None:
    """Empty texts and bare names set nothing; of two spellings the later one counts, known or not."""
    file: dict[str, Value] = {"A": "1", "a": "2", "B": "3", "b": "", "C": UNKNOWN, "c": "4", "D": "5", "d": UNKNOWN}
    assert by_field(file) == {"a": "2", "b": "3", "c": "4", "d": UNKNOWN}
    assert by_field({"A": "", "c": "6", "e": None}, file) == {"a": "2", "b": "3", "c": "6", "d": UNKNOWN}
    assert by_field({"A": "1", "a": None}) == {}


def test_what_is_no_file_is_not_read(tmp_path: Path) -> None:
    """A pipe gives its text once, to the server; a folder or nothing says nothing; another encoding cannot be read."""
    assert read_text(tmp_path / "absent") == read_text(tmp_path) == ""
    os.mkfifo(tmp_path / "pipe")
    assert read_text(tmp_path / "pipe") is None
    (tmp_path / "latin").write_bytes(b"A=\xe9\n")
    with pytest.raises(StartupError, match=r"latin cannot be read: 'utf-8' codec can't decode byte"):
        read_text(tmp_path / "latin")

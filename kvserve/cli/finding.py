"""What `kvserve doctor` has found, as a noun: in words for the person here, and what of it an issue may say."""

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "note", "bad"]

ANSWERS = "a kvserve answers"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at: `text` for the person here, and `shared`, what of it an issue may say."""

    name: str
    state: State
    text: str
    shared: str

"""The token that a generator has drawn for a row and not handed out: it is one token ahead of what clients hear.

A row's states stand behind every token that was handed out. They cannot be taken back, and the last token of a row that
enters again is always computed, so such a row takes the drawn one along. It knows mlx-lm's `BatchGenerator` and ours.
"""

from typing import Any

from kvserve.engine.rows import Row
from kvserve.engine.solo import SoloGenerator


def drawn_token(generator: Any, uid: int) -> int | None:
    """The token; None where the row's last prompt token has not gone through the model. It may have to be computed:
    raises what that raises."""
    if isinstance(generator, SoloGenerator):
        return generator.drawn_token(uid)
    batch = generator._generation_batch
    return int(batch._next_tokens[batch.uids.index(uid)].item()) if uid in batch.uids else None


def hand_out(row: Row, token: int) -> None:
    """Pass a token on to the row's client as a step does, and end the row where it is its last one."""
    if token in row.request.stop_tokens:
        row.finish("stop", num_hidden_tokens=1)
        return
    row.deliver(token)
    if len(row.generated) >= row.request.max_tokens:
        row.finish("length")

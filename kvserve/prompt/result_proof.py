"""Tries, once per model, whether an answer to a tool's result keeps its tokens in the next prompt, and says why not.

It renders a loop of its own and never sees a request.
"""

from kvserve.core import Message, TextBlock, ToolCallBlock, ToolResultBlock, Written
from kvserve.prompt.probe import PROBE_TOOL
from kvserve.prompt.stitch import Stitcher
from kvserve.prompt.template import ChatTemplate, PromptText
from kvserve.prompt.token_replay import ReadsMessages
from kvserve.prompt.tokenizer import Tokenizer

_CALL = ToolCallBlock("kwcall001", PROBE_TOOL.name, '{"kwparameter": "quartz"}')
_RESULT = "Basalt one"
_ASKED = (
    Message("user", (TextBlock("Amber lake"),)),
    Message("assistant", (_CALL,)),
    Message("tool", (ToolResultBlock(_CALL.call_id, (TextBlock(_RESULT),)),)),
)
_ANSWER = Message("assistant", (TextBlock("Green stone"),))
_LATER = Message("user", (TextBlock("Violet moon"),))


def lost_behind_results(
    tokenizer: Tokenizer, template: ChatTemplate, stitcher: Stitcher, says: ReadsMessages
) -> str | None:
    """Why an answer to a tool's result loses its tokens; None where it keeps them, where no answer does, and where it
    begins inside thinking."""
    prompt = _prompt(template, _ASKED)
    if not stitcher.replays or prompt.opens_reasoning:
        return None
    if prompt.adds_special_tokens:
        return "its chat template refuses results, and prompts with them are plain text"
    before = stitcher.tokens(prompt, (None,), says)
    ids = tokenizer.encode("Green ") + tokenizer.encode("stone")
    written = Written(_ANSWER, before.tail_ids, ids, opens_reasoning=False)
    later = _prompt(template, (*_ASKED, _ANSWER, _LATER))
    after = stitcher.tokens(later, (None, written), says).ids
    # what stands before the result may change for reasons of its own: here the model wrote no call
    kept, behind = before.tail_ids + ids, tokenizer.decode(before.ids + ids).partition(_RESULT)[2]
    is_kept = any(after[start : start + len(kept)] == kept for start in range(len(after)))
    if is_kept and tokenizer.decode(after).partition(_RESULT)[2].startswith(behind):
        return None
    head, words, _ = prompt.text.partition(_RESULT)
    if not later.text.startswith(head + words):
        return "its chat template writes what stands before them otherwise once something follows"
    return "its chat template begins them otherwise than a prompt ends"


def _prompt(template: ChatTemplate, messages: tuple[Message, ...]) -> PromptText:
    return template.write(messages, (PROBE_TOOL,), thinking=False)

"""What may stand behind a call that ends with its arguments: the next one, or what closes the calls."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvserve.core import ToolSpec
from kvserve.output.attempt import Attempt, Reading
from kvserve.output.tool_parsers.draft import Draft
from kvserve.output.tool_parsers.form import Scan, ToolForm


def reading_of(form: ToolForm, scan: Scan, tools: Sequence[ToolSpec], draft: Draft) -> Reading:
    """One way to read a call of the form."""
    broken = form.broken
    if broken is None:
        return Reading(scan, draft, form.close_tags)
    return Reading(scan, draft, form.close_tags, lambda text: broken(text, tools))


@dataclass(frozen=True, slots=True)
class Following:
    """Reads on behind a call of `form`, from one of `tags` on; `is_closed`: behind one that is closed already."""

    form: ToolForm | None = None
    is_closed: bool = False
    tags: tuple[str, ...] = ()

    @classmethod
    def of(cls, form: ToolForm | None, *, is_closed: bool = False) -> "Following":
        """What may follow a call of the form, if anything."""
        now = form.closed if is_closed and form is not None else form
        return cls(form, is_closed, now.follow_tags) if now is not None and now.follow_tags else NOTHING

    def closed(self) -> "Following":
        """What may follow where the call is closed."""
        return Following.of(self.form, is_closed=True) if not self.is_closed else self

    def attempt(self, tag: str, tools: Sequence[ToolSpec], draft: Draft) -> Attempt | None:
        """What begins with the tag; None where the tag alone closes the calls."""
        form = self.form
        now = form.closed if form is not None and self.is_closed else form
        assert form is not None and now is not None and now.follow is not None, "only then this tag is looked for"
        scan = now.follow(tag, tools, draft)
        if scan is None:
            return None
        reading = reading_of(form, scan, tools, draft)
        return Attempt(tag, [reading], form.stray_close, form, is_following=True)


NOTHING = Following()

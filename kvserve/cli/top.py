"""`kvserve top`: the dashboard's numbers in a terminal, once per second: reuse, requests that run, sessions, the last
misses. It follows /dashboard/events and shows what stands there."""

import time
from collections.abc import Iterator

import click
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from kvserve.cli.asking import Address, NoAnswer, address_of, server_options
from kvserve.cli.output import Json, json_option, print_json_line, printable_in, show

NUM_SESSIONS = 12
NUM_MISSES = 6
AGAIN_SECONDS = 2.0
UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


@click.command()
@click.option("--once", is_flag=True, help="Print the numbers once and end.")
@server_options
@json_option
def top(once: bool, server_url: str | None, api_key: str | None, as_json: bool) -> None:
    """Watch a running server in the terminal; Ctrl+C ends it. With --json one object per line.

    The exit code is 2 where the server cannot be watched.
    """
    server = address_of(server_url, api_key)
    if once:
        state = next(states(server))
        show(state, as_json, lambda: screen(printable_in(state)))
    elif as_json:
        for state in states(server):
            print_json_line(state)
    else:
        _watch(server)


def _watch(server: Address) -> None:
    console = Console(highlight=False)
    try:
        with Live(console=console, screen=console.is_terminal, auto_refresh=False) as live:
            for state in states(server):
                live.update(screen(printable_in(state)), refresh=True)
    except KeyboardInterrupt:
        return


def screen(state: Json) -> Group:
    """All that is shown of one event."""
    parts: list[Table | Tree | Text] = [head(state), figures(state)]
    if state["running"]:
        parts.append(running(state["running"]))
    if state["sessions"]:
        parts.append(sessions(state["sessions"]))
    parts.append(misses(state["misses"]) if state["misses"] else Text("Nothing was lost that could have been kept."))
    return Group(*parts)


def head(state: Json) -> Text:
    """Model, state and version."""
    health = state["health"]
    return Text(
        f"kvserve {health['version']}  {health['model']}  {health['status']}  up {span(health['uptime_seconds'])}",
        style="bold",
    )


def figures(state: Json) -> Table:
    """The last hour, first tokens, memory, counters."""
    health, cache = state["health"], state["cache"] or {}
    steps = state["activity"]["hour"]  # as `MinuteSums` has it
    num_requests, num_prompt, num_cached, num_written = (sum(step[column] for step in steps) for column in (1, 2, 3, 4))
    first = state["first_token_seconds"]
    rows = [
        ("last hour", f"{num_requests:,} requests, {num_written:,} tokens written"),
        ("prompts", f"{num_cached:,} reused, {num_prompt - num_cached:,} computed ({share(num_cached, num_prompt)})"),
        ("first token", f"{first['median']:.2f} s median, {first['p95']:.2f} s p95" if first else "-"),
        ("requests", f"{health['num_running']} running, {health['num_waiting']} waiting"),
        ("RAM", budget(cache.get("ram_bytes"), cache.get("max_ram_bytes"))),
    ]
    if (disk := cache.get("disk")) is not None:
        rows.append(("disk", f"{budget(disk['total_bytes'], disk['max_bytes'])}, {disk['num_errors']:,} errors"))
    if (shared := cache.get("remote")) is not None:
        rows.append(("shared cache", shared_line(shared)))
    if (warming := cache.get("warming")) is not None:
        used, wasted = warming["num_used_tokens"], warming["num_wasted_tokens"]
        spent = f"{warming['num_warmed_tokens']:,} tokens in {span(warming['seconds'])}"
        rows.append(("warmed", f"{spent}, {used:,} used by requests, {wasted:,} in vain"))
    if (drafts := cache.get("speculation")) is not None and drafts["num_drafted_tokens"]:
        right = share(drafts["num_accepted_tokens"], drafts["num_drafted_tokens"])
        saved = f"{drafts['seconds_saved']:.1f} s saved"
        rows.append(("drafts", f"{right} right, {drafts['tokens_per_step']:.1f} tokens a step, {saved}"))
    if state["causes"]:
        rows.append(("causes", ", ".join(f"{cause} {number:,}" for cause, number in state["causes"].items())))
    rows += [(name, str(number)) for name, number in (cache.get("counters") or {}).items()]
    table = Table(box=None, show_header=False, pad_edge=False)
    for name, value in rows:
        table.add_row(Text(name, style="dim"), Text(value))
    return table


def shared_line(shared: Json) -> str:
    """The cache that several servers share: how it is, what came and went, what went wrong."""
    is_left_alone = shared["state"] in ("down", "lying")
    state = f"{shared['state']}, left alone" if is_left_alone else shared["state"]
    moved = f"{size(shared['num_read_bytes'])} read, {size(shared['num_written_bytes'])} sent"
    found = f"{shared['num_hits']:,} of {shared['num_looks']:,} prompts found something"
    return f"{state}, {moved}, {found}, {shared['num_errors']:,} errors"


def running(requests: list[Json]) -> Table:
    """Requests that are not over."""
    table = Table("running", "stage", "prompt", "reused", "written", "seconds", box=None, pad_edge=False)
    for request in requests:
        done, total = request["num_done_tokens"], request["num_prompt_tokens"]
        table.add_row(
            request["request_id"][:12],
            stage(request),
            f"{done:,} of {total:,} ({share(done, total)})",
            f"{request['num_cached_tokens']:,}",
            f"{request['num_generated_tokens']:,}",
            f"{request['seconds']:.1f}",
        )
    return table


def stage(request: Json) -> str:
    """Where a request is, and for which model it waits."""
    return f"waiting for {request['model']}" if request["stage"] == "waiting for model" else request["stage"]


def sessions(found: list[Json]) -> Tree:
    """The sessions that were used last, each branch below the one that it left."""
    tree = Tree(Text(f"sessions ({len(found)})", style="bold"))
    for session in found[:NUM_SESSIONS]:
        node = tree.add(Text(f"{session['name']}, {span(session['idle_seconds'])} ago"))
        nodes: dict[int, Tree] = {}
        for branch in session["branches"]:
            parent = nodes.get(branch["parent"], node)
            nodes[branch["id"]] = parent.add(Text(branch_line(branch)))
    return tree


def branch_line(branch: Json) -> str:
    """One branch: its size, where it left, and what its last turn reused."""
    line = f"branch {branch['id']}: {branch['num_turns']} turns, {branch['num_tokens']:,} tokens"
    if branch["parent"] is not None:
        line += f", left {branch['parent']} after message {branch['fork_message']}"
    if (last := branch["last"]) is not None:
        line += f", {share(last['num_cached_tokens'], last['num_prompt_tokens'])} reused ({last['cause']})"
    return line


def misses(found: list[Json]) -> Text:
    """The last requests that computed again what could have been kept."""
    text = Text("computed again", style="bold")
    for miss in found[:NUM_MISSES]:
        reused = f"{miss['cached_tokens']:,} of {miss['num_prompt_tokens']:,} reused"
        text.append(f"\n{miss['request_id'][:12]}  {miss['cause']}{where(miss)}, {reused}", style="not bold")
        text.append(f"\n  {miss['remedy'] or miss['summary']}", style="not bold dim")
    return text


def where(miss: Json) -> str:
    """The place of a miss, as message and character."""
    place = miss["first_difference"]
    if place is None:
        return ""
    if place["tool"]:
        what = f"tool {place['tool']}, "
    else:
        what = "" if place["message_index"] is None else f"message {place['message_index']}, "
    return f" ({what}char {place['char']})"


def share(part: int, whole: int) -> str:
    """A part in percent, rounded down as on the dashboard: 100.0 % would hide what was computed."""
    return f"{1000 * part // whole / 10:.1f} %" if whole else "-"


def budget(num_bytes: int | None, limit: int | None) -> str:
    """Bytes against their limit."""
    if num_bytes is None:
        return "-"
    return size(num_bytes) if not limit else f"{size(num_bytes)} of {size(limit)} ({share(num_bytes, limit)})"


def size(num_bytes: float) -> str:
    """Bytes as a person reads them."""
    for unit in UNITS[:-1]:
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} {UNITS[-1]}"


def span(seconds: float) -> str:
    """A time as a person reads it."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"


def states(server: Address) -> Iterator[Json]:
    """What the server tells; a server that ended the stream is asked again. Raises NoAnswer for one never reached."""
    was_reached = False
    while True:
        try:
            for state in server.events("/dashboard/events"):
                if "error" in state:
                    raise NoAnswer(f"the stream failed: {state['error']}")
                was_reached = True
                yield state
        except NoAnswer:
            if not was_reached:
                raise
        time.sleep(AGAIN_SECONDS)

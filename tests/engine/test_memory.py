"""The ledger: what it adds up, what is left for KV, and which bounds it says are met."""

from dataclasses import replace

from kvserve.engine.memory import QUIET_SECONDS, MemoryLedger, MemoryPlan

PLAN = MemoryPlan(
    kv_bytes=100,
    batch_bytes=80,
    write_queue_bytes=10,
    read_ahead_bytes=5,
    records_bytes=3,
    draft_bytes=7,
    image_feature_bytes=2,
    buffer_bytes=1,
)


class Clock:
    """A time that a test moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_every_account_is_told_with_its_bound_and_their_sum() -> None:
    """What the engine says, and what is read where it is, make one total under one budget."""
    memory = MemoryLedger(PLAN)
    memory.say(live_bytes=40, copy_bytes=4)
    read = ("kept", "write_queue", "read_ahead", "records", "image_features", "buffers", "drafts")
    for number, account in enumerate(read):
        memory.open(account, lambda number=number: number + 1)  # type: ignore[arg-type, misc]
    report = memory.report()
    assert {name: held.num_bytes for name, held in report.accounts.items()} == {
        "live": 40,
        "copies": 4,
        "kept": 1,
        "write_queue": 2,
        "read_ahead": 3,
        "records": 4,
        "image_features": 5,
        "buffers": 6,
        "drafts": 7,
    }
    assert (report.total_bytes, report.budget_bytes) == (72, 128)
    assert report.accounts["kept"].max_bytes == 100 and report.accounts["copies"].max_bytes is None


def test_what_rows_and_full_queues_take_is_not_there_for_what_is_kept() -> None:
    """Of the ways to and from the disk only what is beyond their own budgets counts."""
    memory = MemoryLedger(PLAN)
    memory.say(live_bytes=40, copy_bytes=4)
    queued, kept = 10, 50
    memory.open("write_queue", lambda: queued)
    memory.open("kept", lambda: kept)
    assert memory.reserved_bytes == 44 and memory.has_room_for_kv(6) and not memory.has_room_for_kv(7)
    queued = 16
    assert memory.reserved_bytes == 50 and not memory.has_room_for_kv(1)
    kept = 0
    assert memory.has_room_for_kv(50)


def test_the_larger_of_both_budgets_bounds_all_kv() -> None:
    """Rows may take what is not for what is kept."""
    assert MemoryLedger(replace(PLAN, batch_bytes=300)).has_room_for_kv(300)
    assert not MemoryLedger(PLAN).has_room_for_kv(101)


def test_a_bound_is_told_once_when_it_is_met_and_once_when_that_is_over() -> None:
    """However often rows meet it; the report has what it costs, since when, and how often."""
    lines: list[str] = []
    clock = Clock()
    memory = MemoryLedger(PLAN, lines.append, clock)
    for _ in range(3):
        memory.press("kv_pool", "nothing is kept.")
        memory.press("kv_pool", "nothing is kept.")
        clock.now += 1
    assert lines == ["Memory for KV is full (PROMPT_CACHE_MAX_BYTES, MAX_BATCH_BYTES): nothing is kept."]
    [pressure] = memory.report().pressures
    assert (pressure.bound, pressure.cost, pressure.seconds, pressure.num_times) == (
        "kv_pool",
        "nothing is kept.",
        3,
        3,
    )
    memory.look()
    assert len(lines) == 1
    clock.now += QUIET_SECONDS
    memory.look()
    assert memory.report().pressures == () and "over, after 2 s and 3 times" in lines[1]
    memory.press("kv_pool", "nothing is kept.")
    assert len(lines) == 3


def test_a_bound_that_is_watched_lasts_as_long_as_it_is_met() -> None:
    """A full disk is a condition, not an event: it is over when it is over. Whoever watches it tells a person."""
    lines: list[str] = []
    memory = MemoryLedger(PLAN, lines.append, clock := Clock())
    cost: str | None = "KV is in RAM only."
    memory.watch("disk", lambda: cost)
    clock.now = 5
    assert [each.bound for each in memory.report().pressures] == ["disk"]
    clock.now = 500
    memory.look()
    assert memory.report().pressures[0].seconds == 495
    cost = None
    assert memory.report().pressures == () and lines == []

"""Seeded traces of what agents send: bursts of sub-agents, long prompts, streams, title requests. No policy."""

import random
from dataclasses import dataclass, field

type Span = tuple[str, int]
"""A part of a prompt that others may have too: its name and its tokens."""


@dataclass(frozen=True, slots=True)
class Job:
    """One request: when it comes, what its prompt is made of, how long its answer is, when its client leaves."""

    at: float
    prompt: tuple[Span, ...]
    num_answer_tokens: int
    leaves_at: float | None = None
    num_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_tokens", sum(length for _, length in self.prompt))


@dataclass(frozen=True, slots=True)
class Trace:
    """Jobs in the order in which they come, and the machine: a step takes `step_seconds` and `row_seconds` for each
    row; `max_tokens` of KV have room."""

    jobs: tuple[Job, ...]
    tokens_per_second: float
    step_seconds: float
    row_seconds: float
    max_rows: int
    max_tokens: int


def trace_of(seed: int) -> Trace:
    """A trace; the same for the same seed."""
    rng = random.Random(seed)
    jobs: list[Job] = []
    for client in range(rng.choice((1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64))):
        kind = rng.choices((_burst, _long, _stream, _title, _turn), (3, 1, 2, 3, 4))[0]
        jobs += kind(rng, f"{client}", rng.uniform(0, 40))
    jobs = [_leaving(rng, job) for job in jobs]
    longest = max(job.num_tokens + job.num_answer_tokens for job in jobs)
    return Trace(
        tuple(sorted(jobs, key=lambda job: job.at)),
        tokens_per_second=rng.choice((1500.0, 3000.0, 6000.0)),
        step_seconds=rng.choice((0.03, 0.06, 0.12)),
        row_seconds=rng.choice((0.0, 0.002, 0.005)),
        max_rows=rng.choice((2, 4, 8, 8, 8, 16)),
        max_tokens=int(longest * rng.choice((1.1, 2, 4, 20))),
    )


def _burst(rng: random.Random, name: str, at: float) -> list[Job]:
    """A parent, its sub-agents, which share a trunk of their own, and a title request."""
    trunk = (f"sub-agents of {name}", rng.choice((400, 2_000, 8_000)))
    parent = Job(at, (("system", 3_000), (f"task {name}", rng.randrange(20, 4_000))), rng.randrange(20, 120))
    found = [parent, *_title(rng, f"title {name}", at)]
    for number in range(rng.randrange(2, 8)):
        own = (f"sub-agent {name} {number}", rng.randrange(20, 1_500))
        found.append(Job(at + rng.choice((0.0, 0.0, 0.5)), (trunk, own), rng.randrange(5, 150)))
    return found


def _long(rng: random.Random, name: str, at: float) -> list[Job]:
    """A prompt of up to 100k tokens, sometimes with a short one that begins with the same words."""
    trunk, rest = rng.choice((400, 3_000)), rng.choice((15_000, 40_000, 100_000))
    found = [Job(at, ((f"long {name}", trunk), (f"rest {name}", rest)), rng.randrange(1, 100))]
    if rng.random() < 0.5:
        found.append(Job(at + 0.3, ((f"long {name}", trunk), (f"short {name}", 40)), 5))
    return found


def _stream(rng: random.Random, name: str, at: float) -> list[Job]:
    return [Job(at / 4, ((f"stream {name}", rng.randrange(10, 300)),), rng.randrange(200, 900))]


def _title(rng: random.Random, name: str, at: float) -> list[Job]:
    return [Job(at + rng.uniform(0, 0.2), ((f"title {name}", rng.randrange(20, 200)),), rng.randrange(1, 12))]


def _turn(rng: random.Random, name: str, at: float) -> list[Job]:
    """A few turns of one conversation, each with all that was said before."""
    spans: list[Span] = [("system", 3_000)]
    found = []
    for number in range(rng.randrange(1, 4)):
        spans.append((f"turn {name} {number}", rng.randrange(50, 5_000)))
        found.append(Job(at + number * rng.uniform(2, 10), tuple(spans), rng.randrange(5, 200)))
    return found


def _leaving(rng: random.Random, job: Job) -> Job:
    """One client in twelve does not wait for the end."""
    if rng.random() >= 1 / 12:
        return job
    return Job(job.at, job.prompt, job.num_answer_tokens, job.at + rng.choice((0.1, 1.0, 5.0, 20.0)))

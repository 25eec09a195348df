"""The options that all scripts over HTTP share: where the server is, how to get in, which model is asked."""

import argparse
from dataclasses import dataclass

from probing.wire import Server


@dataclass(frozen=True, slots=True)
class Target:
    """`chat` is the address that a client would use, `own` kvserve's own port, None where it is not to be asked."""

    chat: Server
    own: Server | None
    model: str


def make_parser(description: str) -> argparse.ArgumentParser:
    """A parser with the shared options; exit codes are named at the end of its help."""
    parser = argparse.ArgumentParser(
        description=description,
        allow_abbrev=False,
        epilog="Exit code: 0 all expectations held, 1 one of them failed, 2 the script could not be run.",
    )
    parser.add_argument(
        "--base-url", default="http://127.0.0.1:4000", metavar="URL", help="where the chat goes (%(default)s)"
    )
    parser.add_argument(
        "--server-url",
        default="http://127.0.0.1:8080",
        metavar="URL",
        help="kvserve's own port, for /v1/cache (%(default)s); an empty one is not asked",
    )
    parser.add_argument("--model", default="local", metavar="NAME", help="the model name that is sent (%(default)s)")
    parser.add_argument("--api-key", default="none", metavar="KEY", help="sent as Bearer to both (%(default)s)")
    parser.add_argument(
        "--timeout", type=float, default=900.0, metavar="SECONDS", help="longest silence to wait for (%(default)s)"
    )
    return parser


def target_of(options: argparse.Namespace) -> Target:
    """The addresses that the parsed options name."""

    def server(url: str) -> Server:
        return Server(url.rstrip("/").removesuffix("/v1"), options.api_key, options.timeout)

    return Target(server(options.base_url), server(options.server_url) if options.server_url else None, options.model)


def share(text: str) -> float:
    """A percentage from the command line, as a share between 0 and 1."""
    value = float(text.removesuffix("%")) / 100
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is no percentage")
    return value

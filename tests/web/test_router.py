"""The endpoint table's lookup."""

from kvserve.protocols.error_bodies import encode_openai_error
from kvserve.web.exchange import HttpExchange
from kvserve.web.router import Route, Router
from kvserve.web.service import WebService
from tests.web.fakes import FakeService


def nothing(exchange: HttpExchange, service: WebService) -> None:
    """A row's function."""


ROUTER = Router(
    (
        Route("GET", "/a", nothing),
        Route("DELETE", "/a", nothing),
        Route("GET", "/a/*", nothing),
        Route("POST", "/a/b/*", nothing),
        Route("PUT", "/a/*/end", nothing),
        Route("POST", "/v7/talk", nothing),
        Route("GET", "/v7/talk/*", nothing),
        Route("GET", "/v7/a", nothing),
    ),
    FakeService(),
    encode_openai_error,
    prefix="/v7",
)


def test_exact_paths_and_their_methods() -> None:
    """GET rows answer HEAD; Allow names everything possible."""
    match = ROUTER.find("/a")
    assert match.methods == ("DELETE", "GET", "HEAD", "OPTIONS")
    assert match.route("HEAD") is match.route("GET") is not None
    assert match.route("POST") is None


def test_the_longest_prefix_wins_and_leaves_the_rest() -> None:
    """A rest may contain slashes; an empty rest is no match."""
    assert (ROUTER.find("/a/x/y").path_rest, ROUTER.find("/a/x/y").methods) == ("x/y", ("GET", "HEAD", "OPTIONS"))
    assert (ROUTER.find("/a/b/c").path_rest, ROUTER.find("/a/b/c").methods) == ("c", ("OPTIONS", "POST"))
    assert ROUTER.find("/a/").routes == {}
    assert ROUTER.find("/ab").routes == {}


def test_a_star_may_stand_in_the_middle() -> None:
    """What comes before and behind it counts for the longest pattern; something has to stand for the star."""
    match = ROUTER.find("/a/x/y/end")
    assert (match.path_rest, match.methods) == ("x/y", ("OPTIONS", "PUT"))
    assert (ROUTER.find("/a/end").path_rest, ROUTER.find("/a/end").methods) == ("end", ("GET", "HEAD", "OPTIONS"))
    assert ROUTER.find("/a/b/x/end").methods == ("OPTIONS", "PUT"), "the longer of two that fit"
    assert ROUTER.find("/a//end").methods == ("GET", "HEAD", "OPTIONS"), "nothing stands for the star"


def test_an_unknown_path_belongs_to_the_nearest_endpoint_above_it() -> None:
    """Whole parts of the path count, and patterns are no endpoints."""
    for path in ("/a/", "/a/x", "/a/x/y"):
        assert (row := ROUTER.above(path)) is not None and row.path == "/a"
    for path in ("/ab", "/b/c", "/", "", "*", "/a"):
        assert ROUTER.above(path) is None


def test_a_path_of_many_parts_costs_a_look_at_each_endpoint() -> None:
    """Anybody may send one, before a key is asked for: it is not taken apart."""

    class Path(str):
        __slots__ = ("num_cuts",)

        def rpartition(self, separator: str, /) -> tuple[str, str, str]:
            raise AssertionError("one cut per part is quadratic")

    assert ROUTER.above(Path("/" * 60_000)) is None
    assert (row := ROUTER.above(Path("/a" + "/" * 60_000))) is not None and row.path == "/a"


def test_a_path_may_lack_the_prefix() -> None:
    """Exact or with a rest, and what is not there takes the form of the endpoint that it continues; a path that is in
    the table as it is means that one."""
    assert ROUTER.find("/talk") == ROUTER.find("/v7/talk") and ROUTER.find("/talk").routes
    assert ROUTER.find("/talk/x/y") == ROUTER.find("/v7/talk/x/y")
    assert ROUTER.find("/talk/x/y").path_rest == "x/y"
    assert ROUTER.above("/talk/x") is ROUTER.above("/v7/talk/x") is not None
    assert ROUTER.find("/a").route("DELETE") is not None
    assert ROUTER.find("/v7/v7/talk").routes == {}

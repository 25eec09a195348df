"""Which paths exist on port 4000: those of the server's own port, under the same protection, and three of LiteLLM's."""

import pytest

from kvserve.errors import MethodNotAllowed, NotFound
from kvserve.proxy.paths import ROUTES, find_route
from kvserve.web import routes as web_routes
from kvserve.web.router import Route as WebRoute


@pytest.mark.parametrize("row", web_routes.ROUTES, ids=lambda row: f"{row.method} {row.path}")
def test_whatever_the_server_serves_the_proxy_serves(row: WebRoute) -> None:
    """Each row of the endpoint table, with the key where the server wants it and without where it does not."""
    found = find_route(row.method, row.path.replace("*", "one/two"))
    assert found.needs_key == row.needs_key
    if row.method == "GET" and found.way == "direct":
        assert find_route("HEAD", row.path.replace("*", "one/two")) == found


def test_what_only_the_proxy_serves_is_litellms_readiness() -> None:
    """Its watcher asks for it."""
    own = {row.path for row in web_routes.ROUTES}
    assert set(ROUTES) - own == {"/health/readiness", "/health/liveliness"}


@pytest.mark.parametrize(
    ("path", "whole", "way"),
    [
        ("/chat/completions", "/v1/chat/completions", "litellm"),
        ("/completions", "/v1/completions", "as it is"),
        ("/messages", "/v1/messages", "as it is"),
        ("/messages/count_tokens", "/v1/messages/count_tokens", "as it is"),
        ("/responses", "/v1/responses", "as it is"),
    ],
)
def test_paths_without_their_version(path: str, whole: str, way: str) -> None:
    """Clients whose base URL names the port alone reach the same as those that add `/v1`."""
    found = find_route("POST", path)
    assert (found.path, found.way) == (whole, way)
    assert find_route("POST", whole) == found
    assert find_route("GET", "/models/a/b").path == "/v1/models/a/b"
    assert find_route("GET", "/responses/resp_1").path == "/v1/responses/resp_1"


@pytest.mark.parametrize(
    "path", ["/v1/v1/models", "/modelsx", "/cache", "/v1/health", "/v1/cache/", "/v1/metrics", "/*"]
)
def test_nothing_else_is_added_to_or_left_out(path: str) -> None:
    """Only the protocols' own paths are found without `/v1`."""
    with pytest.raises(NotFound):
        find_route("GET", path)


@pytest.mark.parametrize(
    "path", ["/v1/responses/../cache", "/responses/..", "/v1/agents/x/../../cache", "/v1/agents/./x"]
)
def test_a_path_that_climbs_is_not_passed_through_litellm(path: str) -> None:
    """Its client would tidy it up, so that another path arrives than was judged. Names with dots in them are names."""
    for method in ("GET", "DELETE"):
        with pytest.raises(NotFound):
            find_route(method, path)
    for name in ("/v1/agents/a..b", "/v1/responses/...", "/v1/agents/..x/generate"):
        assert find_route("GET", name).path == name


def test_models_are_listed_in_the_form_of_the_client() -> None:
    """By its header: LiteLLM lists them as OpenAI does, whoever asks."""
    assert find_route("GET", "/v1/models").way == "litellm"
    for path in ("/v1/models", "/models", "/v1/models/org/name"):
        assert find_route("GET", path, {"anthropic-version"}).way == "direct"


def test_the_longest_beginning_counts() -> None:
    """The stream of the dashboard wants the key; a file of that page does not."""
    assert find_route("GET", "/dashboard/events").needs_key
    assert not find_route("GET", "/dashboard/page.js").needs_key
    with pytest.raises(MethodNotAllowed):
        find_route("POST", "/v1/cache/explain")

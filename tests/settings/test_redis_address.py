"""A URL of a Redis server is read whole or refused, and what is shown of it holds no secret."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvserve.errors import SettingError, StartupError
from kvserve.settings.kinds import KINDS
from kvserve.settings.redis_address import parse_address
from kvserve.settings.start_checks import known_settings, refuse_shared_without_disk

WORDS = st.text(st.characters(codec="utf-8", exclude_categories=("Cs",)), min_size=1, max_size=12)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://cache.lan", "redis://cache.lan:6379/0"),
        ("redis://10.0.0.5:7000/3", "redis://10.0.0.5:7000/3"),
        ("rediss://me:pass%40word@[::1]:7000/0?ssl_ca_certs=/etc/ca.pem", "rediss://[::1]:7000/0"),
    ],
)
def test_what_is_shown_names_the_place_alone(url: str, shown: str) -> None:
    """Host, port and database."""
    assert parse_address(url).shown == shown
    assert "pass" not in repr(parse_address(url)) and "ca.pem" not in repr(parse_address(url))


@given(WORDS, WORDS)
def test_user_and_password_are_read_as_they_were_meant(user: str, password: str) -> None:
    """Whatever characters they have, once they are percent-encoded."""
    from urllib.parse import quote

    found = parse_address(f"redis://{quote(user, safe='')}:{quote(password, safe='')}@host:1/0")
    assert (found.user, found.password, found.host, found.port) == (user, password, "host", 1)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "http://host",
        "redis://",
        "redis://host:0",
        "redis://host:70000",
        "redis://host:x",
        "redis://host/x",
        "redis://host/-1",
        "redis://host?ssl_ca_certs=/ca",
        "rediss://host?ssl_cert_reqs=none",
        "rediss://host?ssl_ca_certs=",
        "redis://host#x",
    ],
)
def test_what_is_no_such_url_is_refused_and_not_shown(url: str) -> None:
    """It may hold a password in a place that was not expected."""
    with pytest.raises(ValueError, match="no URL"):
        parse_address(url)
    with pytest.raises(SettingError) as refused:
        known_settings({}, {"REMOTE_CACHE_URL": f"{url}secret#secret"}, "")
    assert "secret" not in str(refused.value) and "redis://" in KINDS["remote_cache_url"].expected


def test_it_needs_the_disk() -> None:
    """Who wants no words on a disk wants none on a network."""
    refuse_shared_without_disk(None, True)
    refuse_shared_without_disk("redis://host", False)
    with pytest.raises(StartupError, match="REMOTE_CACHE_URL needs the disk"):
        refuse_shared_without_disk("redis://host", True)

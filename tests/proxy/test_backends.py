"""In which order backends are asked for a key."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvserve.errors import SettingError
from kvserve.proxy.backends import BackendAddress, rendezvous
from kvserve.settings.backend_list import BackendParts, backends_in
from kvserve.settings.kinds import KINDS, SECRETS
from kvserve.settings.start_checks import known_settings, refuse_backends

NAMES = st.lists(st.text("abcdef0123.:-", min_size=1, max_size=12), min_size=1, max_size=6, unique=True)


def fleet(*names: str) -> list[BackendAddress]:
    return [BackendAddress(name, f"http://{name}") for name in names]


def names_of(order: tuple[BackendAddress, ...]) -> list[str]:
    return [backend.name for backend in order]


@given(NAMES, st.binary(max_size=40), st.randoms())
def test_every_proxy_finds_the_same_order(names: list[str], key: bytes, random: object) -> None:
    """However the operator wrote the list, and whatever the addresses are there."""
    shuffled = list(names)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    elsewhere = [BackendAddress(name, f"https://other/{name}", "key") for name in shuffled]
    assert names_of(rendezvous(key, fleet(*names))) == names_of(rendezvous(key, elsewhere))


@given(NAMES, st.binary(max_size=40), st.integers(0, 5))
def test_one_that_goes_moves_nothing_but_its_own(names: list[str], key: bytes, which: int) -> None:
    """The others keep their order, so its keys go to their second choice and come back with it."""
    gone = names[which % len(names)]
    rest = [name for name in names if name != gone]
    assert names_of(rendezvous(key, fleet(*rest))) == [
        name for name in names_of(rendezvous(key, fleet(*names))) if name != gone
    ]


def test_keys_are_spread() -> None:
    """Evenly as first and as second choice: no session of a backend that is gone waits behind all the others."""
    orders = [names_of(rendezvous(b"%d" % number, fleet("a", "b", "c"))) for number in range(3000)]
    for place in (0, 1):
        assert all(900 < num < 1100 for num in Counter(order[place] for order in orders).values())


def test_backends_as_an_operator_writes_them() -> None:
    """A name is the place unless it is given; a key may have any character, percent-encoded."""
    written = ("http://Box.local:8080/", "b=https://k%2F%40y@10.0.0.2", "http://[::1]:81")
    assert backends_in(written) == (
        BackendParts("box.local:8080", "http://box.local:8080", None),
        BackendParts("b", "https://10.0.0.2", "k/@y"),
        BackendParts("[::1]:81", "http://[::1]:81", None),
    )


@pytest.mark.parametrize(
    "written",
    ["box:8080", "ftp://box", "http://", "http://box/v1", "http://box:0", "a b=http://box", "http://a,http://a",
     "x=http://a,x=http://b", "x=http://a,y=http://a", "http://box:8080?x"],
)  # fmt: skip
def test_what_is_no_list_of_backends_is_refused(written: str) -> None:
    """Each form, and a name or a URL that comes twice."""
    with pytest.raises(ValueError):
        KINDS["backends"].read(written)


@pytest.mark.parametrize(
    ("name", "written"),
    [("backends", "http://very-secret@box:8080/v1"), ("proxy_secret", "very-secret"), ("api_key", "very-secret")],
)
def test_no_message_quotes_a_key(name: str, written: str) -> None:
    """What cannot be used is named by its setting; other values are shown."""
    assert name in SECRETS
    if name == "api_key":
        return  # any text will do
    with pytest.raises(SettingError) as refused:
        known_settings({}, {name.upper(): written}, "")
    assert name.upper() in str(refused.value) and "very-secret" not in str(refused.value)
    with pytest.raises(SettingError, match="65536"):
        known_settings({}, {"MLX_PORT": "65536"}, "")


def test_a_server_with_a_proxy_of_its_own_takes_no_backends() -> None:
    """Its proxy would not ask them: no setting that does nothing."""
    refuse_backends(())
    with pytest.raises(SettingError, match="--no-proxy"):
        refuse_backends(("http://a",))

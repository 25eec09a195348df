"""Who may use port 4000 beside API_KEY: the file of API_KEYS_FILE, read again when it changes, and how a holder is told
to the backend. It knows hashes of keys, never a key, and no socket."""

import hashlib
import os
import re
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvserve.core import HELD, KEY_HEADER, principal_digest
from kvserve.errors import NotReady, SettingError, Unauthorized
from kvserve.proxy.access import Headers, is_among, sent_keys

LOOK_SECONDS = 1.0
"""The file is looked at so often at most: a key that was taken out is refused within this time."""

_FRESH_NS = 2_000_000_000
"""A file that was written so shortly before it was read may change again without a new time: some file systems count
whole or every second second."""

MAX_PER_MINUTE = 100_000
MAX_ROWS = 10_000
_SHA256 = re.compile(r"[0-9a-f]{64}")
_FIELDS = ("key_sha256", "principal", "requests_per_minute", "rows_at_once", "operator")


@dataclass(frozen=True, slots=True)
class KeyHolder:
    """Who has a key. `principal` owns what is kept, whichever of its keys a request carries; "" is API_KEY's own, whose
    records are those of that key. Limits are None where there is none; an operator may use the paths of operators."""

    name: str
    principal: str
    requests_per_minute: int | None = None
    rows_at_once: int | None = None
    is_operator: bool = False

    @property
    def digest(self) -> str:
        """By which the principal's records are found; "" for API_KEY's own."""
        return principal_digest("principal", self.principal)


API_KEYS_OWN = KeyHolder("API_KEY", "", is_operator=True)
"""Who has API_KEY: the operator of the server, without limits."""


@dataclass(frozen=True, slots=True)
class KeyTable:
    """The holders in the order of the file, and whose a key is by its SHA-256 in hexadecimal digits."""

    holders: tuple[KeyHolder, ...] = ()
    by_sha256: Mapping[str, KeyHolder] = field(default_factory=dict)

    def holder_of(self, sent: Sequence[bytes]) -> KeyHolder | None:
        """Whose the first known one of these keys is. Hashes are looked up, so the time tells nothing of a key."""
        found = (self.by_sha256.get(hashlib.sha256(key).hexdigest()) for key in sent)
        return next((holder for holder in found if holder is not None), None)

    def num_keys(self, holder: KeyHolder) -> int:
        """How many keys a holder has."""
        return sum(each is holder for each in self.by_sha256.values())


def key_sha256(key: str) -> str:
    """A key as the file has it."""
    return hashlib.sha256(key.encode("utf-8")).hexdigest()


# --- reading ----------------------------------------------------------------------------------------------------------


def read_keys(text: str) -> KeyTable:
    """The table of a file's text. Raises ValueError with the reason, in which no value of the file stands."""
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"it is no TOML: {error}") from None
    holders: list[KeyHolder] = []
    by_sha256: dict[str, KeyHolder] = {}
    for name, table in tables.items():
        if not isinstance(table, dict):
            raise ValueError(f"{name!r} is no table: a holder begins with [NAME]")
        holder = _holder(name, table)
        holders.append(holder)
        for digest in _hashes(name, table.get("key_sha256")):
            if digest in by_sha256:
                raise ValueError(f"[{name}] has a key that [{by_sha256[digest].name}] has too")
            by_sha256[digest] = holder
    return KeyTable(tuple(holders), by_sha256)


def _holder(name: str, table: Mapping[str, object]) -> KeyHolder:
    if not name.strip() or not name.isprintable():
        raise ValueError("a holder has no name that can be read")
    if unknown := [field for field in table if field not in _FIELDS]:
        raise ValueError(f"[{name}] has {unknown[0]!r}, which is none of {', '.join(_FIELDS)}")
    principal, is_operator = table.get("principal", name), table.get("operator", False)
    if not isinstance(principal, str) or not principal.strip() or not principal.isprintable():
        raise ValueError(f"[{name}] principal is no text that can be read")
    if not isinstance(is_operator, bool):
        raise ValueError(f"[{name}] operator is neither true nor false")
    per_minute = _limit(name, table, "requests_per_minute", MAX_PER_MINUTE)
    return KeyHolder(name, principal, per_minute, _limit(name, table, "rows_at_once", MAX_ROWS), is_operator)


def _limit(name: str, table: Mapping[str, object], field: str, highest: int) -> int | None:
    value = table.get(field)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= highest:
        raise ValueError(f"[{name}] {field} is no whole number from 1 to {highest}")
    return value


def _hashes(name: str, value: object) -> list[str]:
    found = value if isinstance(value, list) else []
    if not found or not all(isinstance(each, str) and _SHA256.fullmatch(each) for each in found):
        raise ValueError(f"[{name}] key_sha256 is no list of SHA-256 in 64 hexadecimal digits (`kvserve keys new`)")
    return found


def table_in(path: Path) -> KeyTable:
    """The table of a file. Raises ValueError with the reason."""
    try:
        return read_keys(path.read_text("utf-8-sig"))
    except OSError as error:
        raise ValueError(f"it cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ValueError("it is no text in UTF-8") from None


def refuse_unusable_keys(path: Path | None) -> None:
    """Raises SettingError for a file without a table; None names no file."""
    try:
        if path is not None:
            table_in(path)
    except ValueError as error:
        raise SettingError("API_KEYS_FILE", str(path), f"a file of keys ({error}); docs/clients.md has one") from None


# --- while requests come ----------------------------------------------------------------------------------------------


class KeysFile:
    """The file as it is now. One thread uses it. `tell` gets a line when the file cannot be used any more; then the
    last good table goes on, and without one nobody but API_KEY's own is known."""

    def __init__(
        self,
        path: Path,
        api_key: str | None,
        tell: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        wall_clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._path = path
        self._api_key = api_key
        self._tell = tell
        self._clock = clock
        self._wall_clock_ns = wall_clock_ns
        self._table: KeyTable | None = None
        self._told = ""
        self._seen: tuple[int, ...] | None = None
        self._looked_at = -LOOK_SECONDS + clock()
        self._look()

    def holder(self, headers: Headers) -> KeyHolder:
        """Who sends a request with these headers. Raises Unauthorized, and NotReady where no file could be read yet."""
        sent = sent_keys(headers)
        if self._api_key is not None and is_among(self._api_key, sent):
            return API_KEYS_OWN
        if (table := self.table()) is None:
            raise NotReady("The file of keys cannot be read; the operator finds the reason in LiteLLM's log.")
        if (holder := table.holder_of(sent)) is None:
            raise Unauthorized(
                "The API key is missing or wrong: send a key that this server's operator gave you, as "
                "`Authorization: Bearer KEY` or `x-api-key`."
            )
        return holder

    def table(self) -> KeyTable | None:
        """The last good table, after a look at the file where it is time for one."""
        self._look()
        return self._table

    def _look(self) -> None:
        now = self._clock()
        if now - self._looked_at < LOOK_SECONDS:
            return
        self._looked_at = now
        began_ns = self._wall_clock_ns()
        try:
            stat = os.stat(self._path)
            seen: tuple[int, ...] = (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
        except OSError:
            seen = ()
        if seen and seen == self._seen:
            return
        try:
            self._table = table_in(self._path)
            self._told = ""
        except ValueError as error:
            which = "No key of it counts" if self._table is None else "The keys that it had before count"
            self._say(f"API_KEYS_FILE cannot be used: {error}. {which}.")
        is_settled = bool(seen) and began_ns - max(seen[3:]) > _FRESH_NS
        self._seen = seen if is_settled else None

    def _say(self, line: str) -> None:
        if line != self._told:
            self._told = line
            self._tell(line)


def headers_of_holder(
    headers: Sequence[tuple[bytes, bytes]], holder: KeyHolder, api_key: str | None
) -> list[tuple[bytes, bytes]]:
    """A request's headers with the server's own key in the place of the holder's, and whose request it is."""
    kept = [pair for pair in headers if pair[0].lower() not in (b"authorization", b"x-api-key")]
    own = [(b"authorization", f"Bearer {api_key}".encode())] if api_key is not None else []
    told = [(KEY_HEADER.encode(), f"{HELD} {holder.digest}".encode())] if holder.digest else []
    return [*kept, *own, *told]

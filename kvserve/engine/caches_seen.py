"""What a start has found out of a model's caches by trying them, remembered for the next start of the same model.

    find       the weights are in memory and it is known which they are: what a look at them has shown before
    remember   a look is over in which nothing went wrong, on caches of classes that are known here

A look follows from the model's bytes, from the files of what computes with them, from the machine, the BLAS and how KV
is quantised. All of it is the key, to the letter: where anything is another, the model is looked at again. What was
found out about drafts goes with it, where these were on. It knows numbers and kinds, no arrays, and no model's name.
"""

import hashlib
import importlib.util
import json
import os
import platform
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx

from kvserve.engine.checked_file import CheckedFile, DamagedFile
from kvserve.engine.draft_nouns import DraftsSeen
from kvserve.engine.kv_buffers import flat_caches
from kvserve.engine.kv_size import KvSize
from kvserve.engine.leaf_forms import LeafForm, is_known
from kvserve.engine.model import CacheSupport, LoadedModel, Probed
from kvserve.engine.model_digest import ModelDigest
from kvserve.engine.model_files import CACHES_FILE
from kvserve.engine.quantised import KvSettings

FORMAT = 2
PACKAGES = ("mlx", "mlx_lm", "mlx_vlm", "nvidia", "kvserve")
"""Whose code a look runs; `nvidia` has the libraries that MLX computes with on such a GPU."""

MAX_ROWS = 64
UNUSED_SECONDS = 180 * 86_400.0
REFRESH_SECONDS = 86_400.0
"""That a look is used is written down once a day; what no start had for half a year is forgotten."""

CPU_INFO = Path("/proc/cpuinfo")
_PROCESSOR = re.compile(r"(vendor_id|cpu family|model|model name|stepping|flags|Features|CPU \w+)\s*:.*", re.MULTILINE)
"""What it says that does not change while a machine runs: which processor, and which instructions there are."""

_FILES = "its files"

type LookKey = Mapping[str, str]
"""All that a look follows from, by the words in which a person hears what changed."""

_writing = threading.Lock()
"""Of this process; what another one's takes away is looked at once more."""


def note_code() -> None:
    """Look which code this is. As early as can be: until a model is loaded a fetch may take hours, and code may be
    replaced meanwhile."""
    _code_at_first(PACKAGES)


def surroundings(kv: KvSettings, blas: str) -> dict[str, str] | None:
    """The part of a key that no model has; None where it cannot be told what computes: its files were replaced since
    they were noted, and what this process has imported is of before. `blas`: see `EngineSettings`."""
    try:
        code = _code(PACKAGES)
        if code != _code_at_first(PACKAGES):
            return None
    except OSError:  # they are just being replaced
        return None
    device = mx.device_info()
    names = (device.get("architecture"), device.get("device_name"))
    return {
        "mlx, mlx-lm, mlx-vlm or kvserve": code,
        "the machine": json.dumps(
            [platform.platform(), platform.python_version(), str(mx.default_device()), *names, *_processors()]
        ),
        "the BLAS, or variables of it or of MLX": blas,
        "KV_BITS or what goes with it": json.dumps(asdict(kv)),
    }


def _processors() -> tuple[int, str]:
    """How many there are for this process, and which: a BLAS rounds as the kernels do that it chooses for them, and as
    it shares a product out."""
    first = ""
    with suppress(OSError):  # other systems have no such file
        first = CPU_INFO.read_text("utf-8", "replace").partition("\n\n")[0]
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return usable, _digest([line.group() for line in _PROCESSOR.finditer(first)])


def _code(packages: Sequence[str]) -> str:
    return _digest([_stamps(package) for package in packages])


@cache
def _code_at_first(packages: Sequence[str]) -> str | None:
    """None, for good, where it was just being replaced: nobody knows what was imported."""
    try:
        return _code(packages)
    except OSError:
        return None


def _stamps(package: str) -> list[tuple[str, int, int, int]]:
    """The files of a package, however it was installed, and what shows a change of each: also one that was made by hand
    and one that came under the same version. A wheel's own libraries, such as MLX's BLAS, lie beside it."""
    spec = importlib.util.find_spec(package)
    folders = (spec.submodule_search_locations or ()) if spec is not None else ()
    beside = [path for folder in folders for path in Path(folder).parent.glob(f"{package}*.libs")]
    own = [found for folder in folders for found in _below(folder, "")]
    return sorted((*own, *(found for path in beside for found in _below(str(path), path.name))))


def _below(folder: str, name: str) -> Iterator[tuple[str, int, int, int]]:
    for entry in os.scandir(folder):
        if entry.name == "__pycache__":
            continue  # follows from the sources, and comes with their first use
        if entry.is_dir():
            yield from _below(entry.path, f"{name}/{entry.name}")
            continue
        with suppress(FileNotFoundError):  # a link that leads nowhere
            found = entry.stat()
            yield f"{name}/{entry.name}", found.st_size, found.st_mtime_ns, found.st_ctime_ns


@dataclass(frozen=True, slots=True)
class Seen:
    """One look: what its passes have shown, whether rows may be padded, and what was found out of drafts, None where
    these were off or do not come back. Everything else about the caches was found to be as it should."""

    probed: Probed
    can_pad: bool
    drafts: DraftsSeen | None = None

    @classmethod
    def of(cls, model: LoadedModel, probed: Probed, support: CacheSupport) -> "Seen | None":
        """None where anything went wrong, which another start may find otherwise, and where a class is unknown here."""
        is_right = support == CacheSupport(can_pad=support.can_pad) and not probed.leaf_trouble
        if any(form.state_form or form.pool_form for form in probed.leaf_forms):
            return None  # a row does not hold them
        if not is_right or not all(is_known(leaf) for leaf in flat_caches(model.new_caches())):
            return None
        return cls(probed, support.can_pad, model.drafts.seen if model.drafts is not None else None)

    @property
    def support(self) -> CacheSupport:
        """What the check of the caches has said."""
        return CacheSupport(can_pad=self.can_pad)

    def row(self) -> dict[str, Any]:
        """As JSON has it. Forms of classes that are known here are a kind and two sizes."""
        forms = [[form.kind, form.per_token, form.fixed] for form in self.probed.leaf_forms]
        return {
            "vocab_size": self.probed.vocab_size,
            "sizes": asdict(self.probed.sizes),
            "forms": forms,
            "kv_notes": list(self.probed.kv_notes),
            "can_pad": self.can_pad,
            "drafts": self.drafts.row() if self.drafts is not None else None,
        }

    @classmethod
    def from_row(cls, row: Any) -> "Seen":
        """Raises LookupError, TypeError, ValueError or OverflowError for what is no row."""
        forms = tuple(LeafForm(kind, None, float(per_token), int(fixed)) for kind, per_token, fixed in row["forms"])
        sizes = KvSize(**row["sizes"])
        probed = Probed(int(row["vocab_size"]), sizes, forms, kv_notes=tuple(map(str, row["kv_notes"])))
        drafts = DraftsSeen.from_row(row["drafts"]) if row["drafts"] is not None else None
        return cls(probed, bool(row["can_pad"]), drafts)


@dataclass(frozen=True, slots=True)
class _KeptLook:
    """`name` is the whole key, `place` the model's folder, `parts` the digests of the key's parts: none says a word."""

    name: str
    place: str
    parts: dict[str, str]
    used_at: float
    seen: Seen


class CachesSeen:
    """Safe for several threads. `report` hears of what went wrong, `note` of what is worth knowing."""

    def __init__(
        self,
        folder: Path,
        report: Callable[[str], None],
        note: Callable[[str], None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`clock`: seconds since the epoch."""
        self._file = CheckedFile(folder / CACHES_FILE, FORMAT, "looks")
        self._report = report
        self._note = note
        self._clock = clock

    def find(self, key: LookKey, folder: Path) -> Seen | None:
        """What a look with this key has shown; a line where the model in this folder had another key."""
        kept, name = self._read(), _digest(dict(key))
        if name in kept:
            found = kept[name]
            if self._clock() - found.used_at > REFRESH_SECONDS:
                self.remember(key, folder, found.seen)
            return found.seen
        earlier = [each for each in kept.values() if each.place == _digest(str(folder))]
        if earlier:
            changed = _differing(_parts(key), max(earlier, key=lambda each: each.used_at).parts)
            self._note(f"The model's caches are tried again, which takes longer: changed are {', '.join(changed)}.")
        return None

    def remember(self, key: LookKey, folder: Path, seen: Seen) -> None:
        """Write a look down, and forget what was not used for long. A disk that does not take it is reported. A look
        without drafts leaves what another one found of them."""
        now, name = self._clock(), _digest(dict(key))
        with _writing:
            kept = self._read()
            if seen.drafts is None and name in kept:
                seen = replace(seen, drafts=kept[name].seen.drafts)
            kept[name] = _KeptLook(name, _digest(str(folder)), _parts(key), now, seen)
            fresh = [each for each in kept.values() if now - each.used_at <= UNUSED_SECONDS]
            newest = sorted(fresh, key=lambda each: each.used_at)[-MAX_ROWS:]
            rows = [[each.name, each.place, each.parts, each.used_at, each.seen.row()] for each in newest]
            try:
                self._file.write(rows)
            except OSError as error:
                if self._file.path.parent.is_dir():  # else KV has no place either, which is said there
                    self._report(f"What the caches allow cannot be noted, the next start tries them again: {error}")

    def _read(self) -> dict[str, _KeptLook]:
        """By the name of the key. A file that does not add up is taken away."""
        try:
            rows = [
                _KeptLook(str(name), str(place), dict(parts), float(used_at), Seen.from_row(seen))
                for name, place, parts, used_at, seen in self._file.read()
            ]
        except (DamagedFile, LookupError, TypeError, ValueError, OverflowError) as error:
            self._note(f"{self._file.path} is damaged and taken away, what it says is found out again: {error}")
            with suppress(OSError):
                self._file.path.unlink()
            return {}
        return {row.name: row for row in rows}


class CacheLook:
    """The look at one model, for one load of it: `probed` while it is loaded, `support` when it is, `remember` when its
    start has come through. Belongs to the engine thread."""

    def __init__(
        self, memory: CachesSeen | None, digest: ModelDigest, folder: Path, find_around: Callable[[], LookKey | None]
    ) -> None:
        """`find_around` finds the `surroundings`; without these, or a `memory`, nothing is found and nothing
        remembered."""
        self._memory = memory
        self._digest = digest
        self._folder = folder
        self._find_around = find_around
        self._around: LookKey = {}
        self._build = ""
        self._probed: Probed | None = None
        self._found: Seen | None = None

    def probed(self, build: str, probe: Callable[[], Probed]) -> Probed:
        """What is remembered of the model that was just loaded and is built like this, else what `probe` finds. What
        surrounds it is found only now, when its module has been imported."""
        self._build = build
        if self._memory is not None and (around := self._find_around()) is not None:
            self._around = around
        else:
            self._memory = None
        if self._memory is not None and (fingerprint := self._digest.loaded()) is not None:
            self._found = self._memory.find(self._key(fingerprint), self._folder)
        self._probed = self._found.probed if self._found is not None else probe()
        return self._probed

    @property
    def support(self) -> CacheSupport | None:
        """What is remembered of its caches; None where they are to be tried."""
        return self._found.support if self._found is not None else None

    @property
    def drafts(self) -> DraftsSeen | None:
        """What is remembered of drafts; None where they are to be tried."""
        return self._found.drafts if self._found is not None else None

    def remember(self, model: LoadedModel, support: CacheSupport) -> None:
        """Remember what was tried, once it is known which model that was; what was remembered already stays so."""
        memory, probed, found = self._memory, self._probed, self._found
        if memory is None or probed is None or (seen := Seen.of(model, probed, support)) is None:
            return
        if found is None or seen.drafts not in (None, found.drafts):
            self._digest.when_known(lambda fingerprint: memory.remember(self._key(fingerprint), self._folder, seen))

    def _key(self, fingerprint: str) -> LookKey:
        return {**self._around, "the classes of its caches": self._build, _FILES: fingerprint}


def _differing(parts: Mapping[str, str], others: Mapping[str, str]) -> list[str]:
    """The parts that are not the same; of its files another library makes others too."""
    differing = [part for part in parts if parts[part] != others.get(part)]
    return [part for part in differing if part != _FILES] or differing


def _parts(key: LookKey) -> dict[str, str]:
    return {part: _digest(value)[:16] for part, value in key.items()}


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()

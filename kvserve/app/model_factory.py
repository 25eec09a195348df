"""From a model folder to a served model: tokenizer, template, records and output format first, the engine's part once
its weights are there.

It joins rooms per model. Which model is loaded, and when, is for `model_pool.py` to say; what its chat template can is
found out in `learned_template.py`.
"""

import contextlib
import threading
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path

import llguidance

from kvserve.app.catalogue import ModelSource
from kvserve.app.draft_choice import all_weight_file_bytes, draft_folder
from kvserve.app.learned_template import LearnedTemplate, learn_template
from kvserve.app.shared_tier import why_records_stay
from kvserve.app.wiring import RECORDS_PREFIX, engine_settings, max_record_disk_bytes
from kvserve.cache.shared_cache import SharedCache
from kvserve.config import DiskMode, Settings
from kvserve.core import RequestDefaults
from kvserve.core.keeping import Scope
from kvserve.core.rank_place import RankPlace
from kvserve.drafting.texts import DraftTexts
from kvserve.engine.fingerprint import records_fingerprint
from kvserve.engine.memory import memory_bytes, plan_memory
from kvserve.engine.model import LoadedModel, check_folder, expected_sizes
from kvserve.engine.model_files import FileStamps, check_weights, differing, file_stamps
from kvserve.engine.worker import Engine
from kvserve.errors import ModelLoadError
from kvserve.identity.conversations import Conversations, ForgottenRecords
from kvserve.identity.recognise import IdentitySettings
from kvserve.identity.shared_records import SharedRecords
from kvserve.prompt.images import Images
from kvserve.prompt.images_remote import RemotePictures
from kvserve.prompt.tokenizer import Tokenizer, load_tokenizer
from kvserve.requests.served_model import ServedModel
from kvserve.requests.turn_facts import Observer
from kvserve.sessions.archive import Archive, sweep_stale, unused
from kvserve.sessions.archive_file import FILE_NAME as RECORDS_FILE
from kvserve.sessions.shared_row import secret_key
from kvserve.sessions.stores import StoreLimits
from kvserve.warming.prewarming import UNKNOWN_TOKEN, warm_learned


@dataclass(frozen=True, slots=True)
class ModelFactory:
    """Makes served models, each with everything of its own. `report` takes lines for a person on what went wrong,
    `note` on what is worth knowing. Below `records_dir` the records of conversations outlive the process; None: they do
    not. `blas`, `shared`: see `EngineSettings`, `ranks` and `on_lost`: see `Engine`. `open_records` are the folders of
    those models that were described and are known: their files stay open until the process ends. `described` are the
    files that a model's description was made of; a file of records is opened, read and forgotten in under `opening`."""

    settings: Settings
    defaults: RequestDefaults
    identity: IdentitySettings
    observe: Observer
    report: Callable[[str], None]
    records_dir: Path | None = None
    disk_cache: DiskMode = "on"
    remote: RemotePictures | None = None
    note: Callable[[str], None] = lambda _: None
    blas: str = ""
    ranks: RankPlace | None = None
    on_lost: Callable[[str], None] = lambda _: None
    shared: SharedCache | None = None
    open_records: set[Path] = field(default_factory=set)
    described: dict[Path, FileStamps] = field(default_factory=dict)
    opening: threading.Lock = field(default_factory=threading.Lock)

    def describe(self, source: ModelSource) -> ServedModel:
        """All that a model has without its weights: prompts can be written and counted, its engine has not started.

        Raises ModelLoadError for a folder that cannot be served, as far as that shows without loading it.
        """
        folder = source.folder
        self.described[folder] = file_stamps(folder)
        check_folder(folder)
        check_weights(folder)
        limits = self._identity_of(folder).limits
        learned = self._learned(source, limits)
        for note in learned.notes():
            self.note(f"{source.name}: {note}")
        tokenizer, bounds = learned.tokenizer, learned.output_format.thinking_bounds
        sizes = expected_sizes(folder, self.settings.max_kv_size)
        engine = self._new_engine(source, tokenizer)
        drafts = self._draft_texts(engine, folder)
        # Last: its file is open from here on.
        conversations = self._conversations(engine, source, replace(self.identity, limits=limits))
        return ServedModel(
            name=source.name,
            tokenizer=tokenizer,
            template=learned.template,
            markers=learned.markers,
            stitcher=learned.stitcher,
            output_format=learned.output_format,
            added_tokens=learned.added_tokens,
            closing_ids=tokenizer.encode(bounds.closing) if bounds is not None else (),
            engine=engine,
            defaults=self.defaults,
            vocab_size=max(sizes.vocab_size, tokenizer.vocab_size),
            context_limit=sizes.context_limit,
            observe=self.observe,
            isolates_tenants=self.settings.tenant_isolation,
            conversations=conversations,
            call_ids=learned.call_ids,
            unheld_calls=learned.unheld_calls,
            drafts=drafts,
        )

    def _learned(self, source: ModelSource, limits: StoreLimits) -> LearnedTemplate:
        """Raises ModelLoadError for a template that was given and cannot write a user's message."""
        given, folder = source.chat_template, source.folder
        learned = learn_template(
            load_tokenizer(folder, given.source if given is not None else None),
            folder,
            family=self.settings.model_family,
            placed_bytes=limits.placed_bytes,
            memo_bytes=limits.memo_bytes,
        )
        if given is not None and (reason := learned.template.why_plain) is not None:
            raise ModelLoadError(f"CHAT_TEMPLATE={str(given.path)!r} cannot be used: no user's message ({reason}).")
        return learned

    def renewed(self, served: ServedModel, source: ModelSource) -> ServedModel:
        """The same model with an engine that has not started: one that has ended cannot start again. What it drafted
        from goes: a model that is not loaded has no account of memory."""
        if served.drafts is not None:
            served.drafts.clear()
        engine = self._new_engine(source, served.tokenizer)
        drafts = self._draft_texts(engine, source.folder)
        self._keep_records(engine, source, served.conversations)
        engine.count("records", lambda: served.conversations.totals().num_bytes)
        return replace(served, engine=engine, drafts=drafts)

    def refreshed(self, served: ServedModel, source: ModelSource) -> ServedModel:
        """The same model as its folder is now: described anew where that has changed. One that cannot be described any
        more cannot be loaded either, which its engine says."""
        if differing(self.described[source.folder], file_stamps(source.folder)) is None:
            return served
        with self.opening:
            self._part(served.conversations)
        self.note(f"The files of {served.name} have changed: it is described anew.")
        with contextlib.suppress(ModelLoadError):
            return self.describe(source)
        return served

    def completed(self, served: ServedModel, model: LoadedModel) -> ServedModel:
        """The same model once its engine has loaded; what it was asked most often is computed once nobody waits."""
        if served.drafts is not None and not served.engine.can_draft:
            served.drafts.clear()
        sized = served.with_rows(model.vocab_size)
        if (lacking := tags_without_rows(served, sized)) is not None:
            self.note(f"{served.name}: {lacking}")
        completed = replace(
            sized,
            drafts=served.drafts if served.engine.can_draft else None,
            context_limit=model.context_limit,
            keeps_kv=model.cache_support.can_keep,
            images=self._images(served, model),
        )
        learned = warm_learned(completed, self.settings.prewarm_prefixes)
        results = (each.result for each in learned)
        if num_unknown := sum(result is not None and result.reason == UNKNOWN_TOKEN for result in results):
            self.note(f"{served.name}: {num_unknown} learned beginnings hold a token that the model has no row for.")
        return completed

    def _images(self, served: ServedModel, model: LoadedModel) -> Images | None:
        """What reads the images of a model that sees; None where its template has no place for them."""
        if model.vision is None:
            return None
        try:
            words = model.vision.reader.words(served.template.image_words or model.vision.reader.placeholder)
        except ModelLoadError as error:
            self.report(f"{served.name} sees no images: {error}")
            return None
        return Images(model.vision.reader, words, remote=self.remote)

    def forget_at_rest(self, scope: Scope) -> list[ForgottenRecords]:
        """Forget those who are meant in the records of models that were not described since the start. Blocks on the
        disk: each file is read whole, as at a start. What cannot be had is reported, and not done."""
        if self.records_dir is None:
            return []
        with self.opening:
            files = sorted(self.records_dir.glob(f"{RECORDS_PREFIX}*/{RECORDS_FILE}"))
            return [self._forget_in(file.parent, scope) for file in files if file.parent not in self.open_records]

    def _forget_in(self, place: Path, scope: Scope) -> ForgottenRecords:
        def report(line: str) -> None:
            self.report(f"While somebody was forgotten: {line}")

        try:
            with unused(place), closing(Conversations(self.identity, self._archive_at(place, report))) as conversations:
                return conversations.forget(session=scope.session, principal=scope.principal)
        except FileNotFoundError:  # another server has swept it away meanwhile
            return ForgottenRecords(0, 0, is_done=True)
        except OSError as error:  # the others' are forgotten all the same
            report(f"the records in {place} cannot be had: {error}")
            return ForgottenRecords(0, 0, is_done=False)

    def _identity_of(self, folder: Path) -> IdentitySettings:
        """With as much memory for records as a model of this size leaves, where the operator has not decided."""
        if self.settings.session_records_max_bytes is not None:
            return self.identity
        plan = plan_memory(memory_bytes(), all_weight_file_bytes(self.settings, folder))
        return replace(self.identity, limits=replace(self.identity.limits, max_bytes=plan.records_bytes))

    def _draft_texts(self, engine: Engine, folder: Path) -> DraftTexts | None:
        """What next tokens are drafted from, in the model's ledger; None where nothing is drafted."""
        if self.settings.speculation == "off":
            return None
        drafts = DraftTexts(plan_memory(memory_bytes(), all_weight_file_bytes(self.settings, folder)).draft_bytes)
        engine.count("drafts", lambda: drafts.num_bytes)
        return drafts

    def _conversations(self, engine: Engine, source: ModelSource, identity: IdentitySettings) -> Conversations:
        """What a model has read and written, in the file of its records where that outlives the process: from the
        beginning where it is known which model it is, else once that is known."""
        if self.records_dir is None:
            conversations = Conversations(identity)
        elif (fingerprint := engine.digest.look()) is not None:
            with self.opening:
                conversations = Conversations(identity, self._archive(self.records_dir, source, fingerprint))
        else:
            conversations = Conversations(identity, awaits_archive=True)
        self._keep_records(engine, source, conversations)
        engine.count("records", lambda: conversations.totals().num_bytes)
        return conversations

    def _keep_records(self, engine: Engine, source: ModelSource, conversations: Conversations) -> None:
        """Once an engine's model is known its records have their file, if they have none yet; where it cannot be, what
        they hold may be another model's."""
        records_dir = self.records_dir
        if records_dir is None:
            return

        def attach(fingerprint: str) -> None:
            with self.opening:
                if conversations.archive_folder is None:
                    conversations.attach(self._archive(records_dir, source, fingerprint))
                conversations.shared = self._shared_records(source, fingerprint)

        def part() -> None:
            with self.opening:
                self._part(conversations)

        engine.digest.when_known(attach, otherwise=part)

    def _shared_records(self, source: ModelSource, fingerprint: str) -> SharedRecords | None:
        """What other servers know of the model's conversations, where records travel (`why_records_stay`)."""
        if self.shared is None or why_records_stay(self.settings) is not None:
            return None
        given, secret = source.chat_template, secret_key(self.settings.proxy_secret or "")
        fingerprint = records_fingerprint(fingerprint, given.source if given is not None else None)
        return SharedRecords(self.shared.rows, self.shared.open_records(fingerprint, secret), secret)

    def _part(self, conversations: Conversations) -> None:
        """Conversations begin anew without their file, which is nobody's then."""
        place = conversations.archive_folder
        conversations.detach()
        if place is not None:
            self.open_records.discard(place)

    def _archive(self, records_dir: Path, source: ModelSource, fingerprint: str) -> Archive:
        """Where the records of a model with this fingerprint outlive the process, under the template that writes its
        prompts."""
        given = source.chat_template
        fingerprint = records_fingerprint(fingerprint, given.source if given is not None else None)
        place = records_dir / f"{RECORDS_PREFIX}{fingerprint[:32]}"
        oldest = time.time() - self.identity.limits.keep_seconds
        sweep_stale(records_dir, keep=place, older_than=oldest, report=self.report)
        self.open_records.add(place)
        return self._archive_at(place, self.report)

    def _archive_at(self, place: Path, report: Callable[[str], None]) -> Archive:
        return Archive(
            place,
            max_bytes=max_record_disk_bytes(self.settings),
            report=report,
            min_free_bytes=self.settings.disk_cache_min_free_bytes,
        )

    def _new_engine(self, source: ModelSource, tokenizer: Tokenizer) -> Engine:
        """Raises ModelLoadError where the model that is to draft cannot."""
        drafts, settings = draft_folder(self.settings, source, tokenizer, self.note), self.settings
        engine = Engine(
            source.folder,
            replace(
                engine_settings(settings, self.disk_cache), blas=self.blas, draft_folder=drafts, shared=self.shared
            ),
            grammar_tokenizer=_grammar_tokenizer(tokenizer),
            report=self.report,
            note=self.note,
            place=self.ranks,
            on_lost=self.on_lost,
        )
        engine.digest.expected = self.described[source.folder]
        return engine


def tags_without_rows(served: ServedModel, sized: ServedModel) -> str | None:
    """What is said of tags of a model's answers for whose tokens it has no row; None where it has all. `sized` is the
    same model with its own rows."""
    missing = served.added_tokens.keys() - sized.added_tokens.keys()
    tags = dict.fromkeys(tag for tag in served.output_format.tags if any(token in tag for token in missing))
    if not tags:
        return None
    instead = "an answer that must have it has it in letters" if sized.closing_ids else "thinking is not limited"
    return f"the model has no row for a token of {', '.join(tags)}: a prompt with it is refused, {instead}"


def _grammar_tokenizer(tokenizer: Tokenizer) -> Callable[[int], llguidance.LLTokenizer]:
    """Makes llguidance's view of the tokenizer when the first request needs one, and keeps it: it takes a second."""
    made: dict[int, llguidance.LLTokenizer] = {}

    def make(vocab_size: int) -> llguidance.LLTokenizer:
        if vocab_size not in made:
            made[vocab_size] = llguidance.LLTokenizer(
                tokenizer.backend.to_str(),
                n_vocab=max(vocab_size, tokenizer.vocab_size),
                eos_token=sorted(tokenizer.stop_token_ids),
            )
        return made[vocab_size]

    return make

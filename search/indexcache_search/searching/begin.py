"""The beginning of a search: read its data, load its model, open its journal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial

from rich.text import Text

from indexcache_search.console import announce, warn
from indexcache_search.data import dry_run
from indexcache_search.data.packing import Packer
from indexcache_search.data.reader import TokenReader
from indexcache_search.data.tokens import TokenSet, default_reply
from indexcache_search.engines.base import Engine
from indexcache_search.engines.registry import Surroundings, kind_of
from indexcache_search.evaluation.evaluator import Evaluator
from indexcache_search.evaluation.identity import identity, today
from indexcache_search.evaluation.journal import Journal
from indexcache_search.evaluation.losses import Evaluates, Evaluation
from indexcache_search.hf.loading import check_seq_len, describe_model, load_tokenizer, read_config, set_quiet
from indexcache_search.searching.job import SearchData, SearchJob
from indexcache_search.searching.matrices import Matrices
from indexcache_search.searching.search import Search
from indexcache_search.searching.settings import Settings
from indexcache_search.strategies.base import Goal, TimeGoal
from indexcache_search.workdir.outputs import SERVER_LOG, Outputs, outputs
from sglang_indexcache import ModelLayers
from sglang_indexcache.command_line import error_context
from sglang_indexcache.io.redaction import redacted
from sglang_indexcache.pattern_file.result_folder import FILES, SEARCH

Heard = Callable[[Evaluation], None]


@dataclass(frozen=True)
class Begun:
    """A search whose model is loaded, and whose journal is open.

    Attributes:
        calibration: tokens that choose.
        held_out: tokens that judge.
    """

    settings: Settings
    goal: Goal
    engine: Engine
    calibration: TokenSet
    held_out: TokenSet
    journal: Journal

    def chooses(self, heard: Heard = lambda item: None, engine: Evaluates | None = None) -> Evaluator:
        """Return what evaluates patterns on the tokens that choose; `heard` hears of each evaluation."""
        objective = self.settings.objective
        return Evaluator(engine or self.engine, self.calibration, objective, self.journal, "calibration", heard)

    def judges(self, heard: Heard = lambda item: None, engine: Evaluates | None = None) -> Evaluator:
        """Return what evaluates patterns on the tokens that judge; `heard` hears of each evaluation."""
        return Evaluator(engine or self.engine, self.held_out, "nll", self.journal, "held-out", heard)

    @cached_property
    def matrices(self) -> Matrices:
        """Matrices of what layers have in common."""
        return Matrices(self.engine, self.calibration, self.journal)

    def search(self, chooses: Evaluator) -> Search:
        """Return the search, which has not chosen anything yet."""
        return Search(self.engine, chooses, self.settings.strategy, self.goal, self.matrices.measured)


@contextmanager
def begun(job: SearchJob) -> Iterator[tuple[Begun, Outputs]]:
    """Hold the output folders, read the data, load the model and open the journal, for the `with` block.

    Data are read before the weights: mistakes in the first are common, and the second takes long.

    Raises:
        IndexCacheError: if a request can't be met.
    """
    reads = {"--model": [job.model], "--calibration": job.data.calibration, "--evaluation": job.data.evaluation}
    files, say = job.files, partial(warn, job.console)
    with ExitStack() as stack:
        out = stack.enter_context(outputs(SEARCH, files.folder, files.work_dir, FILES, reads))
        around = Surroundings(
            log=lambda: out.work.growing(SERVER_LOG), announce=partial(announce, job.console), warn=say
        )
        with job.console.status(Text(f"Loading {redacted(job.model)}")):
            with error_context("reading the data"):
                description, goal, reader, calibration, held_out = _data(job)
            with error_context("loading the model"):
                kind = kind_of(job.run.engine, description)
                engine = stack.enter_context(kind.load(job.model, job.run, around))
        for note in reader.notes:
            say(note)
        names = identity(engine, calibration, held_out, job.settings.objective)
        journal = stack.enter_context(Journal(out.journal(), names, today(), files.restart))
        yield Begun(job.settings, goal, engine, calibration, held_out, journal), out


def show_data(job: SearchJob) -> None:
    """Read the data as a search does, print what was read, and do nothing else.

    Raises:
        IndexCacheError: as `begun`.
    """
    with error_context("reading the data"):
        *_, reader, calibration, held_out = _data(job)
    dry_run.show(reader, {"evaluation": held_out, "calibration": calibration})


def _data(job: SearchJob) -> tuple[ModelLayers, Goal, TokenReader, TokenSet, TokenSet]:
    set_quiet()
    description = describe_model(job.model, job.run.selection)
    kind_of(job.run.engine, description)  # refuses what it does not run
    goal, data = job.settings.goal(description), job.data
    seq_len = data.seq_len or 4 * description.first_sparse_position
    if isinstance(goal.budget, TimeGoal) and data.reply is None:
        data = replace(data, reply=default_reply(seq_len))
    return description, goal, *token_sets(job.model, description, data, seq_len)


def token_sets(
    model: str, description: ModelLayers, data: SearchData, seq_len: int
) -> tuple[TokenReader, TokenSet, TokenSet]:
    """Read the calibration and the held-out set of sequences of `seq_len` tokens; the reader has notes about both.

    Raises:
        IndexCacheError: if a source can't be read or holds too little, or the model takes no such sequences.
    """
    config = read_config(model)
    check_seq_len(seq_len, config)
    replies = description.dense
    reader = TokenReader(lambda: load_tokenizer(model), config.vocab_size, seq_len, replies, data.rows)
    packer = Packer(reader, description, seq_len)
    held_out = packer.held_out(data.evaluation, data.num_eval_sequences, data.calibration)
    calibration = packer.collect(data.calibration, data.num_sequences, data.seed, "calibration")
    if data.reply is not None:
        calibration, held_out = calibration.ending_in_replies(data.reply), held_out.ending_in_replies(data.reply)
    return reader, calibration, held_out

"""The results folder and the journal folder of a command that evaluates."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from indexcache_search.evaluation.journal import FILE_NAME
from indexcache_search.workdir.folder import OwnFolder, check_subfolder
from indexcache_search.workdir.overlap import check_apart

PARTIAL, SERVER_LOG = "pattern.partial.yaml", "server.log"
WORK = (FILE_NAME, SERVER_LOG, PARTIAL)


@dataclass(frozen=True)
class Outputs:
    """Folders held by this process alone; they may be the same one."""

    results: OwnFolder
    work: OwnFolder

    def replace(self, contents: Mapping[str, str], console: Console) -> None:
        """Write results over all earlier ones; print which of these are gone without a new one."""
        removed = [*self.work.clear(), *self.results.clear()]
        for name, text in contents.items():
            self.results.write(name, text)
        for path in removed:
            if path not in self.results.written and path.name != PARTIAL:
                console.print(f"removed {path}, which an earlier run wrote", markup=False, soft_wrap=True)

    def journal(self) -> Path:
        """Mark the journal's file as the command's own; return its folder."""
        return self.work.growing(FILE_NAME).parent


@contextmanager
def outputs(
    command: str,
    folder: Path,
    work: Path,
    names: Sequence[str],
    reads: Mapping[str, Iterable[str]],
    *,
    ever: str = "",
) -> Iterator[Outputs]:
    """Hold both folders inside the `with` block.

    Args:
        command: the command that writes.
        folder: the results folder.
        work: the journal's folder, which several commands may use in turn.
        names: file names of the results.
        reads: input options and their values, see `check_apart`.
        ever: see `OwnFolder`.

    Raises:
        FolderError: if a file of somebody else is in the way, or another process writes there.
    """
    own = [*(folder / name for name in names), *(work / name for name in WORK)]
    check_apart({"--output": folder, "--work-dir": work}, own, reads)
    ever = "|".join(filter(None, [*map(re.escape, (*names, *WORK)), ever]))  # both may have been one folder before
    if folder.resolve() == work.resolve():
        with OwnFolder(folder, command, [*names, *WORK], "--output", ever).held() as both:
            yield Outputs(both, both)
        return
    results = OwnFolder(folder, command, names, "--output", ever)
    journal = OwnFolder(work, command, WORK, "--work-dir", ever)
    if work == folder / "work":
        check_subfolder(work, command, "files")
    journal.check()
    with results.held(), journal.held():
        yield Outputs(results, journal)

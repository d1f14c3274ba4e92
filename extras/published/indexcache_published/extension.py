"""What this package adds to `indexcache-check`: remarks on patterns, and the list of those that others published."""

from __future__ import annotations

from pathlib import Path

from indexcache_published.known import as_text, known_patterns
from indexcache_published.warnings import provenance, warnings_about
from sglang_indexcache.checkpoint.findings import Checked, Findings, Listing, Remarks


class Provenance(Remarks):
    """Where a pattern is from, and why to doubt it."""

    def on(self, checked: Checked) -> Findings:
        """See `Remarks.on`."""
        pattern, file, checkpoint = checked.pattern, checked.spec.file, checked.checkpoint
        locked = () if checkpoint is None else checkpoint.locked
        architecture = None if file is None else file.model.architecture
        architecture = architecture if checkpoint is None else checkpoint.model.architecture
        warnings = warnings_about(pattern, file, architecture, checked.spec.is_uniform, locked)
        return Findings(notes=tuple(provenance(pattern, file, architecture)), warnings=tuple(warnings))


class Known(Listing):
    """The patterns that others published."""

    help = "list the patterns that others published"

    def find(self, unpacked: Path | None) -> Findings:
        """See `Listing.find`."""
        from indexcache_published.gains import estimates  # tables of the search, which other checks do without

        found = [(known, estimates(known)) for known in known_patterns()]
        listed = [
            {"path": str(known.path), **known.file.model_dump(mode="json", by_alias=True), "estimates": lines}
            for known, lines in found
        ]
        return Findings(lines=(as_text(found),), content=listed)

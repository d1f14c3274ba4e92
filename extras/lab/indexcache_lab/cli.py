"""The command line: indexcache-lab."""

from __future__ import annotations

import typer

from indexcache_lab.edge import cli as edge
from indexcache_lab.eviction import cli as eviction
from indexcache_lab.key_delta import cli as key_delta
from indexcache_lab.released import cli as released
from indexcache_search.cli.command import Version
from indexcache_search.errors import SearchError

app = typer.Typer(name="indexcache-lab", add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.callback(invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
def lab(context: typer.Context, version: Version = False) -> None:
    """Experiments on dense models. Each may change or leave; so may indexcache-offload."""
    if context.invoked_subcommand is None:
        raise SearchError("which experiment? expected key-delta, eviction, released or edge; see indexcache-lab --help")


app.add_typer(key_delta.app, name="key-delta")
app.add_typer(eviction.app)
app.add_typer(released.app)
app.add_typer(edge.app)

"""The command indexcache-offload in this process."""

from __future__ import annotations

from typing import Any

from typer.testing import CliRunner

from indexcache_lab.offload import cli

STEPS = 12


def offload(*options: object) -> Any:
    return CliRunner().invoke(cli.app, [str(option) for option in options])

"""Entry points of command lines. Nothing is imported before `process.run` handles Ctrl-C."""

from __future__ import annotations

from importlib import import_module

from sglang_indexcache import process


def run(command: str, module: str, extra: str = "search") -> None:
    """Run the typer application `app` of a module as a command.

    Args:
        command: its name.
        module: module of the application.
        extra: extra of the distribution that installs what it imports.
    """

    def work() -> int | None:
        code: int | None = import_module(module).app(prog_name=command, standalone_mode=False)
        return code

    process.run(command, work, extra, resumes=True)

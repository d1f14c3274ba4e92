"""Entry points of the command lines. Nothing is imported before `process.run` handles Ctrl-C."""

from __future__ import annotations

from importlib import import_module

from sglang_indexcache import process


def main() -> None:
    """Run indexcache-search."""
    _run("indexcache-search", "indexcache_search.cli.search")


def evaluate() -> None:
    """Run indexcache-eval."""
    _run("indexcache-eval", "indexcache_search.cli.evaluate")


def distill() -> None:
    """Run indexcache-distill."""
    _run("indexcache-distill", "indexcache_search.cli.distill", "distill")


def offload() -> None:
    """Run indexcache-offload."""
    _run("indexcache-offload", "indexcache_search.lab.offload.cli")


def watch() -> None:
    """Run indexcache-watch."""
    _run("indexcache-watch", "indexcache_search.cli.watch")


def lab() -> None:
    """Run indexcache-lab."""
    _run("indexcache-lab", "indexcache_search.lab.cli")


def _run(command: str, module: str, extra: str = "search") -> None:
    def work() -> int | None:
        code: int | None = import_module(module).app(prog_name=command, standalone_mode=False)
        return code

    process.run(command, work, extra, resumes=True)


if __name__ == "__main__":
    main()

"""Entry points of the command lines."""

from __future__ import annotations

from indexcache_search import commands


def main() -> None:
    """Run indexcache-search."""
    commands.run("indexcache-search", "indexcache_search.cli.search")


def evaluate() -> None:
    """Run indexcache-eval."""
    commands.run("indexcache-eval", "indexcache_search.cli.evaluate")


if __name__ == "__main__":
    main()

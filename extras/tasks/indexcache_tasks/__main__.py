"""The entry point of `python -m indexcache_tasks`."""

from __future__ import annotations

from indexcache_search import commands


def main() -> None:
    """Write samples of generated tasks."""
    commands.run("python -m indexcache_tasks", "indexcache_tasks.cli", "search")


if __name__ == "__main__":
    main()

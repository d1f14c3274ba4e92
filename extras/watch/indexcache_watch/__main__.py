"""The entry point of `indexcache-watch`."""

from __future__ import annotations

from indexcache_search import commands


def main() -> None:
    """Run indexcache-watch."""
    commands.run("indexcache-watch", "indexcache_watch.cli", "watch")


if __name__ == "__main__":
    main()

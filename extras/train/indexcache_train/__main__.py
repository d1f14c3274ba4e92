"""The entry point of `indexcache-distill`, and of `python -m indexcache_train` for launchers of several processes."""

from __future__ import annotations

from indexcache_search import commands


def main() -> None:
    """Run indexcache-distill."""
    commands.run("indexcache-distill", "indexcache_train.cli", "train")


if __name__ == "__main__":
    main()

"""Entry points of the lab's command lines."""

from __future__ import annotations

from indexcache_search import commands


def main() -> None:
    """Run indexcache-lab."""
    commands.run("indexcache-lab", "indexcache_lab.cli", "lab")


def offload() -> None:
    """Run indexcache-offload."""
    commands.run("indexcache-offload", "indexcache_lab.offload.cli", "lab")


if __name__ == "__main__":
    main()

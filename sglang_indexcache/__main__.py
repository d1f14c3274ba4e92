"""The entry point of `indexcache-check`; nothing is imported before `process.run` answers Ctrl-C."""

from __future__ import annotations

from sglang_indexcache import process


def check() -> None:
    """Run indexcache-check."""

    def work() -> int:
        from sglang_indexcache.check import main

        return main()

    process.run("indexcache-check", work)


if __name__ == "__main__":
    check()

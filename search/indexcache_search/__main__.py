"""Entry point of indexcache-search, with a clear line where the search's dependencies are not installed."""

import sys


def main() -> None:
    """Run the command line."""
    try:
        from indexcache_search.cli import app
    except ModuleNotFoundError as error:
        missing = (error.name or str(error)).partition(".")[0]
        sys.stderr.write(
            f"indexcache-search: {missing} is not installed; expected: pip install 'sglang-indexcache[search]'\n"
        )
        sys.exit(2)
    app(prog_name="indexcache-search")


if __name__ == "__main__":
    main()

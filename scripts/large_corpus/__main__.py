"""Make the large corpus, or put its pieces together; see `build` and `pieces`."""

from __future__ import annotations

import argparse
from pathlib import Path

from indexcache_search.errors import FolderError
from scripts.large_corpus import build, pieces
from scripts.large_corpus.build import Build
from scripts.large_corpus.sources import SOURCES


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="scripts.large_corpus",
        description=f"{build.__doc__}\n{pieces.__doc__}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    make = commands.add_parser("make", help="from the archives to the pieces")
    make.add_argument("--output", type=Path, default=Path("build/large"))
    make.add_argument("--vocab-size", type=int, default=build.MOST_OF_A_DICTIONARY)
    make.add_argument("--tokens", type=int, default=150_000_000, help="to train on, at the least")
    joined = commands.add_parser("join", help="from the pieces to the corpus that trainings read")
    joined.add_argument("folders", type=Path, nargs="+", help="with pieces")
    joined.add_argument("--output", type=Path, default=Path("build/corpus"))
    joined.add_argument("--partial", action="store_true", help="without pieces of the training part that are missing")
    options = parser.parse_args()
    try:
        if options.command == "make":
            Build(options.output, SOURCES, options.vocab_size).make(options.tokens)
        else:
            pieces.join(options.folders, options.output, options.partial)
    except FolderError as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()

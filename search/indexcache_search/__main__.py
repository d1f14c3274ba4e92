"""Entry points of the command lines, with a clear line where dependencies are not installed."""

import importlib
import sys


def main() -> None:
    """Run indexcache-search."""
    _run("indexcache-search", "indexcache_search.cli", "search")


def evaluate() -> None:
    """Run indexcache-eval."""
    _run("indexcache-eval", "indexcache_search.eval_cli", "search")


def distill() -> None:
    """Run indexcache-distill."""
    _run("indexcache-distill", "indexcache_search.distill_cli", "distill")


def offload() -> None:
    """Run indexcache-offload."""
    _run("indexcache-offload", "indexcache_search.offload.cli", "search")


def _run(command: str, module: str, extra: str) -> None:
    try:
        app = importlib.import_module(module).app
    except ModuleNotFoundError as error:
        missing = (error.name or str(error)).partition(".")[0]
        sys.stderr.write(f"{command}: {missing} is not installed; expected: pip install 'sglang-indexcache[{extra}]'\n")
        sys.exit(2)
    app(prog_name=command)


if __name__ == "__main__":
    main()

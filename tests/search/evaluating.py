"""indexcache-eval as a module, for `tests.forked`."""

from indexcache_search.__main__ import evaluate

if __name__ == "__main__":
    evaluate()

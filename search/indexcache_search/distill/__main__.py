"""Entry point `python -m indexcache_search.distill`, for launchers of several processes."""

from indexcache_search.__main__ import distill

distill()

"""Generated long-range tasks of indexcache-eval: `tasks` makes samples, `options` has their option."""

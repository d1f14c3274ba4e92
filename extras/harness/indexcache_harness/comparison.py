"""`--harness` of indexcache-eval."""

from __future__ import annotations

from indexcache_harness.settings import Harness
from indexcache_search.console import results, warn
from indexcache_search.eval.extra import ExtraComparison, ExtraJob

FILES = ("harness.json", "lm-eval.log")


def _check(job: ExtraJob) -> None:
    from indexcache_harness.run import check

    check(job.endpoints)


def _run(job: ExtraJob) -> bool:
    """Compare on tasks; return true if a score falls by more than is allowed, or can't show whether it does."""
    from indexcache_harness.run import FILE, falls, run, table

    harness: Harness = job.settings
    result = run(job.model, job.endpoints, harness, job.output, job.console, beside=job.beside)
    results().print(table(result))
    results().print(f"Wrote {job.output / FILE}", soft_wrap=True)
    failed = falls(result)
    for line in failed:
        warn(job.console, f"--harness max_fall={harness.max_fall:g}: {line}")
    return bool(failed)


HARNESS = ExtraComparison(
    kind=Harness,
    help="Tasks of lm-eval, which asks the servers of --endpoint: alone, or after the comparison on --evaluation and"
    " --tasks where one of these is given. Keys: include (a folder with tasks of your own),"
    " sampling (greedy, or paper: temperature 1.0, top-p 0.95, top-k 40),"
    " limit (documents of a task), fewshot, chat (yes: through the chat template), lengths (of RULER's tasks,"
    " 4096/32768), output_tokens (of a reply), concurrency (requests at once; 1), seed, max_fall (exit with 1"
    " if a score is shown to fall by more, corrected for their number).",
    first="TASK,...",
    example="""\b
  indexcache-eval --model zai-org/GLM-5-FP8 --endpoint http://baseline:30000 --endpoint http://shared:30000 \\
        --harness gsm8k,ifeval:sampling=paper,chat=yes
      Real tasks, by lm-eval (its extra is `harness`), paired by document.
""",
    needs=("--endpoint",),
    gate="--harness max_fall",
    files=FILES,
    check=_check,
    run=_run,
)

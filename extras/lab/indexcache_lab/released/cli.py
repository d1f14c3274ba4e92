"""The command line: indexcache-lab released."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from indexcache_lab.options import DenseModel
from indexcache_search.cli.command import Config, Version, application, option
from indexcache_search.console import command, errors_in_one_line, messages, results
from sglang_indexcache import process

COMMAND = "indexcache-lab released"


def released(
    model: DenseModel,
    output: Annotated[Path | None, option("Folder for the results. Default: indexcache-released-NAME.")] = None,
    config: Config = None,
    version: Version = False,
) -> None:
    """Turn a released NOSA or MiniCPM4 (InfLLM-V2) checkpoint into a plain Llama with its eviction heads and plan.

    Writes model/ and pattern.yaml, for indexcache-offload (arXiv 2510.13602).
    """
    with errors_in_one_line(messages(), COMMAND):
        from indexcache_lab.released.convert import convert
        from indexcache_search.hf.loading import set_quiet

        set_quiet()
        process.let_work_end()
        folder = output or Path(f"indexcache-released-{Path(model).name}")
        written = convert(model, folder)
        out = results()
        out.print(f"Wrote {', '.join(map(str, written))}", soft_wrap=True)
        plan = ("--pattern", folder / "pattern.yaml", "--evaluation", "traffic.jsonl")
        out.print(f"Next: {command('indexcache-offload', '--model', folder / 'model', *plan)}", soft_wrap=True)


app = application({"released": released})

"""The command line that writes samples of generated tasks, for a search to calibrate on."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from indexcache_search.cli.bounded import Bounds
from indexcache_search.cli.command import Config, Version, application, number, option, running
from indexcache_search.console import results
from indexcache_search.errors import DataError, SearchError
from indexcache_tasks import tasks
from indexcache_tasks.options import GENERATED
from sglang_indexcache.command_line import exit_codes

EPILOG = f"""
Examples:

\b
  python -m indexcache_tasks --model M --tasks variable_tracking,mrcr --haystack prose.jsonl --seq-len 32768 \\
        --output tasks
      Write tasks/variable_tracking.jsonl and tasks/mrcr.jsonl. `indexcache-eval --tasks` takes other samples.

\b
  indexcache-search --model M --seq-len 32768 --calibration prose.jsonl --calibration tasks/mrcr.jsonl \\
        --calibration tasks/variable_tracking.jsonl
      Search with prose and both tasks, a third of the sequences each.

{exit_codes("is not used")}
"""
APART = 10_000  # samples that `indexcache-eval --tasks` may take: the first ones


def names(text: str) -> list[str]:
    """Read names of tasks, separated by commas.

    Raises:
        typer.BadParameter: if one is unknown, or stands there twice.
    """
    found = [word.strip() for word in text.split(",")]
    try:
        GENERATED.check(found)
    except DataError as error:
        raise typer.BadParameter(str(error)) from None
    return found


def _checked(text: str) -> str:
    names(text)
    return text


def write(
    context: typer.Context,
    *,
    model: Annotated[str, option("Folder or hub id, of which the tokenizer is read.")],
    seq_len: Annotated[int, number("Tokens of each sample.", Bounds(64, 10_000_000))],
    output: Annotated[Path, option("Folder that gets TASK.jsonl for each task; must be empty, or none yet.")],
    tasks: Annotated[
        str, option(f"Which: {', '.join(tasks.TASKS)}.", metavar="NAME,...", callback=_checked)
    ] = ",".join(tasks.TASKS),
    samples: Annotated[int, number("Of each task.", Bounds(1, APART))] = 32,
    haystack: Annotated[str, option("Source of the text around needles, as --calibration of a search.")] = "demo:text",
    chat: Annotated[bool, option("Ask through the chat template.", "--chat")] = False,
    seed: Annotated[int, number("Other seeds give other samples.", Bounds(0, 1_000_000))] = 0,
    config: Config = None,
    version: Version = False,
) -> None:
    """Write samples of generated tasks as rows of input_ids and loss_mask, of which answers count.

    A pattern is as good as what it was calibrated on: a kind of question of which a search saw nothing can break.
    """
    with running(context, {}):
        from indexcache_search.data.reader import TokenReader
        from indexcache_search.eval.held_out import haystack_of
        from indexcache_search.hf.loading import load_tokenizer, read_config, set_quiet
        from indexcache_tasks.tasks import sample

        if output.exists() and (not output.is_dir() or any(output.iterdir())):
            raise SearchError(f"--output {output}: is not empty, expected an empty folder, or none yet")
        set_quiet()
        reader = TokenReader(lambda: load_tokenizer(model), read_config(model).vocab_size, seq_len)
        text, first = haystack_of(reader, haystack, seq_len), APART * (seed + 1)
        written = {}
        for task in names(tasks):
            drawn = (sample(task, reader.tokenizer, text, seq_len, first + at, chat=chat) for at in range(samples))
            rows = ({"input_ids": one.tokens.tolist(), "loss_mask": one.mask.astype(int).tolist()} for one in drawn)
            try:
                written[output / f"{task}.jsonl"] = "".join(
                    json.dumps(row, separators=(",", ":")) + "\n" for row in rows
                )
            except DataError as error:
                raise DataError(str(error).replace("--tasks haystack", "--haystack")) from None
        output.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=output.parent, prefix=f".{output.name}-") as partial:
            made = Path(partial) / output.name
            made.mkdir()
            for path, content in written.items():
                (made / path.name).write_text(content)
            made.rename(output)  # all files or none; an empty folder is replaced
        results().print(f"Wrote {', '.join(map(str, written))}: {samples} samples each", soft_wrap=True)


app = application({"write": write}, EPILOG)

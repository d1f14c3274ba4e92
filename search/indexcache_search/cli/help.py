"""What `--help` shows: the options that most people need, with `--help-all` all of them, as wide as the terminal."""

from __future__ import annotations

import re
from typing import Any

from typer.core import TyperCommand

from sglang_indexcache.command_line import shown_command

ALL = "--help-all"
HELP_OPTIONS = {"help_option_names": ["-h", "--help", ALL]}
MORE = "\f"  # in an epilog: what follows is for `--help-all`
GROUPS = {
    "Model": ("model", "pattern", "search_first", "index_heads", "index_dim", "index_topk"),
    "Data": (
        *("calibration", "training", "evaluation", "rows", "dry_run", "seq_len", "num_sequences"),
        *("num_eval_sequences", "tasks", "reply", "decode_steps", "seed"),
    ),
    "Blocks of queries (DeepSeek-V3.2, GLM-5)": ("prefill", "decode"),
    "Dense models": ("selection", "bytes"),
    "Engine": ("engine", "endpoint", "device", "dtype", "batch_size", "prefix_cache_gb", "threads"),
    "Output": ("every", "write", "tensorboard", "output", "work_dir", "restart", "config", "version"),
}
"""Groups of options; all others stand in a group named after the command, behind the data."""
FIRST = {
    *("model", "pattern", "calibration", "training", "evaluation", "tasks", "dry_run", "seq_len", "num_sequences"),
    *("retain", "estimate", "speed", "max_increase", "search_first", "steps", "server", "engine", "endpoint"),
    *("device", "dtype", "output", "config", "served", "reference", "requests", "follow", "port", "allowed"),
}
"""Options that `--help` shows."""


class HelpfulCommand(TyperCommand):
    """A command whose help has options in groups, and examples that stay commands at any width."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the options in groups, with `--help` those that most people need."""
        own = str(self.name).rpartition("-")[2].capitalize()
        known = {name: title for title, names in GROUPS.items() for name in names}
        records: dict[str, list[Any]] = {title: [] for title in ("Model", "Data", own, *GROUPS)}
        hidden = 0
        for item in self.get_params(ctx):
            if item is self.get_help_option(ctx):  # click has its names in no order
                records["Output"].append((f"-h, --help, {ALL}", "Show this message, or all options, and exit."))
            elif _shows_all(ctx) or item.name in FIRST:
                records[known.get(item.name, own)].append(item.get_help_record(ctx))
            else:
                hidden += 1
        for title, lines in records.items():
            if lines:
                with formatter.section(title):
                    formatter.write_dl(lines)
        if hidden:
            formatter.write_paragraph()
            formatter.write_text(f"{hidden} more options: {ctx.command_path} {ALL}")

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the text behind the options: paragraphs, and blocks of commands or names with what they mean."""
        first, _, more = (self.epilog or "").partition(MORE)
        for block in re.split(r"\n\s*\n", f"{first}\n\n{more}" if _shows_all(ctx) else first):
            lines = block.replace("\b", "").replace("\\\n", " ").strip("\n").splitlines()
            if not "".join(lines).strip():
                continue
            formatter.write_paragraph()
            commands = [line.strip() for line in lines if re.match(r"  \S", line)]
            with formatter.indentation():
                if commands and re.match(r"\S+ {2,}", commands[0]):
                    formatter.write_dl([tuple(re.split(r" {2,}", line, maxsplit=1)) for line in commands])
                elif commands:
                    formatter.write(f"{shown_command(commands[0], formatter.width, '    ')}\n")
                    with formatter.indentation():
                        formatter.indent()
                        formatter.write_text(" ".join(line.strip() for line in lines[1:]))
                        formatter.dedent()
                else:
                    formatter.write_text(" ".join(lines))


def _shows_all(context: Any) -> bool:
    return ALL in context.meta.get("words", ())

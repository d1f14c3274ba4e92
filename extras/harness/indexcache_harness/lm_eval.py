"""lm-eval (EleutherAI's lm-evaluation-harness) in a process of its own, against one server."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from indexcache_harness.settings import Harness
from indexcache_search.engines.own_server import write_log
from indexcache_search.errors import SearchError
from indexcache_search.eval.endpoints import Endpoint
from sglang_indexcache.io.redaction import KEY_VARIABLE
from sglang_indexcache.model.name import ModelName
from sglang_indexcache.process import die_with_parent
from sglang_indexcache.version import requirement

SAMPLING: Mapping[str, Mapping[str, Any]] = {
    "greedy": {"do_sample": False, "temperature": 0},
    "paper": {"do_sample": True, "temperature": 1.0, "top_p": 0.95, "top_k": 40},
}
"""Arguments of generation; `paper` is IndexCache's (arXiv 2603.12201, Appendix D)."""
REQUEST_SECONDS = 3600
_KEY = "OPENAI_API_KEY"  # where lm-eval looks for the key of a server


def check_installed() -> None:
    """Check that lm-eval is installed.

    Raises:
        SearchError: if it is not.
    """
    if find_spec("lm_eval") is None:
        raise SearchError(f"--harness: lm_eval is not installed; expected: pip install {requirement('harness')}")


def configuration(harness: Harness, tokenizer: str, endpoint: Endpoint, room: int, folder: Path) -> dict[str, Any]:
    """Return lm-eval's configuration: prompts are sent as token ids, and all answers are kept.

    Args:
        harness: what to do.
        tokenizer: folder or hub id.
        endpoint: the server; its secrets go another way.
        room: tokens of the longest prompt with its reply.
        folder: for lm-eval's results.
    """
    name, most = ModelName.parse(tokenizer), harness.output_tokens
    found: dict[str, Any] = {
        "model": "local-completions",
        "model_args": {
            "model": endpoint.model,
            "base_url": f"{endpoint.url}/v1/completions",
            "tokenizer": name.repository,
            "tokenizer_backend": "huggingface",
            "tokenized_requests": True,
            "num_concurrent": harness.concurrency,
            "max_length": room,
            "timeout": REQUEST_SECONDS,
            **({"revision": name.revision} if name.revision else {}),
        },
        "tasks": list(harness.tasks),
        "gen_kwargs": dict(SAMPLING[harness.sampling]) | ({"max_gen_toks": most} if most is not None else {}),
        "log_samples": True,
        "output_path": str(folder),
        "seed": [harness.seed] * 4,
        "apply_chat_template": harness.chat,
        "metadata": {"tokenizer": name.repository, "max_seq_lengths": list(harness.lengths)} if harness.lengths else {},
    }
    for key, value in (("limit", harness.limit), ("num_fewshot", harness.fewshot)):
        if value is not None:
            found[key] = value
    if harness.include is not None:
        found["include_path"] = str(harness.include)
    return found


def run(config: Mapping[str, Any], folder: Path, log: Path) -> None:
    """Run lm-eval to its end.

    Args:
        config: see `configuration`.
        folder: for the configuration's file.
        log: its output is added to this file, without secrets.

    Raises:
        SearchError: with lm-eval's last line, if it fails.
    """
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(dict(config), sort_keys=False), encoding="utf-8")
    start = log.stat().st_size if log.exists() else 0
    environment = {name: value for name, value in os.environ.items() if name != _KEY}  # that is for another server
    if KEY_VARIABLE in os.environ:
        environment[_KEY] = os.environ[KEY_VARIABLE]
    process = subprocess.Popen(
        [sys.executable, "-m", "lm_eval", "run", "--config", str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**environment, "TOKENIZERS_PARALLELISM": "false"},
        preexec_fn=die_with_parent,
    )
    assert process.stdout is not None
    logging = threading.Thread(target=write_log, args=(process.stdout, log), daemon=True)
    logging.start()
    try:
        code = process.wait()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        logging.join(5)
    if code:
        with log.open("rb") as file:
            file.seek(start)
            lines = [line for line in file.read().decode(errors="replace").splitlines() if line.strip()]
        ends = [line for line in lines if "Error: " in line]
        reason = (ends or lines or ["no output"])[-1]
        raise SearchError(f"lm-eval ended with exit code {code}: {reason.strip()[:300]} (all of it: {log})")


def version() -> str:
    """Return the installed version of lm-eval."""
    return metadata.version("lm_eval")

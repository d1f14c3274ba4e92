r"""Train a dense language model with latent attention (MLA), of 60 million weights or more, in the time there is.

    python -m scripts.large_corpus join build/large/pieces --output build/corpus
    python -m scripts.demo_model.train_dense_mla --corpus build/corpus --output build/dense --seconds 600
    torchrun --nproc-per-node 2 -m scripts.demo_model.train_dense_mla ...

Short sequences come first, since looking things up is learned soonest there (a model of 24 layers and 10 million
weights learned it within 26 million tokens), then longer ones. A stage of short ones ends once answers are found, or
when its time is up; what it leaves goes to longer ones. Over the last quarter of the time the learning rate falls to 0,
and sequences have `--longest` tokens.
`--steps` takes numbers of steps in the place of the clock. No token of the corpus is read more than `--passes` times:
the shares of the time are then shares of these passes, whichever ends first.

The same command again goes on from the last checkpoint: with `--steps`, on a CPU, to the same weights bit for bit. With
the clock, what earlier runs spent counts; how many steps fit into it depends on the machine. `--base` goes on from
weights that were carried away (`scripts.bench.search.weights`), with optimizers that begin anew.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader

from indexcache_train.training.processes import Processes, joined
from scripts.demo_model import glm
from scripts.demo_model.build_demo import TOKENIZER_CONFIG
from scripts.demo_model.dense_model import check_memory, model_config, operations, text_losses
from scripts.demo_model.mixture import TASK, Batches, mixture_of
from scripts.demo_model.recall import ANSWER, TEXT, Batch
from scripts.demo_model.train_demo_model import MIXTURE, Trainer, configure_pytorch
from sglang_indexcache.io.digest import file_digest

WEIGHTS = {TEXT: 1.0, ANSWER: 4.0, TASK: 32.0}  # of targets in the loss; a sample of TASK has few of them
RATE = 2e-3
RAMP = 30  # steps of the ramp that a stage begins with
CHECK = 10  # steps between looks at the clock and at the losses
LOOKS, LEARNED = 5, 1.0  # a stage of short sequences ends when so many looks saw losses of answers below this
WINDOWS = 64  # of each part of the corpus, for the loss at the end
PROGRESS, WEIGHTS_FILE = "progress.json", "model.safetensors"


@dataclass(frozen=True)
class Stage:
    """A part of the training: sequences of `length` tokens, until a share of all the time is over.

    With `early` it ends as soon as answers are found.
    """

    name: str
    length: int
    until: float
    early: bool = False


STAGES = (
    Stage("256", 256, 0.25, early=True),
    Stage("512", 512, 0.4, early=True),
    Stage("1024", 1024, 0.5, early=True),
    Stage("4096", 4096, 0.75),
    Stage("decay", 4096, 1.0),
)


class DenseTrainer(Trainer):
    """The training of one dense model, in each of its processes.

    Args:
        processes: all of them; each draws batches of its own, and gradients are averaged.
        corpus: see `Batches`.
        output: folder of the model, the log and the checkpoint.
        seed: of weights and batches.
        config: of the model.
        batch_tokens: tokens of a step in each process.
        compile_: compile the layers.
        tasks: share of the sequences that are samples of `indexcache_tasks`.
        text: share of text alone among the others.
        longest: tokens of the last stage's sequences; 0 for those of `STAGES`.
    """

    def __init__(
        self,
        processes: Processes,
        corpus: Path,
        output: Path,
        seed: int,
        config: dict[str, Any],
        batch_tokens: int,
        compile_: bool,
        tasks: float = 0.4,
        text: float = MIXTURE["text"],
        longest: int = 0,
    ) -> None:
        super().__init__(glm, corpus, output, seed, config, compile_)
        self.processes, self.corpus, self.batch_tokens = processes, corpus, batch_tokens
        self.optimizers = self.body_optimizers(RATE)
        self.peaks = [group["lr"] for optimizer in self.optimizers for group in optimizer.param_groups]
        self.tasks_share, self.text_share = tasks, text
        self.step = self.since = 0  # `since` these optimizers began
        self.ends: list[int | None] = []  # steps at which stages end, once that is known
        self.spent: list[float] = []  # seconds of each stage
        self.identity = {
            "config": config,
            "seed": seed,
            "batch_tokens": batch_tokens,
            "processes": processes.count,
            "shares": [tasks, text],
            "longest": longest,
            "corpus": file_digest(corpus / "corpus.npz").sha256,
        }
        self.stages = (*STAGES[:-1], replace(STAGES[-1], length=longest or STAGES[-1].length))

    def log(self, **record: Any) -> None:
        """Log in the first process alone."""
        if self.processes.first:
            super().log(**record)

    def train_loss(self, x: Tensor, batch: Batch) -> tuple[Tensor, Callable[[], dict[str, float]]]:
        """Return the weighted loss, and a function that measures the loss of each kind of target."""
        losses, kind = self.token_losses(x, batch.tokens), batch.kind[:, 1:]
        weight = sum(factor * (kind == value).float() for value, factor in WEIGHTS.items())
        assert isinstance(weight, Tensor)

        def metrics() -> dict[str, float]:
            named = {"text": TEXT, "answer": ANSWER, "task": TASK}
            return {
                name: round(losses[kind == value].mean().item(), 4)
                for name, value in named.items()
                if (kind == value).any()
            }

        return (losses * weight).sum() / weight.sum(), metrics

    # -- checkpoints

    @property
    def _checkpoint(self) -> Path:
        return self.output / "checkpoint.pt"

    def keep(self) -> None:
        """Write a checkpoint in the place of the last one."""
        if self.processes.first:
            partial = self._checkpoint.with_suffix(".part")
            state = {"model": self.model.state_dict(), "optimizers": [item.state_dict() for item in self.optimizers]}
            torch.save({**state, **self.progress(), "identity": self.identity}, partial)
            partial.replace(self._checkpoint)
        self.processes.wait()

    def progress(self) -> dict[str, Any]:
        """Return how far the training is."""
        return {"step": self.step, "since": self.since, "ends": self.ends, "spent": self.spent}

    def go_on(self, base: Path | None = None) -> None:
        """Take the state of the last checkpoint, if there is one; else the weights in `base`.

        Raises:
            SystemExit: if it is another run's.
        """
        if self._checkpoint.exists():
            state = torch.load(self._checkpoint, map_location=self.device, weights_only=True)
            self._take_progress(state, self._checkpoint)
            self.model.load_state_dict(state["model"])
            for optimizer, kept in zip(self.optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(kept)
        elif base is not None:
            self._take_progress(json.loads((base / PROGRESS).read_text()), base / PROGRESS)
            self.since = self.step
            self.model.load_state_dict(load_file(base / WEIGHTS_FILE))

    def _take_progress(self, state: Mapping[str, Any], path: Path) -> None:
        for key, value in self.identity.items():
            if (found := state["identity"].get(key)) != value:
                raise SystemExit(f"{path}: {key} is {found}, expected {value}; take another --output")
        self.step, self.since, self.ends, self.spent = (state[key] for key in self.progress())

    def save(self) -> None:
        """Write the model; its weights, by which it counts as complete, come last."""
        partial = self.output / "model.part"
        shutil.rmtree(partial, ignore_errors=True)
        self.model.to("cpu", torch.bfloat16).save_pretrained(partial)
        (partial / "config.json").write_text(json.dumps(self.config, indent=2) + "\n")
        for path in sorted(partial.iterdir(), key=lambda path: path.name == WEIGHTS_FILE):
            path.replace(self.output / path.name)
        partial.rmdir()

    # -- training

    def train(
        self,
        steps: list[int] | None,
        seconds: float,
        workers: int,
        keep_every: float,
        show: int,
        passes: float = 0.0,
        base: Path | None = None,
    ) -> None:
        """Train through the stages, by the clock or by numbers of steps, and write the model.

        Args:
            steps: of each stage; None for the clock.
            seconds: all of the time, without loading.
            workers: processes that draw batches.
            keep_every: seconds between checkpoints.
            show: steps between lines of the log.
            passes: over the corpus, at most; 0 for any number.
            base: folder of weights that were carried away, for a run without a checkpoint.

        Raises:
            SystemExit: if the steps take more passes, or the base is another run's.
        """
        tokens = self.batch_tokens * self.processes.count
        self.most = int(passes * self.streams["train"].numel() / tokens) if passes else None
        if steps is not None and self.most is not None and sum(steps) > self.most:
            raise SystemExit(f"--steps takes {sum(steps)} steps, expected {self.most} at most: {passes} passes")
        self.go_on(base)
        if not self.ends:
            self.ends = [None] * len(self.stages) if steps is None else [sum(steps[: i + 1]) for i in range(len(steps))]
            self.spent = [0.0] * len(self.stages)
        for number, stage in enumerate(self.stages):
            end = self.ends[number]
            if end is not None and self.step >= end:
                continue
            if end is None and number + 1 == len(self.stages):  # the rate falls over a known number of steps
                self.ends[number] = self._last_end(seconds)
            self._run(number, seconds, workers, keep_every, show)
            self.keep()
            if number != len(self.stages) - 2:
                self.evaluate(stage.name, sparse=False, sequences=16, length=stage.length)
        length = self.stages[-1].length
        losses = text_losses(self, self.corpus, length, WINDOWS, max(1, self.batch_tokens // length))
        self.log(passes=round(self.step * tokens / self.streams["train"].numel(), 3), text_losses=losses)
        if self.processes.first:
            (self.output / "tokenizer.json").write_bytes((self.corpus / "tokenizer.json").read_bytes())
            (self.output / "tokenizer_config.json").write_text(json.dumps(TOKENIZER_CONFIG, indent=2) + "\n")
            self.save()
        self.processes.wait()

    def _last_end(self, seconds: float) -> int:
        """Return the step at which the last stage ends: what fits into the time left, at the pace of the one before.

        Longer sequences take longer, by the operations of a token. The clocks of processes differ. The first one's
        decides, or it would wait for steps that another does not take.
        """
        before, last = [0, *self.ends][-3] or 0, self.spent[-2]
        pace, left = last / max(1, self.step - before), max(0.0, seconds - sum(self.spent))
        pace *= operations(self.config, self.stages[-1].length) / operations(self.config, self.stages[-2].length)
        end = self.step + max(1, round(left / max(pace, 1e-6)))
        end, *_ = self.processes.gather(end if self.most is None else max(self.step + 1, min(end, self.most)))
        return int(end)

    def _run(self, number: int, seconds: float, workers: int, keep_every: float, show: int) -> None:
        """Run stage `number` to its end."""
        stage, first = self.stages[number], ([0, *self.ends][number] or 0)
        rope, tokens = self._rope(stage.length - 1), self.batch_tokens * self.processes.count
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        parameters = [parameter for group in groups for parameter in group["params"]]
        began, earlier = time.monotonic(), self.spent[number]
        kept, shown, since = began, began, self.step
        seen: list[float] = []  # the larger loss of answers, at the last looks
        for batch in self._batches(stage, workers):
            end = self.ends[number]
            factor = min(1.0, (self.step - first + 1) / RAMP) if number < len(self.stages) - 1 else 1.0
            if number == len(self.stages) - 1 and end is not None:
                factor = (end - self.step) / (end - first)
            if self.since:
                factor = min(factor, (self.step - self.since + 1) / RAMP)
            for group, peak in zip(groups, self.peaks, strict=True):
                group["lr"] = peak * factor
            with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.processes.bfloat16):
                metrics = self.dense_step(batch, rope)
            self._average(parameters)
            norm = nn.utils.clip_grad_norm_(parameters, 1.0).item()
            if not math.isfinite(norm):
                last = (
                    f"the last good checkpoint is {self._checkpoint}" if self._checkpoint.exists() else "none is kept"
                )
                raise SystemExit(f"{stage.name}, step {self.step + 1}: gradient norm {norm}, expected a number; {last}")
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            self.step += 1
            now = time.monotonic()
            self.spent[number] = earlier + now - began
            if self.step - first in (1, 2) or self.step % show == 0:
                rate = (self.step - since) * tokens / (now - shown)
                left = (
                    seconds - sum(self.spent)
                    if end is None
                    else (end - self.step) * (now - shown) / (self.step - since)
                )
                about = {"norm": round(norm, 3), "tok_s": int(rate), "left_s": int(left)}
                if self.device.type == "cuda":
                    about["peak_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 1)
                self.log(stage=stage.name, step=self.step, **metrics(), **about)
                shown, since = now, self.step
            if end is None and self.step % CHECK == 0:
                over = sum(self.spent) >= stage.until * seconds
                over |= self.most is not None and self.step >= stage.until * self.most
                if stage.early:
                    found = metrics()
                    seen = [
                        *seen,
                        max((found[name] for name in ("answer", "task") if name in found), default=math.inf),
                    ][-LOOKS:]
                    over |= len(seen) == LOOKS and max(seen) < LEARNED
                over, *_ = self.processes.gather(over)  # the first one decides
                if over:
                    self.ends[number] = end = self.step
            if self.step == end:
                return
            if self.step % CHECK == 0:
                due, *_ = self.processes.gather(time.monotonic() - kept >= keep_every)
                if due:
                    self.keep()
                    kept = time.monotonic()

    def _batches(self, stage: Stage, workers: int) -> Iterator[Batch]:
        """Yield this process's batches from the present step on."""
        batch, mixture = max(1, self.batch_tokens // stage.length), mixture_of(self.text_share)
        drawn = Batches(self.corpus, "train", stage.length, batch, self.seed, self.tasks_share, mixture)
        index, count = self.processes.index, self.processes.count
        numbers = (step * count + index for step in _count_from(self.step))
        loader: Any = DataLoader(
            drawn, batch_size=None, sampler=numbers, num_workers=workers, pin_memory=self.device.type == "cuda"
        )
        for tokens, kind in loader:
            yield Batch(tokens.to(self.device, non_blocking=True), kind.to(self.device, non_blocking=True))

    def _average(self, parameters: list[nn.Parameter]) -> None:
        """Average gradients over processes."""
        if self.processes.count == 1:
            return
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        flat = torch.cat([gradient.flatten() for gradient in gradients]) / self.processes.count
        dist.all_reduce(flat)
        parts = flat.split([gradient.numel() for gradient in gradients])
        torch._foreach_copy_(gradients, [part.view_as(item) for part, item in zip(parts, gradients, strict=True)])


def _count_from(step: int) -> Iterator[int]:
    while True:
        yield step
        step += 1


def main(options: argparse.Namespace) -> None:
    with joined("auto", options.dtype) as processes:
        vocab_size = len(json.loads((options.corpus / "tokenizer.json").read_text())["model"]["vocab"])
        config = model_config(options.layers, options.hidden, options.heads, vocab_size)
        config["max_position_embeddings"] = max(config["max_position_embeddings"], options.longest)
        need = check_memory(config, options.batch_tokens, processes.device)
        trainer = DenseTrainer(
            processes,
            options.corpus,
            options.output,
            options.seed,
            config,
            options.batch_tokens,
            not options.no_compile and processes.device.type == "cuda",
            options.tasks,
            options.text,
            options.longest,
        )
        weights = sum(item.numel() for item in trainer.model.parameters())
        trainer.log(weights=weights, layers=options.layers, estimate_gb=round(need, 1), processes=processes.count)
        steps = [int(part) for part in options.steps.split(",")] if options.steps else None
        if steps is not None and len(steps) != len(STAGES):
            raise SystemExit(f"--steps has {len(steps)} numbers, expected {len(STAGES)}")
        every = (options.workers, options.keep_every, options.show)
        trainer.train(steps, options.seconds, *every, options.passes, options.base)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--steps", default="", help="steps of each stage, such as 600,500,800,500")
    parser.add_argument("--passes", type=float, default=3.0, help="over the corpus, at most; 0 for any number")
    parser.add_argument("--base", type=Path, help="folder of weights to go on from, where there is no checkpoint")
    parser.add_argument("--tasks", type=float, default=0.4, help="share of the sequences that are samples of tasks")
    parser.add_argument("--text", type=float, default=MIXTURE["text"], help="share of text alone among the others")
    parser.add_argument("--longest", type=int, default=STAGES[-1].length, help="tokens of the last stage's sequences")
    parser.add_argument("--batch-tokens", type=int, default=65536, help="tokens of a step in each process")
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="auto")
    parser.add_argument("--workers", type=int, default=6, help="processes that draw batches")
    parser.add_argument("--keep-every", type=float, default=60.0, help="seconds between checkpoints")
    parser.add_argument("--show", type=int, default=50, help="steps between lines")
    parser.add_argument("--no-compile", action="store_true")
    configure_pytorch()
    main(parser.parse_args())

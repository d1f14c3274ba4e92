r"""Train a dense language model with latent attention (MLA), of 60 million weights or more, in the time there is.

    python -m scripts.demo_model.corpus --output build/corpus8192 --vocab-size 8192
    python -m scripts.demo_model.train_dense_mla --corpus build/corpus8192 --output build/dense --seconds 600
    torchrun --nproc-per-node 2 -m scripts.demo_model.train_dense_mla ...

Short sequences come first, since looking things up is learned soonest there (a model of 24 layers and 10 million
weights learned it within 26 million tokens), then longer ones. A stage of short ones ends once answers are found, or
when its time is up; what it leaves goes to the longest. Over the last quarter of the time the learning rate falls to 0.
`--steps` takes numbers of steps in the place of the clock.

The same command again goes on from the last checkpoint: with `--steps`, on a CPU, to the same weights bit for bit. With
the clock, what earlier runs spent counts; how many steps fit into it depends on the machine.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM

from indexcache_train.distill.memory import available
from indexcache_train.training.processes import Processes, joined
from scripts.demo_model import glm
from scripts.demo_model.build_demo import TOKENIZER_CONFIG
from scripts.demo_model.mixture import TASK, Batches
from scripts.demo_model.recall import ANSWER, TEXT, Batch
from scripts.demo_model.train_demo_model import Trainer, configure_pytorch
from sglang_indexcache.io.digest import file_digest

WEIGHTS = {TEXT: 1.0, ANSWER: 4.0, TASK: 32.0}  # of targets in the loss; a sample of TASK has few of them
RATE = 2e-3
RAMP = 30  # steps of the ramp that a stage begins with
CHECK = 10  # steps between looks at the clock and at the losses
LOOKS, LEARNED = 5, 1.0  # a stage of short sequences ends when so many looks saw losses of answers below this
OPTIMIZER_BYTES = 28  # of a weight: itself, gradient, moments, and what Muon holds while it steps


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


def model_config(layers: int, hidden: int, heads: int, vocab_size: int) -> dict[str, Any]:
    """Return config.json: GLM-4.7-Flash's architecture without experts."""
    return {
        **glm.dense_config(glm.demo_config(layers)),
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "intermediate_size": 11 * hidden // 4,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "q_lora_rank": hidden // 2,
        "kv_lora_rank": 128,
        "v_head_dim": 128,  # as wide as queries and keys, which fused attention needs
        "moe_intermediate_size": hidden,
    }


def check_memory(config: dict[str, Any], tokens: int, device: torch.device) -> float:
    """Return the estimated GB of a step of `tokens` tokens.

    Raises:
        SystemExit: if the device has fewer free.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    weights = OPTIMIZER_BYTES * sum(item.numel() for item in model.parameters())
    heads = config["num_attention_heads"] * (config["qk_nope_head_dim"] + config["qk_rope_head_dim"])
    layer = 2 * (5 * heads + 4 * config["intermediate_size"]) + 12 * config["hidden_size"]
    logits = 8 * config["vocab_size"]
    need, there = weights + tokens * (config["num_hidden_layers"] * layer + logits), available(device)
    if need > there:
        raise SystemExit(
            f"about {need / 1e9:.1f} GB are needed, {device} has {there / 1e9:.1f} free; expected fewer --batch-tokens"
        )
    return need / 1e9


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
    ) -> None:
        super().__init__(glm, corpus, output, seed, config, compile_)
        self.processes, self.corpus, self.batch_tokens = processes, corpus, batch_tokens
        self.optimizers = self.body_optimizers(RATE)
        self.peaks = [group["lr"] for optimizer in self.optimizers for group in optimizer.param_groups]
        self.step = 0
        self.ends: list[int | None] = []  # steps at which stages end, once that is known
        self.spent: list[float] = []  # seconds of each stage
        self.identity = {
            "config": config,
            "seed": seed,
            "batch_tokens": batch_tokens,
            "processes": processes.count,
            "corpus": file_digest(corpus / "corpus.npz").sha256,
        }

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
            about = {"step": self.step, "ends": self.ends, "spent": self.spent, "identity": self.identity}
            torch.save({**state, **about}, partial)
            partial.replace(self._checkpoint)
        self.processes.wait()

    def go_on(self) -> None:
        """Take the state of the last checkpoint, if there is one.

        Raises:
            SystemExit: if it is another run's.
        """
        if not self._checkpoint.exists():
            return
        state = torch.load(self._checkpoint, map_location=self.device, weights_only=True)
        for key, value in self.identity.items():
            if state["identity"][key] != value:
                found = state["identity"][key]
                raise SystemExit(f"{self._checkpoint}: {key} is {found}, expected {value}; take another --output")
        self.model.load_state_dict(state["model"])
        for optimizer, kept in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(kept)
        self.step, self.ends, self.spent = state["step"], state["ends"], state["spent"]

    # -- training

    def train(self, steps: list[int] | None, seconds: float, workers: int, keep_every: float, show: int) -> None:
        """Train through `STAGES`, by the clock or by numbers of steps, and write the model.

        Args:
            steps: of each stage; None for the clock.
            seconds: all of the time, without loading.
            workers: processes that draw batches.
            keep_every: seconds between checkpoints.
            show: steps between lines of the log.
        """
        self.go_on()
        if not self.ends:
            self.ends = [None] * len(STAGES) if steps is None else [sum(steps[: i + 1]) for i in range(len(steps))]
            self.spent = [0.0] * len(STAGES)
        for number, stage in enumerate(STAGES):
            end = self.ends[number]
            if end is not None and self.step >= end:
                continue
            if end is None and number + 1 == len(STAGES):  # the rate falls over a known number of steps
                self.ends[number] = self._last_end(seconds)
            self._run(number, seconds, workers, keep_every, show)
            self.keep()
            if number != len(STAGES) - 2:
                self.evaluate(stage.name, sparse=False, sequences=16, length=stage.length)
        if self.processes.first:
            (self.output / "tokenizer.json").write_bytes((self.corpus / "tokenizer.json").read_bytes())
            (self.output / "tokenizer_config.json").write_text(json.dumps(TOKENIZER_CONFIG, indent=2) + "\n")
            self.save()
        self.processes.wait()

    def _last_end(self, seconds: float) -> int:
        """Return the step at which the last stage ends: what fits into the time left, at the pace of the one before.

        The clocks of processes differ. The first one's decides, or it would wait for steps that another does not take.
        """
        before, last = [0, *self.ends][-3] or 0, self.spent[-2]
        pace, left = last / max(1, self.step - before), max(0.0, seconds - sum(self.spent))
        end, *_ = self.processes.gather(self.step + max(1, round(left / max(pace, 1e-6))))
        return int(end)

    def _run(self, number: int, seconds: float, workers: int, keep_every: float, show: int) -> None:
        """Run stage `number` to its end."""
        stage, first = STAGES[number], ([0, *self.ends][number] or 0)
        rope, tokens = self._rope(stage.length - 1), self.batch_tokens * self.processes.count
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        parameters = [parameter for group in groups for parameter in group["params"]]
        began, earlier = time.monotonic(), self.spent[number]
        kept, shown, since = began, began, self.step
        seen: list[float] = []  # the larger loss of answers, at the last looks
        for batch in self._batches(stage, workers):
            end = self.ends[number]
            factor = min(1.0, (self.step - first + 1) / RAMP) if number < len(STAGES) - 1 else 1.0
            if number == len(STAGES) - 1 and end is not None:
                factor = (end - self.step) / (end - first)
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
                if stage.early:
                    found = metrics()
                    seen = [*seen, max(found.get(name, 0.0) for name in ("answer", "task"))][-LOOKS:]
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
        drawn = Batches(self.corpus, "train", stage.length, max(1, self.batch_tokens // stage.length), self.seed)
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
        need = check_memory(config, options.batch_tokens, processes.device)
        trainer = DenseTrainer(
            processes,
            options.corpus,
            options.output,
            options.seed,
            config,
            options.batch_tokens,
            not options.no_compile and processes.device.type == "cuda",
        )
        weights = sum(item.numel() for item in trainer.model.parameters())
        trainer.log(weights=weights, layers=options.layers, estimate_gb=round(need, 1), processes=processes.count)
        steps = [int(part) for part in options.steps.split(",")] if options.steps else None
        if steps is not None and len(steps) != len(STAGES):
            raise SystemExit(f"--steps has {len(steps)} numbers, expected {len(STAGES)}")
        trainer.train(steps, options.seconds, options.workers, options.keep_every, options.show)


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
    parser.add_argument("--batch-tokens", type=int, default=65536, help="tokens of a step in each process")
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="auto")
    parser.add_argument("--workers", type=int, default=6, help="processes that draw batches")
    parser.add_argument("--keep-every", type=float, default=60.0, help="seconds between checkpoints")
    parser.add_argument("--show", type=int, default=50, help="steps between lines")
    parser.add_argument("--no-compile", action="store_true")
    configure_pytorch()
    main(parser.parse_args())

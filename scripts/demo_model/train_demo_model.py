r"""Train the embedded demo model, a 7M-parameter GLM-5-architecture DSA language model, on one GPU in minutes.

Three stages, as DSA models are made (paper, Section 2.1): a dense language model; indexer warm-up by KL against the
head-averaged attention, all else frozen; the sparse stage, in which top-k selection is active, the model learns from
the language modelling loss and the indexers by distillation on a detached graph.

Each stage leaves its weights in the output folder. The same command again goes on behind the last one, to the same
model: every stage has optimizers and random numbers of its own.

    python -m scripts.demo_model.corpus --output build/corpus
    python -m scripts.demo_model.train_demo_model --corpus build/corpus --output build/demo --seed 0
    python -m scripts.demo_model.train_demo_model --architecture deepseek_v4 --layers 21 \
        --index-topk 16 --output build/v4

A trained model goes on with longer sequences, in the sparse stage (the demo model, to 4,096 tokens):

    python -m scripts.demo_model.train_demo_model --base search/indexcache_search/demo/indexcache-demo --length 4096 \
        --output build/demo4096
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM

from scripts.demo_model import deepseek_v4, glm
from scripts.demo_model.muon import Muon
from scripts.demo_model.recall import ANSWER, TASKS, TEXT, Batch, RecallTasks

MIXTURE = {
    "kv_mix": 0.14,
    "kv_dense": 0.09,
    "kv_end": 0.13,
    "chain": 0.10,
    "multi": 0.09,
    "update": 0.09,
    "copy": 0.08,
    "text": 0.28,
}
ARCHITECTURES: dict[str, Any] = {"glm": glm, "deepseek_v4": deepseek_v4}
TRAINED = 1024  # tokens of a sequence in the three stages
ANSWER_WEIGHT = 4.0  # of an answer token in the training loss; unpredictable tokens weigh nothing


@dataclass(frozen=True)
class Stage:
    """One training stage: `steps` of `batch` sequences of `length` tokens, learning rate by cosine from `rate`."""

    name: str
    steps: int
    batch: int
    length: int
    warmup: int = 100


class Trainer:
    """The model, its data and the log of one training run."""

    def __init__(
        self, architecture: Any, corpus: Path, output: Path, seed: int, config: dict[str, Any], compile_: bool
    ) -> None:
        torch.manual_seed(seed)
        self.architecture = architecture
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.output, self.config, self.start = output, config, time.monotonic()
        output.mkdir(parents=True, exist_ok=True)
        hf_config = AutoConfig.for_model(**config)
        self.model = AutoModelForCausalLM.from_config(hf_config, dtype=torch.float32)
        self._initialize()
        self.model.to(self.device)
        data = np.load(corpus / "corpus.npz")
        self.words = torch.from_numpy(data["words"])
        self.streams = {part: torch.from_numpy(data[part].astype(np.int32)) for part in ("train", "evaluation")}
        self.seed = seed
        wrap: Callable[..., Any] = partial(torch.compile, dynamic=False) if compile_ else lambda function: function
        self.dense, self.warmup = wrap(architecture.dense_layer), wrap(architecture.warmup_layer)
        self.sparse = wrap(architecture.sparse_layer)
        self.head_loss = wrap(_head_loss)
        self.log_file = (output / "train_log.jsonl").open("a")

    def _initialize(self) -> None:
        depth = 2 * self.config["num_hidden_layers"]
        for name, parameter in self.model.named_parameters():
            if name.endswith(("position_bias", "sinks", "hc_fn", "hc.fn", "base", "scale", "bias")):
                continue  # as transformers initialises them
            if parameter.dim() >= 2:
                std = 0.02 if "embed" in name or "lm_head" in name else parameter.shape[-1] ** -0.5
                if name.endswith(("o_proj.weight", "o_b_proj.weight", "down_proj.weight", "down_proj")):
                    std /= math.sqrt(depth)
                nn.init.normal_(parameter, std=std)

    def log(self, **record: Any) -> None:
        record = {"seconds": round(time.monotonic() - self.start, 1), **record}
        line = json.dumps(record)
        print(line, flush=True)
        self.log_file.write(line + "\n")
        self.log_file.flush()

    # -- passes

    @property
    def layers(self) -> Iterable[nn.Module]:
        layers: nn.ModuleList = self.model.model.layers
        return layers

    def embed(self, tokens: Tensor) -> Tensor:
        embedded: Tensor = self.architecture.embed(self.model, tokens[:, :-1])
        return embedded

    def token_losses(self, x: Tensor, tokens: Tensor) -> Tensor:
        inputs = self.architecture.final(self.model, x)
        losses: Tensor = self.head_loss(inputs, self.model.lm_head.weight, tokens[:, 1:])
        return losses

    def train_loss(self, x: Tensor, batch: Batch) -> tuple[Tensor, Callable[[], dict[str, float]]]:
        losses = self.token_losses(x, batch.tokens)
        kind = batch.kind[:, 1:]
        weight = (kind == TEXT).float() + ANSWER_WEIGHT * (kind == ANSWER).float()

        def metrics() -> dict[str, float]:
            named = {"text": TEXT, "answer": ANSWER}
            return {name: round(losses[kind == value].mean().item(), 4) for name, value in named.items()}

        return (losses * weight).sum() / weight.sum(), metrics

    def dense_step(self, batch: Batch, rope: Any) -> Callable[[], dict[str, Any]]:
        x = self.embed(batch.tokens)
        for layer in self.layers:
            x = self.dense(layer, x, rope)
        loss, metrics = self.train_loss(x, batch)
        loss.backward()
        return metrics

    def warmup_step(self, batch: Batch, rope: Any) -> Callable[[], dict[str, Any]]:
        x, divergences = self.embed(batch.tokens).detach(), []
        for layer in self.layers:
            x, divergence = self.warmup(layer, x, rope)
            x = x.detach()
            if divergence.requires_grad:  # a layer without an indexer has none
                divergence.backward()
            divergences.append(divergence.detach())
        return lambda: {"kl": [round(value.item(), 3) for value in divergences]}

    def sparse_step(self, batch: Batch, rope: Any) -> Callable[[], dict[str, Any]]:
        x, divergences = self.embed(batch.tokens), []
        for layer in self.layers:
            if batch.tokens.shape[1] > TRAINED + self.architecture.EXTRA_TOKENS:  # [B, H, S, S] of one layer at a time
                x, divergence = checkpoint(self.sparse, layer, x, rope, self.config["index_topk"], use_reentrant=False)
            else:
                x, divergence = self.sparse(layer, x, rope, self.config["index_topk"])
            divergences.append(divergence)
        loss, metrics = self.train_loss(x, batch)
        (loss + torch.stack(divergences).sum()).backward()
        return lambda: {**metrics(), "kl": [round(value.item(), 3) for value in divergences]}

    # -- stages

    def went_on(self, number: int, name: str) -> bool:
        """Take the weights that an earlier run left behind a stage, if it did; else begin the stage."""
        path = self._weights(number, name)
        if path.exists():
            self.model.load_state_dict(torch.load(path, map_location=self.device, weights_only=True))
            return True
        torch.manual_seed(self.seed + 1000 * number)
        self.tasks = RecallTasks(self.streams["train"], self.words, self.seed + 1 + 1000 * number, self.device)
        return False

    def leave(self, number: int, name: str) -> None:
        """Leave the weights for a run that goes on from here."""
        path = self._weights(number, name)
        torch.save(self.model.state_dict(), path.with_suffix(".part"))
        path.with_suffix(".part").rename(path)

    def _weights(self, number: int, name: str) -> Path:
        return self.output / f"{number}-{name}.pt"

    def run_stages(
        self,
        stages: list[Stage],
        optimizers: list[torch.optim.Optimizer],
        step: Callable[[Batch, Any], Callable[[], dict[str, Any]]],
        log_every: int = 100,
    ) -> None:
        """Run `stages` under one cosine schedule over all their tokens."""
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        peaks = [group["lr"] for group in groups]
        total = sum(stage.steps * stage.batch * stage.length for stage in stages)
        done = 0
        for stage in stages:
            length = stage.length + self.architecture.EXTRA_TOKENS
            rope = self._rope(length - 1)
            began, since = time.monotonic(), 0
            for number in range(stage.steps):
                ramp = min(1.0, (number + 1) / stage.warmup)
                factor = ramp * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * done / total)))
                for group, peak in zip(groups, peaks, strict=True):
                    group["lr"] = peak * factor
                draw = self.tasks.mixture if stage.length <= TRAINED else self.tasks.drawn
                batch = draw(MIXTURE, stage.batch, length)
                with torch.autocast(self.device.type, dtype=torch.bfloat16):
                    metrics = step(batch, rope)
                parameters = [parameter for group in groups for parameter in group["params"]]
                norm = nn.utils.clip_grad_norm_(parameters, 1.0)
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=True)
                done += stage.batch * stage.length
                if number in (0, 1) or (number + 1) % log_every == 0:
                    values, now = metrics(), time.monotonic()  # metrics wait for the device
                    rate = (number - since) * stage.batch * stage.length / (now - began)
                    self.log(stage=stage.name, step=number + 1, **values, norm=round(norm.item(), 3), tok_s=int(rate))
                    if not norm.isfinite():
                        raise SystemExit(f"{stage.name}, step {number + 1}: the gradient is not finite")
                    if number == 1:
                        began, since = now, number

    def _rope(self, length: int) -> Any:
        return self.architecture.positions(self.model, length, self.device)

    def body_optimizers(self, rate: float) -> list[torch.optim.Optimizer]:
        named = [(name, p) for name, p in self.model.named_parameters() if "indexer" not in name]
        small = ("position_bias", "fn", "mlp.gate.weight")  # matrices that mix few numbers: not for Muon
        matrices = [p for name, p in named if p.dim() >= 2 and ".layers." in name and not name.endswith(small)]
        tables = [p for name, p in named if p.dim() == 2 and ".layers." not in name and not name.endswith(small)]
        vectors = [p for name, p in named if p.dim() < 2 or name.endswith(small)]
        adam = [{"params": tables, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
        return [Muon(matrices, rate), torch.optim.AdamW(adam, rate, betas=(0.9, 0.95))]

    def indexer_optimizer(self, rate: float) -> torch.optim.Optimizer:
        parameters = [p for name, p in self.model.named_parameters() if "indexer" in name]
        return torch.optim.AdamW(parameters, rate, betas=(0.9, 0.98), weight_decay=0.0)

    @torch.no_grad()
    def evaluate(self, name: str, sparse: bool, sequences: int = 48, length: int = TRAINED) -> None:
        """Log held-out loss and answer accuracy of every task."""
        tasks = RecallTasks(self.streams["evaluation"], self.words, 777, self.device)
        length += self.architecture.EXTRA_TOKENS
        rope, results = self._rope(length - 1), {}
        for task in TASKS:
            batch = tasks.sample(task, sequences, length)
            with torch.autocast(self.device.type, dtype=torch.bfloat16):
                x = self.embed(batch.tokens)
                for layer in self.layers:
                    x = (
                        self.sparse(layer, x, rope, self.config["index_topk"])[0]
                        if sparse
                        else self.dense(layer, x, rope)
                    )
                logits = self.model.lm_head(self.architecture.final(self.model, x)).float()
            kind, target = batch.kind[:, 1:], batch.tokens[:, 1:]
            losses = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none").view_as(target)
            result = {"text": losses[kind == TEXT].mean().item()} if (kind == TEXT).any() else {}
            if (kind == ANSWER).any():
                result["accuracy"] = (logits.argmax(-1) == target)[kind == ANSWER].float().mean().item()
            results[task] = {key: round(value, 4) for key, value in result.items()}
        self.log(evaluation=name, **results)

    def save(self) -> None:
        self.model.to("cpu", torch.bfloat16).save_pretrained(self.output)  # under the names of the release
        (self.output / "config.json").write_text(json.dumps(self.config, indent=2) + "\n")


def _head_loss(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    logits = F.linear(x, weight).float()
    return F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none").view_as(target)


def configure_pytorch() -> None:
    """Set PyTorch's switches for the whole process."""
    torch.set_float32_matmul_precision("high")
    torch._dynamo.config.cache_size_limit = 64  # kinds of layers times lengths
    # PyTorch 2.10 to 2.13 leave gradients of a parameter's chunks unwritten with it (github.com/pytorch/pytorch,
    # issue 193061): those of DeepSeek-V4's hyper-connections became infinite.
    torch._inductor.config.triton.mix_order_reduction = False


def train(trainer: Trainer, scale: float) -> None:
    """Run the three stages with their step counts multiplied by `scale`."""

    def steps(count: int) -> int:
        return max(2, int(count * scale))

    def dense() -> None:
        stages = [Stage("dense 256", steps(3600), 256, 256), Stage("dense 1024", steps(3000), 64, 1024, warmup=30)]
        trainer.run_stages(stages, trainer.body_optimizers(2.5e-3), trainer.dense_step)
        trainer.evaluate("dense", sparse=False)

    def warmup() -> None:
        stages = [Stage("indexer warm-up", steps(400), 16, 1024, warmup=30)]
        trainer.run_stages(stages, [trainer.indexer_optimizer(2e-3)], trainer.warmup_step)
        trainer.evaluate("after warm-up", sparse=True)

    def sparse() -> None:
        stages = [Stage("sparse", steps(2600), 16, 1024, warmup=30)]
        optimizers = [*trainer.body_optimizers(8e-4), trainer.indexer_optimizer(1e-3)]
        trainer.run_stages(stages, optimizers, trainer.sparse_step)
        trainer.evaluate("final", sparse=True)

    for number, run in enumerate((dense, warmup, sparse)):
        if not trainer.went_on(number, run.__name__):
            run()
            trainer.leave(number, run.__name__)
    trainer.save()


def lengthen(trainer: Trainer, base: Path, length: int, scale: float) -> None:
    """Go on from the weights in `base` with sequences of `length` tokens, in the sparse stage."""
    trainer.model.load_state_dict(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).state_dict())
    torch.manual_seed(trainer.seed + 3000)
    trainer.tasks = RecallTasks(trainer.streams["train"], trainer.words, trainer.seed + 3001, trainer.device)
    sequences = max(1, 48 * TRAINED // length)
    trainer.evaluate(f"base at {length}", sparse=True, sequences=sequences, length=length)
    stage = Stage(f"sparse {length}", max(2, int(700 * scale)), 4, length, warmup=30)
    trainer.run_stages([stage], [*trainer.body_optimizers(4e-4), trainer.indexer_optimizer(1e-3)], trainer.sparse_step)
    for tokens in (TRAINED, length):
        trainer.evaluate(f"final at {tokens}", sparse=True, sequences=48 * TRAINED // tokens, length=tokens)
    trainer.save()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, default=Path("build/corpus"))
    parser.add_argument("--output", type=Path, default=Path("build/demo"))
    parser.add_argument("--architecture", choices=ARCHITECTURES, default="glm")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--index-topk", type=int, default=64)
    parser.add_argument("--scale", type=float, default=1.0, help="multiplies every stage's steps (a smoke test: 0.01)")
    parser.add_argument("--base", type=Path, help="a model to go on from, with --length")
    parser.add_argument("--length", type=int, help="tokens of a sequence, for --base")
    parser.add_argument("--no-compile", action="store_true")
    options = parser.parse_args()
    configure_pytorch()
    architecture = ARCHITECTURES[options.architecture]
    if (options.base is None) != (options.length is None):
        parser.error("--base and --length belong together")
    if options.base is None:
        config = architecture.demo_config(options.layers, options.index_topk)
    else:
        config = json.loads((options.base / "config.json").read_text())
    trainer = Trainer(architecture, options.corpus, options.output, options.seed, config, not options.no_compile)
    if options.base is None:
        train(trainer, options.scale)
    else:
        lengthen(trainer, options.base, options.length, options.scale)

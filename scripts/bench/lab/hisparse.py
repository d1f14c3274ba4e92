"""Step times of SGLang's HiSparse beside those that `indexcache-offload` predicts. Needs SGLang and a CUDA device.

    python -m scripts.bench.lab.hisparse --output build/hisparse --make
    python -m scripts.bench.lab.hisparse --output build/hisparse --batch 8 --context 32768 --buffers 2048,4096,8192
    indexcache-offload --model build/hisparse/model --evaluation build/hisparse/tokens.jsonl ...   (it prints them)
    python -m scripts.bench.lab.hisparse --output build/hisparse --compare

--make writes a random model: one TP-8 rank's share of GLM-5's heads, 12 layers, bfloat16. Then the same requests, of
random tokens, are decoded by SGLang with all of the cache on the device, and by HiSparse with each size of buffer, each
in a process of its own. Their greedy replies go to tokens.jsonl, so that the same steps are counted. The prediction is
the step without offloading and what `indexcache-offload` says it waits; it must not know HiSparse's times.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from scripts.bench import child

LAYERS, VOCABULARY, STEPS = 12, 32768, 128
SHAPES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 6144,
    "intermediate_size": 2304,
    "num_hidden_layers": LAYERS,
    "first_k_dense_replace": LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "q_lora_rank": 2048,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "index_topk": 2048,
    "max_position_embeddings": 202752,
    "initializer_range": 0.02,
}
ENGINE: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "kv_cache_dtype": "bfloat16",
    "dsa_prefill_backend": "flashmla_sparse",
    "dsa_decode_backend": "flashmla_sparse",
    "page_size": 64,
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "disable_radix_cache": True,
    "chunked_prefill_size": 8192,
    "mem_fraction_static": 0.7,
    "mm_feature_transport": "cpu",
    "cuda_graph_backend_prefill": "disabled",
    "watchdog_timeout": 600,
}
LETTERS = {"F": "F" * LAYERS, "FSSS": "FSSS" * (LAYERS // 4)}


def make(folder: Path) -> None:
    """Write a random checkpoint that SGLang and transformers load, where there is none."""
    from scripts.tools.random_models import build

    if folder.exists():
        return
    part = folder.with_name(folder.name + ".part")
    build("glm-dense", part, **SHAPES)
    part.rename(folder)


def prompts(options: argparse.Namespace) -> list[list[int]]:
    """Draw prompts of random tokens."""
    drawn = random.Random(0)  # noqa: S311
    return [[drawn.randrange(2, VOCABULARY) for _ in range(options.context)] for _ in range(options.batch)]


def serve(options: argparse.Namespace) -> dict[str, Any]:
    """Run one engine: greedy replies, and milliseconds a step once all requests decode together."""
    import sglang

    engine = sglang.Engine(model_path=str(options.output / "model"), **json.loads(options.engine))
    found = decode(engine, options)
    engine.shutdown()
    return found


def decode(engine: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Decode the prompts with an engine, twice, since the first time compiles."""
    parameters = {"temperature": 0, "max_new_tokens": STEPS, "ignore_eos": True}
    found: list[float] = []
    answers: list[list[list[int]]] = []
    for _ in range(2):
        replies: list[list[int]] = [[] for _ in range(options.batch)]
        began = [0.0] * options.batch
        times: list[list[float]] = [[] for _ in range(options.batch)]
        for answer in engine.generate(input_ids=prompts(options), sampling_params=parameters, stream=True):
            number = answer.get("index", 0)
            began[number] = began[number] or time.perf_counter()
            times[number].append(time.perf_counter())
            replies[number] = answer["output_ids"]
        together = max(began)
        steps = [after - before for mine in times for before, after in pairwise(mine) if before > together]
        found.append(1e3 * statistics.median(steps[len(steps) // 4 :]))
        answers.append(replies)
    first, last = answers
    return {"step_ms": found[-1], "first_ms": found[0], "replies": last, "repeats": first == last}


def run(options: argparse.Namespace, extra: dict[str, Any]) -> dict[str, Any]:
    tokens = (options.context + STEPS + 64) * options.batch
    engine = ENGINE | {"max_running_requests": options.batch, "cuda_graph_bs_decode": [1, options.batch]}
    engine |= {"context_length": options.context + STEPS + 64, "max_total_tokens": tokens} | extra
    arguments = ["--child", "--engine", json.dumps(engine), "--output", str(options.output)]
    arguments += ["--batch", str(options.batch), "--context", str(options.context)]
    return child.result_of(child.start("scripts.bench.lab.hisparse", arguments))[0]


def measure(options: argparse.Namespace) -> None:
    """Measure every pattern with all of the cache on the device, and with each buffer."""
    served: dict[str, Any] = {"batch": options.batch, "context": options.context, "step_ms": {}}
    for name in options.patterns.split(","):
        for buffer in [0, *map(int, options.buffers.split(","))]:
            config = {"top_k": 2048, "device_buffer_size": buffer, "host_to_device_ratio": 2}
            extra = {"enable_hisparse": True, "hisparse_config": json.dumps(config)} if buffer else {}
            override = {"json_model_override_args": json.dumps({"index_topk_pattern": LETTERS[name]})}
            found = run(options, extra | (override if name != "F" else {}))
            print(name, buffer or "all on the device", found["first_ms"], found["step_ms"], flush=True)
            served["step_ms"].setdefault(name, {})[str(buffer)] = found["step_ms"]
            if not buffer and name == "F":
                rows = zip(prompts(options), found["replies"], strict=True)
                mask = [0] * options.context + [1] * STEPS
                lines = [json.dumps({"input_ids": prompt + reply, "loss_mask": mask}) for prompt, reply in rows]
                (options.output / "tokens.jsonl").write_text("\n".join(lines) + "\n")
            (options.output / "served.json").write_text(json.dumps(served, indent=1) + "\n")
    multiples = ",".join(f"{int(size) / 2048:g}" for size in options.buffers.split(","))
    for name, steps in served["step_ms"].items():
        print(
            f"indexcache-offload --model {options.output}/model --evaluation {options.output}/tokens.jsonl"
            f"{'' if name == 'F' else f' --pattern {name}={LETTERS[name]}'}"  # without sharing is always counted
            f" --seq-len {options.context + STEPS} --num-sequences {options.batch}"
            f" --decode-steps {STEPS} --buffers {multiples} --dtype bfloat16 --device cuda --server"
            f" kv_dtype=bfloat16,batch={options.batch},step_ms={steps['0']} --output {options.output}/{name}"
        )


def compare(options: argparse.Namespace) -> None:
    """Print measured and predicted times of the patterns that were counted."""
    served = json.loads((options.output / "served.json").read_text())
    print("| pattern | buffer | step, ms | predicted, ms | predicted / measured |\n|---|---:|---:|---:|---:|")
    for name, steps in served["step_ms"].items():
        path = options.output / name / "offload.json"
        if not path.exists():
            continue
        [plan] = [item for item in json.loads(path.read_text())["plans"] if item["pattern"] == LETTERS[name]]
        predicted = {str(buffer["size"]): buffer["step_ms"] for buffer in plan["buffers"]}
        print(f"| {name} | all on the device | {steps['0']:.2f} | | |")
        for size, measured in steps.items():
            if size != "0":
                ratio = predicted[size] / measured
                print(f"| {name} | {size} | {measured:.2f} | {predicted[size]:.2f} | {ratio:.2f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--make", action="store_true", help="write the model")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--context", type=int, default=32768)
    parser.add_argument("--buffers", default="2048,4096,8192", help="tokens")
    parser.add_argument("--patterns", default="F,FSSS")
    parser.add_argument("--compare", action="store_true", help="with what those lines wrote")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--engine", default="{}", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child.give(serve(options))
    options.output.mkdir(parents=True, exist_ok=True)
    if options.make:
        make(options.output / "model")
    elif options.compare:
        compare(options)
    else:
        measure(options)


if __name__ == "__main__":
    main()

"""The compiled kernel of chosen blocks against its definition, and against attention to everything."""

from __future__ import annotations

import os
import subprocess
import sys
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from indexcache_kernels import KernelInputError
from indexcache_lab.kernels.block_attention import block_attention, cpu

CAPABILITY = torch.backends.cpu.get_cpu_capability()
CAPABILITIES = [CAPABILITY] if CAPABILITY in cpu.FLAGS else []
if CAPABILITY == "AVX512":  # another compilation
    CAPABILITIES += [pytest.param(name, marks=pytest.mark.slow) for name in cpu.FLAGS if name != CAPABILITY]


@pytest.fixture(scope="module", params=CAPABILITIES)
def capability(request: pytest.FixtureRequest) -> Any:
    """Each instruction set that this machine has."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: request.param)
        reason = cpu.compiled(request.param)
        if reason is not None and reason.startswith("needs ") and "INDEXCACHE_REQUIRE_COMPILER" not in os.environ:
            pytest.skip(reason)
        assert reason is None
        yield request.param


def case(
    lengths: list[int], heads: int = 9, kv_heads: int = 3, dim: int = 64, v_dim: int = 64, seed: int = 0
) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    rows, room = len(lengths), max(lengths) + 7  # the buffer is longer than what is in it
    k, v = (torch.randn(rows, kv_heads, room, size, generator=generator) for size in (dim, v_dim))
    for row, length in enumerate(lengths):
        k[row, :, length:], v[row, :, length:] = torch.nan, torch.nan
    return {
        "q": torch.randn(rows, heads, dim, generator=generator) * 2,
        "k": k,
        "v": v,
        "lengths": torch.tensor(lengths, dtype=torch.int32),
        "scale": dim**-0.5,
    }


def all_blocks(lengths: list[int], size: int) -> Tensor:
    most = max(-(-length // size) for length in lengths)
    rows = [[number if number * size < length else -1 for number in range(most)] for length in lengths]
    return torch.tensor(rows, dtype=torch.int32)


@pytest.mark.parametrize("size", [16, 64, 100])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "v_dim"),
    [(9, 3, 64, 64), (4, 4, 32, 128), (32, 8, 128, 64), (2, 1, 96, 80), (3, 1, 256, 32)],
)
def test_all_blocks_are_attention_to_everything(
    capability: str, size: int, heads: int, kv_heads: int, dim: int, v_dim: int
) -> None:
    lengths = [1, 63, 64, 65, 500]
    given = case(lengths, heads, kv_heads, dim, v_dim)
    blocks = all_blocks(lengths, size)
    naive, compiled = (
        block_attention(**given, blocks=blocks, block_tokens=size, backend=name) for name in ("naive", "cpu")
    )
    for row, length in enumerate(lengths):
        query = given["q"][row, :, None]
        keys, values = (given[name][row, :, :length].repeat_interleave(heads // kv_heads, 0) for name in "kv")
        expected = torch.nn.functional.scaled_dot_product_attention(query, keys, values)[:, 0]
        torch.testing.assert_close(naive[row], expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(compiled, naive, atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("threads", [1, 2])
def test_chosen_blocks_are_the_definitions(capability: str, dtype: torch.dtype, threads: int) -> None:
    lengths = [40_000, 33, 2_000, 5]
    given = case(lengths, seed=1)
    given |= {name: given[name].to(dtype) for name in "qkv"}
    generator = torch.Generator().manual_seed(2)
    blocks = torch.full((4, 400), -1, dtype=torch.int32)
    for row, length in enumerate(lengths):
        order = torch.randperm(-(-length // 64), generator=generator)[: 0 if row == 3 else 400]
        blocks[row, torch.randperm(400, generator=generator)[: len(order)]] = order.int()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        compiled = block_attention(**given, blocks=blocks, block_tokens=64, backend="cpu")
    finally:
        torch.set_num_threads(before)
    naive = block_attention(**given, blocks=blocks, block_tokens=64, backend="naive")
    torch.testing.assert_close(compiled.float(), naive.float(), atol=1e-5 if dtype == torch.float32 else 1e-2, rtol=0)
    assert not compiled[3].any() and not naive[3].any()  # nothing was chosen


def test_a_part_of_a_buffer_is_read_where_it_lies(capability: str) -> None:
    given = case([300, 200], seed=3)
    blocks = all_blocks([300, 200], 64)
    expected = block_attention(**given, blocks=blocks, block_tokens=64, backend="cpu")
    side_by_side = torch.stack([given["k"], given["v"]], 3)  # [B, G, L, 2, D]
    given |= {"k": side_by_side[:, :, :, 0], "v": side_by_side[:, :, :, 1]}
    assert torch.equal(block_attention(**given, blocks=blocks, block_tokens=64, backend="cpu"), expected)


def test_scores_of_any_size_give_numbers(capability: str) -> None:
    given = case([200], seed=4)
    blocks = all_blocks([200], 64)
    for factor in (1e-30, 300.0, 1e30):
        large = {**given, "q": given["q"] * factor}
        compiled, naive = (
            block_attention(**large, blocks=blocks, block_tokens=64, backend=name) for name in ("cpu", "naive")
        )
        assert compiled.isfinite().all()
        torch.testing.assert_close(compiled, naive, atol=1e-5, rtol=0)


@pytest.mark.parametrize("where", ["q", "k", "v"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_a_number_is_not_hidden(capability: str, where: str, value: float) -> None:
    for lengths in ([40], [3000]):  # one part, and several
        given = case(lengths, seed=5)
        given[where][(0, 1, 7)[: given[where].ndim - 1]] = value
        blocks = all_blocks(lengths, 64)
        compiled, naive = (
            block_attention(**given, blocks=blocks, block_tokens=64, backend=name) for name in ("cpu", "naive")
        )
        assert not naive.isfinite().all()
        assert torch.equal(compiled.isfinite(), naive.isfinite())


@pytest.mark.usefixtures("capability")
@pytest.mark.parametrize("backend", ["naive", "cpu"])
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"blocks": torch.tensor([[4]], dtype=torch.int32)}, "tokens that are not in the cache"),
        ({"lengths": torch.tensor([208], dtype=torch.int32)}, "tokens that are not in the cache"),
        ({"blocks": torch.zeros(1, 1)}, r"blocks is \[1, 1\] of torch.float32"),
        ({"q": torch.zeros(1, 10, 64)}, r"q is \[1, 10, 64\] and k"),
        ({"v": torch.zeros(1, 3, 5, 64)}, "v is"),
        ({"q": torch.zeros(1, 9, 64, dtype=torch.bfloat16)}, "expected the same one"),
        ({"block_tokens": 0}, "block_tokens is 0"),
        ({"k": torch.zeros(1, 3, 64, 207).mT}, "side by side"),
    ],
)
def test_what_does_not_fit_is_refused(backend: Any, changes: dict[str, Any], words: str) -> None:
    given = {**case([200]), "blocks": all_blocks([200], 64), "block_tokens": 64, **changes}
    with pytest.raises(KernelInputError, match=words):
        block_attention(**given, backend=backend)


def test_where_it_cannot_be_compiled_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {**case([200]), "blocks": all_blocks([200], 64), "block_tokens": 64}
    expected = block_attention(**given, backend="naive")
    cpu.compiled.cache_clear()
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(KernelInputError, match="needs no-such-compiler to be compiled, which is not there"):
        block_attention(**given, backend="cpu")
    assert torch.equal(block_attention(**given), expected)  # auto does without
    cpu.compiled.cache_clear()
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    with pytest.raises(KernelInputError, match="needs AVX2 or AVX-512, found DEFAULT"):
        block_attention(**given, backend="cpu")
    cpu.compiled.cache_clear()


def test_the_compilers_own_words_are_passed_on(
    tmp_path: Path, capability: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, said = tmp_path / "broken.cpp", tmp_path / "said"
    source.write_text("int main( { }")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(cpu, "SOURCE", source)
    cpu.compiled.cache_clear()
    process = get_context("fork").Process(target=lambda: said.write_text(str(cpu.compiled(capability))))
    process.start()  # PyTorch remembers what it compiled, so in a process of its own
    process.join()
    assert said.read_text().startswith("can't be compiled: ") and "error" in said.read_text()


@pytest.mark.slow
def test_a_lock_that_a_killed_process_left_is_no_end(tmp_path: Path, capability: str) -> None:
    code = (
        "import sys; from indexcache_lab.kernels.block_attention import cpu\n"
        "with cpu._build_folder(sys.argv[1]) as folder: (folder / 'lock').touch()\n"
        "print(cpu.compiled(sys.argv[1]))"
    )
    environment = {**os.environ, "TORCH_EXTENSIONS_DIR": str(tmp_path)}
    command = [sys.executable, "-c", code, capability]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "None", done.stderr

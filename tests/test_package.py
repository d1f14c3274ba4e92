"""What ships: the demo's files, the wheel, and a base install that needs neither torch nor sglang."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from indexcache_search import demo
from indexcache_search.hf.loading import describe_model
from sglang_indexcache import PatternFile

ROOT = Path(__file__).parent.parent


def test_pattern_tools_import_neither_torch_nor_sglang() -> None:
    imports = "import sys, sglang_indexcache.families, sglang_indexcache.pattern_file"
    code = f"{imports}; print([m for m in sys.modules if m in {{banned}}])"
    banned = {"torch", "sglang", "transformers", "numpy", "datasets"}
    command = [sys.executable, "-c", code.format(banned=banned)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == "[]"


def test_a_base_install_says_what_the_search_needs() -> None:
    code = "import sys; sys.modules['rich'] = None; import indexcache_search.__main__ as m; m.main()"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 2
    assert result.stderr == (
        "indexcache-search: rich is not installed; expected: pip install 'sglang-indexcache[search]'\n"
    )


def test_help_is_quick_and_teaches_by_example() -> None:
    code = "import sys; from indexcache_search.cli import app; app(['--help'], standalone_mode=False);"
    code += "print('torch' in sys.modules, 'datasets' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip().endswith("False False")
    for text in (
        "Examples:",
        "indexcache-search --engine sglang --model zai-org/GLM-5-FP8",
        "Exit codes",
        "--retain",
        "--work-dir",
    ):
        assert text in result.stdout


def test_the_demo_fits_into_git() -> None:
    files = [path for path in demo.FOLDER.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert sum(path.stat().st_size for path in files) < 16_000_000
    model = describe_model(str(demo.MODEL))
    assert (model.num_layers, model.index_topk, model.locked) == (16, 64, ())
    for source in (*demo.CALIBRATION, *demo.EVALUATION):
        assert demo.data_file(source.removeprefix("demo:")).is_file()


def test_the_wheel_runs_the_demo_outside_the_checkout(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "build", "--wheel", "--outdir", str(tmp_path), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True, timeout=600)
    [wheel] = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert not [name for name in names if name.startswith(("tests/", "scripts/", "search/", "kernels/", "build/"))]
    for name in (
        "sglang_indexcache/py.typed",
        "sglang_indexcache/pattern_file.schema.json",
        "indexcache_search/demo/patterns/lazy.yaml",
        "indexcache_kernels/indexer_topk/triton.py",
        "indexcache_search/offload/page.html",
    ):
        assert name in names
    site = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(site), str(wheel)]
    subprocess.run(pip, check=True, capture_output=True, timeout=600)
    command = [sys.executable, "-c", "import indexcache_search.__main__ as m; print(m.__file__); m.main()"]
    quick = ["--retain", "15/16", "--num-sequences", "2", "--num-eval-sequences", "6", "--output", "out"]
    environment = {**os.environ, "PYTHONPATH": str(site)}
    result = subprocess.run(
        [*command, *quick], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=800
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(str(site))
    assert PatternFile.load(tmp_path / "out" / "pattern.yaml").model.num_layers == 16
    assert (tmp_path / "out" / "report.html").stat().st_size > 50_000


def test_what_docs_import_is_there() -> None:
    lines = []
    for page in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("kernels/**/*.md")):
        for block in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
            lines += [
                (page.name, line) for line in block.splitlines() if re.match(r"(from|import) \w*indexcache", line)
            ]
    assert len(lines) >= 3
    for name, line in lines:
        try:
            exec(line, {})
        except ImportError as error:
            pytest.fail(f"{name}: {line}: {error}")

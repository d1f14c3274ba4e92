"""What ships: the demo's files, the wheel, and a base install that needs neither torch nor sglang."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path

import pytest
from check_jsonschema import main as check_jsonschema
from click.testing import CliRunner
from packaging.specifiers import SpecifierSet

from indexcache_search import demo
from indexcache_search.hf.loading import describe_model
from sglang_indexcache import PatternFile

HAS_SGLANG = find_spec("sglang") is not None
ROOT = Path(__file__).parents[2]


def test_pattern_tools_import_neither_torch_nor_sglang() -> None:
    imports = "import sys, sglang_indexcache.families, sglang_indexcache.pattern_file.file"
    code = f"{imports}; print([m for m in sys.modules if m in {{banned}}])"
    banned = {"torch", "sglang", "transformers", "numpy", "datasets"}
    command = [sys.executable, "-c", code.format(banned=banned)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == "[]"


WITHOUT = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {missing}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Missing())
"""  # what a base install does not bring
NOT_BASE = {"datasets", "huggingface_hub", "indexcache_kernels", "jinja2", "matplotlib", "numpy", "psutil", "pyarrow"}
NOT_BASE |= {"rich", "safetensors", "scipy", "sglang", "tokenizers", "torch", "transformers", "triton", "typer"}


def without(missing: set[str], code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `code` where packages are not installed."""
    command = [sys.executable, "-c", WITHOUT.format(missing=missing) + code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)


def test_what_a_base_install_imports_is_there() -> None:
    code = """
import importlib, pkgutil, sglang_indexcache
for item in pkgutil.walk_packages(sglang_indexcache.__path__, "sglang_indexcache."):
    try:
        importlib.import_module(item.name)
    except ModuleNotFoundError as error:
        print(item.name, error.name)
"""
    result = without(NOT_BASE, code)
    assert result.returncode == 0, result.stderr
    servers = (
        "indexcache_dense.family.",
        "indexcache_minimax.family.",
        "sglang_indexcache.families.dsa.",
        "indexcache_lab.offload.lru_buffer",
    )
    lines = [line.split() for line in result.stdout.splitlines()]
    assert all(name.startswith(servers) and package in ("torch", "numpy") for name, package in lines), result.stdout


@pytest.mark.parametrize(
    ("command", "module", "function", "extra"),
    [
        ("search", "search", "main", "search"),
        ("eval", "search", "evaluate", "search"),
        ("distill", "train", "main", "train"),
        ("lab", "lab", "main", "lab"),
        ("offload", "lab", "offload", "lab"),
        ("watch", "watch", "main", "watch"),
    ],
)
def test_a_base_install_says_what_a_command_needs(command: str, module: str, function: str, extra: str) -> None:
    result = without({"rich"}, f"import indexcache_{module}.__main__ as m; m.{function}()")
    line = f"indexcache-{command}: rich is not installed; expected: pip install '{ROOT}[{extra}]'\n"
    assert (result.returncode, result.stderr) == (2, line)


def test_the_watch_says_what_its_metrics_need(tmp_path: Path) -> None:
    words = "--served http://127.0.0.1:1 --reference http://127.0.0.1:2 --port 9 --requests".split()
    result = without({"prometheus_client"}, "import indexcache_watch.__main__ as m; m.main()", *words, str(tmp_path))
    line = f"indexcache-watch: prometheus_client is not installed; expected: pip install '{ROOT}[watch]'\n"
    assert (result.returncode, result.stderr) == (2, line)


def test_a_base_install_says_what_the_server_and_its_check_need() -> None:
    launch = "from sglang_indexcache.launch_server import main; main(sys.argv[1:])"
    result = without(NOT_BASE - {"sglang"}, launch, "--indexcache-pattern", "FS")
    assert "Traceback" not in result.stderr and result.returncode != 0
    assert f"SGLang is not installed; expected: pip install '{ROOT}[sglang]'" in result.stderr or HAS_SGLANG
    check = "from sglang_indexcache.check import main; sys.exit(main(sys.argv[1:]))"
    result = without(NOT_BASE, check, "FS", "--model", "owner/name")
    assert result.returncode == 2 and len(result.stderr.splitlines()) == 1
    assert "huggingface_hub is not installed; expected: pip install huggingface_hub" in result.stderr


@pytest.mark.parametrize(
    ("package", "extras"),
    [
        ("search/indexcache_search", ["search"]),
        ("kernels/indexcache_kernels", ["search", "kernels"]),
        ("extras/dense/indexcache_dense", ["dense"]),
        ("extras/forecast/indexcache_forecast", ["search"]),
        ("extras/harness/indexcache_harness", ["harness"]),
        ("extras/lab/indexcache_lab", ["lab"]),
        ("extras/launch/indexcache_launch", ["search"]),
        ("extras/minimax/indexcache_minimax", ["minimax"]),
        ("extras/published/indexcache_published", ["search"]),
        ("extras/report/indexcache_report", ["search"]),
        ("extras/rows/indexcache_rows", ["search"]),
        ("extras/speed/indexcache_speed", ["search"]),
        ("extras/tasks/indexcache_tasks", ["search"]),
        ("extras/train/indexcache_train", ["train"]),
        ("extras/watch/indexcache_watch", ["watch"]),
    ],
)
def test_an_extra_asks_for_all_that_is_imported(package: str, extras: list[str]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    optional, waiting, asked = project["optional-dependencies"], list(extras), list(project["dependencies"])
    while waiting:
        for item in optional[waiting.pop()]:
            own = re.fullmatch(r"sglang-indexcache\[(.*)\]", item)
            waiting += own[1].split(",") if own else []
            asked += [] if own else [item]
    known = {re.split(r"[^\w-]", item)[0].replace("-", "_") for item in asked} | {"yaml"}
    known |= {"sglang"} if package.startswith("extras/") else set()  # in a server, where it is
    known |= {"sglang_indexcache", "sgl_kernel", *sys.stdlib_module_names}
    for path in (ROOT / package).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [item.name for item in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            tops = {name.partition(".")[0] for name in names}
            assert {name for name in tops if not name.startswith("indexcache_")} <= known, path
    assert "sglang-indexcache[kernels]" in optional["sglang"]  # families import them


def test_what_is_pinned_takes_every_python_that_we_take() -> None:
    """Debian 12 has Python 3.11.2, and some packages ask for a later 3.11."""
    asked = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    oldest, judged = asked.removeprefix(">=") + ".0", 0
    for line in (ROOT / "scripts" / "constraints.txt").read_text().splitlines():
        name, _, version = line.partition("==")
        try:
            found = distribution(name)
        except (PackageNotFoundError, ValueError):  # not in this environment, or a comment
            continue
        if found.version.partition("+")[0] == version:
            judged += 1
            assert oldest in SpecifierSet(found.metadata["Requires-Python"] or ""), line
    assert judged > 20


def test_help_is_quick_and_teaches_by_example() -> None:
    code = "import sys; from indexcache_search.cli.search import app; app(['--help-all'], standalone_mode=False);"
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


@pytest.mark.slow
@pytest.mark.newest
def test_the_wheel_runs_the_demo_outside_the_checkout(tmp_path: Path) -> None:
    """With the newest of everything, as who installs it has it."""
    build = [sys.executable, "-m", "build", "--wheel", "--outdir", str(tmp_path), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True, timeout=600)
    [wheel] = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert not [
        name for name in names if name.startswith(("tests/", "scripts/", "search/", "kernels/", "extras/", "build/"))
    ]
    for name in (
        "sglang_indexcache/py.typed",
        "indexcache_kernels/py.typed",
        "sglang_indexcache/pattern_file.schema.json",
        "indexcache_published/files/glm-5-half.yaml",
        "indexcache_published/files/glm-5-quarter.yaml",
        "indexcache_report/templates/card.md",
        "indexcache_search/demo/patterns/lazy.yaml",
        "indexcache_kernels/indexer_topk/triton.py",
        "indexcache_lab/offload/page.html",
        "indexcache_search/strategies/budget/tables/glm-5-tp8.json",
    ):
        assert name in names
    site = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(site), str(wheel)]
    subprocess.run(pip, check=True, capture_output=True, timeout=600)
    command = [sys.executable, "-P", ROOT / "examples" / "search_apply_compare.py", "out", "6"]
    environment = {**os.environ, "PYTHONPATH": str(site)}
    where = [sys.executable, "-c", "import indexcache_search; print(indexcache_search.__file__)"]
    found = subprocess.run(where, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert found.stdout.startswith(str(site))
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=800)
    assert result.returncode == 0, result.stderr
    assert "4 of 16 layers run their indexer" in result.stdout
    assert PatternFile.load(tmp_path / "out" / "pattern.yaml").model.num_layers == 16
    assert (tmp_path / "out" / "report.html").stat().st_size > 50_000
    assert (tmp_path / "out" / "compared.svg").stat().st_size > 5_000


@pytest.mark.parametrize(
    ("schema", "name", "broken"),
    [
        ("vendor.citation-file-format", "CITATION.cff", ("authors:", "writers:")),
        ("vendor.github-workflows", ".github/workflows/ci.yml", ("runs-on:", "runs_on:")),
        ("vendor.github-workflows", "docs/deploy/check-patterns.yml", ("runs-on:", "runs_on:")),
        ("vendor.github-issue-forms", ".github/ISSUE_TEMPLATE/bug.yml", ("body:", "text:")),
        ("vendor.github-issue-forms", ".github/ISSUE_TEMPLATE/figure.yml", ("body:", "text:")),
        ("vendor.github-issue-forms", ".github/ISSUE_TEMPLATE/model.yml", ("body:", "text:")),
    ],
)
def test_files_that_others_read_are_as_their_schemas_say(
    schema: str, name: str, broken: tuple[str, str], tmp_path: Path
) -> None:
    other = tmp_path / Path(name).name
    other.write_text((ROOT / name).read_text().replace(*broken))
    for file, code in ((ROOT / name, 0), (other, 1)):
        done = CliRunner().invoke(check_jsonschema, ["--builtin-schema", schema, str(file)])
        assert done.exit_code == code, done.output


def described(file: Path) -> str:
    """The page that an index shows of a distribution."""
    if file.suffix == ".whl":
        with zipfile.ZipFile(file) as wheel:
            return wheel.read(next(name for name in wheel.namelist() if name.endswith("/METADATA"))).decode()
    with tarfile.open(file) as source:
        member = source.extractfile(f"{file.name.removesuffix('.tar.gz')}/PKG-INFO")
        assert member is not None
        return member.read().decode()


@pytest.mark.slow
@pytest.mark.newest
def test_a_package_index_takes_the_distributions_and_pip_installs_both(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "build", "--outdir", tmp_path, ROOT], check=True, capture_output=True)
    files = list(tmp_path.iterdir())
    assert sorted(file.suffix for file in files) == [".gz", ".whl"]
    checked = subprocess.run(
        [sys.executable, "-m", "twine", "check", "--strict", *files], capture_output=True, text=True
    )
    assert checked.returncode == 0, checked.stdout
    versions = set()
    for file in files:
        assert "](docs/" not in described(file) and "# sglang_indexcache" in described(file)
        site = tmp_path / file.suffix[1:]
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", site, file]
        subprocess.run(pip, check=True, capture_output=True)
        code = "import sglang_indexcache as s, indexcache_watch; print(s.__version__, s.__file__)"
        environment = {**os.environ, "PYTHONPATH": str(site)}
        command = [sys.executable, "-P", "-c", code]
        said = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
        version, where = said.stdout.split()
        assert Path(where).is_relative_to(site)
        versions.add(version)
    assert len(versions) == 1


def test_the_readme_has_no_links_on_an_index_that_lead_nowhere_there() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    hook = project["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]
    [text] = [(ROOT / fragment["path"]).read_text() for fragment in hook["fragments"]]
    assert "](docs/" in text
    for item in hook["substitutions"]:
        text = re.sub(item["pattern"], item["replacement"], text)
    targets = re.findall(r"\]\(([^)]*)\)", text)
    assert targets and all(target.startswith("https://") for target in targets) and "![" not in text
    assert "urls" not in project["project"], "links can lead to the address now"


def test_what_docs_import_is_there() -> None:
    lines = []
    for page in (
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("kernels/**/*.md"),
        *ROOT.glob("extras/**/*.md"),
    ):
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

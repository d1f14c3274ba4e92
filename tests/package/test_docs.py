"""Check README and docs: paths, links, flags, words, pictures, and the form of each kind of page."""

from __future__ import annotations

import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from contextlib import redirect_stdout, suppress
from functools import cache
from importlib import import_module
from io import StringIO
from pathlib import Path
from typing import get_args

import pytest
import yaml
from typer.testing import CliRunner

from indexcache_dense.reuse import POLICIES
from indexcache_launch.options import parser_of, versions
from indexcache_search.cli.help import ALL
from indexcache_search.evaluation.objectives import Objective
from indexcache_search.strategies import strategies as known_strategies
from scripts.tools import pictures, site
from sglang_indexcache import check
from sglang_indexcache.families.base import CheckpointReader, SglangAdapter, TransformersAdapter
from sglang_indexcache.families.dsa.sglang import DsaSglang
from sglang_indexcache.pattern import DENSE, FULL, SHARED
from sglang_indexcache.version import RELEASE, version

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
FIGURES = ("deployments", "search", "demo", "language-model")  # of what README and how-to pages say
PAGES = [*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *ROOT.glob("kernels/**/*.md"), *ROOT.glob("extras/**/*.md")]
HOW_TO = [
    path
    for path in (*DOCS.glob("*.md"), DOCS / "deploy" / "README.md")
    if path.stem not in ("index", "explanation", "faq")
]
EVIDENCE = [*DOCS.glob("evidence/*.md"), *DOCS.glob("lab/[!R]*.md")]
APPS = {
    "indexcache-search": "indexcache_search.cli.search",
    "indexcache-eval": "indexcache_search.cli.evaluate",
    "indexcache-distill": "indexcache_train.cli",
    "indexcache-offload": "indexcache_lab.offload.cli",
    "indexcache-watch": "indexcache_watch.cli",
    "indexcache-lab": "indexcache_lab.cli",
}
COMMANDS = tuple(name for name in APPS if name != "indexcache-lab")
OF_THE_LAUNCHER = {
    f"--indexcache-{name}"
    for name in (
        "pattern",
        "calibrate",
        "allow-config-mismatch",
        "allow-unread-source",
        "shard-indexers",
        "union-attention",
        "no-grouping",
    )
}
OF_OTHERS = {
    f"--{name}"
    for name in (
        "admin-api-key api-key attention-backend attn-cp-size chunked-prefill-size config dcp-size disable-radix-cache"
        " dllm-algorithm dp dsa-decode-backend dsa-prefill-backend dsa-topk-backend enable-dp-attention"
        " enable-cp-decode-attn-tp enable-deepseek-v4-fp4-indexer"
        " enable-dp-lm-head enable-flexkv enable-hisparse enable-lmcache enable-metrics enable-mixed-chunk enable-pdmux"
        " enable-prefill-cp enable-return-indexer-topk enable-torch-compile enable-two-batch-overlap"
        " enable-unified-cache-external-linker enable-unified-memory exclude from-file hisparse-config host"
        " hicache-storage-backend max-running-requests max-total-tokens no-deps mem-fraction-static"
        " nproc-per-node page-size pp-size skip-server-warmup"
        " revision speculative-algorithm tp use-ray"
        " cp-strategy cuda-graph-backend-prefill disaggregation-mode enable-deterministic-inference"
        " enable-hierarchical-cache enable-lora enable-pd-role-switch"
        " enable-piecewise-cuda-graph ep-size kv-cache-dtype lora-paths moe-a2a-backend nnodes"
        " speculative-eagle-topk tp-size dp-size"
        " sglang-json-model-override-args"
        " log-requests log-requests-format log-requests-level log-requests-target"
    ).split()
}
LINK = re.compile(r"\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def anchors(path: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", path.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_paths_in_code_and_pages_exist() -> None:
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    files = [ROOT / name for name in tracked if name.endswith((".py", ".md", ".toml", ".yml", ".yaml", ".sh", ".html"))]
    missing = [
        f"{name_of(path)}: {found[0]}"
        for path in files
        if path.is_file()
        for found in re.finditer(r"(?<![\w/])(?<!vLLM )docs/[\w./-]+\.(md|yaml|svg)\b", path.read_text())
        if not (ROOT / found[0]).is_file()
    ]
    assert not missing


@pytest.mark.parametrize("path", [page for page in PAGES if page.stem != "candidates"], ids=name_of)
def test_scripts_that_pages_run_exist(path: Path) -> None:
    for name in re.findall(r"\bscripts\.[a-z_0-9.]*[a-z_0-9]\b(?!/)", path.read_text()):
        place = ROOT / name.replace(".", "/")
        assert place.with_suffix(".py").is_file() or (place / "__main__.py").is_file() or name == "scripts.run", name
    for name in re.findall(r"\bscripts/[\w/]+\.(?:py|sh)\b", path.read_text()):
        assert (ROOT / name).is_file(), name


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_links_lead_somewhere(path: Path) -> None:
    for target in LINK.findall(FENCE.sub("", path.read_text())):
        if re.match(r"\w+:", target):
            continue
        place, _, anchor = target.partition("#")
        page = (path.parent / place).resolve() if place else path
        assert page.exists(), target
        assert not anchor or anchor in anchors(page), target


def test_pages_of_the_site_link_to_what_the_site_has() -> None:
    """A file that is there, but not on the site, would end a strict build."""
    shown = {ROOT / source for source in site.outside().values()} | {file for file in DOCS.rglob("*") if file.is_file()}
    for path in sorted(page for page in shown if page.suffix == ".md"):
        for target in LINK.findall(FENCE.sub("", path.read_text())):
            place = target.partition("#")[0]
            assert re.match(r"\w+:", target) or not place or (path.parent / place).resolve() in shown, (path, target)


def test_readme_is_one_screen_that_begins_with_a_command() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("    "))
    assert len(lines) <= 70 and first < 10


def test_figures_of_deployments_are_those_of_the_evidence() -> None:
    """A figure that is measured again is changed in the evidence, and this names what else says the old one."""
    evidence = "".join((DOCS / "evidence" / f"{name}.md").read_text() for name in FIGURES)
    pages = (ROOT / "README.md", *(DOCS / f"{name}.md" for name in ("serving", "glm5-deepseek", "paper-search")))
    said = set(re.findall(r"\b(?:\d\.\d{2}x|0\.\d{3,})", "".join(page.read_text() for page in pages)))
    assert len(said) > 10 and not {figure for figure in said if figure not in evidence}


def test_words_that_pages_link_are_in_the_glossary() -> None:
    means = site.meanings()
    linked = site.with_words("# nats\n`nats` and [nats](x.md), nats, nats\n    nats\n", "search.md")
    assert (
        linked == f'# nats\n`nats` and [nats](x.md), [nats](reference/glossary.md "{means["nat"]}"), nats\n    nats\n'
    )
    assert set(means) == set(site.LINKED) and all("(" not in text or ")" in text for text in means.values())


def test_the_site_has_five_groups_with_every_page_once() -> None:
    groups = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    pages = re.findall(r"'([\w./-]+\.md)'", str(groups))
    own = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    assert len(pages) == len(set(pages)) and set(pages) == own | {name for name in site.outside() if name[-3:] == ".md"}
    assert [list(group) for group in groups] == [["Start"], ["Find"], ["Serve and prove"], ["Reference"], ["Evidence"]]


def test_the_example_of_the_readme_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    [example] = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    monkeypatch.chdir(ROOT)
    exec(example, {})
    printed = capsys.readouterr().out.splitlines()
    comment = re.search(r"# (FSS.*)", example)
    assert comment is not None and printed[0] == comment[1] and len(example.splitlines()) <= 11


@pytest.mark.parametrize("path", HOW_TO, ids=name_of)
def test_a_how_to_is_short_and_has_one_result(path: Path) -> None:
    text = path.read_text()
    assert 50 <= len(text.splitlines()) <= 100
    [result] = re.findall(r"^\*\*Result\*\*: (.*?)\n\n", text, re.MULTILINE | re.DOTALL)
    assert re.search(r"\]\((\.\./)?(evidence|upstream)/", result)


@pytest.mark.parametrize("path", EVIDENCE, ids=name_of)
def test_figures_say_where_they_are_from(path: Path) -> None:
    for section in re.split(r"^#+ ", FENCE.sub("", path.read_text()), flags=re.MULTILINE):
        if re.search(r"^\|.*[ +]\d+\.\d", section, re.MULTILINE) and "Read in the code" not in path.read_text():
            heading = section.partition("\n")[0]
            for item in ("Command", "Device", "Date", "Seeds"):
                assert f"- **{item}**: " in section, f"{heading}: {item}"


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_pictures_are_current(name: str) -> None:
    drawn = pictures.PICTURES[name]()
    assert (pictures.FOLDER / f"{name}.svg").read_text() == drawn, "run python -m scripts.tools.pictures"


def test_the_kernels_example_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """In this process, which has imported all it needs; test_package starts the other one."""
    path = ROOT / "examples" / "use_kernels.py"
    monkeypatch.setattr(sys, "argv", [str(path)])
    runpy.run_path(str(path), run_name="__main__")
    assert float(capsys.readouterr().out.split()[-1]) < 1e-3


def test_the_version_has_notes_and_says_whether_it_is_released() -> None:
    """A commit between releases is no release: its files and `/server_info` must not say that they are of one."""
    release, _, development = version().partition(".dev")
    notes = re.search(rf"^## \[{re.escape(release)}\] - (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert notes is not None
    assert (notes[1] == "unreleased") == bool(development)


def test_the_citation_is_one() -> None:
    """What the schema of the Citation File Format 1.2.0 asks for; GitHub shows nothing of a file that is not YAML."""
    content = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert content["cff-version"] == "1.2.0" and content["type"] == "software" and content["version"] == RELEASE
    assert all(isinstance(content[key], str) and content[key] for key in ("message", "title"))
    references = content["references"]
    assert all({"type", "title", "authors"} <= set(item) for item in references)
    for item in (content, *references):
        assert item["authors"]
        for author in item["authors"]:
            assert set(author) <= {"family-names", "given-names", "name"} and all(map(bool, author.values()))
            assert ("name" in author) != ("family-names" in author)


def test_every_command_has_its_help_on_the_site() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    shown = re.findall(r"<!-- help: ([\w-]+)", (DOCS / "reference" / "commands.md").read_text())
    assert set(shown) == set(scripts)


@cache
def flags(command: str) -> set[str]:
    """Of all its help, in this process: the site starts one for each command."""
    name, *words = command.split()
    if name == "indexcache-check":
        with redirect_stdout(StringIO()) as said, suppress(SystemExit):
            check.main(["--help"])
        text = said.getvalue()
    else:
        text = CliRunner().invoke(import_module(APPS[name]).app, [*words, ALL], prog_name=name).output
    return set(re.findall(r"--[\w-]+", text))


@pytest.mark.parametrize("path", [*HOW_TO, *DOCS.glob("reference/*.md")], ids=name_of)
def test_flags_in_pages_exist(path: Path) -> None:
    benches = "".join(file.read_text() for file in (ROOT / "scripts" / "bench").rglob("*.py"))
    shown = re.findall(r"<!-- help: (.*) -->", (DOCS / "reference" / "commands.md").read_text())
    of_sglang = set().union(*(parser_of(version).flags() for version in versions()))
    known = set.union(OF_OTHERS, OF_THE_LAUNCHER, of_sglang, *map(flags, shown))
    known |= set(re.findall(r'"(--[a-z][\w-]+)"', benches)) if "scripts.bench" in path.read_text() else set()
    assert set(re.findall(r"(?<![\w-])--[a-z][\w-]+", path.read_text())) <= known


@pytest.mark.parametrize("path", [ROOT / "README.md", *HOW_TO], ids=name_of)
def test_commands_in_how_tos_have_their_flags(path: Path) -> None:
    for line in path.read_text().replace("\\\n", " ").splitlines():
        if not line.startswith("    ") or not (found := re.search(rf"\b({'|'.join(COMMANDS)})(\s.*)?$", line)):
            continue
        given = {word for word in shlex.split(found[2] or "", comments=True) if word.startswith("--")}
        if "--engine sglang" not in line:  # what the search does not know goes to its server
            assert given <= flags(found[1]), line


def test_what_a_new_sglang_needs_is_said() -> None:
    """A version whose options or sources were left out is judged by those of another one, or refused."""
    text = " ".join((ROOT / "CONTRIBUTING.md").read_text().split())
    tools = [path.stem for path in (ROOT / "scripts" / "tools").glob("*.py") if "unpacked" in path.read_text()]
    assert sorted(tools) == ["probe_wheels", "read_sources", "sglang_options"]
    section = text.partition("- **A new SGLang**: ")[2].partition("- **A hook")[0]
    for name in (*(f"python -m scripts.tools.{tool}" for tool in tools), "READ_VERSIONS", "RAN", "VERSIONS"):
        assert f"`{name}" in section, name


def test_what_a_family_has_is_said() -> None:
    text = (DOCS / "add-a-family.md").read_text()
    rows = re.findall(r"^\| (?:`\w+`)? ?\| [^|]+ \| (`[^|]+) \|$", text, re.MULTILINE)
    names = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    parts = (CheckpointReader, SglangAdapter, DsaSglang, TransformersAdapter)
    wrong = [name for name in names if not any(name in {*dir(part), *part.__annotations__} for part in parts)]
    asked = {name for part in parts for name in getattr(part, "__abstractmethods__", ())}
    assert not wrong and asked | {"rule", "would_run"} <= set(names)


def test_the_glossary_has_the_words_of_the_code() -> None:
    glossary = (DOCS / "reference" / "glossary.md").read_text()
    for word in (f"| {FULL}, full", f"| {SHARED}, shared", f"| {DENSE}, dense", *(f"`{name}`" for name in POLICIES)):
        assert word in glossary
    assert all(f"`{name}`" in glossary for name in get_args(Objective))
    strategies = (DOCS / "reference" / "strategies.md").read_text()
    assert all(f"`{name}`" in strategies for name in known_strategies())


def test_the_readme_says_what_a_change_must_pass() -> None:
    ran = re.findall(r'"\$run ((?:--\w+ )?(?:python -m )?pytest(?:[^"\\]|\\.)*)"', (ROOT / ".ci/run").read_text())
    said = (ROOT / "README.md").read_text()
    assert len(ran) == 3
    assert [command for command in ran if "scripts/run.sh " + command.replace("\\", "") not in said] == []

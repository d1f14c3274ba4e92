"""Hooks of the docs site (mkdocs.yml): pages that lie outside of docs/, and the output of `--help`.

Links are written as they are right in the repository. Here those that lead out of docs/ are turned to the pages that
the site makes of READMEs, so that a strict build finds every broken one.
"""

from __future__ import annotations

import os
import posixpath
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"(\]\()([^)#\s]+)((?:#[^)\s]*)?\))")
HELP = re.compile(r"<!-- help: ([\w -]+) -->")
GLOSSARY = "reference/glossary.md"
LINKED = (
    *("DSA", "lightning indexer", "retention", "trajectory", "racing", "look-alike", "latency table", "TTFT", "TPOT"),
    *("nat", "layer-tokens", "noise floor", "journal", "calibration server", "fingerprint", "locked layer"),
)
"""Words of the glossary that a page's first use of links to it."""
SKIPPED = re.compile(
    r"(^```.*?^```|`[^`\n]*`|!?\[[^\]]*\]\([^)]*\)|<[^>]*>|^#.*?$|^    .*?$)", re.MULTILINE | re.DOTALL
)


def outside() -> dict[str, str]:
    """Pages and files of the repository that the site shows, by their path on the site."""
    pages = {"changelog.md": "CHANGELOG.md", "contributing.md": "CONTRIBUTING.md"}
    pages["demo-model.md"] = "search/indexcache_search/demo/indexcache-demo/README.md"
    for path in sorted(ROOT.glob("extras/*/README.md")):
        pages[f"extras/{path.parent.name}.md"] = path.relative_to(ROOT).as_posix()
    extras = ROOT.glob("extras/*/indexcache_*/kernels/*/README.md")
    for path in sorted([*ROOT.glob("kernels/indexcache_kernels/*/README.md"), *extras]):
        pages[f"kernels/{path.parent.name}.md"] = path.relative_to(ROOT).as_posix()
    for path in sorted([*ROOT.glob("kernels/results/*.json"), *ROOT.glob("examples/*.py")]):
        source = path.relative_to(ROOT).as_posix()
        pages[source] = source
    return pages


def on_files(files: Any, config: Any) -> Any:
    """Add what lies outside of docs/."""
    from mkdocs.structure.files import File  # of the extra `docs`

    for place, source in outside().items():
        files.append(File.generated(config, place, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turn links that lead out of docs/, and put in what commands say of themselves."""
    pages = outside()
    places = {source: place for place, source in pages.items()}
    here = pages.get(page.file.src_uri, f"docs/{page.file.src_uri}")

    def turned(link: re.Match[str]) -> str:
        if "://" in link[2] or link[2].startswith("mailto:"):
            return link[0]
        target = posixpath.normpath(posixpath.join(posixpath.dirname(here), link[2]))
        place = target.removeprefix("docs/") if target.startswith("docs/") else places.get(target, target)
        relative = posixpath.relpath(place, posixpath.dirname(page.file.src_uri) or ".")
        return f"{link[1]}{relative}{link[3]}"

    text = with_words(LINK.sub(turned, markdown), page.file.src_uri)
    return HELP.sub(lambda found: f"```text\n{help_of(found[1])}\n```", text)


def meanings() -> dict[str, str]:
    """Return what the glossary says of each word in `LINKED`."""
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", (ROOT / "docs" / GLOSSARY).read_text(), re.MULTILINE)
    found = {word: LINK.sub("", means).replace("[", "").strip() for words, means in rows for word in words.split(", ")}
    return {word: found[word] for word in LINKED}


def with_words(markdown: str, place: str) -> str:
    """Link the first use of each word in `LINKED` to the glossary, outside of code, links and headings."""
    if place == GLOSSARY:
        return markdown
    parts = SKIPPED.split(markdown)  # what is skipped stands at odd places
    target = posixpath.relpath(GLOSSARY, posixpath.dirname(place) or ".")
    for word, means in meanings().items():
        title = means.replace("`", "").replace('"', "'")
        use, link = re.compile(rf"(?<![\w-]){word}s?(?![\w-])"), rf'[\g<0>]({target} "{title}")'
        for number in range(0, len(parts), 2):
            new, count = use.subn(link, parts[number], count=1)
            if count:
                parts[number : number + 1] = SKIPPED.split(new)  # no word within another one's link
                break
    return "".join(parts)


def help_of(command: str) -> str:
    """Ask a command of this project, or one of its sub-commands, for all of its help."""
    name, *arguments = command.split()
    entry = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"][name]
    module, function = entry.split(":")
    code = f"import sys; sys.argv[0] = {name!r}; from {module} import {function}; sys.exit({function}())"
    environment = {**os.environ, "COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb"}
    called = [sys.executable, "-c", code, *arguments, "--help" if name == "indexcache-check" else "--help-all"]
    return subprocess.run(called, env=environment, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

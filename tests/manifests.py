"""The manifests of docs/deploy: as they are, and as kustomize makes them with a pattern of the demo's."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from indexcache_search import demo

DEPLOY = Path(__file__).parents[1] / "docs" / "deploy"
FOLDERS = ("one-node", "two-nodes", "prefill-decode", "calibration")
PATTERN = demo.MODEL.parent / "patterns" / "lazy.yaml"
IN_CONTAINER = "/etc/indexcache/glm5.yaml"


@cache
def rendered(folder: str) -> list[dict[str, Any]]:
    """What `kubectl apply -k` of a folder would send."""
    with TemporaryDirectory() as copy:
        shutil.copytree(DEPLOY, copy, dirs_exist_ok=True)
        shutil.copy(PATTERN, Path(copy) / "pattern" / "glm5.yaml")
        kubectl = Path(sys.executable).with_name("kubectl")  # not in the environment of SGLang
        done = subprocess.run([kubectl, "kustomize", Path(copy) / folder], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def pod_template(document: dict[str, Any]) -> dict[str, Any] | None:
    """The pod template of a Deployment, Job or LeaderWorkerSet; `None` of anything else."""
    spec = document.get("spec", {})
    template: dict[str, Any] | None = spec.get("template", spec.get("leaderWorkerTemplate", {}).get("workerTemplate"))
    return template


def containers(documents: Iterable[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The container of each workload, by the workload's name."""
    found = {}
    for document in documents:
        template = pod_template(document)
        if template is not None:
            [found[document["metadata"]["name"]]] = template["spec"]["containers"]
    return found


def written(file: str) -> dict[str, dict[str, Any]]:
    """The containers of a file of docs/deploy."""
    return containers(yaml.safe_load_all((DEPLOY / file).read_text()))

"""docs/deploy is valid: for kustomize, for the schemas of Kubernetes 1.37, for Compose, for hadolint, and in itself."""

from __future__ import annotations

import copy
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel

from scripts.tools.probe_wheels import VERSIONS
from sglang_indexcache.sglang.asked import split_arguments
from sglang_indexcache.version import RELEASE, version
from tests.manifests import DEPLOY, FOLDERS, IN_CONTAINER, containers, pod_template, rendered, written

KUBERNETES = "1.37.0"
ROOT = DEPLOY.parents[1]
SERVERS = FOLDERS[:3]


class _Strict(BaseModel):
    model_config = ConfigDict(alias_generator=to_camel, extra="forbid", strict=True)


class _RollingUpdate(_Strict):
    partition: int = 0
    max_unavailable: int | str = 1
    max_surge: int | str = 0


class _Rollout(_Strict):
    type: Literal["RollingUpdate"]
    rolling_update_configuration: _RollingUpdate | None = None


class _Group(_Strict):
    size: int = 1
    restart_policy: Literal["Default", "RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"] | None = None
    worker_template: dict[str, Any]  # checked as a PodTemplate
    leader_template: dict[str, Any] | None = None


class _GroupSet(_Strict):
    replicas: Annotated[int, Field(ge=0, le=1_000_000)] = 1
    rollout_strategy: _Rollout | None = None
    startup_policy: Literal["LeaderCreated", "LeaderReady"] | None = None
    leader_worker_template: _Group


class _LeaderWorkerSet(_Strict):
    """leaderworkerset.x-k8s.io/v1, less what is not used here: of its CRD in kubernetes-sigs/lws at 060ab4d."""

    api_version: Literal["leaderworkerset.x-k8s.io/v1"]
    kind: Literal["LeaderWorkerSet"]
    metadata: dict[str, Any]
    spec: _GroupSet


@pytest.fixture(scope="module")
def schemas() -> Iterator[None]:
    """Each schema is parsed once, not for each document."""
    from kubernetes_validate import utils

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utils, "schema_contents", cache(utils.schema_contents))
        yield


def validate(document: dict[str, Any]) -> None:
    import kubernetes_validate  # not in the environment of SGLang

    if document["kind"] == "LeaderWorkerSet":
        template = _LeaderWorkerSet.model_validate(document).spec.leader_worker_template.worker_template
        document = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": document["metadata"], "template": template}
    kubernetes_validate.validate(document, KUBERNETES, strict=True)


@pytest.mark.usefixtures("schemas")
@pytest.mark.parametrize("folder", FOLDERS)
def test_what_kustomize_makes_is_valid(folder: str) -> None:
    kinds = [document["kind"] for document in rendered(folder)]
    assert "ConfigMap" in kinds and any(kind in kinds for kind in ("Deployment", "LeaderWorkerSet", "Job"))
    for document in rendered(folder):
        validate(document)
    for document in yaml.safe_load_all((DEPLOY / "cache.yaml").read_text()):
        validate(document)


def paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of the keys that a schema closes: not those of labels, annotations, limits and data."""
    if isinstance(value, list):
        return [found for number, item in enumerate(value) for found in paths(item, (*path, number))]
    if not isinstance(value, dict):
        return []
    free = {"labels", "annotations", "matchLabels", "limits", "requests", "data", "selector"} & set(path)
    own = [(*path, key) for key in value if not free]
    return own + [found for key, item in value.items() for found in paths(item, (*path, key))]


@pytest.mark.usefixtures("schemas")
@pytest.mark.parametrize("folder", FOLDERS)
def test_a_misspelled_key_anywhere_is_found(folder: str) -> None:
    """The validators can fail, and at every key."""
    import kubernetes_validate

    for document in rendered(folder):
        for *parents, key in paths(document):
            if parents[:1] == ["metadata"] or key in ("kind", "apiVersion"):
                continue
            wrong = copy.deepcopy(document)
            place: Any = wrong
            for parent in parents:
                place = place[parent]
            place[f"{key}x"] = place.pop(key)
            with pytest.raises((kubernetes_validate.ValidationError, ValidationError)):
                validate(wrong)


@pytest.mark.parametrize("folder", FOLDERS)
def test_names_in_manifests_are_those_of_other_parts(folder: str) -> None:
    documents = rendered(folder)
    maps = {document["metadata"]["name"]: document["data"] for document in documents if document["kind"] == "ConfigMap"}
    [claim] = yaml.safe_load_all((DEPLOY / "cache.yaml").read_text())
    pods = {document["metadata"]["name"]: template for document in documents if (template := pod_template(document))}
    for template in pods.values():
        [container] = template["spec"]["containers"]
        volumes = {volume["name"]: volume for volume in template["spec"].get("volumes", ())}
        mounts = {mount["name"]: mount["mountPath"] for mount in container.get("volumeMounts", ())}
        assert mounts.keys() == volumes.keys()
        given = {item["name"] for item in container["env"]}
        used = set(re.findall(r"\$\((\w+)\)", " ".join(container["args"])))
        assert {name for name in used if not name.startswith("LWS_")} <= given
        ports = {port["name"]: port["containerPort"] for port in container.get("ports", ())}
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert probe not in container or container[probe]["httpGet"]["port"] in ports
        if ports:
            assert f"--port={ports['http']}" in container["args"]
        for volume in volumes.values():
            if "configMap" in volume:
                [file] = maps[volume["configMap"]["name"]]
                shown = f"{mounts[volume['name']]}/{file}"
                assert any(word.partition("=")[2].partition("@")[0] == shown for word in container["args"])
            if "persistentVolumeClaim" in volume:
                assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    for document in documents:
        if document["kind"] == "Service":
            own = {key: value for key, value in document["spec"]["selector"].items() if not key.startswith("leader")}
            chosen = [t for t in pods.values() if own.items() <= t["metadata"].get("labels", {}).items()]
            [container] = [t["spec"]["containers"][0] for t in chosen]
            targets = {port["targetPort"] for port in document["spec"]["ports"]}
            assert targets <= {port["name"] for port in container["ports"]}


@pytest.mark.parametrize("folder", SERVERS)
def test_a_model_has_time_to_load_and_a_refusal_is_shown(folder: str) -> None:
    for document in rendered(folder):
        template = pod_template(document)
        if template is None:
            continue
        [container] = template["spec"]["containers"]
        assert container["terminationMessagePolicy"] == "FallbackToLogsOnError"
        if "--model-path=zai-org/GLM-5-FP8" in container["args"]:
            assert split_arguments(container["args"])[0].pattern == f"{IN_CONTAINER}@1/4"
            probe = container["startupProbe"]
            seconds = probe["periodSeconds"] * probe["failureThreshold"]
            assert seconds >= 3600 and container["resources"]["limits"]["nvidia.com/gpu"] == 8
            if document["kind"] == "Deployment":
                assert document["spec"]["progressDeadlineSeconds"] > seconds  # else the roll-out fails before


KEYS = "/etc/indexcache-keys"


@pytest.mark.parametrize("folder", FOLDERS)
def test_keys_are_files_and_stand_in_no_command_line(folder: str) -> None:
    """What `ps` shows of a container all processes of its node can read; a variable, all that its process starts."""
    for document in rendered(folder):
        if (template := pod_template(document)) is None:
            continue
        [container] = template["spec"]["containers"]
        words = [*container["command"], *container.get("args", ())]
        assert not [word for word in words if word.startswith("--api-key") or "$(SGLANG" in word or "$(HF" in word]
        assert all("value" in item and not item["name"].endswith(("KEY", "TOKEN")) for item in container["env"])
        volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
        if any(KEYS in word for word in words):
            assert volumes["keys"]["secret"] == {"secretName": "glm5-keys"}
        if words[:3] == ["python3", "-m", "sglang_indexcache.launch_server"]:
            assert words[words.index("--config") + 1] == f"{KEYS}/server.yaml"  # as two words, or SGLang leaves it


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_pod_can_write_nowhere_but_into_its_volumes(folder: str) -> None:
    for document in rendered(folder):
        if (template := pod_template(document)) is None:
            continue
        spec = template["spec"]
        [container] = spec["containers"]
        assert spec["securityContext"]["runAsNonRoot"] and not spec["automountServiceAccountToken"]
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        writable = [mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")]
        variables = {item["name"]: item["value"] for item in container["env"]}
        assert "/tmp" in writable and variables["HOME"] in writable
        for name in ("HF_HOME", "XDG_CACHE_HOME"):
            assert name not in variables or variables[name].startswith(tuple(writable))


@pytest.mark.parametrize("folder", FOLDERS)
def test_who_reaches_a_pod_is_said(folder: str) -> None:
    documents = rendered(folder)
    policies = [document["spec"] for document in documents if document["kind"] == "NetworkPolicy"]
    for document in documents:
        if (template := pod_template(document)) is None:
            continue
        [policy] = [
            item
            for item in policies
            if item["podSelector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
        ]
        ports = {port["name"] for port in template["spec"]["containers"][0].get("ports", ())}
        assert policy["policyTypes"] == ["Ingress"]
        for rule in policy["ingress"]:
            assert rule["from"], "whoever is nobody is everybody"
            assert all(port["port"] in ports | {8998} for port in rule.get("ports", ()))


def images() -> list[str]:
    names = [container["image"] for folder in FOLDERS for container in containers(rendered(folder)).values()]
    return [*names, yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["glm5"]["image"]]


def test_the_image_is_of_the_newest_sglang_and_of_this_version() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    assert f"FROM lmsysorg/sglang:v{VERSIONS[-1]}\n" in text
    tags = {image.rpartition(":")[2] for image in images()}
    release = RELEASE if version() == RELEASE else f"{RELEASE}.dev"
    assert tags == {f"{VERSIONS[-1]}-{release}"}, "no checkout of a version to come can be built"
    assert all(re.fullmatch(r"\w[\w.-]{0,127}", tag) for tag in tags)
    assert f"-t {images()[0]} ." in text


def test_hadolint_has_nothing_to_say_of_the_dockerfile(tmp_path: Path) -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([hadolint, DEPLOY / "Dockerfile"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")
    (tmp_path / "Dockerfile").write_text((DEPLOY / "Dockerfile").read_text().replace(":v", ":latest # v"))
    assert subprocess.run([hadolint, tmp_path / "Dockerfile"], capture_output=True).returncode == 1


def test_the_image_gets_one_wheel_and_its_search() -> None:
    rules = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    [wheel] = [rule[1:] for rule in rules if rule.startswith("!")]
    assert rules.index("*") < rules.index(f"!{wheel}")
    text = (DEPLOY / "Dockerfile").read_text()
    assert f"COPY {wheel} /opt/\n" in text and f'"$(echo /opt/{Path(wheel).name})[search]"' in text
    [folder] = {
        line.split()[-2] for line in (text + (DEPLOY / "README.md").read_text()).splitlines() if "pip wh" in line
    }
    assert folder == Path(wheel).parent.name


def test_compose_starts_what_the_deployment_starts() -> None:
    from compose_spec import PyCompose

    text = (DEPLOY / "compose.yaml").read_text()
    PyCompose.from_yaml(text).validate()
    for right in ("shm_size", "interval: 30s", "retries: 5", "capabilities", "max_attempts", "stop_grace_period"):
        assert text.count(right) == 1
        with pytest.raises(ValueError):
            PyCompose.from_yaml(text.replace(right, f"{right}x")).validate()
    [container] = written("one-node/server.yaml").values()
    service = yaml.safe_load(text)["services"]["glm5"]
    assert service["command"] == container["command"] + container["args"]
    assert service["environment"] == {item["name"]: item["value"] for item in container["env"]}
    assert service["read_only"] and service["cap_drop"] == ["ALL"] and service["user"] == "1000:1000"
    mounted = {volume.split(":")[1] for volume in service["volumes"]} | set(service["tmpfs"])
    assert mounted | {"/dev/shm"} == {str(Path(mount["mountPath"])) for mount in container["volumeMounts"]} - {
        str(Path(IN_CONTAINER).parent)
    } | {IN_CONTAINER}
    assert any(volume.split(":")[1] == IN_CONTAINER for volume in service["volumes"])
    named = {volume.split(":")[0] for volume in service["volumes"] if not volume.startswith(".")}
    assert named == set(yaml.safe_load(text)["volumes"])

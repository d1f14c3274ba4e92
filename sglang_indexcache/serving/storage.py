"""Backends of HiCache storage whose keys have the model's name in them, and so the pattern (`identity`).

SGLang hands the name to all of them, and some never look at it: a server would find the pages of any pattern there.
Read: backend_factory.py and the backends in sglang/srt/mem_cache/storage of 0.5.11 to 0.5.23.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Mapping
from typing import Any

from sglang_indexcache.sglang.probes import SglangSource

_FACTORY = "srt.mem_cache.storage.backend_factory"
_NAME = "model_name"  # of HiCacheStorageConfig
_OWN_NAME = "model_id"  # of TensorCast's configuration, which it takes instead


def unmarked(source: SglangSource, backend: str | None, extra: Any) -> str | None:
    """Return why the keys of a storage backend would not show the pattern, or `None`.

    Args:
        source: the installed SGLang.
        backend: as in `--hicache-storage-backend`.
        extra: `--hicache-storage-backend-extra-config`: JSON, a mapping, `@` and a file, or `None`.
    """
    places = _backends(source)
    if not places:
        return f"SGLang {source.version} has no {_FACTORY}, so nobody can see what its keys are made of"
    if backend not in places:
        return f"nobody here knows what its keys are made of; expected one of {_marked(source, places)}"
    if not _uses_name(source, *places[backend]):
        return (
            f"in SGLang {source.version} its keys don't have the model's name, which carries the pattern; expected one"
            f" of {_marked(source, places)}"
        )
    if backend == "tensorcast" and _says(extra, _OWN_NAME):
        return f"its keys have {_OWN_NAME} instead of the model's name, which carries the pattern; expected none"
    return None


def _marked(source: SglangSource, places: Mapping[str, tuple[str, str]]) -> str:
    return ", ".join(name for name, place in places.items() if _uses_name(source, *place))


def _backends(source: SglangSource) -> dict[str, tuple[str, str]]:
    """Return module (dotted below `sglang.`) and class of the backends that SGLang registers, by name."""
    tree = source.tree(_FACTORY)
    found = {}
    for node in () if tree is None else ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", None) == "register_backend":
            words = [item.value for item in node.args if isinstance(item, ast.Constant)]
            if len(words) == 3 and all(isinstance(word, str) for word in words):
                name, module, of_class = map(str, words)
                found[name] = (module.removeprefix("sglang."), of_class)
    return found


def _uses_name(source: SglangSource, module: str, of_class: str) -> bool:
    """Return whether a backend does more with the model's name than to keep it."""
    tree = source.tree(module) or source.tree(f"{module}.{of_class}")
    if tree is None:
        return False
    kept = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and all(isinstance(target, ast.Attribute) for target in node.targets)
    }
    return any(id(node) not in kept for node in _reads(tree, of_class))


def _reads(tree: ast.Module, of_class: str) -> Iterator[ast.Attribute]:
    """Yield where `.model_name` is read in a module, or in the class where the module has it beside others."""
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == of_class]
    shared = any(isinstance(node, ast.ClassDef) and node.name == "HiCacheStorageConfig" for node in tree.body)
    for scope in classes if shared else [tree]:
        for node in ast.walk(scope):
            if isinstance(node, ast.Attribute) and node.attr == _NAME and isinstance(node.ctx, ast.Load):
                yield node


def _says(extra: Any, key: str) -> bool:
    """Return whether a configuration has a key at any depth; one that can't be read here may have it."""
    if isinstance(extra, str):
        try:
            extra = json.loads(extra)
        except ValueError:
            return True
    if isinstance(extra, Mapping):
        return key in extra or any(_says(value, key) for value in extra.values() if isinstance(value, Mapping))
    return False

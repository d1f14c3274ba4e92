"""Write the options of SGLang's launch line, by version, into the package: read from wheels, which are not imported.

python -m scripts.tools.sglang_options --folder build/wheels

An option has names, the attribute of SGLang's server arguments that it sets, and how many words it takes. Names,
numbers of words, choices and defaults are facts; no help text is kept.
"""

from __future__ import annotations

import argparse
import ast
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import indexcache_launch
from scripts.tools.probe_wheels import VERSIONS, unpacked

TARGET = Path(indexcache_launch.__file__).with_name("options.json")
_UNKNOWN = object()
_ACTIONS = {
    "store_true": "true",
    "BooleanOptionalAction": "boolean",
    "DeprecatedAction": "retired",
    "DeprecatedStoreTrueAction": "old true",
    "DeprecatedStoreConstAction": "old const",
    "DeprecatedAliasStoreAction": "old store",
    "LoRAPathAction": "list",
}


class Constants:
    """The constants of modules, as far as they are written down: lists, strings, numbers."""

    def __init__(self, *trees: ast.Module) -> None:
        self._nodes: dict[str, ast.expr] = {}
        for tree in trees:
            for node in tree.body:
                if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                    self._nodes[node.targets[0].id] = node.value
            for node in (child for child in tree.body if isinstance(child, ast.ClassDef)):
                for line in node.body:  # defaults of fields, and names such as Backend.BREAKABLE
                    name = line.target if isinstance(line, ast.AnnAssign) else None
                    if isinstance(line, ast.Assign):
                        name = line.targets[0]  # type: ignore[assignment]
                    if isinstance(name, ast.Name) and getattr(line, "value", None) is not None:
                        self._nodes[f"{node.name}.{name.id}"] = line.value  # type: ignore[attr-defined]

    def value(self, node: ast.expr | None) -> Any:
        """Return the value of an expression; `_UNKNOWN` where it is computed."""
        if isinstance(node, ast.Name | ast.Attribute):
            found = self._nodes.get(ast.unparse(node))
            return _UNKNOWN if found is None else self.value(found)
        if isinstance(node, ast.List | ast.Tuple | ast.Set):
            items: list[Any] = []
            for item in node.elts:
                value = self.value(item.value if isinstance(item, ast.Starred) else item)
                if value is _UNKNOWN:
                    return _UNKNOWN
                items += value if isinstance(item, ast.Starred) else [value]
            return items
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            left, right = self.value(node.left), self.value(node.right)
            known = isinstance(left, list) and isinstance(right, list)
            return left + right if known else _UNKNOWN
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("list", "set", "frozenset") and node.args:
            return self.value(node.args[0])
        try:
            return ast.literal_eval(node) if node is not None else _UNKNOWN
        except (ValueError, TypeError):
            return _UNKNOWN


def options_of(root: Path) -> list[dict[str, Any]]:
    """Read the options of the SGLang in `root`, its folder `sglang`."""
    server = ast.parse((root / "srt/server_args.py").read_text())
    fields = sorted((root / "srt/arg_groups/fields").glob("*.py"))
    trees = [ast.parse(path.read_text()) for path in fields]
    others = ("srt/arg_groups/choices.py", "srt/model_executor/cuda_graph_config.py", "srt/environ.py")
    constants = Constants(
        *(ast.parse((root / other).read_text()) for other in others if (root / other).is_file()), *trees, server
    )
    found = [option for tree in (*trees, server) for option in _fields(tree, constants)]
    return found + list(_added(server, constants))


def _fields(tree: ast.Module, constants: Constants) -> Iterator[dict[str, Any]]:
    """Yield the options that are fields of classes, `name: A[type, Arg(...)]` or `name: A[type, "help"]`."""
    for owner in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        for line in owner.body:
            if not (isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)):
                continue
            hint = line.annotation
            if not (isinstance(hint, ast.Subscript) and ast.unparse(hint.value) in ("A", "Annotated")):
                continue
            assert isinstance(hint.slice, ast.Tuple)
            kind, *notes = hint.slice.elts
            calls = [note for note in notes if isinstance(note, ast.Call) and ast.unparse(note.func) == "Arg"]
            if not calls and not any(_is_text(note) for note in notes):
                continue
            given = {word.arg: word.value for word in calls[0].keywords if word.arg} if calls else {}
            if constants.value(given.get("no_cli")) is True:
                continue
            name = line.target.id
            flag = constants.value(given.get("cli_name"))
            first = "--" + name.replace("_", "-") if flag is _UNKNOWN else flag
            aliases = constants.value(given.get("aliases"))
            names = [first, *(aliases if isinstance(aliases, list) else [])]
            yield _option(names, name, _of_type(kind, given, constants), line.value, constants)


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant | ast.JoinedStr | ast.BinOp)


def _of_type(kind: ast.expr, given: Mapping[str, ast.expr], constants: Constants) -> dict[str, Any]:
    """Return how SGLang reads a field of a type, by its own rules for annotations."""
    facts: dict[str, Any] = {"action": "store"}
    for key in ("choices", "nargs", "const"):
        if (value := constants.value(given.get(key))) is not _UNKNOWN:
            facts[key] = value
    if "action" in given:
        more = given.get("action_kwargs")
        if isinstance(more, ast.Dict):
            for name, node in zip(more.keys, more.values, strict=True):
                facts |= _keyword(str(constants.value(name)), node, constants)
        return {**facts, "action": _action(given["action"])}
    kind = _not_none(kind)
    parser = ast.unparse(given["type_parser"]) if "type_parser" in given else None
    if isinstance(kind, ast.Subscript) and ast.unparse(kind.value).endswith("Literal"):
        elements = kind.slice.elts if isinstance(kind.slice, ast.Tuple) else [kind.slice]
        return {"choices": [constants.value(item) for item in elements], **facts, "type": parser or "str"}
    if isinstance(kind, ast.Subscript) and ast.unparse(kind.value) in ("list", "List") and parser is None:
        return {"nargs": "+", **facts, "type": _type_name(kind.slice)}
    if ast.unparse(kind) == "bool" and parser is None:
        return {"action": "true"}
    return {**facts, "type": parser or _type_name(kind)}


def _type_name(kind: ast.expr) -> str:
    name = ast.unparse(kind)
    return name if name in ("int", "float") else "str"


def _not_none(kind: ast.expr) -> ast.expr:
    """Return `X` of `Optional[X]` and of `X | None`."""
    if isinstance(kind, ast.Subscript) and ast.unparse(kind.value).endswith("Optional"):
        return kind.slice
    if isinstance(kind, ast.BinOp) and isinstance(kind.op, ast.BitOr) and ast.unparse(kind.right) == "None":
        return kind.left
    return kind


def _added(tree: ast.Module, constants: Constants) -> Iterator[dict[str, Any]]:
    """Yield the options that `ServerArgs.add_cli_args` adds one by one."""
    [owner] = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "ServerArgs"]
    [adder] = [node for node in owner.body if isinstance(node, ast.FunctionDef) and node.name == "add_cli_args"]
    for call in (node for node in ast.walk(adder) if isinstance(node, ast.Call)):
        if not (isinstance(call.func, ast.Attribute) and call.func.attr == "add_argument"):
            continue
        names = [str(constants.value(node)) for node in call.args]
        long = next(name for name in names if name.startswith("--"))
        facts: dict[str, Any] = {"action": "store"}
        default: ast.expr | None = None
        for word in call.keywords:
            if word.arg == "default":
                default = word.value
            elif word.arg is not None:
                facts |= _keyword(word.arg, word.value, constants)
        dest = facts.pop("dest", long[2:].replace("-", "_"))
        yield _option(names, dest, facts, default, constants)


def _keyword(name: str, node: ast.expr, constants: Constants) -> dict[str, Any]:
    """Return what a keyword of `add_argument` says of an option."""
    if name == "action":
        return {"action": _action(node)}
    if name == "type":
        return {"type": ast.unparse(node)}
    if name in ("dest", "nargs", "choices", "const", "const_value"):
        value = constants.value(node)
        return {} if value is _UNKNOWN else {name.removesuffix("_value"): value}
    return {}


def _action(node: ast.expr) -> str:
    name = node.value if isinstance(node, ast.Constant) else ast.unparse(node).rpartition(".")[2]
    return _ACTIONS[str(name)]


def _option(
    names: list[str], dest: str, facts: dict[str, Any], default: ast.expr | None, constants: Constants
) -> dict[str, Any]:
    option = {"names": names, "dest": dest, **facts}
    for key in ("choices",):
        if isinstance(option.get(key), list) and all(isinstance(item, str) for item in option[key]):
            option[key] = sorted(option[key])
    if option.get("type") == "str":
        del option["type"]
    value = constants.value(default)
    if value is not _UNKNOWN and value is not None and isinstance(value, bool | int | float | str):
        option["default"] = value
    return {key: value for key, value in option.items() if value is not None or key == "const"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("build/wheels"))
    folder = parser.parse_args().folder
    table: dict[str, dict[str, Any]] = {}
    for version in VERSIONS:
        for option in options_of(unpacked(version, folder).root):
            entry = table.setdefault(json.dumps(option, sort_keys=True), {**option, "versions": []})
            if version not in entry["versions"]:  # one is added twice, for different devices
                entry["versions"].append(version)
    entries = sorted(table.values(), key=lambda entry: (entry["names"], VERSIONS.index(entry["versions"][0])))
    lines = ",\n  ".join(json.dumps(entry) for entry in entries)
    TARGET.write_text(f'{{"versions": {json.dumps(VERSIONS)}, "options": [\n  {lines}\n]}}\n')
    print(f"{TARGET}: {len(entries)} options of {len(VERSIONS)} versions")


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""The package as docs/architecture.md has it: no circles, imports downwards only, no private doors. Nothing is imported."""

import ast
import re
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path


ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "paco_trl"
# Low to high. Those in one line do not import each other; "paco_trl" is the package's own `__init__.py`.
LAYERS = (
    ("utils",), ("data",), ("rollout", "tiny"), ("rewards",), ("evaluation",), ("plots",), ("hub",),
    ("checkpointing",), ("trainer",), ("planning",), ("generation",), ("paco_trl",),
    ("dataset_building", "image_benchmarks"), ("commands",),
)  # fmt: skip
HEIGHT = {name: height for height, names in enumerate(LAYERS) for name in names}
NAMEDTUPLE = {"_asdict", "_fields", "_make", "_replace"}
# Private names of other libraries, and why there is no public way
OTHERS = {
    "atexit._run_exitfuncs": "Python runs these functions only after it has waited for all threads",
    "os._exit": "Python has no public way to end while a thread runs",
    "threading._register_atexit": "Python calls nothing else before it waits for threads",
    "DistributedDataParallel._set_params_and_buffers_to_ignore_for_model": "torch has no public way to leave some out",
    "dataset._fingerprint": "datasets has no public identity of a dataset",
    "dataset._indices": "datasets has no public list of the rows that `select` and `shuffle` keep",
    "hf_deepspeed._hf_deepspeed_config_weak_ref": "transformers has no getter for the configuration object",
    "model._internal_dict": "diffusers' `config` has no setter",
    "dist.distributed_c10d._get_default_store": "torch gives the store of a process group nowhere else",
    "model._no_split_modules": "diffusers and transformers name the blocks of a model nowhere else",
    "module._compiled_call_impl": "torch does not say elsewhere whether a module is compiled",
    "nn.modules.dropout._DropoutNd": "torch's only common class of its dropout layers",
    "pipeline._get_messages": "diffusers' Ovis-Image adds its own words to a prompt here",
    "processor._get_num_multimodal_tokens": "transformers counts an image's tokens from its size here",
    "processor._resize_to_target_area": "diffusers' FLUX.2 resizes its sources by this",
    "torch._foreach_lerp_": "torch's optimizers update many tensors at once by such functions; none is public",
    "transformer._no_split_modules": "diffusers names the blocks of some transformers only here",
    "transformer._repeated_blocks": "diffusers compiles these",
}


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


def imports_of(root: Path) -> dict[str, dict[str, str]]:
    """Module -> the modules of the package that it imports anywhere, `TYPE_CHECKING` included -> file and line."""
    names = {path: ".".join(path.relative_to(root.parent).with_suffix("").parts) for path in root.rglob("*.py")}
    found: dict[str, dict[str, str]] = {name.removesuffix(".__init__"): {} for name in names.values()}
    for path, name in names.items():
        for node in nodes_of(path):
            if isinstance(node, ast.Import):
                targets = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                parents = name.split(".")[: -node.level] if node.level else []
                base = ".".join([*parents, *filter(None, [node.module])])
                targets = [each if each in found else base for each in (f"{base}.{a.name}" for a in node.names)]
            else:
                continue
            module = name.removesuffix(".__init__")
            where = f"{path.relative_to(root.parent)}:{node.lineno}"
            found[module] |= {target: where for target in targets if target in found and target != module}
    return found


def private_accesses(root: Path) -> list[tuple[str, str]]:
    """File and line, and what is accessed there, by `.` or by name."""
    found = []
    for path in sorted(root.rglob("*.py")):
        for node in nodes_of(path):
            if isinstance(node, ast.Attribute):
                owner, name = ast.unparse(node.value), node.attr
            elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr", "setattr"):
                owner, name = ast.unparse(node.args[0]), str(getattr(node.args[1], "value", ""))
            elif isinstance(node, ast.ImportFrom) and node.level:
                found += [
                    (f"{path.relative_to(root.parent)}:{node.lineno}", f"{node.module}.{alias.name}")
                    for alias in node.names
                    if alias.name.startswith("_")
                ]
                continue
            else:
                continue
            if not name.startswith("_") or name.startswith("__") or owner in ("self", "cls", "super()"):
                continue
            if name not in NAMEDTUPLE:
                found.append((f"{path.relative_to(root.parent)}:{node.lineno}", f"{owner}.{name}"))
    return sorted(found)


def test_no_circle_of_imports():
    TopologicalSorter(imports_of(PACKAGE)).prepare()  # its error names the circle


def test_packages_import_downwards():
    found = []
    for module, targets in imports_of(PACKAGE).items():
        for target, where in targets.items():
            importing, imported = ((each.split(".") + ["paco_trl"])[1] for each in (module, target))
            if importing != imported and HEIGHT[imported] >= HEIGHT[importing]:
                found.append(f"{where} {importing} imports {imported}")
    assert not found, "\n".join(found)


def test_no_private_attribute_of_another_class():
    accesses = private_accesses(PACKAGE)
    assert set(OTHERS) <= {what for _, what in accesses}  # an exception that nothing needs is taken away
    found = [f"{where} {what}" for where, what in accesses if what not in OTHERS]
    assert not found, "\n".join(found)


def test_the_page_has_the_same_layers():
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    rows = [re.findall(r"`(\w+)/`", row) for row in re.findall(r"^\| (\[`\w+/`\][^|]*) \|", text, flags=re.M)]
    assert list(reversed(rows)) == [list(names) for names in LAYERS if names != ("paco_trl",)]
    assert {path.parent.name for path in PACKAGE.glob("*/__init__.py")} | {"paco_trl"} == set(HEIGHT)

# SPDX-License-Identifier: Apache-2.0
"""The reference of options and of commands, from the source, without an import of the package."""

import ast
import inspect
import re
from functools import cache
from pathlib import Path


PACKAGE = Path(__file__).parent.parent / "paco_trl"
CONFIGS = {
    "PaCoGRPOConfig": "trainer/paco_grpo_config.py",
    "PaCoNFTConfig": "trainer/paco_nft_config.py",
    "PaCoRewardConfig": "trainer/paco_reward_config.py",
}
# Config -> the classes of which it has the other options
INHERITED = {
    "PaCoGRPOConfig": "`paco-trl grpo`. Also the fields of `trl.GRPOConfig` and `transformers.TrainingArguments`",
    "PaCoNFTConfig": "`paco-trl nft`. Also the options of `PaCoGRPOConfig`, except those without an effect",
    "PaCoRewardConfig": "`paco-trl reward`. Also the fields of `trl.SFTConfig` and `transformers.TrainingArguments`",
}
_ENTRY = re.compile(r"^ {4}(\w+(?:, \w+)*) \(`(.+?)`(?:, \*optional\*)?(?:, defaults to `(.+?)`)?\):$")


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def config_options(name: str) -> list[tuple[str, str, str, str]]:
    """Read heading, name, default and meaning of each option that the docstring of a config lists."""
    (node,) = [n for n in _tree(PACKAGE / CONFIGS[name]).body if isinstance(n, ast.ClassDef) and n.name == name]
    lines = inspect.cleandoc(ast.get_docstring(node) or "").splitlines()
    heading, options = "", []
    for line in lines[lines.index("Parameters:") + 1 :]:
        if entry := _ENTRY.match(line):
            options.append([heading, entry[1], entry[3] or "", ""])
        elif line.startswith("    > "):
            heading = line[6:]
        elif line.startswith("        ") and options:
            options[-1][3] += f"{line.strip()} "
    return [tuple(map(_cell, option)) for option in options]


def options_page() -> str:
    """Write the page of all options of the three configs."""
    lines = [
        "# Options",
        "",
        "Every option of the three configs: a field in Python, `--name` on the command line, a key in a YAML file.",
        "Those of trackers (`report_to`), saving and logging are Trainer's.",
    ]
    for name in CONFIGS:
        lines += ["", f"## {name}", "", f"{INHERITED[name]}."]
        last = None
        for heading, option, default, meaning in config_options(name):
            if heading != last:
                lines += [
                    "",
                    f"### {heading} {{ #{name.lower()}-{re.sub(r'[^a-z]+', '-', heading.lower())} }}" * bool(heading),
                ]
                lines += ["", "| option | default | meaning |", "|---|---|---|"]
                last = heading
            lines.append(f"| `{option}` | {f'`{default}`' if default else ''} | {_references(meaning)} |")
    return "\n".join(lines) + "\n"


def _references(text: str) -> str:
    return re.sub(r"\[`~?(?:[\w.]+\.)?(\w+)`\](?!\()", r"`\1`", text)


def _text(node: ast.AST, constants: dict[str, str]) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.Name):
        return constants.get(node.id, node.id)
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(value, constants) for value in node.values)
    return _text(node.value, constants) if isinstance(node, ast.FormattedValue) else ast.unparse(node)


@cache
def _classes() -> dict[tuple[str, str], tuple[list[str], list[tuple[str, str, str]]]]:
    """Read bases and own fields (name, default, help) of the dataclasses of the commands, by module and name."""
    constants, classes = {}, {}
    trees = {path.stem: _tree(path) for path in sorted((PACKAGE / "commands").glob("*.py"))}
    for tree in trees.values():
        for node in tree.body:
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
                constants[getattr(node.targets[0], "id", "")] = str(node.value.value)
    for module, tree in trees.items():
        for node in tree.body:
            if not isinstance(node, ast.ClassDef) or "dataclass" not in "".join(map(ast.unparse, node.decorator_list)):
                continue
            fields = []
            for item in node.body:
                if not isinstance(item, ast.AnnAssign) or "ClassVar" in ast.unparse(item.annotation):
                    continue
                default, text = "", ""
                if isinstance(item.value, ast.Call) and getattr(item.value.func, "id", "") == "option":
                    default, text = ast.unparse(item.value.args[0]), _text(item.value.args[1], constants)
                    if default == "MISSING" or any(word.arg == "required" for word in item.value.keywords):
                        default = "required"
                fields.append((getattr(item.target, "id", ""), default, text))
            classes[module, node.name] = ([ast.unparse(base) for base in node.bases], fields)
    return classes


@cache
def _imported(module: str) -> dict[str, str]:
    """Return the module of the commands that each imported name of a module comes from."""
    imports = [node for node in _tree(PACKAGE / f"commands/{module}.py").body if isinstance(node, ast.ImportFrom)]
    return {name.name: node.module for node in imports if node.level == 1 and node.module for name in node.names}


def fields_of(module: str, name: str) -> dict[str, tuple[str, str]]:
    """Return default and help of all fields of a dataclass of the commands, those of its bases first."""
    places = (module, _imported(module).get(name), f"{module}_arguments")
    key = next(((place, name) for place in places if (place, name) in _classes()), None)
    if key is None:
        return {}
    bases, own = _classes()[key]
    found: dict[str, tuple[str, str]] = {}
    for base in reversed(bases):
        found |= fields_of(key[0], base.split(".")[-1])
    return found | {field: (default, text) for field, default, text in own}


def commands() -> dict[str, tuple[str, str, str]]:
    """Read module, function and summary of each command."""
    for node in _tree(PACKAGE / "commands/main.py").body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "COMMANDS":
            found = ast.literal_eval(node.value)
            places = {name: path.split(".")[2].partition(":") for name, (path, _) in found.items()}
            return {name: (places[name][0], places[name][2], text) for name, (_, text) in found.items()}
    return {}


def parts(module: str, function: str) -> dict[str, str]:
    """Return the class of arguments of each stage of a command, or of the command itself under an empty name."""
    body = _tree(PACKAGE / f"commands/{module}.py").body
    for node in body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "STAGES":
            stages = zip(node.value.keys, node.value.values, strict=True)
            return {ast.literal_eval(key): ast.unparse(value.elts[0]) for key, value in stages}
    bodies = [
        node for node in body if isinstance(node, ast.FunctionDef) and function in (node.name, "main", "main_nft")
    ]
    nodes = [node for tree in bodies for node in ast.walk(tree)]
    names = {node.id for node in nodes if isinstance(node, ast.Name) and node.id.endswith("Arguments")}
    own = [name for name in sorted(names) if fields_of(module, name)]
    return {"": own[0]} if own else {}


def commands_page() -> str:
    """Write the page of all commands with their own options."""
    lines = ["# Commands", "", "`paco-trl <command> --help` prints the same. `--config FILE` reads options from YAML."]
    lines += ["For several processes add `--num_processes 8` or `--accelerate_config FILE`.", ""]
    lines += ["| command | |", "|---|---|"]
    lines += [f"| [`{name}`](#paco-trl-{name}) | {text} |" for name, (*_, text) in commands().items()]
    for name, (module, function, text) in commands().items():
        lines += ["", f"## paco-trl {name}", "", f"{text[0].upper()}{text[1:]}."]
        config = {"grpo": "PaCoGRPOConfig", "nft": "PaCoNFTConfig", "reward": "PaCoRewardConfig"}.get(name)
        if config:
            lines += ["", f"Also every option of [`{config}`](options.md#{config.lower()})."]
        for stage, arguments in parts(module, function).items():
            if stage:
                lines += ["", f"### paco-trl {name} {stage}"]
            lines += ["", "| option | default | meaning |", "|---|---|---|"]
            for field, (default, meaning) in fields_of(module, arguments).items():
                default = "" if default in ("None", "") else default if default == "required" else f"`{default}`"
                lines.append(f"| `--{field}` | {_cell(default)} | {_cell(meaning)} |")
    return "\n".join(lines) + "\n"

# SPDX-License-Identifier: Apache-2.0
"""
Hooks of mkdocs (`make docs`): pages outside docs/, an API reference of every public name, links to the source.

What the pages are written for is GitHub: its anchors, its alerts and its relative links. The functions before the
hooks need nothing but the standard library.
"""

import ast
import configparser
import posixpath
import re
import sys
import textwrap
from pathlib import Path


sys.path.append(str(Path(__file__).parent))
from site_options import commands_page, options_page  # noqa: E402


ROOT = Path(__file__).parent.parent
# Pages outside docs/, by their path on the site
OUTSIDE = {
    "index.md": "README.md",
    "benchmarks.md": "benchmarks/README.md",
    **{
        f"benchmarks/{path.parent.name}.md": f"benchmarks/{path.parent.name}/README.md"
        for path in sorted((ROOT / "benchmarks").glob("*/README.md"))
    },
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
    "security.md": "SECURITY.md",
    "published_models.md": "model_cards/README.md",
    **{f"cards/{path.name}": f"model_cards/{path.name}" for path in sorted((ROOT / "model_cards").glob("PaCo-*.md"))},
}
# Packages with public names, in the order of the reference
PACKAGES = [
    "",
    "rewards",
    "data",
    "rollout",
    "trainer",
    "planning",
    "evaluation",
    "image_benchmarks",
    "dataset_building",
    "generation",
    "hub",
    "tiny",
]
_FENCE = re.compile(r"^(\s*```.*?^\s*```\s*?$)", flags=re.M | re.S)
_LINK = re.compile(r"(!?)\[((?:`[^`]*`|[^\]`])*)\]\((?!https?:|mailto:|#)([^)\s]+)\)")
_BADGE = re.compile(r"^\[!\[.*\n", flags=re.M)
_ALERT = re.compile(r"^> \[!(NOTE|TIP|IMPORTANT|WARNING|CAUTION)\]\n((?:^>.*\n?)+)", flags=re.M)
_REFERENCE = re.compile(r"\[`(~?)([\w.]+)`\](?!\()")


def repository() -> str | None:
    """Return the repository's address, which only setup.cfg has."""
    config = configparser.RawConfigParser()
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    return config["metadata"].get("url")


def public_names(package: str) -> list[str]:
    """Return `__all__` of a package of paco_trl without importing it."""
    source = (ROOT / "paco_trl" / package / "__init__.py").read_text(encoding="utf-8")
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", None) == "__all__":
            return [name for name in ast.literal_eval(node.value) if not name.startswith("__")]
    return []


def addresses() -> dict[str, str]:
    """Return where each public name is in the reference, by its last part."""
    return {
        name: ".".join(filter(None, ["paco_trl", package, name]))
        for package in PACKAGES
        for name in public_names(package)
    }


def reference_page(package: str) -> str:
    """Write the page of a package: mkdocstrings fills in the names."""
    path = f"paco_trl.{package}".rstrip(".")
    # The signature of a config would be a page of fields, which its docstring lists
    hidden = "\n    options:\n      show_signature: false"
    names = [f"::: {path}.{name}{hidden * name.endswith('Config')}" for name in public_names(package)]
    return "\n\n".join([f"# {path}", *names]) + "\n"


def github_slug(heading: str, separator: str = "-") -> str:
    """Return the anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", separator)


def render_page(text: str, page: str, url: str | None) -> str:
    """Render GitHub's Markdown of a page for the site: links, badges and alerts, outside code blocks."""
    source = OUTSIDE.get(page, f"docs/{page}")
    site, names = {path: name for name, path in OUTSIDE.items()}, addresses()

    def link(match: re.Match) -> str:
        image, label, target = match.groups()
        path, _, anchor = target.partition("#")
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), path)) if path else source
        is_page = path.startswith("docs/") and not path.endswith(".py")
        name = site.get(path) or (path.removeprefix("docs/") if is_page else None)
        if image and name is None:
            name = f"benchmarks/{posixpath.basename(path)}"  # copied there
        if name is None and label.strip("`") in names:
            return f"[{label}][{names[label.strip('`')]}]"
        if name is None:
            return f"[{label}]({url}/{'tree' if (ROOT / path).is_dir() else 'blob'}/main/{path})" if url else label
        there = posixpath.relpath(name, posixpath.dirname(page) or ".")
        return f"{image}[{label}]({there}{'#' + anchor if anchor else ''})"

    def alert(match: re.Match) -> str:
        body = re.sub(r"^> ?", "", match[2], flags=re.M)
        return f"!!! {match[1].lower()}\n\n{textwrap.indent(body.strip(), '    ')}\n"

    parts = _FENCE.split(text)
    parts[::2] = [_ALERT.sub(alert, _LINK.sub(link, _BADGE.sub("", part))) for part in parts[::2]]
    return "".join(parts)


def render_docstring(text: str, names: dict[str, str]) -> str:
    """Render a docstring in TRL's style as Markdown: sections, arguments as a list, references."""

    def reference(match: re.Match) -> str:
        parts = match[2].split(".")
        known = next((place for place, part in enumerate(parts) if part in names), None)
        if known is None:
            return f"`{parts[-1] if match[1] else match[2]}`"
        return f"[`{'.'.join(parts[known:])}`][{names[parts[known]]}]"

    lines, section = [], None
    for line in text.splitlines():
        heading = re.fullmatch(r"(Args|Parameters|Attributes|Returns|Raises|Yields|Example|Examples):", line)
        if heading:
            section = heading[1]
            lines += [f"**{section}**", ""]
            continue
        if section is not None and section not in ("Example", "Examples") and line.startswith("    "):
            line = _render_entry(line[4:], section)
        lines.append(line)
    return _REFERENCE.sub(reference, "\n".join(lines))


def _render_entry(line: str, section: str) -> str:
    if line.startswith((" ", ">")) or not line:
        return re.sub(r"^> (.*)$", r"*\1*", line)
    if section in ("Args", "Parameters", "Attributes"):
        return "- " + re.sub(r"(^|, )(\*{0,2}\w+)(?= \(|:$)", r"\1**`\2`**", line)
    return f"- {line}" if section == "Raises" else line


def on_config(config):
    """Give headings GitHub's anchors, and the site the repository's address."""
    config.mdx_configs.setdefault("toc", {})["slugify"] = github_slug
    config.repo_url = repository()
    return config


def on_files(files, config):
    """Add the pages outside docs/, their images, and the reference."""
    from mkdocs.structure.files import File

    for name, path in OUTSIDE.items():
        files.append(File.generated(config, name, content=(ROOT / path).read_text(encoding="utf-8")))
    files.append(File.generated(config, "options.md", content=options_page()))
    files.append(File.generated(config, "commands.md", content=commands_page()))
    for path in sorted((ROOT / "benchmarks").glob("*/*.png")):
        files.append(File.generated(config, f"benchmarks/{path.name}", abs_src_path=str(path)))
    for package in PACKAGES:
        files.append(File.generated(config, f"reference/{package or 'paco_trl'}.md", content=reference_page(package)))
    return files


def on_page_markdown(markdown, page, config, files):
    """Render links for the site, those of the reference are already; rank pages in a search."""
    boosts = {"faq.md": 4, "my_card.md": 2, "rewards.md": 2}
    if page.file.src_uri in boosts:
        page.meta["search"] = {"boost": boosts[page.file.src_uri]}
    elif page.file.src_uri.startswith("cards/"):  # they would come first for "own reward", by their titles
        page.meta["search"] = {"exclude": True}
    if page.file.src_uri.startswith("reference/"):
        return markdown
    return render_page(markdown, page.file.src_uri, config.repo_url)


def on_page_content(html, page, config, files):
    """Keep an option in one piece, which a browser would break after its hyphens."""

    def keep(code: re.Match) -> str:
        return re.sub(r"--\w+", r'<span class="option">\g<0></span>', code[0])

    return re.sub(r"<code>[^<]*--[^<]*</code>", keep, html)


def on_post_build(config):
    """Lead from the addresses of merged pages to where their text is now."""
    for old, new in {"objectives": "method", "status": "families"}.items():
        page = Path(config.site_dir, old, "index.html")
        page.parent.mkdir()
        page.write_text(f'<meta http-equiv="refresh" content="0; url=../{new}/">\n', encoding="utf-8")

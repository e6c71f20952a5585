"""Make the generated part of the site: a page for each bug, the README as the first page, CONTRIBUTING, the schemas'
tables, the evidence, and the order of the pages.

MkDocs calls it (``hooks`` in mkdocs.yml); nothing is written into ``docs/``.

``python docs/generate.py`` writes ``docs/schemas/``, which is committed.
"""

from __future__ import annotations

import inspect
import json
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

sys.path.insert(0, str(Path(__file__).parent))

from trl_hotfix.commands.main import NAMES

import bug_pages

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

DOCS = Path(__file__).parent
CHECKOUT = DOCS.parent
SCHEMAS = DOCS / "schemas"
ORDER = (
    "faq.md",
    "promises.md",
    "reference.md",
    "json.md",
    "security.md",
    "packs.md",
    "contributing.md",
    "add-a-patch.md",
    "architecture.md",
    "glossary.md",
    "changelog.md",
)
"""Of those that are there; others come after them."""

PICTURE = "![Every patch on every TRL release: proven or absent](evidence/matrix.svg)"
"""As the README has it. On the site it scrolls by itself, and leads to the page with the numbers."""

HERE = "<!-- commands -->"
"""Where docs/json.md has a section for each command."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    from mkdocs.structure.files import File

    readme, contributing = ((CHECKOUT / name).read_text(encoding="utf-8") for name in ("README.md", "CONTRIBUTING.md"))
    made = bug_pages.pages() | {"index.md": index(readme), "contributing.md": within_the_site(contributing)}
    for path, text in made.items():
        files.append(File.generated(config, path, content=text))
    evidence = CHECKOUT / "evidence"
    for picture in (evidence / "matrix.svg", evidence / "matrix.html"):
        path = picture.relative_to(CHECKOUT).as_posix()
        files.append(File.generated(config, path, abs_src_path=str(picture)))
    mine = [page.src_uri for page in files.documentation_pages() if "/" not in page.src_uri]
    others = sorted({*mine} - {"index.md", *ORDER})
    config.nav = ["index.md", {"The bugs": bug_pages.nav()}, *(each for each in ORDER if each in mine), *others]
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    if page.file.src_uri != "json.md":
        return markdown
    if HERE not in markdown:
        raise ValueError(f"docs/json.md has no line {HERE}, where the commands go")
    return markdown.replace(HERE, "\n\n".join(section(name, schema) for name, schema in schemas().items()))


def index(readme: str) -> str:
    """The README as the first page; its links are those of the site then."""
    if PICTURE not in readme:
        raise ValueError(f"the README has no line {PICTURE}")
    picture = f'<div class="wide" markdown="1">\n\n[{PICTURE}](evidence/matrix.html)\n\n</div>'
    return "---\nhide: [navigation, toc]\n---\n\n" + within_the_site(readme.replace(PICTURE, picture))


def within_the_site(text: str) -> str:
    """Return a page from the top of the checkout with the links that it has in ``docs/``."""
    return text.replace("](docs/", "](").replace("](CONTRIBUTING.md)", "](contributing.md)")


def schemas() -> dict[str, dict[str, Any]]:
    """For each command that prints JSON, the schema of it."""
    found = {}
    for name in NAMES:
        module = import_module(f"trl_hotfix.commands.{name}")
        if not hasattr(module, "Answer"):
            continue  # `run` becomes the command that it is given
        (its,), parts = msgspec.json.schema_components([module.Answer], ref_template="#/$defs/{name}")
        for part in parts.values():
            # Up to Python 3.12 a docstring keeps its indentation.
            if "description" in part:
                part["description"] = " ".join(inspect.cleandoc(part["description"]).split())
        dialect = "https://json-schema.org/draft/2020-12/schema"
        found[name] = {"$schema": dialect, "title": f"trl-hotfix {name} --json", **its, "$defs": parts}
    return found


def as_text(schema: dict[str, Any]) -> str:
    return json.dumps(schema, indent=1) + "\n"


def section(name: str, schema: dict[str, Any]) -> str:
    """A command in docs/json.md: each of its objects with a row a field."""
    blocks = [f"## {name}", f"Schema: [{name}.json](schemas/{name}.json)"]
    objects = {key: part for key, part in schema["$defs"].items() if "properties" in part}
    # What is printed first, then what it is made of.
    first = schema.get("$ref", "").rpartition("/")[2]
    for key in sorted(objects, key=lambda key: key != first):
        part = objects[key]
        blocks.append(f"**{key}.** {part.get('description', '')}")
        optional = {*part["properties"]} - {*part.get("required", ())}
        rows = [
            f"| `{field}`{' (not always)' if field in optional else ''} | {kind(its, schema['$defs'])} |"
            for field, its in part["properties"].items()
        ]
        blocks.append("\n".join(["| field | what it is |", "|---|---|", *rows]))
    return "\n\n".join(blocks)


def kind(its: dict[str, Any], parts: dict[str, Any]) -> str:
    """A type in words."""
    if "$ref" in its:
        name = its["$ref"].rpartition("/")[2]
        return kind(parts[name], parts) if "enum" in parts[name] else name
    if "enum" in its:
        return ", ".join(f"`{each}`" for each in its["enum"])
    if "const" in its:
        return f"`{its['const']}`"
    if "anyOf" in its:
        return " or ".join(kind(each, parts) for each in its["anyOf"])
    if its.get("type") == "array":
        return f"list of {kind(its.get('items', {}), parts)}"
    if its.get("type") == "object":
        return f"object of {kind(its['additionalProperties'], parts)}" if its.get("additionalProperties") else "object"
    return {"string": "text", "null": "null"}.get(its.get("type", ""), its.get("type", "anything"))


def main() -> None:
    SCHEMAS.mkdir(exist_ok=True)
    for old in SCHEMAS.glob("*.json"):
        old.unlink()
    for name, schema in schemas().items():
        (SCHEMAS / f"{name}.json").write_text(as_text(schema), encoding="utf-8")


if __name__ == "__main__":
    main()

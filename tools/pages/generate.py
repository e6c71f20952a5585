"""Make the generated part of the site.

These are a page for each bug, what the relations found, the README as the first page, the other pages at the top of
the checkout, the tables of the schemas, the evidence, and the order of the pages. MkDocs calls it (``hooks`` in
mkdocs.yml). It writes nothing into ``docs/``.

``python -m tools.pages.generate`` writes ``docs/schemas/``, which is committed.
"""

from __future__ import annotations

import inspect
import json
import re
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from trl_hotfix.catalogue import loading
from trl_hotfix.commands.main import NAMES
from trl_hotfix.relations import ledger

from bench.pages import picture
from bench.relations import record
from bench.results.matrix import matrix, rows
from tools import proof_costs
from tools.pages import bug_pages, chooser, relation_pages, your_stack

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

DOCS = Path(__file__).parents[2] / "docs"
CHECKOUT = DOCS.parent
SCHEMAS = DOCS / "schemas"
SECTIONS = {
    "Find out": (
        "five-questions.md",
        "scan.md",
        "audit.md",
        your_stack.PATH,
        "upgrade.md",
        "check.md",
        "relations.md",
        relation_pages.PATH,
        "faq.md",
    ),
    "Run it": ("platform.md", "security.md", "security-policy.md", "promises.md", "packs.md", "ranks-and-gpu.md"),
    "Reference": ("reference.md", "log.md", "json.md", "glossary.md", "changelog.md"),
    "Contribute": ("contributing.md", "code-of-conduct.md", "add-a-patch.md", "new-release.md", "architecture.md"),
}
"""The order of the pages after the quickstart and the bugs. A page that is not named comes last in the last section."""

FROM_THE_TOP = {
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security-policy.md",
    "CODE_OF_CONDUCT.md": "code-of-conduct.md",
}
"""The pages that lie at the top of the checkout, where a forge looks for them, and their names on the site."""

PICTURE = "![How much of each TRL release is repaired](docs/matrix.svg)"
"""The picture in the README. On the site it links to the page with the numbers, and the table follows it."""

EXAMPLE = DOCS / "examples" / "acme-trl-fixes"
FILE_MARK = re.compile(r"<!-- file: (\S+) -->")
"""Such a line of docs/packs.md is replaced by this file of the example."""

COMMANDS_MARK = "<!-- commands -->"
"""This line of docs/json.md is replaced by a section for each command."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    from mkdocs.structure.files import File

    readme = (CHECKOUT / "README.md").read_text(encoding="utf-8")
    pages = bug_pages.pages() | {
        relation_pages.PATH: relation_pages.page(record.read_all(), ledger.load(), loading.load()),
        your_stack.PATH: your_stack.page(config.use_directory_urls),
    }
    pages["index.md"] = index(readme, config.use_directory_urls)
    for name, path in FROM_THE_TOP.items():
        pages[path] = within_the_site((CHECKOUT / name).read_text(encoding="utf-8"))
    for path, text in pages.items():
        files.append(File.generated(config, path, content=text))
    files.append(File.generated(config, "evidence/matrix.html", content=picture.html(matrix(), rows())))
    present = {page.src_uri for page in files.documentation_pages() if "/" not in page.src_uri}
    named = {"index.md", "tour.md", "quickstart.md", *(name for names in SECTIONS.values() for name in names)}
    unordered = sorted(present - named)
    reports = sorted(page.src_uri for page in files.documentation_pages() if page.src_uri.startswith("upstream/"))
    sections: dict[str, list[Any]] = {
        title: [name for name in names if name in present] for title, names in SECTIONS.items()
    }
    sections["Contribute"] += [*unordered, {"Reports for TRL": reports}]
    config.nav = [
        "index.md",
        "tour.md",
        "quickstart.md",
        {"The bugs": bug_pages.nav()},
        *({title: pages} for title, pages in sections.items()),
    ]
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    if "/" not in page.file.src_uri:
        markdown = within_the_site(markdown)
    if page.file.src_uri == "cost-of-proof.md":
        return with_generated(markdown, proof_costs.TABLES_MARK, proof_costs.tables())
    if page.file.src_uri == "packs.md":
        return FILE_MARK.sub(lambda mark: shown(EXAMPLE, mark[1]), markdown)
    if page.file.src_uri == "json.md":
        sections = "\n\n".join(section(name, schema) for name, schema in schemas().items())
        return with_generated(markdown, COMMANDS_MARK, sections)
    return markdown


def shown(folder: Path, name: str) -> str:
    """Return a file as a block of code under its name."""
    language = {"py": "python", "yaml": "yaml", "toml": "toml"}[name.rpartition(".")[2]]
    return f"`{name}`:\n\n```{language}\n{(folder / name).read_text(encoding='utf-8')}```\n"


def with_generated(markdown: str, mark: str, generated: str) -> str:
    """Return a page with generated text at its mark. Raises ``ValueError`` if it has none."""
    if mark not in markdown:
        raise ValueError(f"the page has no line {mark}, where the generated text goes")
    return markdown.replace(mark, generated)


def index(readme: str, directory_urls: bool = False) -> str:
    """Return the README as the first page, with the links of the site and the table of trainers and releases."""
    if PICTURE not in readme:
        raise ValueError(f"the README has no line {PICTURE}")
    first_screen, rest = readme.split(PICTURE)
    head, words = first_screen.strip().split("\n", 1)
    blocks = [
        head,
        '<div class="first-screen" markdown><div markdown>',
        words.strip(),
        "</div><div markdown>",
        f"[{PICTURE}](evidence/matrix.html)",
        "</div></div>",
        chooser.html("/" if directory_urls else ".html"),
        rest.strip(),
    ]
    text = within_the_site("\n\n".join(blocks)) + "\n"
    return "---\nhide: [navigation, toc]\n---\n\n" + text


def within_the_site(text: str) -> str:
    """Return a page with the links that it has on the site. What lies above ``docs/`` is a page, or no link."""
    text = text.replace("](docs/", "](")
    for name, path in FROM_THE_TOP.items():
        text = text.replace(f"]({name}", f"]({path}").replace(f"](../{name}", f"]({path}")
    return re.sub(r"\[([^\]]+)\]\((\.\./)?\.github/[^)]+\)", r"`\1`", text)


def schemas() -> dict[str, dict[str, Any]]:
    """Return the schema of each command that prints JSON."""
    schema_of = {}
    for name in NAMES:
        module = import_module(f"trl_hotfix.commands.{name}")
        if not hasattr(module, "Answer"):
            continue  # `run` becomes the command in its arguments.
        (schema,), parts = msgspec.json.schema_components([module.Answer], ref_template="#/$defs/{name}")
        for part in parts.values():
            # Up to Python 3.12 a docstring keeps its indentation.
            if "description" in part:
                part["description"] = " ".join(inspect.cleandoc(part["description"]).split())
        dialect = "https://json-schema.org/draft/2020-12/schema"
        words = " ".join([name, *getattr(module.command, "commands", ())])
        schema_of[name] = {"$schema": dialect, "title": f"trl-hotfix {words} --json", **schema, "$defs": parts}
    return schema_of


def as_text(schema: dict[str, Any]) -> str:
    return json.dumps(schema, indent=1) + "\n"


def section(name: str, schema: dict[str, Any]) -> str:
    """Return the section of a command in docs/json.md: a table for each of its objects, a row for each field."""
    blocks = [f"## {name}", f"Schema: [{name}.json](schemas/{name}.json)"]
    objects = {key: part for key, part in schema["$defs"].items() if "properties" in part}
    # The object that is printed comes first, and its parts follow.
    first = schema.get("$ref", "").rpartition("/")[2]
    for key in sorted(objects, key=lambda key: key != first):
        part = objects[key]
        blocks.append(f"**{key}.** {part.get('description', '')}")
        optional = {*part["properties"]} - {*part.get("required", ())}
        rows = [
            f"| `{field}`{' (not always)' if field in optional else ''} | {kind(field_schema, schema['$defs'])} |"
            for field, field_schema in part["properties"].items()
        ]
        blocks.append("\n".join(["| field | what it is |", "|---|---|", *rows]))
    return "\n\n".join(blocks)


def kind(schema: dict[str, Any], parts: dict[str, Any]) -> str:
    """Return a type in words."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return kind(parts[name], parts) if "enum" in parts[name] else name
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if "const" in schema:
        return f"`{schema['const']}`"
    if "anyOf" in schema:
        return " or ".join(kind(alternative, parts) for alternative in schema["anyOf"])
    if schema.get("type") == "array":
        return f"list of {kind(schema.get('items', {}), parts)}"
    if schema.get("type") == "object":
        values = schema.get("additionalProperties")
        return f"object of {kind(values, parts)}" if values else "object"
    return {"string": "text", "null": "null"}.get(schema.get("type", ""), schema.get("type", "anything"))


def main() -> None:
    SCHEMAS.mkdir(exist_ok=True)
    for old in SCHEMAS.glob("*.json"):
        old.unlink()
    for name, schema in schemas().items():
        (SCHEMAS / f"{name}.json").write_text(as_text(schema), encoding="utf-8")


if __name__ == "__main__":
    main()

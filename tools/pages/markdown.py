"""Markdown of plain text: what looks like code is set as code, papers and threads of TRL are linked."""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from trl_hotfix.catalogue import modules
from trl_hotfix.model import Patch

MARKED = re.compile(
    r"""(?P<link> arXiv:(?P<paper>\d{4}\.\d{4,5}) | (?P<kind>[Pp]ull\ request|[Ii]ssue)\ (?P<number>\d+) )
    | (?<![\w.]) (?:
        [A-Za-z_]\w*(?:\.\w+)*=(?:"[^"]*"|\([^)]*\)|\w[\w.\-]*\w|\w)   # name=value
      | [A-Za-z_]\w*(?:\.\w+)*\((?:\w+=[^()]*)?\)                        # call(), call(with=it)
      | (?:[A-Za-z_]\w*\.)*(?:[A-Za-z]\w*)?_\w+(?:\.\w+)*                # has_underscores, of.its.own
      | [A-Z]\w+(?:Trainer|Config|Collator|Callback|Error)\b
    )""",
    re.VERBOSE,
)
"""Matches what is marked in a text: a paper, a thread of TRL's repository, and text that looks like code."""


def docstring(patch: Patch) -> str:
    """Return the docstring of the module of a patch. Raises ``FileNotFoundError``."""
    spec = find_spec(modules.module_of(patch.id))
    if spec is None or spec.origin is None:
        raise FileNotFoundError(f"{patch.id} has no module {modules.module_of(patch.id)}")
    return ast.get_docstring(ast.parse(Path(spec.origin).read_text(encoding="utf-8"))) or ""


def from_docstring(text: str) -> Iterator[str]:
    """Yield the blocks of a docstring as Markdown: paragraphs, lists of ``- ``, and formulas, which are indented."""
    for block in text.split("\n\n"):
        lines = block.strip("\n").splitlines()
        if all(line.startswith("    ") for line in lines):
            yield fenced("text", textwrap.dedent("\n".join(lines)))
        elif lines[0].startswith("- "):
            items = re.split(r"\n(?=- )", "\n".join(lines))
            yield "\n".join(f"- {_quoted(item.removeprefix('- '))}" for item in items)
        else:
            yield _quoted("\n".join(lines))


def _quoted(text: str) -> str:
    """Return text as Markdown in which code stands between double backticks."""
    pieces = re.split(r"``(.+?)``", text, flags=re.DOTALL)
    return "".join(_code(piece) if index % 2 else prose(piece) for index, piece in enumerate(pieces))


def prose(text: str) -> str:
    """Return plain text as Markdown: what looks like code is set as code, papers and threads of TRL are linked."""
    text = re.sub(r"\s+", " ", text)
    pieces, end = [], 0
    for match in MARKED.finditer(text):
        pieces.append(escaped(text[end : match.start()]))
        pieces.append(_link(match) if match["link"] else _code(match[0]))
        end = match.end()
    return "".join([*pieces, escaped(text[end:])])


def _link(match: re.Match[str]) -> str:
    if match["paper"]:
        return f"[arXiv:{match['paper']}](https://arxiv.org/abs/{match['paper']})"
    section = "pull" if match["kind"].lower().startswith("pull") else "issues"
    return f"[{match[0]}](https://github.com/huggingface/trl/{section}/{match['number']})"


def _code(text: str) -> str:
    return f"`` {text} ``" if "`" in text else f"`{' '.join(text.split())}`"


def escaped(text: str) -> str:
    """Return plain text that has no meaning in Markdown or HTML."""
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace("|", "&#124;")
    return re.sub(r"([\\`*_\[\]])", r"\\\1", text)


def fenced(language: str, text: str) -> str:
    """Return a block of code."""
    return f"```{language}\n{text}\n```"

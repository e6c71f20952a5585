"""Files that ask for more time and memory than there is, as hypothesis makes them: for ``scan`` and for ``audit``."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

from hypothesis import strategies as st

HEAD = "from trl import DPOConfig, DPOTrainer\nx0 = k0 = model\nargs = DPOConfig('out', beta=2)\n"
TRAINER = "trainer = DPOTrainer(model, x0, args=args, callbacks=x0, **k0)\ntrainer.train(x0)\n"

_EXPRESSIONS = ("dict(**{0}, **{0})", "{{**{0}, **{0}}}", "[{0}, {0}]", "({0},) * 40", "[*{0}, *{0}]", "{0} * {0}")
_MORE_EXPRESSIONS = ("{0}", "{0}.a", "{0}()", "{0}[0]", "{0}.to('cpu')", "{0} + {0}", "{0} if y else {0}", "f'{{{0}}}'")
_AROUND = ("({})", "[{}]", "-{}", "not {}", "f({})", "lambda: {}", "[{} for y in z]", "{{**{}}}", "x0 if {} else y")
_BEHIND = (".a", "()", "[0]", ".a()", ".to(x)", "(x0)", "[x0]", " + x0", " * 9", ", x0", " and x0", "; x0 = x0", "\nx0")
_LITERALS = ("'{}'", "b'{}'", "0x{}", "{}", "1{}", "'a' * 1{}", "10 ** 1{}", "f'{{x0:{}}}'", "x{}", "-1.{}", "{}j")
_LINES = (
    "x0 = {0}",
    "x0 = x0 * 9 + {0}",
    "args = args",
    "args.k{0} = {0}",
    "args.beta = {0}",
    "print(args)",
    "f(args, {0})",
    "setattr(args, 'k{0}', {0})",
    "alias{0} = args",
    "args = alias = args",
    "kept = {{'a': args, 'b': kept}}",
    "k0['k{0}'] = {0}",
    "k0.update(k0)",
    "model.config.a = x0",
    "a, b = b, a",
    "x0, (model, *args) = model, x0",
    "from m{0} import *",
    "import m{0} as m{0}",
    "from .m{0} import DPOTrainer",
    "for x0 in x0: args.beta = x0",
    "if x0: args = DPOConfig(beta={0})",
    "with x0 as args: pass",
    "trainer = DPOTrainer(model, args=args)",
    "trainer = DPOTrainer(model, args=DPOConfig(*x0, **k0))",
    "trainer.add_callback(x0)",
    "if x0: trainer.add_callback(C{0}())",
    "trainer.args.beta = {0}",
    "trainer.train(resume_from_checkpoint=x0)",
    "def f{0}(x0): return DPOTrainer(x0, args=args)",
    "f{0}(args)",
    "DPOTrainer.beta = {0}",
    "class DPOTrainer(DPOTrainer): beta = {0}",
    "class C{0}(DPOTrainer, C{0}):\n    def __init__(self, *a, **k): super().__init__(*a, **k)",
    "DPOConfig.k{0} = {0}",
    "exec(x0)",
    "global x0",
    "(x0 := {0})",
)


def _levels(name: str, expression: str, count: int) -> str:
    """Assign to each name what is made of the one before it."""
    lines = [f"{name}{level} = {expression.format(f'{name}{level - 1}')}" for level in range(1, count)]
    return "\n".join([*lines, f"{name}0 = {name}{count - 1}", ""])


def _part(draw: st.DrawFn) -> str:
    most = draw(st.sampled_from([4, 60, 1_000, 12_000, 60_000]))
    count = draw(st.integers(most // 4, most))
    kind = draw(st.sampled_from(["levels", "around", "behind", "literal", "lines", "lines", "elements", "body"]))
    if kind == "levels":
        return _levels(draw(st.sampled_from("xk")), draw(st.sampled_from(_EXPRESSIONS + _MORE_EXPRESSIONS)), count + 2)
    if kind == "around":
        before, _, after = draw(st.sampled_from(_AROUND)).replace("{{", "{").replace("}}", "}").partition("{}")
        return f"x0 = {before * count}x0{after * count}\n"
    if kind == "behind":
        begun = draw(st.sampled_from(["x0", "args", "trl", "DPOTrainer"]))
        return f"x0 = {begun}{draw(st.sampled_from(_BEHIND)) * count}\n"
    if kind == "literal":
        return f"x0 = {draw(st.sampled_from(_LITERALS)).format(draw(st.sampled_from('079ae_')) * (count * 4))}\n"
    if kind == "elements":
        element = draw(st.sampled_from(["x0", "args", "1", "'a'", "(x0, args)", "DPOTrainer(args)", "f(args)"]))
        return (
            f"{draw(st.sampled_from(['x0 = [', 'f(', 'x0 = DPOTrainer(', 'DPOConfig(']))}{f'{element}, ' * count}"[:-2]
            + "\n"
        )
    lines = draw(st.lists(st.sampled_from(_LINES), min_size=1, max_size=3))
    text = "".join(f"{line}\n".format(number) for number in range(count // len(lines)) for line in lines)
    if kind == "body":
        indented = "".join(f"    {line}\n" for line in text.splitlines())
        head = draw(st.sampled_from(["def main():", "for y in z:", "class DPOConfig(DPOConfig):", "if x0:"]))
        return f"{head}\n{indented}main()\n"
    return text


@st.composite
def scripts(draw: st.DrawFn) -> str:
    """Return a script of hostile parts, which makes a trainer at its end."""
    parts = [_part(draw) for _ in range(draw(st.integers(1, 3)))]
    return HEAD + "".join(parts) + TRAINER


def _bomb(draw: st.DrawFn, inner: Callable[[int], str]) -> str:
    count, width = draw(st.integers(1, 60)), draw(st.integers(1, 60))
    merged = draw(st.booleans())
    lines = ["a0: &a0 {x: 1}"]
    for level in range(1, count):
        aliases = ", ".join([f"*a{level - 1}"] * width)
        lines.append(f"a{level}: &a{level} {{<<: [{aliases}]}}" if merged else f"a{level}: &a{level} [{aliases}]")
    return "\n".join([*lines, inner(count - 1)])


def _wide(draw: st.DrawFn) -> str:
    count = draw(st.sampled_from([10, 3_000, 20_000]))
    line = draw(
        st.sampled_from(["k{0}: {0}", "k: 1", "- {0}", "k{0}: [[], {{}}]", "? [{0}]\n: 1", "k{0}: &a{0} 1", "#", "'"])
    )
    return "".join(f"{line}\n".format(number) for number in range(count))


def _deep(draw: st.DrawFn, signs: tuple[str, ...]) -> str:
    return draw(st.sampled_from(signs)) * draw(st.sampled_from([10, 900, 9_000, 60_000, 700_000]))


@st.composite
def configs(draw: st.DrawFn) -> str:
    """Return the YAML of a config of TRL's command line."""
    kind = draw(st.sampled_from(["bomb", "wide", "deep", "long"]))
    if kind == "bomb":
        return _bomb(draw, lambda last: f"packing: true\nlearning_rate: *a{last}\n")
    if kind == "wide":
        return _wide(draw) + "packing: true\n"
    if kind == "deep":
        return "packing: " + _deep(draw, ("[", "{", "[[],", "{a: ", "- ", "? ", "!!set ", "&a ", "'"))
    return f"packing: true\nlearning_rate: {_deep(draw, ('9', 'a', '0x', '1_', ':59', ' '))}\n"


@st.composite
def notebooks(draw: st.DrawFn) -> str:
    """Return the JSON of a notebook, of which a cell may be a script."""
    kind = draw(st.sampled_from(["script", "lines", "deep", "cells"]))
    if kind == "deep":
        return '{"cells": [' + _deep(draw, ("[", "[],", '{"a":', "{},", "1,", "1.5,", '"a",', '{"a":1},'))
    if kind == "script":
        sources = [draw(scripts())]
    elif kind == "cells":
        sources = [draw(st.sampled_from(["x = 1", "%%bash", "", "%run a", "DPOTrainer(1)"]))] * 20_000
    else:
        signs = st.sampled_from([" ", "a", "a.", "a,", "\t", "%", "?", "\n", " \n"])
        sources = [draw(signs) * 300_000 + draw(st.sampled_from(["", "%", "?", "= %x", "= ?", "x %"]))]
    return json.dumps({"cells": [{"cell_type": "code", "source": source} for source in sources]})


@dataclass(frozen=True)
class Hostile:
    """The words of a command line, with ``BAD`` for the file of this name and text, or ``FOLDER`` for its folder."""

    words: str
    name: str
    text: str


@st.composite
def scanned(draw: st.DrawFn) -> Hostile:
    """Return a command line of ``scan``."""
    name, strategy = draw(
        st.sampled_from([("a.py", scripts()), ("a.py", scripts()), ("a.ipynb", notebooks()), ("a.yaml", configs())])
    )
    words = draw(st.sampled_from(["text", "text", "json", "sarif", "github"]))
    return Hostile(f"scan --trl 1.0.0 --format {words} BAD", name, draw(strategy))


_PINS = (
    "trl=={1}0.16.1",
    "trl==0.16.1+{1}",
    "p{0}==1.{0}",
    "trl[{1}]==0.16.1",
    "trl==0.16.1; {1}",
    "p{0}==1 \\",
    "{1}==1",
    "# {1}",
    "",
    "p{0} @ {1}",
    "p{0}>=1,!={1}",
)
_ENTRIES = ('[[package]]\nname = "p{0}"\nversion = "{0}"', "[[package]]", 'name = "{1}"', 'version = "1{1}"', "[")
_CARD = ("- TRL: {1}", "- TRL{1}", "- TRL: 0.16.1{1}", "-{1}", "- TRL: 0.16.1", "- Transformers: 4.{0}", "\n")
_HITS = ("problem", "hit", "patch")


def _repeated(draw: st.DrawFn, lines: tuple[str, ...]) -> str:
    """Return lines of which each is long, or of which there are many."""
    count = draw(st.sampled_from([1, 50, 9_000, 90_000]))
    text = draw(st.sampled_from(["1", "a", " ", "(", "1.", "a,", "\t", "'"])) * draw(st.integers(0, 900_000 // count))
    chosen = draw(st.lists(st.sampled_from(lines), min_size=1, max_size=3))
    return "".join(f"{line}\n".format(number, text) for number in range(count) for line in chosen)


def _record(draw: st.DrawFn) -> str:
    count = draw(st.sampled_from([1, 300, 9_000]))
    text = draw(st.sampled_from(["a", "a b ", "\x1b"])) * draw(st.integers(0, 300_000 // count))
    hit = {"id": text, "severity": "wrong-loss", "answer": "hit", "symptom": text, "because": [text], "unknown": []}
    patch = {"id": text, "word": "repaired"}
    return json.dumps(
        {
            "trl": "0.16.1",
            "hits": [{**hit, "id": f"{text}{number}"} for number in range(count)] if draw(st.booleans()) else [],
            "patches": [patch] * count,
            "problems": [text] * count,
        }
    )


@st.composite
def audited(draw: st.DrawFn) -> Hostile:
    """Return a command line of ``audit``."""
    name = draw(st.sampled_from(["r.txt", "r.txt", "uv.lock", "r.yml", "r.json", "README.md", "trl_hotfix.json"]))
    if name == "r.txt":
        text = _repeated(draw, _PINS) + "trl==0.16.1\n"
    elif name == "uv.lock":
        text = _repeated(draw, _ENTRIES) + '[[package]]\nname = "trl"\nversion = "0.16.1"\n'
    elif name == "r.yml":
        text = draw(
            st.sampled_from(
                [_wide(draw), _bomb(draw, lambda last: f"dependencies: *a{last}\n"), _deep(draw, ("[", "- "))]
            )
        )
    elif name == "README.md":
        text = _repeated(draw, _CARD) + "- TRL: 0.16.1\n"
    elif name == "r.json":
        text = (
            "[" + _deep(draw, ('{"name": "trl", "version": "0.16.1"},', "[", "[],", "1.5,", '{"":{}},', '{"a":')) + "1]"
        )
    else:
        text = _record(draw)
    place = "FOLDER" if name in ("README.md", "trl_hotfix.json") else "BAD"
    return Hostile(f"audit {draw(st.sampled_from(['', '--json ']))}{place}", name, text)

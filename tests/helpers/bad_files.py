"""Files that are damaged, too large, or made to do harm, by the suffix of what they claim to be."""

from __future__ import annotations

import json
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path

ESCAPE = "\x1b[31mred\x07\n"
LARGE = 1 << 30
DEEP = 20_000


def _text(text: str) -> Callable[[Path], object]:
    return lambda path: path.write_text(text, encoding="utf-8", errors="surrogateescape")


def _sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(LARGE)


def _python_tags(path: Path) -> None:
    path.write_text(f"packing: !!python/object/apply:os.system ['touch {path.parent / 'ran'}']\ntrl: 1\n")


def bomb(levels: int = 12, merge: bool = False) -> str:
    """Return YAML of a kilobyte that expands to a billion values and more."""
    lines = ["a0: &a0 {x: 1}" if merge else "a0: &a0 [x, x]"]
    for level in range(1, levels):
        aliases = ", ".join([f"*a{level - 1}"] * 9)
        lines.append(f"a{level}: &a{level} {{<<: [{aliases}]}}" if merge else f"a{level}: &a{level} [{aliases}]")
    return "\n".join([*lines, "packing: true", f"learning_rate: *a{levels - 1}", ""])


class _Runs:
    """A pickle that would run a command."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {self.path}",)


def _pickle(path: Path) -> None:
    path.write_bytes(pickle.dumps(_Runs(path.parent / "ran")))


def _zip_bomb(path: Path) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("training_args/data.pkl", b"\0" * (1 << 26))
        archive.writestr("trl-0.16.1.dist-info/METADATA", b"Name: trl\n")
        archive.writestr("trl/trainer/dpo_trainer.py", b"#" * (1 << 26))
        archive.writestr("trl/__init__.py", "")


RED = "\x1b[31mred\x07"
_ENTRY = {"id": RED, "revision": 1, "options": {RED: RED}, "word": RED, "called": 10**18, "acted": 1, "reason": RED}
_HIT = {
    "id": RED,
    "severity": "wrong-loss",
    "answer": "hit",
    "symptom": RED,
    "because": [RED],
    "unknown": [RED],
    "state": RED,
    "reason": RED,
}
_RECORD = {
    "schema": 2,
    "patches": [_ENTRY, {**_ENTRY, "id": "x" * 9_000}],
    "unreached": [_ENTRY],
    "reverted": [_ENTRY],
    "hits": [_HIT, {**_HIT, "answer": "cannot tell"}],
    "problems": [RED, f"{RED}: {RED}"],
    "trl": RED,
    "trl_hotfix": RED,
    "digest": RED,
    "packs": {RED: RED},
}


def _wheel(names: dict[str, bytes]) -> Callable[[Path], object]:
    def write(path: Path) -> None:
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in names.items():
                archive.writestr(name, content)

    return write


def _damaged(path: Path) -> None:
    """Write a wheel whose module has not the bytes that its checksum is of."""
    trl = {"trl-0.16.1.dist-info/METADATA": b"", "trl/trainer/dpo_trainer.py": b"# the module\n"}
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in trl.items():
            archive.writestr(name, content)
    path.write_bytes(path.read_bytes().replace(b"# the module", b"# no module?"))


def _of_class(name: str, state: bytes = b"}") -> bytes:
    """Return a pickle of an object of a class of TRL's, with this state."""
    return b"\x80\x02ctrl.trainer.dpo_config\n" + name.encode() + b"\n)\x81" + state + b"b."


def _arguments(content: bytes) -> Callable[[Path], object]:
    def write(path: Path) -> None:
        path.write_bytes(content)
        (path.parent / "README.md").write_text("- TRL: 0.16.1\n")

    return write


def _within_itself(levels: int) -> bytes:
    """Return the code of a list of two lists, which are one, of two lists, and so on."""
    return b"]" + b"".join(b"q\x00](h\x00h\x00e" for _ in range(levels))


_TEXT = b"X\x0a\x00\x00\x00\x1b[31mred\x07\n"
_BEGUN = b"}X\x04\x00\x00\x00beta"

ANYWHERE: dict[str, Callable[[Path], object]] = {
    "absent": lambda path: None,
    "empty": _text(""),
    "a folder": lambda path: path.mkdir(),
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a link to nothing": lambda path: path.symlink_to("nowhere"),
    "a pipe": os.mkfifo,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "huge": _sparse,
    "no utf-8": lambda path: path.write_bytes(b"trl: \xff\xfe\x80\n" * 9),
    "binary": lambda path: path.write_bytes(bytes(range(256)) * 9),
    "deep": _text("[" * 200_000),
    "deep and closed": _text("[" * 50_000 + "]" * 50_000),
    "control characters": _text(ESCAPE * 9),
    "a pickle": _pickle,
    "an archive": _zip_bomb,
}
"""What any command may be given as any file."""

OF_SUFFIX: dict[str, dict[str, Callable[[Path], object]]] = {
    ".py": {
        "attributes": _text(f"from trl import DPOTrainer\nx = DPOTrainer{'.a' * DEEP}\nDPOTrainer(x)\n"),
        "sums": _text(f"from trl import DPOTrainer\nx = 1{'+1' * DEEP}\nDPOTrainer(args=x)\n"),
        "signs": _text(f"x = {'-' * DEEP}1\n"),
        "calls": _text(f"from trl import DPOTrainer\nx = DPOTrainer{'()' * DEEP}\n"),
        "blocks": _text("".join(f"{' ' * level}if x:\n" for level in range(99)) + " " * 99 + "pass\n"),
        "branches": _text("from trl import DPOTrainer\nif x: pass\n" + "elif x: pass\n" * 3_000 + "DPOTrainer()\n"),
        "long": _text("from trl import DPOTrainer\n" + "x = DPOTrainer()\n" * 20_000),
        "longer": _text("x = 1\n" * 2_000_000),
        "itself": _text("from trl import DPOTrainer\nx = y\ny = x\nx = [x, y]\nDPOTrainer(args=x, beta=y)\n"),
        "numbers": _text(f"from trl import DPOTrainer\nDPOTrainer(beta={'9' * 5_000})\n"),
        "powers": _text("from trl import DPOTrainer\nDPOTrainer(beta=9**9**9**9, x='a' * 10**12)\n"),
        "names": _text("from trl import DPOTrainer\nDPOTrainer(loss_type='\\x1b[31m', beta='\x1b[31mred\x07')\n"),
    },
    ".ipynb": {
        "no cells": _text("{}"),
        "cells of nothing": _text('{"cells": 1}'),
        "a cell of numbers": _text('{"cells": [{"cell_type": "code", "source": [1, [2]]}]}'),
        "magics": _text('{"cells": [{"cell_type": "code", "source": "%%' + "\\u001b[31m" + '\\nx"}]}'),
        "numbers": _text('{"cells": ' + "9" * 5_000 + "}"),
    },
    ".yaml": {
        "a bomb": _text(bomb()),
        "a bomb of merges": _text(bomb(merge=True)),
        "tags": _python_tags,
        "itself": _text("packing: &a [*a]\n"),
        "itself as a key": _text("? &a [*a]\n: 1\n"),
        "a key": _text("packing: true\n? [a, b]\n: 1\n"),
        "numbers": _text(f"packing: true\nlearning_rate: {'9' * 5_000}\n"),
        "sexagesimal": _text(f"packing: true\nlearning_rate: 1{':59' * 20_000}\n"),
        "days": _text("packing: 2001-99-99\n"),
        "two": _text("packing: true\n---\npacking: false\n"),
        "names": _text('packing: true\n"\\e[31mred": "\\e[31m\\a"\nloss_type: "\\e[31mred\\a"\n'),
        "long": _text("".join(f"k{number}: {number}\n" for number in range(100_000))),
    },
    ".json": {
        "a number": _text("1"),
        "text": _text('"x"'),
        "null": _text("null"),
        "numbers": _text('{"trl": ' + "9" * 5_000 + "}"),
        "a record": _text(json.dumps(_RECORD)),
        "hits": _text('{"patches": [], "hits": 1}'),
        "other hits": _text('{"patches": [], "hits": [{"id": 1}]}'),
        "nested": _text('{"a":' * 50_000 + "1" + "}" * 50_000),
    },
    ".bin": {
        "of any class": _arguments(_of_class("DPOConfig")),
        "of a hostile class": _arguments(_of_class(RED)),
        "texts": _arguments(_of_class("DPOConfig", _BEGUN + _TEXT + b"s}" + _TEXT + _TEXT + b"s\x86")),
        "lists within lists": _arguments(_of_class("DPOConfig", _BEGUN + _within_itself(60) + b"s")),
        "deeper": _arguments(_of_class("DPOConfig", _BEGUN + b"]" * 100_000 + b"a" * 99_999 + b"s")),
        "a large number": _arguments(
            _of_class("DPOConfig", _BEGUN + b"\x8b\xff\xff\x00\x00" + b"\x11" * 0xFFFF + b"s")
        ),
        "a number of an object": _arguments(b"\x80\x02]r\xff\xff\xff\x7f."),
        "a length": _arguments(b"\x80\x05\x96\x00\x00\x00\x00\x10\x00\x00\x00."),
        "a length of text": _arguments(b"\x80\x04\x8d\x00\x00\x00\x00\x10\x00\x00\x00."),
        "a frame": _arguments(b"\x80\x04\x95\x00\x00\x00\x00\x10\x00\x00\x00."),
        "classes": _arguments(b"\x80\x02" + b"".join(b"ca\n%d\n0" % number for number in range(90_000)) + b"]."),
        "objects": _arguments(b"\x80\x02(" + b")" * 900_000 + b"t."),
        "another": _arguments(pickle.dumps({"beta": 1})),
        "cut": _arguments(_of_class("DPOConfig")[:-2]),
    },
    ".md": {
        "numbers": _text(f"- TRL: {'9' * 5_000}\n"),
        "no version": _text("- TRL: x.y\n"),
        "long": _text("- TRL: 0.16.1" + " " * 4_000_000),
        "longer": _text("- TRL: 0.16.1\n" * 200_000),
    },
    ".whl": {
        "no Python": _wheel({"trl-0.16.1.dist-info/x": b"", "trl/trainer/dpo_trainer.py": b"def f(:\n"}),
        "no text": _wheel({"trl-0.16.1.dist-info/x": b"", "trl/trainer/dpo_trainer.py": b"x = '\xff'\n"}),
        "deep Python": _wheel(
            {"trl-0.16.1.dist-info/x": b"", "trl/trainer/dpo_trainer.py": b"x = " + b"-" * DEEP + b"1"}
        ),
        "damaged": _damaged,
        "two": _wheel({"trl-0.16.1.dist-info/x": b"", "trl-0.17.0.dist-info/x": b""}),
        "no version": _wheel({"trl-x.dist-info/x": b"", "trl/__init__.py": b""}),
        "names": _wheel({f"trl-{RED}.dist-info/x": b"", "trl/__init__.py": b""}),
        "numbers": _wheel({f"trl-{'9' * 900}.dist-info/x": b"", "trl/__init__.py": b""}),
        "folders": _wheel({"trl-0.16.1.dist-info/x": b"", "a/" * 20_000 + "x": b""}),
        "files": _wheel({"trl-0.16.1.dist-info/x": b"", **{f"trl/{number}": b"" for number in range(20_000)}}),
    },
    ".txt": {
        "numbers": _text(f"trl=={'9' * 5_000}\n"),
        "names": _text("trl==0.16.1\ntransformers==4.50.3\x1b[31m\n\x1b[31mred==1\n"),
        "continued": _text("\\\n" * 200_000),
        "words": _text("trl[" + "a," * 100_000 + "]==0.16.1\n"),
        "markers": _text("trl==0.16.1; " + "(" * 20_000 + "\n"),
    },
    ".lock": {"numbers": _text(f'[[package]]\nname = "trl"\nversion = "{"9" * 5_000}"\n')},
}
"""What is bad in a file of this suffix alone."""


def of_suffix(suffix: str) -> dict[str, Callable[[Path], object]]:
    """Return every kind of bad file for a suffix. Each writes the file."""
    return {**ANYWHERE, **OF_SUFFIX.get(suffix, {})}

"""A script that trains is never said to make no trainer: a trainer is followed, or its use is uncertain."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from pathlib import Path

import pytest

from trl_hotfix.catalogue.conditions import Kind
from trl_hotfix.scanning.found import Cells, TrainerCall, Unseen
from trl_hotfix.scanning.scripts import read

Found = tuple[list[TrainerCall], list[Unseen], Cells]


def found(tmp_path: Path, text: str, files: Mapping[str, str] | None = None) -> Found:
    for name, content in (files or {}).items():
        file = tmp_path / f"{name}.py"
        file.parent.mkdir(exist_ok=True)
        file.write_text(textwrap.dedent(content))
    file = tmp_path / "train.py"
    file.write_text(textwrap.dedent(text))
    return read(file)[:3]


HEAD = """\
import trl, functools, importlib
from functools import partial
from trl import DPOTrainer, SFTConfig, SFTTrainer
"""


@pytest.mark.parametrize(
    "text",
    [
        "make = partial(SFTTrainer, model='m')\nmake(args=SFTConfig(packing=True))",
        "make = functools.partial(SFTTrainer, args=SFTConfig(packing=True))\nmake('m')",
        "partial(SFTTrainer, 'm', SFTConfig(packing=False))(args=SFTConfig(packing=True))",
        "partial(partial(SFTTrainer, 'm'), args=SFTConfig(packing=True))()",
        "TRAINERS = {'sft': SFTTrainer, 'dpo': DPOTrainer}\nTRAINERS['sft']('m', args=SFTConfig(packing=True))",
        "TRAINERS = {'sft': trl.SFTTrainer}\nTRAINERS.get('sft')('m', args=SFTConfig(packing=True))",
        "T = {'sft': SFTTrainer}['sft']\nT('m', args=SFTConfig(packing=True))",
        "getattr(trl, 'SFTTrainer')('m', args=SFTConfig(packing=True))",
        "T = getattr(trl, 'SFTTrainer')\nT('m', args=SFTConfig(packing=True))",
        "m = importlib.import_module('trl')\nm.SFTTrainer('m', args=SFTConfig(packing=True))",
        "def chosen():\n    return SFTTrainer\nchosen()('m', args=SFTConfig(packing=True))",
        "A = SFTTrainer\nB = A\nC = B\nC('m', args=SFTConfig(packing=True))",
        "from typing import cast\ncast(type, SFTTrainer)('m', args=SFTConfig(packing=True))",
    ],
)
def test_what_the_text_tells_is_followed(tmp_path: Path, text: str) -> None:
    (call,), unseen, _ = found(tmp_path, HEAD + text)
    assert (call.name, unseen) == ("SFT", [])
    assert call.argument("packing").value is True


@pytest.mark.parametrize(
    "text",
    [
        "register(SFTTrainer)",
        "TRAINERS = {'sft': SFTTrainer}\nTRAINERS[name]('m')",
        "TRAINERS = {'sft': SFTTrainer}\nbuild(TRAINERS)",
        "TRAINERS = [SFTTrainer]\nfor T in TRAINERS: T('m')",
        "T = SFTTrainer if x else None\nT('m')",
        "T = None\nif x:\n    T = SFTTrainer\nT('m')",
        "self.trainer_class = SFTTrainer",
        "run(trainer_class=SFTTrainer)",
        "def chosen():\n    return SFTTrainer",
        "make = partial(SFTTrainer, 'm')\nbuild(make)",
        "T = lambda *a: SFTTrainer\nT()(1)",
        "@register('sft')\nclass T(SFTTrainer): pass\nREGISTRY['sft']('m')",
        "class Base:\n    def __init_subclass__(cls): ALL.append(cls)\nclass T(Base, SFTTrainer): pass\nALL[0]('m')",
        "class T(SFTTrainer, metaclass=Keeping): pass\nKNOWN[0]('m')",
        "T = type('T', (SFTTrainer,), {})\nT('m')",
        "class T(SFTTrainer):\n    @classmethod\n    def of(cls, recipe): return cls(recipe.model)\nT.of(recipe)",
        "class T(SFTTrainer): pass\nSFTTrainer.__subclasses__()[0]('m')",
    ],
)
def test_a_use_of_which_the_text_does_not_tell_more_is_uncertain(tmp_path: Path, text: str) -> None:
    calls, unseen, _ = found(tmp_path, HEAD + text)
    assert not calls
    assert [reason for _, reason in unseen] == [
        f"line {unseen[0].line} uses TRL's SFTTrainer, and scan cannot see where the script makes one"
    ]
    assert unseen[0].line >= 4


@pytest.mark.parametrize(
    "text",
    [
        "getattr(trl, f'{name}Trainer')('m')",
        "T = getattr(trl, name)\nT('m')",
        "vars(trl)[name]('m')",
        "trl.__dict__[name]('m')",
        "importlib.import_module(f'trl.{name}').X('m')",
        "m = importlib.import_module('trl')\ngetattr(m, name)('m')",
        "globals()[f'{name}Trainer']('m')",
        "locals().get(name)('m')",
        "eval(f'{name}Trainer')('m')",
        "exec('DPOTrainer(1)')",
        "load('trl.SFTTrainer')('m')",
        "job = {'class': 'trl.trainer.sft_trainer.SFTTrainer'}\nbuild(job)",
    ],
)
def test_a_name_of_trl_that_is_made_at_run_time_is_uncertain(tmp_path: Path, text: str) -> None:
    calls, ((line, reason),), _ = found(tmp_path, HEAD + text)
    assert not calls
    assert line >= 4
    assert reason == f"a name of TRL is looked up at line {line}, and the text does not say which"


@pytest.mark.parametrize(
    "text",
    [
        "def f(trainer: SFTTrainer) -> SFTTrainer: pass",
        "x: type[SFTTrainer] | None = None",
        "isinstance(x, SFTTrainer)",
        "print(trl.__version__, SFTTrainer, getattr(trl, '__version__', None))",
        "class MyTrainer(SFTTrainer):\n    def f(self): return super(SFTTrainer, self).f()",
        "SFTTrainer.compute_loss = compute_loss\nSFTTrainer.train(x)",
        "import importlib.metadata\nimportlib.metadata.version('trl')",
        "if x == SFTTrainer: pass",
        "from transformers import Trainer\nTrainer('m')",
        "trl.trainer.utils.pad(1)\nx = trl.get_peft_config(x)",
        "inspect.signature(SFTTrainer)",
        "import typing\n@typing.final\nclass T(SFTTrainer): pass",
        "class T(SFTTrainer):\n    @classmethod\n    def name(cls): return cls.__name__",
        "globals()['x'] = 1\neval('2 + 2')",
        "mock.patch('trl.SFTTrainer')\nprint('a trl.SFTTrainer', 'trl.trainer')",
    ],
)
def test_what_makes_no_trainer_is_not_uncertain(tmp_path: Path, text: str) -> None:
    calls, unseen, _ = found(tmp_path, HEAD + text)
    assert (calls, unseen) == ([], [])


@pytest.mark.parametrize(
    "rebound",
    ["from mine import *\n", "if x:\n    SFTTrainer = patched(SFTTrainer)\n", "SFTTrainer = wrap(SFTTrainer)\n"],
)
def test_a_trainer_that_may_be_another_is_uncertain(tmp_path: Path, rebound: str) -> None:
    calls, unseen, _ = found(tmp_path, f"from trl import SFTTrainer\n{rebound}SFTTrainer('m')\n")
    assert not calls
    assert unseen


def test_a_class_of_a_file_beside_the_script_is_followed(tmp_path: Path) -> None:
    other = """
    from trl import SFTTrainer

    class MyTrainer(SFTTrainer):
        pass
    """
    text = "from mine import MyTrainer\nfrom trl import SFTConfig\nMyTrainer('m', args=SFTConfig(packing=True))\n"
    (call,), unseen, _ = found(tmp_path, text, {"mine": other})
    assert (call.name, call.called, call.argument("packing").value, unseen) == ("SFT", "MyTrainer", True, [])


def test_a_class_of_the_package_of_the_project_is_followed_through_its_imports(tmp_path: Path) -> None:
    files = {
        "pkg/__init__": "from .trainers import MyTrainer\n",
        "pkg/trainers": "from .base import Base\nclass MyTrainer(Base):\n    pass\n",
        "pkg/base": "from trl import DPOTrainer as Base\nfrom .trainers import MyTrainer\n",
    }
    (call,), unseen, _ = found(tmp_path, "from pkg import MyTrainer\nMyTrainer('m')\n", files)
    assert (call.name, unseen) == ("DPO", [])


def test_a_class_beside_the_script_that_may_set_arguments_leaves_them_open(tmp_path: Path) -> None:
    other = "import trl\nclass MyTrainer(trl.SFTTrainer):\n    def f(self):\n        self.args.packing = False\n"
    (call,), _, _ = found(tmp_path, "import mine\nmine.MyTrainer('m')\n", {"mine": other})
    argument = call.argument("packing")
    assert (argument.kind, argument.reason) == (Kind.UNKNOWN, "MyTrainer of mine.py may set it")


@pytest.mark.parametrize(
    ("text", "files", "expected"),
    [
        ("from mylib import MyTrainer\nMyTrainer('m')\n", {}, "MyTrainer of mylib may be a trainer of TRL"),
        ("from mine import main\nmain()\n", {"mine": "import trl\ndef main(): trl.SFTTrainer()\n"}, "mine.py"),
        (
            "from a import X\nX()\n",
            {"a": "from b import X\n", "b": "from a import X\nimport trl\ntrl.SFTTrainer()\n"},
            "b.py",
        ),
        ("from mine import T\nT('m')\n", {"mine": "import trl\nT = trl.SFTTrainer if x else None\n"}, "mine.py"),
    ],
)
def test_what_another_file_makes_is_uncertain(tmp_path: Path, text: str, files: dict[str, str], expected: str) -> None:
    calls, unseen, _ = found(tmp_path, text, files)
    assert not calls
    assert expected in unseen[0].reason


def test_a_trainer_that_a_function_of_the_script_returns_is_found(tmp_path: Path) -> None:
    text = f"{HEAD}def make():\n    return SFTTrainer('m', args=SFTConfig(packing=True))\nmake().train()\n"
    (call,), unseen, _ = found(tmp_path, text)
    assert (call.name, call.line, unseen) == ("SFT", 5, [])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("import runpy\nrunpy.run_path('impl.py')", "it starts impl.py"),
        ("import os, runpy\nrunpy.run_path(os.path.join(here, 'impl.py'), run_name='__main__')", "it starts impl.py"),
        ("exec(open('./impl.py').read())", "it starts impl.py"),
        (
            "import subprocess, sys\nsubprocess.run([sys.executable, 'impl.py', '-v'])",
            "it starts impl.py",
        ),
        ("import os\nos.system('accelerate launch --num_processes 8 impl.py')", "it starts impl.py"),
        ("import subprocess\nsubprocess.run(['trl', 'sft', '--config', path])", "it starts the command line of TRL"),
        (
            "from hydra.utils import instantiate\ninstantiate(cfg.trainer).train()",
            "instantiate() makes what",
        ),
        ("import hydra\nhydra.utils.instantiate(cfg)", "hydra.utils.instantiate() makes what its config"),
    ],
)
def test_what_a_script_starts_is_uncertain(tmp_path: Path, text: str, expected: str) -> None:
    calls, ((line, reason),), _ = found(tmp_path, text, {"impl": "import trl\ntrl.SFTTrainer('m')\n"})
    assert (calls, line) == ([], text.count("\n") + 1)
    assert expected in reason


@pytest.mark.parametrize(
    "text",
    [
        "import subprocess\nsubprocess.run(['python', 'data.py'])",
        "import subprocess\nsubprocess.run(['git', 'log', 'train.py', '/impl.py', '../impl.py'])",
        "run(['pip', 'install', 'trl'])",
    ],
)
def test_what_starts_no_trainer_is_not_uncertain(tmp_path: Path, text: str) -> None:
    files = {"impl": "import trl\ntrl.SFTTrainer('m')\n", "data": "print(1)\n"}
    assert found(tmp_path, text, files)[:2] == ([], [])

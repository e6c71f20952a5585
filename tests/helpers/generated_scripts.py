"""Scripts that are generated, and what they do: the scan's answer is held against a run of the same script.

A script sets arguments of a trainer in every way that Python has, most of them more than once. It is run with stand-ins
for TRL, which record the arguments of each trainer when it is made and when it trains.
"""

from __future__ import annotations

import contextlib
import copy
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

from hypothesis import strategies as st

from trl_hotfix.catalogue.conditions import Argument, Kind
from trl_hotfix.scanning.found import TrainerCall

CONFIG_ARGUMENTS = ("beta", "padding_free", "loss_type", "model_init_kwargs")
TRAINER_ARGUMENTS = ("ref_model", "peft_config", "callbacks")
ARGUMENTS = (*CONFIG_ARGUMENTS, *TRAINER_ARGUMENTS)
PARTS = ("model_init_kwargs.dtype", "peft_config.rank")
RESUMED = "train.resume_from_checkpoint"

HEAD = """\
import copy, dataclasses, functools, sys
import trl
from dataclasses import dataclass
from peft import LoraConfig
from trl import BEMACallback, DPOConfig, DPOTrainer

flag, size, holder, name = True, 4, [], "padding_free"
args = DPOConfig()
other = DPOConfig(beta=1)
options = {}
trainer_options = {}
callbacks = []
lora = None
def change(value, key="beta"):
    if isinstance(value, dict):
        value[key] = value["dtype"] = 7
    elif isinstance(value, list):
        value.append(BEMACallback())
    else:
        setattr(value, key, 7)
    return value
def read(value):
    return value is not None
"""

_EXPRESSIONS = (
    "True",
    "False",
    "1",
    "4",
    "None",
    "'ipo'",
    "flag",
    "size",
    "not flag",
    "size * 2",
    "read(args)",
    "['ipo', 'sft']",
)
_SIMPLE = (
    "{c} = DPOConfig({a}={v})",
    "{c} = DPOConfig({a}={v}, model_init_kwargs=dict(dtype={v}))",
    "{c} = DPOConfig(model_init_kwargs=options)",
    "{c} = trl.DPOConfig()",
    "{c} = DPOConfig(**{o})",
    "{c} = DPOConfig(**dict({a}={v}))",
    "{c} = DPOConfig(**{{'{a}': {v}}})",
    "{c} = DPOConfig(beta={v}, **({{}} if flag else {{'padding_free': {v}}}))",
    "{c} = {d}",
    "{c} = copy.copy({d})",
    "{c} = dataclasses.replace({d}, {a}={v})",
    "{c} = {d} if flag else {c}",
    "{c} = change({d})",
    "({c} := DPOConfig({a}={v}))",
    "{c}, {d} = {d}, {c}",
    "{c} = {d} = DPOConfig({a}={v})",
    "{c}.{a} = {v}",
    "{c}.{a} = {v}",
    "{c}.{a} = {d}.{a}",
    "{c}.beta += 1",
    "del {c}.{a}",
    "setattr({c}, '{a}', {v})",
    "setattr({c}, name, {v})",
    "{c}.__dict__.update({a}={v})",
    "{c}.__dict__['{a}'] = {v}",
    "vars({c})['{a}'] = {v}",
    "object.__setattr__({c}, '{a}', {v})",
    "{c}.set({a}={v})",
    "change({c})",
    "change(value={c}, key='{a}')",
    "read({c})",
    "print({c}, {c}.{a}, file=sys.stderr)",
    "assert {c} is not None",
    "functools.reduce(lambda x, y: setattr(x, '{a}', {v}), [{c}, 1])",
    "[change(item) for item in ({c},)]",
    "(lambda item: setattr(item, '{a}', {v}))({c})",
    "holder.append({c})",
    "holder[-1].{a} = {v}",
    "holder[:] = [{c}]",
    "holder = [{c}, {d}]",
    "alias = {c}",
    "alias.{a} = {v}",
    "for alias in ({c}, {d}): pass",
    "for {c}.{a} in (1, {v}): pass",
    "for size in (1, 2, 3): {c}.{a} = size",
    "exec('{c}.{a} = 5')",
    "globals()['{c}'] = {d}",
    "DPOConfig.{a} = {v}",
    "{c}.model_init_kwargs = options",
    "{c}.model_init_kwargs = {{'dtype': {v}}}",
    "{c}.model_init_kwargs['dtype'] = {v}",
    "{c}.model_init_kwargs.update(dtype={v})",
    "options = {{'{a}': {v}}}",
    "options = {{'dtype': {v}}}",
    "options = dict({a}={v})",
    "options = {{**options, '{a}': {v}}}",
    "options = options | {{'{a}': {v}}}",
    "options['{a}'] = {v}",
    "options['dtype'] = {v}",
    "options.update({a}={v})",
    "options.update({{'dtype': {v}}})",
    "options |= {{'{a}': {v}}}",
    "options.setdefault('{a}', {v})",
    "options.pop('{a}', None)",
    "options.clear()",
    "change(options)",
    "print(options.get('{a}'), len(options), '{a}' in options, file=sys.stderr)",
    "more = options",
    "more['{a}'] = {v}",
    "trainer_options = {{'args': {c}}}",
    "trainer_options = dict(args={c}, {t}={o})",
    "trainer_options['args'] = {c}",
    "trainer_options['{t}'] = {o}",
    "trainer_options.update(args={c})",
    "callbacks = [BEMACallback()]",
    "callbacks = [BEMACallback(), *callbacks]",
    "callbacks.append(BEMACallback())",
    "callbacks += [BEMACallback()]",
    "callbacks[:] = []",
    "lora = LoraConfig(rank={v})",
    "lora = None",
    "lora.rank = {v}",
    "change(lora, 'rank')",
    "flag = {v}",
    "size = {v}",
    "flag, size = size, flag",
    "size += 1",
    "name = '{a}'",
    "[flag := item for item in (1, {v})]",
    "del flag",
    "print(flag := {v}, file=sys.stderr)",
    "import copy as {c}",
    "def {c}(): pass",
)
_TRAINERS = (
    "DPOTrainer('m', args={c})",
    "DPOTrainer('m', None, {c})",
    "DPOTrainer('m', {o}, args={c})",
    "trl.DPOTrainer(model='m', args={c}, {t}={o})",
    "trl.DPOTrainer(model='m', args={c}, peft_config=lora, callbacks=callbacks)",
    "DPOTrainer('m', **trainer_options)",
    "DPOTrainer('m', args={c}, **trainer_options)",
    "DPOTrainer('m', args=DPOConfig(beta={v}, {a}={v}))",
    "DPOTrainer('m', args=DPOConfig(**options))",
    "DPOTrainer('m', args=change({c}))",
    "DPOTrainer('m', args=Mine({a}={v}))",
    "DPOTrainer('m', args=Mine())",
    "MyTrainer('m', args={c})",
    "MyTrainer('m', args={c}, {t}={o})",
    "DPOTrainer(*['m', {o}], args={c})",
    "DPOTrainer(**{{'model': 'm', 'args': {c}}})",
)
_AFTERWARDS = (
    "trainer.args.{a} = {v}",
    "trainer.add_callback(BEMACallback())",
    "trainer.add_callback(lora)",
    "change(trainer.args)",
    "change(trainer.args.model_init_kwargs)",
    "trainer.args.model_init_kwargs['dtype'] = {v}",
    "trainer.args.model_init_kwargs.update(dtype={v})",
    "print(trainer.args.{a}, file=sys.stderr)",
    "trainer.args = {c}",
    "trainer.callbacks = None",
    "trainer.train()",
    "trainer.train(resume_from_checkpoint={v})",
    "trainer.train({v})",
    "trainer.train(**options)",
    "trainer.train(trainer.args.{a})",
    "alias = trainer\nalias.train({v})",
    "trainer.train = functools.partial(trainer.train, {v})",
    "start = trainer.train\nstart(True)",
    "(lambda item: item.train(True))(trainer)",
    "holder.append(trainer)\nholder[-1].train(True)",
    "if flag:\n    trainer.train(True)",
    "pass",
)
_CLASSES = (
    "class Mine(DPOConfig):\n    {a}: object = {v}",
    "@dataclass\nclass Mine(DPOConfig):\n    {a}: object = {v}",
    "@dataclass\nclass Mine(DPOConfig):\n    {a}: object = {v}\n    def __post_init__(self):\n        self.{b} = {v}",
    "@dataclass\nclass Mine(DPOConfig):\n    {a}: object = dataclasses.field(default={v})",
    "@dataclass\nclass Mine(DPOConfig):\n    if flag:\n        {a}: object = {v}",
    "class Mine(DPOConfig):\n    {a} = {v}",
    "class Mine(DPOConfig):\n    def __init__(self, **given):\n"
    "        super().__init__(**given)\n        self.{a} = {v}",
    "class Mine(DPOConfig):\n    @property\n    def {a}(self):\n        return 9\n"
    "    @{a}.setter\n    def {a}(self, value):\n        pass",
    "def Mine(**given):\n    return DPOConfig(**given)",
    "Mine = functools.partial(DPOConfig, {a}={v})",
    "Mine = DPOConfig",
    "class MyTrainer(DPOTrainer):\n    pass",
    "class MyTrainer(DPOTrainer):\n    def train(self, *given, **named):\n        super().train(True)",
    "class MyTrainer(DPOTrainer):\n    def start(self):\n        self.train(True)",
    "class MyTrainer(DPOTrainer):\n    def __init__(self, *given, **named):\n        super().__init__(*given, **named)",
    "class MyTrainer(DPOTrainer):\n    def __init__(self, model, args=None, **named):\n        args.{a} = {v}\n"
    "        super().__init__(model, args=args, **named)",
    "class MyTrainer(DPOTrainer):\n    def __init__(self, model, **named):\n"
    "        super().__init__(model, **{{**named, 'ref_model': 1}})",
)


def _filled(templates: tuple[str, ...]) -> st.SearchStrategy[str]:
    configs = st.sampled_from(["args", "args", "args", "other"])
    objects = st.sampled_from(["None", "None", "1", "'text'", "lora", "callbacks", "options", "flag"])
    return st.builds(
        lambda template, c, d, a, b, v, t, o: template.format(c=c, d=d, a=a, b=b, v=v, t=t, o=o),
        st.sampled_from(templates),
        configs,
        configs,
        st.sampled_from(CONFIG_ARGUMENTS),
        st.sampled_from(CONFIG_ARGUMENTS),
        st.sampled_from(_EXPRESSIONS),
        st.sampled_from(TRAINER_ARGUMENTS),
        objects,
    )


def _indented(lines: list[str]) -> str:
    return "\n".join(f"    {line}" for text in lines for line in text.splitlines()) or "    pass"


def _trained() -> st.SearchStrategy[str]:
    """Make a trainer, do something to it, and train."""
    afterwards = st.lists(_filled(_AFTERWARDS), max_size=1)
    return st.builds(
        lambda made, after: "\n".join([f"trainer = {made}", *after, "trainer.train()"]), _filled(_TRAINERS), afterwards
    )


def _compound(blocks: st.SearchStrategy[list[str]]) -> st.SearchStrategy[str]:
    headers = st.sampled_from(
        [
            ("if flag:", "else:"),
            ("if size == 4:", None),
            ("if len(sys.argv) > 100:", None),
            ("if __name__ == '__main__':", None),
            ("for step in range(2):", None),
            ("for step in range(0):", "else:"),
            ("while flag:", None),
            ("try:", "except Exception:"),
            ("try:", "finally:"),
            ("with open('/dev/null') as file:", None),
        ]
    )

    def build(header: tuple[str, str | None], first: list[str], second: list[str]) -> str:
        opening, other = header
        first = [*first, "break"] if opening.startswith("while") else first
        text = f"{opening}\n{_indented(first)}"
        return text if other is None else f"{text}\n{other}\n{_indented(second)}"

    return st.builds(build, headers, blocks, blocks)


def _function(blocks: st.SearchStrategy[list[str]]) -> st.SearchStrategy[str]:
    """Define a function, and call it once, twice, or never."""
    signatures = st.sampled_from(["", "args=args", "args=None, flag=True", "*args", "size=1"])
    declared = st.sampled_from(["pass", "global args", "global flag, size", "global options", "global other"])
    outer = st.sampled_from([False, True])
    calls = st.sampled_from(["pass", "work()", "work()\nwork()", "work(args)"])

    def build(signature: str, declaration: str, nested: bool, body: list[str], call: str) -> str:
        text = f"def work({signature}):\n{_indented([declaration, *body])}"
        if nested:
            inner = f"args = DPOConfig()\n{text.replace('global args', 'nonlocal args')}\n{call}"
            return f"def outer_work(args=other):\n{_indented([inner, *body])}\nouter_work()"
        return f"{text}\n{call}"

    return st.builds(build, signatures, declared, outer, blocks, calls)


_LINES = st.one_of(_filled(_SIMPLE), _filled(_SIMPLE), _filled(_SIMPLE), _trained(), _filled(_CLASSES))
_BLOCKS = st.recursive(
    st.lists(_LINES, min_size=1, max_size=3),
    lambda blocks: st.lists(st.one_of(_LINES, _compound(blocks), _function(blocks)), min_size=1, max_size=3),
    max_leaves=4,
)


def scripts() -> st.SearchStrategy[str]:
    """Generate scripts that can be parsed. Many of them end with an error, some before a trainer is made."""
    definitions = st.lists(_filled(_CLASSES), max_size=2)
    return st.builds(
        lambda classes, before, body, after, trained: "\n".join([HEAD, *classes, *before, *body, *after, trained, ""]),
        definitions,
        st.lists(_filled(_SIMPLE), max_size=2),
        _BLOCKS,
        st.lists(_filled(_SIMPLE), max_size=1),
        _trained(),
    ).filter(_is_python)


def _is_python(text: str) -> bool:
    try:
        compile(text, "generated", "exec")
    except SyntaxError:
        return False
    return True


@dataclass
class Recorded:
    """One trainer that a script has made: the line of the call, and its arguments when it was made and trained.

    ``resumed`` has the checkpoint that each of its trainings was resumed from, None for one that was not.
    """

    line: int
    snapshots: list[dict[str, Any]] = field(default_factory=list)
    resumed: list[Any] = field(default_factory=list)


def run(text: str) -> list[Recorded]:
    """Run a script with stand-ins for TRL and PEFT, and return its trainers. An error of the script ends it."""
    recorded: list[Recorded] = []
    modules = {"trl": _trl(recorded), "peft": _peft()}
    namespace = {"__name__": "__main__"}
    with mock.patch.dict(sys.modules, modules), contextlib.suppress(Exception), _silent():
        exec(compile(text, "generated", "exec"), namespace)
    return recorded


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stderr(nowhere):
        yield


def _trl(recorded: list[Recorded]) -> ModuleType:
    module: Any = ModuleType("trl")

    @dataclass
    class DPOConfig:
        beta: Any = None
        padding_free: Any = None
        loss_type: Any = None
        model_init_kwargs: Any = None

        def set(self, **given: Any) -> None:
            self.__dict__.update(given)

    class BEMACallback:
        pass

    class DPOTrainer:
        def __init__(self, model: Any = None, ref_model: Any = None, args: Any = None, **given: Any) -> None:
            frame = sys._getframe(1)
            while frame.f_code.co_name == "__init__":
                assert frame.f_back is not None
                frame = frame.f_back
            self.args, self.ref_model = args, ref_model
            self.peft_config, self.callbacks = given.pop("peft_config", None), given.pop("callbacks", None)
            if given or not isinstance(self.callbacks, (list, type(None))):
                raise TypeError(f"unexpected {list(given)}")
            self.own = Recorded(frame.f_lineno)
            recorded.append(self.own)
            self.record()

        def record(self) -> None:
            values = {name: getattr(self.args, name, None) for name in CONFIG_ARGUMENTS}
            values |= {name: getattr(self, name) for name in TRAINER_ARGUMENTS}
            self.own.snapshots.append(copy.deepcopy(values))

        def add_callback(self, callback: Any) -> None:
            self.callbacks = [*(self.callbacks or []), callback]

        def train(self, resume_from_checkpoint: Any = None, **given: Any) -> None:
            self.own.resumed.append(None if resume_from_checkpoint is False else resume_from_checkpoint)
            self.record()

    module.DPOConfig, module.DPOTrainer, module.BEMACallback = DPOConfig, DPOTrainer, BEMACallback
    return module


def _peft() -> ModuleType:
    module: Any = ModuleType("peft")

    @dataclass
    class LoraConfig:
        rank: Any = None

    module.LoraConfig = LoraConfig
    return module


def wrong_answers(call: TrainerCall, recorded: Recorded) -> list[str]:
    """Return what the scan says of a trainer that is not so."""
    wrong = []
    for name in (*ARGUMENTS, *PARTS):
        argument = call.argument(name)
        if not is_true_of(argument, recorded, name):
            values = [_part(snapshot, name) for snapshot in recorded.snapshots]
            wrong.append(f"line {call.line}: {argument.describe(name)}; it is {values!r}")
    argument = call.argument(RESUMED)
    if not all(_is_true(argument, value) for value in recorded.resumed):
        wrong.append(f"line {call.line}: {argument.describe(RESUMED)}; it is {recorded.resumed}")
    return wrong


def is_true_of(argument: Argument, recorded: Recorded, name: str) -> bool:
    """Return whether ``argument`` is what a trainer was given, when it was made and each time that it trained."""
    # A callback that is added later counts as one that was given.
    snapshots = recorded.snapshots[-1:] if name == "callbacks" else recorded.snapshots
    return all(_is_true(argument, _part(snapshot, name)) for snapshot in snapshots)


def _part(snapshot: dict[str, Any], name: str) -> Any:
    name, _, part = name.partition(".")
    value = snapshot[name]
    if not part:
        return value
    return value.get(part) if isinstance(value, dict) else getattr(value, part, None)


def _is_true(argument: Argument, value: Any) -> bool:
    if argument.kind is Kind.UNKNOWN:
        return not argument.alternatives or any(_is_true(alternative, value) for alternative in argument.alternatives)
    if argument.kind is Kind.UNSET:
        return value is None
    if argument.kind is Kind.LITERAL:
        return type(argument.value) is type(value) and bool(argument.value == value)
    if not argument.complete:
        return value is not None
    elements = value if isinstance(value, list) else [value]
    makers = {type(element).__name__ for element in elements if element is not None}
    return value is not None and makers <= {name.rpartition(".")[2] for name in argument.made_by}

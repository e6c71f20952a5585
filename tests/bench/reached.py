"""Run inside one release: trainers that the patches do not reach, and what report, log, record and strict say of them.

    python reached.py OUT.json CASE...

Each case runs in a fork. It makes a real trainer and trains it twice: by default, and under strict.
"""

from __future__ import annotations

import importlib
import inspect
import json
import logging
import os
import sys
import types
from collections.abc import Callable
from importlib.util import spec_from_file_location
from pathlib import Path
from typing import Any

import trl_hotfix
from trl_hotfix.errors import NotAppliedError

import tiny
from release import alone
from trainers import TRAINERS, MessageRecorder, dpo, is_available, sft

FILE, KEY = "trl_hotfix.json", "trl_hotfix"
Settings = dict[str, Any]


def settings(**others: Any) -> Settings:
    return {"output_dir": "out", "max_steps": 2, "save_strategy": "steps", "save_steps": 1, **others}


def pad_is_eos() -> None:
    """Make the bug of ``sft-eos-masked-when-pad-is-eos`` one of this run."""
    original = tiny.tokenizer

    def tokenizer(*args: Any, **kwargs: Any) -> Any:
        words = original(*args, **kwargs)
        words.pad_token = words.eos_token
        return words

    tiny.tokenizer = tokenizer


# The cases. Each returns a trainer that is ready to train.


def made_before_apply() -> Any:
    pad_is_eos()
    trainer = sft(**settings())
    trl_hotfix.apply()
    return trainer


def made_with_it() -> Any:
    pad_is_eos()
    trl_hotfix.apply()
    return sft(**settings())


def made_with_it_and_reverted() -> Any:
    trainer = made_with_it()
    trl_hotfix.revert()
    return trainer


def step_patch_after_the_trainer() -> Any:
    """A late patch of a method that each step calls is in time."""
    trainer = dpo(**settings())
    trl_hotfix.apply()
    return trainer


def copied_into_a_project() -> Any:
    """The trainer's file, copied into a project and used with TRL's config."""
    module = importlib.import_module("trl.trainer.dpo_trainer")
    trl_hotfix.apply()
    copied = types.ModuleType("project_dpo_trainer")
    copied.__package__ = "trl.trainer"
    source = inspect.getsource(module)
    path = Path("project_dpo_trainer.py").resolve()
    path.write_text(source, encoding="utf-8")
    sys.modules[copied.__name__] = copied
    exec(compile(source, str(path), "exec"), vars(copied))
    return with_class("DPO", copied.DPOTrainer, dpo)


def rebuilt_by_type() -> Any:
    """A class of the same name with methods of its own, on the base of TRL's."""
    module = importlib.import_module("trl.trainer.dpo_trainer")
    original = module.DPOTrainer
    body = {name: value for name, value in vars(original).items() if name not in ("__dict__", "__weakref__")}
    rebuilt = type("DPOTrainer", original.__bases__, {**body, "__module__": "project"})
    for function in vars(rebuilt).values():
        for cell in getattr(function, "__closure__", None) or ():
            if cell.cell_contents is original:
                cell.cell_contents = rebuilt
    trl_hotfix.apply()
    return with_class("DPO", rebuilt, dpo)


def with_class(name: str, cls: type, make: Callable[..., Any]) -> Any:
    import trainers

    _, config = tiny.classes(name)
    setattr(trainers, "classes", lambda wanted: (cls, config))  # noqa: B010
    return make(**settings())


def step_without_a_call() -> Any:
    """A subclass whose loss is its own: nothing is overridden that the patch is on, and nothing calls it."""
    trl_hotfix.apply()
    trainer_class, _ = tiny.classes("DPO")

    def compute_loss(self: Any, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        ids = inputs["chosen_input_ids"]
        return model(input_ids=ids, labels=ids).loss

    return with_class("DPO", type("Mine", (trainer_class,), {"compute_loss": compute_loss}), dpo)


def reloaded_after_an_edit() -> Any:
    """autoreload: the module runs again with another body, which no release has."""
    trl_hotfix.apply()
    module = importlib.import_module("trl.trainer.dpo_trainer")
    trainer = dpo(**settings())
    head, method, body = inspect.getsource(module).partition("    def get_batch_loss_metrics(\n")
    edited = head + method + body.replace("        metrics = {}\n", "        metrics = {}\n        edited = True\n", 1)
    path = Path("edited.py").resolve()
    path.write_text(edited, encoding="utf-8")

    class Edited:
        def find_spec(self, name: str, folder: Any = None, target: Any = None) -> Any:
            return spec_from_file_location(name, path) if name == module.__name__ else None

    sys.meta_path.insert(0, Edited())
    importlib.reload(module)
    return trainer


def subclass_of_trl() -> Any:
    """TRL 1.9.0 has a GRPOTrainer in ``trl.experimental.gspo_token``, with a loss of its own."""
    module = importlib.import_module("trl.experimental.gspo_token")
    trl_hotfix.apply()
    trainer = tiny.grpo(module.GRPOTrainer, tiny.llama("models", seed=0))
    trainer.args.max_steps = 2
    return trainer


CASES: dict[str, Callable[[], Any]] = {
    case.__name__.replace("_", " "): case
    for case in (
        made_before_apply,
        made_with_it,
        made_with_it_and_reverted,
        step_patch_after_the_trainer,
        copied_into_a_project,
        rebuilt_by_type,
        step_without_a_call,
        reloaded_after_an_edit,
        subclass_of_trl,
    )
}


def answer_of(make: Callable[[], Any], strict: bool) -> dict[str, Any]:
    recorder = MessageRecorder()
    trainer = make()
    trainer.add_callback(trl_hotfix.HotfixCallback(strict=strict))
    raised = None
    try:
        trainer.train()
    except NotAppliedError as error:
        raised = str(error)
    out = Path(trainer.args.output_dir)
    files = {str(file.relative_to(out)): json.loads(file.read_text()) for file in sorted(out.rglob(FILE))}
    states = {path.parent.name: history_of(path) for path in out.rglob("trainer_state.json")}
    report = trl_hotfix.status()
    return {
        "raised": raised,
        "steps": trainer.state.global_step,
        "said": list(recorder.lines),
        "states": {one.id: f"{one.state.value} ({one.reason.value})" for one in report},
        "files": files,
        "history": [entry[KEY] for entry in trainer.state.log_history if KEY in entry],
        "checkpoints": states,
    }


def history_of(path: Path) -> Any:
    return [entry[KEY] for entry in json.loads(path.read_text())["log_history"] if KEY in entry]


def every_trainer() -> dict[str, Any]:
    """Train each trainer of this release two steps under strict, with all patches on."""
    trl_hotfix.apply(strict=True)
    answers = {}
    for name, make in TRAINERS.items():
        if not is_available(name):
            continue
        recorder = MessageRecorder()
        trainer = make(**settings(output_dir=f"out-{name}", save_strategy="no"))
        trainer.add_callback(trl_hotfix.HotfixCallback(strict=True))
        trainer.train()
        answers[name] = {
            "steps": trainer.state.global_step,
            "warned": [line for line in recorder.lines if "unreached" in line],
            "said": list(recorder.lines),
        }
    return answers


def resumed() -> dict[str, Any]:
    """Train a step unrecorded, and go on with a record; and once more, from a checkpoint that has one."""
    answers: dict[str, Any] = {}
    dpo(**settings(max_steps=1)).train()
    trl_hotfix.apply()
    for name, steps in (("without a record", 2), ("with one", 3)):
        recorder = MessageRecorder()
        trainer = dpo(**settings(max_steps=steps))
        trainer.add_callback(trl_hotfix.HotfixCallback())
        trainer.train(resume_from_checkpoint=True)
        answers[name] = list(recorder.lines)
    return answers


def main(out: str, *asked: str) -> None:
    logging.getLogger("transformers").setLevel(logging.ERROR)
    os.environ.pop("TRL_HOTFIX", None)
    for name in ("transformers.trainer", "datasets", "peft", "accelerate", "trl.trainer.utils"):
        importlib.import_module(name)
    answers: dict[str, Any] = {}
    for name in asked:
        if name in ("every trainer", "resumed"):
            answers[name] = alone(every_trainer if name == "every trainer" else resumed, 300)
            continue
        case, _, strict = name.partition(", ")
        make, is_strict = CASES[case], strict == "strict"
        answers[name] = alone(lambda make=make, is_strict=is_strict: answer_of(make, is_strict), 120)  # type: ignore[misc]
    Path(out).write_text(json.dumps(answers), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])

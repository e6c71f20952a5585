"""Run inside one release: trainers that the patches do not reach, and what report, log, record and strict say of them.

    python -m bench.inside.reached OUT.json CASE...

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
from bench.inside.trainers import TRAINERS, MessageRecorder, dpo, is_available, sft
from bench.proving.release import alone

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
    from bench.inside import trainers

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


def its_own_code_in_training() -> Any:
    """It calls TRL's method in evaluations, whose calls repair no training."""
    trl_hotfix.apply()
    trainer_class, config = tiny.classes("DPO")
    original = inspect.unwrap(trainer_class.concatenated_forward)

    def concatenated_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.model.training:
            return original(self, *args, **kwargs)
        return super(mine, self).concatenated_forward(*args, **kwargs)

    mine: Any = type("Mine", (trainer_class,), {"concatenated_forward": concatenated_forward})
    from bench.inside import trainers

    setattr(trainers, "classes", lambda wanted: (mine, config))  # noqa: B010
    return dpo(**settings(truncation_mode="keep_end", max_length=6, eval_strategy="steps", eval_steps=1))


def made_beside_one_with_pairs() -> Any:
    """Another trainer, which never trains, was made with data that the patch changes."""
    from bench.inside import trainers

    trl_hotfix.apply()
    labelled = tiny.labelled
    setattr(tiny, "labelled", tiny.preferences)  # noqa: B010
    kept.append(trainers.kto(**settings()))
    setattr(tiny, "labelled", labelled)  # noqa: B010
    return trainers.kto(**settings())


kept: list[Any] = []


def made_with_another_option() -> Any:
    trl_hotfix.apply(options={"grpo-loss-type-by-normalisation": {"normalisation": "sequence"}}, only=[OPTION])
    trainer = TRAINERS["GRPO"](**settings())
    trl_hotfix.apply(options={"grpo-loss-type-by-normalisation": {"normalisation": "global"}}, only=[OPTION])
    return trainer


OPTION = "grpo-loss-type-by-normalisation"


def prompts_and_completions() -> Any:
    """SFT on prompts and completions, whose tokens are those of both as one text."""
    from datasets import Dataset

    trl_hotfix.apply()
    rows = [{"prompt": f"w{row} w{row + 1}", "completion": f" w{row + 2} w{row + 3}"} for row in range(8)]
    trainer_class, config_class = tiny.classes("SFT")
    return tiny.trainer(
        trainer_class,
        model=tiny.llama("models", seed=0),
        args=tiny.config(config_class, max_length=16, **settings()),
        train_dataset=Dataset.from_list(rows),
        tokenizer=tiny.tokenizer(),
    )


def with_an_unused_class() -> Any:
    trainer_class, _ = tiny.classes("SFT")
    kept.append(type("ZLossTrainer", (trainer_class,), {"compute_loss": lambda self, *args, **kwargs: 0}))
    trl_hotfix.apply()
    return sft(**settings())


def copied_without_trls_module() -> Any:
    """The trainer's file in a project, on TRL's private base. TRL's own module is never imported."""
    trl_hotfix.apply()
    import trl.trainer.base_trainer
    from trl import DPOConfig

    path = Path(trl.__file__ or "").parent / "trainer" / "dpo_trainer.py"
    copied = types.ModuleType("project_dpo_trainer")
    copied.__package__, copied.__file__ = "trl.trainer", str(Path("project_dpo_trainer.py").resolve())
    source = path.read_text(encoding="utf-8")
    Path(copied.__file__).write_text(source, encoding="utf-8")
    sys.modules[copied.__name__] = copied
    exec(compile(source, copied.__file__, "exec"), vars(copied))
    assert "trl.trainer.dpo_trainer" not in sys.modules
    assert trl.trainer.base_trainer.BaseTrainer in copied.DPOTrainer.__mro__
    from bench.inside import trainers

    setattr(trainers, "classes", lambda wanted: (copied.DPOTrainer, DPOConfig))  # noqa: B010
    return dpo(**settings())


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
        its_own_code_in_training,
        made_beside_one_with_pairs,
        made_with_another_option,
        prompts_and_completions,
        with_an_unused_class,
        copied_without_trls_module,
    )
}


def answer_of(make: Callable[[], Any], strict: bool) -> dict[str, Any]:
    recorder = MessageRecorder()
    trainer = make()
    trainer.add_callback(trl_hotfix.HotfixCallback(strict="all" if strict else False))
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
    trl_hotfix.apply(strict="all")
    answers = {}
    for name, make in TRAINERS.items():
        if not is_available(name):
            continue
        recorder = MessageRecorder()
        trainer = make(**settings(output_dir=f"out-{name}", save_strategy="no"))
        trainer.add_callback(trl_hotfix.HotfixCallback(strict="all"))
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


def resumed_with_its_own_loss() -> Any:
    """A subclass whose ``compute_loss`` calls TRL's goes on from a checkpoint; and once more, under observe."""
    from bench.inside import trainers

    trainer_class, config = tiny.classes("SFT")

    def compute_loss(self: Any, *args: Any, **kwargs: Any) -> Any:
        return super(mine, self).compute_loss(*args, **kwargs)

    mine: Any = type("Mine", (trainer_class,), {"compute_loss": compute_loss})
    setattr(trainers, "classes", lambda wanted: (mine, config))  # noqa: B010
    trl_hotfix.apply()
    answers = {}
    for name, steps, observe in (("first", 1, False), ("repaired", 2, False), ("observed", 3, True)):
        trl_hotfix.apply(observe=observe)
        recorder = MessageRecorder()
        trainer = sft(**settings(max_steps=steps))
        trainer.add_callback(trl_hotfix.HotfixCallback())
        trainer.train(resume_from_checkpoint=name != "first")
        answers[name] = list(recorder.lines)
    return answers


WHOLE: dict[str, Callable[[], Any]] = {
    "every trainer": every_trainer,
    "resumed": resumed,
    "resumed with its own loss": resumed_with_its_own_loss,
}


def main(out: str, *asked: str) -> None:
    logging.getLogger("transformers").setLevel(logging.ERROR)
    os.environ.pop("TRL_HOTFIX", None)
    for name in ("transformers.trainer", "datasets", "peft", "accelerate", "trl.trainer.utils"):
        importlib.import_module(name)
    answers: dict[str, Any] = {}
    for name in asked:
        if name in WHOLE:
            answers[name] = alone(WHOLE[name], 300)
            continue
        case, _, strict = name.partition(", ")
        make, is_strict = CASES[case], strict == "strict"
        answers[name] = alone(lambda make=make, is_strict=is_strict: answer_of(make, is_strict), 120)  # type: ignore[misc]
    Path(out).write_text(json.dumps(answers), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])

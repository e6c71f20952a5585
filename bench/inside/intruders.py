"""Run inside one release: other packages patch the same trainer before, during and after its import.

    python -m bench.inside.intruders OUT.json LEAF TRAINER METHOD PATCH CASE...

A case is an intruder and a time: in a fork, the intruder does then what a real package does. The answer has the state
of the patch by ``apply()`` and by ``status()``, and the warnings of ``HotfixCallback`` when a real trainer begins to
train. Its ``cases`` are the names of all cases.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import logging
import sys
import tempfile
import textwrap
from collections.abc import Callable
from importlib.machinery import PathFinder
from pathlib import Path
from types import MethodType, ModuleType
from typing import Any

import trl_hotfix

import tiny
from bench.proving.release import in_a_fork

OUT, LEAF, TRAINER, METHOD, PATCH, *ASKED = sys.argv[1:]
Intruder = Callable[[ModuleType, Any], None]


# The intruders. Each gets the patched module (leaf), and the trainer if one was made.


def regenerated_in_a_cache(leaf: ModuleType, trainer: Any) -> None:
    """unsloth 2026.10.9, models/rl.py:4268-4368, 3934-3960: the class's source text is edited, written to a file of
    unsloth_compiled_cache, imported from there, and set in the leaf, in trl.trainer and in trl."""
    source = edited(leaf).replace(f"class {TRAINER}", f"class _Unsloth{TRAINER}", 1)
    source = f"from {LEAF} import *\nfrom {LEAF} import {names(leaf)}\n{source}\n"
    source += f"class Unsloth{TRAINER}(_Unsloth{TRAINER}):\n    pass\n"
    folder = Path(tempfile.mkdtemp())
    (folder / f"Unsloth{TRAINER}.py").write_text(source, encoding="utf-8")
    sys.path.insert(0, str(folder))
    put_everywhere(leaf, getattr(importlib.import_module(f"Unsloth{TRAINER}"), f"Unsloth{TRAINER}"))


def regenerated_in_its_module(leaf: ModuleType, trainer: Any) -> None:
    """unsloth 2026.10.9, models/rl.py:1504: edited source text is executed under the name of TRL's own file."""
    exec(compile(edited(leaf), leaf.__file__ or "", "exec"), vars(leaf))
    put_everywhere(leaf, getattr(leaf, TRAINER))


def deleted(leaf: ModuleType, trainer: Any) -> None:
    """ms-swift 4.6.0, rlhf_trainers/grpo_trainer.py:69-70: ``del HFGRPOTrainer.__init__; del HFGRPOTrainer.log``."""
    delattr(getattr(leaf, TRAINER), METHOD)


def deleted_and_put_anew(leaf: ModuleType, trainer: Any) -> None:
    deleted(leaf, trainer)
    setattr(getattr(leaf, TRAINER), METHOD, foreign_method)


def replaced(leaf: ModuleType, trainer: Any) -> None:
    """liger-kernel 0.8.5, transformers/grpo_loss.py:251-252: ``trl.GRPOTrainer.compute_loss = compute_loss``, in TRL's
    own profiling decorator."""
    try:
        from trl.extras.profiling import profiling_decorator
    except ImportError:
        from trl.trainer.utils import profiling_decorator
    setattr(getattr(leaf, TRAINER), METHOD, profiling_decorator(foreign_method))


def wrapped_by_a_look_alike(leaf: ModuleType, trainer: Any) -> None:
    """``functools.wraps`` for the name and the signature; the original is never called."""
    original = getattr(getattr(leaf, TRAINER), METHOD)
    setattr(getattr(leaf, TRAINER), METHOD, functools.wraps(original)(foreign_function()))


def wrapped(leaf: ModuleType, trainer: Any) -> None:
    """axolotl 0.19.0, monkeypatch/trainer/trl_vllm.py:296: ``X.__init__ = patch(X.__init__)``, which calls it."""
    original = getattr(getattr(leaf, TRAINER), METHOD)

    @functools.wraps(original)
    def around(self: Any, *args: Any, **kwargs: Any) -> Any:
        return original(self, *args, **kwargs)

    setattr(getattr(leaf, TRAINER), METHOD, around)


def overridden(leaf: ModuleType, trainer: Any) -> None:
    """ms-swift 4.6.0, rlhf_trainers/dpo_trainer.py:109: the subclass has a concatenated_forward without ``super()``."""
    KEPT.append(type("Mine", (getattr(leaf, TRAINER),), {METHOD: foreign_method}))


def overridden_by_a_mixin(leaf: ModuleType, trainer: Any) -> None:
    """ms-swift 4.6.0, rlhf_trainers/dpo_trainer.py:44: ``class DPOTrainer(RLHFTrainerMixin, ..., HFDPOTrainer)``."""
    mixin = type("Mixin", (), {METHOD: foreign_method})
    KEPT.append(type("Mine", (mixin, getattr(leaf, TRAINER)), {}))


def overridden_with_super_of_another_method(leaf: ModuleType, trainer: Any) -> None:
    keep_subclass(leaf, "super().something_else()")


def overridden_past_the_trainer(leaf: ModuleType, trainer: Any) -> None:
    keep_subclass(leaf, f"super({TRAINER}, self).{METHOD}(*args, **kwargs)")


def overridden_with_super(leaf: ModuleType, trainer: Any) -> None:
    """axolotl 0.19.0, core/trainers/dpo/trainer.py:38-39: ``super().__init__(*args, **kwargs)``."""
    keep_subclass(leaf, f"return super().{METHOD}(*args, **kwargs)")


def keep_subclass(leaf: ModuleType, body: str) -> None:
    space = {TRAINER: getattr(leaf, TRAINER), "__name__": "mine"}
    exec(f"class Mine({TRAINER}):\n    def {METHOD}(self, *args, **kwargs):\n        {body}\n", space)
    KEPT.append(space)


def on_the_instance(leaf: ModuleType, trainer: Any) -> None:
    """liger-kernel 0.8.5, transformers/monkey_patch.py:304: ``model.forward = MethodType(..., model)``."""
    setattr(trainer, METHOD, MethodType(foreign_method, trainer))


KEPT: list[Any] = []


def foreign_method(self: Any, *args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError("what another package does instead")


def foreign_function() -> Callable[..., Any]:
    def look_alike(self: Any, *args: Any, **kwargs: Any) -> Any:
        return foreign_method(self, *args, **kwargs)

    return look_alike


def edited(leaf: ModuleType) -> str:
    source = textwrap.dedent(inspect.getsource(getattr(leaf, TRAINER)))
    head, definition, after = source.partition(f"    def {METHOD}(")
    colon = after.index(":\n")
    return f"{head}{definition}{after[: colon + 2]}        edited_by_somebody = True\n{after[colon + 2 :]}"


def names(leaf: ModuleType) -> str:
    return ", ".join(name for name in vars(leaf) if name.isidentifier() and not name.startswith("__"))


def put_everywhere(leaf: ModuleType, regenerated: type) -> None:
    import trl.trainer

    for module in (leaf, trl.trainer, trl):
        setattr(module, TRAINER, regenerated)


INTRUDERS = {
    intruder.__name__.replace("_", " "): intruder
    for intruder in (
        regenerated_in_a_cache,
        regenerated_in_its_module,
        deleted,
        deleted_and_put_anew,
        replaced,
        wrapped_by_a_look_alike,
        wrapped,
        overridden,
        overridden_by_a_mixin,
        overridden_with_super_of_another_method,
        overridden_past_the_trainer,
        overridden_with_super,
        on_the_instance,
    )
}


# The times.


def before_apply(intrude: Intruder) -> Any:
    intrude(importlib.import_module(LEAF), None)
    apply()


def while_imported(intrude: Intruder) -> Any:
    """Intrude between ``apply()`` and the end of the import: a foreign hook is called before ours."""
    apply()
    finder = trl_hotfix.import_hooks.FINDER

    class ForeignFinder:
        def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
            if name != LEAF:
                return None
            spec: Any = PathFinder.find_spec(name, path, target)
            execute = spec.loader.exec_module
            spec.loader.exec_module = lambda module: (execute(module), intrude(module, None))
            return spec

    sys.meta_path.insert(sys.meta_path.index(finder) + 1, ForeignFinder())
    importlib.import_module(LEAF)


def after_apply(intrude: Intruder) -> Any:
    apply()
    intrude(importlib.import_module(LEAF), None)


def after_the_trainer_was_made(intrude: Intruder) -> Any:
    leaf = importlib.import_module(LEAF)
    apply()
    trainer = make_trainer(leaf)
    intrude(leaf, trainer)
    return trainer


def apply() -> Any:
    report = trl_hotfix.apply(only=[PATCH])
    if LEAF not in sys.modules:
        assert report[PATCH].state.value == "pending"
    return report


def make_trainer(leaf: ModuleType) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        model = tiny.llama(folder, seed=0)
    trainer_class = getattr(leaf, TRAINER)
    if TRAINER == "GRPOTrainer":
        return tiny.grpo(trainer_class, model)
    from datasets import Dataset
    from trl import DPOConfig

    rows = [{"prompt": "w1 w2", "chosen": " w3", "rejected": " w4 w5"}] * 2
    settings = {"model": model, "args": tiny.config(DPOConfig), "tokenizer": tiny.tokenizer()}
    return tiny.trainer(trainer_class, train_dataset=Dataset.from_list(rows), **settings)


TIMES = {time.__name__.replace("_", " "): time for time in (before_apply, while_imported, after_apply)}
TIMES["after the trainer was made"] = after_the_trainer_was_made


def work(case: tuple[str, str]) -> dict[str, Any]:
    intruder, time = case
    trainer = TIMES[time](INTRUDERS[intruder])
    states = {"apply": state_of(apply()), "status": state_of(trl_hotfix.status())}
    evidence = trl_hotfix.status()[PATCH].evidence.get(LEAF, {})
    return {**states, "train begin": at_train_begin(trainer), "evidence": {**evidence, "red": "", "green": ""}}


def state_of(report: Any) -> str:
    return f"{report[PATCH].state.value} ({report[PATCH].reason.value})"


def at_train_begin(trainer: Any) -> list[str]:
    """Return the warnings of the callback at the event that ``Trainer.train`` fires."""
    import trl
    from transformers.trainer_callback import CallbackHandler, TrainerControl, TrainerState

    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("trl_hotfix").addHandler(handler)
    callback = trl_hotfix.HotfixCallback()
    if trainer is not None:
        trainer.add_callback(callback)
        trainer.callback_handler.on_train_begin(trainer.args, trainer.state, trainer.control)
    else:
        args = tiny.config(trl.DPOConfig)
        CallbackHandler([callback], None, None, None, None).on_train_begin(args, TrainerState(), TrainerControl())
    return messages


def main() -> None:
    for name in ("transformers.trainer", "datasets", "peft", "accelerate", "trl.trainer.utils", "trl.data_utils"):
        importlib.import_module(name)
    assert LEAF not in sys.modules
    cases = {
        f"{intruder}, {time}": (intruder, time)
        for time in sorted(TIMES, key=lambda time: time != "while imported")
        for intruder in INTRUDERS
        if intruder != "on the instance" or time == "after the trainer was made"
    }
    answers: dict[str, Any] = {"cases": list(cases)}
    for name in (name for name in cases if name in ASKED):
        if cases[name][1] != "while imported":
            importlib.import_module(LEAF)
        answers[name] = in_a_fork(work, cases[name], 60)  # type: ignore[arg-type]
    Path(OUT).write_text(json.dumps(answers), encoding="utf-8")


if __name__ == "__main__":
    main()

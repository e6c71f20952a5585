from __future__ import annotations

import dataclasses
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from trl_hotfix import testing
from trl_hotfix.model import Verdict
from trl_hotfix.patching.wrappers import Layer, wrapped_descriptor
from trl_hotfix.testing import (
    absent_if_reexported,
    as_tokenizer_of,
    begin_trainer,
    constructed,
    default_arguments,
    quick_is_peft_model,
    stub_trainer,
    trainer_and_config,
)


@dataclasses.dataclass
class MadeUpConfig:
    output_dir: str
    beta: float = 0.1
    report_to: list[str] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        raise AssertionError("it would set up devices and processes")


class MadeUpTrainer:
    def __init__(self) -> None:
        raise AssertionError("a stub is never initialised")

    def scaled(self, loss: float) -> float:
        scaled: float = self.accelerator.gather(loss) * self.beta  # type: ignore[attr-defined]
        return scaled


def test_the_defaults_of_a_config_skip_its_post_init() -> None:
    assert vars(default_arguments(MadeUpConfig, beta=0.5, added=1)) == {"beta": 0.5, "report_to": [], "added": 1}


def test_a_stub_runs_the_real_method_in_one_process() -> None:
    stub = stub_trainer(MadeUpTrainer, default_arguments(MadeUpConfig))
    assert isinstance(stub, MadeUpTrainer)
    assert stub.scaled(2.0) == 0.2
    assert stub_trainer(MadeUpTrainer, default_arguments(MadeUpConfig), beta=3.0).scaled(2.0) == 6.0
    with pytest.raises(AttributeError, match="gamma"):
        _ = stub.gamma


def test_the_class_of_a_stub_is_one_of_this_package() -> None:
    """``overridden`` leaves such classes out, since they wait for the garbage collector."""
    kind = type(stub_trainer(MadeUpTrainer, SimpleNamespace()))
    assert kind.__module__.startswith(f"{testing.__name__}.")


def test_a_constructed_trainer_ran_only_its_constructor() -> None:
    transformers = pytest.importorskip("transformers")

    class OwnTrainer(transformers.Trainer):  # type: ignore[misc,name-defined]
        def __init__(self, model: Any, args: Any) -> None:
            super().__init__(model=model, args=args)
            self.prepared = self.accelerator.prepare_model(model)

    trainer = constructed(OwnTrainer, model="model", args="args")
    assert (trainer.model, trainer.args, trainer.prepared) == ("model", "args", "model")
    assert trainer.accelerator.num_processes == 1


def test_a_constructor_runs_until_it_is_stopped() -> None:
    pytest.importorskip("datasets")
    pytest.importorskip("transformers")
    trl_module = pytest.importorskip("trl.trainer.dpo_trainer")
    seeds: list[int] = []
    module = ModuleType("made_up")
    module.set_seed = seeds.append  # type: ignore[attr-defined]

    class Base:
        pass

    class DPOTrainer(Base):
        def __init__(self, *, model: Any, args: Any, train_dataset: Any, processing_class: Any) -> None:
            super().__init__(model=model, args=args)  # type: ignore[call-arg]
            module.set_seed(args.seed)
            self.rows = self._prepare_dataset(train_dataset).num_rows  # type: ignore[attr-defined]
            module.create_reference_model(model)
            raise AssertionError("it is stopped before")

    def stop(model: Any) -> None:
        raise testing.StopConstruction

    module.create_reference_model = None  # type: ignore[attr-defined]
    module.DPOConfig = trl_module.DPOConfig  # type: ignore[attr-defined]
    trainers: list[Any] = []
    trainer = begin_trainer(
        module,
        DPOTrainer,
        "model",
        parent=trainers.append,
        shadows={"create_reference_model": stop, "other": 1},
        beta=2,
    )
    assert (trainer.rows, trainer.model, trainer.args.beta) == (1, "model", 2)
    assert trainers == [trainer]
    assert seeds == []
    assert module.create_reference_model is None  # type: ignore[attr-defined]
    assert not hasattr(module, "other")


def test_is_peft_model_of_a_module_looks_at_the_class_meanwhile() -> None:
    from peft import get_peft_model

    def slow(model: Any) -> bool:
        raise AssertionError("it is not called")

    module = ModuleType("made_up")
    with quick_is_peft_model(module):
        assert not hasattr(module, "is_peft_model")
    module.is_peft_model = slow  # type: ignore[attr-defined]
    model, lora = testing.base_and_lora()
    with quick_is_peft_model(module):
        assert module.is_peft_model(model) is False
        assert module.is_peft_model(get_peft_model(model, lora)) is True
    assert module.is_peft_model is slow


def test_a_method_that_a_module_only_reexports_is_absent() -> None:
    method = MadeUpTrainer.scaled
    outcome = absent_if_reexported(ModuleType("trl.trainer.old_place"), method)
    assert outcome is not None
    assert outcome.verdict is Verdict.ABSENT
    assert absent_if_reexported(ModuleType(method.__module__), method) is None


def test_a_patched_method_is_that_of_the_module_that_defines_it() -> None:
    layer = Layer("a-patch", 1, lambda wrapped, instance, args, kwargs: wrapped(*args, **kwargs), traced=False)
    path = (MadeUpTrainer.__module__, "MadeUpTrainer.scaled")
    patched = wrapped_descriptor(vars(MadeUpTrainer)["scaled"], (layer,), MadeUpTrainer, path)
    assert patched.__module__ != MadeUpTrainer.__module__
    assert absent_if_reexported(ModuleType(MadeUpTrainer.__module__), patched) is None
    assert absent_if_reexported(ModuleType("trl.trainer.old_place"), patched) is not None


def test_the_classes_of_the_first_method_that_a_module_has() -> None:
    module = ModuleType("trl.trainer.made_up")
    vars(module).update(RLOOTrainer=MadeUpTrainer, RLOOConfig=MadeUpConfig)
    assert trainer_and_config(module, "GRPO", "RLOO") == (MadeUpTrainer, MadeUpConfig)
    vars(module).update(GRPOTrainer=object)
    assert trainer_and_config(module, "GRPO", "RLOO") == (object, None)
    with pytest.raises(LookupError, match=r"trl\.trainer\.made_up has a trainer of none of these methods: DPO, KTO"):
        trainer_and_config(module, "DPO", "KTO")


def test_a_tokenizer_has_the_name_that_the_constructor_gives_it() -> None:
    class Old:
        def __init__(self, model: Any = None, tokenizer: Any = None) -> None: ...

    class New:
        def __init__(self, model: Any = None, processing_class: Any = None) -> None: ...

    assert as_tokenizer_of(Old, "words") == {"tokenizer": "words"}
    assert as_tokenizer_of(New, "words") == {"processing_class": "words"}

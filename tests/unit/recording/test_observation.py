"""Which of the observed bugs a trainer hits, by its own arguments."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from trl_hotfix import witness
from trl_hotfix.catalogue.conditions import Kind
from trl_hotfix.log import FIELDS
from trl_hotfix.matching.hits import Answer
from trl_hotfix.model import Hit, Patch, Reason, Severity, State, Target, Upstream
from trl_hotfix.patching import given
from trl_hotfix.recording import observation
from trl_hotfix.recording.trainer_arguments import TrainerArguments
from trl_hotfix.reporting.report import PatchStatus, Report


@dataclass
class Config:
    beta: float = 0.1
    max_length: int | None = None
    gradient_accumulation_steps: int = 1
    steps_per_generation: int | None = None
    generation_batch_size: int | None = None
    model_init_kwargs: dict[str, Any] | None = None


class SampleTrainer:
    def __init__(self, model: Any = None, args: Any = None, **kwargs: Any) -> None:
        self.model, self.args = model, args if args is not None else Config()
        self.callback_handler = SimpleNamespace(callbacks=[])


SampleTrainer.__module__ = "trl.trainer.sample_trainer"


class PeftModel:
    peft_config = {"other": 1}  # noqa: RUF012
    dtype = "float32"


PeftModel.__module__ = "peft.peft_model"


def made(*args: Any, **kwargs: Any) -> SampleTrainer:
    """Return a trainer whose constructor was observed."""
    trainer = SampleTrainer.__new__(SampleTrainer)
    given.note(trainer, SampleTrainer.__init__, args, kwargs)
    SampleTrainer.__init__(trainer, *args, **kwargs)
    return trainer


def patch(*hits: Hit, id: str = "a-patch", severity: Severity = Severity.WRONG_LOSS) -> Patch:
    target = Target("trl.trainer.sample_trainer", "SampleTrainer.step", "wrapper")
    return Patch(id, 1, "a title", severity, ">=0.9.6", Upstream(), "", "", (target,), "self_test", hits=hits)


def report(*patches: Patch, state: State = State.OBSERVED) -> Report:
    statuses = tuple(PatchStatus(one, state, Reason.REPRODUCED, {}, ()) for one in patches)
    return Report("0.1", "0.11.4", "3.11", statuses, observe=True)


def hit(depends: str | None = None, **when: Any) -> Hit:
    return Hit(("Sample",), "it is off by 4", when, depends)


def found(trainer: Any, *hits: Hit) -> observation.Observed:
    (observed,) = observation.findings(trainer, report(patch(*hits)))
    return observed


@pytest.mark.parametrize(
    ("when", "config", "answer"),
    [
        ({"beta": ">0.2"}, Config(beta=0.5), Answer.HIT),
        ({"beta": ">0.2"}, Config(), Answer.NOT_HIT),
        ({"beta": "unset"}, Config(), Answer.HIT),
        ({"beta": "set"}, Config(), Answer.NOT_HIT),
        ({"beta": ["unset", 0.5]}, Config(beta=0.5), Answer.HIT),
        ({"max_length": None}, Config(), Answer.HIT),
        ({"no_such_field": "unset"}, Config(), Answer.HIT),
        ({"model_init_kwargs.quantization_config": "set"}, Config(model_init_kwargs={}), Answer.NOT_HIT),
        ({"model_init_kwargs.quantization_config": "set"}, Config(), Answer.NOT_HIT),
        (
            {"model_init_kwargs.quantization_config": "set"},
            Config(model_init_kwargs={"quantization_config": 4}),
            Answer.HIT,
        ),
    ],
)
def test_a_field_of_the_config_decides(when: dict[str, Any], config: Config, answer: Answer) -> None:
    assert found(made(args=config), hit(**when)).answer is answer


def test_what_the_config_computes_by_itself_was_not_given() -> None:
    dapo = (
        hit(steps_per_generation="!=@gradient_accumulation_steps"),
        hit("it is another", generation_batch_size="set"),
    )
    equal = Config(gradient_accumulation_steps=2, steps_per_generation=2, generation_batch_size=8)
    assert found(made(args=equal), *dapo).answer is Answer.NOT_HIT
    unequal = Config(gradient_accumulation_steps=2, steps_per_generation=4, generation_batch_size=16)
    assert found(made(args=unequal), *dapo).answer is Answer.HIT


@pytest.mark.parametrize(
    ("when", "arguments", "answer"),
    [
        ({"peft_config": "set"}, {"peft_config": object()}, Answer.HIT),
        ({"peft_config": "set"}, {}, Answer.NOT_HIT),
        ({"peft_config": "unset"}, {"peft_config": None}, Answer.HIT),
        ({"model": "text"}, {"model": "a-path"}, Answer.HIT),
        ({"model": "not by *peft*"}, {"model": "a-path"}, Answer.NOT_HIT),
        ({"model": "by *peft*"}, {"model": PeftModel()}, Answer.HIT),
        ({"model.adapter_name": "!=default"}, {"model": PeftModel()}, Answer.HIT),
        ({"model.dtype": "float32"}, {"model": PeftModel()}, Answer.HIT),
        # Up to TRL 0.12 what is a field of the config now was an argument of the trainer.
        ({"beta": ">0.2"}, {"beta": 0.5}, Answer.HIT),
    ],
)
def test_an_argument_of_the_constructor_decides(when: Any, arguments: dict[str, Any], answer: Answer) -> None:
    assert found(made(**arguments), hit(**when)).answer is answer


def test_what_an_unobserved_constructor_was_given_is_told_only_where_the_trainer_tells_it() -> None:
    arguments = TrainerArguments(SampleTrainer(model=object()))
    assert arguments.find("formatting_func").kind is Kind.UNKNOWN
    assert arguments.find("peft_config").kind is Kind.UNSET
    assert TrainerArguments(SampleTrainer(model=PeftModel())).find("peft_config").kind is Kind.UNKNOWN
    doubtful = found(SampleTrainer(), hit(formatting_func="set"))
    assert doubtful.answer is Answer.CANNOT_TELL
    assert "the constructor was not observed" in doubtful.to_dict()["unknown"][0]


def test_another_trainer_does_not_hit() -> None:
    assert found(made(), Hit(("Other",), "x")).answer is Answer.NOT_HIT
    assert found(made(), Hit(("*",), "x")).answer is Answer.HIT


def test_only_what_is_observed_is_spoken_of() -> None:
    assert observation.findings(made(), report(patch(hit()), state=State.APPLIED)) == []


def said(caplog: pytest.LogCaptureFixture) -> list[tuple[int, str]]:
    return [(record.levelno, record.getMessage()) for record in caplog.records]


def test_there_is_a_line_for_each_hit_and_none_for_the_rest(caplog: pytest.LogCaptureFixture) -> None:
    patches = [
        patch(Hit(("Other",), "x"), id="clear"),
        patch(hit("the model is large"), id="doubtful"),
        patch(hit(beta=0.5), id="certain"),
        patch(hit(), id="worst", severity=Severity.WRONG_GRADIENT),
        patch(hit(), id="why", severity=Severity.DIAGNOSIS),
    ]
    observed = observation.findings(made(args=Config(beta=0.5)), report(*patches))
    observation.log_begin(observed)
    assert [getattr(record, FIELDS)["patch"] for record in caplog.records] == ["worst", "certain", "why"]
    assert said(caplog) == [
        (logging.WARNING, "this run has worst (wrong-gradient): it is off by 4; TRL_HOTFIX=1 repairs it"),
        (logging.WARNING, "this run has certain (wrong-loss): it is off by 4 (beta=0.5); TRL_HOTFIX=1 repairs it"),
        (logging.WARNING, "this run has why (diagnosis): it is off by 4; TRL_HOTFIX=1 reports why"),
    ]
    assert observation.in_doubt(observed) == "; 1 bugs depend on more than arguments: trl_hotfix.json has them"
    assert [one.to_dict()["answer"] for one in observed] == ["hit", "hit", "hit", "cannot tell", "not hit"]


def test_the_end_says_how_often_the_code_of_a_bug_was_called(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="trl_hotfix")
    trainer = made()
    each = witness.witnessed("called-patch", "trl.trainer.sample_trainer:SampleTrainer.step", 1, observe=True)
    witness.elsewhere(trainer).of(each).called = 3
    hits, clear = patch(hit(), id="called-patch"), patch(Hit(("Other",), "x"), id="called-patch")
    observed = observation.findings(trainer, report(hits))
    assert observed[0].to_dict()["called"] == {"trl.trainer.sample_trainer:SampleTrainer.step": 3}
    observation.log_end(observed)
    observation.log_end(observation.findings(trainer, report(clear)))
    observation.log_end(observation.findings(made(), report(hits)))
    assert said(caplog) == [(logging.INFO, "this run has called-patch: it called SampleTrainer.step 3 times")]

"""The scan is never wrong: what it says of a trainer is what a run of the same script gives to the trainer."""

from __future__ import annotations

import ast

import pytest
from hypothesis import HealthCheck, given, settings

from trl_hotfix.catalogue.conditions import Kind
from trl_hotfix.scanning.bindings import ScriptBindings
from trl_hotfix.scanning.trainer_calls import trainer_calls

from helpers import generated_scripts


def check(text: str) -> None:
    recorded = generated_scripts.run(text)
    calls = {call.line: call for call in trainer_calls(ScriptBindings(ast.parse(text))).calls}
    wrong = [
        answer
        for trainer in recorded
        if trainer.line in calls
        for answer in generated_scripts.wrong_answers(calls[trainer.line], trainer)
    ]
    assert not wrong, f"{wrong}\n{text}"


@given(generated_scripts.scripts())
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
def test_the_scan_says_nothing_that_a_run_refutes(text: str) -> None:
    check(text)


@pytest.mark.matrix
@given(generated_scripts.scripts())
@settings(max_examples=10_000, deadline=None, suppress_health_check=list(HealthCheck))
def test_the_scan_says_nothing_that_runs_of_many_scripts_refute(text: str) -> None:
    check(text)


def test_a_plain_script_is_known_in_all_parts() -> None:
    text = (
        f"{generated_scripts.HEAD}args.beta = size\ntrainer = DPOTrainer('m', args=args, callbacks=[BEMACallback()])\n"
    )
    (call,) = trainer_calls(ScriptBindings(ast.parse(text))).calls
    answers = {name: call.argument(name) for name in generated_scripts.ARGUMENTS}
    assert answers["beta"].value == 4
    assert answers["callbacks"].made_by == ("trl.BEMACallback",)
    assert {answers[name].kind for name in ("padding_free", "loss_type", "ref_model")} == {Kind.UNSET}


@pytest.mark.parametrize(
    "change",
    [
        "options.update(padding_free=True)",
        "options |= {'padding_free': True}",
        "options.setdefault('padding_free', True)",
        "setattr(args, name, True)",
        "args.__dict__.update(padding_free=True)",
        "vars(args)['padding_free'] = True",
        "change(args, 'padding_free')",
        "alias = args\nalias.padding_free = True",
        "for item in (args,):\n    item.padding_free = True",
        "holder.append(args)\nholder[0].padding_free = True",
        "exec('args.padding_free = True')",
        "trainer_options['args'] = args\nchange(trainer_options['args'], 'padding_free')",
        "def work():\n    args.padding_free = True\nwork()",
    ],
)
def test_what_may_have_been_set_out_of_sight_is_unknown(change: str) -> None:
    config = "args = DPOConfig(**options)" if change.startswith("options") else ""
    text = f"{generated_scripts.HEAD}{change}\n{config}\ntrainer = DPOTrainer('m', args=args)\ntrainer.train()\n"
    (recorded,) = generated_scripts.run(text)
    assert recorded.snapshots[-1]["padding_free"] in (True, 7)
    (call,) = trainer_calls(ScriptBindings(ast.parse(text))).calls
    assert call.argument("padding_free").kind is Kind.UNKNOWN


def test_what_is_set_at_the_end_of_a_loop_holds_at_its_beginning() -> None:
    body = ("trainer = DPOTrainer('m', args=args)", "trainer.train()", "args = DPOConfig(beta=True)")
    text = "\n    ".join([f"{generated_scripts.HEAD}for step in range(2):", *body])
    assert [recorded.snapshots[0]["beta"] for recorded in generated_scripts.run(text)] == [None, True]
    (call,) = trainer_calls(ScriptBindings(ast.parse(text))).calls
    assert call.argument("beta").kind is Kind.UNKNOWN


def test_the_config_of_an_adapter_is_no_config_of_a_trainer() -> None:
    text = f"{generated_scripts.HEAD}trainer = DPOTrainer('m', LoraConfig(rank=4), args=args)\n"
    (recorded,) = generated_scripts.run(text)
    (call,) = trainer_calls(ScriptBindings(ast.parse(text))).calls
    assert recorded.snapshots[0]["ref_model"].rank == 4
    assert call.argument("ref_model").made_by == ("peft.LoraConfig",)


@pytest.mark.parametrize(
    ("call", "kind"),
    [
        ("trainer.train()", Kind.UNSET),
        ("trainer.train(resume_from_checkpoint=None)", Kind.UNSET),
        ("trainer.train(False)", Kind.UNSET),
        ("trainer.train(0)", Kind.LITERAL),
        ("trainer.train(resume_from_checkpoint=True)", Kind.LITERAL),
        ("trainer.train('checkpoint-2')", Kind.LITERAL),
        ("if flag:\n    trainer.train(True)", Kind.UNKNOWN),
        ("trainer.train(**change(options))", Kind.UNKNOWN),
        ("trainer.train(read(name))", Kind.UNKNOWN),
        ("trainer.train(True)\ntrainer.train()", Kind.UNKNOWN),
        ("start = trainer.train\nstart(True)", Kind.UNKNOWN),
        ("change(trainer)", Kind.UNKNOWN),
        ("pass", Kind.UNKNOWN),
    ],
)
def test_whether_a_run_is_resumed_is_read_from_the_calls_of_train(call: str, kind: Kind) -> None:
    (found,) = trainer_calls(
        ScriptBindings(ast.parse(f"{generated_scripts.HEAD}trainer = DPOTrainer('m', args=args)\n{call}\n"))
    ).calls
    assert found.argument(generated_scripts.RESUMED).kind is kind

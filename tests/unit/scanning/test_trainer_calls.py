"""The arguments of a trainer call: its own, its config's, added callbacks, and those of the call for the model."""

from __future__ import annotations

import ast
from typing import Any

import pytest

from trl_hotfix.catalogue.conditions import Argument, Kind, evaluate
from trl_hotfix.scanning.bindings import ScriptBindings
from trl_hotfix.scanning.trainer_calls import trainer_calls

BEMA = "bema-state-lost-on-resume"
DTYPE = "ref-model-dtype-mismatch"
DAPO = "grpo-dapo-normaliser"
PADDING_FREE = "sft-padding-free-contamination"


def test_a_derived_constructor_may_set_an_argument(scan: Any) -> None:
    (trainer,) = scan(
        """\
        from trl import DPOConfig, DPOTrainer
        class Mine(DPOTrainer):
            def __init__(self, model, **options):
                super().__init__(model, ref_model=copy(model), **options)
        Mine("gpt2", args=DPOConfig(precompute_ref_log_probs=True))
        """
    )
    assert trainer.call.called == "Mine"
    assert "Mine.__init__ may set it" in trainer.unknown["dpo-precomputed-ref-logps-dropped"]


@pytest.mark.needs_trl
def test_each_trainer_of_a_file_has_its_own_config_and_model(scan: Any) -> None:
    text = """\
        from peft import get_peft_model, LoraConfig
        from transformers import AutoModelForCausalLM
        from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer
        def first():
            args = SFTConfig(packing=True)
            SFTTrainer("gpt2", args, None).train()
        def second(steps):
            args = GRPOConfig(steps_per_generation=16, gradient_accumulation_steps=4 * 1, use_vllm=True)
            model = AutoModelForCausalLM.from_pretrained("gpt2").to("cuda")
            model = get_peft_model(model, LoraConfig())
            GRPOTrainer(model, [len], args).train()
        """
    sft, grpo = scan(text, "0.22.0")
    assert [trainer.call.name for trainer in (sft, grpo)] == ["SFT", "GRPO"]
    assert PADDING_FREE in sft.hit_ids
    assert DAPO in grpo.hit_ids
    assert PADDING_FREE not in grpo.hit_ids
    (hit,) = (finding for finding in grpo.hits if finding.patch.id == DAPO)
    assert "steps_per_generation=16 (line 8)" in hit.because
    _, on_older_release = scan(text, "0.15.0")
    assert "grpo-vllm-base-weights" in {*on_older_release.hit_ids, *on_older_release.unknown}
    _, equal_steps = scan(text.replace("=16", "=4"), "0.22.0")
    assert DAPO not in equal_steps.hit_ids


@pytest.mark.parametrize(
    ("argument", "statement", "hit"),
    [
        (", callbacks=[BEMACallback()]", "", True),
        ("", "trainer.add_callback(BEMACallback())", True),
        ("", "", False),
    ],
)
def test_callbacks_are_found_in_the_call_or_added_later(scan: Any, argument: str, statement: str, hit: bool) -> None:
    text = f"""\
        from trl import BEMACallback, SFTTrainer
        trainer = SFTTrainer("gpt2"{argument})
        {statement}
        trainer.train(resume_from_checkpoint="checkpoint-10")
        """
    (trainer,) = scan(text, "1.0.0")
    if hit:
        assert BEMA in trainer.hit_ids
    else:
        assert BEMA not in trainer.hit_ids | trainer.unknown.keys()


def test_arguments_of_the_call_that_makes_the_model(scan: Any) -> None:
    text = """\
        import torch
        from transformers import AutoModelForCausalLM
        from trl import DPOTrainer
        DPOTrainer(AutoModelForCausalLM.from_pretrained("x", {}))
        """
    (trainer,) = scan(text.format("torch_dtype=torch.bfloat16"), "1.0.0")
    assert DTYPE in trainer.hit_ids
    (trainer,) = scan(text.format("torch_dtype=torch.float32"), "1.0.0")
    assert DTYPE not in trainer.hit_ids | trainer.unknown.keys()
    (trainer,) = scan(text.format("revision='main'"), "1.0.0")
    assert "the model is not float32" in trainer.unknown[DTYPE]


def argument_of(body: str, name: str) -> Argument:
    head = "import trl\nfrom trl import BEMACallback, DPOConfig, DPOTrainer, LogCompletionsCallback\n"
    (call,) = trainer_calls(ScriptBindings(ast.parse(head + body))).calls
    return call.argument(name)


@pytest.mark.parametrize(
    ("callback", "by_bema"), [("LogCompletionsCallback(trainer)", False), ("BEMACallback()", None)]
)
def test_a_callback_that_may_be_added_is_one_of_known_ones(callback: str, by_bema: bool | None) -> None:
    added = f"if flag:\n    extra = {callback}\n    trainer.add_callback(extra)\ntrainer.train()\n"
    argument = argument_of(f"trainer = DPOTrainer('m')\n{added}", "callbacks")
    assert argument.kind is Kind.UNKNOWN
    assert evaluate("by BEMACallback", argument, lambda name: argument) is by_bema
    # Whether there is one at all is not known, nor whether all that are there are others.
    assert evaluate("set", argument, lambda name: argument) is None
    assert evaluate("not by BEMACallback", argument, lambda name: argument) is (None if by_bema is False else False)


@pytest.mark.parametrize(
    "body", ["model = A(1) if flag else B(2)", "if flag:\n    model = A(1)\nelse:\n    model = B(2)"]
)
def test_an_object_of_two_branches_is_one_of_both(body: str) -> None:
    argument = argument_of(f"class A: pass\nclass B: pass\n{body}\nDPOTrainer(model, args=DPOConfig())\n", "model")
    assert argument.kind is Kind.UNKNOWN
    assert evaluate("not by *peft*", argument, lambda name: argument) is True
    assert evaluate("by *a*", argument, lambda name: argument) is None


def test_what_may_be_none_in_the_call_may_be_that_of_the_config() -> None:
    for config in ("DPOConfig(beta=0.5)", "DPOConfig(**options)"):
        argument = argument_of(f"DPOTrainer('m', beta=None if flag else 0.2, args={config})\n", "beta")
        assert (argument.kind, argument.alternatives) == (Kind.UNKNOWN, ())
    argument = argument_of("DPOTrainer('m', beta=None if flag else 0.2, args=DPOConfig())\n", "beta")
    assert {alternative.value for alternative in argument.alternatives} == {None, 0.2}


@pytest.mark.parametrize("value", ["False if flag else True", "None if flag else 'x'"])
def test_whether_a_run_is_resumed_is_not_known_if_the_value_depends(value: str) -> None:
    argument = argument_of(f"trainer = DPOTrainer('m')\ntrainer.train({value})\n", "train.resume_from_checkpoint")
    assert [evaluate(condition, argument, lambda name: argument) for condition in ("set", "unset")] == [None, None]


def test_a_key_that_may_be_set_leaves_the_others_known() -> None:
    options = "options = {'beta': 0.1}\nif flag:\n    options['loss_type'] = 'ipo'\n"
    body = f"{options}DPOTrainer('m', args=DPOConfig(**options))\n"
    assert argument_of(body, "beta").value == 0.1
    assert argument_of(body, "loss_type").kind is Kind.UNKNOWN
    assert argument_of(body, "padding_free").kind is Kind.UNSET


def test_what_a_function_assigns_to_a_global_name_has_the_names_of_the_function() -> None:
    function = "def work():\n    global config\n    beta = 0.2\n    config = DPOConfig(beta=beta)\n"
    body = f"beta = 0.1\n{function}work()\nDPOTrainer('m', args=config)\n"
    assert argument_of(body, "beta").kind is Kind.UNKNOWN

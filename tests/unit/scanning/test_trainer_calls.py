"""The arguments of a trainer call: its own, its config's, added callbacks, and those of the call for the model."""

from __future__ import annotations

from typing import Any

import pytest

BEMA = "bema-callback-frozen-parameters"
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
        from peft import LoraConfig
        from trl import BEMACallback, SFTTrainer
        trainer = SFTTrainer("gpt2", peft_config=LoraConfig(){argument})
        {statement}
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
    assert "the model is not in float32" in trainer.unknown[DTYPE]

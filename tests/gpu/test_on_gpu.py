"""Where the bugs are met: on a GPU, in bf16, with real FlashAttention, DeepSpeed, bitsandbytes, Liger and vLLM.

``make gpu`` runs this where there is a GPU. Tolerances are derived, in ``tolerances.py``.
"""

from __future__ import annotations

from typing import Any

import pytest

import tolerances

LAYERS, WIDTH, TOKENS = 2, 256, 338
"""Of the model of ``train_on_device.py``: its longest sums are over the width of the MLP or the tokens of a batch."""

patches = pytest.mark.patches
DTYPES = ("float32", "bfloat16")


def assert_close(answer: dict[str, Any], dtype: str) -> None:
    for name, backward in (("loss", False), ("gradient", True)):
        bound = tolerances.relative(dtype, layers=LAYERS, length=max(WIDTH, TOKENS), backward=backward)
        assert answer[name] is not None, f"the {name} is no number"
        assert answer[name] <= bound, f"the {name} differs by {answer[name]:.2g}: at most {bound:.2g} was expected"


def dtype_of(device: str, dtype: str) -> str:
    """Return the dtype of a run: a rehearsal has float32, which every CPU has kernels for."""
    return "float32" if device == "cpu" else dtype


@patches("moe-aux-loss-lost-under-deepspeed")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_auxiliary_loss_is_in_the_loss_under_zero(measure: Any, device: str, stage: int) -> None:
    dtype = dtype_of(device, "bfloat16")
    on, off = (
        measure("zero", "0.11.4", switch, overlays=("deepspeed",), stage=stage, dtype=dtype) for switch in ("on", "off")
    )
    assert on["wrapped_as"] == "DeepSpeedEngine"
    # The log-probs of policy and reference are equal bit by bit; the aux loss is a sum over experts.
    assert on["share"] == pytest.approx(1, abs=tolerances.relative(dtype, layers=LAYERS, length=16, backward=False))
    assert off["share"] == pytest.approx(0, abs=tolerances.relative(dtype, layers=LAYERS, length=16, backward=False))


@patches("dpo-precomputed-ref-logps-dropped")
def test_a_precomputed_reference_is_in_the_loss(measure: Any, device: str) -> None:
    dtype = dtype_of(device, "bfloat16")
    on, off = (measure("precomputed", "0.12.2", switch, dtype=dtype) for switch in ("on", "off"))
    bound = tolerances.relative(dtype, layers=LAYERS, length=WIDTH, backward=True)
    assert on["loss"] <= bound
    # Unpatched the policy of each step is its own reference: all margins are 0.
    assert off["moved"] <= 1e-6 < off["expected to move"]
    assert off["loss"] > on["loss"]


# On a CPU TRL takes 4-bit weights for sharded ones, and prepares nothing.
@pytest.mark.gpu_only
@patches("qlora-peftmodel-frozen")
def test_an_adapter_on_a_model_in_4_bits_is_trained(measure: Any) -> None:
    on, off = (measure("qlora", "0.22.0", switch, overlays=("gpu-bitsandbytes",)) for switch in ("on", "off"))
    assert off["trained"] == off["moved"] == off["grad_norm"] == 0
    assert on["trained"] > 0
    assert on["moved"] > 0
    assert on["grad_norm"] > 0


@pytest.mark.gpu_only
@patches("grpo-qlora-constructor-crash")
def test_a_grpo_trainer_is_made_with_a_model_in_4_bits(measure: Any) -> None:
    on, off = (measure("grpo_qlora", "0.22.0", switch, overlays=("gpu-bitsandbytes",)) for switch in ("on", "off"))
    assert on["error"] == ""
    assert "can not be both configured" in off["error"]


@patches("sft-padding-free-contamination")
@pytest.mark.parametrize("how", ["padding_free", "packing"])
@pytest.mark.parametrize(
    ("attention", "dtype"),
    [("sdpa", "float32"), ("eager", "float32"), ("sdpa", "bfloat16"), ("eager", "bfloat16"), ("flash", "bfloat16")],
)
def test_a_flattened_batch_is_worth_the_padded_one(
    measure: Any, device: str, attention: str, dtype: str, how: str
) -> None:
    used = dtype_of(device, dtype)
    settings = {"attention": attention, "dtype": used, "how": how}
    on, off = (measure("flattened", "0.22.0", switch, **settings) for switch in ("on", "off"))
    assert_close(on, used)
    # Without the patch the first token of each sequence is a label too.
    assert off["loss"] > on["loss"]
    assert off["gradient"] > on["gradient"]
    if attention == "flash":
        assert on["rows"] < 8


@patches("sft-padding-free-contamination")
def test_a_compiled_model_has_the_loss_of_the_eager_one(measure: Any) -> None:
    assert_close(measure("compiled", "0.22.0", "on"), "float32")


@pytest.mark.gpu_only
@pytest.mark.parametrize("dtype", DTYPES)
def test_ligers_cross_entropy_is_that_of_transformers(measure: Any, dtype: str) -> None:
    assert_close(measure("liger_sft", "0.22.0", "off", overlays=("liger",), dtype=dtype), dtype)


@pytest.mark.gpu_only
@patches("dpo-padding-free-liger")
@pytest.mark.parametrize("dtype", DTYPES)
def test_ligers_dpo_loss_of_a_flattened_batch_is_a_number(measure: Any, dtype: str) -> None:
    on, off = (measure("liger_dpo", "0.28.0", switch, overlays=("liger",), dtype=dtype) for switch in ("on", "off"))
    assert_close(on, dtype)
    assert off["loss"] is None


@pytest.mark.gpu_only
@patches("fused-lm-head-not-the-models-own")
@pytest.mark.parametrize("release", ["1.15.0", "1.16.0"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_trls_own_head_has_the_loss_of_the_models_logits(measure: Any, release: str, dtype: str) -> None:
    assert_close(measure("fused_head", release, "on", dtype=dtype), dtype)


@pytest.mark.gpu_only
@patches("vllm-sync-drifts-bf16-base")
def test_the_base_model_keeps_every_bit_beside_vllm(measure: Any) -> None:
    on, off = (measure("vllm", "1.16.0", switch) for switch in ("on", "off"))
    assert on["changed"] == 0
    assert off["changed"] > 0


@patches("sft-padding-free-contamination")
@pytest.mark.parametrize("tokens", [4096, 32768])
def test_what_a_step_costs_is_measured(measure: Any, device: str, tokens: int) -> None:
    of_run = {"tokens": 64 if device == "cpu" else tokens}
    patched, unpatched, fixed = (
        measure("cost", release, switch, **of_run)
        for release, switch in (("0.22.0", "on"), ("0.22.0", "off"), ("0.23.1", "off"))
    )
    assert patched["tokens"] == unpatched["tokens"] == fixed["tokens"]
    assert min(patched["seconds"], unpatched["seconds"], fixed["seconds"]) > 0

"""Where the bugs are met: on a GPU, in bf16, with real FlashAttention, DeepSpeed, bitsandbytes, Liger and vLLM.

``make gpu`` runs this where there is a GPU, group by group in the order of this file: what is worth most comes first.
Tolerances are derived, in ``tolerances.py``.
"""

from __future__ import annotations

from typing import Any

import pytest

from gpu import tolerances

LAYERS, WIDTH, TOKENS = 2, 256, 338
"""Of the model of ``runs.py``: its longest sums are over the width of the MLP or the tokens of a batch."""

patches, group, limit = pytest.mark.patches, pytest.mark.group, pytest.mark.limit
DTYPES = ("float32", "bfloat16")


def assert_close(answer: dict[str, Any], dtype: str) -> None:
    for name, backward in (("loss", False), ("gradient", True)):
        bound = tolerances.relative(dtype, layers=LAYERS, length=max(WIDTH, TOKENS), backward=backward)
        assert answer[name] is not None, f"the {name} is no number"
        assert answer[name] <= bound, f"the {name} differs by {answer[name]:.2g}: at most {bound:.2g} was expected"


def dtype_of(device: str, dtype: str) -> str:
    """Return the dtype of a run: a rehearsal has float32, which every CPU has kernels for."""
    return "float32" if device == "cpu" else dtype


@group("seeds")
@patches("dpo-precomputed-ref-logps-dropped")
def test_a_precomputed_reference_is_in_the_loss(measure: Any, device: str) -> None:
    dtype = dtype_of(device, "bfloat16")
    on, off = (measure("precomputed", "0.12.2", switch, dtype=dtype) for switch in ("on", "off"))
    bound = tolerances.relative(dtype, layers=LAYERS, length=WIDTH, backward=True)
    assert on["loss"] <= bound
    # Unpatched the policy of each step is its own reference: all margins are 0.
    assert off["moved"] <= 1e-6 < off["expected to move"]
    assert off["loss"] > on["loss"]


@group("seeds")
@patches("moe-aux-loss-lost-under-deepspeed")
@pytest.mark.parametrize("stage", [2, 3, 1])
def test_the_auxiliary_loss_is_in_the_loss_under_zero(measure: Any, device: str, stage: int) -> None:
    dtype = dtype_of(device, "bfloat16")
    on, off = (
        measure("zero", "0.11.4", switch, overlays=("deepspeed",), stage=stage, dtype=dtype) for switch in ("on", "off")
    )
    assert on["wrapped_as"] == "DeepSpeedEngine"
    # The log-probs of policy and reference are equal bit by bit; the aux loss is a sum over experts.
    assert on["share"] == pytest.approx(1, abs=tolerances.relative(dtype, layers=LAYERS, length=16, backward=False))
    assert off["share"] == pytest.approx(0, abs=tolerances.relative(dtype, layers=LAYERS, length=16, backward=False))


@group("liger")
@pytest.mark.gpu_only
@patches("dpo-padding-free-liger")
@pytest.mark.parametrize("dtype", DTYPES)
def test_ligers_dpo_loss_of_a_flattened_batch_is_a_number(measure: Any, dtype: str) -> None:
    on, off = (measure("liger_dpo", "0.28.0", switch, overlays=("gpu-liger",), dtype=dtype) for switch in ("on", "off"))
    assert_close(on, dtype)
    assert off["loss"] is None


@group("liger")
@pytest.mark.gpu_only
@pytest.mark.parametrize("dtype", DTYPES)
def test_ligers_cross_entropy_is_that_of_transformers(measure: Any, dtype: str) -> None:
    assert_close(measure("liger_sft", "0.22.0", "off", overlays=("gpu-liger",), dtype=dtype), dtype)


@group("deepspeed")
@patches("deepspeed-offload-drops-micro-batches")
@limit(120)
def test_accumulated_gradients_reach_an_offloaded_optimizer(measure: Any) -> None:
    overlays = ("gpu-deepspeed-0.17.5", "deepspeed")
    on, off = (measure("offloaded", "1.16.0", switch, overlays=overlays, accumulation=4) for switch in ("on", "off"))
    assert on["difference"] < 1e-3
    assert off["difference"] > 0.1


@group("deepspeed")
@limit(120)
def test_a_newer_deepspeed_drops_no_accumulated_gradient(measure: Any) -> None:
    assert measure("offloaded", "1.16.0", "off", overlays=("deepspeed",), accumulation=4)["difference"] < 1e-3


@group("adapters")
@pytest.mark.gpu_only  # On a CPU TRL takes 4-bit weights for sharded ones, and prepares nothing.
@patches("qlora-peftmodel-frozen")
def test_an_adapter_on_a_model_in_4_bits_is_trained(measure: Any) -> None:
    on, off = (measure("qlora", "0.22.0", switch, overlays=("gpu-bitsandbytes",)) for switch in ("on", "off"))
    assert off["trained"] == off["moved"] == off["grad_norm"] == 0
    assert on["trained"] > 0
    assert on["moved"] > 0
    assert on["grad_norm"] > 0


@group("adapters")
@pytest.mark.gpu_only
@patches("grpo-qlora-constructor-crash")
def test_a_grpo_trainer_is_made_with_a_model_in_4_bits(measure: Any) -> None:
    on, off = (measure("grpo_qlora", "0.22.0", switch, overlays=("gpu-bitsandbytes",)) for switch in ("on", "off"))
    assert on["error"] == ""
    assert "can not be both configured" in off["error"]


@group("adapters")
@pytest.mark.gpu_only
@patches("qlora-dora-magnitude-frozen-in-bf16")
def test_the_magnitudes_of_dora_are_trained_on_a_model_in_4_bits(measure: Any) -> None:
    on, off = (measure("dora", "0.28.0", switch, overlays=("gpu-bitsandbytes",)) for switch in ("on", "off"))
    assert on["magnitudes"] == off["magnitudes"] > 0
    assert on["moved"] == on["magnitudes"]
    assert off["moved"] == 0


@group("grpo")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("release", ["1.16.0", "0.22.0", "0.19.1"])
def test_grpos_losses_have_the_gradients_of_the_formulas(measure: Any, device: str, release: str, dtype: str) -> None:
    used = dtype_of(device, dtype)
    losses = "grpo,bnpo,dr_grpo" if release == "0.19.1" else "grpo,bnpo,dr_grpo,dapo"
    answer = measure("grpo_losses", release, "all", dtype=used, losses=losses)
    bound = tolerances.relative(used, layers=LAYERS, length=WIDTH, backward=True)
    assert {name: value for name, value in answer.items() if value > bound} == {}


@group("flash-attn")
@pytest.mark.gpu_only
@patches("sft-padding-free-contamination")
@pytest.mark.parametrize("release", ["0.22.0", "0.19.1", "0.20.0"])
@pytest.mark.parametrize("how", ["padding_free", "packing"])
def test_flash_attention_by_its_name_has_the_loss_of_the_padded_batch(measure: Any, release: str, how: str) -> None:
    settings = {"attention": "flash_attention_2", "dtype": "bfloat16", "how": how, "overlays": ("flash-attn",)}
    on, off = (measure("flattened", release, switch, **settings) for switch in ("on", "off"))
    assert_close(on, "bfloat16")
    assert on["tokens"] == 330  # Of 338 the first of each of the 8 sequences is no label.
    assert off["loss"] > on["loss"]
    assert on["rows"] < 8


@group("compiled")
@patches("sft-padding-free-contamination")
@limit(180)
@pytest.mark.parametrize("tf32", [0, 1])
def test_a_compiled_model_is_as_exact_as_it_is_without_the_patch(measure: Any, device: str, tf32: int) -> None:
    if device == "cpu" and tf32:
        pytest.skip("a CPU has no TF32")
    patched, unpatched, padded = (
        measure("compiled", "0.22.0", switch, how=how, tf32=tf32)
        for how, switch in (("padding_free", "on"), ("padding_free", "off"), ("padded", "off"))
    )
    for name in ("eager", "compiled"):
        control = max(answer[f"{name} gradient"] for answer in (unpatched, padded))
        bound = tolerances.relative("float32", layers=LAYERS, length=TOKENS, backward=True)
        assert patched[f"{name} gradient"] <= max(3 * control, bound)


@group("flattened")
@patches("sft-padding-free-contamination")
@pytest.mark.parametrize("how", ["padding_free", "packing"])
@pytest.mark.parametrize(
    ("attention", "dtype"),
    [("sdpa", "bfloat16"), ("flash", "bfloat16"), ("eager", "bfloat16"), ("sdpa", "float32"), ("eager", "float32")],
)
def test_a_flattened_batch_is_worth_the_padded_one(
    measure: Any, device: str, attention: str, dtype: str, how: str
) -> None:
    used = dtype_of(device, dtype)
    settings = {"attention": attention, "dtype": used, "how": how, "overlays": ("flash-attn",)}
    on, off = (measure("flattened", "0.22.0", switch, **settings) for switch in ("on", "off"))
    assert_close(on, used)
    # Without the patch the first token of each sequence is a label too.
    assert off["loss"] > on["loss"]
    assert off["gradient"] > on["gradient"]
    if attention == "flash":
        assert on["rows"] < 8


@group("heads")
@pytest.mark.gpu_only
@patches("fused-lm-head-not-the-models-own")
@pytest.mark.parametrize("release", ["1.16.0", "1.15.0"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_trls_own_head_has_the_loss_of_the_models_logits(measure: Any, release: str, dtype: str) -> None:
    assert_close(measure("fused_head", release, "on", dtype=dtype), dtype)


@group("heads")
@pytest.mark.gpu_only
@patches("vllm-sync-drifts-bf16-base")
def test_the_base_model_keeps_every_bit_beside_vllm(measure: Any) -> None:
    on, off = (measure("vllm", "1.16.0", switch) for switch in ("on", "off"))
    assert on["changed"] == 0
    assert off["changed"] > 0


@group("costs")
@pytest.mark.alone
@pytest.mark.parametrize(
    ("what", "release", "tokens"),
    [("sft", "1.16.0", 8192), ("dpo", "1.16.0", 8192), ("grpo", "1.16.0", 4096), ("flattened", "0.22.0", 4096),
     ("flattened", "0.22.0", 32768)],
)  # fmt: skip
def test_what_a_step_costs_is_measured(measure: Any, device: str, what: str, release: str, tokens: int) -> None:
    of_run = {"tokens": 64, "seconds": 1} if device == "cpu" else {"tokens": tokens, "seconds": 60}
    answer = measure("turns", release, "off", what=what, **of_run)
    assert answer["patches"] > 0
    assert answer["steps"] >= 12
    assert 0 < answer["at least"] <= answer["ratio"] <= answer["at most"]

"""Run inside one release: at which moments real trainers call the targets of the patches. No patch is on.

    python -m bench.inside.called OUT.json SECONDS CASE...

A case is a trainer of ``MAKERS``, which trains, evaluates, saves, and resumes in a second trainer; or ``proof ID``, the
training of a patch's proof. Each runs in a fork. Its answer is what ``moments.Observed.to_dict`` returns, or a text,
the traceback.

The proofs have the runs that need a stand-in: of Liger, of vLLM, of a quantised model.
"""

from __future__ import annotations

import functools
import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trl_hotfix.catalogue import loading
from trl_hotfix.matching import gates
from trl_hotfix.matching.versions import installed
from trl_hotfix.verification import cells

import tiny
from bench.inside import moments, trainers
from bench.proving import calls, prove, release

PEFT = ("grpo-qlora-constructor-crash", "qlora-peftmodel-frozen")


def bco(**settings: Any) -> Any:
    return trainers._preference("BCO", tiny.labelled(), ref_model=tiny.llama("models", seed=1), **settings)


def online(name: str, **settings: Any) -> Any:
    return tiny.online_dpo(*tiny.classes(name), tiny.llama("models", seed=0), **settings)


def a2po(**settings: Any) -> Any:
    from datasets import Dataset

    from tiny.data import left_padding_tokenizer

    trainer_class, config_class = tiny.classes("A2PO")
    few = {"max_completion_length": 4, "num_value_samples": 2}
    return tiny.trainer(
        trainer_class,
        model=tiny.llama("models", seed=0),
        reward_funcs=lambda prompts, **kwargs: [1.0] * len(prompts),
        args=tiny.config(config_class, **{**few, **settings}),
        train_dataset=Dataset.from_list([{"prompt": "w1 w2"}] * 8),
        tokenizer=left_padding_tokenizer(),
    )


def reusing(make: Callable[..., Any], **settings: Any) -> Any:
    """Return a trainer that uses the completions of a generation in two optimizer steps."""
    # RLOO counts each micro-batch twice in 0.26. GRPO of 0.16 can resume only where it generates.
    iterations = 4 if make is trainers.rloo else 2
    return make(num_iterations=iterations, beta=0.1, **settings)


def online_with_vllm(**settings: Any) -> Any:
    """Return a trainer of OnlineDPO in which a stand-in takes the place of vLLM."""
    import torch

    trainer = online("OnlineDPO", **settings)
    trainer.args.use_vllm = True

    def generate(prompts: Any, images: Any) -> Any:
        completions = tiny.online_completions(2 * len(prompts))
        ids = torch.tensor([[3, 4, 5]] * len(completions))
        return ids, torch.ones_like(ids), completions, (completions != 0).long()

    trainer._generate_vllm = generate
    return trainer


def grpo_of_one_length(**settings: Any) -> Any:
    trainer_class, _ = tiny.classes("GRPO")
    return tiny.grpo_of_one_length(trainer_class, tiny.llama("models", seed=0), **settings)


def prm(**settings: Any) -> Any:
    from tiny import every_trainer

    words = tiny.tokenizer()
    trainer_class, config_class = tiny.classes("PRM")
    return tiny.trainer(
        trainer_class,
        model=every_trainer._classifier("PRM"),
        args=tiny.config(config_class, **{"max_length": 16, **settings}),
        train_dataset=every_trainer._data("PRM", words),
        tokenizer=words,
    )


def tpo(**settings: Any) -> Any:
    trainer_class, config_class = tiny.classes("TPO")
    return tiny.trainer(
        trainer_class,
        model=tiny.llama("models", seed=0),
        args=tiny.config(config_class, **{"max_length": 16, **settings}),
        train_dataset=tiny.preferences().map(lambda row: {"reference": row["chosen"]}),
        tokenizer=tiny.tokenizer(),
    )


def iw_opd(**settings: Any) -> Any:
    from trl.experimental.iw_opd import IWOPDConfig, IWOPDTrainer

    return distillation((IWOPDTrainer, IWOPDConfig), **settings)


def distillation(classes: Any = None, **settings: Any) -> Any:
    from datasets import Dataset

    from tiny.data import left_padding_tokenizer

    words = left_padding_tokenizer()
    words.chat_template = tiny.chat_tokenizer().chat_template
    messages = [{"role": "user", "content": "w1 w2"}, {"role": "assistant", "content": "w3 w4"}]
    trainer_class, config_class = classes or tiny.classes("Distillation")
    teacher = tiny.llama("models", seed=1)
    # Some releases, and IW-OPD, compare the tokenizer with the teacher's.
    words.save_pretrained("models")
    teacher.config._name_or_path = "models"
    return tiny.trainer(
        trainer_class,
        model=tiny.llama("models", seed=0),
        teacher_model=teacher,
        args=tiny.config(config_class, **{"max_completion_length": 4, "max_prompt_length": 8, **settings}),
        train_dataset=Dataset.from_list([{"messages": messages, "prompt": messages[:1]}] * 8),
        tokenizer=words,
    )


def gold(**settings: Any) -> Any:
    """Return a trainer on tokens: GOLD takes no tokenizer of words, since its loss across tokenizers needs bytes."""
    from datasets import Dataset

    row = {"input_ids": [3, 4, 5, 6], "attention_mask": [1] * 4, "completion_mask": [0, 0, 1, 1]}
    texts = {"original_prompt_text": "w1 w2", "original_completion_text": " w3 w4"}
    trainer_class, config_class = tiny.classes("GOLD")
    return tiny.trainer(
        trainer_class,
        model=tiny.llama("models", seed=0),
        teacher_model=tiny.llama("models", seed=1),
        args=tiny.config(config_class, **{"lmbda": 0.0, "max_completion_length": 4, "max_length": 16, **settings}),
        train_dataset=Dataset.from_list([{**row, **texts}] * 8),
        tokenizer=tiny.tokenizer(),
    )


def with_liger(make: Callable[..., Any], **settings: Any) -> Any:
    """Return a trainer whose loss is Liger's, which the stacks lack: a stand-in takes the place of its kernel."""
    trainer = make(**settings)
    # Releases name it differently.
    trainer.use_liger_loss = trainer.use_liger_kernel = True

    def loss(model: Any, inputs: Any, *args: Any) -> Any:
        import torch

        ids = inputs.get("input_ids")
        if ids is None:
            ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        return model(input_ids=ids).logits.mean()

    trainer._forward_redirection = lambda wrapper, module, method, *args: method(*args)
    trainer.compute_liger_loss = trainer._compute_loss_liger = loss
    return trainer


def dpo_with_liger(**settings: Any) -> Any:
    """Return a trainer with TRL's own method for Liger, in which a stand-in takes the place of the kernel."""
    import torch

    trainer = trainers.dpo(**settings)
    trainer.use_liger_kernel = True
    trainer.liger_loss_fn = lambda weight, hidden, *args: (hidden.square().mean(), (torch.zeros(()),) * 7)
    return trainer


def precomputed(make: Callable[..., Any], **settings: Any) -> Any:
    """Return a trainer whose data lies in a file: without one, releases write the log-probs where they do not look."""
    return make(precompute_ref_log_probs=True, on_disk=True, **settings)


MAKERS: dict[str, Callable[..., Any]] = {
    **{name: trainers.TRAINERS[name] for name in ("DPO", "SFT", "KTO", "ORPO", "CPO", "Reward", "GKD")},
    "DPO, precomputed": functools.partial(precomputed, trainers.dpo),
    "KTO, precomputed": functools.partial(precomputed, trainers.kto),
    "DPO, Liger": dpo_with_liger,
    "DPO, synchronized": functools.partial(trainers.dpo, sync_ref_model=True),
    "BCO": bco,
    "PRM": prm,
    "OnlineDPO": functools.partial(online, "OnlineDPO"),
    "OnlineDPO, vLLM": online_with_vllm,
    "XPO": functools.partial(online, "XPO"),
    "NashMD": functools.partial(online, "NashMD"),
    "A2PO": a2po,
    "GRPO": trainers.grpo,
    "GRPO, one length": grpo_of_one_length,
    "GRPO, reusing": functools.partial(reusing, trainers.grpo),
    "GRPO, Liger": functools.partial(with_liger, trainers.grpo),
    "RLOO": trainers.rloo,
    "RLOO, reusing": functools.partial(reusing, trainers.rloo),
    "GKD, dataset": functools.partial(trainers.gkd, lmbda=0.0),
    "Distillation": distillation,
    "IWOPD": iw_opd,
    "GOLD": gold,
    "TPO": tpo,
}

WITHOUT_EVALUATION = {"OnlineDPO", "OnlineDPO, vLLM", "XPO", "NashMD", "DPO, Liger", "GRPO, Liger", "GRPO, one length"}
"""The data of online trainers and of GRPO in 0.14 are no inputs of a model; the stand-in of Liger has no outputs."""

ON_POLICY = "RLOO, reusing", "GRPO, reusing", "OnlineDPO", "XPO", "NashMD"
CASES: dict[str, tuple[str, ...]] = {
    "0.9.6": ("DPO", "DPO, precomputed", "DPO, synchronized", "SFT", "KTO", "ORPO", "CPO"),
    "0.11.4": ("DPO", "DPO, precomputed", "SFT", "KTO", "ORPO", "CPO", "BCO", "GKD"),
    "0.12.2": ("DPO", "DPO, precomputed", "SFT", "ORPO", "OnlineDPO", "XPO", "NashMD", "GKD"),
    "0.13.0": ("DPO", "KTO", "CPO", "BCO", "ORPO"),
    "0.14.0": ("GRPO, one length",),
    "0.15.0": ("SFT", "GRPO", "ORPO", "proof grpo-vllm-base-weights", "proof grpo-peft-no-input-grads"),
    "0.16.1": (
        *("DPO", "DPO, precomputed", "SFT", "GKD", "GRPO", "GRPO, reusing", "ORPO", "OnlineDPO", "XPO", "NashMD"),
        "proof transformers-gradients-times-gas",
    ),
    "0.19.1": ("DPO", "SFT", "GRPO, reusing", "GRPO, Liger", "OnlineDPO", "XPO", "proof dpo-padding-free-liger"),
    "0.21.0": ("SFT", "GRPO", "OnlineDPO", "proof qlora-peftmodel-frozen"),
    "0.22.1": ("GRPO, reusing",),
    "0.22.2": ("SFT", "Reward", "GRPO, reusing", "RLOO, reusing", *(f"proof {patch}" for patch in PEFT)),
    "0.23.0": (
        *("DPO", "SFT", "KTO", "ORPO", "CPO", "BCO", "GKD", "GKD, dataset", "Reward", "PRM"),
        *("proof qlora-peftmodel-frozen", *ON_POLICY),
    ),
    "0.26.1": ("DPO", "GRPO, reusing", "RLOO, reusing", "proof vllm-sync-drifts-bf16-base"),
    "0.28.0": (
        *("DPO", "SFT", "KTO", "GKD", "ORPO", "Reward", "GRPO, Liger", *ON_POLICY),
        *("proof dpo-padding-free-liger", "proof vllm-sync-drifts-bf16-base"),
        "proof sft-bfd-packing-splits-conversations",
    ),
    "1.5.1": (
        *("DPO", "DPO, precomputed", "DPO, Liger", "SFT", "KTO", "KTO, precomputed", "ORPO", "GKD", "GRPO, Liger"),
        *("proof extract-prompt-negative-index", *ON_POLICY),
    ),
    "1.8.0": (
        *("DPO", "SFT", "KTO", "KTO, precomputed", "ORPO", "CPO", "BCO", "Reward", "GKD", "GKD, dataset"),
        *("GRPO, reusing", "RLOO, reusing", "proof grpo-liger-dapo-normalizer"),
        *("proof apply-chat-template-loses-chosen-tokens", "proof grpo-vllm-sleep-stale-initial-weights"),
        "Distillation",
    ),
    "1.13.0": (
        *("DPO", "SFT", "KTO", "BCO", "GKD", "Reward", "Distillation", *ON_POLICY),
        *("proof left-padded-logprobs-absolute-positions", "proof sft-wrapped-packing-duplicates"),
        "proof async-grpo-loss-mean-of-micro-batches",
    ),
    "1.14.2": ("DPO", "SFT", "KTO", "Reward", "GRPO", "GRPO, Liger", "RLOO", "CPO", "ORPO"),
    "1.15.0": ("DPO", "SFT", "KTO", "Reward", "GRPO", "RLOO"),
    "1.16.0": (
        *("DPO", "DPO, precomputed", "DPO, synchronized", "SFT", "KTO", "ORPO", "CPO", "GKD", "GOLD", "Reward", "TPO"),
        *("Distillation", "GRPO, reusing", "RLOO, reusing", "OnlineDPO", "OnlineDPO, vLLM"),
        "proof bema-callback-frozen-parameters",
        *("proof gkd-onpolicy-normaliser-from-dataset-labels", "proof gold-loss-normaliser-counts-dataset-labels"),
        *("proof kto-paired-data-in-blocks", "proof vllm-sync-drifts-bf16-base"),
        *("proof sft-vlm-standard-format-no-eos", "proof sft-vlm-tools-dropped"),
        *("proof sft-silent-truncation-diagnosis", "proof extract-prompt-negative-index", "A2PO"),
        *("IWOPD", "proof grpo-tool-answers-reordered", "proof dpo-kto-vlm-tools-dropped"),
        "proof async-grpo-loss-mean-of-micro-batches",
    ),
}
"""The cases of each release. Every target of the catalogue is called in one of the releases of its range."""

CANNOT_RUN = {
    ("0.15.0@tf4.51", "proof grpo-peft-no-input-grads"): "Online DPO of 0.15.0 does not train with transformers 4.51"
}
"""The cases that a release cannot run on one of its stacks."""

UNREACHED: dict[tuple[str, str], str] = {
    (
        "grpo-plain-prompt-without-bos",
        "trl.trainer.grpo_trainer:GRPOTrainer._generate_single_turn",
    ): "it is of 0.24 and 0.25, and no case trains them; the proof does",
    **{
        ("eval-dict-metrics-collide", f"trl.experimental.{name.lower()}.{name.lower()}_trainer:{name}Trainer.log"): why
        for name, why in {
            **dict.fromkeys(("SDFT", "SDPO", "SSD"), "no case trains it; a test logs an evaluation of it"),
            "KTO": "it is of 1.6 and 1.7, and no case trains them; the tests log an evaluation of it",
        }.items()
    },
    **{
        (
            "vllm-sync-drifts-bf16-base",
            f"{module}:OnlineDPOTrainer._move_model_to_vllm",
        ): "it is called with vLLM only, for which the proof has a stand-in in GRPO and RLOO"
        for module in ("trl.trainer.online_dpo_trainer", "trl.experimental.online_dpo.online_dpo_trainer")
    },
    **{
        (
            "online-plain-prompt-without-bos",
            f"{module}:OnlineDPOTrainer._generate_vllm_server",
        ): "it is called beside a server of vLLM only"
        for module in ("trl.trainer.online_dpo_trainer", "trl.experimental.online_dpo.online_dpo_trainer")
    },
    (
        "sft-pretokenized-labels-ignored",
        "trl.trainer.sft_trainer:SFTTrainer._set_signature_columns_if_needed",
    ): "it is a target in 0.17 and 0.18 only",
    **{
        (
            "grpo-pretrained-adapter-reference-is-base",
            f"trl.trainer.grpo_trainer:GRPOTrainer.{method}",
        ): "it is a target in 0.18 only"
        for method in ("_compute_loss", "compute_liger_loss")
    },
    (
        "grpo-prompt-cut-on-the-right",
        "trl.trainer.grpo_trainer:GRPOTrainer._generate_single_turn",
    ): "it is a target in 0.24 and 0.25 only",
    **{
        (
            "kto-vlm-kl-of-own-completion",
            f"trl.experimental.kto.kto_trainer:{method}",
        ): "it is a target in 1.6 and 1.7 only"
        for method in ("DataCollatorForVisionUnpairedPreference.torch_call", "KTOTrainer.evaluation_loop")
    },
    **{
        (
            patch_id,
            "trl.experimental.sdpo.sdpo_trainer:SDPOTrainer._calculate_rewards",
        ): "no case trains SDPO"
        for patch_id in (
            "reward-model-input-without-special-tokens",
            "reward-model-left-in-train-mode",
            "think-format-reward-after-prefill",
        )
    },
    **{
        (
            "sdpo-sdft-ranks-draw-the-same-samples",
            f"trl.experimental.{name.lower()}.{name.lower()}_trainer:{name}Trainer.__init__",
        ): f"no case trains {name}"
        for name in ("SDPO", "SDFT")
    },
    (
        "reward-model-input-without-special-tokens",
        "trl.trainer.online_dpo_trainer:OnlineDPOTrainer._calculate_rewards_from_functions",
    ): "the cases of its releases have a judge",
    (
        "grpo-tool-answers-reordered",
        "trl.experimental.dppo.dppo_trainer:DPPOTrainer._tool_call_loop",
    ): "no case trains DPPO",
    **{
        (
            "grpo-vllm-double-bos",
            f"{module}:OnlineDPOTrainer._generate_vllm",
        ): "it is called with vLLM only, for which the proof has a stand-in"
        for module in ("trl.trainer.online_dpo_trainer", "trl.experimental.online_dpo.online_dpo_trainer")
    },
    **{
        (patch.id, target.name): "no case loads the best model"
        for patch in loading.load()
        if patch.id == "resume-leaves-tensors-unrestored"
        for target in patch.targets
        if target.attribute.endswith("_load_best_model")
    },
    **{
        (
            "weights-in-bf16-updates-vanish",
            f"trl.trainer.base_trainer:{base}.{method}",
        ): "it requires transformers 5, and the cases run on 4"
        for base in ("BaseTrainer", "_BaseTrainer")
        for method in ("create_optimizer", "_load_from_checkpoint")
    },
    **{
        (
            "last-window-lost-on-resume",
            target.name,
        ): "it requires transformers 4.52 to 4.56, and the cases run on others"
        for patch in loading.load()
        if patch.id == "last-window-lost-on-resume"
        for target in patch.targets
    },
    **{
        (
            "epoch-tail-lost",
            f"trl.trainer.{name.lower()}_trainer:{name}Trainer.{method}",
        ): "no case trains it with transformers 4.51"
        for name in ("Reward", "PRM")
        for method in ("get_batch_samples", "set_initial_training_values")
    },
    (
        "grpo-vllm-double-bos",
        "trl.trainer.rloo_trainer:RLOOTrainer._generate_single_turn",
    ): "no case trains RLOO on 0.24 or 0.27",
    (
        "grpo-vllm-double-bos",
        "trl.generation.vllm_generation:VLLMGeneration.generate",
    ): "it is called with vLLM only, for which the proof has a stand-in",
    **{
        (
            "grpo-double-bos-pretemplated-prompt",
            f"trl.experimental.{name.lower()}.{name.lower()}_trainer:{name}Trainer.{method}",
        ): f"no case trains {name}"
        for name, method in (
            ("DPPO", "_tokenize_prompts"),
            ("SDPO", "_tokenize_prompts_untruncated"),
            ("SDFT", "_tokenize_prompts"),
        )
    },
    (
        "think-format-reward-after-prefill",
        "trl.trainer.grpo_trainer:GRPOTrainer._generate_and_score_completions",
    ): "it is a target in 0.18 only",
    (
        "sft-prompt-length-is-that-of-a-dict",
        "trl.trainer.sft_trainer:SFTTrainer._prepare_dataset",
    ): "it requires transformers 5, and the cases of its releases run on 4",
    **{
        (
            patch,
            "trl.trainer.sft_trainer:SFTTrainer._get_num_items_in_batch",
        ): "it requires transformers 5, and the cases run on 4"
        for patch in ("sft-prompt-tuning-first-token-not-counted", "sft-gpt2-loss-counts-first-token")
    },
    **{
        (patch.id, target.name): "it requires transformers 5, and the cases run on 4"
        for patch in loading.load()
        if patch.id in ("byte-level-tokenizer-loses-spaces", "lora-skips-fused-experts")
        for target in patch.targets
    },
    **{
        (patch.id, target.name): "it requires transformers 5.2 to 5.5, and the cases run on others"
        for patch in loading.load()
        if patch.id in ("transformers-divides-gradients-twice", "transformers-divides-gradients-of-others-twice")
        for target in patch.targets
    },
}
"""Targets of a patch that no case calls, with the reason."""

ELSEWHERE = {
    **dict.fromkeys(
        (
            "trl.trainer.grpo_trainer:GRPOTrainer._compute_loss",
            "trl.trainer.grpo_trainer:GRPOTrainer._get_per_token_logps_and_entropies",
        ),
        "1.5.1",
    ),
    # With the main stack of 1.16.0 the module cannot be imported.
    "trl.experimental.async_grpo.async_grpo_trainer:AsyncGRPOTrainer.get_batch_samples": "1.13.0",
    "trl.experimental.online_dpo.online_dpo_trainer:OnlineDPOTrainer._forward": "1.13.0",
    "trl.experimental.online_dpo.online_dpo_trainer:OnlineDPOTrainer._generate": "1.13.0",
    "trl.experimental.online_dpo.online_dpo_trainer:OnlineDPOTrainer._calculate_rewards_from_functions": "1.13.0",
    "trl.trainer.dpo_trainer:DPOTrainer._compute_loss": "1.5.1",
    "trl.trainer.dpo_trainer:DPOTrainer.dpo_loss": "0.19.1",
    **{
        f"trl.trainer.{name.lower()}_trainer:{name}Trainer.{method}": "0.13.0"
        for name in ("DPO", "KTO", "CPO", "BCO")
        for method in ("get_batch_samples", "set_initial_training_values")
    },
    "trl.trainer.reward_trainer:maybe_apply_chat_template": "0.22.2",
}
"""The release in which a target is shown to be what is declared, if it is not the newest one of its range.

Up to 1.5.1 GRPO and DPO have the Liger loss in another method than their own loss. XPO inherits _forward, _generate and
the rewards of functions and calls none of them; 1.14.0 removed it. In 0.19.1 a case has the Liger loss of DPO, which
calls no dpo_loss. The reward model is trained in 0.22.2. On transformers 4.51 those of 0.13.0 have the most trainers.
"""


def train(name: str) -> None:
    """Train two steps of two micro-batches, evaluate, and resume from the checkpoint of the second step."""
    settings = {"gradient_accumulation_steps": 2, "output_dir": "out", "save_strategy": "steps", "save_steps": 2}
    # GRPO evaluates groups of four completions.
    settings |= {"per_device_eval_batch_size": 4}
    trainer = MAKERS[name](max_steps=2, **settings)
    trainer.train()
    if name not in WITHOUT_EVALUATION:
        trainer.eval_dataset = trainer.eval_dataset or trainer.train_dataset
        trainer.evaluate()
    # Older transformers cannot load the states of the generators with a newer torch, and do without the file.
    Path("out", "checkpoint-2", "rng_state.pth").unlink()
    MAKERS[name](max_steps=3, **settings).train(resume_from_checkpoint="out/checkpoint-2")


def proof(patch_id: str) -> None:
    module = prove.proof_of(patch_id)
    for run in (module.train, getattr(module, "unaffected", None)):
        if run is not None:
            run()


def answer(case: str, imported: set[str]) -> Any:
    """Return what one case observes, or the traceback of what failed."""
    import torch

    # A fork of a process that has used more threads hangs in the first matrix product.
    torch.set_num_threads(1)
    # What a patch requires besides decides whether the bug is here, and not when its targets are called.
    targets = [target for patch in loading.load() for target in gates.targets_for(patch, installed("trl") or "")]
    observed = moments.observe(cells.runnable(targets), imported)
    kind, _, patch_id = case.partition(" ")
    try:
        proof(patch_id) if kind == "proof" else train(case)
    # Any error of a release is the finding.
    except Exception:  # noqa: BLE001
        return traceback.format_exc()
    return observed.to_dict()


def main(out: str, seconds: str, *cases: str) -> None:
    import trl  # noqa: F401  the calls are recorded only when TRL is there

    imported: set[str] = set()
    with calls.recorded(imported):
        release.warm(loading.load())
    answers = {
        case: release.alone(functools.partial(answer, case, imported), float(seconds)) for case in dict.fromkeys(cases)
    }
    Path(out).write_text(json.dumps(answers), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Every wrapper acts in its self-test and in its proof, and not where the bug does not hit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from trl_hotfix.catalogue import loading
from trl_hotfix.model import Patch

from bench.proving import proofs
from bench.proving.running import process
from bench.releases import layout
from helpers import sharing

PATCHES = {patch.id: patch for patch in loading.load()}
SECONDS_A_PATCH = 300

ENDS_EARLY = "the self-test ends the call by an exception, and a call that raises is not counted as one that acted"
REFUSES = "it ends the call by an error, and a call that raises is not counted as one that acted"
NOT_TRAINED = "the proof trains another of the trainers that have this method"
WARNS = "it warns, and changes nothing"
NOTES_COLLATOR = "it notes whether the trainer is given a collator, and _prepare_dataset drops rows"
NOTES_ADAPTER = "it keeps the weights of the adapter, which are taken where the reference is computed"
UNDER_DEEPSPEED = ("deepspeed-offload-drops-micro-batches", "deepspeed-divides-by-accumulation-twice")
COUNTS = "it counts, and training_step divides by that count"
NOTES = "it notes the dataset that is cut, and _prepare_dataset says what is lost"

TRAINED: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(UNDER_DEEPSPEED, ("SFT", "DPO", "CPO", "Base", "_Base")),
    "prefix-tuning-dropped-by-gradient-checkpointing": ("DPO", "Base", "_Base"),
    "epoch-tail-lost": ("SFT", "DPO"),
    "moe-aux-loss-no-gradient-reentrant": ("SFT", "Base", "_Base"),
    "resume-replays-epoch-0-order": ("SFT", "DPO", "Base", "_Base"),
    "resume-leaves-tensors-unrestored": ("SFT", "Base", "_Base"),
    "group-by-length-resume-order": ("SFT", "Base", "_Base"),
    "byte-level-tokenizer-loses-spaces": ("SFT", "DPO", "GRPO"),
    "last-window-lost-on-resume": ("SFT", "DPO", "Base", "_Base"),
    "gkd-liger-trains-on-prompts": ("GKD",),
    "eval-dict-metrics-collide": ("DPO", "CPO", "Reward", "GRPO", "SFT"),
}
"""The trainers, or bases, that the proofs of patches with many trainers train."""


def not_trained(patch_id: str, trained: tuple[str, ...]) -> dict[str, str]:
    """Return the methods of the trainers that the proof does not train."""
    return {
        target.attribute: NOT_TRAINED
        for target in PATCHES[patch_id].targets
        if target.attribute.partition("Trainer")[0] not in trained
    }


NOTING_ROWS = {
    target.attribute: "it notes how many rows a batch has, and log weighs by that"
    for target in PATCHES["eval-mean-of-batch-means"].targets
    if target.wrapper != "weigh_by_rows"
}

COUNTING = {
    target.attribute: COUNTS
    for target in PATCHES["last-step-divided-by-all-micro-batches"].targets
    if target.wrapper == "count_the_micro_batches"
}

IDLE: dict[tuple[str, str], dict[str, str]] = {
    ("dpo-aux-loss-dropped", "self-test"): {"DPOTrainer._compute_loss_liger": WARNS},
    ("dpo-aux-loss-dropped", "proof"): {"DPOTrainer._compute_loss_liger": WARNS},
    ("dpo-precomputed-ref-logps-cache-key", "self-test"): {
        f"{method}Trainer._precompute_ref_logps": ENDS_EARLY for method in ("DPO", "KTO")
    },
    **{
        (patch_id, "self-test"): {target.attribute: ENDS_EARLY for target in PATCHES[patch_id].targets}
        for patch_id in (*UNDER_DEEPSPEED, "byte-level-tokenizer-loses-spaces", "grpo-plain-prompt-without-bos")
    },
    **{(patch_id, "proof"): not_trained(patch_id, trained) for patch_id, trained in TRAINED.items()},
    ("eval-mean-of-batch-means", "self-test"): NOTING_ROWS,
    ("eval-mean-of-batch-means", "proof"): {
        **NOTING_ROWS,
        **dict.fromkeys(("ORPOTrainer.log", "RLOOTrainer.log"), NOT_TRAINED),
    },
    ("reward-prompt-tuning-head-not-saved", "self-test"): {"RewardTrainer.__init__": ENDS_EARLY},
    ("last-step-divided-by-all-micro-batches", "self-test"): COUNTING,
    ("last-step-divided-by-all-micro-batches", "proof"): {
        **not_trained("last-step-divided-by-all-micro-batches", ("DPO", "KTO", "ORPO", "CPO", "BCO", "Reward")),
        **COUNTING,
    },
    **{
        ("dpo-fully-truncated-completions-kept", run): {
            f"{method}Trainer.__init__": NOTES_COLLATOR for method in ("DPO", "KTO")
        }
        for run in ("self-test", "proof")
    },
    **{
        ("sft-fully-truncated-examples", run): {"SFTTrainer.__init__": NOTES_COLLATOR} for run in ("self-test", "proof")
    },
    ("auto-batch-size-keeps-trained-weights", "self-test"): {
        target.attribute: ENDS_EARLY for target in PATCHES["auto-batch-size-keeps-trained-weights"].targets
    },
    ("gkd-grad-accum-scaling", "self-test"): {
        "GKDTrainer.generate_on_policy_outputs": "the self-test computes the loss of the dataset"
    },
    ("grpo-tool-answers-reordered", "self-test"): {
        f"{method}Trainer._tool_call_loop": ENDS_EARLY for method in ("GRPO", "DPPO")
    },
    ("grpo-tool-answers-reordered", "proof"): {"DPPOTrainer._tool_call_loop": NOT_TRAINED},
    ("grpo-vllm-double-bos", "self-test"): {
        target.attribute: ENDS_EARLY for target in PATCHES["grpo-vllm-double-bos"].targets
    },
    ("grpo-double-bos-pretemplated-prompt", "proof"): {"DPPOTrainer._tokenize_prompts": NOT_TRAINED},
    ("grpo-continuous-batching-casts-master-weights", "self-test"): dict.fromkeys(
        (
            "GRPOTrainer._generate_and_score_completions",
            "GRPOTrainer._generate_single_turn",
            "OnlineDPOTrainer._generate",
            "RLOOTrainer._generate_and_score_completions",
            "RLOOTrainer._generate_single_turn",
        ),
        ENDS_EARLY,
    ),
    ("grpo-cispo-epsilon-high-default", "self-test"): {"GRPOTrainer.__init__": ENDS_EARLY},
    ("grpo-loss-type-by-normalisation", "self-test"): {"GRPOTrainer.__init__": ENDS_EARLY},
    ("grpo-model-generation-config-leak", "self-test"): {
        target.attribute: ENDS_EARLY for target in PATCHES["grpo-model-generation-config-leak"].targets
    },
    **{
        ("grpo-pretrained-adapter-reference-is-base", run): {
            "GRPOTrainer.__init__": NOTES_ADAPTER,
            "RLOOTrainer.__init__": NOTES_ADAPTER,
            "GRPOTrainer.compute_liger_loss": "self-test and proof train without Liger; a test has it",
        }
        for run in ("self-test", "proof")
    },
    ("grpo-prompt-learning-left-padding", "self-test"): dict.fromkeys(
        (
            "GRPOTrainer._prepare_inputs",
            "GRPOTrainer._generate_and_score_completions",
            "RLOOTrainer._generate_and_score_completions",
        ),
        "the self-test scores; the proof and the tests generate too",
    ),
    ("grpo-resume-replays-epoch-0-order", "proof"): {"DistillationTrainer._get_train_sampler": NOT_TRAINED},
    **{
        (f"transformers-divides-gradients{others}-twice", "proof"): {"DistillationTrainer.training_step": NOT_TRAINED}
        for others in ("", "-of-others")
    },
    **{
        ("grpo-reward-list-broadcast", run): {
            target.attribute: REFUSES for target in PATCHES["grpo-reward-list-broadcast"].targets
        }
        for run in ("self-test", "proof")
    },
    ("metrics-of-rank-0", "self-test"): {"A2POTrainer._prepare_inputs": "the self-test runs the loss"},
    ("grpo-vllm-sleep-stale-initial-weights", "proof"): {
        "RLOOTrainer._generate_single_turn": "up to 0.26 RLOO has vLLM answer conversations only; that of 0.27 trains"
    },
    ("grpo-zero-loss-diagnosis", "self-test"): {
        "GRPOTrainer.__init__": "the self-test looks at the log; the proof makes trainers with adapters too"
    },
    **{
        ("online-plain-prompt-without-bos", run): {
            "OnlineDPOTrainer._generate_vllm_server": "self-test and proof have no server of vLLM; a test has one"
        }
        for run in ("self-test", "proof")
    },
    **{
        ("kto-vlm-kl-of-own-completion", run): {
            "KTOTrainer.evaluation_loop": "it notes a completion, which the collator takes for a single row"
        }
        for run in ("self-test", "proof")
    },
    ("grpo-vlm-token-types-shifted", "proof"): {"DistillationTrainer._generate_and_score_completions": NOT_TRAINED},
    **{
        ("weights-in-bf16-updates-vanish", run): {
            f"{base}._load_from_checkpoint": "it casts for the option float32 only; a test has it"
            for base in ("BaseTrainer", "_BaseTrainer")
        }
        for run in ("self-test", "proof")
    },
    ("resume-leaves-tensors-unrestored", "self-test"): {
        target.attribute: "the self-test resumes a run; the proof and the tests load the best model too"
        for target in PATCHES["resume-leaves-tensors-unrestored"].targets
        if target.attribute.endswith("._load_best_model")
    },
    ("moe-aux-coef-ignores-model-config", "self-test"): dict.fromkeys(
        (f"{method}Trainer.__init__" for method in ("SFT", "GRPO", "RLOO", "DPO", "KTO")), ENDS_EARLY
    ),
    ("num-tokens-reset-on-resume", "proof"): {"KTOTrainer.compute_loss": NOT_TRAINED},
    ("sft-pretokenized-labels-ignored", "self-test"): {
        "SFTTrainer._set_signature_columns_if_needed": "the self-test collates; the proof keeps the column too"
    },
    ("reward-model-input-without-special-tokens", "proof"): {
        "SDPOTrainer._calculate_rewards": NOT_TRAINED,
        "OnlineDPOTrainer._calculate_rewards_from_functions": NOT_TRAINED,
    },
    ("reward-model-left-in-train-mode", "proof"): {"SDPOTrainer._calculate_rewards": NOT_TRAINED},
    ("think-format-reward-after-prefill", "proof"): {
        "SDPOTrainer._calculate_rewards": NOT_TRAINED,
        "OnlineDPOTrainer._calculate_rewards_from_functions": NOT_TRAINED,
    },
    ("tool-calls-filled-with-nulls", "proof"): {"GOLDTrainer._prepare_dataset": NOT_TRAINED},
    ("peft-config-reinitialises-peftmodel", "self-test"): {
        target.attribute: ENDS_EARLY for target in PATCHES["peft-config-reinitialises-peftmodel"].targets
    },
    ("peft-non-default-adapter-name", "self-test"): dict.fromkeys(
        (f"{method}Trainer.__init__" for method in ("GRPO", "RLOO", "DPO", "KTO")), ENDS_EARLY
    ),
    ("ref-adapter-incomplete-copy", "self-test"): dict.fromkeys(
        (f"{method}Trainer.__init__" for method in ("GRPO", "RLOO", "DPO", "KTO")), ENDS_EARLY
    ),
    ("ref-model-dtype-mismatch", "self-test"): dict.fromkeys(
        (f"{method}Trainer.__init__" for method in ("GRPO", "RLOO", "DPO", "KTO")), ENDS_EARLY
    ),
    ("qlora-adapter-frozen-in-bf16", "self-test"): {
        target.attribute: ENDS_EARLY for target in PATCHES["qlora-adapter-frozen-in-bf16"].targets
    },
    ("qlora-adapter-frozen-in-bf16", "proof"): dict.fromkeys(
        (f"{method}Trainer.__init__" for method in ("GRPO", "Reward", "RLOO", "DPO", "KTO", "Distillation")),
        NOT_TRAINED,
    ),
    ("qlora-dora-magnitude-frozen-in-bf16", "self-test"): {
        target.attribute: ENDS_EARLY for target in PATCHES["qlora-dora-magnitude-frozen-in-bf16"].targets
    },
    ("qlora-dora-magnitude-frozen-in-bf16", "proof"): dict.fromkeys(
        (f"{method}Trainer.__init__" for method in ("GRPO", "Reward", "RLOO", "DPO", "KTO")), NOT_TRAINED
    ),
    ("preference-extra-eos-conversational", "self-test"): {
        target.attribute: ENDS_EARLY for target in PATCHES["preference-extra-eos-conversational"].targets
    },
    ("tokenizer-ignores-model-revision", "self-test"): {
        target.attribute: ENDS_EARLY for target in PATCHES["tokenizer-ignores-model-revision"].targets
    },
    ("reward-trainer-two-label-model", "self-test"): {"RewardTrainer.__init__": ENDS_EARLY},
    ("sft-padding-free-contamination", "proof"): {
        "SFTTrainer.__init__": "the collator is changed for worker processes, and for the prompts of 0.17 and 0.18"
    },
    ("vllm-sync-drifts-bf16-base", "proof"): {"OnlineDPOTrainer._move_model_to_vllm": NOT_TRAINED},
    **{
        ("sft-silent-truncation-diagnosis", run): dict.fromkeys(
            ("get_dataset_column_names", "pack_dataset", "truncate_dataset"), NOTES
        )
        for run in ("self-test", "proof")
    },
}
"""Patch and run -> the methods that this run does not reach, or whose wrapper has nothing to do in it, and why."""

A_VIEW = "it hands on a view that looks only later whether there is something to do"
ALWAYS = "it computes what is equal where the bug does not hit, since a look at the values would cost a synchronisation"
ACTING_UNAFFECTED: dict[str, dict[str, str]] = {
    "assistant-mask-without-end-of-turn": {"SFTTrainer._prepare_dataset": f"{A_VIEW}: the tokenizer"},
    "dpo-precomputed-ref-logps-cache-key": {
        f"{method}Trainer._precompute_ref_logps": "the file's name has the settings of each run, also of equal ones"
        for method in ("DPO", "KTO")
    },
    "grpo-continuous-batching-casts-master-weights": dict.fromkeys(
        ("GRPOTrainer._generate_and_score_completions", "GRPOTrainer._generate_single_turn"),
        "it keeps the buffers too, also where every weight has the dtype that they are cast to",
    ),
    "grpo-loss-normalisation": {"GRPOTrainer.compute_loss": ALWAYS},
    "grpo-prompt-learning-left-padding": dict.fromkeys(
        (
            "GRPOTrainer._prepare_inputs",
            "GRPOTrainer._generate_and_score_completions",
            "GRPOTrainer._get_per_token_logps",
            "GRPOTrainer._get_per_token_logps_and_entropies",
        ),
        ALWAYS,
    ),
    "grpo-scale-rewards-swapped": {"GRPOTrainer._generate_and_score_completions": ALWAYS},
    "left-padded-logprobs-absolute-positions": {
        "GRPOTrainer._get_per_token_logps": f"{A_VIEW}: the model, for a table of positions without padding",
        "GRPOTrainer._get_per_token_logps_and_entropies": f"{A_VIEW}: the model",
        "GRPOTrainer._full_logits_logps": f"{A_VIEW}: the model",
    },
    "neftune-noise-by-padded-length": {"SFTTrainer.compute_loss": ALWAYS},
    "online-dpo-metrics-include-padding": {"OnlineDPOTrainer._forward": ALWAYS},
    "orpo-nan-gradient-near-certainty": {"ORPOTrainer.odds_ratio_loss": ALWAYS},
    "ref-model-dtype-mismatch": {
        "GRPOTrainer.__init__": f"{A_VIEW}: the loaders, which ask the policy for its dtype when it is made",
    },
    "sft-silent-truncation-diagnosis": dict.fromkeys(
        ("SFTTrainer._prepare_dataset", "SFTTrainer.__init__"), "it says what is lost, and changes nothing anywhere"
    ),
    "sft-loss-normaliser-counts-first-token": {
        "SFTTrainer.__init__": "the collator of the user that leaves first tokens out of the labels is not known"
    },
}
"""Patch -> the methods whose wrappers act although loss and gradients stay the same, bit by bit, and why."""


def places_of(patch: Patch) -> tuple[layout.Place, ...]:
    """Return the oldest and the newest place with the bug, and the newest ones with the targets that both lack."""
    places = [place for place in layout.places() if place.targets_of(patch)]
    chosen = places[:1] if places[0].release == places[-1].release else [places[0], places[-1]]
    for target in patch.targets:
        if not any(target in place.targets_of(patch) for place in chosen):
            # On its main stack: on another one TRL's own trainer may fail.
            with_target = [place for place in places if target in place.targets_of(patch)]
            chosen.append(max(with_target, key=lambda place: (place.is_main, places.index(place))))
    return tuple(dict.fromkeys(chosen))


@pytest.fixture(scope="module")
def answers(request: pytest.FixtureRequest) -> Mapping[layout.Place, Mapping[str, Any]]:
    """Return the answers of each place, by patch."""
    ids = sharing.by_place(
        ((place, proofs.overlays_of(PATCHES[case["patch_id"]], place)), case["patch_id"])
        for case in sharing.parameters(request)
        for place in places_of(PATCHES[case["patch_id"]])
    )
    layout.build(place for place, _ in ids)

    def run(where: tuple[layout.Place, tuple[str, ...]]) -> Mapping[str, Any]:
        place, overlays = where
        command = ["-m", "bench.inside.acts", "{out}", str(SECONDS_A_PATCH), *ids[where]]
        answer = process(place, command, 120 + SECONDS_A_PATCH * len(ids[where]), *overlays)
        return dict.fromkeys(ids[where], answer) if isinstance(answer, str) else answer

    found: dict[layout.Place, dict[str, Any]] = {}
    for (place, _), answer in sharing.side_by_side(run, ids).items():
        found.setdefault(place, {}).update(answer)
    return found


@pytest.mark.parametrize("patch_id", sharing.heavy(PATCHES))
def test_wrappers_act_where_the_bug_is_and_nowhere_else(
    answers: Mapping[layout.Place, Mapping[str, Any]], patch_id: str
) -> None:
    seen = []
    for place in places_of(PATCHES[patch_id]):
        of_place = answers[place]
        assert not isinstance(of_place[patch_id], str), (place, of_place[patch_id])
        seen.append(of_place[patch_id])
    for run in ("self-test", "proof"):
        assert idle([of_place[run] for of_place in seen]) == set(IDLE.get((patch_id, run), ())), (run, seen)
    unaffected = [of_place["unaffected"] for of_place in seen if of_place["unaffected"] is not None]
    assert acting(unaffected) == set(ACTING_UNAFFECTED.get(patch_id, ())), unaffected


Counts = Mapping[str, tuple[int, int]]


def idle(counts: list[Counts]) -> set[str]:
    """Return the methods whose wrapper acted in no place, or was called in one and did not act there."""
    every = {attribute(target) for of_place in counts for target in of_place}
    in_vain = {
        attribute(target) for of_place in counts for target, (called, acted) in of_place.items() if called and not acted
    }
    return in_vain | every - acting(counts)


def acting(counts: list[Counts]) -> set[str]:
    return {attribute(target) for of_place in counts for target, (_, acted) in of_place.items() if acted}


def attribute(target: str) -> str:
    """Return the method without its module: a class that has moved has two."""
    return target.partition(":")[2]


def test_a_wrapper_is_idle_where_it_is_not_called_or_called_in_vain() -> None:
    here = {"old:a": (2, 1), "m:b": (0, 0), "m:c": (1, 1)}
    there = {"new:a": (0, 0), "m:b": (3, 3), "m:c": (1, 0), "m:d": (0, 0)}
    assert idle([here, there]) == {"c", "d"}
    assert acting([here, there]) == {"a", "b", "c"}

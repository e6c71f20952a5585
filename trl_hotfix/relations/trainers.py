"""The recipes of all trainers that TRL has or had, and why some trainers lack one."""

from __future__ import annotations

import dataclasses
import functools
import math
from pathlib import Path
from typing import Any

from .materials import GROUP, LONGEST
from .recipes import Make, Recipe
from .setting import CannotBeAskedError, Setting

_LENGTHS = {"max_length": 64, "max_seq_length": 64, "max_prompt_length": 32}
_ONLINE = {
    "num_generations": GROUP,
    "max_completion_length": LONGEST,
    "max_new_tokens": LONGEST,
    "max_prompt_length": 32,
    "max_length": 64,
    "temperature": 1.0,
}
_NEW_PAIR = {"loss": math.log(2), "rewards/chosen": 0.0, "rewards/rejected": 0.0, "rewards/margins": 0.0}
_NO_DROPOUT = ("disable_dropout", False)
# On the policy no ratio is clipped, and every answer ends.
_NEUTRAL_ON_POLICY: tuple[tuple[str, Any], ...] = (
    ("top_p", 1.0),
    ("reward_weights", [1.0]),
    ("epsilon", 0.3),
    ("epsilon_high", 0.5),
    ("delta", 5.0),
    ("num_iterations", 1),
    ("mask_truncated_completions", True),
    _NO_DROPOUT,
)
_AGGREGATIONS = (
    ("loss_type", "grpo", "bnpo"),
    ("loss_type", "grpo", "dapo"),
    # It divides by the longest that a completion may be, and all are.
    ("loss_type", "grpo", "dr_grpo"),
    ("importance_sampling_level", "token", "sequence"),
)
_PAIR_LOSSES = (
    *("hinge", "ipo", "nca_pair", "bco_pair", "aot", "aot_pair", "aot_unpaired"),
    *("apo_zero", "apo_down", "discopop", "sft", "sigmoid_norm"),
)


def _losses(*names: str) -> tuple[dict[str, Any], ...]:
    return tuple({"loss_type": name} for name in names)


def _bema() -> Any:
    """Return the callback that averages the weights for the reference model."""
    from trl.experimental.bema_for_ref_model import BEMACallback

    return BEMACallback(update_freq=1, update_ref_model=True, ref_model_update_freq=1)


def _group(name: str, **fields: Any) -> Recipe:
    """Return the recipe of a trainer that is GRPO's kin: groups of answers to a prompt, and a reward for each."""
    known: dict[str, Any] = {
        "rows": "prompts",
        "side": "left",
        "answers": GROUP,
        "generates": True,
        "rewarding": "function",
        "options": {**_ONLINE, "beta": 0.1},
        "neutral": _NEUTRAL_ON_POLICY,
        "fresh": {"kl": 0.0},
    }
    return Recipe(name, **{**known, **fields})


def _pairs_online(name: str, package: str, **fields: Any) -> Recipe:
    """Return the recipe of a trainer that is online DPO's kin: two answers to a prompt, and which is better."""
    known: dict[str, Any] = {
        "rows": "prompts",
        "side": "left",
        "second_model": "ref_model",
        "answers": 2,
        "rewarding": "model",
        "options": _ONLINE,
        # Every answer ends.
        "neutral": (("missing_eos_penalty", 1.0), _NO_DROPOUT),
        "variants": _losses("ipo"),
    }
    return Recipe(name, package=package, **{**known, **fields})


def _dpo(name: str, **fields: Any) -> Recipe:
    return Recipe(
        name,
        "pairs",
        side="left",
        second_model="ref_model",
        options=_LENGTHS,
        neutral=(
            ("precompute_ref_log_probs", True),
            ("ld_alpha", 1.0),
            ("label_smoothing", 0.0),
            # It is the usual loss where no label is wrong.
            ("loss_type", "robust"),
            ("loss_weights", [1.0]),
            ("rpo_alpha", 0.0),
            ("use_logits_to_keep", True),
            ("truncation_mode", "keep_end"),
            _NO_DROPOUT,
        ),
        fresh=_NEW_PAIR,
        **fields,
    )


_ALL = (
    Recipe(
        "SFT",
        "text",
        rows_with={"completion_only_loss": "completions", "assistant_only_loss": "messages"},
        options={**_LENGTHS, "dataset_text_field": "text"},
        neutral=(
            ("label_smoothing_factor", 0.0),
            ("max_length", 128),
            ("loss_type", "chunked_nll"),
            ("neftune_noise_alpha", 0.0),
        ),
        variants=(
            *_losses("dft"),
            {"completion_only_loss": True},
            {"assistant_only_loss": True},
            {"label_smoothing_factor": 0.1},
            {"packing": True, "max_length": 16},
        ),
    ),
    _dpo(
        "DPO",
        variants=(
            *_losses(*_PAIR_LOSSES),
            # Their gradients are so large that rounding grows at the usual rate.
            {"f_divergence_type": "forward_kl", "learning_rate": 0.005},
            {"loss_type": "sppo_hard", "learning_rate": 0.001},
            {"f_divergence_type": "js_divergence"},
            {"f_divergence_type": "alpha_divergence"},
            {"loss_type": "exo_pair", "label_smoothing": 1e-3},
            {"loss_type": "robust", "label_smoothing": 0.1},
            {"loss_type": ["sigmoid", "sft"], "loss_weights": [0.8, 0.2]},
            {"use_weighting": True},
            {"ld_alpha": 0.5},
            {"rpo_alpha": 1.0},
        ),
    ),
    _dpo("BEMADPO", trainers=("DPO",), package="bema_for_ref_model", callback=_bema),
    Recipe(
        "KTO",
        "labelled",
        side="left",
        second_model="ref_model",
        options=_LENGTHS,
        neutral=(("precompute_ref_log_probs", True), ("desirable_weight", 1.0), _NO_DROPOUT),
        fresh={"loss": 0.5, "kl": 0.0},
        variants=(*_losses("apo_zero_unpaired"), {"desirable_weight": 2.0}),
        least=2,
    ),
    Recipe(
        "Reward",
        "pairs",
        labels=1,
        options=_LENGTHS,
        neutral=(("center_rewards_coefficient", 0.0), _NO_DROPOUT),
        variants=({"center_rewards_coefficient": 0.1},),
    ),
    _group(
        "GRPO",
        agree_on_equal_lengths=_AGGREGATIONS,
        variants=(
            *_losses("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "vespo"),
            {"loss_type": "luspo", "importance_sampling_level": "sequence"},
            {"loss_type": "grpo", "importance_sampling_level": "sequence"},
            {"scale_rewards": "batch"},
            {"scale_rewards": "none"},
            {"scale_rewards": False},
            {"num_iterations": 2, "max_steps": 4},
            {"beta": 0.0},
            {"top_entropy_quantile": 0.5},
            {"entropy_coef": 0.1},
            {"use_bias_correction_kl": True},
        ),
    ),
    _group(
        "GSPOToken",
        trainers=("GRPO",),
        package="gspo_token",
        options={**_ONLINE, "beta": 0.1, "importance_sampling_level": "sequence_token"},
        neutral=(),
        variants=_losses("grpo", "bnpo", "dapo"),
    ),
    _group("GMPO"),
    _group("DPPO", variants=tuple({"divergence_type": name} for name in ("binary_kl", "topk_tv", "topk_kl"))),
    _group("GFPO", options={**_ONLINE, "beta": 0.1, "num_remains_in_group": GROUP // 2}),
    _group("GRPOWithReplayBuffer", package="grpo_with_replay_buffer", neutral=()),
    _group(
        "MiniLLM",
        second_model="teacher_model",
        rewarding="",
        options=_ONLINE,
        neutral=(_NO_DROPOUT,),
        fresh={},
        variants=(
            {"rkl_advantage": False},
            {"single_step_decomposition": False},
            {"gamma": 0.5},
            {"length_normalization": False},
        ),
    ),
    _group(
        "RLOO",
        options={**_ONLINE, "beta": 0.1},
        variants=({"num_iterations": 2, "max_steps": 4}, {"normalize_advantages": True}, {"beta": 0.0}),
    ),
    _group(
        "SDPO",
        options=_ONLINE,
        fresh={},
        variants=(
            {"distillation_weight": 0.5},
            {"distillation_mode": "full_logits", "distillation_alpha": 0.5},
            {"distillation_mode": "topk_logits", "distillation_topk": 8},
            {"teacher_model_kind": "base"},
        ),
    ),
    _group(
        "SDFT",
        rows="privileged",
        rewarding="",
        options={**_ONLINE, "distillation_topk": 8},
        neutral=(("num_iterations", 1), _NO_DROPOUT),
        fresh={},
        variants=(
            {"distillation_mode": "full_logits"},
            {"distillation_mode": "sampled_token", "distillation_alpha": 1.0},
            {"teacher_model_kind": "ema"},
            {"generate_from_teacher": True},
        ),
    ),
    Recipe(
        "PPO",
        "prompts",
        # PPOTrainer was another one while there were both.
        trainers=("PPOv2", "PPO"),
        side="left",
        second_model="ref_model",
        answers=1,
        rewarding="model",
        options=_ONLINE,
        neutral=(("missing_eos_penalty", 1.0), ("cliprange", 0.3)),
        variants=({"whiten_rewards": True}, {"kl_estimator": "k3"}),
    ),
    Recipe(
        "A2PO",
        "prompts",
        side="left",
        answers=1,
        rewarding="function",
        options={**_ONLINE, "num_value_samples": GROUP, "beta2": 0.1},
        neutral=(("top_p", 1.0), ("reward_weights", [1.0])),
    ),
    Recipe(
        "SSD", "prompts", side="left", answers=1, options={**_ONLINE, "filter_empty": False}, neutral=(_NO_DROPOUT,)
    ),
    _pairs_online("OnlineDPO", "online_dpo", rewarding="function", fresh={"loss": math.log(2), "objective/kl": 0.0}),
    _pairs_online("XPO", "xpo"),
    # The mixture of two models samples itself: nearly the most probable token each time. The loss has no temperature.
    _pairs_online("NashMD", "nash_md", options={**_ONLINE, "temperature": 1e-6}, variants=()),
    Recipe(
        "CPO",
        "pairs",
        side="left",
        options=_LENGTHS,
        neutral=(("label_smoothing", 0.0), _NO_DROPOUT),
        variants=(
            *_losses("hinge", "ipo", "simpo"),
            {"loss_type": "simpo", "cpo_alpha": 0.0},
            {"cpo_alpha": 0.0},
            {"alpha": 0.1},
        ),
    ),
    Recipe("ORPO", "pairs", side="left", options=_LENGTHS, neutral=(_NO_DROPOUT,)),
    Recipe(
        "TPO",
        "triples",
        options=_LENGTHS,
        neutral=(("label_smoothing", 0.0), _NO_DROPOUT),
        variants=(*_losses("hinge", "ipo", "tpo-l"), {"tpo_alpha": 0.0}),
    ),
    Recipe(
        "BCO",
        "labelled",
        side="left",
        second_model="ref_model",
        options=_LENGTHS,
        neutral=(("precompute_ref_log_probs", True), _NO_DROPOUT),
        fresh={"loss": math.log(2)},
    ),
    Recipe(
        "PRM",
        "steps",
        labels=2,
        options=_LENGTHS,
        neutral=(_NO_DROPOUT,),
        variants=({"train_on_last_step_only": True},),
    ),
    Recipe(
        "GKD",
        "messages",
        second_model="teacher_model",
        answers=1,
        options={**_LENGTHS, "max_new_tokens": LONGEST, "lmbda": 0.0},
        neutral=(_NO_DROPOUT,),
        variants=({"lmbda": 1.0}, {"seq_kd": True}, {"beta": 0.0}, {"beta": 1.0}),
    ),
    Recipe(
        "GOLD",
        "messages",
        second_model="teacher_model",
        answers=1,
        options={**_LENGTHS, "max_completion_length": LONGEST, "lmbda": 0.0},
        neutral=(_NO_DROPOUT,),
        variants=({"lmbda": 1.0}, {"beta": 0.0}, {"beta": 1.0}, {"use_uld_loss": True}),
    ),
    Recipe(
        "Distillation",
        "conversations",
        side="left",
        second_model="teacher_model",
        answers=1,
        options={**_ONLINE, "num_generations": 1},
        neutral=(_NO_DROPOUT, ("top_p", 1.0)),
        variants=({"beta": 0.0}, {"beta": 0.5}, {"lmbda": 0.0}),
    ),
    Recipe(
        "IWOPD",
        "messages",
        package="iw_opd",
        side="left",
        second_model="teacher_model",
        answers=1,
        options={**_ONLINE, "num_generations": 1},
        neutral=(_NO_DROPOUT,),
        variants=(
            {"iw_opd_gamma": 0.0},
            {"distillation_objective": "jsd"},
            {"distillation_objective": "jsd", "lmbda": 0.0},
            {"distillation_objective": "jsd", "beta": 0.0, "loss_top_k": 0},
        ),
    ),
)

RECIPES = {recipe.name: recipe for recipe in _ALL}

NO_RECIPE = {
    "AsyncGRPO": "it generates on a vLLM server",
    "AsyncDistillation": "it generates on a vLLM server",
    "ServerDistillation": "its teacher is a vLLM server",
    "BaseSelfDistillation": "SDFT and SDPO were made of it",
    "PAPO": "it asks for images, and the materials have no model that sees",
    "IterativeSFT": "the user calls its step: it has no loop",
    "DDPO": "it trains a diffusion pipeline",
    "AlignProp": "it trains a diffusion pipeline",
}
"""Trainers that no recipe makes, and why."""


def recipe_of(trainer_class: Any) -> Recipe:
    """Return the recipe of the TRL trainer that a class inherits from. Raises ``CannotBeAskedError``."""
    for base in trainer_class.__mro__:
        name = base.__name__.removesuffix("Trainer")
        if base.__module__.partition(".")[0] == "trl":
            named = [recipe for recipe in _ALL if name in (recipe.trainers or (recipe.name,))]
            of_package = [recipe for recipe in named if recipe.package and recipe.package in base.__module__]
            if named:
                return (of_package or named)[0]
    known = ", ".join(f"{name}Trainer" for name in RECIPES)
    raise CannotBeAskedError(f"{trainer_class.__name__} inherits from none of {known}; give a recipe")


def of_the_user(found: Any, folder: Path, *, is_recipe: bool) -> tuple[Recipe, Make]:
    """Return the recipe of a user's trainer, and what makes it: his own recipe, or ours for his subclass.

    A recipe is called once, to see which trainer it makes. It says nothing of losses that TRL's trainer computes too.
    """
    trainer_class = type(found(Setting(), folder)) if is_recipe else found
    recipe = dataclasses.replace(recipe_of(trainer_class), variants=())
    if is_recipe:
        return recipe, found
    return recipe, functools.partial(recipe.make, trainer_class=found)

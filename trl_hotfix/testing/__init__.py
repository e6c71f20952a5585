"""Stand-ins for self-tests. It is public: packs may use it too.

A self-test calls the real installed methods, within milliseconds, without a network and without a GPU. So it needs
trainers that were never initialised, models of one matrix and tokenizers without files.

==============  =======================================================================================================
``trainers``    a trainer of any family: ``stub_trainer``, ``constructed``, ``begin_trainer`` with ``StopConstruction``,
                ``default_arguments`` of a config, ``absent_if_reexported``, ``quick_is_peft_model``; the classes of a
                module (``trainer_and_config``), a tokenizer as they take it (``as_tokenizer_of``)
``dpo``         DPO, CPO, ORPO, KTO and BCO: ``dpo_stub``; steps of pairs and their loss by the formula (``Pair``,
                ``PairMicroBatch``, ``pair_micro_batches``, ``pair_batch``, ``pair_log_probs``,
                ``pair_loss``); batches that may be flattened (``absent_if_never_flattened``, ``forwarded``)
``logs``        a trainer that logs what it has evaluated: ``stub_that_logs``, of a ``trainer_class_of`` a module, with
                ``metrics_of_a_mode``
``grpo``        the loss of GRPO: ``stub_grpo_trainer``, and an empty ``metrics_by_mode``
``generation``  GRPO and RLOO generate (``stub_that_generates``, ``completions_of``) and score (``stub_that_scores``,
                ``scored_completions``), with a ``PromptTokenizer``
``references``  the loss of GRPO with a reference or an adapter (``stub_with_reference``), and that of its formula
                (``token_losses_of_a_group``)
``rewards``     a reward model that notes what it scores (``NotingReward``) in GRPO,
                RLOO, SDPO and OnlineDPO: ``stub_with_rewards``, ``score_texts`` and the ``method_that_scores``
``online``      OnlineDPO, XPO and NashMD: ``online_dpo_stub``; the prompts of A2PO: ``a2po_stub``, ``a2po_prompts``
``sft``         SFT prepares a dataset (``sft_prepared``; ``quick_sft_prepared``, and ``quick_rows`` for self-tests) and
                differentiates the loss of a mixture of experts (``SftMoeStep``)
``flattened``   SFT's loss of a flattened batch (``flattened_batch``, ``sft_trainer_of``), with a model that shows what
                its tokens have seen (``model_of_means``, ``gradient_of_seen``)
``gkd``         GKD and GOLD: ``distillation_stub``, the ``divergence`` of its models
``models``      ``tiny_causal_lm`` and ``give_decoder``, ``tiny_moe_lm``, ``tiny_attention_model``,
                ``wrapped_like_deepspeed``
``tokenizers``  ``CharacterTokenizer``, ``BeginningTokenizer``, ``digit_tokenizer``, ``tiny_tokenizer``
``chats``       ``messages`` for a ``CharacterTokenizer``, ``only_iterable`` for a dataset of them
``completions`` the completions of such messages, as SFT prepares them: ``prepared_completions``
``vision``      ``CharacterProcessor``, for the collator of SFT on images
``steps``       one of two micro-batches, divided by transformers and by accelerate: ``gradient_of_one_of_two``
``deepspeed``   a step under DeepSpeed (``micro_batch_under_deepspeed``) of a ``class_with_steps``, and a method of the
                installed one (``deepspeed_method``), which is not imported
``vllm``        the class that hands weights over to vLLM, or generates with it (``class_with_vllm``)
``adapters``    a model for adapters (``base_for_adapters``); LoRA beneath a checkpoint (``base_and_lora``), and the
                gradients of its matrices (``lora_gradients``)
``tools``       tools that a model calls: a ``running_loop`` for asynchronous ones, GRPO's loop of calls up to what it
                has ``answered`` (``stub_with_tools``; ``has_tools_of_rows``)
``processes``   ``single_process`` for modules that ask for the ranks, ``stream`` for datasets without a cache,
                ``recorded_warnings``
==============  =======================================================================================================

torch, transformers, datasets and TRL are imported inside functions only, because a patch module must load without them.
"""

from __future__ import annotations

from .adapters import base_and_lora, base_for_adapters, lora_gradients
from .chats import messages, only_iterable
from .completions import prepared_completions
from .deepspeed import class_with_steps, deepspeed_method, micro_batch_under_deepspeed
from .dpo import (
    Pair,
    PairMicroBatch,
    absent_if_never_flattened,
    dpo_stub,
    forwarded,
    pair_batch,
    pair_log_probs,
    pair_loss,
    pair_micro_batches,
)
from .flattened import flattened_batch, gradient_of_seen, model_of_means, sft_trainer_of
from .generation import PromptTokenizer, completions_of, scored_completions, stub_that_generates, stub_that_scores
from .gkd import distillation_stub, divergence
from .grpo import metrics_by_mode, stub_grpo_trainer
from .logs import metrics_of_a_mode, stub_that_logs, trainer_class_of
from .models import give_decoder, tiny_attention_model, tiny_causal_lm, tiny_moe_lm, wrapped_like_deepspeed
from .online import a2po_prompts, a2po_stub, online_dpo_stub
from .processes import recorded_warnings, single_process, stream
from .references import stub_with_reference, token_losses_of_a_group
from .rewards import NotingReward, method_that_scores, score_texts, stub_with_rewards
from .sft import SftMoeStep, quick_rows, quick_sft_prepared, sft_prepared
from .steps import gradient_of_one_of_two
from .tokenizers import BeginningTokenizer, CharacterTokenizer, digit_tokenizer, tiny_tokenizer
from .tools import answered, has_tools_of_rows, running_loop, stub_with_tools
from .trainers import (
    ONE_PROCESS,
    StopConstruction,
    absent_if_reexported,
    as_tokenizer_of,
    begin_trainer,
    constructed,
    default_arguments,
    quick_is_peft_model,
    stub_trainer,
    trainer_and_config,
)
from .vision import CharacterProcessor
from .vllm import class_with_vllm

__all__ = [
    "ONE_PROCESS",
    "BeginningTokenizer",
    "CharacterProcessor",
    "CharacterTokenizer",
    "NotingReward",
    "Pair",
    "PairMicroBatch",
    "PromptTokenizer",
    "SftMoeStep",
    "StopConstruction",
    "a2po_prompts",
    "a2po_stub",
    "absent_if_never_flattened",
    "absent_if_reexported",
    "answered",
    "as_tokenizer_of",
    "base_and_lora",
    "base_for_adapters",
    "begin_trainer",
    "class_with_steps",
    "class_with_vllm",
    "completions_of",
    "constructed",
    "deepspeed_method",
    "default_arguments",
    "digit_tokenizer",
    "distillation_stub",
    "divergence",
    "dpo_stub",
    "flattened_batch",
    "forwarded",
    "give_decoder",
    "gradient_of_one_of_two",
    "gradient_of_seen",
    "has_tools_of_rows",
    "lora_gradients",
    "messages",
    "method_that_scores",
    "metrics_by_mode",
    "metrics_of_a_mode",
    "micro_batch_under_deepspeed",
    "model_of_means",
    "online_dpo_stub",
    "only_iterable",
    "pair_batch",
    "pair_log_probs",
    "pair_loss",
    "pair_micro_batches",
    "prepared_completions",
    "quick_is_peft_model",
    "quick_rows",
    "quick_sft_prepared",
    "recorded_warnings",
    "running_loop",
    "score_texts",
    "scored_completions",
    "sft_prepared",
    "sft_trainer_of",
    "single_process",
    "stream",
    "stub_grpo_trainer",
    "stub_that_generates",
    "stub_that_logs",
    "stub_that_scores",
    "stub_trainer",
    "stub_with_reference",
    "stub_with_rewards",
    "stub_with_tools",
    "tiny_attention_model",
    "tiny_causal_lm",
    "tiny_moe_lm",
    "tiny_tokenizer",
    "token_losses_of_a_group",
    "trainer_and_config",
    "trainer_class_of",
    "wrapped_like_deepspeed",
]

"""What the wrappers and self-tests of patches share. It is public: packs may use it too.

========================  =============================================================================================
``beginnings``            whether a tokenizer puts a beginning-of-sequence token before a text (``adds_beginning``), and
                          a view of one that puts none before a text that has its own (``beginning_once``)
``Call``, ``wrapper``     what a wrapper is given, and its mark
``calls``                 the model that a call is given, its module, an attribute for one call; the arguments of a call
                          for wrappers with wrapt's four arguments
``act``, ``Mark``         say that such a wrapper acts where the witness cannot see it: in place, or by a hook
``once``                  what is done once for each trainer: ``Once``, ``WarnOnce``
``checkpoints``           what a callback keeps beside a checkpoint, and finds again in a resumed run
``datasets``              what a dataset has before it is prepared: ``masks_prompts_of_messages``
``dropped_rows``          rows that a trainer must not have: ``only_rows``, and whether the collator is the user's
``ends``                  an end-of-sequence id that equals each of several, where TRL compares tokens with one
``views``                 views of tokenizers, which TRL is given: how they are pickled
``verdicts``              the answer of a self-test: ``judge``, ``absent``, ``absent_on`` an error
``flattened_batches``     batches without padding: which models keep their sequences apart, and how to make the others
``heads``                 TRL's own LM heads: ``with_names``, a copy of a function with other global names, and
                          ``decoder_returns``, a model whose decoder is not run
``means``                 metrics: a ``Mean`` that knows of how many rows or tokens it is (``counted``), ``mean_of_all``
                          batches or micro-batches, ``count_of_all_ranks``, ``without_doubled_rows``
``plain_prompts``         a call in which TRL puts one such token before each plain prompt: ``begun_with_bos``
``soft_prompts``          what PEFT's soft prompts do to a batch: ``virtual_tokens_come_first``
``training``              what a trainer does around its loss: micro-batches, ranks, preparing a dataset, router losses
========================  =============================================================================================

``trl_hotfix.testing`` has the stand-ins for self-tests. torch, transformers and TRL are imported inside functions only,
because a patch module must load without them.
"""

from __future__ import annotations

from ..call import Call, Mark, act, act_of_this_call, wrapper
from .beginnings import adds_beginning, beginning_once
from .calls import argument, called_with, module_of, shadowed, with_config
from .checkpoints import is_sharded, keep_beside_checkpoint, kept_beside_checkpoint
from .datasets import masks_prompts_of_messages
from .dropped_rows import has_own_collator, note_own_collator, only_rows
from .flattened_batches import (
    MASKABLE,
    Places,
    attention_keeps_apart,
    block_diagonal,
    flattened_again,
    in_rows,
    isolated,
    places_in_rows,
    sequence_numbers,
    why_sequences_mix,
)
from .heads import decoder_returns, with_names
from .means import Mean, count_of_all_ranks, counted, mean_of_all, without_doubled_rows
from .once import Once, WarnOnce
from .plain_prompts import begun_with_bos
from .soft_prompts import virtual_tokens_come_first
from .training import (
    GeneratedLabels,
    copies_of_a_loss_of_all_gpus,
    copies_of_the_loss,
    deepspeed_divides,
    deepspeed_engine,
    micro_batches,
    nobody_divides,
    plain_model,
    prepared_first,
)
from .verdicts import absent, absent_on, judge
from .views import pickled_as_made

__all__ = [
    "MASKABLE",
    "Call",
    "GeneratedLabels",
    "Mark",
    "Mean",
    "Once",
    "Places",
    "WarnOnce",
    "absent",
    "absent_on",
    "act",
    "act_of_this_call",
    "adds_beginning",
    "argument",
    "attention_keeps_apart",
    "beginning_once",
    "begun_with_bos",
    "block_diagonal",
    "called_with",
    "copies_of_a_loss_of_all_gpus",
    "copies_of_the_loss",
    "count_of_all_ranks",
    "counted",
    "decoder_returns",
    "deepspeed_divides",
    "deepspeed_engine",
    "flattened_again",
    "has_own_collator",
    "in_rows",
    "is_sharded",
    "isolated",
    "judge",
    "keep_beside_checkpoint",
    "kept_beside_checkpoint",
    "masks_prompts_of_messages",
    "mean_of_all",
    "micro_batches",
    "module_of",
    "nobody_divides",
    "note_own_collator",
    "only_rows",
    "pickled_as_made",
    "places_in_rows",
    "plain_model",
    "prepared_first",
    "sequence_numbers",
    "shadowed",
    "virtual_tokens_come_first",
    "why_sequences_mix",
    "with_config",
    "with_names",
    "without_doubled_rows",
    "wrapper",
]

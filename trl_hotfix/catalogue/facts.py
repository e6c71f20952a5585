"""The facts of a model, its tokenizer, its launch and its dataset that decide what no argument says: ``facts`` of hits.

``depends`` says it for a reader, and ``facts`` for a program: conditions, in the language of ``when``, that hold
together if, and only if, what ``depends`` says is so. ``scan`` knows those that a model's folder, a config of
accelerate and the rows of a dataset tell (``scanning/facts.py``). A trainer that begins to train tells all
(``recording/trainer_facts.py``).
"""

from __future__ import annotations

from collections.abc import Mapping

OF_FILES: Mapping[str, str] = {
    "experts": "the model is a mixture of experts: true or false",
    "output_router_logits": "output_router_logits of the model's config: true or false",
    "router_aux_loss_coef": "router_aux_loss_coef of the model's config, as it was loaded: a number",
    "router_loss": "the model's config, or its text_config, has output_router_logits, whatever it is: true or false",
    "model_type": "model_type of the model's config, such as gpt2",
    "scales_logits": "the model scales its logits by logits_scaling or lm_head_multiplier: true or false",
    "quantized": "the model, or the base of its adapter, is loaded in 4 or 8 bits of bitsandbytes: true or false",
    "labels": "the number of labels of the model's config: a number",
    "pad_is_eos": "the tokenizer's padding token is its end-of-sequence token, or is missing: true or false",
    "adds_bos": "the tokenizer puts a beginning-of-sequence token before a text: true or false",
    "other_ends": "the model lists an end-of-sequence token that is not the tokenizer's: true or false",
    "sampling_settings": "the generation config has a temperature, top_p, top_k, ... of its own: true or false",
    "plain_lora": "the adapter is a LoRA of linear layers, and of nothing else: true or false",
    "distributed": "deepspeed, fsdp or ddp",
    "processes": "the number of processes: a number",
    "zero_stage": "the stage of DeepSpeed's ZeRO: a number",
    "optimizer_offloaded": "DeepSpeed keeps the optimizer on the CPU or on NVMe: true or false",
}
"""The facts that a model's folder or a config of accelerate or DeepSpeed may tell, with what they mean."""

OF_TRAINERS: Mapping[str, str] = {
    "dtype": "the dtype of the weights that are not an adapter's, such as bfloat16",
    "trained_dtype": "the dtype of the parameters that are trained, such as float32",
    "mixed_precision": "bf16 or fp16 of the config, whichever is on",
    "default_attention": "the attention is what transformers takes by default, sdpa for most models: true or false",
    "mixes_sequences": "the model mixes the sequences of a row whose position_ids start again: true or false",
    "attends_across": "sequences in one row attend to one another, as without FlashAttention they may: true or false",
    "soft_prompt": "PEFT puts virtual tokens before each row, as in prompt tuning and p-tuning: true or false",
    "frozen_parameters": "a parameter of the model is frozen: true or false",
    "forward_kwargs": "the forward of the model takes **kwargs: true or false",
    "template_end": "what the chat template puts behind the last message: nothing, eos, or eos and blanks",
    "triton": "Triton is there, and a GPU for it: true or false",
    "epochs_before": "the number of whole epochs before this training, as it was resumed: a number",
    "synchronized": "the reference model was synchronized before this training, as it was resumed: true or false",
}
"""The facts that only a trainer knows, when it begins to train."""

OF_DATASETS: Mapping[str, str] = {
    "columns": "the columns of the training dataset, as it was given to the trainer",
    "tokens_in_one_piece": "it has input_ids, and a batch of them for TRL is a part of a longer piece: true or false",
    "conversational": "its texts are messages with role and content, and not plain texts: true or false",
    "images": "it has a column image or images: true or false",
    "pairs": "it has the columns chosen and rejected: true or false",
    "prompt_completion": "it has the columns prompt and completion: true or false",
    "text_column": "it has a column text: true or false",
    "named_text_column": "it has the column that dataset_text_field names: true or false",
    "sharegpt_roles": "it has messages with from and value, and the roles human and gpt: true or false",
    "any_text_has_bos": "its texts, rendered ones too, begin with a beginning-of-sequence token: true or false",
    "plain_text_has_bos": "its texts, not messages, begin with a beginning-of-sequence token: true or false",
    "no_prefix": "the tokens of a prompt are not a prefix of those of prompt and completion: true or false",
    "prefilled": "a prompt of messages ends with one of the assistant: true or false",
}
"""The facts of the training dataset: by its columns, their types, and the roles of its first row."""

FACTS: Mapping[str, str] = {**OF_FILES, **OF_TRAINERS, **OF_DATASETS}
"""The names of all facts, with what they mean."""

"""Calls of wrappers with batches and models of real size, for the patches whose code allocates or walks a model.

Each case returns one call as TRL makes it. What TRL's function does is left out, but it calls what the wrapper has left
in its way, such as a view of the model. Sequences have 500 tokens. The models have shapes and no weights.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

from trl_hotfix.call import Call as CallOfTrl
from trl_hotfix.call import takes_call

from benchmarks.own_code import CLOCK, Memory, counted_modules, counted_tensors

SEQUENCE = 500
TOKENS = (1_000, 100_000)
REPETITIONS = 5

Call = Callable[[], Any]
CASES: dict[str, Callable[[Size], Call]] = {}
"""The case of each patch that needs one, by its id."""

NOT_ON_A_GPU = {"fused-lm-head-crash-without-triton": "where a GPU trains, Triton runs, and the head is TRL's own"}
"""The patches that do nothing in a step on a GPU, and why."""


@dataclass(frozen=True)
class Size:
    """A micro-batch of so many tokens, and a model. ``patch`` is the module of the patch."""

    patch: ModuleType
    tokens: int
    model: Any
    accelerator: Any

    @property
    def rows(self) -> int:
        return self.tokens // SEQUENCE

    @property
    def ids(self) -> Any:
        """Token ids, ``(rows, length)``."""
        import torch

        return torch.full((self.rows, SEQUENCE), 7)

    @property
    def mask(self) -> Any:
        """A mask of tokens, ``(rows, length)``, without padding."""
        import torch

        return torch.ones((self.rows, SEQUENCE), dtype=torch.long)

    @property
    def numbers(self) -> Any:
        """A number for each token, ``(rows, length)``."""
        import torch

        return torch.zeros((self.rows, SEQUENCE))


def case(patch_id: str) -> Callable[[Callable[[Size], Call]], Callable[[Size], Call]]:
    def register(make: Callable[[Size], Call]) -> Callable[[Size], Call]:
        CASES[patch_id] = make
        return make

    return register


def called(wrapper: Callable[..., Any], wrapped: Callable[..., Any], trainer: Any, *args: Any, **more: Any) -> Call:
    """Return the call of a wrapper around ``wrapped``, which stands for TRL's function. ``more``: its options."""
    theirs = CLOCK.theirs(wrapped)
    if takes_call(wrapper):
        return lambda: wrapper(CallOfTrl(theirs, trainer, args, {}), **more)
    return lambda: wrapper(theirs, trainer, args, {}, **more)


def dense() -> Any:
    """Return a Llama with 1.2 billion parameters."""
    return _llama(layers=16)


def mixture() -> Any:
    """Return a mixture of experts with about 30,000 modules: 48 layers of 128 experts."""
    import torch

    model = _llama(layers=48)
    with torch.device("meta"):
        for layer in model.model.layers:
            expert = type(layer.mlp)
            layer.mlp = torch.nn.ModuleList(expert(model.config) for _ in range(128))
    return model


def _llama(layers: int) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128_256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        tie_word_embeddings=True,
    )
    # What the patches of a mixture of experts read; a dense model has it here too.
    config.router_aux_loss_coef, config.output_router_logits = 0.001, True
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.router_aux_loss_coef = 0.001
    # Without this the model would compute; its shapes are all that is wanted.
    model.forward = lambda *args, **kwargs: SimpleNamespace(aux_loss=torch.zeros(()))
    return model.train()


def measured(patch_id: str, patch: ModuleType) -> dict[str, Any]:
    """Return what the first call and the later ones take at each size. Nothing if the patch has no case."""
    from accelerate import Accelerator

    if patch_id not in CASES:
        return {}
    accelerator = Accelerator(cpu=True)
    # The first call of all imports what it needs.
    of_one_call(CASES[patch_id](Size(patch, TOKENS[0], dense(), accelerator)))
    sizes: dict[str, Any] = {}
    for tokens in TOKENS:
        sizes[f"dense, {tokens}"] = _of_size(patch_id, Size(patch, tokens, dense(), accelerator))
    if sizes[f"dense, {TOKENS[0]}"]["first"]["modules"] > 1:
        sizes[f"mixture, {TOKENS[0]}"] = _of_size(patch_id, Size(patch, TOKENS[0], mixture(), accelerator))
    return sizes


def _of_size(patch_id: str, size: Size) -> dict[str, Any]:
    model = {
        "modules": sum(1 for _ in size.model.modules()),
        "parameters": sum(weight.numel() for weight in size.model.parameters()),
    }
    call = CASES[patch_id](size)
    first, *later = [of_one_call(call) for _ in range(1 + REPETITIONS)]
    typical = sorted(later, key=lambda record: float(record["seconds"]))[REPETITIONS // 2]
    return {"first": first, "later": typical, "model": model}


def of_one_call(call: Call) -> dict[str, Any]:
    """Return the time of our code in a call, the memory that it needs at most, and what it counts."""
    CLOCK.reset()
    memory = Memory()
    with counted_modules(), counted_tensors(memory):
        call()
    names = ("seconds", "operations", "synchronisations", "modules", "bytes")
    totals = {name: sum(getattr(span, name) for span in CLOCK.spans) for name in names}
    return {**totals, "peak": memory.peak}


# The cases. Each has the names of TRL's parameters that the wrapper reads.


@case("grpo-kl-metric-token-level")
def _(size: Size) -> Call:
    metrics: dict[str, Any] = {"train": defaultdict(list)}
    trainer = SimpleNamespace(loss_type="grpo", beta=0.04, accelerator=size.accelerator, _metrics=metrics)
    divergence = size.numbers

    def compute_loss(model: Any, inputs: Any) -> Any:
        metrics["train"]["kl"].append(0.0)
        return trainer.beta * divergence

    wrapper = size.patch.note_the_kl_that_the_loss_has
    return called(wrapper, compute_loss, trainer, size.model, {"completion_mask": size.mask})


@case("grpo-loss-normalisation")
def _(size: Size) -> Call:
    trainer = SimpleNamespace(_get_per_token_logps=lambda model, ids, attention_mask, logits_to_keep: None)
    ids = size.ids

    def compute_loss(model: Any, inputs: Any) -> Any:
        return trainer._get_per_token_logps(model, ids, inputs["completion_mask"], SEQUENCE)

    options = {"normalisation": "sequence"}
    inputs = {"completion_mask": size.mask}
    return called(size.patch.normalise, compute_loss, trainer, size.model, inputs, options=options)


@case("grpo-pretrained-adapter-reference-is-base")
def _(size: Size) -> Call:
    # The weights of the model stand for those of an adapter.
    copy = dict(size.model.named_parameters())
    trainer = SimpleNamespace(model=size.model, accelerator=size.accelerator, **{size.patch._COPY: copy})

    def score(inputs: Any) -> None:
        with trainer.model.disable_adapter():
            pass

    return called(size.patch.take_them_for_the_reference, score, trainer, [])


@case("left-padded-logprobs-absolute-positions")
def _(size: Size) -> Call:
    size.model.config.model_type = "gpt2"
    trainer = SimpleNamespace(accelerator=size.accelerator)

    def log_probs(model: Any, input_ids: Any, attention_mask: Any) -> Any:
        return model(input_ids=input_ids, attention_mask=attention_mask)

    wrapper = size.patch.count_positions_from_the_first_token
    return called(wrapper, log_probs, trainer, size.model, size.ids, size.mask)


@case("online-dpo-metrics-include-padding")
def _(size: Size) -> Call:
    log_probs = size.numbers

    def forward(model: Any, prompt_ids: Any, prompt_mask: Any, completion_ids: Any, completion_mask: Any) -> Any:
        return log_probs

    arguments = (size.model, size.ids, size.mask, size.ids, size.mask)
    return called(size.patch.leave_out_the_padding, forward, None, *arguments)


@case("gkd-onpolicy-normaliser-from-dataset-labels")
def _(size: Size) -> Call:
    trainer = SimpleNamespace(current_gradient_accumulation_steps=4)
    labels = size.ids
    size.patch._generated.note(labels.clone())

    def compute_loss(model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> None:
        pass

    wrapper = size.patch.divide_by_the_tokens_of_the_loss
    return called(wrapper, compute_loss, trainer, size.model, {"labels": labels}, False, 2_000)


@case("gold-loss-normaliser-counts-dataset-labels")
def _(size: Size) -> Call:
    model = SimpleNamespace(training=True)
    parts = [{"labels": size.ids} for _ in range(4)]
    arguments = SimpleNamespace(average_tokens_across_devices=True)
    accelerator = SimpleNamespace(gather=lambda count: count, num_processes=1)
    trainer = SimpleNamespace(
        model=model, use_uld_loss=False, args=arguments, accelerator=accelerator, _buffered_inputs=parts
    )

    def compute_loss(model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> None:
        pass

    wrapper = size.patch.divide_by_the_tokens_of_the_step
    return called(wrapper, compute_loss, trainer, size.model, parts[0], False, 2_000)


@case("distillation-normaliser-counts-dataset-labels")
def _(size: Size) -> Call:
    model = SimpleNamespace(training=True)
    parts = [{"labels": size.ids} for _ in range(4)]
    arguments = SimpleNamespace(average_tokens_across_devices=True)
    accelerator = SimpleNamespace(gather=lambda count: count, num_processes=1)
    trainer = SimpleNamespace(
        model=model, use_teacher_server=False, args=arguments, accelerator=accelerator, _buffered_inputs=parts
    )

    def compute_loss(model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> None:
        pass

    wrapper = size.patch.divide_by_the_tokens_of_the_buffer
    return called(wrapper, compute_loss, trainer, size.model, parts[0], False, 2_000)


@case("sft-label-smoothing-times-gas")
def _(size: Size) -> Call:
    import torch
    from transformers.trainer_pt_utils import LabelSmoother

    def mean(self: Any, outputs: Any, labels: Any, shift_labels: bool = False) -> Any:
        return torch.ones(())

    smoother = type("Smoother", (LabelSmoother,), {"__call__": CLOCK.theirs(mean)})()
    arguments = SimpleNamespace(loss_type="nll", n_gpu=1)
    trainer = SimpleNamespace(
        label_smoother=smoother, model_accepts_loss_kwargs=True, compute_loss_func=None, args=arguments
    )

    def compute_loss(model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> None:
        trainer.label_smoother(None, inputs["labels"], shift_labels=True)

    wrapper = size.patch.weigh_by_tokens
    return called(wrapper, compute_loss, trainer, size.model, {"labels": size.ids}, False, 2_000)


@case("sft-loss-normaliser-counts-first-token")
def _(size: Size) -> Call:
    from transformers import Trainer
    from transformers.loss.loss_utils import ForCausalLMLoss

    trainer: Any = Trainer.__new__(type("SFTTrainer", (Trainer,), {}))
    model = SimpleNamespace(config=size.model.config, loss_function=ForCausalLMLoss)
    arguments = SimpleNamespace(average_tokens_across_devices=False, n_gpu=1, device="cpu", world_size=1)
    vars(trainer).update(model=model, args=arguments, accelerator=size.accelerator, compute_loss_func=None)
    vars(trainer).update(model_accepts_loss_kwargs=True)
    called(size.patch.count_what_is_predicted, lambda: None, trainer)()
    batch = {"input_ids": size.ids, "labels": size.ids}
    if hasattr(Trainer, "_get_num_items_in_batch"):
        return lambda: trainer._get_num_items_in_batch([batch], "cpu")
    device = ["cpu"] * (len(inspect.signature(Trainer.get_batch_samples).parameters) - 3)
    return lambda: trainer.get_batch_samples(iter([batch]), 1, *device)


@case("sft-tokens-weighted-per-rank")
def _(size: Size) -> Call:
    """The count of this rank alone: how long the others take is up to the network."""
    import torch
    from transformers import Trainer

    method = CLOCK.theirs(lambda self, model, inputs, num_items_in_batch: None)
    trainer: Any = Trainer.__new__(type("SFTTrainer", (Trainer,), {"__module__": "trl", "training_step": method}))
    vars(trainer).update(model_accepts_loss_kwargs=True, compute_loss_func=None)
    arguments = SimpleNamespace(average_tokens_across_devices=False, world_size=2)
    gather = CLOCK.theirs(lambda counts: counts[None])
    accelerator = SimpleNamespace(gather=gather, device=torch.device("cpu"), num_processes=2)
    vars(trainer).update(args=arguments, accelerator=accelerator)
    called(size.patch.divide_by_the_mean_count, lambda: None, trainer)()
    return lambda: trainer.training_step(size.model, {"input_ids": size.ids}, 2_000)


@case("sft-padding-free-contamination")
def _(size: Size) -> Call:
    import torch

    arguments = SimpleNamespace(padding_free=True)
    trainer = SimpleNamespace(padding_free=True, args=arguments, accelerator=size.accelerator)
    positions = torch.arange(SEQUENCE).repeat(size.rows)[None]

    def compute_loss(model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
        return model(**inputs)

    # TRL takes what it does not hand on to the model out of the batch.
    inputs = {"input_ids": size.ids.reshape(1, -1), "labels": size.ids.reshape(1, -1), "position_ids": positions}
    wrapper = size.patch.keep_the_sequences_apart
    return lambda: called(wrapper, compute_loss, trainer, size.model, dict(inputs))()


@case("sft-eos-masked-when-pad-is-eos")
def _(size: Size) -> Call:
    from transformers import DataCollatorForLanguageModeling

    import tiny

    tokenizer = tiny.tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    trainer = SimpleNamespace(data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False))
    called(size.patch.learn_the_end, lambda model, data_collator=None: None, trainer, size.model)()
    examples = [{"input_ids": [7] * SEQUENCE} for _ in range(size.rows)]
    return lambda: trainer.data_collator.torch_call(examples)


@case("sft-pretokenized-labels-ignored")
def _(size: Size) -> Call:
    labels = size.ids
    examples = [{"labels": [-100] + [7] * (SEQUENCE - 1)} for _ in range(size.rows)]
    return called(size.patch.train_on_the_labels, lambda examples: {"labels": labels}, None, examples)


@case("dpo-precomputed-ref-logps-dropped")
def _(size: Size) -> Call:
    examples = [dict.fromkeys(size.patch._COLUMNS, 0.5)] * size.rows
    return called(size.patch.keep_the_values, lambda examples: {}, None, examples)


@case("orpo-nan-gradient-near-certainty")
def _(size: Size) -> Call:
    # Half of the rows are chosen.
    log_probs = size.numbers[: size.rows // 2, 0]

    def odds_ratio_loss(policy_chosen_logps: Any, policy_rejected_logps: Any) -> None:
        pass

    return called(size.patch.keep_away_from_certainty, odds_ratio_loss, None, log_probs, log_probs)


@case("grpo-single-eos-only")
def _(size: Size) -> Call:
    import tiny

    size.model.generation_config.eos_token_id = [1, 2]
    tokenizer, ids = tiny.tokenizer(), size.ids
    trainer = SimpleNamespace(model=size.model, processing_class=tokenizer, args=SimpleNamespace())
    return called(size.patch.end_at_every_end, lambda: ids == trainer.processing_class.eos_token_id, trainer)


@case("grpo-vllm-base-weights")
def _(size: Size) -> Call:
    model = with_adapter(size.model)
    trainer = SimpleNamespace(model=model, accelerator=size.accelerator)
    return called(size.patch.hand_over_copies_of_what_is_merged, lambda: model.state_dict(), trainer)


@case("vllm-sync-drifts-bf16-base")
def _(size: Size) -> Call:
    model = with_adapter(size.model)
    trainer = SimpleNamespace(model=model, accelerator=size.accelerator)

    def hand_over() -> None:
        for _ in model.named_parameters():
            pass

    return called(size.patch.merge_one_by_one, hand_over, trainer)


@case("bema-callback-frozen-parameters")
def _(size: Size) -> Call:
    _, *trained = (name for name, _ in size.model.named_parameters())
    callback = SimpleNamespace(running_model=size.model, param_names=trained)
    return called(size.patch.pair_parameters_by_name, lambda: None, callback)


@case("grpo-continuous-batching-casts-master-weights")
def _(size: Size) -> Call:
    size.model.float().generate_batch = lambda: None
    arguments = SimpleNamespace(bf16=True, fp16=False)
    trainer = SimpleNamespace(model=size.model, args=arguments, use_vllm=False, is_fsdp_enabled=False)
    vars(trainer).update(dict.fromkeys(size.patch._OPTIONS, True))
    return called(size.patch.keep_the_weights_as_they_are, lambda: size.model.generate_batch(), trainer)


@case("frozen-peftmodel-trains-nothing")
def _(size: Size) -> Call:
    trainer = SimpleNamespace(model=size.model, accelerator=size.accelerator, is_in_train=True)
    return called(size.patch.warn_of_a_frozen_model, lambda: None, trainer)


@case("weights-in-bf16-updates-vanish")
def _(size: Size) -> Call:
    trainer = SimpleNamespace(
        model=size.model, accelerator=size.accelerator, is_deepspeed_enabled=False, is_fsdp_enabled=False
    )
    return called(size.patch.warn_or_train_in_float32, lambda: None, trainer, options={"weights": "as-loaded"})


@case("gemma2-softcap-dropped-by-sdpa")
def _(size: Size) -> Call:
    trainer = SimpleNamespace(model=size.model, accelerator=size.accelerator, args=SimpleNamespace())
    return called(size.patch.warn_or_attend_eagerly, lambda: None, trainer, options={"attention": "as-loaded"})


@case("dpo-wpo-weights-not-clamped")
def _(size: Size) -> Call:
    import torch
    from trl.trainer import dpo_trainer

    log_weights = torch.zeros(len(size.ids))

    def compute_loss(model: Any, inputs: Any, return_outputs: bool) -> Any:
        return dpo_trainer.torch.exp(log_weights)

    trainer = SimpleNamespace(use_weighting=True)
    return called(size.patch.clamp_the_weights, compute_loss, trainer, size.model, {"input_ids": size.ids}, False)


@case("grpo-zero-loss-diagnosis")
def _(size: Size) -> Call:
    class Trainer:
        model, accelerator, beta = size.model, size.accelerator, 0.0
        args = SimpleNamespace(fp16=False, gradient_checkpointing=False, gradient_checkpointing_kwargs=None)
        _metrics: ClassVar[dict[str, Any]] = {"train": {"reward_std": [0.5], "frac_reward_zero_std": [0.0]}}

    wrapper = size.patch.say_why_the_loss_is_zero
    return called(wrapper, lambda logs: None, Trainer(), {"loss": 0.0, "grad_norm": 1.0})


@case("sft-moe-aux-loss-times-gas")
def _(size: Size) -> Call:
    arguments = SimpleNamespace(average_tokens_across_devices=False)
    trainer = SimpleNamespace(model_accepts_loss_kwargs=True, compute_loss_func=None, model=size.model, args=arguments)
    vars(trainer).update(accelerator=size.accelerator, current_gradient_accumulation_steps=4)

    def compute_loss(model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> None:
        pass

    return called(size.patch.weigh_the_aux_loss_once, compute_loss, trainer, size.model, {}, False, 2_000)


@case("dpo-aux-loss-dropped")
def _(size: Size) -> Call:
    import torch

    trainer = SimpleNamespace(accelerator=size.accelerator, model=size.model, _metrics={"train": defaultdict(list)})

    def compute_loss(model: Any, inputs: Any, return_outputs: bool = False) -> Any:
        model(input_ids=inputs["input_ids"])
        return torch.zeros(())

    return called(size.patch.add_aux_loss, compute_loss, trainer, size.model, {"input_ids": size.ids})


@case("dpo-padding-free-contamination")
def _(size: Size) -> Call:
    class Trainer:
        padding_free, is_encoder_decoder, accelerator = True, False, size.accelerator

    wrapper = size.patch.pad_what_the_model_would_mix
    return called(wrapper, lambda model, batch, is_ref_model=False: None, Trainer(), size.model, {})


@case("fused-lm-head-crash-without-triton")
def _(size: Size) -> Call:
    """The head itself, which is ours where Triton does not run: on no GPU."""
    import torch

    # Nothing is written into these, so they take no memory.
    weight = torch.empty((128_256, 2048))
    hidden, targets = torch.empty((size.tokens, 2048)), size.ids.reshape(-1)
    head = size.patch._TorchLogProbFunction
    return lambda: head.apply(hidden, weight, None, targets, 1.0, 1024, None, 1.0, ("entropy",))


@case("fused-lm-head-not-the-models-own")
def _(size: Size) -> Call:
    """Scoring the logits of a model whose head is not TRL's. The logits are the model's own: they are not counted."""
    import torch

    logits = torch.empty((size.tokens, 128_256), dtype=torch.bfloat16, device="meta")
    head, targets = size.patch._Kernel, size.ids.reshape(-1)
    return lambda: head.apply(logits, None, None, targets, 1.0, 1024, None, 1.0, ("entropy",))


@case("qlora-peftmodel-frozen")
def _(size: Size) -> Call:
    model = with_adapter(size.model)
    return called(size.patch.keep_what_is_trained, lambda model, peft_config=None: model, None, model)


@case("peft-non-default-adapter-name")
def _(size: Size) -> Call:
    model = with_adapter(size.model, "mine")

    def construct(model: Any) -> None:
        model.add_adapter("ref", model.peft_config["default"])

    def call() -> None:
        called(size.patch.copy_the_active_adapter, construct, None, model)()
        model.delete_adapter("ref")

    return call


@case("completion-only-collator-padding-free")
def _(size: Size) -> Call:
    class DataCollatorForCompletionOnlyLM:
        padding_free = True

    class Trainer:
        model = size.model

    trainer: Any = Trainer()

    def construct() -> None:
        trainer.data_collator = DataCollatorForCompletionOnlyLM()

    return called(size.patch.pad_what_the_model_would_mix, construct, trainer)


@case("sft-eos-custom-text-field")
def _(size: Size) -> Call:
    from datasets import Dataset

    import tiny

    settings = SimpleNamespace(dataset_text_field="words", dataset_num_proc=None)
    rows = Dataset.from_list([{"words": "w1 " * SEQUENCE}] * size.rows)

    def prepare(
        dataset: Any, processing_class: Any, args: Any, packing: Any, formatting_func: Any, dataset_name: str
    ) -> None:
        pass

    arguments = (rows, tiny.tokenizer(), settings, False, None, "train")
    return called(size.patch.end_the_texts, prepare, None, *arguments)


@case("sft-formatting-func-ignored")
def _(size: Size) -> Call:
    from datasets import Dataset

    settings = SimpleNamespace(dataset_text_field="text", assistant_only_loss=False, completion_only_loss=None)
    rows = Dataset.from_list([{"prompt": "w1 " * SEQUENCE, "completion": "w2"}] * size.rows)

    def prepare(dataset: Any, processing_class: Any, args: Any, packing: Any, formatting_func: Any, name: str) -> None:
        pass

    arguments = (rows, None, settings, False, lambda row: row["prompt"], "train")
    return called(size.patch.tokenise_what_the_function_returns, prepare, SimpleNamespace(), *arguments)


@case("sharegpt-roles-not-mapped")
def _(size: Size) -> Call:
    from datasets import Dataset

    settings = SimpleNamespace(dataset_num_proc=None)
    messages = [{"from": "human", "value": "w1 " * SEQUENCE}, {"from": "gpt", "value": "w2"}]
    rows = Dataset.from_list([{"conversations": messages}] * size.rows)

    def prepare(
        dataset: Any, processing_class: Any, args: Any, packing: Any, formatting_func: Any, dataset_name: str
    ) -> None:
        pass

    arguments = (rows, None, settings, False, None, "train")
    return called(size.patch.name_the_roles, prepare, None, *arguments)


@case("kto-paired-data-in-blocks")
def _(size: Size) -> Call:
    """Unpair a block of as many pairs as the micro-batch of other cases has rows."""
    pairs = {name: ["w1 " * SEQUENCE] * size.rows for name in ("prompt", "chosen", "rejected")}

    def unpair(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        labels = [True] * size.rows + [False] * size.rows
        return {
            "prompt": 2 * batch["prompt"],
            "completion": batch["chosen"] + batch["rejected"],
            "label": labels,
        }

    return called(size.patch.alternate, unpair, None, pairs)


@case("sft-vlm-image-tokens-in-loss")
def _(size: Size) -> Call:
    """Every token is one of an image."""
    collator = SimpleNamespace(processor=SimpleNamespace(image_token_id=7))

    def collate(examples: Any) -> dict[str, Any]:
        return {"labels": size.ids}

    return called(size.patch.learn_no_images, collate, collator, None)


@case("grpo-resume-replays-epoch-0-order")
def _(size: Size) -> Call:
    """Resume in epoch 3. The dataset has as many rows as the micro-batch of other cases has tokens."""
    import torch

    trainer = SimpleNamespace(state=SimpleNamespace(epoch=3.0))

    def sampler() -> Any:
        return torch.utils.data.RandomSampler(range(size.tokens), generator=torch.Generator())

    sampled = called(size.patch.begin_with_the_epoch_of_the_run, sampler, trainer)
    return lambda: iter(sampled())


def with_adapter(model: Any, name: str = "default") -> Any:
    """Return the model with LoRA on its attention."""
    from peft import LoraConfig, get_peft_model

    settings = LoraConfig(r=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return get_peft_model(model, settings, adapter_name=name)

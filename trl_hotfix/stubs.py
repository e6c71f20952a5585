"""Stand-ins for self-tests: trainers that were never initialised, models of one matrix, tokenizers of characters.

The methods that they run are the installed ones. torch is imported inside functions only.
"""

from __future__ import annotations

import inspect
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import MISSING, fields
from types import ModuleType, SimpleNamespace
from typing import Any

from .authoring import absent, shadowed
from .model import Outcome

ONE_PROCESS: Mapping[str, Any] = {"device": "cpu", "num_processes": 1, "is_main_process": True}
"""What an accelerator says of itself."""


def default_arguments(config_class: type, **changed: Any) -> SimpleNamespace:
    """The defaults of a TRL config class, without its ``__post_init__``, which would set up devices and processes."""
    defaults: dict[str, Any] = {}
    for each in fields(config_class):
        if each.default is not MISSING:
            defaults[each.name] = each.default
        elif each.default_factory is not MISSING:
            defaults[each.name] = each.default_factory()
    return SimpleNamespace(**{**defaults, **changed})


def stub_trainer(trainer_class: type, args: SimpleNamespace, **attributes: Any) -> Any:
    """A trainer that was never initialised: methods are the installed ones, an unset attribute is that of ``args``."""

    def from_args(self: Any, name: str) -> Any:
        try:
            return vars(args)[name]
        except KeyError:
            raise AttributeError(name) from None

    stub_class = type(trainer_class.__name__, (trainer_class,), {"__getattr__": from_args})
    trainer: Any = object.__new__(stub_class)
    same = ("unwrap_model", "gather", "gather_for_metrics", "reduce", "pad_across_processes")
    accelerator = SimpleNamespace(**ONE_PROCESS, **dict.fromkeys(same, lambda value, *args, **kwargs: value))
    vars(trainer).update({"args": args, "accelerator": accelerator, **attributes})
    return trainer


def stub_grpo_trainer(
    module: ModuleType, log_probs: Any = None, reference: Any = None, *, training: bool = True, **settings: Any
) -> Any:
    """A GRPO trainer in the middle of a step, whose loss of one batch can be computed in every release.

    ``log_probs`` and ``reference``, of shape ``(batch, completion length)``, are what the forward passes of the policy
    and of its reference give; without ``log_probs`` the real ones run. ``settings`` are fields of ``GRPOConfig``; a
    release that has no such field never looks at it.
    """
    metrics: dict[str, Any] = defaultdict(list, {"train": defaultdict(list), "eval": defaultdict(list)})
    trainer = stub_trainer(
        module.GRPOTrainer,
        default_arguments(module.GRPOConfig, **{"report_to": [], **settings}),
        model=SimpleNamespace(training=training),
        ref_model=SimpleNamespace(),
        control=SimpleNamespace(should_evaluate=not training),
        # What 0.27 times the loss with asks for the step.
        state=SimpleNamespace(global_step=0),
        # Up to 0.15 the metrics are not kept by mode.
        _metrics=metrics,
        epsilon_low=0.2,
        epsilon_high=0.2,
        current_gradient_accumulation_steps=1,
        use_liger_loss=False,
        tools=None,
        aux_loss_enabled=False,
        _entropy_bonus_enabled=False,
    )
    if log_probs is not None:
        both = getattr(module.GRPOTrainer, "_get_per_token_logps_and_entropies", None)
        # From 1.7 on the auxiliary loss of a mixture-of-experts model is a third.
        nothing = (None,) if both is not None and "compute_aux_loss" in inspect.signature(both).parameters else ()
        # 0.18 asks for the reference's in the loss, by the same method.
        by_model = {id(trainer.ref_model): reference}
        trainer._get_per_token_logps = lambda model, *args, **kwargs: by_model.get(id(model), log_probs)
        trainer._get_per_token_logps_and_entropies = lambda *args, **kwargs: (log_probs, -log_probs.detach(), *nothing)
    return trainer


def dpo_stub(module: ModuleType, method: str = "DPO", **attributes: Any) -> Any:
    """A stub of this module's ``DPOTrainer`` that has what ``get_batch_loss_metrics`` reads in any release up to 0.28.

    ``method`` is that of another trainer with such a method (CPO, ORPO, KTO, BCO). It is a text model without PEFT and
    without an auxiliary loss, padded with 0, unless ``attributes`` say otherwise.
    """
    usual: dict[str, Any] = {
        "aux_loss_enabled": False,
        "is_encoder_decoder": False,
        "is_vision_model": False,
        "is_peft_model": False,
        "padding_value": 0,
        "pad_token_id": 0,
        "use_dpo_data_collator": True,
        "_peft_has_been_casted_to_bf16": False,
    }
    arguments = default_arguments(getattr(module, f"{method}Config"))
    return stub_trainer(getattr(module, f"{method}Trainer"), arguments, **{**usual, **attributes})


def tiny_causal_lm(
    config: SimpleNamespace | None = None, *, vocabulary: int = 11, aux_loss: float | None = None
) -> Any:
    """A language model of one matrix: ``logits[b, t] = W[input_ids[b, t]]``, shape ``(batch, length, vocabulary)``.

    Its weights are a fixed function of their indices, so that no random number is drawn. ``aux_loss`` is what a
    mixture-of-experts model would return as ``outputs.aux_loss``, when it is called with ``output_router_logits=True``
    or its config says so. With ``fused_lm_head=True`` (TRL 1.15.0 and later) it answers what TRL's own head does,
    each of shape ``(batch, length - 1)``: ``log_probs`` of ``labels`` (0 where -100), ``entropy``, ``mean_logits`` and
    ``is_top1``.
    """
    import torch

    class TinyCausalLM(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            index = torch.arange(vocabulary * vocabulary, dtype=torch.float32, device="cpu")
            self.weight = torch.nn.Parameter(torch.sin(index).reshape(vocabulary, vocabulary))
            self.config = config
            self.is_gradient_checkpointing = False

        def forward(self, input_ids: Any, attention_mask: Any = None, **kwargs: Any) -> SimpleNamespace:
            logits = self.weight[input_ids]
            outputs = SimpleNamespace(logits=logits)
            if kwargs.get("fused_lm_head"):
                ignored = kwargs["labels"][:, 1:] == -100
                labels = kwargs["labels"][:, 1:].masked_fill(ignored, 0)
                every = logits[:, :-1].log_softmax(-1)
                outputs.log_probs = every.gather(-1, labels[..., None])[..., 0].masked_fill(ignored, 0.0)
                outputs.entropy = -(every.exp() * every).sum(-1)
                outputs.mean_logits = logits[:, :-1].mean(-1)
                outputs.is_top1 = every.argmax(-1) == labels
            if aux_loss is not None and kwargs.get(
                "output_router_logits", getattr(config, "output_router_logits", False)
            ):
                outputs.aux_loss = torch.tensor(aux_loss, device="cpu")
            return outputs

    return TinyCausalLM()


def wrapped_like_deepspeed(model: Any) -> Any:
    """``model`` as a ``DeepSpeedEngine`` shows it: ``.module`` is the model, ``.config`` is DeepSpeed's own dict."""
    import torch

    class Engine(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.module = model
            self.config = {"train_micro_batch_size_per_gpu": 1}

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return self.module(*args, **kwargs)

    return Engine()


def tiny_attention_model() -> Any:
    """A Llama of one layer with real attention, sdpa, whose weights are a fixed function of their indices.

    It also answers what TRL's own heads do: its chunked loss, and from 1.15.0 on the fused head.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    class TinyForCausalLM(LlamaForCausalLM):  # type: ignore[misc]
        def forward(self, fused_lm_head: bool = False, **kwargs: Any) -> Any:
            outputs = super().forward(**kwargs)
            labels = kwargs.get("labels")
            if labels is not None:
                counted = labels[:, 1:] != -100
                every = outputs.logits[:, :-1].log_softmax(-1)
                picked = every.gather(-1, labels[:, 1:].clamp(min=0)[..., None])[..., 0].masked_fill(~counted, 0.0)
                entropy = -(every.exp() * every).sum(-1)
                top1 = every.argmax(-1) == labels[:, 1:]
                answers = {
                    "log_probs": picked,
                    "label_mask": counted,
                    "entropy": entropy,
                    "is_top1": top1,
                    "num_valid_tokens": counted.sum(),
                    "num_correct_tokens": (top1 & counted).sum(),
                    "entropy_sum": (entropy * counted).sum(),
                }
                for name, value in answers.items():
                    setattr(outputs, name, value)
            return outputs

    model = TinyForCausalLM(
        LlamaConfig(
            vocab_size=16,
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=32,
            attn_implementation="sdpa",
        )
    )
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            index = torch.arange(parameter.numel(), dtype=torch.float32, device="cpu")
            parameter.copy_(torch.sin(index * 0.7 + number).reshape(parameter.shape))
    return model


class CharacterTokenizer:
    """A tokenizer whose ids are the characters' code points, and whose end-of-sequence token is the character 1."""

    eos_token, eos_token_id, pad_token, pad_token_id = "\1", 1, "\0", 0
    bos_token = bos_token_id = chat_template = None
    padding_side = "right"
    model_max_length = 1024

    def __call__(self, text: str, **kwargs: Any) -> Any:
        from transformers import BatchEncoding

        return BatchEncoding({"input_ids": [ord(each) for each in text], "attention_mask": [1] * len(text)})

    def render(self, messages: list[dict[str, str]], *, add_generation_prompt: bool) -> str:
        """The chat template: the first letter of the role, the content and an end of sequence for each message."""
        turns = (f"{each['role'][0]}{each['content']}{self.eos_token}" for each in messages)
        return "".join(turns) + ("a" if add_generation_prompt else "")

    def apply_chat_template(
        self,
        messages: list[dict[str, str]],
        tokenize: bool = True,
        return_dict: bool = False,
        add_generation_prompt: bool = False,
        **kwargs: Any,
    ) -> Any:
        text = self.render(messages, add_generation_prompt=add_generation_prompt)
        if not tokenize:
            return text
        return self(text) if return_dict else self(text)["input_ids"]

    def decode(self, ids: list[int], **kwargs: Any) -> str:
        return "".join(map(chr, ids))

    def pad(self, examples: list[dict[str, list[int]]], **kwargs: Any) -> dict[str, Any]:
        """Padded on the right, as tensors ``(batch, longest)``."""
        import torch

        longest = max(len(each["input_ids"]) for each in examples)
        fillers = {"input_ids": self.pad_token_id, "attention_mask": 0}
        return {
            name: torch.tensor([each[name] + [filler] * (longest - len(each[name])) for each in examples])
            for name, filler in fillers.items()
        }


def tiny_tokenizer() -> Any:
    """One of transformers' own, for constructors that ask what it is; it has one token."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<pad>": 0}, unk_token="<pad>"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<pad>")


@contextmanager
def single_process(module: ModuleType) -> Iterator[None]:
    """In here this module says nothing, and in this thread it knows of one process.

    A self-test does not wait for the ranks of a run, and accelerate's loggers would want to know them.
    """
    here = threading.get_ident()

    def instead_of(real: Callable[..., Any], substitute: Callable[[], Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: substitute() if threading.get_ident() == here else real(*args, **kwargs)

    def state() -> SimpleNamespace:
        return SimpleNamespace(main_process_first=nullcontext, local_main_process_first=nullcontext)

    with ExitStack() as stack:
        for name, its in (("PartialState", state), ("global_then_local_main_first", nullcontext)):
            if hasattr(module, name):
                stack.enter_context(shadowed(module, name, instead_of(getattr(module, name), its)))
        if hasattr(module, "logger"):
            quiet = dict.fromkeys(("info", "warning", "warning_once"), lambda *args, **kwargs: None)
            stack.enter_context(shadowed(module, "logger", SimpleNamespace(**quiet)))
        yield


def stream(rows: list[dict[str, Any]]) -> Any:
    """``rows`` as an ``IterableDataset``: mapped without a hash, a cache or a progress bar.

    It always knows its columns and its first row, which 0.15 asks for after a map, and is mapped as a ``Dataset`` is.
    """
    from datasets import Dataset, IterableDataset

    class Rows(IterableDataset):  # type: ignore[misc]
        column_names = property(lambda self: list(next(iter(self))))

        def __getitem__(self, index: int) -> Any:
            return list(self)[index]

        def map(self, *args: Any, **kwargs: Any) -> Any:
            only_for_a_dataset = {"num_proc", "desc", "writer_batch_size"}
            how = {name: value for name, value in kwargs.items() if name not in only_for_a_dataset}
            mapped = super().map(*args, **how)
            mapped.__class__ = Rows
            return mapped

    made = Dataset.from_list(rows).to_iterable_dataset()
    made.__class__ = Rows
    return made


def sft_prepared(
    module: ModuleType, rows: list[dict[str, Any]], tokenizer: Any, formatting_func: Any = None, **settings: Any
) -> list[dict[str, Any]]:
    """What ``SFTTrainer._prepare_dataset`` makes of ``rows``, neither truncated nor packed. From 0.15.0 on.

    ``settings`` are fields of ``SFTConfig``; a release that has no such field never looks at it.
    """
    args = default_arguments(
        module.SFTConfig, **{"max_length": None, "max_seq_length": None, "shuffle_dataset": False, **settings}
    )
    trainer = stub_trainer(
        module.SFTTrainer,
        args,
        chat_template=None,
        completion_only_loss=bool(args.completion_only_loss) if hasattr(args, "completion_only_loss") else False,
        _is_vlm=False,
        _tokenizer=tokenizer,
    )
    with single_process(module):
        return list(trainer._prepare_dataset(stream(rows), tokenizer, args, False, formatting_func, "train"))


def online_dpo_stub(module: ModuleType, completions: Any = None, completion_mask: Any = None, **settings: Any) -> Any:
    """A stub of this module's trainer, OnlineDPO's, XPO's or NashMD's, whose ``training_step`` runs from 0.12.0 on.

    ``trainer.training_step(trainer.model, {"prompt": [...]})`` samples nothing. OnlineDPO's ``completions`` are given
    with their mask, each of shape ``(2 * prompts, length)``, and the log-probs are those of a ``tiny_causal_lm``. Of
    the other two trainers only what follows the loss is the real one, and the loss is 2. The judge prefers the first
    completion; the reference is the model at half its weights. What ``accelerator.backward`` is given is appended to
    ``trainer.went_backward``. ``settings`` are of the trainer's arguments.
    """
    import torch

    kind = {"xpo_trainer": "XPO", "nash_md_trainer": "NashMD"}.get(module.__name__.rpartition(".")[2], "OnlineDPO")
    usual = {"n_gpu": 1, "use_vllm": True, "missing_eos_penalty": None}
    args = default_arguments(getattr(module, f"{kind}Config"), **{**usual, **settings})
    config = SimpleNamespace(is_encoder_decoder=False)
    model, reference = tiny_causal_lm(config), tiny_causal_lm(config)
    with torch.no_grad():
        reference.weight.mul_(0.5)
    tokens = torch.tensor([[1, 2, 3], [4, 5, 6]]) if completions is None else completions
    mask = torch.ones_like(tokens) if completion_mask is None else completion_mask
    prompts = torch.tensor([[7, 8]]).repeat(len(tokens) // 2, 1)
    both = prompts.repeat(2, 1)
    model.generate = lambda *args, **kwargs: torch.cat([both, tokens], dim=1)
    words = SimpleNamespace(eos_token_id=0, pad_token_id=9, batch_decode=lambda ids, **kwargs: ["w"] * len(ids))
    judged = SimpleNamespace(judge=lambda prompts, completions, **kwargs: [0] * len(prompts))
    trainer = stub_trainer(
        getattr(module, f"{kind}Trainer"),
        args,
        model=model,
        ref_model=reference,
        judge=judged,
        reward_model=None,
        # From 0.22.0 on they come before the judge, and from 1.1.0 on there is no judge.
        reward_funcs=[len] if hasattr(getattr(module, f"{kind}Trainer"), "_calculate_rewards_from_functions") else None,
        _calculate_rewards_from_functions=lambda **kwargs: torch.arange(len(tokens), 0.0, -1),
        _beta=0.1,
        _alpha=0.1,
        _mixture_coef=0.5,
        stats=defaultdict(list),
        state=SimpleNamespace(global_step=0, epoch=0.0),
        processing_class=words,
        _tokenizer=words,
        eos_token_id=0,
        eos_token_ids=[0],
        pad_token_id=9,
        max_length=64,
        is_vision_model=False,
        generation_config=None,
        use_apex=False,
        went_backward=[],
        tokenize_row=lambda *args: None,
        data_collator=lambda rows: {"prompt_input_ids": prompts, "prompt_attention_mask": torch.ones_like(prompts)},
        _prepare_inputs=lambda inputs: inputs,
    )
    one_device = {
        "state": SimpleNamespace(deepspeed_plugin=None),
        "distributed_type": "NO",
        "gradient_accumulation_steps": 1,
    }
    vars(trainer.accelerator).update(one_device, backward=lambda loss, **kwargs: trainer.went_backward.append(loss))
    if kind == "OnlineDPO":
        # What generate gives are four values, in 1.16.0 five; what vLLM gives are four.
        trainer._generate_vllm = lambda *args: (both, torch.ones_like(both), tokens, mask)
        return trainer
    one = torch.ones(len(prompts))
    of_tokens = torch.zeros(len(prompts), 3)
    trainer._generate_completions = trainer._process_completions = lambda *args: ({}, {})
    trainer._compute_rewards = lambda *args: (one, one)
    trainer._compute_judge = lambda *args: one > 0
    trainer._compute_logprobs = lambda *args: (of_tokens,) * (4 if kind == "XPO" else 2)
    trainer._compute_losses = lambda *args: (2.0 * model.weight.sum() / model.weight.sum(), one, one)
    trainer._log_statistics = lambda *args: None
    return trainer


def sft_moe_loss(
    module: ModuleType,
    coefficient: float,
    *,
    cross_entropy: float = 3.0,
    aux_loss: float = 2.0,
    num_items_in_batch: int | None = None,
    **attributes: Any,
) -> float:
    """What ``compute_loss`` of this module's ``SFTTrainer`` makes of a mixture-of-experts model.

    Given labels, the model returns ``cross_entropy + router_aux_loss_coef * aux_loss``; so it does for a batch of three
    tokens. ``attributes`` are the trainer's.
    """
    import torch

    class Log(dict):  # type: ignore[type-arg]
        """``[mode][name].append`` and, before 0.18.0, ``[name].append``."""

        def __missing__(self, key: str) -> Any:
            return Log()

        def append(self, value: float) -> None: ...

    class Outputs(dict):  # type: ignore[type-arg]
        __getattr__ = dict.__getitem__

    class Model(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.router_aux_loss_coef = coefficient

        def forward(self, input_ids: Any, labels: Any, **kwargs: Any) -> Any:
            here = labels[:, 1:]
            return Outputs(
                loss=torch.tensor(cross_entropy + self.router_aux_loss_coef * aux_loss),
                aux_loss=torch.tensor(aux_loss),
                logits=torch.zeros(*input_ids.shape, 11),
                # What TRL's own heads answer besides: its chunked loss, and from 1.15.0 on the fused head.
                num_valid_tokens=torch.tensor(here.numel()),
                num_correct_tokens=torch.tensor(0),
                entropy_sum=torch.tensor(0.0),
                log_probs=torch.full(here.shape, -cross_entropy),
                label_mask=torch.ones_like(here, dtype=torch.bool),
                entropy=torch.zeros(here.shape),
                is_top1=torch.zeros_like(here, dtype=torch.bool),
            )

    model = Model()
    usual: dict[str, Any] = {
        "model": model,
        "aux_loss_enabled": True,
        "aux_loss_coef": coefficient,
        "router_aux_loss_coef": coefficient,
        "label_smoother": None,
        "compute_loss_func": None,
        "model_accepts_loss_kwargs": False,
        "current_gradient_accumulation_steps": 1,
        "num_virtual_tokens": 0,
        "control": SimpleNamespace(should_evaluate=False),
        "_metrics": Log(),
        "_total_train_tokens": 0,
        "_tp_size": 1,
    }
    arguments = default_arguments(module.SFTConfig, n_gpu=1)
    trainer = stub_trainer(module.SFTTrainer, arguments, **{**usual, "get_tp_size": lambda: 1, **attributes})
    trainer.accelerator.parallelism_config = None
    tokens = torch.tensor([[1, 2, 3, 4]])
    inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens.clone()}
    # transformers before 4.46 knows of no such argument.
    items = {} if num_items_in_batch is None else {"num_items_in_batch": num_items_in_batch}
    return float(trainer.compute_loss(model, inputs, **items))


def constructed(trainer_class: type, **given: Any) -> Any:
    """A trainer whose own constructor has run on ``given``, and transformers' beneath it has not."""
    import torch
    from transformers import Trainer
    from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback

    class Given(Trainer):  # type: ignore[misc]
        """In the order of the bases in the place of transformers' own."""

        is_deepspeed_enabled = is_fsdp_enabled = False

        def __init__(self, **given: Any) -> None:
            self.__dict__.update(given)
            callbacks = [DefaultFlowCallback, *(given.get("callbacks") or [])]
            self.callback_handler = CallbackHandler(callbacks, given.get("model"), None, None, None)
            self.accelerator = SimpleNamespace(
                prepare_model=lambda model, **kwargs: model,
                parallelism_config=None,
                **{**ONE_PROCESS, "device": torch.device("cpu")},
            )

    trainer: Any = object.__new__(type(trainer_class.__name__, (trainer_class, Given), {}))
    trainer_class.__init__(trainer, **given)  # type: ignore[misc]
    return trainer


def stub_that_generates(trainer_class: type, args: SimpleNamespace, model: Any, **attributes: Any) -> Any:
    """A GRPO or RLOO stub whose ``completions_of`` gets as far as ``model.generate`` or ``model.generate_batch``.

    Of a text model, without vLLM. The one prompt has tokens 3 and 4; 0 is padding and 1 the end of a sequence.
    """
    from contextlib import nullcontext

    import torch

    class Words:
        """What is asked of a tokenizer."""

        pad_token, pad_token_id, eos_token, eos_token_id, bos_token_id = "<pad>", 0, "<eos>", 1, None
        chat_template = None

        def __call__(self, *texts: Any, return_tensors: str | None = None, **kwargs: Any) -> Any:
            ids = [[3, 4]]
            if return_tensors is None:
                return type("Encoding", (dict,), {"input_ids": ids})(input_ids=ids, attention_mask=[[1, 1]])
            return {"input_ids": torch.tensor(ids), "attention_mask": torch.ones(1, 2, dtype=torch.long)}

        def batch_decode(self, ids: Any, **kwargs: Any) -> list[str]:
            return ["" for _ in ids]

    words = Words()
    usual: dict[str, Any] = {
        "model": model,
        "model_wrapped": model,
        "processing_class": words,
        "_tokenizer": words,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "is_fsdp_enabled": False,
        "is_deepspeed_enabled": False,
        "_dist": SimpleNamespace(summon_full_params=lambda *args, **kwargs: nullcontext()),
        "state": SimpleNamespace(global_step=0, num_input_tokens_seen=0),
        "tools": None,
        "rollout_func": None,
        "chat_template": None,
        "chat_template_kwargs": {},
        "max_prompt_length": None,
        "pad_to_multiple_of": None,
        "control": SimpleNamespace(should_evaluate=False),
    }
    args.report_to, args.device, args.past_index = [], torch.device("cpu"), -1
    trainer = stub_trainer(trainer_class, args, **{**usual, **attributes})
    trainer.accelerator.state = SimpleNamespace(deepspeed_plugin=None, fsdp_plugin=None)
    trainer.accelerator.process_index = 0
    return trainer


def completions_of(trainer: Any) -> Any:
    """What the method answers in which this release's GRPO or RLOO ``trainer`` calls ``generate``."""
    names = ("_generate_single_turn", "_generate_and_score_completions", "_prepare_inputs")
    method = getattr(trainer, next(name for name in names if name in vars(type(trainer).__mro__[1])))
    known: dict[str, Any] = {
        "inputs": [{"prompt": "a"}],
        "prompts": ["a"],
        "prompt_ids": [[3, 4]],
        "images": None,
        "multimodal_fields": {},
        "num_generations": 1,
    }
    wanted = inspect.signature(method).parameters
    return method(**{name: value for name, value in known.items() if name in wanted})


def absent_if_reexported(module: ModuleType, method: Any) -> Outcome | None:
    """``absent``, if ``module`` only re-exports this method: a class that has moved keeps its old name for a while."""
    home = method.__module__
    return None if home == module.__name__ else absent(f"{module.__name__} hands the method on from {home}")


class StopConstruction(Exception):
    """A trainer is made as far as a self-test has to see."""


def begin_trainer(
    module: ModuleType,
    trainer_class: Any,
    model: Any,
    *,
    parent: Callable[[Any], None] = lambda trainer: None,
    shadows: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Any:
    """Run the real ``__init__`` of a DPO, KTO, GRPO or RLOO trainer until something raises ``StopConstruction``.

    Its superclass does no more than take model and arguments and call ``parent`` with the trainer. ``shadows`` are what
    stands in the module meanwhile, of the names that it has; ``settings`` are arguments. The trainer is returned as it
    is then.
    """
    from datasets import Dataset

    class Parent(*trainer_class.__bases__):  # type: ignore[misc]
        def __init__(self, *, model: Any, args: Any, **others: Any) -> None:
            self.model, self.args = model, args
            self.accelerator = SimpleNamespace(parallelism_config=None, **ONE_PROCESS)
            self.is_deepspeed_enabled = self.is_fsdp_enabled = False
            parent(self)

    class Stub(trainer_class, Parent):  # type: ignore[misc]
        def _prepare_dataset(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
            return dataset

    with_rewards = "reward_funcs" in inspect.signature(trainer_class.__init__).parameters
    one_device = {"n_gpu": 0, "distributed_state": SimpleNamespace(distributed_type="NO"), "eval_strategy": "no"}
    one_device |= {"deepspeed_plugin": None, "bf16": False, "beta": 0.5}
    step = {"steps_per_generation": 1, "generation_batch_size": 8, "loss_type": "grpo"} if with_rewards else {}
    config_class = getattr(module, trainer_class.__name__.replace("Trainer", "Config"))
    trainer: Any = object.__new__(Stub)
    with ExitStack() as stack:
        # The seed of the process is not a self-test's to set.
        for name, its in {"set_seed": lambda *args, **kwargs: None, **(shadows or {})}.items():
            if hasattr(module, name):
                stack.enter_context(shadowed(module, name, its))
        stack.enter_context(suppress(StopConstruction))
        Stub.__init__(
            trainer,
            model=model,
            args=default_arguments(config_class, **{**one_device, **step, **settings}),
            **({"reward_funcs": len} if with_rewards else {}),
            train_dataset=Dataset.from_dict({"prompt": ["a"], "completion": ["b"], "label": [True]}),
            processing_class=tiny_tokenizer(),
        )
    return trainer

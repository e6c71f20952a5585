"""The facts of a trainer that begins to train: they settle what ``depends`` says, and agree with the model's files."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from msgspec.structs import replace
from transformers import GenerationConfig

from trl_hotfix.catalogue import loading
from trl_hotfix.catalogue.conditions import Kind
from trl_hotfix.catalogue.facts import FACTS, OF_FILES
from trl_hotfix.matching.hits import Answer
from trl_hotfix.model import Hit
from trl_hotfix.recording import run_hits, weight_facts
from trl_hotfix.recording.models_within import tokenizer_of, without_wrappers
from trl_hotfix.recording.trainer_facts import TrainerFacts
from trl_hotfix.scanning.model_files import model_facts

import tiny
from helpers import real_trainers

LAUNCH = SimpleNamespace(distributed_type="NO", num_processes=1)
ARGS = SimpleNamespace(n_gpu=1, bf16=False, fp16=False)


def trainer_with(model: Any, tokenizer: Any = None, **attributes: Any) -> Any:
    """Return what a trainer of this model has, as far as facts are concerned."""
    usual = {"model": model, "processing_class": tokenizer, "accelerator": LAUNCH, "args": ARGS}
    return SimpleNamespace(**{**usual, **attributes})


def value(trainer: Any, name: str) -> Any:
    """Return a fact: its value, "unset", or its reason if it is unknown."""
    found = TrainerFacts(trainer).find(name)
    return {Kind.LITERAL: found.value, Kind.UNSET: "unset"}.get(found.kind, found.reason)


MODELS = {
    "llama": lambda folder: tiny.llama(folder, seed=0),
    "mixtral": lambda folder: tiny.mixtral(folder, seed=0, coefficient=0.02),
    "qwen2-moe": lambda folder: tiny.qwen2_moe(folder, seed=0, coefficient=0.001),
    "gpt-neo": lambda folder: tiny.gpt_neo(folder, seed=0),
}
GENERATION: tuple[dict[str, Any], ...] = (
    {"eos_token_id": 1},
    {"eos_token_id": [1, 7], "do_sample": True, "top_p": 0.9},
    {"eos_token_id": 7, "do_sample": True, "temperature": 0.6},
    {"do_sample": True, "top_k": 20},
)
LAUNCHED = ("distributed", "processes", "zero_stage", "optimizer_offloaded")
OF_MODEL = [name for name in OF_FILES if name not in LAUNCHED]


@pytest.mark.parametrize("kind", MODELS)
def test_what_the_files_of_a_model_tell_is_what_the_trainer_tells(kind: str, tmp_path: Path) -> None:
    model, tokenizer = MODELS[kind](str(tmp_path)), tiny.tokenizer()
    told: set[str] = set()
    for number, settings in enumerate(GENERATION):
        model.generation_config = GenerationConfig(**settings)
        tokenizer.pad_token = "<eos>" if number % 2 else "<pad>"
        folder = tmp_path / f"saved-{number}"
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        of_files, live = model_facts(folder), TrainerFacts(trainer_with(model, tokenizer))
        assert of_files.keys() == {*OF_MODEL}
        known = {name: fact.value for name, fact in of_files.items() if fact.kind is Kind.LITERAL}
        assert known == {name: live.find(name).value for name in known}
        told |= known.keys()
    assert told >= {"experts", "model_type", "labels", "pad_is_eos", "other_ends", "sampling_settings", "quantized"}


def test_a_live_model_tells_what_its_files_leave_out(tmp_path: Path) -> None:
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    model = MixtralForCausalLM(MixtralConfig(**sizes, num_attention_heads=1, num_key_value_heads=1))
    trainer = trainer_with(model)
    told = {name: value(trainer, name) for name in ("experts", "output_router_logits", "router_loss", "model_type")}
    assert told == {"experts": True, "output_router_logits": False, "router_loss": True, "model_type": "mixtral"}
    assert value(trainer, "router_aux_loss_coef") == 0.001
    assert value(trainer_with(tiny.llama(str(tmp_path), seed=0)), "output_router_logits") == "unset"
    assert value(trainer_with(tiny.llama(str(tmp_path), seed=0)), "router_loss") is False


def test_sft_tells_the_coefficient_with_which_the_model_was_loaded(tmp_path: Path) -> None:
    class SFTTrainer(SimpleNamespace):
        pass

    model = tiny.mixtral(str(tmp_path), seed=0, coefficient=0.02)
    model.config.router_aux_loss_coef, model.config.output_router_logits = 0.001, True
    args = SimpleNamespace(router_aux_loss_coef=0.001)
    trainer = SFTTrainer(model=model, args=args)
    assert value(trainer, "router_aux_loss_coef") == 0.02
    assert value(trainer, "output_router_logits") == "TRL has set output_router_logits"
    assert value(trainer_with(model, args=args), "router_aux_loss_coef") == 0.001
    del model.router_aux_loss_coef
    assert value(trainer, "router_aux_loss_coef") == "TRL has set router_aux_loss_coef"


def test_an_adapter_and_what_a_launch_puts_around_a_model_are_looked_through(tmp_path: Path) -> None:
    from peft import get_peft_model

    from trl_hotfix.testing import wrapped_like_deepspeed

    model = tiny.mixtral(str(tmp_path), seed=0, coefficient=0.02)
    adapted = get_peft_model(model, tiny.lora())
    for wrapped in (adapted, wrapped_like_deepspeed(adapted), torch.nn.DataParallel(model)):
        assert without_wrappers(wrapped) is model
        trainer = trainer_with(wrapped, tiny.tokenizer())
        facts = {name: value(trainer, name) for name in ("experts", "router_aux_loss_coef", "other_ends", "labels")}
        assert facts == {"experts": True, "router_aux_loss_coef": 0.02, "other_ends": False, "labels": 2}
    assert value(trainer_with(adapted), "frozen_parameters") is True
    assert value(trainer_with(adapted), "plain_lora") is True
    tiny.quantised(model)
    assert value(trainer_with(adapted), "quantized") is True


def test_a_part_of_a_composite_config_counts_where_no_release_differs(tmp_path: Path) -> None:
    model = tiny.llama(str(tmp_path), seed=0)

    class Composite(type(model.config)):  # type: ignore[misc]
        def get_text_config(self, *arguments: Any, **keywords: Any) -> Any:
            return self.text_config

    model.config = Composite(text_config=SimpleNamespace(output_router_logits=True), output_router_logits=True)
    assert value(trainer_with(model), "output_router_logits") is True
    model.config.output_router_logits = False
    reason = "model.config and its text_config have another output_router_logits"
    assert value(trainer_with(model), "output_router_logits") == reason


def test_the_dtype_is_that_of_the_weights_without_the_adapter(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    model = tiny.llama(str(tmp_path), seed=0)
    assert (value(trainer_with(model), "dtype"), value(trainer_with(model), "trained_dtype")) == ("float32", "float32")
    lora = LoraConfig(r=1, target_modules=["q_proj", "embed_tokens"], modules_to_save=["lm_head"])
    trainer = trainer_with(get_peft_model(model.to(torch.bfloat16), lora))
    for name, parameter in trainer.model.named_parameters():
        if "lora" in name or "modules_to_save" in name:
            parameter.data = parameter.data.float()
    assert (value(trainer, "dtype"), value(trainer, "trained_dtype")) == ("bfloat16", "float32")
    # LoRA on embeddings has parameters by the name of the adapter.
    assert value(trainer, "plain_lora") is False
    next(iter(model.parameters())).data = next(iter(model.parameters())).data.half()
    assert value(trainer, "dtype") == "the weights have the dtypes bfloat16, float16"
    sharded = trainer_with(model, accelerator=SimpleNamespace(distributed_type="FSDP", num_processes=2))
    for name in ("dtype", "trained_dtype", "frozen_parameters", "plain_lora"):
        assert TrainerFacts(sharded).find(name).kind is Kind.UNKNOWN


@pytest.mark.parametrize(
    ("kind", "n_gpu", "distributed", "processes"),
    [
        ("NO", 1, "unset", 8),
        ("NO", 2, "torch.nn.DataParallel", "one process has 2 GPUs"),
        ("MULTI_GPU", 1, "ddp", 8),
        ("MULTI_CPU", 0, "ddp", 8),
        ("FSDP", 1, "fsdp", 8),
        ("DEEPSPEED", 1, "deepspeed", 8),
        ("XLA", 1, "the launch is XLA", 8),
    ],
)
def test_the_launch_is_that_of_the_accelerator(kind: str, n_gpu: int, distributed: str, processes: Any) -> None:
    from accelerate.utils import DistributedType  # type: ignore[import-untyped]

    accelerator = SimpleNamespace(distributed_type=DistributedType(kind), num_processes=8)
    trainer = trainer_with(torch.nn.Linear(1, 1), accelerator=accelerator, args=SimpleNamespace(n_gpu=n_gpu))
    assert (value(trainer, "distributed"), value(trainer, "processes")) == (distributed, processes)


@pytest.mark.parametrize(
    ("config", "stage", "offloaded"),
    [
        ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}, 2, True),
        ({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "none"}}}, 3, False),
        ({"zero_optimization": {"stage": 1, "offload_optimizer": None}}, 1, False),
        ({}, 0, False),
        (None, "unset", "unset"),
    ],
)
def test_what_zero_does_is_that_of_the_plugin(config: dict[str, Any] | None, stage: Any, offloaded: Any) -> None:
    plugin = SimpleNamespace(deepspeed_config=config)
    kind = "DEEPSPEED" if config is not None else "MULTI_GPU"
    accelerator = SimpleNamespace(distributed_type=kind, state=SimpleNamespace(deepspeed_plugin=plugin))
    trainer = trainer_with(torch.nn.Linear(1, 1), accelerator=accelerator, args=SimpleNamespace(n_gpu=1))
    assert (value(trainer, "zero_stage"), value(trainer, "optimizer_offloaded")) == (stage, offloaded)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% for m in messages %}{{ m['content'] }}{% endfor %}", "nothing"),
        ("{% for m in messages %}{{ m['content'] }}<eos>{% endfor %}", "eos"),
        ("{% for m in messages %}{{ m['content'] }} <eos>\n{% endfor %}\n", "eos and blanks"),
        ("{% for m in messages %}{{ m['content'] }}<end>\n{% endfor %}", "the chat template ends a message"),
        ("{% for m in messages %}{{ m['content'] }}\n{% endfor %}\n", "the chat template ends with blanks"),
        ("{% for m in messages %}{{ m['content'] | upper }}{% endfor %}", "the chat template changes a message"),
        ("{{ raise_exception('no') }}", FACTS["template_end"]),
    ],
)
def test_the_chat_template_tells_what_is_behind_the_last_message(template: str, expected: str) -> None:
    tokenizer = tiny.chat_tokenizer(template.replace("\n{% endfor %}", "{{ '\\n' }}{% endfor %}"))
    assert value(trainer_with(torch.nn.Linear(1, 1), tokenizer), "template_end").startswith(expected)


def test_another_attention_than_that_by_default_is_told(tmp_path: Path) -> None:
    model = tiny.llama(str(tmp_path), seed=0)
    for chosen, expected in (("sdpa", True), ("flash_attention_2", False), ("eager", False)):
        model.config._attn_implementation = chosen
        assert value(trainer_with(model), "default_attention") is expected
    type(model)._supports_sdpa, supports = False, type(model)._supports_sdpa
    try:
        assert value(trainer_with(model), "default_attention") is True
    finally:
        type(model)._supports_sdpa = supports


@pytest.mark.parametrize(
    ("attention", "version", "expected"),
    [
        ("flash_attention_2", "4.44.2", False),
        ("kernels-community/flash-attn3", "4.57.0", False),
        ("sdpa", "4.52.4", True),
        ("eager", "4.52.4", True),
        ("sdpa", "4.53.0", "the model may have a KV cache, or make its mask itself"),
        ("flex_attention", "4.44.2", "the model does not say which attention it has"),
        ({"text_config": "sdpa"}, "4.44.2", "the model does not say which attention it has"),
    ],
)
def test_sequences_in_one_row_attend_to_one_another_without_flash_attention(
    attention: Any, version: str, expected: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transformers, "__version__", version)
    model = tiny.llama(str(tmp_path), seed=0)
    model.config._attn_implementation = attention
    assert value(trainer_with(model), "attends_across") == expected


def test_a_tokenizer_that_adds_a_beginning_is_told() -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = tiny.tokenizer()
    assert value(trainer_with(None, tokenizer), "adds_bos") is False
    tokenizer.bos_token = "w1"
    assert value(trainer_with(None, tokenizer), "adds_bos") is False
    number = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="w1 $A", special_tokens=[("w1", number)])
    assert value(trainer_with(None, tokenizer), "adds_bos") is True


def test_the_forward_and_the_precision_are_told(tmp_path: Path) -> None:
    class WithKwargs(torch.nn.Module):  # type: ignore[misc]
        def forward(self, x: Any, **kwargs: Any) -> Any:
            return x

    assert value(trainer_with(WithKwargs()), "forward_kwargs") is True
    assert value(trainer_with(torch.nn.Linear(1, 1)), "forward_kwargs") is False
    for precision in ("bf16", "fp16"):
        args = SimpleNamespace(**{**vars(ARGS), precision: True})
        assert value(trainer_with(WithKwargs(), args=args), "mixed_precision") == precision
    assert value(trainer_with(WithKwargs()), "mixed_precision") == "unset"


class Hostile:
    """An object of which nothing can be asked."""

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(name)


@pytest.mark.parametrize("name", FACTS)
def test_a_trainer_of_which_nothing_can_be_asked_is_unknown(name: str) -> None:
    for trainer in (Hostile(), SimpleNamespace(), trainer_with(Hostile(), Hostile(), accelerator=None, args=None)):
        found = TrainerFacts(trainer).find(name)
        # The machine alone tells of Triton.
        assert found.kind is Kind.UNKNOWN or name == "triton"
        assert found.reason
    assert TrainerFacts(Hostile()).find("no such fact").kind is Kind.UNKNOWN


def test_the_tokenizer_of_a_processor_and_of_an_old_trainer_is_found() -> None:
    tokenizer = tiny.tokenizer()
    for trainer in (
        SimpleNamespace(processing_class=SimpleNamespace(tokenizer=tokenizer)),
        SimpleNamespace(tokenizer=tokenizer),
    ):
        assert tokenizer_of(trainer) is tokenizer
    with pytest.raises(LookupError):
        tokenizer_of(SimpleNamespace(tokenizer=None))


def test_nothing_is_changed_and_no_random_number_drawn(tmp_path: Path) -> None:
    trainer = real_trainers.dpo(tmp_path)
    before = torch.random.get_rng_state(), {**vars(trainer)}, str(trainer.model.config), {**vars(trainer.args)}
    for name in FACTS:
        TrainerFacts(trainer).find(name)
    assert torch.equal(before[0], torch.random.get_rng_state())
    assert before[1:] == ({**vars(trainer)}, str(trainer.model.config), {**vars(trainer.args)})


@pytest.mark.parametrize(
    ("facts", "answer", "because"),
    [
        ({"experts": True, "router_aux_loss_coef": ">0.01"}, Answer.HIT, "experts=True (model.config)"),
        ({"experts": True, "router_aux_loss_coef": ">0.03"}, Answer.NOT_HIT, None),
        ({"experts": True, "tokens_in_one_piece": True}, Answer.CANNOT_TELL, None),
        # What is not so decides, whatever else is unknown.
        ({"tokens_in_one_piece": True, "experts": False}, Answer.NOT_HIT, None),
    ],
)
def test_a_fact_settles_what_a_bug_depends_on(facts: Any, answer: Answer, because: Any, tmp_path: Path) -> None:
    trainer = real_trainers.dpo(tmp_path, tiny.mixtral(str(tmp_path), seed=0, coefficient=0.02))
    hit = Hit(("*",), "it is off by 4", {}, "the model is made so", facts)
    patch = replace(loading.load()[0], hits=(hit,), trl=">=0.9", requires={})
    found = run_hits.judged(trainer, patch, "0.11.4")
    assert found.answer is answer
    assert found.unknown == (("if the model is made so",) if answer is Answer.CANNOT_TELL else ())
    assert because is None or found.because[0] == because


def test_a_fact_is_asked_for_once(tmp_path: Path) -> None:
    trainer, known = trainer_with(tiny.llama(str(tmp_path), seed=0)), {}
    assert TrainerFacts(trainer, known).find("model_type").value == "llama"
    trainer.model = None
    assert TrainerFacts(trainer, known).find("model_type").value == "llama"
    assert TrainerFacts(trainer).find("model_type").kind is Kind.UNKNOWN


@pytest.mark.parametrize("why", [None, "the model has layers that carry a state from one sequence into the next"])
def test_a_model_mixes_the_sequences_of_a_row_for_a_reason(why: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_facts, "why_sequences_mix", lambda model, no_cache: why)
    assert value(trainer_with(torch.nn.Linear(1, 1)), "mixes_sequences") is (why is not None)


@pytest.mark.parametrize(("kind", "is_soft"), [("PromptTuning", True), ("PrefixTuning", False)])
def test_a_soft_prompt_stands_before_each_row(kind: str, is_soft: bool, tmp_path: Path) -> None:
    import peft

    model = tiny.llama(str(tmp_path), seed=0)
    assert value(trainer_with(model), "soft_prompt") is False
    config = getattr(peft, f"{kind}Config")(task_type="CAUSAL_LM", num_virtual_tokens=2)
    assert value(trainer_with(peft.get_peft_model(model, config)), "soft_prompt") is is_soft

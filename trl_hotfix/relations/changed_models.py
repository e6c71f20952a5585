"""Models that a trainer gets in another way: with a trained adapter, marked as quantised, or with other ends."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from . import materials
from .architectures import SIZES
from .changes import Arguments, field, is_change, words_of
from .setting import Setting

OTHER_END = materials.FIRST_WORD + 10
"""A word that ends an answer too."""


@is_change("a trained adapter")
def _trained(arguments: Arguments, folder: Path) -> None:
    _train(arguments["model"], "lora_")


@is_change("a trained adapter and a new one")
def _trained_twice(arguments: Arguments, folder: Path) -> None:
    _train(arguments["model"], "lora_")
    arguments["peft_config"] = materials.lora(arguments["model"].get_base_model())


@is_change("a trained IA3")
def _trained_ia3(arguments: Arguments, folder: Path) -> None:
    from peft import IA3Config, get_peft_model

    modules = ["k_proj", "v_proj", "down_proj"]
    config = IA3Config(target_modules=modules, feedforward_modules=["down_proj"], task_type="CAUSAL_LM")
    model = arguments["model"]
    arguments["model"] = materials.answering_as(model, get_peft_model(model, config))
    _train(arguments["model"], "ia3_l")
    if "ref_model" in arguments:
        arguments["ref_model"] = None


def _train(model: Any, part: str) -> None:
    """Give the weights of an adapter with this name numbers that a training may have given them."""
    import torch

    generator = torch.Generator().manual_seed(0)
    for name, weight in model.named_parameters():
        if part in name:
            weight.data.copy_(0.5 + 0.3 * torch.randn(weight.shape, generator=generator))


@is_change("a model loaded in bfloat16")
def _in_half(arguments: Arguments, folder: Path) -> None:
    """Load the model in bfloat16. One that is cast has other positions, whose frequencies are cast too."""
    model = arguments["model"]
    loaded = type(model).from_pretrained(model.name_or_path, torch_dtype="bfloat16")
    arguments["model"] = materials.answering_as(model, loaded)


@is_change("a model marked as quantised")
def _quantised(arguments: Arguments, folder: Path) -> None:
    """Mark the model as loaded in 8 bits. TRL asks no more than the mark."""
    model = arguments["model"]
    getattr(model, "get_base_model", lambda: model)().is_loaded_in_8bit = True


@is_change("a DoRA of a model marked as quantised")
def _quantised_dora(arguments: Arguments, folder: Path) -> None:
    arguments["peft_config"].use_dora = True
    _quantised(arguments, folder)


@is_change("a divergence by its constant")
def _by_constant(arguments: Arguments, folder: Path) -> None:
    """Name the divergence by TRL's own constant, as the command line does, where it has one."""
    constants = getattr(import_module("trl.trainer.dpo_config"), "FDivergenceType", None)
    if constants is not None:
        field(arguments, "f_divergence_type", constants.JS_DIVERGENCE)


@is_change("a temperature of the model's own")
def _temperature(arguments: Arguments, folder: Path) -> None:
    config = arguments["model"].generation_config
    config.temperature, config.do_sample = 0.3, True


@is_change("an end of the tokenizer")
def _end_of_tokenizer(arguments: Arguments, folder: Path) -> None:
    _other_end(arguments)
    words_of(arguments).eos_token = "w10"


@is_change("an end of the model")
def _end_of_model(arguments: Arguments, folder: Path) -> None:
    _other_end(arguments)
    arguments["model"].generation_config.eos_token_id = [1, OTHER_END]


@is_change("an end in generation_kwargs")
def _end_in_kwargs(arguments: Arguments, folder: Path) -> None:
    _other_end(arguments)
    field(arguments, "generation_kwargs", {"eos_token_id": [1, OTHER_END]})


def _other_end(arguments: Arguments) -> None:
    """Have the table's answers end with another word, which the reward does not see."""
    table = arguments["model"].generate
    answer, reward = table.answer, arguments["reward_funcs"]
    table.answer = lambda prompt, times: [*answer(prompt, times)[:-1], OTHER_END]

    def without_end(completions: list[Any], **kwargs: Any) -> list[float]:
        return reward([one.replace(" w10", "").replace("w10", "") for one in completions], **kwargs)  # type: ignore[no-any-return]

    arguments["reward_funcs"] = without_end


@is_change("answers without an end")
def _without_end(arguments: Arguments, folder: Path) -> None:
    """Have every second answer of the table cut off by its length."""
    table = arguments["model"].generate
    answer = table.answer

    def cut(prompt: Any, times: int) -> list[int]:
        found: list[int] = answer(prompt, times)
        return [*found[:-1], *[materials.FIRST_WORD] * (materials.LONGEST - len(found) + 1)] if found[0] % 2 else found

    table.answer = cut


@is_change("a recurrent model")
def _recurrent(arguments: Arguments, folder: Path) -> None:
    """Give a model whose logits are capped, though its config calls the cap by another name."""
    import torch
    import transformers

    path = folder / "model-recurrent"
    if not path.is_dir():
        torch.manual_seed(0)
        sizes = {**SIZES, "num_hidden_layers": 3, "vocab_size": materials.WORDS + 4, "bos_token_id": None}
        config = transformers.RecurrentGemmaConfig(
            **sizes, lru_width=16, attention_window_size=32, logits_soft_cap=0.05
        )
        transformers.RecurrentGemmaForCausalLM(config).save_pretrained(path)
    model = transformers.RecurrentGemmaForCausalLM.from_pretrained(path)
    for module in model.modules():
        # transformers 4 goes on with the state of the batch before, and fails in the second one.
        if hasattr(module, "recurrent_states"):
            module.register_forward_pre_hook(lambda module, _: setattr(module, "recurrent_states", None))
    arguments["model"] = model


@is_change("no labels in its config")
def _without_labels(arguments: Arguments, folder: Path) -> None:
    """Have the path of a model on disk whose config does not say how many labels it has."""
    import json
    import shutil

    path = folder / "without-labels"
    if not path.is_dir():
        shutil.copytree(materials.saved_model(folder, Setting(), seed=0, labels=1), path)
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
        (path / "config.json").write_text(
            json.dumps({name: value for name, value in config.items() if "label" not in name}), encoding="utf-8"
        )
    arguments["model"] = str(path)

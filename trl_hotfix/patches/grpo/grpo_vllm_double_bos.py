"""GRPO, RLOO and Online DPO send vLLM a text that begins with a BOS, and vLLM puts another before it (issue 3853).

Up to 0.24.0 GRPO and RLOO, and Online DPO to this day, render conversations by the chat template, which writes the BOS,
and call ``generate`` of vLLM with these texts. vLLM tokenizes them as any text. The loss tokenizes them with
``add_special_tokens=False``, or has the ids that vLLM returns (a colocated vLLM of Online DPO, and both modes of 0.24).
From 0.25.0 on GRPO and RLOO have vLLM render conversations, and send it texts that are given as prompts, up to 0.29.0.

vLLM is given the text without its BOS, if the tokenizer makes the same ids of it as of the text alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import ExitStack, suppress
from types import ModuleType, SimpleNamespace
from typing import Any

from ...authoring import Call, absent, absent_on, judge, shadowed, wrapper
from ...model import Outcome
from ...testing import (
    BeginningTokenizer,
    StopConstruction,
    absent_if_reexported,
    single_process,
    stub_that_generates,
    tiny_causal_lm,
)


@wrapper
def leave_the_beginning_to_vllm(call: Call) -> Any:
    """Call the method with views of its engine and its client, which is on the main process only."""
    owner = call.trainer
    engines = {name: engine for name in ("llm", "vllm_client") if (engine := vars(owner).get(name)) is not None}
    processor = inspect.unwrap(owner.processing_class)
    tokenizer = getattr(processor, "tokenizer", processor)
    if not tokenizer.bos_token:
        return call()
    act = call.act_later()
    with ExitStack() as stack:
        for name, engine in engines.items():
            stack.enter_context(shadowed(owner, name, _view(engine, tokenizer, act)))
        return call()


def _view(engine: Any, tokenizer: Any, act: Callable[[], None]) -> Any:
    """Return a view of an engine or a client that generates from texts without their BOS. It calls ``act`` for each."""
    import wrapt

    def without_beginning(prompt: Any) -> Any:
        if not isinstance(prompt, str) or not prompt.startswith(tokenizer.bos_token):
            return prompt
        rest = prompt.removeprefix(tokenizer.bos_token)
        # Some tokenizers of SentencePiece put a blank where the BOS was, and others add none.
        if tokenizer(rest)["input_ids"] != tokenizer(prompt, add_special_tokens=False)["input_ids"]:
            return prompt
        act()
        return rest

    class View(wrapt.ObjectProxy):  # type: ignore[type-arg]
        def generate(self, prompts: Any, *args: Any, **kwargs: Any) -> Any:
            # Processors of images tokenize by rules of their own.
            if not kwargs.get("images"):
                prompts = [without_beginning(prompt) for prompt in prompts]
            return self.__wrapped__.generate(prompts, *args, **kwargs)

    return View(engine)


_METHODS = {
    "GRPOTrainer": ("_generate_single_turn", "_generate_and_score_completions", "_prepare_inputs", "compute_loss"),
    "RLOOTrainer": ("_generate_single_turn", "_generate_and_score_completions"),
    "OnlineDPOTrainer": ("_generate_vllm",),
    "VLLMGeneration": ("generate",),
}
"""The methods in which a class may generate with vLLM. Where two of them are there, one calls the other."""
_SETTINGS = {"use_vllm": True, "vllm_mode": "server", "mode": "server", "_last_loaded_step": 0}
_SETTINGS |= {"num_generations": 1, "num_generations_eval": 1}
_SETTINGS |= dict.fromkeys(("guided_decoding_regex", "structured_outputs_regex", "sampling_params"))


def _method(holder: Any) -> Any:
    """Return the method of a class that calls ``generate`` of vLLM, or has another one do so."""
    methods = (vars(holder).get(name) for name in _METHODS[holder.__name__])
    callers = {"llm", "vllm_client", "_generate_vllm_server"}
    return next(
        (method for method in methods if method and callers & {*inspect.unwrap(method).__code__.co_names}), None
    )


@absent_on(TypeError, "string indices must be integers", "RLOO of 0.25 and 0.26 takes no texts with vLLM")
def vllm_begins_once(module: ModuleType) -> Outcome:
    """Count the beginnings of what vLLM makes of a text that has one, as the tokenizer does."""
    name = next(name for name in reversed(_METHODS) if name in vars(module))
    holder = getattr(module, name)
    method = _method(holder)
    if method is None:
        return absent("this class does not generate with vLLM, or in a class of its own")
    if reexported := absent_if_reexported(module, method):
        return reexported
    code = inspect.unwrap(method).__code__
    names = code.co_varnames[: code.co_argcount]
    if name == "VLLMGeneration" and "images" in names:
        return absent("vLLM is given token ids")
    if name == "OnlineDPOTrainer" and "images" not in names:
        return absent("vLLM renders conversations")
    given: list[str] = []

    def generate(prompts: list[str], *args: Any, **settings: Any) -> None:
        given.extend(prompts)
        raise StopConstruction

    engine, tokenizer, model = SimpleNamespace(generate=generate), BeginningTokenizer(), tiny_causal_lm()
    config = getattr(module, name.replace("Trainer", "Config"))
    parameters = inspect.signature(inspect.unwrap(config.__init__)).parameters
    args = SimpleNamespace(**{key: each.default for key, each in parameters.items()} | _SETTINGS)
    attributes = {"llm": engine, "vllm_client": engine, "processing_class": tokenizer, "_tokenizer": tokenizer}
    trainer = stub_that_generates(holder, args, model, generation_config=SimpleNamespace(max_tokens=1), **attributes)
    known = {"model": model, "inputs": [{"prompt": "\2a"}], "prompts": ["\2a"], "images": None, "num_generations": 1}
    with single_process(module), suppress(StopConstruction):
        getattr(trainer, method.__name__)(**{key: value for key, value in known.items() if key in names})
    return judge(sum(tokenizer(text)["input_ids"].count(2) for text in given), right=1, wrong=2)

"""vLLM makes one BOS of a text that has one, and is given every other prompt as TRL gives it."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from tokenizers import models, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from trl_hotfix.authoring import shadowed
from trl_hotfix.patches.grpo.grpo_vllm_double_bos import _SETTINGS, _method, _view
from trl_hotfix.testing import StopConstruction, single_process, stub_that_generates, tiny_causal_lm

import tiny

ID = "grpo-vllm-double-bos"
BOS, EOS = 62, 1
GIVEN = ["w59 w1 w2 w3", "w4", "w59 w5 w6", "w59 w59 w7", "w59", ""]
ONCE = [[BOS, 4, 5, 6], [BOS, 7], [BOS, 8, 9], [BOS, BOS, 10], [BOS], [BOS]]
TEMPLATE = "w59 {% for message in messages %}{{ message['content'] }} {% endfor %}"
CHATS = [[{"role": "user", "content": text}] for text in ("w1 w2 w3", "w4")]
NAMES = {
    "GRPO": ("trl.trainer.grpo_trainer", "GRPOTrainer"),
    "RLOO": ("trl.trainer.rloo_trainer", "RLOOTrainer"),
    "OnlineDPO": ("trl.trainer.online_dpo_trainer", "OnlineDPOTrainer"),
    "experimental OnlineDPO": ("trl.experimental.online_dpo.online_dpo_trainer", "OnlineDPOTrainer"),
    "VLLMGeneration": ("trl.generation.vllm_generation", "VLLMGeneration"),
}


def holders() -> Iterable[tuple[str, tuple[ModuleType, Any]]]:
    """Return the classes of this release that give vLLM texts."""
    for name, (module_name, class_name) in NAMES.items():
        try:
            module = import_module(module_name)
        except ImportError:
            continue
        holder = getattr(module, class_name, None)
        method = _method(holder) if holder is not None else None
        if method is None or inspect.unwrap(method).__module__ != module_name:
            continue
        code = inspect.unwrap(method).__code__
        names = code.co_varnames[: code.co_argcount]
        gives_ids = class_name == "VLLMGeneration" and "images" in names
        renders = class_name == "OnlineDPOTrainer" and "images" not in names
        takes_no_texts = name == "RLOO" and import_module("trl").__version__.startswith(("0.25.", "0.26."))
        if not (gives_ids or renders or takes_no_texts):
            yield name, (module, holder)


HOLDERS = dict(holders())
each = pytest.mark.parametrize("name", HOLDERS)


def words(single: str = "w59 $A", bos_token: str | None = "w59") -> Any:
    """Return a tokenizer that makes ``single`` of a text."""
    tokenizer = tiny.tokenizer()
    tokenizer.padding_side, tokenizer.bos_token, tokenizer.chat_template = "left", bos_token, TEMPLATE
    specials = [("w59", BOS), ("<eos>", EOS)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=single, special_tokens=specials)
    return tokenizer


class Engine:
    """An engine or a client of vLLM. It keeps the prompts that it is given, and stops."""

    def __init__(self) -> None:
        self.given: list[Any] = []
        runner = SimpleNamespace(model=SimpleNamespace(load_weights=lambda weights: None))
        self.llm_engine = SimpleNamespace(
            model_executor=SimpleNamespace(driver_worker=SimpleNamespace(model_runner=runner))
        )

    def reset_prefix_cache(self) -> None: ...

    def generate(self, prompts: list[Any], *args: Any, **settings: Any) -> None:
        self.given += prompts
        raise StopConstruction

    def chat(self, messages: list[Any], *args: Any, **settings: Any) -> None:
        self.given += messages
        raise StopConstruction


def stub(name: str, tokenizer: Any = None, *, colocated: bool = False, **attributes: Any) -> Any:
    module, holder = HOLDERS[name]
    mode = "colocate" if colocated else "server"
    config = getattr(module, holder.__name__.replace("Trainer", "Config"))
    parameters = inspect.signature(inspect.unwrap(config.__init__)).parameters
    defaults = {key: parameter.default for key, parameter in parameters.items()}
    settings = defaults | _SETTINGS | {"vllm_mode": mode, "mode": mode, "tensor_parallel_size": 1}
    settings |= {"vllm_tensor_parallel_size": 1, "vllm_enable_sleep_mode": False, "generation_kwargs": {}}
    tokenizer, engine = words() if tokenizer is None else tokenizer, Engine()
    known = {
        "processing_class": tokenizer,
        "_tokenizer": getattr(tokenizer, "tokenizer", tokenizer),
        "llm": engine,
        "engine": engine,
    }
    if not colocated:
        known["vllm_client"] = engine
    known |= {"generation_config": SimpleNamespace(max_tokens=1), "rollout_func": None}
    model = tiny_causal_lm()
    trainer = stub_that_generates(holder, SimpleNamespace(**settings), model, **{**known, **attributes})
    trainer.module, trainer.method = module, _method(holder)
    return trainer


@contextmanager
def vllm(module: ModuleType) -> Iterator[None]:
    """Let the module have the names of vLLM, which some releases import when they generate."""
    of_vllm: Any = SimpleNamespace(__version__="0.12.0", StructuredOutputsParams=SimpleNamespace)
    missing = {"vllm", "vllm.sampling_params"} - sys.modules.keys()
    sys.modules.update(dict.fromkeys(missing, of_vllm))
    try:
        with shadowed(module, "SamplingParams", SimpleNamespace), shadowed(module, "vllm", of_vllm):
            yield
    finally:
        for name in missing:
            del sys.modules[name]


def given(trainer: Any, prompts: Any) -> list[Any]:
    """Return the prompts that vLLM is given."""
    known = {"model": trainer.model, "inputs": [{"prompt": prompt} for prompt in prompts], "prompts": list(prompts)}
    known |= {"images": None, "num_generations": 1}
    code = inspect.unwrap(trainer.method).__code__
    names = code.co_varnames[: code.co_argcount]
    trainer.engine.given.clear()
    with single_process(trainer.module), vllm(trainer.module), suppress(StopConstruction):
        getattr(trainer, trainer.method.__name__)(**{key: value for key, value in known.items() if key in names})
    found: list[Any] = trainer.engine.given
    assert len(found) == len(prompts)
    return found


def ids_in_vllm(trainer: Any, prompts: Any) -> list[list[int]]:
    """Return what vLLM makes of the prompts."""
    tokenizer = getattr(trainer.processing_class, "tokenizer", trainer.processing_class)
    return [tokenizer(text)["input_ids"] for text in given(trainer, prompts)]


each_mode = pytest.mark.parametrize("colocated", [False, True], ids=["server", "colocate"])


def skip_what_is_not_there(name: str, colocated: bool) -> None:
    source = inspect.getsource(HOLDERS[name][0])
    if ("self.llm.generate(" if colocated else "self.vllm_client.generate(") not in source:
        pytest.skip("this release has no such mode")


def renders(name: str) -> bool:
    """Return whether TRL renders conversations itself, and gives vLLM texts."""
    return "llm.chat(" not in inspect.getsource(HOLDERS[name][0]) or "OnlineDPO" in name


@each
@each_mode
@pytest.mark.parametrize("training", [True, False])
def test_vllm_begins_each_text_once(name: str, colocated: bool, training: bool, step: Any) -> None:
    skip_what_is_not_there(name, colocated)
    trainer = stub(name, colocated=colocated)
    trainer.model.train(training)
    assert ids_in_vllm(trainer, step(GIVEN)) == step(ONCE)
    assert ids_in_vllm(trainer, GIVEN[1:2]) == ONCE[1:2]
    assert ids_in_vllm(trainer, GIVEN[:1]) == ONCE[:1]


@pytest.fixture(params=[1, -1], ids=["", "reversed"])
def step(request: pytest.FixtureRequest) -> Any:
    return lambda rows: rows[:: request.param]


@each
@each_mode
def test_trl_has_vllm_put_two_beginnings(name: str, colocated: bool, switch: Any) -> None:
    skip_what_is_not_there(name, colocated)
    with switch.off():
        twice = [[BOS, *row] if text.startswith("w59") else row for row, text in zip(ONCE, GIVEN, strict=True)]
        assert ids_in_vllm(stub(name, colocated=colocated), GIVEN) == twice


@each
@each_mode
def test_conversations_begin_once_where_trl_renders_them(name: str, colocated: bool) -> None:
    skip_what_is_not_there(name, colocated)
    trainer = stub(name, colocated=colocated)
    if renders(name):
        assert ids_in_vllm(trainer, CHATS) == ONCE[:2]
    else:
        assert given(trainer, CHATS) == CHATS


UNAFFECTED = {
    "no text has a BOS": (words(), ["w1", "w2 w3"]),
    "the BOS is not the first word": (words(), ["w1 w59", "w2"]),
    "no BOS is added": (words("$A"), ["w59 w59 w1", "w59 w1", "w1"]),
    "a BOS is added behind": (words("$A w59"), ["w59 w59 w1", "w59 w1"]),
    "an end is added": (words("w59 $A <eos>"), ["w59 w1"]),
    "another token is added": (words("<eos> $A"), ["w59 w59 w1", "w59 w1"]),
    "there is no BOS": (words(bos_token=None), ["w59 w1"]),
}


@each
@pytest.mark.parametrize(("tokenizer", "prompts"), UNAFFECTED.values(), ids=list(UNAFFECTED))
def test_other_texts_stay_as_they_are(name: str, tokenizer: Any, prompts: Any) -> None:
    with tiny.counted(ID) as counts:
        assert given(stub(name, tokenizer), prompts) == prompts
        assert counts().acted == 0


class Generating:
    """An engine that keeps what it is given."""

    def generate(self, prompts: list[Any], **settings: Any) -> Any:
        self.given = prompts
        return settings


@pytest.mark.parametrize("prompts", [[[BOS, 4], [BOS]], [{"prompt": "w59 w1", "multi_modal_data": {}}]])
def test_prompts_that_are_no_texts_stay_as_they_are(prompts: list[Any]) -> None:
    engine, acts = Generating(), []
    assert _view(engine, words(), lambda: acts.append(1)).generate(prompts, n=2) == {"n": 2}
    assert engine.given == prompts
    assert not acts


@pytest.mark.parametrize(("images", "given_prompts"), [(None, [" w1"]), ([], [" w1"]), ([["image"]], ["w59 w1"])])
def test_a_processor_of_images_gets_the_texts_that_trl_gives_it(images: Any, given_prompts: list[str]) -> None:
    engine = Generating()
    _view(engine, words(), lambda: None).generate(["w59 w1"], images=images)
    assert engine.given == given_prompts


@each
def test_a_trainer_without_one_of_the_two_lacks_it_in_the_call(name: str) -> None:
    skip_what_is_not_there(name, colocated=False)
    seen: list[Any] = []

    class Looking(Engine):
        def generate(self, *args: Any, **settings: Any) -> None:
            seen.append(trainer.llm)
            super().generate(*args, **settings)

    trainer = stub(name)
    trainer.vllm_client = trainer.engine = Looking()
    trainer.llm = None
    given(trainer, GIVEN)
    assert seen == [None]


@each
def test_a_text_that_would_have_a_blank_of_sentencepiece_stays(name: str) -> None:
    tokenizer = words()
    vocabulary = {"<pad>": 0, "<eos>": EOS, "<unk>": 2, "w1": 3, "\u2581w1": 4, "w59": BOS, "\u2581": 5}
    tokenizer.backend_tokenizer.model = models.WordLevel(vocabulary, unk_token="<unk>")
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=True)
    tokenizer.add_special_tokens({"bos_token": "w59"})
    assert given(stub(name, tokenizer), ["w59w1"]) == ["w59w1"]


@each
def test_the_trainer_keeps_its_engine_and_its_client(name: str) -> None:
    trainer = stub(name)
    given(trainer, GIVEN)
    assert trainer.llm is trainer.vllm_client is trainer.engine


@each
def test_the_processor_of_a_vision_model_has_a_tokenizer(name: str) -> None:
    class Processor:
        def __init__(self) -> None:
            self.tokenizer = words()

        def __call__(self, text: Any, **settings: Any) -> Any:
            return self.tokenizer(text, **settings)

        def batch_decode(self, *args: Any, **settings: Any) -> Any:
            return self.tokenizer.batch_decode(*args, **settings)

    assert ids_in_vllm(stub(name, Processor()), GIVEN) == ONCE

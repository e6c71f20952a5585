"""Train two steps of two micro-batches with the real trainers and a stand-in for vLLM.

The stand-in tokenizes texts as vLLM does, with special tokens, and its completions depend on every token of the prompt.
What it generates from must begin once, and all losses and gradients be those of a run whose stand-in adds no BOS.
"""

from __future__ import annotations

import inspect
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from types import ModuleType, SimpleNamespace
from typing import Any

import transformers
import trl

from trl_hotfix.authoring import absent, judge, shadowed
from trl_hotfix.matching.versions import in_range
from trl_hotfix.model import Outcome, Verdict

import tiny

OVERLAYS = ()
PARITY = False
EQUIVALENT = {"applied twice": "the inner view is given texts without a BOS"}

BOS, EOS, STEPS, MICRO_BATCHES, LONGEST = 62, 1, 2, 2, 5
ADDS, SILENT = "w59 $A", "$A"
TEXTS = [" ".join(f"w{(5 * row + 3 * place) % 50}" for place in range(1 + row % 4)) for row in range(8)]
TEMPLATE = "w59 {% for message in messages %}{{ message['content'] }} {% endfor %}"


def train() -> tiny.TrainingResult:
    names = [name for name in ("GRPO", "RLOO", "OnlineDPO") if _sends_texts(name)]
    if not names:
        return tiny.TrainingResult(absent("vLLM renders conversations, or is given token ids"))
    runs = {name: _Run(name, _prompts(name)) for name in names}
    outcomes = [run.judged() for run in runs.values()]
    if len({outcome.verdict for outcome in outcomes}) > 1:
        raise AssertionError(f"the trainers do not agree: {outcomes}")
    return _result(runs, outcomes[0])


def unaffected() -> tiny.TrainingResult:
    """Train on texts without a BOS, and with a tokenizer that adds none."""
    runs = {}
    for name in ("GRPO", "RLOO", "OnlineDPO"):
        if _sends_texts(name):
            runs[f"{name}, texts"] = _Run(name, TEXTS)
            runs[f"{name}, silent"] = _Run(name, [f"w59 {text}" for text in TEXTS], SILENT)
    return _result(runs, absent("no text has a BOS, or vLLM adds none"))


def _module(name: str) -> ModuleType:
    return sys.modules[tiny.classes(name)[0].__module__]


def _source(name: str) -> str:
    """Return the code that calls vLLM."""
    module = _module(name)
    has_class = hasattr(module, "VLLMGeneration")
    return inspect.getsource(sys.modules["trl.generation.vllm_generation"] if has_class else module)


def _renders(name: str) -> bool:
    return name == "OnlineDPO" or ".chat(" not in _source(name)


def _sends_texts(name: str) -> bool:
    trainer_class, _ = tiny.classes(name)
    if trainer_class is None:
        return False
    if name == "OnlineDPO":
        # Its own loop calls what transformers 5 no longer has.
        if in_range(version("trl"), "<0.28") and in_range(transformers.__version__, ">=5"):
            return False
        return "images" in inspect.signature(getattr(trainer_class, "_generate_vllm", id)).parameters
    if "vllm_client.generate(" not in _source(name) and "llm.generate(" not in _source(name):
        return False
    # From 0.29.1 on vLLM is given ids. RLOO of 0.25 and 0.26 takes no texts.
    return not (
        hasattr(trainer_class, "_tokenize_prompts")
        or (name == "RLOO" and trl.__version__.startswith(("0.25.", "0.26.")))
    )


def _prompts(name: str) -> list[Any]:
    if _renders(name):
        return [[{"role": "user", "content": text}] for text in TEXTS]
    return [f"w59 {text}" for text in TEXTS]


def _words(single: str) -> Any:
    """Return a tokenizer that makes ``single`` of a text."""
    from tokenizers.processors import TemplateProcessing

    words = tiny.tokenizer()
    words.padding_side, words.bos_token, words.chat_template = "left", "w59", TEMPLATE
    words.backend_tokenizer.post_processor = TemplateProcessing(single=single, special_tokens=[("w59", BOS)])
    return words


class _StandIn:
    """The engine of vLLM, and the client of its server."""

    def __init__(self, words: Any, copies: int) -> None:
        self.words, self.copies, self.sampled_from = words, copies, []
        self.reset_prefix_cache = lambda: None
        # 0.14.0 hands weights over by itself.
        runner = SimpleNamespace(model=SimpleNamespace(load_weights=lambda weights: None))
        executor = SimpleNamespace(driver_worker=SimpleNamespace(model_runner=runner))
        self.llm_engine = SimpleNamespace(model_executor=executor)

    def generate(self, prompts: Sequence[Any], *args: Any, n: int = 0, **settings: Any) -> list[Any]:
        """Complete each text by one to four words and an end. Its copies have other completions."""
        seen, answers = Counter[str](), []
        for text in prompts:
            ids = self.words(text)["input_ids"]
            self.sampled_from.append(ids)
            completions = []
            for _ in range(n or self.copies):
                number = sum(ids) + 11 * seen[text]
                seen[text] += 1
                token_ids = [*(10 + (7 * number + 3 * place) % 50 for place in range(1 + number % 4)), EOS]
                chances = [{token: SimpleNamespace(logprob=-1.0, rank=1)} for token in token_ids]
                completions.append(SimpleNamespace(token_ids=token_ids, logprobs=chances))
            answers.append(SimpleNamespace(prompt_token_ids=ids, outputs=completions))
        # A client returns ids alone, in the one release without a colocated vLLM.
        return [each.token_ids for answer in answers for each in answer.outputs] if n else answers


@contextmanager
def _vllm(module: ModuleType) -> Iterator[None]:
    """Let the module have the names of vLLM, which some releases import when they generate."""
    of_vllm: Any = SimpleNamespace(__version__="0.12.0", StructuredOutputsParams=SimpleNamespace)
    with ExitStack() as stack:
        stack.enter_context(shadowed(module, "SamplingParams", SimpleNamespace))
        stack.enter_context(shadowed(module, "vllm", of_vllm))
        yield


class _Run:
    """A run of a real trainer, which is given the stand-in when it is made."""

    def __init__(self, name: str, prompts: Sequence[Any], single: str = ADDS) -> None:
        from datasets import Dataset

        self.name, self.prompts = name, prompts
        self.losses: list[float] = []
        self.gradients: list[dict[str, Any]] = []
        trainer_class, config_class = tiny.classes(name)
        settings: dict[str, Any] = {"gradient_accumulation_steps": MICRO_BATCHES, "max_steps": STEPS, "optim": "sgd"}
        settings |= {"learning_rate": 0.5, "loss_type": "grpo", "max_completion_length": LONGEST}
        settings |= {"per_device_train_batch_size": 4, "per_device_eval_batch_size": 4, "num_generations": 4}
        settings |= {"max_new_tokens": LONGEST, "max_length": 64, "vllm_importance_sampling_correction": False}
        settings |= {"max_prompt_length": 32, "beta": 0.5 if name == "OnlineDPO" else 0.04}
        settings |= {"loss_type": "sigmoid"} if name == "OnlineDPO" else {}
        settings["generation_kwargs"] = {}  # 0.19.0 cannot do without.
        rows = [{"prompt": prompt} for prompt in prompts]
        module = _module(name)
        if hasattr(module, "VLLMGeneration"):
            module = sys.modules["trl.generation.vllm_generation"]
        with tempfile.TemporaryDirectory() as folder, _vllm(module):
            trainer = tiny.trainer(
                self._recording(trainer_class),
                model=tiny.llama(folder, seed=0),
                reward_funcs=_reward,
                args=tiny.config(config_class, **settings),
                train_dataset=Dataset.from_list(rows),
                tokenizer=_words(single),
            )
            # 0.14.0 has vLLM answer a prompt several times.
            copies = 2 if name == "OnlineDPO" else 4 if trl.__version__.startswith("0.14.") else 1
            self.engine = _StandIn(_words(single), copies)
            self._have_vllm(trainer)
            trainer.train()

    def _recording(self, trainer_class: Any) -> Any:
        """Return a subclass that keeps the loss of each micro-batch, and the gradients behind it."""
        run = self

        class Recorder(trainer_class):  # type: ignore[misc]
            def training_step(self, *args: Any, **kwargs: Any) -> Any:
                loss = super().training_step(*args, **kwargs)
                run.losses.append(float(loss))
                run.gradients.append(tiny.gradients_of(self.model))
                return loss

        return Recorder

    def _have_vllm(self, trainer: Any) -> None:
        """Have the trainer generate with the stand-in, which needs no weights."""
        mode = "colocate" if "self.llm.generate(" in _source(self.name) else "server"
        vars(trainer).update(use_vllm=True, vllm_mode=mode, llm=self.engine, sampling_params=None)
        vars(trainer).update(_move_model_to_vllm=lambda: None, _last_loaded_step=0, vllm_tensor_parallel_size=1)
        vars(trainer).update(guided_decoding_regex=None, structured_outputs_regex=None)
        trainer.args.use_vllm = True
        if mode == "server":
            trainer.vllm_client = self.engine
        if self.name == "OnlineDPO":
            trainer.generation_config = SimpleNamespace(max_tokens=LONGEST)
        if hasattr(_module(self.name), "VLLMGeneration") and self.name != "OnlineDPO":
            generation_class: Any = _module(self.name).VLLMGeneration  # type: ignore[attr-defined]
            generation = object.__new__(generation_class)
            parameters = inspect.signature(inspect.unwrap(generation_class.__init__)).parameters
            vars(generation).update({key: each.default for key, each in parameters.items()})
            vars(generation).update(accelerator=trainer.accelerator, processing_class=trainer.processing_class)
            vars(generation).update(mode=mode, llm=self.engine, sync_weights=lambda: None, generation_kwargs={})
            vars(generation).update(enable_sleep_mode=False, tensor_parallel_size=1, rollout_func=None, tools=None)
            vars(generation).update(chat_template=None, chat_template_kwargs={}, max_completion_length=LONGEST)
            trainer.vllm_generation = generation

    def judged(self) -> Outcome:
        """Judge the beginnings of what is sampled from, and compare all else with a run whose vLLM adds none."""
        beginnings = sum(ids.count(BOS) for ids in self.engine.sampled_from)
        count = len(self.engine.sampled_from)
        outcome = judge(beginnings, right=count, wrong=2 * count)
        assert len(self.losses) == STEPS * MICRO_BATCHES
        assert any(bool(value.any()) for value in self.gradients[-1].values())
        difference = self._difference(_Run(self.name, self.prompts, SILENT))
        if (difference < 1e-6) != (outcome.verdict is Verdict.FIXED):
            raise AssertionError(f"{self.name}: {outcome}, and the gradients differ by {difference}")
        return outcome

    def _difference(self, other: _Run) -> float:
        """Return the largest difference of the losses and gradients of two runs."""
        assert len(self.engine.sampled_from) == len(other.engine.sampled_from) > 0
        differences = [abs(one - another) for one, another in zip(self.losses, other.losses, strict=True)]
        for gradients, expected in zip(self.gradients, other.gradients, strict=True):
            differences += [float((gradients[key] - value).abs().max()) for key, value in expected.items()]
        return max(differences)


def _result(runs: dict[str, _Run], outcome: Outcome) -> tiny.TrainingResult:
    gradients = {
        f"{name} {number} {key}": value
        for name, run in runs.items()
        for number, gradients in enumerate(run.gradients)
        for key, value in gradients.items()
    }
    return tiny.TrainingResult(outcome, sum(sum(run.losses) for run in runs.values()), gradients)


def _reward(completions: list[Any], **kwargs: Any) -> list[float]:
    """Return rewards by all words of a completion."""
    import torch

    # The trainer shuffles the batch after it has the rewards.
    torch.manual_seed(0)
    texts = [each if isinstance(each, str) else each[0]["content"] for each in completions]
    return [float(sum(int(word[1:]) for word in text.split() if word[0] == "w") % 7) for text in texts]

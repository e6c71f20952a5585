"""The ratio of the trainer's log-probs to those of vLLM is that of the two engines, whatever tokens vLLM keeps."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import accelerate.utils
import pytest
import torch
from packaging.version import Version
from trl.trainer import grpo_trainer

from trl_hotfix.patches.grpo.grpo_vllm_is_ratio_truncated_support import _log_mass, _unfused, _with_vllm
from trl_hotfix.testing import PromptTokenizer, scored_completions, stub_that_scores, tiny_attention_model

import tiny

ID = "grpo-vllm-is-ratio-truncated-support"
TARGET = "trl.trainer.grpo_trainer:GRPOTrainer._generate_and_score_completions"
RELEASE = Version(version("trl"))
TRUNCATIONS = {
    "top_p": {"top_p": 0.6},
    "top_k": {"top_k": 3},
    "top_k of 1": {"top_k": 1},
    "min_p": {"min_p": 0.8},
    "all": {"top_p": 0.8, "top_k": 9, "min_p": 0.3},
    "temperature": {"top_p": 0.6, "temperature": 0.5},
    "generation_kwargs": {"generation_kwargs": {"top_k": 2, "top_p": 0.9, "min_p": 0.01}},
    "generation_kwargs over settings": {"top_k": 15, "top_p": 0.1, "generation_kwargs": {"top_k": 2, "top_p": 1.0}},
}


def likely_completion(length: int) -> list[int]:
    """Return a completion of tokens that are likely, but not all the most likely."""
    model, ids = tiny_attention_model(), list(PromptTokenizer.prompt_ids)
    for place in range(length - 1):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids]), labels=None).logits[0, -1]
        # The first two are padding and the end.
        ids.append(2 + int(logits[2:].argsort(descending=True)[(place + length) % 2]))
    return [*ids[len(PromptTokenizer.prompt_ids) :], PromptTokenizer.eos_token_id]


COMPLETIONS = [likely_completion(3), likely_completion(5)]


def kept(logits: Any, sampled: int, top_p: float = 1.0, top_k: int = 0, min_p: float = 0.0) -> list[bool]:
    """Return which tokens vLLM keeps, token by token, and that it has kept the one that it sampled."""
    probs = logits.double().softmax(-1).tolist()
    left = [prob if prob >= (min_p or 0) * max(probs) else 0.0 for prob in probs]
    if top_k:
        left = [prob if prob >= sorted(left)[-top_k] else 0.0 for prob in left]
    total = sum(left)
    mask = [prob > 0 and sum(other for other in left if other > prob) / total < top_p for prob in left]
    least = min([prob for prob, is_kept in zip(probs, mask, strict=True) if is_kept] + [probs[sampled]])
    return [prob >= least for prob in probs]


def full_and_vllm(model: Any, temperature: float = 1.0, **settings: Any) -> tuple[list[list[float]], list[list[float]]]:
    """Return the log-probs of the completions over all tokens, and over those that are kept."""
    full, vllm = [], []
    settings |= settings.pop("generation_kwargs", {})
    for completion in COMPLETIONS:
        ids = [*PromptTokenizer.prompt_ids, *completion]
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids]), labels=None).logits[0, 1:-1] / temperature
        rows = list(zip(logits, completion, strict=True))
        full.append([float(row.log_softmax(-1)[token]) for row, token in rows])
        masses = [float(row.softmax(-1)[kept(row, token, **settings)].sum()) for row, token in rows]
        vllm.append([value - math.log(mass) for value, mass in zip(full[-1], masses, strict=True)])
    return full, vllm


def stub(mode: str = "token_truncate", shift: float = 0.0, **settings: Any) -> Any:
    """Return a trainer whose vLLM has its weights. ``shift`` is added to vLLM's log-probs."""
    options = {name: settings.pop(name) for name in ("training", "reference") if name in settings}
    model = tiny_attention_model()
    trainer = stub_that_scores(
        grpo_trainer, COMPLETIONS, [0.0, 1.0], model=model, **options, **{"beta": 0.0, **settings}
    )
    names = ("temperature", "top_p", "top_k", "min_p", "generation_kwargs")
    _, vllm = full_and_vllm(model, **{name: settings[name] for name in names if name in settings})
    _with_vllm(trainer, [[value + shift for value in row] for row in vllm])
    trainer.vllm_importance_sampling_mode = mode
    return trainer


def tokens(values: Any) -> list[Any]:
    return [row[: len(ids)] for row, ids in zip(values, COMPLETIONS, strict=True)]


def acts(trainer: Any) -> int:
    return tiny.acts(ID, TARGET, trainer) or 0


def assert_close(values: Any, expected: Sequence[Sequence[float]]) -> None:
    for row, other in zip(tokens(values), expected, strict=True):
        torch.testing.assert_close(row, torch.tensor(other), rtol=1e-4, atol=1e-5)


def assert_equal(output: dict[str, Any], other: dict[str, Any]) -> None:
    assert output.keys() == other.keys()
    for name, value in output.items():
        assert value.equal(other[name]) if torch.is_tensor(value) else value == other[name], name


def ones(factor: float = 1.0) -> list[list[float]]:
    return [[factor] * len(ids) for ids in COMPLETIONS]


each_truncation = pytest.mark.parametrize("settings", TRUNCATIONS.values(), ids=TRUNCATIONS)


@pytest.fixture(autouse=True)
def skip_temperatures(request: pytest.FixtureRequest) -> None:
    settings = getattr(request.node, "callspec", SimpleNamespace(params={})).params.get("settings", {})
    if "temperature" in settings and Version("1.15") <= RELEASE:
        pytest.skip("the model has the temperature, and the stand-in for it none; the proof has both")


@each_truncation
def test_the_ratio_of_equal_engines_is_one(settings: dict[str, Any]) -> None:
    trainer = stub(**settings)
    assert_close(scored_completions(trainer)["importance_sampling_ratio"], ones())
    assert acts(trainer) == 1


@each_truncation
def test_trl_has_another_ratio(settings: dict[str, Any], switch: Any) -> None:
    with switch.off():
        ratio = scored_completions(stub(**settings))["importance_sampling_ratio"]
    assert min(row.max() for row in tokens(ratio)) <= 1.0001
    assert min(row.min() for row in tokens(ratio)) < 0.95


def test_in_evaluation_and_in_each_call_too() -> None:
    trainers = stub(top_k=3, training=False), stub(top_k=3)
    for trainer in trainers * 2:
        assert_close(scored_completions(trainer)["importance_sampling_ratio"], ones())
    assert [acts(trainer) for trainer in trainers] == [2, 2]


def test_a_difference_of_the_engines_stays() -> None:
    output = scored_completions(stub(top_k=3, shift=0.1))
    assert_close(output["importance_sampling_ratio"], ones(math.exp(-0.1)))


@pytest.mark.skipif(
    "vllm_importance_sampling_mode" not in grpo_trainer.GRPOConfig.__dataclass_fields__,
    reason="this release compares tokens only",
)
def test_the_ratio_of_a_completion_is_one_too() -> None:
    ratio = scored_completions(stub("sequence_mask", top_k=3))["importance_sampling_ratio"]
    torch.testing.assert_close(ratio, torch.ones(2, 1), rtol=1e-4, atol=1e-5)


@each_truncation
def test_the_loss_has_the_log_probs_of_all_tokens(settings: dict[str, Any], switch: Any) -> None:
    patched = scored_completions(stub(**settings))["old_per_token_logps"]
    with switch.off():
        assert patched.equal(scored_completions(stub(**settings))["old_per_token_logps"])


@each_truncation
def test_those_of_vllm_are_put_on_all_tokens(settings: dict[str, Any]) -> None:
    trainer = stub(**settings)
    output = scored_completions(trainer)
    if "sampling_per_token_logps" not in output:
        pytest.skip("this release does not return them")
    full, _ = full_and_vllm(trainer.model, temperature=settings.get("temperature", 1.0))
    assert_close(output["sampling_per_token_logps"], full)


def test_the_reference_is_scored_as_before(switch: Any) -> None:
    settings: dict[str, Any] = {"top_k": 3, "beta": 0.1}
    output = scored_completions(stub(reference=tiny_attention_model(), **settings))
    assert_close(output["importance_sampling_ratio"], ones())
    with switch.off():
        other = scored_completions(stub(reference=tiny_attention_model(), **settings))
    assert output["ref_per_token_logps"].equal(other["ref_per_token_logps"])


def test_padding_and_masked_completions_have_no_part_in_it() -> None:
    trainer = stub(top_k=3)
    trainer.mask_truncated_completions = True
    # No completion ends with this one, so all are truncated.
    (unused, *_) = set(range(2, 16)) - {token for completion in COMPLETIONS for token in completion}
    trainer._tokenizer.eos_token_id = trainer.eos_token_id = unused
    trainer.eos_token_ids = [unused]
    for name, value in scored_completions(trainer).items():
        assert not torch.is_tensor(value) or value.isfinite().all(), name


def test_micro_batches_are_scored_one_by_one() -> None:
    trainer = stub(top_k=3, per_device_train_batch_size=1)
    assert_close(scored_completions(trainer)["importance_sampling_ratio"], ones())


def test_the_trainer_has_its_own_method_again() -> None:
    trainer = stub(top_k=3)
    scored_completions(trainer)
    assert "_get_per_token_logps_and_entropies" not in vars(trainer)


@pytest.mark.skipif(not hasattr(grpo_trainer.GRPOTrainer, "_chunked_logps"), reason="1.14 alone has this method")
def test_with_the_chunked_head_of_1_14(switch: Any) -> None:
    def scored() -> dict[str, Any]:
        trainer = stub(top_k=3)
        trainer.use_liger_kernel = True
        return scored_completions(trainer)

    output = scored()
    assert_close(output["importance_sampling_ratio"], ones())
    with switch.off():
        assert output["old_per_token_logps"].equal(scored()["old_per_token_logps"])


UNTOUCHED: dict[str, Callable[[], Any]] = {
    "all tokens": stub,
    "top_k of 0": lambda: stub(top_k=0, min_p=0.0),
    "top_k of -1": lambda: stub(top_k=-1),
    "generation_kwargs": lambda: stub(top_p=0.6, generation_kwargs={"top_p": 1.0}),
    "no correction": lambda: stub(top_k=3, vllm_importance_sampling_correction=False),
    "repetition_penalty": lambda: stub(top_k=3, repetition_penalty=1.1),
    "rollout_func": lambda: with_attribute("rollout_func", lambda *args: None),
    "temperature": lambda: with_generation_kwargs({"temperature": 0.5}),
    "structured outputs": lambda: with_generation_kwargs({"structured_outputs": {"regex": "a"}}),
    "penalty": lambda: with_generation_kwargs({"presence_penalty": 0.5}),
    "min_tokens": lambda: with_generation_kwargs({"min_tokens": 2}),
}


def with_attribute(name: str, value: Any, trainer: Any = None) -> Any:
    trainer = trainer or stub(top_k=3)
    if name == "rollout_func":
        # The stub generates as without such a function. The wrapper looks at it when it is called.
        generate = trainer._generate

        def generate_without(*args: Any, **kwargs: Any) -> Any:
            trainer.rollout_func = None
            try:
                return generate(*args, **kwargs)
            finally:
                trainer.rollout_func = value

        trainer._generate = generate_without
    setattr(trainer, name, value)
    return trainer


def with_generation_kwargs(more: dict[str, Any]) -> Any:
    trainer = stub(top_k=3)
    trainer.args.generation_kwargs = more
    return trainer


def with_regex() -> Any:
    trainer = stub(top_k=3)
    fields = grpo_trainer.GRPOConfig.__dataclass_fields__
    name = "vllm_structured_outputs_regex"
    setattr(trainer.args, name if name in fields else "vllm_guided_decoding_regex", "a*")
    return trainer


@pytest.mark.parametrize("make", [*UNTOUCHED.values(), with_regex], ids=[*UNTOUCHED, "regex"])
def test_other_runs_are_not_touched(make: Callable[[], Any], switch: Any) -> None:
    trainer = make()
    output = scored_completions(trainer)
    assert acts(trainer) == 0
    with switch.off():
        assert_equal(output, scored_completions(make()))


def test_without_vllm_nothing_is_touched() -> None:
    trainer = stub(top_k=3)
    trainer.use_vllm = False
    assert "importance_sampling_ratio" not in scored_completions(trainer)
    assert acts(trainer) == 0


def with_server(mode: str, *, is_main_process: bool = True) -> Any:
    trainer = stub(top_k=3)
    trainer.vllm_mode = "server"
    trainer.accelerator.is_main_process = is_main_process
    info = {"model_config": {"logprobs_mode": mode}}
    client = SimpleNamespace(get_server_info=lambda: info)
    trainer.vllm_generation = SimpleNamespace(**{"vllm_client": client} if is_main_process else {})
    return trainer


RETURNS_PROCESSED = Version("0.27.1") <= RELEASE < Version("1.11")
CAN_ASK = Version("1.16") <= RELEASE


def test_the_server_of_trl_returns_log_probs_of_what_it_keeps(switch: Any) -> None:
    trainer = with_server("processed_logprobs")
    output = scored_completions(trainer)
    assert acts(trainer) == (RETURNS_PROCESSED or CAN_ASK)
    if acts(trainer):
        assert_close(output["importance_sampling_ratio"], ones())
        return
    with switch.off():
        assert_equal(output, scored_completions(with_server("processed_logprobs")))


@pytest.mark.skipif(not CAN_ASK, reason="the trainer of this release cannot ask its server")
def test_a_server_that_returns_others_is_left_alone(switch: Any) -> None:
    trainer = with_server("raw_logprobs")
    output = scored_completions(trainer)
    assert acts(trainer) == 0
    with switch.off():
        assert_equal(output, scored_completions(with_server("raw_logprobs")))


@pytest.mark.skipif(not CAN_ASK, reason="the trainer of this release cannot ask its server")
@pytest.mark.parametrize("mode", ["processed_logprobs", "raw_logprobs"])
def test_all_ranks_decide_as_the_main_process_does(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broadcast(values: list[Any], from_process: int = 0) -> list[Any]:
        assert (values, from_process) == ([None], 0)
        values[:] = [mode]
        return values

    monkeypatch.setattr(accelerate.utils, "broadcast_object_list", broadcast)
    trainer = with_server("", is_main_process=False)
    scored_completions(trainer)
    assert acts(trainer) == (mode == "processed_logprobs")


@pytest.mark.skipif(not CAN_ASK, reason="the trainer of this release cannot ask its server")
def test_a_server_is_not_asked_if_nothing_is_cut() -> None:
    trainer = with_server("processed_logprobs")
    trainer.args.top_k = 0
    trainer.vllm_generation = None
    scored_completions(trainer)
    assert acts(trainer) == 0


@pytest.mark.parametrize("top_p", [1e-9, 0.3, 0.7, 0.95, 1.0])
@pytest.mark.parametrize("top_k", [0, 1, 4, 7, 8])
@pytest.mark.parametrize("min_p", [0.0, 0.4, 1.0])
def test_the_mass_is_that_of_the_tokens_that_vllm_keeps(top_p: float, top_k: int, min_p: float) -> None:
    logits = torch.tensor([[0.3, 2.0, -1.0, 2.0, 1.1, -3.0, 0.9], [5.0, 0.1, 0.2, -0.3, 0.0, 4.0, 4.5]])
    sampled = torch.tensor([1, 3])
    masses = _log_mass(logits, sampled, top_p=top_p, top_k=top_k, min_p=min_p).exp()
    keep = [kept(row, int(token), top_p, min(top_k, 7), min_p) for row, token in zip(logits, sampled, strict=True)]
    expected = torch.where(torch.tensor(keep), logits.softmax(-1), 0.0).sum(-1)
    torch.testing.assert_close(masses, expected)
    several = _log_mass(logits[:, None], sampled[:, None], top_p=top_p, top_k=top_k, min_p=min_p).exp()
    torch.testing.assert_close(several, expected[:, None])


class Whole(torch.nn.Module):
    """A model that notes what it is given, and returns all logits."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[dict[str, Any]] = []

    def forward(self, input_ids: Any, use_cache: bool | None = None, **others: Any) -> Any:
        self.given.append({"use_cache": use_cache, **others})


class Keeping(Whole):
    """A model that returns the last logits alone if it is asked to."""

    def forward(self, input_ids: Any, use_cache: bool | None = None, logits_to_keep: int = 0, **others: Any) -> Any:
        self.given.append({"use_cache": use_cache, "logits_to_keep": logits_to_keep, **others})


class Adapted(Keeping):
    """A PeftModel: its forward takes what that of its base does not."""

    def get_base_model(self) -> Any:
        return Whole()

    def forward(self, input_ids: Any, **others: Any) -> Any:  # type: ignore[override]
        self.given.append(others)


@pytest.mark.parametrize(
    ("model", "expected"),
    [(Whole(), {}), (Keeping(), {"logits_to_keep": 4}), (Adapted(), {})],
    ids=lambda each: type(each).__name__,
)
def test_the_models_own_forward_returns_the_logits_of_the_completion(model: Any, expected: dict[str, Any]) -> None:
    trainer = SimpleNamespace(accelerator=SimpleNamespace(unwrap_model=lambda model: model))
    kwargs = {"input_ids": torch.ones(1, 5), "attention_mask": 7, "labels": 8}
    _unfused(trainer, model, 3, (), kwargs)
    assert model.given[-1] == {"attention_mask": 7, "use_cache": False, **expected}


def test_the_policy_is_scored_once() -> None:
    trainer, scored = stub(top_k=3), []
    method = trainer._get_per_token_logps_and_entropies
    trainer._get_per_token_logps_and_entropies = lambda *args, **kwargs: (scored.append(1), method(*args, **kwargs))[1]
    scored_completions(trainer)
    assert scored == [1]

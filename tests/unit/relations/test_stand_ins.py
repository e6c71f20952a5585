"""What stands in place of what a CPU lacks does what TRL expects of it, and no more."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest

from trl_hotfix.relations.setting import CannotBeAskedError, Setting

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

PROMPTS = ([5, 6, 7], [8, 9])


class EarlyClient:
    def generate(self, prompts: Any, n: int = 1) -> Any:
        return {"completion_ids": prompts}["completion_ids"]


class Client:
    def generate(self, prompts: Any, n: int = 1) -> Any:
        return {"prompt_ids": prompts, "completion_ids": prompts, "logprobs": prompts}


class LateClient:
    def generate(self, prompts: Any, n: int = 1) -> Any:
        return {"prompt_ids": prompts, "completion_ids": prompts, "logprobs": prompts, "logprob_token_ids": prompts}


def server_of(client: type, folder: Path) -> tuple[Any, Any]:
    """Return a server, and the policy that it has a copy of."""
    from trl_hotfix.relations import materials, stand_ins

    policy = materials.model(folder, Setting())
    table = materials.AnswersFromTable(policy, materials.GROUP)
    return stand_ins.Server(client, table, materials.tokenizer(Setting(), "left")), policy


def test_a_server_answers_from_the_table_as_a_release_expects_it(tmp_path: Path) -> None:
    early, _ = server_of(EarlyClient, tmp_path)
    answers = early.generate(list(PROMPTS), n=2)
    assert len(answers) == 4
    assert answers[0] != answers[1]
    usual = server_of(Client, tmp_path)[0].generate(list(PROMPTS), n=2)
    assert (usual["prompt_ids"], usual["completion_ids"]) == ([*map(list, PROMPTS)], answers)
    late = server_of(LateClient, tmp_path)[0].generate(list(PROMPTS), n=2)
    assert [[one for (one,) in each] for each in late["logprobs"]] == usual["logprobs"]
    assert [[one for (one,) in each] for each in late["logprob_token_ids"]] == answers


def test_a_text_is_its_tokens(tmp_path: Path) -> None:
    texts = server_of(EarlyClient, tmp_path)[0].generate(["w2 w3 w4"], n=2)
    assert texts == server_of(EarlyClient, tmp_path)[0].generate([[5, 6, 7]], n=2)


def test_its_log_probs_are_of_the_weights_that_it_was_sent(tmp_path: Path) -> None:
    server, policy = server_of(Client, tmp_path)
    before = server.generate([PROMPTS[0]], n=1)["logprobs"]
    with torch.no_grad():
        policy.lm_head.weight.mul_(0.5)
    server, _ = server_of(Client, tmp_path)
    assert server.generate([PROMPTS[0]], n=1)["logprobs"] == before
    for name, weight in policy.named_parameters():
        server.update_named_param(name, weight.data)
    server._answers.asked.clear()
    answer = server.generate([PROMPTS[0]], n=1)
    ids = torch.tensor([[*PROMPTS[0], *answer["completion_ids"][0]]])
    with torch.no_grad():
        right = policy(input_ids=ids).logits.log_softmax(-1)[0, 2:-1].gather(-1, ids[0, 3:, None]).squeeze(-1)
    assert answer["logprobs"][0] == pytest.approx(right.tolist())
    assert answer["logprobs"] != before


def test_a_weight_that_the_model_does_not_have_is_an_error(tmp_path: Path) -> None:
    server, policy = server_of(Client, tmp_path)
    with pytest.raises(KeyError, match="base_model"):
        server.update_named_param("base_model.lm_head.weight", policy.lm_head.weight)


def test_trl_finds_a_server_inside_the_block_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from trl_hotfix.relations import materials, stand_ins

    module: Any = types.ModuleType("trl.made_up")
    module.VLLMClient, module.is_vllm_available = Client, lambda: False
    monkeypatch.setitem(sys.modules, "trl.made_up", module)
    table = materials.AnswersFromTable(materials.model(tmp_path, Setting()), materials.GROUP)
    args = types.SimpleNamespace(use_vllm=True, vllm_mode="colocate")
    with stand_ins.server(args, table, None):
        assert isinstance(module.VLLMClient(base_url="http://localhost"), stand_ins.Server)
        assert module.is_vllm_available()
    assert (module.VLLMClient, module.is_vllm_available(), args.vllm_mode) == (Client, False, "server")
    with stand_ins.server(types.SimpleNamespace(use_vllm=False), table, None):
        assert module.VLLMClient is Client


def test_batches_are_answers_of_the_table(tmp_path: Path) -> None:
    from trl_hotfix.relations import materials, stand_ins

    first, second = (materials.AnswersFromTable(None, materials.GROUP) for _ in range(2))
    found = stand_ins.Batches(first)([PROMPTS[0], PROMPTS[0], PROMPTS[1]], generation_config=None)
    assert [found[number].generated_tokens for number in range(3)] == [
        second.answer(prompt, 1) for prompt in (PROMPTS[0], PROMPTS[0], PROMPTS[1])
    ]


@pytest.mark.parametrize("option", ["use_liger_kernel", "use_liger_loss"])
def test_liger_cannot_be_asked_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch, option: str) -> None:
    from trl_hotfix.relations import stand_ins

    monkeypatch.setattr(stand_ins, "find_spec", lambda name: None)
    with pytest.raises(CannotBeAskedError, match="liger-kernel is not installed"), stand_ins.liger({option: True}):
        pytest.fail("it was asked")
    with stand_ins.liger({option: False}):
        assert stand_ins.KERNELS not in sys.modules


def test_liger_puts_nothing_into_a_model_inside_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    from trl_hotfix.relations import stand_ins

    monkeypatch.setattr(stand_ins, "find_spec", lambda name: object())
    with stand_ins.liger({"use_liger_kernel": True}):
        kernels = sys.modules[stand_ins.KERNELS]
        assert kernels._apply_liger_kernel_to_instance(model=object()) is None
    assert stand_ins.KERNELS not in sys.modules


def test_images_cannot_be_asked_without_pillow(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from trl_hotfix.relations import images

    monkeypatch.setattr(images, "find_spec", lambda name: None)
    with pytest.raises(CannotBeAskedError, match="Pillow is not installed"):
        images.given({}, "picture", "tokenizer", tmp_path)


def test_deepspeed_cannot_be_asked_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    from trl_hotfix.relations import engines

    monkeypatch.setattr(engines, "find_spec", lambda name: None)
    with pytest.raises(CannotBeAskedError, match="DeepSpeed is not installed"):
        engines.arguments("zero 2", 2)
    assert engines.arguments("fsdp", 2) == engines.arguments("", 2) == {}

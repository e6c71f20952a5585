from __future__ import annotations

from types import SimpleNamespace

import pytest

from trl_hotfix.testing import tiny_attention_model, tiny_causal_lm, wrapped_like_deepspeed

torch = pytest.importorskip("torch")


def test_the_one_matrix_model_looks_its_logits_up() -> None:
    model, ids = tiny_causal_lm(vocabulary=5), torch.tensor([[1, 2, 4]])
    assert torch.equal(model(ids).logits, model.weight[ids])
    assert torch.equal(model.weight, tiny_causal_lm(vocabulary=5).weight)


def test_no_random_number_is_drawn() -> None:
    pytest.importorskip("transformers")
    before = torch.random.get_rng_state()
    tiny_causal_lm()
    assert torch.equal(before, torch.random.get_rng_state())
    first, second = tiny_attention_model(), tiny_attention_model()
    assert all(map(torch.equal, first.parameters(), second.parameters()))


def test_the_auxiliary_loss_is_returned_on_request() -> None:
    ids = torch.tensor([[1, 2]])
    model = tiny_causal_lm(SimpleNamespace(output_router_logits=True), aux_loss=2.0)
    assert float(model(ids).aux_loss) == 2.0
    assert not hasattr(model(ids, output_router_logits=False), "aux_loss")
    assert float(tiny_causal_lm(aux_loss=2.0)(ids, output_router_logits=True).aux_loss) == 2.0


def test_the_fused_head_returns_the_label_log_probs() -> None:
    model, ids = tiny_causal_lm(), torch.tensor([[1, 2, 3]])
    labels = torch.tensor([[-100, -100, 3]])
    outputs = model(ids, fused_lm_head=True, labels=labels)
    log_probs = model(ids).logits.log_softmax(-1)
    assert outputs.log_probs.tolist() == [[0.0, pytest.approx(float(log_probs[0, 1, 3]))]]
    assert outputs.entropy.shape == outputs.mean_logits.shape == outputs.is_top1.shape == (1, 2)


def test_the_attention_model_attends_to_earlier_tokens() -> None:
    pytest.importorskip("transformers")
    model = tiny_attention_model()
    first, second = (model(input_ids=torch.tensor([[start, 5, 6]])).logits for start in (3, 4))
    assert not torch.allclose(first[:, -1], second[:, -1])
    ids = torch.tensor([[3, 5, 6]])
    outputs = model(input_ids=ids, labels=torch.tensor([[-100, -100, 6]]))
    assert outputs.label_mask.tolist() == [[False, True]]
    assert int(outputs.num_valid_tokens) == 1
    assert float(outputs.log_probs.sum()) == pytest.approx(-float(outputs.loss), rel=1e-5)


def test_an_engine_has_a_config_and_calls_its_model() -> None:
    model = tiny_causal_lm(SimpleNamespace(output_router_logits=False))
    engine, ids = wrapped_like_deepspeed(model), torch.tensor([[1]])
    assert engine.module is model
    assert engine.config == {"train_micro_batch_size_per_gpu": 1}
    assert torch.equal(engine(ids).logits, model(ids).logits)

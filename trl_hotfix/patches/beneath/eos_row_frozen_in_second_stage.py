"""A model whose ``pad_token_id`` is an end-of-sequence token has an embedding that gives this row no gradient.

transformers makes the embedding with ``padding_idx=config.pad_token_id``. From 4.56 on it also puts the tokenizer's
padding token into the config when training begins. TRL takes the end of sequence for padding if the tokenizer has no
padding token, so the first stage saves a config that freezes a row in the second one.

Real padding needs no ``padding_idx``: it is masked, and its gradient is zero. ``create_optimizer`` comes before the
first batch in each trainer that has transformers' loop.
"""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

from ...authoring import Call, judge, wrapper
from ...model import Outcome
from ...testing import stub_trainer


@wrapper
def train_the_row_of_the_end(call: Call) -> Any:
    """Take ``padding_idx`` off the embedding if it is an end of sequence, and something of the embedding is trained."""
    for embedding in _without_a_gradient(call.trainer):
        call.act()
        embedding.padding_idx = None
    return call()


def _without_a_gradient(trainer: Any) -> list[Any]:
    """Return the embeddings, PEFT's copies among them, that give the row of an end of sequence no gradient."""
    from torch.nn import Embedding

    get_embeddings = getattr(trainer.model, "get_input_embeddings", None)
    embeddings = None if get_embeddings is None else get_embeddings()
    if embeddings is None or not any(weight.requires_grad for weight in embeddings.parameters()):
        return []
    ends = _ends(trainer)
    return [each for each in embeddings.modules() if isinstance(each, Embedding) and each.padding_idx in ends]


def _ends(trainer: Any) -> set[int]:
    """Return the tokens that end a sequence for the tokenizer, or for the model when it generates."""
    processor, model = trainer.processing_class, trainer.model
    having = (getattr(processor, "tokenizer", processor), model.config, getattr(model, "generation_config", None))
    ends: set[int] = set()
    for each in having:
        tokens = getattr(each, "eos_token_id", None)
        ends.update(tokens if isinstance(tokens, list) else [] if tokens is None else [tokens])
    return ends


def row_of_the_end_gets_a_gradient(module: ModuleType) -> Outcome:
    """Differentiate the embedding of the end of sequence, which is the padding token, when training begins."""
    import torch

    trainer_class = getattr(module, "_BaseTrainer", None) or module.BaseTrainer
    embedding = torch.nn.Embedding(2, 1, padding_idx=1, device="cpu")
    model = SimpleNamespace(get_input_embeddings=lambda: embedding, config=SimpleNamespace(eos_token_id=1))
    switches = dict.fromkeys(("is_deepspeed_enabled", "is_fsdp_enabled"), False)
    made = {"optimizer": "made by the user", "processing_class": None, **switches}
    stub_trainer(trainer_class, SimpleNamespace(), model=model, **made).create_optimizer()
    embedding(torch.tensor([1], device="cpu")).sum().backward()
    assert embedding.weight.grad is not None
    return judge(float(embedding.weight.grad[1]), right=1.0, wrong=0.0)

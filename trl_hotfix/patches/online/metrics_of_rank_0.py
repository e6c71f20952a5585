"""Online DPO, A2PO and IW-OPD log some metrics of the first rank only.

They append ``tensor.mean().item()`` and never gather it: Online DPO's ``val/contain_eos_token``, all that A2PO logs
besides the loss, and the advantages and weights of IW-OPD. Only rank 0 logs.

The wrapper averages over the ranks what a call has appended. That is where all ranks are: a callback may call ``log``
on one of them, and would wait there for the others.
"""

from __future__ import annotations

from collections import defaultdict
from inspect import signature
from types import ModuleType, SimpleNamespace
from typing import Any

from ...authoring import Call, absent, judge, wrapper
from ...model import Outcome
from ...testing import absent_if_reexported, online_dpo_stub, stub_trainer

_NAMES = (
    "val/contain_eos_token",
    *("reward", "v_star", "implicit_reward", "advantage"),
    *(f"iw_opd/{name}" for name in ("mean_advantage", "mean_abs_advantage", "mean_weight", "min_weight", "max_weight")),
)


@wrapper
def average_over_the_ranks(call: Call) -> Any:
    """Replace the metrics that this call appends by their means over the ranks."""
    import torch

    accelerator = call.trainer.accelerator
    if accelerator.num_processes == 1:
        return call()
    metrics = _metrics(call.trainer)
    before = {name: len(metrics.get(name, ())) for name in _NAMES}
    result = call()
    appended = [metrics.get(name, [])[length:] for name, length in before.items()]
    # A rank without tokens appends nothing, so each counts its own.
    # The dtype must not depend on what this rank has appended.
    totals = torch.tensor([[sum(values), len(values)] for values in appended], dtype=torch.float32)
    totals = accelerator.reduce(totals.to(accelerator.device), reduction="sum")
    for name, (total, count) in zip(_NAMES, totals.tolist(), strict=True):
        if count:
            call.act()
            metrics[name][before[name] :] = [total / count]
    return result


def _metrics(trainer: Any) -> Any:
    """Return the lists of what is logged next."""
    if hasattr(trainer, "stats"):
        return trainer.stats
    return trainer._metrics["train" if trainer.model.training else "eval"]


def metric_is_that_of_all_ranks(module: ModuleType) -> Outcome:
    """Read a metric of 1 on this rank of two, where it is 0 on the other: 0.5."""
    import torch

    def both(totals: Any, reduction: str = "sum") -> Any:
        return totals + torch.stack([torch.zeros(len(totals)), totals[:, 1]], dim=1)

    two = {"num_processes": 2, "reduce": both}
    if hasattr(module, "OnlineDPOTrainer"):
        if reexported := absent_if_reexported(module, module.OnlineDPOTrainer.training_step):
            return reexported
        if "num_items_in_batch" not in signature(module.OnlineDPOTrainer.training_step).parameters:
            return absent("the stand-in trains from 0.12.0 on")
        online = online_dpo_stub(module, torch.tensor([[3, 0], [4, 0]]))
        vars(online.accelerator).update(two)
        online.training_step(online.model, {"prompt": ["a"]}, None)
        return judge(online.stats["val/contain_eos_token"][0], right=0.5, wrong=1.0)
    trainer_class = module.A2POTrainer if hasattr(module, "A2POTrainer") else module.IWOPDTrainer
    metrics: Any = defaultdict(list)
    settings = {"model": SimpleNamespace(training=True), "_metrics": {"train": metrics}}
    settings |= {"temperature": 1.0, "iw_opd_gamma": 0.0, "iw_opd_epsilon": 1e-6}
    trainer = stub_trainer(trainer_class, SimpleNamespace(beta2=1.0), **settings)
    vars(trainer.accelerator).update(two)
    one = torch.ones(1)
    if hasattr(module, "A2POTrainer"):
        trainer._get_sequence_logps = lambda *args: one
        given = {"rewards": 2 * one, "v_star": one, "ref_logps": 0 * one}
        trainer.compute_loss(None, defaultdict(lambda: None, given))
        return judge(metrics["advantage"][0], right=0.5, wrong=1.0)
    token = torch.zeros(1, 1, dtype=torch.long)
    # One word has a log-prob of 0, and the teacher's is 1.
    trainer._compute_iw_opd_loss(torch.zeros(1, 1, 1), token, token, one[None])
    return judge(metrics["iw_opd/mean_abs_advantage"][0], right=0.5, wrong=1.0)

"""The Liger loss of DPO and KTO calls the model inside DistributedDataParallel, whose own forward never runs.

Its forward is what has the gradients of the next backward averaged. ``_compute_loss_liger`` takes the wrapper off
(0.19 to 0.28) or is given the model without it (``compute_loss`` of 1.9 to 1.13; there only ZeRO-3 and FSDP go through
their wrapper). From 0.29.0 to 1.8.0 the wrapper is asked for the attributes of the model, which is an AttributeError.

The wrappers have TRL's method run within that forward: it takes the place of the model's forward for one call. This is
what ``_ForwardRedirection`` of TRL does, and since 1.14.0 TRL does it here, too.
"""

from __future__ import annotations

import inspect
from contextlib import ExitStack
from types import ModuleType, SimpleNamespace
from typing import Any

from ...authoring import Call, absent, judge, shadowed, wrapper
from ...model import Outcome
from ...testing import absent_if_reexported, default_arguments, dpo_stub, stub_trainer, tiny_causal_lm


@wrapper
def synchronize_liger_loss(call: Call) -> Any:
    """Compute the Liger loss of DPO within the forward of DistributedDataParallel (0.19.0 to 0.28.0)."""
    return _in_forward(call)


@wrapper
def synchronize_loss(call: Call) -> Any:
    """Compute the loss within the forward of DistributedDataParallel, if it is Liger's (1.9.0 to 1.13.0)."""
    return _in_forward(call) if call.trainer.use_liger_kernel else call()


def _in_forward(call: Call) -> Any:
    """Make the call within the forward of the model that it is given, if that is DistributedDataParallel."""
    from torch.nn.parallel import DistributedDataParallel

    # torch.compile comes last.
    model = getattr(call["model"], "_orig_mod", call["model"])
    if not isinstance(model, DistributedDataParallel):
        return call()
    with ExitStack() as until_called:

        def forward(*args: Any, **kwargs: Any) -> Any:
            # The method may call the model's own.
            until_called.close()
            return call.made_with(args, kwargs)

        until_called.enter_context(shadowed(model.module, "forward", forward))
        return model(*call.args, **call.kwargs)


def liger_loss_is_synchronized(module: ModuleType) -> Outcome:
    """Differentiate the sum of the weights, as a Liger loss, on one of two ranks. The mean of both is half of it."""
    import torch

    method = "KTO" if module.__name__.endswith("kto_trainer") else "DPO"
    trainer_class, model = getattr(module, f"{method}Trainer"), tiny_causal_lm()
    if absence := absent_if_reexported(module, trainer_class.compute_loss):
        return absence

    class Rank(torch.nn.parallel.DistributedDataParallel):  # type: ignore[misc]
        """Has gradients averaged if its forward has run, and only then, as the real one. It needs no group."""

        def __init__(self) -> None:
            torch.nn.Module.__init__(self)
            self.module = model

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            model.weight.register_hook(lambda gradient: gradient / 2)
            return model(*args, **kwargs)

    if "unwrap_model" in inspect.unwrap(trainer_class.compute_loss).__code__.co_names:
        from trl.models.utils import _ForwardRedirection  # TRL's own repair

        attributes = {"use_liger_kernel": True, "is_fsdp_enabled": False, "_forward_redirection": _ForwardRedirection()}
        trainer = stub_trainer(trainer_class, default_arguments(getattr(module, f"{method}Config")), **attributes)
        trainer._compute_loss_liger = trainer._compute_loss = lambda *args: model.weight.sum()
        trainer.accelerator.state = SimpleNamespace(deepspeed_plugin=None)
        compute: Any = trainer.compute_loss
    elif hasattr(trainer_class, "_compute_loss_liger") and "concatenated_forward" in vars(trainer_class):
        model.get_decoder = lambda: lambda *args, **kwargs: SimpleNamespace(last_hidden_state=model.weight)
        model.get_output_embeddings = lambda: model
        # After the loss come log-probs, logits and rewards, which are logged.
        settings: dict[str, Any] = {"reference_free": True}
        settings["dpo_loss_fn"] = lambda *args, **kwargs: (model.weight.sum(), (0.0,) * 7)
        trainer = dpo_stub(module, model=model, padding_free=False, label_pad_token_id=-100, **settings)
        compute = lambda *args: trainer._compute_loss_liger(*args)["loss"]  # noqa: E731
    else:
        return absent("there is no Liger loss, or it asks the wrapper for what the model has, which is an error")
    trainer.accelerator.unwrap_model = lambda model: getattr(model, "module", model)
    parts = ("prompt", "chosen", "rejected")
    batch = {f"{name}_{kind}": torch.ones(1, 2).long() for name in parts for kind in ("input_ids", "attention_mask")}
    compute(Rank(), batch).backward()
    return judge(float(model.weight.grad[0, 0]), right=0.5, wrong=1.0)

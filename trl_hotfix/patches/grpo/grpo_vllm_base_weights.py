"""GRPO with adapters hands the weights of the base model to vLLM, without what was merged into them (TRL issue 2856).

TRL 0.15.1 (pull request 2873) unmerges the adapter after the weights are handed over. A wrapper cannot do that under
DeepSpeed ZeRO-3, where the weights are sharded again by then. It copies the weights that a merge changes at the point
where 0.15.0 takes its ``state_dict``, while they are merged: this is right with sharding and without. Only the main
process loads weights into vLLM, so only it copies them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

from ...authoring import judge, shadowed
from ...model import Outcome, Verdict
from ...testing import stub_grpo_trainer


def hand_over_copies_of_what_is_merged(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Let the ``state_dict`` of a ``PeftModel`` contain copies of the weights beneath its adapters."""
    from peft import PeftModel

    model = instance.accelerator.unwrap_model(instance.model)
    # torch.compile keeps the original module under this name.
    model = model._modules.get("_orig_mod", model)
    if not isinstance(model, PeftModel) or not instance.accelerator.is_main_process:
        return wrapped(*args, **kwargs)
    state_dict = model.state_dict

    def state_dict_with_copies(*args: Any, **kwargs: Any) -> dict[str, Any]:
        weights = state_dict(*args, **kwargs)
        return {name: _copy(weight) if ".base_layer." in name else weight for name, weight in weights.items()}

    with shadowed(model, "state_dict", state_dict_with_copies):
        return wrapped(*args, **kwargs)


def _copy(weight: Any) -> Any:
    # A merge replaces a quantised weight by a new one instead of writing into it, so it needs no copy.
    return weight.to("cpu", copy=True) if weight.is_floating_point() else weight


def vllm_is_given_the_merged_weights(module: ModuleType) -> Outcome:
    """Read the weights that three trainers hand over in training and evaluation, where one layer of two has an adapter.

    The model of the last one is compiled. What a merge does not write into must not be copied: that of the other layer,
    and whole numbers. Neither must anything on another rank than the main one, or without an adapter.
    """
    outcomes = []
    with _known_as_compiled(module):
        cases = [_Case(module, 0.0), _Case(module, 1.0), _Case(module, 0.5, compiled=True)]
        # Later releases do not look beneath what torch.compile returns.
        for case in cases if hasattr(module, "is_compiled_module") else cases[:2]:
            outcomes += [case.judged(0), case.judged(1), case.judged(1, training=False)]
    for case in cases[:2]:
        case.trainer.accelerator.is_main_process = False
        case.hand_over(2)
        if case.is_shadowed:
            raise AssertionError("weights are copied on a rank that hands over none")
    if len({outcome.verdict for outcome in outcomes}) != 1:
        raise AssertionError(f"the weights are not always handed over alike: {outcomes}")
    case = _Case(module, 0.0, adapter=False)
    case.hand_over(0)
    is_own = all(case.loaded[name][1] == weight.data_ptr() for name, weight in case.model.named_parameters())
    if case.is_shadowed or not is_own:
        raise AssertionError("without an adapter weights are copied")
    return outcomes[0]


def _known_as_compiled(module: ModuleType) -> Any:
    """Return a context in which the module knows the stand-in of a compiled model. A real one takes seconds to make."""
    if not hasattr(module, "is_compiled_module"):
        return nullcontext()
    return shadowed(module, "is_compiled_module", lambda model: "_orig_mod" in model._modules)


class _Case:
    """A trainer with a model of two layers, and what vLLM is given: a copy of each weight, and where it lies."""

    def __init__(self, module: ModuleType, start: float, *, adapter: bool = True, compiled: bool = False) -> None:
        import torch
        from peft import LoraConfig, get_peft_model

        self.loaded: dict[str, tuple[Any, int]] = {}
        self.is_shadowed = False
        self.model: Any = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2, bias=False))
        self.layer = self.model[0]
        self.layer.register_buffer("levels", torch.arange(4))
        if adapter:
            self.model = get_peft_model(self.model, LoraConfig(r=1, lora_alpha=1, target_modules=["0"]))
            self.merge, self.model.merge_adapter = self.model.merge_adapter, self._merge
        for number, weight in enumerate(self.model.parameters()):
            weight.data = torch.cos(start + number + torch.arange(1.0, weight.numel() + 1)).reshape(weight.shape)
        runner = SimpleNamespace(model=SimpleNamespace(load_weights=self._load))
        worker = SimpleNamespace(driver_worker=SimpleNamespace(model_runner=runner))
        # From 0.16.0 on vLLM is another process.
        client = SimpleNamespace(
            update_named_param=lambda name, weight: self._load([(name, weight)]), reset_prefix_cache=lambda: None
        )
        self.trainer = stub_grpo_trainer(
            module,
            use_vllm=True,
            vllm_mode="server",
            llm=SimpleNamespace(llm_engine=SimpleNamespace(model_executor=worker)),
            vllm_client=client,
        )
        self.trainer.model, self.trainer.is_fsdp_enabled = self.model, False
        if compiled:
            self.trainer.model = torch.nn.Module()
            self.trainer.model._orig_mod = self.model
        self.trainer.accelerator.state = SimpleNamespace(deepspeed_plugin=None, fsdp_plugin=None)

    def _load(self, weights: Any) -> None:
        self.is_shadowed = "state_dict" in vars(self.model)
        self.loaded.update({name: (weight.detach().clone(), weight.data_ptr()) for name, weight in weights})

    def _merge(self, *args: Any, **kwargs: Any) -> None:
        self.is_shadowed = "state_dict" in vars(self.model)
        self.merge(*args, **kwargs)

    def hand_over(self, step: int) -> None:
        self.loaded.clear()
        self.trainer.state.global_step = step
        self.trainer._move_model_to_vllm()
        if "state_dict" in vars(self.model):
            raise AssertionError("the model is left with another state_dict")

    def judged(self, step: int, *, training: bool = True) -> Outcome:
        """Judge by how much the weight that is handed over differs from the base model's. The adapter is trained on."""
        lora = self.model.base_model.model[0]
        matrices = lora.lora_A["default"].weight, lora.lora_B["default"].weight
        matrices[1].data += 1
        self.trainer.model.train(training)
        delta, before = (matrices[1] @ matrices[0]).detach(), self.layer.weight.detach().clone()
        self.hand_over(step)
        names = {"0.weight", "0.bias", "1.weight"}
        if set(self.loaded) - {"0.levels"} != names or not self.layer.weight.allclose(before, atol=1e-6):
            raise AssertionError(f"vLLM was given {set(self.loaded)}, and {self.layer.weight} is left in the model")
        weight, _ = self.loaded["0.weight"]
        change = weight - before
        outcome = judge(float(change.abs().max()), right=float(delta.abs().max()), wrong=0.0)
        if outcome.verdict is Verdict.FIXED and not change.allclose(delta, atol=1e-6):
            raise AssertionError(f"the base model is {before}, the adapter adds {delta}, and vLLM was given {weight}")
        others = {"1.weight": self.model.base_model.model[1].weight, "0.levels": self.layer.levels}
        for name, own in others.items():
            if name in self.loaded and self.loaded[name][1] != own.data_ptr():
                raise AssertionError(f"{name} is copied, which no merge writes into")
        return outcome

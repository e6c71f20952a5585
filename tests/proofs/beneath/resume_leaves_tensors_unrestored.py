"""Train three steps, resume after the first in a new model, and load the best model in the end.

SFT trains a Llava, and DPO a Mixtral on transformers 5. The resumed run has the weights, losses and gradients of the
run without a stop. The best model is by choice not the last: it has the weights that were saved then.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trl_hotfix.authoring import absent, judge
from trl_hotfix.matching.versions import in_range

import tiny
from tiny.data import preferences_of_several_lengths
from tiny.gkd_steps import words

ID = "resume-leaves-tensors-unrestored"
OVERLAYS = ()
PARITY = False
VARIANTS = "a checkpoint is loaded by the names of its tensors, compiled or not, and an adapter by PEFT"

STOP, STEPS = 1, 3


def train() -> tiny.TrainingResult:
    import transformers

    if in_range(transformers.__version__, "<4.52"):
        return tiny.TrainingResult(absent("this transformers saves each tensor by its own name"))
    runs: dict[str, Any] = {}
    measured = wrong = 0
    for method, kinds in models().items():
        for kind, make in kinds.items():
            whole, resumed, missing = _runs(method, make)
            begin, saved = resumed.steps[0].weights, whole.steps[STOP].weights
            lost = _different(begin, saved)
            # Biases of 0 are those of any new model.
            differing = missing & _different(resumed.initial, saved)
            assert not lost or lost == differing, f"{method}, {kind}: {lost ^ differing} is lost, or is not"
            last = whole.steps[STEPS - 1].weights
            # Texts do not move the vision tower.
            lost_of_best = _different(_weights(whole), saved)
            expected = missing & _different(last, saved)
            assert not lost_of_best or lost_of_best == expected, f"{method}, {kind}: {lost_of_best}, not {expected}"
            if not lost:
                _assert_goes_on(whole, resumed)
            acted = [_acts(run, method) for run in (whole, resumed)]
            assert acted in ([(None, None)] * 2, [(0, 1), (1, 1)]), f"{method}, {kind}: it acts {acted} times"
            measured += len(lost) + len(lost_of_best)
            wrong += len(differing) + len(expected)
            runs |= {f"{method} {kind} whole": whole, f"{method} {kind} resumed": resumed}
    outcome = judge(measured, right=0, wrong=wrong) if wrong else absent("the checkpoint has the names of the model")
    return tiny.result_of_runs(runs, outcome)


def unaffected() -> tiny.TrainingResult:
    """Resume a Llama, whose checkpoint has its own names, and has no output embeddings if they are the input's."""
    runs: dict[str, Any] = {}
    for kind, tied in (("own", False), ("tied", True)):

        def make(folder: str, *, seed: int, tied: bool = tied) -> Any:
            model = tiny.llama(folder, seed=seed)
            model.config.tie_word_embeddings = tied
            model.tie_weights()
            return model

        whole, resumed, missing = _runs("SFT", make)
        assert missing == ({"lm_head.weight"} if tied else set()), missing
        assert not _different(resumed.steps[0].weights, whole.steps[STOP].weights), kind
        assert not _different(_weights(whole), whole.steps[STOP].weights), kind
        assert [_acts(run, "SFT") for run in (whole, resumed)] in ([(None, None)] * 2, [(0, 0)] * 2), kind
        _assert_goes_on(whole, resumed)
        runs |= {f"{kind} whole": whole, f"{kind} resumed": resumed}
    return tiny.result_of_runs(runs, absent("the checkpoint has the names of the model"))


def models() -> dict[str, dict[str, Callable[..., Any]]]:
    """Return the models that each trainer trains. DPO takes a Llava for one with images."""
    import transformers

    from tiny.vision import llava

    kinds: dict[str, dict[str, Callable[..., Any]]] = {"SFT": {"Llava": lambda folder, *, seed: llava(seed=seed)}}
    if in_range(transformers.__version__, ">=5"):
        kinds["DPO"] = {"Mixtral": lambda folder, *, seed: tiny.mixtral(folder, seed=seed, coefficient=0.1)}
    return kinds


def _runs(method: str, make: Callable[..., Any]) -> tuple[Any, Any, set[str]]:
    """Return the run without a stop, the resumed one, and the names that are in the model and not in the checkpoint."""
    from safetensors.torch import load_file

    with tempfile.TemporaryDirectory() as folder:
        whole = _trainer(method, make, folder, seed=0)
        whole.train()
        checkpoint = Path(folder, "out", f"checkpoint-{STOP}")
        assert whole.state.best_model_checkpoint == str(checkpoint), "the loss does not fall"
        missing = set(whole.model.state_dict()) - set(load_file(checkpoint / "model.safetensors"))
        # Old releases of transformers cannot read it with a torch as new as the bench's; nothing here is random.
        (checkpoint / "rng_state.pth").unlink()
        resumed = _trainer(method, make, folder, seed=5)
        resumed.initial = {name: value.detach().clone() for name, value in _weights(resumed).items()}
        resumed.train(resume_from_checkpoint=str(checkpoint))
    return whole, resumed, missing


def _trainer(method: str, make: Callable[..., Any], folder: str, *, seed: int) -> Any:
    from datasets import Dataset
    from torch.utils.data import SequentialSampler

    trainer_class, config_class = tiny.classes(method)

    class InOrder(tiny.stepwise(trainer_class)):  # type: ignore[misc]
        def _get_train_sampler(self, *args: Any) -> Any:
            return SequentialSampler(self.train_dataset)

    best = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    best |= {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "greater_is_better": True}
    data = (
        Dataset.from_list([{"text": words(number, 3 + number)} for number in range(8)])
        if method == "SFT"
        else preferences_of_several_lengths()
    )
    return tiny.trainer(
        InOrder,
        model=make(folder, seed=seed),
        args=tiny.config(
            config_class,
            output_dir=str(Path(folder, "out")),
            max_steps=STEPS,
            per_device_train_batch_size=1,
            gradient_accumulation_steps=2,
            optim="sgd",
            learning_rate=0.05,
            max_length=32,
            **best,
        ),
        train_dataset=data,
        eval_dataset=data.select(range(4)),
        tokenizer=tiny.tokenizer(),
        **({} if method == "SFT" else {"ref_model": make(folder, seed=9)}),
    )


def _weights(trainer: Any) -> dict[str, Any]:
    return dict(trainer.model.state_dict())


def _different(weights: dict[str, Any], others: dict[str, Any]) -> set[str]:
    assert weights.keys() == others.keys()
    return {name for name, weight in weights.items() if not weight.equal(others[name])}


def _assert_goes_on(whole: Any, resumed: Any) -> None:
    for step, of_whole in zip(resumed.steps, whole.steps[STOP:], strict=True):
        losses, right = ([micro_batch.loss for micro_batch in run.micro_batches] for run in (step, of_whole))
        assert losses == right, f"the losses are {losses}, without a stop {right}"
        assert not _different(step.gradients, of_whole.gradients)


def _acts(trainer: Any, method: str) -> tuple[int | None, int | None]:
    """Return how often the checkpoint was completed that a run is resumed from, and the best one."""
    for base in type(trainer).__mro__:
        target = f"{base.__module__}:{base.__name__}"
        resumed, best = (
            tiny.acts(ID, f"{target}.{name}", trainer) for name in ("_load_from_checkpoint", "_load_best_model")
        )
        if best is not None:
            return resumed or 0, best
    return None, None

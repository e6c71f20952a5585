"""Train two steps of two micro-batches on two GPUs with the real SFTTrainer: gradients and loss are those of one GPU.

The GPUs are a stand-in on the CPU: torch's own functions split the batch between two calls of the model. The expected
gradients are those of the mean over all tokens of a step, by the logits of the model. The wrong ones are half of them
up to transformers 4.49. From 4.51 on they are the part of the first GPU.
"""

from __future__ import annotations

import tempfile
from typing import Any

from trl_hotfix.authoring import absent, judge, module_of
from trl_hotfix.matching.versions import in_range
from trl_hotfix.model import Outcome, Verdict

import tiny

ID, TARGET = "dataparallel-divides-by-gpus", "trl.trainer.sft_trainer:SFTTrainer.training_step"
OVERLAYS = ()
PARITY = False
VARIANTS = {"compiled": "what the trainer wraps in DataParallel is not compiled"}
GPUS, ROWS, MICRO_BATCHES = 2, 2, 2
LENGTHS = (4, 5, 9, 12, 6, 4, 7, 15, 5, 4, 11, 8, 4, 6, 13)
"""The last micro-batch has three rows, two of them for the first GPU."""


def train() -> tiny.TrainingResult:
    import transformers
    from trl.trainer import sft_trainer

    if not in_range(transformers.__version__, ">=4.47.1,<4.57,!=4.48.0,!=4.50.*"):
        return tiny.TrainingResult(absent("this transformers gives each GPU its items, or fails"))
    if module_of(sft_trainer.SFTTrainer.training_step) is sft_trainer:
        return tiny.TrainingResult(absent("this release fails on several GPUs where transformers has the bug"))
    run = sft(GPUS)
    outcomes = [judged(run, number) for number in range(len(run.steps))]
    assert len(outcomes) == 2, outcomes
    assert outcomes[0].verdict is outcomes[1].verdict, outcomes
    is_fixed = outcomes[0].verdict is Verdict.FIXED
    drops = in_range(transformers.__version__, ">=4.51") and not is_fixed
    assert run.gpus.rows == ([[2]] * 4 if drops else [[2, 2]] * 3 + [[2, 1]]), run.gpus.rows
    assert tiny.acts(ID, TARGET, run) in (None, 4)
    return tiny.result_of_runs({"two GPUs": run}, outcomes[0])


def judged(run: Any, number: int) -> Outcome:
    """Judge the gradients of a step, and what is logged of it."""
    import transformers

    step = run.steps[number]
    tokens = sum(int((part.inputs["labels"][:, 1:] != -100).sum()) for part in step.micro_batches)
    first = in_range(transformers.__version__, ">=4.51")

    def right(model: Any) -> Any:
        return sum(total(model, part.inputs) for part in step.micro_batches) / tokens

    def wrong(model: Any) -> Any:
        parts = ({key: value[:ROWS] for key, value in part.inputs.items()} for part in step.micro_batches)
        return sum(total(model, part) for part in parts) / tokens if first else right(model) / GPUS

    gradients = [tiny.expected_gradients(run.model, step.weights, loss) for loss in (right, wrong)]
    outcome = judge(projected(step.gradients), right=projected(gradients[0]), wrong=projected(gradients[1]))
    if outcome.verdict is Verdict.FIXED:
        run.model.load_state_dict(step.weights)
        expected = float(right(run.model).detach())
        logged = [entry["loss"] for entry in run.state.log_history if "loss" in entry][number]
        assert abs(logged - expected) < 1e-3, f"{logged} is logged, and not {expected}"
        assert step.difference(gradients[0]) < 1e-6, step.difference(gradients[0])
    return outcome


def total(model: Any, inputs: Any) -> Any:
    """Return the sum over the predicted tokens of a batch, by the logits of the model."""
    from torch.nn.functional import cross_entropy

    logits = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
    return cross_entropy(logits[:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten(), reduction="sum")


def projected(gradients: dict[str, Any]) -> float:
    """Return one number for all gradients, which tells them apart."""
    import torch

    flat = torch.cat([value.flatten() for _, value in sorted(gradients.items())])
    return float((flat * torch.cos(torch.arange(len(flat)))).sum())


def unaffected() -> tiny.TrainingResult:
    """Train on one GPU, and on two with a loss function of the user's, which is given the whole batch."""
    runs = {"one GPU": sft(1), "own loss": sft(GPUS, compute_loss_func=own_loss) if _hands_over_all() else sft(1)}
    for name, run in runs.items():
        assert not tiny.acts(ID, TARGET, run), f"{name}: the wrapper acts"
    return tiny.result_of_runs(runs, absent("one GPU, or a loss of the whole batch"))


def _hands_over_all() -> bool:
    """Return whether the items are a number, so that ``DataParallel`` calls the model on both GPUs."""
    import transformers

    return in_range(transformers.__version__, ">=4.47.1,<4.50")


def own_loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    from torch.nn.functional import cross_entropy

    logits, following = outputs["logits"][:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return cross_entropy(logits, following, reduction="sum") / num_items_in_batch


def sft(gpus: int, **options: Any) -> Any:
    """Train two steps, of rows whose first token is not trained on."""
    from datasets import Dataset
    from torch.utils.data import SequentialSampler
    from trl import SFTConfig, SFTTrainer

    from tiny.gpus import several_gpus

    class OneLoss(SFTTrainer):  # type: ignore[misc]
        def _wrap_model(self, *args: Any, **kwargs: Any) -> Any:
            self.gpus = super()._wrap_model(*args, **kwargs)
            return self.gpus

        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            """Take the mean over the GPUs, as the step does next."""
            result = super().compute_loss(*args, **kwargs)
            return (result[0].mean(), result[1]) if isinstance(result, tuple) else result.mean()

    class InOrder(tiny.stepwise(OneLoss)):  # type: ignore[misc]
        def _get_train_sampler(self, *args: Any) -> Any:
            return SequentialSampler(self.train_dataset)

    ids = [[3 + (row + 7 * place) % 50 for place in range(length)] for row, length in enumerate(LENGTHS)]
    with tempfile.TemporaryDirectory() as folder, several_gpus():
        args = tiny.config(
            SFTConfig,
            per_device_train_batch_size=GPUS * ROWS // gpus,
            gradient_accumulation_steps=MICRO_BATCHES,
            max_steps=2,
            optim="sgd",
            learning_rate=0.1,
            remove_unused_columns=False,
            dataset_kwargs={"skip_prepare_dataset": True},
            max_length=32,
            max_seq_length=32,
        )
        args._n_gpu = gpus
        run = tiny.trainer(
            InOrder,
            model=tiny.llama(folder, seed=0),
            args=args,
            train_dataset=Dataset.from_list([{"input_ids": row} for row in ids]),
            data_collator=collate,
            tokenizer=tiny.tokenizer(),
            **options,
        )
        # Without it TRL 0.15 and later compare the labels of all rows with the logits of some, and fail.
        run.args.use_liger = run.args.use_liger_kernel = True
        run.train()
    return run


def collate(examples: list[dict[str, Any]]) -> dict[str, Any]:
    import torch

    length = max(len(example["input_ids"]) for example in examples)
    batch: dict[str, list[list[int]]] = {"input_ids": [], "labels": [], "attention_mask": []}
    for example in examples:
        ids = example["input_ids"]
        padding = length - len(ids)
        batch["input_ids"].append(ids + [0] * padding)
        batch["labels"].append([-100, *ids[1:]] + [-100] * padding)
        batch["attention_mask"].append([1] * len(ids) + [0] * padding)
    return {name: torch.tensor(value) for name, value in batch.items()}

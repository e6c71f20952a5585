"""Two processes train two steps of two micro-batches with the real Online DPO, A2PO and IW-OPD.

Each notes the metrics of its own micro-batches, computed without those of TRL, and rank 0 logs. This process is rank 0,
so that what acts is seen; rank 1 is a fork of it.
"""

from __future__ import annotations

import inspect
import os
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

from trl_hotfix.authoring import absent, judge
from trl_hotfix.model import Outcome, Verdict

import tiny
from tiny import distillation
from tiny.data import left_padding_tokenizer
from tiny.two_ranks import on_two_ranks

OVERLAYS = ()
PARITY = False
VARIANTS = "the numbers are averaged after the step, whatever part of the model is compiled or trained"

STEPS, MICRO_BATCHES = 2, 2
SIZES = {"max_steps": STEPS, "gradient_accumulation_steps": MICRO_BATCHES, "optim": "sgd", "learning_rate": 0.1}
Noted = dict[str, list[float]]


def train() -> tiny.TrainingResult:
    if not has_online_dpo_of_0_12():
        return tiny.TrainingResult(absent("the stand-in trains from 0.12.0 on"))
    runs = {name: on_two_ranks(run) for name, run in trained().items()}
    outcomes = {name: judged(ranks) for name, ranks in runs.items()}
    assert len({outcome.verdict for outcome in outcomes.values()}) == 1, outcomes
    return result({name: ranks[0] for name, ranks in runs.items()}, outcomes["OnlineDPO"])


def unaffected() -> tiny.TrainingResult:
    """Train in one process."""
    if not has_online_dpo_of_0_12():
        return tiny.TrainingResult(absent("the stand-in trains from 0.12.0 on"))
    runs = {name: run() for name, run in trained().items()}
    assert all(judged([run]).verdict is Verdict.FIXED for run in runs.values())
    return result(runs, absent("there is one process"))


def has_online_dpo_of_0_12() -> bool:
    trainer_class, _ = classes("OnlineDPO")
    return "num_items_in_batch" in inspect.signature(trainer_class.training_step).parameters


def trained() -> Mapping[str, Callable[[], dict[str, Any]]]:
    """Return the runs of the trainers that this release has."""
    runs = {"OnlineDPO": online_dpo, "A2PO": a2po, "IWOPD": iw_opd}
    return {name: run for name, run in runs.items() if classes(name)[0] is not None}


def judged(ranks: list[dict[str, Any]]) -> Outcome:
    """Judge what rank 0 has logged by the metrics of all ranks, and by its own."""
    outcomes = []
    for name, own in ranks[0]["noted"].items():
        assert len(own) == STEPS * MICRO_BATCHES, name
        assert len(ranks[0]["logged"][name]) == STEPS, ranks[0]["logged"]
        for step, logged in enumerate(ranks[0]["logged"][name]):
            of_step = [rank["noted"][name][step * MICRO_BATCHES : (step + 1) * MICRO_BATCHES] for rank in ranks]
            means = [sum(values) / MICRO_BATCHES for values in of_step]
            right, wrong = sum(means) / len(means), means[0]
            if len(ranks) == 1:
                assert abs(logged - right) < 1e-5, name
            elif abs(right - wrong) > 1e-4:
                outcomes.append(judge(logged, right=right, wrong=wrong, metric=name))
    if len(ranks) == 1:
        return Outcome(Verdict.FIXED)
    seen = {outcome.numbers["metric"] for outcome in outcomes}
    # The weight of the first token is always the largest one.
    assert seen == ranks[0]["noted"].keys() - {"iw_opd/max_weight"}, seen
    assert len({outcome.verdict for outcome in outcomes}) == 1, outcomes
    return outcomes[0]


def result(runs: dict[str, dict[str, Any]], outcome: Outcome) -> tiny.TrainingResult:
    gradients = {f"{name} {key}": value for name, run in runs.items() for key, value in run["gradients"].items()}
    return tiny.TrainingResult(outcome, sum(sum(run["losses"]) for run in runs.values()), gradients)


def classes(name: str) -> tuple[Any, Any]:
    if name != "IWOPD":
        return tiny.classes(name)
    try:
        from trl.experimental.iw_opd import IWOPDConfig, IWOPDTrainer
    except ImportError:
        return None, None
    return IWOPDTrainer, IWOPDConfig


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def answer(trainer: Any, losses: list[float], noted: Noted) -> dict[str, Any]:
    logged = {name: [entry[name] for entry in trainer.state.log_history if name in entry] for name in noted}
    model = trainer.accelerator.unwrap_model(trainer.model)
    weights = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    return {"noted": dict(noted), "logged": logged, "losses": losses, "gradients": weights}


def online_dpo() -> dict[str, Any]:
    """Train on completions that end on rank 0, and that do not all end on rank 1."""
    trainer_class, config_class = classes("OnlineDPO")
    losses: list[float] = []
    noted: Noted = defaultdict(list)

    class Recorder(trainer_class):  # type: ignore[misc, valid-type]
        def training_step(self, model: Any, *args: Any, **kwargs: Any) -> Any:
            # 0.14 to 0.16 ask the wrapped model for its config. That of DeepSpeed has one, and torch's has none.
            model.config = self.model.config
            loss = super().training_step(model, *args, **kwargs)
            losses.append(float(loss))
            return loss

    def generate(input_ids: Any, **kwargs: Any) -> Any:
        import torch

        ids = tiny.online_completions(len(input_ids))
        # The numbers of completions that end are 4 on rank 0, and 3, 2, 1, 0 on rank 1.
        ending = len(ids) - rank() * (1 + len(noted["val/contain_eos_token"]))
        ids[ending:] = 7
        noted["val/contain_eos_token"].append(ending / len(ids))
        return torch.cat([input_ids, ids], dim=1)

    with tempfile.TemporaryDirectory() as folder:
        policy = tiny.llama(folder, seed=0)
        trainer = tiny.online_dpo(Recorder, config_class, policy, **SIZES)
        policy.generate = generate
        trainer.train()
    return answer(trainer, losses, noted)


def a2po() -> dict[str, Any]:
    """Train on rewards that differ between the prompts, and so between the ranks."""
    from datasets import Dataset

    trainer_class, config_class = classes("A2PO")
    losses: list[float] = []
    noted: Noted = defaultdict(list)

    class Recorder(trainer_class):  # type: ignore[misc, valid-type]
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            import torch

            with torch.no_grad():
                logits = self.accelerator.unwrap_model(model)(
                    inputs["input_ids"], attention_mask=inputs["attention_mask"], use_cache=False
                ).logits[:, -1 - inputs["logits_to_keep"] : -1]
            kept = inputs["input_ids"][:, -inputs["logits_to_keep"] :]
            of_tokens = logits.log_softmax(-1).gather(2, kept[..., None])[..., 0]
            log_probs = (of_tokens * inputs["attention_mask"][:, -inputs["logits_to_keep"] :]).sum(1)
            metrics = {name: inputs[of] for name, of in (("reward", "rewards"), ("v_star", "v_star"))}
            metrics["advantage"] = inputs["rewards"] - inputs["v_star"]
            metrics["implicit_reward"] = 0.5 * (log_probs - inputs["ref_logps"])
            for name, value in metrics.items():
                noted[name].append(float(value.mean()))
            loss = super().compute_loss(model, inputs, *args, **kwargs)
            losses.append(float(loss.detach()))
            return loss

    prompts = [" ".join(f"w{(5 * row + 3 * place) % 50}" for place in range(1 + row % 4)) for row in range(24)]

    def reward(prompts: list[str], completions: list[str], **kwargs: Any) -> list[float]:
        return [float(len(prompt) + index) % 5 for index, prompt in enumerate(prompts)]

    def generate(input_ids: Any, generation_config: Any, **kwargs: Any) -> Any:
        import torch

        ids = input_ids.repeat_interleave(generation_config.num_return_sequences or 1, 0)
        return torch.cat([ids, 5 + ids.sum(1, keepdim=True) % 50, torch.ones_like(ids[:, :1])], dim=1)

    with tempfile.TemporaryDirectory() as folder:
        policy = tiny.llama(folder, seed=0)
        policy.generate = generate
        values = {"beta1": 0.5, "beta2": 0.5, "num_value_samples": 3, "filter_all_incorrect": False}
        trainer = tiny.trainer(
            Recorder,
            model=policy,
            reward_funcs=reward,
            args=tiny.config(config_class, output_dir=folder, **values, **SIZES),
            train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts]),
            tokenizer=left_padding_tokenizer(),
        )
        trainer.train()
    return answer(trainer, losses, noted)


def iw_opd() -> dict[str, Any]:
    """Distil the completions of the student, which are longer on rank 1, by the log-probs of their tokens."""
    import torch
    from datasets import Dataset

    trainer_class, config_class = classes("IWOPD")
    losses: list[float] = []
    noted: Noted = defaultdict(list)

    class Recorder(trainer_class):  # type: ignore[misc, valid-type]
        def _compute_iw_opd_loss(self, **batch: Any) -> Any:
            import torch

            labels, teacher = batch["labels"], batch["teacher_actual_logprobs"]
            log_probs = batch["student_logits"].detach().log_softmax(-1)
            student = log_probs.gather(2, batch["completion_tokens"][..., None])[..., 0]
            signed, absolute, weights = [], [], []
            for row in range(len(labels)):
                kept = labels[row] != -100
                gaps = (teacher[row] - student[row])[kept]
                before = gaps.abs().cumsum(0) - gaps.abs()
                weight = 1 + self.iw_opd_gamma * (1 - before / gaps.abs().sum())
                signed.append(weight * gaps)
                absolute.append(gaps.abs())
                weights.append(weight)
            parts = {"mean_advantage": signed, "mean_abs_advantage": absolute, "mean_weight": weights}
            values = {name: float(torch.cat(part).mean()) for name, part in parts.items()}
            values |= {"min_weight": float(torch.cat(weights).min()), "max_weight": float(torch.cat(weights).max())}
            for name, value in values.items():
                noted[f"iw_opd/{name}"].append(value)
            loss = super()._compute_iw_opd_loss(**batch)
            losses.append(float(loss.detach()))
            return loss

    rows = []
    for number in range(24):
        words = [f"w{(7 * number + 3 * place) % 50}" for place in range(4 + number % 5)]
        turns = (("user", " ".join(words[:2])), ("assistant", " ".join(words[2:])))
        rows.append({"messages": [{"role": role, "content": content} for role, content in turns]})
    words = left_padding_tokenizer()
    words.chat_template = tiny.chat_tokenizer().chat_template
    settings = {
        "max_completion_length": 12,
        "max_prompt_length": 12,
        "max_length": 24,
        "lmbda": 1.0,
        "temperature": 1.0,
    }
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as of_teacher:
        student, teacher = tiny.llama(folder, seed=0), tiny.llama(of_teacher, seed=1)
        # The trainer compares its tokenizer with the student's.
        words.save_pretrained(of_teacher)
        teacher.config._name_or_path = of_teacher
        student.generate = distillation.growing_completions()
        for _ in range(3 * rank()):
            student.generate(torch.zeros(1, 1, dtype=torch.long))
        trainer = tiny.trainer(
            Recorder,
            model=student,
            teacher_model=teacher,
            args=tiny.config(config_class, output_dir=folder, distillation_objective="iw_opd", **settings, **SIZES),
            train_dataset=Dataset.from_list(rows),
            tokenizer=words,
        )
        trainer.train()
    return answer(trainer, losses, noted)

"""Stand-ins for SFT's trainer: the preparation of a dataset, and the loss of a mixture-of-experts model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

from .processes import single_process, stream
from .trainers import default_arguments, stub_trainer


def sft_prepared(
    module: ModuleType, rows: list[dict[str, Any]], tokenizer: Any, formatting_func: Any = None, **settings: Any
) -> list[dict[str, Any]]:
    """Return ``rows`` after ``SFTTrainer._prepare_dataset``, neither truncated nor packed. From 0.15.0 on.

    ``settings`` are fields of ``SFTConfig``; a release that has no such field ignores it.
    """
    args = default_arguments(
        module.SFTConfig, **{"max_length": None, "max_seq_length": None, "shuffle_dataset": False, **settings}
    )
    trainer = stub_trainer(
        module.SFTTrainer,
        args,
        chat_template=None,
        completion_only_loss=bool(args.completion_only_loss) if hasattr(args, "completion_only_loss") else False,
        _is_vlm=False,
        _tokenizer=tokenizer,
    )
    with single_process(module):
        return list(trainer._prepare_dataset(stream(rows), tokenizer, args, False, formatting_func, "train"))


def quick_sft_prepared(
    module: ModuleType, rows: Sequence[Mapping[str, Any]], tokenizer: Any, formatting_func: Any = None, **settings: Any
) -> list[dict[str, Any]]:
    """Return ``rows`` as ``sft_prepared`` does, but of a dataset that takes no time, for self-tests."""
    usual: dict[str, Any] = {"max_length": None, "max_seq_length": None, "shuffle_dataset": False}
    args = default_arguments(module.SFTConfig, **{**usual, **settings})
    known = {"chat_template": None, "_is_vlm": False, "_tokenizer": tokenizer}
    completion_only_loss = bool(getattr(args, "completion_only_loss", False))
    trainer = stub_trainer(module.SFTTrainer, args, completion_only_loss=completion_only_loss, **known)
    with single_process(module):
        return list(trainer._prepare_dataset(quick_rows(rows), tokenizer, args, False, formatting_func, "train"))


def quick_rows(rows: Sequence[Mapping[str, Any]]) -> Any:
    """Return ``rows`` as an ``IterableDataset`` that is a list: to map it takes no longer than to call the function.

    What a function that is mapped in batches returns takes the place of all columns. TRL 1.0.0rc1 maps Arrow tables.
    """
    import pyarrow
    from datasets import IterableDataset

    class Rows(IterableDataset):  # type: ignore[misc]
        column_names = property(lambda self: list(self.rows[0]))
        _formatting = None

        def __init__(self, rows: Sequence[Mapping[str, Any]], format: str | None = None) -> None:
            self.rows, self.of_tables = rows, format == "arrow"

        def with_format(self, type: str | None = None) -> Any:
            return Rows(self.rows, type)

        def __iter__(self) -> Any:
            return map(dict, self.rows)

        def __getitem__(self, index: int) -> Any:
            return dict(self.rows[index])

        def map(
            self,
            function: Any,
            fn_kwargs: Mapping[str, Any] | None = None,
            remove_columns: Any = (),
            batched: bool = False,
            **unused: Any,
        ) -> Any:
            fn_kwargs = fn_kwargs or {}
            if self.of_tables:
                return Rows(function(pyarrow.Table.from_pylist(self.rows), **fn_kwargs).to_pylist(), "arrow")
            if batched:
                columns = function({name: [row[name] for row in self] for name in self.column_names}, **fn_kwargs)
                return Rows([dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)])
            removed = [remove_columns] if isinstance(remove_columns, str) else remove_columns or ()
            mapped = []
            for row in self:
                others = {name: row[name] for name in row if name not in removed}
                mapped.append({**others, **function(row, **fn_kwargs)})
            return Rows(mapped)

        def filter(self, function: Any, **unused: Any) -> Any:
            return Rows([row for row in self if function(row)])

        def select_columns(self, names: Any) -> Any:
            selected = [names] if isinstance(names, str) else names
            return Rows([{name: row[name] for name in row if name in selected} for row in self])

        def rename_columns(self, names: Mapping[str, str]) -> Any:
            return Rows([{names.get(name, name): row[name] for name in row} for row in self])

    return Rows(rows)


class SftMoeStep:
    """A trainer and a mixture-of-experts model whose loss of a micro-batch is differentiated.

    The model returns ``cross_entropy + coefficient() * aux_loss``, both of them parameters, as 3 and 2. ``weights``
    has the derivatives by the two. The trainer has these ``attributes``, is in training and alone.
    """

    def __init__(self, module: ModuleType, coefficient: float, **attributes: Any) -> None:
        import torch

        class Log(dict):  # type: ignore[type-arg]
            """``[mode][name].append`` and, before 0.18.0, ``[name].append``; ``entries`` has what was appended."""

            def __missing__(self, key: str) -> Any:
                self[key] = Log()
                return self[key]

            def append(self, value: float) -> None:
                self.entries = [*getattr(self, "entries", ()), value]

        class Outputs(dict):  # type: ignore[type-arg]
            __getattr__ = dict.__getitem__

        class Model(torch.nn.Module):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__()
                self.cross_entropy = torch.nn.Parameter(torch.tensor(3.0))
                self.aux_loss = torch.nn.Parameter(torch.tensor(2.0))
                self.router_aux_loss_coef = coefficient

        def forward(input_ids: Any, labels: Any = None, **kwargs: Any) -> Any:
            model = self.model
            loss = model.cross_entropy + self.coefficient() * model.aux_loss
            labelled = torch.zeros_like(input_ids) if labels is None else labels
            shifted = labelled[:, 1:]
            return Outputs(
                **({} if labels is None else {"loss": loss}),
                cross_entropy=1 * model.cross_entropy,
                aux_loss=1 * model.aux_loss,
                logits=torch.zeros(*input_ids.shape, 11),
                # TRL's own heads return these as well: its chunked loss, and from 1.15.0 on the fused head.
                num_valid_tokens=torch.tensor(shifted.numel()),
                num_correct_tokens=torch.tensor(0),
                entropy_sum=torch.tensor(0.0),
                log_probs=-model.cross_entropy.expand(shifted.shape),
                label_mask=torch.ones_like(shifted, dtype=torch.bool),
                entropy=torch.zeros(shifted.shape),
                is_top1=torch.zeros_like(shifted, dtype=torch.bool),
            )

        self.model = Model()
        self.model.forward = forward
        self.coefficient: Callable[[], Any] = lambda: self.model.router_aux_loss_coef
        self.outputs: Any = None
        defaults: dict[str, Any] = {
            "model": self.model,
            "aux_loss_enabled": True,
            "aux_loss_coef": coefficient,
            "router_aux_loss_coef": coefficient,
            "label_smoother": None,
            "compute_loss_func": None,
            "model_accepts_loss_kwargs": True,
            "current_gradient_accumulation_steps": 1,
            "num_virtual_tokens": 0,
            "control": SimpleNamespace(should_evaluate=False),
            "_metrics": Log(),
            "_total_train_tokens": 0,
            "_tp_size": 1,
            "get_tp_size": lambda: 1,
        }
        arguments = default_arguments(module.SFTConfig, n_gpu=1, average_tokens_across_devices=True)
        self.trainer = stub_trainer(module.SFTTrainer, arguments, **{**defaults, **attributes})
        self.trainer.accelerator.parallelism_config = None

    def weights(self, *, items: int | None = 12, model: Any = None, **keywords: Any) -> tuple[float, float]:
        """Return the derivatives of a micro-batch's loss by the cross-entropy and by the auxiliary loss."""
        import torch

        tokens = torch.tensor([[1, 2, 3, 4]])
        inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens.clone()}
        # transformers before 4.46 has no such argument.
        keywords |= {} if items is None else {"num_items_in_batch": items}
        with torch.enable_grad():
            result = self.trainer.compute_loss(model or self.model, inputs, **keywords)
            loss, self.outputs = result if isinstance(result, tuple) else (result, None)
            leaves = (self.model.cross_entropy, self.model.aux_loss)
            gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
        cross_entropy, aux_loss = (0.0 if gradient is None else float(gradient) for gradient in gradients)
        return cross_entropy, aux_loss

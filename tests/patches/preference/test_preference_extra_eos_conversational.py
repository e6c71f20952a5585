"""A conversation whose template ends it with an end of sequence and blanks has no second end. Others have TRL's."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest

from trl_hotfix.catalogue import loading
from trl_hotfix.matching import gates
from trl_hotfix.testing import CharacterTokenizer, constructed, default_arguments, single_process, tiny_causal_lm

import tiny

ID = "preference-extra-eos-conversational"
TARGETS = {
    target.attribute.partition("Trainer")[0]: target
    for target in gates.targets_here(next(patch for patch in loading.load() if patch.id == ID))
}
END = CharacterTokenizer.eos_token
PROMPTS = ("a", "gh", "l")
COMPLETIONS = ("bc", "def", "i", "jk", "mnop", "q")
"""Chosen and rejected in turn."""

Row = dict[str, Any]


def with_end(end: str, completions: Sequence[str] = COMPLETIONS) -> list[str]:
    return [f"{completion}{end}" for completion in completions]


OF_TEMPLATE = with_end(f"{END}\n")


class Lines(CharacterTokenizer):
    """A tokenizer that ends texts with the character 3. Its chat template closes each message with ``closing``."""

    def __init__(self, closing: str = f"{END}\n", eos_token: str = END) -> None:
        self.closing, self.eos_token, self.eos_token_id = closing, eos_token, ord(eos_token)

    def __call__(self, text: Any, add_special_tokens: bool = True, **kwargs: Any) -> Any:
        if isinstance(text, str):
            return super().__call__(text + "\3" * add_special_tokens)
        rows = [self(one, add_special_tokens) for one in text]
        return {name: [row[name] for row in rows] for name in ("input_ids", "attention_mask")}

    def render(self, messages: list[dict[str, str]], *, add_generation_prompt: bool) -> str:
        text = super().render(messages, add_generation_prompt=add_generation_prompt)
        return text.replace(self.eos_token, self.closing)


class Rows(list[Row]):
    """A dataset that is mapped at once. One of ``datasets`` takes some milliseconds for each map."""

    @property
    def column_names(self) -> list[str]:
        return list(self[0]) if self else []

    def __getitem__(self, key: Any) -> Any:
        return [row[key] for row in self] if isinstance(key, str) else super().__getitem__(key)

    def map(
        self,
        function: Callable[..., Any],
        fn_kwargs: Mapping[str, Any] = MappingProxyType({}),
        remove_columns: Sequence[str] = (),
        batched: bool = False,
        **options: Any,
    ) -> Rows:
        if batched:
            columns = {name: self[name] for name in self.column_names}
            columns |= function({**columns}, **fn_kwargs)
            # A dataset makes lists of arrays.
            lists = {
                name: [getattr(value, "tolist", lambda v=value: v)() for value in columns[name]] for name in columns
            }
            changed = [dict(zip(lists, row, strict=True)) for row in zip(*lists.values(), strict=True)]
        else:
            changed = [row | function(row, **fn_kwargs) for row in self]
        return Rows({name: row[name] for name in row if name not in remove_columns} for row in changed)

    def filter(self, *args: Any, **kwargs: Any) -> Rows:
        return self

    shuffle = filter


class Datasets(dict[str, Rows]):
    """Several datasets, as a ``DatasetDict`` has them."""

    def map(self, *args: Any, **kwargs: Any) -> Datasets:
        return Datasets({name: rows.map(*args, **kwargs) for name, rows in self.items()})


def side_by_side(datasets: list[Rows], axis: int) -> Rows:
    return Rows({**row, **other} for row, other in zip(*datasets, strict=True))


class Method:
    """A trainer's class, and how its rows are prepared."""

    def __init__(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.name, self.target = name, TARGETS[name]
        self.module: Any = importlib.import_module(self.target.module)
        self.has_pairs = name in ("ORPO", "CPO")
        self.renames = "deprecate_kwarg" in vars(self.module)
        self.adder = "add_eos_token_if_needed" if self.has_pairs else "_process_tokens"
        self.own = getattr(self.module, self.adder)
        substitutes = {"concatenate_datasets": side_by_side, "is_sklearn_available": lambda: True}
        for substituted in substitutes.keys() & vars(self.module).keys():
            monkeypatch.setattr(self.module, substituted, substitutes[substituted])

    def rows(self, completions: Sequence[str] = COMPLETIONS, *, conversational: bool = True) -> list[Row]:
        """Return rows of these completions, two in a row where the trainer wants pairs.

        The prompts of texts are those of the chat template.
        """

        def of(role: str, content: str) -> Any:
            return [{"role": role, "content": content}] if conversational else content

        prompts = [of("user", prompt if conversational else f"u{prompt}{END}\na") for prompt in PROMPTS]
        answers = [of("assistant", completion) for completion in completions]
        if self.has_pairs:
            pairs = zip(prompts, answers[::2], answers[1::2], strict=True)
            return [dict(zip(("prompt", "chosen", "rejected"), pair, strict=True)) for pair in pairs]
        return [
            {"prompt": prompts[index // 2], "completion": answer, "label": index % 2 == 0}
            for index, answer in enumerate(answers)
        ]

    def texts(self, completions: Sequence[str] = COMPLETIONS) -> list[Row]:
        return self.rows(completions, conversational=False)

    def trainer(
        self,
        train: list[Row],
        evaluation: Any = None,
        tokenizer: Any = None,
        *,
        by: str = "processing_class",
        loads: bool = False,
        **settings: Any,
    ) -> Any:
        """Return a trainer whose constructor has prepared these rows.

        ``by`` is the name of the tokenizer's argument. If TRL ``loads`` the tokenizer, the argument is None.
        """

        def model() -> Any:
            config: Any = SimpleNamespace(is_encoder_decoder=settings.get("is_encoder_decoder", False))
            config.model_type, config.decoder_start_token_id, config.pad_token_id = "tiny", 0, 0
            config.get_text_config = lambda: config
            lm = tiny_causal_lm(config)
            lm.warnings_issued, lm.generation_config = {}, SimpleNamespace()
            return lm

        if isinstance(evaluation, dict):
            evaluation = Datasets({name: Rows(rows) for name, rows in evaluation.items()})
        elif evaluation is not None:
            evaluation = Rows(evaluation)
        defaults = {"max_length": 99, "max_prompt_length": 49, "remove_unused_columns": False}
        settings = {**defaults, "gradient_checkpointing": False, **settings}
        with single_process(self.module):
            return constructed(
                getattr(self.module, f"{self.name}Trainer"),
                model=model(),
                args=default_arguments(getattr(self.module, f"{self.name}Config"), **settings),
                train_dataset=Rows(train),
                eval_dataset=evaluation,
                **{by: None if loads else tokenizer or Lines()},
                **({} if self.has_pairs else {"ref_model": model()}),
            )

    def prepared(self, *args: Any, **settings: Any) -> list[Rows]:
        """Return the datasets of ``trainer(...)``: the one to train on, and those to evaluate."""
        trainer = self.trainer(*args, **settings)
        made = trainer.eval_dataset
        return [trainer.train_dataset, *(made.values() if isinstance(made, dict) else [] if made is None else [made])]

    def completions(self, *args: Any, **settings: Any) -> list[list[str]]:
        """Return the texts of all labels of each dataset. KTO has those of the row before in a row, too."""
        return [
            [
                CharacterTokenizer().decode([token for token in row[name] if token >= 0])
                for row in rows
                for name in row
                if name.endswith("_labels")
            ]
            for rows in self.prepared(*args, **settings)
        ]

    def expected(self, completions: Sequence[str]) -> list[str]:
        if self.name != "KTO":
            return list(completions)
        return [text for index, own in enumerate(completions) for text in (own, completions[index - 1])]

    def acts(self, trainer: Any) -> int | None:
        return tiny.acts(ID, f"{self.target.module}:{self.target.attribute}", trainer)


@pytest.fixture(params=TARGETS)
def method(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Method:
    return Method(request.param, monkeypatch)


@pytest.fixture
def of_pairs(method: Method) -> Method:
    if not method.has_pairs:
        pytest.skip("this trainer takes no pairs, or maps several datasets by itself")
    return method


def test_each_conversation_ends_once_in_training_and_in_evaluation(method: Method) -> None:
    rows = method.rows()
    assert method.completions(rows, rows) == [method.expected(OF_TEMPLATE)] * 2


def test_trl_ends_each_conversation_twice(method: Method, switch: Any) -> None:
    with switch.off():
        found = method.completions(method.rows(), method.rows())
    assert found == [method.expected(with_end(END, OF_TEMPLATE))] * 2


@pytest.mark.parametrize("limit", range(6, 14))
def test_a_limit_leaves_what_it_leaves_of_a_text_that_ends(method: Method, limit: int) -> None:
    limits: dict[str, Any] = {"max_length": limit, "max_prompt_length": 3}
    # TRL adds nothing to these texts, since the line break is the end of sequence of this tokenizer.
    expected = method.prepared(method.texts(OF_TEMPLATE), None, Lines(eos_token="\n"), **limits)
    assert method.prepared(method.rows(), None, **limits) == expected


def test_an_encoder_and_decoder_has_the_tokens_of_the_template(method: Method) -> None:
    if not method.has_pairs and "is_encoder_decoder" not in method.own.__code__.co_consts:
        pytest.skip("this release takes no encoder and decoder")
    encoder: dict[str, Any] = {"is_encoder_decoder": True, "max_completion_length": 4}
    expected = method.prepared(method.texts(OF_TEMPLATE), None, Lines(eos_token="\n"), **encoder)
    assert method.prepared(method.rows(), None, **encoder) == expected


def test_the_tokenizer_may_be_one_that_trl_loads(method: Method, monkeypatch: pytest.MonkeyPatch) -> None:
    if not hasattr(method.module, "AutoTokenizer"):
        pytest.skip("in this release the trainer must be given a tokenizer")
    loads = SimpleNamespace(from_pretrained=lambda *args, **kwargs: Lines())
    monkeypatch.setattr(method.module, "AutoTokenizer", loads)
    assert method.completions(method.rows(), loads=True) == [method.expected(OF_TEMPLATE)]
    plain = method.completions(method.texts(), loads=True)
    assert plain == [method.expected(with_end(END))]


def test_the_tokenizer_may_be_passed_by_its_old_name(method: Method) -> None:
    if not method.renames:
        pytest.skip("this release takes it by its new name alone")
    assert method.completions(method.rows(), by="tokenizer") == [method.expected(OF_TEMPLATE)]
    assert method.acts(method.trainer(method.rows(), None, Lines(END), by="tokenizer")) == 0


def test_conversations_to_evaluate_end_once_beside_texts_to_train_on(method: Method) -> None:
    expected = [method.expected(with_end(END)), method.expected(OF_TEMPLATE)]
    assert method.completions(method.texts(), method.rows()) == expected


def test_texts_to_evaluate_have_the_end_of_trl_where_they_have_none(method: Method) -> None:
    mixed = [text if index % 3 else f"{text}{END}\n" for index, text in enumerate(COMPLETIONS)]
    ended = [text if index % 3 == 0 else f"{text}{END}" for index, text in enumerate(mixed)]
    expected = [method.expected(OF_TEMPLATE), method.expected(ended)]
    assert method.completions(method.rows(), method.texts(mixed)) == expected


def test_texts_alone_have_the_end_of_trl(method: Method) -> None:
    trainer = method.trainer(method.texts(), method.texts(OF_TEMPLATE))
    assert method.acts(trainer) == 0
    expected = [method.expected(with_end(END)), method.expected(with_end(END, OF_TEMPLATE))]
    assert method.completions(method.texts(), method.texts(OF_TEMPLATE)) == expected


@pytest.mark.parametrize("closing", ["", "\n", f"{END}\nx", "  "])
def test_a_template_that_ends_otherwise_has_the_end_of_trl(method: Method, closing: str) -> None:
    tokenizer = Lines(closing)
    assert method.acts(method.trainer(method.rows(), method.rows(), tokenizer)) == 0
    expected = [method.expected(with_end(f"{closing}{END}"))] * 2
    assert method.completions(method.rows(), method.rows(), tokenizer) == expected


def test_a_template_that_ends_with_the_end_has_no_other(method: Method) -> None:
    tokenizer = Lines(END)
    assert method.acts(method.trainer(method.rows(), method.rows(), tokenizer)) == 0
    assert method.completions(method.rows(), method.rows(), tokenizer) == [method.expected(with_end(END))] * 2


@pytest.mark.parametrize("blanks", [" ", "\n\n", " \n\t"])
def test_all_blanks_behind_the_end_count(method: Method, blanks: str) -> None:
    expected = [method.expected(with_end(f"{END}{blanks}"))]
    assert method.completions(method.rows(), None, Lines(f"{END}{blanks}")) == expected


def test_the_conversations_among_several_datasets_to_evaluate_end_once(of_pairs: Method) -> None:
    several = {"first": of_pairs.texts(), "second": of_pairs.rows()}
    assert of_pairs.completions(of_pairs.texts(), several) == [with_end(END), with_end(END), OF_TEMPLATE]


def test_a_dataset_may_have_no_rows(of_pairs: Method) -> None:
    assert of_pairs.completions(of_pairs.texts(), []) == [with_end(END), []]


def test_prompts_that_trl_extracts_are_conversations_too(of_pairs: Method) -> None:
    rows = [{side: row["prompt"] + row[side] for side in ("chosen", "rejected")} for row in of_pairs.rows()]
    assert of_pairs.completions(rows, rows) == [OF_TEMPLATE] * 2


def test_trainer_and_module_keep_their_own(method: Method) -> None:
    trainer = method.trainer(method.rows())
    assert method.acts(trainer) == 1
    assert "tokenize_row" not in vars(trainer)
    assert getattr(method.module, method.adder) is method.own


def test_they_keep_them_after_an_error_too(method: Method, switch: Any) -> None:
    class Failing(Lines):
        def __call__(self, text: Any, add_special_tokens: bool = True, **kwargs: Any) -> Any:
            if "mnop" in str(text):  # the last row
                raise RuntimeError("the tokenizer fails")
            return super().__call__(text, add_special_tokens)

    with switch.on(), pytest.raises(RuntimeError, match="the tokenizer fails"):
        method.trainer(method.rows(), None, Failing())
    assert getattr(method.module, method.adder) is method.own


def test_every_trainer_has_conversations_that_end_once(method: Method) -> None:
    for completions in (COMPLETIONS, COMPLETIONS[::-1]):
        found = method.completions(method.rows(completions), method.rows(completions))
        assert found == [method.expected(with_end(f"{END}\n", completions))] * 2

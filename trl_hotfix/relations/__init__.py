"""Relations: two runs of a trainer, or two ways to the same number, that must agree.

A bug that nobody has reported breaks one of them. ``setting`` is how a trainer is made and run: ``trainers`` has the
recipe of each, ``recipes`` makes it of ``materials``, ``forms``, ``conversations``, ``images`` and ``architectures``,
and ``making`` does what a setting changes about that. ``changes`` has what no field of a setting says: the arguments of
a trainer are changed, as ``changed_rows``, ``changed_models`` and ``changed_rewards`` do; ``texts`` are more forms and
``odd_models`` more architectures. ``stand_ins`` has what a CPU lacks, such as a vLLM server, and ``engines`` what
shards the weights over several ranks. ``run`` trains it and notes what it computes, and ``effects`` what it changes of
what it was given.

``relations`` has the relations: ``of_steps`` those of one step and the next, ``of_models`` and ``of_forms`` those of
the model and of the data, all of the kinds in ``claims``. ``more_of_steps``, ``more_of_models`` and ``more_of_forms``
have those about such changes, and about options that are not at their default. ``compare`` and ``tolerance`` say
whether two runs agree, ``by_hand`` whether a loss is its formula; ``formulas`` has those of most trainers, and
``more_formulas`` those of some options. ``cells`` ask a trainer, ``inside`` does it in a process of its own, and
``checks`` in the tests of a project, by ``parametrize``. ``ledger`` reads ``relations.yaml``: the cause of each
relation that does not hold in TRL's own trainers.

torch, transformers and TRL are imported in that process only.
"""

from __future__ import annotations

from .checks import parametrize

__all__ = ["parametrize"]

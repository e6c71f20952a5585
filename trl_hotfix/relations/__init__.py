"""Relations: two runs of a trainer, or two ways to the same number, that must agree.

A bug that nobody has reported breaks one of them. ``setting`` is how a trainer is made and run, ``materials`` and
``recipes`` make it, ``run`` trains it and notes what it computes. ``relations`` has the relations, ``compare`` and
``tolerance`` say whether two runs agree. ``cells`` ask a trainer, ``inside`` does it in a process of its own, and
``checks`` in the tests of a project, by ``parametrize``. ``ledger`` reads ``relations.yaml``: the cause of each
relation that does not hold in TRL's own trainers.

torch, transformers and TRL are imported in that process only.
"""

from __future__ import annotations

from .checks import parametrize

__all__ = ["parametrize"]

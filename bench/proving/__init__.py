"""Prove patches: ``cells`` are self-tests, ``proofs`` trainings, ``patch_tests`` the tests of patches.

``release``, ``prove`` and ``prove_several`` are the ends of these inside a release; ``running`` starts the processes.
``check`` says everything about one patch. ``covering`` chooses places that have every patch, ``orderings`` the orders
of patches on one method, ``calls`` records what a run calls. ``variants`` are the settings of other users, ``curves``
and ``longer_runs`` the losses of longer runs.
"""

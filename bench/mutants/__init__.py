"""Break the wrappers of patches, and count what notices: ``python -m bench.mutants some-id``.

``counting`` counts, ``mutated`` judges inside a release. ``code_mutants`` and ``breakages`` make the mistakes,
``detaching`` and ``covered`` find out which of them can matter and which branches are reached.
"""

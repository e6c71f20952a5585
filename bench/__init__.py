"""The workshop: every patch against every real TRL release. ``python -m bench --help`` has the commands.

``releases`` lays TRL's releases out and takes a new one in; ``proving`` runs self-tests, proofs and tests of patches in
them; ``mutants`` breaks wrappers and counts what notices; ``relations`` asks the trainers of every release whether two
runs agree. ``results`` is the evidence and the keys of what it depends on; ``pages`` draws it. ``inside`` has what runs
inside one release for a test, ``upstream`` runs TRL's own tests. ``shards`` divides everything into parts, and
``options`` has what several commands take. Tests of all this are in ``tests/bench``.
"""

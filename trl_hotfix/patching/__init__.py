"""Put patches on their targets, and take them off exactly.

``api`` has the public functions and ``engine`` their work, by a ``configuration``; ``previews`` are reports that change
nothing, and ``registry`` keeps the module patches of this process. A ``module_patch`` is a patch in one module of TRL,
which ``application`` puts on: red, install, green. ``sites`` and ``wrappers`` change the attribute, ``guard`` is around
each wrapper, ``conflicts`` and ``compiled_code`` detect other code that replaces or bypasses it. ``self_test`` and
``isolation`` run self-tests; ``references`` and ``pickled`` are for patched functions that are pickled.
"""

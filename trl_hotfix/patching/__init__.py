"""From a decision to a wrapper that stands on its target.

``api`` has the public functions; ``engine`` keeps what is on in this process. A ``module_patch`` is a patch in one
module of TRL; ``application`` puts it on: red, install, green. ``sites`` and ``wrappers`` change the attribute,
``guard`` is around each wrapper, ``conflicts`` and ``compiled_code`` say who else is there. ``self_test`` and
``isolation`` run self-tests; ``references`` and ``pickled`` are for patched functions that are pickled.
"""

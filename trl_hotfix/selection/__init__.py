"""The user's choice of patches: a ``selection`` from arguments and variables, or one of the ``freeze_files``.

``set_digest`` is the digest of such a set.
"""

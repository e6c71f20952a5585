"""Put patches on their targets, and take them off exactly.

``api`` has the public functions and ``engine`` their work, by a ``configuration``; ``previews`` are reports that change
nothing, and ``registry`` keeps the module patches of this process. A ``module_patch`` is a patch in one module of TRL,
which ``application`` puts on: red, install, green. ``sites`` and ``wrappers`` change the attribute, and the ``breaker``
of a patch switches it off when one of its wrappers fails. ``standing`` says whether a patch still stands: ``conflicts``
and ``compiled_code`` detect other code that replaces or bypasses it, ``reach`` the trainers that do not call it.
``self_test`` and ``isolation`` run self-tests; ``exits`` tells their exits from those of others. ``generators`` brings
random generators back. ``observing`` counts where nothing is repaired. ``phases`` puts the layers on that say what
TRL's trainers do (``in_phase``), and ``given`` keeps what their constructors were given, ``given_datasets`` the
datasets among it. ``inheritance`` is for methods that TRL's class inherits, and ``announcements`` is the line that a
trainer gets in the log. ``references`` and ``pickled`` are for patched functions that are pickled, ``libraries`` tells
whose code a function is. ``collector`` makes Python's garbage collector wait while patches go on.
"""

"""The command line: each command has a module of its name, with the click ``command`` and the ``Answer`` of ``--json``.

They are ``list``, ``status``, ``explain``, ``doctor``, ``verify``, ``run``, ``scan``, ``audit``, ``compare``, ``diff``,
``freeze``, ``fingerprint``, ``relations``, ``check``, ``pack`` and ``new``. ``main`` is the entry point; ``common`` has
the exit codes and options that commands share, ``progress`` a line for what takes long.

Beside a command are the shape of its answer (``scan_answer``, ``audit_answer``, ``compare_answer``), its forms
(``scan_formats``, ``audit_formats``, with ``sarif`` and ``annotations``) and its screens (``compare_screen``,
``verify_screen``, ``relations_screen``, ``check_screen``). ``scan_files`` scans, ``gate`` says whether that fails, with
what is ``accepted`` and what ``repairs`` a run would have, and ``ask_more`` is the command that would answer more.
``audit_run`` audits a run, ``audit_pins`` a set of pins. ``status_records`` reads what runs have written,
``freeze_elsewhere`` freezes for another release, ``pack_file`` is a pack's fingerprints, ``new_templates`` has the
texts of ``new``.
"""

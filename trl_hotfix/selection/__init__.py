"""What the user asked for: a ``selection``, from arguments and variables, or ``freeze_files``, which name a set."""

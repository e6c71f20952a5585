"""One module for each patch: its wrappers and its self-test. Its name is the patch's id with underscores."""

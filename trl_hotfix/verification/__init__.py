"""Verify patches on request: ``cells`` computes the verdict on a patch with the installed TRL."""

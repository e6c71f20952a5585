"""Verify patches on request: ``cells`` computes the verdict on a patch with the installed TRL.

``__main__`` writes the cells of patches to a file, in a process of its own.
"""

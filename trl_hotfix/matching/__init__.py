"""Match patches to the installed TRL: ``versions``, ``gates`` and the ``digests`` of function bodies.

``fingerprints`` holds the bodies of TRL's releases, ``sources`` reads the body of a target from a wheel or a folder.
``installation`` tells whether the TRL that is imported is the one of the metadata. ``hits`` matches patches to the
arguments of a trainer.
"""

"""What fits what is installed here: ``versions``, ``gates``, the ``digests`` of bodies and what is known of them.

``fingerprints`` has the bodies that TRL's releases have; ``sources`` reads a target's body from a wheel or a folder.
"""

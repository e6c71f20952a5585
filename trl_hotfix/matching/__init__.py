"""Match patches to the installed TRL: ``versions``, ``gates`` and the ``digests`` of function bodies.

``fingerprints`` holds the bodies of TRL's releases, ``inherited`` those of transformers that TRL's classes inherit,
``sources`` reads the body of a target from a wheel or a folder. ``foreseen`` decides by these what a process will,
before TRL is imported. ``installation`` checks that the TRL that is imported is the one of the metadata. ``hits``
matches patches to the arguments of a trainer, whose defaults in each release are in ``config_defaults``;
``model_configs`` and ``dataset_facts`` tell the facts of a model and of a dataset.
"""

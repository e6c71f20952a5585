"""TRL's own tests, without the patches and with them: ``runner``, with ``plugin`` and ``hub`` inside a release."""

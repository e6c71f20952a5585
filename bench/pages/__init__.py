"""Draw the evidence: ``picture`` is a page with every number, ``summary`` the picture in the README."""

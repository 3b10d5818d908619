"""The sections of the config: the schema of ``configs/``.

Each key is one field of a dataclass: type, default, limits, and below it a docstring with its
meaning. Checks, ``--help``, ``docs/reference.md`` and the comments in ``configs/`` come from there.
"""

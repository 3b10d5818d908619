"""From files to texts: which files are read, in which formats.

In: a folder, a pattern, and how its files are read. Out: texts, or token ids, one by one.
Imports: config.
"""

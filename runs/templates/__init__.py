"""The modules that an exported folder is made of; `launch` is shared with the judge.

They import nothing of this project, so that an exported folder runs without it.
"""

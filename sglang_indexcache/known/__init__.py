"""Patterns that others published: pattern files of this folder, and the warnings that follow from them.

Their letters were compared with the source that each file names; what they lose was not measured by this project.
"""

"""Token sequences from files, folders and hub ids, with masks of the tokens that count.

How many there are by default is said here, for commands and for Python.
"""

SEARCHED, SEARCHED_IN_TIME = 32, 64  # that choose; the latter where layers may select for blocks of queries
JUDGED = 32  # that judge what a search has found
COMPARED = 144  # of a comparison

"""Token sequences from files, folders and hub ids, with masks of the tokens that count."""

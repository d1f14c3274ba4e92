"""From files, folders and hub ids to token sequences of which it is known what counts."""

"""Selections for blocks of prompt queries, and rows shared out over ranks; imported where a plan asks for them."""

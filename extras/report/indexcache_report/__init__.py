"""Pages of searches and comparisons, and the model card of a search.

`points` has what is drawn, `advice` the pattern to take, `figures` the SVG, `frontier` the section made of them;
`search`, `comparison` and `card` are whole files, `pages` names them to the commands.
"""

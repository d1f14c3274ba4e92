"""Parts that the HTML pages of searches and comparisons share: their look, and loss beside speed.

`points` has what is drawn, `advice` the pattern to take, `figures` the SVG, `frontier` the section made of them.
"""

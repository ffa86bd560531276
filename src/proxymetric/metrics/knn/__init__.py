"""The exact search of the metrics: it finds nearest neighbours in the order of their exact scores.

`search` finds candidates in float32, and re-ranks near-ties in float64 and, where needed, in exact arithmetic. `plain`
defines the result in 40 lines.
"""

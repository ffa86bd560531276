"""The exact search behind the metrics: nearest neighbours in the order of their exact scores.

`search` finds candidates in float32, and re-ranks near-ties in float64 and, where needed, in exact arithmetic. `plain`
is the definition in 40 lines.
"""

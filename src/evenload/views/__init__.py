"""Views: readers of a run's records, never of a training process.

`progress` is what the launcher shows while ranks train, `panel` its area on a terminal; `story` sums up a run
afterwards, `story_text` writes it for people.
"""

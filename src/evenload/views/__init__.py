"""Views that read records, never a training process.

In `run`, `progress` shows a run while its ranks train (`panel` draws it on a terminal), `summary` summarizes a run
afterwards and `summary_text` formats the summary.
"""

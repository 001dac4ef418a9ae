"""Views of a run: the progress line, the live panel, and the report."""

"""Views of a queue: tables, one line per job, and the report of one job."""

"""The backend `ray`: hand a job file to a queue that runs inside a Ray cluster."""

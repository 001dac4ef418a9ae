"""Submit a job: check it, copy the working tree, and send it to a queue or another scheduler."""

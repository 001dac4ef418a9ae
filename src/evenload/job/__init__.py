"""Protocol between a program and a queue: report progress, receive a stop request, exit with code 75.

`client` holds the functions for programs, `protocol` the two files between a program and its runner.
"""

from evenload.job.client import EXIT_CODE as EXIT_CODE
from evenload.job.client import attempt as attempt
from evenload.job.client import go_on_text as go_on_text
from evenload.job.client import grace_left_s as grace_left_s
from evenload.job.client import listening as listening
from evenload.job.client import report as report
from evenload.job.client import steps as steps
from evenload.job.client import stop_reason as stop_reason
from evenload.job.client import stop_requested as stop_requested
from evenload.job.client import stopped_text as stopped_text

"""What the command's exit status means."""

COMPLETED, FAILED, USER_ERROR, INTERRUPTED = 0, 1, 2, 130

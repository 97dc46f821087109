"""One step on each rank: the executor's loop, stages, mailboxes and the report at the end."""

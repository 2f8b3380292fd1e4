"""The coordinator: the one process that has the data and the run file. Its workers know only its messages."""

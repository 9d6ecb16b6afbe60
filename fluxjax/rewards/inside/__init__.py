"""The programs that run inside sandboxes: the tests of a task, and the code of a response. This folder imports only
the standard library."""

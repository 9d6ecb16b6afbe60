"""The programs that run inside sandboxes: the tests of a task, and the code of a response. They import only the
standard library."""

"""The programs that run inside sandboxes: a task's tests, a response's code. They import only the standard library."""

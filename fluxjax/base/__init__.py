"""The base of every room: the data of a step, errors that a user can mend, caches, the event loop, the timeline."""
